"""Conversions that are killed, refused, or start where something is already; and their memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reopened import CODES, added_memory, check_told, many_layers, tensors_of

from tiny_checkpoint import edit_tensors, folder_bytes
from tiny_formats import Written, write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.errors import BadRequest, BadTensor
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")
KILLED_AFTER = 6
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from weightpath.jobs.convert import convert

def die(label, done, total):
    if done == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
convert(sys.argv[1], sys.argv[2], Path(sys.argv[3]), progress=die)
"""
"""A conversion that kills itself with signal 9 once so many tensors are written."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Asymmetric GPTQ, 3 shards. Read-only."""
    return write("gptq-v1", tmp_path_factory.mktemp("source") / "gptq", symmetric=False, shards=3)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_killed_by_signal_9_is_taken_up_and_ends_with_the_bytes_of_an_undisturbed_one(
    source: Written, tmp_path: Path
) -> None:
    arguments = [str(source.path), "compressed-tensors", str(tmp_path / "out"), str(KILLED_AFTER)]
    killed = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert left_in(tmp_path) == ["out.partial"]
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    whole = convert(str(source.path), "compressed-tensors", tmp_path / "whole")
    assert (done.resumed, whole.resumed) == (KILLED_AFTER, 0)
    assert folder_bytes(done.folder) == folder_bytes(whole.folder)
    assert done.linears == whole.linears
    assert left_in(tmp_path) == ["out", "whole"]


def interrupt(source: Path, to: str, folder: Path) -> None:
    """Ctrl-C once KILLED_AFTER tensors are written."""

    def press(_: str, done: int, __: int) -> None:
        if done == KILLED_AFTER:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert(str(source), to, folder, progress=press)


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_keeps_what_is_finished_and_the_next_run_goes_on(
    threads: int, source: Written, tmp_path: Path
) -> None:
    torch.set_num_threads(threads)
    interrupt(source.path, "awq", tmp_path / "out")
    assert torch.get_num_threads() == threads
    assert left_in(tmp_path) == ["out.partial"]
    done = convert(str(source.path), "awq", tmp_path / "out")
    assert done.resumed >= KILLED_AFTER
    whole = convert(str(source.path), "awq", tmp_path / "whole")
    assert folder_bytes(done.folder) == folder_bytes(whole.folder)
    check_told(done, source.weights)


def test_what_the_audit_of_an_earlier_run_found_is_told_again(tmp_path: Path) -> None:
    made = write("autoround-gptq", tmp_path / "in", negative_scales=True)
    interrupt(made.path, "compressed-tensors", tmp_path / "out")
    done = convert(str(made.path), "compressed-tensors", tmp_path / "out")
    whole = convert(str(made.path), "compressed-tensors", tmp_path / "whole")
    assert any("negative scales in 14 of 14 linears" in note for note in whole.notes)
    assert done.notes == whole.notes


def test_bytes_that_changed_since_and_a_cut_journal_line_are_made_again(
    source: Written, tmp_path: Path
) -> None:
    interrupt(source.path, "gptq_v2", tmp_path / "out")
    with (tmp_path / "out.partial" / "journal.jsonl").open("a") as journal:
        journal.write('{"unit": "model.la')
    with (tmp_path / "out.partial" / "model.safetensors").open("r+b") as weights:
        weights.seek(-70_000, 2)
        weights.write(b"\xff" * 60_000)
    done = convert(str(source.path), "gptq_v2", tmp_path / "out")
    check_told(done, source.weights)


def test_an_unfinished_run_of_another_target_or_source_is_not_continued(
    source: Written, tmp_path: Path
) -> None:
    interrupt(source.path, "awq", tmp_path / "out")
    before = folder_bytes(tmp_path)
    other = write("gptq-v1", tmp_path.parent / f"{tmp_path.name}-other", seed=5)
    for path, to, strict in (
        (source.path, "compressed-tensors", False),
        (other.path, "awq", False),
        (source.path, "awq", True),  # which was not checked for loss so far
    ):
        with pytest.raises(BadRequest, match="unfinished run of another job"):
            convert(str(path), to, tmp_path / "out", exact_only=strict)
        assert folder_bytes(tmp_path) == before
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", overwrite=True)
    assert done.resumed == 0
    check_told(done, source.weights)


