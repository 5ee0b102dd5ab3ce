"""Where the peers' environments are, the demo model's low-bit checkpoints, and the table of results
that is shown after the tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from agreement import Checkpoint, greedy
from install_peer import environment
from peers import read_by_transformers
from safetensors.torch import load_file, save_file

from weightpath import load
from weightpath.engine.load import load_tokenizer
from weightpath.jobs.make import make

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "WEIGHTPATH_INTEROP_VENVS"
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
def peer_python() -> Callable[[str], Path]:
    """peer_python(name): the python of a peer's environment, in the folder that
    WEIGHTPATH_INTEROP_VENVS names.

    Named but not there is a failure; not named and not there, the tests are skipped.
    """
    named = os.environ.get(VARIABLE)

    def find(name: str) -> Path:
        folder = environment(ROOT / (named or ""), name)
        python = folder / "bin" / "python"
        if not python.is_file():
            message = f"no peer environment at {folder}: run make interop, which makes it"
            if named:
                pytest.fail(message)
            pytest.skip(message)
        return python

    return find


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """checkpoint(scheme): the demo model with a 16-bit head, built and answered once a session.

    exact and rounded are transformers' logits, from the decompressed weights in fp32 and in bf16.
    """

    @cache
    def made(scheme: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp("interop") / scheme
        make("demo", folder, scheme, head_bits=16)
        prompts, answers, logits = greedy(load(folder), load_tokenizer(folder))
        ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        exact, rounded, facts = read_by_transformers(folder, ids)
        return Checkpoint(
            scheme, folder, prompts, answers, logits, exact, rounded, "bf16 rounding", facts
        )

    return made


@pytest.fixture(scope="session")
def damaged(checkpoint: Callable[[str], Checkpoint]) -> Path:
    """A copy of the symmetric checkpoint whose packed words have their nibbles in reverse order."""
    good = checkpoint("w4g64").folder
    folder = good.with_name("damaged")
    shutil.copytree(good, folder)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, words in tensors.items():
            if name.endswith("weight_packed"):
                nibbles = [(words >> (4 * place)) & 15 for place in range(8)]
                mixed = torch.zeros_like(words)
                for place, nibble in enumerate(nibbles):
                    mixed |= nibble << (4 * (7 - place))
                tensors[name] = mixed
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder
