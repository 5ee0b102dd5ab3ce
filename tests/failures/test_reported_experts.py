"""Reported failures of experts and extra prediction layers. README.md has the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import float_model, logits, tensors_of, told, weights_of
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tiny_configs
import tiny_linears
import weightpath
from tiny_checkpoint import edit_json, edit_tensors
from tiny_formats import write
from tiny_linears import Asked
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")


def problems(found: Any, severity: str) -> list[str]:
    return [finding.problem for finding in found.findings if finding.severity == severity]


@pytest.mark.parametrize("kind", ["awq-gemm", "gptq-v1", "ct-packed"])
def test_reported_extra_prediction_layers_are_carried_byte_for_byte(
    kind: str, tmp_path: Path
) -> None:
    """vllm#35548: mtp.* tensors were dropped, and read as whatever memory held."""
    source = write(kind, tmp_path / "in")
    extra = {"mtp.layers.0.mlp.up_proj.weight": torch.linspace(-1, 1, 256 * 128).view(256, 128).half(),
             "mtp.norm.weight": torch.linspace(0, 2, 128).half()}  # fmt: skip
    edit_tensors(source.folder, lambda t: t.update(extra))
    found = examine(source.path)
    assert any("extra prediction layers: 2 weights" in line for line in problems(found, "note"))
    assert told(found, "weightpath").startswith("no: the model that transformers makes")
    with pytest.raises(BadCheckpoint, match=r"mtp\.layers\.0\.mlp\.up_proj\.weight has no place"):
        weightpath.load(source.path)
    for to in ("compressed-tensors", "awq", "gptq"):
        after = tensors_of(convert(str(source.path), to, tmp_path / to).folder)
        assert all(torch.equal(after[name], value) for name, value in extra.items())


# mixtures of experts


def experts(folder: Path, fused: bool) -> tuple[Path, dict[str, Tensor]]:
    """A float Qwen3-MoE of 4 experts: as transformers saves them, or fused [4, ...] as it holds them."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
            num_experts=4, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32,
        )
    ).to(torch.bfloat16)  # fmt: skip
    model.save_pretrained(folder)
    if fused:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder, tensors_of(folder)


def packed_experts(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The same with every expert's linears packed, one by one, and their weights."""
    _, floats = experts(folder, fused=False)
    asked, weights = Asked(4, 32, True), {}
    tensors: dict[str, Tensor] = {}
    for name, value in floats.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = value.half()
            continue
        parts, weights[module] = tiny_linears.ct_packed(value.float().numpy(), asked)
        tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = tiny_configs.compressed_tensors(
        asked, "pack-quantized", ["lm_head", r"re:.*mlp\.gate$"]
    )
    edit_json(folder / "config.json", quantization_config=settings, dtype="float16")
    return folder, weights


def test_reported_fused_experts_stay_whole_at_their_dtype_and_their_share_is_told(
    tmp_path: Path,
) -> None:
    """llm-compressor#2939, bitsandbytes#1849: 3-D experts packed wrongly, or left at 16 bits unsaid."""
    source, tensors = experts(tmp_path / "in", fused=True)
    fused = {name: value for name, value in tensors.items() if value.ndim == 3}
    assert {tuple(value.shape) for value in fused.values()} == {(4, 128, 128), (4, 128, 64)}
    made = weightpath.quantize(source, tmp_path / "q", "w4g64")
    assert all(made.outcomes[name] == "copied" for name in fused)
    found = examine(tmp_path / "q")
    (note,) = [line for line in problems(found, "note") if "fused experts" in line]
    assert "4 tensors, 0 of them packed, 393,216 bytes" in note
    assert "% of the checkpoint" in note
    assert bool(torch.isfinite(logits(weightpath.load(tmp_path / "q"))).all())
    done = convert(str(tmp_path / "q"), "awq", tmp_path / "awq")
    for place in (tmp_path / "q", done.folder):
        after = tensors_of(place)
        assert all(torch.equal(after[name], value) for name, value in fused.items())


def test_reported_packed_experts_are_read_one_by_one_and_none_is_lost(tmp_path: Path) -> None:
    """llm-compressor#2939: every expert is converted by its own scales; a missing one is an error."""
    source, weights = packed_experts(tmp_path / "in")
    found = examine(source)
    assert found.errors == ()
    assert any("24 of them packed" in line for line in problems(found, "note"))
    for to in ("awq", "gptq"):
        done = convert(str(source), to, tmp_path / to, exact_only=True)
        after = weights_of(done.folder)
        assert all(np.array_equal(after[name], weight) for name, weight in weights.items())
    assert told(found, "weightpath").startswith("no: the model that transformers makes")
    with pytest.raises(BadCheckpoint, match="is packed but is no linear layer"):
        weightpath.load(source)
    lost = "model.layers.0.mlp.experts.2."
    edit_tensors(source, lambda t: [t.pop(name) for name in list(t) if name.startswith(lost)])
    missing, fewer = examine(source).errors
    assert "1 of 4 experts are missing (2)" in missing.problem
    assert "3 experts are stored, the model has 4" in fewer.problem
    with pytest.raises(BadCheckpoint, match="experts are missing"):
        convert(str(source), "awq", tmp_path / "out")


def test_reported_experts_packed_as_one_3d_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """llm-compressor#2939: a 3-D packed parameter is not taken for a matrix."""
    source = write("ct-packed", tmp_path / "in")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_tensors(source.folder, lambda t: t.update({
        f"{name}.weight_packed": torch.zeros(4, 128, 16, dtype=torch.int32),
        f"{name}.weight_scale": torch.ones(4, 128, 4).half(),
        f"{name}.weight_shape": torch.tensor([4, 128, 128]),
    }))  # fmt: skip
    (error,) = examine(source.path).errors
    assert error.tensor == f"{name}.weight_packed"
    assert "(4, 128, 16), wanted int32 [N, words]" in error.problem
    with pytest.raises(BadTensor, match=r"\(4, 128, 16\)"):
        convert(str(source.path), "awq", tmp_path / "out")


def test_reported_float_models_with_what_they_have_no_place_for_are_not_quantized_by_halves(
    tmp_path: Path,
) -> None:
    """vllm#35548: quantize names the tensor instead of dropping it."""
    extra = {"mtp.norm.weight": torch.ones(128).bfloat16()}
    with pytest.raises(BadCheckpoint, match=r"mtp\.norm\.weight has no place"):
        weightpath.quantize(float_model(tmp_path / "m", extra=extra), tmp_path / "q", "w4g32")
    assert not (tmp_path / "q").exists()
