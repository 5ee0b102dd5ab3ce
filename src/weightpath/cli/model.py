"""What the verbs that run a model share: its options, and loading it with progress and notes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from weightpath.cli.show import progress_bar, stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BITS: Any = typer.Option(None, help="8 or 16; without it, what DIR was made for.")
DEVICE: Any = typer.Option("cpu", help="cpu or cuda.")
ENGINE: Any = typer.Option(
    "auto",
    help="native (CPU), graph (CUDA), transformers, or auto: native or graph, by device, where it "
    "takes the model.",
)
KV_CACHE: Any = typer.Option(
    "bf16", help="With --engine native: keys and values in bf16, int8 (half the memory) or fp32."
)
NO_CACHE: Any = typer.Option(
    False, "--no-cache", help="Neither read nor write the packed weights beside the model."
)


def loaded(
    place: Path,
    device: str,
    activation_bits: int | None,
    engine: str,
    kv_cache: str,
    no_cache: bool,
) -> PreTrainedModel:
    """The model, its notes shown on stderr."""
    from weightpath.engine.load import load

    with progress_bar() as progress:
        model = load(
            place, device, activation_bits=activation_bits, progress=progress, engine=engine,
            kv_cache=kv_cache, cache=not no_cache,
        )  # fmt: skip
    for note in model.weightpath.notes:  # type: ignore[union-attr]
        stderr.print(f"[dim]note: {escape(note)}[/dim]")
    return model
