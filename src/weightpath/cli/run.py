"""weightpath run DIR: let a low-bit model answer."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from weightpath.cli.show import emit_json, progress_bar, stderr
from weightpath.errors import BadRequest

if TYPE_CHECKING:
    from weightpath.engine.generate import Answer, Message

NAME = "run"
EXAMPLE = 'Example: weightpath run out --prompt "What is the capital of France?"'


def command(
    folder: str = typer.Argument(help="A low-bit folder of any format, a GGUF file, or a hub id."),
    prompt: str = typer.Option(None, help="What to ask; - reads it from standard input."),
    interactive: bool = typer.Option(
        False, "--interactive", help="Chat until an empty line or end of input."
    ),
    system: str = typer.Option(None, help="A system message for the chat template."),
    max_tokens: int = typer.Option(256, min=1, help="Tokens to generate at most."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
    top_p: float = typer.Option(
        1.0, min=0.0, max=1.0, help="Nucleus sampling, with a temperature."
    ),
    seed: int = typer.Option(None, help="Seed for sampling."),
    activation_bits: int = typer.Option(None, help="8 or 16; without it, what DIR was made for."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    json: bool = typer.Option(
        False, "--json", help="Print the whole answer as JSON instead of streaming it."
    ),
) -> None:
    """Stream an answer to a prompt, the chat template applied."""
    if interactive == (prompt is not None):
        raise BadRequest("run: give --prompt TEXT or --interactive, one of them")
    if interactive and json:
        raise BadRequest("run: --json prints one answer; use it with --prompt")
    from weightpath.checkpoints.locate import place_of
    from weightpath.checkpoints.low_bit import open_low_bit
    from weightpath.engine.generate import answer
    from weightpath.engine.load import load, load_tokenizer

    text = sys.stdin.read() if prompt == "-" else prompt
    place = place_of(folder)
    open_low_bit(place)
    tokenizer = load_tokenizer(place)
    with progress_bar() as progress:
        model = load(place, device, activation_bits=activation_bits, progress=progress)
    for note in model.weightpath.notes:  # type: ignore[union-attr]
        stderr.print(f"[dim]note: {escape(note)}[/dim]")
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    options: dict[str, Any] = {
        "max_new_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed,
    }  # fmt: skip

    def say(message: str, stream: bool = True) -> Answer:
        history.append({"role": "user", "content": message})
        emit = (lambda piece: print(piece, end="", flush=True)) if stream else None
        reply = answer(model, tokenizer, history, emit=emit, **options)
        history.append({"role": "assistant", "content": reply.text})
        if stream:
            print()
            speed = len(reply.tokens) / reply.seconds
            end = "" if reply.stopped else f"; cut at {max_tokens} tokens"
            stderr.print(
                f"[dim]{len(reply.tokens)} tokens, {speed:.1f} a second, prompt included{end}[/dim]"
            )
        return reply

    if json:
        emit_json(asdict(say(text, stream=False)))
    elif not interactive:
        say(text)
    else:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            if not line.strip():
                return
            say(line)
