"""Every format that is read, written in every folder format: exact ones bit for bit, lossy ones by
as much as is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reopened import check_told, tensors_of

from tiny_checkpoint import edit_tensors
from tiny_formats import FORMATS, Written, write
from weightpath.errors import BadRequest
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = ("compressed-tensors", "awq", "gptq", "gptq_v2", "int8")
EIGHT = ("ct-int8", "torchao-int8")
EIGHT_FP32 = ("bnb-int8", "weightpath-int8")
FLOATS_OR_MINIMUMS = ("torchao-int4", "modelopt-int4", "bnb-nf4")
FOLDED = {"ct-ordered": ("gate_proj", "up_proj", "down_proj"), "modelopt-int4": ("up_proj", "down_proj")}  # fmt: skip
"""Linears whose rows or columns move; test_jobs_folds.py and ..._scale_folds.py prove these."""
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """One checkpoint of every format, written when it is first asked for. Read-only."""
    made: dict[str, Written] = {}

    def source(name: str) -> Written:
        if name not in made:
            made[name] = write(name, tmp_path_factory.mktemp("sources") / name)
        return made[name]

    return source


def wholly_exact(name: str, to: str) -> bool:
    """Whether every linear of a format keeps its values in another one."""
    if name in FLOATS_OR_MINIMUMS:
        return False
    if name == "ct-ordered":
        return to.startswith("gptq")
    if name in EIGHT:
        return True
    if name in EIGHT_FP32:  # their scales are fp32, GPTQ's are fp16
        return to in ("compressed-tensors", "int8")
    return to != "int8"


@pytest.mark.parametrize("to", FOLDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_every_other_and_changes_by_what_is_told(
    name: str, to: str, sources: Callable[[str], Written], tmp_path: Path
) -> None:
    source = sources(name)
    if to == "awq" and name in (*EIGHT, *EIGHT_FP32):
        with pytest.raises(BadRequest, match=r"nothing is left to write as awq, .*8 bits, AWQ has"):
            convert(str(source.path), to, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        return
    done = convert(str(source.path), to, tmp_path / "out")
    assert {item.name for item in done.linears} == set(source.weights)
    check_told(done, source.weights, () if wholly_exact(name, to) else FOLDED.get(name, ()))
    assert (done.lossy == 0) == wholly_exact(name, to)
    assert done.exact + done.lossy == len(done.linears)
    for item in done.linears:
        assert item.exact or "quantized again" in item.how or "rounded" in item.how, item
    names = tensors_of(done.folder).keys()
    assert to.startswith("gptq") or not any(n.endswith("g_idx") for n in names)


def test_sabotage_one_flipped_bit_of_the_result_is_not_what_was_told(
    sources: Callable[[str], Written], tmp_path: Path
) -> None:
    source = sources("awq-gemm")
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}.weight_packed"].view(-1)[5] ^= 1 << 13

    edit_tensors(done.folder, flip)
    with pytest.raises(AssertionError):
        check_told(done, source.weights)
