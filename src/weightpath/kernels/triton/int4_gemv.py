"""W4A16 for few rows: 4-bit weights from gpu tiles times x of 1 to 16 rows.

    y[m, n] = sum_g scale[n, g] * (sum_{k in g} x[m, k] * (code[n, k] - zero[n, g])) + bias[n]

A program takes TILES row tiles (16 output channels each) and all of K, or one of `splits` parts of
it. Its warps take different chunks (64 columns) of K, CHUNKS at a time, each with a product of its
own on the tensor cores: 16 rows of codes minus zeros, exact in 16 bits, times 8 or 16 tokens. That
needs fewer instructions a weight than multiply-adds of a single token do, one token included. The
sums are scaled in fp32 a chunk (half a chunk where groups are of 32), and added over warps at the
end. Parts of K go to an fp32 workspace [splits, M, N] that `partials.py` adds in order: no atomics,
so two runs give the same bits.
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

PROGRAMS = 256
"""K is split until there are about so many programs: two for each SM of the larger GPUs."""


@dataclass(frozen=True)
class Config:
    """chunks: of K in a step of a program; tiles: row tiles of a program; splits: parts of K."""

    chunks: int
    tiles: int
    splits: int
    warps: int


def config(rows: int, out_features: int, in_features: int) -> Config:
    """The fixed configuration for x [rows, in_features] and a weight of out_features."""
    row_tiles, chunks = -(-out_features // 64) * 4, -(-in_features // 64)
    # A step keeps 512 bytes a chunk on their way. Where each SM has two programs at most, they take
    # 32 chunks: of one row in 16 warps of 64 registers, of more in 8 of 126. More programs than that
    # take 16 in 8 warps, of which more fit an SM at a time.
    few = row_tiles <= PROGRAMS and chunks > 16
    step, warps = (32, 16 if rows == 1 else 8) if few else (16, 8)
    tiles = 2 if row_tiles >= 4 * PROGRAMS and 1 < rows <= 8 else 1
    splits = max(1, min(PROGRAMS * tiles // row_tiles, -(-chunks // step), 16))
    return Config(step, tiles, splits, warps)


@triton.jit
def int4_gemv_kernel(
    x, codes, scales, zeros, bias, y,
    M, N, K, x_stride, chunks, groups, steps_of_part,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr,
    ONE: tl.constexpr, ASYMMETRIC: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """x [M, K]; codes int32 [N/64, K/64, 4, 32, 4]; scales [N/64, G, 64]; zeros int16
    [N/64, G, 32]; y [M, N], or fp32 [splits, M, N] if SPLIT. GROUP 0: one group."""
    first = tl.program_id(0) * TILES
    part = tl.program_id(1)
    block = first // 4
    tile = first % 4 + tl.arange(0, TILES)
    row = first % 4 * 16 + tl.arange(0, TILES * 16)
    token = tl.arange(0, TOKENS)
    place = scale_place(row)
    dtype: tl.constexpr = tl.float32 if PLAIN else x.dtype.element_ty
    # One scale is of 64 columns, or of the halves of 32 that batch 0..CHUNKS and CHUNKS..2*CHUNKS are.
    HALVES: tl.constexpr = 2 if GROUP == 32 else 1
    BATCH: tl.constexpr = CHUNKS * HALVES
    WIDTH: tl.constexpr = 64 // HALVES
    batch_chunk = tl.arange(0, BATCH) % CHUNKS
    batch_half = tl.arange(0, BATCH) // CHUNKS
    column = batch_half[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((BATCH, TILES * 16, TOKENS), tl.float32)
    start = part * steps_of_part * CHUNKS
    end = tl.minimum(start + steps_of_part * CHUNKS, chunks)
    for step in range(start, end, CHUNKS):
        chunk = step + tl.arange(0, CHUNKS)
        at = ((block * chunks + chunk[:, None, None]) * 4 + tile[None, :, None]) * 128
        inside = chunk[:, None, None] < end
        words = tl.load(codes + at + tl.arange(0, 128)[None, None, :], mask=inside, other=0)
        words = tl.reshape(words, (CHUNKS, TILES, 8, 4, HALVES, 4 // HALVES))
        words = tl.reshape(tl.permute(words, (4, 0, 1, 2, 3, 5)), (BATCH, TILES, 8, 4, 4 // HALVES))
        mine = step + batch_chunk
        if GROUP == 32:
            group = mine * 2 + batch_half
        elif GROUP == 0:
            group = mine * 0
        else:
            group = mine * 64 // GROUP
        live = mine < end
        line = block * groups + group
        scale = tl.load(scales + line[:, None] * 64 + place[None, :], mask=live[:, None], other=0)
        if ASYMMETRIC:
            g = tl.arange(0, 8)[None, None, :, None, None]
            at_zero = line[:, None, None, None, None] * 32 + tile[None, :, None, None, None] * 8 + g
            of_both = live[:, None, None, None, None]
            both = tl.load(zeros + at_zero, mask=of_both, other=0).to(tl.int32)
            both = tl.broadcast_to(both, (BATCH, TILES, 8, 4, 4 // HALVES))
            weight = expand(words, both & 255, (both >> 8) & 255, dtype, PLAIN)
        else:
            middle = tl.full((BATCH, TILES, 8, 4, 4 // HALVES), 8, tl.int32)
            weight = expand(words, middle, middle, dtype, PLAIN)
        # [batch, tile, g, q, j, h, row half, column half] to rows, and columns in the wide order
        weight = tl.permute(weight, (0, 1, 6, 2, 4, 3, 7, 5))
        weight = tl.reshape(weight, (BATCH, TILES * 16, WIDTH))
        k = mine[:, None] * 64 + column
        if ONE:
            line_of_x = tl.load(x + k, mask=live[:, None] & (k < K), other=0).to(dtype)
            line_of_x = tl.reshape(line_of_x, (BATCH, 4 // HALVES, 2, 4, 2))
            line_of_x = tl.reshape(tl.permute(line_of_x, (0, 1, 3, 2, 4)), (BATCH, WIDTH))
            tokens = tl.broadcast_to(line_of_x[:, :, None], (BATCH, WIDTH, TOKENS))
        else:
            at_x = token[None, None, :] * x_stride + k[:, :, None]
            in_x = (token[None, None, :] < M) & live[:, None, None] & (k[:, :, None] < K)
            tokens = tl.load(x + at_x, mask=in_x, other=0).to(dtype)
            tokens = tl.reshape(tokens, (BATCH, 4 // HALVES, 2, 4, 2, TOKENS))
            tokens = tl.permute(tokens, (0, 1, 3, 2, 4, 5))
            tokens = tl.reshape(tokens, (BATCH, WIDTH, TOKENS))
        total += tl.dot(weight, tokens) * scale.to(tl.float32)[:, :, None]
    product = tl.sum(total, 0)
    n = block * 64 + row
    at_y = token[None, :] * N + n[:, None]
    in_y = (n[:, None] < N) & (token[None, :] < M)
    if SPLIT:
        tl.store(y + part * M * N + at_y, product, mask=in_y)
    else:
        if BIAS:
            product += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
        tl.store(y + at_y, product.to(y.dtype.element_ty), mask=in_y)


def int4_gemv(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    group_size: int,
    plain: bool = False,
    chosen: Config | None = None,
) -> None:
    """y [M, N] = x [M, K] times the weight of the tiles; M at most 16, x's columns adjacent.

    zeros uint8 [N/64, G, 64] or None; group_size in columns, 0 for one group. plain: without
    inline assembly, as the interpreter needs it.
    """
    (m, k), n = x.shape, y.shape[1]
    config_ = chosen or config(m, n, k)
    chunks = codes.shape[1]
    steps = triton.cdiv(triton.cdiv(chunks, config_.chunks), config_.splits)
    splits = triton.cdiv(chunks, steps * config_.chunks)
    out = y if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    grid = (codes.shape[0] * 4 // config_.tiles, splits)
    int4_gemv_kernel[grid](
        x, codes, scales, scales if zeros is None else zeros.view(-1).view(torch.int16),
        scales if bias is None else bias, out,
        m, n, k, x.stride(0), chunks, scales.shape[1], steps,
        GROUP=group_size, TOKENS=8 if m <= 8 else 16, CHUNKS=config_.chunks, TILES=config_.tiles,
        ONE=m == 1, ASYMMETRIC=zeros is not None, BIAS=bias is not None, SPLIT=splits > 1, PLAIN=plain,
        num_warps=config_.warps, num_stages=1,
    )  # fmt: skip
    if splits > 1:
        add_partials(out, bias, y)
