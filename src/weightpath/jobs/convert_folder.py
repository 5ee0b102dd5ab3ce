"""Convert a low-bit checkpoint to a folder in another format, saying per tensor what that keeps.

Every linear's integers are read, fitted to what the target holds (fit.py) and written, a few linears
in memory at a time; a killed run is taken up where it stopped. Column orders that the target has no
place for are folded into the layers before where that is exact (folds.py). What is part of no
linear is copied.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.audit import Finding
from weightpath.checkpoints.low_bit import MANIFEST, open_low_bit
from weightpath.checkpoints.store import architecture
from weightpath.checkpoints.writer import CheckpointWriter, Planned, Unit
from weightpath.engine.load import Progress, model_dtype
from weightpath.errors import BadRequest, BadTensor, WeightpathError
from weightpath.jobs.conversion import (
    Converted,
    ConvertedTensor,
    Work,
    prepare,
    refuse_known_losses,
    without_settings,
)
from weightpath.jobs.fit import change, fit
from weightpath.jobs.quantize import refuse_loss
from weightpath.jobs.targets import Target
from weightpath.qweight import QWeight, scale_change
from weightpath.version import __version__

Made = tuple[Mapping[str, Tensor], dict[str, Any]]
"""A unit's tensors, and the note on what was done."""
AHEAD = 2
"""Linears worked on at a time, each on a thread; memory holds this many."""


def convert_to_folder(
    path: Path,
    source: str,
    target: Target,
    folder: Path,
    exact_only: bool,
    overwrite: bool,
    progress: Progress,
    group_size: int | None = None,
) -> Converted:
    """Write the low-bit checkpoint at `path` (SOURCE as the user named it) in a target's format."""
    low = open_low_bit(path)
    refuse_loss(low.source, folder)
    work = prepare(low, target.choose, target.keeps_order, group_size)
    if exact_only:
        refuse_known_losses(work)
    units = _units(work, target)
    schemes = {name: c.scheme for name, c in work.choices.items() if c.scheme is not None}
    if not schemes:
        name, first = next(iter(work.choices.items()))
        raise BadRequest(
            f"nothing is left to write as {target.name}, first {name}: {first.why}; "
            "use compressed-tensors"
        )
    ordered = any(choice.keep_order for choice in work.choices.values())
    settings = target.config(schemes, _ignored(work), ordered)
    job = {
        "convert": low.source.fingerprint, "settings": low.settings, "to": target.name,
        "version": __version__, "exact_only": exact_only, "group_size": group_size,
    }  # fmt: skip
    with CheckpointWriter(folder, list(units), job, overwrite) as writer:
        resumed = len(writer.finished)
        todo = [unit for unit in units if unit.key not in writer.finished]
        done = len(units) - len(todo)
        with closing(_made(work, target, todo)) as made:
            while True:
                try:
                    unit, (tensors, note) = next(made)
                    if exact_only and not note["exact"]:
                        raise _not_exact(note)
                except StopIteration:
                    break
                except WeightpathError:  # the source's fault: what is finished is of no use
                    writer.discard()
                    raise
                writer.write(unit.key, tensors, note)
                done += 1
                progress(f"converting {unit.key}", done, len(units))
        notes = [writer.finished[unit.key] for unit in units]
        writer.finish(_files(work, target, settings, notes, source))
    return _converted(work, target.name, folder, notes, resumed)


