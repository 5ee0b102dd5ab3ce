"""QWeight: one linear's weight as integers. Every format reads into it and writes from it.

    w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])        integer zero points
    w[n, k] = scales[n, g] * codes[n, k] + minimums[n, g]       float minimums (Q4_1, Q4_K, tinygemm)
    g = g_idx[k] where a column order is kept, else k // group_size

Shapes: codes uint8 [N, K]; scales float [N, nG]; zeros int16 [N, nG]; minimums float [N, nG];
g_idx int32 [K]. Symmetric: zeros and minimums are None and the zero is the scheme's midpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightpath.errors import BadTensor
from weightpath.scheme import PER_CHANNEL, Scheme


@dataclass(frozen=True)
class QWeight:
    """Codes, scales, zeros (or minimums) and column order of one weight [N, K]."""

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    g_idx: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def group_of_column(self) -> Tensor:
        """Group index of every column, int64 [K]."""
        if self.g_idx is not None:
            return self.g_idx.long()
        size = self.in_features if self.scheme.group_size == PER_CHANNEL else self.scheme.group_size
        return torch.arange(self.in_features, device=self.codes.device) // size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that these integers stand for, computed in fp32, then cast."""
        n, k = self.codes.shape
        groups = self.scales.shape[1]
        if self.g_idx is None and k % groups == 0:
            shape: tuple[int, ...] = (n, groups, k // groups)
            spread = (slice(None), slice(None), None)
        else:
            shape, spread = (n, k), (slice(None), self.group_of_column())
        weight = self.codes.float().view(shape)
        scales = self.scales.float()[spread]
        if self.minimums is not None:
            return (weight * scales + self.minimums.float()[spread]).view(n, k).to(dtype)
        zeros = self.scheme.midpoint if self.zeros is None else self.zeros.float()[spread]
        return ((weight - zeros) * scales).view(n, k).to(dtype)

    def rows(self, start: int, stop: int) -> QWeight:
        """Rows start..stop as views, for work that must stay within a memory bound."""
        cut = slice(start, stop)
        return replace(
            self,
            codes=self.codes[cut],
            scales=self.scales[cut],
            zeros=None if self.zeros is None else self.zeros[cut],
            minimums=None if self.minimums is None else self.minimums[cut],
        )

    def stored_bits(self) -> int:
        """Bits of the parts themselves: packed codes, scales, packed zeros or minimums, order."""
        total = (
            self.codes.numel() * self.scheme.bits
            + self.scales.numel() * self.scales.element_size() * 8
        )
        if self.zeros is not None:
            total += self.zeros.numel() * self.scheme.bits
        if self.minimums is not None:
            total += self.minimums.numel() * self.minimums.element_size() * 8
        if self.g_idx is not None:
            total += self.g_idx.numel() * 32
        return total

    def check(self, name: str) -> QWeight:
        """Itself, if shapes, ranges and scales are sound; else BadTensor with the numbers."""
        n, k = self.codes.shape
        groups = self.scales.shape[-1]
        if self.codes.dtype != torch.uint8:
            raise BadTensor(
                name,
                f"codes are {self.codes.dtype}, wanted torch.uint8",
                "convert them to unsigned codes",
            )
        wanted = (n, groups if self.g_idx is not None else self.scheme.groups(k))
        if tuple(self.scales.shape) != wanted:
            raise BadTensor(
                name,
                f"scales have shape {tuple(self.scales.shape)}, wanted {wanted}",
                "check group_size in the checkpoint's quantization config",
            )
        for part, values in (("zeros", self.zeros), ("minimums", self.minimums)):
            if values is not None and tuple(values.shape) != wanted:
                raise BadTensor(
                    name,
                    f"{part} have shape {tuple(values.shape)}, wanted {wanted}",
                    "check group_size in the checkpoint's quantization config",
                )
        if self.zeros is not None and self.minimums is not None:
            raise BadTensor(
                name, "both integer zeros and float minimums are given", "keep one of them"
            )
        if self.g_idx is not None and (
            self.g_idx.shape != (k,) or int(self.g_idx.min()) < 0 or int(self.g_idx.max()) >= groups
        ):
            raise BadTensor(
                name,
                f"g_idx has shape {tuple(self.g_idx.shape)} and range {int(self.g_idx.min())}.."
                f"{int(self.g_idx.max())}, wanted ({k},) within 0..{groups - 1}",
                "the file is damaged: fetch it again",
            )
        if k and n and int(self.codes.max()) > self.scheme.top_code:
            raise BadTensor(
                name,
                f"code {int(self.codes.max())} exceeds {self.scheme.top_code}",
                "the file is damaged: fetch it again",
            )
        for part, values in (("scale", self.scales), ("minimum", self.minimums)):
            if values is not None and not bool(torch.isfinite(values).all()):
                row, group = (~torch.isfinite(values)).nonzero()[0].tolist()
                raise BadTensor(
                    name,
                    f"{part} [{row}, {group}] is {float(values[row, group])}",
                    "the checkpoint is damaged: quantize or fetch it again",
                )
        return self
