"""What every test shares: stores of its own, tiny checkpoints, the command line in this process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def own_stores(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches and records of this test alone; the user's own are never touched."""
    root = tmp_path_factory.mktemp("stores")
    if "MPLCONFIGDIR" not in os.environ:  # matplotlib's list of fonts takes seconds to make anew
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        monkeypatch.setenv("MPLCONFIGDIR", os.path.join(cache, "matplotlib"))
    monkeypatch.setenv("WEIGHTPATH_CACHE", str(root / "cache"))
    monkeypatch.setenv("WEIGHTPATH_RECORDS", str(root / "records"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "xdg-cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(root / "xdg-data"))
    monkeypatch.delenv("WEIGHTPATH_DEVICE", raising=False)
    return root


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of models and texts beside the repository, where there is one."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside the repository: its models and texts are not shipped")
    return SHARED


@pytest.fixture(scope="session")
def pycode(shared: Path) -> Path:
    """A real 42 M parameter decoder with its own head."""
    folder = shared / "models" / "pycode-42m"
    if not folder.is_dir():
        pytest.skip("no ../shared/models/pycode-42m: this model is not shipped")
    return folder


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's folder: the user's, where it is whole, else fetched for this session."""
    from weightpath.checkpoints import demo
    from weightpath.errors import BadRequest

    own = Path.home() / ".cache" / "weightpath" / demo.FOLDER
    if demo.is_whole(own):
        return own
    try:
        return demo.fetch_demo(tmp_path_factory.mktemp("demo"))
    except BadRequest as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama with a head of its own. Read-only: tests that edit it make their own."""
    from tiny_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama-untied")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama whose head is its embedding. Read-only."""
    from tiny_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama-tied", tied=True)


@pytest.fixture(scope="session")
def tiny_low_bit(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with w4g64 linears and an int8 head. Read-only."""
    import weightpath

    folder = tmp_path_factory.mktemp("tiny") / "w4g64"
    weightpath.quantize(tiny_llama, folder, scheme="w4g64")
    return folder


@pytest.fixture
def one_thread():
    """Tiny products gain nothing from threads, and wait long for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def weightpath_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """run(*arguments, stdin="") calls the command line in this process."""
    from weightpath.cli.app import main

    def run(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["weightpath", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        seen = capsys.readouterr()
        code = stopped.value.code
        return Ran(code if isinstance(code, int) else 0 if code is None else 1, seen.out, seen.err)

    return run
