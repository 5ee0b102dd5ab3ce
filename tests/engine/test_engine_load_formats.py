"""Every format loads and computes what its integers stand for, or says what runs as floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_formats import FORMATS, Written, write
from weightpath.engine import skeleton
from weightpath.engine.load import load, load_tokenizer
from weightpath.nn.gathered_linear import GatheredLinear

pytestmark = pytest.mark.usefixtures("one_thread")

RUN_AS_FLOATS = {"torchao-int4", "bnb-nf4"}
TOKENS = torch.tensor([[1, 5, 9, 33, 7, 2]])
DOWN = "model.layers.0.mlp.down_proj"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def oracle(written: Written) -> Any:
    """A float model with the weights that the integers stand for."""
    from weightpath.checkpoints.low_bit import open_low_bit

    low = open_low_bit(written.folder)
    model = skeleton.build(low.config, torch.float32)
    weights = {f"{name}.weight": torch.tensor(value) for name, value in written.weights.items()}
    floats = {name: low.source.read(name).float() for name in low.floats}
    skeleton.fill(model, (weights | floats).items(), "oracle")
    return skeleton.finish(model, "oracle")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "weightpath-int8"])
def test_every_format_computes_what_its_integers_stand_for(name: str, tmp_path: Path) -> None:
    written = write(name, tmp_path / "low", tokenizer=name == "gguf")
    model = load(written.folder, dtype=torch.float32, backend="torch")
    wanted = logits(oracle(written))
    assert torch.allclose(logits(model), wanted, atol=2e-4 * float(wanted.abs().max()))
    floats = model.weightpath.floats  # type: ignore[union-attr]
    assert bool(floats) == (name in RUN_AS_FLOATS)
    assert model.weightpath.explain().keys() >= written.weights.keys()  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_act_order_runs_by_gathering_activations(bits: int, tmp_path: Path) -> None:
    options = {"ordered": True, "bits": bits, "symmetric": False}
    written = write("gptq-v2", tmp_path / "low", **options)
    model = load(written.folder, dtype=torch.float32, backend="torch")
    wanted = logits(oracle(written))
    assert torch.allclose(logits(model), wanted, atol=2e-4 * float(wanted.abs().max()))
    module = model.get_submodule(DOWN)
    if bits == 8:  # asymmetric groups of 8 bits have no module
        assert "w8g32-asym" in model.weightpath.floats[DOWN][1]  # type: ignore[index,union-attr]
        return
    assert isinstance(module, GatheredLinear)
    assert module.order is not None
    module.order = torch.arange(module.order.shape[0])
    assert not torch.allclose(logits(model), wanted, atol=1e-2 * float(wanted.abs().max()))


def test_column_scales_are_applied_to_activations(tmp_path: Path) -> None:
    written = write("modelopt-int4", tmp_path / "low")
    model = load(written.folder, dtype=torch.float32)
    module = model.get_submodule(DOWN)
    assert isinstance(module, GatheredLinear)
    assert module.scales is not None
    wanted = logits(model)
    module.scales = None
    assert not torch.allclose(logits(model), wanted, atol=1e-2 * float(wanted.abs().max()))


def test_what_runs_as_floats_says_why(tmp_path: Path) -> None:
    written = write("bnb-nf4", tmp_path / "low")
    explained = load(written.folder).weightpath.explain()  # type: ignore[operator,union-attr]
    assert explained[DOWN]["kernel"] == "float"
    assert "no integers" in explained[DOWN]["rejected"][0][1]


def test_a_gguf_file_loads_with_its_own_tokenizer(tmp_path: Path) -> None:
    written = write("gguf", tmp_path / "low", tokenizer=True)
    model = load(written.folder, dtype=torch.float32)
    assert model.weightpath.format.startswith("GGUF")  # type: ignore[union-attr]
    tokenizer = load_tokenizer(written.folder)
    assert tokenizer.decode(tokenizer("Hello")["input_ids"], skip_special_tokens=True)


def test_reading_tells_what_it_decided(tmp_path: Path) -> None:
    written = write("gptq-v2", tmp_path / "low", changes={"checkpoint_format": "gptq"})
    notes: Any = load(written.folder).weightpath.notes  # type: ignore[union-attr]
    assert any("contradiction: checkpoint_format gptq means v1" in note for note in notes)
