"""ModelOpt checkpoints of integer weights: INT4 AWQ with its pre-quant scales, and int8.

    y = (x * pre_quant_scale) @ w.T,   w[n, k] = weight_scale[n, g] * q[n, k],   g = k // G

For a linear called NAME with weight [N, K]:

    W4A16_AWQ  NAME.weight           uint8 [N/2, K]   byte (i, k): low nibble row 2i, high row
                                                      2i + 1, both two's complement
               NAME.weight_scale     float [N, nG]
               NAME.pre_quant_scale  float [K]        absent where a norm has taken it up
    W8A16, W8A8_SQ_PER_CHANNEL
               NAME.weight           int8 [N, K], weight_scale float [N], and the same

hf_quant_config.json says {"producer": {"name": "modelopt"}, "quantization": {"quant_algo",
"group_size", "has_zero_point", "pre_quant_scale", "exclude_modules": ["lm_head", "a.b*"]}}; with
MIXED_PRECISION, "quantized_layers" says it by module. config.json has the same keys flat, with
`ignore` and quant_method "modelopt", and may lack the group size, which the scales then tell.
Source: NVIDIA Model-Optimizer 0.47 (torch/export/quant_utils.py, convert_hf_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.read_linear import (
    CONFIG,
    FETCH,
    FLOATS,
    ReadLinear,
    column_scales,
    part,
)
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

METHOD = "modelopt"
INT4_AWQ = "W4A16_AWQ"
INT8 = ("W8A16", "W8A8_SQ_PER_CHANNEL")
MIXED = "MIXED_PRECISION"
READ = (INT4_AWQ, *INT8)
SUFFIXES = ("weight", "weight_scale", "pre_quant_scale", "input_scale")
_ACTIVATIONS = {"W8A8_SQ_PER_CHANNEL": "int8 activations"}


@dataclass(frozen=True)
class LayerSettings:
    """How one linear is quantized. group_size None: not stated, the scales tell.

    pre_quant_scale: whether the config says that linears have one.
    """

    algorithm: str
    group_size: int | None = None
    pre_quant_scale: bool = False


@dataclass(frozen=True)
class ModelOptSettings:
    """default: of every linear not excluded, None where layers are listed instead.

    layers: by module name. excluded: patterns with `*`, of modules that are float.
    """

    default: LayerSettings | None
    layers: Mapping[str, LayerSettings]
    excluded: tuple[str, ...]
    where: str

    def for_module(self, name: str) -> LayerSettings | None:
        """Settings of the linear `name`, None where it is float."""
        if name in self.layers:
            return self.layers[name]
        if self.default is None or any(fnmatchcase(name, pattern) for pattern in self.excluded):
            return None
        return self.default


def recognise(config: Mapping[str, Any]) -> str | None:
    """How a hf_quant_config.json, or a quantization_config, is known as ModelOpt's, or None."""
    if config.get("quant_method") == METHOD:
        return f"quant_method {METHOD}"
    producer = config.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == METHOD:
        return f"producer {METHOD}"
    return None


def settings(config: Mapping[str, Any], where: str = "hf_quant_config.json") -> ModelOptSettings:
    """Read hf_quant_config.json, or config.json's quantization_config; `where` names it.

    BadCheckpoint for an algorithm that is not of integer weights, for zero points (ModelOpt packs
    none), and for keys of the wrong kind.
    """
    section = config.get("quantization", config)
    if not isinstance(section, Mapping):
        raise BadCheckpoint(where, f"quantization is {section!r:.40}, wanted an object", FETCH)
    excluded = section.get("exclude_modules", section.get("ignore")) or []
    if not isinstance(excluded, list) or not all(isinstance(entry, str) for entry in excluded):
        raise BadCheckpoint(where, f"exclude_modules is {excluded!r:.40}, wanted names", FETCH)
    if section.get("quant_algo") != MIXED:
        group = _first_weights(section)
        return ModelOptSettings(_layer({**group, **section}, where), {}, tuple(excluded), where)
    listed = section.get("quantized_layers")
    if not isinstance(listed, Mapping) or not listed:
        raise BadCheckpoint(where, f"quant_algo {MIXED} without quantized_layers", FETCH)
    layers = {}
    for name, entry in listed.items():
        if not isinstance(entry, Mapping):
            raise BadCheckpoint(f"{where}: {name}", f"is {entry!r:.40}, wanted an object", FETCH)
        layers[name] = _layer(entry, f"{where}: {name}")
    return ModelOptSettings(None, layers, tuple(excluded), where)


