"""Low-bit folders through the engine, against a float model that holds the dequantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import weightpath
from tiny_checkpoint import edit_json, edit_tensors, logits_of, make_checkpoint
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.store import open_checkpoint
from weightpath.engine.load import load, load_float
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor, CannotRun, WeightpathError
from weightpath.kernels import cpu
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear

pytestmark = pytest.mark.usefixtures("one_thread")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def dequantized(folder: Path, source: Path) -> PreTrainedModel:
    """The source's float model in fp32, every low-bit linear's weight replaced by its integers'."""
    model = load_float(open_checkpoint(source), torch.bfloat16, torch.float32)
    checkpoint = open_low_bit(folder)
    if not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    with torch.no_grad():
        for name in checkpoint.linears:
            model.get_submodule(name).weight.copy_(checkpoint.read_qweight(name).dequantize())  # type: ignore[operator,union-attr]
    return model


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def in_bf16(folder: Path, source: Path, wanted: torch.Tensor) -> float:
    """What plain torch loses on the same weights when activations are bf16."""
    return error(logits_of(dequantized(folder, source).bfloat16()).float(), wanted)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a checkpoint that a test may edit."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("scheme", ["w4g64", "w4g32-asym", "w4"])
def test_four_bit_logits_are_those_of_the_dequantized_weights_bit_for_bit(
    tmp_path: Path, kind: str, tied: bool, scheme: str
) -> None:
    source = make_checkpoint(tmp_path / "source", kind, tied)
    weightpath.quantize(source, tmp_path / "low", scheme=scheme, head_bits=16)
    model = load(tmp_path / "low", dtype=torch.float32, backend="torch")
    found, wanted = logits_of(model), logits_of(dequantized(tmp_path / "low", source))
    assert torch.equal(found, wanted)
    assert sum(isinstance(module, Int4Linear) for module in model.modules()) == 14
    compiled = logits_of(load(tmp_path / "low", dtype=torch.float32))
    assert not torch.equal(compiled, wanted)
    assert error(compiled, wanted) < in_bf16(tmp_path / "low", source, wanted) / 8
    original = logits_of(load_float(open_checkpoint(source), torch.bfloat16, torch.float32))
    assert not torch.allclose(found, original, atol=1e-3)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(("scheme", "head"), [("int8", 8), ("w4g64", 8), ("w4g64", 4)])
def test_int8_logits_are_those_of_the_dequantized_weights_to_rounding(
    tmp_path: Path, kind: str, tied: bool, scheme: str, head: int
) -> None:
    source = make_checkpoint(tmp_path / "source", kind, tied)
    weightpath.quantize(source, tmp_path / "low", scheme=scheme, head_bits=head)
    model = load(tmp_path / "low", dtype=torch.float32, backend="torch")
    found, wanted = logits_of(model), logits_of(dequantized(tmp_path / "low", source))
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    compiled = logits_of(load(tmp_path / "low", dtype=torch.float32))
    assert error(compiled, wanted) < in_bf16(tmp_path / "low", source, wanted) / 8
    wanted_head = Int8Linear if head == 8 else Int4Linear
    assert isinstance(model.get_output_embeddings(), wanted_head)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)


