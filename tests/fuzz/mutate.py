"""Damage to the files of a checkpoint, seeded: what a broken download or a hostile author may do.

    mutate(files, random.Random("0/gptq-v1/17")) -> (damaged files, what was done in words)

files maps names to bytes; nothing touches the disk here. A third of the damage is to raw bytes (cut
short, bits flipped, runs overwritten), the rest is made by those who know the format: JSON of configs
and the index (mutate_json), safetensors headers and tensors (mutate_safetensors), and the numbers
in a GGUF header (mutate_gguf).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from mutate_gguf import gguf_marks, mutate_gguf
from mutate_json import mutate_json, wants_settings
from mutate_safetensors import mutate_safetensors, safetensors_marks

Files = dict[str, bytes]
WEIGHTS = (".safetensors", ".gguf", ".index.json")


def mutate(files: Files, draw: random.Random) -> tuple[Files, str]:
    """One damage, or up to three on top of each other."""
    damaged, done = dict(files), []
    for _ in range(draw.choice([1, 1, 1, 1, 2, 3])):
        name = _chosen(damaged, draw)
        if name is None:
            break
        by_format = 0.85 if name.endswith(".json") else 0.65  # flipped JSON is mostly no JSON
        step = _by_format if draw.random() < by_format else _by_bytes
        what = step(damaged, name, draw)
        done.append(f"{name}: {what}")
    return damaged, "; ".join(done) or "nothing"


def _chosen(files: Files, draw: random.Random) -> str | None:
    """A file, those that say what the weights are more often than a tokenizer."""
    names = sorted(files)
    if not names:
        return None
    weights = [
        10 if wants_settings(name) else 16 if name.endswith(WEIGHTS) else 1 for name in names
    ]
    return draw.choices(names, weights)[0]


def _by_format(files: Files, name: str, draw: random.Random) -> str:
    if name.endswith(".json"):
        files[name], what = mutate_json(name, files[name], draw)
    elif name.endswith(".safetensors"):
        files[name], what = mutate_safetensors(files[name], draw)
    elif name.endswith(".gguf"):
        files[name], what = mutate_gguf(files[name], draw)
    else:
        return _by_bytes(files, name, draw)
    return what


def _by_bytes(files: Files, name: str, draw: random.Random) -> str:
    actions = (_cut, _cut, _flip, _flip, _flip, _overwrite, _overwrite, _insert, _remove, _file)
    action: Callable[[Files, str, random.Random], str] = draw.choice(actions)
    return action(files, name, draw)


def _marks(name: str, data: bytes) -> list[int]:
    """Offsets where something ends or begins, each with its neighbours."""
    marks = [0, 4, 8, 16, 24, len(data)]
    if name.endswith(".safetensors"):
        marks += safetensors_marks(data)
    elif name.endswith(".gguf"):
        marks += gguf_marks(data)
    near = {mark + step for mark in marks for step in (-1, 0, 1)}
    return sorted(mark for mark in near if 0 <= mark <= len(data))


def _place(name: str, data: bytes, draw: random.Random) -> int:
    """An offset: anywhere, in the first 4 KiB (headers), or at a mark."""
    if not data:
        return 0
    kind = draw.random()
    if kind < 0.4:
        return draw.randrange(min(len(data), 4096))
    if kind < 0.7:
        return min(draw.choice(_marks(name, data)), len(data) - 1)
    return draw.randrange(len(data))


def _cut(files: Files, name: str, draw: random.Random) -> str:
    data = files[name]
    end = draw.choice(_marks(name, data)) if draw.random() < 0.5 else _place(name, data, draw)
    files[name] = data[:end]
    return f"cut to {end} of {len(data)} bytes"


def _flip(files: Files, name: str, draw: random.Random) -> str:
    data = bytearray(files[name])
    places = []
    for _ in range(draw.choice([1, 1, 2, 8]) if data else 0):
        place, bit = _place(name, bytes(data), draw), draw.randrange(8)
        data[place] ^= 1 << bit
        places.append(f"{place}.{bit}")
    files[name] = bytes(data)
    return f"bits flipped at {', '.join(places)}"


def _overwrite(files: Files, name: str, draw: random.Random) -> str:
    data = bytearray(files[name])
    start, length = _place(name, bytes(data), draw), draw.choice([1, 2, 4, 8, 64, 1024])
    length = min(length, len(data) - start)
    fills = (b"\0" * length, b"\xff" * length, b"\x7f" * length, draw.randbytes(length))
    data[start : start + length] = draw.choice(fills)
    files[name] = bytes(data)
    return f"{length} bytes overwritten at {start}"


def _insert(files: Files, name: str, draw: random.Random) -> str:
    data, start = files[name], _place(name, files[name], draw)
    extra = draw.choice((b"\0", b"\n", b"{", draw.randbytes(7), data[start : start + 32]))
    files[name] = data[:start] + extra + data[start:]
    return f"{len(extra)} bytes inserted at {start}"


def _remove(files: Files, name: str, draw: random.Random) -> str:
    data, start = files[name], _place(name, files[name], draw)
    length = draw.choice([1, 2, 8, 32, 4096])
    files[name] = data[:start] + data[start + length :]
    return f"{length} bytes removed at {start}"


def _file(files: Files, name: str, draw: random.Random) -> str:
    """The file as a whole: gone, empty, junk, doubled, or in another's place."""
    action = draw.choice(("deleted", "emptied", "junk", "doubled", "swapped"))
    if action == "deleted":
        del files[name]
    elif action == "swapped":
        other = draw.choice(sorted(files))
        files[name], files[other] = files[other], files[name]
        action = f"swapped with {other}"
    else:
        data = files[name]
        files[name] = {"emptied": b"", "junk": draw.randbytes(100), "doubled": data + data}[action]
    return action
