"""The KV budget of MODEL: its config read, completed with what transformers assumes, and counted.

A config.json often leaves out what its class has a default for (gemma-3's says neither its KV
heads nor which layers slide), so the numbers are completed from transformers' own reading of the
config, and the budget says which. A model_type that transformers does not know is counted from
the config as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weightpath.checkpoints.locate import config_of
from weightpath.engine.skeleton import special_floats
from weightpath.errors import BadCheckpoint
from weightpath.paths.kv_budget import KVBudget, kv_budget
from weightpath.paths.kv_fields import Fields, section_at, text_path
from weightpath.paths.kv_layers import LAYERS, MOST_LAYERS
from weightpath.paths.kv_states import HEADS, WIDTHS

COMMON = {HEADS: "num_attention_heads", WIDTHS: "hidden_size"}


def model_kv(
    model: str,
    context: int,
    sequences: int = 1,
    kv_dtype: str = "auto",
    *,
    block_size: int = 1,
    source_tokens: int | None = None,
    state_dtype: str = "auto",
    held_by: str = "formula",
) -> KVBudget:
    """`kv_budget` of a folder, config.json, GGUF file, hub id or demo. No weights are read."""
    config, where = config_of(model)
    return config_kv(
        config, where, context, sequences, kv_dtype, block_size=block_size,
        source_tokens=source_tokens, state_dtype=state_dtype, held_by=held_by,
    )  # fmt: skip


def config_kv(
    config: Mapping[str, Any],
    where: str,
    context: int,
    sequences: int = 1,
    kv_dtype: str = "auto",
    *,
    block_size: int = 1,
    source_tokens: int | None = None,
    state_dtype: str = "auto",
    held_by: str = "formula",
) -> KVBudget:
    """`kv_budget` of a config, completed, with the fields that were not in it under `filled`."""
    whole, note = completed(config, where)
    budget = kv_budget(
        whole, context, sequences, kv_dtype, block_size=block_size, source_tokens=source_tokens,
        state_dtype=state_dtype, held_by=held_by, where=where,
    )  # fmt: skip
    written = section_at(config, text_path(config))
    filled = tuple(name for name in budget.fields if written.get(name) is None)
    said = (*budget.notes, note) if note else budget.notes
    return replace(budget, filled=filled if not note else (), notes=said)


def completed(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """A config with every field that transformers gives it, and "" or why that could not be had.

    BadCheckpoint where transformers knows the model_type and cannot make a config of the values.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return dict(
            config
        ), f"model_type {kind!r:.40} is unknown to transformers: its fields were read as they stand"
    written = Fields(section_at(config, text_path(config)), where)
    layers = written.first("num_hidden_layers", "n_layer", "num_layers", "decoder_layers") or 1
    if layers > MOST_LAYERS:  # the class would make a list of so many
        raise BadCheckpoint(
            where, f"has {layers} layers, at most {MOST_LAYERS} are counted", "mend it"
        )
    settings = {
        key: value
        for key, value in special_floats(config).items()
        if key not in ("model_type", "quantization_config", "architectures")
    }
    try:
        parsed = AutoConfig.for_model(kind, **settings)
        text = parsed.get_text_config(decoder=True)
    except Exception as error:  # what a config of wrong values raises is not one family
        said = " ".join(str(error).split())[:200]
        raise BadCheckpoint(where, f"makes no {kind} config ({type(error).__name__}: {said})",
                            "mend its values") from error  # fmt: skip
    whole = _over(dict(config), parsed.to_dict())
    section: Any = section_at(whole, text_path(whole))
    section["layer_types"] = _layer_types(text, section)
    _under_common_names(section, text)
    return whole, ""


def _over(written: dict[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """`written` with transformers' reading over it, section by section."""
    for key, value in read.items():
        own = written.get(key)
        written[key] = (
            _over(dict(own), value)
            if isinstance(own, dict) and isinstance(value, Mapping)
            else value
        )
    return written


def _under_common_names(section: dict[str, Any], text: Any) -> None:
    """Set what the section spells in words of its own family (attention_heads, layers), and a
    number of layers that transformers works out (two attentions a layer in LongCat)."""
    for names in (HEADS, WIDTHS):
        if any(section.get(name) is not None for name in names):
            continue
        value = getattr(text, COMMON[names], None)
        if type(value) is int and value > 0:
            section[COMMON[names]] = value
    layers = getattr(text, "num_hidden_layers", None)
    decoder = section.get("decoder_layers") or section.get("num_decoder_layers")
    if type(layers) is int and layers > 0 and not decoder:
        known = next((section[name] for name in LAYERS if section.get(name) is not None), None)
        if known != layers:
            section["num_hidden_layers"] = layers


def _layer_types(text: Any, section: Mapping[str, Any]) -> list[str] | None:
    """Layer kinds as transformers' cache takes them: a window without a list is every layer's."""
    said = getattr(text, "layer_types", None)
    if said is not None:
        return list(said)
    layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int) or section.get("is_encoder_decoder"):
        return None
    if getattr(text, "cross_attention_layers", None):
        return None
    if getattr(text, "sliding_window", None) is not None:
        return ["sliding_attention"] * layers
    if getattr(text, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * layers
    return None
