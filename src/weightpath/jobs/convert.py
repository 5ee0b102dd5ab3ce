"""Convert a low-bit checkpoint to another format: what is exact, what is lossy, and by how much."""

from __future__ import annotations

from pathlib import Path

from weightpath.checkpoints.locate import locate
from weightpath.engine.load import Progress, no_progress
from weightpath.errors import BadRequest
from weightpath.jobs.conversion import Converted, ConvertedTensor
from weightpath.jobs.convert_folder import convert_to_folder
from weightpath.jobs.convert_gguf import convert_to_gguf
from weightpath.jobs.targets import GGUF, find_target

__all__ = ["Converted", "ConvertedTensor", "convert"]


def convert(
    source: str,
    to: str,
    folder: Path,
    *,
    exact_only: bool = False,
    overwrite: bool = False,
    group_size: int | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write SOURCE in format `to` into `folder` (for gguf: a .gguf file, or a folder for one).

    source: a folder, a GGUF file, or a hub id. to: compressed-tensors, awq, gptq, gptq_v2, int8 or
    gguf. exact_only: refuse where any weight would change. group_size: cut groups into this size,
    which is exact (a tensor-parallel shard may need it). Errors: BadRequest for an unknown format,
    a folder that is there, or a loss that was not allowed; BadCheckpoint and BadTensor for what is
    wrong with the source. Nothing is left half-written in `folder`.
    """
    target, path = find_target(to), locate(source)
    shown = progress or no_progress
    if group_size is not None and to in (GGUF, "int8"):
        own = "int8 has one scale a row" if to == "int8" else "a GGUF file's blocks have their own"
        raise BadRequest(f"group size {group_size}: {own}; leave out --group-size")
    if target is None:
        return convert_to_gguf(path, Path(folder), exact_only, overwrite, shown)
    return convert_to_folder(
        path, source, target, Path(folder), exact_only, overwrite, shown, group_size
    )
