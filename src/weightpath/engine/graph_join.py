"""Linears of one input made one: codes, scales and zeros one below the other along N.

Only linears of one kind, scheme, scale dtype and kernel are joined; others stay apart. Linears behind
the same gather (GPTQ orders columns by their inputs, so those of one input share an order) are joined
behind one. What a joined linear was made from stays in the model as a view (floats) or a JoinedLinear
(low-bit).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.joined_linear import JoinedLinear
from weightpath.nn.low_bit_linear import LowBitLinear

Products = tuple[nn.Module, ...]
"""Linears of one input: one that gives all outputs side by side, or one for each output."""


def join(parent: nn.Module, names: Sequence[str]) -> Products:
    """The linears `names` of a module as one, or as they are; `parent` keeps what stands for each."""
    outer: list[Any] = [getattr(parent, name) for name in names]
    gathered = _one_gather(outer)
    modules = [module.inner for module in outer] if gathered else outer
    if all(isinstance(module, JoinedLinear) for module in modules):  # by another engine before
        whole = modules[0].inner
        return (_behind(outer[0], whole) if gathered else whole,)
    if len({_kind(module) for module in modules}) > 1 or _kind(modules[0]) is None:
        return tuple(outer)
    whole = joined(modules)
    start = 0
    for name, module in zip(names, modules, strict=True):
        end = start + module.out_features
        if isinstance(whole, LowBitLinear):
            part = JoinedLinear(whole, start, end)
            setattr(parent, name, _behind(outer[0], part) if gathered else part)
        else:
            for key, value in whole.named_parameters():
                setattr(module, key, nn.Parameter(value.detach()[start:end], requires_grad=False))
        start = end
    return (_behind(outer[0], whole) if gathered else whole,)


def _one_gather(modules: Sequence[Any]) -> bool:
    """Whether all are low-bit linears behind gathers of one order and the same scales."""
    if not all(isinstance(module, GatheredLinear) for module in modules):
        return False
    first = modules[0]
    return all(
        _same(module.order, first.order) and _same(module.scales, first.scales)
        for module in modules[1:]
    )


def _behind(gather: GatheredLinear, inner: nn.Module) -> GatheredLinear:
    """Another linear behind the same gather."""
    return GatheredLinear(inner, gather.order, gather.scales).eval()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def joined(modules: Sequence[Any]) -> Any:
    """A new linear [sum of N, K] of linears of one kind."""
    first = modules[0]
    bias = _stacked([module.bias for module in modules])
    if not isinstance(first, LowBitLinear):
        weight = _stacked([module.weight for module in modules])
        assert weight is not None
        plain = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias, requires_grad=False)
        return plain.eval()
    parts: Any = {
        name: _stacked([getattr(module, name) for module in modules]) for name in first.PLAIN
    }
    if isinstance(first, Int4Linear):
        low: LowBitLinear = Int4Linear(**parts, scheme=first.scheme, bias=bias)
    else:
        low = Int8Linear(**parts, bias=bias)
    low.scale_per_group, low.backend = first.scale_per_group, first.backend
    return low.eval()


def _kind(module: Any) -> tuple[Any, ...] | None:
    """What must be the same in linears that are joined; None: a kind that is never joined."""
    if type(module) is nn.Linear:
        return (nn.Linear, module.weight.dtype, module.bias is None)
    if type(module) not in (Int4Linear, Int8Linear):
        return None
    scales = getattr(module, module.PLAIN[1])
    groups = 1 if scales.dim() == 1 else scales.shape[1]
    bias = None if module.bias is None else module.bias.dtype
    symmetric = getattr(module, "zeros", None) is None
    return (
        type(module), module.scheme, module.scale_per_group, module.backend, scales.dtype, groups,
        symmetric, bias,
    )  # fmt: skip


def _stacked(values: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors one below the other; None where there are none."""
    kept = [value.detach() for value in values if value is not None]
    return torch.cat(kept) if kept else None
