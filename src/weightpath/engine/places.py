"""Where a checkpoint's tensors belong in a model, checked against the model's own shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.checkpoints.shards import TensorInfo
from weightpath.checkpoints.store import Checkpoint
from weightpath.engine import skeleton
from weightpath.errors import BadCheckpoint, BadTensor


def read_checked(checkpoint: LowBitCheckpoint, name: str, linear: nn.Linear) -> ReadLinear:
    """One linear as read. BadTensor where its shape is not the model's."""
    read = checkpoint.read_linear(name)
    found = read.floats if read.qweight is None else read.qweight.codes
    assert found is not None
    wanted = (linear.out_features, linear.in_features)
    if tuple(found.shape) != wanted:
        stored = next(iter(checkpoint.parts[name].values()))
        raise BadTensor(stored, f"holds {list(found.shape)}, the model wants {list(wanted)}",
                        "the checkpoint does not match its config.json")  # fmt: skip
    return read


def take_bias(
    checkpoint: LowBitCheckpoint,
    name: str,
    linear: nn.Linear,
    floats: dict[str, TensorInfo],
    dtype: torch.dtype,
) -> Tensor | None:
    """A linear's bias, taken out of `floats`; None where the model has none."""
    if linear.bias is None:
        return None
    info = floats.pop(f"{name}.bias", None)
    if info is None:
        raise BadTensor(f"{name}.bias", "is missing", "fetch the checkpoint again")
    if info.shape != (linear.out_features,):
        raise BadTensor(info.name, f"shape {info.shape}, the model wants {(linear.out_features,)}",
                        "the checkpoint does not match its config.json")  # fmt: skip
    return checkpoint.source.read(info.name).to(dtype)


def check_places(
    checkpoint: LowBitCheckpoint, model: PreTrainedModel, linears: dict[str, nn.Linear]
) -> list[str]:
    """Low-bit tables that are looked up and not multiplied. BadCheckpoint for what is neither."""
    table = skeleton.embedding_name(model)
    for name in checkpoint.parts:
        if name not in linears and name != table:
            raise BadCheckpoint(checkpoint.where, f"{name} is packed but is no linear layer of the model",
                                "the checkpoint does not match its config.json")  # fmt: skip
    return [name for name in checkpoint.parts if name == table]


def tied_copy(model: PreTrainedModel, checkpoint: Checkpoint) -> str | None:
    """A head stored beside an embedding that it is tied to: its name, if the two are equal.

    Where they differ the head is its own, whatever the config says, and the model is untied.
    """
    head = skeleton.head_name(model)
    name = f"{head}.weight"
    if head is None or name not in checkpoint.tensors or not model.config.tie_word_embeddings:
        return None
    table = f"{skeleton.embedding_name(model)}.weight"
    if table in checkpoint.tensors and torch.equal(checkpoint.read(name), checkpoint.read(table)):
        return name
    model.config.tie_word_embeddings = False
    return None
