"""GGUF files read as HF checkpoints: row order, block formats, config, vocabulary, bad files."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from block_formulas import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_of_process import anonymous_bytes
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tiny_gguf import (
    byte_level,
    file_tensors,
    finish,
    gguf_name,
    tiny_model,
    vocabulary,
    write_gguf,
    writer_of,
)
from weightpath.checkpoints.gguf import GGUFCheckpoint, gguf_to_checkpoint
from weightpath.checkpoints.gguf_config import generation_config
from weightpath.checkpoints.gguf_file import read_gguf
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor, WeightpathError

KIND = gguf.GGMLQuantizationType
IDS = torch.tensor([[1, 5, 9, 33, 60, 2, 2, 17]])


def rebuilt(path: Path) -> PreTrainedModel:
    """A transformers model with the config and tensors that the reader gives."""
    checkpoint = GGUFCheckpoint(path)
    config = AutoConfig.for_model(**json.loads(json.dumps(checkpoint.config)))
    model = AutoModelForCausalLM.from_config(config).eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if checkpoint.config["tie_word_embeddings"] else set()
    assert set(missing) == tied
    assert not unexpected
    model.tie_weights()
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 16}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    ],
)
def test_logits_of_the_file_are_those_of_the_model_it_was_made_from(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(architecture, **changes)
    path = write_gguf(tmp_path / "m.gguf", model, architecture)
    again = rebuilt(path)
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))


def test_sabotage_rows_left_in_the_files_order_change_the_logits(tmp_path: Path) -> None:
    """A file whose q and k were never interleaved must not come out right."""
    model = tiny_model("llama")
    tensors = file_tensors(model, "qwen2")  # no interleaving
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors)
    assert float((logits(rebuilt(path)) - logits(model)).abs().max()) > 1e-3


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFCheckpoint]:
    model = tiny_model("llama", num_hidden_layers=1, intermediate_size=32)
    folder = tmp_path_factory.mktemp("permuted")
    blocks = {"blk.0.attn_q.weight": KIND.Q8_0}
    plain = write_gguf(folder / "f.gguf", model, "llama")
    packed = write_gguf(folder / "q.gguf", model, "llama", blocks=blocks)
    return {"F32": GGUFCheckpoint(plain), "Q8_0": GGUFCheckpoint(packed)}


@pytest.mark.parametrize(("kind", "bound"), [("F32", 0.0), ("Q8_0", 0.004)])
@given(rows=st.tuples(st.integers(0, 128), st.integers(0, 128)))
@settings(max_examples=30, deadline=None)
def test_rows_of_a_permuted_weight_are_the_rows_of_the_whole(
    permuted: dict[str, GGUFCheckpoint], kind: str, bound: float, rows: tuple[int, int]
) -> None:
    name, (start, stop) = "model.layers.0.self_attn.q_proj.weight", sorted(rows)
    whole = permuted[kind].read(name)
    assert torch.equal(permuted[kind].read_rows(name, start, stop), whole[start:stop])
    assert float((whole - permuted["F32"].read(name)).abs().max()) <= bound


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes [rows, bytes a row] whose float16 numbers are finite."""
    _, values, size, halves = FORMULAS[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in halves:
        numbers = (random.standard_normal(len(blocks)) * 2).astype("<f2")
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMULAS)
def test_blocks_of_random_bytes_follow_the_formula(kind: str, tmp_path: Path) -> None:
    formula, values, size, _ = FORMULAS[kind]
    model = tiny_model("llama", hidden_size=256, num_hidden_layers=1, vocab_size=6)
    tensors = file_tensors(model, "llama")
    blocks = random_blocks(kind, 6, 256, seed=7)
    tensors["token_embd.weight"] = blocks
    path = write_gguf(
        tmp_path / "m.gguf", model, "llama", tensors, blocks={"token_embd.weight": KIND[kind]}
    )
    checkpoint = GGUFCheckpoint(path)
    got = checkpoint.read("model.embed_tokens.weight")
    flat = [v for b in blocks.reshape(-1, size) for v in formula(b.tobytes())]
    wanted = torch.tensor(flat, dtype=torch.float64).view(6, 256)
    assert got.dtype == torch.float32
    assert got.shape == (6, 256)
    assert checkpoint.tensors["model.embed_tokens.weight"].nbytes == 6 * 256 * 4
    scale = wanted.abs().max()
    assert float((got.double() - wanted).abs().max() / scale) < 1e-6
    assert torch.equal(checkpoint.read_rows("model.embed_tokens.weight", 2, 5), got[2:5])
    assert values in (32, 256)


