"""W4A16 straight from the AWQ kernel's layout, layouts/awq_kernel.py, in fp16.

    weight int32 [N, K/8]     nibble k % 8 of word k // 8
    zeros  int32 [N, Z]       nibble g % 8 of word g // 8
    scales fp16  [N, 8 * Z]   entry g,  g = k // G, G 64 or 128

    w[n, k] = fp16(fp32(code - zero) * scale);   y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]

Codes and zeros are subtracted as integers, scaled in fp32 and rounded to fp16 once; sums are fp32.
K is split into `split_k` equal parts, added in order by `partials.py`. What the kernel needs is said
by `available.awq_refusal`, which asks for no Triton.
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightpath.kernels.triton.partials import add_partials

COLUMNS = 32
"""Columns of a step: the layout's own tile; a group is a whole number of steps."""


def tokens_of(rows: int) -> int:
    """Rows of x that a program takes."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


@triton.jit
def awq_kernel(
    x, weight, zeros, scales, bias, y,
    M, N, K, x_stride, zeros_w, columns_of_part,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A program takes 64 rows of weight, TOKENS of x and a part of K."""
    n = tl.program_id(0) * 64 + tl.arange(0, 64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    row = n.to(tl.int64)
    in_rows = token[None, :] < M
    column = tl.arange(0, COLUMNS)
    at_x = x + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    shift = tl.arange(0, 8)[None, None, :] * 4
    at_words = weight + row[:, None] * (K // 8) + tl.arange(0, COLUMNS // 8)[None, :]
    total = tl.zeros((64, TOKENS), tl.float32)
    start = part * columns_of_part
    for k in range(start, start + columns_of_part, COLUMNS):
        group = k // GROUP
        words = tl.load(at_words + k // 8)
        code = tl.reshape((words[:, :, None] >> shift) & 15, (64, COLUMNS))
        zero = (tl.load(zeros + row * zeros_w + group // 8) >> (group % 8 * 4)) & 15
        scale = tl.load(scales + row * (zeros_w * 8) + group).to(tl.float32)
        value = (code - zero[:, None]).to(tl.float32) * scale[:, None]
        tokens = tl.load(at_x + k, mask=in_rows, other=0)
        total = tl.dot(value.to(tl.float16), tokens, total)
    at_y = token.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT:
        tl.store(y + part.to(tl.int64) * M * N + at_y, total, mask=in_rows)
    else:
        if BIAS:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        tl.store(y + at_y, total.to(y.dtype.element_ty), mask=in_rows)


def awq_linear(
    x: Tensor,
    weight: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    group_size: int,
    split_k: int,
) -> None:
    """y fp16 [M, N] = x fp16 [M, K] times the weight; K a multiple of 32 * split_k."""
    (m, k), n = x.shape, weight.shape[0]
    tokens = tokens_of(m)
    shape = (split_k, m, n)
    out = y if split_k == 1 else torch.empty(shape, dtype=torch.float32, device=x.device)
    awq_kernel[(n // 64, triton.cdiv(m, tokens), split_k)](
        x, weight, zeros, scales, scales if bias is None else bias, out,
        m, n, k, x.stride(0), zeros.shape[1], k // split_k,
        GROUP=group_size, TOKENS=tokens, COLUMNS=COLUMNS, BIAS=bias is not None, SPLIT=split_k > 1,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if split_k > 1:
        add_partials(out, bias, y)
