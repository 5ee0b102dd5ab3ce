"""Make the low-bit checkpoint that a plan describes, tensor by tensor.

Every tensor of the source has one outcome: quantized, copied, rounded to the stored dtype, or left
out as the tied head's second copy. A head that is untied is made from the embedding. The outcomes
are checked against the source's list before anything is moved into place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints import compressed_tensors
from weightpath.checkpoints.low_bit import MANIFEST
from weightpath.checkpoints.store import Checkpoint
from weightpath.checkpoints.writer import CheckpointWriter, Planned, Unit
from weightpath.engine import skeleton
from weightpath.engine.load import Progress, no_progress
from weightpath.engine.places import tied_copy
from weightpath.errors import BadRequest, BadTensor, WeightpathError
from weightpath.jobs.shapes import stored_dtype
from weightpath.paths.tensors import TensorPlan
from weightpath.quantize.int8 import quantize_int8
from weightpath.quantize.rtn import quantize_rtn
from weightpath.quantize.stats import QuantizeStats, require_finite, row_blocks
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, Scheme


@dataclass(frozen=True)
class Recipe:
    """What a run is asked to make, as far as it decides bytes; goes into the manifest.

    base_model: the source's name as the user gave it. path: the weight path's name, or "" where a
    scheme was given. activation_bits: what the 4-bit linears are meant to run with. search: whether
    the clipping range is searched. version: of this package.
    """

    base_model: str
    version: str
    path: str = ""
    activation_bits: int = 16
    search: bool = True


@dataclass(frozen=True)
class Quantized:
    """What was done: folder; outcome of every source tensor; statistics by linear and in total;
    how many units an earlier, interrupted run had finished already."""

    folder: Path
    outcomes: dict[str, str]
    stats: dict[str, QuantizeStats]
    total: QuantizeStats
    resumed: int


@dataclass(frozen=True)
class _Work:
    """One unit of output: the source tensor it is read from, and what becomes of it."""

    unit: Unit
    source: str
    outcome: str
    module: str = ""
    scheme: Scheme | None = None


@dataclass
class _Layout:
    works: list[_Work] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    tied: bool = False


def quantize_checkpoint(
    checkpoint: Checkpoint,
    plan: TensorPlan,
    folder: Path,
    recipe: Recipe,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Quantized:
    """Write the checkpoint that `plan` describes into `folder` and say what was done.

    Peak anonymous memory is the output of one tensor plus small blocks. A run that was killed is
    taken up where it stopped, with the same bytes as an uninterrupted one. BadRequest where the
    plan leaves every weight as it is, or where `overwrite` would remove what is no checkpoint.
    """
    refuse_loss(checkpoint, folder)
    dtype = stored_dtype(checkpoint)
    layout = _lay_out(checkpoint, plan, dtype)
    if not any(work.scheme for work in layout.works):
        reason = plan.decisions[0].reason if plan.decisions else "the model has no linears"
        raise BadRequest(f"nothing to quantize in {checkpoint.where}: {reason}")
    units = [work.unit for work in layout.works]
    job = {"source": checkpoint.fingerprint, "recipe": vars(recipe), "dtype": str(dtype)}
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    total = sum(sizes[work.source] for work in layout.works)
    notes: dict[str, Any] = {}
    with CheckpointWriter(folder, units, job, overwrite) as writer:
        resumed = len(writer.finished)
        done = 0
        for work in layout.works:
            if work.unit.key not in writer.finished:
                try:
                    tensors, stats = _make(checkpoint, work, dtype, recipe.search)
                except WeightpathError:  # the source's fault: what is finished is of no use
                    writer.discard()
                    raise
                writer.write(work.unit.key, tensors, None if stats is None else vars(stats))
            notes[work.unit.key] = writer.finished[work.unit.key]
            done += sizes[work.source]
            progress(f"quantizing {work.source}", done, total)
        stats = {
            work.module: QuantizeStats(**notes[work.unit.key])
            for work in layout.works
            if work.scheme is not None
        }
        _account(checkpoint, layout.outcomes)
        schemes = {work.module: work.scheme for work in layout.works if work.scheme is not None}
        files = _files(checkpoint, plan, layout, schemes, stats, recipe, dtype)
        writer.finish(files)
    return Quantized(folder, layout.outcomes, stats, sum(stats.values(), QuantizeStats()), resumed)


def refuse_loss(checkpoint: Checkpoint, folder: Path) -> None:
    """BadRequest where writing `folder` would remove the source, or what is not a checkpoint."""
    source, target = Path(checkpoint.where).resolve(), Path(folder).resolve()
    if target in (source if source.is_dir() else source.parent, *source.parents):
        raise BadRequest(
            f"{folder}: holds the model that it would be made from; name another folder"
        )
    if target.is_file() or (target.is_dir() and not (target / "config.json").is_file()):
        raise BadRequest(f"{folder}: exists and is no checkpoint; name another folder")


def _lay_out(checkpoint: Checkpoint, plan: TensorPlan, dtype: torch.dtype) -> _Layout:
    """One unit for every output, and the outcome of every source tensor."""
    model = skeleton.build(checkpoint.config, dtype, checkpoint.where)
    copy = tied_copy(model, checkpoint)
    layout = _Layout(tied=bool(model.config.tie_word_embeddings) and not plan.unties_head)
    decided = {f"{item.name}.weight": item for item in plan.decisions if item.scheme is not None}
    for name, info in checkpoint.tensors.items():
        if name == copy:
            layout.outcomes[name] = "left out: the embedding's second copy"
            continue
        if skeleton.recomputed(name):
            layout.outcomes[name] = "left out: computed from the config"
            continue
        decision = decided.get(name)
        if decision is not None and decision.shape.role != "tied_head":
            assert decision.scheme is not None
            rows, columns = info.shape
            unit = _unit(name, decision.name, decision.scheme, (rows, columns), dtype)
            layout.works.append(_Work(unit, name, "quantized", decision.name, decision.scheme))
        else:
            kept = dtype if info.dtype.is_floating_point else info.dtype
            outcome = (
                "copied" if kept == info.dtype else f"rounded to {str(kept).removeprefix('torch.')}"
            )
            layout.works.append(
                _Work(Unit(name, (Planned(name, kept, tuple(info.shape)),)), name, outcome)
            )
        layout.outcomes[name] = layout.works[-1].outcome
    for item in plan.decisions:
        if item.shape.role == "tied_head" and item.scheme is not None:
            table = f"{skeleton.embedding_name(model)}.weight"
            shape = (item.shape.out_features, item.shape.in_features)
            unit = _unit(f"{item.name}.weight from {table}", item.name, item.scheme, shape, dtype)
            layout.works.append(_Work(unit, table, "quantized", item.name, item.scheme))
    return layout


def _unit(
    key: str, module: str, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
) -> Unit:
    scales = torch.float32 if scheme == INT8 else dtype
    return Unit(key, compressed_tensors.planned(module, scheme, shape, scales))


def _make(
    checkpoint: Checkpoint, work: _Work, dtype: torch.dtype, search: bool
) -> tuple[Mapping[str, Tensor], QuantizeStats | None]:
    """A unit's tensors, and what quantizing did where it was quantized."""
    weight = checkpoint.read(work.source)
    if work.scheme is None:
        planned = work.unit.tensors[0]
        return {planned.name: _kept(weight, planned.dtype, work.source)}, None
    qweight, stats = quantize_weight(weight, work.scheme, dtype, search, work.source)
    return compressed_tensors.to_tensors(work.module, qweight), stats


