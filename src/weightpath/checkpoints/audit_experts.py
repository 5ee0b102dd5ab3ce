"""Audit of mixture-of-experts weights: every expert there, and how they are stored.

    2-D   model.layers.0.mlp.experts.5.up_proj.weight   one matrix an expert
    3-D   model.layers.0.mlp.experts.gate_up_proj       one tensor for all, [experts, ...]

transformers 5 builds 3-D experts and stacks 2-D ones as it loads them; both forms are carried
whole. Fused 3-D experts are what several tools leave at 16 bits or pack wrongly
(llm-compressor 2939, bitsandbytes 1849), so their bytes are told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from weightpath.checkpoints.audit_finding import Finding, plural
from weightpath.checkpoints.audit_stored import Stored

_ONE = re.compile(r"(?P<block>.*?)\.experts\.(?P<index>\d{1,9})\.(?P<leaf>.+)")
_LAYER = re.compile(r".*?\.\d{1,9}(?=\.)")
_SEEN = 3
"""Missing experts that are named one by one."""


def audit_experts(weights: Mapping[str, Stored]) -> tuple[Finding, ...]:
    """Experts that are missing or unlike the rest, and notes of what there is. Names and shapes."""
    blocks: dict[str, dict[int, dict[str, Stored]]] = {}
    fused: list[str] = []
    for name, weight in weights.items():
        match = _ONE.fullmatch(name)
        if match is not None:
            expert = blocks.setdefault(match["block"], {}).setdefault(int(match["index"]), {})
            expert[match["leaf"]] = weight
        elif ".experts." in f"{name}." and len(weight.shape or ()) == 3:
            fused.append(name)
    found = [finding for block in blocks.items() for finding in _audit_block(*block)]
    if blocks:
        found.append(_note(blocks))
    if fused:
        found.append(_note_fused(fused, weights))
    return tuple(found)


def other_form(
    missing: Iterable[str], unexpected: Iterable[str], wanted: Mapping[str, tuple[int, ...]]
) -> tuple[set[str], set[str], tuple[Finding, ...]]:
    """Experts that the model has in one form and the file in the other, layer by layer.

    Returns the wanted names that they fill, the stored names that fill them, and findings where the
    numbers of experts differ.
    """
    stored: dict[str, list[str]] = {}
    for name in unexpected:
        if ".experts." in name and (layer := _LAYER.match(name)):
            stored.setdefault(layer[0], []).append(name)
    filled: set[str] = set()
    used: set[str] = set()
    found = []
    for name in missing:
        layer = _LAYER.match(name) if ".experts." in name else None
        if layer is None or layer[0] not in stored:
            continue
        filled.add(name)
        if layer[0] in used:
            continue
        used.add(layer[0])
        numbers = {int(m["index"]) for n in stored[layer[0]] if (m := _ONE.fullmatch(n))}
        shape = wanted[name]
        if numbers and len(shape) == 3 and len(numbers) != shape[0]:
            found.append(
                Finding(
                    "error",
                    name,
                    f"{len(numbers)} experts are stored, the model has {shape[0]}",
                    "the checkpoint does not match its config.json",
                    "wrong number of experts",
                )
            )
    names = {name for layer in used for name in stored[layer]}
    return filled, names, tuple(found)


def _audit_block(block: str, experts: Mapping[int, Mapping[str, Stored]]) -> Iterable[Finding]:
    """Numbers left out, and experts whose tensors or shapes are not those of the others."""
    missing = max(experts) + 1 - len(experts)
    if missing:
        absent = (number for number in range(max(experts)) if number not in experts)
        few = [str(next(absent)) for _ in range(min(missing, _SEEN))]
        more = ", ..." if missing > _SEEN else ""
        yield Finding(
            "error",
            f"{block}.experts",
            f"{missing} of {max(experts) + 1} experts are missing ({', '.join(few)}{more})",
            "fetch the checkpoint again",
            "missing experts",
            "block",
        )
    leaves: dict[str, Stored] = {}
    for own in experts.values():
        for leaf, weight in own.items():
            leaves.setdefault(leaf, weight)
    for number, own in experts.items():
        for leaf, like in leaves.items():
            weight = own.get(leaf)
            name = f"{block}.experts.{number}.{leaf}"
            if weight is None:
                yield Finding("error", name, "is missing, other experts of the block have it",
                              "fetch the checkpoint again", "missing")  # fmt: skip
            elif weight.shape and like.shape and weight.shape != like.shape:
                yield Finding(
                    "error",
                    name,
                    f"has shape {weight.shape}, other experts of the block {like.shape}",
                    "the checkpoint is damaged: fetch it again",
                    "wrong dtype or shape",
                )


def _note(blocks: Mapping[str, Mapping[int, Mapping[str, Stored]]]) -> Finding:
    every = [
        weight for block in blocks.values() for own in block.values() for weight in own.values()
    ]
    most = max(len(block) for block in blocks.values())
    packed, nbytes = sum(weight.packed for weight in every), sum(weight.nbytes for weight in every)
    problem = (
        f"experts one by one: {plural(len(blocks), 'block')} of up to {most}, "
        f"{plural(len(every), 'weight')}, {packed} of them packed, {nbytes:,} bytes"
    )
    return Finding("note", f"{next(iter(blocks))}.experts", problem, "carried whole", "experts")


def _note_fused(names: list[str], weights: Mapping[str, Stored]) -> Finding:
    total = sum(weight.nbytes for weight in weights.values())
    nbytes = sum(weights[name].nbytes for name in names)
    packed = sum(weights[name].packed for name in names)
    problem = (
        f"fused experts [experts, ...]: {plural(len(names), 'tensor')}, {packed} of them packed, "
        f"{nbytes:,} bytes, {100 * nbytes / max(total, 1):.0f}% of the checkpoint"
    )
    left = "" if packed else "; they stay at their float dtype"
    return Finding("note", names[0], problem, f"carried whole{left}", "fused experts")
