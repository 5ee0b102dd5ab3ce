"""The int8 kernels under Triton's interpreter. Run by test_interpreted.py in a process of its own."""

from __future__ import annotations

from functools import partial

import interpreter_repair  # noqa: F401
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import assert_as_good_as_torch, room_for

from weightpath.kernels.triton import int8_gemm, int8_gemv


@st.composite
def cases(draw: st.DrawFn, most_rows: int):
    return {
        "m": draw(st.integers(1, most_rows)),
        "n": draw(st.integers(1, 100)),
        "k": draw(st.integers(1, 400)),
        "dtype": draw(st.sampled_from((torch.bfloat16, torch.float16))),
        "bias": draw(st.booleans()),
        "padding": draw(st.sampled_from((0, 3))),
        "wide_out": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def check(kernel, case, chosen) -> None:
    draw = torch.Generator().manual_seed(case["seed"])
    m, n, k = case["m"], case["n"], case["k"]
    codes = torch.randint(-127, 128, (n, k + case["padding"]), generator=draw).to(torch.int8)
    codes = codes[:, :k]
    scale = torch.rand(n, generator=draw) * 0.02 + 1e-3
    x = torch.randn((m, k + case["padding"]), generator=draw).to(case["dtype"])[:, :k]
    bias = torch.randn(n, generator=draw) if case["bias"] else None
    out = torch.float32 if case["wide_out"] else case["dtype"]
    y = room_for((m, n), out)
    kernel(x, codes, scale, bias, y, plain=True, chosen=chosen)
    weight = codes.double() * scale.double()[:, None]
    assert_as_good_as_torch(y.to(out), x, weight, bias)
    if case["wide_out"]:
        exact = x.double() @ weight.t() + (0 if bias is None else bias.double())
        assert float((y - exact).abs().max()) <= 1e-5 * float(exact.abs().max() + 1)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases(16), chunks=st.sampled_from((1, 2, 4)), splits=st.sampled_from((1, 2, 3)))
def test_the_kernel_for_few_rows_is_as_good_as_torch(case, chunks: int, splits: int) -> None:
    check(int8_gemv.int8_gemv, case, int8_gemv.Config(chunks, splits, 4))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases(40), splits=st.sampled_from((1, 2, 3)), wgmma=st.booleans())
def test_the_tensor_core_kernel_is_as_good_as_torch(case, splits: int, wgmma: bool) -> None:
    kernel = partial(int8_gemm.int8_gemm, wgmma=wgmma)
    check(kernel, case, int8_gemm.Config(16, 64, 64, splits, 4, 1))


def test_sums_beyond_fp16_come_back_where_the_result_fits() -> None:
    """Sums of codes times x of about 2e9, scaled to what fp16 holds."""
    codes = torch.full((5, 256), 127, dtype=torch.int8)
    x = torch.full((3, 256), 65504.0, dtype=torch.float16)
    scale, exact = torch.full((5,), 1e-6), 127 * 65504 * 256 * 1e-6
    for kernel in (int8_gemv.int8_gemv, partial(int8_gemm.int8_gemm, wgmma=True)):
        y = torch.empty((3, 5), dtype=torch.float16)
        kernel(x, codes, scale, None, y, plain=True)
        assert torch.allclose(y.double(), torch.full((3, 5), exact).double(), rtol=1e-3)


def test_a_row_of_scale_zero_gives_zeros() -> None:
    y = torch.full((2, 3), float("nan"), dtype=torch.float16)
    x, codes = torch.ones((2, 40), dtype=torch.float16), torch.zeros((3, 40), dtype=torch.int8)
    int8_gemv.int8_gemv(x, codes, torch.zeros(3), None, y, plain=True)
    assert not y.any()
