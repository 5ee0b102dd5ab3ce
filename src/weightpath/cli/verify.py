"""weightpath verify DIR --reference MODEL: what the low-bit weights lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weightpath.cli.model import BITS, DEVICE, ENGINE, KV_CACHE
from weightpath.cli.show import emit_json, interval, progress_bar, stdout, table

if TYPE_CHECKING:
    from weightpath.jobs.verify import Verification

NAME = "verify"
EXAMPLE = "Example: weightpath verify out --reference demo --text wikitext2-test.txt"


def command(
    folder: str = typer.Argument(help="A low-bit checkpoint's folder."),
    reference: str = typer.Option(
        ..., help="The float MODEL: a folder, a GGUF file, a hub id, or demo."
    ),
    text: str = typer.Option(
        None, help="A UTF-8 text file; without it, Python's own documentation."
    ),
    windows: int = typer.Option(24, min=1, help="Windows of text at most."),
    length: int = typer.Option(512, min=8, help="Tokens a window."),
    contiguous: bool = typer.Option(
        False, "--contiguous", help="Cut the text in a row, as published figures do."
    ),
    compute: str = typer.Option(
        None, help="MODEL's arithmetic, float32 or bfloat16; else float32 where memory allows."
    ),
    prompts: str = typer.Option(
        None, help="A JSON list of {name, prompt} for the greedy comparison."
    ),
    prompt_tokens: int = typer.Option(48, min=1, help="Tokens generated a prompt."),
    activation_bits: int = BITS,
    device: str = DEVICE,
    engine: str = ENGINE,
    kv_cache: str = KV_CACHE,
    json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Compare DIR with MODEL's own bf16 weights: KL divergence, top-1, perplexity, greedy text."""
    from weightpath.jobs.verify import VerifyOptions, verify_folder

    options = VerifyOptions(
        text=Path(text) if text else None, length=length, limit=windows, contiguous=contiguous, compute=compute,
        prompts=Path(prompts) if prompts else None, prompt_tokens=prompt_tokens, device=device,
        activation_bits=activation_bits, engine=engine, kv_cache=kv_cache,
    )  # fmt: skip
    with progress_bar() as progress:
        result = verify_folder(Path(folder), reference, options, progress)
    if json:
        emit_json(result.to_dict())
    else:
        show_verification(result)


def show_verification(result: Verification) -> None:
    """The figures with 95% intervals, beside the reference's own noise."""
    fidelity, floor, greedy = result.fidelity, result.noise_floor, result.greedy
    for note in result.notes:
        stdout.print(f"note: {note}", markup=False)
    stdout.print(
        f"{result.text}; {fidelity.tokens:,} tokens, reference in {result.compute}; {result.ran}"
    )
    rows = table("against its own bf16", "value (95% interval)", "noise floor")
    rows.add_row(
        "KL divergence, mean (nats)", interval(fidelity.mean_kl), f"{floor.mean_kl.value:.1e}"
    )
    rows.add_row(
        "KL divergence, median", interval(fidelity.median_kl), f"{floor.median_kl.value:.1e}"
    )
    rows.add_row(
        "KL divergence, 99.9th percentile", interval(fidelity.p999_kl), f"{floor.p999_kl.value:.1e}"
    )
    rows.add_row(
        "top-1 agreement",
        interval(fidelity.top1, 1, percent=True),
        f"{100 * floor.top1.value:.1f}%",
    )
    rows.add_row(
        "perplexity",
        interval(fidelity.perplexity_candidate, 3),
        f"bf16 {fidelity.perplexity_reference.value:.3f}",
    )
    rows.add_row("perplexity ratio", interval(fidelity.perplexity_ratio), "")
    stdout.print(rows)
    stdout.print(
        f"greedy text reproduced: {greedy.k} of {greedy.n} prompts "
        f"({100 * greedy.equal.low:.0f}% to {100 * greedy.equal.high:.0f}%), {greedy.max_new_tokens} tokens each; "
        f"noise floor: {floor.comparison}"
    )
