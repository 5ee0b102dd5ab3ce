"""Float checkpoints, read tensor by tensor from memory-mapped safetensors.

Nothing is read beyond headers (see shards.py) until `read` or `read_rows`, and those return views
of the mapped file, so a model larger than the memory can be walked. Tensors are listed in natural
order of their names (layer 2 before layer 10), which is the same however the model is sharded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from weightpath.checkpoints.shards import TensorInfo, open_map, read_json, read_shards
from weightpath.errors import BadCheckpoint, BadRequest

_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "*.jinja",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "*preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "LICENSE*",
    "NOTICE*",
    "*.py",
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_PACKED = (
    ("gptq or awq", (".qweight", ".qzeros")),
    ("compressed-tensors", (".weight_packed",)),
    ("bitsandbytes", (".weight.absmax", ".SCB")),
    ("hqq", (".W_q",)),
    ("torchao", ("._weight_qdata",)),
    ("fp8 or int8 with scales", (".weight_scale", ".weight_scale_inv")),
)
"""Tensor names that only a quantized checkpoint has, by who writes them."""


class Checkpoint(Protocol):
    """A read-only float model: HF config, HF tensor names, and the files that go with it."""

    @property
    def where(self) -> str:
        """The folder or file, for messages."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """config.json as a dict."""
        ...

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor, in natural order of its HF name."""
        ...

    @property
    def companions(self) -> tuple[Path, ...]:
        """Tokenizer, chat template, generation settings, licence; never weights or config.json."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 of config, names, shapes, dtypes, file sizes and times. No weight is read."""
        ...

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, mapped where the file allows. Treat it as read-only."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of the first dimension, mapped where the file allows."""
        ...


class SafetensorsCheckpoint:
    """A folder of safetensors. Holds one open map a shard; tensors are views of those maps.

    files: the shards.
    """

    def __init__(
        self, where: str, config: dict[str, Any], shards: dict[Path, dict[str, TensorInfo]]
    ) -> None:
        self.where = where
        self.config = config
        self._shard_of = {name: path for path, infos in shards.items() for name in infos}
        found = {name: info for infos in shards.values() for name, info in infos.items()}
        self.tensors = {name: found[name] for name in natural_order(found)}
        self.companions = companion_files(next(iter(shards)).parent)
        self.fingerprint = fingerprint_of(config, self.tensors.values(), list(shards))
        self.files = tuple(shards)
        self._maps = {path: open_map(path) for path in shards}

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of all files' headers, joined: lists in JSON, such as torchao's names
        of tensors, are put together; of other values the last file's stands."""
        joined: dict[str, str] = {}
        for handle in self._maps.values():
            for key, value in (handle.metadata() or {}).items():
                joined[key] = _joined(joined[key], value) if key in joined else value
        return joined

    def read(self, name: str) -> Tensor:
        return self._map_of(name).get_tensor(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        handle = self._map_of(name)
        check_rows(self.tensors[name], start, stop)
        return handle.get_slice(name)[start:stop]

    def _map_of(self, name: str) -> Any:
        return self._maps[self._shard_of[known(self, name)]]


def _joined(first: str, second: str) -> str:
    """Two JSON lists as one, each entry once; else the second value."""
    if first == second:
        return second
    try:
        lists = [json.loads(value) for value in (first, second)]
    except (ValueError, RecursionError):
        return second
    if not all(isinstance(found, list) for found in lists):
        return second
    entries = {json.dumps(entry): entry for found in lists for entry in found}
    return json.dumps(list(entries.values()))


def open_checkpoint(folder_or_file: Path, *, float_only: bool = True) -> SafetensorsCheckpoint:
    """Open a folder of safetensors, or one .safetensors file beside its config.json.

    float_only: refuse a checkpoint that is already quantized (the default, since every verb that
    makes low-bit weights starts from floats); False opens it as it is, for looking inside.
    Errors: BadCheckpoint, one line, for anything in the folder that does not add up.
    """
    path = Path(folder_or_file)
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise BadCheckpoint(str(path), "does not exist", "give a folder that holds config.json")
    if path.is_file() and path.suffix != ".safetensors":
        raise BadCheckpoint(
            str(path), "is not a .safetensors file", "give the checkpoint's folder, or a GGUF file"
        )
    config = read_json(folder / "config.json")
    method = quantization_method(config, ()) if float_only else None
    shards = {} if method else read_shards(path)
    if float_only and method is None:
        method = quantization_method(config, [name for infos in shards.values() for name in infos])
    if method is not None:
        raise BadCheckpoint(
            str(path),
            f"is already quantized ({method})",
            "give the float model it was made from, or convert it: weightpath convert",
        )
    return SafetensorsCheckpoint(str(path), config, shards)


def gguf_at(path: Path) -> Path | None:
    """The GGUF file that a path is, or the only one in a folder without safetensors; else None."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        return files[0] if len(files) == 1 and not any(path.glob("*.safetensors")) else None
    return path if path.suffix == ".gguf" and path.is_file() else None


def quantization_method(config: dict[str, Any], tensor_names: Iterable[str]) -> str | None:
    """Who quantized this checkpoint, or None for a float one.

    Looks for a quantization config at any depth of config.json (multimodal models nest it in
    text_config), then for tensor names that only packed weights have, since some files lost theirs.
    """
    for section in _sections(config):
        for key in ("quantization_config", "compression_config"):
            found = section.get(key)
            if isinstance(found, dict) and found:
                return str(found.get("quant_method") or found.get("format") or "method not named")
    names = list(tensor_names)
    for method, endings in _PACKED:
        if any(name.endswith(endings) for name in names):
            return f"{method}, by its tensor names"
    return None


def architecture(config: dict[str, Any]) -> str:
    """The model's class as config.json names it, else its model_type, else "unknown"."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return first if isinstance(first, str) else "unknown"


def companion_files(folder: Path) -> tuple[Path, ...]:
    """Files of a checkpoint's folder that belong in every checkpoint made from it, by name."""
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and any(fnmatch(path.name, pattern) for pattern in _COMPANIONS)
        and not any(fnmatch(path.name, pattern) for pattern in (*_WEIGHTS, "*.index.json"))
    )


def fingerprint_of(
    config: dict[str, Any], tensors: Iterable[TensorInfo], files: Sequence[Path]
) -> str:
    """sha256 over config, tensors as described, and each file's name, size and mtime in ns."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
    described = [(info.name, info.shape, str(info.dtype)) for info in tensors]
    text = json.dumps([config, described, stats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted with their numbers as numbers: layers.2 before layers.10."""

    def key(name: str) -> list[tuple[int, int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]

    return sorted(names, key=key)


def known(checkpoint: Checkpoint, name: str) -> str:
    """The name, if the checkpoint has that tensor; else BadCheckpoint."""
    if name not in checkpoint.tensors:
        raise BadCheckpoint(
            checkpoint.where, f"has no tensor {name}", "use a name from the checkpoint's list"
        )
    return name


def check_rows(info: TensorInfo, start: int, stop: int) -> None:
    """BadRequest unless 0 <= start <= stop <= rows of the first dimension."""
    rows = info.shape[0] if info.shape else 0
    if not 0 <= start <= stop <= rows:
        raise BadRequest(f"tensor {info.name}: rows {start}..{stop} asked of 0..{rows}")


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config and every dict nested in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _sections(value)
