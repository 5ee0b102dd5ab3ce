"""From a checkpoint to the shapes that a plan decides on: its linears, its head, what is tied."""

from __future__ import annotations

import torch

from weightpath.checkpoints.store import Checkpoint
from weightpath.engine import skeleton
from weightpath.engine.load import tied_copy
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.paths.tensors import LinearShape, ModelShapes

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that float tensors are written in: fp16 where most of the source is fp16, else
    bf16 (fp32 sources and expanded GGUF blocks are rounded to it)."""
    sizes: dict[torch.dtype, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return (
        torch.float16
        if max(sizes, key=lambda dtype: sizes[dtype]) == torch.float16
        else torch.bfloat16
    )


def model_shapes(checkpoint: Checkpoint) -> ModelShapes:
    """Every linear, the head and the embedding of a float checkpoint, checked against its model.

    BadCheckpoint names a weight that the model needs and the checkpoint lacks; BadTensor one whose
    shape is not the model's.
    """
    dtype = stored_dtype(checkpoint)
    model = skeleton.build(checkpoint.config, dtype, checkpoint.where)
    head = skeleton.head_name(model)
    copy = tied_copy(model, checkpoint)
    tied = bool(model.config.tie_word_embeddings) and head is not None
    shapes: list[LinearShape] = []
    for name, module in skeleton.linears(model).items():
        role = "linear" if name != head else "tied_head" if tied else "head"
        shapes.append(LinearShape(name, module.out_features, module.in_features, role))
        if role != "tied_head":
            _require(checkpoint, f"{name}.weight", (module.out_features, module.in_features))
    if head is not None:
        table = skeleton.embedding_name(model)
        rows, columns = model.get_input_embeddings().weight.shape  # type: ignore[union-attr]
        _require(checkpoint, f"{table}.weight", (rows, columns))
        if not tied:
            shapes.append(LinearShape(table, rows, columns, "embedding"))
    total = 0
    for name, info in checkpoint.tensors.items():
        width = dtype.itemsize if info.dtype.is_floating_point else info.dtype.itemsize
        total += 0 if name == copy else _count(info.shape) * width
    return ModelShapes(tuple(shapes), tied, DTYPES[dtype], total)


def _require(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> None:
    if name not in checkpoint.tensors:
        raise BadCheckpoint(
            checkpoint.where, f"tensor {name} is missing", "fetch the checkpoint again"
        )
    found = checkpoint.tensors[name].shape
    if tuple(found) != shape:
        raise BadTensor(
            name,
            f"shape {tuple(found)}, config.json wants {shape}",
            "the checkpoint does not match its config.json",
        )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
