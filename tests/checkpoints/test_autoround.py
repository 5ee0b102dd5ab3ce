"""AutoRound: which layout a file has, and what each linear is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightpath.checkpoints import autoround, gptq
from weightpath.checkpoints.autoround import LayerSettings
from weightpath.errors import BadCheckpoint
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

BASE: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "autoround_version": "0.14.2",
    "block_name_to_quantize": "model.layers",
}  # fmt: skip


@pytest.mark.parametrize(
    ("packing", "layout"),
    [
        ("auto_round:auto_gptq", "gptq"),
        ("auto_round:gptq", "gptq"),
        ("auto_round:auto_gptq:exllamav2", "gptq"),  # 0.5 wrote this one
        ("auto_gptq:exllamav2", "gptq"),
        ("auto", "gptq"),
        ("auto_round", "gptq_v2"),
        ("auto_round:gptqmodel", "gptq_v2"),
        ("auto_round:exllamav2", "gptq_v2"),
        ("auto_round:auto_awq", "awq"),
        ("auto_round:awq", "awq"),
        ("auto_round:llm_compressor", "compressed-tensors"),
    ],
)
def test_the_packing_format_decides_the_layout(packing: str, layout: str) -> None:
    assert autoround.settings(BASE | {"packing_format": packing}).layout == layout


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("autoround:exllamav2", "gptq_v2"), ("auto_round:gptq:exllamav2", "gptq"), ("auto_gptq:triton", "gptq")],
)  # fmt: skip
def test_old_files_name_their_packing_under_backend(backend: str, layout: str) -> None:
    old = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, "backend": backend}  # fmt: skip
    read = autoround.settings(old)
    assert read.layout == layout
    assert backend in read.notes[0]


def test_a_backend_that_only_asks_for_a_kernel_is_no_packing() -> None:
    bare = {key: value for key, value in BASE.items() if key != "packing_format"}
    read = autoround.settings(bare | {"backend": "auto"})
    assert read.layout == "gptq"
    assert "packing_format is missing" in read.notes[0]
    assert autoround.settings(BASE | {"backend": "auto_round:tritonv2"}).layout == "gptq"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not AutoRound's"),
        ({"packing_format": "auto_round:fp8_static"}, "'auto_round:fp8_static' is not read"),
        ({"packing_format": "mlx"}, "'mlx' is not read"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "nvfp4_e5m3' is not read"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' is not read"),
        ({"data_type": "int_asym_float_zp"}, "int_asym_float_zp"),
        ({"act_bits": 8}, "act_bits is 8"),
        ({"rotation_config": {"r1": True}}, "rotation_config"),
        ({"bits": 16}, "bits is 16"),
        ({"bits": None}, "bits is None"),
        ({"group_size": [128, 128]}, r"group_size is \[128, 128\]"),
        ({"sym": 1}, "sym is 1"),
        ({"extra_config": ["lm_head"]}, "extra_config is no object"),
        ({"extra_config": {"lm_head": 4}}, "'lm_head' holds no object"),
        ({"extra_config": {"lm_head": {"bits": 9}}}, "extra_config 'lm_head': bits is 9"),
        ({"extra_config": {"lm_head": {"bits": 8, "data_type": "fp"}}}, "data_type 'fp'"),
        ({"extra_config": {"(a+)+$": {"bits": 8}}}, "repeats a group"),
        ({"block_name_to_quantize": 3}, "block_name_to_quantize is 3"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadCheckpoint, match=message) as caught:
        autoround.settings(BASE | change, "config.json")
    assert str(caught.value).startswith("config.json")


def test_a_linear_takes_its_own_settings_then_a_patterns_then_its_blocks() -> None:
    read = autoround.settings(
        BASE
        | {
            "extra_config": {
                "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1},
                "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
                r".*mlp\.down_proj.*": {"bits": 2},
                r".*experts\..*": {"bits": 16},
                "lm_head": {"bits": 8, "sym": False},
                "model.layers.9.mlp.up_proj": {},
            }
        }
    )
    assert read.for_module("model.layers.0.mlp.down_proj") == LayerSettings(8, -1)
    assert read.for_module("model.layers.1.mlp.down_proj") == LayerSettings(2, 128)
    assert read.for_module("model.layers.0.mlp.gate") is None
    assert read.for_module("model.layers.0.mlp.gate_proj") == LayerSettings(4, 128)
    assert read.for_module("model.layers.3.mlp.experts.7.up_proj") is None
    assert read.for_module("lm_head") == LayerSettings(8, 128, False)
    assert read.for_module("model.layers.9.mlp.up_proj") == LayerSettings(4, 128)
    assert read.for_module("visual.blocks.0.mlp.fc1") is None
    assert read.scheme("model.layers.1.mlp.down_proj") == Scheme(2, 128)


@pytest.mark.parametrize("blocks", ["a.layers, b.layers", ["a.layers", "b.layers"],
                                    [["a.layers.0", "a.layers.1"], ["b.layers.0"]]])  # fmt: skip
def test_blocks_are_read_from_a_text_or_lists(blocks: object) -> None:
    read = autoround.settings(BASE | {"block_name_to_quantize": blocks})
    assert read.for_module("a.layers.1.q") is not None
    assert read.for_module("b.layers.0.q") is not None
    assert read.for_module("c.layers.0.q") is None


def test_without_blocks_every_linear_but_the_head_takes_the_defaults() -> None:
    read = autoround.settings(BASE | {"block_name_to_quantize": None})
    assert read.for_module("anything.q_proj") == LayerSettings(4, 128)
    assert read.for_module("lm_head") is None


def test_gptq_settings_carry_the_convention_and_the_word_arithmetic_of_the_version() -> None:
    for packing, label, version, by_word in (
        ("auto_round:auto_gptq", "gptq", "0.14.2", True),
        ("auto_round:auto_gptq", "gptq", "0.5.1", False),
        ("auto_round", "gptq_v2", "0.14.2", False),
    ):
        read = autoround.settings(
            BASE | {"packing_format": packing, "autoround_version": version}
        ).gptq()
        assert read is not None
        assert (read.checkpoint_format, read.zeros_by_word) == (label, by_word)
    float_one = autoround.settings(BASE | {"extra_config": {"x": {"bits": 16}}})
    assert float_one.gptq("x") is None
    with pytest.raises(BadCheckpoint, match="its layout is awq"):
        autoround.settings(BASE | {"packing_format": "auto_round:auto_awq"}).gptq()


@pytest.mark.parametrize(
    ("packing", "version"), [("auto_round:auto_gptq", "v1"), ("auto_round", "v2")]
)
def test_a_file_without_g_idx_and_with_negative_scales_is_read_by_its_packing(
    packing: str, version: gptq.Convention
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 256), generator=generator).to(torch.uint8)
    scales = (torch.rand(64, 2, generator=generator) - 0.5).half()
    zeros = torch.randint(1, 16, (64, 2), generator=generator).to(torch.int16)
    for symmetric in (True, False):
        qweight = QWeight(Scheme(4, 128, symmetric), codes, scales, None if symmetric else zeros)
        tensors = {
            name[2:]: tensor
            for name, tensor in gptq.to_tensors("x", qweight, version).items()
            if not name.endswith("g_idx")
        }
        read = autoround.settings(BASE | {"packing_format": packing, "sym": symmetric})
        config = read.gptq("model.layers.0.q_proj")
        assert config is not None
        found = gptq.zero_convention([tensors["qzeros"]], 4, config)
        assert found.contradiction is None
        got = gptq.from_tensors("x", config, tensors, found.convention)
        assert bool((got.scales < 0).any())
        assert torch.equal(got.dequantize(), qweight.dequantize())


def test_zeros_of_0_that_autoround_borrowed_from_a_neighbour_are_restored() -> None:
    # What auto-round 0.6 and later pack: the sum of (zero - 1) << 4 * lane, as one int32.
    zeros = [8, 0, 15, 8, 0, 0, 15, 1]
    total = sum((zero - 1) << (4 * lane) for lane, zero in enumerate(zeros)) % (1 << 32)
    word = total - (1 << 32) if total >> 31 else total
    config = autoround.settings(BASE | {"sym": False, "group_size": 32}).gptq()
    assert config is not None
    tensors = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[word]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    got = gptq.from_tensors("x", config, tensors, "v1")
    assert got.zeros is not None
    assert got.zeros[:, 0].tolist() == zeros
