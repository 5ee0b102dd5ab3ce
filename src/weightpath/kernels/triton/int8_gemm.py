"""W8A16 for more rows: an int8 weight as stored, codes [N, K], times x on the tensor cores.

    y[m, n] = scale[n] * sum_k x[m, k] * code[n, k] + bias[n]

Codes are the left operand, cast in registers (exactly) to x's dtype; x, turned, is the right one.
Sums are fp32, scaled once at the end. Parts of K go to an fp32 workspace [splits, M, N] that
`partials.py` adds in order.
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

PROGRAMS = 264
MOST_SPLITS = 16


@dataclass(frozen=True)
class Config:
    """tokens: rows of x a program takes; rows: of codes; columns: of a step; splits: parts of K."""

    tokens: int
    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def config(rows: int, out_features: int, in_features: int) -> Config:
    """The fixed configuration for x [rows, in_features] and codes [out_features, in_features]."""
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    tall = 128 if -(-out_features // 128) * -(-rows // tokens) >= PROGRAMS else 64
    programs = -(-out_features // tall) * -(-rows // tokens)
    splits = max(1, min(PROGRAMS // programs, in_features // 256, MOST_SPLITS))
    return Config(tokens, tall, 64 if tokens == 128 else 128, splits, tall // 16, 3)


@triton.jit
def int8_gemm_kernel(
    x, codes, scale, bias, y,
    M, N, K, x_stride, code_stride, steps_of_part,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PERMUTED: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """As int8_gemv_kernel. Rows and tokens beyond the last are read as the last one is, and not
    stored; EVEN: whether K is whole steps.

    PERMUTED: columns 16q + 4j + 2p + h of 64 are taken in the order 16j + 8p + 2q + h, in both
    operands, so that a lane reads 16 bytes of codes and not 2 (wgmma takes its left operand thus).
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    dtype: tl.constexpr = tl.float32 if PLAIN else x.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    at_codes = codes + tl.minimum(n, N - 1).to(tl.int64)[:, None] * code_stride + column[None, :]
    at_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * x_stride + column[:, None]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    start = part * steps_of_part * COLUMNS
    end = tl.minimum(start + steps_of_part * COLUMNS, K)
    for k in range(start, end, COLUMNS):
        if EVEN:
            weight = tl.load(at_codes + k)
            tokens = tl.load(at_x + k).to(dtype)
        else:
            inside = k + column < K
            weight = tl.load(at_codes + k, mask=inside[None, :], other=0)
            tokens = tl.load(at_x + k, mask=inside[:, None], other=0).to(dtype)
        weight = cast_codes(weight, dtype, PLAIN)
        if PERMUTED:
            weight = tl.reshape(weight, (ROWS, COLUMNS // 64, 4, 4, 2, 2))
            weight = tl.reshape(tl.permute(weight, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))
            tokens = tl.reshape(tokens, (COLUMNS // 64, 4, 4, 2, 2, TOKENS))
            tokens = tl.reshape(tl.permute(tokens, (0, 2, 3, 1, 4, 5)), (COLUMNS, TOKENS))
        total = tl.dot(weight, tokens, total)
    at_y = token.to(tl.int64)[None, :] * N + n[:, None]
    in_y = (n[:, None] < N) & (token[None, :] < M)
    if SPLIT:
        tl.store(y + part.to(tl.int64) * M * N + at_y, total, mask=in_y)
    else:
        total *= tl.load(scale + n, mask=n < N, other=0)[:, None]
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
        tl.store(y + at_y, total.to(y.dtype.element_ty), mask=in_y)


def int8_gemm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    wgmma: bool,
    plain: bool = False,
    chosen: Config | None = None,
) -> None:
    """y [M, N] = x [M, K] times codes int8 [N, K] scaled, any M; arguments as int8_gemv.

    wgmma: whether the device's products are wgmma: compute capability 9. There, up to 64 rows of x
    a program are put in the order of the codes; 128 cost more than the codes gain.
    """
    (m, k), n = x.shape, codes.shape[0]
    config_ = chosen or config(m, n, k)
    steps = triton.cdiv(triton.cdiv(k, config_.columns), config_.splits)
    splits = triton.cdiv(k, steps * config_.columns)
    out = y if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, config_.rows), triton.cdiv(m, config_.tokens), splits)
    int8_gemm_kernel[grid](
        x, codes, scale, scale if bias is None else bias, out,
        m, n, k, x.stride(0), codes.stride(0), steps,
        TOKENS=config_.tokens, ROWS=config_.rows, COLUMNS=config_.columns,
        PERMUTED=wgmma and config_.tokens <= 64, EVEN=k % config_.columns == 0, BIAS=bias is not None, SPLIT=splits > 1, PLAIN=plain,
        num_warps=config_.warps, num_stages=config_.stages,
    )  # fmt: skip
    if splits > 1:
        add_partials(out, bias, y, scale)
