"""Generating on sessions: pieces, stops, limits, the prompt cache, several at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tiny_checkpoint import build_model, build_tokenizer
from weightpath.engine.batch import generate_many
from weightpath.engine.sampling import Sampling
from weightpath.engine.session import TransformersEngine, TransformersSession, open_session
from weightpath.engine.stream import Generation, Limits, Piece, Reply, joined, stream
from weightpath.errors import BadRequest, CannotRun

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [4, 40, 20, 30, 99, 61, 8]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy ids, without any end of text."""
    output = model.generate(
        torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def reply(model: Any, tokenizer: Any, prompt: Sequence[int], **limits: Any) -> Reply:
    return joined(list(stream(open_session(model), tokenizer, prompt, limits=Limits(**limits))))


def ids_of(one: Reply) -> list[int]:
    return [token.token for token in one.tokens]


def test_greedy_tokens_and_text_are_transformers_own(model: Any, tokenizer: Any) -> None:
    wanted = greedy(model, PROMPT, 40)
    pieces = list(stream(open_session(model), tokenizer, PROMPT, limits=Limits(40)))
    whole = joined(pieces)
    assert ids_of(whole) == wanted
    assert whole.text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert len(pieces) == 40
    assert [piece.finish for piece in pieces] == [None] * 39 + ["length"]


def test_usage_counts_tokens_and_splits_the_time(model: Any, tokenizer: Any) -> None:
    usage = reply(model, tokenizer, PROMPT, max_new_tokens=5).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (7, 0, 5)
    assert usage.prefill_seconds > 0
    assert usage.decode_seconds > 0
    assert usage.decode_speed == pytest.approx(4 / usage.decode_seconds)
    assert reply(model, tokenizer, PROMPT, max_new_tokens=1).usage.decode_speed == 0


def test_a_stop_token_ends_the_reply_and_is_not_in_the_text(model: Any, tokenizer: Any) -> None:
    free = greedy(model, PROMPT, 20)
    stop = free[6]
    first = free.index(stop)
    one = reply(model, tokenizer, PROMPT, max_new_tokens=20, stop_tokens=(stop,))
    assert ids_of(one) == free[: first + 1]
    assert one.text == tokenizer.decode(free[:first], skip_special_tokens=True)
    assert (one.finish, one.stopped_by) == ("stop", stop)


def test_a_stop_string_ends_the_reply_before_it_and_is_never_shown(
    model: Any, tokenizer: Any
) -> None:
    text = reply(model, tokenizer, PROMPT, max_new_tokens=40).text
    stop = text[9:13]
    at = text.find(stop)
    pieces = list(
        stream(open_session(model), tokenizer, PROMPT, limits=Limits(40, (), ("zq!", stop)))
    )
    one = joined(pieces)
    assert one.text == text[:at]
    assert (one.finish, one.stopped_by) == ("stop", stop)
    assert one.usage.completion_tokens < 40


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_at_the_end(
    model: Any, tokenizer: Any
) -> None:
    text = reply(model, tokenizer, PROMPT, max_new_tokens=10).text
    never = text[-2:] + "~~never~~"
    assert reply(model, tokenizer, PROMPT, max_new_tokens=10, stop_strings=(never,)).text == text


def test_a_chats_next_turn_runs_only_what_is_new(model: Any, tokenizer: Any) -> None:
    session = open_session(model)
    first = joined(list(stream(session, tokenizer, PROMPT, limits=Limits(6))))
    assert session.tokens == [*PROMPT, *ids_of(first)[:-1]]
    turn = [*PROMPT, *ids_of(first), 70, 71]
    seen: list[int] = []
    extend = session.extend

    def counted(tokens: Sequence[int]) -> Any:
        seen.append(len(tokens))
        return extend(tokens)

    session.extend = counted  # type: ignore[method-assign]
    second = joined(list(stream(session, tokenizer, turn, limits=Limits(6))))
    assert second.usage.cached_tokens == len(PROMPT) + 5
    assert seen[0] == 3
    assert ids_of(second) == greedy(model, turn, 6)


@pytest.mark.parametrize(
    "other",
    [PROMPT, PROMPT[:3], [*PROMPT[:4], 1, 2, 3], [9, 9], [*PROMPT, 5]],
    ids=["same", "shorter", "forks", "another", "longer"],
)
def test_what_a_session_held_before_changes_no_token(
    model: Any, tokenizer: Any, other: list[int]
) -> None:
    session = open_session(model)
    list(stream(session, tokenizer, PROMPT, limits=Limits(8)))
    again = joined(list(stream(session, tokenizer, other, limits=Limits(8))))
    assert ids_of(again) == greedy(model, other, 8)


def test_a_long_prompt_is_read_in_chunks_and_can_be_cancelled_between(
    model: Any, tokenizer: Any
) -> None:
    prompt = [3 + i % 120 for i in range(600)]
    one = Generation(open_session(model), tokenizer, prompt)
    assert one.step(256) is None
    assert one.step(256) is None
    assert len(one.session.tokens) == 512
    one.cancel()
    last = one.step(256)
    assert last is not None
    assert (last.finish, last.text) == ("cancelled", "")
    assert len(one.session.tokens) == 512
    whole = reply(model, tokenizer, prompt, max_new_tokens=4)
    assert ids_of(whole) == greedy(model, prompt, 4)


def test_cancelling_ends_a_reply_at_the_next_token(model: Any, tokenizer: Any) -> None:
    pieces: list[Piece] = []
    running = stream(
        open_session(model), tokenizer, PROMPT, limits=Limits(100),
        cancelled=lambda: len(pieces) >= 3,
    )  # fmt: skip
    for piece in running:
        pieces.append(piece)
    assert [piece.finish for piece in pieces] == [None, None, None, "cancelled"]
    assert joined(pieces).usage.completion_tokens == 3


def test_a_reply_ends_where_the_context_does(model: Any, tokenizer: Any) -> None:
    session = open_session(model, 10)
    one = joined(list(stream(session, tokenizer, PROMPT, limits=Limits(100))))
    assert (one.finish, len(one.tokens)) == ("length", 3)
    with pytest.raises(BadRequest, match="the prompt has 10 tokens and the context is 10"):
        next(stream(session, tokenizer, [1] * 10))
    with pytest.raises(BadRequest, match="the prompt is empty"):
        next(stream(session, tokenizer, []))


def test_log_probabilities_come_with_every_token(model: Any, tokenizer: Any) -> None:
    one = joined(list(stream(open_session(model), tokenizer, PROMPT, limits=Limits(5), logprobs=3)))
    ids = list(PROMPT)
    for token in one.tokens:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        wanted = logits.double().log_softmax(0)
        assert token.logprob == pytest.approx(float(wanted[token.token]), abs=1e-4)
        assert [i for i, _ in token.best] == wanted.topk(3).indices.tolist()
        ids.append(token.token)


def test_logits_that_are_not_finite_end_a_reply_with_one_line(tokenizer: Any) -> None:
    model = build_model()
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("inf")  # type: ignore[union-attr, index]
    with pytest.raises(CannotRun, match="logits are not finite"):
        list(stream(open_session(model), tokenizer, PROMPT))


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_prompts_of_a_batch_do_not_change_each_other(
    model: Any, tokenizer: Any, at_once: int
) -> None:
    prompts = [PROMPT, [50, 51], PROMPT[:4], [7], [*PROMPT, 3, 4]]
    stop = greedy(model, [50, 51], 9)[2]
    limits = Limits(9, stop_tokens=(stop,))
    seen: list[tuple[int, Piece]] = []
    replies = generate_many(
        TransformersEngine(model), tokenizer, prompts, limits=limits, at_once=at_once,
        emit=lambda index, piece: seen.append((index, piece)),
    )  # fmt: skip
    for index, (prompt, found) in enumerate(zip(prompts, replies, strict=True)):
        alone = joined(list(stream(open_session(model), tokenizer, prompt, limits=limits)))
        assert ids_of(found) == ids_of(alone)
        assert found.text == alone.text
        assert "".join(piece.text for i, piece in seen if i == index) == alone.text
    assert generate_many(TransformersEngine(model), tokenizer, []) == []


def test_sampled_prompts_of_a_batch_follow_their_own_seeds(model: Any, tokenizer: Any) -> None:
    sampling = Sampling(temperature=1.5, seed=3)
    each = [sampling, replace(sampling, seed=4), sampling]
    replies = generate_many(TransformersEngine(model), tokenizer, [PROMPT] * 3, each)
    assert ids_of(replies[0]) == ids_of(replies[2]) != ids_of(replies[1])
    alone = joined(list(stream(open_session(model), tokenizer, PROMPT, sampling)))
    assert ids_of(replies[0]) == ids_of(alone)


def test_several_sequences_take_one_call_of_the_engine_a_step(model: Any, tokenizer: Any) -> None:
    class Counting(TransformersEngine):
        widths: list[int] = []  # noqa: RUF012

        def extend_many(self, sessions: Sequence[Any], tokens: Sequence[int]) -> torch.Tensor:
            self.widths.append(len(sessions))
            return super().extend_many(sessions, tokens)

    engine = Counting(model)
    generate_many(engine, tokenizer, [PROMPT, [5], [6]], limits=Limits(4))
    assert engine.widths == [3, 3, 3]


def test_a_cancelled_batch_gives_what_there_is(model: Any, tokenizer: Any) -> None:
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count > 3

    replies = generate_many(
        TransformersEngine(model), tokenizer, [PROMPT] * 3, limits=Limits(50), at_once=2,
        cancelled=stop,
    )  # fmt: skip
    assert [one.finish for one in replies] == ["cancelled"] * 3
    assert [len(one.tokens) for one in replies] == [3, 3, 0]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"stop_strings": ("",)}, "an empty stop string"),
        ({"stop_strings": ("x",) * 17}, "17 stop strings; use at most 16"),
    ],
    ids=str,
)
def test_limits_that_cannot_be_are_one_clear_line(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Limits(**limits)


def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(BadRequest, match="need a tokenizer"):
        Generation(TransformersSession(model), None, PROMPT, limits=Limits(1, (), ("x",)))


class Faulty(TransformersEngine):
    """An engine that fails wherever a sequence holds BAD, and after it has run some of a step."""

    BAD = 77

    def session(self, context: int | None = None) -> TransformersSession:
        class Checked(TransformersSession):
            def extend(self, tokens: Sequence[int]) -> torch.Tensor:
                if Faulty.BAD in self.tokens and len(self.tokens) > len(PROMPT) + 2:
                    raise CannotRun("the device is on fire")
                return super().extend(tokens)

        return Checked(self._model, context)


@pytest.mark.filterwarnings("ignore:a step of 3 sequences failed")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_fails_in_the_engine_ends_one_reply_and_no_other(
    model: Any, tokenizer: Any, place: int
) -> None:
    prompts = [[*PROMPT, 5], [*PROMPT, 6], [*PROMPT, 9]]
    wanted = [greedy(model, prompt, 8) for prompt in prompts]
    assert all(Faulty.BAD not in ids for ids in wanted)
    prompts[place] = [Faulty.BAD, *PROMPT]
    replies = generate_many(
        Faulty(model), tokenizer, [*prompts, PROMPT], limits=Limits(8), at_once=3, isolate=True
    )
    for index, one in enumerate(replies[:3]):
        if index == place:
            assert one.finish == "failed"
            assert "on fire" in str(one.error)
            assert len(one.tokens) == 3
        else:
            assert ids_of(one) == wanted[index]
            assert one.error is None
    assert ids_of(replies[3]) == greedy(model, PROMPT, 8)  # in the place of the failed one
    with pytest.raises(CannotRun, match="on fire"):
        generate_many(Faulty(model), tokenizer, prompts, limits=Limits(8), at_once=3)


def test_a_step_that_fails_for_all_and_for_none_alone_is_told(model: Any, tokenizer: Any) -> None:
    class Together(TransformersEngine):
        def extend_many(self, sessions: Any, tokens: Any) -> torch.Tensor:
            super().extend_many(sessions[:1], tokens[:1])  # the first is run already
            raise CannotRun("not together")

    prompts = [PROMPT, [*PROMPT, 5]]
    with pytest.warns(RuntimeWarning, match=r"2 sequences failed \(not together\)"):
        replies = generate_many(Together(model), tokenizer, prompts, limits=Limits(8))
    assert [ids_of(one) for one in replies] == [greedy(model, prompt, 8) for prompt in prompts]
