"""The demo model end to end: quantized by its name, loaded, and still knowing an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weightpath
from weightpath.checkpoints.demo import FOLDER
from weightpath.engine.generate import answer
from weightpath.engine.load import load_tokenizer
from weightpath.jobs.inspect import inspect_folder

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def in_cache(demo_model: Path, own_stores: Path) -> None:
    """The demo model in this test's own cache, without a second copy of its weights."""
    (own_stores / "cache").mkdir(parents=True)
    (own_stores / "cache" / FOLDER).symlink_to(demo_model)


@pytest.mark.usefixtures("in_cache")
def test_the_demo_model_in_4_bits_still_answers_paris(
    weightpath_cli: Callable[..., Any], tmp_path: Path
) -> None:
    low = tmp_path / "low"
    ran = weightpath_cli("quantize", "demo", "-o", low, "--scheme", "w4g64", "--head", "16")
    assert ran.code == 0, ran.err
    assert "210 linears quantized" in ran.out
    found = inspect_folder(low)
    assert found.linear_bits_per_weight == 4.25
    assert {kind.role for kind in found.kinds} == {"linear", "embedding", "other"}
    model: Any = weightpath.load(low)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    pieces: list[str] = []
    said = answer(model, load_tokenizer(low), QUESTION, 10, emit=pieces.append)
    assert "Paris" in said.text
    assert "".join(pieces).strip() == said.text


@pytest.mark.usefixtures("in_cache")
def test_the_demo_models_plan_unties_the_head_and_takes_groups_of_64() -> None:
    plan = weightpath.plan("demo")
    assert plan.tensors.group_size == 64
    assert "576" in plan.tensors.group_reason
    assert plan.tensors.unties_head
    assert sum(d.shape.role == "linear" for d in plan.tensors.decisions) == 210


def test_the_demo_model_loads_as_from_pretrained_does(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from weightpath.checkpoints.store import open_checkpoint
    from weightpath.engine.load import load_float

    ids = torch.arange(1000, 1032)[None]
    with torch.inference_mode():
        ours = load_float(open_checkpoint(demo_model))(input_ids=ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16)(
            input_ids=ids
        ).logits
    assert torch.equal(ours, theirs)


def test_a_real_model_with_its_own_head_takes_groups_of_128(pycode: Path, tmp_path: Path) -> None:
    done = weightpath.quantize(pycode, tmp_path / "low", scheme="w4g128-asym", head_bits=8)
    assert set(done.outcomes.values()) == {"quantized", "copied"}
    assert inspect_folder(tmp_path / "low").linear_bits_per_weight == 4 + 20 / 128
    model: Any = weightpath.load(tmp_path / "low")
    ids = load_tokenizer(pycode)("def add(a, b):\n    return", return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert "a + b" in load_tokenizer(pycode).decode(out[0])
