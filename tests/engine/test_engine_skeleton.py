"""A config.json is hostile input too: what it says is bounded before a model is built of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightpath.engine import skeleton
from weightpath.errors import BadCheckpoint

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16,
}  # fmt: skip


def refusal(**changes: Any) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        skeleton.build(CONFIG | changes, torch.float32)
    return str(caught.value)


@pytest.mark.parametrize("count", [65536, 10**30])
def test_more_layers_than_any_model_has_are_refused_before_they_are_built(count: int) -> None:
    assert f"num_hidden_layers is {count}, at most {skeleton.MOST_LAYERS}" in refusal(
        num_hidden_layers=count
    )
    assert "depth is" in refusal(vision_config={"depth": count})


def test_keys_that_are_no_text_are_passed_over() -> None:
    skeleton.build(CONFIG | {"id2label": {0: "a", 10**6: "b"}}, torch.float32)


@pytest.mark.parametrize("named", [-1, 2**64, {"0": ["LlamaForCausalLM"]}, "LlamaForCausalLM", [3]])
def test_an_architecture_that_is_no_list_of_names_is_taken_from_the_model_type(named: Any) -> None:
    model = skeleton.build(CONFIG | {"architectures": named}, torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_names_are_spelled_as_the_model_spells_them() -> None:
    model = skeleton.build(CONFIG, torch.float32)
    assert skeleton.renamed(model)("model.norm.weight") == "model.norm.weight"
    mixtral = {key: value for key, value in CONFIG.items() if key != "architectures"}
    model = skeleton.build(mixtral | {"model_type": "mixtral"}, torch.float32)
    stored = "model.layers.0.block_sparse_moe.gate.weight"
    assert skeleton.renamed(model)(stored) == "model.layers.0.mlp.gate.weight"


def test_infinities_as_transformers_5_writes_them_are_read() -> None:
    written = {
        "a": {"__float__": "Infinity"},
        "b": [0.0, {"__float__": "-Infinity"}],
        "c": {"d": 1},
    }
    assert skeleton.special_floats(written) == {
        "a": float("inf"), "b": [0.0, float("-inf")], "c": {"d": 1},
    }  # fmt: skip
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8,
             "state_size": 4, "n_groups": 2, "vocab_size": 64}  # fmt: skip
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    model = skeleton.build({"model_type": "mamba2", **sizes, **limit}, torch.bfloat16)
    assert model.config.time_step_limit[1] == float("inf")
