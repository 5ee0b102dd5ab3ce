"""The command as a process of its own: nothing but its own lines, from any folder, into any pipe."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WEIGHTPATH = f"{shlex.quote(sys.executable)} -c 'from weightpath.cli.app import main; main()'"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in a folder; `weightpath` in it is this package's command."""
    line = f'weightpath() {{ {WEIGHTPATH} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "line",
    [
        "abacus",
        "plan none",
        "quantize FLOAT -o new --scheme w9",
        "run FLOAT --prompt x",
        "verify LOW --reference LOW",
        "quantize FLOAT -o . --scheme int8 --overwrite",
    ],
)
def test_a_bad_line_prints_one_line_and_no_library_adds_to_it(
    tiny_llama: Path, tiny_low_bit: Path, tmp_path: Path, line: str
) -> None:
    ran = shell(
        "weightpath " + line.replace("FLOAT", str(tiny_llama)).replace("LOW", str(tiny_low_bit)),
        tmp_path,
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    lines = [text for text in ran.stderr.splitlines() if text.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("weightpath: ")
    assert list(tmp_path.iterdir()) == []


def test_relative_folders_and_standard_input_work(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tiny_llama)
    ran = shell("weightpath quantize here -o out --scheme w4g64 --json", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(os.listdir(tmp_path)) == ["here", "out"]
    ran = shell("echo Hello | weightpath run out --prompt - --max-tokens 4", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert " a second, prompt included" in ran.stderr.splitlines()[-1]


def test_a_reader_that_leaves_early_sees_no_traceback(tiny_llama: Path, tmp_path: Path) -> None:
    for reader in ("head -n 1", "true"):
        for verb in (f"plan {tiny_llama} --why", f"plan {tiny_llama} --json", "probe"):
            ran = shell(f"weightpath {verb} | {reader}", tmp_path)
            assert "Traceback" not in ran.stderr
            assert "BrokenPipe" not in ran.stderr
