"""weightpath inspect DIR: what a checkpoint holds, counted from its stored tensors."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from weightpath.cli.show import emit_json, heading, progress_bar, size, stdout, table
from weightpath.errors import BadCheckpoint, BadRequest

if TYPE_CHECKING:
    from weightpath.jobs.examine import Examination
    from weightpath.jobs.inspect import Inspection
    from weightpath.paths.held import Verdict

NAME = "inspect"
EXAMPLE = "Example: weightpath inspect out --tp 2,4,8 --json"
SHOWN = 20
"""Findings, splits and limits that are shown; --json has them all."""


def command(
    folder: str = typer.Argument(
        help="A checkpoint's folder, a GGUF file, or a hub id (org/name)."
    ),
    tp: str = typer.Option(
        None, "--tp", help="Tensor-parallel sizes to try, such as 2,4,8: what cannot be split."
    ),
    kernel: str = typer.Option(None, help="awq: what that kernel's layout cannot hold."),
    json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Print what a checkpoint is: format, schemes, measured bits per weight, problems, and which
    runtimes load it, with the conversion that would make it load. Exit code 2 where something in
    it is wrong."""
    from weightpath.checkpoints.locate import place_of
    from weightpath.jobs.examine import examine

    sizes = _sizes(tp)
    with progress_bar() as progress:
        found = examine(place_of(folder), sizes, kernel, progress)
    if json:
        emit_json(found.to_dict())
    else:
        show_inspection(found.inspection)
        show_examination(found)
    if found.errors:
        first = found.errors[0]
        more = f" ({len(found.errors) - 1} more above)" if len(found.errors) > 1 else ""
        raise BadCheckpoint(folder, f"{first.tensor}: {first.problem}{more}", first.mend)


def _sizes(tp: str | None) -> tuple[int, ...]:
    """The numbers in `--tp 2,4,8`."""
    if tp is None:
        return ()
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", tp):
        raise BadRequest(f"--tp '{tp:.40}': give sizes with commas between, such as 2,4,8")
    return tuple(int(size) for size in tp.split(","))


def show_examination(found: Examination) -> None:
    """How it was recognised, linears by module, findings, the acceptance table, splits, limits."""
    stdout.print(f"recognised by {found.how}", markup=False)
    if found.inspection.modules:
        rows = table("linears", "scheme", "count", "shape [N, K]", "bits per weight")
        rows.columns[0].no_wrap = True
        for item in found.inspection.modules:
            shapes = ", ".join(f"[{shape[0]}, {shape[1]}]" for shape in item.shapes[:3])
            rows.add_row(
                item.pattern, item.scheme, str(item.count), escape(shapes),
                f"{item.bits_per_weight:.3f}",
            )  # fmt: skip
        stdout.print(rows)
    for note in found.notes[:SHOWN]:
        stdout.print(f"note: {note}", markup=False)
    count = sum(item.count for item in found.inspection.modules)
    heading("problems")
    from weightpath.checkpoints.audit import summarise

    for line in summarise(found.findings, SHOWN, count) or ("none found",):
        stdout.print(line, markup=False)
    heading("who loads it, with the errors mended" if found.errors else "who loads it")
    rows = table("runtime", "", "loads", "why, and what would make it load")
    rows.columns[-1].justify = "left"
    for verdict in found.acceptance:
        rows.add_row(f"{verdict.runtime} {verdict.versions}", verdict.device, verdict.loads,
                     escape(_why(verdict)))  # fmt: skip
    stdout.print(rows)
    if found.split_checked or found.split_unknown:
        heading("tensor parallelism")
        if found.split_checked:
            _show(
                _alike([(f"tp {s.tp}: ", s.name, f"{s.problem}; {s.mend}") for s in found.splits]),
                f"all {found.split_checked} splits asked work",
            )
        if found.split_unknown:
            stdout.print(
                f"{found.split_unknown} linears were not asked: their names tell neither rows nor columns"
            )
    if found.kernel_checked:
        heading("the AWQ kernel's limits")
        _show(
            _alike([("", limit.name, f"{limit.problem}; {limit.mend}") for limit in found.kernel]),
            f"its layout holds all {found.kernel_checked} linears",
        )
        if found.device_refuses:
            stdout.print(f"on this machine: {found.device_refuses}", markup=False)


def _why(verdict: Verdict) -> str:
    needs = f" (needs {', '.join(verdict.needs)})" if verdict.needs else ""
    if verdict.convert is None:
        return f"{verdict.why}{needs}"
    kept = {True: ", exact", False: ", lossy", None: ""}[verdict.lossless]
    return f"{verdict.why}{needs}; weightpath convert {verdict.convert}{kept}"


def _alike(rows: list[tuple[str, str, str]]) -> list[str]:
    """Lines of (label, linear, rest), those that differ in numbers of the name alone as one."""
    counts = Counter((label, re.sub(r"\d+", "*", name), rest) for label, name, rest in rows)
    return [
        f"{label}{pattern}{f' ({count})' if count > 1 else ''}: {rest}"
        for (label, pattern, rest), count in counts.items()
    ]


def _show(lines: list[str], otherwise: str) -> None:
    for line in lines[:SHOWN] or [otherwise]:
        stdout.print(line, markup=False)
    if len(lines) > SHOWN:
        stdout.print(f"and {len(lines) - SHOWN} more: --json lists them")


def show_inspection(found: Inspection) -> None:
    """Counts by scheme and role, then the totals."""
    stdout.print(f"{found.where}: {found.format}, {found.architecture}")
    rows = table("scheme", "role", "tensors", "weights", "bytes", "bits per weight")
    for kind in found.kinds:
        rows.add_row(kind.scheme, kind.role, str(kind.tensors), f"{kind.weights:,}", f"{kind.stored_bytes:,}",
                     f"{kind.bits_per_weight:.3f}")  # fmt: skip
    stdout.print(rows)
    stdout.print(
        f"{found.tensors} tensors, {size(found.file_bytes)}; bits per weight: linears "
        f"{found.linear_bits_per_weight:.3f}, with the head {found.matmul_bits_per_weight:.3f}, "
        f"whole file {found.file_bits_per_weight:.3f}"
    )
    if found.made_by:
        made = found.made_by
        stdout.print(
            f"made by weightpath {made.get('version')} from {made.get('base_model')}: {made.get('method')}"
        )
