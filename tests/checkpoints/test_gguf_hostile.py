"""GGUF metadata, configs and tokenizers of the wrong kinds are refused in one line, both ways."""

from __future__ import annotations

import json
import struct
import time
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tiny_gguf import (
    byte_level,
    file_tensors,
    finish,
    make_folder,
    tiny_model,
    vocabulary,
    writer_of,
)
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.gguf_blocks import from_blocks
from weightpath.checkpoints.gguf_config import generation_config, model_config
from weightpath.checkpoints.gguf_metadata import gguf_model
from weightpath.checkpoints.gguf_tokenizer import joins, tokenizer_files
from weightpath.checkpoints.gguf_vocabulary import vocabulary_metadata
from weightpath.errors import BadCheckpoint, BadTensor

ROWS = 272


def one_line(error: Exception, *words: str) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    for word in words:
        assert word in message


# --- reading ----------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 512, "llama.embedding_length": 128,
    "llama.feed_forward_length": 256, "llama.block_count": 2, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}  # fmt: skip
SHAPES = {"token_embd.weight": (64, 128), "output_norm.weight": (128,)}
KINDS = dict.fromkeys(SHAPES, "F16")


def config_of(**changes: Any) -> dict[str, Any]:
    metadata = PLAIN | {key.replace("__", "."): value for key, value in changes.items()}
    return model_config("a.gguf", metadata, KINDS, SHAPES, None)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("general__architecture", ["llama"], "architecture is ['llama']"),
        ("llama__block_count", [1, 2], "block_count is [1, 2]"),
        ("llama__context_length", list(range(9000)), "context_length is [0, 1, 2"),
        ("llama__attention__layer_norm_rms_epsilon", 1e300, "epsilon is 1e+300"),
        ("llama__rope__freq_base", float("nan"), "freq_base is nan"),
        ("tokenizer__ggml__eos_token_id", [1, 2], "eos_token_id is [1, 2]"),
    ],
)
def test_metadata_of_another_kind_is_refused_by_its_key(key: str, value: Any, word: str) -> None:
    assert config_of()["hidden_size"] == 128
    with pytest.raises(BadCheckpoint) as caught:
        config_of(**{key: value})
    one_line(caught.value, "a.gguf", word)


@pytest.mark.parametrize("factor", ["2", [2.0], None, float("nan"), -1.0])
def test_a_rope_factor_that_is_no_number_is_refused(factor: Any) -> None:
    with pytest.raises(BadCheckpoint, match="rope"):
        config_of(llama__rope__scaling__type="linear", llama__rope__scaling__factor=factor)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokenizer.ggml.eot_token_id", [1]), ("general.sampling.temp", "warm"),
     ("general.sampling.top_p", float("inf"))],
)  # fmt: skip
def test_generation_settings_of_another_kind_are_refused(key: str, value: Any) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        generation_config({key: value}, "a.gguf")
    one_line(caught.value, "a.gguf", key)


def tokenizer_metadata(**changes: Any) -> dict[str, Any]:
    names = {"add_tokenizer_model": "model", "add_tokenizer_pre": "pre", "add_token_list": "tokens",
             "add_token_types": "token_type", "add_token_merges": "merges",
             "add_bos_token_id": "bos_token_id", "add_eos_token_id": "eos_token_id"}  # fmt: skip
    made = {names[key]: value for key, value in byte_level().items() if key in names}
    return {f"tokenizer.ggml.{key}": value for key, value in (made | changes).items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 7},
        {"tokens": [1, 2, 3]},
        {"merges": 0.5},
        {"merges": [1, 2]},
        {"merges": ["x" * 9000]},
        {"token_type": 3},
        {"token_type": ["a"]},
        {"pre": ["smollm"]},
        {"pre": "x" * 9000},
        {"bos_token_id": [1]},
        {"bos_token_id": 1.0},
        {"model": "llama", "scores": ["a"] * len(vocabulary())},
        {"model": "llama", "scores": 0.5},
        {"add_bos_token": True, "tokens": ["<|end|>", "a: b", *vocabulary()[2:]]},
        {"add_bos_token": True, "tokens": ["<|end|>", "$0", *vocabulary()[2:]]},
    ],
)
def test_a_vocabulary_of_other_kinds_is_refused(changes: dict[str, Any]) -> None:
    assert "tokenizer.json" in tokenizer_files("a.gguf", tokenizer_metadata(), 0)
    with pytest.raises(BadCheckpoint) as caught:
        tokenizer_files("a.gguf", tokenizer_metadata(**changes), 0)
    one_line(caught.value, "a.gguf")


