"""Scales and zero points: what would lose weights or be misread, with the number and the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from audit_cases import kinds, the_one
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints.audit import Finding, audit_qweight, audit_scales_when_served
from weightpath.quantize.int8 import quantize_int8
from weightpath.quantize.rtn import quantize_rtn
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")
N, K, GROUP = 64, 128, 32
NAME = "model.layers.0.mlp.up_proj"
FP16_NORMAL = 2.0**-14


def qweight(symmetric: bool = True, dtype: torch.dtype = torch.float16) -> QWeight:
    """A sound 4-bit linear [64, 128], 4 groups a row."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.05
    return quantize_rtn(weight, Scheme(4, GROUP, symmetric), scale_dtype=dtype)[0]


def with_scales(made: QWeight, change: Callable[[Tensor], object]) -> QWeight:
    scales = made.scales.clone()
    change(scales)
    return replace(made, scales=scales)


def set_scale(value: float, row: int = 5, group: int = 2) -> Callable[[Tensor], object]:
    def change(scales: Tensor) -> None:
        scales[row, group] = value

    return change


def audit(made: QWeight) -> tuple[Finding, ...]:
    return audit_qweight(NAME, made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_sound_linear_has_no_finding(symmetric: bool, dtype: torch.dtype) -> None:
    assert audit(qweight(symmetric, dtype)) == ()
    assert audit_qweight(NAME, qweight(symmetric, dtype), torch.rand(K) + 0.5) == ()


def test_sound_int8_and_sound_minimums_have_no_finding() -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(4)) * 0.05
    assert audit(quantize_int8(weight)[0]) == ()
    made = qweight(symmetric=False)
    assert made.zeros is not None
    minimums = -(made.scales.float() * made.zeros)
    assert audit(replace(made, zeros=None, minimums=minimums)) == ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [(float("nan"), "NaN scales"), (float("inf"), "infinite scales"),
     (float("-inf"), "infinite scales")],
)  # fmt: skip
def test_a_scale_that_is_not_finite_is_an_error_with_its_place(value: float, kind: str) -> None:
    (finding,) = audit(with_scales(qweight(), set_scale(value)))
    assert (finding.severity, finding.kind) == ("error", kind)
    assert f"1 of {N * K // GROUP}, first [5, 2]" in finding.problem


def test_several_are_counted_and_the_first_is_named() -> None:
    def change(scales: Tensor) -> None:
        scales[7, 1] = scales[9, 3] = scales[40] = float("nan")

    assert "6 of 256, first [7, 1]" in audit(with_scales(qweight(), change))[0].problem


def test_a_zero_scale_over_codes_that_are_not_zero_loses_weights() -> None:
    (finding,) = audit(with_scales(qweight(), set_scale(0.0)))
    assert (finding.severity, finding.kind) == ("warning", "zero scales")
    assert "first [5, 2]" in finding.problem


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_zero_scale_over_an_empty_group_is_a_note(symmetric: bool) -> None:
    made = with_scales(qweight(symmetric), set_scale(0.0))
    codes = made.codes.clone()
    zero = made.scheme.midpoint if made.zeros is None else made.zeros[5, 2]
    codes[5, 2 * GROUP : 3 * GROUP] = zero
    (finding,) = audit(replace(made, codes=codes))
    assert (finding.severity, finding.kind) == ("note", "zero scales of empty groups")
    codes[5, 3 * GROUP - 1] = zero ^ 1 if isinstance(zero, int) else int(zero) ^ 1
    assert kinds(audit(replace(made, codes=codes))) == [("warning", "zero scales")]


def test_a_zero_scale_beside_minimums_is_judged_by_codes_alone() -> None:
    made = qweight(symmetric=False)
    made = replace(made, zeros=None, minimums=torch.ones_like(made.scales))
    made = with_scales(made, set_scale(0.0))
    assert kinds(audit(made)) == [("warning", "zero scales")]
    codes = made.codes.clone()
    codes[5, 2 * GROUP : 3 * GROUP] = 0
    assert kinds(audit(replace(made, codes=codes))) == [("note", "zero scales of empty groups")]


def test_the_empty_group_is_found_through_a_column_order() -> None:
    made = with_scales(qweight(), set_scale(0.0))
    order = torch.arange(K, dtype=torch.int32).flip(0) // GROUP
    codes = made.codes.clone()
    codes[5, (order == 2)] = made.scheme.midpoint
    assert kinds(audit(replace(made, codes=codes, g_idx=order))) == [
        ("note", "zero scales of empty groups")
    ]
    assert kinds(audit(replace(made, g_idx=order))) == [("warning", "zero scales")]


