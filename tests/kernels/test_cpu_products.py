"""The compiled products: every instruction set gives the scalar bits, and those are right.

Right: against float64, the error is at most twice that of plain torch in the same activation
precision on the same inputs (reference with int8 activations; bf16 or fp16 products for 16 bits).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from random_qweight import a_qweight
from weightpath.kernels import cpu, reference
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

SETS = [name for name, reason in cpu.instruction_sets().items() if reason is None]
VECTOR_SETS = [name for name in SETS if name != "scalar"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.skipif(not SETS, reason="this install has no compiled kernels")
fuzz = hypothesis_settings(max_examples=120, deadline=None)


def an_input(kind: str, m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=draw)
    if kind == "outlier":
        x[:, k // 2] = 30_000.0
    elif kind == "zeros":
        x[m // 2] = 0.0
    elif kind == "subnormal":
        x *= 5e-7  # mostly subnormal in fp16
    elif kind == "large":
        x *= 1.5e4
    elif kind == "infinite":
        x[m // 2, k // 3] = 7e4  # infinity in fp16
        x[0, 0] = float("nan")
    return x.to(dtype)


KINDS = ["normal", "outlier", "zeros", "subnormal", "large", "infinite"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN where the other is NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name", VECTOR_SETS)
@fuzz
@given(
    m=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33]),
    n=st.integers(1, 100),
    groups=st.integers(1, 6),
    group_size=st.sampled_from([8, 32, 64, 128, PER_CHANNEL]),
    bits=st.sampled_from([4, 4, 8]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    bias=st.sampled_from([None, *DTYPES]),
    activation_bits=st.sampled_from([8, 16]),
    per_group=st.booleans(),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1 << 30),
)
def test_every_instruction_set_gives_the_scalar_bits(
    name: str,
    m: int,
    n: int,
    groups: int,
    group_size: int,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    out: torch.dtype,
    bias: torch.dtype | None,
    activation_bits: int,
    per_group: bool,
    kind: str,
    seed: int,
) -> None:
    if bits == 8:
        group_size, symmetric = PER_CHANNEL, True
    k = 37 * groups if group_size == PER_CHANNEL else groups * group_size
    weight = cpu.pack(
        a_qweight(n, k, group_size, bits=bits, symmetric=symmetric, dtype=scale_dtype, seed=seed)
    )
    x = an_input(kind, m, k, dtype, seed)
    add = None if bias is None else torch.randn(n).to(bias)
    results = [
        cpu.linear(
            x, weight, add, activation_bits=activation_bits, per_group=per_group, out=out,
            instruction_set=one,
        )
        for one in ("scalar", name)
    ]  # fmt: skip
    assert results[0].dtype == out
    assert results[0].shape == (m, n)
    assert same_bits(results[0], results[1])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("m", [64, 127])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_many_rows_are_the_rows_one_by_one(name: str, m: int, activation_bits: int) -> None:
    weight = cpu.pack(a_qweight(70, 512, 128, symmetric=False))
    x = an_input("normal", m, 512, torch.bfloat16)
    whole = cpu.linear(x, weight, activation_bits=activation_bits, instruction_set=name)
    rows = [
        cpu.linear(row, weight, activation_bits=activation_bits, instruction_set=name)
        for row in x.split(1)
    ]
    assert torch.equal(whole, torch.cat(rows))


def plain(x: Tensor, qweight: QWeight, activation_bits: int) -> Tensor:
    """Plain torch at this activation precision: weights and outputs in 16 bits.

    int8 activations stay as they are: a cast to fp16 would snap subnormal ones back to x's grid.
    """
    low = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    weight = qweight.dequantize(low)
    if activation_bits == 8:
        return torch_linear(reference.quantize_activations(x.float()), weight.float()).to(low)
    return torch_linear(x.to(low), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"),
    [
        (4, 32, True),
        (4, 64, False),
        (4, 128, True),
        (4, PER_CHANNEL, False),
        (8, PER_CHANNEL, True),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zeros", "subnormal"])
@pytest.mark.parametrize("m", [1, 16])
def test_the_error_is_at_most_twice_that_of_plain_torch(
    dtype: torch.dtype,
    activation_bits: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    kind: str,
    m: int,
) -> None:
    n, k = 65, 768
    qweight = a_qweight(n, k, group_size, bits=bits, symmetric=symmetric)
    x = an_input(kind, m, k, dtype)
    exact = x.double() @ qweight.dequantize(torch.float64).T
    low = torch.bfloat16 if dtype == torch.float32 else dtype
    ours = cpu.linear(x, cpu.pack(qweight), activation_bits=activation_bits, out=low)
    theirs = plain(x, qweight, activation_bits)
    error = (ours.double() - exact).pow(2).mean().sqrt()
    bar = (theirs.double() - exact).pow(2).mean().sqrt()
    assert error <= 2 * bar
    assert error > 0 or kind == "zeros"


@pytest.mark.parametrize("bits", [4, 8])
def test_int8_activations_are_the_reference_to_the_last_bits_of_fp32(bits: int) -> None:
    qweight = a_qweight(48, 512, 64 if bits == 4 else PER_CHANNEL, bits=bits, dtype=torch.float32)
    x = an_input("normal", 5, 512, torch.float32)
    rounded = reference.quantize_activations(x).double()
    exact = rounded @ qweight.dequantize(torch.float64).T
    ours = cpu.linear(x, cpu.pack(qweight), activation_bits=8)
    assert (ours.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_a_scale_for_every_group_holds_an_outlier_to_its_group() -> None:
    qweight = a_qweight(32, 1024, 64)
    x = an_input("outlier", 4, 1024, torch.float32)
    exact = x.double() @ qweight.dequantize(torch.float64).T
    errors = [
        float((cpu.linear(x, cpu.pack(qweight), activation_bits=8, per_group=g) - exact).norm())
        for g in (False, True)
    ]
    assert errors[1] < errors[0] / 2


def test_the_check_of_bits_would_see_one_rounding() -> None:
    """The sabotage: a result with one last bit changed is not the same."""
    weight = cpu.pack(a_qweight(32, 64, 32))
    y = cpu.linear(an_input("normal", 2, 64, torch.float32), weight)
    moved = y.clone()
    moved[1, 3] = torch.nextafter(moved[1, 3], torch.tensor(torch.inf))
    assert not same_bits(y, moved)


@pytest.mark.parametrize("name", SETS)
def test_a_row_with_nan_or_infinity_is_nan_and_others_are_untouched(name: str) -> None:
    weight = cpu.pack(a_qweight(40, 128, 32, symmetric=False))
    x = an_input("normal", 7, 128, torch.float16)
    clean = cpu.linear(x, weight, instruction_set=name)
    x[2, 5], x[6, 127] = 7e4, float("nan")
    y = cpu.linear(x, weight, instruction_set=name)
    assert y[[2, 6]].isnan().all()
    assert torch.equal(y[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("name", SETS)
def test_rows_of_nothing_give_the_bias(name: str) -> None:
    weight = cpu.pack(a_qweight(33, 64, 64, symmetric=False))
    bias = torch.randn(33)
    for x in (torch.zeros(3, 64), torch.full((3, 64), 1e-38)):
        assert torch.equal(cpu.linear(x, weight, bias, instruction_set=name), bias.expand(3, 33))


@pytest.mark.parametrize("name", SETS)
def test_the_extremes_of_codes_and_activations_do_not_overflow(name: str) -> None:
    """All codes at their ends, all activations at the top: the longest integer sums there are."""
    for bits, top in ((4, 15), (8, 255)):
        for code in (0, top):
            k = 4096
            codes = torch.full((33, k), code, dtype=torch.uint8)
            scheme = Scheme(bits, PER_CHANNEL)
            qweight = QWeight(scheme, codes, torch.ones(33, 1))
            for activation_bits in (8, 16):
                for sign in (1.0, -1.0):
                    x = torch.full((2, k), sign)
                    y = cpu.linear(
                        x, cpu.pack(qweight), activation_bits=activation_bits, instruction_set=name
                    )
                    wanted = sign * k * (code - scheme.midpoint)
                    assert (y - wanted).abs().max() <= abs(wanted) * 1e-6
