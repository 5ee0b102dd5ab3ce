"""What other writers of compressed-tensors leave behind: padded words, int8, orders, old zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints import compressed_tensors as ct
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")


def made(scheme: Scheme, n: int, k: int, seed: int = 0) -> QWeight:
    generator = torch.Generator().manual_seed(seed)
    groups, top = scheme.groups(k), 1 << scheme.bits
    zeros = torch.randint(0, top, (n, groups), generator=generator).to(torch.int16)
    return QWeight(
        scheme,
        torch.randint(0, top, (n, k), generator=generator).to(torch.uint8),
        torch.rand(n, groups, generator=generator) + 0.5,
        None if scheme.symmetric else zeros,
    )


def bare(qweight: QWeight) -> dict[str, Tensor]:
    stored = ct.to_tensors("m", qweight)
    return {name.removeprefix("m."): tensor for name, tensor in stored.items()}


# --- an independent packer of padded words, as the package was up to 0.17.1 --------------------


def padded_rows(codes: list[list[int]], bits: int) -> Tensor:
    """32 // bits codes a word from bit 0 up; a word's other bits are 0."""
    held, out = 32 // bits, []
    for row in codes:
        words = []
        for start in range(0, len(row), held):
            word = sum(code << (bits * i) for i, code in enumerate(row[start : start + held]))
            words.append(word - (1 << 32) if word >> 31 else word)
        out.append(words)
    return torch.tensor(out, dtype=torch.int32)


def padded(qweight: QWeight) -> dict[str, Tensor]:
    """A linear as an old writer stores it."""
    bits = qweight.scheme.bits
    tensors = {
        "weight_packed": padded_rows(qweight.codes.tolist(), bits),
        "weight_scale": qweight.scales,
        "weight_shape": torch.tensor(qweight.codes.shape),
    }
    if qweight.zeros is not None:
        rows = padded_rows(qweight.zeros.t().tolist(), bits)
        tensors["weight_zero_point"] = rows.t().contiguous()
    return tensors


def same(found: QWeight, wanted: QWeight) -> bool:
    zeros = (found.zeros is None) == (wanted.zeros is None)
    if found.zeros is not None and wanted.zeros is not None:
        zeros = torch.equal(found.zeros, wanted.zeros)
    return zeros and torch.equal(found.codes, wanted.codes)


# --- padded words -----------------------------------------------------------------------------


