"""int8 per output channel: scale = max|W| / 127, codes -127..127, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.errors import BadRequest, BadTensor
from weightpath.quantize.int8 import TINY, dequantize, quantize_int8, quantize_per_channel
from weightpath.quantize.stats import BLOCK_WEIGHTS, QuantizeStats
from weightpath.scheme import INT8, Scheme


def random(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def by_hand(weight: Tensor) -> tuple[list[list[int]], list[float]]:
    """The definition, element by element, in the arithmetic of fp32."""
    codes, scales = [], []
    for row in weight.float():
        largest = max(abs(float(value)) for value in row)
        scale = torch.tensor(largest) / 127
        scales.append(float(scale))
        if largest == 0:
            codes.append([0] * len(row))
            continue
        codes.append([max(-127, min(127, round(float(value / scale)))) for value in row])
    return codes, scales


@settings(deadline=None, max_examples=50)
@given(
    n=st.integers(1, 6),
    k=st.integers(1, 40),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
def test_codes_and_scales_are_the_definition(
    n: int, k: int, exponent: int, dtype: torch.dtype
) -> None:
    weight = (random(n, k, seed=n * k) * 2.0**exponent).to(dtype)
    weight = torch.where(torch.isfinite(weight), weight, torch.zeros_like(weight))
    codes, scale = quantize_per_channel(weight)
    wanted_codes, wanted_scale = by_hand(weight)
    assert codes.tolist() == wanted_codes
    assert scale.tolist() == wanted_scale
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert scale.shape == (n,)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_minus_128_is_never_used_and_every_row_reaches_127(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows)
    codes, scale = quantize_per_channel(weight)
    assert int(codes.min()) >= -127
    for row in range(len(rows)):
        if weight[row].abs().max() / 127 >= TINY:
            assert int(codes[row].abs().max()) == 127
    restored = dequantize(codes, scale)
    assert bool(torch.isfinite(restored).all())
    assert bool(((restored - weight).abs() <= 0.5001 * scale[:, None]).all())


def test_a_row_of_zeros_has_scale_zero_codes_zero_and_no_nan() -> None:
    weight = torch.zeros(3, 8)
    weight[1] = torch.linspace(-1, 1, 8)
    weight[2] = -0.0
    codes, scale = quantize_per_channel(weight)
    assert scale[0] == 0
    assert scale[2] == 0
    assert not codes[0].any()
    assert not codes[2].any()
    assert torch.equal(dequantize(codes, scale)[0], torch.zeros(8))
    assert bool(torch.isfinite(dequantize(codes, scale)).all())


def test_a_row_whose_scale_would_be_subnormal_is_finite_and_counted() -> None:
    weight = torch.full((2, 4), 1e-40)
    weight[1] = 1.0
    codes, scale = quantize_per_channel(weight)
    assert float(scale[0]) == TINY
    assert bool(torch.isfinite(dequantize(codes, scale)).all())
    _, stats = quantize_int8(weight)
    assert (stats.raised_scales, stats.zero_groups, stats.groups) == (1, 0, 2)


def test_tiny_rows_keep_their_precision_as_long_as_their_scale_is_normal() -> None:
    weight = random(4, 32)
    codes, _ = quantize_per_channel(weight)
    small, scale = quantize_per_channel(weight * 2.0**-100)
    assert torch.equal(codes, small)
    assert bool((scale >= TINY).all())


def test_halves_go_to_the_even_code() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5]])  # scale 1
    assert quantize_per_channel(weight)[0].tolist() == [[127, 0, 2, -2]]


def test_the_qweight_form_holds_the_same_integers_plus_128() -> None:
    weight = random(5, 48)
    weight[3] = 0
    codes, scale = quantize_per_channel(weight)
    qweight, stats = quantize_int8(weight, name="a")
    assert qweight.scheme == INT8
    assert torch.equal(qweight.codes.int() - 128, codes.int())
    assert torch.equal(qweight.scales, scale[:, None])
    assert qweight.zeros is None
    assert torch.equal(qweight.check("a").dequantize(), dequantize(codes, scale))
    assert stats.zero_groups == 1


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e25])
def test_the_squared_error_is_that_of_the_stored_form(size: float) -> None:
    weight = random(6, 40) * size
    qweight, stats = quantize_int8(weight)
    error = float((qweight.dequantize().double() - weight.double()).square().sum())
    assert stats.squared_error == pytest.approx(error, rel=1e-9)
    assert stats.squared_weight == pytest.approx(float(weight.double().square().sum()), rel=1e-9)
    assert 38 < stats.signal_to_noise_db < 50
    assert (stats.weights, stats.groups) == (240, 6)


def test_blocks_of_rows_are_put_together_in_order() -> None:
    columns = BLOCK_WEIGHTS // 3
    weight = random(7, columns)
    codes, scale = quantize_per_channel(weight)
    qweight, stats = quantize_int8(weight)
    assert torch.equal(qweight.codes.int() - 128, codes.int())
    assert torch.equal(qweight.scales[:, 0], scale)
    parts = [quantize_int8(weight[start : start + 1])[1] for start in range(7)]
    total = sum(parts, QuantizeStats())
    assert (total.weights, total.groups) == (stats.weights, stats.groups)
    assert math.isclose(total.squared_error, stats.squared_error, rel_tol=1e-12)


def test_a_nan_far_down_is_named_by_its_place_in_the_whole_tensor() -> None:
    weight = torch.zeros(BLOCK_WEIGHTS // 512 + 20, 512)
    row = weight.shape[0] - 2
    weight[row, 7] = math.nan
    with pytest.raises(BadTensor, match=rf"tensor up\.weight: element \[{row}, 7\] is nan"):
        quantize_int8(weight, name="up.weight")


def test_a_float64_weight_beyond_fp32_is_refused_not_made_infinite() -> None:
    weight = torch.full((2, 4), 1e300, dtype=torch.float64)
    for make in (quantize_per_channel, quantize_int8):
        with pytest.raises(BadTensor, match=r"element \[0, 0\] is inf"):
            make(weight)


@pytest.mark.parametrize("scheme", [Scheme(4), Scheme(8, 16), Scheme(8, symmetric=False)])
def test_another_scheme_is_refused(scheme: Scheme) -> None:
    with pytest.raises(BadRequest, match=scheme.name):
        quantize_int8(torch.zeros(2, 32), scheme)


def test_a_view_and_a_parameter_give_the_same_codes_and_stay_untouched() -> None:
    weight = random(8, 24)
    view = weight.t().contiguous().t()
    parameter = torch.nn.Parameter(weight.clone())
    for other in (view, parameter):
        codes, scale = quantize_per_channel(other)
        assert torch.equal(codes, quantize_per_channel(weight)[0])
        assert torch.equal(scale, quantize_per_channel(weight)[1])
        assert not codes.requires_grad
        assert not scale.requires_grad
    assert torch.equal(parameter.detach(), weight)
