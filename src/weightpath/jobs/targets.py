"""The formats that `convert` writes: what each holds, and how a linear is fitted to it.

    compressed-tensors  any bits and groups, zero points, the source's own scale dtype
    awq                 4 bits, one group size for all, zero points, fp16 scales (gemm)
    gptq, gptq_v2       2, 3, 4, 8 bits, zero points, a column order, fp16 scales
    int8                per output channel, fp32 scales, as compressed-tensors
    gguf                Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; one file, written in convert_gguf.py

A linear that a format cannot hold stays float, with the reason; one whose integers do not fit it is
quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints import awq, compressed_tensors, gguf_blocks, gptq
from weightpath.checkpoints.opened import Outline
from weightpath.checkpoints.writer import Planned
from weightpath.errors import BadRequest, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import GROUP_SIZES, INT8, PER_CHANNEL, Scheme

Shape = tuple[int, int]
GGUF = "gguf"


@dataclass(frozen=True)
class Choice:
    """What becomes of one linear. scheme None: it stays float, and `why` says the reason.

    again: it must be quantized again, because of `why`. keep_order: its g_idx is stored.
    """

    scheme: Scheme | None
    scale_dtype: torch.dtype
    why: str = ""
    again: bool = False
    keep_order: bool = False


@dataclass(frozen=True)
class Target:
    """One format: its choices for all linears, tensors of one, and its quantization config.

    config(schemes, ignored, ordered) is None for a file that has none.
    """

    name: str
    choose: Callable[[Mapping[str, Outline]], dict[str, Choice]]
    planned: Callable[[str, Scheme, Shape, torch.dtype], tuple[Planned, ...]]
    to_tensors: Callable[[str, QWeight], dict[str, Tensor]]
    config: Callable[[Mapping[str, Scheme], Iterable[str], bool], dict[str, Any]]
    keeps_order: bool = False
    side_file: str = ""


def find_target(name: str) -> Target | None:
    """The target of that name, None for GGUF. BadRequest with the names there are."""
    if name == GGUF:
        return None
    for target in TARGETS:
        if target.name == name:
            return target
    known = ", ".join((*(target.name for target in TARGETS), GGUF))
    raise BadRequest(f"format '{name}': not written; use one of {known}")


def cut_groups(
    choices: Mapping[str, Choice], outlines: Mapping[str, Outline], size: int
) -> dict[str, Choice]:
    """The choices with groups of `size` columns, which repeats scales and keeps every weight.

    BadRequest, naming the linear, where its groups are no multiple of it.
    """
    cut: dict[str, Choice] = {}
    for name, choice in choices.items():
        k = outlines[name].shape[1]
        if choice.scheme is None:
            cut[name] = choice
            continue
        old = k if choice.scheme.group_size == PER_CHANNEL else choice.scheme.group_size
        if size < 1 or old % size:
            raise BadRequest(
                f"group size {size}: {name} has groups of {old}, which cannot be cut to it; give a "
                "divisor, or quantize the float model again"
            )
        if choice.keep_order and size != old:
            raise BadRequest(
                f"group size {size}: {name} keeps a column order, whose groups of {old} cannot be "
                "cut; write compressed-tensors, where orders are folded or quantized again"
            )
        cut[name] = replace(choice, scheme=replace(choice.scheme, group_size=size))
    return cut


def choose_gguf(outlines: Mapping[str, Outline]) -> dict[str, Choice]:
    """What a GGUF file makes of linears: blocks that hold their integers, else floats."""
    choices = {}
    for name, outline in outlines.items():
        scheme, again, why = _integers(outline, ordered_ok=False, minimums_ok=True)
        try:
            gguf_blocks.block_type(name, scheme, outline.shape[1])
            choices[name] = Choice(scheme, torch.float16, why, again)
        except BadTensor as refusal:
            choices[name] = Choice(None, torch.float16, refusal.problem)
    return choices


def _choose_compressed(outlines: Mapping[str, Outline]) -> dict[str, Choice]:
    choices = {}
    for name, outline in outlines.items():
        scheme, again, why = _integers(outline, ordered_ok=False)
        dtype = _halves(outline) if again else outline.scales
        choices[name] = Choice(scheme, dtype, why, again)
    return choices


def _choose_int8(outlines: Mapping[str, Outline]) -> dict[str, Choice]:
    choices = {}
    for name, outline in outlines.items():
        scheme = outline.scheme
        whole = scheme is not None and scheme.group_size in (PER_CHANNEL, outline.shape[1])
        kept = outline.plain and whole and scheme is not None and scheme.symmetric
        found = "floats" if scheme is None else scheme.name
        why = "" if kept else f"{found} is not int8 per channel"
        choices[name] = Choice(INT8, torch.float32, why, not kept)
    return choices


def _choose_awq(outlines: Mapping[str, Outline]) -> dict[str, Choice]:
    """One group size: the smallest of those that linears of up to 4 bits have. Others are cut to it."""
    fitted = {name: _integers(outline, ordered_ok=False) for name, outline in outlines.items()}
    four = {
        name: scheme
        for name, (scheme, _, _) in fitted.items()
        if scheme.bits <= 4 and outlines[name].shape[0] % 8 == 0
    }
    sizes = {
        name: outlines[name].shape[1] if scheme.group_size == PER_CHANNEL else scheme.group_size
        for name, scheme in four.items()
    }
    whole = all(scheme.group_size == PER_CHANNEL for scheme in four.values())
    base = PER_CHANNEL if whole else min(sizes.values(), default=PER_CHANNEL)
    choices = {}
    for name, (scheme, again, why) in fitted.items():
        if name not in four:
            n = outlines[name].shape[0]
            reason = (
                f"{scheme.bits} bits, AWQ has 4"
                if scheme.bits > 4
                else f"out_features {n} is no multiple of 8"
            )
            choices[name] = Choice(None, torch.float16, reason)
            continue
        if base != PER_CHANNEL and sizes[name] % base:
            reason = f"groups of {sizes[name]} cannot be cut to {base}, the file's one group size"
            choices[name] = Choice(None, torch.float16, reason)
            continue
        chosen = Scheme(4, base, symmetric=False)
        choices[name] = Choice(chosen, torch.float16, why, again)
    return choices


def _choose_gptq(outlines: Mapping[str, Outline]) -> dict[str, Choice]:
    choices = {}
    for name, outline in outlines.items():
        scheme, again, why = _integers(outline, ordered_ok=True)
        bits = next((bits for bits in gptq.WRITTEN_BITS if bits >= scheme.bits), 8)
        scheme = replace(scheme, bits=bits)
        try:
            gptq.planned(name, scheme, outline.shape)
            choices[name] = Choice(scheme, torch.float16, why, again, outline.ordered and not again)
        except BadTensor as refusal:
            choices[name] = Choice(None, torch.float16, refusal.problem)
    return choices


def _integers(
    outline: Outline, ordered_ok: bool, minimums_ok: bool = False
) -> tuple[Scheme, bool, str]:
    """The scheme that a linear has or gets, whether it must be quantized again, and why."""
    k = outline.shape[1]
    if outline.scheme is None:
        return Scheme(4, _dividing(k), symmetric=False), True, "floats of no integer grid"
    scheme = outline.scheme.with_activations(16)
    if outline.scaled:
        return _tiling(scheme, k), True, "its activations are scaled by column"
    if outline.ordered and not ordered_ok:
        return _tiling(scheme, k), True, "its column order (g_idx) has no place in the file"
    if not scheme.divides(k):
        why = f"its groups of {scheme.group_size} do not tile {k} columns"
        return _tiling(scheme, k), True, why
    if outline.minimums and not minimums_ok:
        return scheme, False, "its minimums are not whole zero points"
    return scheme, False, ""


def _tiling(scheme: Scheme, in_features: int) -> Scheme:
    return (
        scheme
        if scheme.divides(in_features)
        else replace(scheme, group_size=_dividing(in_features))
    )


def _dividing(in_features: int) -> int:
    """The largest of 64, 32 and 16 that divides K, else whole rows."""
    sizes = (*(size for size in GROUP_SIZES if size <= 64), 16)
    return next((size for size in sizes if in_features % size == 0), PER_CHANNEL)


def _halves(outline: Outline) -> torch.dtype:
    """A 16-bit dtype for new scales: the old ones' where they have one."""
    return torch.float16 if outline.scales == torch.float32 else outline.scales


