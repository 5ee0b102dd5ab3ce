"""From a checkpoint to the shapes that a plan decides on: its linears, its head, what is tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightpath.checkpoints.store import Checkpoint
from weightpath.engine import skeleton
from weightpath.engine.places import tied_copy
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

    BadCheckpoint names a tensor that the model needs and the checkpoint lacks, or the other way
    round; BadTensor one whose shape is not the model's.
    """
    dtype = stored_dtype(checkpoint)
    model = skeleton.build(checkpoint.config, dtype, checkpoint.where)
    head = skeleton.head_name(model)
    copy = tied_copy(model, checkpoint)
    stored = {name: info.shape for name, info in checkpoint.tensors.items()}
    skeleton.check(model, stored, checkpoint.where)
    tied = bool(model.config.tie_word_embeddings) and head is not None
    shapes: list[LinearShape] = []
    for name, module in skeleton.linears(model).items():
        role = "linear" if name != head else "tied_head" if tied else "head"
        shapes.append(LinearShape(name, module.out_features, module.in_features, role))
    if head is not None and not tied:
        rows, columns = _weight(model.get_input_embeddings()).shape
        shapes.append(LinearShape(skeleton.embedding_name(model), rows, columns, "embedding"))
    total = 0
    for name, info in checkpoint.tensors.items():
        width = dtype.itemsize if info.dtype.is_floating_point else info.dtype.itemsize
        left_out = name == copy or skeleton.recomputed(name)
        total += 0 if left_out else _count(info.shape) * width
    return ModelShapes(tuple(shapes), tied, DTYPES[dtype], total)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
