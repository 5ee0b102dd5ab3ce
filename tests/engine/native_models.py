"""Tiny seeded models for tests of the native engine, and what transformers says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tiny_checkpoint import VOCABULARY, build_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_SCALED = {
    **YARN, "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3,
}  # fmt: skip
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4, "truncate": False}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-own-attention-factor": ("llama", {"rope_parameters": YARN_SCALED}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN_MSCALE}),
    "llama-short-rope-base": (
        "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "mistral-llama3-rope": ("mistral", {"rope_parameters": LLAMA3, "sliding_window": 40}),
    "qwen2-yarn-rope": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-linear-rope": ("qwen3", {"rope_parameters": LINEAR}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-own-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-nine-heads": ("llama", {
        "hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3,
    }),
    "llama-seven-to-one": ("llama", {
        "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1,
    }),
    "llama-head-64": ("llama", {"head_dim": 64}),
    "llama-head-80": ("llama", {"head_dim": 80}),
    "llama-head-128": ("llama", {"head_dim": 128}),
    "llama-head-256": ("llama", {"head_dim": 256, "num_attention_heads": 2}),
    "llama-odd-widths": ("llama", {"hidden_size": 52, "intermediate_size": 75}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "mistral-long-window": ("mistral", {"sliding_window": 150}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen2-window-in-one-layer": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-head-128": ("qwen3", {"head_dim": 128, "tied": True}),
}  # fmt: skip


def family(name: str) -> PreTrainedModel:
    """One of FAMILIES, in fp32."""
    kind, changes = FAMILIES[name]
    return build_model(kind, **changes)


def some_ids(count: int, seed: int = 1) -> list[int]:
    """Token ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def wanted_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """transformers' logits fp32 [len(ids), vocabulary] in one pass."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()  # type: ignore[operator]


def divergence(found: Tensor, wanted: Tensor) -> float:
    """Mean KL divergence of softmaxed logits [M, vocabulary] from the wanted ones, in nats."""
    p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
