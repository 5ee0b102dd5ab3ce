"""Which runtimes load a checkpoint: a case for each kind of file that loads, fails or is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightpath.checkpoints.gguf_blocks import block_type
from weightpath.checkpoints.gguf_config import ARCHITECTURES
from weightpath.checkpoints.opened import Outline
from weightpath.errors import BadTensor
from weightpath.jobs.targets import choose_gguf, find_target
from weightpath.paths.acceptance import OTHERS, accepts
from weightpath.paths.converted import GGUF_CLASSES, TARGETS, after_convert, block_kind
from weightpath.paths.held import Answer, Held, HeldLinear, Verdict
from weightpath.paths.vllm_accepts import DEVICES, FIRST_OF_SPAN, span_label, vllm_answer
from weightpath.scheme import INT8, Scheme

SYM, ASYM = Scheme(4, 128), Scheme(4, 128, symmetric=False)
CT = "compressed-tensors pack-quantized"
DOWN = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq"}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
CUDA, CPU = DEVICES


def one(scheme: Scheme | None = SYM, shape: tuple[int, int] = (256, 256), **more) -> HeldLinear:
    return HeldLinear(DOWN, scheme, shape, **more)


def gptq(scheme: Scheme = SYM, stored: str = "v1", linear: dict | None = None, **settings) -> Held:
    keys = GPTQ | {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}
    keys = {key: value for key, value in (keys | settings).items() if value is not None}
    return Held(f"GPTQ {stored}", (one(scheme, **(linear or {})),), keys, "float16")


def awq(scheme: Scheme = ASYM, layout: str = "gemm", dtype: str = "float16", **settings) -> Held:
    keys = AWQ | {"group_size": scheme.group_size}
    return Held(f"AWQ {layout}", (one(scheme),), keys | settings, dtype)


def ct(scheme: Scheme = SYM, dtype: str = "bfloat16", settings: dict | None = None, **more) -> Held:
    linear = replace(one(scheme, scale_dtype=dtype), **more)
    return Held(CT, (linear,), settings or {"quant_method": "compressed-tensors"}, dtype)


def row(held: Held, runtime: str, device: str = "") -> Verdict:
    """The row of a runtime; of vLLM's, the newest release's."""
    return [v for v in accepts(held) if (v.runtime, v.device) == (runtime, device)][-1]


def by_release(held: Held, device: str = CUDA) -> dict[str, str]:
    return {v.versions: v.loads for v in accepts(held) if v.device == device}


def check(verdict: Verdict, loads: str, *words: str, convert: str | None = None) -> None:
    assert verdict.loads == loads, verdict
    assert all(word in verdict.why or word in verdict.needs for word in words), verdict
    assert verdict.convert == convert, verdict


# GPTQ


def test_symmetric_gptq_loads_in_every_vllm_and_its_label_does_not_matter():
    for held in (gptq(), gptq(stored="v2"), gptq(checkpoint_format="gptq_v2")):
        assert set(by_release(held).values()) == {"yes"}
    check(row(gptq(stored="v2"), "vLLM", CUDA), "yes", "Marlin", "checkpoint_format is not read")


def test_asymmetric_gptq_is_refused_since_vllm_0_22_and_converts_exactly():
    held = gptq(ASYM)
    assert by_release(held) == {"<= 0.21": "yes", ">= 0.22": "no"}
    verdict = row(held, "vLLM", CUDA)
    check(verdict, "no", "refuses asymmetric GPTQ", "sym false",
          convert="--to compressed-tensors")  # fmt: skip
    assert verdict.lossless is True
    check(row(held, "vLLM", CPU), "no", convert="--to compressed-tensors")


def test_gptq_of_2_and_3_bits_is_refused_since_vllm_0_22():
    for bits in (2, 3):
        held = gptq(Scheme(bits, 128))
        assert by_release(held)["<= 0.21"] == "yes"
        check(row(held, "vLLM", CUDA), "no", f"refuses {bits}-bit GPTQ",
              convert="--to compressed-tensors")  # fmt: skip
        # wider fields hold the codes, and 4 bits are what a CPU takes
        check(row(held, "vLLM", CPU), "no", convert="--to awq")
        assert row(held, "vLLM", CPU).lossless is True


def test_a_sym_true_file_whose_zeros_are_not_the_midpoint_is_wrong_in_vllm():
    held = gptq(ASYM, sym=True)
    assert by_release(held) == {"0.19 to 0.33": "wrong"}
    check(row(held, "vLLM", CUDA), "wrong", "never uses qzeros", "not the midpoint", DOWN,
          convert="--to compressed-tensors")  # fmt: skip
    check(row(held, "vLLM", CPU), "wrong", convert="--to compressed-tensors")


def test_a_v1_label_on_v2_zeros_is_wrong_where_the_label_is_believed():
    held = gptq(ASYM, stored="v2", checkpoint_format="gptq")
    check(row(held, "transformers"), "wrong", "goes by the label (gptq)", "v2", "off by one",
          convert="--to compressed-tensors")  # fmt: skip
    check(row(held, "llama.cpp"), "no", "checkpoint_format alone", "off by one",
          convert="--to gguf")  # fmt: skip
    old = accepts(held)[0]
    assert old.versions == "<= 0.21"
    check(old, "wrong", "stored as v2", "off by one", convert="--to compressed-tensors")


def test_a_v2_label_under_format_alone_misleads_llama_cpp_and_not_transformers():
    held = gptq(ASYM, stored="v2", checkpoint_format=None, format="gptq_v2")
    check(row(held, "llama.cpp"), "no", "checkpoint_format alone", convert="--to gguf")
    assert row(held, "transformers").loads == "yes"
    good = gptq(ASYM, stored="v2", checkpoint_format="gptq_v2")
    assert "into floats" in row(good, "llama.cpp").why


def test_a_column_order_under_desc_act_false_is_wrong_in_every_vllm():
    held = gptq(linear={"ordered": True})
    assert by_release(held) == {"<= 0.29": "wrong", ">= 0.30": "wrong"}
    old = accepts(held)[0]
    check(old, "wrong", "drops every g_idx", convert="--to gptq")  # which writes desc_act true
    assert old.lossless is True
    check(row(held, "vLLM", CUDA), "wrong", "desc_act false", "drops every g_idx", DOWN,
          convert="--to compressed-tensors")  # fmt: skip
    check(row(held, "transformers"), "wrong", "Marlin kernel drops g_idx", convert="--to gptq")


def test_desc_act_is_refused_since_vllm_0_30_even_where_the_order_is_plain():
    held = gptq(desc_act=True)
    assert by_release(held) == {"<= 0.29": "yes", ">= 0.30": "no"}
    verdict = row(held, "vLLM", CUDA)
    check(verdict, "no", "desc_act true since 0.30", "it could run",
          convert="--to compressed-tensors")  # fmt: skip
    assert verdict.lossless is True
    ordered = row(gptq(linear={"ordered": True}, desc_act=True), "vLLM", CUDA)
    check(ordered, "no", "do have an order of their own", convert="--to compressed-tensors")
    assert ordered.lossless is None


def test_desc_act_means_nothing_where_a_group_is_a_whole_row_and_a_dynamic_rule_counts():
    assert by_release(gptq(Scheme(4), desc_act=True)) == {"0.19 to 0.33": "yes"}
    rule = {"+:.*down.*": {"desc_act": True}}
    assert by_release(gptq(dynamic=rule))[">= 0.30"] == "no"
    assert by_release(gptq(dynamic={"-:.*down.*": {"desc_act": True}})) == {"0.19 to 0.33": "yes"}
    assert "3-bit" in row(gptq(dynamic={"+:.*up.*": {"bits": 3}}), "vLLM", CUDA).why


@pytest.mark.parametrize("key", ["bits", "group_size", "desc_act", "sym"])
def test_a_missing_key_is_named(key):
    held = gptq()
    held = replace(held, settings={k: v for k, v in held.settings.items() if k != key})
    verdict = row(held, "vLLM", CUDA)
    check(verdict, "no", f"lacks {key}", convert="--to compressed-tensors")
    assert row(held, "transformers").loads == "yes"
    assert by_release(held)["<= 0.21"] == ("yes" if key == "sym" else "no")


def test_gptq_groups_that_marlin_lacks_are_refused():
    check(row(gptq(Scheme(4, 16)), "vLLM", CUDA), "no", "not 16", convert="--to compressed-tensors")


def test_8_bit_gptq_has_no_cpu_kernel_and_no_conversion_that_keeps_it():
    held = gptq(Scheme(8, 128))
    assert row(held, "vLLM", CUDA).loads == "yes"
    check(row(held, "vLLM", CPU), "no", "4-bit weights only", "no convert helps")


def test_a_packed_head_needs_lm_head_true_in_the_config():
    held = gptq()
    head = replace(held.linears[0], name="lm_head", role="head")
    held = replace(held, linears=(*held.linears, head))
    check(row(held, "vLLM", CUDA), "no", "lm_head true", convert="--to compressed-tensors")
    held = replace(held, settings={**held.settings, "lm_head": True})
    assert row(held, "vLLM", CUDA).loads == "yes"


# AWQ


def test_awq_gemm_loads_in_vllm_and_in_transformers_with_two_more_packages():
    assert by_release(awq()) == by_release(awq(), CPU) == {"0.19 to 0.33": "yes"}
    check(row(awq(), "vLLM", CUDA), "yes", "Marlin")
    check(row(awq(), "transformers"), "yes", "gptqmodel", "accelerate")
    check(row(gptq(), "transformers"), "yes", "optimum>=1.24", "gptqmodel>=1.4.3")


@pytest.mark.parametrize("layout", ["gemv", "gemv_fast", "llm-awq"])
def test_other_awq_layouts_stop_vllm_by_their_shapes(layout):
    held = awq(layout=layout)
    check(row(held, "vLLM", CUDA), "no", "gemm layout alone", "another shape", layout,
          convert="--to compressed-tensors")  # fmt: skip
    assert row(held, "transformers").loads == "yes"


def test_awq_without_zero_points_goes_to_plain_kernels_on_cuda_and_is_guessed_on_cpu():
    even = awq(SYM, zero_point=False)
    check(row(even, "vLLM", CUDA), "yes", "plain AWQ kernels", "zero_point false")
    assert by_release(even, CPU) == {"<= 0.21": "no", ">= 0.22": "yes"}
    uneven = awq(ASYM, zero_point=False)
    assert row(uneven, "vLLM", CUDA).loads == "yes"
    check(row(uneven, "vLLM", CPU), "wrong", "assumes 8", convert="--to compressed-tensors")


def test_awq_groups_that_marlin_lacks_go_to_plain_kernels_in_fp16():
    check(row(awq(Scheme(4, 256, symmetric=False)), "vLLM", CUDA), "yes", "groups of 256")
    brain = awq(Scheme(4, 256, symmetric=False), dtype="bfloat16")
    check(row(brain, "vLLM", CUDA), "yes", "--dtype float16")


def test_awq_without_the_zero_point_key_is_refused():
    held = awq(zero_point=None)
    check(row(held, "vLLM", CUDA), "no", "asks for zero_point", convert="--to compressed-tensors")


def test_fp16_scales_in_a_bf16_model_load_and_are_said_to_be_rounded():
    verdict = row(awq(dtype="bfloat16"), "vLLM", CUDA)
    check(verdict, "yes", "float16 scales are rounded to bf16, by up to 0.39%")
    assert "rounded" not in row(awq(), "vLLM", CUDA).why


def test_shapes_that_the_cpu_kernel_lacks_are_named_with_their_linear():
    held = Held("AWQ gemm", (one(ASYM, (40, 256)),), AWQ, "float16")
    verdict = row(held, "vLLM", CPU)
    check(verdict, "no", f"out_features that are a multiple of 32, not 40 ({DOWN})",
          "no convert helps")  # fmt: skip
    narrow = Held("AWQ gemm", (one(Scheme(4, 16, False), (64, 48)),), AWQ, "float16")
    assert "in_features" in row(narrow, "vLLM", CPU).why


# compressed-tensors


def test_packed_4_bits_load_everywhere_but_in_llama_cpp():
    for held in (ct(), ct(ASYM), ct(Scheme(4))):
        assert by_release(held) == by_release(held, CPU) == {"0.19 to 0.33": "yes"}
        assert row(held, "transformers").loads == "yes"
        assert row(held, "llama.cpp").loads == "no"
    check(row(ct(ASYM), "transformers"), "yes", "CompressedTensorsConfig(dequantize=True)")


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_padded_to_whole_codes_are_refused_and_repacked_exactly(bits):
    held = replace(ct(Scheme(bits, 128)), padded_words=True)
    verdict = row(held, "vLLM", CUDA)
    check(verdict, "no", "padded to whole codes", f"{bits}-bit", convert="--to compressed-tensors")
    assert verdict.lossless is True
    check(row(held, "transformers"), "no", "packed densely", convert="--to compressed-tensors")
    dense = replace(held, padded_words=False)
    assert by_release(dense) == {"<= 0.26": "no", ">= 0.27": "yes"}
    check(row(dense, "vLLM", CUDA), "yes", "Humming", "humming-kernels")
    check(row(dense, "transformers"), "yes", "compressed-tensors>=0.18")


def test_odd_widths_with_zero_points_come_with_vllm_0_32():
    assert by_release(ct(Scheme(3, 128, symmetric=False))) == {
        "<= 0.26": "no",
        "0.27 to 0.31": "no",
        ">= 0.32": "yes",
    }


def test_int8_per_channel_runs_on_cuda_and_not_on_a_cpu():
    held = ct(INT8, scale_dtype="float32")
    check(row(held, "vLLM", CUDA), "yes", "Marlin", "float32 scales are rounded to bf16")
    check(row(held, "vLLM", CPU), "no", "4-bit weights only", "no convert helps")


def test_int8_zero_points_need_hopper_before_vllm_0_27():
    held = ct(Scheme(8, 128, symmetric=False))
    check(accepts(held)[0], "yes", "Machete", "compute capability 9.0")
    check(row(held, "vLLM", CUDA), "yes", "Humming")


def test_groups_that_marlin_lacks_fall_to_other_kernels():
    held = ct(Scheme(4, 16))
    check(accepts(held)[0], "yes", "exllama", "--dtype float16")
    uneven = accepts(ct(Scheme(4, 16, symmetric=False)))[0]
    check(uneven, "no", "not 16", convert="--to awq")


def groups_of(**weights) -> dict:
    return {"config_groups": {"group_0": {"weights": weights, "input_activations": None}}}


def test_actorder_group_is_refused_since_vllm_0_30():
    held = ct(settings=groups_of(actorder="group"), ordered=True)
    assert by_release(held) == {"<= 0.29": "yes", ">= 0.30": "no"}
    check(row(held, "vLLM", CUDA), "no", "actorder group", convert="--to compressed-tensors")
    plain = ct(settings=groups_of(actorder="group"))
    check(row(plain, "vLLM", CUDA), "no", "it could run", convert="--to compressed-tensors")
    assert by_release(ct(settings=groups_of(actorder="weight"))) == {"0.19 to 0.33": "yes"}


def test_an_order_that_the_config_does_not_state_is_dropped_silently_since_vllm_0_30():
    held = ct(settings=groups_of(actorder=None), ordered=True)
    assert by_release(held) == {"<= 0.29": "no", ">= 0.30": "wrong"}
    check(row(held, "transformers"), "wrong", "weight_g_idx", convert="--to compressed-tensors")


def test_int_quantized_runs_with_int8_activations_alone():
    form = "compressed-tensors int-quantized"
    alone = replace(ct(INT8), format=form)
    check(row(alone, "vLLM", CPU), "no", "int8 activations alone", "no convert helps")
    check(row(alone, "vLLM", CUDA), "no", convert="--to compressed-tensors")
    asked = {"config_groups": {"a": {"weights": {}, "input_activations": {"num_bits": 8}}}}
    both = replace(alone, settings=asked)
    assert row(both, "vLLM", CPU).loads == row(both, "vLLM", CUDA).loads == "yes"
    assert row(replace(both, linears=(one(ASYM),)), "vLLM", CUDA).loads == "no"


def test_an_int8_head_beside_zero_points_loads_in_no_way_in_transformers():
    head = HeldLinear("lm_head", INT8, (256, 256), "head", scale_dtype="float32")
    held = ct(ASYM)
    held = replace(held, linears=(*held.linears, head))
    check(row(held, "transformers"), "no", "dequantize=True", "int8 head", convert="--to awq")
    even = replace(ct(), linears=(*ct().linears, head))
    check(row(even, "transformers"), "yes", "garbles an int8 head")


# the rest


def test_autoround_loads_in_vllm_by_its_packing():
    def held(layout: str, scheme: Scheme = SYM, **settings) -> Held:
        keys = {"bits": 4, "group_size": 128, "sym": scheme.symmetric} | settings
        return Held(f"AutoRound ({layout})", (one(scheme),), keys, "float16")

    assert row(held("gptq"), "vLLM", CUDA).loads == row(held("gptq"), "vLLM", CPU).loads == "yes"
    check(
        row(held("gptq", ASYM), "vLLM", CUDA), "no", "asymmetric", convert="--to compressed-tensors"
    )
    check(row(held("gptq_v2"), "vLLM", CUDA), "no", "gptq_v2", convert="--to compressed-tensors")
    check(row(held("compressed-tensors"), "vLLM", CUDA), "no", convert="--to compressed-tensors")
    assert row(held("awq", ASYM), "vLLM", CPU).loads == "yes"
    check(row(held("awq"), "vLLM", CPU), "no", "CUDA's", convert="--to compressed-tensors")
    check(row(held("gptq", Scheme(3, 128)), "vLLM", CUDA), "yes", "Humming")
    check(row(held("gptq"), "transformers"), "yes", "auto-round>=0.5")


def test_gguf_left_vllms_core_and_is_unpacked_by_transformers():
    held = Held("GGUF Q4_0", (one(Scheme(4, 32)),), dtype="float16")
    assert by_release(held) == {"<= 0.23": "yes", ">= 0.24": "yes"}
    check(row(held, "vLLM", CUDA), "yes", "vllm-gguf-plugin>=0.0.2")
    assert "rounded" not in row(replace(held, dtype="bfloat16"), "vLLM", CUDA).why
    check(row(held, "vLLM", CPU), "no", "CUDA's", convert="--to compressed-tensors")
    check(row(held, "transformers"), "yes", "unpacks")
    check(row(held, "llama.cpp"), "yes")
    minimums = Held("GGUF Q4_K", (one(Scheme(4, 32, False), minimums=True),), dtype="float16")
    assert row(minimums, "vLLM", CPU).lossless is None


def test_bitsandbytes_left_vllm_with_0_28_and_has_no_exact_target():
    held = Held("bitsandbytes", (one(None),), {"quant_method": "bitsandbytes"})
    assert by_release(held) == {"<= 0.27": "yes", ">= 0.28": "no"}
    verdict = row(held, "vLLM", CUDA)
    check(verdict, "no", "left it with 0.28", convert="--to compressed-tensors")
    assert verdict.lossless is False


def test_hqq_and_modelopt_are_not_in_vllm():
    hqq = Held("HQQ", (one(ASYM, minimums=True),))
    check(row(hqq, "vLLM", CUDA), "no", "no HQQ reader", convert="--to compressed-tensors")
    settings = {"quantization": {"quant_algo": "W4A16_AWQ"}}
    modelopt = Held("ModelOpt", (one(column_scales=True),), settings)
    verdict = row(modelopt, "vLLM", CUDA)
    check(verdict, "no", "W4A16_AWQ", convert="--to compressed-tensors")
    assert verdict.lossless is None
    assert row(modelopt, "transformers").loads == "no"


def test_torchao_is_handed_to_torchao():
    held = Held("torchao", (one(SYM),))
    check(row(held, "vLLM", CUDA), "yes", "torchao>=0.15")
    check(row(held, "vLLM", CPU), "no", convert="--to compressed-tensors")
    head = Held("torchao", (one(SYM, role="head"),))
    check(row(head, "vLLM", CUDA), "no", "linears alone", convert="--to compressed-tensors")


def test_a_lost_config_stops_vllm_and_is_garbage_in_transformers():
    held = replace(ct(), config_missing=True, settings={})
    check(row(held, "vLLM", CUDA), "no", "without a quantization_config",
          convert="--to compressed-tensors")  # fmt: skip
    check(row(held, "transformers"), "wrong", "at random", convert="--to compressed-tensors")
    check(row(held, "weightpath"), "yes", "by the shapes of its tensors")


def test_a_nested_config_is_found_by_vllm_and_not_by_llama_cpps_converter():
    held = replace(gptq(), nested=True)
    check(row(held, "vLLM", CUDA), "yes", "text_config too")
    assert row(held, "transformers").loads == "yes"
    check(row(held, "llama.cpp"), "no", "at the top of config.json", convert="--to gguf")


def test_llama_cpp_opens_gguf_alone_and_symmetric_fp16_scales_get_there_exactly():
    verdict = row(gptq(), "llama.cpp")
    check(verdict, "no", "GGUF files alone", "into floats", convert="--to gguf")
    assert verdict.lossless is True
    assert row(gptq(ASYM), "llama.cpp").lossless is None
    assert row(ct(), "llama.cpp").lossless is None  # bf16 scales
    assert "AWQ gemm" in row(awq(), "llama.cpp").why
    assert "2, 4 and 8 bits alone" in row(gptq(Scheme(3, 128)), "llama.cpp").why
    other = replace(gptq(), architecture="GemmaForCausalLM")
    check(row(other, "llama.cpp"), "no", "no convert helps", "not GemmaForCausalLM")


def test_float_checkpoints_run_and_llama_cpp_wants_them_as_gguf():
    held = Held("float")
    assert row(held, "transformers").loads == "yes"
    check(row(held, "weightpath"), "no", "weightpath quantize makes them")
    assert by_release(held) == {"0.19 to 0.33": "yes"}
    check(row(held, "llama.cpp"), "no", convert="--to gguf")


def test_what_the_model_has_no_place_for_weightpath_does_not_run():
    held = replace(gptq(), no_place=("mtp.0.weight", "mtp.1.weight"))
    check(row(held, "weightpath"), "no", "no place for mtp.0.weight and 1 more", "no convert helps")
    check(row(held, "transformers"), "yes")


def test_awq_without_its_zeros_is_read_by_vllm_as_whatever_memory_held():
    held = replace(awq(), no_zeros=("a.b", "a.c"))
    for device in DEVICES:
        found = row(held, "vLLM", device)
        check(found, "wrong", "2 linears, first a.b", convert="--to compressed-tensors")
        assert found.lossless is True


def test_a_gguf_of_floats_alone_is_what_llama_cpp_opens_and_weightpath_does_not_run():
    held = Held("GGUF")
    check(row(held, "llama.cpp"), "yes")
    check(row(held, "weightpath"), "no", "these are floats", "no convert helps")


def test_a_model_that_transformers_does_not_know_is_run_by_neither_and_may_be_by_vllm():
    held = replace(gptq(), no_model="model_type 'nova' is unknown to transformers 5")
    for runtime in ("transformers", "weightpath"):
        check(row(held, runtime), "no", "model_type 'nova'", "no convert helps: as compressed")
    assert set(by_release(held).values()) == {"yes"}


def test_weightpath_runs_what_it_opened_and_says_how():
    held = gptq(linear={"ordered": True}, stored="v2")
    held = replace(held, contradictions=("the label says gptq and all zeros are 8",))
    check(row(held, "weightpath"), "yes", "gathering activations", "all zeros are 8")
    assert "as floats" in row(Held("bitsandbytes", (one(None),)), "weightpath").why


# properties

SCHEMES = st.builds(
    Scheme,
    st.integers(2, 8),
    st.sampled_from((-1, 16, 32, 48, 64, 128, 256)),
    st.booleans(),
)
LINEARS = st.builds(
    HeldLinear,
    st.sampled_from((DOWN, "model.layers.0.self_attn.q_proj", "lm_head")),
    st.none() | SCHEMES,
    st.tuples(st.sampled_from((24, 40, 96, 256)), st.sampled_from((96, 192, 256, 1000))),
    st.sampled_from(("linear", "head")),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("float16", "bfloat16", "float32")),
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "bits": st.integers(2, 8),
        "group_size": st.sampled_from((-1, 32, 48, 128)),
        "desc_act": st.booleans(),
        "sym": st.booleans(),
        "zero_point": st.booleans(),
        "checkpoint_format": st.sampled_from(("gptq", "gptq_v2")),
        "lm_head": st.booleans(),
    },
)
FORMATS = ("AWQ gemm", "AWQ gemv", "GPTQ v1", "GPTQ v2", "AutoRound (gptq)", "AutoRound (gptq_v2)",
           "AutoRound (awq)", "AutoRound (compressed-tensors)", CT,
           "compressed-tensors int-quantized", "torchao", "ModelOpt", "bitsandbytes", "HQQ",
           "GGUF Q4_0, Q6_K")  # fmt: skip
HELD = st.builds(
    Held,
    st.sampled_from(FORMATS),
    st.lists(LINEARS, min_size=1, max_size=3).map(tuple),
    SETTINGS,
    st.sampled_from(("float16", "bfloat16")),
    st.sampled_from((*GGUF_CLASSES, "GemmaForCausalLM")),
    st.just(()),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def answers(held: Held, verdict: Verdict) -> list[Answer]:
    """What the runtime of a row does with another checkpoint: of vLLM, in each of its releases."""
    if verdict.runtime != "vLLM":
        return [judge(held) for name, _, judge, _ in OTHERS if name == verdict.runtime]
    return [vllm_answer(held, first, verdict.device) for first in releases(verdict.versions)]


def releases(label: str) -> list[int]:
    """The spans that a label stands for."""
    for start, first in enumerate(FIRST_OF_SPAN):
        for stop in range(start + 1, len(FIRST_OF_SPAN) + 1):
            following = FIRST_OF_SPAN[stop] if stop < len(FIRST_OF_SPAN) else None
            if span_label(first, following) == label:
                return list(FIRST_OF_SPAN[start:stop])
    raise AssertionError(label)


@given(HELD)
def test_every_row_that_is_not_yes_has_a_conversion_that_loads_or_says_why_none_does(held):
    verdicts = accepts(held)
    for verdict in verdicts:
        assert "\n" not in verdict.why
        if verdict.loads == "yes":
            assert verdict.convert is None
            continue
        if verdict.convert is None:
            assert "no convert helps: " in verdict.why
            continue
        made = after_convert(held, verdict.convert.removeprefix("--to "))
        assert not isinstance(made, str)
        assert {answer.loads for answer in answers(made[0], verdict)} == {"yes"}


@given(HELD)
def test_rows_cover_every_release_once_and_neighbours_differ(held):
    for device in DEVICES:
        rows = [verdict for verdict in accepts(held) if verdict.device == device]
        covered = [first for verdict in rows for first in releases(verdict.versions)]
        assert covered == list(FIRST_OF_SPAN)
        for earlier, later in pairwise(rows):
            assert replace(earlier, versions="") != replace(later, versions="")


@given(HELD)
def test_a_conversion_leaves_no_order_minimum_or_column_scale_where_it_has_no_place(held):
    for target in TARGETS:
        made = after_convert(held, target)
        if isinstance(made, str) or target in ("gptq", "gguf"):
            continue
        assert all(linear.plain for linear in made[0].linears)
        for linear in made[0].linears:
            assert linear.scheme is not None
            assert linear.scheme.divides(linear.shape[1]) or target in ("compressed-tensors", "awq")


# what is said twice in the package is the same


def test_the_gguf_classes_are_those_that_the_writer_knows():
    assert set(GGUF_CLASSES) == {name for _, name in ARCHITECTURES.values()}


@given(SCHEMES, st.sampled_from((32, 96, 128, 256, 1000)))
def test_the_blocks_are_those_that_the_writer_chooses(scheme, in_features):
    if not scheme.divides(in_features):
        return
    try:
        expected = block_type("w", scheme, in_features)
    except BadTensor:
        expected = None
    assert block_kind(scheme, in_features) == expected


def possible(linear: HeldLinear) -> bool:
    """Whether a checkpoint can hold it: no symmetric minimums, and groups that tile a row."""
    scheme = linear.scheme
    if scheme is None or (linear.minimums and scheme.symmetric):
        return scheme is None
    return linear.ordered or scheme.divides(linear.shape[1])


@given(st.lists(LINEARS, min_size=1, max_size=4, unique_by=lambda linear: linear.name))
def test_what_convert_is_said_to_make_is_what_it_chooses(linears):
    linears = [linear for linear in linears if possible(linear)]
    if not linears:
        return
    outlines = {
        linear.name: Outline(
            linear.scheme,
            linear.shape,
            getattr(torch, linear.scale_dtype),
            linear.ordered,
            linear.minimums,
            linear.column_scales,
        )
        for linear in linears
    }
    held = Held("GPTQ v1", tuple(linears))
    for name in TARGETS:
        target = find_target(name)
        made = after_convert(held, name)
        choices = choose_gguf(outlines) if target is None else target.choose(outlines)
        if isinstance(made, str):
            assert not any(choice.scheme for choice in choices.values())
            continue
        after, lossless = made
        schemes = {linear.name: linear.scheme for linear in after.linears}
        assert schemes == {n: c.scheme for n, c in choices.items() if c.scheme is not None}
        if lossless:
            assert not any(choice.again or choice.scheme is None for choice in choices.values())
            assert not any(linear.minimums for linear in linears)


def test_the_acceptance_rooms_do_not_import_torch():
    check = "import sys; from weightpath.paths import acceptance, splits; "
    check += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
