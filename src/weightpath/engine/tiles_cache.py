"""Packed weights kept beside a checkpoint, so that the next load maps them instead of packing.

    FOLDER/.weightpath-tiles            of a folder
    FOLDER/.FILE.gguf.weightpath-tiles  of a GGUF file

In it (side_file.py: a safetensors container) lie the low-bit matrices in `layouts/cpu_tiles.py`'s
bytes, one after another as a step of the native engine reads them (native_weights.py's blocks), and
the float tensors that had to be computed: dequantized blocks, casts, linears that run as floats.
Floats that a file holds as they are used stay mapped from there. Beside them a record: every linear's
place and shape, and what the audit of its values found, so that it is said again.

It is made from the files and says of what: the key is a hash of the config, of every weight file's
name, size and time of change, the safetensors headers, the quantization config, the dtype, the
version of the layout and of this package. The layout's bytes are the same for every CPU instruction
set, and activation bits change nothing in it, so neither is part of the key. Whatever does not match
is made anew. Deleting the file costs one slower load.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from weightpath.checkpoints.audit_finding import Finding
from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.checkpoints.shard_layout import DTYPE_NAMES
from weightpath.checkpoints.store import SafetensorsCheckpoint
from weightpath.engine.low_bit_module import Built, float_linear
from weightpath.engine.side_file import SideFile, beside, read_side_file, write_side_file
from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import KINDS, ROWS, VERSION, CpuTiles
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.low_bit_linear import LowBitLinear
from weightpath.scheme import Scheme
from weightpath.version import __version__

FORM = 1
"""Of what this file writes."""
_SCALES = {DTYPE_NAMES[dtype]: dtype for dtype in KINDS}
_KINDS: dict[str, type[LowBitLinear]] = {"int4": Int4Linear, "int8": Int8Linear}
_FLOAT = "float:"


@dataclass(frozen=True)
class Kept:
    """A cache that fits the model. floats: tensors by their checkpoint's names. findings: of the
    audit of values. schemes: linear -> scheme and why, of those that run as floats."""

    floats: dict[str, Tensor]
    findings: tuple[Finding, ...]
    schemes: dict[str, tuple[str, str]]
    _linears: dict[str, dict[str, Any]]
    _file: SideFile

    def linear(self, name: str, bias: Tensor | None) -> Built:
        """One linear's module on the mapped bytes."""
        entry = self._linears[name]
        order, scales = (self._file.tensors.get(f"{name}.{part}") for part in ("order", "scales"))
        if name in self.schemes:
            return Built(float_linear(self._file.tensors[f"{name}.weight"], bias), entry["why"])
        scheme = Scheme.parse(entry["scheme"])
        inner = _KINDS[entry["kind"]].from_tiles(_tiles(entry, self._file.tensors), scheme, bias)
        gathered = order is not None or scales is not None
        return Built(GatheredLinear(inner, order, scales) if gathered else inner)


def key_of(checkpoint: LowBitCheckpoint, dtype: torch.dtype) -> str:
    """What the cache of a checkpoint is made from, as one hash. Reads headers, no weights."""
    source, place = checkpoint.source, Path(checkpoint.where)
    files = source.files if isinstance(source, SafetensorsCheckpoint) else ()
    digest = hashlib.sha256()
    for part in (FORM, VERSION, __version__, sys.byteorder, str(dtype), source.fingerprint):
        digest.update(f"{part}\n".encode())
    digest.update(json.dumps([checkpoint.config, checkpoint.settings], sort_keys=True).encode())
    folder = place if place.is_dir() else place.parent
    for path in sorted({*files, *folder.glob("*.safetensors")} if files else {place}):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
    return digest.hexdigest()


def start_reading(checkpoint: LowBitCheckpoint, key: str) -> Future[SideFile | str]:
    """Map and check the cache of a checkpoint on a thread of its own."""
    reading: Future[SideFile | str] = Future()
    path, threads = beside(checkpoint.where), torch.get_num_threads()

    def read() -> None:
        try:
            reading.set_result(read_side_file(path, key, threads))
        except BaseException as error:  # the caller's, where it waits
            reading.set_exception(error)

    Thread(target=read, name="weightpath-cache", daemon=True).start()
    return reading


def find(
    checkpoint: LowBitCheckpoint,
    reading: Future[SideFile | str],
    linears: Mapping[str, nn.Linear],
    names: Sequence[str],
) -> Kept | str:
    """The cache of a checkpoint, if it holds the linears `names` in the model's shapes; else a
    sentence for the user, "" where there is no cache."""
    path, found = beside(checkpoint.where), reading.result()
    if isinstance(found, SideFile):
        try:
            return _fitting(found, linears, names)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            found = f"does not fit the model ({' '.join(str(error).split())[:100]})"
    return found and f"{path.name} {found}; packed anew"


