"""W8A16 for few rows: an int8 weight as stored, codes [N, K], times x of 1 to 16 rows.

    y[m, n] = scale[n] * sum_k x[m, k] * code[n, k] + bias[n]

A program takes 16 output channels and all of K, or a part of it; its warps take different chunks of
64 columns, each with a product on the tensor cores (the cast of an int8 code to bf16 or fp16 is
exact), and the sums are added over warps at the end, scaled in fp32. A lane reads 16 columns of a
row, 16 bytes; the columns of a chunk, 16q + 4j + i, are taken in the order 16j + 4q + i in both
operands, which is where that lane's share of the product lies, so that no lane hands codes on.
Parts of K go to an fp32 workspace that `partials.py` adds in order.
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightpath.kernels.triton.codes import cast_codes
from weightpath.kernels.triton.partials import add_partials

PROGRAMS = 256


@dataclass(frozen=True)
class Config:
    """chunks: of 64 columns in a step of a program; splits: parts of K."""

    chunks: int
    splits: int
    warps: int


def config(rows: int, out_features: int, in_features: int) -> Config:
    """The fixed configuration for x [rows, in_features] and codes [out_features, in_features]."""
    chunks, programs = -(-in_features // 64), -(-out_features // 16)
    step = 16 if chunks > 8 else 8
    steps = -(-chunks // step)
    return Config(step, max(1, min(PROGRAMS // programs, steps, 16)), 8)


@triton.jit
def int8_gemv_kernel(
    x, codes, scale, bias, y,
    M, N, K, x_stride, code_stride, steps_of_part,
    TOKENS: tl.constexpr, CHUNKS: tl.constexpr, ONE: tl.constexpr,
    BIAS: tl.constexpr, SPLIT: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """x [M, K]; codes int8 [N, K]; scale fp32 [N]; y [M, N], or fp32 [splits, M, N] if SPLIT."""
    first = tl.program_id(0) * 16
    part = tl.program_id(1)
    token = tl.arange(0, TOKENS)
    dtype: tl.constexpr = tl.float32 if PLAIN else x.dtype.element_ty
    # [g, chunk, row half, column]: in this order of dimensions lanes lie along g.
    row = first + tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, 2)[None, None, :, None]
    in_codes = row < N
    at_row = row.to(tl.int64) * code_stride
    total = tl.zeros((CHUNKS, 16, TOKENS), tl.float32)
    start = part * steps_of_part * CHUNKS * 64
    end = tl.minimum(start + steps_of_part * CHUNKS * 64, K)
    for step in range(start, end, CHUNKS * 64):
        k = step + tl.arange(0, CHUNKS)[:, None] * 64 + tl.arange(0, 64)[None, :]
        at = k[None, :, None, :]
        loaded = tl.load(codes + at_row + at, mask=in_codes & (at < K), other=0)
        weight = cast_codes(tl.permute(loaded, (1, 2, 0, 3)), dtype, PLAIN)
        weight = tl.reshape(weight, (CHUNKS, 16, 4, 4, 4))
        weight = tl.reshape(tl.permute(weight, (0, 1, 3, 2, 4)), (CHUNKS, 16, 64))
        if ONE:
            line = tl.load(x + k, mask=k < K, other=0).to(dtype)
            line = tl.permute(tl.reshape(line, (CHUNKS, 4, 4, 4)), (0, 2, 1, 3))
            line = tl.reshape(line, (CHUNKS, 64))
            tokens = tl.broadcast_to(line[:, :, None], (CHUNKS, 64, TOKENS))
        else:
            at_x = token[None, None, :] * x_stride + k[:, :, None]
            in_x = (token[None, None, :] < M) & (k[:, :, None] < K)
            tokens = tl.load(x + at_x, mask=in_x, other=0).to(dtype)
            tokens = tl.reshape(tokens, (CHUNKS, 4, 4, 4, TOKENS))
            tokens = tl.reshape(tl.permute(tokens, (0, 2, 1, 3, 4)), (CHUNKS, 64, TOKENS))
        total = tl.dot(weight, tokens, total)
    product = tl.sum(total, 0)
    n = first + tl.arange(0, 16)
    at_y = token[None, :] * N + n[:, None]
    in_y = (n[:, None] < N) & (token[None, :] < M)
    if SPLIT:
        tl.store(y + part * M * N + at_y, product, mask=in_y)
    else:
        product *= tl.load(scale + n, mask=n < N, other=0)[:, None]
        if BIAS:
            product += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
        tl.store(y + at_y, product.to(y.dtype.element_ty), mask=in_y)


def int8_gemv(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    plain: bool = False,
    chosen: Config | None = None,
) -> None:
    """y [M, N] = x [M, K] times codes int8 [N, K] scaled; M at most 16, columns adjacent.

    plain: products in fp32, as the interpreter needs them for bf16.
    """
    (m, k), n = x.shape, codes.shape[0]
    config_ = chosen or config(m, n, k)
    steps = triton.cdiv(triton.cdiv(k, config_.chunks * 64), config_.splits)
    splits = triton.cdiv(k, steps * config_.chunks * 64)
    out = y if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    int8_gemv_kernel[(triton.cdiv(n, 16), splits)](
        x, codes, scale, scale if bias is None else bias, out,
        m, n, k, x.stride(0), codes.stride(0), steps,
        TOKENS=8 if m <= 8 else 16, CHUNKS=config_.chunks, ONE=m == 1,
        BIAS=bias is not None, SPLIT=splits > 1, PLAIN=plain,
        num_warps=config_.warps, num_stages=1,
    )  # fmt: skip
    if splits > 1:
        add_partials(out, bias, y, scale)
