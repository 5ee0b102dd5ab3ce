"""Old checkpoints store a rotary table in every layer; a model computes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weightpath import load, quantize
from weightpath.checkpoints.store import open_checkpoint
from weightpath.engine.load import load_float


def with_tables(source: Path, folder: Path, name: str) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.self_attn.{name}"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_stored_rotary_table_is_left_out_and_said_to_be(tiny_llama: Path, tmp_path: Path) -> None:
    name = "rotary_emb.inv_freq"
    old = with_tables(tiny_llama, tmp_path / "old", name)
    done = quantize(old, tmp_path / "out", scheme="int8")
    assert done.outcomes[f"model.layers.0.self_attn.{name}"] == "left out: computed from the config"
    ids = torch.arange(8)[None]
    expected = load_float(open_checkpoint(tiny_llama))(ids).logits
    assert torch.equal(load_float(open_checkpoint(old))(ids).logits, expected)
    assert bool(torch.isfinite(load(tmp_path / "out")(ids).logits).all())