def linear_note(
    work: Work, module: str, target: Target
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One linear's tensors in the target format, and what was done."""
    choice, outline = work.choices[module], work.low.linears[module]
    read = work.read(module)
    was = "floats" if outline.scheme is None else outline.scheme.name
    if choice.scheme is None:
        weight = read.weight()
        kept = weight.to(work.float_dtype)
        if not bool(torch.isfinite(kept).all()):
            raise BadTensor(module, f"overflows {work.float_dtype}", "use compressed-tensors")
        largest, mean = change(kept, weight)
        how = f"stored as {str(work.float_dtype).removeprefix('torch.')}: {choice.why}"
        note = _note(module, was, "float", how, largest, mean)
        return {f"{module}.weight": kept}, note
    why = work.folds.why_not.get(module)
    fitted = fit(module, read, choice.scheme, choice.scale_dtype, choice.keep_order,
                 why or choice.why)  # fmt: skip
    steps = [step for step in (work.folds.step(module), *fitted.steps) if step]
    if outline.ordered and choice.keep_order:
        steps.insert(0, "column order kept")
    how = "; ".join(steps) or "codes, scales and zeros kept"
    note = _note(module, was, fitted.qweight.scheme.name, how, fitted.largest_change,
                 fitted.mean_change)  # fmt: skip
    note["served"] = served_change(fitted.qweight, work.low.config)
    return target.to_tensors(module, fitted.qweight), note


def float_note(work: Work, name: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """One float tensor as it is written, and what that changed."""
    before, step = (
        work.folds.apply_float(name, work.low.source.read(name)),
        work.folds.float_step(name),
    )
    if before.dtype == dtype:
        return before, _note(name, "", "", step or "copied", 0.0, 0.0)
    after = before.to(dtype)
    if not bool(torch.isfinite(after).all()):
        raise BadTensor(name, f"overflows {dtype} or is not finite", "use a format that keeps fp32")
    flat = (-1, before.shape[-1]) if before.ndim else (1, 1)
    largest, mean = change(after.reshape(flat), before.reshape(flat))
    short = [str(kind).removeprefix("torch.") for kind in (before.dtype, dtype)]
    how = f"{step}; rounded to {short[1]}" if step else f"rounded to {short[1]}"
    return after, _note(name, short[0], short[1], how, largest, mean)


def served_change(qweight: QWeight, config: dict[str, Any]) -> tuple[float, float, int] | None:
    """Relative change of fp16 scales in a bf16 model: the largest, the sum, and of how many.

    None where the scales or the model are of another dtype.
    """
    if qweight.scales.dtype != torch.float16 or model_dtype(config) != torch.bfloat16:
        return None
    change, count = scale_change(qweight, torch.bfloat16), qweight.scales.numel()
    return change.largest, change.mean * count, count


def _note(
    name: str, source: str, target: str, how: str, largest: float, mean: float
) -> dict[str, Any]:
    return {
        "name": name, "source": source, "target": target, "how": how, "exact": largest == 0.0,
        "largest_change": largest, "mean_change": mean,
    }  # fmt: skip


def _units(work: Work, target: Target) -> list[Unit]:
    """One unit a linear and one a float tensor, linears where their first part stood."""
    units: list[Unit] = []
    first = {next(iter(own.values())): module for module, own in work.low.parts.items()}
    for name in work.low.source.tensors:
        if name in first:
            units.append(_linear_unit(work, target, first[name]))
        elif name in work.low.floats and name not in work.left_out:
            dtype, shape = work.float_info(name)
            units.append(Unit(name, (Planned(name, dtype, shape),)))
    return units


def _linear_unit(work: Work, target: Target, module: str) -> Unit:
    choice, shape = work.choices[module], work.folds.outlines[module].shape
    if choice.scheme is None:
        return Unit(module, (Planned(f"{module}.weight", work.float_dtype, shape),))
    return Unit(module, target.planned(module, choice.scheme, shape, choice.scale_dtype))


def _made(
    work: Work, target: Target, units: list[Unit]
) -> Generator[tuple[Unit, Made], None, None]:
    """Units with their tensors, in order, AHEAD of them worked on at a time."""

    def make(unit: Unit) -> Made:
        if unit.key in work.choices:
            tensors, note = linear_note(work, unit.key, target)
            warnings = [asdict(warning) for warning in work.warnings[unit.key]]
            return tensors, note | {"warnings": warnings}
        planned = unit.tensors[0]
        tensor, note = float_note(work, planned.name, planned.dtype)
        return {planned.name: tensor}, note

    again = any(choice.again for choice in work.choices.values())
    threads = torch.get_num_threads()
    if again or threads == 1:  # quantizing has threads of its own
        for unit in units:
            yield unit, make(unit)
        return
    torch.set_num_threads(1)
    pending: list[tuple[Unit, Future[Any]]] = []
    try:
        with ThreadPoolExecutor(min(AHEAD, threads)) as pool:
            for unit in units:
                pending.append((unit, pool.submit(make, unit)))
                if len(pending) >= AHEAD:
                    done, future = pending.pop(0)
                    yield done, future.result()
            for done, future in pending:
                yield done, future.result()
    finally:
        torch.set_num_threads(threads)


def _ignored(work: Work) -> list[str]:
    """Modules left float that hold a matrix, for the config's list: not the embedding."""
    floats = [module for module, choice in work.choices.items() if choice.scheme is None]
    for name, info in work.low.floats.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(info.shape) == 2 and "embed" not in module.rpartition(".")[2]:
            floats.append(module)
    return floats + _tied_head(work)


def _tied_head(work: Work) -> list[str]:
    """The head's module where it has no tensor of its own: it is of class Linear all the same, and
    transformers would look for its codes."""
    modules = {name.rpartition(".")[0] for name in work.low.source.tensors}
    kind = architecture(work.low.config)
    generates = (
        kind.endswith(("LM", "ForConditionalGeneration")) or "architectures" not in work.low.config
    )
    has_own = any(module.rpartition(".")[2] == "lm_head" for module in modules)
    return ["lm_head"] if generates and not has_own else []


def _files(
    work: Work,
    target: Target,
    settings: dict[str, Any],
    notes: list[dict[str, Any]],
    source: str,
) -> dict[str, str | Path]:
    """config.json with the new quantization config alone, companions, and the manifest."""
    config = without_settings(work.low.config)
    heads = [module for module in work.choices if module.rpartition(".")[2] == "lm_head"]
    if heads:  # a head that was packed shares no matrix with the embedding
        config["tie_word_embeddings"] = False
    config["quantization_config"] = settings
    files: dict[str, str | Path] = {path.name: path for path in work.low.companions}
    files["config.json"] = json.dumps(config, indent=2) + "\n"
    if target.side_file:
        files[target.side_file] = json.dumps(settings, indent=2) + "\n"
    linears = {note["name"]: note for note in notes if note["name"] in work.choices}
    manifest = {
        "kind": "weightpath-conversion",
        "version": __version__,
        "base_model": Path(source).name or Path(work.low.where).resolve().name,
        "method": f"converted from {work.low.format} to {target.name}",
        "linears": {
            name: {"scheme": note["target"], "how": note["how"], "exact": note["exact"],
                   "largest_change": note["largest_change"], "mean_change": note["mean_change"]}
            for name, note in linears.items()
        },
    }  # fmt: skip
    files[MANIFEST] = json.dumps(manifest, indent=2) + "\n"
    return files


def _not_exact(note: dict[str, Any]) -> BadTensor:
    return BadTensor(
        note["name"],
        f"is not converted exactly ({note['how']}): values change by up to "
        f"{note['largest_change']:.3g}, {note['mean_change']:.3g} on average",
        "leave out --exact-only to allow the loss, or use another format",
    )


def _converted(
    work: Work, to: str, folder: Path, notes: list[dict[str, Any]], resumed: int
) -> Converted:
    linears, floats, served = [], [], []
    work.warnings = {  # those of an earlier run too, in the order of the file
        note["name"]: [Finding(**warning) for warning in note.get("warnings", ())] for note in notes
    }
    for note in notes:
        kept = {key: note[key] for key in note if key not in ("served", "warnings")}
        if note["name"] in work.choices:
            linears.append(ConvertedTensor(**kept))
        elif note["how"] != "copied":
            floats.append(ConvertedTensor(**kept))
        if note.get("served"):
            served.append(note["served"])
    largest = max((found[0] for found in served), default=0.0)
    mean = sum(found[1] for found in served) / max(sum(found[2] for found in served), 1)
    return Converted(
        Path(folder), work.low.format, to, tuple(linears), tuple(floats),
        len(notes) - len(linears) - len(floats), work.notes(), resumed,
        (largest, mean) if largest else None,
    )  # fmt: skip
