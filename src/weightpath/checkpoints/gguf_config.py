"""config.json, generation_config.json and tensor names for llama-type decoders in GGUF.

    GGUF                     HF
    blk.N.attn_q.weight      model.layers.N.self_attn.q_proj.weight   [heads * head_dim, hidden]
    blk.N.ffn_down.weight    model.layers.N.mlp.down_proj.weight      [hidden, intermediate]
    output.weight            lm_head.weight, absent where the head is tied

The converter that made a file of architecture llama (Llama, Mistral, SmolLM, ...) interleaved the
two halves of every q and k head for its rotary kernel; qwen2 and qwen3 files are not permuted.
A metadata key or a tensor that would change the model and is not known here is an error by name:
better no model than another one.
Source: gguf-py's keys and names (0.19); llama.cpp's converter; transformers' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightpath.errors import BadCheckpoint

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""general.architecture -> (model_type, class)."""

PERMUTED = ("llama", "mistral")
"""Architectures whose q and k rows are interleaved in the file."""

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What every Llama 3.1 and 3.2 model states in config.json; a GGUF keeps what follows of it."""

_KNOWN = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
    "tensor_data_layout",
}  # fmt: skip
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "padding": "pad"}
_DTYPES = {"F32": "float32", "F16": "float16"}
_LARGEST = float(np.finfo(np.float32).max)
"""No number of a model is beyond float32, in which GGUF stores most."""


@dataclass(frozen=True)
class Source:
    """An HF tensor's GGUF name, shape, and the heads whose rows to put back (0: none)."""

    gguf_name: str
    shape: tuple[int, ...]
    heads: int = 0


