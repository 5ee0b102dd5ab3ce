"""A low-bit checkpoint opened for reading: which linears it holds, and each as integers.

Any format that detect.py knows, or a GGUF file. Opening reads headers and configs; `linears` and
`read_linear` look at tensors, and name the first that is missing or does not fit. `weightpath.json`,
where this project wrote the folder, records how it was made; nothing in it is needed to read the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.detect import detect
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.opened import Opened, Outline, source_of
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.checkpoints.shards import read_json
from weightpath.checkpoints.store import (
    Checkpoint,
    gguf_at,
    open_checkpoint,
    quantization_method,
)
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight

MANIFEST = "weightpath.json"


class LowBitCheckpoint:
    """A low-bit folder or GGUF file. parts: module -> suffix -> tensor; floats: all other tensors.

    format and how: its name, and by what it was recognised. settings: the quantization config as
    found; nested: whether in a section of config.json; config_missing: whether config.json has none.
    """

    def __init__(
        self,
        source: Checkpoint,
        opened: Opened,
        settings: dict[str, Any],
        nested: bool = False,
        config_missing: bool = False,
    ) -> None:
        self.source, self.settings, self.nested = source, settings, nested
        self.config_missing = config_missing
        self.where, self.config = source.where, source.config
        self.format, self.how, self.notes = opened.format, opened.how, opened.notes
        self.parts = opened.parts
        self._opened = opened
        taken = {name for own in opened.parts.values() for name in own.values()}
        self.floats = {name: info for name, info in source.tensors.items() if name not in taken}
        path = Path(self.where) / MANIFEST
        self.manifest: dict[str, Any] = read_json(path) if path.is_file() else {}

    @property
    def companions(self) -> tuple[Path, ...]:
        return self.source.companions

    @cached_property
    def linears(self) -> dict[str, Outline]:
        """Every linear's outline. BadTensor for the first one whose tensors do not add up."""
        return {module: self.outline(module) for module in self.parts}

    def outline(self, module: str) -> Outline:
        """One linear's scheme and shape, before its codes are read."""
        return self._opened.outline(module)

    def read_linear(self, module: str) -> ReadLinear:
        """One linear, checked. BadTensor names what is missing or damaged."""
        return self._opened.read(module)

    def read_qweight(self, module: str) -> QWeight:
        """One linear's integers. BadTensor where it is not only that."""
        read = self.read_linear(module)
        if read.qweight is None or read.column_scales is not None:
            what = "floats" if read.qweight is None else "codes with column scales"
            raise BadTensor(
                module, f"is {what} in {self.format}", "convert it, which says the loss"
            )
        return read.qweight

    def read_floats(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor that is not part of a low-bit linear."""
        for name in self.floats:
            yield name, self.source.read(name)

    def stored_bytes(self, module: str) -> int:
        """Bytes on disk of a linear's parts."""
        if isinstance(self.source, GGUFCheckpoint):
            return self.source.stored_bytes(module)
        return sum(self.source.tensors[name].nbytes for name in self.parts[module].values())


def open_low_bit(folder: Path) -> LowBitCheckpoint:
    """Open a low-bit folder or GGUF file. BadCheckpoint for a float one, or an unknown format."""
    folder = Path(folder)
    gguf = gguf_at(folder)
    if gguf is not None:
        return _open_gguf(gguf)
    checkpoint = open_checkpoint(folder, float_only=False)
    source = source_of(checkpoint)
    if not source.settings and quantization_method({}, checkpoint.tensors) is None:
        raise BadCheckpoint(
            str(folder), "holds float weights", "quantize it first: weightpath quantize"
        )
    missing = not source.in_config
    return LowBitCheckpoint(checkpoint, detect(source), source.settings, source.nested, missing)


def _open_gguf(path: Path) -> LowBitCheckpoint:
    checkpoint = GGUFCheckpoint(path)
    linears = checkpoint.linears
    if not linears:
        raise BadCheckpoint(
            str(path), "holds float weights", "quantize it first: weightpath quantize"
        )
    kinds = sorted({kind for kind, _ in linears.values()})

    def outline(module: str) -> Outline:
        kind, scheme = linears[module]
        n, k = checkpoint.tensors[f"{module}.weight"].shape
        scales = torch.float32 if kind.endswith("_K") else torch.float16
        return Outline(scheme, (n, k), scales, minimums=not scheme.symmetric)

    parts = {module: {"weight": f"{module}.weight"} for module in linears}
    opened = Opened(
        f"GGUF {', '.join(kinds)}",
        "the file's magic number",
        parts,
        outline,
        lambda module: ReadLinear(checkpoint.read_qweight(module)),
    )
    return LowBitCheckpoint(checkpoint, opened, {})