def test_a_folder_that_is_there_is_kept_unless_it_is_to_be_replaced(
    source: Written, tmp_path: Path
) -> None:
    convert(str(source.path), "awq", tmp_path / "out")
    before = folder_bytes(tmp_path)
    with pytest.raises(BadRequest, match="exists already"):
        convert(str(source.path), "gptq_v2", tmp_path / "out")
    assert folder_bytes(tmp_path) == before
    done = convert(str(source.path), "gptq_v2", tmp_path / "out", overwrite=True)
    assert json.loads((done.folder / "quantize_config.json").read_text())["bits"] == 4
    check_told(done, source.weights)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", [".", "sub/.."])
def test_the_source_s_own_folder_is_refused_as_the_target(
    place: str, overwrite: bool, tmp_path: Path
) -> None:
    source = write("awq-gemm", tmp_path / "in")
    before = folder_bytes(tmp_path)
    (tmp_path / "in" / "sub").mkdir()
    for target in (source.folder / place, tmp_path):
        with pytest.raises(BadRequest, match="holds the model that it would be made from"):
            convert(str(source.path), "compressed-tensors", target, overwrite=overwrite)
    assert folder_bytes(tmp_path) == before


def test_a_folder_of_other_things_is_never_replaced(source: Written, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(BadRequest, match="exists and is no checkpoint"):
        convert(str(source.path), "awq", tmp_path / "out", overwrite=True)
    assert left_in(tmp_path / "out") == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        ("gptq-v1", "int8", "14 of 14 linears .*w4g32 is not int8 per channel"),
        ("bnb-nf4", "awq", "14 of 14 linears .*floats of no integer grid"),
        ("ct-ordered", "awq", "12 of 14 linears .*residual stream"),
        ("ct-ordered", "compressed-tensors", "12 of 14 linears .*residual stream"),
        ("bnb-int8", "gptq", "down_proj: is not converted exactly .*scales rounded to float16"),
        ("torchao-int4", "awq", "down_proj: is not converted exactly .*minimums"),
    ],
)
def test_exact_only_refuses_a_loss_and_leaves_nothing_behind(
    name: str, to: str, why: str, tmp_path: Path
) -> None:
    made = write(name, tmp_path / "in")
    with pytest.raises((BadRequest, BadTensor), match=why) as caught:
        convert(str(made.path), to, tmp_path / "out", exact_only=True)
    assert "\n" not in str(caught.value)
    assert "--exact-only" in str(caught.value)
    assert left_in(tmp_path) == ["in"]


def test_a_nan_scale_stops_the_conversion_and_names_it(tmp_path: Path) -> None:
    made = write("awq-gemm", tmp_path / "in")
    name = "model.layers.1.self_attn.k_proj"
    edit_tensors(made.folder, lambda t: t[f"{name}.scales"].__setitem__((2, 7), float("nan")))
    with pytest.raises(BadTensor, match=rf"{name}: scale \[7, 2\] is nan"):
        convert(str(made.path), "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 linears, 16 times the codes of the largest."""
    return many_layers(tmp_path_factory.mktemp("large") / "in", 4)


@pytest.mark.parametrize("to", ["compressed-tensors", "awq", "gptq_v2"])
def test_memory_holds_a_few_linears_and_not_the_model(to: str, large: Path, tmp_path: Path) -> None:
    convert(str(many_layers(tmp_path / "small", 1)), to, tmp_path / "warm")
    with added_memory() as memory:
        done = convert(str(large), to, tmp_path / "out")
    assert (done.exact, done.lossy) == (28, 0)
    print(f"{to}: added {(memory.peak - memory.start) / 1e6:.1f} MB")
    assert memory.peak - memory.start < 8 * CODES  # four linears in 16 bits


def test_sabotage_holding_every_linear_is_seen_by_that_measure(large: Path) -> None:
    low = open_low_bit(large)
    with added_memory() as memory:
        held = [low.read_qweight(module) for module in low.parts]
    assert len(held) == 28
    assert memory.peak - memory.start > 12 * CODES


def test_sharded_sources_are_read_from_every_shard(source: Written, tmp_path: Path) -> None:
    assert len(list(source.folder.glob("*.safetensors"))) == 3
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", exact_only=True)
    check_told(done, source.weights)
    assert tensors_of(done.folder)["model.norm.weight"].dtype == torch.float16