def test_joins_of_long_pieces_are_found_by_lengths_and_at_once() -> None:
    pieces = ["a", "b", "ab", "abab", "aba", "x" * 40, "x" * 80, "ba", "bab"]
    wanted = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    assert ("x" * 40, "x" * 40) in wanted
    assert joins({piece: index for index, piece in enumerate(pieces)}) == wanted
    started = time.monotonic()
    joins({"a": 0, "a" * 500_000: 1, "b" * 500_000: 2})  # every cut would copy 125 GB
    assert time.monotonic() - started < 2


def test_a_number_of_parts_that_is_a_text_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", tiny_model(num_hidden_layers=1)
    writer = writer_of(path, model, "llama")
    writer.add_string("split.count", "two")
    finish(writer)
    with pytest.raises(BadCheckpoint, match="is one of 'two' parts"):
        GGUFCheckpoint(path)


def test_rope_factors_in_blocks_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", tiny_model(num_hidden_layers=1)
    writer = writer_of(path, model, "llama")
    for name, values in file_tensors(model, "llama").items():
        writer.add_tensor(name, values)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(np.ones((1, 32), np.float32), kind)[0]
    writer.add_tensor("rope_freqs.weight", packed, raw_dtype=kind)
    finish(writer)
    with pytest.raises(BadTensor, match=r"rope_freqs.weight: is Q8_0, wanted floats"):
        GGUFCheckpoint(path)


def test_a_tensor_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", tiny_model(num_hidden_layers=1)
    writer = writer_of(path, model, "llama")
    for name, values in file_tensors(model, "llama").items():
        writer.add_tensor(name, values)
    writer.add_tensor("rope_freqs.weight", np.ones((0,), np.float32))
    finish(writer)
    with pytest.raises(BadCheckpoint, match=r"rope_freqs.weight has shape \(0,\)"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_an_infinite_scale_of_a_k_block_is_refused_without_a_warning(kind: str) -> None:
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    block = bytearray(size)
    struct.pack_into("<e", block, 208 if kind == "Q6_K" else 0, float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadTensor, match="is nan"):
            from_blocks("m", kind, np.frombuffer(bytes(block), np.uint8)[None])


# --- writing ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written() -> tuple[dict[str, Any], list[str]]:
    model = tiny_model()
    return json.loads(model.config.to_json_string(use_diff=False)), list(model.state_dict())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"model_type": "x" * 9000}, "model_type is 'xxx"),
        ({"num_hidden_layers": 1 << 30}, "has 1073741824 layers, but 21 tensors"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"layer_types": 5}, "layers are 5"),
        ({"layer_types": [["full_attention"]]}, "layers are ['full_attention']"),
        ({"hidden_act": "x" * 9000}, "hidden_act is 'xxx"),
        ({"rope_parameters": {"rope_theta": 1e300}}, "rope rope_theta is 1e+300"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope rope_theta is 1000"),
        ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, "rope type is ['yarn']"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0,
                                 "original_max_position_embeddings": 1 << 40}},
            "original_max_position_embeddings is 1099511627776",
        ),
        ({"model_type": "mistral", "architectures": None, "sliding_window": "4"}, "sliding_window is '4'"),
    ],
)  # fmt: skip
def test_a_config_of_other_kinds_is_refused_by_its_key(
    written: tuple[dict[str, Any], list[str]], changes: dict[str, Any], word: str
) -> None:
    config, names = written
    assert gguf_model("a", config, names).architecture == "llama"
    with pytest.raises(BadCheckpoint) as caught:
        gguf_model("a", config | changes, names)
    one_line(caught.value, word)


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("tokenizer_config.json", {"pad_token": ["<|end|>"]}, "no pad token"),
        ("tokenizer_config.json", {"bos_token": {"content": ["x"]}}, "no bos token"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, "no Unicode text"),
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8 (byte 0)"),
        ("generation_config.json", {"do_sample": True, "top_k": 1 << 40}, "top_k is 1099511627776"),
        ("generation_config.json", {"do_sample": True, "top_p": float("inf")}, "top_p is inf"),
    ],
)
def test_a_tokenizers_files_of_other_kinds_are_refused(
    tmp_path: Path, file: str, content: Any, word: str
) -> None:
    folder = make_folder(tmp_path)
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(known | content))
    with pytest.raises(BadCheckpoint) as caught:
        vocabulary_metadata(folder, ROWS, {})
    one_line(caught.value, word)


def test_end_tokens_in_nested_lists_are_passed_over(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [[1], 5, 0, 5]}))
    values, _ = vocabulary_metadata(folder, ROWS, {})
    assert values["tokenizer.ggml.eot_token_id"][1] == 5


def test_an_added_token_under_another_id_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    stated = json.loads((folder / "tokenizer.json").read_text())
    stated["added_tokens"][-1]["id"] = 1 << 30
    (folder / "tokenizer.json").write_text(json.dumps(stated))
    with pytest.raises(BadCheckpoint, match=r"adds token '<think>' as 1073741824"):
        vocabulary_metadata(folder, ROWS, {})
