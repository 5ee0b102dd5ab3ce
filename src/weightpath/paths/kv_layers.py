"""What one token leaves in each layer of a decoder, from its config alone.

Elements of a token in one layer:

    attention           kv_heads * head_dim * 2              keys and values
    latent attention    kv_lora_rank + qk_rope_head_dim      one latent for keys and values
      with an indexer   + index_head_dim                     keys that choose what to attend to
    shared KV           0                                    read from an earlier layer
    cross attention     kv_heads * head_dim * 2              a token of the encoder's

`flat_elements` is what the naive count gives the same layer: the latent expanded to the keys and
values of every head, and a shared layer's own keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weightpath.errors import BadCheckpoint
from weightpath.paths.kv_fields import Fields
from weightpath.paths.kv_kinds import layer_kinds
from weightpath.paths.kv_states import StateCache, attention_heads, head_dim, state_cache

ENCODERS = (
    "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2",
    "mpnet", "modernbert", "nomic_bert",
)  # fmt: skip
"""model_types that read a text at once and keep nothing between steps."""
MOST_LAYERS = 1000
"""Far above the deepest model there is (a few hundred)."""
LAYERS = (
    "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers",
    "num_layers",
)  # fmt: skip


@dataclass(frozen=True)
class TokenCache:
    """One layer's keys and values.

    kind: "full_attention", "sliding_window", "chunked_attention", "latent_attention", "shared_kv"
    or "cross_attention". vectors: a token's separately scaled vectors (heads, keys and values).
    window: most tokens that are needed; None where all are. shape: in words, for people.
    """

    kind: str
    vectors: int
    elements: int
    flat_elements: int
    flat_vectors: int
    window: int | None = None
    shape: str = ""


@dataclass(frozen=True)
class DecoderCache:
    """Every layer's caches in order, a layer without one as (). note: from placing the kinds."""

    layers: tuple[tuple[TokenCache | StateCache, ...], ...]
    cross_attends: bool
    note: str


def decoder_cache(fields: Fields, encoder_decoder: bool = False) -> DecoderCache:
    """What each layer keeps. encoder_decoder: every layer also attends to an encoder."""
    kind = fields.values.get("model_type")
    if kind in ENCODERS and not fields.values.get("is_decoder"):
        raise BadCheckpoint(
            fields.where,
            f"is an encoder ({kind}): it keeps no KV cache",
            "give a model that generates",
        )
    layers = count_layers(fields)
    kinds, note = layer_kinds(fields, layers)
    shared = _shared(fields, layers)
    own = [_layer(fields, index, kind) for index, kind in enumerate(kinds)]
    for index in shared:
        own[index] = tuple(
            replace(part, kind="shared_kv", vectors=0, elements=0, shape="reads an earlier layer")
            if isinstance(part, TokenCache)
            else part
            for part in own[index]
        )
    if encoder_decoder:
        own = [(*parts, _attention(fields, index, "cross")) for index, parts in enumerate(own)]
    cross = any(
        isinstance(part, TokenCache) and part.kind == "cross_attention"
        for parts in own
        for part in parts
    )
    return DecoderCache(tuple(own), cross, note)


def count_layers(fields: Fields) -> int:
    """Layers of the decoder. BadCheckpoint where there are none, or more than any model has."""
    layers = fields.first(*LAYERS)
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if layers is None and isinstance(words := fields.get(name), (list, tuple, str)) and words:
            layers = len(words)
    if layers is None:
        raise fields.missing("num_hidden_layers", "n_layer", "decoder_layers")
    if layers > MOST_LAYERS:
        raise BadCheckpoint(
            fields.where,
            f"has {layers} layers, at most {MOST_LAYERS} are counted",
            "mend that field",
        )
    return layers


def _layer(fields: Fields, index: int, kind: str) -> tuple[TokenCache | StateCache, ...]:
    if kind == "none":
        return ()
    if kind in ("linear", "conv"):
        return (state_cache(fields, kind == "conv"),)
    if kind.startswith("hybrid"):
        attends = "sliding" if kind == "hybrid_sliding" else "full"
        return (_attention(fields, index, attends), state_cache(fields, False))
    return (_attention(fields, index, kind),)


