"""One thread for every test here."""

import pytest


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """Tiny tensors: threads only cost."""
