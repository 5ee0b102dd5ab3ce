"""weightpath quantize MODEL -o DIR: make low-bit weights."""

from __future__ import annotations

from pathlib import Path

import typer

from weightpath.cli.inspect import show_inspection
from weightpath.cli.show import emit_json, progress_bar, stdout
from weightpath.device.probe import probe

NAME = "quantize"
EXAMPLE = "Example: weightpath quantize demo -o out --scheme w4g64-asym --head 16"


def command(
    model: str = typer.Argument(help="A folder, a GGUF file, a hub id (org/name), or demo."),
    output: str = typer.Option(
        ..., "-o", "--output", help="The folder to write; it must not exist."
    ),
    scheme: str = typer.Option(
        None, help="int8, w4g64, w4g128-asym, ...; without it, the device's plan."
    ),
    head: int = typer.Option(8, help="Bits of the output head: 16, 8 or 4."),
    device: str = typer.Option(
        None, help="Plan for this JSON profile or shipped name instead of this machine."
    ),
    priority: str = typer.Option("speed", help="speed or fidelity, where the plan chooses."),
    runtime: str = typer.Option(
        "weightpath", help="weightpath, vllm, transformers: what will load it."
    ),
    group_size: int = typer.Option(None, help="Force the plan's group size; -1 is per channel."),
    search: bool = typer.Option(True, help="Search each group's clipping range by squared error."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace DIR, and any unfinished run beside it."
    ),
    json: bool = typer.Option(False, "--json", help="Print what was done as JSON."),
) -> None:
    """Write MODEL's low-bit weights (compressed-tensors) into DIR. A killed run resumes."""
    from weightpath.jobs.inspect import inspect_folder
    from weightpath.jobs.make import make

    with progress_bar() as progress:
        done = make(model, Path(output), scheme, head, search, overwrite, probe(device=device), progress,
                    priority, runtime, group_size)  # fmt: skip
    found = inspect_folder(Path(output))
    total = done.total
    if json:
        emit_json({
            "folder": str(done.folder),
            "resumed_units": done.resumed,
            "outcomes": done.outcomes,
            "total": vars(total) | {"signal_to_noise_db": total.signal_to_noise_db},
            "linears": {
                name: vars(stats) | {"signal_to_noise_db": stats.signal_to_noise_db} for name, stats in done.stats.items()
            },
            "written": found.to_dict(),
        })  # fmt: skip
        return
    show_inspection(found)
    stdout.print(
        f"{len(done.stats)} linears quantized, weights kept to {total.signal_to_noise_db:.1f} dB; "
        f"{total.zero_groups} groups of zeros, {total.raised_scales} scales raised, {total.lowered_scales} lowered"
    )
    if done.resumed:
        stdout.print(f"{done.resumed} tensors were finished by an earlier run and kept")
