"""run: an answer streamed, read from standard input, as JSON, and a chat that keeps its history."""

from __future__ import annotations

import json
import shutil
import signal
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
    model, tokenizer = load(tiny_low_bit, engine="native"), tokenizer_of(tiny_low_bit)
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
    """Every piece is on stdout before the next token is made."""
    from weightpath.engine.decode import Session

    written: list[str] = []
    shown_at_each_step: list[int] = []
    real_print, real_extend = print, Session.extend

    def watched_print(*values: Any, **options: Any) -> None:
        if options.get("flush"):
            written.extend(values)
        real_print(*values, **options)

    def watched_extend(self: Any, tokens: Any) -> torch.Tensor:
        shown_at_each_step.append(len("".join(written)))
        return real_extend(self, tokens)

    monkeypatch.setattr("builtins.print", watched_print)
    monkeypatch.setattr(Session, "extend", watched_extend)
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "24")
    assert len(shown_at_each_step) == 24
    assert len(set(shown_at_each_step)) > 12
    assert ran.out == "".join(written) + "\n"


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
    assert set(plain) == {
        "text", "prompt_tokens", "cached_tokens", "tokens", "seconds", "prefill_seconds",
        "decode_seconds", "stopped", "finish", "error",
    }  # fmt: skip
    assert plain["finish"] == "length"
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
    model = load(tiny_low_bit, activation_bits=8, engine="native")
    assert not torch.equal(
        *(m(input_ids=torch.tensor([[3, 9, 5]])).logits for m in (model, load(tiny_low_bit)))
    )
    wanted = answer(model, tokenizer_of(tiny_low_bit), [user("Hello")], 8).text
    arguments = ("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "8")
    assert weightpath_cli(*arguments, "--activation-bits", "8").out.strip() == wanted


def test_every_sampling_setting_reaches_the_sampler(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    settings = {
        "temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3,
        "seed": 4,
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
    arguments = ("run", tiny_low_bit, "--prompt", "Hello", "--max-new-tokens", "8", *options)
    assert weightpath_cli(*arguments).out.strip() == expected(user("Hello"), **settings)


@pytest.fixture
def advising(tiny_low_bit: Path, tmp_path: Path) -> Callable[..., Path]:
    """The tiny folder with a generation_config.json of its own."""

    def made(**settings: Any) -> Path:
        folder = Path(shutil.copytree(tiny_low_bit, tmp_path / "advising", dirs_exist_ok=True))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **settings}))
        return folder

    return made


def test_what_generation_config_advises_is_applied_and_said(
    weightpath_cli: Cli, advising: Callable[..., Path], expected: Callable[..., str]
) -> None:
    settings = {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3}
    folder = advising(do_sample=True, **settings)
    ran = weightpath_cli("run", folder, "--prompt", "Hello", "--max-tokens", "8", "--seed", "4")
    assert ran.out.strip() == expected(user("Hello"), seed=4, **settings)
    assert ran.out.strip() != expected(user("Hello"), seed=4, temperature=1.5)
    said = "temperature 1.5, top_k 20, top_p 0.8, repetition_penalty 1.3, as generation_config"
    assert said in " ".join(ran.err.split())


def test_an_option_goes_before_what_generation_config_advises(
    weightpath_cli: Cli, advising: Callable[..., Path], expected: Callable[..., str]
) -> None:
    folder = advising(do_sample=True, temperature=1.5, repetition_penalty=1.7)
    arguments = ("run", folder, "--prompt", "Hello", "--max-tokens", "8", "--temperature", "0")
    ran = weightpath_cli(*arguments)
    assert ran.out.strip() == expected(user("Hello"), repetition_penalty=1.7)
    assert ran.out.strip() != expected(user("Hello"))
    assert "repetition_penalty 1.7, as generation_config" in " ".join(ran.err.split())
    assert "temperature 1.5" not in ran.err
    plain = weightpath_cli(*arguments, "--repetition-penalty", "1")
    assert plain.out.strip() == expected(user("Hello"))
    assert "generation_config" not in plain.err


def test_without_advice_the_answer_is_greedy_and_do_sample_alone_is_temperature_1(
    weightpath_cli: Cli, advising: Callable[..., Path], expected: Callable[..., str]
) -> None:
    arguments = ("--prompt", "Hello", "--max-tokens", "8", "--seed", "4")
    greedy = weightpath_cli("run", advising(), *arguments)
    assert greedy.out.strip() == expected(user("Hello"))
    assert "generation_config" not in greedy.err
    drawn = weightpath_cli("run", advising(do_sample=True), *arguments)
    assert drawn.out.strip() == expected(user("Hello"), temperature=1.0, seed=4)


def test_advice_that_cannot_be_is_one_clear_line(
    weightpath_cli: Cli, advising: Callable[..., Path]
) -> None:
    folder = advising(do_sample=True, repetition_penalty=1000.0)
    ran = weightpath_cli("run", folder, "--prompt", "Hello")
    assert ran.code == 2
    assert "repetition_penalty 1000" in ran.err
    assert "Traceback" not in ran.err


def test_an_answer_ends_before_any_of_the_stop_strings(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    free = expected(user("Hello"))
    arguments = ("--stop", "never!", "--stop", free[3:5], "--max-tokens", "8")
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "Hello", *arguments)
    assert ran.out.strip() == free[: free.find(free[3:5])].strip()
    assert "cut at" not in ran.err