@pytest.mark.parametrize("kind", FORMULAS)
def test_sabotage_swapped_nibbles_break_every_block_format(kind: str) -> None:
    """The comparison above can fail: the same bytes with nibbles swapped give other values."""
    formula, values, _, halves = FORMULAS[kind]
    block = random_blocks(kind, 1, values, seed=3).reshape(-1)
    swapped = (block << 4) | (block >> 4)
    for at in halves:
        swapped[at : at + 2] = block[at : at + 2]
    wanted, got = formula(block.tobytes()), formula(swapped.tobytes())
    assert max(abs(a - b) for a, b in zip(wanted, got, strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "block", "wanted"),
    [
        # d = 2: code 0 -> -16, code 15 -> 14; low nibbles are the first 16 values
        ("Q4_0", struct.pack("<e", 2.0) + b"\xf0" * 16, [-16.0] * 16 + [14.0] * 16),
        # d = 0.5, m = -1: code 2 -> 0, code 4 -> 1
        ("Q4_1", struct.pack("<ee", 0.5, -1.0) + b"\x42" * 16, [0.0] * 16 + [1.0] * 16),
        # d = 1, high bits of the first half only: 16 + 1 - 16 = 1, then 0 + 0 - 16
        ("Q5_0", struct.pack("<eI", 1.0, 0xFFFF) + b"\x01" * 16, [1.0] * 16 + [-16.0] * 16),
        # d = 1, m = 3, high bits of the second half only: 0 + 3, then 16 + 2 + 3
        ("Q5_1", struct.pack("<eeI", 1, 3, 0xFFFF0000) + b"\x20" * 16, [3.0] * 16 + [21.0] * 16),
        ("Q8_0", struct.pack("<e", 0.25) + struct.pack("<32b", *[-128] * 32), [-32.0] * 32),
        # d = 1, dmin = 2; scales 0..3 are 3, minimums 0..3 are 1, scales 4..7 are 2, minimums 5:
        # low nibble 1, high nibble 4
        (
            "Q4_K",
            struct.pack("<ee", 1.0, 2.0) + bytes([3] * 4 + [1] * 4 + [0x52] * 4) + b"\x41" * 128,
            ([3.0 - 2] * 32 + [12.0 - 2] * 32) * 2 + ([2.0 - 10] * 32 + [8.0 - 10] * 32) * 2,
        ),
        # d = 0.5, scales 2, low nibble 1, high nibble 3, top bits 2: 32 + 1 - 32 and 32 + 3 - 32
        (
            "Q6_K",
            b"\x31" * 128 + b"\xaa" * 64 + b"\x02" * 16 + struct.pack("<e", 0.5),
            ([1.0] * 64 + [3.0] * 64) * 2,
        ),
    ],
)
def test_blocks_written_by_hand_read_as_computed_by_hand(
    kind: str, block: bytes, wanted: list[float], tmp_path: Path
) -> None:
    model = tiny_model("llama", hidden_size=256, num_hidden_layers=1, vocab_size=1)
    tensors = file_tensors(model, "llama")
    repeated = 256 // len(wanted)
    tensors["token_embd.weight"] = np.frombuffer(block * repeated, np.uint8).reshape(1, -1)
    blocks = {"token_embd.weight": KIND[kind]}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors, blocks=blocks)
    assert GGUFCheckpoint(path).read("model.embed_tokens.weight").tolist() == [wanted * repeated]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_tensors_keep_their_dtype_and_stay_mapped(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=32768, num_hidden_layers=1)  # 8 or 16 MB a matrix
    tensors = file_tensors(model, "llama")
    if kind == "F16":
        tensors["token_embd.weight"] = tensors["token_embd.weight"].astype(np.float16)
    blocks = {"token_embd.weight": KIND.BF16} if kind == "BF16" else None
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors, blocks=blocks)
    checkpoint = GGUFCheckpoint(path)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert checkpoint.tensors["model.embed_tokens.weight"].dtype == dtype
    before = anonymous_bytes()
    values = checkpoint.read("model.embed_tokens.weight")
    assert float(values[:, ::16].float().max()) > 0
    assert anonymous_bytes() - before < 6 << 20
    assert torch.equal(values, model.state_dict()["model.embed_tokens.weight"].to(dtype))


