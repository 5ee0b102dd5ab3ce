from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weightpath.bench import decode as decode_room
from weightpath.bench.decode import measure_speed
from weightpath.errors import BadRequest


def tiny(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny products gain nothing from threads, and wait long for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models():
    return {"small": tiny(1), "large": tiny(12)}


def test_models_are_measured_in_turns_with_one_prefill_and_the_steps_after_it(models):
    seen: list[tuple[str, int, int]] = []

    def note(name: str, kwargs: dict) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        seen.append(
            (name, kwargs["input_ids"].shape[1], 0 if cache is None else cache.get_seq_length())
        )

    hooks = [
        model.model.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: note(name, kwargs), with_kwargs=True
        )
        for name, model in models.items()
    ]
    try:
        found = measure_speed(models, prompt_length=10, decode_tokens=3, rounds=2)
    finally:
        for hook in hooks:
            hook.remove()

    def sample(name: str, steps: int) -> list[tuple[str, int, int]]:
        return [(name, 10, 0), *((name, 1, 10 + i) for i in range(steps))]

    warm = sample("small", 2) + sample("large", 2)
    rounds = sample("small", 3) + sample("large", 3) + sample("large", 3) + sample("small", 3)
    assert seen == warm + rounds
    assert found.rounds == 2


def test_a_model_of_twelve_layers_is_slower_than_one_of_one(models):
    found = measure_speed(models, prompt_length=8, decode_tokens=4, rounds=3)
    small, large = found.models
    assert (small.name, large.name) == ("small", "large")
    assert small.decode_ratio is None
    assert small.prefill_ratio is None
    assert large.decode_ratio is not None
    assert large.decode_ratio.median < 1
    assert large.decode.low <= large.decode.median <= large.decode.high
    assert large.decode.unit == large.prefill.unit == "tokens/s"


def test_speeds_are_tokens_over_the_seconds_of_their_own_part(models, monkeypatch):
    monkeypatch.setattr(decode_room, "_sample", lambda *_: (2.0, 4.0))
    found = measure_speed(models, prompt_length=100, decode_tokens=8, rounds=2).models[0]
    assert found.prefill.samples == (50.0, 50.0)
    assert found.decode.samples == (2.0, 2.0)


def test_the_budget_bounds_the_rounds(models):
    found = measure_speed(models, prompt_length=4, decode_tokens=1, rounds=500, budget_seconds=1e-6)
    assert found.rounds == 2


def test_the_result_survives_json(models):
    found = measure_speed(models, prompt_length=4, decode_tokens=1, rounds=2)
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["models"][1]["decode_ratio"].keys() == {"median", "low", "high", "decided"}
    assert back["device"] == "cpu"


def test_bad_requests_name_the_numbers(models):
    with pytest.raises(BadRequest, match="no models"):
        measure_speed({})
    with pytest.raises(BadRequest, match="a prompt of 0 and 16"):
        measure_speed(models, prompt_length=0)
    with pytest.raises(BadRequest, match="training mode"):
        measure_speed({"a": tiny(1).train()})
