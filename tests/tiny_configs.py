"""What each low-bit format's config says of a tiny checkpoint, in its writers' own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_linears import Asked

LEGACY = {
    "awq": "quant_config.json",
    "gptq": "quantize_config.json",
    "modelopt": "hf_quant_config.json",
}
"""The file beside config.json in which a method's older writers put their settings."""
INT4_PARTS = ["qdata", "scale", "zero_point"]


def awq(asked: Asked, version: str) -> dict[str, Any]:
    said = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": asked.group_size,
        "zero_point": not asked.symmetric,
        "version": version,
        "modules_to_not_convert": None,
    }
    return said | ({"backend": "llm-awq"} if version == "llm-awq" else {})


def gptq(asked: Asked, label: str) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": asked.bits,
        "group_size": asked.group_size,
        "desc_act": asked.ordered or asked.static_groups,
        "static_groups": asked.static_groups,
        "sym": asked.symmetric,
        "checkpoint_format": label,
        "lm_head": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "pack_dtype": str(asked.pack_dtype).removeprefix("torch."),
        **({"meta": {"quantizer": ["gptqmodel:7.3.4"]}} if asked.by_word else {}),
    }


def autoround(asked: Asked, packing: str) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": asked.bits,
        "group_size": asked.group_size,
        "sym": asked.symmetric,
        "data_type": "int",
        "packing_format": packing,
        "autoround_version": "0.14.2" if asked.by_word else "0.5.1",
        "block_name_to_quantize": "model.layers",
    }


def compressed_tensors(asked: Asked, form: str, ignore: list[str]) -> dict[str, Any]:
    channel = asked.group_size == -1
    weights = {
        "num_bits": asked.bits,
        "type": "int",
        "symmetric": asked.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else asked.group_size,
        "block_structure": None,
        "dynamic": False,
        "actorder": "group" if asked.ordered else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "version": "0.15.0",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def torchao(asked: Asked, kind: str) -> dict[str, Any]:
    named = "Int4WeightOnlyConfig" if kind == "Int4Tensor" else "Int8WeightOnlyConfig"
    data = {"group_size": asked.group_size if kind == "Int4Tensor" else None}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": named, "_version": 2, "_data": data}},
        "modules_to_not_convert": ["lm_head"],
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def torchao_entry(asked: Asked, kind: str, shape: tuple[int, int]) -> dict[str, Any]:
    """What the files' metadata says of one parameter."""
    named = str(asked.scale_dtype).removeprefix("torch.")
    dtype = {"_type": "torch.dtype", "_data": named}
    data: dict[str, Any] = {"block_size": [1, asked.size(shape[1])]}
    if kind == "Int4Tensor":
        data |= {"shape": list(shape), "activation_dtype": dtype}
    else:
        data |= {"dtype": dtype, "act_quant_kwargs": None}
    parts = INT4_PARTS if kind == "Int4Tensor" else INT4_PARTS[:2]
    return {"_type": kind, "_data": data, "_tensor_data_names": parts}


def modelopt(asked: Asked) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_AWQ",
        "group_size": asked.group_size,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }


def bitsandbytes(asked: Asked, four_bit: bool) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four_bit,
        "load_in_8bit": not four_bit,
        "bnb_4bit_quant_type": "nf4" if four_bit else "fp4",
        "bnb_4bit_use_double_quant": asked.nested,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": str(asked.scale_dtype).removeprefix("torch."),
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    }


def hqq(asked: Asked) -> dict[str, Any]:
    said = {
        "nbits": asked.bits,
        "channel_wise": True,
        "group_size": asked.group_size,
        "optimize": True,
        "round_zero": asked.whole_zeros,
        "axis": asked.axis,
        "view_as_float": False,
    }
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": said, "offload_meta": False},
        "skip_modules": ["lm_head"],
    }


def in_legacy_words(method: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings as a method's older writers put them in a file of their own."""
    if method == "awq":
        return {
            "zero_point": said["zero_point"],
            "q_group_size": said["group_size"],
            "w_bit": said["bits"],
            "version": str(said["version"]).upper(),
        }
    if method == "gptq":
        new = ("quant_method", "checkpoint_format", "pack_dtype")
        return {key: value for key, value in said.items() if key not in new}
    inner = {
        key: said[key] for key in ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
    }
    inner |= {"kv_cache_quant_algo": None, "exclude_modules": said["ignore"]}
    return {"producer": said["producer"], "quantization": inner}
