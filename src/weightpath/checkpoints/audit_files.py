"""Audit of a folder's files: shards beside the model that no index names, and numbers left out.

    model-00003-of-00005.safetensors   the third of five, says its name

What read_shards refuses (a shard that is named but missing, an index and shards that disagree, a
damaged or short file, a tensor stored twice) is not repeated here. transformers and vLLM take the
files that the index names; without an index vLLM takes every .safetensors file of the folder, and
llama.cpp's converter always takes every model*.safetensors. Sources: transformers 5.24
(modeling_utils), vLLM (weight_utils, filter_duplicate_safetensors_files), llama.cpp
(convert_hf_to_gguf, get_model_part_names).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from weightpath.checkpoints.audit_finding import Finding, plural, shown
from weightpath.checkpoints.shards import INDEX, read_header, read_shards
from weightpath.checkpoints.store import SafetensorsCheckpoint
from weightpath.errors import BadCheckpoint

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")
_REMOVE = "remove the file, or fetch the folder again"


def audit_files(folder: Path, opened: SafetensorsCheckpoint | None = None) -> tuple[Finding, ...]:
    """Findings about the .safetensors files of a folder. Reads headers only; of the model's own
    files none where it is opened already.

    BadCheckpoint as read_shards raises it, where the model's own files do not add up.
    """
    if not folder.is_dir():
        return ()
    if opened is None:
        shards = read_shards(folder)
        used = {path.name for path in shards}
        held = {name for infos in shards.values() for name in infos}
    else:
        used, held = {path.name for path in opened.files}, set(opened.tensors)
    beside = [
        path
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in used and path.is_file()
    ]
    series = _series(used)
    found = [_beside(path, used, held, series, (folder / INDEX).exists()) for path in beside]
    return (*found, *_numbers(series, _series(path.name for path in beside)))


def _series(names: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """(stem, total as written) -> the numbers that there are, of files that number themselves."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in sorted(names):
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            series.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
    return series


def _beside(
    path: Path,
    used: Collection[str],
    held: Collection[str],
    series: Collection[tuple[str, str]],
    indexed: bool,
) -> Finding:
    """What a file that is no part of the model is."""
    try:
        infos = read_header(path)
    except BadCheckpoint as error:
        problem = f"is no part of the model, and cannot be read ({error.problem})"
        return Finding("warning", path.name, problem, _REMOVE, "stale shard", "file")
    own = [name for name in infos if name not in held]
    same = any(key in series for key in _series([path.name]))
    where = f"the index does not name it: {INDEX}" if indexed else f"only {min(used)} is read"
    has = f"holds {plural(len(infos), 'tensor')}, {len(own)} of them in no file of the model"
    if own:
        has += f" (first {shown(own[0])})"
    if same and own:
        return Finding(
            "error", path.name, f"{has}, and {where}", "fetch the index again: it is incomplete",
            "shard not in the index", "file",
        )  # fmt: skip
    reads = "llama.cpp's converter reads every model*.safetensors"
    if not indexed:
        reads = "without an index vLLM reads every .safetensors file of a folder"
    return Finding(
        "warning", path.name, f"{has}, and {where}; {reads}", _REMOVE, "stale shard", "file"
    )


def _numbers(
    series: Mapping[tuple[str, str], set[int]], beside: Mapping[tuple[str, str], set[int]]
) -> list[Finding]:
    """Whether files that number themselves are all there, and all of one numbering."""
    found = []
    for (stem, total), numbers in series.items():
        there = numbers | beside.get((stem, total), set())
        missing = int(total) - len(there)
        if missing > 0:
            first = next(n for n in range(1, len(there) + 2) if n not in there)
            problem = (
                f"the files number themselves of {int(total)}, and {plural(missing, 'number')} of "
                "these is nowhere; its tensors may be lost"
            )
            found.append(
                Finding(
                    "warning",
                    f"{stem}-{first:0{len(total)}d}-of-{total}.safetensors",
                    problem,
                    "fetch the folder again, with its index",
                    "shard number left out",
                    "file",
                )
            )
    if len(series) > 1:
        named = ", ".join(f"{stem} of {int(total)}" for stem, total in sorted(series))
        found.append(
            Finding(
                "warning",
                INDEX,
                f"names files of {len(series)} numberings ({shown(named)})",
                "fetch the folder again: it may be mixed from several",
                "mixed shards",
                "file",
            )
        )
    return found
