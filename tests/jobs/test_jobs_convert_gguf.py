"""Every format that is read, written as a GGUF file; what blocks hold exactly, and refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from reopened import check_told, difference, of, weights_of
from test_jobs_folds import SIZES, act_order, logits, same

import tiny_gguf
from tiny_checkpoint import build_model, edit_json, edit_tensors, folder_bytes, save_model
from tiny_formats import BLOCK_TYPES, FORMATS, Written, write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.store import open_checkpoint
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor
from weightpath.jobs.convert import convert
from weightpath.qweight import QWeight

pytestmark = pytest.mark.usefixtures("one_thread")

SYMMETRIC = (
    "gptq-v1", "gptq-v2", "autoround-gptq", "autoround-gptqmodel", "autoround-awq", "autoround-ct",
    "ct-packed", "ct-padded", "ct-int8", "torchao-int8", "gguf",
)  # fmt: skip
FOLDED = {"ct-ordered": ("gate_proj", "up_proj", "down_proj"), "modelopt-int4": ("up_proj", "down_proj")}  # fmt: skip
Q_PROJ, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def with_tokenizer(name: str, folder: Path, **options: Any) -> Written:
    """A checkpoint with the tokenizer that a GGUF must hold (a GGUF source has its own)."""
    return write(name, folder, **({} if name == "gguf" else {"tokenizer": True}), **options)


def stored(file: Path) -> dict[str, Any]:
    """A file's tensors as gguf-py reads them, by name."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def read_by_gguf_py(tensors: dict[str, Any], module: str, heads: int = 0) -> np.ndarray:
    """A weight as gguf-py dequantizes it; heads: put q and k rows back in HF's order."""
    tensor = tensors[tiny_gguf.gguf_name(f"{module}.weight")]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if not heads:
        return values
    order = tiny_gguf.interleave(np.arange(values.shape[0]), heads)
    return values[np.argsort(order)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_a_gguf_and_changes_by_no_more_than_is_told(
    name: str, tmp_path: Path
) -> None:
    source = with_tokenizer(name, tmp_path / "in")
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf")
    assert {item.name for item in done.linears} == set(source.weights)
    found = weights_of(done.folder)
    for item in done.linears:
        if item.name.endswith(FOLDED.get(name, "\0")):
            continue
        largest, mean = difference(source.weights[item.name], found[item.name])
        assert largest <= item.largest_change * 1.0001 + 1e-12, item
        assert mean <= item.mean_change * 1.0001 + 1e-12, item
        assert item.exact == (largest == 0.0) == (item.largest_change == 0.0), item
        assert item.target in item.how or "float16" in item.how
    assert (done.lossy == 0) == (name in SYMMETRIC)
    by_peer = read_by_gguf_py(stored(done.folder), Q_PROJ, heads=4)
    np.testing.assert_allclose(by_peer, found[Q_PROJ], rtol=0, atol=1e-6)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("name", ["gptq-v1", "ct-packed", "autoround-awq"])
def test_symmetric_4_bit_codes_are_the_nibbles_of_q4_0_and_fp16_scales_its_d_bit_for_bit(
    name: str, group_size: int, tmp_path: Path
) -> None:
    source = with_tokenizer(name, tmp_path / "in", group_size=group_size)
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf", exact_only=True)
    assert {(item.target, item.exact) for item in done.linears} == {("Q4_0", True)}
    low, tensors = open_low_bit(source.path), stored(done.folder)
    for module in source.weights:
        leaf = module.rpartition(".")[2]
        heads = {"q_proj": 4, "k_proj": 2}.get(leaf, 0)
        assert np.array_equal(read_by_gguf_py(tensors, module, heads), source.weights[module])
        if heads:
            continue
        blocks = tensors[tiny_gguf.gguf_name(f"{module}.weight")].data
        n, k = source.weights[module].shape
        blocks = blocks.reshape(n, k // 32, 18)
        qweight = low.read_qweight(module)
        scales = qweight.scales.numpy().repeat(group_size // 32, axis=1)
        assert np.array_equal(blocks[..., :2].copy().view(np.uint16)[..., 0], scales.view(np.uint16))  # fmt: skip
        codes = qweight.codes.numpy().reshape(n, k // 32, 32)
        assert np.array_equal(blocks[..., 2:], codes[..., :16] | codes[..., 16:] << 4)


def test_sabotage_rows_of_q_in_hf_order_are_not_what_gguf_readers_take_them_for(
    tmp_path: Path,
) -> None:
    source = with_tokenizer("gptq-v1", tmp_path / "in")
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf")
    assert not np.array_equal(read_by_gguf_py(stored(done.folder), Q_PROJ), source.weights[Q_PROJ])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_gguf_s_own_blocks_stay_and_k_types_say_what_16_bits_lose(
    kind: str, tmp_path: Path
) -> None:
    source = write("gguf", tmp_path / "in", kind=kind)
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf")
    kept = {item.name: item for item in done.linears}[DOWN]
    assert kept.exact == (not kind.endswith("K"))
    assert kept.target == {"Q4_K": "Q4_1", "Q5_K": "Q5_1", "Q6_K": "F16"}.get(kind, kind)
    largest, mean = difference(source.weights[DOWN], weights_of(done.folder)[DOWN])
    assert (largest, mean) == pytest.approx((kept.largest_change, kept.mean_change), rel=1e-4)
    if kind == "Q6_K":
        assert "groups of 16 columns" in kept.how


@pytest.mark.parametrize(
    ("options", "target", "why"),
    [
        ({"bits": 8, "symmetric": False}, "F16", "asymmetric 8-bit codes"),
        ({"group_size": 16}, "F16", "groups of 16 columns"),
        ({"bits": 2}, "Q4_0", "exact"),
        ({"bits": 5}, "Q5_0", "exact"),
        ({"bits": 7}, "Q8_0", "exact"),
        ({"scale_dtype": torch.bfloat16}, "Q4_0", "exact"),
        ({"bits": 3, "symmetric": False}, "Q4_1", "minimums"),
    ],
)
def test_each_scheme_gets_the_blocks_that_hold_it_or_f16_and_the_reason(
    options: dict[str, Any], target: str, why: str, tmp_path: Path
) -> None:
    source = with_tokenizer("ct-packed", tmp_path / "in", **options)
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf")
    told = of(done, DOWN)
    assert (told.target, why in told.how) == (target, True), told
    largest, _ = difference(source.weights[DOWN], read_by_gguf_py(stored(done.folder), DOWN))
    assert largest == pytest.approx(told.largest_change, rel=1e-4)
    assert told.exact == (largest == 0.0)


def test_an_order_is_folded_and_the_file_computes_the_same(tmp_path: Path) -> None:
    source = act_order(tmp_path / "in", tokenizer=True, model=SIZES)
    done = convert(str(source), "gguf", tmp_path / "out.gguf", exact_only=True)
    assert "column order folded" in of(done, "model.layers.0.self_attn.o_proj").how
    assert "rows take the column order" in of(done, "model.layers.0.self_attn.v_proj").how
    assert same(logits(done.folder, source), logits(source, source))


def test_an_order_that_cannot_be_folded_is_quantized_again_with_the_reason(tmp_path: Path) -> None:
    source = with_tokenizer("gptq-v1", tmp_path / "in", ordered=True)
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf")
    told = of(done, Q_PROJ)
    assert told.how.startswith("quantized again as w4g32: its input is the residual stream")
    assert (told.target, told.exact) == ("Q4_0", False)
    with pytest.raises(BadRequest, match="12 of 14 linears cannot be converted exactly"):
        convert(str(source.path), "gguf", tmp_path / "other" / "x.gguf", exact_only=True)
    assert not (tmp_path / "other").exists()


def test_a_float_checkpoint_and_a_tied_one_become_f16_files(tmp_path: Path) -> None:
    for tied in (False, True):
        source = tmp_path / f"in{tied}"
        model = build_model(tied=tied, vocab_size=len(tiny_gguf.vocabulary()))
        save_model(source, model, torch.float16, chat=None)
        tiny_gguf.make_folder(source)
        done = convert(str(source), "gguf", tmp_path / "out", exact_only=True)
        assert (done.source_format, done.linears, done.floats) == ("float", (), ())
        assert done.folder == tmp_path / "out" / f"{source.name}.gguf"
        floats = open_checkpoint(source)
        module = "model.layers.0.mlp.up_proj"
        wanted = floats.read(f"{module}.weight").float().numpy()
        assert np.array_equal(read_by_gguf_py(stored(done.folder), module), wanted)
        assert ("output.weight" in stored(done.folder)) == (not tied)


def test_a_packed_head_is_written_as_the_output_matrix(tmp_path: Path) -> None:
    source = with_tokenizer("ct-packed", tmp_path / "in", head=True)
    edit_json(source.folder / "config.json", tie_word_embeddings=True)  # as some writers leave it
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf")
    assert of(done, "lm_head").target == "Q4_0"
    assert np.array_equal(
        read_by_gguf_py(stored(done.folder), "lm_head"), source.weights["lm_head"]
    )
    assert any("written as a head" in note for note in done.notes)


def test_shards_and_one_file_make_the_same_gguf(tmp_path: Path) -> None:
    for count in (1, 3):
        source = with_tokenizer("awq-gemm", tmp_path / f"{count}" / "in", shards=count)
        convert(str(source.path), "gguf", tmp_path / f"{count}.gguf")
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_a_gguf_becomes_a_folder_and_a_gguf_again_with_the_same_blocks(tmp_path: Path) -> None:
    source = write("gguf", tmp_path / "in", kind="Q4_0")
    middle = convert(str(source.path), "compressed-tensors", tmp_path / "ct")
    check_told(middle, source.weights)
    back = convert(str(middle.folder), "gguf", tmp_path / "back.gguf")
    assert back.lossy == 0
    for module, wanted in source.weights.items():
        assert np.array_equal(weights_of(back.folder)[module], wanted)


Refusal = Callable[[Path, Path], tuple[Path, Path]]
REFUSALS: dict[str, tuple[Refusal, dict[str, Any], type[Exception], str]] = {
    "exists": (
        lambda source, room: (source, room / "there.gguf"),
        {}, BadRequest, "there.gguf exists already; name another file, or pass --overwrite",
    ),
    "a file that is no gguf": (
        lambda source, room: (source, room / "notes.txt"),
        {"overwrite": True}, BadRequest, "notes.txt: exists and is no folder",
    ),
    "itself": (
        lambda source, room: (room / "there.gguf", room / "." / "there.gguf"),
        {"overwrite": True}, BadRequest, "is the source itself; name another file",
    ),
    "itself in its folder": (
        lambda source, room: (room / "there.gguf", room),
        {"overwrite": True}, BadRequest, "is the source itself; name another file",
    ),
    "lossy": (
        lambda source, room: (source, room / "new" / "out.gguf"),
        {"exact_only": True}, BadTensor, "Q4_1 without loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_and_changes_no_file(case: str, tmp_path: Path) -> None:
    places, options, kind, words = REFUSALS[case]
    source = with_tokenizer("awq-gemm", tmp_path / "in")
    room = tmp_path / "room"
    room.mkdir()
    convert(str(with_tokenizer("gptq-v1", tmp_path / "b").path), "gguf", room / "there.gguf")
    (room / "notes.txt").write_text("notes")
    before = folder_bytes(tmp_path)
    what, where = places(source.path, room)
    with pytest.raises(kind, match=words) as caught:
        convert(str(what), "gguf", where, **options)
    assert "\n" not in str(caught.value)
    assert folder_bytes(tmp_path) == before
    assert sorted(path.name for path in room.iterdir()) == ["notes.txt", "there.gguf"]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("tokenizer.json", r"tokenizer\.json: is missing"),
        ("tokenizer_config.json", "names no end-of-text token"),
    ],
)
def test_a_folder_without_its_tokenizer_is_refused_naming_what_is_missing(
    missing: str, words: str, tmp_path: Path
) -> None:
    source = with_tokenizer("gptq-v1", tmp_path / "in")
    (source.folder / missing).unlink()
    edit_json(source.folder / "config.json", eos_token_id=None, bos_token_id=None)
    with pytest.raises(BadCheckpoint, match=words):
        convert(str(source.path), "gguf", tmp_path / "new" / "out.gguf")
    assert not (tmp_path / "new").exists()


def test_a_damaged_linear_leaves_no_file(tmp_path: Path) -> None:
    source = with_tokenizer("awq-gemm", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t[f"{DOWN}.scales"].fill_(float("inf")))
    with pytest.raises((BadTensor, BadCheckpoint), match=DOWN):
        convert(str(source.path), "gguf", tmp_path / "new" / "out.gguf")
    assert not (tmp_path / "new").exists()


def test_an_existing_file_is_replaced_where_that_is_asked(tmp_path: Path) -> None:
    first, second = (with_tokenizer("gptq-v1", tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    convert(str(first.path), "gguf", tmp_path / "out.gguf")
    done = convert(str(second.path), "gguf", tmp_path / "out.gguf", overwrite=True)
    assert np.array_equal(weights_of(done.folder)[DOWN], second.weights[DOWN])


def test_integers_made_anew_are_let_go_once_they_are_written(tmp_path: Path) -> None:
    source = with_tokenizer("bnb-nf4", tmp_path / "in")
    alive: list[int] = []

    def count(_: str, done: int, total: int) -> None:
        if done == total:
            alive.append(sum(type(item) is QWeight for item in gc.get_objects()))

    gc.collect()
    done = convert(str(source.path), "gguf", tmp_path / "out.gguf", progress=count)
    assert len([item for item in done.linears if "quantized again" in item.how]) == 14
    assert alive[0] <= 2
