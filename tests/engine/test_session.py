"""A session: what it holds, what it gives, and that its cache changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartForCausalLM, T5Config, T5ForConditionalGeneration

from tiny_checkpoint import KINDS, build_model
from weightpath.engine.session import (
    Engine,
    Session,
    TransformersEngine,
    TransformersSession,
    common_prefix,
    engine_of,
    open_session,
)
from weightpath.errors import BadRequest

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [5, 9, 33, 100, 7, 7, 64, 12, 90, 41, 3, 77]


@torch.inference_mode()
def uncached(model: Any, ids: Sequence[int]) -> Tensor:
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


@pytest.fixture(scope="module", params=[*KINDS, "sliding"])
def model(request: pytest.FixtureRequest) -> Any:
    """Every family; "sliding" is a Mistral whose window is shorter than the text."""
    if request.param == "sliding":
        return build_model("mistral", sliding_window=6)
    return build_model(request.param)


def test_logits_are_the_models_own_however_the_tokens_are_cut(model: Any) -> None:
    for cuts in ([12], [1] * 12, [5, 1, 6]):
        session = open_session(model)
        start = 0
        for length in cuts:
            logits = session.extend(IDS[start : start + length])
            start += length
            assert logits.dtype == torch.float32
            assert logits.shape == (128,)
            torch.testing.assert_close(logits, uncached(model, IDS[:start]), atol=1e-4, rtol=1e-4)
        assert session.tokens == IDS


@pytest.mark.parametrize("length", [0, 1, 5, 6, 9, 12])
def test_after_truncating_a_session_is_as_good_as_fresh(model: Any, length: int) -> None:
    session = open_session(model)
    session.extend(IDS)
    session.truncate(length)
    assert session.tokens == IDS[:length]
    session.extend([50, 51])
    session.truncate(length + 1)
    found = session.extend([60])
    wanted = uncached(model, [*IDS[:length], 50, 60])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_plain_cache_is_cut_and_not_run_again() -> None:
    model = build_model()
    session = TransformersSession(model)
    session.extend(IDS)
    session.truncate(9)
    assert session._cached == 9
    assert session._cache.get_seq_length() == 9


def test_a_window_that_is_full_cannot_be_cut_and_its_tokens_are_run_again() -> None:
    session = TransformersSession(build_model("mistral", sliding_window=6))
    session.extend(IDS[:4])
    session.truncate(3)
    assert session._cached == 3
    session.extend(IDS[3:])
    session.truncate(9)
    assert session._cached == 0
    assert session.tokens == IDS[:9]


@pytest.mark.parametrize("length", [1, 5, 9, 12])
def test_an_adopted_beginning_is_as_good_as_one_that_was_run(model: Any, length: int) -> None:
    source, taken = open_session(model), open_session(model)
    source.extend(IDS)
    taken.extend([3, 4, 5])
    adopted = taken.adopt(source, length)
    assert adopted == (getattr(model.config, "sliding_window", None) != 6)
    held = IDS[:length] if adopted else [3, 4, 5]
    assert taken.tokens == held
    for session, tokens in ((taken, held), (source, IDS)):
        torch.testing.assert_close(
            session.extend([8, 2]), uncached(model, [*tokens, 8, 2]), atol=1e-4, rtol=1e-4
        )


def test_many_sessions_take_a_token_each(model: Any) -> None:
    engine = engine_of(model)
    sessions = [engine.session() for _ in range(3)]
    for index, session in enumerate(sessions):
        session.extend(IDS[: 3 + index])
    logits = engine.extend_many(sessions, [20, 21, 22])
    for index, row in enumerate(logits):
        wanted = uncached(model, [*IDS[: 3 + index], 20 + index])
        torch.testing.assert_close(row, wanted, atol=1e-4, rtol=1e-4)


def test_the_context_is_the_models_or_what_was_asked_for() -> None:
    model = build_model()
    assert open_session(model).context == 1024
    session = open_session(model, 12)
    session.extend(IDS)
    with pytest.raises(BadRequest, match="12 tokens and 1 more are beyond the context of 12"):
        session.extend([1])
    assert session.tokens == IDS
    for context in (0, 1025):
        with pytest.raises(BadRequest, match=f"context {context}: the model takes 1 to 1024"):
            open_session(model, context)


def test_bad_calls_are_one_clear_line_and_change_nothing() -> None:
    session = open_session(build_model())
    with pytest.raises(BadRequest, match="at least one token"):
        session.extend([])
    session.extend(IDS)
    for length in (-1, 13):
        with pytest.raises(BadRequest, match="the session holds 12 tokens"):
            session.truncate(length)
    assert session.tokens == IDS


def test_a_failing_step_leaves_the_session_as_it_was() -> None:
    model: Any = build_model()
    session = open_session(model)
    session.extend(IDS[:5])
    with pytest.raises(IndexError):
        session.extend([5000])
    assert session.tokens == IDS[:5]
    found = session.extend(IDS[5:])
    torch.testing.assert_close(found, uncached(model, IDS), atol=1e-4, rtol=1e-4)


def test_what_is_no_plain_decoder_is_refused_by_name() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(BadRequest, match="T5ForConditionalGeneration is no plain decoder"):
        open_session(T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes)))
    small = BartConfig(vocab_size=32, d_model=16, decoder_layers=1, decoder_attention_heads=2)
    assert open_session(BartForCausalLM(small)).tokens == []


def test_an_engine_that_load_put_beside_the_model_is_taken() -> None:
    model: Any = build_model()
    assert isinstance(engine_of(model), TransformersEngine)

    class Native:
        """An engine as another room makes it."""

        def session(self, context: int | None = None) -> Session:
            return TransformersSession(build_model(seed=1), context)

        def extend_many(self, sessions: Sequence[Any], tokens: Sequence[int]) -> Tensor:
            raise AssertionError

    class Beside:
        native: Engine = Native()

    model.weightpath = Beside()
    assert engine_of(model) is Beside.native
    found = open_session(model).extend(IDS)
    torch.testing.assert_close(found, uncached(build_model(seed=1), IDS), atol=1e-4, rtol=1e-4)


def test_the_common_prefix_is_counted_from_the_start() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == common_prefix([1, 2, 4], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0
