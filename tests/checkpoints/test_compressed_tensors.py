"""compressed-tensors pack-quantized: bytes by hand, the package's own eyes, and hostile files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import (
    PackedQuantizationCompressor,
    pack_to_int32,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle import apply_quantization_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weightpath.checkpoints import compressed_tensors as ct
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.quantize.int8 import quantize_int8
from weightpath.quantize.rtn import quantize_rtn
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = [Scheme(4, 8), Scheme(4, 8, symmetric=False), Scheme(4), Scheme(3, 16, symmetric=False),
           Scheme(8, symmetric=False), Scheme(8), Scheme(5, 8), Scheme(2, 8, symmetric=False)]  # fmt: skip


def quantized(scheme: Scheme, n: int = 12, k: int = 32, seed: int = 0) -> QWeight:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) + 0.3
    return quantize_rtn(weight, scheme)[0]


def suffixes(tensors: dict[str, Tensor], name: str = "m") -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items()}


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


# Bytes by hand


def test_the_words_of_a_small_4_bit_weight_are_these() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9], [15, 0, 15, 0, 15, 0, 15, 0, 15]])
    scales = torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16)
    zeros = torch.tensor([[3], [14]], dtype=torch.int16)
    qweight = QWeight(Scheme(4, symmetric=False), codes.to(torch.uint8), scales, zeros)
    tensors = ct.to_tensors("m", qweight)
    assert tensors["m.weight_packed"].tolist() == [[signed(0x87654321), 9], [0x0F0F0F0F, 15]]
    assert tensors["m.weight_shape"].tolist() == [2, 9]
    assert tensors["m.weight_shape"].dtype == torch.int64
    assert tensors["m.weight_zero_point"].tolist() == [[0xE3]]  # along N: 3 low, 14 next
    assert torch.equal(tensors["m.weight_scale"], scales)
    # what a reader that knows only the format makes of it: (q - z) * s
    assert ct.from_tensors("m", qweight.scheme, suffixes(tensors)).dequantize()[0, :3].tolist() == [
        -1.0, -0.5, 0.0,
    ]  # fmt: skip


def test_zero_points_are_packed_along_the_outputs_and_padded() -> None:
    codes = torch.zeros(12, 16, dtype=torch.uint8)
    zeros = torch.arange(24, dtype=torch.int16).view(12, 2) % 16
    qweight = QWeight(Scheme(4, 8, symmetric=False), codes, torch.ones(12, 2), zeros)
    stored = ct.to_tensors("m", qweight)["m.weight_zero_point"]
    assert stored.shape == (2, 2)  # ceil(12 / 8) words by nG
    assert stored[:, 0].tolist() == [signed(0xECA86420), 0x6420]
    assert stored[:, 1].tolist() == [signed(0xFDB97531), 0x7531]
    assert stored.is_contiguous()


def test_zero_points_packed_along_the_groups_are_not_taken_for_the_right_ones() -> None:
    scheme = Scheme(4, 8, symmetric=False)
    qweight = quantized(scheme, n=8, k=64)  # [8, 8], so that the wrong way has the right shape
    assert qweight.zeros is not None
    parts = suffixes(ct.to_tensors("m", qweight))
    unsigned = (qweight.zeros - 8).to(torch.int8)
    parts["weight_zero_point"] = pack_to_int32(unsigned, 4, packed_dim=1).t().contiguous()
    found = ct.from_tensors("m", scheme, parts)
    assert found.zeros is not None
    assert not torch.equal(found.zeros, qweight.zeros)


def test_an_8_bit_code_is_stored_plus_128_and_its_scale_in_fp32() -> None:
    qweight, _ = quantize_int8(torch.tensor([[-127.0, 0.0, 127.0, 1.0]]))
    tensors = ct.to_tensors("m", qweight)
    assert tensors["m.weight_packed"].tolist() == [[signed(0x81FF8001)]]
    assert tensors["m.weight_scale"].dtype == torch.float32
    assert tensors["m.weight_scale"].tolist() == [[1.0]]
    assert "m.weight_zero_point" not in tensors


# Round trips and the package


@settings(deadline=None, max_examples=60)
@given(
    bits=st.integers(2, 8),
    n=st.integers(1, 20),
    size=st.sampled_from((-1, 1, 5, 8, 32)),
    groups=st.integers(1, 3),
    symmetric=st.booleans(),
)
def test_integers_come_back_exactly_and_parts_are_the_planned_ones(
    bits: int, n: int, size: int, groups: int, symmetric: bool
) -> None:
    scheme = Scheme(bits, size, symmetric=symmetric)
    k = 11 * groups if size == -1 else size * groups
    qweight = quantized(scheme, n, k, seed=n * k)
    tensors = ct.to_tensors("a.b", qweight)
    plan = ct.planned("a.b", scheme, (n, k), torch.bfloat16)
    assert {p.name: (p.dtype, p.shape) for p in plan} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = ct.from_tensors("a.b", scheme, suffixes(tensors, "a.b"))
    assert torch.equal(back.codes, qweight.codes)
    assert torch.equal(back.scales, qweight.scales)
    if symmetric:
        assert back.zeros is None
    else:
        assert back.zeros is not None
        assert qweight.zeros is not None
        assert torch.equal(back.zeros, qweight.zeros)
    assert torch.equal(back.dequantize(), qweight.dequantize())


def package_scheme(scheme: Scheme) -> QuantizationScheme:
    weights = ct.quantization_config({"m": scheme}, [])["config_groups"]["group_0"]["weights"]
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("n", [8, 12])
def test_the_package_decompresses_what_is_written_to_the_same_weight(
    scheme: Scheme, n: int
) -> None:
    qweight = quantized(scheme, n)
    qweight = replace(qweight, scales=qweight.scales.float())
    theirs = PackedQuantizationCompressor.decompress(
        suffixes(ct.to_tensors("m", qweight)), package_scheme(scheme)
    )
    assert torch.equal(theirs["weight"], qweight.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_what_the_package_compresses_is_written_and_read_alike(scheme: Scheme) -> None:
    qweight = quantized(scheme)
    scales = qweight.scales.float()
    parts: dict[str, Any] = {"weight": qweight.dequantize(), "weight_scale": scales}
    if qweight.zeros is not None:
        parts["weight_zero_point"] = (qweight.zeros - scheme.midpoint).to(torch.int8)
    theirs = PackedQuantizationCompressor.compress(parts, package_scheme(scheme))
    ours = suffixes(ct.to_tensors("m", replace(qweight, scales=scales)))
    assert set(theirs) == set(ours)
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor), name
    assert torch.equal(ct.from_tensors("m", scheme, theirs).dequantize(), qweight.dequantize())


# What cannot be written


def test_minimums_an_order_and_values_that_would_spill_are_refused() -> None:
    scheme = Scheme(4, 8, symmetric=False)
    qweight = quantized(scheme)
    assert qweight.zeros is not None
    zeros = qweight.zeros.clone()
    zeros[1, 1] = 16
    codes = qweight.codes.clone()
    codes[0, 0] = 16
    nan = qweight.scales.clone()
    nan[0, 0] = float("nan")
    for change, word in (
        ({"zeros": None, "minimums": qweight.scales}, "float minimums"),
        ({"g_idx": torch.zeros(32, dtype=torch.int32)}, "column order"),
        ({"zeros": zeros}, "hold 0..15"),
        ({"zeros": zeros - 20}, "hold 0..15"),
        ({"codes": codes}, "code 16 exceeds 15"),
        ({"scales": nan}, "nan"),
        ({"zeros": None}, "neither"),
    ):
        with pytest.raises(BadTensor) as caught:
            ct.to_tensors("layers.0.q", replace(qweight, **change))
        assert word in str(caught.value)
        assert "layers.0.q" in str(caught.value)


# Hostile tensors

GOOD = Scheme(4, 8, symmetric=False)


def broken(**changes: Tensor | None) -> dict[str, Tensor]:
    parts = suffixes(ct.to_tensors("m", quantized(GOOD, n=12, k=32)))
    merged = parts | changes
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


INT = torch.int32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_packed": None}, ["m.weight_packed", "missing"]),
        ({"weight_scale": None}, ["m.weight_scale", "missing"]),
        ({"weight_zero_point": None}, ["m.weight_zero_point", "missing"]),
        ({"weight_packed": torch.zeros(12, 4)}, ["m.weight_packed", "float32"]),
        ({"weight_packed": torch.zeros(12, 4, dtype=torch.int64)}, ["m.weight_packed", "int64"]),
        ({"weight_packed": torch.zeros(2, 12, 4, dtype=INT)}, ["m.weight_packed", "(2, 12, 4)"]),
        ({"weight_packed": torch.zeros(12, 0, dtype=INT)}, ["m.weight_packed", "(12, 0)"]),
        ({"weight_packed": torch.zeros(0, 4, dtype=INT), "weight_shape": None}, ["(0, 4)"]),
        ({"weight_packed": torch.zeros(12, 5, dtype=INT)}, ["m.weight_packed", "(12, 5)", "(12, 4)"]),
        ({"weight_packed": torch.zeros(11, 4, dtype=INT)}, ["m.weight_packed", "(11, 4)", "(12, 4)"]),
        ({"weight_shape": torch.tensor([12])}, ["m.weight_shape", "[12]"]),
        ({"weight_shape": torch.tensor([12, 32, 1])}, ["m.weight_shape"]),
        ({"weight_shape": torch.tensor([12, 0])}, ["m.weight_shape", "0"]),
        ({"weight_shape": torch.tensor([12, -32])}, ["m.weight_shape", "-32"]),
        ({"weight_shape": torch.tensor([12.0, float("nan")])}, ["m.weight_shape", "nan"]),
        ({"weight_shape": torch.tensor([], dtype=torch.int64)}, ["m.weight_shape"]),
        ({"weight_shape": torch.tensor([2**40, 2**40])}, ["m.weight_packed", "wants"]),
        ({"weight_shape": torch.tensor([12, 31])}, ["31", "8"]),
        ({"weight_scale": torch.ones(12, 3)}, ["m.weight_scale", "(12, 3)", "(12, 4)"]),
        ({"weight_scale": torch.ones(12)}, ["m.weight_scale", "(12,)", "(12, 4)"]),
        ({"weight_scale": torch.tensor(1.0)}, ["m.weight_scale", "()"]),
        ({"weight_scale": torch.ones(12, 4, dtype=INT)}, ["scales", "int32"]),
        ({"weight_scale": torch.full((12, 4), float("inf"))}, ["scale [0, 0]", "inf"]),
        ({"weight_zero_point": torch.zeros(2, 4)}, ["m.weight_zero_point", "float32"]),
        ({"weight_zero_point": torch.zeros(12, 4, dtype=INT)}, ["m.weight_zero_point", "(12, 4)", "(2, 4)"]),
        ({"weight_zero_point": torch.zeros(8, dtype=INT)}, ["m.weight_zero_point", "(8,)"]),
        ({"weight_g_idx": torch.zeros(31, dtype=INT)}, ["g_idx", "(31,)"]),
        ({"weight_g_idx": torch.zeros(0, dtype=INT)}, ["g_idx", "(0,)"]),
        ({"weight_g_idx": torch.full((32,), 4, dtype=INT)}, ["g_idx", "4..4", "0..3"]),
        ({"weight_g_idx": torch.full((32,), float("nan"))}, ["g_idx", "float32"]),
    ],
)  # fmt: skip
def test_a_malformed_linear_is_one_line_that_names_the_part_and_the_numbers(
    changes: dict[str, Tensor | None], words: list[str]
) -> None:
    with pytest.raises(BadTensor) as caught:
        ct.from_tensors("m", GOOD, broken(**changes))
    message = str(caught.value)
    assert message.startswith("tensor m")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_config_of_other_bits_symmetry_or_groups_is_noticed() -> None:
    parts = broken()
    for scheme in (Scheme(8, 8, False), Scheme(3, 8, False), Scheme(4, 16, False), Scheme(4, 8),
                   Scheme(4, symmetric=False)):  # fmt: skip
        with pytest.raises(BadTensor):
            ct.from_tensors("m", scheme, parts)


def test_without_weight_shape_the_words_say_the_shape() -> None:
    qweight = quantized(GOOD)
    found = ct.from_tensors("m", GOOD, broken(weight_shape=None))
    assert torch.equal(found.codes, qweight.codes)
    assert ct.from_tensors("m", GOOD, broken(weight_shape=torch.tensor([12, 32], dtype=INT)))


def test_a_g_idx_with_a_minus_one_is_unused_and_another_one_is_kept() -> None:
    unused = torch.full((32,), -1, dtype=INT)
    assert ct.from_tensors("m", GOOD, broken(weight_g_idx=unused)).g_idx is None
    order = (torch.arange(32) % 4).to(INT)
    kept = ct.from_tensors("m", GOOD, broken(weight_g_idx=order)).g_idx
    assert kept is not None
    assert torch.equal(kept, order)


# The config


def linears() -> dict[str, Scheme]:
    four, two = Scheme(4, 32), Scheme(8)
    return {
        "model.layers.0.q_proj": four,
        "model.layers.0.down_proj": two,
        "model.layers.1.q_proj": four,
        "model.layers.1.down_proj": four,
        "lm_head": two,
    }


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_config_is_one_that_the_package_accepts(scheme: Scheme) -> None:
    config = ct.quantization_config({"m": scheme, "n": INT8}, ["lm_head"])
    parsed = QuantizationConfig.model_validate(config)
    first = parsed.config_groups["group_0"]
    assert isinstance(first, QuantizationScheme)
    weights = first.weights
    assert weights is not None
    assert (weights.num_bits, weights.symmetric) == (scheme.bits, scheme.symmetric)
    assert weights.strategy == ("channel" if scheme.group_size == -1 else "group")
    assert weights.group_size == (None if scheme.group_size == -1 else scheme.group_size)
    assert parsed.format == "pack-quantized"
    assert parsed.quantization_status == "compressed"
    assert parsed.ignore == ["lm_head"]


def test_the_config_says_every_linear_s_scheme_and_the_ignored_ones() -> None:
    config = ct.quantization_config(linears(), ["model.extra"])
    find = ct.scheme_finder(config, "here")
    for name, scheme in linears().items():
        assert find(name) == scheme, name
    assert find("model.extra") is None
    assert find("model.layers.7.q_proj") == Scheme(4, 32)  # the class target
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert "lm_head" in config["config_groups"]["group_1"]["targets"]


def test_a_head_is_named_even_where_its_scheme_is_the_common_one() -> None:
    config = ct.quantization_config({"lm_head": INT8, "a.b": INT8}, [])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]


def test_activation_bits_are_not_part_of_the_stored_scheme() -> None:
    config = ct.quantization_config(
        {"a.b": Scheme(4, 32, activation_bits=8), "a.c": Scheme(4, 32)}, []
    )
    assert list(config["config_groups"]) == ["group_0"]
    assert ct.scheme_finder(config, "here")("a.b") == Scheme(4, 32)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(32, 32) for n in ("q", "up")}) for _ in range(3)
        )
        self.lm_head = nn.Linear(32, 32)


def package_bits(config: dict[str, Any]) -> dict[str, int | None]:
    """Bits that the package gives every linear of Toy under a config."""
    model = Toy()
    apply_quantization_config(model, QuantizationConfig.model_validate(config), show_progress=False)
    found: dict[str, int | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            scheme = getattr(module, "quantization_scheme", None)
            found[name] = None if scheme is None else scheme.weights.num_bits
    return found


def group(bits: int, *targets: str) -> dict[str, Any]:
    return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}


@pytest.mark.parametrize(
    ("groups", "ignore"),
    [
        ([group(4, "Linear")], ["lm_head"]),
        ([group(4, "Linear"), group(8, "lm_head")], []),
        ([group(4, "Linear"), group(8, "re:.*up$")], ["layers.1.up"]),
        ([group(4, "re:layers.*"), group(8, "layers.0.q")], []),  # a name wins over a pattern
        ([group(4, "re:.*up$"), group(8, "re:.*layers.0.*"), group(2, "Linear")], ["re:.*head"]),
        ([group(4, "re:z"), group(8, "re:up"), group(3, "re:layers.2")], []),  # only at the start
        ([group(4, "Linear")], ["re:layers.[12].*"]),
        ([group(4, "Linear")], ["Linear"]),
        ([group(4, "layers.0")], []),  # a parent's name is no target
        ([group(4, "Embedding")], []),
        ([group(4, "Linear"), group(8, "Linear")], []),
    ],
)  # fmt: skip
def test_targets_and_ignores_mean_what_they_mean_to_the_package(
    groups: list[dict[str, Any]], ignore: list[str]
) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "frozen",
        "config_groups": {f"group_{index}": value for index, value in enumerate(groups)},
        "ignore": ignore,
    }
    find = ct.scheme_finder(config, "here")
    ours = {}
    for name, module in Toy().named_modules():
        if isinstance(module, nn.Linear):
            scheme = find(name)
            ours[name] = None if scheme is None else scheme.bits
    assert ours == package_bits(config)


def test_a_config_without_groups_quantizes_nothing() -> None:
    assert ct.scheme_finder({}, "here")("a") is None
    assert ct.scheme_finder({"config_groups": {}, "ignore": None}, "here")("a") is None


def test_a_group_for_activations_alone_says_nothing_of_weights() -> None:
    config = {
        "config_groups": {
            "a": {"targets": ["LlamaAttention"], "weights": None},
            "b": group(4, "Linear"),
        }
    }
    assert ct.scheme_finder(config, "here")("q") == Scheme(4)


def weights(**changes: Any) -> dict[str, Any]:
    plain = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": plain | changes}}}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"format": None}, "None"),
        (weights(type="float"), "float"),
        (weights(strategy="tensor", group_size=None), "tensor"),
        (weights(strategy="block"), "block"),
        (weights(group_size=0), "group_size 0"),
        (weights(group_size=-1), "group_size -1"),
        (weights(group_size=None), "group_size None"),
        (weights(group_size="32"), "'32'"),
        (weights(group_size=True), "True"),
        (weights(num_bits="4"), "'4'"),
        (weights(num_bits=4.0), "4.0"),
        (weights(num_bits=None), "None"),
        (weights(num_bits=1), "1 bits"),
        (weights(num_bits=16), "16 bits"),
        ({"config_groups": ["Linear"]}, "list"),
        ({"config_groups": {"group_0": None}}, "NoneType"),
        ({"config_groups": {"group_0": ["Linear"]}}, "list"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": [4]}}}, "list"),
        ({"config_groups": {"group_0": group(4) | {"targets": "Linear"}}}, "'Linear'"),
        ({"config_groups": {"group_0": group(4) | {"targets": [None]}}}, "None"),
        ({"config_groups": {"group_0": group(4, "re:(")}}, "rule '('"),
        ({"ignore": "lm_head"}, "'lm_head'"),
        ({"ignore": ["re:[a"]}, "rule '[a'"),
        ({"ignore": ["re:(.+)+!"]}, "repeats a group"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line_that_says_where_and_what(
    config: dict[str, Any], word: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        ct.scheme_finder(config, "folder")
    message = str(caught.value)
    assert message.startswith("folder")
    assert word in message
    assert "\n" not in message


def test_a_strategy_left_out_follows_from_the_group_size() -> None:
    assert ct.scheme_finder(weights(strategy=None), "here")("a") == Scheme(4, 32)
    assert ct.scheme_finder(weights(strategy=None, group_size=-1), "here")("a") == Scheme(4)
    assert ct.scheme_finder(weights(strategy=None, group_size=None), "here")("a") == Scheme(4)
