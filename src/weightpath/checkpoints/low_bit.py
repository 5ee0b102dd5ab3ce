"""A low-bit checkpoint opened for reading: which linears it holds, and each as a QWeight.

`weightpath.json`, where this project wrote the folder, records how it was made; nothing in it is
needed to read the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from weightpath.checkpoints import compressed_tensors
from weightpath.checkpoints.shards import TensorInfo, read_json
from weightpath.checkpoints.store import SafetensorsCheckpoint, open_checkpoint, quantization_method
from weightpath.errors import BadCheckpoint
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

MANIFEST = "weightpath.json"


class LowBitCheckpoint:
    """A compressed-tensors pack-quantized folder; `linears` maps a module's name to its scheme."""

    format = f"{compressed_tensors.METHOD} {compressed_tensors.FORMAT}"

    def __init__(self, source: SafetensorsCheckpoint, settings: dict[str, Any]) -> None:
        self.source, self.settings = source, settings
        self.where, self.config = source.where, source.config
        find = compressed_tensors.scheme_finder(settings, self.where)
        self.parts: dict[str, list[str]] = {}
        self.floats: dict[str, TensorInfo] = {}
        for name, info in source.tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf in compressed_tensors.SUFFIXES:
                self.parts.setdefault(module, []).append(leaf)
            else:
                self.floats[name] = info
        self.linears: dict[str, Scheme] = {}
        for module in self.parts:
            scheme = find(module)
            if scheme is None:
                raise BadCheckpoint(self.where, f"{module} is packed but its quantization_config ignores it",
                                    "the config is another checkpoint's: fetch it again")  # fmt: skip
            self.linears[module] = scheme
        path = Path(self.where) / MANIFEST
        self.manifest: dict[str, Any] = read_json(path) if path.is_file() else {}

    @property
    def companions(self) -> tuple[Path, ...]:
        return self.source.companions

    def read_qweight(self, module: str) -> QWeight:
        """One linear's integers, checked. BadTensor names what is missing or damaged."""
        tensors = {leaf: self.source.read(f"{module}.{leaf}") for leaf in self.parts[module]}
        return compressed_tensors.from_tensors(module, self.linears[module], tensors)

    def read_floats(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor that is not part of a low-bit linear."""
        for name in self.floats:
            yield name, self.source.read(name)

    def stored_bytes(self, module: str) -> int:
        """Bytes on disk of a linear's parts."""
        return sum(self.source.tensors[f"{module}.{leaf}"].nbytes for leaf in self.parts[module])


def open_low_bit(folder: Path) -> LowBitCheckpoint:
    """Open a low-bit folder. BadCheckpoint for a float one, or a format that is not read."""
    source = open_checkpoint(folder, float_only=False)
    settings = source.config.get("quantization_config")
    method = quantization_method(source.config, source.tensors)
    if method is None:
        raise BadCheckpoint(
            str(folder), "holds float weights", "quantize it first: weightpath quantize"
        )
    if not isinstance(settings, dict) or settings.get("quant_method") != compressed_tensors.METHOD:
        raise BadCheckpoint(str(folder), f"is quantized by {method}, which is not read",
                            f"this version reads {LowBitCheckpoint.format}")  # fmt: skip
    return LowBitCheckpoint(source, settings)
