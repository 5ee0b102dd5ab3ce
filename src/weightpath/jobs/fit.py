"""One linear, as read, made into the integers that a target format holds; what changed is measured.

Codes are kept wherever that is possible, and then nothing is computed:

    a smaller group     scales and zeros repeated
    more bits           the same codes in wider fields (symmetric ones moved to the new midpoint)
    zero points asked   a symmetric weight gets its midpoint
    float minimums      zeros, where every one of them is -(scale * whole number)

Otherwise the weight is quantized again (int8 per channel, or round to nearest in groups), or float
minimums are rounded to the nearest whole zero points where that changes less; the change of every
weight is measured: |w - w'|, the largest and the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightpath.checkpoints.read_linear import ReadLinear, whole_zeros
from weightpath.errors import BadTensor
from weightpath.quantize.int8 import quantize_int8
from weightpath.quantize.rtn import quantize_rtn
from weightpath.quantize.stats import row_blocks
from weightpath.qweight import QWeight, in_scheme
from weightpath.scheme import INT8, Scheme


@dataclass(frozen=True)
class Fitted:
    """The integers, what was done to get them, and by how much weights changed (absolute)."""

    qweight: QWeight
    steps: tuple[str, ...] = ()
    largest_change: float = 0.0
    mean_change: float = 0.0

    @property
    def exact(self) -> bool:
        return self.largest_change == 0.0


def fit(
    name: str,
    read: ReadLinear,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    keep_order: bool = False,
    why: str = "",
) -> Fitted:
    """A linear as `scheme` with scales of `scale_dtype`.

    keep_order: a column order may stay. why: what is known to prevent keeping the codes, for the
    sentence. BadTensor where scales overflow scale_dtype.
    """
    qweight = read.qweight
    kept = None
    if qweight is not None and read.column_scales is None:
        qweight = whole_zeros(name, qweight)
        if qweight.minimums is None and (keep_order or qweight.g_idx is None):
            kept = in_scheme(qweight, scheme)
    if kept is None:
        again = _again(name, read, scheme, scale_dtype, why)
        rounded = _nearest_zeros(name, read, scheme, scale_dtype)
        if rounded is not None and rounded.mean_change < again.mean_change:
            return rounded
        return again
    return _with_scales(name, *kept, scale_dtype)


def _with_scales(
    name: str, kept: QWeight, steps: tuple[str, ...], scale_dtype: torch.dtype
) -> Fitted:
    """Codes kept, scales in another dtype; the change is measured only where there is one."""
    if kept.scales.dtype == scale_dtype:
        return Fitted(kept, steps)
    cast = replace(kept, scales=_cast(name, kept.scales, scale_dtype))
    if torch.equal(cast.scales.double(), kept.scales.double()):
        return Fitted(cast, steps)
    largest, mean = change(cast, kept.dequantize)
    short = str(scale_dtype).removeprefix("torch.")
    return Fitted(cast, (*steps, f"scales rounded to {short}"), largest, mean)


def change(after: QWeight | Tensor, before: Tensor | Callable[[], Tensor]) -> tuple[float, float]:
    """Largest and mean |before - after| over a weight [N, K]; before: a Tensor, or a function that
    gives it. Worked out in blocks of rows in fp32."""
    reference = before if isinstance(before, Tensor) else before()
    n, k = reference.shape
    largest, total = 0.0, 0.0
    for start, stop in row_blocks(n, k):
        rows = after[start:stop] if isinstance(after, Tensor) else after.rows(start, stop)
        values = rows.float() if isinstance(rows, Tensor) else rows.dequantize()
        difference = (values - reference[start:stop].float()).abs_()
        largest = max(largest, float(difference.max()))
        total += float(difference.sum(dtype=torch.float64))
    return largest, total / (n * k)


def _nearest_zeros(
    name: str, read: ReadLinear, scheme: Scheme, scale_dtype: torch.dtype
) -> Fitted | None:
    """Codes kept and minimums rounded to the nearest zero points in range; None without minimums."""
    qweight = read.qweight
    if qweight is None or qweight.minimums is None or read.column_scales is not None:
        return None
    if qweight.g_idx is not None or scheme.symmetric:
        return None
    step = torch.where(qweight.scales == 0, 1.0, qweight.scales.double())
    zeros = (-qweight.minimums.double() / step).round_().clamp_(0, qweight.scheme.top_code)
    whole = replace(qweight, zeros=zeros.to(torch.int16), minimums=None)
    kept = in_scheme(whole, scheme)
    if kept is None:
        return None
    fitted = replace(kept[0], scales=_cast(name, kept[0].scales, scale_dtype))
    largest, mean = change(fitted, qweight.dequantize)
    return Fitted(fitted, (*kept[1], "minimums rounded to whole zero points"), largest, mean)


def _again(
    name: str, read: ReadLinear, scheme: Scheme, scale_dtype: torch.dtype, why: str
) -> Fitted:
    weight = read.weight()
    if scheme == INT8:
        qweight, _ = quantize_int8(weight, scheme, name)
        if scale_dtype != torch.float32:
            qweight = replace(qweight, scales=_cast(name, qweight.scales, scale_dtype))
    else:
        qweight, _ = quantize_rtn(weight, scheme.with_activations(16), scale_dtype, True, name)
    largest, mean = change(qweight, weight)
    step = f"quantized again as {'int8' if scheme == INT8 else scheme.name}"
    return Fitted(qweight, (f"{step}: {why}" if why else step,), largest, mean)


def _cast(name: str, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in another dtype. BadTensor where one overflows it."""
    cast = scales.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        ends = torch.finfo(dtype).max
        raise BadTensor(
            name,
            f"has scales up to {float(scales.abs().max()):.4g}, {dtype} ends at {ends:.6g}",
            "write compressed-tensors, which keeps their dtype",
        )
    return cast
