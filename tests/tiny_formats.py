"""A tiny low-bit checkpoint in every format that is read, written by hand, with what it stands for.

    write("gptq-v1", folder, bits=3, symmetric=False).weights["model.layers.0.mlp.up_proj"]

One seeded Llama: 2 layers, hidden 128, intermediate 256, vocabulary 64, 4 query and 2 KV heads of
32. Its linears are rounded to integers and packed by tiny_linears and tiny_packers, which share
nothing with the package; `weights` is the formula of the format on these integers, float32 [N, K].
The rest (embedding, norms, head) is float16. `FORMATS` names every format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny_configs as configs
import tiny_gguf
import tiny_linears as linears
from tiny_files import (
    BLOCK_TYPES,
    Written,
    config_of,
    is_linear,
    model_of,
    place_settings,
    save,
    write_gguf,
    write_int8,
)
from tiny_linears import Asked, Made

__all__ = ["BLOCK_TYPES", "FORMATS", "Format", "Written", "write"]


@dataclass(frozen=True)
class Format:
    """How a format is made. make(module, weight [N, K], asked); settings(asked, float modules)."""

    method: str
    make: Callable[[str, np.ndarray, Asked], Made]
    settings: Callable[[Asked, Sequence[str]], dict[str, Any]]
    bits: int = 4
    symmetric: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""


def _awq(version: str) -> Format:
    return Format(
        "awq",
        lambda _, weight, asked: linears.awq(weight, asked, version),
        lambda asked, _: configs.awq(asked, version),
        symmetric=False,
    )


def _gptq(label: str) -> Format:
    return Format(
        "gptq",
        lambda name, weight, asked: linears.gptq(
            weight, asked, _order(name, weight, asked), label == "gptq"
        ),
        lambda asked, _: configs.gptq(asked, label),
    )


def _autoround(packing: str, make: Callable[[np.ndarray, Asked], Made]) -> Format:
    return Format(
        "auto-round",
        lambda _, weight, asked: make(weight, asked),
        lambda asked, _: configs.autoround(asked, packing),
        changes={"by_word": packing.endswith("auto_gptq")},
    )


def _ct(form: str, make: Callable[[str, np.ndarray, Asked], Made], **defaults: Any) -> Format:
    return Format(
        "compressed-tensors",
        make,
        lambda asked, ignore: configs.compressed_tensors(asked, form, list(ignore)),
        **defaults,
    )


def _torchao(kind: str, make: Callable[[np.ndarray, Asked], Made], **defaults: Any) -> Format:
    return Format(
        "torchao",
        lambda _, weight, asked: make(weight, asked),
        lambda asked, _: configs.torchao(asked, kind),
        kind=kind,
        **defaults,
    )


FORMATS: dict[str, Format] = {
    "awq-gemm": _awq("gemm"),
    "awq-gemv": _awq("gemv"),
    "awq-gemv_fast": _awq("gemv_fast"),
    "awq-llm": _awq("llm-awq"),
    "gptq-v1": _gptq("gptq"),
    "gptq-v2": _gptq("gptq_v2"),
    "autoround-gptq": _autoround(
        "auto_round:auto_gptq", lambda w, asked: linears.gptq(w, asked, None, True, g_idx=False)
    ),
    "autoround-gptqmodel": _autoround(
        "auto_round:gptqmodel", lambda w, asked: linears.gptq(w, asked, None, False, g_idx=False)
    ),
    "autoround-awq": _autoround(
        "auto_round:auto_awq", lambda w, asked: linears.awq(w, asked, "gemm")
    ),
    "autoround-ct": _autoround("auto_round:llm_compressor", linears.ct_packed),
    "ct-packed": _ct("pack-quantized", lambda _, w, asked: linears.ct_packed(w, asked)),
    "ct-padded": _ct(
        "pack-quantized", lambda _, w, asked: linears.ct_packed(w, asked, pads=True), bits=3
    ),
    "ct-int8": _ct(
        "int-quantized",
        lambda _, w, asked: linears.ct_int8(w, asked),
        bits=8,
        changes={"group_size": -1},
    ),
    "ct-ordered": _ct(
        "pack-quantized",
        lambda name, w, asked: linears.ct_packed(w, asked, _order(name, w, asked)),
        changes={"ordered": True},
    ),
    "torchao-int4": _torchao(
        "Int4Tensor",
        linears.torchao_int4,
        symmetric=False,
        changes={"scale_dtype": torch.bfloat16},
    ),
    "torchao-int8": _torchao(
        "Int8Tensor",
        linears.torchao_int8,
        bits=8,
        changes={"group_size": -1, "scale_dtype": torch.bfloat16},
    ),
    "modelopt-int4": Format(
        "modelopt",
        lambda _, w, asked: linears.modelopt_int4(w, asked),
        lambda asked, _: configs.modelopt(asked),
    ),
    "bnb-nf4": Format(
        "bitsandbytes",
        lambda _, w, asked: linears.bnb_nf4(w, asked),
        lambda asked, _: configs.bitsandbytes(asked, True),
    ),
    "bnb-int8": Format(
        "bitsandbytes",
        lambda _, w, asked: linears.bnb_int8(w, asked),
        lambda asked, _: configs.bitsandbytes(asked, False),
        bits=8,
    ),
    "hqq": Format(
        "hqq",
        lambda _, w, asked: linears.hqq(w, asked),
        lambda asked, _: configs.hqq(asked),
        symmetric=False,
    ),
    "weightpath-int8": Format("weightpath", lambda *_: ({}, np.empty(0)), lambda *_: {}, bits=8),
    "gguf": Format("gguf", lambda *_: ({}, np.empty(0)), lambda *_: {}),
}


def _order(name: str, weight: np.ndarray, asked: Asked) -> np.ndarray | None:
    """A rank for every column, the same for linears that share their input; None: as they are."""
    if not asked.ordered:
        return None
    prefix, _, leaf = name.rpartition(".")
    kind = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2}
    layer = next((int(part) for part in prefix.split(".") if part.isdecimal()), 0)
    draw = np.random.default_rng([asked.seed, layer, kind.get(leaf, 3)])
    return draw.permutation(weight.shape[1])


def write(
    format_name: str,
    folder: Path,
    *,
    seed: int = 0,
    group_size: int | None = None,
    bits: int | None = None,
    symmetric: bool | None = None,
    ordered: bool | None = None,
    shards: int = 1,
    place: str | None = None,
    changes: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    tokenizer: bool | None = None,
    head: bool = False,
    model: Mapping[str, Any] | None = None,
    **options: Any,
) -> Written:
    """Write a checkpoint of a format in FORMATS into `folder`, which is made.

    group_size: 32 if not given (one group a row for int8). bits, symmetric, ordered: as the format
    usually is. shards: files, with an index. place of the settings: "config" (config.json),
    "legacy" (a file of their own, in the words of older writers: awq, gptq, modelopt), "both",
    "nested" (config.json's text_config) or "missing"; ModelOpt's stand in "both" if not said.
    changes, without: keys of the settings to set, and to leave out. tokenizer: with a tokenizer's
    files and 269 rows of vocabulary (GGUF: unless False). head: lm_head in low bits too. model:
    arguments of tiny_checkpoint.build_model. options: fields of tiny_linears.Asked; `kind` is the
    block type of a GGUF, K types only where they divide K, else Q8_0.
    """
    made = FORMATS[format_name]
    given = {"group_size": group_size, "bits": bits, "symmetric": symmetric, "ordered": ordered}
    usual = {"group_size": 32, "bits": made.bits, "symmetric": made.symmetric, "ordered": False}
    stated = {key: value for key, value in given.items() if value is not None}
    asked = Asked(**{**usual, **made.changes, **stated, "seed": seed, **options})
    vocabulary = tokenizer or (tokenizer is None and format_name == "gguf")
    folder.mkdir(parents=True, exist_ok=True)
    source = model_of(seed, vocabulary, tuple(sorted((model or {}).items())))
    if format_name == "gguf":
        return write_gguf(folder, source, asked, vocabulary)
    if vocabulary:
        tiny_gguf.make_folder(folder)
    if format_name == "weightpath-int8":
        return write_int8(folder, source)
    return _write_folder(
        folder, made, source, asked, shards, place, dict(changes or {}), without, head
    )


def _write_folder(
    folder: Path,
    made: Format,
    source: PreTrainedModel,
    asked: Asked,
    shards: int,
    place: str | None,
    changes: dict[str, Any],
    without: Sequence[str],
    head: bool,
) -> Written:
    tensors: dict[str, Tensor] = {}
    weights: dict[str, np.ndarray] = {}
    entries: dict[str, Any] = {}
    for name, parameter in source.state_dict().items():
        if name == "lm_head.weight" and source.config.tie_word_embeddings:
            continue
        module = name.removesuffix(".weight")
        if not is_linear(name, head):
            tensors[name], entries[name] = parameter.half(), {"_type": "Tensor"}
            continue
        seeded = replace(asked, seed=asked.seed + len(weights)) if not asked.ordered else asked
        parts, weights[module] = made.make(module, parameter.float().numpy(), seeded)
        tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        if made.kind:
            entries[name] = configs.torchao_entry(asked, made.kind, tuple(parameter.shape))
    save(folder, tensors, shards, entries if made.kind else {})
    settings = made.settings(asked, [] if head else ["lm_head"]) | changes
    settings = {key: value for key, value in settings.items() if key not in without}
    place_settings(folder, made.method, config_of(source), settings, place)
    return Written(folder, folder, weights, settings, made.method != "hqq" or asked.whole_zeros)
