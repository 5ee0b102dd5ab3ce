"""The oracle: its products against float64 loops, and against what plain torch loses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from weightpath.checkpoints import bitpack
from weightpath.errors import BadRequest
from weightpath.kernels import reference
from weightpath.quantize.int8 import dequantize, quantize_per_channel
from weightpath.quantize.rtn import quantize_rtn
from weightpath.scheme import Scheme


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int4_parts(
    n: int, k: int, size: int, symmetric: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """codes [N, K], packed, scales [N, nG], zeros or None."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8)
    scales = torch.rand(n, k // size, generator=generator) * 0.1 + 0.01
    zeros = torch.randint(0, 16, (n, k // size), generator=generator).to(torch.uint8)
    return codes, reference.pack_nibbles(codes), scales, None if symmetric else zeros


def int4_by_hand(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """y[m, n], one product at a time, in Python floats (float64)."""
    (m, k), (n, groups) = x.shape, scales.shape
    y = torch.zeros(m, n, dtype=torch.float64)
    for i in range(m):
        for j in range(n):
            terms = []
            for c in range(k):
                g = c * groups // k
                zero = 8 if zeros is None else int(zeros[j, g])
                terms.append(float(x[i, c]) * float(scales[j, g]) * (int(codes[j, c]) - zero))
            y[i, j] = math.fsum(terms) + (0.0 if bias is None else float(bias[j]))
    return y


# Nibbles


def test_two_codes_make_a_byte_with_the_first_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 3, 15], [0, 9, 8, 4]], dtype=torch.uint8)
    assert reference.pack_nibbles(codes).tolist() == [[0x21, 0xF3], [0x90, 0x48]]


def test_the_other_nibble_order_gives_other_codes() -> None:
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    swapped = (codes[:, 0::2] << 4) | codes[:, 1::2]
    assert not torch.equal(reference.unpack_nibbles(swapped), codes)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 5), half=st.integers(1, 33), seed=st.integers(0, 99))
def test_nibbles_come_back_and_are_the_bytes_of_the_words_on_disk(
    n: int, half: int, seed: int
) -> None:
    codes = torch.randint(0, 16, (n, 2 * half), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    packed = reference.pack_nibbles(codes)
    assert packed.shape == (n, half)
    assert torch.equal(reference.unpack_nibbles(packed), codes)
    words = bitpack.pack(codes, 4).view(-1).view(torch.uint8).view(n, -1)
    assert torch.equal(words[:, :half], packed)


@pytest.mark.parametrize("k", [1, 3, 31])
def test_an_odd_number_of_codes_cannot_be_paired(k: int) -> None:
    with pytest.raises(BadRequest, match="K is odd"):
        reference.pack_nibbles(torch.zeros(2, k, dtype=torch.uint8))


# int4


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 3),
    n=st.integers(1, 5),
    groups=st.integers(1, 3),
    half=st.integers(1, 4),
    symmetric=st.booleans(),
    biased=st.booleans(),
)
def test_int4_in_float64_is_the_formula(
    m: int, n: int, groups: int, half: int, symmetric: bool, biased: bool
) -> None:
    codes, packed, scales, zeros = int4_parts(n, 2 * half * groups, 2 * half, symmetric, seed=n)
    x = random(m, codes.shape[1], seed=m).double()
    bias = random(n, seed=7) if biased else None
    y = reference.int4_linear(x, packed, scales, zeros, bias)
    assert y.dtype == torch.float64
    torch.testing.assert_close(
        y, int4_by_hand(x, codes, scales, zeros, bias), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_dequantized_weight_is_that_of_the_qweight(symmetric: bool) -> None:
    qweight, _ = quantize_rtn(random(6, 64), Scheme(4, 16, symmetric=symmetric))
    packed = reference.pack_nibbles(qweight.codes)
    zeros = qweight.zeros_as_codes("a")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = reference.dequantize_int4(packed, qweight.scales, zeros, dtype)
        assert torch.equal(weight, qweight.dequantize(dtype))


def test_zeros_packed_in_the_wrong_group_give_another_product() -> None:
    codes, packed, scales, zeros = int4_parts(3, 32, 8, symmetric=False)
    assert zeros is not None
    x = random(2, 32).double()
    right = int4_by_hand(x, codes, scales, zeros, None)
    wrong = reference.int4_linear(x, packed, scales, zeros.flip(1), None)
    assert not torch.allclose(right, wrong, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 576, 192), (8, 64, 64), (5, 1536, 96)])
