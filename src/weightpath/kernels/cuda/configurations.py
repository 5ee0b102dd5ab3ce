"""Which of a closed set of kernels multiplies so many rows by a weight of so many rows and columns.

No tuning at run time: rules of the shape, from the sweeps in docs/experiments.md (one H200).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_MMA_ROWS = 32
SHARED_A_BLOCK = 232_448
"""Bytes of shared memory that a block can have on sm_90; 166,912 on sm_80."""


@dataclass(frozen=True)
class Mma:
    """tiles_mma.cu: row_tiles (R) of 16 weight rows a warp, WN x WK warps, `tokens` of x a block."""

    tokens: int
    row_tiles: int
    warps_n: int
    warps_k: int
    stages: int
    blocks: int


@dataclass(frozen=True)
class Wgmma:
    """tiles_wgmma.cu: `tokens` of x by 128 rows of the weight a tile; split blocks share its columns."""

    tokens: int
    stages: int
    split: int
    blocks: int


def mma_for(rows: int, out_features: int, bits: int, multiprocessors: int) -> Mma:
    """The kernel for 1 to 32 rows of x (more: in passes of 32)."""
    tokens = 8 if rows <= 8 else 16 if rows <= 16 else 32
    tiles = (out_features + 63) // 64 * 4
    if tokens == 8:
        if tiles < 6 * multiprocessors:
            return Mma(8, 1, 1, 8, 6, 3)
        return Mma(8, 2, 1, 8, 4, 3)
    if tokens == 16:
        if tiles < 6 * multiprocessors:
            return Mma(16, 1, 2, 8, 4, 1)
        return Mma(16, 2, 2, 4, 4, 2)
    if tiles < 6 * multiprocessors:
        return Mma(32, 1, 2, 8, 4, 1)
    return Mma(32, 2, 2, 4, 4, 2)


def wgmma_for(rows: int, out_features: int, in_features: int, multiprocessors: int) -> Wgmma:
    """The kernel for any number of rows of x on sm_90."""
    blocks = (out_features + 127) // 128
    if rows <= 64:
        tokens = 64
    elif rows <= 128 or blocks * ((rows + 255) // 256) < multiprocessors:
        tokens = 128
    else:
        tokens = 256
    tiles = blocks * ((rows + tokens - 1) // tokens)
    resident = 2 if tokens == 64 else 1
    split = 1
    while (
        split < 8 and tiles * split * 2 <= multiprocessors * resident and in_features >= 512 * split
    ):
        split *= 2
    stages = {64: 6, 128: 6, 256: 4}[tokens]
    return Wgmma(tokens, stages, split, resident)
