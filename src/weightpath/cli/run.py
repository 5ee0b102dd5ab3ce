"""weightpath run DIR: let a low-bit model answer."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weightpath.cli.interrupt import CODE as INTERRUPTED
from weightpath.cli.interrupt import stopping
from weightpath.cli.model import BITS, DEVICE, ENGINE, KV_CACHE, NO_CACHE, loaded
from weightpath.cli.show import emit_json, stderr
from weightpath.errors import BadRequest, CannotRun

if TYPE_CHECKING:
    from weightpath.engine.generate import Answer, Message
    from weightpath.engine.sampling import Sampling
    from weightpath.engine.stream import Limits, Piece

NAME = "run"
EXAMPLE = 'Example: weightpath run out --prompt "What is the capital of France?"'
HEADING = 60
"""Characters of a prompt that its answer is headed with."""


@dataclass(frozen=True)
class _Asked:
    """What every answer of this run is made with."""

    model: Any
    tokenizer: Any
    system: str | None
    sampling: Sampling
    limits: Limits
    logprobs: int | None
    context: int | None
    json: bool

    def opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []


def command(
    folder: str = typer.Argument(help="A low-bit folder of any format, a GGUF file, or a hub id."),
    prompt: str = typer.Option(None, help="What to ask; - reads it from standard input."),
    interactive: bool = typer.Option(
        False, "--interactive", "--chat", help="Chat until an empty line or end of input."
    ),
    prompts_file: str = typer.Option(
        None, help="A file with a prompt a line, each answered on its own; - is standard input."
    ),
    at_once: int = typer.Option(8, min=1, help="Prompts of a file that are run together."),
    system: str = typer.Option(None, help="A system message for the chat template."),
    max_tokens: int = typer.Option(
        256, "--max-tokens", "--max-new-tokens", min=1, help="Tokens to generate at most."
    ),
    temperature: float = typer.Option(
        None, min=0.0, help="0 is greedy. This and the next four: else generation_config.json's."
    ),
    top_k: int = typer.Option(None, min=0, help="Sample from the k most likely; 0: from all."),
    top_p: float = typer.Option(
        None, min=0.0, max=1.0, help="Nucleus sampling, with a temperature; 1: none."
    ),
    min_p: float = typer.Option(
        None, min=0.0, max=1.0, help="Leave out what is less likely than this times the likeliest."
    ),
    repetition_penalty: float = typer.Option(
        None, min=0.01, help="Above 1 makes tokens that were there less likely; 1: none."
    ),
    seed: int = typer.Option(None, help="Seed for sampling."),
    stop: list[str] = typer.Option(
        None, help="End an answer before this text; may be given again."
    ),
    logprobs: int = typer.Option(
        None, min=0, help="With --json: log-probabilities, of so many beside each token."
    ),
    context: int = typer.Option(
        None, min=2, help="Most tokens of a prompt and its answer; without it, the model's own."
    ),
    activation_bits: int = BITS,
    device: str = DEVICE,
    engine: str = ENGINE,
    kv_cache: str = KV_CACHE,
    no_cache: bool = NO_CACHE,
    json: bool = typer.Option(
        False, "--json", help="Print whole answers as JSON (of a chat, a line a turn)."
    ),
) -> None:
    """Stream an answer to a prompt, the chat template applied."""
    if sum((prompt is not None, interactive, prompts_file is not None)) != 1:
        raise BadRequest(
            "run: give --prompt TEXT or --interactive or --prompts-file FILE, one of them"
        )
    if logprobs is not None and not json:
        raise BadRequest("run: --logprobs are shown with --json")
    from weightpath.checkpoints.locate import place_of
    from weightpath.checkpoints.low_bit import open_low_bit
    from weightpath.engine.generate import stop_ids
    from weightpath.engine.load import load_tokenizer
    from weightpath.engine.sampling import Sampling
    from weightpath.engine.stream import Limits

    settings = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    Sampling(**given)  # what cannot be is said before the model is loaded
    limits = Limits(max_tokens, (), tuple(stop or ()))
    texts = [sys.stdin.read() if prompt == "-" else prompt] if prompt is not None else []
    if prompts_file is not None:
        texts = _lines(prompts_file)
    place = place_of(folder)
    open_low_bit(place)
    tokenizer = load_tokenizer(place)
    model = loaded(place, device, activation_bits, engine, kv_cache, no_cache)
    limits = replace(limits, stop_tokens=tuple(stop_ids(model, tokenizer)))
    sampling = _sampling(model, given)
    asked = _Asked(model, tokenizer, system, sampling, limits, logprobs, context, json)
    if interactive:
        _chat(asked)
    elif prompts_file is not None:
        _many(asked, texts, at_once)
    else:
        _one(asked, texts[0])


def _sampling(model: Any, given: dict[str, Any]) -> Sampling:
    """The options, over what generation_config.json advises, which is said on stderr."""
    from weightpath.serve.defaults import advised, default_sampling

    taken = {name: value for name, value in advised(model).items() if name not in given}
    if taken:
        said = ", ".join(f"{name} {value:g}" for name, value in taken.items())
        stderr.print(f"[dim]note: {said}, as generation_config.json advises[/dim]")
    return replace(default_sampling(model, unsaid_temperature=0.0), **given)


def _lines(name: str) -> list[str]:
    """The prompts of a file, empty lines left out."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"run: {name} cannot be read ({error}); give a text file") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadRequest(f"run: {name} holds no prompt; write one a line")
    return lines