def test_a_row_of_zeros_made_by_our_own_int8_is_only_noted() -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(5))
    weight[3] = 0
    assert kinds(audit(quantize_int8(weight)[0])) == [
        ("note", "zero scales of empty groups"), ("note", "rows of one code throughout"),
    ]  # fmt: skip


def test_subnormal_scales_are_told_with_the_least_of_them() -> None:
    def change(scales: Tensor) -> None:
        scales[1, 0], scales[2, 0], scales[3, 0] = FP16_NORMAL / 2, FP16_NORMAL / 64, FP16_NORMAL

    (finding,) = audit(with_scales(qweight(), change))
    assert (finding.severity, finding.kind) == ("warning", "scales that are subnormal in float16")
    assert "2 of 256, first [1, 0]" in finding.problem
    assert f"{FP16_NORMAL / 64:.2g}" in finding.problem


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (torch.bfloat16, 1e-9, ["scales that become 0 in float16"]),
        (torch.float32, 1e-9, ["scales that become 0 in float16"]),
        (torch.float32, 1e-41, ["scales that become 0 in float16", "scales that become 0 in bfloat16"]),
        (torch.float32, 3e-8, ["scales that are subnormal in float16"]),
    ],
)  # fmt: skip
def test_scales_too_small_for_the_served_dtype_are_told_for_each(
    dtype: torch.dtype, value: float, expected: list[str]
) -> None:
    found = audit(with_scales(qweight(dtype=dtype), set_scale(value)))
    assert kinds(found) == [("warning", kind) for kind in expected]


def test_a_tiny_scale_over_an_empty_group_is_nothing() -> None:
    made = with_scales(qweight(dtype=torch.float32), set_scale(1e-41))
    codes = made.codes.clone()
    codes[5, 2 * GROUP : 3 * GROUP] = made.scheme.midpoint
    assert audit(replace(made, codes=codes)) == ()


def test_a_row_of_1e_9_quantized_with_bf16_scales_vanishes_in_fp16() -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(6))
    weight[2] *= 1e-9
    weight[9, :GROUP] *= 1e-12
    made = quantize_rtn(weight, Scheme(4, GROUP), scale_dtype=torch.bfloat16)[0]
    finding = the_one(audit(made), "scales that become 0 in float16")
    assert "5 of 256, first [2, 0]" in finding.problem


def test_a_scale_beyond_fp16_is_a_warning() -> None:
    (finding,) = audit(with_scales(qweight(dtype=torch.bfloat16), set_scale(7e4)))
    assert (finding.severity, finding.kind) == ("warning", "scales beyond float16")
    assert "above 65504" in finding.problem


def test_negative_scales_name_who_writes_and_who_misreads_them() -> None:
    def flip(scales: Tensor) -> None:
        scales[::2] *= -1

    (finding,) = audit(with_scales(qweight(), flip))
    assert (finding.severity, finding.kind) == ("warning", "negative scales")
    assert "128 of 256, first [0, 0]" in finding.problem
    assert "AutoRound" in finding.problem
    assert "Marlin kernel with int8 activations" in finding.problem


@pytest.mark.parametrize(("value", "told"), [(16, "0..16"), (-1, "-1..15")])
def test_a_zero_beyond_its_bits_is_an_error(value: int, told: str) -> None:
    made = qweight(symmetric=False)
    assert made.zeros is not None
    zeros = made.zeros.clone()
    zeros[0, 0], zeros[0, 1], zeros[8, 1] = 0, 15, value
    (finding,) = audit(replace(made, zeros=zeros))
    assert (finding.severity, finding.kind) == ("error", "zeros out of range")
    assert f"1 of 256, first [8, 1], they are {told}, wanted 0..15" in finding.problem


def test_minimums_are_checked_as_scales_are() -> None:
    made = qweight(symmetric=False, dtype=torch.float32)
    minimums = torch.zeros_like(made.scales)
    minimums[4, 3], minimums[6, 1] = float("nan"), 1e5
    found = audit(replace(made, zeros=None, minimums=minimums))
    assert kinds(found) == [
        ("error", "minimums that are NaN or Inf"), ("warning", "minimums beyond float16"),
    ]  # fmt: skip
    assert "first [4, 3]" in found[0].problem


def test_rows_of_one_code_are_noted_and_nearly_constant_rows_are_not() -> None:
    made = qweight()
    codes = made.codes.clone()
    codes[11], codes[30], codes[31] = 3, 8, 7
    codes[31, -1] = 8
    finding = the_one(audit(replace(made, codes=codes)), "rows of one code throughout")
    assert finding.severity == "note"
    assert "2 of 64, first [11, 0]" in finding.problem


