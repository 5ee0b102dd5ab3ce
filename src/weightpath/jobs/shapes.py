"""From a checkpoint to the shapes that a plan decides on: its linears, its head, what is tied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weightpath.checkpoints.store import Checkpoint
from weightpath.engine import skeleton
from weightpath.engine.places import tied_copy
from weightpath.paths.tensors import ExpertShape, LinearShape, ModelShapes

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
"""What configs call the number of experts that a token goes to."""


@dataclass(frozen=True)
class ConfigOnly:
    """A model of which there is only a config: enough to plan it, not to make it."""

    config: dict[str, Any]
    where: str


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
    copy = tied_copy(model, checkpoint)
    stored = {name: info.shape for name, info in checkpoint.tensors.items()}
    skeleton.check(model, stored, checkpoint.where)
    kept = [
        (info.shape, dtype.itemsize if info.dtype.is_floating_point else info.dtype.itemsize)
        for name, info in checkpoint.tensors.items()
        if name != copy and not skeleton.recomputed(name)
    ]
    return _shapes_of(model, dtype, kept)


def config_shapes(config: Mapping[str, Any], where: str = "config.json") -> ModelShapes:
    """The same from a config alone: no weights are needed, and experts may be fused.

    The floats are bf16, or fp16 where the config says so, as `stored_dtype` has it for files.
    """
    said = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = torch.float16 if said == "float16" else torch.bfloat16
    model = skeleton.build(config, dtype, where)
    saved = set(model.state_dict())
    tensors = [*model.named_parameters(), *model.named_buffers()]  # a tied matrix once
    kept = [
        (tuple(t.shape), dtype.itemsize if t.is_floating_point() else t.dtype.itemsize)
        for name, t in tensors
        if name in saved
    ]
    return _shapes_of(model, dtype, kept)


def _shapes_of(
    model: PreTrainedModel, dtype: torch.dtype, kept: list[tuple[tuple[int, ...], int]]
) -> ModelShapes:
    """kept: shape and bytes an element of every tensor that the file holds."""
    head = skeleton.head_name(model)
    tied = bool(model.config.tie_word_embeddings) and head is not None
    shapes: list[LinearShape] = []
    for name, module in skeleton.linears(model).items():
        role = "linear" if name != head else "tied_head" if tied else "head"
        shapes.append(LinearShape(name, module.out_features, module.in_features, role))
    if head is not None and not tied:
        rows, columns = _weight(model.get_input_embeddings()).shape
        shapes.append(LinearShape(skeleton.embedding_name(model), rows, columns, "embedding"))
    main = model.get_input_embeddings() if head is not None else None
    return ModelShapes(
        tuple(shapes), tied, DTYPES[dtype],
        total_bytes=sum(_count(shape) * width for shape, width in kept),
        experts=_experts(model),
        experts_per_token=_experts_per_token(model),
        tables=tuple(
            LinearShape(name, *module.weight.shape, role="embedding")
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and module is not main
        ),
        vector_elements=sum(_count(shape) for shape, _ in kept if len(shape) == 1),
    )  # fmt: skip


def _experts(model: PreTrainedModel) -> tuple[ExpertShape, ...]:
    """Parameters [experts, N, K] of modules that hold all experts of a layer, or [experts, K, N]:
    the hidden size is the K of what goes in and the N of what comes out."""
    hidden = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
    found = []
    for name, tensor in model.named_parameters():
        if tensor.ndim != 3 or "experts" not in name.split(".")[:-1]:
            continue
        count, n, k = (int(size) for size in tensor.shape)
        out = "down" in name.rpartition(".")[2]
        turned = (n if out else k) != hidden and (k if out else n) == hidden
        found.append(ExpertShape(name, count, *((k, n) if turned else (n, k))))
    return tuple(found)


def _experts_per_token(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    found = (getattr(config, name, None) for name in EXPERTS_PER_TOKEN)
    return next((value for value in found if isinstance(value, int)), 0)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
