"""A decoder's config.json as GGUF metadata and tensor names: the way back of gguf_config.

    model_type        general.architecture
    llama, mistral    llama     q and k rows interleaved; llama3 rope becomes rope_freqs.weight
    qwen2             qwen2
    qwen3             qwen3

llama.cpp reads no config.json, so whatever in it changes the model and has no key there is an error
by name: other activations, rope types, partial rotary, sliding layers.
Source: llama.cpp's converter and model loaders (those in llama-cpp-python 0.3.36), gguf-py's keys
(0.19), transformers' config classes for the defaults.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from weightpath.checkpoints.gguf_config import (
    ARCHITECTURES,
    Source,
    llama3_factors,
    tensor_sources,
)
from weightpath.errors import BadCheckpoint, BadTensor

Values = dict[str, tuple[GGUFValueType, Any]]
"""Metadata key -> its GGUF type and value; an array's items tell their own type."""

_LIKE_LLAMA = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type -> general.architecture; mistral is llama's loader under its own config class."""

_DEFAULT_YARN = {
    "beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None,
    "mscale_all_dim": None, "truncate": True,
}  # fmt: skip
_KEEP = "keep the checkpoint as safetensors"
_LARGEST = float(np.finfo(np.float32).max)
"""GGUF stores the fractions of a model as float32."""


@dataclass(frozen=True)
class GGUFModel:
    """What goes into a file beside weights and vocabulary.

    sources: HF tensor -> its GGUF name, shape and permuted heads. rope_factors: float32
    [head_dim / 2] for rope_freqs.weight, or None. left_out: HF tensors that no file holds.
    """

    architecture: str
    values: Values
    sources: dict[str, Source]
    rope_factors: np.ndarray | None
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def gguf_model(where: str, config: dict[str, Any], names: Collection[str]) -> GGUFModel:
    """Metadata, tensor names and rope factors for a config.json and the HF tensors there are.

    Errors: BadCheckpoint for a model or setting that llama.cpp's loader of it does not know;
    BadTensor for a tensor that is missing, or has no place in the model.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _LIKE_LLAMA:
        raise BadCheckpoint(
            where,
            f"model_type is {model_type!r:.40}; written as GGUF are {', '.join(_LIKE_LLAMA)}",
            _KEEP,
        )
    expected = ARCHITECTURES[model_type][1]
    if config.get("architectures") not in (None, [], [expected]):
        raise BadCheckpoint(
            where,
            f"is a {config['architectures']!r:.60}, only {expected} is written as GGUF",
            _KEEP,
        )
    architecture = _LIKE_LLAMA[model_type]
    full = _with_defaults(where, config, model_type)
    full["tie_word_embeddings"] = "lm_head.weight" not in names
    if full["num_hidden_layers"] > len(names):
        raise BadCheckpoint(
            where, f"has {full['num_hidden_layers']} layers, but {len(names)} tensors",
            "give a complete checkpoint",
        )  # fmt: skip
    rope, factors = _rope(where, architecture, full)
    notes = _unusual(where, config, model_type, full)
    if not full["tie_word_embeddings"] and config.get("tie_word_embeddings"):
        notes.append("the config ties the head, but lm_head.weight is given: written as a head")
    sources = tensor_sources(architecture, full)
    left_out = _account(model_type, sources, names, bool(config.get("tie_word_embeddings")))
    u32, f32 = GGUFValueType.UINT32, GGUFValueType.FLOAT32
    keys: Values = {
        "vocab_size": (u32, full["vocab_size"]),
        "context_length": (u32, full["max_position_embeddings"]),
        "embedding_length": (u32, full["hidden_size"]),
        "block_count": (u32, full["num_hidden_layers"]),
        "feed_forward_length": (u32, full["intermediate_size"]),
        "attention.head_count": (u32, full["num_attention_heads"]),
        "attention.head_count_kv": (u32, full["num_key_value_heads"]),
        "attention.key_length": (u32, full["head_dim"]),
        "attention.value_length": (u32, full["head_dim"]),
        "attention.layer_norm_rms_epsilon": (f32, full["rms_norm_eps"]),
        "rope.dimension_count": (u32, full["head_dim"]),
        **rope,
    }
    if full["sliding_window"]:
        keys["attention.sliding_window"] = (u32, full["sliding_window"])
    values = {f"{architecture}.{key}": value for key, value in keys.items()}
    return GGUFModel(architecture, values, sources, factors, left_out, tuple(notes))


def _with_defaults(where: str, config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The numbers of the model, checked, with the config class's defaults filled in."""
    full: dict[str, Any] = {}
    for key in (
        "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers",
        "intermediate_size", "num_attention_heads",
    ):  # fmt: skip
        full[key] = _whole(where, config, key)
    heads = full["num_attention_heads"]
    own_heads = model_type == "llama" and config.get("num_key_value_heads") is None
    full["num_key_value_heads"] = (
        heads if own_heads else _whole(where, config, "num_key_value_heads")
    )
    if config.get("head_dim") is not None or model_type == "qwen3":
        full["head_dim"] = _whole(where, config, "head_dim")
    else:
        full["head_dim"] = full["hidden_size"] // heads
    if full["head_dim"] % 2 or heads % full["num_key_value_heads"]:
        raise BadCheckpoint(
            where,
            f"has heads of {full['head_dim']} dimensions, {heads} for queries and "
            f"{full['num_key_value_heads']} for keys",
            "an even size and a whole number of queries a key are needed: check config.json",
        )
    epsilon = config.get("rms_norm_eps")
    if not isinstance(epsilon, float) or not 0 < epsilon <= _LARGEST:
        raise BadCheckpoint(
            where, f"rms_norm_eps is {epsilon!r:.40}, wanted a number above 0", "check config.json"
        )
    full["rms_norm_eps"] = epsilon
    full["attention_bias"] = bool(config.get("attention_bias")) and model_type != "mistral"
    full["mlp_bias"] = bool(config.get("mlp_bias")) and model_type == "llama"
    full["sliding_window"] = None
    if model_type == "mistral" and config.get("sliding_window"):
        full["sliding_window"] = _whole(where, config, "sliding_window")
    full["rope"] = _stated_rope(config)
    return full