def test_a_changed_code_changes_the_logits(
    tiny_low_bit: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = edit_tensors(
        copy_of(tiny_low_bit),
        lambda tensors: tensors[f"{Q_PROJ}.weight_packed"].bitwise_xor_(1),
    )
    assert not torch.equal(logits_of(load(folder)), logits_of(load(tiny_low_bit)))


def test_biases_are_carried(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    weightpath.quantize(source, tmp_path / "low", scheme="w4g64")
    kept = open_checkpoint(source).read(f"{Q_PROJ}.bias")
    assert kept.abs().max() > 0
    model = load(tmp_path / "low")
    assert torch.equal(model.get_submodule(Q_PROJ).bias, kept)  # type: ignore[arg-type]


def test_float_tensors_take_the_checkpoints_dtype_or_the_one_asked_for(tiny_low_bit: Path) -> None:
    assert load(tiny_low_bit).dtype == torch.bfloat16
    assert load(tiny_low_bit, dtype=torch.float32).dtype == torch.float32
    assert logits_of(load(tiny_low_bit, dtype=torch.float32)).dtype == torch.float32


def test_the_model_says_how_it_was_made_and_why_each_kernel(tiny_low_bit: Path) -> None:
    about: Any = load(tiny_low_bit).weightpath
    assert about.manifest["method"].startswith("round to nearest")
    assert about.activation_bits == 16
    explained = about.explain()
    assert len(explained) == 15
    assert explained["lm_head"]["scheme"] == "w8"
    assert explained[Q_PROJ]["scheme"] == "w4g64"
    assert all(row["kernel"] == "cpu" for row in explained.values())
    assert explained[Q_PROJ]["rejected"][0][0] == "cuda"
    fastest = next(name for name, why in cpu.instruction_sets().items() if why is None)
    assert fastest in explained[Q_PROJ]["instruction_set"]
    by_name: Any = load(tiny_low_bit, backend="torch").weightpath
    assert {row["kernel"] for row in by_name.explain().values()} == {"torch"}


def test_progress_counts_every_linear(tiny_low_bit: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load(tiny_low_bit, progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == list(range(1, 16))
    assert {total for _, _, total in seen} == {15}


def test_activation_bits_come_from_the_folder_unless_they_are_asked_for(
    tiny_llama: Path, tmp_path: Path
) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "a8", scheme="w4a8g64")
    made, asked = load(tmp_path / "a8"), load(tmp_path / "a8", activation_bits=16)
    assert made.weightpath.activation_bits == 8  # type: ignore[union-attr]
    assert made.weightpath.explain()[Q_PROJ]["scheme"] == "w4a8g64"  # type: ignore[union-attr,operator]
    assert asked.weightpath.activation_bits == 16  # type: ignore[union-attr]
    assert not torch.equal(logits_of(made), logits_of(asked))


@pytest.mark.parametrize("bits", [0, 7, -8, 4])
@pytest.mark.parametrize("scheme", ["w4g64", "int8"])
def test_activation_bits_that_no_kernel_has_are_refused(
    tiny_llama: Path, tmp_path: Path, bits: int, scheme: str
) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "low", scheme=scheme)
    with pytest.raises(BadRequest, match="8 or 16"):
        load(tmp_path / "low", activation_bits=bits)


def test_a_backend_that_cannot_run_or_does_not_exist_says_so(tiny_low_bit: Path) -> None:
    with pytest.raises(CannotRun, match="Triton kernels run on CUDA"):
        load(tiny_low_bit, backend="triton")
    with pytest.raises(BadRequest, match=r"backend 'fast': unknown; .*triton, cpu, torch"):
        load(tiny_low_bit, backend="fast")
    assert torch.equal(logits_of(load(tiny_low_bit, backend="cpu")), logits_of(load(tiny_low_bit)))


@pytest.mark.parametrize("device", ["abacus", "cpu:x", "", "cuda:99", "mps"])
def test_a_device_that_is_not_here_is_one_clear_line(
    tiny_low_bit: Path, tiny_llama: Path, device: str
) -> None:
    for call in (
        lambda: load(tiny_low_bit, device=device),
        lambda: load_float(open_checkpoint(tiny_llama), device=device),
    ):
        with pytest.raises(BadRequest, match=f"device '{device}' cannot be used") as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1


Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.weight_scale"), f"{Q_PROJ}.weight_scale"),
        (lambda t: t.pop(f"{Q_PROJ}.weight_packed"), f"{Q_PROJ}.weight_packed"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.pop("model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (lambda t: t.update({"surplus": torch.zeros(3)}), "surplus"),
        (lambda t: t.update({f"{Q_PROJ}.bias": torch.ones(64)}), f"{Q_PROJ}.bias"),
        (lambda t: t.update({f"{Q_PROJ}.weight": torch.zeros(64, 64)}), f"{Q_PROJ}.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), "model.norm.weight"),
        (lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.zeros(64, 2)}), Q_PROJ),
        (lambda t: t.update({f"{Q_PROJ}.weight_packed": torch.zeros(64, 8)}), Q_PROJ),
        (lambda t: t.update({f"{Q_PROJ}.weight_shape": torch.tensor([64, 72])}), Q_PROJ),
        (lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(float("nan")), Q_PROJ),
        (lambda t: t.update({f"{Q_PROJ}.weight_packed": torch.zeros(32, 8, dtype=torch.int32),
                             f"{Q_PROJ}.weight_scale": torch.ones(32, 1),
                             f"{Q_PROJ}.weight_shape": torch.tensor([32, 64])}), Q_PROJ),
        (lambda t: t.update({f"model.norm.{leaf}": t[f"{Q_PROJ}.{leaf}"].clone()
                             for leaf in ("weight_packed", "weight_scale", "weight_shape")}), "model.norm"),
        (lambda t: [t.pop(f"{Q_PROJ}.{leaf}") for leaf in ("weight_packed", "weight_scale", "weight_shape")], Q_PROJ),
    ],
    ids=[
        "no scale", "no codes", "no norm", "no embedding", "surplus tensor", "surplus bias",
        "float beside packed", "norm of another shape", "scales of another shape",
        "codes of another dtype", "shape that does not fit", "NaN scale", "half of the rows",
        "a packed norm", "a linear that is gone",
    ],
)  # fmt: skip
def test_a_damaged_folder_is_one_line_that_names_the_tensor(
    tiny_low_bit: Path, copy_of: Callable[[Path], Path], edit: Edit, named: str
) -> None:
    folder = edit_tensors(copy_of(tiny_low_bit), edit)
    with pytest.raises((BadTensor, BadCheckpoint)) as caught:
        load(folder)
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_bias_of_a_low_bit_linear_is_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    weightpath.quantize(source, tmp_path / "low", scheme="int8")
    edit_tensors(tmp_path / "low", lambda tensors: tensors.pop(f"{Q_PROJ}.bias"))
    with pytest.raises(BadTensor, match=f"{Q_PROJ}.bias: is missing"):
        load(tmp_path / "low")


def test_a_bias_of_another_length_is_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    weightpath.quantize(source, tmp_path / "low", scheme="int8")
    edit_tensors(tmp_path / "low", lambda t: t.update({f"{Q_PROJ}.bias": torch.zeros(1)}))
    with pytest.raises(BadTensor, match=rf"{Q_PROJ}.bias: .*\(1,\).*\(64,\)"):
        load(tmp_path / "low")


def test_a_packed_head_is_not_tied_whatever_the_config_says(
    tiny_tied: Path, tmp_path: Path
) -> None:
    weightpath.quantize(tiny_tied, tmp_path / "low", scheme="w4g64")
    wanted = logits_of(load(tmp_path / "low"))
    edit_json(tmp_path / "low" / "config.json", tie_word_embeddings=True)
    model = load(tmp_path / "low")
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    assert torch.equal(logits_of(model), wanted)
    assert list(dict(model.get_output_embeddings().named_parameters())) == []
    assert not model.config.tie_word_embeddings


def test_a_float_folder_is_refused_with_the_mend(tiny_llama: Path) -> None:
    with pytest.raises(BadCheckpoint, match="holds float weights; quantize it first"):
        load(tiny_llama)


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"activation_bits": 7}', '{"activation_bits": "8"}', "null"]
)
def test_a_damaged_manifest_is_one_clear_line(
    tiny_low_bit: Path, copy_of: Callable[[Path], Path], damage: str
) -> None:
    folder = copy_of(tiny_low_bit)
    (folder / "weightpath.json").write_text(damage)
    with pytest.raises(WeightpathError) as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_without_a_manifest_loads_as_another_tools_would(
    tiny_low_bit: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_low_bit)
    (folder / "weightpath.json").unlink()
    model = load(folder)
    assert model.weightpath.manifest == {}  # type: ignore[union-attr]
    assert torch.equal(logits_of(model), logits_of(load(tiny_low_bit)))