def test_column_scales_of_zero_nan_or_another_length_are_told() -> None:
    scales = torch.ones(K)
    scales[3], scales[4] = 0, float("inf")
    assert kinds(audit_qweight(NAME, qweight(), scales)) == [
        ("error", "column scales that are NaN or Inf"), ("warning", "column scales of 0"),
    ]  # fmt: skip
    assert kinds(audit_qweight(NAME, qweight(), torch.ones(K - 1))) == [
        ("error", "wrong dtype or shape")
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"scales": torch.ones(N, 3)},
        {"scales": torch.ones(N)},
        {"scales": torch.ones(N, 4, dtype=torch.int32)},
        {"zeros": torch.ones(N, 3, dtype=torch.int16)},
        {"zeros": torch.ones(N, 4)},
        {"codes": torch.zeros(N, K, dtype=torch.int32)},
        {"codes": torch.zeros(0, K, dtype=torch.uint8)},
        {"codes": torch.zeros(N, K - 8, dtype=torch.uint8)},
        {"g_idx": torch.full((K,), 4, dtype=torch.int32)},
        {"g_idx": torch.full((K,), -1, dtype=torch.int32)},
        {"g_idx": torch.zeros(3, dtype=torch.int32)},
        {"g_idx": torch.zeros(K, dtype=torch.int32), "scales": torch.tensor(1.0)},
    ],
)
def test_parts_that_do_not_fit_are_one_finding_and_no_crash(change: dict[str, Tensor]) -> None:
    made = replace(qweight(symmetric=False), **change)
    (finding,) = audit(made)
    assert (finding.severity, finding.kind) == ("error", "wrong dtype or shape")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_scales_or_zeros_make_the_audit_raise_and_every_nan_is_counted(
    data: st.DataObject,
) -> None:
    bits = data.draw(st.integers(2, 8))
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    rows, groups, size = (data.draw(st.integers(1, 4)) for _ in range(3))
    value = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-30, 6e-5, -1.0])
    scales = torch.tensor(
        data.draw(st.lists(value, min_size=rows * groups, max_size=rows * groups))
    )
    zero = st.integers(-3, 300)
    zeros = torch.tensor(
        data.draw(st.lists(zero, min_size=rows * groups, max_size=rows * groups)), dtype=torch.int16
    )
    codes = torch.randint(0, 1 << bits, (rows, groups * size), dtype=torch.uint8)
    scheme = Scheme(bits, size, symmetric=False)
    shape = (rows, groups)
    made = QWeight(scheme, codes, scales.to(dtype).view(shape), zeros.view(shape))
    found = {finding.kind: finding for finding in audit(made)}
    count = int(torch.isnan(made.scales).sum())
    assert ("NaN scales" in found) == (count > 0)
    if count:
        assert f"NaN scales: {count} of {rows * groups}" in found["NaN scales"].problem
    outside = int(((zeros < 0) | (zeros > scheme.top_code)).sum())
    assert ("zeros out of range" in found) == (outside > 0)


def test_fp16_scales_served_in_bf16_are_noted_with_the_change() -> None:
    made = qweight()
    (finding,) = audit_scales_when_served(NAME, made, torch.bfloat16)
    before = made.scales.double()
    change = ((made.scales.bfloat16().double() - before).abs() / before).flatten()
    assert finding.severity == "note"
    assert float(change.max()) < 2**-8
    share = 100 * float((change > 0).double().mean())
    assert f"{share:.0f}% of them change, by {100 * float(change.max()):.2g}%" in finding.problem
    assert f"{100 * float(change.mean()):.2g}% in the mean" in finding.problem


def test_scales_kept_exactly_make_no_note() -> None:
    assert audit_scales_when_served(NAME, qweight(), torch.float16) == ()
    assert audit_scales_when_served(NAME, qweight(), torch.float32) == ()
    assert audit_scales_when_served(NAME, qweight(dtype=torch.bfloat16), torch.float32) == ()


def test_a_scale_that_overflows_when_served_is_a_warning() -> None:
    made = with_scales(qweight(dtype=torch.float32), set_scale(1e5))
    (finding,) = audit_scales_when_served(NAME, made, torch.float16)
    assert finding.severity == "warning"
    assert "1e+05, becomes infinite" in finding.problem


def test_scales_that_are_not_finite_are_left_to_the_other_audit() -> None:
    made = with_scales(qweight(), set_scale(float("nan")))
    assert audit_scales_when_served(NAME, made, torch.bfloat16) == ()
