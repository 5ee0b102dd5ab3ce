"""What MODEL can be: a folder, a GGUF file, `demo`, or a model hub's id `org/name`.

Tried in that order, so a local folder always wins over a hub id of the same spelling. A hub is
asked through huggingface_hub, which serves its cache where it cannot reach the hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightpath.checkpoints.demo import fetch_demo
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.shards import read_json
from weightpath.checkpoints.store import Checkpoint, gguf_at, open_checkpoint
from weightpath.errors import BadRequest

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
_UNWANTED = ("*/*", "consolidated*")


def locate(model: str | Path) -> Path:
    """The folder or .gguf file that MODEL means, fetched where it has to be.

    A folder that holds no safetensors but just one .gguf file stands for that file.
    Errors: BadRequest, one line that names what was tried.
    """
    name, path = str(model), Path(model).expanduser()
    if name and path.is_dir():
        return gguf_at(path) or path
    if path.is_file():
        if path.suffix in (".gguf", ".safetensors"):
            return path
        raise BadRequest(
            f"model {path}: is a {path.suffix or 'plain'} file; give a folder or a .gguf file"
        )
    if name == "demo":
        return fetch_demo()
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _from_hub(name)
    raise BadRequest(
        f"model '{name}': no such folder or file, and not a hub id (org/name); give a folder, a "
        ".gguf file, a hub id, or demo"
    )


def place_of(model: str | Path) -> Path:
    """MODEL as a path, fetched where it is not here and spelled like a hub id; else as it is."""
    path = Path(model).expanduser()
    return locate(model) if not path.exists() and _HUB_ID.fullmatch(str(model)) else path


def open_model(model: str | Path) -> Checkpoint:
    """Locate MODEL and open it as a float checkpoint: safetensors, or a GGUF file directly."""
    path = locate(model)
    return GGUFCheckpoint(path) if path.suffix == ".gguf" else open_checkpoint(path)


def config_of(model: str | Path) -> tuple[dict[str, Any], str]:
    """MODEL's config and the name it goes by in messages; no weights are opened or fetched.

    MODEL may also be a config.json itself. Errors: BadRequest, or BadCheckpoint for a damaged file.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_json(path), str(path)
    if not path.exists() and str(model) != "demo" and _HUB_ID.fullmatch(str(model)):
        return read_json(_asked_of_hub(str(model), _config_file)), f"{model} config.json"
    place = locate(model)
    if place.suffix == ".gguf":
        return GGUFCheckpoint(place).config, str(place)
    folder = place if place.is_dir() else place.parent
    return read_json(folder / "config.json"), str(folder / "config.json")


def _config_file(name: str) -> str:
    from huggingface_hub import snapshot_download

    return os.path.join(snapshot_download(name, allow_patterns=["config.json"]), "config.json")


def _snapshot(name: str) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=[*_WANTED], ignore_patterns=[*_UNWANTED])


def _from_hub(name: str) -> Path:
    """The hub's snapshot of a model, or the cached one where the hub cannot be reached."""
    return _asked_of_hub(name, _snapshot)


def _asked_of_hub(name: str, ask: Callable[[str], str]) -> Path:
    """What a hub answers, as a path. BadRequest with its reason where there is no answer."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(ask(name))
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and its cache has no such model"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "no message")
    raise BadRequest(
        f"model '{name}': no such folder, and not from the hub ({reason.strip()[:200]}); give a "
        "local folder or a .gguf file, or fetch it where there is a network"
    )
