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


def tokens_of(rows: int) -> int:
    """Rows of x that a program takes."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


@triton.jit
def _value(words, zero, scale, NIBBLE: tl.constexpr):
    """fp16 weights of nibble NIBBLE: integers less the zero, scaled in fp32, rounded once."""
    code = (words >> (4 * NIBBLE)) & 15
    return ((code - zero).to(tl.float32) * scale).to(tl.float16)


@triton.jit
def awq_kernel(
    x, weight, zeros, scales, bias, y,
    M, N, words_of_row, x_stride, zeros_w, words_of_part,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A program takes 64 rows of weight, TOKENS of x and a part of K, COLUMNS a step.

    Lane 4g + q of warp t holds rows 16t + g and 16t + g + 8, and of a step the quarter q of a row's
    words: that is its share of a product if the columns are taken in the order below, which both
    operands are. WIDE: the order that mma.sync wants (tiles.py).
    """
    n = tl.program_id(0) * 64 + tl.arange(0, 64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    # [g, t, row half]: in this order of dimensions lanes lie along g and warps along t.
    of_lane = (
        tl.arange(0, 8)[:, None, None]
        + 16 * tl.arange(0, 4)[None, :, None]
        + 8 * tl.arange(0, 2)[None, None, :]
    )
    row = tl.program_id(0).to(tl.int64) * 64 + of_lane
    in_rows = token[None, :] < M
    at_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * x_stride
    at_x += tl.arange(0, COLUMNS)[:, None]
    WORDS: tl.constexpr = COLUMNS // 32
    at_words = weight + row[:, :, :, None] * words_of_row
    at_words += tl.arange(0, COLUMNS // 8)[None, None, None, :]
    total = tl.zeros((64, TOKENS), tl.float32)
    start = part * words_of_part
    at_scales = scales + row * (zeros_w * 8)
    scale = tl.load(at_scales + start * 8 // GROUP)
    for word in range(start, start + words_of_part, COLUMNS // 8):
        k = word * 8
        group = k // GROUP
        words = tl.reshape(tl.load(at_words + word), (8, 4, 2, 4, WORDS))
        zero = (tl.load(zeros + row * zeros_w + group // 8) >> (group % 8 * 4)) & 15
        zero = zero[:, :, :, None, None]
        of_step = scale.to(tl.float32)[:, :, :, None, None]
        # The next step's, so that none waits for them.
        scale = tl.load(at_scales + tl.minimum(word + COLUMNS // 8, words_of_row - 1) * 8 // GROUP)
        first = tl.join(
            tl.join(_value(words, zero, of_step, 0), _value(words, zero, of_step, 1)),
            tl.join(_value(words, zero, of_step, 2), _value(words, zero, of_step, 3)),
        )
        second = tl.join(
            tl.join(_value(words, zero, of_step, 4), _value(words, zero, of_step, 5)),
            tl.join(_value(words, zero, of_step, 6), _value(words, zero, of_step, 7)),
        )
        value = tl.join(
            first, second
        )  # [g, t, row half, q, word, bit 0, bit 1, bit 2 of 8 columns]
        tokens = tl.reshape(tl.load(at_x + k), (4, WORDS, 2, 2, 2, TOKENS))
        if WIDE:
            value = tl.permute(value, (1, 2, 0, 4, 7, 3, 6, 5))
            tokens = tl.permute(tokens, (1, 2, 0, 3, 4, 5))
        else:
            value = tl.permute(value, (1, 2, 0, 4, 7, 6, 3, 5))
            tokens = tl.permute(tokens, (1, 2, 3, 0, 4, 5))
        value = tl.reshape(value, (64, COLUMNS))
        total = tl.dot(value, tl.reshape(tokens, (COLUMNS, TOKENS)), total)
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
    wide: bool,
) -> None:
    """y fp16 [M, N] = x fp16 [M, K] times the weight; K a multiple of 32 * split_k.

    wide: whether the device's products are mma.sync: all but compute capabilities 9 and 10.
    """
    (m, k), n = x.shape, weight.shape[0]
    tokens, of_part = tokens_of(m), k // split_k
    columns = next(each for each in (group_size, 64, 32) if of_part % each == 0)
    shape = (split_k, m, n)
    out = y if split_k == 1 else torch.empty(shape, dtype=torch.float32, device=x.device)
    awq_kernel[(n // 64, triton.cdiv(m, tokens), split_k)](
        x, weight, zeros, scales, scales if bias is None else bias, out,
        m, n, k // 8, x.stride(0), zeros.shape[1], of_part // 8,
        GROUP=group_size, TOKENS=tokens, COLUMNS=columns, WIDE=wide,
        BIAS=bias is not None, SPLIT=split_k > 1,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if split_k > 1:
        add_partials(out, bias, y)
