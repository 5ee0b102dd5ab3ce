"""Gpu tiles to the weight itself, bf16 or fp16 [N, K], for a product by cuBLAS.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])     in fp32, rounded once

Codes of 4 bits (layouts in tiles.py) or of 8: word i of step s of lane 4g + q holds in byte (e, h),
at bits 8e + 16h, the code of row g + 8e, column 32s + 16*(i // 2) + 2q + h + 8*(i % 2) of a chunk.
A lane reads 16 bytes of a tile and the scales of its two rows; the weight leaves in whole rows.
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightpath.kernels.triton.tiles import nibbles


@triton.jit
def _of_bytes(words, ROW: tl.constexpr):
    """Codes of rows g (ROW 0) or g + 8 (1) in words of 8-bit codes, fp32 [..., h]."""
    low = (words << (24 - 8 * ROW)) >> 24
    high = (words << (8 - 8 * ROW)) >> 24
    return tl.join(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def dequantize_kernel(
    codes, scales, zeros, weight,
    N, K, chunks, groups,
    BITS: tl.constexpr, COLUMNS: tl.constexpr, ASYMMETRIC: tl.constexpr,
):  # fmt: skip
    """A program writes 64 rows of two chunks. codes int32 [N/64, K/64, 128 * BITS]; zeros int16
    [N/64, G, 32], pairs of them. COLUMNS of a group: 32 or a multiple of 64; 0: one group."""
    block = tl.program_id(0)
    chunk = tl.program_id(1) * 2 + tl.arange(0, 2)
    STEPS: tl.constexpr = BITS // 4
    # [chunk, t, s, lane's g, q, word]: what a lane holds of a tile, of 4 bits s is 0.
    at = (block.to(tl.int64) * chunks + chunk[:, None]) * (128 * BITS)
    words = tl.load(
        codes + at + tl.arange(0, 128 * BITS)[None, :], mask=chunk[:, None] < chunks, other=0
    )
    words = tl.reshape(words, (2, 4, STEPS, 8, 4, 4))
    c = chunk[:, None, None, None, None, None]
    t = tl.arange(0, 4)[None, :, None, None, None, None]
    s = tl.arange(0, STEPS)[None, None, :, None, None, None]
    g = tl.arange(0, 8)[None, None, None, :, None, None]
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    if COLUMNS == 0:
        group = c * 0
    elif COLUMNS == 32:
        group = c * 2 + (s if BITS == 8 else word // 2)
    else:
        group = c * 64 // COLUMNS
    inside = group < groups
    place = (block * groups + group) * 32 + t * 8 + g
    scale0 = tl.load(scales + place * 2, mask=inside, other=0).to(tl.float32)
    scale8 = tl.load(scales + place * 2 + 1, mask=inside, other=0).to(tl.float32)
    scale0, scale8 = tl.expand_dims(scale0, 6), tl.expand_dims(scale8, 6)
    if BITS == 8:
        row0 = _of_bytes(words, 0) * scale0
        row8 = _of_bytes(words, 1) * scale8
        # [c, t, s, g, q, word = (j, column half), h, row half]
        value = tl.reshape(tl.join(row0, row8), (2, 4, 2, 8, 4, 2, 2, 2, 2))
        value = tl.permute(value, (1, 8, 3, 0, 2, 5, 6, 4, 7))
    else:
        if ASYMMETRIC:
            both = tl.load(zeros + place, mask=inside, other=0).to(tl.int32)
            zero0, zero8 = both & 255, (both >> 8) & 255
        else:
            zero0, zero8 = 8, 8
        first = tl.join(
            nibbles(words, zero0, 0) * scale0,
            nibbles(words, zero8, 1) * scale8,
        )
        second = tl.join(
            nibbles(words, zero0, 2) * scale0,
            nibbles(words, zero8, 3) * scale8,
        )
        # [c, t, s, g, q, j, h, row half, column half]
        value = tl.permute(tl.join(first, second), (1, 7, 3, 0, 2, 5, 8, 4, 6))
    value = tl.reshape(value, (64, 128)).to(weight.dtype.element_ty)
    n = block * 64 + tl.arange(0, 64)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    to = n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(weight + to, value, mask=(n < N)[:, None] & (k < K)[None, :])


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, weight: Tensor, group_size: int
) -> None:
    """Fill weight [N, K] from the tiles; group_size in columns, 0 for one group."""
    blocks, chunks = codes.shape[:2]
    run: Any = dequantize_kernel[(blocks, triton.cdiv(chunks, 2))]
    run(
        codes, scales, scales if zeros is None else zeros.view(-1).view(torch.int16), weight,
        weight.shape[0], weight.shape[1], chunks, scales.shape[1],
        BITS=4 if codes.ndim == 5 else 8, COLUMNS=group_size, ASYMMETRIC=zeros is not None,
    )  # fmt: skip
