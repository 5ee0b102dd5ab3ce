"""What quantizing a weight did to it, added up over row blocks, tensors or a whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from weightpath.errors import BadTensor

BLOCK_WEIGHTS = 1 << 18
"""Weights worked on at a time: 1 MiB of fp32 a temporary (docs/experiments.md, block size)."""


@dataclass(frozen=True)
class QuantizeStats:
    """Sums over one or more weights; `a + b` adds them.

    squared_error: sum of (w - w_hat)**2. squared_weight: sum of w**2. zero_groups: groups that
    hold only zeros. raised_scales: scales below the smallest normal number of their stored type,
    raised to it. lowered_scales: scales above its largest finite number, lowered to it.
    """

    weights: int = 0
    groups: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0
    zero_groups: int = 0
    raised_scales: int = 0
    lowered_scales: int = 0

    def __add__(self, other: QuantizeStats) -> QuantizeStats:
        return QuantizeStats(
            *(getattr(self, field) + getattr(other, field) for field in self.__dataclass_fields__)
        )

    @property
    def signal_to_noise_db(self) -> float:
        """10 log10 of squared weight over squared error, in decibels; infinite when exact."""
        if self.squared_error == 0:
            return math.inf
        return 10 * math.log10(max(self.squared_weight, 1e-300) / self.squared_error)


def require_finite(weight: Tensor, name: str, first_row: int = 0) -> None:
    """BadTensor naming the first NaN or infinite element of a weight [N, K].

    first_row: the row of the whole tensor at which this block starts.
    """
    finite = torch.isfinite(weight)
    if bool(finite.all()):
        return
    index = (~finite).nonzero()[0].tolist()
    value = float(weight[tuple(index)])
    index[0] += first_row
    count = int((~finite).sum())
    raise BadTensor(
        name,
        f"element {index} is {value} ({count} such in the block read)",
        "the source checkpoint is damaged: fetch or train it again",
    )


def row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive blocks of about BLOCK_WEIGHTS weights, at least one row each."""
    step = max(1, BLOCK_WEIGHTS // max(columns, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def over_blocks(
    rows: int, columns: int, work: Callable[[int, int], QuantizeStats]
) -> QuantizeStats:
    """The sum, in row order, of work(start, stop) over blocks of rows, one block a thread.

    As many threads as torch has now, each with torch's own threads at one while this runs (they
    are set back). Sharing every small product between torch's threads instead was 5 to 7 times
    slower where another program has one of the cores (docs/experiments.md, blocks and threads).
    """
    threads = torch.get_num_threads()
    blocks = list(row_blocks(rows, columns))
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, max(len(blocks), 1))) as pool:
            return sum(pool.map(lambda block: work(*block), blocks), QuantizeStats())
    finally:
        torch.set_num_threads(threads)


def require_matrix(weight: Tensor, name: str) -> None:
    """BadTensor unless a weight is [out_features, in_features] with elements in it."""
    if weight.ndim != 2 or weight.numel() == 0:
        raise BadTensor(
            name,
            f"shape {tuple(weight.shape)}, wanted [out_features, in_features]",
            "only the weights of linear layers are quantized",
        )
