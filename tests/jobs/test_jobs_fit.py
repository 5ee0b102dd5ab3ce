"""A linear fitted to another scheme keeps its values bit for bit where its fields allow it; where
not, the change is measured, the smaller one is taken, and the reason is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.errors import BadTensor
from weightpath.jobs.fit import change, fit
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, PER_CHANNEL, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def made(
    scheme: Scheme, n: int = 8, k: int = 64, dtype: torch.dtype = F16, seed: int = 0
) -> QWeight:
    """Random codes, scales of some size and either sign, zeros of the whole range."""
    draw = np.random.default_rng(seed)
    groups = scheme.groups(k)
    scales = draw.uniform(0.001, 0.1, (n, groups)) * draw.choice([-1, 1], (n, groups))
    zeros = draw.integers(0, scheme.top_code + 1, (n, groups), np.int16)
    return QWeight(
        scheme,
        torch.from_numpy(draw.integers(0, scheme.top_code + 1, (n, k), np.uint8)),
        torch.from_numpy(scales).to(dtype),
        None if scheme.symmetric else torch.from_numpy(zeros),
    )


def by_hand(qweight: QWeight) -> np.ndarray:
    """scale * (code - zero), or scale * code + minimum, column by column, in float64."""
    n, k = qweight.codes.shape
    weight, group = np.empty((n, k)), qweight.group_of_column().numpy()
    scales = qweight.scales.double().numpy()
    codes = qweight.codes.double().numpy()
    for column in range(k):
        step = scales[:, group[column]]
        if qweight.minimums is not None:
            offset = qweight.minimums.double().numpy()[:, group[column]]
            weight[:, column] = step * codes[:, column] + offset
        elif qweight.zeros is not None:
            zero = qweight.zeros.numpy()[:, group[column]]
            weight[:, column] = step * (codes[:, column] - zero)
        else:
            weight[:, column] = step * (codes[:, column] - 2 ** (qweight.scheme.bits - 1))
    return weight


def moved(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    away = np.abs(first - second)
    return float(away.max()), float(away.mean())


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(2, 8), more=st.integers(0, 6), symmetric=st.booleans(),
    size=st.sampled_from([16, 32, 64, PER_CHANNEL]), cut=st.sampled_from([1, 2, 4]),
    add_zeros=st.booleans(), n=st.integers(1, 9), seed=st.integers(0, 9),
)  # fmt: skip
def test_more_bits_smaller_groups_and_zero_points_change_no_value(
    bits: int, more: int, symmetric: bool, size: int, cut: int, add_zeros: bool, n: int, seed: int
) -> None:
    qweight = made(Scheme(bits, size, symmetric), n, seed=seed)
    whole = 64 if size == PER_CHANNEL else size
    smaller = size if cut == 1 else whole // cut
    wanted = Scheme(min(bits + more, 8), smaller, symmetric and not add_zeros)
    fitted = fit("w", ReadLinear(qweight), wanted, F16)
    assert fitted.exact
    assert fitted.qweight.check("w").scheme == wanted
    assert np.array_equal(by_hand(fitted.qweight), by_hand(qweight))
    assert (fitted.steps == ()) == (wanted == qweight.scheme)


def test_sabotage_symmetric_codes_widened_without_moving_them_are_other_weights() -> None:
    qweight = made(Scheme(3, 32))
    fitted = fit("w", ReadLinear(qweight), Scheme(4, 32), F16)
    assert torch.equal(fitted.qweight.codes, qweight.codes + 4)
    wrong = replace(fitted.qweight, codes=qweight.codes)
    assert not np.array_equal(by_hand(wrong), by_hand(qweight))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Scheme(4, 32), Scheme(3, 32)),  # fewer bits
        (Scheme(4, 32), Scheme(4, 64)),  # larger groups
        (Scheme(4, 32), Scheme(4)),
        (Scheme(4, 32, symmetric=False), Scheme(4, 32)),  # zeros that are not all the midpoint
        (Scheme(8, 32, symmetric=False), INT8),
    ],
)
def test_what_the_fields_do_not_hold_is_quantized_again_with_its_change_and_the_reason(
    old: Scheme, new: Scheme
) -> None:
    qweight = made(old)
    fitted = fit("w", ReadLinear(qweight), new, F32 if new == INT8 else F16, why="because")
    assert fitted.qweight.scheme == new
    name = "int8" if new == INT8 else new.name
    assert fitted.steps == (f"quantized again as {name}: because",)
    largest, mean = moved(by_hand(fitted.qweight), by_hand(qweight))
    assert (fitted.largest_change, fitted.mean_change) == pytest.approx((largest, mean), rel=1e-3)
    assert 0 < mean < np.abs(by_hand(qweight)).mean() / 2


def test_zero_points_that_are_all_the_midpoint_can_be_left_out() -> None:
    qweight = made(Scheme(4, 32, symmetric=False))
    qweight = replace(qweight, zeros=torch.full_like(qweight.scales, 8, dtype=torch.int16))
    fitted = fit("w", ReadLinear(qweight), Scheme(4, 32), F16)
    assert fitted.exact
    assert fitted.qweight.zeros is None
    assert np.array_equal(by_hand(fitted.qweight), by_hand(qweight))


def test_a_column_order_is_kept_only_where_asked_and_never_dropped() -> None:
    order = torch.arange(64).flip(0) % 2
    qweight = replace(made(Scheme(4, 32)), g_idx=order.to(torch.int32))
    kept = fit("w", ReadLinear(qweight), Scheme(4, 32), F16, keep_order=True)
    assert kept.qweight.g_idx is not None
    assert np.array_equal(by_hand(kept.qweight), by_hand(qweight))
    again = fit("w", ReadLinear(qweight), Scheme(4, 32), F16, why="no place")
    assert again.qweight.g_idx is None
    assert not again.exact
    assert moved(by_hand(again.qweight), by_hand(qweight))[0] == pytest.approx(again.largest_change)
    wider = fit("w", ReadLinear(qweight), Scheme(8, 32), F16, keep_order=True)
    assert wider.exact
    assert np.array_equal(by_hand(wider.qweight), by_hand(qweight))
    smaller = fit("w", ReadLinear(qweight), Scheme(4, 16), F16, keep_order=True)
    assert "quantized again" in smaller.steps[0]  # groups of an order cannot be cut


def with_minimums(zeros: np.ndarray, scale: float = 0.0625) -> QWeight:
    """4 bits, groups of 32, minimums of -(scale * zero) for zeros [8, 2] that may be fractions."""
    qweight = made(Scheme(4, 32, symmetric=False))
    scales = torch.full((8, 2), scale, dtype=F32)
    minimums = -scales * torch.from_numpy(zeros).float()
    return replace(qweight, scales=scales, zeros=None, minimums=minimums)


def test_minimums_that_are_whole_zero_points_become_these() -> None:
    whole = np.random.default_rng(1).integers(0, 16, (8, 2))
    qweight = with_minimums(whole)
    fitted = fit("w", ReadLinear(qweight), Scheme(4, 32, symmetric=False), F16)
    assert fitted.exact
    assert fitted.qweight.zeros is not None
    assert np.array_equal(fitted.qweight.zeros.numpy(), whole)
    assert np.array_equal(by_hand(fitted.qweight), by_hand(qweight))


@pytest.mark.parametrize("off", [0.02, 0.5])
def test_other_minimums_take_the_way_that_changes_less_and_measure_it(off: float) -> None:
    near = np.random.default_rng(1).integers(1, 15, (8, 2)) + off
    qweight = with_minimums(near)
    scheme = Scheme(4, 32, symmetric=False)
    fitted = fit("w", ReadLinear(qweight), scheme, F16)
    largest, mean = moved(by_hand(fitted.qweight), by_hand(qweight))
    assert (fitted.largest_change, fitted.mean_change) == pytest.approx((largest, mean), rel=1e-3)
    assert mean <= 0.0625 * off * 1.001
    if off < 0.1:
        assert fitted.steps == ("minimums rounded to whole zero points",)
        assert torch.equal(fitted.qweight.codes, qweight.codes)


def test_minimums_outside_the_codes_range_are_not_clamped_in_silence() -> None:
    qweight = with_minimums(np.full((8, 2), 40.0))  # every weight is far below zero
    fitted = fit("w", ReadLinear(qweight), Scheme(4, 32, symmetric=False), F16)
    assert not fitted.exact
    largest, _ = moved(by_hand(fitted.qweight), by_hand(qweight))
    assert fitted.largest_change == pytest.approx(largest, rel=1e-3)


def test_a_group_of_scale_zero_and_a_minimum_keeps_its_constant_or_tells_the_loss() -> None:
    qweight = with_minimums(np.zeros((8, 2)))
    assert qweight.minimums is not None
    qweight.scales[3, 1], qweight.minimums[3, 1] = 0.0, -0.75
    fitted = fit("w", ReadLinear(qweight), Scheme(4, 32, symmetric=False), F16)
    largest, mean = moved(by_hand(fitted.qweight), by_hand(qweight))
    assert (fitted.largest_change, fitted.mean_change) == pytest.approx((largest, mean), rel=1e-3)


def test_scales_of_another_dtype_are_exact_where_it_holds_them_and_measured_where_not() -> None:
    halves = made(Scheme(4, 32), dtype=F16)
    for dtype in (F32, F16):
        fitted = fit("w", ReadLinear(halves), Scheme(4, 32), dtype)
        assert (fitted.exact, fitted.steps) == (True, ())
        assert fitted.qweight.scales.dtype == dtype
    back = fit("w", ReadLinear(replace(halves, scales=halves.scales.float())), Scheme(4, 32), F16)
    assert back.exact
    rounded = fit("w", ReadLinear(halves), Scheme(4, 32), BF16)
    assert rounded.steps == ("scales rounded to bfloat16",)
    largest, mean = moved(by_hand(rounded.qweight), by_hand(halves))
    assert (rounded.largest_change, rounded.mean_change) == pytest.approx((largest, mean), rel=1e-4)
    assert largest > 0


def test_scales_that_fp16_turns_to_nothing_are_told_and_those_beyond_it_are_refused() -> None:
    qweight = made(Scheme(4, 32), dtype=F32)
    qweight.scales[2, 1] = 1e-9
    fitted = fit("w", ReadLinear(qweight), Scheme(4, 32), F16)
    assert float(fitted.qweight.scales[2, 1]) == 0
    assert fitted.largest_change > 0
    qweight.scales[2, 1] = 7e4
    with pytest.raises(BadTensor, match=r"tensor w: has scales up to 7e\+04, .*ends at 65504"):
        fit("w", ReadLinear(qweight), Scheme(4, 32), F16)


def test_column_scales_and_floats_are_quantized_with_all_that_belongs_to_them() -> None:
    qweight = made(Scheme(4, 32))
    factors = torch.linspace(0.5, 2, 64)
    fitted = fit("w", ReadLinear(qweight, column_scales=factors), Scheme(4, 32), F16)
    wanted = by_hand(qweight) * factors.double().numpy()
    assert moved(by_hand(fitted.qweight), wanted) == pytest.approx(
        (fitted.largest_change, fitted.mean_change), rel=1e-3
    )
    assert not fitted.exact
    floats = torch.from_numpy(wanted).float()
    fitted = fit("w", ReadLinear(None, floats=floats), INT8, F32, why="floats")
    assert fitted.steps == ("quantized again as int8: floats",)
    assert fitted.largest_change <= float(floats.abs().max()) / 127 / 2 * 1.01


def test_floats_that_are_not_finite_are_refused() -> None:
    floats = torch.ones(4, 32)
    floats[1, 2] = float("nan")
    with pytest.raises(BadTensor, match="w"):
        fit("w", ReadLinear(None, floats=floats), Scheme(4, 32), F16)


def test_the_change_of_many_rows_is_that_of_all_of_them() -> None:
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(3000, 1024, generator=draw)  # more than one block of rows
    after = before.clone()
    after[2999, 5] += 0.25
    largest, mean = change(after, before)
    assert largest == 0.25
    assert mean == pytest.approx(0.25 / before.numel())
    assert change(after, lambda: before) == (largest, mean)
    assert change(before, before) == (0.0, 0.0)
