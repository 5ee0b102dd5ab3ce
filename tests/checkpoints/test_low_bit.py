"""Low-bit folders opened for reading: whole, odd, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightpath.checkpoints import compressed_tensors as ct
from weightpath.checkpoints.low_bit import MANIFEST, LowBitCheckpoint, open_low_bit
from weightpath.errors import BadCheckpoint, BadTensor, WeightpathError
from weightpath.quantize.int8 import quantize_int8
from weightpath.quantize.rtn import quantize_rtn
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = {
    "model.layers.0.q_proj": Scheme(4, 16),
    "model.layers.0.o_proj": Scheme(4, 16, symmetric=False),
    "model.layers.10.q_proj": Scheme(4, 16),
    "lm_head": INT8,
}
FLOATS = {
    "model.embed_tokens.weight": torch.ones(7, 32),
    "model.norm.weight": torch.ones(32),
    "model.layers.0.q_proj.bias": torch.ones(12),
}


def quantized(name: str, scheme: Scheme) -> QWeight:
    generator = torch.Generator().manual_seed(len(name))
    weight = torch.randn(12, 32, generator=generator)
    return quantize_int8(weight)[0] if scheme == INT8 else quantize_rtn(weight, scheme)[0]


def make(folder: Path, **config: Any) -> Path:
    """A low-bit folder as the writer's caller would lay it out."""
    folder.mkdir(parents=True)
    tensors = dict(FLOATS)
    for name, scheme in SCHEMES.items():
        tensors |= ct.to_tensors(name, quantized(name, scheme))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quantization_config": ct.quantization_config(SCHEMES, ["model.extra"])}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | settings | config))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "low")


def test_linears_have_their_schemes_and_integers_and_the_rest_is_float(folder: Path) -> None:
    checkpoint = open_low_bit(folder)
    assert {m: outline.scheme for m, outline in checkpoint.linears.items()} == SCHEMES
    assert set(checkpoint.floats) == set(FLOATS)
    for name, scheme in SCHEMES.items():
        wanted, found = quantized(name, scheme), checkpoint.read_qweight(name)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales, wanted.scales)
        assert torch.equal(found.dequantize(), wanted.dequantize())
    for name, tensor in checkpoint.read_floats():
        assert torch.equal(tensor, FLOATS[name])


def test_every_tensor_of_the_file_is_a_linear_s_part_or_a_float(folder: Path) -> None:
    checkpoint = open_low_bit(folder)
    parts = {f"{name}.{leaf}" for name, leaves in checkpoint.parts.items() for leaf in leaves}
    assert parts | set(checkpoint.floats) == set(load_file(folder / "model.safetensors"))
    assert not parts & set(checkpoint.floats)


def test_linears_come_in_natural_order(folder: Path) -> None:
    names = [name for name in open_low_bit(folder).linears if name.startswith("model.layers")]
    assert names == ["model.layers.0.o_proj", "model.layers.0.q_proj", "model.layers.10.q_proj"]


def test_stored_bytes_count_a_linear_s_parts(folder: Path) -> None:
    checkpoint = open_low_bit(folder)
    # 12 x 32 codes, 12 x 2 bf16 scales, two int64; asymmetric: two words of zeros a group
    assert checkpoint.stored_bytes("model.layers.0.q_proj") == 192 + 48 + 16
    assert checkpoint.stored_bytes("model.layers.0.o_proj") == 192 + 48 + 16 + 16
    assert checkpoint.stored_bytes("lm_head") == 384 + 48 + 16