def _awq_config(
    schemes: Mapping[str, Scheme], ignored: Iterable[str], ordered: bool
) -> dict[str, Any]:
    (size,) = {scheme.group_size for scheme in schemes.values()}  # _choose_awq gives all the same
    return awq.quantization_config(size, True, ignored)


def _gptq_target(version: gptq.Convention) -> Target:
    return Target(
        "gptq" if version == "v1" else "gptq_v2",
        _choose_gptq,
        gptq.planned,
        lambda name, qweight: gptq.to_tensors(name, qweight, version),
        lambda schemes, ignored, ordered: gptq.quantization_config(
            schemes, ignored, version, ordered
        ),
        keeps_order=True,
        side_file="quantize_config.json",
    )


def _compressed_config(
    schemes: Mapping[str, Scheme], ignored: Iterable[str], ordered: bool
) -> dict[str, Any]:
    return compressed_tensors.quantization_config(schemes, ignored)


TARGETS = (
    Target(
        "compressed-tensors",
        _choose_compressed,
        compressed_tensors.planned,
        compressed_tensors.to_tensors,
        _compressed_config,
    ),
    Target(
        "awq",
        _choose_awq,
        lambda name, scheme, shape, _: awq.planned(name, scheme, shape),
        awq.to_tensors,
        _awq_config,
    ),
    _gptq_target("v1"),
    _gptq_target("v2"),
    Target(
        "int8",
        _choose_int8,
        compressed_tensors.planned,
        compressed_tensors.to_tensors,
        _compressed_config,
    ),
)
"""Every target but GGUF, which is one file and has a writer of its own."""
