"""Make the environment of a peer (vLLM for CPUs) in a folder of its own, or reuse it.

    python install_peer.py FOLDER [--requirements FILE]

Two installs: torch with what it needs, held to the versions of FILE; then every line of FILE with
no dependencies. The second keeps out torchvision and the GPU packages that the peer names and does
not need here. A stamp of FILE, this script and the python version is written last; a folder
whose stamp matches is left as it is, any other is made anew.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

STAMP = "peer-stamp"
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
CHECK = f"""
import importlib.util, torch, vllm
from vllm import LLM
found = [name for name in {UNWANTED!r} if importlib.util.find_spec(name)]
assert not found, f"in the environment, and must not be: {{found}}"
print("vllm", vllm.__version__, "torch", torch.__version__)
"""


def stamp(requirements: Path) -> str:
    """What an environment is made from, as one hash."""
    parts = (requirements.read_bytes(), Path(__file__).read_bytes(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pinned(requirements: Path, package: str) -> str:
    """The line of the requirements that pins `package`."""
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if line.partition("==")[0] == package:
            return line
    raise SystemExit(f"{requirements}: no line pins {package}; add one such as {package}==X.Y.Z")


def install(folder: Path, requirements: Path) -> None:
    """Make the environment anew; every step that fails ends the run with its own message."""
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "--constraint", str(requirements), pinned(requirements, "torch")],
        [*pip, "--no-deps", "--only-binary", ":all:", "--requirement", str(requirements)],
        [str(python), "-c", CHECK],
    )
    for step in steps:
        ran = subprocess.run(step, check=False)
        if ran.returncode:
            raise SystemExit(f"peer environment {folder}: failed with {ran.returncode}: {step[:6]}")


def main() -> None:
    """Reuse or make the environment, and say which, with its time and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--requirements", type=Path, default=Path(__file__).with_name("vllm-requirements.txt")
    )
    options = parser.parse_args()
    folder, wanted = options.folder.resolve(), stamp(options.requirements)
    mark = folder / STAMP
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        print(f"peer environment {folder}: reused")
        return
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise SystemExit(f"{folder} is no virtual environment; name another folder")
    started = time.monotonic()
    install(folder, options.requirements)
    mark.write_text(wanted, encoding="utf-8")
    size = sum(
        os.lstat(os.path.join(where, name)).st_size
        for where, _, names in os.walk(folder)
        for name in names
    )
    print(
        f"peer environment {folder}: made in {time.monotonic() - started:.0f} s, {size / 1e9:.1f} GB"
    )


if __name__ == "__main__":
    main()
