"""A llama-type decoder written as one GGUF file that llama.cpp opens.

    head    metadata of config.json and the tokenizer, then every tensor's name, shape and type
    data    tensor after tensor, each padded to 32 bytes, in the order of the head
    q, k    rows of llama and mistral shuffled: the file's (head, i, half) is HF's (head, half, i)

Low-bit linears become the blocks that hold their codes (gguf_blocks), whose rows are shuffled as
packed bytes; vectors become float32, which llama.cpp's norms and biases must be; other matrices
become F16, BF16 or F32. Every change of a value is measured and returned. Types follow from schemes
alone, so the head is written before a weight is read, and one tensor is in memory at a time. The
file grows beside its place under a lock and is moved there when it is whole.
Source: the GGUF description in ggml; llama.cpp's converter; gguf-py's GGUFWriter (0.19).
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from torch import Tensor

from weightpath.checkpoints.gguf import ROPE_FACTORS
from weightpath.checkpoints.gguf_blocks import block_type, bytes_of_row, hf_rows, to_blocks
from weightpath.checkpoints.gguf_config import Source
from weightpath.checkpoints.gguf_file import MAGIC
from weightpath.checkpoints.gguf_metadata import GGUFModel, Values, gguf_model
from weightpath.checkpoints.gguf_vocabulary import vocabulary_metadata
from weightpath.checkpoints.store import Checkpoint
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

FloatKind = Literal["F16", "BF16", "F32"]

ALIGNMENT = 32
VALUES_AT_ONCE = 1 << 22
"""Values of a float tensor turned into another type in one step."""

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_FILE_TYPES = {"F32": LlamaFileType.ALL_F32} | {
    kind: LlamaFileType[f"MOSTLY_{kind}"]
    for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
}
_MEND = "make room or name another place, and run it again"


@dataclass(frozen=True)
class Weight:
    """One tensor to be written: its scheme (None: floats) and how to get it when its turn comes."""

    scheme: Scheme | None
    read: Callable[[], QWeight | Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor as written: GGUF name, type, bytes, and by how much its values changed.

    exactness: `exact: ...` or `lossy: ...`, with the reason. The changes are absolute.
    """

    gguf_name: str
    kind: str
    nbytes: int
    exactness: str = "exact"
    largest_change: float = 0.0
    mean_change: float = 0.0

    @property
    def exact(self) -> bool:
        return self.largest_change == 0.0


@dataclass(frozen=True)
class WrittenGGUF:
    """The file, every tensor by its HF name, and what a user should know."""

    path: Path
    tensors: dict[str, Stored]
    notes: tuple[str, ...]


def float_weights(checkpoint: Checkpoint) -> dict[str, Weight]:
    """Every tensor of a float checkpoint, read when it is written."""
    return {name: Weight(None, partial(checkpoint.read, name)) for name in checkpoint.tensors}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Weight],
    tokenizer_folder: Path,
    *,
    float_kind: FloatKind = "F16",
    exact_only: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> WrittenGGUF:
    """Write a model of config.json and HF tensors, with the tokenizer of a folder, as a GGUF file.

    float_kind: type of the matrices that are no codes. exact_only: refuse where a value would
    change. progress is told tensors done and tensors in all.
    Errors: BadRequest where the file exists; BadCheckpoint for a model or tokenizer that GGUF has
    no words for, and a disk that refuses; BadTensor, naming it, for a tensor that is missing,
    misshapen, not finite, beyond its type's range, or whose codes no block type holds.
    """
    path = Path(path)
    if path.suffix != ".gguf":
        raise BadRequest(f"{path} is not named .gguf, which llama.cpp's tools expect")
    if path.exists() and not overwrite:
        raise BadRequest(f"{path} exists already; name another file, or pass --overwrite")
    model = gguf_model(str(path), dict(config), tensors)
    rows = model.sources["model.embed_tokens.weight"].shape[0]
    vocabulary, notes = vocabulary_metadata(Path(tokenizer_folder), rows, dict(config))
    plan = {
        name: _planned(name, source, tensors[name].scheme, float_kind)
        for name, source in model.sources.items()
    }
    stored: dict[str, Stored] = {}
    with _growing(path, sum(planned.nbytes for planned in plan.values())) as partial_path:
        _write_head(partial_path, model, vocabulary, plan)
        with partial_path.open("r+b") as handle:
            handle.seek(0, os.SEEK_END)
            _pad(handle)
            if model.rope_factors is not None:
                handle.write(model.rope_factors.astype("<f4").tobytes())
                _pad(handle)
            for name, source in model.sources.items():
                done = _write_tensor(handle, name, source, plan[name], tensors[name].read())
                if exact_only and not done.exact:
                    raise BadTensor(
                        name, f"is not {done.kind} without loss ({done.exactness})",
                        "allow lossy tensors, or write another format",
                    )  # fmt: skip
                _pad(handle)
                stored[name] = done
                if progress is not None:
                    progress(len(stored), len(plan))
            handle.flush()
            os.fsync(handle.fileno())
    left_out = [f"{name} is left out: it follows from the config" for name in model.left_out]
    return WrittenGGUF(path, stored, (*model.notes, *notes, *left_out))


def _planned(name: str, source: Source, scheme: Scheme | None, float_kind: str) -> Stored:
    """Type and bytes of a tensor, before it is read."""
    if len(source.shape) == 1:
        if scheme is not None:
            raise BadTensor(name, f"is a vector of {scheme.name} codes", "give it as floats")
        return Stored(source.gguf_name, "F32", source.shape[0] * 4)
    n, k = source.shape
    if scheme is None:
        return Stored(source.gguf_name, float_kind, n * k * _DTYPES[float_kind].itemsize)
    kind = block_type(name, scheme, k)
    return Stored(source.gguf_name, kind, n * bytes_of_row(kind, k))


