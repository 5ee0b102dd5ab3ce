"""Reported failures of scales, of dtypes, in making weights and in running. README.md has the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    DOWN,
    TOKENS,
    UP,
    float_model,
    logits,
    oracle,
    same,
    weights_of,
)

import weightpath
from tiny_checkpoint import build_model as tiny_model
from tiny_checkpoint import edit_tensors, save_model
from tiny_formats import FORMATS, write
from tiny_gguf import vocabulary
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.engine.generate import answer
from weightpath.engine.load import load_tokenizer
from weightpath.errors import BadTensor, WeightpathError
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ["w4g32", "w4g32-asym", "int8"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["ct-packed", "ct-int8", "awq-gemm", "gptq-v1"])
def test_reported_a_scale_that_is_no_number_is_named_by_every_verb(
    kind: str, value: float, tmp_path: Path
) -> None:
    """compressed-tensors#832: NaN and Inf scales were saved, and loaded."""
    source = write(kind, tmp_path / "in", tokenizer=True)
    reference = float_model(tmp_path / "float", vocab_size=len(vocabulary()))
    part = f"{DOWN}.scales" if kind in ("awq-gemm", "gptq-v1") else f"{DOWN}.weight_scale"
    edit_tensors(source.folder, lambda t: t[part].view(-1)[5:6].fill_(value))
    (error,) = examine(source.path).errors
    place = re.search(r"\[\d+, \d+\] is (nan|inf)", error.problem)
    assert place is not None
    for refuse in (
        lambda: weightpath.load(source.path),
        lambda: convert(str(source.path), "compressed-tensors", tmp_path / "out"),
        lambda: weightpath.verify(source.path, reference),
    ):
        with pytest.raises(BadTensor, match=re.escape(place[0])) as caught:
            refuse()
        assert caught.value.name.startswith(DOWN)
    assert not (tmp_path / "out").exists()


def test_reported_one_zero_scale_is_told_and_spoils_nothing_else(tmp_path: Path) -> None:
    """TensorRT-LLM#16447: one zero scale made every expert NaN."""
    source = write("gptq-v1", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t[f"{DOWN}.scales"][0, 3].fill_(0))
    (finding,) = examine(source.path).findings
    assert (finding.severity, finding.kind) == ("warning", "zero scales")
    wanted = dict(source.weights)
    wanted[DOWN] = source.weights[DOWN].copy()
    wanted[DOWN][3, :32] = 0
    model: Any = weightpath.load(source.path, dtype=torch.float32)
    assert same(logits(model), logits(oracle(source.path, wanted)))
    assert any("zero scales" in note for note in model.weightpath.notes)
    for to in ("compressed-tensors", "awq", "gptq", "int8"):
        done = convert(str(source.path), to, tmp_path / to)
        assert any("zero scales" in note for note in done.notes)
        weight = weights_of(done.folder)[DOWN]
        assert np.isfinite(weight).all()
        assert not weight[3, :32].any()


def tiny_weights(model: Any) -> None:
    """A row of 1e-9, a group of 1e-12, a row and a column of zeros."""
    weight = model.model.layers[0].mlp.up_proj.weight
    weight[3], weight[4, :32], weight[5], weight[:, 7] = 1e-9, 1e-12, 0.0, 0.0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reported_tiny_and_zero_groups_become_finite_scales(
    dtype: torch.dtype, scheme: str, tmp_path: Path
) -> None:
    """GPTQModel#1531, llama.cpp#7313: NaN from a row of 1e-9 and a group of 1e-12."""
    source = float_model(tmp_path / "m", dtype, tiny_weights)
    made = weightpath.quantize(source, tmp_path / "q", scheme)
    low = open_low_bit(tmp_path / "q")
    assert all(bool(torch.isfinite(low.read_qweight(m).scales).all()) for m in low.parts)
    weight = low.read_qweight(UP).dequantize()
    held = dtype == torch.bfloat16  # float16 has no 1e-9: there it is 0, in the source already
    assert float(weight[3].abs().max()) == pytest.approx(1e-9 if held else 0, rel=0.01)
    assert float(weight[4, :32].abs().max()) <= 1.01e-12
    assert not weight[5].any()
    assert np.isfinite(made.stats[UP].signal_to_noise_db)
    assert bool(torch.isfinite(logits(weightpath.load(tmp_path / "q"))).all())
    assert examine(tmp_path / "q").errors == ()


def large_activations(model: Any) -> None:
    """down_proj's input is about 7.8e4 in layer 0, its output as before."""
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight *= 50
        layer.mlp.up_proj.weight *= 100
        layer.mlp.down_proj.weight /= 5000


