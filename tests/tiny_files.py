"""Files of a tiny low-bit checkpoint: the seeded model, shards and index, config files, GGUF, int8."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import tiny_configs as configs
import tiny_gguf
from tiny_blocks import gguf_blocks
from tiny_checkpoint import build_model
from tiny_linears import Asked

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk. path: what is opened, `folder` or the .gguf file in it.

    weights: module -> float32 [N, K], column scales included. settings: the quantization config as
    it stands in the file. exact: whether a reader's float32 must equal `weights` bit for bit; else
    the format's own formula rounds in another order.
    """

    folder: Path
    path: Path
    weights: dict[str, np.ndarray]
    settings: dict[str, Any]
    exact: bool = True


@lru_cache(maxsize=4)
def model_of(seed: int, vocabulary: bool, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    sizes = SIZES | ({"vocab_size": len(tiny_gguf.vocabulary())} if vocabulary else {})
    return build_model(**{"seed": seed, **sizes, **dict(changes)})


def config_of(source: PreTrainedModel) -> dict[str, Any]:
    stated = json.loads(source.config.to_json_string())
    return stated | {"architectures": [type(source).__name__], "dtype": "float16"}


def is_linear(name: str, head: bool) -> bool:
    return name.endswith("_proj.weight") or (head and name == "lm_head.weight")


def save(folder: Path, tensors: dict[str, Tensor], shards: int, entries: dict[str, Any]) -> None:
    """One file, or `shards` of them with an index. entries: torchao's, by parameter."""
    names, weight_map = list(tensors), {}
    metadata = {"format": "pt"}
    if entries:  # in every file, of all files, as transformers does
        metadata |= {name: json.dumps(entry) for name, entry in entries.items()}
        metadata["tensor_names"] = json.dumps(list(entries))
    for shard in range(shards):
        chosen = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"  # fmt: skip
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / file, metadata)
        weight_map |= dict.fromkeys(chosen, file)
    if shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def place_settings(
    folder: Path, method: str, config: dict[str, Any], settings: dict[str, Any], place: str | None
) -> None:
    """config.json, with the settings where they are asked for."""
    place = place or ("both" if method == "modelopt" else "config")
    if place in ("config", "both"):
        config["quantization_config"] = settings
    if place == "nested":
        config["text_config"] = {**config, "quantization_config": settings}
    if place in ("legacy", "both"):
        words = configs.in_legacy_words(method, settings)
        (folder / configs.LEGACY[method]).write_text(json.dumps(words, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_int8(folder: Path, source: PreTrainedModel) -> Written:
    """This project's own int8, made by `weightpath.quantize` and decoded here from its words."""
    import weightpath

    floats = folder / "floats"
    floats.mkdir()
    tensors = {name: value.bfloat16().clone() for name, value in source.state_dict().items()}
    if source.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, floats / "model.safetensors", {"format": "pt"})
    (floats / "config.json").write_text(json.dumps(config_of(source) | {"dtype": "bfloat16"}))
    for path in folder.glob("tokenizer*"):
        path.rename(floats / path.name)
    weightpath.quantize(floats, folder / "int8", scheme="int8")
    settings = json.loads((folder / "int8" / "config.json").read_text())["quantization_config"]
    weights = {}
    with safe_open(folder / "int8" / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            module, _, suffix = name.rpartition(".")
            if suffix == "weight_packed":
                _, k = file.get_tensor(f"{module}.weight_shape")
                codes = file.get_tensor(name).view(np.uint8)[:, :k].astype(np.float32) - 128
                weights[module] = codes * file.get_tensor(f"{module}.weight_scale")
    return Written(folder / "int8", folder / "int8", weights, settings)


def write_gguf(folder: Path, source: PreTrainedModel, asked: Asked, vocabulary: bool) -> Written:
    """F32 norms, F16 embedding and head, linears in blocks; q and k rows in the file's order."""
    heads = {
        "q_proj": source.config.num_attention_heads,
        "k_proj": source.config.num_key_value_heads,
    }
    architecture = source.config.model_type
    path, weights = folder / "model.gguf", {}
    writer = tiny_gguf.writer_of(path, source, architecture)
    for method, value in (tiny_gguf.byte_level() if vocabulary else {}).items():
        getattr(writer, method)(value)
    for name, parameter in source.state_dict().items():
        if name == "lm_head.weight" and source.config.tie_word_embeddings:
            continue
        values, place = parameter.float().numpy(), tiny_gguf.gguf_name(name)
        if values.ndim == 1:
            writer.add_tensor(place, values)
            continue
        if not is_linear(name, False):
            writer.add_tensor(place, values.astype(np.float16))
            continue
        module = name.removesuffix(".weight")
        kind = "Q8_0" if asked.kind.endswith("K") and values.shape[1] % 256 else asked.kind
        packed, weights[module] = gguf_blocks(values, kind)
        leaf = module.rpartition(".")[2]
        if architecture == "llama" and leaf in heads:
            packed = tiny_gguf.interleave(packed, heads[leaf])
        writer.add_tensor(place, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    tiny_gguf.finish(writer)
    return Written(folder, path, weights, {})
