"""A file of tensors beside a checkpoint, mapped when it is read: a cache, so it is never trusted.

    file = u64 n (little-endian) | n bytes of JSON, padded with spaces | tensors
    JSON = safetensors' header; in its __metadata__: key      what the tensors were made from
                                                    record   JSON text of the caller's
                                                    data     checksum of all tensors' bytes
                                                    header   sha256 of the header without this entry

The container is safetensors', so that any tool of that format shows what is in it; the name ends
otherwise, so that no runtime takes it for weights. The tensors begin at a page and lie in the order
in which they were given, each at a multiple of 64 bytes where those before it fill such.

Reading checks every byte: the header by its own sum, the size, and the data by a checksum that runs
at the speed of the memory (cpp/memory.cpp) and brings the mapped pages in, which the first step would
have to do. What does not hold is a sentence, and the file is as good as absent. Writing goes to a
temporary name in the same folder, locked while it is written, and is moved into place after fsync: a
killed writer leaves such a file at most, which the next one removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightpath.checkpoints.shard_layout import DTYPE_NAMES
from weightpath.checkpoints.shards import LARGEST_HEADER
from weightpath.kernels import cpu

NAME = ".weightpath-tiles"
PARTIAL = ".partial"
ROOM_LEFT = 256 << 20
"""Bytes of the disk that a cache leaves free."""
_PAGE = 4096
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class SideFile:
    """A file that held: its tensors, views of one private mapping, and the caller's record."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]


def beside(where: str | Path) -> Path:
    """Where the side file of a checkpoint's folder, or of a single file of weights, lies."""
    path = Path(where)
    return path / NAME if path.is_dir() else path.with_name(f".{path.name}{NAME}")


def read_side_file(path: Path, key: str, threads: int) -> SideFile | str:
    """What the file holds, mapped; or why it cannot be used, "" where there is none.

    It may run beside other work: nearly all of its time is spent in the checksum.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LARGEST_HEADER):
                return f"has {size} bytes and a header of {length}"
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__")
            if metadata.pop("header") != _header_sum(header, metadata):
                return "has a header that does not match its checksum"
            if metadata["key"] != key:
                return "was made from other files, or by another version"
            start, end = 8 + length, max(entry["data_offsets"][1] for entry in header.values())
            if start + end != size:
                return f"has {size} bytes, its header says {start + end}"
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "has a header that cannot be read"
    if hasattr(mmap, "MADV_WILLNEED"):
        mapping.madvise(mmap.MADV_WILLNEED)  # where it is not in memory, the disk begins now
    data = torch.frombuffer(mapping, dtype=torch.uint8, offset=start)
    if _data_sum(data.data_ptr(), end, threads) != metadata["data"]:
        return "has tensors that do not match their checksum"
    try:
        tensors = {name: _view(mapping, start, entry) for name, entry in header.items()}
        return SideFile(tensors, json.loads(metadata["record"]))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        return f"has tensors that do not fit it ({' '.join(str(error).split())[:100]})"


def write_side_file(
    path: Path, key: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any], like: Path
) -> str:
    """Write and move into place; "" or the reason why nothing was kept. like: a file whose
    permissions it gets. Tensors are contiguous."""
    entries, end = _entries(tensors)
    metadata = {"format": "pt", "key": key, "record": json.dumps(record)}
    try:
        free = shutil.disk_usage(path.parent).free
        if free < end + ROOM_LEFT:
            return f"{end} bytes and {ROOM_LEFT} to spare are wanted on its disk, {free} are free"
        _remove_left_over(path)
        handle, name = tempfile.mkstemp(PARTIAL, f"{path.name}.", path.parent)
        try:
            with os.fdopen(handle, "w+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.fchmod(file.fileno(), like.stat().st_mode & 0o666)
                head = _header(entries, metadata | {"data": "0" * 16})
                file.seek(len(head))
                for tensor in tensors.values():
                    file.write(_bytes_of(tensor))
                file.flush()
                whole = mmap.mmap(file.fileno(), len(head) + end, access=mmap.ACCESS_READ)
                data = _data_sum(_address(whole) + len(head), end, torch.get_num_threads())
                file.seek(0)
                file.write(_header(entries, metadata | {"data": data}))
                file.flush()
                os.fsync(file.fileno())
                os.replace(name, path)
            _sync_folder(path.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        return f"its folder cannot be written ({error.strerror or error})"
    return ""


def _entries(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Header entries one after another, and the bytes of all."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    return entries, end


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The header's bytes, to a whole page."""
    whole = {"__metadata__": {**metadata, "header": _header_sum(entries, metadata)}, **entries}
    text = json.dumps(whole, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return struct.pack("<Q", len(text)) + text


def _header_sum(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([entries, metadata], sort_keys=True).encode()).hexdigest()


def _data_sum(address: int, size: int, threads: int) -> str:
    return f"{cpu.extension().checksum(address, size, threads):016x}"


def _view(mapping: mmap.mmap, start: int, entry: Mapping[str, Any]) -> Tensor:
    """One tensor of the mapping. ValueError where its shape is not its bytes."""
    dtype, shape, (begin, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    count = math.prod(shape)
    if begin < 0 or min(shape, default=1) < 1 or stop - begin != count * dtype.itemsize:
        raise ValueError(f"{shape} at {begin}..{stop}")
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + begin).view(shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _address(mapping: mmap.mmap) -> int:
    """Where a read-only mapping lies."""
    return np.frombuffer(mapping, dtype=np.uint8).ctypes.data


def _remove_left_over(path: Path) -> None:
    """Remove what killed writers left: temporary files that no process holds locked."""
    for left in path.parent.iterdir():
        if not (left.name.startswith(f"{path.name}.") and left.name.endswith(PARTIAL)):
            continue
        try:
            with left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink(missing_ok=True)
        except OSError:  # another writer's
            continue


def _sync_folder(folder: Path) -> None:
    """The new name reaches the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