def test_the_manifest_is_read_where_there_is_one_and_not_needed(folder: Path) -> None:
    assert open_low_bit(folder).manifest == {}
    (folder / MANIFEST).write_text('{"activation_bits": 8}')
    assert open_low_bit(folder).manifest == {"activation_bits": 8}


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"a": 1, "a": 2}'])
def test_a_damaged_manifest_is_one_line_that_names_it(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(BadCheckpoint, match=MANIFEST):
        open_low_bit(folder)


def test_a_linear_s_part_that_is_missing_is_named_when_it_is_read(folder: Path) -> None:
    for part in ("weight_packed", "weight_scale", "weight_zero_point"):
        name = f"model.layers.0.o_proj.{part}"
        edit(folder, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(BadTensor, match=name):
            open_low_bit(folder).read_qweight("model.layers.0.o_proj")
        edit(folder, lambda t: t.update(ct.to_tensors("model.layers.0.o_proj", quantized("model.layers.0.o_proj", SCHEMES["model.layers.0.o_proj"]))))  # fmt: skip


def test_one_damaged_linear_does_not_stop_the_others_from_being_read(folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight_scale"][3, 0] = float("nan")

    checkpoint = open_low_bit(edit(folder, spoil))
    with pytest.raises(BadTensor, match=r"lm_head: scale \[3, 0\] is nan"):
        checkpoint.read_qweight("lm_head")
    assert checkpoint.read_qweight("model.layers.0.q_proj")


def settings(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": ct.quantization_config(SCHEMES, []) | changes}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quantization_config": None}, "no quantization_config"),
        ({"quantization_config": {}}, "no quantization_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "group_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "group_size"),
        ({"quantization_config": {"quant_method": "awq", "group_size": 32}}, "no packed linear"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm' is not read"),
        ({"quantization_config": "int4"}, "no quantization_config"),
        (settings(format="marlin-24"), "marlin-24"),
        (settings(ignore=["lm_head"]), "lm_head is packed"),
        (settings(config_groups={}), "is packed"),
        (settings(config_groups={"g": None}), "NoneType"),
    ],
)
def test_a_config_that_does_not_go_with_the_tensors_is_one_line(
    tmp_path: Path, config: dict[str, Any], word: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        open_low_bit(make(tmp_path / "low", **config))
    message = str(caught.value)
    assert word in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_a_quantization_config_nested_in_text_config_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "low", quantization_config=None, text_config=settings())
    checkpoint = open_low_bit(folder)
    assert checkpoint.nested
    assert {m: outline.scheme for m, outline in checkpoint.linears.items()} == SCHEMES


def test_a_lost_quantization_config_is_inferred_where_the_shapes_settle_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "low", quantization_config=None)
    alike = "model.layers.10.q_proj"
    with pytest.raises(BadCheckpoint, match="no quantization_config"):
        open_low_bit(folder)  # linears of several schemes

    def keep_one(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if "weight_" in n and not n.startswith(alike)]:
            del tensors[name]

    checkpoint = open_low_bit(edit(folder, keep_one))
    assert checkpoint.linears[alike].scheme == SCHEMES[alike]
    assert any("no quantization_config was found" in note for note in checkpoint.notes)


def test_a_config_of_other_bits_or_groups_is_refused_when_a_linear_is_read(tmp_path: Path) -> None:
    for number, scheme in enumerate((Scheme(8), Scheme(4, 32), Scheme(3, 16))):
        wrong = ct.quantization_config(dict.fromkeys(SCHEMES, scheme), [])
        checkpoint = open_low_bit(make(tmp_path / str(number), quantization_config=wrong))
        with pytest.raises(BadTensor, match=r"model\.layers\.0\.q_proj"):
            checkpoint.read_qweight("model.layers.0.q_proj")


def test_zero_points_in_a_file_that_its_config_calls_symmetric_are_not_dropped(
    tmp_path: Path,
) -> None:
    wrong = ct.quantization_config(SCHEMES | {"model.layers.0.o_proj": Scheme(4, 16)}, [])
    checkpoint = open_low_bit(make(tmp_path / "low", quantization_config=wrong))
    with pytest.raises(BadTensor, match="weight_zero_point"):
        checkpoint.read_qweight("model.layers.0.o_proj")


def test_a_float_checkpoint_says_to_quantize_it_first(tmp_path: Path) -> None:
    folder = tmp_path / "float"
    folder.mkdir()
    save_file(FLOATS, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="holds float weights; quantize it first"):
        open_low_bit(folder)


def test_what_is_no_checkpoint_is_a_clear_error(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadCheckpoint):
        open_low_bit(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(BadCheckpoint):
        open_low_bit(folder)


def test_any_flipped_byte_of_a_header_or_config_never_ends_in_a_traceback(folder: Path) -> None:
    original = {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json")}
    length = 8 + int.from_bytes(original["model.safetensors"][:8], "little")
    generator = torch.Generator().manual_seed(0)
    refused: list[str] = []
    for name, limit in (
        ("model.safetensors", length),
        ("config.json", len(original["config.json"])),
    ):
        for place in torch.randint(0, limit, (60,), generator=generator).tolist():
            raw = bytearray(original[name])
            raw[place] ^= 1 << (place % 7)
            (folder / name).write_bytes(raw)
            try:
                checkpoint = open_low_bit(folder)
                for module in checkpoint.linears:
                    checkpoint.read_qweight(module)
            except WeightpathError as error:
                refused.append(str(error))
        (folder / name).write_bytes(original[name])
    assert len(refused) > 60
    assert not any("\n" in message for message in refused)
    assert isinstance(open_low_bit(folder), LowBitCheckpoint)