def test_the_head_is_tied_just_where_the_file_has_none(tmp_path: Path) -> None:
    tied = write_gguf(tmp_path / "t.gguf", tiny_model("llama", tie_word_embeddings=True), "llama")
    assert GGUFCheckpoint(tied).config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in GGUFCheckpoint(tied).tensors
    untied = write_gguf(tmp_path / "u.gguf", tiny_model("llama"), "llama")
    assert GGUFCheckpoint(untied).config["tie_word_embeddings"] is False
    assert GGUFCheckpoint(untied).tensors["lm_head.weight"].shape == (64, 128)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama3_file(path: Path, change: float = 1.0) -> tuple[PreTrainedModel, Path]:
    """A model with llama3 rope and its file, whose factors are the ratio of transformers' own
    frequencies; one middle factor times `change`."""
    model = tiny_model("llama", head_dim=64, rope_parameters=LLAMA3, hidden_size=128)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).numpy().astype(np.float32)
    middle = int(np.flatnonzero((factors > 1.01) & (factors < 7.9))[0])
    factors[middle] *= change
    tensors = file_tensors(model, "llama") | {"rope_freqs.weight": factors}
    return model, write_gguf(path, model, "llama", tensors)


def test_llama3_rope_factors_come_back_as_config_and_are_accounted_for(tmp_path: Path) -> None:
    model, path = llama3_file(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config["rope_parameters"] == LLAMA3
    assert "llama3" in checkpoint.set_aside["rope_freqs.weight"]
    assert torch.equal(logits(rebuilt(path)), logits(model))


def test_rope_factors_that_no_config_gives_are_refused(tmp_path: Path) -> None:
    _, path = llama3_file(tmp_path / "m.gguf", change=1.05)
    with pytest.raises(BadCheckpoint, match="rope_freqs"):
        GGUFCheckpoint(path)


def test_linear_and_yarn_rope_scaling_come_back_and_others_are_refused(tmp_path: Path) -> None:
    def rope(kind: str) -> dict[str, Any]:
        metadata = {"add_rope_scaling_factor": 4.0, "add_rope_scaling_orig_ctx_len": 128}
        model = tiny_model("qwen2", num_hidden_layers=1)
        metadata["add_rope_scaling_type"] = gguf.RopeScalingType(kind)
        path = write_gguf(tmp_path / f"{kind}.gguf", model, "qwen2", metadata=metadata)
        return GGUFCheckpoint(path).config["rope_parameters"]

    assert rope("linear") == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert rope("yarn")["original_max_position_embeddings"] == 128
    with pytest.raises(BadCheckpoint, match="longrope"):
        rope("longrope")


def refusal(path: Path) -> str:
    with pytest.raises(WeightpathError) as caught:
        GGUFCheckpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", num_hidden_layers=1, intermediate_size=32)
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    return write_gguf(path, model, "llama", metadata=byte_level())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_is_refused_in_one_line(good: Path, data: st.DataObject) -> None:
    whole = good.read_bytes()
    cut = data.draw(st.one_of(st.integers(0, 3000), st.integers(0, len(whole) - 4096)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cut.gguf"
        path.write_bytes(whole[:cut])
        assert "bytes" in refusal(path) or "byte" in refusal(path)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_file_with_a_changed_byte_never_fails_otherwise_than_by_refusal(
    good: Path, data: st.DataObject
) -> None:
    whole = bytearray(good.read_bytes())
    head = read_gguf(good)
    end = min(tensor.offset for tensor in head.tensors.values())
    at = data.draw(st.one_of(st.integers(0, end - 1), st.integers(0, 700)))
    whole[at] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.gguf"
        path.write_bytes(whole)
        try:
            checkpoint = GGUFCheckpoint(path)
            told = str(sorted(checkpoint.companion_texts))
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except WeightpathError as error:
            told = str(error)
        assert told
        assert "\n" not in told


def test_a_cut_file_is_told_with_the_tensor_and_both_sizes(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-600])
    message = refusal(tmp_path / "cut.gguf")
    assert f"ends at byte {len(whole) - 600}" in message
    assert "tensor " in message


def test_a_big_endian_file_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    writer = writer_of(tmp_path / "b.gguf", model, "llama", endianess=gguf.GGUFEndian.BIG)
    for name, values in file_tensors(model, "llama").items():
        writer.add_tensor(name, values)
    finish(writer)
    assert "big-endian" in refusal(tmp_path / "b.gguf")


def test_versions_2_and_3_are_read_and_others_refused(good: Path, tmp_path: Path) -> None:
    whole = bytearray(good.read_bytes())
    for version, fine in ((1, False), (2, True), (3, True), (4, False)):
        whole[4:8] = struct.pack("<I", version)
        path = tmp_path / f"v{version}.gguf"
        path.write_bytes(whole)
        if fine:
            assert len(GGUFCheckpoint(path).tensors) == 12
        else:
            assert f"version {version}" in refusal(path)


def test_what_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "z.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    assert "does not start with GGUF" in refusal(tmp_path / "z.gguf")
    (tmp_path / "e.gguf").write_bytes(b"")
    assert "has 0 bytes" in refusal(tmp_path / "e.gguf")
    assert "does not exist" in refusal(tmp_path / "none.gguf")


@pytest.mark.parametrize("kind", ["IQ4_NL", "TQ1_0", "MXFP4", "Q2_K", "F64"])
def test_a_type_that_is_not_read_is_named_with_its_tensor(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, num_hidden_layers=1, vocab_size=2)
    tensors = file_tensors(model, "llama")
    block, size = gguf.GGML_QUANT_SIZES[KIND[kind]]
    tensors["token_embd.weight"] = np.zeros((2, 256 // block * size), np.uint8)
    blocks = {"token_embd.weight": KIND[kind]}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors, blocks=blocks)
    message = refusal(path)
    assert kind in message
    assert "token_embd.weight" in message


def test_extra_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    tensors = file_tensors(model, "llama")

    def refused(changed: dict[str, np.ndarray]) -> str:
        return refusal(write_gguf(tmp_path / "m.gguf", model, "llama", changed))

    vector = np.zeros(128, np.float32)
    for extra in ("blk.0.attn_q_norm.weight", "blk.1.attn_norm.weight", "mtp.weight"):
        assert f"tensor {extra} has no place" in refused(tensors | {extra: vector})
    assert "blk.0.attn_v.bias" in refused(tensors | {"blk.0.attn_v.bias": vector[:64]})
    for lost in ("blk.0.ffn_up.weight", "output_norm.weight"):
        kept = {name: values for name, values in tensors.items() if name != lost}
        assert f"no tensor {lost}" in refused(kept)
    short = tensors | {"blk.0.attn_k.weight": tensors["blk.0.attn_k.weight"][:32]}
    assert "[32, 128]" in refused(short)
    assert "[64, 128]" in refused(short)
    # q biased but o not: a llama config cannot say that, and would start o's bias at random
    q_only = {
        f"blk.0.attn_{part}.bias": vector[:size]
        for part, size in zip("qkv", (128, 64, 64), strict=True)
    }
    assert "blk.0.attn_output.bias" in refused(tensors | q_only)


def test_metadata_that_changes_the_model_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)

    def refused(architecture: str = "llama", **metadata: Any) -> str:
        path = tmp_path / "m.gguf"
        return refusal(write_gguf(path, model, architecture, metadata=metadata))

    assert "llama.expert_count = 8" in refused(add_expert_count=8)
    assert "llama.logit_scale" in refused(add_logit_scale=2.0)
    assert "gemma2" in refused("gemma2")
    assert "rope.dimension_count is 16" in refused(add_rope_dimension_count=16)
    fine = write_gguf(tmp_path / "m.gguf", model, "llama", metadata={"add_expert_count": 0})
    assert GGUFCheckpoint(fine).config["num_hidden_layers"] == 1


def test_numbers_stored_as_float32_come_back_as_they_were_written(good: Path) -> None:
    config = GGUFCheckpoint(good).config
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


# --- vocabulary ---------------------------------------------------------------------------------


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_str(GGUFCheckpoint(path).companion_texts["tokenizer.json"])


def pieces(path: Path, text: str) -> list[str]:
    return tokenizer_of(path).encode(text).tokens


def vocabulary_file(folder: Path, **metadata: Any) -> Path:
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=len(vocabulary()))
    return write_gguf(folder / "v.gguf", model, "llama", metadata=metadata)


def test_special_tokens_are_one_id_and_text_round_trips(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, **byte_level())
    text = "<|start|>hello w\n\n naïve 東京 <think>"
    ids = tokenizer_of(path).encode(text).ids
    assert ids[0] == 1
    assert vocabulary().index("hello") in ids
    assert vocabulary().index("<think>") in ids
    assert tokenizer_of(path).decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["Ġ", "123", "4"]),
        ("llama-bpe", ["Ġ", "123", "4"]),
    ],
)
def test_digits_are_split_as_the_file_says(pre: str, wanted: list[str], tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, **byte_level(pre, add_add_bos_token=False))
    assert pieces(path, " 1234") == wanted