def _write_head(path: Path, model: GGUFModel, vocabulary: Values, plan: dict[str, Stored]) -> None:
    """Everything before the data: metadata, and the table of tensors in the plan's order."""
    matrices = [p.kind for n, p in plan.items() if len(model.sources[n].shape) == 2]
    commonest = Counter(matrices).most_common(1)[0][0]
    u32 = GGUFValueType.UINT32
    values: Values = {
        "general.type": (GGUFValueType.STRING, "model"),
        "general.file_type": (u32, int(_FILE_TYPES[commonest])),
        "general.quantization_version": (u32, 2),
        **model.values,
        **vocabulary,
    }
    writer = GGUFWriter(path, model.architecture)
    for key, (kind, value) in values.items():
        writer.add_key_value(key, value, kind)
    table = {planned.gguf_name: (planned, model.sources[name]) for name, planned in plan.items()}
    if model.rope_factors is not None:
        factors = model.rope_factors
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, np.dtype(np.float32), factors.nbytes)
    for gguf_name, (planned, source) in table.items():
        kind = GGMLQuantizationType[planned.kind]
        writer.add_tensor_info(
            gguf_name, source.shape, np.dtype(np.float32), planned.nbytes, raw_dtype=kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _write_tensor(
    handle: IO[bytes], name: str, source: Source, planned: Stored, value: QWeight | Tensor
) -> Stored:
    """Write one tensor's bytes, rows in the file's order, and tell what changed."""
    order = hf_rows(source.shape[0], source.heads) if source.heads else None
    is_float = isinstance(value, Tensor)
    shape = tuple(value.shape if is_float else value.codes.shape)
    if is_float != (planned.kind in _DTYPES) or shape != source.shape:
        found = f"{value.dtype} {shape}" if is_float else f"{value.scheme.name} codes {shape}"
        raise BadTensor(
            name, f"is {found}, the model wants {planned.kind} {source.shape}", "check config.json"
        )
    if is_float:
        return _write_floats(handle, name, planned, value, order)
    blocks = to_blocks(name, value)
    if blocks.kind != planned.kind:
        raise BadTensor(
            name, f"became {blocks.kind}, planned was {planned.kind}", "state the scheme it has"
        )
    n, width = blocks.data.shape
    step = max(1, VALUES_AT_ONCE // width)
    for start in range(0, n, step):
        cut = slice(start, start + step)
        rows = blocks.data[cut] if order is None else blocks.data[order[cut]]
        handle.write(rows.data)
    return Stored(
        planned.gguf_name, planned.kind, planned.nbytes,
        blocks.exactness, blocks.largest_change, blocks.mean_change,
    )  # fmt: skip


def _write_floats(
    handle: IO[bytes], name: str, planned: Stored, value: Tensor, order: np.ndarray | None
) -> Stored:
    """A float tensor in its planned type, a few rows at a time."""
    if value.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise BadTensor(name, f"is {value.dtype}, wanted floats of 16 or 32 bits", "convert it")
    dtype, rows = _DTYPES[planned.kind], value.detach().reshape(value.shape[0], -1)
    picks = None if order is None else torch.from_numpy(order)
    largest = total = 0.0
    changed, step = 0, max(1, VALUES_AT_ONCE // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        cut = slice(start, start + step)
        before = rows[cut] if picks is None else rows[picks[cut]]
        after = before.to(dtype).contiguous()
        if not all(math.isfinite(extreme) for extreme in torch.aminmax(after)):
            sound = all(math.isfinite(extreme) for extreme in torch.aminmax(before))
            if not sound:
                raise BadTensor(name, "holds NaN or infinite values", "fetch the checkpoint again")
            raise BadTensor(
                name,
                f"holds {float(before.abs().max()):.6g}, {planned.kind} ends at "
                f"{torch.finfo(dtype).max:.6g}",
                "write its floats as BF16 or F32",
            )
        if dtype not in (value.dtype, torch.float32):
            change = (after.float() - before.float()).abs_()
            largest = max(largest, float(change.max()))
            total += float(change.sum(dtype=torch.float64))
            changed += int(torch.count_nonzero(change))
        handle.write(after.view(torch.uint8).numpy().data)
    exactness = "exact: its floats hold every value"
    if changed:
        mean = total / value.numel()
        exactness = (
            f"lossy: {planned.kind} rounds {changed} of {value.numel()} values, by up to "
            f"{largest:.3g}, {mean:.3g} on average"
        )
    return Stored(
        planned.gguf_name, planned.kind, planned.nbytes, exactness, largest, total / value.numel()
    )


def _pad(handle: IO[bytes]) -> None:
    """Zeros up to the next multiple of the alignment."""
    handle.write(bytes(-handle.tell() % ALIGNMENT))


@contextmanager
def _growing(path: Path, nbytes: int) -> Iterator[Path]:
    """The temporary place of a file, moved to `path` when the body is done, removed if it fails."""
    growing = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with growing.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadRequest(
                    f"{growing}: another process is writing here; wait for it, or name another file"
                ) from None
            if lock.tell() and growing.open("rb").read(4) != MAGIC:
                raise BadRequest(
                    f"{growing} is there and no part of a GGUF; move it away, or name another file"
                )
            try:
                free = shutil.disk_usage(path.parent).free
                if free < nbytes + (16 << 20):
                    raise BadCheckpoint(
                        str(path), f"needs {nbytes} bytes, {free} are free on its disk", _MEND
                    )
                yield growing
                os.replace(growing, path)
            except BaseException:
                growing.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise BadCheckpoint(
            str(path), f"cannot be written ({error.strerror or error})", _MEND
        ) from None