def test_int4_loses_no_more_than_plain_torch_on_the_same_weights(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    x = random(m, k, seed=m).to(dtype)
    qweight, _ = quantize_rtn(random(n, k, seed=n) * 0.05, Scheme(4, 32))
    exact = x.double() @ qweight.dequantize(torch.float64).T
    plain = linear(x, qweight.dequantize(dtype)).double()
    y = reference.int4_linear(
        x, reference.pack_nibbles(qweight.codes), qweight.scales, None, None
    ).double()
    assert float((y - exact).norm()) <= float((plain - exact).norm())


# int8


@settings(deadline=None, max_examples=25)
@given(m=st.integers(1, 4), n=st.integers(1, 5), k=st.integers(1, 12), biased=st.booleans())
def test_int8_in_float64_is_the_formula(m: int, n: int, k: int, biased: bool) -> None:
    codes, scale = quantize_per_channel(random(n, k, seed=k))
    x, bias = random(m, k, seed=m).double(), random(n, seed=3) if biased else None
    wanted = [
        [
            float(scale[j]) * math.fsum(float(x[i, c]) * int(codes[j, c]) for c in range(k))
            + (0.0 if bias is None else float(bias[j]))
            for j in range(n)
        ]
        for i in range(m)
    ]
    y = reference.int8_linear(x, codes, scale, bias, torch.float64)
    torch.testing.assert_close(y, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 576, 192), (16, 64, 64), (8, 1536, 96)])
def test_int8_with_fp32_out_loses_less_than_plain_torch_on_the_same_weights(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    x = random(m, k, seed=m).to(dtype)
    codes, scale = quantize_per_channel(random(n, k, seed=n) * 0.05)
    exact = x.double() @ (codes.double() * scale.double()[:, None]).T
    plain = float((linear(x, dequantize(codes, scale, dtype)).double() - exact).norm())
    wide = reference.int8_linear(x, codes, scale, None, torch.float32)
    assert float((wide.double() - exact).norm()) < 0.85 * plain
    # In bf16 the product is rounded before the scale and again after it, in place of each weight:
    # up to 1.13 times plain torch's error was seen.
    narrow = reference.int8_linear(x, codes, scale, None, dtype)
    assert float((narrow.double() - exact).norm()) < 1.2 * plain


@pytest.mark.parametrize("autocast", [False, True])
def test_large_fp16_activations_do_not_overflow_before_the_scale(autocast: bool) -> None:
    weight = torch.full((2, 64), 1e-3)
    weight[1] = -weight[1]
    codes, scale = quantize_per_channel(weight)
    x = torch.full((1, 64), 6e4, dtype=torch.float16)  # x times the codes is 4.9e8
    plain = linear(x, dequantize(codes, scale, torch.float16))
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        y = reference.int8_linear(x, codes, scale, None, torch.float16)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), torch.tensor([[3840.0, -3840.0]]), rtol=2e-3, atol=0)
    torch.testing.assert_close(y.float(), plain.float(), rtol=4e-3, atol=0)


def test_activations_of_7e4_are_right_in_bf16_and_visibly_infinite_in_fp16() -> None:
    codes, scale = quantize_per_channel(torch.full((2, 64), 1e-3))
    x = torch.full((1, 64), 7e4)
    y = reference.int8_linear(x.bfloat16(), codes, scale, None, torch.bfloat16)
    torch.testing.assert_close(y.float(), torch.full((1, 2), 4480.0), rtol=1e-2, atol=0)
    lost = reference.int8_linear(x.half(), codes, scale, None, torch.float16)
    assert not bool(torch.isfinite(lost).any())  # 7e4 is beyond fp16 before any product


def test_a_zero_row_of_int8_gives_the_bias_alone() -> None:
    weight = random(3, 16)
    weight[1] = 0
    codes, scale = quantize_per_channel(weight)
    y = reference.int8_linear(
        random(4, 16), codes, scale, torch.tensor([1.0, 2.0, 3.0]), torch.float32
    )
    assert torch.equal(y[:, 1], torch.full((4,), 2.0))


# Activations


