"""What each layer of a decoder keeps: one kind a layer, from layer_types or the older patterns.

Kinds: "full", "sliding", "chunked", "linear" (a state: linear attention or state space), "conv"
(a short convolution's state), "hybrid" and "hybrid_sliding" (attention beside a state in one
layer), "cross" (attention to an encoder alone), "none" (a layer of experts or an MLP alone).

`layer_types` wins. Without it, in this order: layers_block_type, hybrid_override_pattern,
linear_attn_config, attn_type_list, indices of attention layers, period and offset, block_types,
full_attention_interval, sliding_window_pattern, no_rope_layers with an attention chunk,
max_window_layers. A window that none of these places counts as full attention in every layer: an
upper bound, and what the edge selector did (shared reference, section A).
"""

from __future__ import annotations

from typing import Any

from weightpath.errors import BadCheckpoint
from weightpath.paths.kv_fields import Fields

NAMES = {
    "full_attention": "full", "attention": "full", "global": "full", "global_attention": "full",
    "indexed_attention": "full", "deepseek_sparse_attention": "full", "minimax_m3_sparse": "full",
    "sliding_attention": "sliding", "local": "sliding", "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear", "mamba": "linear", "mamba2": "linear", "recurrent": "linear",
    "conv": "conv", "short_conv": "conv",
    "hybrid": "hybrid", "hybrid_sliding": "hybrid_sliding",
    "moe": "none", "mlp": "none",
}  # fmt: skip
"""Words of layer_types (transformers 5.24, older releases and checkpoints) -> kind."""
_LETTERS = {"M": "linear", "*": "full", "-": "none", "E": "none"}
_STATE_FIELDS = (
    "mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads", "linear_num_heads",
    "linear_attn_config", "conv_L_cache", "lru_width",
)  # fmt: skip


def layer_kinds(fields: Fields, layers: int) -> tuple[list[str], str]:
    """One kind for each of `layers` layers, and the note that belongs to them ("" for none).

    BadCheckpoint for an unknown word, a list of another length, and a state-space model that does
    not say which of its layers are which.
    """
    for name in ("layer_types", "layers_block_type"):
        words = fields.listed(name)
        if words is not None:
            return _checked(
                fields, name, [_named(fields, name, word) for word in words], layers
            ), ""
    found = _patterned(fields, layers)
    cross = fields.listed("cross_attention_layers")
    if found is None and cross is None:
        return _unplaced(fields, layers)
    kinds = found or ["full"] * layers
    for index in cross or ():
        if not isinstance(index, int) or not 0 <= index < layers:
            raise BadCheckpoint(
                fields.where, f"cross_attention_layers names layer {index!r:.20} of {layers}",
                "mend that field",
            )  # fmt: skip
        kinds[index] = "cross"
    return _checked(fields, "the layer pattern", kinds, layers), ""


def _patterned(fields: Fields, layers: int) -> list[str] | None:
    """Kinds by the pattern fields that checkpoints carry beside or instead of layer_types."""
    letters = fields.get("hybrid_override_pattern")
    if isinstance(letters, str):
        return [_letter(fields, letter) for letter in letters]
    if (split := fields.get("linear_attn_config")) is not None and isinstance(split, dict):
        full = split.get("full_attn_layers")
        if isinstance(full, list):  # counted from 1
            return ["full" if index + 1 in full else "linear" for index in range(layers)]
    if (flags := fields.listed("attn_type_list")) is not None:
        return ["full" if flag == 1 else "linear" for flag in flags]
    for name, other in (("attn_layer_indices", "linear"), ("full_attn_idxs", "conv")):
        if (indices := fields.listed(name)) is not None:
            return ["full" if index in indices else other for index in range(layers)]
    if (period := fields.first("attn_layer_period")) is not None:
        offset = fields.get("attn_layer_offset") or 0
        return ["full" if index % period == offset else "linear" for index in range(layers)]
    if (blocks := fields.listed("block_types")) is not None and blocks:
        named = ["sliding" if word == "attention" else "linear" for word in blocks]
        return [named[index % len(named)] for index in range(layers)]
    if (interval := fields.first("full_attention_interval")) is not None:
        return ["linear" if (index + 1) % interval else "full" for index in range(layers)]
    return _windowed(fields, layers)


def _windowed(fields: Fields, layers: int) -> list[str] | None:
    """Kinds of a decoder of attention layers alone, some of which see a part of the context."""
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(layers)]
    if pattern is not None and fields.first("sliding_window") is not None:
        every = fields.need("sliding_window_pattern")
        return ["sliding" if (index + 1) % every else "full" for index in range(layers)]
    if fields.first("attention_chunk_size") is not None:
        rope = fields.listed("no_rope_layers")
        every = fields.first("no_rope_layer_interval")
        if rope:
            return ["chunked" if flag else "full" for flag in rope]
        if every:
            return ["chunked" if (index + 1) % every else "full" for index in range(layers)]
    if fields.get("use_sliding_window") is True and fields.first("sliding_window") is not None:
        first = fields.get("max_window_layers")
        if isinstance(first, int) and not isinstance(first, bool):
            return ["sliding" if index >= first else "full" for index in range(layers)]
    return None


def _unplaced(fields: Fields, layers: int) -> tuple[list[str], str]:
    """Kinds where nothing places windows or states."""
    stateful = [name for name in _STATE_FIELDS if fields.values.get(name) is not None]
    if stateful:
        if fields.first("num_attention_heads") is None:
            return ["linear"] * layers, ""
        raise fields.missing("layer_types")
    windows = ("sliding_window", "attention_chunk_size", "attention_window_size")
    for name in windows:
        if fields.values.get("use_sliding_window") is False and name == "sliding_window":
            continue
        if (window := fields.first(name)) is not None:
            note = (
                f"{name} is {window} and nothing says in which layers (layer_types): every layer "
                "counts as full attention, an upper bound"
            )
            return ["full"] * layers, note
    return ["full"] * layers, ""


def _named(fields: Fields, name: str, word: Any) -> str:
    kind = NAMES.get(word) if isinstance(word, str) else None
    if kind is None:
        raise BadCheckpoint(
            fields.where, f"{name} holds {word!r:.40}, of which no cache is known",
            f"known are {', '.join(NAMES)}",
        )  # fmt: skip
    return kind


def _letter(fields: Fields, letter: str) -> str:
    if letter not in _LETTERS:
        raise BadCheckpoint(
            fields.where, f"hybrid_override_pattern holds {letter!r}",
            f"known are {', '.join(_LETTERS)}",
        )  # fmt: skip
    return _LETTERS[letter]


def _checked(fields: Fields, name: str, kinds: list[str], layers: int) -> list[str]:
    if len(kinds) != layers:
        raise BadCheckpoint(
            fields.where, f"{name} names {len(kinds)} layers, the config has {layers}",
            "mend one of the two",
        )  # fmt: skip
    return kinds
