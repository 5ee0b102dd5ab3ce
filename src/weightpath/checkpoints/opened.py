"""A low-bit checkpoint recognised: which tensors make up each linear, and how to read one.

A format's opener gets a Source (the folder's config, tensor names and metadata) and gives an
Opened. Only headers, configs and, where they decide how codes are read, zero points are looked at
until `read` is called; `outline` says what a linear will be without unpacking its codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.checkpoints.shards import TensorInfo, read_json
from weightpath.checkpoints.store import SafetensorsCheckpoint
from weightpath.errors import BadTensor
from weightpath.scheme import Scheme

Parts = dict[str, dict[str, str]]
"""Module -> bare suffix -> the tensor's name."""

SIDE_FILES = ("quant_config.json", "quantize_config.json", "hf_quant_config.json")
"""Where AWQ, GPTQ and ModelOpt keep a config of their own beside, or instead of, config.json's."""


@dataclass(frozen=True)
class Outline:
    """A linear before its codes are read.

    scheme: of the integers as they will be read; None where only floats stand for it. shape: [N, K].
    scales: their dtype, or that of the floats. ordered: columns have a group order of their own.
    minimums: floats instead of whole zero points. scaled: activations are to be multiplied by column
    scales.
    """

    scheme: Scheme | None
    shape: tuple[int, int]
    scales: torch.dtype = torch.float16
    ordered: bool = False
    minimums: bool = False
    scaled: bool = False

    @property
    def plain(self) -> bool:
        """Whether codes, scales and whole zero points in column order are all there is to it."""
        return self.scheme is not None and not (self.ordered or self.minimums or self.scaled)


@dataclass(frozen=True)
class Opened:
    """A recognised format: its name, how it was known, every linear's parts, and its readers."""

    format: str
    how: str
    parts: Parts
    outline: Callable[[str], Outline]
    read: Callable[[str], ReadLinear]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What formats are recognised by. settings: the quantization config, {} where there is none,
    and `where` it was found; side_files: those of SIDE_FILES that are there; nested: whether
    config.json holds the settings in a section such as text_config; in_config: whether it does."""

    checkpoint: SafetensorsCheckpoint
    settings: dict[str, Any]
    where: str
    metadata: dict[str, str] = field(default_factory=dict)
    side_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    nested: bool = False
    in_config: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.checkpoint.tensors)

    def info(self, name: str) -> TensorInfo:
        return self.checkpoint.tensors[name]

    def tensors(self, parts: Mapping[str, str]) -> dict[str, Tensor]:
        """Mapped tensors of one linear by suffix; nothing is read until they are used."""
        return {suffix: self.checkpoint.read(name) for suffix, name in parts.items()}


def source_of(checkpoint: SafetensorsCheckpoint) -> Source:
    """The settings, wherever the folder keeps them: config.json at any depth, then SIDE_FILES."""
    folder = Path(checkpoint.where)
    folder = folder if folder.is_dir() else folder.parent
    sides = {name: read_json(folder / name) for name in SIDE_FILES if (folder / name).is_file()}
    found, place = _in_config(checkpoint.config, "config.json")
    in_config = bool(found)
    if not in_config and sides:
        place = next(iter(sides))
        found = sides[place]
    file, _, section = place.partition(": ")
    where = str(folder / file) + (f": {section}" if section else "")
    return Source(
        checkpoint, found, where, checkpoint.metadata, sides, bool(section), in_config
    )  # fmt: skip


def group_parts(names: Iterable[str], suffixes: Iterable[str], marks: Iterable[str]) -> Parts:
    """Tensors by module and suffix, of the modules that have one of the suffixes in `marks`."""
    wanted, parts = set(suffixes), Parts()
    for name in names:
        module, _, suffix = name.rpartition(".")
        if suffix in wanted:
            parts.setdefault(module, {})[suffix] = name
    chosen = set(marks)
    return {module: found for module, found in parts.items() if chosen & found.keys()}


def outline_of(name: str, read: ReadLinear) -> Outline:
    """The outline of a linear that has been read."""
    scaled = read.column_scales is not None
    if read.qweight is None:
        if read.floats is None:
            raise BadTensor(name, "has neither codes nor floats", "report this")
        n, k = read.floats.shape
        return Outline(None, (n, k), read.floats.dtype, scaled=scaled)
    qweight = read.qweight
    return Outline(
        qweight.scheme,
        (qweight.out_features, qweight.in_features),
        qweight.scales.dtype,
        qweight.g_idx is not None,
        qweight.minimums is not None,
        scaled,
    )


def _in_config(config: dict[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """The first quantization config in a config.json or its sections, and where: "file: section"."""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, dict) and found:
            return found, place
    for key, value in config.items():
        if isinstance(value, dict):
            found, inner = _in_config(value, f"{place}: {key}" if ":" not in place else place)
            if found:
                return found, inner
    return {}, place
