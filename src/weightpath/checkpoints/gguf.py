"""A llama-type decoder in a GGUF file, read as a float checkpoint under HF names.

    block types: w = d * (q - zero) or d * q + m a block (formats in gguf.quants), read as float32
    q and k of llama files: HF row (head, half, i) is the file's row (head, i, half)

Rows are outputs and blocks lie along a row, so putting q and k back in order is a lossless shuffle
of whole rows, done on the packed bytes before they are dequantized, or read as codes (gguf_blocks).
Values become float32 (or the file's own F32, F16, BF16, mapped); a large matrix is dequantized a
few rows at a time, so that the result is the only large allocation.
Every tensor of the file is the source of exactly one HF tensor, or stands in `set_aside` with the
reason; anything else is an error that names it.
Source: llama.cpp's converter for the row order; gguf-py 0.19 for block formats.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from weightpath.checkpoints.gguf_blocks import file_rows, from_blocks, scheme_of
from weightpath.checkpoints.gguf_config import (
    Source,
    generation_config,
    model_config,
    tensor_sources,
)
from weightpath.checkpoints.gguf_file import BLOCKS, read_gguf
from weightpath.checkpoints.gguf_tokenizer import tokenizer_files
from weightpath.checkpoints.store import (
    TensorInfo,
    check_rows,
    fingerprint_of,
    known,
    natural_order,
)
from weightpath.checkpoints.writer import CheckpointWriter, Planned, Unit
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "model.embed_tokens.weight"
VALUES_AT_ONCE = 1 << 20
"""Values dequantized in one step; gguf-py needs several times their size while it works."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint:
    """A GGUF file behind the Checkpoint protocol. `set_aside`: tensors left out, and why."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._companions: tuple[Path, ...] | None = None
        self._file = read_gguf(path)
        metadata, tensors = self._file.metadata, self._file.tensors
        self.set_aside: dict[str, str] = {}
        factors = None
        if ROPE_FACTORS in tensors:
            kind = tensors[ROPE_FACTORS].kind
            if kind not in _DTYPES:
                raise BadTensor(ROPE_FACTORS, f"is {kind}, wanted floats", "convert it again")
            factors = _floats(self._file.rows(ROPE_FACTORS), kind)
            factors = factors.float().flatten().numpy()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        kinds = {name: tensor.kind for name, tensor in tensors.items()}
        self.config: dict[str, Any] = model_config(self.where, metadata, kinds, shapes, factors)
        if factors is not None:
            rope = self.config["rope_parameters"]["rope_type"]
            self.set_aside[ROPE_FACTORS] = f"config.json's rope type {rope} gives the same factors"
        self._sources = tensor_sources(metadata["general.architecture"], self.config)
        self._account()
        self.tensors: dict[str, TensorInfo] = {
            name: self._info(name) for name in natural_order(self._sources)
        }
        self.fingerprint = fingerprint_of(self.config, self.tensors.values(), [path])

    @cached_property
    def companion_texts(self) -> dict[str, str]:
        """Tokenizer, chat template and generation settings made from the metadata, by file name."""
        context = self.config["max_position_embeddings"]
        texts = tokenizer_files(self.where, self._file.metadata, context)
        settings = generation_config(self._file.metadata, self.where)
        return texts | {"generation_config.json": json.dumps(settings, indent=2) + "\n"}

    @property
    def companions(self) -> tuple[Path, ...]:
        """The companion texts as files, in a temporary folder that lives as long as this object."""
        if self._companions is None:
            folder = Path(tempfile.mkdtemp(prefix="weightpath-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            for name, text in self.companion_texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            self._companions = tuple(sorted(folder.iterdir()))
        return self._companions

    def read(self, name: str) -> Tensor:
        shape = self.tensors[known(self, name)].shape
        return self._rows(name, 0, shape[0]) if len(shape) > 1 else self._rows(name, 0, 1)[0]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        info = self.tensors[known(self, name)]
        check_rows(info, start, stop)
        return self._rows(name, start, stop) if len(info.shape) > 1 else self.read(name)[start:stop]

    @cached_property
    def linears(self) -> dict[str, tuple[str, Scheme]]:
        """Linear modules that lie in blocks: module name -> block type, and the scheme it has."""
        found: dict[str, tuple[str, Scheme]] = {}
        for name, source in self._sources.items():
            kind = self._file.tensors[source.gguf_name].kind
            if kind in BLOCKS and name != EMBEDDING:
                found[name.removesuffix(".weight")] = (kind, scheme_of(kind))
        return {module: found[module] for module in natural_order(found)}

    def read_qweight(self, module: str) -> QWeight:
        """The integers of a linear (or the embedding) that lies in blocks, rows in HF order.

        Its float32 values are those that `read` gives, bit for bit. BadTensor where the file has
        it as floats.
        """
        name = f"{module}.weight"
        source = self._sources[known(self, name)]
        stored = self._file.tensors[source.gguf_name]
        if stored.kind not in BLOCKS:
            raise BadTensor(name, f"is {stored.kind}, which has no codes", "read it as floats")
        order = _file_rows(source, 0, source.shape[0]) if source.heads else None
        return from_blocks(name, stored.kind, self._file.rows(source.gguf_name), order)

    def stored_bytes(self, module: str) -> int:
        """Bytes in the file of a module's weight."""
        name = known(self, f"{module}.weight")
        return self._file.tensors[self._sources[name].gguf_name].nbytes

    def stored(self, name: str) -> tuple[str, int]:
        """Block or float type of a tensor in the file, and its bytes there."""
        found = self._file.tensors[self._sources[known(self, name)].gguf_name]
        return found.kind, found.nbytes

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [stop - start, K] in HF order; a vector is one row (a bias is put in order)."""
        source = self._sources[name]
        stored = self._file.tensors[source.gguf_name]
        packed = self._file.rows(source.gguf_name)
        if stored.kind not in BLOCKS:
            values = _floats(packed, stored.kind)
            if not source.heads:
                return values[start:stop]
            if len(source.shape) == 1:
                return values[:, torch.from_numpy(_file_rows(source, 0, source.shape[0]))]
            return values[torch.from_numpy(_file_rows(source, start, stop))]
        kind = GGMLQuantizationType[stored.kind]
        result = torch.empty((stop - start, stored.shape[-1]), dtype=torch.float32)
        step = max(1, VALUES_AT_ONCE // stored.shape[-1])
        for first in range(start, stop, step):
            last = min(first + step, stop)
            chosen = packed[_file_rows(source, first, last)] if source.heads else packed[first:last]
            with np.errstate(over="ignore", invalid="ignore"):  # NaN and Inf stay what they are
                values = quants.dequantize(np.ascontiguousarray(chosen), kind)
            result[first - start : last - start] = torch.from_numpy(values)
        return result

    def _info(self, name: str) -> TensorInfo:
        source = self._sources[name]
        dtype = _DTYPES.get(self._file.tensors[source.gguf_name].kind, torch.float32)
        return TensorInfo(name, source.shape, dtype, math.prod(source.shape) * dtype.itemsize)

    def _account(self) -> None:
        """Every tensor of the file has one place, and every place a tensor, of the right shape."""
        tensors = self._file.tensors
        wanted = {source.gguf_name: name for name, source in self._sources.items()}
        for gguf_name in tensors:
            if gguf_name not in wanted and gguf_name not in self.set_aside:
                raise BadCheckpoint(
                    self.where,
                    f"tensor {gguf_name} has no place in a {self.config['architectures'][0]}",
                    "give the model's safetensors checkpoint",
                )
        for gguf_name, name in wanted.items():
            if gguf_name not in tensors:
                raise BadCheckpoint(
                    self.where, f"has no tensor {gguf_name} (for {name})", "fetch it again"
                )
            found, shape = tensors[gguf_name], self._sources[name].shape
            if found.shape != shape:
                raise BadTensor(
                    gguf_name,
                    f"has shape {list(found.shape)}, the metadata gives {list(shape)}",
                    "the file's metadata and tensors disagree: convert it again",
                )
            if len(shape) == 1 and found.kind in BLOCKS:
                raise BadTensor(
                    gguf_name, f"is a vector in {found.kind} blocks", "convert it again as F32"
                )


def gguf_to_checkpoint(
    gguf: Path,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a GGUF file as a standard HF folder of safetensors in `dtype`, and return the folder.

    One tensor at a time, so memory holds the largest tensor in float32 and in `dtype`. Written
    beside the folder and moved into place. progress is told tensors done and tensors in all.
    Errors: BadCheckpoint for the GGUF; BadRequest where the folder exists; BadTensor where a value
    overflows `dtype`.
    """
    checkpoint = GGUFCheckpoint(gguf)
    config = checkpoint.config | {"dtype": str(dtype).removeprefix("torch.")}
    texts = checkpoint.companion_texts | {"config.json": json.dumps(config, indent=2) + "\n"}
    units = [
        Unit(name, (Planned(name, dtype, info.shape),)) for name, info in checkpoint.tensors.items()
    ]
    job = {"gguf": checkpoint.fingerprint, "dtype": config["dtype"]}
    with CheckpointWriter(folder, units, job, overwrite) as writer:
        for done, name in enumerate(checkpoint.tensors, 1):
            if name not in writer.finished:
                writer.write(name, {name: _cast(name, checkpoint.read(name), dtype)})
            if progress is not None:
                progress(done, len(units))
        writer.finish(texts)
    return folder


def _cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in dtype; a finite value that becomes infinite is an error, not a loss."""
    result = values.to(dtype)
    if not all(math.isfinite(extreme) for extreme in torch.aminmax(result)):
        lost = int((~torch.isfinite(result)).sum()) - int((~torch.isfinite(values)).sum())
        if lost == 0:  # NaN and infinity in the file stay what they are
            return result
        raise BadTensor(name, f"{lost} values overflow {dtype}", "convert to bfloat16 or float32")
    return result


def _floats(packed: np.ndarray, kind: str) -> Tensor:
    """Mapped bytes [rows, bytes a row] of a float type as a tensor [rows, K], a view if aligned."""
    dtype = _DTYPES[kind]
    if packed.ctypes.data % dtype.itemsize:
        packed = packed.copy()
    return torch.from_numpy(np.asarray(packed)).view(dtype)


def _file_rows(source: Source, start: int, stop: int) -> np.ndarray:
    """The file's rows that HF rows start..stop come from."""
    return file_rows(source.shape[0], source.heads)[start:stop]