def _whole(where: str, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise BadCheckpoint(
            where, f"{key} is {value!r:.40}, wanted a whole number above 0", "check config.json"
        )
    return value


def _unusual(
    where: str, config: dict[str, Any], model_type: str, full: dict[str, Any]
) -> list[str]:
    """Notes on what llama.cpp leaves out; BadCheckpoint for what it would compute otherwise."""
    rotary = full["rope"].get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    listed = config.get("layer_types") or []
    kinds = {str(kind) for kind in (listed if isinstance(listed, list) else [listed])}
    kinds -= {"full_attention"}
    act = config.get("hidden_act", "silu")
    for problem, found in (
        (f"hidden_act is {act!r:.40}", act != "silu"),
        (f"partial_rotary_factor is {rotary!r:.40}", rotary not in (None, 1, 1.0)),
        (f"layers are {', '.join(sorted(kinds)):.60}", kinds and model_type != "mistral"),
        ("use_sliding_window is true", config.get("use_sliding_window")),
        (
            f"head_dim is {full['head_dim']}",
            model_type == "qwen2"
            and full["head_dim"] * full["num_attention_heads"] != full["hidden_size"],
        ),
    ):
        if found:
            raise BadCheckpoint(
                where, f"{problem}, which llama.cpp's {_LIKE_LLAMA[model_type]} has not", _KEEP
            )
    window, context = full["sliding_window"], full["max_position_embeddings"]
    if window and window < context:
        return [f"llama.cpp ignores sliding_window {window}: longer texts come out otherwise"]
    return []


def _stated_rope(config: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters, or what older configs call rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(rope) if isinstance(rope, dict) else {"rope_type": rope}
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def _rope(where: str, architecture: str, full: dict[str, Any]) -> tuple[Values, np.ndarray | None]:
    """Keys for the frequencies, and the factors that rope type llama3 divides them by."""
    rope, text, f32 = full["rope"], GGUFValueType.STRING, GGUFValueType.FLOAT32
    kind = rope["rope_type"]
    keys: Values = {"rope.freq_base": (f32, _number(where, rope, "rope_theta"))}
    if kind == "default":
        return keys, None
    if kind == "llama3" and architecture == "llama":
        stated = {
            key: _number(where, rope, key)
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        }
        factor = _number(where, rope, "factor")
        theta = _number(where, rope, "rope_theta")
        return keys, llama3_factors(theta, full["head_dim"], factor, stated).astype(np.float32)
    if kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = (text, kind)
        keys["rope.scaling.factor"] = (f32, _number(where, rope, "factor"))
        if kind == "linear":
            return keys, None
        original = _whole(where, rope, "original_max_position_embeddings")
        keys["rope.scaling.original_context_length"] = (GGUFValueType.UINT32, original)
        other = [key for key, usual in _DEFAULT_YARN.items() if rope.get(key, usual) != usual]
        if not other:
            return keys, None
        kind = f"yarn with {', '.join(f'{key} {rope[key]}' for key in other)}"
    raise BadCheckpoint(
        where, f"rope type is {kind!s:.60}, which is not written for {architecture}", _KEEP
    )


def _number(where: str, rope: dict[str, Any], key: str) -> float:
    value = rope.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST:
        return float(value)
    raise BadCheckpoint(
        where, f"rope {key} is {value!r:.40}, wanted a number above 0", "check config.json"
    )


def _account(
    model_type: str, sources: dict[str, Source], names: Collection[str], tied: bool
) -> tuple[str, ...]:
    """Every source is there and every tensor has a place; returns the tensors to leave out."""
    left_out = []
    for name in names:
        if name in sources:
            continue
        if not name.endswith("rotary_emb.inv_freq"):  # follows from the config
            raise BadTensor(
                name,
                f"has no place in a {ARCHITECTURES[model_type][1]}",
                "leave it out, or " + _KEEP,
            )
        left_out.append(name)
    for name in sources:
        if name not in names:
            raise BadTensor(name, "is missing", "give a complete checkpoint")
    if "lm_head.weight" not in names and not tied:
        raise BadTensor(
            "lm_head.weight",
            "is missing, and the config does not tie the head to the embedding",
            "give a complete checkpoint, or set tie_word_embeddings",
        )
    return tuple(left_out)
