"""Round-to-nearest in groups: the range, the search, the stored scales, the refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.errors import BadRequest, BadTensor
from weightpath.quantize.rtn import quantize_rtn
from weightpath.quantize.stats import BLOCK_WEIGHTS, QuantizeStats
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOTH = (Scheme(4, 32), Scheme(4, 32, symmetric=False))


def random(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def heavy(n: int, k: int, seed: int = 0) -> Tensor:
    """Weights with a few outliers a group, where clipping matters."""
    weight = random(n, k, seed)
    return weight * (1 + 6 * (random(n, k, seed + 1) > 2.3))


def importance(groups: torch.Tensor) -> torch.Tensor:
    """What the search weighs an error by: |w| + rms of the group, which is the last dimension."""
    return groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()


def searched_errors(qweight: QWeight, weight: torch.Tensor) -> torch.Tensor:
    """Float64 [N, nG]: the error that the search makes small."""
    groups = weight.double().view(*qweight.scales.shape, -1)
    missed = qweight.dequantize().double().view_as(groups) - groups
    return (missed.square() * importance(groups)).sum(-1)


def group_errors(qweight: QWeight, weight: Tensor) -> Tensor:
    """Squared error of every group, float64 [N, nG], from what is stored."""
    error = (qweight.dequantize().double() - weight.double()).square()
    return error.view(*qweight.scales.shape, -1).sum(2)


# The range


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scheme", BOTH)
def test_a_group_all_of_one_sign_keeps_zero_in_its_range(
    scheme: Scheme, sign: float, search: bool
) -> None:
    weight = sign * torch.linspace(1.0, 1.1, 32)[None]  # a range without zero ends at 0.1 here
    qweight, _ = quantize_rtn(weight, scheme, torch.float32, search)
    restored = qweight.dequantize()
    assert float((restored - weight).abs().max()) < 0.08
    if qweight.zeros is not None:
        assert 0 <= int(qweight.zeros.min()) <= int(qweight.zeros.max()) <= scheme.top_code


@pytest.mark.parametrize("scheme", BOTH)
def test_a_weight_of_zero_stays_exactly_zero(scheme: Scheme) -> None:
    weight = heavy(16, 64) + 3.0
    weight[:, ::5] = 0
    qweight, _ = quantize_rtn(weight, scheme)
    assert not qweight.dequantize()[:, ::5].any()


@settings(deadline=None, max_examples=40)
@given(
    bits=st.integers(2, 8),
    size=st.integers(1, 40),
    groups=st.integers(1, 4),
    rows=st.integers(1, 5),
    symmetric=st.booleans(),
    shift=st.sampled_from((0.0, 0.7, -3.0)),
)
def test_without_search_no_weight_is_further_than_a_step_from_its_stored_value(
    bits: int, size: int, groups: int, rows: int, symmetric: bool, shift: float
) -> None:
    scheme = Scheme(bits, size, symmetric=symmetric)
    weight = random(rows, groups * size, seed=bits * size) + shift
    qweight, _ = quantize_rtn(weight, scheme, torch.float32, search=False)
    steps = (qweight.dequantize() - weight).abs().view(rows, groups, size) / qweight.scales[
        ..., None
    ]
    # Half a step of rounding; an asymmetric zero is rounded too, which moves an end by half a step.
    assert float(steps.max()) <= (0.5 if symmetric else 1.0) * (1 + 1e-4)


# The search


@settings(deadline=None, max_examples=60)
@given(
    bits=st.integers(2, 8),
    size=st.sampled_from((1, 2, 7, 32)),
    symmetric=st.booleans(),
    dtype=st.sampled_from(SCALE_DTYPES),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 1000),
)
def test_the_search_is_never_worse_than_min_max_in_any_group(
    bits: int, size: int, symmetric: bool, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    scheme = Scheme(bits, size, symmetric=symmetric)
    weight = heavy(4, 4 * size, seed) * 2.0**exponent
    found = searched_errors(quantize_rtn(weight, scheme, dtype)[0], weight)
    plain = searched_errors(quantize_rtn(weight, scheme, dtype, search=False)[0], weight)
    # Candidates are compared in fp32 sums, so allow for their rounding.
    slack = 1e-6 * searched_errors(quantize_rtn(weight * 0, scheme, dtype)[0], weight) + 1e-300
    assert bool((found <= plain * (1 + 1e-5) + slack * 1e-6).all())


@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("w4g32", 0.85),
        ("w4g128", 0.87),
        ("w4g32-asym", 0.97),
        ("w4g128-asym", 0.96),
        ("w2g32", 0.7),
    ],
)
def test_the_search_pays_on_gaussian_weights(name: str, at_most: float) -> None:
    scheme, weight = Scheme.parse(name), random(64, 256)
    found = group_errors(quantize_rtn(weight, scheme)[0], weight).sum()
    plain = group_errors(quantize_rtn(weight, scheme, search=False)[0], weight).sum()
    assert float(found / plain) < at_most


@pytest.mark.parametrize("name", ["w4g32", "w3g32", "w2g16-asym", "w4g32-asym"])
def test_the_search_comes_close_to_every_scale_and_zero_tried_in_turn(name: str) -> None:
    scheme = Scheme.parse(name)
    weight = heavy(24, scheme.group_size).double().float()
    found = searched_errors(quantize_rtn(weight, scheme, torch.float32)[0], weight)[:, 0]
    exact = weight.double()
    low, high = exact.amin(1).clamp_max(0), exact.amax(1).clamp_min(0)
    whole = torch.maximum(-low, high) * 2 if scheme.symmetric else high - low
    best = torch.full((24,), math.inf, dtype=torch.float64)
    for share in torch.linspace(0.2, 1.15, 250, dtype=torch.float64):
        scale = (whole * share / scheme.top_code)[:, None]
        for zero in [scheme.midpoint] if scheme.symmetric else range(scheme.top_code + 1):
            codes = (torch.round(exact / scale) + zero).clamp(0, scheme.top_code)
            missed = ((codes - zero) * scale - exact).square()
            best = torch.minimum(best, (missed * importance(exact)).sum(1))
    assert float(found.sum() / best.sum()) < 1.08


# The stored scale


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_codes_are_the_nearest_for_the_scale_as_it_is_stored(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    weight = heavy(8, 128)
    qweight, _ = quantize_rtn(weight, scheme, dtype)
    assert qweight.scales.dtype == dtype
    zeros = torch.full_like(qweight.scales, 8.0) if qweight.zeros is None else qweight.zeros
    steps = weight.view(8, 4, 32) / qweight.scales.float()[..., None]
    nearest = (torch.round(steps) + zeros.float()[..., None]).clamp(0, 15)
    assert torch.equal(qweight.codes.float().view(8, 4, 32), nearest)


@pytest.mark.parametrize("exponent", [-70, -40, 40, 70, 100])
@pytest.mark.parametrize("scheme", BOTH)
def test_weights_times_a_power_of_two_get_the_same_codes(scheme: Scheme, exponent: int) -> None:
    weight = heavy(6, 64)
    one, stats = quantize_rtn(weight, scheme)
    other, scaled = quantize_rtn(weight * 2.0**exponent, scheme)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales.float() * 2.0**exponent, other.scales.float())
    assert scaled.signal_to_noise_db == pytest.approx(stats.signal_to_noise_db, abs=1e-6)


@pytest.mark.parametrize("size", [1e-12, 1e-20, 1e-40, 1e-45])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("scheme", BOTH)
def test_a_tiny_group_has_a_normal_scale_and_finite_weights_and_is_counted_if_lost(
    scheme: Scheme, dtype: torch.dtype, size: float
) -> None:
    weight = torch.cat((random(2, 32) * size, random(2, 32)), dim=1)
    qweight, stats = quantize_rtn(weight, scheme, dtype)
    qweight.check("a")
    smallest = torch.finfo(dtype).tiny
    assert float(qweight.scales.float().min()) >= smallest
    restored = qweight.dequantize()
    assert bool(torch.isfinite(restored).all())
    small = weight[:, :32]
    if float(small.abs().max()) / 7.5 < smallest:
        assert stats.raised_scales == 2
        assert bool((restored[:, :32].abs() <= 2 * smallest).all())
    else:
        assert stats.raised_scales == 0
        assert float((restored[:, :32] / size - small / size).norm()) < 0.2 * float(
            (small / size).norm()
        )
    assert stats.zero_groups == 0


def test_an_fp16_scale_is_never_subnormal() -> None:
    tiny = torch.finfo(torch.float16).tiny
    weight = random(4, 64)[:, :32].repeat(1, 2) * 3e-5  # scale about 9e-6, subnormal in fp16
    for scheme in BOTH:
        qweight, stats = quantize_rtn(weight, scheme, torch.float16)
        assert float(qweight.scales.min()) == tiny
        assert stats.raised_scales == stats.groups == 8
        plain, _ = quantize_rtn(weight, scheme, torch.bfloat16)
        assert float(plain.scales.max()) < tiny


@pytest.mark.parametrize("scheme", BOTH)
def test_a_scale_beyond_fp16_is_lowered_to_its_largest_number_and_counted(scheme: Scheme) -> None:
    weight = torch.cat((random(2, 32).clamp(-1, 1) * 1e7, random(2, 32)), dim=1)
    qweight, stats = quantize_rtn(weight, scheme, torch.float16)
    assert stats.lowered_scales == 2
    assert qweight.scales[:, 0].tolist() == [65504.0, 65504.0]
    restored = qweight.dequantize()
    assert bool(torch.isfinite(restored).all())
    reach = 65504 * scheme.top_code
    assert bool((restored[:, :32].abs() <= reach).all())
    assert bool((restored[:, :32] * weight[:, :32] >= 0).all())
    assert quantize_rtn(weight, scheme, torch.bfloat16)[1].lowered_scales == 0


@pytest.mark.parametrize("size", [1e19, 1e25, 1e36])
@pytest.mark.parametrize("scheme", BOTH)
def test_weights_whose_squares_overflow_fp32_are_quantized_as_well_as_any(
    scheme: Scheme, size: float
) -> None:
    weight = random(4, 64) * size
    qweight, stats = quantize_rtn(weight, scheme)
    relative = (qweight.dequantize().double() - weight.double()).norm() / weight.double().norm()
    assert float(relative) < 0.12
    assert 18 < stats.signal_to_noise_db < 25


@pytest.mark.parametrize("scheme", BOTH)
def test_a_group_of_zeros_is_exact_and_counted(scheme: Scheme) -> None:
    weight = random(3, 64)
    weight[1, :32] = 0
    weight[2] = -0.0
    qweight, stats = quantize_rtn(weight, scheme)
    assert not qweight.dequantize()[1, :32].any()
    assert not qweight.dequantize()[2].any()
    assert stats.zero_groups == 3
    assert stats.raised_scales == 0
    assert qweight.scales[2].tolist() == [1.0, 1.0]
    everything, none = quantize_rtn(torch.zeros(2, 32), scheme)
    assert not everything.dequantize().any()
    assert none.squared_error == 0
    assert none.signal_to_noise_db == math.inf


# Statistics


@pytest.mark.parametrize(
    "scheme", [*BOTH, Scheme(2, 16), Scheme(8, 64, symmetric=False), Scheme(4)]
)
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_the_squared_error_is_that_of_the_stored_form(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = heavy(5, 128) * 0.02
    qweight, stats = quantize_rtn(weight, scheme, dtype)
    assert stats.squared_error == pytest.approx(
        float(group_errors(qweight, weight).sum()), rel=1e-9, abs=1e-30
    )
    assert stats.squared_weight == pytest.approx(float(weight.double().square().sum()), rel=1e-12)
    assert stats.weights == weight.numel()
    assert stats.groups == qweight.scales.numel()


@pytest.mark.parametrize("scheme", BOTH)
def test_a_weight_cut_into_rows_gives_the_same_codes_and_statistics_that_add_up(
    scheme: Scheme,
) -> None:
    columns = BLOCK_WEIGHTS // 4  # so that blocks end within the weight
    weight = heavy(9, columns)
    whole, stats = quantize_rtn(weight, scheme)
    parts = [quantize_rtn(weight[row : row + 1], scheme) for row in range(9)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part, _ in parts]))
    assert torch.equal(whole.scales, torch.cat([part.scales for part, _ in parts]))
    total = sum((part for _, part in parts), QuantizeStats())
    assert replace(total, squared_error=0, squared_weight=0) == replace(
        stats, squared_error=0, squared_weight=0
    )
    assert math.isclose(total.squared_error, stats.squared_error, rel_tol=1e-12)


# Shapes and inputs


@settings(deadline=None, max_examples=40)
@given(
    bits=st.integers(2, 8),
    size=st.one_of(st.just(-1), st.integers(1, 33)),
    groups=st.integers(1, 5),
    rows=st.integers(1, 6),
    symmetric=st.booleans(),
    dtype=st.sampled_from(SCALE_DTYPES),
)
def test_every_shape_gives_a_sound_qweight(
    bits: int, size: int, groups: int, rows: int, symmetric: bool, dtype: torch.dtype
) -> None:
    scheme = Scheme(bits, size, symmetric=symmetric)
    columns = groups * (7 if size == -1 else size)
    weight = heavy(rows, columns, seed=columns)
    qweight, stats = quantize_rtn(weight, scheme, dtype)
    qweight.check("a")
    assert (qweight.zeros is None) == symmetric
    if qweight.zeros is not None:
        assert qweight.zeros.dtype == torch.int16
        assert qweight.zeros_as_codes("a") is not None
    assert qweight.codes.shape == (rows, columns)
    assert stats.weights == rows * columns
    assert stats.squared_error <= stats.squared_weight


def test_a_group_that_does_not_divide_the_row_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadRequest, match=r"in_features 576 .* group size 128"):
        quantize_rtn(random(2, 576), Scheme(4, 128))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", [*BOTH, Scheme(4)])
def test_a_nan_or_infinity_is_named_by_its_place_in_the_whole_tensor(
    scheme: Scheme, value: float
) -> None:
    weight = torch.zeros(BLOCK_WEIGHTS // 512 + 9, 512)
    row = weight.shape[0] - 3
    weight[row, 4] = value
    weight[row + 1, 0] = math.nan
    with pytest.raises(BadTensor) as caught:
        quantize_rtn(weight, scheme, name="layers.7.down_proj.weight")
    assert str(caught.value).startswith(
        f"tensor layers.7.down_proj.weight: element [{row}, 4] is {value}"
    )


def test_a_float64_weight_beyond_fp32_is_refused_not_made_infinite() -> None:
    with pytest.raises(BadTensor, match=r"element \[0, 0\] is inf"):
        quantize_rtn(torch.full((2, 32), 1e300, dtype=torch.float64), BOTH[0])


@pytest.mark.parametrize("shape", [(32,), (2, 4, 32), (0, 32), (2, 0)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadTensor, match=r"w: shape"):
        quantize_rtn(torch.zeros(shape), Scheme(4), name="w")


@pytest.mark.parametrize("scheme", BOTH)
def test_the_result_does_not_depend_on_threads_strides_or_gradients(scheme: Scheme) -> None:
    weight = heavy(64, 256)
    one, stats = quantize_rtn(weight, scheme)
    torch.set_num_threads(2)
    other, again = quantize_rtn(weight, scheme)
    torch.set_num_threads(1)
    assert again == stats
    wide = torch.zeros(64, 512)
    wide[:, ::2] = weight
    for same in (other, quantize_rtn(weight.t().contiguous().t(), scheme)[0],
                 quantize_rtn(wide[:, ::2], scheme)[0],
                 quantize_rtn(torch.nn.Parameter(weight.clone()), scheme)[0]):  # fmt: skip
        assert torch.equal(one.codes, same.codes)
        assert torch.equal(one.scales, same.scales)
        assert not same.scales.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_low_precision_weight_is_quantized_as_the_floats_it_holds(dtype: torch.dtype) -> None:
    weight = heavy(8, 64).to(dtype)
    before = weight.clone()
    one, _ = quantize_rtn(weight, BOTH[1])
    other, _ = quantize_rtn(weight.float(), BOTH[1])
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)
    assert torch.equal(weight, before)


def test_weights_that_lie_on_a_grid_of_codes_come_back_exactly() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(1))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    for scheme in (Scheme(4, 32), Scheme(4, 32, symmetric=False)):
        weight = (codes - 8).float() * 0.25
        qweight, stats = quantize_rtn(weight, scheme)
        assert torch.equal(qweight.dequantize(), weight)
        assert stats.squared_error == 0
