"""The pipe of benchmarks/peer_process.py to a worker, with a worker of three lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import peer_process
from peer_process import PeerFailed, PeerProcess, absent, peer_python

WORKER = f"""
import sys
sys.path.insert(0, {str(peer_process.WORKERS)!r})
from loop import answer
def double(number):
    print("a library that prints")
    return {{"is": 2 * number}}
def fail():
    raise ValueError("two\\nlines")
answer({{"double": double, "fail": fail, "time": lambda calls: {{"seconds": 6.0, "calls": 3}},
        "end": lambda: sys.exit(3)}})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A running worker."""
    (tmp_path / "small.py").write_text(WORKER)
    monkeypatch.setattr(peer_process, "WORKERS", tmp_path)
    with PeerProcess(sys.executable, "small.py") as running:
        yield running


def test_an_answer_comes_back_whatever_else_the_worker_prints(worker: PeerProcess) -> None:
    assert worker.ask(do="double", number=21) == {"is": 42}
    assert worker.ask(do="double", number=4) == {"is": 8}


def test_a_worker_that_raises_is_told_in_one_line_and_goes_on(worker: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match=r"small\.py: ValueError: two lines"):
        worker.ask(do="fail")
    with pytest.raises(PeerFailed, match="KeyError: 'unknown'"):
        worker.ask(do="unknown")
    assert worker.ask(do="double", number=1) == {"is": 2}


def test_a_sample_is_seconds_over_the_calls_that_the_worker_did(worker: PeerProcess) -> None:
    assert worker.sampler(0.01, do="time")() == 2.0


def test_a_worker_that_ends_is_said_with_its_code(worker: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match="ended with 3"):
        worker.ask(do="end")
    with pytest.raises(PeerFailed, match="ended with 3"):
        worker.ask(do="double", number=1)


def test_a_peer_without_an_environment_is_none_and_named_in_one_line(tmp_path: Path) -> None:
    assert peer_python("ort", tmp_path) is None
    assert "\n" not in absent("ort", "ONNX Runtime")
    assert ".venv-ort" in absent("ort", "ONNX Runtime")
    python = tmp_path / ".venv-ort" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert peer_python("ort", tmp_path) == python
