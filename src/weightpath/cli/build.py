"""weightpath build MODEL: probe, plan, quantize, verify, bench, report and an answer, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weightpath.cli.inspect import show_inspection
from weightpath.cli.plan import show_plan
from weightpath.cli.probe import show_profile
from weightpath.cli.show import emit_json, heading, progress_bar, stdout, table
from weightpath.cli.verify import show_verification
from weightpath.device.probe import probe

if TYPE_CHECKING:
    from weightpath.bench.decode import SpeedResult
    from weightpath.jobs.build import Build

NAME = "build"
EXAMPLE = "Example: weightpath build demo"


def command(
    model: str = typer.Argument(help="A folder, a GGUF file, a hub id (org/name), or demo."),
    output: str = typer.Option(
        None, "-o", "--output", help="The folder to write; default, one in the cache."
    ),
    priority: str = typer.Option("speed", help="speed or fidelity."),
    runtime: str = typer.Option(
        "weightpath", help="weightpath, vllm, transformers: what will load it."
    ),
    head: int = typer.Option(8, help="Bits of the output head: 16, 8 or 4."),
    group_size: int = typer.Option(None, help="Force a group size; -1 is per channel."),
    text: str = typer.Option(
        None, help="A UTF-8 text file to verify on; default, Python's documentation."
    ),
    windows: int = typer.Option(10, min=1, help="Windows of text to verify on, at most."),
    question: str = typer.Option(None, help="What the built model answers at the end."),
    record: bool = typer.Option(
        True, help="Keep the measurement as evidence in your record store."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the output folder."),
    json: bool = typer.Option(
        False, "--json", help="Print everything as one JSON document at the end."
    ),
) -> None:
    """Build, prove and measure MODEL's low-bit weights on this machine, and write a report."""
    from weightpath.jobs.build import QUESTION, BuildOptions, build
    from weightpath.jobs.summary import command_line
    from weightpath.jobs.verify import VerifyOptions

    verify = VerifyOptions(text=Path(text) if text else None, limit=windows, prompt_tokens=32)
    options = BuildOptions(
        output=Path(output) if output else None, priority=priority, runtime=runtime, head_bits=head,
        group_size=group_size, overwrite=overwrite, verify=verify, question=question or QUESTION, record=record,
    )  # fmt: skip
    typed = command_line("build", Path(model).name, head, priority, runtime, group_size)
    with progress_bar() as progress:
        shown = (lambda name, result: None) if json else show_stage
        result = build(model, options, probe(), shown, progress, typed)
    if json:
        emit_json(result.to_dict())


def show_stage(name: str, result: Any) -> None:
    """Print one stage's result as it is finished."""
    titles = {"written": "what was written", "fidelity": "fidelity", "speed": "speed, measured in turns",
              "answer": "an answer from the low-bit model", "files": "files"}  # fmt: skip
    heading(titles.get(name, name))
    if name == "device":
        show_profile(result)
    elif name == "plan":
        show_plan(result)
    elif name == "written":
        show_inspection(result)
    elif name == "fidelity":
        show_verification(result)
    elif name == "speed":
        show_speed(result)
    elif name == "answer":
        question, reply = result
        stdout.print(f"> {question}\n{reply.text}", markup=False)
    elif name == "files":
        show_files(result)


def show_speed(speed: SpeedResult) -> None:
    """Tokens a second with their spread, and ratios to bf16."""
    rows = table(
        "model", "decode tok/s (spread)", "against bf16", "prefill tok/s (spread)", "against bf16"
    )
    for model in speed.models:
        decode, prefill = model.decode, model.prefill
        rows.add_row(
            model.name,
            f"{decode.median:.1f} ({decode.low:.1f} to {decode.high:.1f})",
            str(model.decode_ratio or ""),
            f"{prefill.median:.0f} ({prefill.low:.0f} to {prefill.high:.0f})",
            str(model.prefill_ratio or ""),
        )
    stdout.print(rows)
    stdout.print(
        f"prompt {speed.prompt_length} tokens, {speed.decode_tokens} decoded, {speed.rounds} rounds, "
        f"{speed.threads} threads, {speed.device}"
    )


def show_files(result: Build) -> None:
    """Where everything is, and what to type next."""
    stdout.print(f"weights: {result.folder}")
    stdout.print(f"report:  {result.report}")
    if result.record:
        stdout.print(f"record:  {result.record}")
    stdout.print(f'next:    weightpath run {result.folder} --prompt "..."')
