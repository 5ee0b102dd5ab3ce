"""The Triton products as torch operators: one clean entry a weight.

    int8_linear   codes int8 [N, K], scale fp32 [N]                        as Int8Linear holds them
    int4_linear   codes, scales, zeros of layouts/gpu_tiles.py             4 bits, groups
    awq_linear    weight, zeros, scales of layouts/awq_kernel.py           4 bits, fp16
    dequantize    gpu tiles of 4 or 8 bits to the weight [N, K]

x [..., K] bf16 or fp16 of any strides; y [..., N]. Products add in fp32, in a fixed order: two runs
give the same bits. By rows of x, int4_linear takes a kernel for few rows (to GEMV_ROWS, 16),
the tensor-core kernel (to GEMM_ROWS) or dequantizes and lets cuBLAS multiply; int8_linear takes its
kernel for few rows (to GEMV_ROWS), then the tensor-core one.

The operators are `weightpath::triton_*`, with fakes for tracing. They read nothing back from the
device and allocate through torch, so a CUDA graph can hold them; each shape must have run once
before it is captured, since Triton compiles at the first call. Triton is imported at the first call.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels.triton.available import awq_refusal, awq_split, refusal
from weightpath.kernels.triton.operators import (
    GEMV_ROWS,
    awq_operator,
    dequantize_operator,
    int4_operator,
    int8_operator,
)

KERNELS = ("gemv", "gemm", "dequantize")
DTYPES = (torch.bfloat16, torch.float16)
_refused = cache(refusal)
"""What a device answers once, it answers always."""


def int8_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor:
    """y [..., N] = scale * (x [..., K] @ codes.T) + bias, in out_dtype (x's by default).

    codes int8 [N, K]; scale fp32 [N]; bias [N] or None. kernel forces "gemv" (to GEMV_ROWS rows) or
    "gemm". CannotRun where the device cannot; BadRequest for tensors that do not fit.
    """
    _require(x, codes, _refused(x.device))
    wrong = None
    if codes.dtype != torch.int8 or codes.ndim != 2 or codes.shape[1] != x.shape[-1]:
        wrong = f"codes are {_said(codes)}, wanted int8 [N, {x.shape[-1]}]"
    elif scale.dtype != torch.float32 or scale.shape != codes.shape[:1]:
        wrong = f"scale is {_said(scale)}, wanted float32 [{codes.shape[0]}]"
    _require_fit("int8_linear", wrong, x, codes.shape[0], bias, kernel, KERNELS[:2])
    return int8_operator(x, codes, scale.contiguous(), bias, out_dtype or x.dtype, kernel)


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor:
    """y [..., out_features] = x [..., K] times the weight of gpu tiles, in out_dtype (x's by default).

    codes int32 [N/64, K/64, 4, 32, 4]; scales [N/64, G, 64], bf16, fp16 or fp32; zeros uint8
    [N/64, G, 64] or None; group_size in columns: 32, or a multiple of 64 (any where G is 1). bias
    [out_features] or None. kernel forces one of KERNELS. CannotRun where the device cannot;
    BadRequest for tensors that do not fit.
    """
    _require(x, codes, _refused(x.device))
    wrong = _tiles_misfit(codes, scales, zeros, out_features, x.shape[-1], group_size, (4,))
    _require_fit("int4_linear", wrong, x, out_features, bias, kernel, KERNELS)
    out = out_dtype or x.dtype
    return int4_operator(x, codes, scales, zeros, bias, out_features, group_size, out, kernel)


def awq_linear(
    x: Tensor,
    weight: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group_size: int,
    split_k: int | None = None,
) -> Tensor:
    """y fp16 [..., N] = x fp16 [..., K] times a weight in the AWQ kernel layout (KernelAwq).

    split_k: parts of K, `awq_split`'s by default. CannotRun with `awq_refusal`'s sentence.
    """
    n, k = weight.shape[0], weight.shape[1] * 8
    split = split_k or awq_split(x.numel() // max(1, x.shape[-1]), n, k)
    _require(x, weight, awq_refusal(x.device, n, k, group_size, x.dtype, split))
    wrong = None
    if x.shape[-1] != k:
        wrong = f"x is {_said(x)}, wanted [..., {k}] for weight {_said(weight)}"
    elif scales.dtype != torch.float16 or scales.shape != (n, zeros.shape[1] * 8):
        wrong = f"scales are {_said(scales)}, wanted float16 [{n}, {zeros.shape[1] * 8}]"
    elif zeros.shape[0] != n or zeros.shape[1] * 8 < k // group_size:
        wrong = f"zeros are {_said(zeros)}, wanted int32 [{n}, {-(-k // group_size // 8)} or more]"
    _require_fit("awq_linear", wrong, x, n, bias, "", KERNELS)
    return awq_operator(x, weight, zeros, scales, bias, group_size, split)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [out_features, in_features] of gpu tiles in `dtype`: scale * (code - zero), in fp32,
    rounded once. codes of 4 bits as int4_linear's, or of 8: int32 [N/64, K/64, 4, 2, 32, 4]."""
    _require(codes, scales, _refused(codes.device))
    wrong = _tiles_misfit(codes, scales, zeros, out_features, in_features, group_size, (4, 8))
    if wrong is not None:
        raise BadRequest(f"dequantize: {wrong}; lay the weight out again with gpu_tiles")
    return dequantize_operator(codes, scales, zeros, out_features, in_features, group_size, dtype)


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _require(x: Tensor, weight: Tensor, reason: str | None) -> None:
    """CannotRun for what the device cannot, or for tensors of two devices."""
    if reason is not None:
        raise CannotRun(reason)
    if x.device != weight.device:
        raise CannotRun(f"x is on {x.device}, the weight on {weight.device}; move one to the other")


def _require_fit(
    what: str,
    wrong: str | None,
    x: Tensor,
    n: int,
    bias: Tensor | None,
    kernel: str,
    kernels: tuple[str, ...],
) -> None:
    """BadRequest, naming what does not fit."""
    if wrong is None and x.dtype not in DTYPES:
        wrong = f"x is {_said(x)}, wanted bfloat16 or float16"
    if wrong is None and bias is not None and (bias.shape != (n,) or bias.stride(0) != 1):
        wrong = f"bias is {_said(bias)}, wanted [{n}], contiguous"
    if wrong is None and kernel and kernel not in kernels:
        wrong = f"kernel '{kernel}' is unknown; the kernels are {', '.join(kernels)}"
    if wrong is None and kernel == "gemv" and x.numel() > GEMV_ROWS * x.shape[-1]:
        wrong = f"x is {_said(x)}; kernel 'gemv' takes {GEMV_ROWS} rows at most"
    if wrong is not None:
        raise BadRequest(f"{what}: {wrong}; check the shapes and dtypes against the weight's")


def _tiles_misfit(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    out_features: int,
    in_features: int,
    group_size: int,
    bits: tuple[int, ...],
) -> str | None:
    """What of the tiles does not fit a weight [out_features, in_features], or None."""
    blocks, chunks = -(-out_features // 64), -(-in_features // 64)
    shapes = {4: (blocks, chunks, 4, 32, 4), 8: (blocks, chunks, 4, 2, 32, 4)}
    wanted = [shapes[each] for each in bits]
    if codes.dtype != torch.int32 or codes.shape not in wanted or not codes.is_contiguous():
        return f"codes are {_said(codes)}, wanted contiguous int32 {list(wanted[0])}"
    groups = scales.shape[1] if scales.ndim == 3 else 0
    if groups != 1 and group_size != 32 and group_size % 64:
        return f"group size {group_size}, wanted 32 or a multiple of 64"
    if scales.shape != (blocks, groups, 64) or not scales.is_contiguous():
        return f"scales are {_said(scales)}, wanted contiguous [{blocks}, groups, 64]"
    if groups != 1 and groups * group_size < in_features:
        return f"scales are of {groups} groups of {group_size}, fewer than {in_features} columns"
    if zeros is not None and (
        zeros.dtype != torch.uint8 or zeros.shape != scales.shape or not zeros.is_contiguous()
    ):
        return f"zeros are {_said(zeros)}, wanted contiguous uint8 {list(scales.shape)}"
    return None
