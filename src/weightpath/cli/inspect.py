"""weightpath inspect DIR: what a checkpoint holds, counted from its stored tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weightpath.cli.show import emit_json, size, stdout, table

if TYPE_CHECKING:
    from weightpath.jobs.inspect import Inspection

NAME = "inspect"
EXAMPLE = "Example: weightpath inspect out --json"


def command(
    folder: str = typer.Argument(help="A checkpoint's folder, or a GGUF file."),
    json: bool = typer.Option(False, "--json", help="Print the counts as JSON."),
) -> None:
    """Print the format, schemes, tensors, bytes and measured bits per weight of a checkpoint."""
    from weightpath.jobs.inspect import inspect_folder

    found = inspect_folder(Path(folder))
    if json:
        emit_json(found.to_dict())
    else:
        show_inspection(found)


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