def model_config(
    where: str,
    metadata: dict[str, Any],
    kinds: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """config.json of the model, from the GGUF's metadata.

    kinds and shapes: type name and torch-order shape of every tensor. rope_factors: the values of
    rope_freqs.weight [head_dim / 2], where the file has it.
    Errors: BadCheckpoint for an architecture, key or value that has no place in the config.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BadCheckpoint(
            where,
            f"architecture is {name!r:.40}; read here are {', '.join(ARCHITECTURES)}",
            "give the model's safetensors checkpoint",
        )
    model_type, class_name = ARCHITECTURES[name]
    keys = {k.removeprefix(name + "."): v for k, v in metadata.items() if k.startswith(name + ".")}
    for key, value in keys.items():
        if key not in _KNOWN and value not in (0, False, "none"):
            raise BadCheckpoint(
                where,
                f"metadata {name}.{key} = {str(value)[:40]} changes the model, and is not read here",
                "give the model's safetensors checkpoint",
            )
    number = _reader(where, name, keys)
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", number("rope.dimension_count", hidden // heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if number(key, head_dim) != head_dim:
            raise BadCheckpoint(
                where,
                f"{name}.{key} is {number(key)}, the heads have {head_dim} dimensions",
                "give the model's safetensors checkpoint",
            )
    if head_dim % 2:
        raise BadCheckpoint(
            where, f"heads have {head_dim} dimensions, wanted an even number", "convert it again"
        )
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise BadCheckpoint(
            where, "has no token_embd.weight matrix", "give a complete language model"
        )
    if number("block_count") > len(shapes):
        raise BadCheckpoint(
            where,
            f"{name}.block_count is {keys['block_count']}, the file has {len(shapes)} tensors",
            "fetch it again",
        )
    window = number("attention.sliding_window", 0)
    if window and name == "llama":
        model_type, class_name = ARCHITECTURES["mistral"]
    elif window and name != "mistral":
        raise BadCheckpoint(
            where,
            f"{name}.attention.sliding_window is {window}, which is not read here",
            "give the model's safetensors checkpoint",
        )
    theta = _shortest(number("rope.freq_base", 10000.0, float))
    rope = _rope_parameters(where, name, keys, theta, head_dim, rope_factors)
    matrices = [kinds[key] for key, shape in shapes.items() if len(shape) == 2]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon", kind=float)),
        "rope_theta": theta,
        "rope_parameters": rope,
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "dtype": _DTYPES.get(max(matrices, key=matrices.count), "bfloat16"),
        **_token_ids(where, metadata),
    }
    if len(rope) > 2:
        config["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    if model_type == "mistral":
        config["sliding_window"] = window or None
    return config


def tensor_sources(architecture: str, config: dict[str, Any]) -> dict[str, Source]:
    """Every HF tensor that a model of this config has, and what it comes from."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, vocabulary = config["head_dim"], config["vocab_size"]
    q_heads, k_heads = (heads, kv_heads) if architecture in PERMUTED else (0, 0)
    matrices = {
        "attn_q": ("self_attn.q_proj", (heads * dim, hidden), q_heads),
        "attn_k": ("self_attn.k_proj", (kv_heads * dim, hidden), k_heads),
        "attn_v": ("self_attn.v_proj", (kv_heads * dim, hidden), 0),
        "attn_output": ("self_attn.o_proj", (hidden, heads * dim), 0),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden), 0),
        "ffn_up": ("mlp.up_proj", (inner, hidden), 0),
        "ffn_down": ("mlp.down_proj", (hidden, inner), 0),
    }
    biased: set[str] = set()
    if config["attention_bias"] or architecture == "qwen2":
        biased |= {"attn_q", "attn_k", "attn_v"} | (
            set() if architecture == "qwen2" else {"attn_output"}
        )
    if config.get("mlp_bias"):
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}
    norms = {
        "attn_norm": ("input_layernorm", hidden),
        "ffn_norm": ("post_attention_layernorm", hidden),
    }
    if architecture == "qwen3":
        norms |= {
            "attn_q_norm": ("self_attn.q_norm", dim),
            "attn_k_norm": ("self_attn.k_norm", dim),
        }
    sources = {
        "model.embed_tokens.weight": Source("token_embd.weight", (vocabulary, hidden)),
        "model.norm.weight": Source("output_norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = Source("output.weight", (vocabulary, hidden))
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for part, (hf, size) in norms.items():
            sources[f"{ours}{hf}.weight"] = Source(f"{theirs}{part}.weight", (size,))
        for part, (hf, shape, permuted) in matrices.items():
            sources[f"{ours}{hf}.weight"] = Source(f"{theirs}{part}.weight", shape, permuted)
            if part in biased:
                sources[f"{ours}{hf}.bias"] = Source(f"{theirs}{part}.bias", shape[:1], permuted)
    return sources


def generation_config(metadata: dict[str, Any], where: str = "GGUF metadata") -> dict[str, Any]:
    """generation_config.json: special token ids, and the sampling settings in the file."""
    settings: dict[str, Any] = _token_ids(where, metadata)
    ends = _token_ids(where, metadata, {"eos": "eos", "eot": "eot", "eom": "eom"})
    unique = list(dict.fromkeys(ends.values()))
    if len(unique) > 1:
        settings["eos_token_id"] = unique
    for key, hf in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise BadCheckpoint(
                    where, f"general.sampling.{key} is {value!r:.40}", "convert it again"
                )
            settings[hf] = _shortest(value) if isinstance(value, float) else value
            settings["do_sample"] = True
    return settings


def llama3_factors(theta: float, head_dim: int, factor: float, rope: dict[str, Any]) -> np.ndarray:
    """What rope type llama3 divides each of the head_dim / 2 frequencies by.

    f = theta^(-2i/d), wavelength 2 pi / f. Longer than original / low: factor. Shorter than
    original / high: 1. Between: 1 / ((1 - s) / factor + s), s = (original / wavelength - low) /
    (high - low). Source: the Llama 3.1 release, as in transformers.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _rope_parameters(
    where: str,
    name: str,
    keys: dict[str, Any],
    theta: float,
    head_dim: int,
    factors: np.ndarray | None,
) -> dict[str, Any]:
    """rope_parameters of the config, from the scaling keys or from the factors tensor."""
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 1.0)
    if "rope.scale_linear" in keys and "rope.scaling.type" not in keys:
        kind, factor = "linear", keys["rope.scale_linear"]
    plain = {"rope_theta": theta, "rope_type": "default"}
    mend = "give the model's safetensors checkpoint"
    if factors is not None and not np.all(factors == 1.0):
        largest = _shortest(float(factors.max(initial=1.0)))
        wanted = llama3_factors(theta, head_dim, largest, LLAMA3_ROPE)
        fits = factors.shape == wanted.shape and np.allclose(factors, wanted, rtol=1e-4, atol=0)
        if kind not in ("none", "linear") or not fits:
            raise BadCheckpoint(where, "rope_freqs.weight is not what rope type llama3 gives", mend)
        return {"rope_theta": theta, "rope_type": "llama3", "factor": largest, **LLAMA3_ROPE}
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return plain
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise BadCheckpoint(where, f"{name}.rope.scaling.factor is {factor!r:.40}", mend)
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": _shortest(factor)}
    original = keys.get("rope.scaling.original_context_length")
    if kind == "yarn" and type(original) is int and original > 0:
        return plain | {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": original,
        }
    raise BadCheckpoint(
        where, f"{name}.rope.scaling.type is {kind!r:.40}, which is not read here", mend
    )


def _reader(where: str, name: str, keys: dict[str, Any]) -> Any:
    """A function that reads a number of the architecture; a list of equal numbers is one."""

    def number(key: str, default: Any = None, kind: type = int) -> Any:
        value = _only(keys.get(key, default))
        least = 0 if default is not None else 1e-30
        sound = isinstance(value, kind) and not isinstance(value, bool) and value >= least
        if not sound or value > _LARGEST:
            raise BadCheckpoint(
                where,
                f"metadata {name}.{key} is {value!r:.40}, wanted one number above 0",
                "convert it again",
            )
        return value

    return number


def _only(value: Any) -> Any:
    """The number itself, or that of a list in which all are equal."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _token_ids(
    where: str, metadata: dict[str, Any], names: Mapping[str, str] = _SPECIAL
) -> dict[str, int]:
    """Ids of special tokens, under the names of config.json; names: GGUF's -> HF's."""
    found = {}
    for kind, hf in names.items():
        index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if type(index) is int:
            found[f"{hf}_token_id"] = index
        elif index is not None:
            raise BadCheckpoint(
                where, f"tokenizer.ggml.{kind}_token_id is {index!r:.40}", "convert it again"
            )
    return found


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for the stored 9.99999974e-06."""
    with np.errstate(over="ignore"):  # a float64 that float32 does not hold is infinite
        return float(str(np.float32(value)))
