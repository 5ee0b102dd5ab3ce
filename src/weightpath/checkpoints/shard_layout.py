"""Where every tensor of a checkpoint to be written will lie, fixed before the first is made.

    shard = u64 n (little-endian) | n bytes of JSON padded to 8 | data

Tensors go to shards in the order given, a unit never split; within a shard wide dtypes come first,
so that every tensor is aligned for mapping. Source: the safetensors format description.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """Tensors that are finished together (a linear's codes, scales and zeros)."""

    key: str
    tensors: tuple[Planned, ...]


@dataclass(frozen=True)
class Place:
    """Shard file and byte offset of a planned tensor."""

    shard: str
    offset: int
    planned: Planned


def assign(units: Sequence[Unit], shard_bytes: int) -> dict[str, list[Place]]:
    """Shard file name -> the places in it, for shards of about `shard_bytes` of data."""
    bins: list[list[Planned]] = [[]]
    filled = 0
    for unit in units:
        size = sum(planned.nbytes for planned in unit.tensors)
        if bins[-1] and filled + size > shard_bytes:
            bins.append([])
            filled = 0
        bins[-1].extend(unit.tensors)
        filled += size
    shards: dict[str, list[Place]] = {}
    for number, planned_here in enumerate(bins, 1):
        name = (
            "model.safetensors"
            if len(bins) == 1
            else f"model-{number:05d}-of-{len(bins):05d}.safetensors"
        )
        ordered = sorted(planned_here, key=lambda planned: -planned.dtype.itemsize)
        draft = _places(name, ordered, 0)
        shards[name] = _places(name, ordered, len(header(draft)))
    return shards


def _places(shard: str, ordered: Sequence[Planned], offset: int) -> list[Place]:
    places = []
    for planned in ordered:
        places.append(Place(shard, offset, planned))
        offset += planned.nbytes
    return places


def header(places: Sequence[Place]) -> bytes:
    """The safetensors header: 8-byte little-endian length, then JSON padded to 8 bytes."""
    base = places[0].offset if places else 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for place in places:
        planned = place.planned
        start = place.offset - base
        entries[planned.name] = {
            "dtype": DTYPE_NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, start + planned.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