def run_with_large_activations(
    folder: Path, scheme: str, dtype: torch.dtype, factor: float = 1.0
) -> tuple[float, torch.Tensor, list[int]]:
    """The largest activation before down_proj, logits, and 8 greedy tokens."""

    def edit(model: Any) -> None:
        large_activations(model)
        for layer in model.model.layers:
            layer.mlp.up_proj.weight *= factor

    source = float_model(folder / "m", edit=edit)
    weightpath.quantize(source, folder / "q", scheme)
    model: Any = weightpath.load(folder / "q", dtype=dtype)
    seen: list[float] = []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda _, given: seen.append(float(given[0].abs().max()))
    )
    found = logits(model)
    tokens = model.generate(TOKENS, max_new_tokens=8, do_sample=False)[0, TOKENS.shape[1] :]
    return seen[0], found, tokens.tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reported_an_activation_of_7e4_is_finite_in_bf16(scheme: str, tmp_path: Path) -> None:
    """vllm#15429, vllm#33972: fine in bf16, NaN in fp16."""
    largest, found, tokens = run_with_large_activations(tmp_path, scheme, torch.bfloat16)
    assert largest > 7e4
    assert bool(torch.isfinite(found).all())
    exact = logits(weightpath.load(tmp_path / "q", dtype=torch.float32))
    assert float((found.float() - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reported_products_beyond_fp16_are_finite_where_their_result_is(
    scheme: str, tmp_path: Path
) -> None:
    """vllm#15429: sums of codes pass 65504 long before the scaled result does."""
    largest, found, tokens = run_with_large_activations(tmp_path, scheme, torch.float16, 0.6)
    assert 4e4 < largest < 65504
    assert bool(torch.isfinite(found).all())
    exact = logits(weightpath.load(tmp_path / "q", dtype=torch.float32))
    assert float((found.float() - exact).abs().max()) < 0.02 * float(exact.abs().max())
    assert len(set(tokens)) > 3


def test_reported_an_overflow_of_fp16_is_named_and_no_answer_of_one_token(tmp_path: Path) -> None:
    """vllm#33972, vllm#9618: "!!!!" from an overflow."""
    model = tiny_model(vocab_size=128)
    with torch.no_grad():
        large_activations(model)
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(10)
    save_model(tmp_path / "m", model)
    weightpath.quantize(tmp_path / "m", tmp_path / "q", "w4g32")
    low = weightpath.load(tmp_path / "q", dtype=torch.float16)
    assert not bool(torch.isfinite(logits(low)).all())
    with pytest.raises(WeightpathError, match="not finite"):
        answer(low, load_tokenizer(tmp_path / "q"), [{"role": "user", "content": "a"}], 4)


@pytest.mark.parametrize("kind", FORMATS)
def test_reported_no_format_answers_with_one_token_over_and_over(kind: str, tmp_path: Path) -> None:
    """vllm#9618: "!!!!" from a kernel: logits are finite, tokens are those of the float weights."""
    source = write(kind, tmp_path / "in", tokenizer=kind == "gguf")
    model: Any = weightpath.load(source.path, dtype=torch.float32)
    ids = TOKENS
    reference = oracle(source.path, source.weights)
    for _ in range(8):
        step = logits(model, ids)[0, -1]
        assert bool(torch.isfinite(step).all())
        ids = torch.cat([ids, step.argmax().view(1, 1)], dim=1)
        assert int(ids[0, -1]) == int(logits(reference, ids[:, :-1])[0, -1].argmax())
    assert len(set(ids[0, TOKENS.shape[1] :].tolist())) > 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reported_a_dead_column_stops_nothing(scheme: str, tmp_path: Path) -> None:
    """llm-compressor#142: Cholesky fails on dead columns and few samples. Rounding needs neither."""

    def dead(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[:, 7] = 0
            layer.mlp.down_proj.weight[:, 5] = 0

    source = float_model(tmp_path / "m", edit=dead)
    weightpath.quantize(source, tmp_path / "q", scheme)
    for name, column in ((UP, 7), (DOWN, 5)):
        qweight = open_low_bit(tmp_path / "q").read_qweight(name)
        assert bool(torch.isfinite(qweight.scales).all())
        assert float(qweight.scales.abs().min()) > 0
        assert not qweight.dequantize()[:, column].any()
    assert bool(torch.isfinite(logits(weightpath.load(tmp_path / "q"))).all())


def test_reported_a_weight_that_is_no_number_stops_with_its_place(tmp_path: Path) -> None:
    """llm-compressor#142, compressed-tensors#832: what would poison a solver is refused by name."""

    def poisoned(model: Any) -> None:
        model.model.layers[0].mlp.up_proj.weight[9, 4] = torch.nan

    source = float_model(tmp_path / "m", edit=poisoned)
    with pytest.raises(BadTensor, match=rf"{UP}.*nan"):
        weightpath.quantize(source, tmp_path / "q", "w4g32")
    assert not (tmp_path / "q").exists()
