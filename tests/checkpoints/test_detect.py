"""Which format a folder is in: by its label, wherever that stands, then by its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tiny_checkpoint import edit_tensors
from tiny_formats import FORMATS, Written, write
from weightpath.checkpoints import detect as detect_room
from weightpath.checkpoints.detect import FORMATS as OPENERS
from weightpath.checkpoints.detect import detect
from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit
from weightpath.checkpoints.opened import Opened, source_of
from weightpath.checkpoints.store import SafetensorsCheckpoint, open_checkpoint
from weightpath.errors import BadCheckpoint, BadTensor, WeightpathError

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {
    "awq-gemm": "AWQ gemm",
    "awq-gemv": "AWQ gemv",
    "awq-gemv_fast": "AWQ gemv_fast",
    "awq-llm": "AWQ llm-awq",
    "gptq-v1": "GPTQ v1",
    "gptq-v2": "GPTQ v2",
    "autoround-gptq": "AutoRound (gptq)",
    "autoround-gptqmodel": "AutoRound (gptq_v2)",
    "autoround-awq": "AutoRound (awq)",
    "autoround-ct": "AutoRound (compressed-tensors)",
    "ct-packed": "compressed-tensors pack-quantized",
    "ct-padded": "compressed-tensors pack-quantized",
    "ct-int8": "compressed-tensors int-quantized",
    "ct-ordered": "compressed-tensors pack-quantized",
    "torchao-int4": "torchao",
    "torchao-int8": "torchao",
    "modelopt-int4": "ModelOpt",
    "bnb-nf4": "bitsandbytes",
    "bnb-int8": "bitsandbytes",
    "hqq": "HQQ",
    "weightpath-int8": "compressed-tensors pack-quantized",
    "gguf": "GGUF Q4_0",
}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """One checkpoint of every format, read-only."""
    known: dict[str, Written] = {}

    def make(name: str) -> Written:
        if name not in known:
            known[name] = write(name, tmp_path_factory.mktemp("made") / name)
        return known[name]

    return make


def config_of(folder: Path, **settings: Any) -> None:
    """Change the quantization config; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changed = config.get("quantization_config", {}) | settings
    config["quantization_config"] = {k: v for k, v in changed.items() if v is not None}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_known_by_name_and_says_how(
    name: str, made: Callable[[str], Written]
) -> None:
    opened = open_low_bit(made(name).path)
    assert opened.format == NAMES[name]
    wanted = {"gguf": "the file's magic number", "modelopt-int4": "producer modelopt"}
    assert wanted.get(name, "quant_method") in opened.how
    if name not in ("gguf", "hqq", "bnb-nf4", "bnb-int8", "torchao-int4", "torchao-int8"):
        assert "config.json" in opened.how
    assert opened.parts.keys() == made(name).weights.keys()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gguf"])
def test_no_two_formats_claim_the_same_folder(name: str, made: Callable[[str], Written]) -> None:
    """The order of FORMATS decides nothing that labels have decided."""
    source = source_of(open_checkpoint(made(name).path, float_only=False))
    claims = [opener.__name__ for opener in OPENERS if _opens(opener, source)]
    assert len(claims) == 1, claims


def _opens(opener: Callable[..., Opened | None], source: Any) -> bool:
    return opener(source) is not None


