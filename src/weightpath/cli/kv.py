"""weightpath kv MODEL: how much memory a context and its sequences take, by kind of layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from weightpath.cli.show import emit_json, stdout, table

if TYPE_CHECKING:
    from weightpath.paths.kv_budget import KVBudget

NAME = "kv"
EXAMPLE = "Example: weightpath kv demo --context 32768 --sequences 8 --kv-dtype fp8"


def command(
    model: str = typer.Argument(
        help="A folder, config.json, GGUF file, hub id (org/name), or demo; weights are not read."
    ),
    context: int = typer.Option(32768, help="Tokens of one sequence, prompt and reply."),
    sequences: int = typer.Option(1, help="Sequences held at a time."),
    kv_dtype: str = typer.Option(
        "auto", help="auto (the model's), fp32, bf16, fp16, fp8, or int8 with a scale a head."
    ),
    block_size: int = typer.Option(1, help="Round lengths up to whole blocks: 16 for vLLM."),
    source_tokens: int = typer.Option(
        None, help="Tokens that cross attention attends to, where the config does not fix them."
    ),
    state_dtype: str = typer.Option(
        "auto", help="Of recurrent states: auto is what the config says, else fp32."
    ),
    held_by: str = typer.Option(
        "formula", help="formula: what is needed; transformers: what its cache holds."
    ),
    json: bool = typer.Option(False, "--json", help="Print the budget as JSON."),
) -> None:
    """Print the KV cache and the states that MODEL needs for a context and a number of sequences,
    by kind of layer, beside the figure of counting every layer alike."""
    from weightpath.jobs.kv import model_kv

    budget = model_kv(
        model, context, sequences, kv_dtype, block_size=block_size, source_tokens=source_tokens,
        state_dtype=state_dtype, held_by=held_by,
    )  # fmt: skip
    if json:
        emit_json(budget.to_dict())
    else:
        show_budget(budget)


def show_budget(budget: KVBudget) -> None:
    """A row a kind, the total, the naive figure, and what misleads."""
    many = "sequence" if budget.sequences == 1 else "sequences"
    rounding = f", blocks of {budget.block_size}" if budget.block_size > 1 else ""
    stdout.print(
        f"{budget.sequences} {many} of {budget.context:,} tokens, keys and values in "
        f"{budget.kv_dtype}{rounding}"
    )
    rows = table("keeps", "layers", "a token", "tokens", "a sequence", "total")
    for row in budget.rows:
        grows = row.bytes_per_token > 0
        rows.add_row(
            f"{row.kind.replace('_', ' ')} ({escape(row.what)})", str(row.layers),
            f"{row.bytes_per_token:,} B" if grows else "-", f"{row.tokens:,}" if grows else "-",
            mib(row.bytes_per_sequence), mib(row.total_bytes),
        )  # fmt: skip
    stdout.print(rows)
    with_headroom = mib(budget.reserved_bytes())
    stdout.print(
        f"[bold]total {mib(budget.total_bytes)}[/bold] ({budget.total_bytes:,} bytes), "
        f"with headroom of a quarter {with_headroom}"
    )
    off = budget.difference_bytes
    word = "less" if off >= 0 else "more"
    stdout.print(
        f"counting every attention layer alike: {mib(budget.flat_bytes)}; by kind it is "
        f"{mib(abs(off))} {word}"
    )
    for part in budget.towers:
        stdout.print(f"  beside it: {part}, no cache", markup=False)
    if budget.filled:
        known = ", ".join(f"{name} {_short(budget.fields[name])}" for name in budget.filled)
        stdout.print(
            f"  as transformers reads it, not written in the config: {known}", markup=False
        )
    for note in (*budget.differences, *budget.notes):
        stdout.print(f"  note: {note}", markup=False)


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)):
        kinds = list(dict.fromkeys(str(item) for item in value))
        return f"[{', '.join(kinds[:4])}]"
    return f"{value!s:.40}"


def mib(count: float) -> str:
    """Bytes in binary units, as memory is sold and limited: B, KiB, MiB, GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            digits = 2 if unit == "GiB" else 0 if float(count).is_integer() else 1
            return f"{count:,.{digits}f} {unit}"
        count /= 1024
    raise AssertionError  # pragma: no cover
