"""Bits and groups from shapes alone, for a folder whose quantization_config was lost.

    compressed-tensors  weight_packed [N, W], weight_shape (N, K), weight_scale [N, nG]:
                        b = 32 W / K where that is whole, G = K / nG, asymmetric where there are zeros
    AWQ gemm            qweight [K, N/8], scales [nG, N]:  G = K / nG
    GPTQ                qweight [K b/32, N], qzeros [nG, N b/32], scales [nG, N]: b from qzeros

All packed linears must tell the same; GPTQ's zero convention is then decided by the zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from weightpath.checkpoints import compressed_tensors
from weightpath.checkpoints.opened import Source, group_parts

Told = tuple[str, int, int, bool]
"""Format, bits, group size and symmetry that one linear's shapes tell."""


def inferred_settings(source: Source) -> tuple[dict[str, Any], str] | None:
    """A quantization config that the tensors leave no doubt about, and how it was inferred."""
    packed = group_parts(source.names, compressed_tensors.SUFFIXES, ("weight_packed",))
    words = group_parts(source.names, ("qweight", "qzeros", "scales", "g_idx"), ("qweight",))
    told: set[Told | None] = set()
    for own in packed.values():
        told.add(_compressed(source, own))
    for own in words.values():
        told.add(_awq_or_gptq(source, own))
    if len(told) != 1:
        return None
    only = told.pop()
    if only is None:
        return None
    kind, bits, size, symmetric = only
    count = len(packed) or len(words)
    how = f"the shapes of {count} packed linears are {kind}'s at {bits} bits in groups of {size}"
    if kind == "AWQ":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "zero_point": True}, how
    if kind == "GPTQ":
        return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}, how
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size,
               "strategy": "group"}  # fmt: skip
    group = {"targets": ["Linear", *packed], "weights": weights}
    return {
        "quant_method": compressed_tensors.METHOD,
        "format": compressed_tensors.FORMAT,
        "config_groups": {"group_0": group},
        "ignore": [],
    }, how


def _compressed(source: Source, own: dict[str, str]) -> Told | None:
    if not {"weight_packed", "weight_scale", "weight_shape"} <= own.keys():
        return None
    shape = source.checkpoint.read(own["weight_shape"])
    words, scales = (source.info(own[part]).shape for part in ("weight_packed", "weight_scale"))
    if shape.numel() != 2 or shape.dtype not in (torch.int64, torch.int32):
        return None
    k = int(shape.reshape(-1)[1])
    if len(words) != 2 or len(scales) != 2 or k < 1 or not scales[1]:
        return None
    bits, rest = divmod(words[1] * 32, k)
    if rest or not 2 <= bits <= 8 or k % scales[1]:
        return None
    if bits == 8 and not _fills_words(source.checkpoint.read(own["weight_packed"])):
        return None  # padded words of four 7-bit codes are as many
    return "compressed-tensors", bits, k // scales[1], "weight_zero_point" not in own


def _fills_words(words: torch.Tensor) -> bool:
    """Whether any of the four highest bits of a word is set, which four 7-bit codes leave empty."""
    return words.dtype == torch.int32 and bool((words >> 28 != 0).any())


def _awq_or_gptq(source: Source, own: dict[str, str]) -> Told | None:
    if not {"qweight", "qzeros", "scales"} <= own.keys():
        return None
    infos = [source.info(own[part]) for part in ("qweight", "qzeros", "scales")]
    if any(len(info.shape) != 2 or 0 in info.shape for info in infos):
        return None
    if infos[0].dtype != torch.int32 or infos[1].dtype != torch.int32:
        return None
    (rows, columns), (_, zero_words), (groups, n) = (info.shape for info in infos)
    if columns * 8 == n and zero_words == columns and rows % groups == 0 and "g_idx" not in own:
        return "AWQ", 4, rows // groups, False
    bits, rest = divmod(zero_words * 32, n)
    if columns != n or rest or not 2 <= bits <= 8 or rows * 32 % bits:
        return None
    k = rows * 32 // bits
    return ("GPTQ", bits, k // groups, False) if k % groups == 0 else None