def by_formula(row: list[float]) -> list[float]:
    scale = torch.tensor(max(abs(value) for value in row)) / 127
    if scale == 0:
        return [0.0] * len(row)
    return [float(torch.tensor(float(round(float(torch.tensor(v) / scale)))) * scale) for v in row]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=4, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_activations_are_rounded_to_127_steps_of_their_row(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    got = reference.quantize_activations(x)
    assert got.tolist() == [by_formula(row) for row in x.tolist()]
    scale = x.abs().amax(1, keepdim=True) / 127
    assert bool(((got - x).abs() <= 0.5001 * scale).all())


def test_each_row_of_activations_has_its_own_scale() -> None:
    x = random(2, 3, 8)
    x[1, 2] *= 1000
    x[0, 0] = 0
    got = reference.quantize_activations(x)
    assert torch.equal(got[0, 1:], reference.quantize_activations(x[0, 1:]))
    assert not got[0, 0].any()
    assert bool(torch.isfinite(got).all())


@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-45, 3e38])
def test_activations_near_the_ends_of_fp32_stay_finite(size: float) -> None:
    got = reference.quantize_activations(torch.tensor([[size, -size, size / 3, 0.0]]))
    assert bool(torch.isfinite(got).all())
    assert bool((got.abs() <= size * 1.01).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_activations_keep_their_dtype_and_largest_value(dtype: torch.dtype) -> None:
    x = (random(3, 32) * 1000).to(dtype)
    got = reference.quantize_activations(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.abs().amax(1), x.abs().amax(1), rtol=1e-2, atol=0)


def test_8_bit_activations_are_those_rounded_values_times_the_weight() -> None:
    _, packed, scales, zeros = int4_parts(5, 32, 16, symmetric=False)
    x = random(4, 32)
    eight = reference.int4_linear(x, packed, scales, zeros, None, activation_bits=8)
    rounded = reference.int4_linear(
        reference.quantize_activations(x), packed, scales, zeros, None, activation_bits=16
    )
    sixteen = reference.int4_linear(x, packed, scales, zeros, None)
    assert torch.equal(eight, rounded)
    assert not torch.equal(eight, sixteen)


# Shapes and strides


@pytest.mark.parametrize("lead", [(), (1,), (0,), (0, 3), (2, 0, 3), (2, 3)])
def test_any_leading_shape_is_kept_and_no_rows_give_no_rows(lead: tuple[int, ...]) -> None:
    _, packed, scales, zeros = int4_parts(5, 32, 16, symmetric=False)
    codes, scale = quantize_per_channel(random(5, 32))
    x, bias = random(*lead, 32), random(5)
    for activation_bits in (8, 16):
        y = reference.int4_linear(x, packed, scales, zeros, bias, activation_bits)
        assert y.shape == (*lead, 5)
    assert reference.int8_linear(x, codes, scale, bias, torch.bfloat16).shape == (*lead, 5)


def test_strided_inputs_give_what_contiguous_ones_give_and_are_not_written_to() -> None:
    codes, packed, scales, zeros = int4_parts(6, 32, 8, symmetric=False)
    assert zeros is not None
    eight, scale = quantize_per_channel(random(6, 32))
    x, bias = random(32, 4).t(), random(6)
    strided = [packed.t().contiguous().t(), scales.t().contiguous().t(), zeros.t().contiguous().t()]
    copies = [value.clone() for value in (x, *strided, eight)]
    want = reference.int4_linear(x.contiguous(), packed, scales, zeros, bias)
    torch.testing.assert_close(
        reference.int4_linear(x, strided[0], strided[1], strided[2], bias), want
    )
    torch.testing.assert_close(
        reference.int8_linear(x, eight.t().contiguous().t(), scale, bias, torch.float32),
        reference.int8_linear(x.contiguous(), eight, scale, bias, torch.float32),
    )
    for value, copy in zip((x, *strided, eight), copies, strict=True):
        assert torch.equal(value, copy)
    assert torch.equal(reference.unpack_nibbles(strided[0]), codes)


def test_a_scale_a_group_keeps_small_groups_beside_an_outlier() -> None:
    x = torch.full((1, 8), 0.01)
    x[0, 0] = 100.0
    whole = reference.quantize_activations(x)
    apart = reference.quantize_activations(x, groups=2)
    assert torch.equal(whole[0, 4:], torch.zeros(4))
    torch.testing.assert_close(apart[0, 4:], x[0, 4:])
    assert torch.equal(apart[0, :4], whole[0, :4])
