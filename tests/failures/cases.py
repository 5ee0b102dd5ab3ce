"""What the tests of reported failures share: the tiny model, float oracles, and words on disk.

Base of all: a seeded Llama of 2 layers, hidden 128, intermediate 256, vocabulary 64, 4 query and 2
KV heads (tiny_formats.write for low-bit files, `float_model` for floats).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tiny_checkpoint import build_model
from tiny_files import SIZES, config_of
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.engine import skeleton
from weightpath.jobs.convert import Converted
from weightpath.jobs.examine import Examination

DOWN = "model.layers.0.mlp.down_proj"
UP = "model.layers.0.mlp.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"
LINEARS = 14
TOKENS = torch.tensor([[1, 5, 9, 33, 7, 2]])


def float_model(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    edit: Callable[[Any], object] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """A float checkpoint of the base model. edit: changes its weights; extra: more tensors."""
    model = build_model(**{**SIZES, **changes})
    if edit is not None:
        with torch.no_grad():
            edit(model)
    folder.mkdir()
    tensors = {name: value.to(dtype).clone() for name, value in model.state_dict().items()}
    save_file(tensors | dict(extra or {}), folder / "model.safetensors", {"format": "pt"})
    said = config_of(model) | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def logits(model: Any, ids: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def oracle(place: Path, weights: Mapping[str, np.ndarray]) -> PreTrainedModel:
    """The float32 model with these weights [N, K], and the file's own floats."""
    low = open_low_bit(place)
    config = {**low.config, "tie_word_embeddings": False} if "lm_head" in weights else low.config
    model = skeleton.build(config, torch.float32)
    tensors = {f"{name}.weight": torch.tensor(value) for name, value in weights.items()}
    tensors |= {name: low.source.read(name).float() for name in low.floats}
    skeleton.fill(model, tensors.items(), str(place))
    return skeleton.finish(model, str(place))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether logits agree as two orders of fp32 sums do."""
    return torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max()))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def weights_of(place: Path) -> dict[str, np.ndarray]:
    """float32 [N, K] of every packed linear, as it is read."""
    low = open_low_bit(place)
    return {module: low.read_linear(module).weight().numpy() for module in low.parts}


def lossy(done: Converted) -> dict[str, str]:
    """The linears that changed, and how."""
    return {item.name: item.how for item in done.linears if not item.exact}


def told(found: Examination, runtime: str, device: str = "") -> str:
    """A runtime's verdict, the newest vLLM's: "no: why"."""
    rows = [row for row in found.acceptance if (row.runtime, row.device) == (runtime, device)]
    return f"{rows[-1].loads}: {rows[-1].why}"


def fields(words: Tensor, bits: int = 4) -> np.ndarray:
    """Fields of int32 words along the last axis, each word from its low end."""
    plain = words.numpy().view(np.uint32).astype(np.int64)
    each = 32 // bits
    shifts = bits * np.arange(each)
    return ((plain[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*plain.shape[:-1], -1)


def packed_fields(values: np.ndarray, bits: int = 4) -> Tensor:
    """The opposite of `fields`: values that fit go into int32 words."""
    each = 32 // bits
    rows = values.astype(np.uint64).reshape(*values.shape[:-1], -1, each)
    words = sum(rows[..., i] << np.uint64(bits * i) for i in range(each))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32).copy())


def gptq_weight(tensors: Mapping[str, Tensor], module: str, add: int) -> np.ndarray:
    """W [N, K] of 4-bit GPTQ by its formula. add: what is added to each stored zero, field by field."""
    codes = fields(tensors[f"{module}.qweight"].t().contiguous())
    zeros = (fields(tensors[f"{module}.qzeros"]) + add) % 16
    scales = tensors[f"{module}.scales"].float().numpy()
    group = tensors[f"{module}.g_idx"].long().numpy()
    steps = (codes - zeros[group].T).astype(np.float32)
    return steps * scales[group].T
