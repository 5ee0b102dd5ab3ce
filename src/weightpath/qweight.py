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

    def zeros_as_codes(self, name: str) -> Tensor | None:
        """Zeros as uint8 [N, nG], for a store of fields of `bits`; None where there are none.

        BadTensor where one does not fit: stored, it would spill into its neighbours.
        """
        if self.zeros is None:
            return None
        low, high = int(self.zeros.min()), int(self.zeros.max())
        if low < 0 or high > self.scheme.top_code:
            raise BadTensor(
                name,
                f"zeros are {low}..{high}, {self.scheme.bits} bits hold 0..{self.scheme.top_code}",
                "requantize it, or store it in a format that holds them",
            )
        return self.zeros.to(torch.uint8)

    def check(self, name: str) -> QWeight:
        """Itself, if shapes, ranges and scales are sound; else BadTensor with the numbers."""
        if self.codes.dtype != torch.uint8 or self.codes.ndim != 2 or not self.codes.numel():
            raise BadTensor(
                name,
                f"codes are {self.codes.dtype} {tuple(self.codes.shape)}, wanted torch.uint8 [N, K]",
                "convert them to unsigned codes, a row for every output",
            )
        n, k = self.codes.shape
        if self.g_idx is None and not self.scheme.divides(k):
            raise BadTensor(
                name,
                f"in_features {k} is not a multiple of group size {self.scheme.group_size}",
                "check group_size in the checkpoint's quantization config",
            )
        groups = self.scales.shape[-1] if self.scales.ndim else 0
        wanted = (n, groups if self.g_idx is not None else self.scheme.groups(k))
        self._check_parts(name, wanted)
        if self.g_idx is not None:
            self._check_order(name, groups)
        if int(self.codes.max()) > self.scheme.top_code:
            raise BadTensor(
                name,
                f"code {int(self.codes.max())} exceeds {self.scheme.top_code}",
                "the file is damaged: fetch it again",
            )
        return self

    def _check_parts(self, name: str, wanted: tuple[int, int]) -> None:
        """Scales, zeros and minimums: shape [N, nG], dtype, and no NaN or Inf."""
        mend = "check group_size in the checkpoint's quantization config"
        for part, values in (
            ("scales", self.scales),
            ("zeros", self.zeros),
            ("minimums", self.minimums),
        ):
            if values is None:
                continue
            if tuple(values.shape) != wanted or 0 in wanted:
                raise BadTensor(
                    name, f"{part} have shape {tuple(values.shape)}, wanted {wanted}", mend
                )
            if values.is_floating_point() != (part != "zeros"):
                kind = "integers" if part == "zeros" else "floats"
                raise BadTensor(name, f"{part} are {values.dtype}, wanted {kind}",
                                "the file is damaged: fetch it again")  # fmt: skip
            if part != "zeros" and not bool(torch.isfinite(values).all()):
                row, group = (~torch.isfinite(values)).nonzero()[0].tolist()
                raise BadTensor(
                    name,
                    f"{part.removesuffix('s')} [{row}, {group}] is {float(values[row, group])}",
                    "the checkpoint is damaged: quantize or fetch it again",
                )
        if self.zeros is not None and self.minimums is not None:
            raise BadTensor(
                name, "both integer zeros and float minimums are given", "keep one of them"
            )
        if self.scheme.symmetric != (self.zeros is None and self.minimums is None):
            has = "zeros or minimums" if self.scheme.symmetric else "neither zeros nor minimums"
            raise BadTensor(
                name, f"scheme {self.scheme.name} has {has}", "state the scheme that the parts have"
            )

    def _check_order(self, name: str, groups: int) -> None:
        order = self.g_idx
        assert order is not None
        k = self.in_features
        sound = order.shape == (k,) and not order.is_floating_point()
        found = f"range {int(order.min())}..{int(order.max())}" if sound else f"{order.dtype}"
        if not sound or int(order.min()) < 0 or int(order.max()) >= groups:
            raise BadTensor(
                name,
                f"g_idx has shape {tuple(order.shape)} and {found}, wanted ({k},) within "
                f"0..{groups - 1}",
                "the file is damaged: fetch it again",
            )


@dataclass(frozen=True)
class ScaleChange:
    """What another dtype does to scales: relative changes |s' - s| / |s|, inf where s overflows."""

    exact: bool
    largest: float
    mean: float
    changed: int


def scale_change(qweight: QWeight, dtype: torch.dtype) -> ScaleChange:
    """What storing the scales as `dtype` would change. A scale of 0 is never changed."""
    before = qweight.scales.double()
    after = qweight.scales.to(dtype).double()
    change = torch.where(before == after, 0.0, (after - before).abs() / before.abs())
    changed = int((before != after).sum())
    return ScaleChange(changed == 0, float(change.max()), float(change.mean()), changed)


def in_scheme(qweight: QWeight, scheme: Scheme) -> tuple[QWeight, tuple[str, ...]] | None:
    """The same weights in the fields of another scheme, and how; None where they do not fit.

    Exact, and never more than copies: zero points written out or left out where they are the
    midpoint, groups cut by repeating scales, codes in wider fields (symmetric ones moved to the new
    midpoint). Float minimums do not fit; a column order stays and its groups are not cut.
    """
    old, k = qweight.scheme, qweight.in_features
    scheme = scheme.with_activations(16)
    if old.with_activations(16) == scheme:
        return qweight, ()
    if qweight.minimums is not None or scheme.bits < old.bits or not scheme.divides(k):
        return None
    steps: list[str] = []
    codes, scales, zeros = qweight.codes, qweight.scales, qweight.zeros
    if scheme.symmetric and zeros is not None:
        if not bool((zeros == old.midpoint).all()):
            return None
        zeros = None
        steps.append(f"zero points, all {old.midpoint}, left out")
    elif not scheme.symmetric and zeros is None:
        zeros = torch.full(scales.shape, old.midpoint, dtype=torch.int16, device=scales.device)
        steps.append(f"zero points of {old.midpoint} written out")
    size = k if old.group_size == PER_CHANNEL else old.group_size
    wanted = k if scheme.group_size == PER_CHANNEL else scheme.group_size
    if wanted != size:
        if qweight.g_idx is not None or size % wanted:
            return None
        scales = scales.repeat_interleave(size // wanted, dim=1)
        zeros = None if zeros is None else zeros.repeat_interleave(size // wanted, dim=1)
        steps.append(f"groups of {size} cut to {wanted}")
    if scheme.bits > old.bits:
        if scheme.symmetric:
            codes = codes + (scheme.midpoint - old.midpoint)
        steps.append(f"{old.bits}-bit codes in {scheme.bits}-bit fields")
    return replace(qweight, scheme=scheme, codes=codes, scales=scales, zeros=zeros), tuple(steps)
