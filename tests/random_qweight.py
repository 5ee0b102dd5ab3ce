"""A QWeight of random integers, for tests of layouts and kernels."""

from __future__ import annotations

import torch

from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme


def a_qweight(
    n: int,
    k: int,
    group_size: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> QWeight:
    """Random codes; scales of both signs, about 0.01."""
    draw = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == PER_CHANNEL else k // group_size
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=draw)
    scales = (torch.randn(n, groups, generator=draw) * 0.01).to(dtype)
    zeros = None
    if not symmetric:
        zeros = torch.randint(0, 16, (n, groups), generator=draw).to(torch.int16)
    return QWeight(Scheme(bits, group_size, symmetric), codes, scales, zeros)
