"""W4A16 for more rows: 4-bit weights from gpu tiles times x, on the tensor cores.

    y[m, n] = sum_g scale[n, g] * (sum_{k in g} x[m, k] * (code[n, k] - zero[n, g])) + bias[n]

The operands are swapped: codes minus zeros, exact in 16 bits and made in registers, are the left
one, [64 * blocks, 64 or 128] a step; TOKENS rows of x, turned, are the right one. A step's product is
scaled in fp32 (in two halves where groups are of 32) and added. Parts of K go to an fp32 workspace
[splits, M, N] that `partials.py` adds in order.
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

from weightpath.kernels.triton.partials import add_partials
from weightpath.kernels.triton.tiles import expand, scale_place

PROGRAMS = 264
"""K is split until there are about so many programs."""
MOST_SPLITS = 16


@dataclass(frozen=True)
class Config:
    """tokens: rows of x a program takes; blocks: of 64 output channels; splits: parts of K."""

    tokens: int
    blocks: int
    splits: int
    warps: int
    stages: int


def config(rows: int, out_features: int, in_features: int, wide: bool, asymmetric: bool) -> Config:
    """The fixed configuration for x [rows, in_features] and a weight of out_features.

    128 tokens spill registers with mma.sync (`wide`); two blocks with zeros pass the weights through
    shared memory.
    """
    most = 64 if wide else 128
    tokens = min(16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128, most)
    blocks, chunks = -(-out_features // 64), -(-in_features // 64)
    many = blocks % 2 == 0 and blocks // 2 * -(-rows // tokens) >= PROGRAMS
    each = 2 if many and not asymmetric else 1
    programs = blocks // each * -(-rows // tokens)
    splits = max(1, min(PROGRAMS // programs, chunks // 4, MOST_SPLITS))
    return Config(tokens, each, splits, 4 * each, 3 if tokens == 128 else 4)


@triton.jit
def _group(chunk, half, GROUP: tl.constexpr):
    """The group of a chunk of 64 columns, or of its half of 32; GROUP 0: one group."""
    if GROUP == 32:
        group = chunk * 2 + half
    elif GROUP == 0:
        group = chunk * 0
    else:
        group = chunk * 64 // GROUP
    return group


@triton.jit
def int4_gemm_kernel(
    x, codes, scales, zeros, bias, y,
    M, N, K, x_stride, chunks, groups, chunks_of_part,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, ASYMMETRIC: tl.constexpr, BIAS: tl.constexpr,
    SPLIT: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """As int4_gemv_kernel. WIDE: columns in the order that mma.sync's layout wants (tiles.py).

    A step takes CHUNKS chunks of one group, or half a chunk; its scales are loaded a step ahead.
    EVEN: whether K is whole steps. Tokens beyond the last are read as the last, and not stored.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    row = tl.arange(0, BLOCKS * 64)
    dtype: tl.constexpr = tl.float32 if PLAIN else x.dtype.element_ty
    HALVES: tl.constexpr = 2 if GROUP == 32 else 1
    WIDTH: tl.constexpr = 64 * CHUNKS // HALVES
    WORDS: tl.constexpr = 4 // HALVES
    column = tl.arange(0, WIDTH)
    # Word 4 * lane + j of a chunk's 512: WORDS of a lane's four are taken at a time.
    count = tl.arange(0, 128 * WORDS * CHUNKS)
    word = count // WORDS * 4 + count % WORDS
    first_row = tl.program_id(0) * BLOCKS * 64
    at_scale = (tl.program_id(0) * BLOCKS + row // 64) * groups * 64 + scale_place(row % 64)
    t = tl.arange(0, 4)[None, None, :, None, None, None]
    g = tl.arange(0, 8)[None, None, None, :, None, None]
    at_zero = block[:, None, None, None, None, None] * groups * 32 + t * 8 + g
    x_row = x + tl.minimum(token, M - 1).to(tl.int64) * x_stride
    total = tl.zeros((BLOCKS * 64, TOKENS), tl.float32)
    start = part * chunks_of_part
    end = tl.minimum(start + chunks_of_part, chunks)
    group = _group(start, 0, GROUP)
    scale = tl.load(scales + at_scale + group * 64)
    if ASYMMETRIC:
        both = tl.load(zeros + at_zero + group * 32)
    for chunk in range(start, end, CHUNKS):
        for half in tl.static_range(HALVES):
            of_step = scale.to(tl.float32)[:, None]
            if ASYMMETRIC:
                zero = tl.broadcast_to(both.to(tl.int32), (BLOCKS, CHUNKS, 4, 8, 4, WORDS))
            else:
                zero = tl.full((BLOCKS, CHUNKS, 4, 8, 4, WORDS), 0x0808, tl.int32)
            after = tl.minimum(chunk + (half + 1) // HALVES * CHUNKS, chunks - 1)
            group = _group(after, (half + 1) % HALVES, GROUP)
            scale = tl.load(scales + at_scale + group * 64)
            if ASYMMETRIC:
                both = tl.load(zeros + at_zero + group * 32)
            at = (block[:, None] * chunks + chunk) * 512 + half * WORDS
            if CHUNKS == 1 or EVEN:
                words = tl.load(codes + at + word[None, :])
            else:
                inside = chunk + count[None, :] // (128 * WORDS) < chunks
                words = tl.load(codes + at + word[None, :], mask=inside, other=0)
            words = tl.reshape(words, (BLOCKS, CHUNKS, 4, 8, 4, WORDS))
            weight = expand(words, zero & 255, (zero >> 8) & 255, dtype, PLAIN)
            # [block, chunk, t, g, q, j, h, row half, column half] to rows and columns
            if WIDE:
                weight = tl.permute(weight, (0, 2, 7, 3, 1, 5, 4, 8, 6))
            else:
                weight = tl.permute(weight, (0, 2, 7, 3, 1, 5, 8, 4, 6))
            weight = tl.reshape(weight, (BLOCKS * 64, WIDTH))
            k = chunk * 64 + half * WIDTH + column
            at_x = x_row[None, :] + k[:, None]
            if EVEN:
                tokens = tl.load(at_x).to(dtype)
            else:
                tokens = tl.load(at_x, mask=k[:, None] < K, other=0).to(dtype)
            if WIDE:
                tokens = tl.reshape(tokens, (WIDTH // 16, 2, 4, 2, TOKENS))
                tokens = tl.reshape(tl.permute(tokens, (0, 2, 1, 3, 4)), (WIDTH, TOKENS))
            total += tl.dot(weight, tokens) * of_step
    n = first_row + row
    at_y = token.to(tl.int64)[None, :] * N + n[:, None]
    in_y = (token[None, :] < M) & (n[:, None] < N)
    if SPLIT:
        tl.store(y + part.to(tl.int64) * M * N + at_y, total, mask=in_y)
    else:
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
        tl.store(y + at_y, total.to(y.dtype.element_ty), mask=in_y)


def int4_gemm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    group_size: int,
    wide: bool,
    plain: bool = False,
    chosen: Config | None = None,
) -> None:
    """y [M, N] = x [M, K] times the weight of the tiles, any M; arguments as int4_gemv.

    wide: whether the device's products are mma.sync: all but compute capabilities 9 and 10.
    """
    (m, k), n = x.shape, y.shape[1]
    config_ = chosen or config(m, n, k, wide, zeros is not None)
    blocks, chunks = codes.shape[:2]
    step = 2 if group_size % 128 == 0 else 1
    each = triton.cdiv(triton.cdiv(chunks, config_.splits), step) * step
    splits = triton.cdiv(chunks, each)
    out = y if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    grid = (blocks // config_.blocks, triton.cdiv(m, config_.tokens), splits)
    int4_gemm_kernel[grid](
        x, codes, scales, scales if zeros is None else zeros.view(-1).view(torch.int16),
        scales if bias is None else bias, out,
        m, n, k, x.stride(0), chunks, scales.shape[1], each,
        GROUP=group_size, TOKENS=config_.tokens, BLOCKS=config_.blocks, CHUNKS=step,
        WIDE=wide, EVEN=k % (64 * step) == 0,
        ASYMMETRIC=zeros is not None, BIAS=bias is not None, SPLIT=splits > 1, PLAIN=plain,
        num_warps=config_.warps, num_stages=config_.stages,
    )  # fmt: skip
    if splits > 1:
        add_partials(out, bias, y)
