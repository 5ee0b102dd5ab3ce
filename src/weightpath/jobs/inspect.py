"""What is in a checkpoint's folder, counted from the tensors that are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.checkpoints.shards import TensorInfo
from weightpath.checkpoints.store import (
    Checkpoint,
    architecture,
    gguf_at,
    open_checkpoint,
    quantization_method,
)
from weightpath.engine import skeleton
from weightpath.engine.load import Progress, no_progress
from weightpath.errors import BadCheckpoint, BadTensor


@dataclass(frozen=True)
class Kind:
    """Weights of one scheme and role (linear, head, embedding, other): tensors, bytes, bits."""

    scheme: str
    role: str
    tensors: int
    weights: int
    stored_bytes: int
    bits_per_weight: float


@dataclass(frozen=True)
class Modules:
    """Low-bit linears that differ in numbers alone (`*` stands for them) and have one scheme: how
    many, their shapes [N, K], and bits per weight as stored."""

    pattern: str
    scheme: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    bits_per_weight: float


@dataclass(frozen=True)
class Inspection:
    """Counts of one folder. Bits per weight are bytes stored over weights; a linear's weight_shape,
    two numbers beside its codes, counts in the file alone.

    linear: decoder linears alone; matmul: with the head, what a decode step reads; file: every
    tensor's bytes over the weights of the model (a tied matrix once).
    """

    where: str
    format: str
    architecture: str
    tensors: int
    weights: int
    tensor_bytes: int
    file_bytes: int
    linear_bits_per_weight: float
    matmul_bits_per_weight: float
    file_bits_per_weight: float
    kinds: tuple[Kind, ...]
    made_by: dict[str, Any]
    modules: tuple[Modules, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass
class _Count:
    tensors: int = 0
    weights: int = 0
    stored: int = 0


OnRead = Callable[[str, ReadLinear | BadTensor | BadCheckpoint], None]
"""Told of every linear as it was read, or of what refused it."""


def inspect_folder(
    where: Path, on_read: OnRead | None = None, progress: Progress = no_progress
) -> Inspection:
    """Count a float or low-bit checkpoint, or a GGUF file. Reads headers, and every linear's
    integers, so that a damaged one is an error naming it: raised, or told to `on_read`."""
    if not where.exists():
        raise BadCheckpoint(str(where), "does not exist", "give a folder that holds config.json")
    opened = open_any(where)
    if isinstance(opened, LowBitCheckpoint):
        return _low_bit(opened, on_read, progress)
    form = "GGUF" if isinstance(opened, GGUFCheckpoint) else "safetensors, float"
    return _float(opened, form)


def open_any(where: Path) -> LowBitCheckpoint | Checkpoint:
    """A low-bit checkpoint where its config or its tensors say so, else a float one."""
    gguf = gguf_at(where)
    if gguf is not None:
        checkpoint = GGUFCheckpoint(gguf)
        return open_low_bit(gguf) if checkpoint.linears else checkpoint
    source = open_checkpoint(where, float_only=False)
    if quantization_method(source.config, source.tensors):
        return open_low_bit(where)
    return source


def _low_bit(
    checkpoint: LowBitCheckpoint, on_read: OnRead | None, progress: Progress
) -> Inspection:
    role_of = roles(checkpoint.config, checkpoint.where)
    counts: dict[tuple[str, str], _Count] = {}
    rows: dict[tuple[str, str], _Count] = {}
    shapes: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for done, module in enumerate(checkpoint.parts, 1):
        try:
            read = checkpoint.read_linear(module)
        except (BadTensor, BadCheckpoint) as error:
            if on_read is None:
                raise
            on_read(module, error)
            continue
        finally:
            progress("reading linears", done, len(checkpoint.parts))
        if on_read is not None:
            on_read(module, read)
        values = read.floats if read.qweight is None else read.qweight.codes
        assert values is not None
        scheme = "floats" if read.qweight is None else read.qweight.scheme.name
        stored = checkpoint.stored_bytes(module) - _shape_bytes(checkpoint, module)
        _add(counts, (scheme, role_of(f"{module}.weight")), values.numel(), stored)
        place = (re.sub(r"\d+", "*", module), scheme)
        _add(rows, place, values.numel(), stored)
        shapes.setdefault(place, set()).add(tuple(values.shape))
    for name, info in checkpoint.floats.items():
        kind, stored = _stored(checkpoint.source, info)
        _add(counts, (kind, role_of(name)), _numel(info.shape), stored)
    weights = sum(count.weights for count in counts.values())
    if checkpoint.manifest.get("untied_head"):
        weights -= sum(count.weights for (_, role), count in counts.items() if role == "head")
    modules = tuple(
        Modules(pattern, scheme, count.tensors, tuple(sorted(shapes[pattern, scheme])),
                _ratio(count.stored, count.weights))
        for (pattern, scheme), count in rows.items()
    )  # fmt: skip
    tensors = checkpoint.source.tensors.values()
    tensor_bytes = sum(_stored(checkpoint.source, info)[1] for info in tensors)
    return _inspection(checkpoint.where, checkpoint.format, checkpoint.config, counts, weights,
                       tensor_bytes, _file_bytes(checkpoint.where), checkpoint.manifest,
                       modules)  # fmt: skip


def _shape_bytes(checkpoint: LowBitCheckpoint, module: str) -> int:
    info = checkpoint.source.tensors.get(f"{module}.weight_shape")
    return info.nbytes if info else 0


def _float(checkpoint: Checkpoint, form: str) -> Inspection:
    role_of = roles(checkpoint.config, checkpoint.where)
    counts: dict[tuple[str, str], _Count] = {}
    for name, info in checkpoint.tensors.items():
        kind, stored = _stored(checkpoint, info)
        _add(counts, (kind, role_of(name)), _numel(info.shape), stored)
    weights = sum(count.weights for count in counts.values())
    stored = sum(count.stored for count in counts.values())
    return _inspection(
        checkpoint.where, form, checkpoint.config, counts, weights, stored,
        _file_bytes(checkpoint.where), {}, (),
    )  # fmt: skip


def roles(config: Mapping[str, Any], where: str) -> Callable[[str], str]:
    """Tensor name -> linear, head, embedding or other (norms, biases), by the model that config.json
    describes; by names alone where transformers does not know it."""
    try:
        model = skeleton.build(config, torch.bfloat16, where)
    except BadCheckpoint:
        return _role_by_name
    linears, head = skeleton.linears(model), skeleton.head_name(model)
    table = skeleton.embedding_name(model)

    def role_of(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or (module != table and module not in linears):
            return "other"
        return "embedding" if module == table else "head" if module == head else "linear"

    return role_of


def _role_by_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    if leaf != "weight" or "norm" in last:
        return "other"
    return "embedding" if "embed" in last else "head" if last == "lm_head" else "linear"


def _add(
    counts: dict[tuple[str, str], _Count], key: tuple[str, str], weights: int, stored: int
) -> None:
    count = counts.setdefault(key, _Count())
    count.tensors += 1
    count.weights += weights
    count.stored += stored


def _inspection(
    where: str, form: str, config: dict[str, Any], counts: dict[tuple[str, str], _Count],
    weights: int, tensor_bytes: int, file_bytes: int, made_by: dict[str, Any],
    modules: tuple[Modules, ...],
) -> Inspection:  # fmt: skip
    def bits(*roles: str) -> float:
        chosen = [count for (_, role), count in counts.items() if role in roles]
        return _ratio(sum(c.stored for c in chosen), sum(c.weights for c in chosen))

    kinds = tuple(
        Kind(
            scheme,
            role,
            count.tensors,
            count.weights,
            count.stored,
            _ratio(count.stored, count.weights),
        )
        for (scheme, role), count in counts.items()
    )
    return Inspection(
        where=where,
        format=form,
        architecture=architecture(config),
        tensors=sum(count.tensors for count in counts.values()),
        weights=weights,
        tensor_bytes=tensor_bytes,
        file_bytes=file_bytes,
        linear_bits_per_weight=bits("linear"),
        matmul_bits_per_weight=bits("linear", "head"),
        file_bits_per_weight=_ratio(tensor_bytes, weights),
        kinds=kinds,
        made_by=made_by,
        modules=modules,
    )


def _stored(source: Checkpoint, info: TensorInfo) -> tuple[str, int]:
    """How a float tensor is stored: its dtype, or a GGUF file's type for it, and its bytes."""
    if isinstance(source, GGUFCheckpoint):
        return source.stored(info.name)
    return str(info.dtype).removeprefix("torch."), info.nbytes


def _file_bytes(where: str) -> int:
    """Bytes of the weight files of a folder, or of a file's folder; of a GGUF file itself."""
    path = Path(where)
    if path.suffix == ".gguf" and path.is_file():
        return path.stat().st_size
    folder = path if path.is_dir() else path.parent
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _ratio(stored: int, weights: int) -> float:
    return 8 * stored / weights if weights else 0.0
