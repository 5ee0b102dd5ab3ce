"""Make the environments of peers in folders of their own, or reuse them.

    python install_peer.py [--under FOLDER] vllm llama writers ort openvino

Each goes into FOLDER/.venv-NAME, from NAME-requirements.txt beside this file. Two installs: torch
with what it needs, held to the versions of that file, where it names torch; then every line of it
with no dependencies. The second keeps out torchvision and the GPU packages that peers name and do
not need here. A stamp of the file, this script and the python version is written last; a folder
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

HERE = Path(__file__).resolve().parent
STAMP = "peer-stamp"
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
PEERS = {
    "vllm": "from vllm import LLM",
    "llama": "from xllamacpp import Server",
    "writers": "import gptqmodel, auto_round",
    "ort": "import onnxruntime, onnx.helper",
    "openvino": "import openvino_genai, openvino_tokenizers",
}
"""Environments, and what each is for: what must be importable in it."""
CHECK = f"""
import importlib.util
found = [name for name in {UNWANTED!r} if importlib.util.find_spec(name)]
assert not found, f"in the environment, and must not be: {{found}}"
"""


def requirements(name: str) -> Path:
    """The file of exact versions that an environment is made from."""
    return HERE / f"{name}-requirements.txt"


def environment(under: Path, name: str) -> Path:
    """The folder of an environment."""
    return under / f".venv-{name}"


def stamp(name: str) -> str:
    """What an environment is made from, as one hash."""
    parts = (requirements(name).read_bytes(), Path(__file__).read_bytes(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pinned(name: str, package: str) -> list[str]:
    """The line of the requirements that pins `package`, if there is one."""
    lines = requirements(name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] == package]


def install(folder: Path, name: str) -> None:
    """Make the environment anew; every step that fails ends the run with its own message."""
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    versions, torch = str(requirements(name)), pinned(name, "torch")
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "--constraint", versions, *torch] if torch else [],
        [*pip, "--no-deps", "--only-binary", ":all:", "--requirement", versions],
    )
    for step in filter(None, steps):
        ran = subprocess.run(step, check=False)
        if ran.returncode:
            raise SystemExit(f"peer environment {folder}: failed with {ran.returncode}: {step[:6]}")
    check = [str(python), "-c", CHECK + PEERS[name]]
    ran = subprocess.run(check, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"peer environment {folder}: {PEERS[name]!r} fails\n{ran.stderr}")


def make(folder: Path, name: str) -> None:
    """Reuse or make one environment, and say which, with its time and size."""
    mark, wanted = folder / STAMP, stamp(name)
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        print(f"peer environment {folder}: reused")
        return
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise SystemExit(f"{folder} is no virtual environment; name another folder")
    started = time.monotonic()
    install(folder, name)
    mark.write_text(wanted, encoding="utf-8")
    size = sum(
        os.lstat(os.path.join(where, file)).st_size
        for where, _, files in os.walk(folder)
        for file in files
    )
    print(
        f"peer environment {folder}: made in {time.monotonic() - started:.0f} s, {size / 1e9:.1f} GB"
    )


def main() -> None:
    """Every environment that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=PEERS)
    parser.add_argument("--under", type=Path, default=HERE.parents[1])
    options = parser.parse_args()
    for name in options.names:
        make(environment(options.under.resolve(), name), name)


if __name__ == "__main__":
    main()
