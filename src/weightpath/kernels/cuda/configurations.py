"""Which of a closed set of kernels multiplies so many rows by a weight of so many rows and columns.

No tuning at run time: rules of the shape, from the sweeps in docs/experiments.md (one H200).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_MMA_ROWS = 32


@dataclass(frozen=True)
class Mma:
    """tiles_mma.cu: `rows` of x a block, row_tiles (R) of 16 weight rows a warp, WN x WK warps,
    steps of 1, 2 or 4 blocks of 64 columns, stages of them ahead, blocks a multiprocessor."""

    rows: int
    row_tiles: int
    warps_n: int
    warps_k: int
    stages: int
    blocks_a_step: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Columns of the product: rows of x, up to whole eights."""
        return -(-self.rows // 8) * 8


@dataclass(frozen=True)
class Wgmma:
    """tiles_wgmma.cu: `tokens` of x by 64 * groups rows of the weight a tile, whose columns `split`
    blocks divide; stages of 64 columns ahead, blocks a multiprocessor."""

    groups: int
    tokens: int
    stages: int
    split: int
    blocks: int


def mma_for(rows: int, out_features: int, bits: int, multiprocessors: int) -> Mma:
    """The kernel for 1 to 32 rows of x (more: in passes of 32)."""
    few = (out_features + 63) // 64 * 4 < 6 * multiprocessors
    if rows <= 8:
        held = 1 if rows == 1 else 4 if rows <= 4 else 8
        if bits == 8:
            return Mma(held, 2, 1, 8, 3, 1, 1) if few else Mma(held, 4, 1, 4, 2, 1, 3)
        if few:
            one_turn = out_features <= 32 * multiprocessors  # a block of 32 rows each
            deep = Mma(held, 2, 1, 8, 2, 4, 1) if one_turn else Mma(held, 2, 1, 8, 3, 2, 2)
            return deep if held <= 4 else Mma(held, 2, 1, 8, 3, 2, 1)
        return Mma(held, 4, 1, 4, 2, 2, 4)
    if rows <= 16:
        if bits == 8:
            return Mma(16, 2, 1, 8, 3, 1, 1) if few else Mma(16, 2, 4, 2, 3, 1, 2)
        return Mma(16, 2, 1, 8, 3, 1, 2) if few else Mma(16, 4, 2, 2, 4, 2, 2)
    if bits == 8:
        return Mma(32, 2, 1, 8, 3, 1, 1) if few else Mma(32, 2, 4, 2, 3, 1, 1)
    return Mma(32, 2, 1, 8, 4, 1, 1) if few else Mma(32, 2, 4, 2, 2, 2, 2)


WGMMA_KINDS: dict[tuple[int, int, int], tuple[float, int]] = {
    (3, 64, 1): (0.48, 6),
    (2, 64, 2): (0.61, 6),
    (2, 128, 1): (0.44, 4),
    (3, 128, 1): (0.61, 4),
    (1, 256, 1): (0.39, 4),
    (2, 256, 1): (0.66, 4),
}
"""(groups, tokens, blocks a multiprocessor) -> microseconds for a block of 64 columns with every place
taken, and stages. Fitted to the sweep of 4-bit products on an H200 in docs/experiments.md."""
SPLIT_COSTS = {1: (3.0, 1.0), 2: (5.0, 1.0), 4: (6.0, 0.85), 8: (12.0, 0.75)}
"""split -> microseconds of a launch beside its blocks of columns, and the share of the places that
clusters of so many blocks can take at once (32 clusters of 4 did not fit 132); the same sweep."""


def wgmma_for(rows: int, out_features: int, in_features: int, multiprocessors: int) -> Wgmma:
    """The kernel for any number of rows of x on sm_90: the one with the lowest estimate."""
    chunks = (in_features + 63) // 64
    best, least = Wgmma(2, 256, 4, 1, 1), float("inf")
    for (groups, tokens, resident), (time, stages) in WGMMA_KINDS.items():
        tiles = -(-out_features // (64 * groups)) * -(-rows // tokens)
        for split, (start, share) in SPLIT_COSTS.items():
            places = int(multiprocessors * resident * share)
            if split > 1 and (tokens == 256 or tiles * split > places):
                continue
            turns = -(-tiles * split // places)
            estimate = start + turns * -(-chunks // split) * time
            if estimate < least:
                best, least = Wgmma(groups, tokens, stages, split, resident), estimate
    return best
