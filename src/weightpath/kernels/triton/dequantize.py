"""Gpu tiles to the weight itself, bf16 or fp16 [N, K], for a product by cuBLAS.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])     in fp32, rounded once

Codes of 4 or 8 bits; the lanes' words are as layouts/gpu_tiles.py says.
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weightpath.kernels.triton.tiles import scale_place


@triton.jit
def dequantize_kernel(
    codes, scales, zeros, weight,
    N, K, chunks, groups,
    BITS: tl.constexpr, COLUMNS: tl.constexpr, ASYMMETRIC: tl.constexpr,
):  # fmt: skip
    """A program writes 64 rows of a chunk. codes int32 [N/64, K/64, 512 * BITS / 4]; zeros uint8.

    COLUMNS: of a group; 0: one group.
    """
    block, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, 64)
    t, g, i = row // 16, row % 8, row % 16 // 8
    column = tl.arange(0, 64)
    j, q, h, high = column // 16, column % 8 // 2, column % 2, column % 16 // 8
    if BITS == 4:
        word = (t * 32 + g * 4)[:, None] * 4 + (q * 4 + j)[None, :]
        shift = 4 * (i[:, None] + 2 * high[None, :]) + 16 * h[None, :]
    else:
        word = (t * 256 + g * 16)[:, None] + (j // 2 * 128 + q * 4 + 2 * (j % 2) + high)[None, :]
        shift = 8 * i[:, None] + 16 * h[None, :]
    at = (block.to(tl.int64) * chunks + chunk) * (128 * BITS)
    words = tl.load(codes + at + word) >> shift
    code = words & 15 if BITS == 4 else words.to(tl.int8).to(tl.int32)
    k = chunk * 64 + column
    group = k * 0 if COLUMNS == 0 else k // COLUMNS
    inside = group < groups
    place = (block * groups + group)[None, :] * 64 + scale_place(row)[:, None]
    scale = tl.load(scales + place, mask=inside[None, :], other=0).to(tl.float32)
    if ASYMMETRIC:
        code -= tl.load(zeros + place, mask=inside[None, :], other=0).to(tl.int32)
    elif BITS == 4:
        code -= 8
    value = code.to(tl.float32) * scale
    n = block * 64 + row
    to = n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(
        weight + to, value.to(weight.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :]
    )


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, weight: Tensor, group_size: int
) -> None:
    """Fill weight [N, K] from the tiles; group_size in columns, 0 for one group."""
    blocks, chunks = codes.shape[:2]
    dequantize_kernel[(blocks, chunks)](
        codes, scales, scales if zeros is None else zeros, weight,
        weight.shape[0], weight.shape[1], chunks, scales.shape[1],
        BITS=4 if codes.ndim == 5 else 8, COLUMNS=group_size, ASYMMETRIC=zeros is not None,
        num_warps=4,
    )  # fmt: skip
