"""Reported failures of zero points, column orders and symmetric AWQ. README.md has the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    DOWN,
    LINEARS,
    float_model,
    gptq_weight,
    logits,
    lossy,
    oracle,
    packed_fields,
    same,
    tensors_of,
    told,
    weights_of,
)
from cases import fields as fields_of
from torch import Tensor

import weightpath
from tiny_checkpoint import edit_json, edit_tensors
from tiny_formats import write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")


def test_reported_v2_zeros_under_a_v1_label_are_read_as_they_are(tmp_path: Path) -> None:
    """vllm#38966: all fields 8 under label gptq gave "!!!" """
    source = write("gptq-v2", tmp_path / "in", changes={"checkpoint_format": "gptq"})
    stored = tensors_of(source.folder)
    assert (fields_of(stored[f"{DOWN}.qzeros"]) == 8).all()
    wanted = logits(oracle(source.path, source.weights))
    model = weightpath.load(source.path, dtype=torch.float32)
    assert same(logits(model), wanted)
    believed = {name: gptq_weight(stored, name, add=1) for name in source.weights}
    assert not same(logits(oracle(source.path, believed)), wanted)
    found = examine(source.path)
    assert any(note.startswith("contradiction: checkpoint_format gptq") for note in found.notes)
    assert told(found, "transformers").startswith("wrong")
    done = convert(str(source.path), "gptq", tmp_path / "v1", exact_only=True)
    after = examine(done.folder)
    assert after.inspection.format == "GPTQ v1"
    assert not any("contradiction" in note for note in after.notes)


def with_zeros_0_and_15(folder: Path, v1: bool) -> dict[str, np.ndarray]:
    """A GPTQ file whose zeros are 0, 15, 0, 15, ... along every word, and its weights."""
    source = write("gptq-v1" if v1 else "gptq-v2", folder, symmetric=False)

    def zeros(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("qzeros")]:
            groups, words = tensors[name].shape
            values = np.tile([0, 15], (groups, words * 4))
            tensors[name] = packed_fields((values - v1) % 16)

    edit_tensors(source.folder, zeros)
    tensors = tensors_of(source.folder)
    return {name: gptq_weight(tensors, name, add=int(v1)) for name in source.weights}


@pytest.mark.parametrize("v1", [True, False])
def test_reported_zeros_0_and_15_side_by_side_keep_to_their_own_fields(
    v1: bool, tmp_path: Path
) -> None:
    """AutoGPTQ#325, AutoGPTQ#640: asymmetric v1 under- and overflows into neighbours."""
    wanted = with_zeros_0_and_15(tmp_path / "in", v1)
    found = weights_of(tmp_path / "in")
    assert all(np.array_equal(found[name], weight) for name, weight in wanted.items())
    model = weightpath.load(tmp_path / "in", dtype=torch.float32)
    assert same(logits(model), logits(oracle(tmp_path / "in", wanted)))
    for to in ("compressed-tensors", "awq", "gptq_v2"):
        done = convert(str(tmp_path / "in"), to, tmp_path / to, exact_only=True)
        after = weights_of(done.folder)
        assert all(np.array_equal(after[name], weight) for name, weight in wanted.items()), to
    with pytest.raises(BadTensor, match=r"512 of 1024 zero points are 0, .*; write gptq_v2"):
        convert(str(tmp_path / "in"), "gptq", tmp_path / "v1")


