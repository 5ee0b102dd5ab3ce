"""Text out of a model: greedy, sampled, streamed, stopped, with and without a chat template."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, GenerationConfig

from tiny_checkpoint import VOCABULARY, build_tokenizer, tokenizer_of
from weightpath.engine.generate import Message, answer, encode, stop_ids
from weightpath.engine.load import load
from weightpath.errors import BadRequest

pytestmark = pytest.mark.usefixtures("one_thread")
HELLO: list[Message] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def loaded(tiny_low_bit: Path) -> Any:
    return load(tiny_low_bit, dtype=torch.float32)  # bf16 logits tie


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """The low-bit model; its generation settings are put back after the test."""
    before = loaded.generation_config
    loaded.generation_config = GenerationConfig(eos_token_id=None)
    yield loaded
    loaded.generation_config = before


@pytest.fixture(scope="module")
def tokenizer(tiny_low_bit: Path) -> Any:
    return tokenizer_of(tiny_low_bit)


@pytest.fixture
def endless(tokenizer: Any) -> Any:
    """The same tokenizer without an end-of-text token."""
    made = build_tokenizer()
    made.eos_token = None
    return made


@torch.inference_mode()
def greedy_by_hand(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """The most likely token, one forward pass over everything at a time."""
    found: list[int] = []
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        found.append(int(ids[0, -1]))
    return found


def test_transformers_own_generate_runs_the_low_bit_model(model: Any, tokenizer: Any) -> None:
    ids = encode(tokenizer, HELLO)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert output[0, : ids.shape[1]].tolist() == ids[0].tolist()
    assert output[0, ids.shape[1] :].tolist() == greedy_by_hand(model, ids, 12)


def test_a_greedy_answer_is_the_most_likely_token_every_time(model: Any, endless: Any) -> None:
    said = answer(model, endless, HELLO, 20)
    ids = encode(endless, HELLO)
    assert list(said.tokens) == greedy_by_hand(model, ids, 20)
    assert said.prompt_tokens == ids.shape[1]
    assert said.text == endless.decode(list(said.tokens), skip_special_tokens=True).strip()
    assert not said.stopped
    assert said.seconds > 0


def test_greedy_wins_over_sampling_settings_that_the_checkpoint_carries(
    model: Any, endless: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(model, endless, HELLO, 20)
    model.generation_config = GenerationConfig(do_sample=True, temperature=5.0, top_k=3, top_p=0.9)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # this logger hands nothing to the root's
    try:
        assert answer(model, endless, HELLO, 20).tokens == plain.tokens
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []


def test_streamed_pieces_join_to_the_text(model: Any, endless: Any) -> None:
    pieces: list[str] = []
    said = answer(model, endless, HELLO, 40, emit=pieces.append)
    assert "".join(pieces).strip() == said.text
    assert len(pieces) > 1
    assert all(pieces)


@pytest.mark.parametrize("as_list", [False, True], ids=["one id", "a list"])
def test_a_stop_token_of_the_generation_settings_ends_the_answer(
    model: Any, endless: Any, as_list: bool
) -> None:
    free = answer(model, endless, HELLO, 20).tokens
    stop = free[5]
    first = free.index(stop)
    model.generation_config = GenerationConfig(eos_token_id=[stop, 3] if as_list else stop)
    said = answer(model, endless, HELLO, 20)
    assert said.tokens == free[: first + 1]
    assert said.stopped


def test_the_tokenizers_own_end_of_text_stops_too(model: Any, endless: Any) -> None:
    free = answer(model, endless, HELLO, 20).tokens
    endless.eos_token = endless.convert_ids_to_tokens(free[3])
    said = answer(model, endless, HELLO, 20)
    assert said.tokens == free[: free.index(free[3]) + 1]
    assert said.stopped


def test_an_answer_that_stops_at_the_limit_by_its_last_token_counts_as_stopped(
    model: Any, endless: Any
) -> None:
    free = answer(model, endless, HELLO, 6).tokens
    last = free.index(free[5])
    model.generation_config = GenerationConfig(eos_token_id=free[5])
    assert answer(model, endless, HELLO, last + 1).stopped
    assert not answer(model, endless, HELLO, max(last, 1)).stopped or last == 0


@pytest.mark.parametrize(
    ("settings", "own", "wanted"),
    [(None, 1, [1]), (1, 1, [1]), ([2, 1], 1, [2, 1]), ([2], 1, [2, 1]), (2, None, [2]), (None, None, [])],
    ids=str,
)  # fmt: skip
def test_stop_ids_are_the_settings_then_the_tokenizers(
    model: Any, settings: Any, own: int | None, wanted: list[int]
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None if own is None else tokenizer.convert_ids_to_tokens(own)
    model.generation_config = GenerationConfig(eos_token_id=settings)
    assert stop_ids(model, tokenizer) == wanted


def test_sampling_with_a_seed_repeats_and_another_seed_differs(model: Any, endless: Any) -> None:
    def sampled(seed: int | None) -> tuple[int, ...]:
        return answer(model, endless, HELLO, 24, temperature=1.5, seed=seed).tokens

    assert sampled(1) == sampled(1)
    assert len({sampled(1), sampled(2), sampled(3)}) == 3
    assert sampled(None) != sampled(None)
    assert sampled(1) != answer(model, endless, HELLO, 24).tokens


def test_a_tiny_nucleus_leaves_the_most_likely_token_alone(model: Any, endless: Any) -> None:
    greedy = answer(model, endless, HELLO, 12).tokens
    said = answer(model, endless, HELLO, 12, temperature=1.0, top_p=1e-6, seed=0)
    assert said.tokens == greedy


def test_the_chat_template_is_applied_with_the_reply_opened(tokenizer: Any) -> None:
    history = [{"role": "system", "content": "S"}, *HELLO]
    ids = encode(tokenizer, history)[0].tolist()
    assert tokenizer.decode(ids) == "<|system|>S<|end|><|user|>Hello<|end|><|assistant|>"


def test_without_a_chat_template_the_contents_are_plain_text(model: Any) -> None:
    tokenizer = build_tokenizer(chat=False)
    history = [{"role": "system", "content": "S"}, *HELLO]
    assert tokenizer.decode(encode(tokenizer, history)[0].tolist()) == "S\nHello"
    assert len(answer(model, tokenizer, HELLO, 4).tokens) <= 4


def test_an_empty_prompt_without_a_template_is_one_clear_line(model: Any) -> None:
    with pytest.raises(BadRequest, match="the prompt is empty"):
        answer(model, build_tokenizer(chat=False), [{"role": "user", "content": ""}], 4)


def test_a_template_that_refuses_is_one_clear_line() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(BadRequest, match=r"system, user \(no system role here\)"):
        encode(tokenizer, [{"role": "system", "content": "S"}, *HELLO])
    tokenizer.chat_template = "{{ messages[ }}"
    with pytest.raises(BadRequest, match="the chat template refuses") as caught:
        encode(tokenizer, HELLO)
    assert len(str(caught.value).splitlines()) == 1


def test_a_token_beyond_the_models_vocabulary_is_one_clear_line(model: Any) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["Ω"])
    with pytest.raises(BadRequest, match=f"token {VOCABULARY}, the model has {VOCABULARY} tokens"):
        answer(model, tokenizer, [{"role": "user", "content": "Ω"}], 4)


def test_an_encoder_does_not_answer_and_says_so(tokenizer: Any) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertModel(BertConfig(vocab_size=VOCABULARY, intermediate_size=64, **sizes))
    with pytest.raises(BadRequest, match="BertModel does not generate text"):
        answer(encoder, tokenizer, HELLO, 4)
