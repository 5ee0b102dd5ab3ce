"""The GGUF container: metadata, the table of tensors, and where each tensor's bytes lie.

    "GGUF" | u32 version | u64 tensors | u64 pairs | pairs: key, type, value
    | table: name, u32 dimensions, u64 sizes (fastest first), u32 type, u64 offset
    | padding to general.alignment (32) | data

Everything is little-endian; strings are a u64 length and UTF-8. Versions 2 and 3 share this layout.
The file is hostile input: every length is checked against the file before it is used, so a short or
damaged file is one line with the tensor and the numbers. Blocks of K values lie along a row, so a
row of K values is K / block size whole blocks.
Source: the GGUF description in ggml; block sizes from gguf-py's constants (0.19).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from weightpath.errors import BadCheckpoint

MAGIC = b"GGUF"
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
MEND = "the file is damaged or cut short: fetch it again"

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: shape in torch order (rows first), type name, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file, mapped: its metadata as plain values and its tensors by GGUF name."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.ndarray  # the whole file as uint8, mapped copy-on-write

    def rows(self, name: str) -> np.ndarray:
        """A tensor's bytes, [rows, bytes a row], mapped. A vector is one row."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape[:-1])
        flat = self.data[tensor.offset : tensor.offset + tensor.nbytes]
        return flat.reshape(count, tensor.nbytes // count if count else 0)


def read_gguf(path: Path) -> GGUFFile:
    """Parse a GGUF file's metadata and tensor table; no tensor data is read.

    Errors: BadCheckpoint for a file that is not GGUF, cut short, big-endian, of another version,
    one part of several, or holding a tensor of a type that is not read here (named, with the tensor).
    """
    where = str(path)
    if not path.is_file():
        raise BadCheckpoint(where, "does not exist", "give the path of a .gguf file")
    if path.stat().st_size < 24:
        raise BadCheckpoint(where, f"has {path.stat().st_size} bytes, wanted at least 24", MEND)
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
    cursor = _Cursor(data, where)
    if cursor.take(4, "the magic") != MAGIC:
        raise BadCheckpoint(where, "does not start with GGUF", "give a .gguf file")
    version = cursor.number("I", "the version")
    if version & 0xFFFF == 0:
        raise BadCheckpoint(
            where,
            f"is a big-endian GGUF (version reads as {version:#x})",
            "convert it to little-endian with gguf-convert-endian from the gguf package",
        )
    if version not in (2, 3):
        raise BadCheckpoint(
            where, f"is GGUF version {version}; versions 2 and 3 are read", "convert it again"
        )
    tensor_count = cursor.count(24, "the number of tensors")
    pair_count = cursor.count(12, "the number of metadata pairs")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise BadCheckpoint(where, f"metadata key {key} is given twice", MEND)
        metadata[key] = cursor.value(key)
    if (parts := metadata.get("split.count", 0)) not in (0, 1):
        raise BadCheckpoint(
            where, f"is one of {parts!r:.20} parts", "join them with llama-gguf-split --merge"
        )
    table = [_table_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise BadCheckpoint(where, f"alignment is {alignment!r:.20}, wanted a power of two", MEND)
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in table:
        if name in tensors:
            raise BadCheckpoint(where, f"tensor {name} is given twice", MEND)
        tensors[name] = _placed(where, name, shape, kind, start + offset, data.size)
    return GGUFFile(path, version, metadata, tensors, data)


class _Cursor:
    """Reads the head of a file from front to back, never past its end."""

    def __init__(self, data: np.ndarray, where: str) -> None:
        self.data, self.where, self.position = data.data, where, 0

    def take(self, size: int, what: str) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise BadCheckpoint(
                self.where, f"ends at byte {len(self.data)}, {what} needs bytes up to {end}", MEND
            )
        taken = bytes(self.data[self.position : end])
        self.position = end
        return taken

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, least: int, what: str) -> int:
        """A u64 count of things that take at least `least` bytes each in the rest of the file."""
        count = self.number("Q", what)
        left = len(self.data) - self.position
        if count * least > left:
            raise BadCheckpoint(self.where, f"{what} is {count}, with {left} bytes left", MEND)
        return count

    def string(self, what: str) -> str:
        raw = self.take(self.count(1, f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise BadCheckpoint(self.where, f"{what} is not UTF-8 ({raw[:20]!r})", MEND) from None

    def value(self, key: str) -> Any:
        kind = self.number("I", f"the type of {key}")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            raise BadCheckpoint(self.where, f"metadata {key} has type {kind}", MEND)
        item = self.number("I", f"the item type of {key}")
        if item == _STRING:
            return [self.string(key) for _ in range(self.count(8, f"the length of {key}"))]
        if item not in _SCALARS:
            raise BadCheckpoint(self.where, f"metadata {key} is an array of type {item}", MEND)
        size = struct.calcsize("<" + _SCALARS[item])
        count = self.count(size, f"the length of {key}")
        return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.take(count * size, key)))


def _table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor's name")
    dimensions = cursor.number("I", f"the dimensions of {name}")
    if not 1 <= dimensions <= 4:
        raise BadCheckpoint(
            cursor.where, f"tensor {name} has {dimensions} dimensions, wanted 1 to 4", MEND
        )
    sizes = [cursor.number("Q", f"the shape of {name}") for _ in range(dimensions)]
    kind = cursor.number("I", f"the type of {name}")
    return name, tuple(reversed(sizes)), kind, cursor.number("Q", f"the offset of {name}")


def _placed(
    where: str, name: str, shape: tuple[int, ...], number: int, offset: int, size: int
) -> GGUFTensor:
    """The tensor with its byte range, or BadCheckpoint for its type, its row or the file's end."""
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise BadCheckpoint(where, f"tensor {name} has unknown type {number}", MEND) from None
    if kind.name not in FLOATS and kind.name not in BLOCKS:
        raise BadCheckpoint(
            where,
            f"tensor {name} is {kind.name}; read here are {', '.join((*FLOATS, *BLOCKS))}",
            "give a file in one of those types, or the float model it was made from",
        )
    if 0 in shape:
        raise BadCheckpoint(where, f"tensor {name} has shape {shape}, which holds nothing", MEND)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise BadCheckpoint(
            where,
            f"tensor {name} has rows of {shape[-1]}, {kind.name} wants a multiple of {block}",
            MEND,
        )
    nbytes = math.prod(shape) // block * block_bytes
    if offset + nbytes > size:
        raise BadCheckpoint(
            where, f"ends at byte {size}, tensor {name} needs bytes up to {offset + nbytes}", MEND
        )
    return GGUFTensor(name, shape, kind.name, offset, nbytes)
