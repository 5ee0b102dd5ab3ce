"""The module that runs one linear as read: low-bit where a kernel takes its integers, else float.

4 bits and fewer, in groups         Int4Linear; fewer bits in 4-bit fields
8 bits, symmetric, per channel      Int8Linear
a column order, column scales       the same behind a GatheredLinear
anything else                       its weight as floats in a plain linear, with the reason
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weightpath.checkpoints import column_order
from weightpath.checkpoints.read_linear import ReadLinear, whole_zeros
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.qweight import QWeight, in_scheme
from weightpath.scheme import PER_CHANNEL


@dataclass(frozen=True)
class Built:
    """A module for one linear. why_float: the sentence, where it is a plain linear of floats."""

    module: nn.Module
    why_float: str = ""


def module_of(name: str, read: ReadLinear, bias: Tensor | None, dtype: torch.dtype) -> Built:
    """The module of a linear. dtype: of the weight where it has to be floats."""
    qweight, order = read.qweight, None
    if qweight is None:
        return _float(read, bias, dtype, "it has no integers with groups along in_features")
    qweight = whole_zeros(name, qweight)
    if qweight.g_idx is not None:
        order = column_order.contiguous_order(qweight.g_idx)
        qweight = column_order.permute_columns(qweight, order)
    why = _refused(qweight)
    if why:
        return _float(read, bias, dtype, why)
    if qweight.scheme.bits == 8:
        inner: nn.Module = Int8Linear.from_qweight(qweight, bias, name)
    else:
        wide = in_scheme(qweight, replace(qweight.scheme, bits=4))
        assert wide is not None  # the same groups and symmetry, no fewer bits
        inner = Int4Linear.from_qweight(wide[0], bias, name)
    if order is None and read.column_scales is None:
        return Built(inner)
    return Built(GatheredLinear(inner, order, read.column_scales))


def _refused(qweight: QWeight) -> str:
    """Why no low-bit module takes these integers, or nothing."""
    scheme = qweight.scheme
    if qweight.g_idx is not None:
        return "its groups are of unequal size"
    if qweight.minimums is not None:
        return "its minimums are not whole zero points"
    if scheme.bits == 8:
        if not scheme.symmetric or scheme.group_size != PER_CHANNEL:
            return f"int8 runs per output channel and symmetric, not {scheme.name}"
        return ""
    if scheme.bits > 4:
        return f"no module takes {scheme.bits} bits"
    if qweight.in_features % 2:
        return f"in_features {qweight.in_features} is odd, and 4-bit codes are packed in pairs"
    return ""


def float_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A plain linear on these very tensors."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    for parameter in linear.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return linear


def _float(read: ReadLinear, bias: Tensor | None, dtype: torch.dtype, why: str) -> Built:
    return Built(float_linear(read.weight().to(dtype), bias), why)