def test_log_probabilities_are_in_the_json(weightpath_cli: Cli, tiny_low_bit: Path) -> None:
    arguments = ("--prompt", "Hello", "--max-tokens", "3", "--json", "--logprobs", "2")
    rows = json.loads(weightpath_cli("run", tiny_low_bit, *arguments).out)["logprobs"]
    assert len(rows) == 3
    for row in rows:
        assert row["logprob"] == row["best"][0]["logprob"] >= row["best"][1]["logprob"]
        assert (row["token"], row["text"]) == (row["best"][0]["token"], row["best"][0]["text"])


def test_log_probabilities_without_json_are_refused(
    weightpath_cli: Cli, tiny_low_bit: Path
) -> None:
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "x", "--logprobs", "3")
    assert (ran.code, ran.out) == (2, "")
    assert "--logprobs are shown with --json" in ran.err


def test_a_chat_in_json_is_a_line_a_turn_and_later_turns_use_the_cache(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str]
) -> None:
    ran = weightpath_cli(
        "run", tiny_low_bit, "--chat", "--json", "--max-tokens", "8", stdin="Hello\nAnd then?\n"
    )
    first, second = map(json.loads, ran.out.splitlines())
    assert first["text"] == expected(user("Hello"))
    assert first["cached_tokens"] == 0
    assert second["text"] == expected(user("Hello"), reply(first["text"]), user("And then?"))
    assert second["cached_tokens"] >= first["prompt_tokens"]


def test_prompts_of_a_file_are_answered_each_on_its_own(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("Hello\n\nAnd then?\nHi\n")
    arguments = ("run", tiny_low_bit, "--prompts-file", tmp_path / "prompts", "--max-tokens", "8")
    prompts = ["Hello", "And then?", "Hi"]
    wanted = [expected(user(text)) for text in prompts]
    shown = "".join(f"## {text}\n{said}\n\n" for text, said in zip(prompts, wanted, strict=True))
    for at_once in (1, 2):
        assert weightpath_cli(*arguments, "--at-once", at_once).out == shown
    answers = json.loads(weightpath_cli(*arguments, "--json").out)["answers"]
    assert [one["prompt"] for one in answers] == prompts
    assert [one["text"] for one in answers] == wanted
    ran = weightpath_cli(
        "run", tiny_low_bit, "--prompts-file", "-", "--max-tokens", "8", stdin="Hi\n"
    )
    assert ran.out == f"## Hi\n{wanted[2]}\n\n"


def test_ctrl_c_ends_an_answer_with_what_there_is_and_130(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    press_at_step(monkeypatch, 4)
    ran = weightpath_cli("run", tiny_low_bit, "--prompt", "Hello", "--max-tokens", "500")
    assert ran.code == 130
    assert ran.out.strip()
    assert expected(user("Hello")).startswith(ran.out.strip())
    assert "4 tokens" in ran.err
    assert "stopped by Ctrl-C" in ran.err


def test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_chat(
    weightpath_cli: Cli, tiny_low_bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_at_step(monkeypatch, 4)
    ran = weightpath_cli(
        "run", tiny_low_bit, "--chat", "--json", "--max-tokens", "8", stdin="Hello\nMore\n"
    )
    assert ran.code == 0
    first, second = map(json.loads, ran.out.splitlines())
    assert (first["finish"], len(first["tokens"])) == ("cancelled", 4)
    assert second["finish"] == "length"


def press_at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A real SIGINT to this process during the session's step of that number."""
    from weightpath.engine.decode import Session

    real, count = Session.extend, 0

    def extend(self: Any, tokens: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == step:
            signal.raise_signal(signal.SIGINT)
        return real(self, tokens)

    monkeypatch.setattr(Session, "extend", extend)


@pytest.mark.filterwarnings("ignore:a step of 2 sequences failed")
def test_a_prompt_of_a_file_that_fails_leaves_the_others_their_answers(
    weightpath_cli: Cli, tiny_low_bit: Path, expected: Callable[..., str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from weightpath.engine.decode import NativeModel

    real = NativeModel.step

    def failing(
        self: Any, tokens: list[int], caches: Any, positions: list[int], *rest: Any
    ) -> None:
        if long in positions:
            raise MemoryError("no room for keys and values")
        real(self, tokens, caches, positions, *rest)

    (tmp_path / "prompts").write_text("Hello\nA longer prompt that goes on and on\nHi\n")
    texts = (tmp_path / "prompts").read_text().splitlines()
    wanted = [expected(user(text)) for text in texts]
    long = len(encode(tokenizer_of(tiny_low_bit), [user(texts[1])])[0]) + 2
    monkeypatch.setattr(NativeModel, "step", failing)
    arguments = ("run", tiny_low_bit, "--prompts-file", tmp_path / "prompts", "--max-tokens", "8")
    ran = weightpath_cli(*arguments, "--at-once", "2", "--json")
    assert ran.code == 2
    rows = json.loads(ran.out)["answers"]
    assert [row["finish"] for row in rows] == ["length", "failed", "length"]
    assert [row["text"] for row in (rows[0], rows[2])] == [wanted[0], wanted[2]]
    assert rows[1]["error"] == "no room for keys and values"
    assert len(rows[1]["tokens"]) == 3
    assert "1 of 3 prompts failed, number 2 first: no room" in " ".join(ran.err.split())
    assert "Traceback" not in ran.err
