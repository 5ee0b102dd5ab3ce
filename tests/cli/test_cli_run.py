"""run: an answer streamed, read from standard input, as JSON, and a chat that keeps its history."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_checkpoint import tokenizer_of
from weightpath.engine.generate import Message, answer, encode
from weightpath.engine.load import load

pytestmark = pytest.mark.usefixtures("one_thread")
Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def expected(tiny_low_bit: Path) -> Callable[..., str]:
    """The reply to a history, from the engine itself."""
    model, tokenizer = load(tiny_low_bit), tokenizer_of(tiny_low_bit)
    return lambda *history, **options: answer(model, tokenizer, list(history), 8, **options).text


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_the_answer_is_streamed_to_stdout_and_the_speed_to_stderr(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "8")
    assert ran.code == 0
    assert ran.out.strip() == expected(user("Hello"))
    assert ran.out.endswith("\n")
    assert "8 tokens" in ran.err
    assert "cut at 8 tokens" in ran.err


def test_pieces_are_written_as_they_come(
    weightpath_cli: Cli, tiny_low_bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece is flushed before the next token is made."""
    from weightpath.engine import generate

    seen: list[str] = []
    real = generate._Stream.on_finalized_text

    def watched(self: Any, text: str, stream_end: bool = False) -> None:
        seen.append(text)
        real(self, text, stream_end)

    monkeypatch.setattr(generate._Stream, "on_finalized_text", watched)
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "24")
    assert len(seen) >= 24
    assert len([piece for piece in seen if piece]) > 1
    assert ran.out == "".join(seen) + "\n"


def test_a_dash_reads_the_prompt_from_standard_input(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    arguments = ("run", tiny_low_bit, "--prompt", "-", "--max-tokens", "8")
    ran = weightpath_cli(*arguments, stdin="Two\nlines")
    assert ran.out.strip() == expected(user("Two\nlines"))


def test_a_system_message_goes_before_the_prompt(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    arguments = ("--system", "Be brief", "--prompt", "Hello", "--max-tokens", "8")
    ran = weightpath_cli("run", tiny_low_bit, *arguments)
    system = {"role": "system", "content": "Be brief"}
    assert ran.out.strip() == expected(system, user("Hello")) != expected(user("Hello"))


def test_json_holds_the_whole_answer_and_nothing_is_streamed(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "8", "--json")
    plain = json.loads(ran.out)
    assert set(plain) == {"text", "prompt_tokens", "tokens", "seconds", "stopped"}
    assert plain["text"] == expected(user("Hello"))
    assert len(plain["tokens"]) == 8
    tokenizer = tokenizer_of(tiny_low_bit)
    assert plain["prompt_tokens"] == encode(tokenizer, [user("Hello")]).shape[1]
    assert plain["stopped"] is False


def test_a_chat_keeps_its_history(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    ran = weightpath_cli(
        "run", tiny_low_bit, "--interactive", "--max-tokens", "8", stdin="Hello\nAnd then?\n"
    )
    assert ran.code == 0
    first = expected(user("Hello"))
    second = expected(user("Hello"), reply(first), user("And then?"))
    assert " ".join(ran.out.split()) == " ".join(f"{first} {second}".split())
    assert second != expected(user("And then?"))


def test_an_empty_line_ends_the_chat(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    ran = weightpath_cli(
        "run", tiny_low_bit, "--interactive", "--max-tokens", "8", stdin="Hello\n\nNo more\n"
    )
    assert ran.code == 0
    assert " ".join(ran.out.split()) == " ".join(expected(user("Hello")).split())


def test_a_chat_with_no_input_ends_quietly(weightpath_cli: Cli, tiny_low_bit: Path) -> None:
    ran = weightpath_cli("run", tiny_low_bit, "--interactive", stdin="")
    assert (ran.code, ran.out) == (0, "")


def test_sampling_repeats_with_its_seed(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    arguments = ("run", tiny_low_bit, "--prompt", "Hi", "--max-tokens", "8", "--temperature", "1.5")
    first, again, other = (
        weightpath_cli(*arguments, "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert first == again != other
    assert first.strip() == expected(user("Hi"), temperature=1.5, seed=1)


def test_int8_activations_can_be_asked_for(weightpath_cli: Cli, tiny_low_bit: Path) -> None:
    model = load(tiny_low_bit, activation_bits=8)
    assert not torch.equal(
        *(m(input_ids=torch.tensor([[3, 9, 5]])).logits for m in (model, load(tiny_low_bit)))
    )
    wanted = answer(model, tokenizer_of(tiny_low_bit), [user("Hello")], 8).text
    arguments = ("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "8")
    assert weightpath_cli(*arguments, "--activation-bits", "8").out.strip() == wanted