def test_a_split_or_model_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    for metadata, told in (
        (byte_level("made-up"), "made-up"),
        (byte_level() | {"add_tokenizer_model": "t5"}, "t5"),
        (byte_level() | {"add_token_merges": ["q z"]}, "q z"),
        (byte_level() | {"add_eos_token_id": 9999}, "9999"),
        (byte_level() | {"add_token_list": ["a", "a"]}, "'a'"),
        ({}, "tokens"),
    ):
        checkpoint = GGUFCheckpoint(vocabulary_file(tmp_path, **metadata))
        with pytest.raises(BadCheckpoint, match=told):
            checkpoint.companion_texts  # noqa: B018


def test_a_first_token_is_added_just_where_the_file_says(tmp_path: Path) -> None:
    for metadata, first in (
        (byte_level("smollm"), "hello"),
        (byte_level("smollm", add_add_bos_token=True), "<|start|>"),
        (byte_level("llama-bpe"), "<|start|>"),
        (byte_level("llama-bpe", add_add_bos_token=False), "hello"),
    ):
        assert pieces(vocabulary_file(tmp_path, **metadata), "hello")[0] == first


def test_sentencepiece_vocabularies_merge_by_score_and_fall_back_to_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    ordinary = {"▁": -1.0, "a": -1.1, "b": -1.2, "c": -1.3, "▁a": -0.5, "ab": -0.1, "bc": -0.4}
    metadata = {
        "add_tokenizer_model": "llama",
        "add_token_list": [*tokens, *ordinary],
        "add_token_types": [2, 3, 3, *[6] * 256, *[1] * len(ordinary)],
        "add_token_scores": [0.0] * len(tokens) + list(ordinary.values()),
        "add_bos_token_id": 1,
        "add_eos_token_id": 2,
        "add_unk_token_id": 0,
    }
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=len(tokens) + len(ordinary))
    path = write_gguf(tmp_path / "s.gguf", model, "llama", metadata=metadata)
    # "ab" scores better than "▁a" and "bc", so it goes first
    assert pieces(path, "abc") == ["<s>", "▁", "ab", "c"]
    assert pieces(path, "bé") == ["<s>", "▁", "b", "<0xC3>", "<0xA9>"]
    tokenizer = tokenizer_of(path)
    assert tokenizer.decode(tokenizer.encode("abc bé").ids) == "abc bé"
    wrong = vocabulary_file(tmp_path, **(metadata | {"add_token_scores": [0.0]}))
    with pytest.raises(BadCheckpoint, match="scores"):
        GGUFCheckpoint(wrong).companion_texts  # noqa: B018


