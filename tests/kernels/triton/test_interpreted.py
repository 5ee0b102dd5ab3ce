"""The kernels' plain branch, run by Triton's interpreter on the CPU.

Triton decides when it is imported whether to interpret, so each file runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["interpreted_int4", "interpreted_int8", "interpreted_awq"])
def test_the_interpreted_kernels_are_right(name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it has no build for this system")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, str(HERE / f"{name}.py")],
        capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
