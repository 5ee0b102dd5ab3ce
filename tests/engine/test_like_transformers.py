"""`generate` on sessions gives what transformers' generate gives, or says what it does not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from tiny_checkpoint import build_model, build_tokenizer
from weightpath.engine.like_transformers import generate_like_transformers
from weightpath.engine.session import TransformersEngine
from weightpath.errors import BadRequest

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = torch.tensor([[4, 40, 20, 30, 99, 61, 8]])


@pytest.fixture(scope="module")
def model() -> Any:
    made: Any = build_model()
    made.generation_config = GenerationConfig(pad_token_id=0)
    return made


def ours(model: Any, ids: Tensor = PROMPT, **arguments: Any) -> Tensor:
    return generate_like_transformers(
        TransformersEngine(model), ids, default_config=model.generation_config, **arguments
    )


def theirs(model: Any, ids: Tensor = PROMPT, **arguments: Any) -> Tensor:
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **arguments)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 12, "do_sample": False},
        {"max_length": 15},
        {"max_new_tokens": 9, "repetition_penalty": 1.4},
        {"max_new_tokens": 12, "use_cache": True, "num_beams": 1},
        {"generation_config": GenerationConfig(max_new_tokens=7, pad_token_id=0)},
        {},
    ],
    ids=str,
)
def test_greedy_is_transformers_own(model: Any, arguments: dict[str, Any]) -> None:
    found = ours(model, **arguments)
    assert torch.equal(found, theirs(model, **arguments))
    assert found.dtype == torch.int64


def test_stop_tokens_and_padding_are_transformers_own(model: Any) -> None:
    free = theirs(model, max_new_tokens=12)[0, 7:].tolist()
    stops = [free[4], 127]
    for arguments in ({"eos_token_id": stops[0]}, {"eos_token_id": stops, "pad_token_id": 9}):
        found = ours(model, max_new_tokens=12, **arguments)
        assert torch.equal(found, theirs(model, max_new_tokens=12, **arguments))


def test_a_padded_batch_is_transformers_own(model: Any) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 10, 11, 12, 13], [0, 50, 51, 52, 53]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    free = theirs(model, ids, attention_mask=mask, max_new_tokens=9)
    arguments = {"max_new_tokens": 9, "eos_token_id": int(free[1, 8]), "attention_mask": mask}
    found = ours(model, ids, **arguments)
    assert torch.equal(found, theirs(model, ids, **arguments))
    assert (found[:, 5:] == 0).any()  # a shorter reply is padded


def test_stop_strings_leave_their_tokens_in_as_transformers_does(model: Any) -> None:
    tokenizer = build_tokenizer()
    text = tokenizer.decode(theirs(model, max_new_tokens=20)[0, 7:])
    arguments = {"stop_strings": [text[4:7]], "tokenizer": tokenizer, "max_new_tokens": 20}
    found = ours(model, **arguments)
    assert torch.equal(found, theirs(model, **arguments))
    assert found.shape[1] < 27


def test_sampling_with_top_k_1_is_greedy_and_a_seed_repeats(model: Any) -> None:
    greedy = theirs(model, max_new_tokens=12)
    assert torch.equal(ours(model, max_new_tokens=12, do_sample=True, top_k=1), greedy)
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0}
    assert torch.equal(ours(model, seed=1, **arguments), ours(model, seed=1, **arguments))
    assert not torch.equal(ours(model, seed=1, **arguments), ours(model, seed=2, **arguments))
    torch.manual_seed(5)
    first = ours(model, **arguments)
    torch.manual_seed(5)
    assert torch.equal(first, ours(model, **arguments))
    twice = ours(model, PROMPT.repeat(2, 1), seed=1, **arguments)
    assert torch.equal(twice[:1], ours(model, seed=1, **arguments))
    assert torch.equal(twice[1:], ours(model, seed=2, **arguments))


def test_temperature_without_do_sample_changes_nothing_as_there(model: Any) -> None:
    found = ours(model, max_new_tokens=6, temperature=3.0, top_k=5)
    assert torch.equal(found, theirs(model, max_new_tokens=6))


def test_a_streamer_gets_the_prompt_then_every_token(model: Any) -> None:
    class Seen:
        def __init__(self) -> None:
            self.put_ids: list[list[int]] = []
            self.ended = False

        def put(self, ids: Tensor) -> None:
            self.put_ids.append(ids.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    mine, wanted = Seen(), Seen()
    ours(model, max_new_tokens=5, streamer=mine)
    theirs(model, max_new_tokens=5, streamer=wanted)
    assert mine.put_ids == wanted.put_ids
    assert mine.ended


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4}, "num_beams=4 is not done by this engine"),
        ({"abacus": 1}, "argument abacus is not known here"),
        ({"logits_processor": [1]}, "logits_processor"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3"),
        ({"generation_config": GenerationConfig(guidance_scale=2.0)}, "guidance_scale"),
        ({"stop_strings": "x"}, "stop_strings need tokenizer="),
        ({"max_length": 7}, "max_length 7 leaves nothing after a prompt of 7"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask \[1, 3\]"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, "pad on the left"),
        ({"do_sample": True, "top_p": 1.5}, "top_p 1.5"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_by_name(
    model: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        ours(model, **arguments)


def test_a_prompt_of_another_shape_is_one_clear_line(model: Any) -> None:
    for ids in (torch.tensor([1, 2]), torch.zeros(1, 0, dtype=torch.long)):
        with pytest.raises(BadRequest, match=r"wanted int64 \[B, L\]"):
            ours(model, ids)
    with pytest.raises(BadRequest, match="a streamer takes one prompt, not 2"):
        ours(model, PROMPT.repeat(2, 1), streamer=object())
