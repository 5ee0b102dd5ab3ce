"""Audit of a checkpoint's tensors by names and shapes: what the model lacks, and what it never asked for.

`wanted` is the float model that config.json describes, parameter (and saved buffer) -> shape; a
packed linear M stands for `M.weight`. Nothing but headers is looked at, unless `read` is given:
then biases that the model lacks (optimum 1827: AutoGPTQ wrote zeros for every linear) and a tied
head (sglang 2935, mlx-lm 1247) are read to tell harmless copies from others.

Without `wanted`, for an architecture that transformers does not know, names alone are judged:
wrappers' prefixes, numbers left out of a list of layers, layers that lack what the others have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weightpath.checkpoints.audit_experts import audit_experts, other_form
from weightpath.checkpoints.audit_finding import Finding
from weightpath.checkpoints.audit_prefixes import audit_prefixes, audit_wrappers
from weightpath.checkpoints.audit_stored import (
    Stored,
    carried,
    collect,
    last_of_stacks,
    prediction,
    rotary,
    stack_of,
    tower,
)
from weightpath.checkpoints.shards import TensorInfo

Shapes = Mapping[str, tuple[int, ...]]
_OTHER = "the checkpoint does not match its config.json"
_FETCH = "fetch the checkpoint again"


def audit_names(
    tensors: Mapping[str, TensorInfo],
    parts: Mapping[str, Mapping[str, str]],
    wanted: Shapes | None = None,
    tied: tuple[str, str] | None = None,
    *,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    renamed: Callable[[str], str] = str,
    num_hidden_layers: int | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> tuple[Finding, ...]:
    """Findings about every tensor of a checkpoint, from its headers.

    parts: packed linear -> bare suffix -> tensor. wanted: the float model's parameters, None where
    it is not known. tied: the names of the head's and the embedding's parameter where config.json
    ties them. shapes: [N, K] of packed linears where they are known. renamed: a stored name as the
    model spells it, where transformers renames on load. num_hidden_layers: of config.json, used
    where `wanted` is None. read: a tensor's values by its stored name.
    """
    weights, found = collect(tensors, parts, shapes or {}, renamed, wanted or ())
    if tied is not None:
        wanted = None if wanted is None else {n: s for n, s in wanted.items() if n != tied[0]}
        found.extend(_audit_tied(*tied, weights, read))
    found.extend(audit_experts(weights))
    others = {name: weight for name, weight in weights.items() if tied is None or name != tied[0]}
    if wanted is None:
        found.extend(audit_wrappers(others))
        found.extend(_audit_layers(others))
        last = {} if num_hidden_layers is None else _text_stacks(others, num_hidden_layers)
        unexpected = [name for name in others if _extra(name, last) or rotary(name)]
    else:
        found.extend(_audit_shapes(others, wanted))
        last = last_of_stacks(wanted)
        unexpected = _audit_against(others, wanted, found)
    found.extend(_audit_carried(others, unexpected, last))
    if wanted is not None:
        found.extend(_audit_unexpected(others, unexpected, wanted, last, read))
    return tuple(found)


def _audit_against(
    weights: Mapping[str, Stored], wanted: Shapes, found: list[Finding]
) -> list[str]:
    """Findings about wanted names, appended; returns the stored ones that are not accounted for."""
    missing = [name for name in wanted if name not in weights and not rotary(name)]
    unexpected = [name for name in weights if name not in wanted]
    prefixed, filled, used = audit_prefixes(missing, unexpected, weights, wanted)
    found.extend(prefixed)
    missing = [name for name in missing if name not in filled]
    unexpected = [name for name in unexpected if name not in used]
    filled, used, numbers = other_form(missing, unexpected, wanted)
    found.extend(numbers)
    told = {finding.tensor for finding in found}
    for name in missing:
        if name in filled or name in told:
            continue
        bias = name.endswith(".bias")
        found.append(
            Finding(
                "error",
                name,
                f"is missing, the model wants {wanted[name]}",
                f"{_FETCH}, or check that its config.json is its own",
                "missing biases" if bias else "missing",
            )
        )
    return [name for name in unexpected if name not in used]


def _audit_shapes(weights: Mapping[str, Stored], wanted: Shapes) -> list[Finding]:
    found = []
    for name, weight in weights.items():
        shape = wanted.get(name)
        if shape is None:
            continue
        kind = "wrong dtype or shape"
        if weight.shape is not None and tuple(weight.shape) != tuple(shape):
            held = "holds" if weight.packed else "has shape"
            problem = f"{held} {tuple(weight.shape)}, the model wants {tuple(shape)}"
            found.append(Finding("error", weight.source, problem, _OTHER, kind))
        if weight.dtype is not None and not weight.dtype.is_floating_point:
            problem = f"is {weight.dtype} and part of no packed linear, the model wants floats"
            found.append(Finding("error", weight.source, problem, _FETCH, kind))
    return found


def _audit_carried(
    weights: Mapping[str, Stored], unexpected: list[str], last: Mapping[str, int]
) -> list[Finding]:
    """Notes of towers, extra prediction layers and rotary tables, each as one."""
    towers = [name for name in weights if tower(name)]
    extra = [name for name in unexpected if _extra(name, last) and not tower(name)]
    tables = [name for name in unexpected if rotary(name)]
    told = (
        ("vision and audio towers", towers, "carried whole"),
        ("extra prediction layers", extra,
         "carried whole; transformers ignores them, vLLM drafts with them where it is asked to"),
        ("rotary tables", tables, "left out: the model computes them from config.json"),
    )  # fmt: skip
    return [carried(kind, names, weights, rest) for kind, names, rest in told if names]


def _audit_unexpected(
    weights: Mapping[str, Stored],
    unexpected: list[str],
    wanted: Shapes,
    last: Mapping[str, int],
    read: Callable[[str], Tensor] | None,
) -> list[Finding]:
    found = []
    for name in unexpected:
        weight = weights[name]
        if tower(name) or _extra(name, last) or rotary(name):
            continue
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" and f"{module}.weight" in wanted:
            found.append(_extra_bias(weight, read))
            continue
        what = "is a packed linear" if weight.packed else f"{weight.shape}"
        problem = f"{what}: the model has no such place"
        found.append(
            Finding(
                "warning",
                weight.source,
                problem,
                f"remove it if it is not needed; else {_OTHER}",
                "unexpected",
            )
        )
    return found


def _extra_bias(weight: Stored, read: Callable[[str], Tensor] | None) -> Finding:
    """A bias that the architecture does not have: harmless where it is all zeros."""
    kind, mend = "biases that the architecture does not have", "remove it"
    problem = f"{weight.shape}: the architecture has no such bias"
    if read is None:
        return Finding("warning", weight.source, f"{problem}; its values were not read", mend, kind)
    used = int((read(weight.source) != 0).sum())
    if not used:
        return Finding("note", weight.source, f"{problem}; it is all zeros", mend, kind)
    return Finding(
        "error",
        weight.source,
        f"{problem}, and {used} of its values are not zero: some runtimes add it, some do not",
        "check config.json against the float model; remove the bias if that has none",
        kind,
    )


def _audit_tied(
    head: str,
    embedding: str,
    weights: Mapping[str, Stored],
    read: Callable[[str], Tensor] | None,
) -> list[Finding]:
    """A head that config.json ties to the embedding, yet is stored."""
    own, table = weights.get(head), weights.get(embedding)
    if own is None:
        return []
    kind = "tied head stored twice"
    untie = "set tie_word_embeddings to false in config.json to use the stored head, or remove it"
    if own.packed or (table is not None and table.packed):
        which = "packed" if own.packed else "floats beside a packed embedding"
        problem = (
            f"is stored as {which}, and config.json ties it to {embedding}: vLLM drops it, sglang "
            "fails on it"
        )
        return [Finding("warning", own.source, problem, untie, kind)]
    if table is None:
        return []
    if own.shape != table.shape:
        problem = f"{own.shape} is tied to {table.source} {table.shape}, another shape"
        return [Finding("error", own.source, problem, untie, kind)]
    problem = f"is stored beside {table.source}, to which config.json ties it: {own.nbytes:,} bytes"
    if read is None:
        return [Finding("note", own.source, f"{problem}; not compared", "remove it if equal", kind)]
    if torch.equal(read(own.source), read(table.source)):
        return [Finding("note", own.source, f"{problem}; the two are equal", "remove it", kind)]
    problem += "; the two differ: vLLM takes the embedding, transformers 5 the stored head"
    return [Finding("warning", own.source, problem, untie, kind)]


def _extra(name: str, last: Mapping[str, int]) -> bool:
    """Whether a weight belongs to extra prediction layers: by name, or beyond the last layer."""
    place = stack_of(name)
    return prediction(name) or (place is not None and place[1] > last.get(place[0], place[1]))


def _text_stacks(weights: Mapping[str, Stored], num_hidden_layers: int) -> dict[str, int]:
    """The last layer of the lists that hold a decoder's layers."""
    names = [name for name in weights if not tower(name) and not prediction(name)]
    stacks = last_of_stacks(names)
    return {
        stack: num_hidden_layers - 1
        for stack in stacks
        if stack.endswith(("layers.", ".h.", "blocks."))
    }


