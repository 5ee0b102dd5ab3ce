"""The decode step for B rows, captured once in a CUDA graph and replayed.

State, caches' addresses and results lie in tensors whose places never change: `load` writes where the
rows stand, `run` replays, and a replay's tokens and positions are the next one's input. Rows beyond
the sequences given stand on a cache of their own, at position 0. Where nothing is captured (the CPU,
or by request) `run` is the same step, eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weightpath.kernels.step_records import Rows

Step = Callable[[Rows, Tensor], Tensor]
"""step(rows, bad) -> logits [B, vocabulary]."""
MOST_ROWS = 64
WARM_UPS = 2
"""Steps before the capture: kernels are compiled and libraries set up in them."""


class StepRunner:
    """One step of `size` rows. idle: the cache that rows without a sequence stand on. pool: of
    memory that captured graphs share.

    logits: [size, vocabulary] of the last run. bad: int32 [size], 1 where they are not finite."""

    logits: Tensor

    def __init__(self, step: Step, size: int, idle: Tensor, capture: bool, pool: Any) -> None:
        self.size = size
        self._step, self._idle = step, idle
        state = torch.zeros(4, size, dtype=torch.int64, device=idle.device)
        self.rows = Rows(state, [idle] * size)
        self.bad = torch.zeros(size, dtype=torch.int32, device=idle.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture:
            self._capture(pool)

    def _capture(self, pool: Any) -> None:
        self.load([], [], [])
        side = torch.cuda.Stream(self._idle.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.logits = self._step(self.rows, self.bad)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.logits = self._step(self.rows, self.bad)
        self._graph = graph

    def load(
        self, tokens: Sequence[int], positions: Sequence[int], caches: Sequence[Tensor]
    ) -> None:
        """Where the rows stand before the next run: the id to run, what its cache holds, its cache."""
        count = self.size - len(tokens)
        self.rows.caches[:] = [*caches, *[self._idle] * count]
        state = [
            [*tokens, *[0] * count],
            [*positions, *[0] * count],
            [cache.data_ptr() for cache in self.rows.caches],
            [cache.shape[3] for cache in self.rows.caches],
        ]
        self.rows.state.copy_(torch.tensor(state))

    def run(self) -> Tensor:
        """One step: logits [size, vocabulary], overwritten by the next one; rows are advanced."""
        if self._graph is None:
            self.logits = self._step(self.rows, self.bad)
        else:
            self._graph.replay()
        return self.logits