def _attention(fields: Fields, index: int, kind: str) -> TokenCache:
    """The cache of an attention layer of `kind` full, sliding, chunked or cross."""
    window = None
    if kind == "sliding":
        window = _override(fields, index).first(
            "sliding_window", "attention_window_size", "sliding_window_size"
        )
        if window is None:
            raise fields.missing("sliding_window")
    if kind == "chunked":
        window = fields.need("attention_chunk_size")
    if fields.values.get("kv_lora_rank") is not None and kind != "cross":
        return _latent(_override(fields, index), window)
    heads, dim = _geometry(fields, index, kind)
    named = {"full": "full_attention", "sliding": "sliding_window", "chunked": "chunked_attention",
             "cross": "cross_attention"}  # fmt: skip
    elements = 2 * heads * dim
    limit = f", window {window}" if kind == "sliding" else f", chunks of {window}" if window else ""
    return TokenCache(named[kind], 2 * heads, elements, elements, 2 * heads, window,
                      f"{heads} KV heads x {dim}{limit}")  # fmt: skip


def _latent(fields: Fields, window: int | None) -> TokenCache:
    """Multi-head latent attention: one latent and one rotated key (of 0 dimensions where nothing
    is rotated) a token for all heads."""
    rank = fields.need("kv_lora_rank")
    rope = 0 if fields.values.get("qk_rope_head_dim") == 0 else fields.need("qk_rope_head_dim")
    heads = attention_heads(fields)
    expanded = heads * (fields.need("qk_nope_head_dim") + rope + fields.need("v_head_dim"))
    index = (fields.first("index_head_dim") or 0) if window is None else 0
    more = f" + index {index}" if index else f", window {window}" if window else ""
    return TokenCache("latent_attention", 3 if index else 2, rank + rope + index, expanded,
                      2 * heads, window, f"latent {rank} + rope {rope}{more}")  # fmt: skip


def _geometry(fields: Fields, index: int, kind: str) -> tuple[int, int]:
    """(KV heads, head_dim) of one layer.

    Gemma 4 gives its full layers a geometry of their own (global_head_dim), other families one for
    single layers (per_layer_config) or a list of KV heads.
    """
    layer = _override(fields, index)
    if layer.values is not fields.values and layer.values.get("head_dim") is not None:
        dim = layer.need("head_dim")
    elif kind == "full" and fields.first("global_head_dim") is not None:
        dim = fields.need("global_head_dim")
    else:
        dim = head_dim(layer)
    if kind == "full" and (heads := fields.first("num_global_key_value_heads")) is not None:
        return heads, dim
    listed = layer.values.get("num_key_value_heads") or fields.values.get("num_kv_heads")
    if isinstance(listed, (list, tuple)):
        name = "num_key_value_heads" if "num_key_value_heads" in layer.values else "num_kv_heads"
        if index >= len(listed):
            raise BadCheckpoint(
                fields.where, f"{name} has {len(listed)} entries, layer {index} needs one",
                "mend that field",
            )  # fmt: skip
        return Fields({name: listed[index]}, fields.where, fields.used).need(name), dim
    return _kv_heads(layer), dim


def _kv_heads(fields: Fields) -> int:
    """KV heads; as many as there are query heads where no field says other (multi-head attention).

    multi_query (GPT BigCode, Falcon without new_decoder_architecture): one.
    """
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        return 1
    if fields.values.get("model_type") == "falcon" and not fields.get("new_decoder_architecture"):
        return attention_heads(fields)
    said = fields.first("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads",
                        "multi_query_group_num")  # fmt: skip
    return attention_heads(fields) if said is None else said


def _override(fields: Fields, index: int) -> Fields:
    """The fields as one layer has them."""
    layers = fields.values.get("per_layer_config")
    if not isinstance(layers, Mapping):
        return fields
    own: Any = layers.get(str(index)) or layers.get(f"{index:02d}") or layers.get(f"{index:03d}")
    if not isinstance(own, Mapping):
        return fields
    return Fields({**fields.values, **own}, f"{fields.where} layer {index}", fields.used)


def _shared(fields: Fields, layers: int) -> list[int]:
    """Layers that read the keys and values of an earlier one (Gemma 3n, Gemma 4)."""
    modes = fields.listed("kv_sharing_modes")
    if modes is not None:
        return [index for index, mode in enumerate(modes[:layers]) if mode == "reuse"]
    count = fields.values.get("num_kv_shared_layers") or 0
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < layers:
        raise BadCheckpoint(
            fields.where, f"num_kv_shared_layers is {count!r:.20} of {layers} layers",
            "mend that field",
        )  # fmt: skip
    if count:
        fields.used["num_kv_shared_layers"] = count
    return list(range(layers - count, layers))
