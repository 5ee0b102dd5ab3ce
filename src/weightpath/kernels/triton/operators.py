"""The Triton products as torch operators, `weightpath::triton_*`, with fakes for tracing.

Unchecked: `ops.py` is the door. They read nothing back from the device and allocate through torch,
so a CUDA graph can hold them. Triton is imported by the first call, and starts kernels on torch's
current device, which is therefore set to that of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from weightpath.kernels.triton.available import capability_of

GEMV_ROWS = 16
"""Most rows of the kernels for few rows."""
GEMM_ROWS = 256
"""Most rows of the 4-bit tensor-core kernel; above, the weight is dequantized for cuBLAS."""


def _major(device: torch.device) -> int:
    """The first number of the compute capability, by which products are made."""
    capability = capability_of(device)
    return 0 if capability is None else capability[0]


def _flat(x: Tensor) -> Tensor:
    """x [..., K] as rows [M, K] whose columns are adjacent; copied only where they are not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _result(x: Tensor, n: int, out: torch.dtype) -> Tensor:
    return torch.empty((*x.shape[:-1], n), dtype=out, device=x.device)


def _multiply_int8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: torch.dtype, kernel: str
) -> Tensor:
    y = _result(x, codes.shape[0], out)
    if not y.numel():
        return y
    rows, flat = _flat(x), y.view(-1, codes.shape[0])
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    if kernel == "gemv" or (not kernel and rows.shape[0] <= GEMV_ROWS):
        from weightpath.kernels.triton.int8_gemv import int8_gemv

        with torch.cuda.device(x.device):
            int8_gemv(rows, codes, scale, bias, flat)
    else:
        from weightpath.kernels.triton.int8_gemm import int8_gemm

        with torch.cuda.device(x.device):
            int8_gemm(rows, codes, scale, bias, flat, wgmma=_major(x.device) == 9)
    return y


def _multiply_int4(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    out: torch.dtype,
    kernel: str,
) -> Tensor:
    y = _result(x, n, out)
    if not y.numel():
        return y
    rows, flat = _flat(x), y.view(-1, n)
    group = 0 if scales.shape[1] == 1 else group_size
    if kernel == "gemv" or (not kernel and rows.shape[0] <= GEMV_ROWS):
        from weightpath.kernels.triton.int4_gemv import int4_gemv

        with torch.cuda.device(x.device):
            int4_gemv(rows, codes, scales, zeros, bias, flat, group)
    elif kernel == "gemm" or (not kernel and rows.shape[0] <= GEMM_ROWS):
        from weightpath.kernels.triton.int4_gemm import int4_gemm

        wide = _major(x.device) not in (9, 10)
        with torch.cuda.device(x.device):
            int4_gemm(rows, codes, scales, zeros, bias, flat, group, wide)
    else:
        weight = _dequantize(codes, scales, zeros, n, x.shape[-1], group_size, x.dtype)
        product = linear(rows, weight, None if bias is None else bias.to(x.dtype))
        y = product.to(out).view(y.shape)
    return y


def _multiply_awq(
    x: Tensor,
    weight: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group_size: int,
    split_k: int,
) -> Tensor:
    y = _result(x, weight.shape[0], x.dtype)
    if not y.numel():
        return y
    from weightpath.kernels.triton.awq_kernel import awq_linear as run

    rows, flat = _flat(x), y.view(-1, weight.shape[0])
    wide = _major(x.device) not in (9, 10)
    with torch.cuda.device(x.device):
        run(rows, weight, zeros, scales, bias, flat, group_size, split_k, wide)
    return y


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    from weightpath.kernels.triton.dequantize import dequantize as run

    weight = torch.empty((n, k), dtype=dtype, device=codes.device)
    with torch.cuda.device(codes.device):
        run(codes, scales, zeros, weight, 0 if scales.shape[1] == 1 else group_size)
    return weight


def _operator(name: str, function: Any) -> Any:
    return torch.library.custom_op(
        f"weightpath::{name}", function, mutates_args=(), device_types="cuda"
    )


int8_operator = _operator("triton_int8_linear", _multiply_int8)
int4_operator = _operator("triton_int4_linear", _multiply_int4)
awq_operator = _operator("triton_awq_linear", _multiply_awq)
dequantize_operator = _operator("triton_dequantize", _dequantize)


@int8_operator.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: torch.dtype, kernel: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out)


@int4_operator.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    out: torch.dtype,
    kernel: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out)


@awq_operator.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group_size: int,
    split_k: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@dequantize_operator.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((n, k), dtype=dtype)
