"""Write a safetensors checkpoint tensor by tensor, so that a killed run loses nothing it finished.

Every output tensor's name, dtype and shape is known before the work starts, so each shard's header
and every tensor's offset are fixed at once. The shards are laid out in `<folder>.partial`, a unit's
tensors are written at their offsets, and only then does a line with their checksums go into a
journal. A run that finds a journal of the same job checks those sums, keeps what holds, and does
the rest: the bytes are the same as from one run. At the end the folder is renamed into place. One
process writes at a time, under a lock, and what is not of this job is never removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.shard_layout import Planned, Unit, assign, header
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor

SHARD_BYTES = 4 << 30
READ_BYTES = 16 << 20
_REPORT = "report this: the plan is inconsistent"
JOURNAL, LOCK = "journal.jsonl", "lock"


class CheckpointWriter:
    """Writes the units of one job into `folder`; use as a context manager.

    folder: where the checkpoint will stand; it must not exist unless overwrite, which replaces a
    folder of files as a whole and refuses one that has folders in it. job: what is being
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
        self.folder = Path(folder).resolve()
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.units = {unit.key: unit for unit in units}
        for what, names in (
            ("unit", [unit.key for unit in units]),
            ("tensor", [planned.name for unit in units for planned in unit.tensors]),
        ):
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise BadTensor(twice, f"would be written twice as a {what}", _REPORT)
        self.job = json.dumps(
            {"job": job, "units": [_describe(unit) for unit in units]}, sort_keys=True
        )
        self.overwrite = overwrite
        self.shards = assign(units, shard_bytes)
        self.places = {
            place.planned.name: place for places in self.shards.values() for place in places
        }
        self.finished: dict[str, Any] = {}
        self.files: dict[str, int] = {}
        self.journal = self.lock = -1

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers apart."""
        return sum(place.planned.nbytes for place in self.places.values())

    def __enter__(self) -> CheckpointWriter:
        self._require_place("name another folder, or pass --overwrite")
        try:
            self._open_partial()
        except OSError as error:
            self._give_up()
            raise self._disk(error) from None
        except BaseException:
            self._give_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close files; what was finished stays in the partial folder."""
        self._close()

    def write(self, key: str, tensors: Mapping[str, Tensor], note: Any = None) -> None:
        """Write a unit's tensors and record it as finished, with a JSON note.

        BadCheckpoint where the disk refuses; what was finished before stays.
        """
        unit = self.units[key]
        if set(tensors) != {planned.name for planned in unit.tensors}:
            raise BadTensor(
                key,
                f"was to become {[p.name for p in unit.tensors]}, got {sorted(tensors)}",
                _REPORT,
            )
        sums: dict[str, int] = {}
        entry = {"unit": key, "crc32": sums, "note": note}
        try:
            for planned in unit.tensors:
                data = _bytes(tensors[planned.name], planned)
                place = self.places[planned.name]
                _write_at(self.files[place.shard], place.offset, data)
                sums[planned.name] = zlib.crc32(data)
            _write_all(self.journal, (json.dumps(entry, sort_keys=True) + "\n").encode())
        except OSError as error:
            raise self._disk(error) from None
        self.finished[key] = json.loads(json.dumps(note))  # as a resumed run will read it

    def finish(self, files: Mapping[str, str | bytes | Path]) -> None:
        """Write the index and `files` (name -> content, or a file to copy) and move into place.

        BadTensor naming the first unit that was never written; BadRequest where a folder has
        appeared in its place.
        """
        missing = [key for key in self.units if key not in self.finished]
        if missing:
            raise BadTensor(
                missing[0], f"was planned but not written ({len(missing)} such)", "run it again"
            )
        self._require_place("move it away and run it again: what is finished is kept")
        extra: dict[str, str | bytes | Path] = dict(files)
        if len(self.shards) > 1:
            weight_map = {name: place.shard for name, place in self.places.items()}
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            extra["model.safetensors.index.json"] = json.dumps(index, indent=2) + "\n"
        try:
            for name, content in extra.items():
                target = self.partial / name
                if isinstance(content, Path):
                    shutil.copyfile(content, target)
                else:
                    target.write_bytes(content.encode() if isinstance(content, str) else content)
            for handle in self.files.values():
                os.fsync(handle)
            _remove(self.partial, keep={JOURNAL, LOCK, *extra, *self.shards})
            self._move_into_place()
        except OSError as error:
            raise self._disk(error) from None
        self._close()

    def discard(self) -> None:
        """Remove the partial folder with all that was finished: the job is given up."""
        _remove(self.partial, keep={LOCK})
        self._give_up()

    def _move_into_place(self) -> None:
        """Rename, with the journal still there: a kill before it loses nothing. A folder that is
        replaced lies beside it, hidden, until the new one stands."""
        aside: Path | None = None
        if self.folder.exists():
            aside = Path(
                tempfile.mkdtemp(prefix=f".{self.folder.name}.replaced-", dir=self.folder.parent)
            )
            os.rename(self.folder, aside / self.folder.name)
        os.rename(self.partial, self.folder)
        for name in (JOURNAL, LOCK):
            (self.folder / name).unlink()
        if aside is not None:
            shutil.rmtree(aside)

    def _require_place(self, mend: str) -> None:
        """BadRequest where the folder exists and was not asked to be replaced, or holds folders,
        which no checkpoint of ours does."""
        if not self.folder.exists():
            return
        if not self.overwrite:
            raise BadRequest(f"{self.folder} exists already; {mend}")
        inner = [path.name for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []  # fmt: skip
        if inner:
            raise BadRequest(
                f"{self.folder} has a folder in it ({inner[0]}), which overwriting would delete; "
                "remove it yourself, or name another folder"
            )

    def _open_partial(self) -> None:
        self.partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.partial / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BadRequest(
                f"{self.partial}: another process is writing here; wait for it, or name another folder"
            ) from None
        self.lock = lock
        entries = self._read_journal()
        self._check_room(entries)
        if not entries:
            (self.partial / JOURNAL).write_text(self.job + "\n")
        self.journal = os.open(self.partial / JOURNAL, os.O_WRONLY | os.O_APPEND)
        for shard, places in self.shards.items():
            handle = os.open(self.partial / shard, os.O_RDWR | os.O_CREAT, 0o644)
            self.files[shard] = handle
            head = header(places)
            _write_at(handle, 0, head)
            end = max((p.offset + p.planned.nbytes for p in places), default=len(head))
            os.ftruncate(handle, end)
        self._keep_sound(entries)

    def _read_journal(self) -> list[dict[str, Any]]:
        """What a journal of this same job says is finished; [] to start afresh."""
        path = self.partial / JOURNAL
        if not path.exists():
            foreign = sorted(set(os.listdir(self.partial)) - {LOCK})
            if foreign:
                raise BadRequest(
                    f"{self.partial} holds {foreign[0]}, which no run of this kind left there; "
                    "move it away, or name another folder"
                )
            return []
        lines = path.read_text(errors="replace").split("\n")
        complete = lines[:-1]
        if complete and complete[0] != self.job:
            if not self.overwrite:
                raise BadRequest(
                    f"{self.partial} holds an unfinished run of another job; remove it, or pass --overwrite to start afresh"
                )
            _remove(self.partial, keep={LOCK})
            return []
        if complete and lines[-1]:  # a line cut short by a kill
            path.write_text("\n".join(complete) + "\n")
        found = (_entry(line) for line in complete[1:])
        return [entry for entry in found if entry is not None and entry["unit"] in self.units]

    def _keep_sound(self, entries: Iterable[dict[str, Any]]) -> None:
        """Take over the units whose bytes still match their checksums; the rest is done again."""
        for entry in entries:
            unit = self.units[entry["unit"]]
            if entry["crc32"] == {planned.name: self._crc32(planned) for planned in unit.tensors}:
                self.finished[unit.key] = entry["note"]
            else:
                self.finished.pop(unit.key, None)

    def _crc32(self, planned: Planned) -> int:
        """Checksum of a tensor's bytes as they stand in the partial folder."""
        place, total, done = self.places[planned.name], 0, 0
        while done < planned.nbytes:
            size = min(READ_BYTES, planned.nbytes - done)
            data = os.pread(self.files[place.shard], size, place.offset + done)
            total, done = zlib.crc32(data, total), done + size
        return total

    def _check_room(self, entries: Iterable[dict[str, Any]]) -> None:
        claimed = {entry["unit"] for entry in entries}
        wanted = sum(
            planned.nbytes
            for key, unit in self.units.items()
            if key not in claimed
            for planned in unit.tensors
        )
        free = shutil.disk_usage(self.partial).free
        if free < wanted + (1 << 20):
            raise BadCheckpoint(str(self.folder), f"needs {wanted} bytes, {free} are free on its disk",
                                "free some space, or name a folder on another disk")  # fmt: skip

    def _disk(self, error: OSError) -> BadCheckpoint:
        return BadCheckpoint(
            str(self.partial),
            f"cannot be written ({error.strerror or error})",
            "make room or name another folder, and run it again: what is finished is kept",
        )

    def _give_up(self) -> None:
        """After a refusal: the partial folder goes too, if there is nothing in it but our lock."""
        if self.lock >= 0 and os.listdir(self.partial) == [LOCK]:
            (self.partial / LOCK).unlink()
            self.partial.rmdir()
        self._close()

    def _close(self) -> None:
        for handle in [*self.files.values(), self.journal, self.lock]:
            if handle >= 0:
                os.close(handle)
        self.files, self.journal, self.lock = {}, -1, -1


def _describe(unit: Unit) -> list[Any]:
    return [unit.key, [[p.name, str(p.dtype), list(p.shape)] for p in unit.tensors]]


def _bytes(tensor: Tensor, planned: Planned) -> memoryview:
    """A tensor's bytes in row order, without a copy where it is contiguous."""
    if tensor.dtype != planned.dtype or tuple(tensor.shape) != planned.shape:
        raise BadTensor(planned.name, f"is {tensor.dtype} {tuple(tensor.shape)}, planned {planned.dtype} {planned.shape}",
                        _REPORT)  # fmt: skip
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _entry(line: str) -> dict[str, Any] | None:
    """A line of the journal, or None where it is damaged: its unit is then done again."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(entry, dict) and entry.keys() >= {"unit", "crc32", "note"}
    return entry if whole and isinstance(entry["unit"], str) else None


def _remove(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _write_at(handle: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done
