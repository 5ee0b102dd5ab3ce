"""Every family of the graph engine against transformers on the same float weights, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_models import FAMILIES, family, some_ids, wanted_logits

from tiny_checkpoint import build_model
from weightpath.engine import graph_weights
from weightpath.engine.graph import GraphModel
from weightpath.engine.graph_support import refusal
from weightpath.errors import CannotRun

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, PROMPT = 120, 60


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_and_many_steps_give_the_logits_of_transformers_to_float_rounding(
    name: str,
) -> None:
    model, ids = family(name), some_ids(LENGTH)
    wanted = wanted_logits(model, ids)
    session = GraphModel.of(model).session()
    found = [session.all_logits(ids[:30]), session.all_logits(ids[30:PROMPT])]
    found += [session.extend([token])[None].clone() for token in ids[PROMPT:]]
    assert (torch.cat(found) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert session.tokens == ids


@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "qwen2", "qwen3"])
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model, prompt = family(name), some_ids(9)
    wanted = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert GraphModel.of(model).greedy([prompt], 40) == [wanted[0, 9:].tolist()]


@pytest.mark.parametrize("name", ["llama-yarn-rope", "llama-linear-rope"])
def test_a_wrong_rope_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = family(name), some_ids(LENGTH)
    plain, own = graph_weights.weights_of(build_model("llama")), graph_weights.rotary_tables
    monkeypatch.setattr("weightpath.engine.graph.rotary_tables", lambda _, count: own(plain, count))
    found, wanted = GraphModel.of(model).session().all_logits(ids), wanted_logits(model, ids)
    assert (found - wanted).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu; the graph engine has silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"head_dim": 24}, "head_dim 24"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    model = build_model("llama", **changes)
    assert said in (refusal(model) or "")
    with pytest.raises(CannotRun, match="graph engine: "):
        GraphModel.of(model)


def test_models_and_linears_of_other_kinds_are_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    assert "GPT2LMHeadModel is not a family of the graph engine" in (refusal(other) or "")
    model = build_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Bilinear(64, 64, 128)  # type: ignore[union-attr, index]
    assert (refusal(model) or "").startswith("model.layers.1.mlp.up_proj: a Bilinear")
    mixed = build_model("llama")
    mixed.model.layers[0].self_attn.q_proj.to(torch.float16)  # type: ignore[union-attr, index]
    assert "torch.float16 beside an embedding in torch.float32" in (refusal(mixed) or "")
