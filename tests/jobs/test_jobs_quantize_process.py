"""`weightpath quantize` as a process: killed, interrupted, measured."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tiny_checkpoint import build_tokenizer, folder_bytes
from weightpath.device.memory import PeakMemory
from weightpath.engine import skeleton

pytestmark = pytest.mark.slow
WEIGHTPATH = [sys.executable, "-c", "from weightpath.cli.app import main; main()"]
SHARED_BYTES = 400_000_000
"""Anonymous memory allowed beside the three largest tensors (issue 2)."""


def random_model(folder: Path, layers: int, hidden: int, intermediate: int, vocabulary: int) -> int:
    """A bf16 Llama of random weights with a tied head; returns its bytes."""
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, vocab_size=vocabulary,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    model = skeleton.build(config.to_dict(), torch.bfloat16)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    noise = noise.to(torch.bfloat16)
    tensors = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        count = parameter.numel()
        copies = noise.roll(place * 7919).repeat(-(-count // noise.numel()))
        tensors[name] = copies[:count].view(parameter.shape).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 30 M parameters, so that a run lasts a while."""
    folder = tmp_path_factory.mktemp("source") / "random-30m"
    assert random_model(folder, 10, 512, 1408, 2048) > 56_000_000
    return folder


def command(source: Path, target: Path, *options: str) -> list[str]:
    return [*WEIGHTPATH, "quantize", str(source), "-o", str(target), *options]


def wait_for_lines(process: subprocess.Popen[str], journal: Path, lines: int) -> None:
    """Until the journal has that many lines. The process must still be at work then."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    assert process.poll() is None, "the run was over before it could be stopped"


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(arguments: list[str]) -> str:
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_run_killed_twice_ends_with_the_bytes_of_an_undisturbed_one(
    source: Path, tmp_path: Path
) -> None:
    options = ("--scheme", "w4g64")
    target, whole = tmp_path / "killed" / "out", tmp_path / "whole" / "out"
    journal = target.with_name("out.partial") / "journal.jsonl"
    for lines in (5, 40):
        process = start(command(source, target, *options))
        wait_for_lines(process, journal, lines)
        process.kill()
        process.wait()
        assert process.returncode == -signal.SIGKILL
        assert not target.exists()
    told = finished(command(source, target, *options))
    assert "finished by an earlier run and kept" in told
    finished(command(source, whole, *options))
    assert folder_bytes(target) == folder_bytes(whole)
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_half_a_line_in_the_journal_and_spoilt_bytes_are_made_again(
    source: Path, tmp_path: Path
) -> None:
    """What a kill, or a disk, can leave behind: a cut line, and bytes that no longer add up."""
    options = ("--scheme", "int8")
    target, whole = tmp_path / "killed" / "out", tmp_path / "whole" / "out"
    partial = target.with_name("out.partial")
    process = start(command(source, target, *options))
    wait_for_lines(process, partial / "journal.jsonl", 12)
    process.kill()
    process.wait()
    with (partial / "journal.jsonl").open("a") as journal:
        journal.write('{"unit": "model.layers.9.mlp')
    with (partial / "model.safetensors").open("r+b") as weights:
        weights.seek(3_000_000)
        weights.write(bytes(64))
    finished(command(source, target, *options))
    finished(command(source, whole, *options))
    assert folder_bytes(target) == folder_bytes(whole)


def test_ctrl_c_ends_with_130_and_the_next_run_goes_on(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    arguments = command(source, target, "--scheme", "w4g64-asym", "--no-search")
    process = start(arguments)
    wait_for_lines(process, tmp_path / "out.partial" / "journal.jsonl", 10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-2000:]
    assert "Traceback" not in err + out
    assert not target.exists()
    assert "finished by an earlier run and kept" in finished(arguments)


def loaded_interpreter() -> int:
    """RssAnon of a process that has torch and transformers loaded and does nothing."""
    script = (
        "import torch, transformers; from transformers import LlamaForCausalLM, AutoTokenizer;"
        "from weightpath.device.memory import rss_anon; print(rss_anon())"
    )
    return int(subprocess.check_output([sys.executable, "-c", script], text=True))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model far larger than the bound, so that holding it would be seen; and the bound."""
    folder = tmp_path_factory.mktemp("source") / "random-350m"
    size = random_model(folder, layers=20, hidden=1024, intermediate=4096, vocabulary=16384)
    largest = [16384 * 1024 * 2, 1024 * 4096 * 2, 1024 * 4096 * 2]
    bound = sum(largest) + SHARED_BYTES
    assert size > 1.5 * bound
    return folder, bound


@pytest.mark.parametrize(
    "options", [("--scheme", "int8"), ("--scheme", "w4g64", "--no-search")], ids=" ".join
)
def test_anonymous_memory_stays_under_three_tensors_and_400_mb(
    large: tuple[Path, int], tmp_path: Path, options: tuple[str, ...]
) -> None:
    source, bound = large
    base = loaded_interpreter()
    process = start(command(source, tmp_path / "out", *options))
    with PeakMemory(interval=0.005, pid=process.pid) as memory:
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert memory.samples > 100
    added = memory.peak - base
    print(f"base {base / 1e6:.0f} MB, added {added / 1e6:.0f} MB of {bound / 1e6:.0f}")
    assert added < bound


def test_the_search_needs_no_more_memory_than_a_few_blocks(source: Path, tmp_path: Path) -> None:
    """The search works on blocks of rows: on a model of 30 M weights it adds less than the model
    in fp32 and its codes would (4 + 1 bytes a weight)."""
    base = loaded_interpreter()
    process = start(command(source, tmp_path / "out", "--scheme", "w4g64"))
    with PeakMemory(interval=0.005, pid=process.pid) as memory:
        _, err = process.communicate()
    assert process.returncode == 0, err
    added = memory.peak - base
    print(f"base {base / 1e6:.0f} MB, added {added / 1e6:.0f} MB")
    assert added < 150_000_000
