"""One server for the tests that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import Client, running

from tiny_checkpoint import build_model, build_tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> Any:
    return build_model()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def client(model: Any, tokenizer: Any) -> Iterator[Client]:
    with running(model, tokenizer) as made:
        yield made
