"""AutoRound: which layout its files have, and the bits, group size and symmetry of every linear.

    quant_method "auto-round", packing_format:
      auto_round:auto_gptq                 GPTQ, zeros less one (v1), no g_idx
      auto_round, auto_round:gptqmodel     GPTQ, zeros as they are (v2)
      auto_round:auto_awq                  AWQ gemm
      auto_round:llm_compressor            compressed-tensors

`extra_config` maps a linear's name, or a pattern searched in it, to what differs; 16 bits and more
are float. `block_name_to_quantize` bounds the rest to these blocks. Symmetric scales may be
negative. Before 0.5 the packing stood under `backend`, with quant_method "intel/auto-round".
Source: auto-round 0.3 to 0.14 (export_to_autoround/export.py, inference/convert_model.py), vLLM
(INCConfig.get_layer_config).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightpath.checkpoints.gptq_config import GptqSettings, rule_pattern, shown
from weightpath.errors import BadCheckpoint
from weightpath.scheme import PER_CHANNEL, Scheme

METHODS = ("auto-round", "auto_round", "intel/auto-round")
Layout = Literal["gptq", "gptq_v2", "awq", "compressed-tensors"]
_PACKINGS: dict[str, Layout] = {
    "auto": "gptq", "auto_gptq": "gptq", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2", "auto_round:exllamav2": "gptq_v2",
    "auto_round:triton": "gptq_v2", "auto_round:tritonv2": "gptq_v2",
    "auto_awq": "awq", "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
    "auto_round:llm_compressor": "compressed-tensors",
}  # fmt: skip
_INTEGERS = ("int", "int_sym", "int_asym")
_SIGNS = frozenset("*+?^$()[]{}|\\")  # a key with one of these is a pattern (vLLM's rule)


@dataclass(frozen=True)
class LayerSettings:
    """Bits, group size (-1: one group a row) and stated symmetry of one linear."""

    bits: int
    group_size: int
    sym: bool = True


@dataclass(frozen=True)
class AutoRoundSettings:
    """A file's layout and what it says of each linear. notes: what a reader assumed.

    layout: "gptq" and "gptq_v2" are what `gptq.from_tensors` reads as v1 and v2, "awq" is the gemm
    layout. blocks: name prefixes that `defaults` hold for; empty where all are.
    """

    layout: Layout
    defaults: LayerSettings
    named: Mapping[str, LayerSettings | None]
    patterns: tuple[tuple[re.Pattern[str], LayerSettings | None], ...]
    blocks: tuple[str, ...]
    version: str
    notes: tuple[str, ...]
    where: str

    def for_module(self, name: str) -> LayerSettings | None:
        """Settings of the linear `name`, None where it is float: its own, else the first pattern
        found in its name, else the defaults if it stands in a listed block (never a head)."""
        if name in self.named:
            return self.named[name]
        for pattern, layer in self.patterns:
            if pattern.search(name):
                return layer
        if self.blocks:
            return self.defaults if name.startswith(self.blocks) else None
        return None if name.rpartition(".")[2] == "lm_head" else self.defaults

    def scheme(self, name: str) -> Scheme | None:
        """The Scheme stated for the linear `name`, or None where it is float."""
        layer = self.for_module(name)
        return None if layer is None else Scheme(layer.bits, layer.group_size, layer.sym)

    def gptq(self, name: str | None = None) -> GptqSettings | None:
        """What `gptq.from_tensors` needs for the linear `name` (or the defaults), None if float.

        BadCheckpoint where the layout is not GPTQ's.
        """
        if self.layout not in ("gptq", "gptq_v2"):
            raise BadCheckpoint(
                self.where, f"its layout is {self.layout}, not GPTQ", f"read it as {self.layout}"
            )
        layer = self.defaults if name is None else self.for_module(name)
        if layer is None:
            return None
        return GptqSettings(
            bits=layer.bits,
            group_size=layer.group_size,
            sym=layer.sym,
            checkpoint_format=self.layout,
            zeros_by_word=self.layout == "gptq" and _release(self.version) >= (0, 6),
            notes=self.notes,
            where=self.where,
        )


def settings(config: Mapping[str, Any], where: str = "quantization_config") -> AutoRoundSettings:
    """The settings in a quantization_config of AutoRound; `where` names the file in messages.

    BadCheckpoint names what is not read: another method, a packing of floating-point or
    kernel-layout weights, quantized activations, rotations.
    """
    method = config.get("quant_method")
    if method not in METHODS:
        raise BadCheckpoint(
            where, f"quant_method {shown(method)} is not AutoRound's", "read it as that method"
        )
    notes: list[str] = []
    layout = _layout(config, where, notes)
    kind = config.get("data_type") or "int"
    if kind not in _INTEGERS:
        raise BadCheckpoint(
            where, f"data_type {shown(kind)} is not read", f"{', '.join(_INTEGERS)} are"
        )
    act_bits = config.get("act_bits")
    if act_bits is not None and not (isinstance(act_bits, int) and act_bits >= 16):
        raise BadCheckpoint(
            where, f"act_bits is {shown(act_bits)}: its activations are quantized", "16 is read"
        )
    if config.get("rotation_config"):
        raise BadCheckpoint(
            where,
            "rotation_config: its activations are rotated as it runs, which is not read",
            "fetch a checkpoint without rotations",
        )
    if "sym" not in config:
        notes.append("sym is missing: taken as true; the stored zeros decide")
    defaults = _layer(config, None, where)
    if defaults is None:
        raise BadCheckpoint(where, f"bits is {shown(config.get('bits'))}", "2 to 8 are read")
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise BadCheckpoint(where, "extra_config is no object", "write names with their settings")
    named: dict[str, LayerSettings | None] = {}
    patterns: list[tuple[re.Pattern[str], LayerSettings | None]] = []
    for key, value in extra.items():
        if not isinstance(value, Mapping):
            raise BadCheckpoint(
                where, f"extra_config: {shown(key)} holds no object", "write its settings"
            )
        if not value:
            continue
        layer = _layer(value, defaults, f"{where}: extra_config {shown(key)}")
        if _SIGNS.isdisjoint(key):
            named[key] = layer
        else:
            patterns.append((rule_pattern(key, where), layer))
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
    return AutoRoundSettings(
        layout=layout,
        defaults=defaults,
        named=named,
        patterns=tuple(patterns),
        blocks=tuple(dict.fromkeys(_names(blocks, where))),
        version=str(config.get("autoround_version") or ""),
        notes=tuple(notes),
        where=where,
    )


def _layout(config: Mapping[str, Any], where: str, notes: list[str]) -> Layout:
    """The layout of packing_format, or of an old `backend` such as auto_round:gptq:exllamav2."""
    packing, old = config.get("packing_format"), config.get("backend")
    if packing is None and str(old).startswith(("auto_round", "autoround", "auto_gptq")):
        packing = old
        notes.append(f"packing_format is missing: taken from backend {shown(old)}")
    elif packing is None:
        packing = "auto_round:auto_gptq"
        notes.append(f"packing_format is missing: taken as {packing}, as AutoRound and vLLM do")
    maker, *kind = str(packing).replace("autoround", "auto_round").split(":")
    name = f"{maker}:{kind[0]}" if maker == "auto_round" and kind else maker
    if name not in _PACKINGS:
        raise BadCheckpoint(
            where, f"packing_format {shown(packing)} is not read", f"{', '.join(_PACKINGS)} are"
        )
    return _PACKINGS[name]


def _layer(
    values: Mapping[str, Any], defaults: LayerSettings | None, where: str
) -> LayerSettings | None:
    """One linear's settings over the defaults, or None where it is left at 16 bits or more."""
    bits = values.get("bits", defaults.bits if defaults else None)
    size = values.get("group_size", defaults.group_size if defaults else None)
    sym = values.get("sym", defaults.sym if defaults else True)
    if isinstance(bits, int) and bits >= 16:
        return None
    kind = values.get("data_type") or "int"
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise BadCheckpoint(where, f"bits is {shown(bits)}", "2 to 8, or 16 for float, are read")
    if isinstance(size, bool) or not isinstance(size, int) or not (size > 0 or size == PER_CHANNEL):
        raise BadCheckpoint(
            where, f"group_size is {shown(size)}", "-1 or a positive number is read"
        )
    if not isinstance(sym, bool | None) or kind not in _INTEGERS:
        raise BadCheckpoint(
            where,
            f"sym is {shown(sym)}, data_type {shown(kind)}",
            "true or false, and int, are read",
        )
    return LayerSettings(bits, size, True if sym is None else sym)


def _names(blocks: object, where: str) -> list[str]:
    """Block names from a text with commas, or from lists of them."""
    names, left = [], [blocks]
    while left:
        block = left.pop(0)
        if isinstance(block, str):
            names.extend(name.strip() for name in block.split(",") if name.strip())
        elif isinstance(block, list | tuple):
            left[:0] = block
        else:
            raise BadCheckpoint(
                where, f"block_name_to_quantize is {shown(block)}", "write block names"
            )
    return names


def _release(version: str) -> tuple[int, ...]:
    """(0, 14) of "0.14.2"; () where there is none."""
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version)[:2])
