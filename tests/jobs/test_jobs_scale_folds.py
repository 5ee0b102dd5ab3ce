"""Column scales are folded into norms and rows: the codes stay and the model computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_formats import write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.engine.load import load
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.tensor([[1, 5, 9, 33, 7, 2]])
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
ATTENTION = "model.layers.0.self_attn"


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        model: Any = load(folder, dtype=torch.float32)
        return model(input_ids=TOKENS).logits


def share(tensors: dict[str, Tensor], norms: bool = True, heads: bool = True) -> None:
    """Scales as ModelOpt leaves them: one for all linears after a norm, alike in a head's group."""
    for name in [name for name in tensors if name.endswith("pre_quant_scale")]:
        if norms:
            for sibling, first in (
                ("k_proj", "q_proj"),
                ("v_proj", "q_proj"),
                ("up_proj", "gate_proj"),
            ):
                if f".{sibling}." in name:
                    tensors[name] = tensors[name.replace(sibling, first)].clone()
        if heads and ".o_proj." in name:
            shared = tensors[name].view(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            tensors[name] = shared[:, :1].expand_as(shared).reshape(-1).contiguous()


def modelopt(folder: Path, **how: bool) -> Path:
    written = write("modelopt-int4", folder)
    file = written.folder / "model.safetensors"
    tensors = load_file(file)
    share(tensors, **how)
    save_file(tensors, file, metadata={"format": "pt"})
    return written.folder


def test_scales_fold_into_norms_and_rows_and_every_code_stays(tmp_path: Path) -> None:
    source = modelopt(tmp_path / "source")
    done = convert(str(source), "compressed-tensors", tmp_path / "out")
    before, after = open_low_bit(source), open_low_bit(tmp_path / "out")
    for module in before.parts:
        kept = before.read_linear(module).qweight
        assert kept is not None
        assert torch.equal(after.read_qweight(module).codes, kept.codes)
    wanted, found = logits(source), logits(tmp_path / "out")
    assert torch.allclose(found, wanted, atol=4e-3 * float(wanted.abs().max()))
    norm = next(
        item for item in done.floats if item.name == "model.layers.0.input_layernorm.weight"
    )
    assert "takes the activation scales" in norm.how
    assert not norm.exact
    assert {item.how for item in done.linears if ".q_proj" in item.name} == {
        "activation scales folded into the layer before"
    }


def test_without_the_fold_the_same_model_is_far_off(tmp_path: Path) -> None:
    source = modelopt(tmp_path / "source")
    convert(str(source), "compressed-tensors", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{norm}.weight"].fill_(1.0)
    save_file(tensors, file, metadata={"format": "pt"})
    wanted = logits(source)
    assert not torch.allclose(
        logits(tmp_path / "out"), wanted, atol=2e-2 * float(wanted.abs().max())
    )


@pytest.mark.parametrize(
    ("how", "module", "why"),
    [
        ({"norms": False}, f"{ATTENTION}.q_proj", "reads the same norm and has other"),
        ({"heads": False}, f"{ATTENTION}.o_proj", "differ between query heads"),
    ],
)
def test_scales_that_cannot_be_folded_are_quantized_in_and_said_why(
    how: dict[str, bool], module: str, why: str, tmp_path: Path
) -> None:
    source = modelopt(tmp_path / "source", **how)
    done = convert(str(source), "compressed-tensors", tmp_path / "out")
    item = next(item for item in done.linears if item.name == module)
    assert "quantized again" in item.how
    assert why in item.how
    assert item.mean_change > 0


def test_a_model_that_was_not_read_folds_nothing(tmp_path: Path) -> None:
    source = modelopt(tmp_path / "source")
    config = source / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gemma2"'))
    done = convert(str(source), "compressed-tensors", tmp_path / "out")
    assert all("quantized again" in item.how for item in done.linears)
    assert "'gemma2' was not read" in done.linears[0].how