def _audit_layers(weights: Mapping[str, Stored]) -> list[Finding]:
    """Numbers left out of a list of layers, and single layers that lack what most have.

    Only lists whose members are modules of modules: a Sequential may well lack numbers.
    """
    layers: dict[str, dict[int, set[str]]] = {}
    for name in weights:
        place = stack_of(name)
        if place is not None:
            stack, number = place
            leaf = name.removeprefix(stack).partition(".")[2]
            if "." in leaf:
                layers.setdefault(stack, {}).setdefault(number, set()).add(leaf)
    found = []
    for stack, numbered in layers.items():
        gaps = max(numbered) + 1 - len(numbered)
        if 0 < gaps < len(numbered):
            first = next(n for n in range(max(numbered)) if n not in numbered)
            problem = f"{gaps} of {max(numbered) + 1} layers are missing, the first is {first}"
            found.append(Finding("warning", f"{stack}{first}", problem, _FETCH, "missing layers"))
        counts = Counter(frozenset(leaves) for leaves in numbered.values())
        most, times = counts.most_common(1)[0]
        for number, leaves in numbered.items():
            if times > 1 and leaves < most and counts[frozenset(leaves)] == 1:
                lacks = sorted(most - leaves)
                problem = f"is missing, {times} other layers have it ({len(lacks)} such here)"
                name = f"{stack}{number}.{lacks[0]}"
                found.append(Finding("warning", name, problem, _FETCH, "missing"))
    return found
