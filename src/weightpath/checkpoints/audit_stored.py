"""A checkpoint's tensors as an audit sees them: by the model's own names, shapes alone.

A packed linear M stands for the float weight `M.weight`. Which parts a linear must have, and the
kinds of tensors that a language model does not need but a checkpoint carries: vision and audio
towers, extra prediction layers, rotary tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from weightpath.checkpoints.audit_finding import Finding, plural
from weightpath.checkpoints.shards import TensorInfo

PACKED = ("qweight", "weight_packed", "W_q", "_weight_qdata")
"""Parts that hold codes under a name of their own, so that a `weight` beside them is a second."""
NEEDS: dict[str, tuple[str, ...]] = {
    "qweight": ("scales",),
    "qzeros": ("qweight", "scales"),
    "scaled_zeros": ("qweight", "scales"),
    "g_idx": ("qweight", "scales"),
    "weight_packed": ("weight_scale",),
    "weight_zero_point": ("weight_scale",),
    "weight_g_idx": ("weight_packed", "weight_scale"),
    "weight_shape": ("weight_packed",),
    "W_q": ("scale", "zero"),
    "_weight_qdata": ("_weight_scale",),
    "_weight_scale": ("_weight_qdata",),
    "weight.absmax": ("weight", "weight.quant_map"),
    "weight.nested_absmax": ("weight.absmax", "weight.nested_quant_map"),
    "SCB": ("weight",),
}
"""Part -> the parts that it is worth nothing without."""
_ORPHANS = (".qweight", ".qzeros", ".scales", ".scaled_zeros", ".weight_packed", ".weight_scale",
            ".W_q", ".SCB", ".weight.absmax")  # fmt: skip
_TOWERS = frozenset((
    "visual", "vision", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens",
    "vision_backbone", "vision_projection", "image_newline", "multi_modal_projector",
    "mm_projector", "audio_tower", "audio_model", "audio_encoder", "audio_projection",
))  # fmt: skip
_PREDICTION = ("mtp", "nextn", "eagle", "medusa")
_ROTARY = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb)\.(inv_freq|cos_cached|sin_cached)$")
_STACK = re.compile(r"^(?P<stack>(?:[^.]+\.)*?)(?P<index>\d{1,9})\.")
"""The outermost numbered list of modules that a name goes through: `model.layers.` and 12."""


@dataclass(frozen=True)
class Stored:
    """One weight in the checkpoint, under the model's name.

    source: its name in the file, a packed linear's own name without `.weight`. shape: None where a
    packed linear's is not known. nbytes: all its parts.
    """

    source: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    nbytes: int
    packed: bool


def collect(
    tensors: Mapping[str, TensorInfo],
    parts: Mapping[str, Mapping[str, str]],
    shapes: Mapping[str, tuple[int, int]],
    renamed: Callable[[str], str],
    known: Collection[str],
) -> tuple[dict[str, Stored], list[Finding]]:
    """Every weight by the model's name, and findings about parts and names that meet.

    known: the model's own names, which are no lost parts whatever they end with.
    """
    found: list[Finding] = []
    belongs = {name for own in parts.values() for name in own.values()}
    weights: dict[str, Stored] = {}

    def add(name: str, weight: Stored) -> None:
        first = weights.setdefault(name, weight)
        if first is weight:
            return
        if weight.source == name and first.packed:
            return  # told as stored both ways
        found.append(
            Finding(
                "error",
                weight.source,
                f"and {first.source} are both the model's {name}",
                "remove the one that is not the model's",
                "stored twice",
            )
        )

    for module, own in parts.items():
        infos = [tensors[name] for name in own.values() if name in tensors]
        nbytes = sum(info.nbytes for info in infos)
        shape = shapes.get(module)
        if shape is None and any(len(info.shape) == 3 for info in infos):
            shape = next(info.shape for info in infos if len(info.shape) == 3)
        add(renamed(f"{module}.weight"), Stored(module, shape, None, nbytes, True))
        found.extend(_check_parts(module, own, tensors))
    found.extend(_lost_zeros(parts))
    for name, info in tensors.items():
        if name in belongs:
            continue
        if name.endswith(_ORPHANS) and renamed(name) not in known:
            found.append(
                Finding(
                    "error",
                    name,
                    "is part of a packed linear whose codes are missing",
                    "fetch the checkpoint again",
                    "incomplete parts",
                )
            )
            continue
        add(renamed(name), Stored(name, info.shape, info.dtype, info.nbytes, False))
    return weights, found


def rotary(name: str) -> bool:
    """Whether a tensor is a rotary table, which models compute from their config."""
    return _ROTARY.search(name) is not None


def tower(name: str) -> bool:
    """Whether a name goes through a vision or audio tower or its projector."""
    return not _TOWERS.isdisjoint(name.split("."))


def prediction(name: str) -> bool:
    """Whether a name goes through a module of extra prediction layers (`mtp.`, `nextn_`)."""
    return any(part.startswith(_PREDICTION) for part in name.split("."))


def stack_of(name: str) -> tuple[str, int] | None:
    """("model.layers.", 12) of a name in a numbered list of modules, else None."""
    match = _STACK.match(name)
    return (match["stack"], int(match["index"])) if match else None


def last_of_stacks(names: Iterable[str]) -> dict[str, int]:
    """Stack -> its highest number."""
    last: dict[str, int] = {}
    for name in names:
        place = stack_of(name)
        if place is not None:
            last[place[0]] = max(place[1], last.get(place[0], -1))
    return last


def carried(kind: str, names: Iterable[str], weights: Mapping[str, Stored], rest: str) -> Finding:
    """A note that tensors of a kind are there and how much they hold."""
    listed = list(names)
    nbytes = sum(weights[name].nbytes for name in listed)
    packed = sum(weights[name].packed for name in listed)
    problem = f"{kind}: {plural(len(listed), 'weight')}, {packed} of them packed, {nbytes:,} bytes"
    return Finding("note", weights[listed[0]].source, problem, rest, kind)


def _check_parts(
    module: str, own: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> Iterable[Finding]:
    """What a packed linear lacks, and floats beside it."""
    lacks = sorted({need for part in own for need in NEEDS.get(part, ()) if need not in own})
    if "weight_scale" in own and own.keys().isdisjoint(("weight", "weight_packed")):
        lacks.append("weight_packed")
    if lacks:
        has = ", ".join(sorted(own))
        yield Finding("error", module, f"has {has}, but no {' or '.join(lacks)}",
                      "fetch the checkpoint again", "incomplete parts", "linear")  # fmt: skip
    if f"{module}.weight" in tensors and not own.keys().isdisjoint(PACKED):
        yield Finding(
            "warning",
            f"{module}.weight",
            "is stored as floats beside its packed codes: runtimes take one or the other",
            "remove the one that is not the model's",
            "stored both packed and as floats",
        )


def _lost_zeros(parts: Mapping[str, Mapping[str, str]]) -> Iterable[Finding]:
    """Linears without zero points in a checkpoint where most have them."""
    alike = [module for module, own in parts.items() if "qweight" in own]
    lack = [
        module for module in alike if parts[module].keys().isdisjoint(("qzeros", "scaled_zeros"))
    ]
    if 2 * len(lack) < len(alike):
        for module in lack:
            yield Finding(
                "error",
                module,
                f"has no qzeros, {len(alike) - len(lack)} of {len(alike)} linears do",
                "fetch the checkpoint again",
                "incomplete parts",
                "linear",
            )
