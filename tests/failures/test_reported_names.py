"""Reported failures of heads, biases, skip lists and extra parts. README.md has the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    LINEARS,
    QUERY,
    logits,
    oracle,
    same,
    tensors_of,
    told,
)
from torch import Tensor

import weightpath
from tiny_checkpoint import edit_json, edit_tensors
from tiny_formats import write
from weightpath.errors import BadCheckpoint, WeightpathError
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def quantization_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def set_ignore(folder: Path, ignore: list[str]) -> None:
    edit_json(folder / "config.json",
              quantization_config=quantization_config(folder) | {"ignore": ignore})  # fmt: skip


def problems(found: Any, severity: str) -> list[str]:
    return [finding.problem for finding in found.findings if finding.severity == severity]


@pytest.mark.parametrize("equal", [True, False])
def test_reported_a_tied_head_stored_twice_is_told_and_computed_once(
    equal: bool, tmp_path: Path
) -> None:
    """sglang#2935: a tied head stored beside its embedding."""
    source = write("gptq-v1", tmp_path / "in", model={"tied": True})
    wanted = logits(oracle(source.path, source.weights))
    own = tensors_of(source.folder)[TABLE] * (1 if equal else 2)
    edit_tensors(source.folder, lambda t: t.update({HEAD: own}))
    (finding,) = examine(source.path).findings
    assert (finding.tensor, finding.kind) == (HEAD, "tied head stored twice")
    assert finding.severity == ("note" if equal else "warning")
    found = logits(weightpath.load(source.path, dtype=torch.float32))
    assert same(found, wanted * (1 if equal else 2))


def test_reported_a_packed_head_of_a_tied_model_is_used_and_the_tie_is_said(tmp_path: Path) -> None:
    """mlx-lm#1247: a tied head stored as a quantized triple."""
    source = write("gptq-v1", tmp_path / "in", head=True, changes={"lm_head": True})
    edit_json(source.folder / "config.json", tie_word_embeddings=True)
    (finding,) = examine(source.path).findings
    assert (finding.severity, finding.tensor) == ("warning", "lm_head")
    assert "is stored as packed, and config.json ties it" in finding.problem
    wanted = logits(oracle(source.path, source.weights))
    assert same(logits(weightpath.load(source.path, dtype=torch.float32)), wanted)
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", exact_only=True)
    assert json.loads((done.folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert examine(done.folder).findings == ()
    assert same(logits(weightpath.load(done.folder, dtype=torch.float32)), wanted)


def test_reported_a_bias_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    """optimum#1827: random biases on a model without any."""
    source = write("gptq-v1", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t.update({f"{QUERY}.bias": torch.ones(128).half()}))
    (error,) = examine(source.path).errors
    assert error.tensor == f"{QUERY}.bias"
    assert "128 of its values are not zero" in error.problem
    with pytest.raises(WeightpathError, match=r"q_proj\.bias"):
        weightpath.load(source.path)
    with pytest.raises(BadCheckpoint, match="the architecture has no such bias"):
        convert(str(source.path), "awq", tmp_path / "out")


def test_reported_a_bias_of_zeros_is_harmless_and_said_so(tmp_path: Path) -> None:
    """optimum#1827: AutoGPTQ writes a bias of zeros for every linear."""
    source = write("gptq-v1", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t.update({
        f"{name}.bias": torch.zeros(len(weight)).half() for name, weight in source.weights.items()
    }))  # fmt: skip
    found = examine(source.path)
    assert {finding.severity for finding in found.findings} == {"note"}
    assert all("it is all zeros" in finding.problem for finding in found.findings)
    assert len(found.findings) == LINEARS
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", exact_only=True)
    assert done.exact == LINEARS


def test_reported_biases_of_zeros_are_left_out_by_load(tmp_path: Path) -> None:
    """optimum#1827: such files run as if the biases were not there."""
    source = write("gptq-v1", tmp_path / "in")
    wanted = logits(oracle(source.path, source.weights))
    edit_tensors(source.folder, lambda t: t.update({f"{QUERY}.bias": torch.zeros(128).half()}))
    assert told(examine(source.path), "weightpath").startswith("yes")
    assert same(logits(weightpath.load(source.path, dtype=torch.float32)), wanted)


def test_reported_a_skip_list_that_splits_a_fused_layer_is_told_and_loads_here(
    tmp_path: Path,
) -> None:
    """vllm#11354: q_proj ignored, k_proj and v_proj quantized."""
    source = write("ct-packed", tmp_path / "in")
    floats = {name: weight for name, weight in source.weights.items() if "q_proj" in name}

    def unpack(tensors: dict[str, Tensor]) -> None:
        for name, weight in floats.items():
            for part in [part for part in tensors if part.startswith(name)]:
                del tensors[part]
            tensors[f"{name}.weight"] = torch.from_numpy(weight).half()

    edit_tensors(source.folder, unpack)
    set_ignore(source.folder, ["lm_head", "re:.*q_proj"])
    told_of = problems(examine(source.path), "warning")
    assert len(told_of) == 2
    assert all("q_proj of it is float, k_proj, v_proj are quantized" in line for line in told_of)
    packed = {name: weight for name, weight in source.weights.items() if name not in floats}
    wanted = logits(oracle(source.path, packed))
    assert same(logits(weightpath.load(source.path, dtype=torch.float32)), wanted)
    done = convert(str(source.path), "awq", tmp_path / "out", exact_only=True)
    assert set(quantization_config(done.folder)["modules_to_not_convert"]) == {"lm_head", *floats}
    assert same(logits(weightpath.load(done.folder, dtype=torch.float32)), wanted)


TOWER = {
    "visual.blocks.0.attn.qkv.weight": torch.linspace(-1, 1, 128 * 128).view(128, 128).half(),
    "visual.blocks.0.mlp.fc1.weight": torch.linspace(1, -2, 256 * 128).view(256, 128).half(),
}


@pytest.mark.parametrize(
    ("ignore", "covered"),
    [(["lm_head"], False), (["lm_head", "visual"], False), (["lm_head", "re:visual.*"], True)],
)
def test_reported_a_vision_tower_that_no_skip_entry_covers_is_told(
    ignore: list[str], covered: bool, tmp_path: Path
) -> None:
    """vllm#9832: the skip list was not honoured for visual.*"""
    source = write("ct-packed", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t.update(TOWER))
    set_ignore(source.folder, ignore)
    found = examine(source.path)
    assert any("vision and audio towers: 2 weights" in line for line in problems(found, "note"))
    warned = [line for line in problems(found, "warning") if "no entry of ignore covers" in line]
    assert len(warned) == (0 if covered else 2)  # as vLLM and as transformers read the list


@pytest.mark.parametrize(
    ("to", "key"),
    [("compressed-tensors", "ignore"), ("awq", "modules_to_not_convert"), ("gptq", "dynamic")],
)
def test_reported_a_vision_tower_is_carried_whole_and_named_in_the_skip_list(
    to: str, key: str, tmp_path: Path
) -> None:
    """vllm#9832: what is written names every float linear of the tower in full."""
    source = write("ct-packed", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t.update(TOWER))
    done = convert(str(source.path), to, tmp_path / "out", exact_only=True)
    after = tensors_of(done.folder)
    assert all(torch.equal(after[name], value) for name, value in TOWER.items())
    listed = str(quantization_config(done.folder)[key]).replace("\\\\", "")
    assert all(name.removesuffix(".weight") in listed for name in TOWER)
    assert problems(examine(done.folder), "warning") == []
