"""weightpath convert SRC --to FORMAT -o DIR: another format, with what it keeps said per tensor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weightpath.cli.show import emit_json, progress_bar, stdout, table

if TYPE_CHECKING:
    from weightpath.jobs.convert import Converted, ConvertedTensor

NAME = "convert"
EXAMPLE = "Example: weightpath convert awq-model --to compressed-tensors -o out"
SHOWN = 20
"""Lossy tensors and notes that are shown one by one; --json has them all."""


def command(
    source: str = typer.Argument(
        help="A low-bit checkpoint's folder, a GGUF file, or a hub id (org/name)."
    ),
    to: str = typer.Option(
        ..., "--to", help="compressed-tensors, awq, gptq, gptq_v2, int8 or gguf."
    ),
    output: str = typer.Option(
        ..., "-o", "--output", help="The folder to write; for gguf also a .gguf file."
    ),
    exact_only: bool = typer.Option(
        False, "--exact-only", help="Refuse where any weight would change."
    ),
    group_size: int = typer.Option(
        None, help="Cut groups into this size (exact), for tensor parallelism."
    ),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace DIR, and any unfinished run beside it."
    ),
    json: bool = typer.Option(False, "--json", help="Print every tensor's outcome as JSON."),
) -> None:
    """Write SRC's integers in another format. A killed run resumes (a GGUF file starts again)."""
    from weightpath.jobs.convert import convert

    with progress_bar() as progress:
        done = convert(
            source, to, Path(output), exact_only=exact_only, overwrite=overwrite,
            group_size=group_size, progress=progress,
        )  # fmt: skip
    if json:
        emit_json(done.to_dict())
    else:
        show_conversion(done)


def show_conversion(done: Converted) -> None:
    """Outcomes counted by what was done, the lossy ones by name, then the totals."""
    stdout.print(f"{done.source_format} to {done.format}: {done.folder}", markup=False)
    rows = table("linears", "from", "to", "", "how")
    rows.columns[-1].justify = "left"
    counts = Counter((i.source, i.target, i.exact, _kind(i)) for i in done.linears)
    for (source, target, exact, how), count in counts.most_common():
        rows.add_row(str(count), source, target, "exact" if exact else "lossy", how)
    stdout.print(rows)
    changed = [item for item in (*done.linears, *done.floats) if not item.exact]
    if changed:
        worst = sorted(changed, key=lambda item: -item.mean_change)
        rows = table("changed most", "largest change", "mean change")
        for item in worst[:SHOWN]:
            rows.add_row(item.name, f"{item.largest_change:.3g}", f"{item.mean_change:.3g}")
        stdout.print(rows)
        if len(worst) > SHOWN:
            stdout.print(f"and {len(worst) - SHOWN} more: --json lists them")
    for note in done.notes[:SHOWN]:
        stdout.print(f"note: {note}", markup=False)
    if len(done.notes) > SHOWN:
        stdout.print(f"and {len(done.notes) - SHOWN} more notes: --json lists them")
    if done.served is not None:
        largest, mean = done.served
        stdout.print(
            f"note: scales are fp16 and the model is bf16: a runtime that holds scales in the model's "
            f"dtype changes them by up to {100 * largest:.2g}% ({100 * mean:.2g}% on average)"
        )
    if done.resumed:
        stdout.print(f"{done.resumed} tensors were finished by an earlier run and kept")
    lossy_floats = len([item for item in done.floats if not item.exact])
    stdout.print(
        f"{done.exact} of {len(done.linears)} linears exact, {done.lossy} lossy; "
        f"{done.copied} other tensors copied, {lossy_floats} rounded"
    )


def _kind(item: ConvertedTensor) -> str:
    """How, without what differs from tensor to tensor: numbers stay in the list of changes."""
    first = item.how.split("; weights change")[0]
    return first.split(": float16 rounds")[0] if "float16 rounds" in first else first
