"""What a reader hands over where a QWeight alone does not say all of a linear.

    W[n, k] = w[n, k] * column_scales[k]

W [N, K] is what the checkpoint multiplies activations with. w is a QWeight, or floats where no
integers with groups along K stand for it (codebooks, groups across rows). column_scales [K] are
factors that the file wants activations multiplied by (AWQ's and SmoothQuant's, where no norm has
taken them up); a QWeight has no place for them.

Also here: the checks of one part of a linear, and whether float offsets are whole zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightpath.errors import BadTensor
from weightpath.qweight import QWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FETCH = "fetch the checkpoint again"
CONFIG = "check group_size in the checkpoint's quantization config"


@dataclass(frozen=True)
class ReadLinear:
    """One linear as read: a QWeight or floats [N, K], column_scales float32 [K] or None, notes."""

    qweight: QWeight | None
    floats: Tensor | None = None
    column_scales: Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def lossy(self) -> bool:
        """Whether no integers stand for it, so that any integer format changes its values."""
        return self.qweight is None

    def weight(self) -> Tensor:
        """W, float32 [N, K], with the column scales in it."""
        if self.qweight is not None:
            weight = self.qweight.dequantize()
        else:
            assert self.floats is not None
            weight = self.floats.float()
        return weight if self.column_scales is None else weight * self.column_scales


def part(
    name: str,
    suffix: str,
    tensors: Mapping[str, Tensor],
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    mend: str = FETCH,
) -> Tensor:
    """The tensor under `suffix`, if it is there, of these dtypes and this shape (None: any size).

    BadTensor otherwise, and where it is empty. Nothing is read or allocated.
    """
    tensor = tensors.get(suffix)
    if tensor is None:
        raise BadTensor(f"{name}.{suffix}", "is missing", FETCH)
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(
        size == wanted or (wanted is None and size > 0)
        for size, wanted in zip(found, shape, strict=False)
    )
    if not fits or tensor.dtype not in dtypes:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadTensor(
            f"{name}.{suffix}",
            f"is {tensor.dtype} {found}, wanted {' or '.join(map(str, dtypes))} ({sizes})",
            mend,
        )
    return tensor


def finite(name: str, suffix: str, tensor: Tensor) -> Tensor:
    """Itself, if no value is NaN or Inf, else BadTensor with the first one."""
    sound = torch.isfinite(tensor)
    if not bool(sound.all()):
        place = (~sound).nonzero()[0].tolist()
        raise BadTensor(
            f"{name}.{suffix}",
            f"{place} is {float(tensor[tuple(place)])}",
            "the checkpoint is damaged: quantize or fetch it again",
        )
    return tensor


def column_scales(
    name: str, suffix: str, tensors: Mapping[str, Tensor], in_features: int
) -> Tensor | None:
    """Factors of the activations as float32 [K]; None where the file has none or all are 1.

    The file may hold [K], [1, K] or a single number.
    """
    tensor = tensors.get(suffix)
    if tensor is None:
        return None
    if tensor.numel() == 1 or tuple(tensor.shape) == (1, in_features):
        tensor = tensor.reshape(-1)
    wanted = 1 if tensor.numel() == 1 else in_features
    checked = part(name, suffix, {suffix: tensor}, FLOATS, (wanted,))
    scales = finite(name, suffix, checked).float().expand(in_features).contiguous()
    return None if bool((scales == 1).all()) else scales


def zeros_or_minimums(
    name: str, bits: int, scales: Tensor, offsets: Tensor
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Zeros int16 or minimums float32 for w = scales * code + offsets, and notes.

    scales [N, nG]; offsets float64 [N, nG], exact. Zeros where every offset is -(scale * z) for a
    whole z in 0 .. 2**bits - 1 (both None where all are the midpoint), else minimums.
    """
    step = scales.double()
    midpoint = 1 << (bits - 1)
    whole = torch.where(step == 0, float(midpoint), torch.round(-offsets / step))
    agrees = (-(step * whole) == offsets) & (whole >= 0) & (whole < 1 << bits)
    if bool(agrees.all()):
        zeros = whole.to(torch.int16)
        return (None if bool((zeros == midpoint).all()) else zeros), None, ()
    minimums = offsets.float()
    change = torch.where(step == 0, 0.0, (minimums.double() - offsets).abs() / step.abs())
    largest = float(torch.nan_to_num(change).max())
    notes = (
        f"{name}: {int((~agrees).sum())} of {agrees.numel()} zero points are not whole, so all are "
        "kept as float minimums; formats with integer zeros need it requantized",
    )
    if largest > 0:
        notes += (f"{name}: the minimums are rounded to float32, by up to {largest:.2g} of a step",)
    return None, minimums, notes


def whole_zeros(name: str, qweight: QWeight) -> QWeight:
    """A weight of float minimums as one of zeros, where that changes nothing; else itself."""
    if qweight.minimums is None:
        return qweight
    bits = qweight.scheme.bits
    zeros, minimums, _ = zeros_or_minimums(name, bits, qweight.scales, qweight.minimums.double())
    if minimums is not None:
        return qweight
    if zeros is None:
        zeros = torch.full(qweight.scales.shape, qweight.scheme.midpoint, dtype=torch.int16)
    return replace(qweight, zeros=zeros, minimums=None)
