"""Head counts of a hostile config.json ask nothing of a split instead of dividing by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny_checkpoint import edit_json
from tiny_formats import write
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("value", [0, -2, "four", None])
def test_head_counts_that_are_none_are_not_asked(value: Any, tmp_path: Path) -> None:
    written = write("ct-packed", tmp_path / "low")
    edit_json(written.folder / "config.json", num_key_value_heads=value, model_type="other")
    found = examine(written.path, tp=(2,))
    assert not [split for split in found.splits if "key/value heads" in split.problem]
