"""Write a safetensors checkpoint tensor by tensor, so that a killed run loses nothing it finished.

Every output tensor's name, dtype and shape is known before the work starts, so each shard's header
and every tensor's offset are fixed at once. The shards are laid out in `<folder>.partial`, a unit's
tensors are written at their offsets, and only then does a line with their checksums go into a
journal. A run that finds a journal of the same job checks those sums, keeps what holds, and does
the rest: the bytes are the same as from one run. At the end the folder is renamed into place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.errors import BadCheckpoint, BadRequest, BadTensor

SHARD_BYTES = 4 << 30
JOURNAL, LOCK = "journal.jsonl", "lock"

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
class _Place:
    shard: str
    offset: int
    planned: Planned


class CheckpointWriter:
    """Writes the units of one job into `folder`; use as a context manager.

    folder: where the checkpoint will stand; it must not exist unless overwrite. job: what is being
    made, as JSON (source fingerprint, options): a partial folder of another job is refused unless
    overwrite. `finished` maps the key of every unit already there to the note kept with it.
    """

    def __init__(
        self,
        folder: Path,
        units: Sequence[Unit],
        job: Mapping[str, Any],
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder = Path(folder)
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.units = {unit.key: unit for unit in units}
        self.job = json.dumps(
            {"job": job, "units": [_describe(unit) for unit in units]}, sort_keys=True
        )
        self.overwrite = overwrite
        self.shards = _assign(units, shard_bytes)
        self.places = {
            place.planned.name: place for places in self.shards.values() for place in places
        }
        if len(self.places) != sum(len(unit.tensors) for unit in units):
            names = [planned.name for unit in units for planned in unit.tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadTensor(
                twice, "would be written twice", "report this: the plan is inconsistent"
            )
        self.finished: dict[str, Any] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers apart."""
        return sum(place.planned.nbytes for place in self.places.values())

    def __enter__(self) -> CheckpointWriter:
        if self.folder.exists() and not self.overwrite:
            raise BadRequest(
                f"{self.folder} exists already; name another folder, or pass --overwrite"
            )
        self._open_partial()
        return self

    def __exit__(self, *_: object) -> None:
        """Close files; what was finished stays in the partial folder."""
        self._close()

    def write(self, key: str, tensors: Mapping[str, Tensor], note: Any = None) -> None:
        """Write a unit's tensors and record it as finished, with a JSON note."""
        unit = self.units[key]
        if set(tensors) != {planned.name for planned in unit.tensors}:
            raise BadTensor(key, f"was to become {[p.name for p in unit.tensors]}, got {sorted(tensors)}",
                            "report this: the plan is inconsistent")  # fmt: skip
        sums: dict[str, int] = {}
        for planned in unit.tensors:
            data = _bytes(tensors[planned.name], planned)
            place = self.places[planned.name]
            _write_at(self.files[place.shard], place.offset, data)
            sums[planned.name] = zlib.crc32(data)
        self._append({"unit": key, "crc32": sums, "note": note})
        self.finished[key] = note

    def finish(self, files: Mapping[str, str | bytes | Path]) -> None:
        """Write the index and `files` (name -> content, or a file to copy) and move into place.

        BadTensor naming the first unit that was never written.
        """
        missing = [key for key in self.units if key not in self.finished]
        if missing:
            raise BadTensor(
                missing[0], f"was planned but not written ({len(missing)} such)", "run it again"
            )
        extra: dict[str, str | bytes | Path] = dict(files)
        if len(self.shards) > 1:
            weight_map = {name: place.shard for name, place in self.places.items()}
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            extra["model.safetensors.index.json"] = json.dumps(index, indent=2) + "\n"
        for name, content in extra.items():
            target = self.partial / name
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_bytes(content.encode() if isinstance(content, str) else content)
        for handle in self.files.values():
            os.fsync(handle)
        for name in os.listdir(self.partial):
            if name in (JOURNAL, LOCK) or (name not in extra and name not in self.shards):
                (self.partial / name).unlink()
        old = self.folder.with_name(self.folder.name + ".old")
        if self.folder.exists():
            os.rename(self.folder, old)
        os.rename(self.partial, self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._close()

    def _open_partial(self) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        self.lock = os.open(self.partial / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise BadRequest(
                f"{self.partial}: another process is writing here; wait for it, or name another folder"
            ) from None
        self.files: dict[str, int] = {}
        try:
            lines = self._read_journal()
            self._check_room(bool(lines))
            for shard, places in self.shards.items():
                handle = os.open(self.partial / shard, os.O_RDWR | os.O_CREAT, 0o644)
                self.files[shard] = handle
                header = _header(places)
                _write_at(handle, 0, header)
                end = max((p.offset + p.planned.nbytes for p in places), default=len(header))
                os.ftruncate(handle, end)
            if lines:
                self._keep_sound(lines[1:])
            else:
                (self.partial / JOURNAL).write_text(self.job + "\n")
            self.journal = os.open(self.partial / JOURNAL, os.O_WRONLY | os.O_APPEND)
        except BaseException:
            self._close()
            raise

    def _read_journal(self) -> list[str]:
        """Complete lines of a journal of this same job; [] to start afresh."""
        path = self.partial / JOURNAL
        text = path.read_text() if path.exists() else ""
        lines = text.split("\n")
        complete = lines[:-1]
        if not complete:
            return []
        if complete[0] != self.job:
            if not self.overwrite:
                raise BadRequest(
                    f"{self.partial} holds an unfinished run of another job; remove it, or pass --overwrite to start afresh"
                )
            for name in os.listdir(self.partial):
                if name != LOCK:
                    (self.partial / name).unlink()
            return []
        if lines[-1]:  # a line cut short by a kill
            path.write_text("\n".join(complete) + "\n")
        return complete

    def _keep_sound(self, lines: Iterable[str]) -> None:
        """Take over the units whose bytes still match their checksums; the rest is done again."""
        for line in lines:
            entry = json.loads(line)
            sound = entry["unit"] in self.units
            for name, expected in entry["crc32"].items():
                place = self.places[name]
                data = os.pread(self.files[place.shard], place.planned.nbytes, place.offset)
                sound = sound and zlib.crc32(data) == expected
            if sound:
                self.finished[entry["unit"]] = entry["note"]

    def _check_room(self, resuming: bool) -> None:
        free = shutil.disk_usage(self.partial).free
        if not resuming and free < self.total_bytes + (1 << 20):
            raise BadCheckpoint(str(self.folder), f"needs {self.total_bytes} bytes, {free} are free on its disk",
                                "free some space, or name a folder on another disk")  # fmt: skip

    def _append(self, entry: Mapping[str, Any]) -> None:
        os.write(self.journal, (json.dumps(entry, sort_keys=True) + "\n").encode())

    def _close(self) -> None:
        for handle in [
            *self.files.values(),
            getattr(self, "journal", -1),
            getattr(self, "lock", -1),
        ]:
            if handle >= 0:
                os.close(handle)
        self.files, self.journal, self.lock = {}, -1, -1


def _describe(unit: Unit) -> list[Any]:
    return [unit.key, [[p.name, str(p.dtype), list(p.shape)] for p in unit.tensors]]


def _assign(units: Sequence[Unit], shard_bytes: int) -> dict[str, list[_Place]]:
    """Tensors to shards in order, a unit never split; within a shard wide dtypes come first, so
    that every tensor is aligned for mapping."""
    bins: list[list[Planned]] = [[]]
    filled = 0
    for unit in units:
        size = sum(planned.nbytes for planned in unit.tensors)
        if bins[-1] and filled + size > shard_bytes:
            bins.append([])
            filled = 0
        bins[-1].extend(unit.tensors)
        filled += size
    shards: dict[str, list[_Place]] = {}
    for number, planned_here in enumerate(bins, 1):
        name = (
            "model.safetensors"
            if len(bins) == 1
            else f"model-{number:05d}-of-{len(bins):05d}.safetensors"
        )
        ordered = sorted(planned_here, key=lambda planned: -planned.dtype.itemsize)
        draft = _places(name, ordered, 0)
        shards[name] = _places(name, ordered, len(_header(draft)))
    return shards


def _places(shard: str, ordered: Sequence[Planned], offset: int) -> list[_Place]:
    places = []
    for planned in ordered:
        places.append(_Place(shard, offset, planned))
        offset += planned.nbytes
    return places


def _header(places: Sequence[_Place]) -> bytes:
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


def _bytes(tensor: Tensor, planned: Planned) -> memoryview:
    """A tensor's bytes in row order, without a copy where it is contiguous."""
    if tensor.dtype != planned.dtype or tuple(tensor.shape) != planned.shape:
        raise BadTensor(planned.name, f"is {tensor.dtype} {tuple(tensor.shape)}, planned {planned.dtype} {planned.shape}",
                        "report this: the plan is inconsistent")  # fmt: skip
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _write_at(handle: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done
