"""compressed-tensors `pack-quantized`: the on-disk default, since vLLM and transformers read it.

For a linear called NAME with weight [N, K], b bits and nG groups a row:

    NAME.weight_packed      int32 [N, ceil(K*b/32)]    codes along K, unsigned (q + 2**(b-1))
    NAME.weight_scale       float [N, nG]              [N, 1] per channel
    NAME.weight_shape       int64 [2]                  N, K
    NAME.weight_zero_point  int32 [ceil(N*b/32), nG]   asymmetric only; zeros along N, unsigned

config.json carries `quantization_config`: groups of targets (class name, exact module name, or
`re:` pattern) with their scheme, and an `ignore` list. Source: the compressed-tensors package,
versions 0.15 to 0.20 (pack_quantized compressor, QuantizationConfig).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints import bitpack
from weightpath.checkpoints.writer import Planned
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


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
    """A QWeight as the tensors above. BadTensor for float minimums or a column order."""
    if qweight.minimums is not None or qweight.g_idx is not None:
        what = "float minimums" if qweight.minimums is not None else "a column order"
        raise BadTensor(
            name, f"{what} cannot be stored as {FORMAT}", "requantize it to integer zero points"
        )
    bits = qweight.scheme.bits
    tensors = {
        f"{name}.weight_packed": bitpack.pack(qweight.codes, bits),
        f"{name}.weight_scale": qweight.scales.contiguous(),
        f"{name}.weight_shape": torch.tensor(qweight.codes.shape, dtype=torch.int64),
    }
    if qweight.zeros is not None:
        columns = qweight.zeros.to(torch.uint8).t().contiguous()
        tensors[f"{name}.weight_zero_point"] = bitpack.pack(columns, bits).t().contiguous()
    return tensors


def from_tensors(name: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> QWeight:
    """A QWeight from the tensors above (keys are the bare suffixes), checked.

    BadTensor names what is missing or does not fit, with the numbers.
    """
    for suffix in SUFFIXES[:2] if scheme.symmetric else (*SUFFIXES[:2], "weight_zero_point"):
        if suffix not in tensors:
            raise BadTensor(f"{name}.{suffix}", "is missing", "fetch the checkpoint again")
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    if packed.dtype != torch.int32 or packed.ndim != 2:
        raise BadTensor(f"{name}.weight_packed", f"is {packed.dtype} {tuple(packed.shape)}, wanted int32 [N, words]",
                        "only pack-quantized linears are read")  # fmt: skip
    per_word = 32 // scheme.bits
    n, k = packed.shape[0], packed.shape[1] * per_word
    if "weight_shape" in tensors:
        stated = tensors["weight_shape"].reshape(-1).tolist()
        if len(stated) != 2:
            raise BadTensor(
                f"{name}.weight_shape",
                f"holds {len(stated)} numbers, wanted 2",
                "fetch the checkpoint again",
            )
        n, k = int(stated[0]), int(stated[1])
    if packed.shape[0] != n or packed.shape[1] != bitpack.words(k, scheme.bits):
        raise BadTensor(
            f"{name}.weight_packed",
            f"has shape {tuple(packed.shape)}, [{n}, {k}] at {scheme.bits} bits wants ({n}, {bitpack.words(k, scheme.bits)})",
            "the bits in config.json do not match the file",
        )
    zeros = None
    if not scheme.symmetric:
        stored, groups = tensors["weight_zero_point"], scales.shape[-1]
        wanted = (bitpack.words(n, scheme.bits), groups)
        if tuple(stored.shape) != wanted or stored.dtype != torch.int32:
            raise BadTensor(f"{name}.weight_zero_point", f"is {stored.dtype} {tuple(stored.shape)}, wanted int32 {wanted}",
                            "fetch the checkpoint again")  # fmt: skip
        zeros = (
            bitpack.unpack(stored.t().contiguous(), scheme.bits, n).t().contiguous().to(torch.int16)
        )
    g_idx = tensors.get("weight_g_idx")
    if g_idx is not None and bool((g_idx < 0).any()):
        g_idx = None
    codes = bitpack.unpack(packed, scheme.bits, k)
    return QWeight(scheme, codes, scales, zeros, g_idx=g_idx).check(name)


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

    An exact name or pattern wins over the class name `Linear`. BadCheckpoint names a format,
    a type or a strategy that is not integer groups or channels.
    """
    if config.get("format", FORMAT) not in (FORMAT, "mixed-precision"):
        raise BadCheckpoint(where, f"compressed-tensors format '{config.get('format')}' is not read",
                            f"this version reads {FORMAT}")  # fmt: skip
    ignore = list(config.get("ignore") or [])
    named: list[tuple[Sequence[str], Scheme]] = []
    for label, group in (config.get("config_groups") or {}).items():
        named.append((group.get("targets") or [], _scheme_of(group, f"{where}: {label}")))

    def find(name: str) -> Scheme | None:
        if any(_matches(target, name) for target in ignore):
            return None
        for targets, scheme in named:
            if any(_matches(target, name) for target in targets):
                return scheme
        return next((scheme for targets, scheme in named if "Linear" in targets), None)

    return find


def _matches(target: str, name: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name


def _scheme_of(group: Mapping[str, Any], where: str) -> Scheme:
    weights = group.get("weights") or {}
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "group" if size and size > 0 else "channel"
    if kind != "int" or strategy not in ("group", "channel"):
        raise BadCheckpoint(
            where,
            f"weights of type {kind}, strategy {strategy}",
            "integer groups or channels are read",
        )
    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise BadCheckpoint(
            where, f"strategy group with group_size {size}", "a positive group size is needed"
        )
    return Scheme(
        bits=weights.get("num_bits", 8),
        group_size=int(size) if strategy == "group" and size else PER_CHANNEL,
        symmetric=bool(weights.get("symmetric", True)),
    )
