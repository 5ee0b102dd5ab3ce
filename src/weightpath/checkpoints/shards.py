"""Safetensors on disk: headers, shards and their index, with every size checked.

    file  = u64 n (little-endian) | n bytes of JSON | data
    JSON  = {name: {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, ...}
    index = model.safetensors.index.json: {"weight_map": {name: file}}

A checkpoint is treated as hostile input: what does not add up is one line that names the file or
the tensor, before any tensor is handed out.
Source: the safetensors format description and the index that transformers writes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightpath.errors import BadCheckpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes of header that the safetensors library itself accepts."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a reader hands it out: shape in torch order, dtype, and bytes at that dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def read_shards(path: Path) -> dict[Path, dict[str, TensorInfo]]:
    """Every shard of a folder (or the one file given) with its tensors, each tensor exactly once.

    Errors: BadCheckpoint for a missing shard, a tensor that is absent, doubled or not in the index,
    a damaged or short file, an index that names files outside the folder, or pickled weights only.
    """
    if path.is_file():
        return {path: read_header(path)}
    shards = {file: read_header(file) for file in _weight_files(path)}
    _check_shards(path, shards, _read_index(path))
    return shards


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file, checked against the size of the file."""
    where, mend = str(path), "the file is damaged or cut short: fetch it again"
    try:
        size = path.stat().st_size if path.is_file() else -1
    except OSError:  # a name that no file system takes
        size = -1
    if size < 0:
        raise BadCheckpoint(
            where, "shard is missing", "fetch it again, or remove it from the index"
        )
    if size < 8:
        raise BadCheckpoint(where, f"has {size} bytes, wanted at least 8", mend)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, LARGEST_HEADER):
            raise BadCheckpoint(where, f"header of {length} bytes in a file of {size} bytes", mend)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
        header.pop("__metadata__", None)
        infos = {name: _tensor_info(name, entry) for name, entry in header.items()}
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadCheckpoint(where, f"header cannot be read ({one_line(error)})", mend) from None
    held = size - 8 - length
    for name, end in ends.items():
        if end > held:
            raise BadCheckpoint(
                where, f"tensor {name} ends at byte {end} of the data, the file holds {held}", mend
            )
    return infos


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or BadCheckpoint. A key given twice is an error, not a silent choice."""
    if not path.is_file():
        raise BadCheckpoint(str(path), "is missing", "give a complete checkpoint folder")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            str(path), f"cannot be read as JSON ({one_line(error)})", "fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise BadCheckpoint(str(path), "is not a JSON object", "fetch it again")
    return value


def _read_index(folder: Path) -> dict[str, str] | None:
    """The index's tensor -> file, with file names kept inside the folder; None without an index."""
    if not (folder / INDEX).exists():
        return None
    where = str(folder / INDEX)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(where, "has no weight_map", "fetch the index again")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and PurePosixPath(file).name == file and "\\" not in file
        if not plain or not file.endswith(".safetensors"):
            raise BadCheckpoint(
                where,
                f"tensor {name} is said to be in {file!r}",
                "name .safetensors files beside it",
            )
    return weight_map


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, sorted."""
    weight_map = _read_index(folder)
    if weight_map is not None:
        named = set(weight_map.values())
        if (folder / SINGLE).exists() and SINGLE not in named:
            raise BadCheckpoint(
                str(folder), f"has both {SINGLE} and {INDEX}", "keep the one that is the model"
            )
        return [folder / name for name in sorted(named)]
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE in files:
        return [folder / SINGLE]
    if len(files) == 1:
        return files
    if files:
        raise BadCheckpoint(
            str(folder), f"has {len(files)} .safetensors files and no {INDEX}", "fetch the index"
        )
    pickled = sorted(path.name for end in ("bin", "pt", "pth") for path in folder.glob(f"*.{end}"))
    if pickled:
        raise BadCheckpoint(
            str(folder),
            f"holds only pickled weights ({pickled[0]}), which can run code when read",
            "load them with transformers where you trust them, and save_pretrained as safetensors",
        )
    raise BadCheckpoint(str(folder), "holds no .safetensors weights", "give a complete checkpoint")


def _check_shards(
    folder: Path, shards: dict[Path, dict[str, TensorInfo]], weight_map: dict[str, str] | None
) -> None:
    """Every tensor once, and just where the index says."""
    mend = "the index and the shards are of different models: fetch the folder again"
    seen: dict[str, str] = {}
    for path, infos in shards.items():
        for name in infos:
            if name in seen:
                raise BadCheckpoint(
                    str(folder), f"tensor {name} is in both {seen[name]} and {path.name}", mend
                )
            seen[name] = path.name
    for name, file in (weight_map or {}).items():
        if seen.get(name) != file:
            raise BadCheckpoint(
                str(folder), f"tensor {name} is not in {file}, where the index puts it", mend
            )
    for name, file in seen.items():
        if weight_map is not None and name not in weight_map:
            raise BadCheckpoint(str(folder), f"tensor {name} in {file} is not in the index", mend)


def _tensor_info(name: str, entry: dict[str, Any]) -> TensorInfo:
    """One entry of a header; ValueError with the numbers where they disagree."""
    shape, (begin, end), kind = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name} is {kind}; known are {', '.join(_DTYPES)}")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has shape {list(shape)} at bytes {begin}..{end}")
    nbytes = math.prod(shape) * _DTYPES[kind].itemsize
    if end - begin != nbytes:
        raise ValueError(f"tensor {name} holds {end - begin} bytes, its shape wants {nbytes}")
    return TensorInfo(name, shape, _DTYPES[kind], nbytes)


def open_map(path: Path) -> Any:
    """The library's map of a file whose header has been checked; it checks holes and overlaps."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            str(path), f"cannot be mapped ({one_line(error)})", "fetch the file again"
        ) from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is given twice")
    return result


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
