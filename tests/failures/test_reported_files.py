"""Reported failures of files, configs and GGUF. README.md has the table."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cases import (
    DOWN,
    LINEARS,
    QUERY,
    UP,
    fields,
    gptq_weight,
    logits,
    oracle,
    same,
    tensors_of,
    told,
    weights_of,
)

import tiny_gguf
import weightpath
from tiny_checkpoint import edit_json, edit_tensors
from tiny_files import model_of
from tiny_formats import write
from tiny_packers import AWQ_ORDER
from weightpath.checkpoints.gguf_file import read_gguf
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.errors import BadCheckpoint, WeightpathError
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")

INDEX = "model.safetensors.index.json"


# config


@pytest.mark.parametrize("kind", ["awq-gemm", "gptq-v1", "ct-packed", "hqq"])
def test_reported_a_nested_quantization_config_is_found(kind: str, tmp_path: Path) -> None:
    """vllm#11122: quantization_config stands in text_config."""
    source = write(kind, tmp_path / "in", place="nested")
    assert "quantization_config" not in json.loads((source.folder / "config.json").read_text())
    found = weights_of(source.path)
    assert all(np.array_equal(found[name], weight) for name, weight in source.weights.items())
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    said = json.loads((done.folder / "config.json").read_text())
    assert said["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in said["text_config"]
    assert told(examine(done.folder), "vLLM", "CUDA").startswith("yes")


@pytest.mark.parametrize("kind", ["gptq-v1", "awq-gemm", "ct-packed", "bnb-nf4", "hqq"])
def test_reported_a_lost_quantization_config_is_worked_out_from_the_tensors_and_said(
    kind: str, tmp_path: Path
) -> None:
    """llm-compressor#959: quantization_config is missing, packed tensors are present."""
    source = write(kind, tmp_path / "in", place="missing")
    found = weights_of(source.path)
    assert all(np.array_equal(found[name], weight) for name, weight in source.weights.items())
    seen = examine(source.path)
    assert told(seen, "vLLM", "CUDA").startswith("no: without a quantization_config")
    assert told(seen, "transformers").startswith("wrong: without a quantization_config")
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    assert told(examine(done.folder), "vLLM", "CUDA").startswith("yes")


@pytest.mark.parametrize("kind", ["awq-gemv", "ct-int8", "ct-padded"])
def test_reported_a_lost_config_that_nothing_settles_is_refused_and_not_guessed(
    kind: str, tmp_path: Path
) -> None:
    """llm-compressor#959: shapes alone do not tell these."""
    source = write(kind, tmp_path / "in", place="missing")
    for refuse in (
        lambda: examine(source.path),
        lambda: weightpath.load(source.path),
        lambda: convert(str(source.path), "awq", tmp_path / "out"),
    ):
        with pytest.raises(BadCheckpoint, match="no quantization_config, and its tensors do not"):
            refuse()


# files


def test_reported_a_missing_shard_is_named_by_every_verb(tmp_path: Path) -> None:
    """vllm#34859: a missing shard loaded silently."""
    source = write("gptq-v1", tmp_path / "in", shards=3)
    (source.folder / "model-00002-of-00003.safetensors").unlink()
    for refuse in (
        lambda: examine(source.path),
        lambda: weightpath.load(source.path),
        lambda: convert(str(source.path), "awq", tmp_path / "out"),
    ):
        with pytest.raises(BadCheckpoint, match=r"model-00002-of-00003\..*shard is missing"):
            refuse()


def test_reported_a_shard_that_the_index_forgot_is_an_error(tmp_path: Path) -> None:
    """vllm#34859: neither the index nor the model has its tensors."""
    source = write("gptq-v1", tmp_path / "in", shards=3)
    index = json.loads((source.folder / INDEX).read_text())["weight_map"]
    kept = {name: file for name, file in index.items() if "00002" not in file}
    edit_json(source.folder / INDEX, weight_map=kept)
    errors = examine(source.path).errors
    assert errors[0].tensor == "model-00002-of-00003.safetensors"
    assert "the index does not name it" in errors[0].problem
    with pytest.raises(WeightpathError):
        weightpath.load(source.path)
    with pytest.raises(BadCheckpoint, match="model-00002-of-00003"):
        convert(str(source.path), "awq", tmp_path / "out")


GONE = [f"{DOWN}.scales", f"{UP}.qweight", f"{QUERY}.qzeros", "model.norm.weight",
        "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"]  # fmt: skip


@pytest.mark.parametrize("name", GONE)
def test_reported_a_missing_tensor_is_named_by_every_verb(name: str, tmp_path: Path) -> None:
    """vllm#34859: a missing tensor was read as whatever memory held."""
    source = write("gptq-v1", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t.pop(name))
    assert any(name.startswith(error.tensor) for error in examine(source.path).errors)
    place = name.rpartition(".")[0]
    for refuse in (
        lambda: weightpath.load(source.path),
        lambda: convert(str(source.path), "compressed-tensors", tmp_path / "out"),
    ):
        with pytest.raises(WeightpathError, match=place):
            refuse()
    assert not (tmp_path / "out").exists()


def test_reported_gptq_words_with_the_sign_bit_read_as_unsigned(tmp_path: Path) -> None:
    """llama.cpp#8147: numpy overflowed on words of 2**31 and more."""
    source = write("gptq-v1", tmp_path / "in", symmetric=False)
    edit_tensors(source.folder, lambda t: [
        t[name].fill_(-1) for name in t if name.endswith("qweight")
    ])  # fmt: skip
    tensors = tensors_of(source.folder)
    assert (fields(tensors[f"{DOWN}.qweight"]) == 15).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = weights_of(source.path)
        done = convert(str(source.path), "awq", tmp_path / "out", exact_only=True)
    wanted = {name: gptq_weight(tensors, name, add=1) for name in source.weights}
    for weights in (found, weights_of(done.folder)):
        assert all(np.array_equal(weights[name], weight) for name, weight in wanted.items())


def test_reported_awq_words_with_the_sign_bit_read_as_unsigned(tmp_path: Path) -> None:
    """llama.cpp#8147: the highest nibble is column 7 of its eight."""
    source = write("awq-gemm", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t[f"{DOWN}.qweight"].fill_(-(2**31)))  # 8 in nibble 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes = open_low_bit(source.path).read_qweight(DOWN).codes
    assert AWQ_ORDER[7] == 7
    assert (codes[7::8] == 8).all()
    assert int(codes.sum()) == 8 * codes[7::8].numel()


def test_reported_a_big_endian_gguf_is_refused_with_the_mend(tmp_path: Path) -> None:
    """llama.cpp#17431: a big-endian file was read as little-endian."""
    model = model_of(0, True, ())
    writer: Any = tiny_gguf.writer_of(
        tmp_path / "big.gguf", model, "llama", endianess=gguf.GGUFEndian.BIG
    )
    for name, value in model.state_dict().items():
        writer.add_tensor(tiny_gguf.gguf_name(name), value.float().numpy())
    tiny_gguf.finish(writer)
    path = tmp_path / "big.gguf"
    assert path.read_bytes()[4:8] == b"\x00\x00\x00\x03"
    for refuse in (
        lambda: examine(path),
        lambda: weightpath.load(path),
        lambda: convert(str(path), "compressed-tensors", tmp_path / "out"),
        lambda: weightpath.quantize(path, tmp_path / "out", "w4g32"),
    ):
        with pytest.raises(BadCheckpoint, match=r"is a big-endian GGUF .*gguf-convert-endian"):
            refuse()


# GGUF


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """HF rows in llama.cpp's order: rows i and i + d/2 of every head side by side."""
    return np.concatenate(
        [np.stack([head[: len(head) // 2], head[len(head) // 2 :]], axis=1).reshape(head.shape)
         for head in np.split(rows, heads)]
    )  # fmt: skip


def file_rows(path: Path, name: str) -> np.ndarray:
    """Dequantized rows [N, K] of a tensor as they stand in the file, by gguf-py's own arithmetic."""
    file = read_gguf(path)
    kind = gguf.GGMLQuantizationType[file.tensors[name].kind]
    return gguf.dequantize(np.ascontiguousarray(file.rows(name)), kind)


@pytest.mark.parametrize("kind", ["ct-packed", "gptq-v1", "autoround-awq"])
def test_reported_query_and_key_rows_are_put_in_ggufs_order_and_back(
    kind: str, tmp_path: Path
) -> None:
    """llama.cpp#22611: q and k rows left as they were made perplexity 100 times worse."""
    source = write(kind, tmp_path / "in", tokenizer=True)
    path = convert(str(source.path), "gguf", tmp_path / "m.gguf", exact_only=True).folder
    for place, leaf, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        wanted = source.weights[f"model.layers.0.self_attn.{leaf}"]
        found = file_rows(path, f"blk.0.{place}.weight")
        assert np.array_equal(found, interleaved(wanted, heads))
        assert not np.array_equal(found, wanted)
    value = source.weights["model.layers.0.self_attn.v_proj"]
    assert np.array_equal(file_rows(path, "blk.0.attn_v.weight"), value)
    wanted_logits = logits(oracle(source.path, source.weights))
    assert same(logits(weightpath.load(path, dtype=torch.float32)), wanted_logits)
    back = convert(str(path), "compressed-tensors", tmp_path / "back", exact_only=True)
    assert back.exact == LINEARS
    after = weights_of(back.folder)
    assert all(np.array_equal(after[name], weight) for name, weight in source.weights.items())


def test_reported_rows_in_the_wrong_order_do_give_other_logits(tmp_path: Path) -> None:
    """llama.cpp#22611: the check above is not blind."""
    source = write("ct-packed", tmp_path / "in")
    skipped = dict(source.weights)
    for name, weight in source.weights.items():
        if name.endswith(("q_proj", "k_proj")):
            skipped[name] = interleaved(weight, 4 if "q_proj" in name else 2)
    right, wrong = (logits(oracle(source.path, weights)) for weights in (source.weights, skipped))
    assert not same(wrong, right)
