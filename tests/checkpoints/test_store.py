"""Safetensors checkpoints: what is read, that it stays mapped, and the ways a folder can be bad."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_of_process import anonymous_bytes
from safetensors.torch import load_file, save_file

from weightpath.checkpoints.store import natural_order, open_checkpoint, quantization_method
from weightpath.errors import BadCheckpoint, BadRequest

CONFIG = {"model_type": "llama", "hidden_size": 8}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors_of_a_model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(6, 8).to(torch.bfloat16),
        "model.layers.10.mlp.down_proj.weight": torch.randn(8, 4).to(torch.float16),
        "model.layers.2.mlp.down_proj.weight": torch.randn(8, 4),
        "model.layers.2.mlp.down_proj.bias": torch.randn(8),
    }


def write_config(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    write_config(folder)
    save_file(tensors_of_a_model(), folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    write_config(folder)
    tensors = list(tensors_of_a_model().items())
    save_file(dict(tensors[:2]), folder / ONE)
    save_file(dict(tensors[2:]), folder / TWO)
    weight_map = {name: ONE for name, _ in tensors[:2]} | {name: TWO for name, _ in tensors[2:]}
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def refusal(folder: Path) -> str:
    """The message with which the folder is refused; one line."""
    with pytest.raises(BadCheckpoint) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_comes_back_with_its_values_and_dtype(
    kind: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(kind))
    assert checkpoint.config == CONFIG
    for name, wanted in tensors_of_a_model().items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.dtype) == (tuple(wanted.shape), wanted.dtype)
        assert info.nbytes == wanted.numel() * wanted.element_size()
        assert torch.equal(checkpoint.read(name), wanted)
        assert torch.equal(checkpoint.read_rows(name, 2, 5), wanted[2:5])
    assert len(checkpoint.tensors) == 4


def test_order_is_natural_and_the_same_for_single_and_sharded(single: Path, sharded: Path) -> None:
    names = list(open_checkpoint(single).tensors)
    assert names == list(open_checkpoint(sharded).tensors)
    assert names.index("model.layers.2.mlp.down_proj.weight") < names.index(
        "model.layers.10.mlp.down_proj.weight"
    )


@given(st.lists(st.text(alphabet="ab.0123456789²", max_size=8)))
def test_natural_order_is_total_and_loses_no_name(names: list[str]) -> None:
    assert sorted(natural_order(names)) == sorted(names)
    assert natural_order(reversed(names)) == natural_order(names)


def test_a_single_file_can_be_named_itself(single: Path) -> None:
    assert len(open_checkpoint(single / "model.safetensors").tensors) == 4


def test_rows_out_of_range_and_unknown_names_are_refused(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    with pytest.raises(BadRequest, match=r"rows 0\.\.9 asked of 0\.\.8"):
        checkpoint.read_rows("model.layers.2.mlp.down_proj.bias", 0, 9)
    with pytest.raises(BadCheckpoint, match=r"no tensor lm_head\.weight"):
        checkpoint.read("lm_head.weight")


def test_reading_maps_the_file_and_adds_no_anonymous_memory(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"big": torch.ones(12288, 1024)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read_rows("big", 0, 1)
    taken: list[torch.Tensor] = []  # what was freed before, so that 48 MB more must be new
    before, grown = anonymous_bytes(), 0
    while grown < 48 << 20:
        assert len(taken) < 64
        taken.append(torch.ones(12288, 1024))
        grown, before = anonymous_bytes() - before, anonymous_bytes()
    whole = checkpoint.read("big")
    part = checkpoint.read_rows("big", 100, 12000)
    assert float(whole[:, ::4].min()) == float(part[:, ::4].max()) == 1.0  # every page is touched
    assert anonymous_bytes() - before < 16 << 20
    copied = whole.clone()  # what a reader that copies would do
    assert anonymous_bytes() - before >= 48 << 20
    del copied


def test_companions_are_carried_but_never_weights_or_config(single: Path) -> None:
    carried = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"]
    carried += ["chat_template.jinja", "merges.txt", "vocab.json", "modeling_own.py"]
    left = ["README.md", "pytorch_model.bin", "model.gguf", "training_args.bin", ".hidden"]
    left += ["tokenizer.bin", "quantize_config.json"]
    for name in [*carried, *left]:
        (single / name).write_text("{}")
    names = [path.name for path in open_checkpoint(single).companions]
    assert names == sorted(carried)


def test_fingerprint_changes_with_the_file_and_not_with_the_folder(
    single: Path, tmp_path: Path
) -> None:
    first = open_checkpoint(single).fingerprint
    moved = single.rename(tmp_path / "moved")
    assert open_checkpoint(moved).fingerprint == first
    write_config(moved, CONFIG | {"hidden_size": 9})
    assert open_checkpoint(moved).fingerprint != first
    write_config(moved)
    tensors = tensors_of_a_model()
    tensors["model.layers.2.mlp.down_proj.bias"] += 1
    save_file(tensors, moved / "model.safetensors")
    assert open_checkpoint(moved).fingerprint != first


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / TWO).unlink()
    assert TWO in refusal(sharded)
    assert "missing" in refusal(sharded)


def test_a_shard_of_an_impossible_name_is_missing_and_no_crash(sharded: Path) -> None:
    weight_map = read_weight_map(sharded)
    name = next(iter(weight_map))
    write_index(sharded, weight_map | {name: "x" * 300 + ".safetensors"})
    assert "shard is missing" in refusal(sharded)


def test_lists_in_the_metadata_of_several_shards_are_put_together(sharded: Path) -> None:
    for number, file in enumerate((ONE, TWO)):
        tensors = load_file(sharded / file)
        metadata = {"names": json.dumps(["both", f"own {number}"]), "format": "pt"}
        save_file(tensors, sharded / file, metadata=metadata)
    joined = open_checkpoint(sharded).metadata
    assert sorted(json.loads(joined["names"])) == ["both", "own 0", "own 1"]
    assert joined["format"] == "pt"


def test_a_tensor_absent_from_its_shard_is_named(sharded: Path) -> None:
    lost = "model.layers.10.mlp.down_proj.weight"
    tensors = tensors_of_a_model()
    save_file({"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}, sharded / ONE)
    assert lost in refusal(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    tensors = tensors_of_a_model()
    names = [name for name, file in read_weight_map(sharded).items() if file == TWO]
    doubled = "model.embed_tokens.weight"
    save_file({name: tensors[name] for name in [*names, doubled]}, sharded / TWO)
    message = refusal(sharded)
    assert doubled in message
    assert ONE in message
    assert TWO in message


def test_a_tensor_that_the_index_does_not_know_is_named(sharded: Path) -> None:
    weight_map = read_weight_map(sharded)
    del weight_map["model.embed_tokens.weight"]
    write_index(sharded, weight_map)
    assert "model.embed_tokens.weight" in refusal(sharded)


@pytest.mark.parametrize(
    "file", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "..", 7, ""]
)
def test_an_index_that_leaves_the_folder_is_refused(sharded: Path, file: Any) -> None:
    outside = sharded.parent / "evil.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(6, 8)}, outside)
    write_index(sharded, read_weight_map(sharded) | {"model.embed_tokens.weight": file})
    assert "model.embed_tokens.weight" in refusal(sharded)


@pytest.mark.parametrize("cut", [1, 100, 300])
def test_a_truncated_file_is_told_with_both_sizes(single: Path, cut: int) -> None:
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    message = refusal(single)
    held = len(data) - cut - 8 - struct.unpack("<Q", data[:8])[0]
    assert f"the file holds {held}" in message


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_a_header_gets_past_as_anything_but_a_refusal(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_config(folder)
        path = folder / "model.safetensors"
        save_file(tensors_of_a_model(), path)
        whole = bytearray(path.read_bytes())
        head = 8 + struct.unpack("<Q", whole[:8])[0]
        at = data.draw(st.integers(0, head - 1))
        whole[at] = data.draw(st.integers(0, 255))
        path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), head, at]))])
        try:
            for name, info in open_checkpoint(folder).tensors.items():
                assert len(name) > 0
                assert info.nbytes >= 0
        except BadCheckpoint as error:
            told = str(error)
        else:
            told = ""
        assert "\n" not in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "0 bytes"),
        (b"\x00" * 4, "4 bytes"),
        (b"\xff" * 64, "header of"),
        (struct.pack("<Q", 6) + b"{nope}", "cannot be read"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "cannot be read"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(single: Path, content: bytes, told: str) -> None:
    (single / "model.safetensors").write_bytes(content)
    assert told in refusal(single)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, "holds 12 bytes"),
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, "shape [-2, -2]"),
        ({"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}, "F8_E4M3"),
        ({"dtype": "F32", "shape": [2, 2]}, "data_offsets"),
        ({"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}, "wants"),
    ],
)
def test_a_header_entry_that_lies_is_refused_with_its_numbers(
    single: Path, entry: dict[str, Any], told: str
) -> None:
    header = json.dumps({"w": entry}).encode()
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    assert told in refusal(single)


def test_overlapping_tensors_and_holes_are_refused(single: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for second in ([0, 16], [20, 36]):
        header = json.dumps({"a": entry, "b": entry | {"data_offsets": second}}).encode()
        data = struct.pack("<Q", len(header)) + header + b"\0" * 36
        (single / "model.safetensors").write_bytes(data)
        assert "cannot be mapped" in refusal(single)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write_config(tmp_path)
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_folders_without_weights_config_or_index_are_refused(single: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    write_config(empty)
    assert "no .safetensors" in refusal(empty)
    (single / "config.json").unlink()
    assert "config.json: is missing" in refusal(single)
    (single / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(single)
    (single / "config.json").write_text('{"a": 1, "a": 2}')
    assert "a is given twice" in refusal(single)
    write_config(single)
    (single / "model.safetensors").rename(single / "part-a.safetensors")
    save_file({"b": torch.zeros(1)}, single / "part-b.safetensors")
    assert "2 .safetensors files" in refusal(single)
    assert "does not exist" in refusal(tmp_path / "nowhere")


def test_two_answers_to_which_weights_are_the_model_are_refused(sharded: Path) -> None:
    save_file({"old": torch.zeros(1)}, sharded / "model.safetensors")
    assert "has both" in refusal(sharded)


@pytest.mark.parametrize(
    ("config", "names", "method"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, [], "awq"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, [], "gptq"),
        ({"a": {"b": {"quantization_config": {"bits": 4}}}}, [], "method not named"),
        ({}, ["m.q_proj.qweight", "m.q_proj.scales"], "gptq or awq, by its tensor names"),
        ({}, ["m.q_proj.weight_packed"], "compressed-tensors, by its tensor names"),
        ({}, ["m.q_proj.weight.absmax"], "bitsandbytes, by its tensor names"),
        ({"quantization_config": None, "text_config": {}}, ["m.q_proj.weight"], None),
    ],
)
def test_the_method_of_a_quantized_checkpoint_is_found(
    config: dict[str, Any], names: list[str], method: str | None
) -> None:
    assert quantization_method(config, names) == method


def test_a_quantized_folder_is_refused_as_a_float_source_and_opened_when_asked(
    single: Path,
) -> None:
    write_config(single, CONFIG | {"text_config": {"quantization_config": {"quant_method": "awq"}}})
    assert "already quantized (awq)" in refusal(single)
    assert len(open_checkpoint(single, float_only=False).tensors) == 4
    write_config(single)
    save_file({"q.weight_packed": torch.zeros(2, dtype=torch.int32)}, single / "model.safetensors")
    assert "compressed-tensors" in refusal(single)
