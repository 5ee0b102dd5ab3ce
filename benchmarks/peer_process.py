"""A peer that is measured beside this package: a worker in an environment of its own.

The worker (a script of benchmarks/peer_workers/, run by the environment's python) reads one JSON object a
line and answers one a line: what was asked, or {"error": sentence}. It times itself and answers
seconds, so that the pipe costs nothing; while it runs this process waits, and the other way round,
so that the two take turns on the same cores.

Environments are made by tests/interop/install_peer.py and lie in FOLDER/.venv-NAME.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import REPOSITORY

WORKERS = Path(__file__).resolve().parent / "peer_workers"


class PeerFailed(Exception):
    """A worker refused what it was asked, or ended; the message is its own."""


def peer_python(name: str, under: Path = REPOSITORY) -> Path | None:
    """The python of a peer's environment, or None where it was not made."""
    python = under.resolve() / f".venv-{name}" / "bin" / "python"
    return python if python.is_file() else None


def absent(name: str, product: str) -> str:
    """The line that a table says instead of the peer's rows."""
    return (
        f"{product}: left out, no .venv-{name} here; `python tests/interop/install_peer.py {name}` "
        "makes it"
    )


class PeerProcess:
    """One running worker. Use it in a `with` block; leaving it ends the process."""

    def __init__(self, python: Path | str, script: str, environment: dict[str, str] | None = None):
        self.script = script
        self.process = subprocess.Popen(
            [str(python), str(WORKERS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, and what it was asked is lost
            self.process.stdin.close()  # the worker ends where its input does
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer; PeerFailed with the worker's sentence, or how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.script} ended with {self.process.wait()}; see its stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.script}: {answer['error']}")
        return answer

    def sampler(self, minimum_seconds: float, **request: Any) -> Callable[[], float]:
        """Seconds a call, for `sample_in_turns`; sized by a first call, as `timing.sampler` is.

        The worker answers {"seconds", "calls"} to {**request, "calls"}, and may do more calls than
        it was asked for.
        """

        def run(calls: int) -> float:
            answer = self.ask(**request, calls=calls)
            return answer["seconds"] / answer["calls"]

        run(1)
        calls = max(1, round(minimum_seconds / max(run(1), 1e-9)))
        return lambda: run(calls)
