"""Where the peer's environment is, and the table that is shown after the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The agreement table, whether or not tests failed."""
    rows = terminalreporter.config.stash[TABLE]
    if rows:
        terminalreporter.section("agreement with other readers of the same files")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines to be shown at the end."""
    return request.config.stash[TABLE]


@pytest.fixture(scope="session")
def peer_python() -> Path:
    """The python of the peer's environment: the folder that WEIGHTPATH_INTEROP_VENV names.

    Named but not there is a failure; not named and not there, the tests are skipped.
    """
    named = os.environ.get("WEIGHTPATH_INTEROP_VENV")
    folder = Path(named) if named else ROOT / ".venv-vllm"
    python = (folder if folder.is_absolute() else ROOT / folder) / "bin" / "python"
    if not python.is_file():
        message = f"no peer environment at {folder}: run make interop, which makes it"
        if named:
            pytest.fail(message)
        pytest.skip(message)
    return python
