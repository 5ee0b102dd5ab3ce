"""serve: what it says where it cannot start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_the_mend_is_one_line(
    weightpath_cli: Callable[..., Any], tiny_low_bit: Path, monkeypatch: pytest.MonkeyPatch,
    missing: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, missing, None)
    ran = weightpath_cli("serve", tiny_low_bit)
    assert ran.code == 2
    assert ran.err == f"weightpath: serve needs {missing}: pip install 'weightpath[serve]'\n"