def test_reported_words_that_a_packer_overran_are_told_as_lost(tmp_path: Path) -> None:
    """AutoGPTQ#325: -1 was OR-ed into its word and filled every later field with ones."""
    source = write("gptq-v1", tmp_path / "in", symmetric=False)

    def overrun(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("qzeros"):
                tensors[name][0, 0] = -9  # 7, then fifteens to the end of the word

    edit_tensors(source.folder, overrun)
    notes = examine(source.path).notes
    assert any("AutoGPTQ leaves words after a zero of 0: some are lost" in note for note in notes)


def only_positive(model: Any) -> None:
    """Groups in [1.0, 1.1] and in [-1.1, -1.0], which leave 0 out of their range."""
    weight = model.model.layers[0].mlp.down_proj.weight
    spread = torch.linspace(1.0, 1.1, weight.shape[1])
    weight[0], weight[1] = spread, -spread


@pytest.mark.parametrize("scheme", ["w4g32-asym", "w4g32"])
def test_reported_codes_and_zeros_stay_within_their_bits(scheme: str, tmp_path: Path) -> None:
    """auto-round#2273: code 16 spilled into its neighbour, since nothing was clamped."""
    weightpath.quantize(float_model(tmp_path / "m", edit=only_positive), tmp_path / "q", scheme)
    qweight = open_low_bit(tmp_path / "q").read_qweight(DOWN)
    assert int(qweight.codes.max()) == 15
    assert qweight.zeros is None or 0 <= int(qweight.zeros.min()) <= int(qweight.zeros.max()) <= 15
    weight = qweight.dequantize()
    spread = torch.linspace(1.0, 1.1, 256)
    step = 1.1 / (15 if qweight.zeros is not None else 7)
    assert float((weight[0] - spread).abs().max()) < step
    assert float((weight[1] + spread).abs().max()) < step
    done = convert(str(tmp_path / "q"), "awq", tmp_path / "awq")
    assert np.array_equal(weights_of(done.folder)[DOWN], weight.numpy())


@pytest.mark.parametrize(
    ("kind", "dtype", "value", "words"),
    [
        ("ct-int8", torch.uint8, 200, "is torch.uint8"),  # unsigned in a signed convention
        ("ct-packed", torch.int8, 16, "zeros out of range"),
    ],
)
def test_reported_zeros_of_another_convention_are_refused_and_never_packed(
    kind: str, dtype: torch.dtype, value: int, words: str, tmp_path: Path
) -> None:
    """auto-round#2273: an unsigned zero point in a signed convention."""
    source = write(kind, tmp_path / "in", symmetric=False)

    def other(tensors: dict[str, Tensor]) -> None:
        name = f"{DOWN}.weight_zero_point"
        tensors[name] = torch.full(tensors[f"{DOWN}.weight_scale"].shape, value, dtype=dtype)

    edit_tensors(source.folder, other)
    (error,) = examine(source.path).errors
    assert words in error.problem
    assert DOWN in error.tensor
    for refuse in (
        lambda: weightpath.load(source.path),
        lambda: convert(str(source.path), "gptq_v2", tmp_path / "out"),
    ):
        with pytest.raises((BadTensor, BadCheckpoint), match=DOWN):
            refuse()


def test_reported_asymmetric_zero_points_of_12_rows_are_decompressed_by_transformers(
    tmp_path: Path,
) -> None:
    """llm-compressor#1618: compressed-tensors asymmetric, N = 12."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    narrow = {"head_dim": 12, "num_key_value_heads": 1}
    source = write("ct-packed", tmp_path / "in", symmetric=False, group_size=16, model=narrow)
    key = "model.layers.0.self_attn.k_proj"
    assert source.weights[key].shape == (12, 128)
    assert np.array_equal(weights_of(source.path)[key], source.weights[key])
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", exact_only=True)
    assert tensors_of(done.folder)[f"{key}.weight_zero_point"].shape == (2, 8)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(done.folder),
        dtype=torch.float16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    for name, wanted in source.weights.items():
        found = model.get_submodule(name).weight.detach().numpy()
        assert np.array_equal(found, wanted.astype(np.float16)), name


@pytest.mark.parametrize("desc_act", [True, False])
def test_reported_a_column_order_is_never_ignored(desc_act: bool, tmp_path: Path) -> None:
    """vllm#54809: a permuted g_idx was ignored silently, whatever desc_act says."""
    source = write("gptq-v1", tmp_path / "in", ordered=True, changes={"desc_act": desc_act})
    wanted = logits(oracle(source.path, source.weights))
    assert same(logits(weightpath.load(source.path, dtype=torch.float32)), wanted)
    plain = write("gptq-v1", tmp_path / "plain", ordered=True)
    edit_tensors(plain.folder, lambda t: [
        t[name].copy_(torch.arange(len(t[name])) // 32) for name in t if name.endswith("g_idx")
    ])  # fmt: skip
    assert not same(logits(weightpath.load(plain.path, dtype=torch.float32)), wanted)
    verdict = told(examine(source.path), "vLLM", "CUDA")
    if desc_act:
        assert verdict.startswith("no: it refuses desc_act true since 0.30")
    else:
        assert verdict.startswith("wrong: under desc_act false it drops every g_idx")
    done = convert(str(source.path), "compressed-tensors", tmp_path / "ct")
    changed = lossy(done)
    assert all("quantized again as w4g32: " in how for how in changed.values())
    assert not any(name.endswith("down_proj") for name in changed)  # folded into gate and up
    assert told(examine(done.folder), "vLLM", "CUDA").startswith("yes")
    kept = convert(str(source.path), "gptq_v2", tmp_path / "v2", exact_only=True)
    assert same(logits(weightpath.load(kept.folder, dtype=torch.float32)), wanted)


@pytest.mark.parametrize("zeros", [True, False])
def test_reported_symmetric_awq_is_read_and_written(zeros: bool, tmp_path: Path) -> None:
    """AutoAWQ#478: zero_point false had no writer; its zeros are 8, stored or not."""
    source = write("awq-gemm", tmp_path / "in", symmetric=True)
    if not zeros:
        edit_tensors(source.folder, lambda t: [t.pop(n) for n in list(t) if n.endswith("qzeros")])
    assert source.settings["zero_point"] is False
    found = weights_of(source.path)
    assert all(np.array_equal(found[name], weight) for name, weight in source.weights.items())
    assert told(examine(source.path), "vLLM", "CUDA").startswith("yes" if zeros else "wrong")
    symmetric = convert(
        str(source.path), "compressed-tensors", tmp_path / "ct", exact_only=True
    )  # zero points that are all the midpoint are left out
    assert not any(name.endswith("zero_point") for name in tensors_of(symmetric.folder))
    written = convert(str(symmetric.folder), "awq", tmp_path / "awq", exact_only=True)
    assert written.exact == LINEARS
    after = weights_of(written.folder)
    assert all(np.array_equal(after[name], weight) for name, weight in source.weights.items())
    stored = tensors_of(written.folder)[f"{DOWN}.qzeros"]
    assert (fields_of(stored) == 8).all()
    edit_json(written.folder / "config.json", dtype="float16")
    assert told(examine(written.folder), "vLLM", "CUDA").startswith("yes")