def _kept(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor that stays float, in its stored dtype. BadTensor for NaN, Inf, or a number beyond
    what that dtype holds."""
    if not weight.is_floating_point():
        return weight
    kept = weight.to(dtype)
    rows, rounded = (weight, kept) if weight.ndim else (weight.reshape(1), kept.reshape(1))
    for start, stop in row_blocks(rows.shape[0], weight.numel() // max(rows.shape[0], 1)):
        require_finite(rows[start:stop], name, start)
        if dtype != weight.dtype and not bool(torch.isfinite(rounded[start:stop]).all()):
            largest = float(rows[start:stop].abs().max())
            raise BadTensor(name, f"holds {largest:.6g}, {str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.6g}",
                            "save the model in bfloat16 first")  # fmt: skip
    return kept


def quantize_weight(
    weight: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    search: bool = True,
    name: str = "weight",
) -> tuple[QWeight, QuantizeStats]:
    """int8 per channel for that scheme, else round-to-nearest in groups."""
    if scheme == INT8:
        return quantize_int8(weight, scheme, name)
    return quantize_rtn(weight, scheme.with_activations(16), scale_dtype, search, name)


def _account(checkpoint: Checkpoint, outcomes: Mapping[str, str]) -> None:
    lost = [name for name in checkpoint.tensors if name not in outcomes]
    invented = [name for name in outcomes if name not in checkpoint.tensors]
    if lost or invented:
        raise BadTensor(
            (lost + invented)[0],
            "is not accounted for in the result",
            "report this: nothing was written",
        )


def _files(
    checkpoint: Checkpoint,
    plan: TensorPlan,
    layout: _Layout,
    schemes: Mapping[str, Scheme],
    stats: Mapping[str, QuantizeStats],
    recipe: Recipe,
    dtype: torch.dtype,
) -> dict[str, str | Path]:
    """config.json, the manifest, and the source's companions."""
    ignored = [
        item.name
        for item in plan.decisions
        if item.scheme is None and item.shape.role != "embedding"
    ]
    config = {
        key: value
        for key, value in checkpoint.config.items()
        if key not in ("torch_dtype", "dtype")
    }
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["tie_word_embeddings"] = layout.tied
    config["quantization_config"] = compressed_tensors.quantization_config(schemes, ignored)
    files: dict[str, str | Path] = {path.name: path for path in checkpoint.companions}
    files["config.json"] = json.dumps(config, indent=2) + "\n"
    files[MANIFEST] = json.dumps(_manifest(plan, layout, schemes, stats, recipe), indent=2) + "\n"
    return files


def _manifest(
    plan: TensorPlan,
    layout: _Layout,
    schemes: Mapping[str, Scheme],
    stats: Mapping[str, QuantizeStats],
    recipe: Recipe,
) -> dict[str, Any]:
    return {
        "kind": "weightpath-build",
        **vars(recipe),
        "method": "round to nearest, clipping range searched" if recipe.search else "round to nearest, min-max",
        "group_size": plan.group_size,
        "group_reason": plan.group_reason,
        "untied_head": plan.unties_head,
        "outcomes": dict(Counter(outcome for outcome in layout.outcomes.values())),
        "linears": {
            module: {"scheme": schemes[module].with_activations(16).name, "signal_to_noise_db": _rounded(found),
                     "zero_groups": found.zero_groups, "raised_scales": found.raised_scales,
                     "lowered_scales": found.lowered_scales}
            for module, found in stats.items()
        },
    }  # fmt: skip


def _rounded(stats: QuantizeStats) -> float | None:
    """Decibels to two places; None where the weight is exact (JSON has no infinity)."""
    value = stats.signal_to_noise_db
    return None if value == float("inf") else round(value, 2)
