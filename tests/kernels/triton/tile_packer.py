"""Gpu tiles written out value by value from their description, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """codes, scales and zeros as the kernels read them; weight float64 [N, K] that they stand for.

    group_size in columns, K padded where there is one group.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    weight: Tensor
    group_size: int


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Integers [N, K], N and K multiples of 64, to int32 words [N/64, K/64, 4, 32, 4], or of 8 bits
    [N/64, K/64, 4, 2, 32, 4]."""
    n, k = codes.shape
    lanes = torch.arange(32)
    g, q = lanes // 4, lanes % 4
    tiles = codes.long().view(n // 64, 4, 16, k // 64, 64).permute(0, 3, 1, 2, 4)
    if bits == 4:
        words = torch.zeros((n // 64, k // 64, 4, 32, 4), dtype=torch.int64)
        for j in range(4):
            for p in range(4):
                for h in range(2):
                    row, column = g + 8 * (p & 1), 16 * j + 2 * q + h + 8 * (p >> 1)
                    words[..., j] |= (tiles[..., row, column] & 15) << (4 * p + 16 * h)
    else:
        words = torch.zeros((n // 64, k // 64, 4, 2, 32, 4), dtype=torch.int64)
        for s in range(2):
            for i in range(4):
                for e in range(2):
                    for h in range(2):
                        j, p = 2 * s + i // 2, 2 * (i % 2) + e
                        row, column = g + 8 * (p & 1), 16 * j + 2 * q + h + 8 * (p >> 1)
                        byte = (tiles[..., row, column] & 255) << (8 * e + 16 * h)
                        words[..., s, :, i] |= byte
    return words.to(torch.int32)


def pack_groups(values: Tensor) -> Tensor:
    """Scales or zeros [N, G], N a multiple of 64, to [N/64, G, 64]: 16t + 2g + i is row 16t + g + 8i."""
    n, groups = values.shape
    place = torch.arange(64)
    row = place // 16 * 16 + place % 16 // 2 + 8 * (place % 2)
    return values.view(n // 64, 64, groups)[:, row].transpose(1, 2).contiguous()


def random_tiles(
    n: int,
    k: int,
    group_size: int,
    seed: int,
    bits: int = 4,
    asymmetric: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Packed:
    """A random weight [N, K]; group_size in columns, 0 for one group a row."""
    draw = torch.Generator().manual_seed(seed)
    padded_n, padded_k = -(-n // 64) * 64, -(-k // 64) * 64
    columns = group_size or padded_k
    groups = -(-padded_k // columns)
    low, high, middle = (0, 16, 8) if bits == 4 else (-127, 128, 0)
    codes = torch.randint(low, high, (padded_n, padded_k), generator=draw)
    zeros = torch.randint(0, 16, (padded_n, groups), generator=draw)
    scales = (torch.rand((padded_n, groups), generator=draw) * 0.02 + 1e-3).to(scale_dtype)
    scales[n:] = 0
    scales[:, -(-k // columns) :] = 0
    offset = zeros if asymmetric else torch.full_like(zeros, middle)
    of_column = torch.arange(padded_k) // columns
    weight = (codes - offset[:, of_column]).double() * scales.double()[:, of_column]
    return Packed(
        pack_codes(codes, bits).to(device),
        pack_groups(scales).to(device),
        pack_groups(zeros.to(torch.uint8)).to(device) if asymmetric else None,
        weight[:n, :k].to(device),
        columns,
    )
