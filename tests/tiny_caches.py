"""Tiny random models of many families, built in memory, and the bytes that their caches hold."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, EncoderDecoderCache

WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": None,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 2, "num_experts": 4, "num_experts_per_tok": 1}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
           "first_k_dense_replace": 1, "moe_intermediate_size": 16}  # fmt: skip
_DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
          "linear_value_head_dim": 12}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 4, "mamba_n_groups": 2}
_PLAIN = {"head_dim": None, "num_key_value_heads": None}
_SLIDES = {"sliding_window": WINDOW}
_SHARES = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
           "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **_SLIDES},
    "qwen3": {},
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "smollm3": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, **_PLAIN},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 3, "n_head": 4, **_PLAIN},
    "gpt_neox": _PLAIN,
    "opt": _PLAIN | {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "bloom": _PLAIN | {"n_layer": 2, "n_head": 4},
    "phi": _PLAIN,
    "stablelm": {},
    "ernie4_5": {},
    "seed_oss": {},
    "falcon": _PLAIN | {"multi_query": True},
    "mistral": _SLIDES,
    "mixtral": _SLIDES | _EXPERTS,
    "phi3": _SLIDES,
    "starcoder2": _SLIDES,
    "gemma2": _SLIDES,
    "gemma3_text": _SLIDES | {"num_hidden_layers": 7},
    "cohere2": _SLIDES,
    "exaone4": _SLIDES | {"sliding_window_pattern": 4},
    "gpt_oss": _SLIDES | _EXPERTS,
    "llama4_text": {"attention_chunk_size": WINDOW, "num_local_experts": 2,
                    "intermediate_size_mlp": 64},
    "gemma3n_text": _SLIDES | _SHARES | {"laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": _SLIDES | _SHARES | {"global_head_dim": 16},
    "deepseek_v3": _LATENT | _ROUTED,
    "deepseek_v32": _LATENT | _ROUTED | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    "minicpm3": _LATENT,
    "qwen3_next": _DELTA | _EXPERTS | {"moe_intermediate_size": 16,
                                       "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA | {"linear_num_value_heads": 2},
    "kimi_linear": _LATENT | _EXPERTS | {
        "linear_head_dim": 8, "linear_num_heads": 4, "n_routed_experts": 4,
        "moe_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
              "num_experts_per_tok": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA2 | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_d_state": 4,
               "num_mem_blocks": 1, "attention_hidden_size": 64, "num_key_value_heads": 4,
               "head_dim": None},
    "nemotron_h": {"hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 8,
                   "ssm_state_size": 4, "n_groups": 2},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_experts": 4,
                 "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_dense_layers": 1},
    "recurrent_gemma": {"attention_window_size": WINDOW, "lru_width": 48},
}  # fmt: skip
"""model_type -> what is set beside SIZES; None leaves one of SIZES out."""


def settings_of(family: str) -> dict[str, Any]:
    """The fields that a family's tiny config is made of."""
    return {key: value for key, value in (SIZES | FAMILIES[family]).items() if value is not None}


def tiny_decoder(family: str) -> tuple[Any, dict[str, Any]]:
    """A random bf16 model, and its config as config.json would hold it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings_of(family))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model, json.loads(model.config.to_json_string())


def token_ids(rows: int, length: int) -> Tensor:
    """Ids [rows, length] that are no special tokens."""
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def cache_after(model: Any, length: int, steps: int, rows: int) -> int:
    """Bytes of the cache after a prompt of `length` and `steps` single tokens, `rows` sequences."""
    cache: Any = None
    if model.config.model_type == "recurrent_gemma":  # whose output leaves it out
        cache = DynamicCache(config=model.config)
    ids = token_ids(rows, length + steps)
    for start, stop in [(0, length), *((length + i, length + i + 1) for i in range(steps))]:
        given = {} if cache is None else {"past_key_values": cache}
        output = model(ids[:, start:stop], use_cache=True, **given)
        cache = cache_in(output) or cache
    total = cache_bytes(cache)
    if model.config.model_type == "recurrent_gemma":  # states are attributes of its modules
        for module in model.modules():
            for name in ("conv1d_state", "recurrent_states"):
                state = getattr(module, name, None)
                total += state.nbytes if isinstance(state, Tensor) else 0
    return total


def cache_in(output: Any) -> Any:
    """The cache of a model's output, under whichever name it has."""
    for name in ("cache", "past_key_values", "cache_params"):
        found = output.get(name, None)
        if found is not None:
            return found
    return None


def cache_bytes(cache: Any) -> int:
    """Bytes of every tensor that a cache keeps, however it keeps them; scalars do not count."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    kept = [*(vars(layer) for layer in cache.layers), {"own": getattr(cache, "linear_cache", None)}]
    return sum(_nbytes(value) for fields in kept for value in fields.values())


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes if value.ndim else 0
    if isinstance(value, dict):
        return sum(_nbytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0


transformers.logging.set_verbosity_error()
