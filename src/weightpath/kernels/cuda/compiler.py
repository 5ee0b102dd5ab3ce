"""Run-time compilation of this folder's CUDA C++ by NVRTC, which torch's CUDA builds bring along.

    cubin = compile_cubin("tiles_mma.cu", {"BITS": 4, ...}, "sm_90a")

A compiled file is kept in the user's cache folder under a hash of the text, the options and the
compiler's version; a damaged or missing one is compiled again (0.3 to 2 s).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

from weightpath.errors import CannotRun

HERE = Path(__file__).parent
VERSIONS = (13, 12)
OPTIONS = ("--std=c++17", "-default-device", "-diag-suppress=177,550")


@cache
def library() -> ctypes.CDLL:
    """NVRTC. CannotRun where no library of it is found."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    for version in VERSIONS:
        name = f"libnvrtc.so.{version}"
        found = [name, *(str(path) for folder in folders for path in folder.glob(f"*/lib/{name}"))]
        for place in found:
            try:
                return ctypes.CDLL(place)
            except OSError:
                continue
    raise CannotRun(
        "NVRTC, CUDA's run-time compiler, is not found (libnvrtc.so.13 or .12); install a CUDA "
        "build of torch, which brings it, or use the triton or torch kernels"
    )


def refusal() -> str | None:
    """Why nothing can be compiled here, as a sentence, or None."""
    try:
        library()
    except CannotRun as missing:
        return str(missing)
    return None


def source(file: str) -> str:
    """The text of one file of this folder."""
    return (HERE / file).read_text(encoding="utf-8")


def compile_cubin(text: str, settings: dict[str, int], architecture: str) -> bytes:
    """Machine code for `architecture` ("sm_90a") of a CUDA C++ text, from the cache where it is."""
    options = [
        f"--gpu-architecture={architecture}",
        *OPTIONS,
        *(f"-D{name}={value}" for name, value in settings.items()),
    ]
    key = hashlib.sha256("\0".join((text, *options, _version())).encode()).hexdigest()
    kept = _folder() / f"{key[:40]}.cubin"
    try:
        held = kept.read_bytes()
        if held[-32:] == hashlib.sha256(held[:-32]).digest():
            return held[:-32]
    except OSError:
        pass
    cubin = _compiled(text, options)
    _keep(kept, cubin + hashlib.sha256(cubin).digest())
    return cubin


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightpath" / "cuda"


def _keep(place: Path, held: bytes) -> None:
    """Written beside and renamed; a folder that cannot be written only costs the next start."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(held)
        os.replace(file.name, place)
    except OSError:
        return


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compiled(text: str, options: list[str]) -> bytes:
    nvrtc, program = library(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _bytes(nvrtc, program, "ProgramLog").decode(errors="replace")
            wrong = [line for line in log.splitlines() if "error" in line] or log.splitlines()
            raise CannotRun(
                f"CUDA's run-time compiler {_version()} refused a kernel for {options[0]}: "
                f"{' '.join(wrong[:1])}; use the triton or torch kernels"
            )
        return _bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, held)
    return held.raw if what == "CUBIN" else held.value
