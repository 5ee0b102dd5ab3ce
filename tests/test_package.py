"""The package itself: importing it loads nothing heavy, and its functions stay functions."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import weightpath
from weightpath.version import __version__

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "gguf", "safetensors", "huggingface_hub")


def loaded_after(statement: str, names: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after a statement."""
    script = f"{statement}\nimport sys; print(*[n for n in {names!r} if n in sys.modules])"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    return ran.stdout.split()


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    assert loaded_after("import weightpath") == []


def test_the_check_would_see_a_heavy_import() -> None:
    assert "torch" in loaded_after("import weightpath.scheme, weightpath.qweight")


def test_probing_loads_neither_torch_nor_transformers() -> None:
    assert loaded_after("import weightpath; weightpath.probe('/')", ("torch", "transformers")) == []


def test_help_and_probe_of_the_command_load_neither_torch_nor_transformers() -> None:
    for arguments in (["--help"], ["--version"], ["probe"], ["quantize", "--help"]):
        statement = (
            f"import sys, io, contextlib; sys.argv = ['weightpath', *{arguments!r}]\n"
            "from weightpath.cli.app import main\n"
            "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()"
        )
        assert loaded_after(statement, ("torch", "transformers")) == [], arguments


def test_importing_reads_no_weightpath_variable_and_opens_no_device() -> None:
    script = (
        "import os\n"
        "class Watch(dict):\n"
        "    def _see(self, key):\n"
        "        assert not str(key).startswith('WEIGHTPATH'), key\n"
        "    def get(self, key, default=None):\n"
        "        self._see(key); return dict.get(self, key, default)\n"
        "    def __getitem__(self, key):\n"
        "        self._see(key); return dict.__getitem__(self, key)\n"
        "    def __contains__(self, key):\n"
        "        self._see(key); return dict.__contains__(self, key)\n"
        "os.environ = Watch(os.environ)\n"
        "import weightpath, weightpath.device.probe, weightpath.paths.select, weightpath.jobs.build\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_functions_stay_functions_after_every_room_is_imported() -> None:
    """A room and a function share the name `quantize`; importing the room must not replace it."""
    for module in pkgutil.walk_packages(weightpath.__path__, "weightpath."):
        importlib.import_module(module.name)
    for name in weightpath.__all__:
        assert inspect.isfunction(getattr(weightpath, name)), name
    assert inspect.ismodule(importlib.import_module("weightpath.quantize"))


def test_quantize_is_the_function_even_where_the_room_is_imported_first() -> None:
    script = (
        "import weightpath.quantize.int8, weightpath, inspect\n"
        "from weightpath import quantize\n"
        "from weightpath.quantize.rtn import quantize_rtn\n"
        "assert inspect.isfunction(weightpath.quantize) and quantize is weightpath.quantize"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_version_is_the_installed_one() -> None:
    assert __version__ == version("weightpath")


def test_every_public_function_says_what_it_is() -> None:
    for name in weightpath.__all__:
        assert len(inspect.getdoc(getattr(weightpath, name)) or "") > 40, name


def test_quantize_and_load_take_text_and_paths(tiny_llama: Path, tmp_path: Path) -> None:
    weightpath.quantize(str(tiny_llama), str(tmp_path / "a"), scheme="int8")
    weightpath.quantize(tiny_llama, tmp_path / "b", scheme="int8")
    assert weightpath.load(str(tmp_path / "a")).config == weightpath.load(tmp_path / "a").config
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()
