"""Random inputs for the kernels of a decode step, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from weightpath.kernels.step_records import AttentionShape, Rotary, Rows

POSITIONS = (0, 5, 70, 199)
CAPACITIES = (16, 8, 96, 200)
SHAPES = {
    "two heads a group": AttentionShape(4, 2, 16, 0.25),
    "a window and norms": AttentionShape(9, 3, 64, 0.125, window=40),
    "one kv head of 80": AttentionShape(7, 1, 80, 0.1),
    "as many kv heads, a short window": AttentionShape(4, 4, 32, 0.2, window=5),
    "heads of 128": AttentionShape(8, 2, 128, 0.088),
    "twenty heads a group": AttentionShape(20, 1, 32, 0.2),
}
NORMED = ("a window and norms", "twenty heads a group")


class Source:
    """Seeded normal numbers on a device."""

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(sizes, generator=self._generator).to(self.device, dtype)


def rows(source: Source, shape: AttentionShape, dtype: torch.dtype, layers: int = 2) -> Rows:
    """Four sequences at POSITIONS on filled caches of CAPACITIES."""
    caches = [
        source.normal(layers, 2, shape.kv_heads, capacity, shape.head_dim, dtype=dtype)
        for capacity in CAPACITIES
    ]
    addresses = [cache.data_ptr() for cache in caches]
    state = [[1] * len(POSITIONS), list(POSITIONS), addresses, list(CAPACITIES)]
    return Rows(torch.tensor(state, device=source.device), caches)


def copied(before: Rows) -> Rows:
    """The same sequences on caches of their own."""
    caches = [cache.clone() for cache in before.caches]
    state = before.state.clone()
    state[2] = torch.tensor([cache.data_ptr() for cache in caches])
    return Rows(state, caches)


def rotary(source: Source, name: str, dtype: torch.dtype) -> Rotary:
    """Tables of 256 positions, and norms where the case has them."""
    head_dim = SHAPES[name].head_dim
    angles = torch.arange(256.0)[:, None] * torch.linspace(1.0, 0.01, head_dim // 2)
    norms = (
        [source.normal(head_dim, dtype=dtype) for _ in range(2)] if name in NORMED else [None] * 2
    )
    return Rotary(angles.cos().to(source.device), angles.sin().to(source.device), *norms)


def queries(
    source: Source, shape: AttentionShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as columns of one product, so that rows are apart."""
    sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = source.normal(len(POSITIONS), sum(sizes), dtype=dtype).split(sizes, dim=1)
    return q, k, v


def far(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
