"""ModelOpt: bytes by hand, how pre_quant_scale enters, both configs, and hostile files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints import modelopt
from weightpath.checkpoints.modelopt import LayerSettings
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

AWQ = LayerSettings("W4A16_AWQ", None, True)


def signed(nibble: int) -> int:
    return nibble - 16 if nibble >= 8 else nibble


def scalar_weight(tensors: dict[str, Tensor]) -> list[list[float]]:
    """The weight that the checkpoint multiplies x with, one element at a time."""
    packed, scale = tensors["weight"].tolist(), tensors["weight_scale"].tolist()
    pre = tensors["pre_quant_scale"].tolist() if "pre_quant_scale" in tensors else None
    size = len(packed[0]) // len(scale[0])
    return [
        [
            scale[n][k // size]
            * signed(packed[n // 2][k] >> (4 * (n % 2)) & 15)
            * (pre[k] if pre else 1)
            for k in range(len(packed[0]))
        ]
        for n in range(2 * len(packed))
    ]


# Rows [-8, 3, 0, 1] and [7, -1, 2, -2]: the even row in the low nibble.
GOLDEN = torch.tensor([[0x78, 0xF3, 0x20, 0xE1]], dtype=torch.uint8)
GOLDEN_WEIGHT = [[-4.0, 1.5, 0.0, 0.25], [7.0, -1.0, 4.0, -4.0]]


def golden(**changes: Tensor | None) -> dict[str, Tensor]:
    plain: dict[str, Tensor | None] = {
        "weight": GOLDEN, "weight_scale": torch.tensor([[0.5, 0.25], [1.0, 2.0]]),
    }  # fmt: skip
    return {key: value for key, value in (plain | changes).items() if value is not None}


def test_bytes_packed_by_hand_are_read_as_their_weight() -> None:
    got = modelopt.from_tensors("m", AWQ, golden())
    assert got.qweight is not None
    assert got.qweight.codes.tolist() == [[0, 11, 8, 9], [15, 7, 10, 6]]
    assert got.qweight.scheme == Scheme(4, 2)
    assert got.weight().tolist() == GOLDEN_WEIGHT
    assert not got.lossy


def test_sabotage_rows_of_high_nibbles_first_are_another_weight() -> None:
    swapped = (GOLDEN << 4) | (GOLDEN >> 4)
    got = modelopt.from_tensors("m", AWQ, golden(weight=swapped)).weight()
    assert got.tolist() == [
        [half / own * value for value, half, own in zip(row, halves, owns, strict=True)]
        for row, halves, owns in (
            (GOLDEN_WEIGHT[1], [0.5, 0.5, 0.25, 0.25], [1, 1, 2, 2]),
            (GOLDEN_WEIGHT[0], [1, 1, 2, 2], [0.5, 0.5, 0.25, 0.25]),
        )
    ]
    assert got.tolist() != GOLDEN_WEIGHT


def test_sabotage_offset_binary_nibbles_are_another_weight() -> None:
    got = modelopt.from_tensors("m", AWQ, golden(weight=GOLDEN ^ 0x88)).weight()
    assert got.tolist() != GOLDEN_WEIGHT


def test_pre_quant_scale_multiplies_activations_and_so_the_columns_of_the_weight() -> None:
    pre = torch.tensor([2.0, 0.5, 4.0, 1.0], dtype=torch.bfloat16)
    plain = modelopt.from_tensors("m", AWQ, golden())
    for shape in ((4,), (1, 4)):
        got = modelopt.from_tensors("m", AWQ, golden(pre_quant_scale=pre.view(shape)))
        assert got.column_scales is not None
        assert torch.equal(got.column_scales, pre.float())
        assert got.qweight is not None
        assert torch.equal(got.qweight.dequantize(), plain.weight())
        x = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
        assert torch.equal(x @ got.weight().t(), (x * pre) @ plain.weight().t())
        assert "multiplied by pre_quant_scale" in got.notes[0]


def test_sabotage_dividing_by_pre_quant_scale_is_another_product() -> None:
    pre = torch.tensor([2.0, 0.5, 4.0, 1.0])
    got = modelopt.from_tensors("m", AWQ, golden(pre_quant_scale=pre))
    x = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
    plain = modelopt.from_tensors("m", AWQ, golden()).weight()
    assert not torch.equal(x @ got.weight().t(), (x / pre) @ plain.t())


def test_a_missing_pre_quant_scale_is_said_only_where_the_config_has_them() -> None:
    said = modelopt.from_tensors("m", AWQ, golden())
    assert said.column_scales is None
    assert "folded into the layer before it" in said.notes[0]
    assert modelopt.from_tensors("m", LayerSettings("W4A16_AWQ"), golden()).notes == ()


@settings(deadline=None, max_examples=30)
@given(
    pairs=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=st.sampled_from([1, 4, 16, 128]),
    stated=st.booleans(),
    pre=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_shape_is_the_published_formula(
    pairs: int, groups: int, size: int, stated: bool, pre: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = groups * size
    tensors = {
        "weight": torch.randint(0, 256, (pairs, k), generator=generator).to(torch.uint8),
        "weight_scale": torch.rand(2 * pairs, groups, generator=generator) + 0.1,
    }
    if pre:
        tensors["pre_quant_scale"] = (torch.rand(k, generator=generator) + 0.5).to(torch.bfloat16)
    layer = LayerSettings("W4A16_AWQ", size if stated else None, pre)
    got = modelopt.from_tensors("m", layer, tensors)
    wanted = torch.tensor(scalar_weight(tensors), dtype=torch.float64)
    torch.testing.assert_close(got.weight().double(), wanted, rtol=3e-7, atol=0)
    if not pre:
        assert torch.equal(got.weight(), wanted.float())


def test_int8_weights_and_their_pre_quant_scale_are_read_exactly() -> None:
    tensors = {
        "weight": torch.tensor([[-128, 127], [0, -1]], dtype=torch.int8),
        "weight_scale": torch.tensor([0.5, 2.0]),
        "pre_quant_scale": torch.tensor([2.0, 1.0]),
        "input_scale": torch.tensor(0.1),
    }
    got = modelopt.from_tensors("m", LayerSettings("W8A8_SQ_PER_CHANNEL"), tensors)
    assert got.qweight is not None
    assert got.qweight.scheme == Scheme(8)
    assert got.weight().tolist() == [[-128.0, 63.5], [0.0, -2.0]]
    assert "asks for int8 activations" in got.notes[1]
    assert modelopt.from_tensors("m", LayerSettings("W8A16"), tensors).lossy is False


# --- the config -------------------------------------------------------------------------------

SEPARATE: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.40.0"},
    "quantization": {
        "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None, "group_size": 128,
        "has_zero_point": False, "pre_quant_scale": True,
        "exclude_modules": ["lm_head", "model.layers.1.self_attn*", "model.vision.*"],
    },
}  # fmt: skip


def test_hf_quant_config_says_every_linear_and_its_wildcards_what_is_float() -> None:
    read = modelopt.settings(SEPARATE)
    assert read.for_module("model.layers.0.self_attn.q_proj") == LayerSettings(
        "W4A16_AWQ", 128, True
    )
    for name in ("lm_head", "model.layers.1.self_attn.q_proj", "model.vision.a.b"):
        assert read.for_module(name) is None, name
    for name in ("model.lm_head", "model.layers.11.self_attn.q_proj", "model.visionary"):
        assert read.for_module(name) is not None, name


def test_the_flat_config_is_read_too_and_the_scales_tell_a_missing_group_size() -> None:
    flat = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"]}
    read = modelopt.settings(flat, "config.json")
    assert read.for_module("lm_head") is None
    assert read.default == LayerSettings("W4A16_AWQ", None, False)
    grouped = flat | {"config_groups": {"group_0": {"weights": {"group_size": 64}}}}
    assert modelopt.settings(grouped).default == LayerSettings("W4A16_AWQ", 64, False)


def test_mixed_precision_lists_its_layers_and_the_rest_is_float() -> None:
    layers = {
        "a.q": {"quant_algo": "W4A16_AWQ", "group_size": 64, "pre_quant_scale": True},
        "a.k": {"quant_algo": "W8A16"},
    }
    read = modelopt.settings(
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    )
    assert read.for_module("a.q") == LayerSettings("W4A16_AWQ", 64, True)
    assert read.for_module("a.k") == LayerSettings("W8A16")
    assert read.for_module("a.v") is None


def test_it_is_recognised_by_its_producer_or_its_method() -> None:
    assert modelopt.recognise(SEPARATE) == "producer modelopt"
    assert modelopt.recognise({"quant_method": "modelopt"}) == "quant_method modelopt"
    assert modelopt.recognise({"quant_method": "awq"}) is None
    assert modelopt.recognise({"producer": "modelopt"}) is None


def section(**changes: Any) -> dict[str, Any]:
    return {"quantization": SEPARATE["quantization"] | changes}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (section(quant_algo="NVFP4"), "quant_algo 'NVFP4' is not read"),
        (section(quant_algo="W4A8_AWQ"), "'W4A8_AWQ'"),
        (section(quant_algo=None), "None"),
        (section(quant_algo=["W4A16_AWQ"]), "['W4A16_AWQ']"),
        (section(has_zero_point=True), "has_zero_point is true"),
        (section(group_size="128"), "group_size is '128'"),
        (section(group_size=-128), "group_size is -128"),
        (section(group_size=True), "group_size is True"),
        (section(exclude_modules="lm_head"), "exclude_modules is 'lm_head'"),
        (section(exclude_modules=[7]), "exclude_modules is [7]"),
        ({"quantization": "W4A16_AWQ"}, "quantization is 'W4A16_AWQ'"),
        ({}, "quant_algo None"),
        ({"quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.q": 4}}, "folder: a.q: is 4"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.q": {"quant_algo": "FP8"}}},
            "folder: a.q: quant_algo 'FP8'",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(config: dict[str, Any], word: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        modelopt.settings(config, "folder")
    message = str(caught.value)
    assert message.startswith("folder")
    assert word in message
    assert "\n" not in message


# --- hostile tensors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": None}, ["m.weight", "missing"]),
        ({"weight_scale": None}, ["m.weight_scale", "missing"]),
        ({"weight": GOLDEN.float()}, ["m.weight", "float32 (1, 4)"]),
        ({"weight": GOLDEN[0]}, ["m.weight", "(4,)"]),
        ({"weight": GOLDEN[:0]}, ["m.weight", "(0, 4)"]),
        ({"weight": GOLDEN.repeat(2, 1)}, ["m.weight", "2 rows", "mtq.compress"]),
        ({"weight": GOLDEN.repeat(3, 1)}, ["m.weight_scale", "(2, 2)", "(6, any)"]),
        ({"weight_scale": torch.ones(2, 3)}, ["m.weight_scale", "3 groups", "in_features 4"]),
        ({"weight_scale": torch.ones(2, 5)}, ["m.weight_scale", "5 groups"]),
        ({"weight_scale": torch.ones(2)}, ["m.weight_scale", "(2,)"]),
        ({"weight_scale": torch.full((2, 2), float("nan"))}, ["scale [0, 0] is nan"]),
        ({"pre_quant_scale": torch.ones(5)}, ["m.pre_quant_scale", "(5,)", "(4)"]),
        ({"pre_quant_scale": torch.full((4,), float("nan"))}, ["m.pre_quant_scale", "nan"]),
        ({"weight_scale_2": torch.tensor(1.0)}, ["m.weight_scale_2", "second scale"]),
    ],
)
def test_a_malformed_linear_is_one_line_with_the_part_and_the_numbers(
    change: dict[str, Tensor | None], words: list[str]
) -> None:
    with pytest.raises(BadTensor) as caught:
        modelopt.from_tensors("m", AWQ, golden(**change))
    message = str(caught.value)
    assert message.startswith("tensor m")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_stated_group_size_that_the_scales_contradict_is_refused() -> None:
    with pytest.raises(BadTensor, match="2 groups a row; in_features 4 at group size 4 has 1"):
        modelopt.from_tensors("m", LayerSettings("W4A16_AWQ", 4), golden())
    with pytest.raises(BadTensor, match=r"in_features 4 at group size 3 has 1\.33333"):
        modelopt.from_tensors("m", LayerSettings("W4A16_AWQ", 3), golden())
