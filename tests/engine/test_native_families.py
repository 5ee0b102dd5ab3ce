"""Every family of the native engine against transformers on the same float weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_models import FAMILIES, divergence, family, some_ids, wanted_logits

from tiny_checkpoint import build_model
from weightpath.engine import native_support
from weightpath.engine.decode import NativeModel, refusal
from weightpath.errors import CannotRun
from weightpath.kernels import cpu

pytestmark = pytest.mark.usefixtures("one_thread")
INSTRUCTION_SETS = [name for name, reason in cpu.instruction_sets().items() if reason is None]
LENGTH = 300
"""Tokens: more than two blocks of the cache, and more than one chunk."""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_to_float_rounding(name: str) -> None:
    model, ids = family(name), some_ids(LENGTH)
    found = NativeModel(model, cache="fp32").session().all_logits(ids)
    wanted = wanted_logits(model, ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", ["llama-nine-heads", "qwen3", "mistral-window", "llama-head-80"])
def test_every_instruction_set_agrees_with_transformers(name: str, instruction_set: str) -> None:
    model, ids = family(name), some_ids(LENGTH)
    wanted = wanted_logits(model, ids)
    for cache, most in (("fp32", 1e-9), ("bf16", 5e-4), ("int8", 3e-3)):
        native = NativeModel(model, cache=cache, instruction_set=instruction_set)
        assert divergence(native.session().all_logits(ids), wanted) < most, cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bit_float_weights_give_the_logits_of_the_same_weights_in_fp32(
    dtype: torch.dtype,
) -> None:
    model, ids = build_model("qwen2"), some_ids(100)
    found = NativeModel(build_model("qwen2").to(dtype), cache="fp32").session().all_logits(ids)  # type: ignore[arg-type]
    with torch.no_grad():  # a cast of the model would round its rotary frequencies too
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    wanted = wanted_logits(model, ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    "name",
    ["llama-yarn-rope", "llama-llama3-rope", "llama-linear-rope", "llama-short-rope-base",
     "llama-yarn-own-attention-factor", "llama-yarn-mscale"],
)  # fmt: skip
def test_a_wrong_rope_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = family(name), some_ids(LENGTH)
    plain = build_model("llama")
    own = native_support.rope_tables
    monkeypatch.setattr(native_support, "rope_tables", lambda _, count: own(plain, count))
    found = NativeModel(model, cache="fp32").session().all_logits(ids)
    wanted = wanted_logits(model, ids)
    assert (found - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_a_wrong_window_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = family("mistral-window"), some_ids(LENGTH)
    monkeypatch.setattr(native_support, "window", lambda *_: 41)
    found = NativeModel(model, cache="fp32").session().all_logits(ids)
    wanted = wanted_logits(model, ids)
    assert (found - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "its rope scaling is 'longrope'; the native engine has default, linear, llama3, yarn",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "its rope turns 0.5 of each head",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.25,
                }
            },
            "its rope turns 0.25 of each head",
        ),
        ({"partial_rotary_factor": 0.5}, "its rope turns 0.5 of each head"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"head_dim": 272}, "head_dim 272"),
    ],
)
def test_what_is_not_covered_is_refused_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    model = build_model("llama", **changes)
    reason = refusal(model)
    assert reason is not None
    assert said in reason
    assert "\n" not in reason
    with pytest.raises(CannotRun, match="native engine: "):
        NativeModel(model)


def test_a_partial_rotary_factor_of_one_is_none() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert refusal(build_model("llama", rope_parameters=rope)) is None


def test_a_model_of_another_family_is_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    assert "GPT2LMHeadModel is not a family" in (refusal(model) or "")


def test_a_linear_of_another_kind_is_refused_by_its_place() -> None:
    model = build_model("llama")

    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model.model.layers[1].mlp.up_proj = Doubled(64, 128, bias=False)  # type: ignore[union-attr, index]
    assert (refusal(model) or "").startswith("model.layers.1.mlp.up_proj: a Doubled")
