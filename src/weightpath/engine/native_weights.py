"""A model's linears as the native engine takes them: addresses, and the tensors kept alive.

Low-bit modules become `CpuTiles`; plain linears stay where they are, in their own dtype. Norms and
biases are copied to fp32, which holds every value that they have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import KINDS, CpuTiles
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear


def tiles_of(module: Int4Linear | Int8Linear) -> CpuTiles:
    """The packed layout of one low-bit linear."""
    if isinstance(module, Int8Linear):
        return cpu.pack_parts(
            module.codes, cpu.INT8, module.scale[:, None], None,
            bits=8, group_size=module.in_features,
        )  # fmt: skip
    return cpu.pack_parts(
        module.packed, cpu.NIBBLES, module.scales, module.zeros,
        bits=4, group_size=module.in_features // module.scales.shape[1],
    )  # fmt: skip


class Weights:
    """Matrices and vectors for the C++ decoder. `kept` holds what their addresses point into.

    per_group: an activation scale for every group of a low-bit linear instead of every row.
    bytes: of all matrices, which is what one token reads.
    """

    def __init__(self, per_group: bool = False) -> None:
        self.per_group = per_group
        self.kept: list[Tensor] = []
        self.bytes = 0

    def vector(self, values: Tensor | None) -> int:
        """The address of a contiguous fp32 copy; 0 for None."""
        return 0 if values is None else self._address(values.detach().float().contiguous())

    def matrix(self, module: nn.Module) -> Any:
        """The C++ matrix of one linear."""
        module_cpp, order, scales = cpu.extension(), None, None
        if isinstance(module, GatheredLinear):
            order, scales, module = module.order, module.scales, module.inner
        if not isinstance(module, Int4Linear | Int8Linear):
            assert isinstance(module, nn.Linear)
            weight = module.weight.detach().contiguous()
            self.bytes += weight.numel() * weight.element_size()
            n, k = weight.shape
            address, kind = self._address(weight), KINDS[weight.dtype]
            return module_cpp.float_matrix(n, k, address, kind, self.vector(module.bias))
        tiles = tiles_of(module)
        self.bytes += tiles.packed.numel()
        return module_cpp.packed_matrix(
            bits=tiles.bits,
            n=tiles.out_features,
            k=tiles.in_features,
            group=tiles.group_size,
            zeros=tiles.zeros,
            scales=KINDS[tiles.scale_dtype],
            packed=self._address(tiles.packed),
            bias=self.vector(module.bias),
            planes=1 if isinstance(module, Int4Linear) and module.scheme.activation_bits == 8 else 2,
            per_group=self.per_group,
            order=0 if order is None else self._address(order.to(torch.int64).contiguous()),
            column_scales=self.vector(scales),
        )

    def _address(self, values: Tensor) -> int:
        self.kept.append(values)
        return values.data_ptr()