def _one(asked: _Asked, text: str) -> None:
    reply = _say(asked, [*asked.opening(), {"role": "user", "content": text}], _session(asked))
    if asked.json:
        emit_json(_plain(asked, reply))
    if reply.finish == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _chat(asked: _Asked) -> None:
    """Turns until an empty line. Ctrl-C in an answer ends that answer, elsewhere the chat."""
    history, session = asked.opening(), _session(asked)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        history.append({"role": "user", "content": line})
        reply = _say(asked, history, session)
        history.append({"role": "assistant", "content": reply.text})
        if asked.json:
            print(json_module.dumps(_plain(asked, reply)), flush=True)


def _session(asked: _Asked) -> Any:
    from weightpath.engine.session import open_session

    return open_session(asked.model, asked.context)


def _say(asked: _Asked, messages: list[Message], session: Any) -> Answer:
    """One answer, streamed unless it is printed as JSON."""
    from weightpath.engine.generate import answer

    emit = None if asked.json else (lambda piece: print(piece, end="", flush=True))
    with stopping() as stopped:
        reply = answer(
            asked.model, asked.tokenizer, messages, asked.limits.max_new_tokens, emit=emit,
            stop=asked.limits.stop_strings, logprobs=asked.logprobs, session=session,
            cancelled=stopped, **vars(asked.sampling),
        )  # fmt: skip
    if not asked.json:
        print()
        stderr.print(f"[dim]{_speed(asked, reply)}[/dim]")
    return reply


def _speed(asked: _Asked, reply: Answer) -> str:
    """Two lines: of the prompt and what follows it, and of the whole."""
    ends = {"length": f"; cut at {len(reply.tokens)} tokens", "cancelled": "; stopped by Ctrl-C"}
    read = reply.prompt_tokens - reply.cached_tokens
    kept = f" ({reply.cached_tokens} kept)" if reply.cached_tokens else ""
    parts = f"prompt of {read}{kept}: {read / max(reply.prefill_seconds, 1e-9):.1f} a second"
    if len(reply.tokens) > 1:
        speed = (len(reply.tokens) - 1) / max(reply.decode_seconds, 1e-9)
        parts += f"; then {speed:.1f} a second"
    whole = len(reply.tokens) / max(reply.seconds, 1e-9)
    end = ends.get(reply.finish, "")
    return f"{parts}\n{len(reply.tokens)} tokens, {whole:.1f} a second, prompt included{end}"


def _many(asked: _Asked, texts: list[str], at_once: int) -> None:
    """A prompt's answer is printed once it is whole, in the prompts' order."""
    from weightpath.engine.batch import generate_many
    from weightpath.engine.generate import answer_of, check_vocabulary, encode
    from weightpath.engine.session import engine_of
    from weightpath.engine.stream import joined

    prompts = []
    for text in texts:
        messages = [*asked.opening(), {"role": "user", "content": text}]
        prompts.append(encode(asked.tokenizer, messages)[0].tolist())
        check_vocabulary(asked.model, prompts[-1])
    pieces: list[list[Piece]] = [[] for _ in texts]
    printed = 0

    def show(index: int, piece: Piece) -> None:
        nonlocal printed
        pieces[index].append(piece)
        while not asked.json and printed < len(texts) and _is_whole(pieces[printed]):
            heading, whole = " ".join(texts[printed].split())[:HEADING], joined(pieces[printed])
            print(f"## {heading}\n{whole.text.strip()}\n", flush=True)
            printed += 1

    with stopping() as stopped:
        replies = generate_many(
            engine_of(asked.model), asked.tokenizer, prompts, asked.sampling, asked.limits,
            asked.logprobs, at_once, asked.context, stopped, show, isolate=True,
        )  # fmt: skip
    answers = [answer_of(reply, asked.logprobs is not None) for reply in replies]
    if asked.json:
        rows = [
            {"prompt": text, **_plain(asked, one)} for text, one in zip(texts, answers, strict=True)
        ]
        emit_json({"answers": rows})
    if any(one.finish == "cancelled" for one in answers):
        raise typer.Exit(INTERRUPTED)
    failed = [index for index, one in enumerate(answers, 1) if one.error]
    if failed:
        first = answers[failed[0] - 1].error
        raise CannotRun(f"run: {len(failed)} of {len(texts)} prompts failed, number {failed[0]} first: {first}")  # fmt: skip


def _is_whole(pieces: list[Piece]) -> bool:
    return bool(pieces) and pieces[-1].finish is not None


def _plain(asked: _Asked, reply: Answer) -> dict[str, Any]:
    """JSON-ready; tokens with log-probabilities carry their text."""
    plain = asdict(reply)
    rows = plain.pop("logprobs")
    if asked.logprobs is None:
        return plain
    text = asked.tokenizer.decode
    plain["logprobs"] = [
        {
            "token": row["token"], "text": text([row["token"]]), "logprob": row["logprob"],
            "best": [{"token": i, "text": text([i]), "logprob": p} for i, p in row["best"]],
        }
        for row in rows
    ]  # fmt: skip
    return plain
