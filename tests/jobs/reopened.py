"""What a written checkpoint holds, read back, and how far it is from what it was made from."""

from __future__ import annotations

import ctypes
import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightpath.checkpoints import compressed_tensors as ct
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.store import Checkpoint
from weightpath.device.memory import PeakMemory
from weightpath.jobs.convert import Converted, ConvertedTensor
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

HIDDEN, INTERMEDIATE = 1024, 4096
CODES = HIDDEN * INTERMEDIATE
"""Bytes of the codes of the largest linear of `many_layers`, a byte each."""
LAYERS_SCHEME = Scheme(4, 64, symmetric=False)


def weights_of(place: Path) -> dict[str, np.ndarray]:
    """float32 [N, K] of every projection and a low-bit head, packed or float, by module."""
    low = open_low_bit(place)
    found = {module: low.read_linear(module).weight().numpy() for module in low.parts}
    for name in low.floats:
        if re.search(r"_proj\.weight$|^lm_head\.weight$", name):
            found[name.removesuffix(".weight")] = low.source.read(name).float().numpy()
    return found


def difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Largest and mean |first - second|, in float64."""
    moved = np.abs(first.astype(np.float64) - second.astype(np.float64))
    return float(moved.max()), float(moved.mean())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    joined: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        joined |= load_file(file)
    return joined


def state_of(place: Path, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A float model's state dict: linears by their weights, all else as it is stored."""
    low = open_low_bit(place)
    source: Checkpoint = low.source
    state = {name: source.read(name).to(dtype) for name in low.floats}
    for module in low.parts:
        state[f"{module}.weight"] = low.read_linear(module).weight().to(dtype)
    return state


def of(done: Converted, name: str) -> ConvertedTensor:
    """What was told of one tensor."""
    return next(item for item in (*done.linears, *done.floats) if item.name == name)


def check_told(done: Converted, oracle: dict[str, np.ndarray], skip: tuple[str, ...] = ()) -> None:
    """Every linear is as far from the oracle as was told, and bit-equal where exact was told."""
    found = weights_of(done.folder)
    assert found.keys() >= oracle.keys()
    for item in done.linears:
        if item.name.endswith(skip or "\0"):
            continue
        largest, mean = difference(oracle[item.name], found[item.name])
        assert largest == pytest.approx(item.largest_change, rel=1e-4), item
        assert mean == pytest.approx(item.mean_change, rel=1e-4), item
        assert item.exact == np.array_equal(oracle[item.name], found[item.name]), item


def added_memory() -> PeakMemory:
    """A measure of RssAnon that starts when what earlier work freed is back with the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return PeakMemory(interval=0.001)


def many_layers(folder: Path, layers: int) -> Path:
    """A Llama of hidden 1024 and intermediate 4096 in asymmetric 4 bits, 7 linears a layer."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, int]] = dict.fromkeys(
        [f"self_attn.{part}_proj" for part in "qkvo"], (HIDDEN, HIDDEN)
    )
    shapes |= dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (INTERMEDIATE, HIDDEN))
    shapes["mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
    tensors = {
        "model.embed_tokens.weight": torch.ones(64, HIDDEN).half(),
        "lm_head.weight": torch.ones(64, HIDDEN).half(),
        "model.norm.weight": torch.ones(HIDDEN).half(),
    }
    names = []
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN).half()
        for leaf, (n, k) in shapes.items():
            names.append(f"model.layers.{layer}.{leaf}")
            qweight = QWeight(
                LAYERS_SCHEME,
                torch.from_numpy(draw.integers(0, 16, (n, k), np.uint8)),
                torch.from_numpy(draw.uniform(0.01, 0.02, (n, k // 64))).half(),
                torch.from_numpy(draw.integers(1, 16, (n, k // 64), np.int16)),
            )
            tensors |= ct.to_tensors(names[-1], qweight)
    save_file(tensors, folder / "model.safetensors")
    said = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float16",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "quantization_config": ct.quantization_config(dict.fromkeys(names, LAYERS_SCHEME), ["lm_head"]),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))
    return folder