@pytest.mark.parametrize("name", ["awq-gemm", "gptq-v1", "ct-packed", "modelopt-int4", "hqq", "bnb-nf4"])  # fmt: skip
def test_recognising_reads_no_weights_but_gptq_s_zero_points(
    name: str, made: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = SafetensorsCheckpoint.read

    def spy(self: SafetensorsCheckpoint, tensor: str) -> torch.Tensor:
        read.append(tensor)
        return original(self, tensor)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", spy)
    open_low_bit(made(name).path)
    assert {tensor.rpartition(".")[2] for tensor in read} <= {"qzeros"}
    assert bool(read) == name.startswith("gptq")


@pytest.mark.parametrize("place", ["legacy", "both", "nested"])
@pytest.mark.parametrize("name", ["awq-gemm", "gptq-v2", "modelopt-int4"])
def test_a_label_is_found_in_side_files_and_sections(name: str, place: str, tmp_path: Path) -> None:
    written = write(name, tmp_path / "in", place=place)
    opened = open_low_bit(written.path)
    assert opened.format == NAMES[name]
    assert opened.nested == (place == "nested")
    if place == "legacy":
        file = {"awq-gemm": "quant_config", "gptq-v2": "quantize_config", "modelopt-int4": "hf_quant_config"}  # fmt: skip
        assert f"{file[name]}.json" in opened.how


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gptq-v1", {"quant_method": None, "method": "gptq"}),
        ("gptq-v1", {"quant_method": "GPTQ"}),
        ("gptq-v1", {"quant_method": None}),
        ("awq-gemm", {"quant_method": "AWQ"}),
        ("awq-gemm", {"quant_method": None, "bits": None, "group_size": None, "w_bit": 4, "q_group_size": 32}),
        ("ct-packed", {"quant_method": None}),
        ("ct-packed", {"format": "int-quantized"}),  # words are words
        ("autoround-gptq", {"quant_method": "intel/auto-round"}),
        ("bnb-nf4", {"quant_method": None, "load_in_4bit": True}),
        ("hqq", {"quant_method": None, "quant_config": {}}),
    ],
)  # fmt: skip
def test_other_spellings_of_a_label_are_the_same_format(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    written = write(name, tmp_path / "in")
    config_of(written.folder, **settings)
    opened = open_low_bit(written.path)
    assert opened.format == NAMES[name]
    assert torch.equal(opened.read_linear(UP).weight(), torch.from_numpy(written.weights[UP]))


def read_all(path: Path) -> None:
    opened = open_low_bit(path)
    for module in opened.parts:
        opened.read_linear(module)


@pytest.mark.parametrize(
    ("name", "lie", "words"),
    [
        ("gptq-v1", {"quant_method": "awq", "version": "gemm"}, "set quant_method to gptq"),
        ("awq-gemm", {"quant_method": "gptq"}, "check bits and group_size"),
        ("ct-packed", {"quant_method": "awq", "group_size": 32, "version": "gemm"}, "holds no packed linear"),
        ("gptq-v1", {"quant_method": "compressed-tensors"}, "holds no packed linear"),
        ("gptq-v1", {"quant_method": "torchao"}, "metadata says nothing of tensor_names"),
        ("gptq-v1", {"quant_method": "modelopt"}, "quant_algo"),
        ("gptq-v1", {"quant_method": "hqq"}, "holds no packed linear"),
        ("ct-int8", {"quant_method": "bitsandbytes"}, "holds no packed linear"),
    ],
)  # fmt: skip
def test_a_label_of_another_format_is_refused_and_never_read_as_numbers(
    name: str, lie: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written = write(name, tmp_path / "in")
    config_of(written.folder, **lie)
    with pytest.raises(WeightpathError) as caught:
        read_all(written.path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["aqlm", "quip", "fp8", "x" * 500, 5, ["gptq"], {"a": 1}])
def test_an_unknown_method_is_named_with_what_is_read(method: Any, tmp_path: Path) -> None:
    written = write("ct-packed", tmp_path / "in")
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    path.write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint) as caught:
        open_low_bit(written.path)
    message = str(caught.value)
    assert repr(method)[:40] in message
    assert message.endswith(detect_room.READ)
    assert "\n" not in message
    assert len(message) < 600 + len(str(tmp_path))


def test_a_label_without_packed_tensors_says_that_the_weights_are_floats(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(BadCheckpoint, match=r"quant_method gptq .*holds no packed linear"):
        open_low_bit(folder)


def test_gptq_s_zeros_outvote_its_label_and_the_contradiction_is_told(tmp_path: Path) -> None:
    written = write("gptq-v2", tmp_path / "in", changes={"checkpoint_format": "gptq"})
    opened = open_low_bit(written.path)
    assert opened.format == "GPTQ v2"
    assert any(note.startswith("contradiction: ") for note in opened.notes)
    assert torch.equal(opened.read_linear(UP).weight(), torch.from_numpy(written.weights[UP]))


def test_a_quantize_config_that_disagrees_with_config_json_is_told(tmp_path: Path) -> None:
    written = write("gptq-v1", tmp_path / "in", place="both")
    side = written.folder / "quantize_config.json"
    side.write_text(json.dumps(json.loads(side.read_text()) | {"group_size": 64}))
    opened = open_low_bit(written.path)
    assert any("group_size" in note and "64" in note for note in opened.notes)
    assert opened.outline(UP).scheme is not None
    assert torch.equal(opened.read_linear(UP).weight(), torch.from_numpy(written.weights[UP]))


def test_one_damaged_linear_is_named_when_it_is_outlined_and_others_are_not(
    tmp_path: Path,
) -> None:
    written = write("awq-gemm", tmp_path / "in")
    edit_tensors(written.folder, lambda t: t.pop(f"{UP}.qzeros"))
    opened = open_low_bit(written.path)
    with pytest.raises(BadTensor, match=rf"{UP}\.qzeros: is missing"):
        opened.outline(UP)
    with pytest.raises(BadTensor, match=UP):
        _ = opened.linears
    assert opened.outline("model.layers.1.mlp.up_proj").shape == (256, 128)


def test_outlines_say_what_reading_then_gives(made: Callable[[str], Written]) -> None:
    for name in FORMATS:
        opened = open_low_bit(made(name).path)
        for module, outline in opened.linears.items():
            read = opened.read_linear(module)
            assert outline.shape == made(name).weights[module].shape
            assert outline.scaled == (read.column_scales is not None)
            if read.qweight is None:
                assert outline.scheme is None
                continue
            found = read.qweight
            assert outline.scheme == found.scheme, name
            assert outline.scales == found.scales.dtype
            assert outline.ordered == (found.g_idx is not None)
            assert outline.minimums == (found.minimums is not None)


def test_what_an_opened_checkpoint_tells_is_all_there(made: Callable[[str], Written]) -> None:
    source = source_of(open_checkpoint(made("awq-gemm").path, float_only=False))
    opened = detect(source)
    assert {field.name for field in fields(Opened)} >= {"format", "how", "parts", "notes"}
    assert set(opened.parts[UP]) == {"qweight", "qzeros", "scales"}
    low = open_low_bit(made("awq-gemm").path)
    assert isinstance(low, LowBitCheckpoint)
    assert low.stored_bytes(UP) == 256 * 128 // 2 + 4 * 256 // 2 + 4 * 256 * 2
    assert set(low.floats) == {
        "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight",
        *(f"model.layers.{i}.{norm}.weight" for i in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")),
    }  # fmt: skip