def from_tensors(name: str, layer: LayerSettings, tensors: Mapping[str, Tensor]) -> ReadLinear:
    """A linear from its tensors (keys are the bare suffixes), checked. Exact and symmetric.

    column_scales is pre_quant_scale [K]: the checkpoint multiplies activations by it, so its
    weight is w[n, k] * pre_quant_scale[k]. BadTensor names what is missing or does not fit, with
    the numbers, before a code is unpacked.
    """
    if "weight_scale_2" in tensors:
        raise BadTensor(
            f"{name}.weight_scale_2",
            "is there: a second scale, of weights that pass through 8-bit or 4-bit floats",
            f"only {', '.join(READ)} are read",
        )
    qweight = (_int4 if layer.algorithm == INT4_AWQ else _int8)(name, layer, tensors)
    scales = column_scales(name, "pre_quant_scale", tensors, qweight.in_features)
    notes: tuple[str, ...] = ()
    if scales is not None:
        notes = (f"{name}: activations are multiplied by pre_quant_scale, kept as column scales",)
    elif layer.pre_quant_scale and "pre_quant_scale" not in tensors:
        notes = (f"{name}: stores no pre_quant_scale; taken as folded into the layer before it",)
    if layer.algorithm in _ACTIVATIONS:
        asked = _ACTIVATIONS[layer.algorithm]
        notes += (f"{name}: the file asks for {asked}; only the weight is read",)
    return ReadLinear(qweight.check(name), column_scales=scales, notes=notes)


def _int4(name: str, layer: LayerSettings, tensors: Mapping[str, Tensor]) -> QWeight:
    packed = part(name, "weight", tensors, (torch.uint8, torch.int8), (None, None))
    n, k = packed.shape[0] * 2, packed.shape[1]
    found = tensors.get("weight_scale")
    if found is not None and found.ndim == 2 and found.shape[0] * 2 == n:
        raise BadTensor(
            f"{name}.weight",
            f"has {n // 2} rows and weight_scale as many: packed along K, by mtq.compress",
            "export it from the model before it was compressed",
        )
    scales = part(name, "weight_scale", tensors, FLOATS, (n, None), CONFIG)
    groups = scales.shape[1]
    size = layer.group_size or (k // groups if groups <= k else 1)
    if size * groups != k:
        raise BadTensor(
            f"{name}.weight_scale",
            f"has {groups} groups a row; in_features {k} at group size {size} has {k / size:g}",
            CONFIG,
        )
    pairs = packed.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=1).view(n, k) ^ 8
    scheme = Scheme(4, PER_CHANNEL if groups == 1 else size)
    return QWeight(scheme, codes, scales.contiguous())


def _int8(name: str, layer: LayerSettings, tensors: Mapping[str, Tensor]) -> QWeight:
    weight = part(name, "weight", tensors, (torch.int8,), (None, None))
    scales = part(name, "weight_scale", tensors, FLOATS, (weight.shape[0],))
    codes = weight.contiguous().view(torch.uint8) ^ 128
    return QWeight(Scheme(8), codes, scales.contiguous().view(-1, 1))


def _layer(entry: Mapping[str, Any], where: str) -> LayerSettings:
    algorithm, size = entry.get("quant_algo"), entry.get("group_size")
    if algorithm not in READ:
        raise BadCheckpoint(
            where, f"quant_algo {algorithm!r:.40} is not read", f"{', '.join(READ)} are read"
        )
    if size is not None and (type(size) is not int or size < 0):
        raise BadCheckpoint(where, f"group_size is {size!r:.20}", "a whole number is needed")
    if entry.get("has_zero_point"):
        raise BadCheckpoint(
            where, "has_zero_point is true, but ModelOpt's packing has no place for zeros", FETCH
        )
    return LayerSettings(algorithm, size or None, bool(entry.get("pre_quant_scale")))


def _first_weights(section: Mapping[str, Any]) -> dict[str, Any]:
    """The group size under config_groups of a flat config, where one is."""
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            return {"group_size": weights.get("group_size")}
    return {}
