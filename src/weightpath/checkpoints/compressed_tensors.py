"""compressed-tensors `pack-quantized`: the on-disk default, since vLLM and transformers read it.

For a linear called NAME with weight [N, K], b bits and nG groups a row:

    NAME.weight_packed      int32 [N, ceil(K*b/32)]    codes along K, unsigned (q + 2**(b-1))
    NAME.weight_scale       float [N, nG]              [N, 1] per channel
    NAME.weight_shape       int64 [2]                  N, K
    NAME.weight_zero_point  int32 [ceil(N*b/32), nG]   asymmetric only; zeros along N, unsigned

Reading these, and int-quantized, is in compressed_tensors_read.py.

config.json carries `quantization_config`: groups of targets (class name, exact module name, or
`re:` pattern) with their scheme, and an `ignore` list. Source: the compressed-tensors package,
versions 0.15 to 0.20 (pack_quantized compressor, QuantizationConfig).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints import bitpack
from weightpath.checkpoints.compressed_tensors_read import from_tensors as from_tensors
from weightpath.checkpoints.gptq_config import rule_pattern
from weightpath.checkpoints.writer import Planned
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
INT_FORMATS = ("int-quantized", "naive-quantized")
"""Formats whose integer weights are int8 [N, K] under the name `weight`."""
_PATTERN = "re:"
_AGAIN = "the config is damaged: fetch config.json again"
SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
RUN_TIME_SUFFIXES = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""What a linear stores for quantized activations."""
INT_SUFFIXES = ("weight", "weight_scale", "weight_zero_point")
"""Parts of a linear in one of INT_FORMATS, which from_tensors reads too."""


