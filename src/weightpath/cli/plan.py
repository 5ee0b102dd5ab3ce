"""weightpath plan MODEL: which low-bit weights a device should run, and why not the others."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

import weightpath
from weightpath.cli.show import emit_json, heading, size, stdout, table

if TYPE_CHECKING:
    from weightpath.jobs.plan import Plan
    from weightpath.paths.select import Selection

NAME = "plan"
EXAMPLE = "Example: weightpath plan demo --priority fidelity --runtime vllm"


def command(
    model: str = typer.Argument(
        help="A folder, a GGUF file, a hub id (org/name), demo, or a config.json alone."
    ),
    device: str = typer.Option(
        None, help="A JSON profile or a shipped name, in place of this machine."
    ),
    priority: str = typer.Option("speed", help="speed or fidelity."),
    runtime: str = typer.Option(
        "weightpath", help="weightpath, vllm, transformers or llama.cpp: what will load it."
    ),
    head: int = typer.Option(8, help="Bits of the output head: 16, 8 or 4."),
    group_size: int = typer.Option(None, help="Force a group size; -1 is per channel."),
    context: int = typer.Option(
        None, help="Tokens of a sequence, for the fit in memory; 4096 where the model has so many."
    ),
    sequences: int = typer.Option(1, help="Sequences held at a time."),
    kv_dtype: str = typer.Option("auto", help="auto (the model's), fp32, bf16, fp16, fp8 or int8."),
    why: bool = typer.Option(
        False, "--why", help="Also list what becomes of every tensor, and its reason."
    ),
    json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Print the weight path for MODEL on a device, its reasons, and every path it rejects."""
    profile = weightpath.probe(device=device)
    made = weightpath.plan(
        model, profile, priority, runtime, head, group_size, context, sequences, kv_dtype
    )
    if json:
        emit_json(made.to_dict())
        return
    show_plan(made)
    if why:
        heading("every tensor")
        rows = table("tensor", "scheme", "bytes", "reason")
        rows.columns[3].justify = "left"
        for item in made.tensors.decisions:
            rows.add_row(
                item.name,
                item.scheme.name if item.scheme else "as it is",
                f"{item.stored_bytes:,}",
                item.reason,
            )
        stdout.print(rows)


def show_plan(plan: Plan) -> None:
    """The chosen path, reasons, rejections, and the tensors in short."""
    if plan.selection is not None:
        path, selection = plan.selection.path, plan.selection
        state = "verified" if selection.verified else "not verified"
        stdout.print(
            f"[bold]{path.name}[/bold]  {path.bits_per_weight:.3f} bits per weight, {state}"
        )
        for reason in selection.reasons:
            stdout.print(f"  + {reason}")
        for note in path.notes:
            stdout.print(f"  note: {note}")
        for claim in path.claims:
            stdout.print(f"  claim, not evidence: {claim}")
        stdout.print(f"  kernel: {path.kernels}")
        stdout.print(f"  build: {path.built_by}")
        _show_serving(selection)
        for name, reason in selection.rejected:
            stdout.print(f"  - {name}: {reason}")
        for warning in selection.warnings:
            stdout.print(f"  warning: {warning}")
    stdout.print(f"  groups: {plan.tensors.group_reason}")
    counts = Counter(
        (
            item.shape.role.replace("_", " "),
            item.scheme.name if item.scheme else "as it is",
            item.reason,
        )
        for item in plan.tensors.decisions
    )
    for (role, scheme, reason), count in counts.items():
        stdout.print(f"  {count} {role}: {scheme} ({reason})")
    tensors = plan.tensors
    stdout.print(
        f"  planned: {size(tensors.source_bytes)} -> {size(tensors.file_bytes)}, linears "
        f"{tensors.linear_bits_per_weight:.3f} bits per weight, whole file {tensors.file_bits_per_weight:.3f}"
    )
    if plan.fit is not None:
        found = plan.fit
        stdout.print(f"  {found.fit.sentence}", markup=False)
        weights = found.weights.step_bytes(found.fit.sequences)
        stdout.print(
            f"  a decode step at that context reads {size(found.step_bytes)}: {size(weights)} of "
            f"weights, {size(found.step_bytes - weights)} of cache"
        )
        if found.note:
            stdout.print(f"  {found.note}", markup=False)


def _show_serving(selection: Selection) -> None:
    """How to serve the built folder: to one user here, to many with vLLM."""
    path = selection.path
    if path.scheme is not None and not path.name.startswith("export"):
        stdout.print("  serve, one user: weightpath serve DIR")
    if selection.vllm_command is not None:
        stdout.print(f"  serve, many users or machines: {escape(selection.vllm_command)}")
    else:
        stdout.print(
            "  serve, many users or machines: vLLM does not run this path here; plan with "
            "--runtime vllm for one that it runs"
        )
