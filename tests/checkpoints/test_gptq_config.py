"""GPTQ's quantization_config: spellings, rules, what is refused, and what we write for others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers.utils.quantization_config import GPTQConfig

from weightpath.checkpoints import autoround, gptq
from weightpath.checkpoints.gptq import GptqSettings
from weightpath.errors import BadCheckpoint
from weightpath.scheme import PER_CHANNEL, Scheme

BASE: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "label"),
    [
        ({"checkpoint_format": "gptq"}, "gptq"),
        ({"format": "gptq_v2"}, "gptq_v2"),
        ({"format": "GPTQ", "checkpoint_format": "gptq"}, "gptq"),
        ({"method": "gptq", "format": "gptq_p"}, "gptq_p"),
        ({}, None),
    ],
)
def test_both_spellings_of_the_format_are_read(stated: dict[str, Any], label: str | None) -> None:
    assert gptq.settings(BASE | stated).checkpoint_format == label


def test_formats_that_contradict_each_other_are_trusted_neither_and_noted() -> None:
    read = gptq.settings(BASE | {"checkpoint_format": "gptq", "format": "gptq_v2"})
    assert read.checkpoint_format is None
    assert "checkpoint_format gptq, format gptq_v2" in read.notes[0]


def test_the_method_may_be_missing_as_in_quantize_config_json() -> None:
    content = {"bits": 3, "group_size": -1, "damp_percent": 0.01, "desc_act": True, "static_groups": True,
               "sym": False, "true_sequential": True, "model_name_or_path": None}  # fmt: skip
    read = gptq.settings(content, "quantize_config.json")
    assert (read.bits, read.group_size, read.desc_act, read.sym) == (3, PER_CHANNEL, True, False)
    assert read.static_groups
    assert not read.zeros_by_word


def test_what_gptqmodel_writes_is_read_and_its_word_arithmetic_known() -> None:
    read = gptq.settings(
        BASE | {"method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int16",
                "lm_head": True, "meta": {"quantizer": ["optimum:1.24", "gptqmodel:7.3.4"], "static_groups": True}}
    )  # fmt: skip
    assert read.zeros_by_word
    assert read.pack_dtype == torch.int16
    assert read.static_groups
    assert read.lm_head


def test_a_missing_sym_is_taken_as_true_with_a_note() -> None:
    content = {key: value for key, value in BASE.items() if key != "sym"}
    read = gptq.settings(content)
    assert read.sym
    assert "sym is missing" in read.notes[0]
    assert gptq.settings(BASE).notes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not GPTQ"),
        ({"is_marlin_format": True}, "Marlin's kernel layout"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read"),
        ({"format": "bitblas"}, "format 'bitblas' is not read"),
        ({"bits": None}, "'bits' is missing"),
        ({"group_size": None}, "'group_size' is missing"),
        ({"bits": 9}, "bits is 9; 2 to 8"),
        ({"bits": True}, "bits is True"),
        ({"bits": "4"}, "bits is '4'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 128.0}, r"group_size is 128\.0"),
        ({"sym": "yes"}, "sym is 'yes'; write true or false"),
        ({"desc_act": 1}, "desc_act is 1"),
        ({"pack_dtype": "uint4"}, "pack_dtype is 'uint4'; int8, int16, int32, int64"),
        ({"dynamic": ["-:lm_head"]}, "dynamic is"),
        ({"dynamic": {"+:x": 4}}, "rule '.:x' holds 4"),
        ({"dynamic": {"+:x": {"bits": 16}}}, "bits is 16"),
        ({"dynamic": {"+:(": {}}}, "is no pattern"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadCheckpoint, match=message) as caught:
        gptq.settings(BASE | change, "config.json")
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


def test_the_first_dynamic_rule_that_matches_from_the_start_wins() -> None:
    rules = {
        r"-:.*\.moe\..*": {},
        r"+:.*\.1[0-5]\..*": {"bits": 8, "group_size": 64},
        r".*\.1\d\..*": {"sym": False, "desc_act": True},
        "lm_head": {"bits": 2, "mse": 0.1},
    }
    read = gptq.settings(BASE | {"dynamic": rules})
    assert read.for_module("model.layers.10.moe.up") is None
    assert read.for_module("model.layers.1.mlp.up_proj") == gptq.settings(BASE)
    tenth = read.for_module("model.layers.10.mlp.up_proj")
    assert tenth is not None
    assert (tenth.bits, tenth.group_size, tenth.sym) == (8, 64, True)
    last = read.for_module("model.layers.19.mlp.up_proj")
    assert last is not None
    assert (last.bits, last.sym, last.desc_act) == (4, False, True)
    head = read.for_module("lm_head")
    assert head is not None
    assert head.bits == 2
    assert read.for_module("model.lm_head") == gptq.settings(BASE)  # re.match, not re.search


@pytest.mark.parametrize(
    "rule", ["(a+)+$", "(a|a)*b", ".*.*.*.*.*.*x", "a?" * 30 + "a" * 30, "(a|a)" * 30]
)
def test_rules_whose_matching_could_run_away_are_refused(rule: str) -> None:
    with pytest.raises(BadCheckpoint, match="repeats a group, or has too many"):
        gptq.settings(BASE | {"dynamic": {f"-:{rule}": {}}})


@pytest.mark.parametrize("rule", [r".*\.(?:1[0-5])\..*", r"^(?!.*experts).*mlp\.(gate|up)_proj$", r".*mlp\.gate.*", r"model\.layers\.(0|1)\.[^.]+\.[a-z_]+"])  # fmt: skip
def test_rules_that_quantizers_document_are_read(rule: str) -> None:
    assert gptq.settings(BASE | {"dynamic": {rule: {}}}).dynamic[0].pattern == re.compile(rule)


def test_two_files_that_disagree_are_told_apart_setting_by_setting() -> None:
    first = gptq.settings(BASE, "config.json")
    second = gptq.settings(BASE | {"desc_act": True, "format": "gptq_v2"}, "quantize_config.json")
    said = gptq.disagreements(first, second)
    assert len(said) == 2
    assert said[0] == "desc_act is False in config.json, True in quantize_config.json"
    assert gptq.disagreements(first, first) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 200) | st.floats() | st.text("a.*+?()[]|\\\n-:1{}"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = ("quant_method", "method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "dynamic",
        "pack_dtype", "meta", "lm_head", "packing_format", "backend", "extra_config", "data_type", "act_bits",
        "block_name_to_quantize", "autoround_version", "static_groups")  # fmt: skip


@hypothesis_settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_json_is_read_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    for reader, method in ((gptq.settings, "gptq"), (autoround.settings, "auto-round")):
        said = ""
        try:
            read = reader({"quant_method": method, "bits": 4, "group_size": 32} | changes)
            read.for_module("model.layers.0.mlp.up_proj")
        except BadCheckpoint as error:
            said = str(error)
        assert "\n" not in said


# --- what is written -------------------------------------------------------------------------


def _schemes() -> dict[str, Scheme]:
    schemes = {}
    for layer in (1, 10):
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"):
            schemes[f"model.layers.{layer}.{leaf}"] = Scheme(4, 64)
    schemes["model.layers.1.mlp.down_proj"] = Scheme(8, 64)
    for part in "qkv":
        schemes[f"model.layers.2.self_attn.{part}_proj"] = Scheme(8, PER_CHANNEL)
    return schemes


def test_the_config_that_is_written_says_of_every_linear_what_it_is() -> None:
    ignored = ["lm_head", "model.layers.1.mlp.gate_proj"]
    read = gptq.settings(gptq.quantization_config(_schemes(), ignored, "v2"))
    assert read.checkpoint_format == "gptq_v2"
    for name, scheme in _schemes().items():
        found = read.for_module(name)
        assert found is not None
        assert (found.bits, found.group_size, found.sym) == (
            scheme.bits,
            scheme.group_size,
            scheme.symmetric,
        )
    assert all(read.for_module(name) is None for name in ignored)
    eleventh = read.for_module("model.layers.11.mlp.down_proj")
    assert eleventh is not None
    assert eleventh.bits == 4  # layers.1 is not a prefix of layers.11
    longer = read.for_module("model.layers.1.mlp.down_proj_scale")
    assert longer is not None
    assert longer.bits == 4


def test_rules_match_the_fused_name_where_its_parts_agree_and_not_where_they_differ() -> None:
    schemes = _schemes()
    read = gptq.settings(gptq.quantization_config(schemes))
    fused = read.for_module("model.layers.2.self_attn.qkv_proj")
    assert fused is not None
    assert fused.bits == 8
    schemes["model.layers.2.self_attn.q_proj"] = Scheme(4, 64)
    split = gptq.settings(gptq.quantization_config(schemes))
    assert split.for_module("model.layers.2.self_attn.qkv_proj") == split.for_module("other")


@pytest.mark.parametrize(("version", "label"), [("v1", "gptq"), ("v2", "gptq_v2")])
def test_every_key_that_vllm_transformers_and_gptqmodel_need_is_there(
    version: str, label: str
) -> None:
    written = gptq.quantization_config({"a.q_proj": Scheme(4, 64), "lm_head": Scheme(4, 64)}, (), version)  # fmt: skip
    for key, value in {"bits": 4, "group_size": 64, "desc_act": False, "sym": True, "lm_head": True,
                       "quant_method": "gptq", "method": "gptq", "format": label,
                       "checkpoint_format": label, "pack_dtype": "int32"}.items():  # fmt: skip
        assert written[key] == value
    peer = GPTQConfig.from_dict(dict(written))
    assert (peer.bits, peer.group_size, peer.sym, peer.format) == (4, 64, True, label)
    assert "dynamic" not in written


def test_a_config_of_no_linear_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="no linear is quantized"):
        gptq.quantization_config({})


def test_planes_are_told_by_bits_and_label() -> None:
    assert GptqSettings(5, 32).planar
    assert GptqSettings(3, 32, checkpoint_format="gptq_p").planar
    assert not GptqSettings(3, 32).planar
    assert not GptqSettings(4, 32, checkpoint_format="gptq_p").planar
