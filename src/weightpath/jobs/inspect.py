"""What is in a checkpoint's folder, counted from the tensors that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit
from weightpath.checkpoints.shards import TensorInfo, read_json
from weightpath.checkpoints.store import Checkpoint, open_checkpoint, quantization_method
from weightpath.engine import skeleton
from weightpath.errors import BadCheckpoint


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass
class _Count:
    tensors: int = 0
    weights: int = 0
    stored: int = 0


def inspect_folder(where: Path) -> Inspection:
    """Count a float or low-bit checkpoint, or a GGUF file. Reads headers, and every linear's
    integers, so that a damaged one is an error naming it."""
    if not where.exists():
        raise BadCheckpoint(str(where), "does not exist", "give a folder that holds config.json")
    if where.suffix == ".gguf" and where.is_file():
        return _float(GGUFCheckpoint(where), "GGUF", where.stat().st_size)
    config = read_json((where if where.is_dir() else where.parent) / "config.json")
    if quantization_method(config, ()):
        return _low_bit(open_low_bit(where))
    checkpoint = open_checkpoint(where)
    return _float(checkpoint, "safetensors, float", _weight_files(where))


def _low_bit(checkpoint: LowBitCheckpoint) -> Inspection:
    role_of = _roles(checkpoint.config, checkpoint.where)
    counts: dict[tuple[str, str], _Count] = {}
    for module in checkpoint.linears:
        qweight = checkpoint.read_qweight(module)
        _add(
            counts,
            (qweight.scheme.name, role_of(f"{module}.weight")),
            qweight.codes.numel(),
            checkpoint.stored_bytes(module) - _shape_bytes(checkpoint, module),
        )
    for name, info in checkpoint.floats.items():
        _add(
            counts,
            (_dtype(info), role_of(name)),
            _numel(info.shape),
            info.nbytes,
        )
    weights = sum(count.weights for count in counts.values())
    if checkpoint.manifest.get("untied_head"):
        weights -= sum(count.weights for (_, role), count in counts.items() if role == "head")
    return _inspection(checkpoint.where, checkpoint.format, checkpoint.config, counts, weights,
                       sum(info.nbytes for info in checkpoint.source.tensors.values()),
                       _weight_files(Path(checkpoint.where)), checkpoint.manifest)  # fmt: skip


def _shape_bytes(checkpoint: LowBitCheckpoint, module: str) -> int:
    info = checkpoint.source.tensors.get(f"{module}.weight_shape")
    return info.nbytes if info else 0


def _float(checkpoint: Checkpoint, form: str, file_bytes: int) -> Inspection:
    role_of = _roles(checkpoint.config, checkpoint.where)
    counts: dict[tuple[str, str], _Count] = {}
    for name, info in checkpoint.tensors.items():
        _add(
            counts,
            (_dtype(info), role_of(name)),
            _numel(info.shape),
            info.nbytes,
        )
    weights = sum(count.weights for count in counts.values())
    stored = sum(count.stored for count in counts.values())
    return _inspection(
        checkpoint.where, form, checkpoint.config, counts, weights, stored, file_bytes, {}
    )


def _roles(config: Mapping[str, Any], where: str) -> Callable[[str], str]:
    """Tensor name -> linear, head, embedding or other (norms, biases), by the model that config.json
    describes."""
    model = skeleton.build(config, torch.bfloat16, where)
    linears, head = skeleton.linears(model), skeleton.head_name(model)
    table = skeleton.embedding_name(model)

    def role_of(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or (module != table and module not in linears):
            return "other"
        return "embedding" if module == table else "head" if module == head else "linear"

    return role_of


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
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        tensors=sum(count.tensors for count in counts.values()),
        weights=weights,
        tensor_bytes=tensor_bytes,
        file_bytes=file_bytes,
        linear_bits_per_weight=bits("linear"),
        matmul_bits_per_weight=bits("linear", "head"),
        file_bits_per_weight=_ratio(tensor_bytes, weights),
        kinds=kinds,
        made_by=made_by,
    )


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _weight_files(folder: Path) -> int:
    folder = folder if folder.is_dir() else folder.parent
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _ratio(stored: int, weights: int) -> float:
    return 8 * stored / weights if weights else 0.0