def test_padded_3_bit_words_by_hand_are_read_as_their_codes() -> None:
    first = sum((i % 8) << (3 * i) for i in range(10))  # 0..7, 0, 1
    words = [first, sum(((i + 2) % 8) << (3 * i) for i in range(10)), 0b101 << 3 | 0b110, 0]
    tensors = {
        "weight_packed": torch.tensor([words], dtype=torch.int32),
        "weight_scale": torch.ones(1, 1),
        "weight_shape": torch.tensor([1, 32]),
    }
    got = ct.from_tensors("m", Scheme(3), tensors).codes[0].tolist()
    assert got[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert got[10:20] == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert got[20:24] == [6, 5, 0, 0]


def test_sabotage_padded_words_read_as_dense_are_other_codes() -> None:
    qweight = made(Scheme(3), 4, 64)
    tensors = padded(qweight)
    assert same(ct.from_tensors("m", qweight.scheme, tensors), qweight)
    tensors["weight_packed"] = tensors["weight_packed"][:, :6].contiguous()  # the dense width
    assert not same(ct.from_tensors("m", qweight.scheme, tensors), qweight)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8]),
    n=st.integers(1, 40),
    groups=st.integers(1, 3),
    size=st.sampled_from([32, 64, 160, PER_CHANNEL]),
    symmetric=st.booleans(),
    dense=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_number_of_words_tells_padded_from_dense_at_every_width(
    bits: int, n: int, groups: int, size: int, symmetric: bool, dense: bool, seed: int
) -> None:
    k = 96 if size == PER_CHANNEL else size * groups
    qweight = made(Scheme(bits, size, symmetric), n, k, seed)
    tensors = bare(qweight) if dense else padded(qweight)
    assert same(ct.from_tensors("m", qweight.scheme, tensors), qweight)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_where_the_number_of_words_is_the_same_the_bits_beyond_the_codes_tell(bits: int) -> None:
    k = next(k for k in range(8, 40) if -(-k // (32 // bits)) == -(-k * bits // 32) > 1)
    qweight = made(Scheme(bits), 16, k)
    old, new = padded(qweight), bare(qweight)
    assert old["weight_packed"].shape == new["weight_packed"].shape
    assert not torch.equal(old["weight_packed"], new["weight_packed"])
    assert same(ct.from_tensors("m", qweight.scheme, old), qweight)
    assert same(ct.from_tensors("m", qweight.scheme, new), qweight)


def test_the_zero_points_words_settle_what_the_codes_leave_open() -> None:
    qweight = made(Scheme(3, PER_CHANNEL, symmetric=False), 64, 15)
    qweight = replace(qweight, codes=qweight.codes.clone().fill_(0))  # nothing beyond the codes
    for tensors in (padded(qweight), bare(qweight)):
        assert same(ct.from_tensors("m", qweight.scheme, tensors), qweight)


@pytest.mark.parametrize("n", [12, 40, 64])
def test_zero_points_of_12_outputs_follow_the_layout_of_the_codes(n: int) -> None:
    for bits in (3, 4, 5, 6, 7):
        qweight = made(Scheme(bits, 32, symmetric=False), n, 64, seed=bits)
        for tensors in (padded(qweight), bare(qweight)):
            found = ct.from_tensors("m", qweight.scheme, tensors)
            assert same(found, qweight), bits
            assert torch.equal(found.dequantize(), qweight.dequantize())


def test_a_number_of_words_that_fits_neither_layout_names_both() -> None:
    tensors = padded(made(Scheme(3), 4, 64))
    tensors["weight_packed"] = torch.zeros(4, 5, dtype=torch.int32)
    with pytest.raises(BadTensor) as caught:
        ct.from_tensors("m", Scheme(3), tensors)
    assert "(4, 5), [4, 64] at 3 bits wants (4, 6), or (4, 7) with padded words" in str(
        caught.value
    )


def test_bits_set_where_padding_must_be_empty_mean_the_config_is_wrong() -> None:
    four = bare(made(Scheme(4), 12, 32))  # 4 words a row, as padded 3-bit codes would be
    with pytest.raises(BadTensor, match="3-bit codes leave empty in a word are set"):
        ct.from_tensors("m", Scheme(3), four)


# --- int-quantized ----------------------------------------------------------------------------


def int8(**changes: Tensor | None) -> dict[str, Tensor]:
    plain: dict[str, Tensor | None] = {
        "weight": torch.tensor([[-128, 127, 0], [1, -1, 5]], dtype=torch.int8),
        "weight_scale": torch.tensor([[0.5], [2.0]]),
    }
    return {key: value for key, value in (plain | changes).items() if value is not None}


def test_int8_codes_by_hand_are_read_exactly() -> None:
    got = ct.from_tensors("m", Scheme(8), int8())
    assert got.codes.tolist() == [[0, 255, 128], [129, 127, 133]]
    assert got.dequantize().tolist() == [[-64.0, 63.5, 0.0], [2.0, -2.0, 10.0]]


def test_int8_zero_points_are_signed_and_may_be_unused_in_a_symmetric_file() -> None:
    zero = torch.tensor([[-128], [3]], dtype=torch.int8)
    got = ct.from_tensors("m", Scheme(8, symmetric=False), int8(weight_zero_point=zero))
    assert got.zeros is not None
    assert got.zeros.tolist() == [[0], [131]]
    assert got.dequantize()[1].tolist() == [-4.0, -8.0, 4.0]
    empty = int8(weight_zero_point=torch.zeros(2, 1, dtype=torch.int8))
    assert ct.from_tensors("m", Scheme(8), empty).zeros is None


def test_sabotage_an_unsigned_zero_point_is_another_weight() -> None:
    asymmetric = Scheme(8, symmetric=False)
    zero = torch.tensor([[-126], [3]], dtype=torch.int8)
    right = ct.from_tensors("m", asymmetric, int8(weight_zero_point=zero))
    unsigned = (zero.view(torch.uint8) ^ 128).view(torch.int8)
    wrong = ct.from_tensors("m", asymmetric, int8(weight_zero_point=unsigned))
    assert not torch.equal(right.dequantize(), wrong.dequantize())


def test_one_scale_for_the_tensor_or_one_a_row_is_spread() -> None:
    plain = ct.from_tensors("m", Scheme(8), int8(weight_scale=torch.full((2, 1), 0.25)))
    for scale in (torch.tensor(0.25), torch.tensor([0.25]), torch.full((2,), 0.25)):
        got = ct.from_tensors("m", Scheme(8), int8(weight_scale=scale))
        assert torch.equal(got.dequantize(), plain.dequantize())
    zero = torch.tensor([3], dtype=torch.int8)
    asymmetric = int8(weight_scale=torch.tensor([0.25]), weight_zero_point=zero)
    got = ct.from_tensors("m", Scheme(8, symmetric=False), asymmetric)
    assert got.zeros is not None
    assert got.zeros.tolist() == [[131], [131]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [8, PER_CHANNEL])
def test_what_the_package_compresses_to_int8_is_read_to_its_own_weight(
    bits: int, symmetric: bool, size: int
) -> None:
    qweight = made(Scheme(bits, size, symmetric), 12, 32)
    weights = ct.quantization_config({"m": qweight.scheme}, [])["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights["weights"]))
    parts: dict[str, Any] = {"weight": qweight.dequantize(), "weight_scale": qweight.scales}
    if qweight.zeros is not None:
        signed = qweight.zeros - qweight.scheme.midpoint
        parts["weight_zero_point"] = signed.to(torch.int8)
    theirs = IntQuantizationCompressor.compress(parts, scheme)
    got = ct.from_tensors("m", qweight.scheme, theirs)
    assert same(got, qweight)
    back = IntQuantizationCompressor.decompress(theirs, scheme)["weight"]
    assert torch.equal(back, got.dequantize())


@pytest.mark.parametrize(
    ("scheme", "change", "words"),
    [
        (Scheme(8), {"weight_scale": None}, ["m.weight_scale", "missing"]),
        (Scheme(8), {"weight": None}, ["m.weight_packed", "missing"]),
        (Scheme(8, symmetric=False), {}, ["m.weight_zero_point", "missing"]),
        (Scheme(8), {"weight": torch.zeros(2, 3)}, ["m.weight", "float32 (2, 3)", "int8 [N, K]"]),
        (Scheme(8), {"weight": torch.zeros(2, 0, dtype=torch.int8)}, ["m.weight", "(2, 0)"]),
        (Scheme(4), {}, ["m.weight", "spans -128..127", "4 bits hold -8..7"]),
        (Scheme(8), {"weight_scale": torch.ones(3, 1)}, ["m.weight_scale", "(3, 1)", "(2, 1)"]),
        (Scheme(8, 3), {"weight_scale": torch.ones(2, 2)}, ["m.weight_scale", "(2, 2)", "(2, 1)"]),
        (
            Scheme(8, symmetric=False),
            {"weight_zero_point": torch.zeros(1, 1, dtype=torch.int32)},
            ["m.weight_zero_point", "int32 (1, 1)", "wanted int8 (2, 1)"],
        ),
        (
            Scheme(8),
            {"weight_zero_point": torch.ones(2, 1, dtype=torch.int8)},
            ["m.weight_zero_point", "is there, but"],
        ),
    ],
)  # fmt: skip
def test_a_malformed_int8_linear_is_one_line_with_the_part_and_the_numbers(
    scheme: Scheme, change: dict[str, Tensor | None], words: list[str]
) -> None:
    with pytest.raises(BadTensor) as caught:
        ct.from_tensors("m", scheme, int8(**change))
    message = str(caught.value)
    assert message.startswith("tensor m")
    assert "\n" not in message
    for word in words:
        assert word in message


def config(form: str, **weights: Any) -> dict[str, Any]:
    plain = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return {
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": plain | weights}},
    }


def test_the_config_of_an_int8_file_is_read_and_its_one_scale_taken_as_one_a_row() -> None:
    for form in ct.INT_FORMATS:
        assert ct.scheme_finder(config(form), "here")("a") == Scheme(8)
        whole = config(form, strategy="tensor", symmetric=False)
        assert ct.scheme_finder(whole, "here")("a") == Scheme(8, symmetric=False)
    with pytest.raises(BadCheckpoint, match="strategy tensor"):
        ct.scheme_finder(config("pack-quantized", strategy="tensor"), "here")
    with pytest.raises(BadCheckpoint, match="type float"):
        ct.scheme_finder(config("naive-quantized", type="float"), "here")
    with pytest.raises(BadCheckpoint, match="'float-quantized' is not read"):
        ct.scheme_finder(config("float-quantized"), "here")


def test_a_group_of_a_mixed_file_says_its_own_format() -> None:
    mixed = config("mixed-precision", strategy="tensor")
    mixed["config_groups"]["group_0"]["format"] = "int-quantized"
    assert ct.scheme_finder(mixed, "here")("a") == Scheme(8)


# --- zero points, shapes and orders -----------------------------------------------------------

GROUPED = Scheme(4, 8, symmetric=False)


def test_int8_zero_points_that_are_not_packed_are_read() -> None:
    qweight = made(GROUPED, 12, 32)
    assert qweight.zeros is not None
    tensors = bare(qweight) | {"weight_zero_point": (qweight.zeros - 8).to(torch.int8)}
    assert same(ct.from_tensors("m", GROUPED, tensors), qweight)


def test_packed_midpoints_in_a_symmetric_file_are_accepted_and_others_are_not() -> None:
    qweight = made(Scheme(4, 8), 16, 32)
    middle = torch.full((2, 4), -2004318072, dtype=torch.int32)  # 0x88888888
    got = ct.from_tensors("m", qweight.scheme, bare(qweight) | {"weight_zero_point": middle})
    assert got.zeros is None
    with pytest.raises(BadTensor, match="is there, but"):
        ct.from_tensors("m", qweight.scheme, bare(qweight) | {"weight_zero_point": middle + 1})


def test_a_shape_of_int32_is_read_as_one_of_int64() -> None:
    qweight = made(Scheme(3, 32), 4, 96)
    for tensors in (bare(qweight), padded(qweight)):
        tensors["weight_shape"] = tensors["weight_shape"].to(torch.int32)
        assert same(ct.from_tensors("m", qweight.scheme, tensors), qweight)


def test_an_order_that_says_something_is_kept_and_its_weight_is_the_formula_s() -> None:
    qweight = made(Scheme(4, 32, symmetric=False), 4, 128)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)) // 32
    tensors = bare(qweight) | {"weight_g_idx": order.to(torch.int32)}
    got = ct.from_tensors("m", qweight.scheme, tensors)
    assert got.g_idx is not None
    assert torch.equal(got.g_idx, order.to(torch.int32))
    assert qweight.zeros is not None
    codes, zeros = qweight.codes.tolist(), qweight.zeros.tolist()
    wanted = [
        [qweight.scales[n, g] * (codes[n][k] - zeros[n][g]) for k, g in enumerate(order.tolist())]
        for n in range(4)
    ]
    assert torch.equal(got.dequantize(), torch.tensor(wanted))


def test_a_trivial_order_is_dropped_and_one_of_whole_groups_moves_the_scales() -> None:
    qweight = made(Scheme(4, 32, symmetric=False), 4, 128)
    plain = torch.arange(128) // 32
    trivial = ct.from_tensors("m", qweight.scheme, bare(qweight) | {"weight_g_idx": plain})
    assert trivial.g_idx is None
    assert torch.equal(trivial.dequantize(), qweight.dequantize())
    swapped = torch.tensor([2, 0, 3, 1]).repeat_interleave(32).to(torch.int32)
    got = ct.from_tensors("m", qweight.scheme, bare(qweight) | {"weight_g_idx": swapped})
    assert got.g_idx is None
    kept = replace(qweight, g_idx=swapped)
    assert torch.equal(got.dequantize(), kept.dequantize())
    assert not torch.equal(got.dequantize(), qweight.dequantize())
