"""QWeight: what its integers stand for, and what it refuses to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.errors import BadTensor
from weightpath.qweight import QWeight, ScaleChange, in_scheme, scale_change
from weightpath.scheme import PER_CHANNEL, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(
    scheme: Scheme,
    n: int = 4,
    k: int = 64,
    minimums: bool = False,
    order: bool = False,
    seed: int = 0,
) -> QWeight:
    """A sound QWeight of random integers."""
    random, groups = seeded(seed), scheme.groups(k)
    codes = torch.randint(0, scheme.top_code + 1, (n, k), generator=random).to(torch.uint8)
    scales = torch.rand(n, groups, generator=random) + 0.01
    zeros = torch.randint(0, scheme.top_code + 1, (n, groups), generator=random).to(torch.int16)
    lows = torch.randn(n, groups, generator=random)
    g_idx = torch.randint(0, groups, (k,), generator=random).to(torch.int32)
    return QWeight(
        scheme,
        codes,
        scales,
        None if scheme.symmetric or minimums else zeros,
        lows if minimums else None,
        g_idx if order else None,
    )


def by_hand(qweight: QWeight) -> Tensor:
    """The formula of the docstring, element by element, in float64."""
    n, k = qweight.codes.shape
    size = k if qweight.scheme.group_size == -1 else qweight.scheme.group_size
    weight = torch.zeros(n, k, dtype=torch.float64)
    for row in range(n):
        for column in range(k):
            group = int(qweight.g_idx[column]) if qweight.g_idx is not None else column // size
            code, scale = int(qweight.codes[row, column]), float(qweight.scales[row, group])
            if qweight.minimums is not None:
                weight[row, column] = scale * code + float(qweight.minimums[row, group])
                continue
            zero = 2 ** (qweight.scheme.bits - 1)
            if qweight.zeros is not None:
                zero = int(qweight.zeros[row, group])
            weight[row, column] = scale * (code - zero)
    return weight


@settings(deadline=None, max_examples=40)
@given(
    bits=st.integers(2, 8),
    groups=st.integers(1, 4),
    size=st.integers(1, 9),
    rows=st.integers(1, 4),
    kind=st.sampled_from(("symmetric", "zeros", "minimums")),
    order=st.booleans(),
)
def test_dequantize_is_the_formula(
    bits: int, groups: int, size: int, rows: int, kind: str, order: bool
) -> None:
    scheme = Scheme(bits, size, symmetric=kind == "symmetric")
    qweight = some(scheme, rows, groups * size, kind == "minimums", order, seed=bits + size)
    torch.testing.assert_close(
        qweight.dequantize().double(), by_hand(qweight), rtol=1e-6, atol=1e-6
    )


def test_per_channel_is_one_group_a_row() -> None:
    qweight = some(Scheme(4), n=3, k=10)
    assert qweight.scales.shape == (3, 1)
    torch.testing.assert_close(qweight.dequantize().double(), by_hand(qweight))


def test_a_low_precision_copy_is_rounded_once_from_fp32() -> None:
    qweight = some(Scheme(4, 16, symmetric=False))
    assert torch.equal(qweight.dequantize(torch.bfloat16), qweight.dequantize().to(torch.bfloat16))


def test_rows_are_rows_of_the_whole_and_no_copy() -> None:
    for minimums in (False, True):
        qweight = some(Scheme(4, 16, symmetric=False), n=6, minimums=minimums)
        part = qweight.rows(2, 5)
        assert torch.equal(part.dequantize(), qweight.dequantize()[2:5])
        assert part.codes.data_ptr() == qweight.codes[2:].data_ptr()


def test_stored_bits_count_every_part() -> None:
    scheme = Scheme(4, 32, symmetric=False)
    qweight = some(scheme, n=4, k=64, order=True)
    qweight = replace(qweight, scales=qweight.scales.to(torch.bfloat16))
    # 256 codes of 4 bits, 8 scales of 16, 8 zeros of 4, an order of 64 int32
    assert qweight.stored_bits() == 256 * 4 + 8 * 16 + 8 * 4 + 64 * 32
    low = some(scheme, n=4, k=64, minimums=True)
    assert low.stored_bits() == 256 * 4 + 8 * 32 + 8 * 32


def test_a_sound_weight_passes_its_check() -> None:
    for scheme in (Scheme(4, 16), Scheme(3, 16, symmetric=False), Scheme(8)):
        for order in (False, True):
            qweight = some(scheme, order=order)
            assert qweight.check("a") is qweight
    assert some(Scheme(4, 16, symmetric=False), minimums=True).check("a")


def test_negative_and_zero_scales_are_sound_since_other_tools_write_them() -> None:
    qweight = some(Scheme(4, 16))
    scales = qweight.scales.clone()
    scales[0, 0], scales[1, 1] = 0.0, -0.25
    assert replace(qweight, scales=scales).check("a")


def spoiled(part: str, index: tuple[int, int], value: float) -> dict[str, Any]:
    qweight = some(Scheme(4, 16, symmetric=False), minimums=part == "minimums")
    values = getattr(qweight, part).clone()
    values[index] = value
    return {part: values}


ORDER = torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codes": torch.zeros(4, 64, dtype=torch.int32)}, ["codes", "int32"]),
        ({"codes": torch.zeros(64, dtype=torch.uint8)}, ["codes", "(64,)"]),
        ({"codes": torch.zeros(4, 0, dtype=torch.uint8)}, ["codes", "(4, 0)"]),
        ({"codes": torch.zeros(0, 64, dtype=torch.uint8)}, ["codes", "(0, 64)"]),
        ({"codes": torch.zeros(4, 63, dtype=torch.uint8)}, ["63", "16"]),
        ({"codes": torch.full((4, 64), 16, dtype=torch.uint8)}, ["code 16", "15"]),
        ({"scales": torch.ones(4, 3)}, ["scales", "(4, 3)", "(4, 4)"]),
        ({"scales": torch.ones(4)}, ["scales", "(4,)", "(4, 4)"]),
        ({"scales": torch.tensor(1.0)}, ["scales", "()", "(4, 4)"]),
        ({"scales": torch.ones(4, 4, dtype=torch.int32)}, ["scales", "int32"]),
        (spoiled("scales", (2, 1), float("nan")), ["scale [2, 1]", "nan"]),
        (spoiled("scales", (0, 3), float("-inf")), ["scale [0, 3]", "-inf"]),
        ({"zeros": torch.zeros(4, 3, dtype=torch.int16)}, ["zeros", "(4, 3)", "(4, 4)"]),
        ({"zeros": torch.full((4, 4), 7.5)}, ["zeros", "float32", "integers"]),
        ({"zeros": None}, ["asym", "neither"]),
        ({"minimums": torch.ones(4, 4)}, ["both"]),
        ({"zeros": None, **spoiled("minimums", (1, 0), float("inf"))}, ["minimum [1, 0]", "inf"]),
        ({"scheme": Scheme(4, 16)}, ["w4g16", "zeros"]),
        ({"g_idx": ORDER[:0]}, ["g_idx", "(0,)"]),
        ({"g_idx": ORDER[:63]}, ["g_idx", "(63,)"]),
        ({"g_idx": ORDER - 1}, ["g_idx", "-1..-1", "0..3"]),
        ({"g_idx": ORDER + 4}, ["g_idx", "4..4", "0..3"]),
        ({"g_idx": torch.full((64,), float("nan"))}, ["g_idx", "float32"]),
    ],
)
def test_an_unsound_weight_is_one_line_that_names_it_and_the_numbers(
    change: dict[str, Any], words: list[str]
) -> None:
    qweight = replace(some(Scheme(4, 16, symmetric=False)), **change)
    with pytest.raises(BadTensor) as caught:
        qweight.check("layers.3.q_proj")
    message = str(caught.value)
    assert message.startswith("tensor layers.3.q_proj: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_zeros_that_do_not_fit_their_bits_are_not_handed_out_as_codes() -> None:
    qweight = some(Scheme(4, 16, symmetric=False))
    assert qweight.zeros is not None
    codes = qweight.zeros_as_codes("a")
    assert codes is not None
    assert codes.dtype == torch.uint8
    assert torch.equal(codes.to(torch.int16), qweight.zeros)
    for wrong in (-1, 16):
        zeros = qweight.zeros.clone()
        zeros[0, 0] = wrong
        with pytest.raises(BadTensor, match=r"4 bits hold 0\.\.15"):
            replace(qweight, zeros=zeros).zeros_as_codes("a")
    assert some(Scheme(4, 16)).zeros_as_codes("a") is None


def test_the_change_of_scales_is_counted_in_shares_of_their_size() -> None:
    qweight = some(Scheme(4, 32), n=8)
    halves = replace(qweight, scales=qweight.scales.half())
    assert scale_change(halves, torch.float32) == ScaleChange(True, 0.0, 0.0, 0)
    scales = torch.ones(8, 2)
    scales[0, 0], scales[1, 1], scales[2, 0] = 1 + 2**-12, 0.0, -1.0
    change = scale_change(replace(qweight, scales=scales), torch.float16)
    share = 2**-12 / (1 + 2**-12)
    assert (change.exact, change.changed) == (False, 1)
    assert change.largest == pytest.approx(share)
    assert change.mean == pytest.approx(share / 16)
    tiny = scale_change(replace(qweight, scales=torch.full((8, 2), 1e-9)), torch.float16)
    assert tiny.largest == 1.0
    huge = scale_change(replace(qweight, scales=torch.full((8, 2), 1e6)), torch.float16)
    assert huge.largest == torch.inf


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 8),
    st.sampled_from((16, 32, 64, PER_CHANNEL)),
    st.booleans(),
    st.integers(2, 8),
    st.sampled_from((16, 32, 64, PER_CHANNEL)),
    st.booleans(),
    st.integers(0, 100),
)
def test_other_fields_hold_the_same_weights_bit_for_bit_or_none_are_given(
    bits: int, size: int, symmetric: bool, to_bits: int, to_size: int, to_symmetric: bool, seed: int
) -> None:
    qweight = some(Scheme(bits, size, symmetric), seed=seed)
    wanted = Scheme(to_bits, to_size, to_symmetric)
    columns = {PER_CHANNEL: 64}
    old, new = columns.get(size, size), columns.get(to_size, to_size)
    found = in_scheme(qweight, wanted)
    fits = bits <= to_bits and old % new == 0 and (symmetric or not to_symmetric)
    assert (found is not None) == fits
    if found is not None:
        assert found[0].check("a").scheme == wanted
        assert torch.equal(found[0].dequantize(), qweight.dequantize())
        same = (bits, symmetric, old) == (to_bits, to_symmetric, new)
        assert bool(found[1]) != same


def test_zero_points_at_the_midpoint_are_left_out_and_others_never() -> None:
    qweight = some(Scheme(4, 16, symmetric=False))
    assert qweight.zeros is not None
    assert in_scheme(qweight, Scheme(4, 16)) is None
    middle = replace(qweight, zeros=torch.full_like(qweight.zeros, 8))
    found = in_scheme(middle, Scheme(4, 16))
    assert found is not None
    assert found[0].zeros is None
    assert torch.equal(found[0].dequantize(), middle.dequantize())


def test_minimums_do_not_fit_and_an_order_keeps_its_groups() -> None:
    assert in_scheme(some(Scheme(4, 16, False), minimums=True), Scheme(5, 16, False)) is None
    ordered = some(Scheme(4, 32), order=True)
    assert in_scheme(ordered, Scheme(4, 16)) is None
    found = in_scheme(ordered, Scheme(5, 32))
    assert found is not None
    assert torch.equal(found[0].dequantize(), ordered.dequantize())