def planned(
    name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[Planned, ...]:
    """The tensors that a linear [N, K] of `scheme` becomes, before its codes are known."""
    n, k = shape
    groups = scheme.groups(k)
    parts = [
        Planned(f"{name}.weight_packed", torch.int32, (n, bitpack.words(k, scheme.bits))),
        Planned(f"{name}.weight_scale", scale_dtype, (n, groups)),
        Planned(f"{name}.weight_shape", torch.int64, (2,)),
    ]
    if not scheme.symmetric:
        parts.append(
            Planned(
                f"{name}.weight_zero_point", torch.int32, (bitpack.words(n, scheme.bits), groups)
            )
        )
    return tuple(parts)


def to_tensors(name: str, qweight: QWeight) -> dict[str, Tensor]:
    """A QWeight as the tensors above.

    BadTensor for float minimums, a column order, and codes or zeros that do not fit their bits.
    """
    if qweight.minimums is not None or qweight.g_idx is not None:
        what = "float minimums" if qweight.minimums is not None else "a column order"
        raise BadTensor(
            name, f"{what} cannot be stored as {FORMAT}", "requantize it to integer zero points"
        )
    qweight.check(name)
    bits, zeros = qweight.scheme.bits, qweight.zeros_as_codes(name)
    tensors = {
        f"{name}.weight_packed": bitpack.pack(qweight.codes, bits),
        f"{name}.weight_scale": qweight.scales.contiguous(),
        f"{name}.weight_shape": torch.tensor(qweight.codes.shape, dtype=torch.int64),
    }
    if zeros is not None:
        columns = bitpack.pack(zeros.t().contiguous(), bits)
        tensors[f"{name}.weight_zero_point"] = columns.t().contiguous()
    return tensors


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` for linears name -> scheme and the names left float.

    The commonest scheme is the group of class `Linear`; linears of another one are named. A head
    is always named, since a vLLM head is not of class Linear.
    """
    counts: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        counts.setdefault(scheme.with_activations(16), []).append(name)
    ordered = sorted(counts.items(), key=lambda item: -len(item[1]))
    groups: dict[str, Any] = {}
    for index, (scheme, names) in enumerate(ordered):
        heads = [name for name in names if "." not in name or name.endswith("lm_head")]
        groups[f"group_{index}"] = {
            "targets": ["Linear", *heads] if index == 0 else names,
            "weights": _weights(scheme),
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    per_channel = scheme.group_size == PER_CHANNEL
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if per_channel else "group",
        "group_size": None if per_channel else scheme.group_size,
        "dynamic": False,
    }


def scheme_finder(config: Mapping[str, Any], where: str) -> Callable[[str], Scheme | None]:
    """From a quantization_config, the function module name -> Scheme, or None where ignored.

    As the package does: an exact name wins over a pattern, a pattern over the class name `Linear`;
    of several patterns the first in the alphabet. BadCheckpoint names a format, a type or a
    strategy that is not integer groups or channels, and a config that is not one.
    """
    form = config.get("format", FORMAT)
    if form not in (FORMAT, *INT_FORMATS, "mixed-precision"):
        raise BadCheckpoint(where, f"compressed-tensors format '{form}' is not read",
                            f"this version reads {FORMAT} and {INT_FORMATS[0]}")  # fmt: skip
    ignore = _targets(config.get("ignore") or [], f"{where}: ignore")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise BadCheckpoint(
            where, f"config_groups is a {type(groups).__name__}, wanted an object", _AGAIN
        )
    schemes: dict[str, Scheme] = {}
    for label, group in groups.items():
        place = f"{where}: {label}"
        if not isinstance(group, Mapping):
            raise BadCheckpoint(place, f"is a {type(group).__name__}, wanted an object", _AGAIN)
        if group.get("weights") is None:  # activations alone, of an attention say
            continue
        scheme = _scheme_of(group, place, (group.get("format") or form) in INT_FORMATS)
        schemes |= dict.fromkeys(_targets(group.get("targets") or [], place), scheme)
    ordered = sorted(schemes, key=lambda target: (target.startswith("re:"), target))

    def find(name: str) -> Scheme | None:
        if any(_matches(target, name) or target == "Linear" for target in ignore):
            return None
        for target in ordered:
            if _matches(target, name):
                return schemes[target]
        return schemes.get("Linear")

    return find


def _targets(values: Any, where: str) -> list[str]:
    """A list of names and `re:` patterns, checked."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise BadCheckpoint(where, f"targets are {values!r:.60}, wanted a list of names", _AGAIN)
    for value in values:
        if value.startswith(_PATTERN):
            rule_pattern(value.removeprefix(_PATTERN), where)
    return values


def _matches(target: str, name: str) -> bool:
    if target.startswith(_PATTERN):
        return bool(re.match(target.removeprefix(_PATTERN), name))
    return target == name


def _scheme_of(group: Mapping[str, Any], where: str, unpacked: bool) -> Scheme:
    """A group's scheme. unpacked: stored as int8, where one scale for all is read as one a row."""
    weights = group["weights"]
    if not isinstance(weights, Mapping):
        raise BadCheckpoint(
            where, f"weights is a {type(weights).__name__}, wanted an object", _AGAIN
        )
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    if any(type(value) not in (int, type(None)) for value in (bits, size)) or bits is None:
        raise BadCheckpoint(
            where, f"num_bits {bits!r:.20}, group_size {size!r:.20}", "whole numbers are needed"
        )
    if strategy is None:
        strategy = "group" if size and size > 0 else "channel"
    if unpacked and strategy == "tensor":
        strategy = "channel"
    if kind != "int" or strategy not in ("group", "channel"):
        raise BadCheckpoint(
            where,
            f"weights of type {kind}, strategy {strategy}",
            "integer groups or channels are read",
        )
    if strategy == "group" and (size is None or size < 1):
        raise BadCheckpoint(
            where, f"strategy group with group_size {size}", "a positive group size is needed"
        )
    if not 2 <= bits <= 8:
        raise BadCheckpoint(where, f"weights of {bits} bits", "2 to 8 bits are read")
    return Scheme(
        bits=bits,
        group_size=size if strategy == "group" and size else PER_CHANNEL,
        symmetric=bool(weights.get("symmetric", True)),
    )