def keep(
    checkpoint: LowBitCheckpoint,
    key: str,
    model: nn.Module,
    names: Sequence[str],
    blocks: Iterable[tuple[Tensor, Sequence[LowBitLinear]]],
    floats: Mapping[str, Tensor],
    run_as_floats: Mapping[str, tuple[str, str]],
    findings: Iterable[Finding],
) -> str:
    """Write the cache of a model that has been packed; a sentence for the user: where and how much,
    or why not. blocks: of the native engine, contiguous; floats: computed ones, by name."""
    tensors: dict[str, Tensor] = {}
    places: dict[int, dict[str, Any]] = {}
    for number, (block, modules) in enumerate(blocks):
        start, tensors[f"block.{number}"] = 0, block
        for module in modules:
            tiles = module.cpu_tiles
            assert tiles is not None
            places[id(module)] = {"block": f"block.{number}", "start": start} | _described(module)
            start += tiles.packed.shape[1]
    linears: dict[str, dict[str, Any]] = {}
    wide: dict[str, Tensor] = {}
    for name in names:
        module = model.get_submodule(name)
        if name in run_as_floats:
            scheme, why = run_as_floats[name]
            linears[name] = {"kind": "float", "scheme": scheme, "why": why}
            wide[f"{name}.weight"] = module.weight.detach().contiguous()  # type: ignore[operator, union-attr]
            continue
        if isinstance(module, GatheredLinear):
            parts = {"order": module.order, "scales": module.scales}
            wide |= {f"{name}.{part}": value for part, value in parts.items() if value is not None}
            module = module.inner
        linears[name] = places[id(module)]
    wide |= {_FLOAT + name: value.detach().contiguous() for name, value in floats.items()}
    order = sorted(wide, key=lambda name: -wide[name].element_size())  # so that each is aligned
    tensors |= {name: wide[name] for name in order}
    record = {"linears": linears, "findings": [asdict(finding) for finding in findings]}
    path, source = beside(checkpoint.where), checkpoint.source
    like = source.files[0] if isinstance(source, SafetensorsCheckpoint) else Path(source.where)
    reason = write_side_file(path, key, tensors, record, like)
    if reason:
        return f"the packed weights are not kept for the next load: {reason}"
    return (
        f"the packed weights are kept in {path.name} ({path.stat().st_size / 1e6:.0f} MB) for the "
        "next load; it may be deleted"
    )


def _fitting(file: SideFile, linears: Mapping[str, nn.Linear], names: Sequence[str]) -> Kept:
    """What a file holds of these linears. An error of Python's where it is not just them."""
    entries = file.record["linears"]
    if set(entries) != set(names):
        raise ValueError(f"{len(entries)} linears, wanted {len(names)}")
    schemes: dict[str, tuple[str, str]] = {}
    for name, entry in entries.items():
        n, k = wanted = (linears[name].out_features, linears[name].in_features)
        if entry["kind"] == "float":
            schemes[name] = (entry["scheme"], entry["why"])
            found = tuple(file.tensors[f"{name}.weight"].shape)
        else:
            found = tuple(entry["shape"])
            tiles = _tiles(entry, file.tensors)
            sizes = (tiles.bits, n, k, tiles.group_size, tiles.zeros, KINDS[tiles.scale_dtype])
            if tiles.packed.numel() != cpu.extension().packed_bytes(*sizes):
                raise ValueError(f"{name}: {tiles.packed.numel()} bytes")
            order = file.tensors.get(f"{name}.order")
            if order is not None and (order.shape != (k,) or not 0 <= int(order.min()) <= int(order.max()) < k):  # fmt: skip
                raise ValueError(f"{name}: its column order")
        if found != wanted:
            raise ValueError(f"{name}: {list(found)}, wanted {list(wanted)}")
    floats = {n.removeprefix(_FLOAT): t for n, t in file.tensors.items() if n.startswith(_FLOAT)}
    findings = tuple(Finding(**finding) for finding in file.record["findings"])
    return Kept(floats, findings, schemes, entries, file)


def _described(module: LowBitLinear) -> dict[str, Any]:
    """What `_tiles` and `Kept.linear` build a module from."""
    tiles = module.cpu_tiles
    assert tiles is not None
    return {
        "kind": next(kind for kind, form in _KINDS.items() if isinstance(module, form)),
        "scheme": module.scheme.with_activations(16).name,
        "bits": tiles.bits,
        "shape": [tiles.out_features, tiles.in_features],
        "group_size": tiles.group_size,
        "zeros": tiles.zeros,
        "scales": DTYPE_NAMES[tiles.scale_dtype],
        "bytes": tiles.packed.shape[1],
    }


def _tiles(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CpuTiles:
    """A linear's tiles as rows of its block. ValueError where they are not inside it."""
    block, start, width = tensors[entry["block"]], entry["start"], entry["bytes"]
    n, k = entry["shape"]
    if block.dtype != torch.uint8 or block.dim() != 2 or len(block) != -(-n // ROWS):
        raise ValueError(f"a block of {block.dtype} {list(block.shape)} for {n} rows")
    if not 0 <= start < start + width <= block.shape[1] or k % entry["group_size"]:
        raise ValueError(f"columns {start} to {start + width} of {block.shape[1]}")
    rows, scales = block[:, start : start + width], _SCALES[entry["scales"]]
    return CpuTiles(rows, entry["bits"], n, k, entry["group_size"], bool(entry["zeros"]), scales)
