"""The audit of an opened checkpoint: files, names, skip lists and every linear's values.

inspect shows all findings; convert, load and verify call `require_sound`, which refuses what would
make the model wrong, and keep the warnings as notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weightpath.checkpoints.audit import (
    Finding,
    audit_files,
    audit_fused,
    audit_names,
    audit_qweight,
    audit_scales_when_served,
)
from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.checkpoints.opened import Outline, Parts
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.checkpoints.store import Checkpoint
from weightpath.engine import skeleton
from weightpath.engine.load import model_dtype
from weightpath.errors import BadCheckpoint


def name_findings(low: LowBitCheckpoint, outlines: Mapping[str, Outline]) -> list[Finding]:
    """Files, names against the model that config.json describes, and skip lists."""
    shapes = {module: outline.shape for module, outline in outlines.items()}
    found, head = _names(low.source, low.parts, shapes)
    quantized = dict.fromkeys(low.parts, True)
    for name, info in low.floats.items():
        module, _, leaf = name.rpartition(".")
        table = "embed" in module.rpartition(".")[2]
        if leaf == "weight" and len(info.shape) == 2 and not table:
            quantized.setdefault(module, False)
    found.extend(audit_fused(quantized, low.settings, head or "lm_head"))
    return found


def float_findings(checkpoint: Checkpoint) -> list[Finding]:
    """The same of a float checkpoint: files and names."""
    return _names(checkpoint, {}, {})[0]


def _names(
    source: Checkpoint, parts: Parts, shapes: dict[str, tuple[int, int]]
) -> tuple[list[Finding], str | None]:
    """Findings about files and names, and the head's module where the model is known.

    Where transformers does not know the model, names are audited by themselves.
    """
    found = list(audit_files(Path(source.where)))
    try:
        model = skeleton.build(source.config, torch.bfloat16, source.where)
    except BadCheckpoint:
        layers = source.config.get("num_hidden_layers")
        layers = layers if type(layers) is int else None
        found.extend(
            audit_names(
                source.tensors, parts, shapes=shapes, read=source.read, num_hidden_layers=layers
            )
        )
        return found, None
    head, table = skeleton.head_name(model), skeleton.embedding_name(model)
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters()}
    saved = model.state_dict()
    wanted |= {name: tuple(value.shape) for name, value in model.named_buffers() if name in saved}
    tied = None
    if head is not None and model.config.tie_word_embeddings:
        tied = (f"{head}.weight", f"{table}.weight")
    wanted = {name: shape for name, shape in wanted.items() if not skeleton.recomputed(name)}
    found.extend(
        audit_names(
            source.tensors, parts, wanted, tied, shapes=shapes, read=source.read,
            renamed=skeleton.renamed(model),
        )
    )  # fmt: skip
    return found, head


def value_findings(name: str, read: ReadLinear, config: Mapping[str, Any]) -> list[Finding]:
    """One linear's scales and zero points, and what serving it in the model's dtype does to them."""
    if read.qweight is None:
        return []
    found = list(audit_qweight(name, read.qweight, read.column_scales))
    found.extend(audit_scales_when_served(name, read.qweight, model_dtype(dict(config))))
    return found
