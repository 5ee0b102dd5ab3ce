"""Where the rows of a decode step stand, and what its attention is of: the records that the step's
kernels take. The layout of a row's state on the device is in step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer. window: positions that a query sees, its own among them; 0 is all. epsilon: of
    the norms on queries and keys."""

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int = 0
    epsilon: float = 1e-6


@dataclass(frozen=True)
class Rows:
    """Where B sequences stand. state: int64 [4, B] as above. caches: the tensors that the addresses
    are of, for kernels that take no addresses."""

    state: Tensor
    caches: list[Tensor]

    @property
    def tokens(self) -> Tensor:
        return self.state[0]

    @property
    def positions(self) -> Tensor:
        return self.state[1]

    @property
    def addresses(self) -> Tensor:
        return self.state[2]

    @property
    def capacities(self) -> Tensor:
        return self.state[3]


@dataclass(frozen=True)
class Rotary:
    """cosines and sines fp32 [positions, head_dim / 2]; norms [head_dim] on queries and keys before
    them, or None."""

    cosines: Tensor
    sines: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