def test_end_tokens_and_sampling_settings_become_the_generation_config() -> None:
    settings_of = generation_config(
        {
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 7,
            "general.sampling.temp": float(np.float32(0.6)),
            "general.sampling.top_k": 20,
        }
    )
    assert settings_of == {
        "bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20,
        "do_sample": True,
    }  # fmt: skip


# --- writing a folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_folder_made_from_a_gguf_loads_in_transformers(
    architecture: str, tmp_path: Path
) -> None:
    model = tiny_model(architecture, num_hidden_layers=1, vocab_size=len(vocabulary()))
    pre = "qwen2" if architecture.startswith("qwen") else "smollm"
    template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    metadata = byte_level(pre, add_chat_template=template)
    path = write_gguf(tmp_path / "m.gguf", model, architecture, metadata=metadata)
    seen: list[tuple[int, int]] = []
    folder = gguf_to_checkpoint(path, tmp_path / "out", progress=lambda *at: seen.append(at))
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(logits(again), logits(model))
    assert seen[-1] == (len(seen), len(seen))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|start|>hello 1234 w"
    assert tokenizer(text).input_ids == tokenizer_of(path).encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, 0)
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>hello<|end|>"
    assert again.generation_config.eos_token_id == 0


def test_the_folder_holds_every_tensor_once_and_is_not_written_over(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", metadata=byte_level())
    folder = gguf_to_checkpoint(path, tmp_path / "out", torch.float32)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], values) for name, values in model.state_dict().items())
    assert sorted(item.name for item in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["m.gguf", "out"]
    with pytest.raises(BadRequest, match="exists already"):
        gguf_to_checkpoint(path, folder)


def test_a_value_that_overflows_float16_is_an_error_naming_the_tensor(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1e6
    path = write_gguf(tmp_path / "m.gguf", model, "llama", metadata=byte_level())
    with pytest.raises(BadTensor, match=r"lm_head\.weight: 1 values overflow"):
        gguf_to_checkpoint(path, tmp_path / "out", torch.float16)


def test_companions_are_files_that_go_when_the_checkpoint_goes(good: Path) -> None:
    checkpoint = GGUFCheckpoint(good)
    paths = checkpoint.companions
    assert [path.name for path in paths] == [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert all(path.read_text() == checkpoint.companion_texts[path.name] for path in paths)
    del checkpoint
    assert not paths[0].exists()


def test_names_map_one_to_one(good: Path) -> None:
    checkpoint = GGUFCheckpoint(good)
    names = {gguf_name(name) for name in checkpoint.tensors}
    assert names == set(read_gguf(good).tensors)
