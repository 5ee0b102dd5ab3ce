"""A model's linears as the native engine takes them: addresses, and the tensors kept alive.

Low-bit modules become `CpuTiles`; plain linears stay where they are, in their own dtype. Norms and
biases are copied to fp32, which holds every value that they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import KINDS, ROWS, CpuTiles
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.low_bit_linear import LowBitLinear

SMALL = 4 << 20
"""Bytes of a packed matrix from which it stays where it was packed, in huge pages of its own."""


def tiles_of(module: LowBitLinear) -> CpuTiles:
    """The packed layout of one low-bit linear, which holds it from now on."""
    module.set_backend(None)
    tiles = module.cpu_tiles
    assert tiles is not None  # `refusal` has seen to that
    return tiles


class Weights:
    """Matrices and vectors for the C++ decoder. `kept` holds what their addresses point into.

    Packed matrices under SMALL bytes lie one after another in one mapping of huge pages, in the
    order in which a step reads them, and the tiles of a pair (gate, up) alternate: one linear
    stream. A small matrix alone would be in pages of 4 KiB, which read at half the speed. The modules
    hold their tiles there too, so that weights are in memory once.

    modules: all linears, whose sizes make the mapping's. bytes: of all matrices, which is what one
    token reads. blocks: the packed matrices in the order in which a step reads them, uint8 [tiles,
    bytes], each with the modules whose tiles are its columns.

    Modules whose tiles are rows of a matrix already (another engine's, or a mapped file's) are read
    where they are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.kept: list[Tensor] = []
        self.blocks: list[tuple[Tensor, tuple[LowBitLinear, ...]]] = []
        self.bytes = 0
        low_bit = [plain for plain in map(_plain, modules) if isinstance(plain, LowBitLinear)]
        moving = [tiles.packed.numel() for tiles in map(tiles_of, low_bit) if _moves(tiles)]
        self._arena = cpu.fresh_memory(sum(moving))
        self._used = 0

    def vector(self, values: Tensor | None) -> int:
        """The address of a contiguous fp32 copy; 0 for None."""
        return 0 if values is None else self._address(values.detach().float().contiguous())

    def matrices(self, modules: Sequence[nn.Module], paired: bool = False) -> list[Any]:
        """The C++ matrices of linears that are read one after another, or tile by tile in pairs."""
        tiles = [
            tiles_of(plain) if isinstance(plain, LowBitLinear) else None
            for plain in map(_plain, modules)
        ]
        small = [one for one in tiles if one is not None and _moves(one)]
        if paired and len(small) == len(tiles) and len({_count(one) for one in small}) == 1:
            rows = [one.packed.view(_count(one), -1) for one in small]
            joint = self._placed(torch.cat(rows, dim=1).flatten()).view(_count(small[0]), -1)
            starts = [0, *accumulate(row.shape[1] for row in rows)]
            views = [joint[:, start:stop] for start, stop in pairwise(starts)]
            self.blocks.append((joint, tuple(map(_plain, modules))))
        else:
            views = [None if one is None else self._rows(one) for one in tiles]
            for module, view in zip(modules, views, strict=True):
                if view is not None:
                    self.blocks.append((view, (_plain(module),)))
        for module, view in zip(modules, views, strict=True):
            if view is not None:
                _plain(module).hold_rows(view)
        return [
            self._floats(module) if one is None or view is None else self._packed(module, one, view)
            for module, one, view in zip(modules, tiles, views, strict=True)
        ]

    def _floats(self, module: nn.Module) -> Any:
        assert isinstance(module, nn.Linear)
        weight = module.weight.detach().contiguous()
        self.bytes += weight.numel() * weight.element_size()
        n, k = weight.shape
        address, kind = self._address(weight), KINDS[weight.dtype]
        return cpu.extension().float_matrix(n, k, address, kind, self.vector(module.bias))

    def _packed(self, module: nn.Module, tiles: CpuTiles, rows: Tensor) -> Any:
        """rows [tiles, bytes]: a tile each, at the row's beginning."""
        plain, order, scales = _plain(module), None, None
        if isinstance(module, GatheredLinear):
            order, scales = module.order, module.scales
        self.bytes += tiles.packed.numel()
        return cpu.extension().packed_matrix(
            bits=tiles.bits,
            n=tiles.out_features,
            k=tiles.in_features,
            group=tiles.group_size,
            zeros=tiles.zeros,
            scales=KINDS[tiles.scale_dtype],
            packed=self._address(rows),
            stride=rows.stride(0),
            bias=self.vector(plain.bias),
            planes=plain.activation_bits // 8,
            per_group=plain.takes_scales_per_group,
            order=0 if order is None else self._address(order.to(torch.int64).contiguous()),
            column_scales=self.vector(scales),
        )

    def _rows(self, tiles: CpuTiles) -> Tensor:
        """A matrix's rows [tiles, bytes], placed where that is due."""
        if tiles.packed.dim() == 2:
            return tiles.packed
        packed = self._placed(tiles.packed) if _moves(tiles) else tiles.packed
        return packed.view(_count(tiles), -1)

    def _placed(self, packed: Tensor) -> Tensor:
        """A copy in the mapping, after what was placed before."""
        place = self._arena[self._used : self._used + packed.numel()]
        self._used += packed.numel()
        return place.copy_(packed.reshape(-1))

    def _address(self, values: Tensor) -> int:
        self.kept.append(values)
        return values.data_ptr()


def _plain(module: nn.Module) -> Any:
    """A linear behind its gather."""
    return module.inner if isinstance(module, GatheredLinear) else module


def _count(tiles: CpuTiles) -> int:
    return -(-tiles.out_features // ROWS)


def _moves(tiles: CpuTiles) -> bool:
    """Whether a packed matrix is small, and no row of another one."""
    return tiles.packed.dim() == 1 and tiles.packed.numel() < SMALL
