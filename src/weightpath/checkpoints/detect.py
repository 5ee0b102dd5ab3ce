"""Which low-bit format a folder is in: the first of an ordered tuple that recognises it.

Labels come first (quant_method, or a side file's keys), then tensor names and file metadata. Where
no config says anything, bits and groups are inferred from shapes alone if these settle them
(inferred.py), and that is said.
"""

from __future__ import annotations

from dataclasses import replace

from weightpath.checkpoints import openers
from weightpath.checkpoints.inferred import inferred_settings
from weightpath.checkpoints.opened import Opened, Source
from weightpath.errors import BadCheckpoint

FORMATS = (
    openers.open_autoround,
    openers.open_compressed,
    openers.open_awq,
    openers.open_gptq,
    openers.open_torchao,
    openers.open_modelopt,
    openers.open_bitsandbytes,
    openers.open_hqq,
)
"""Tried in this order. A function takes a Source and gives an Opened, or None."""

READ = (
    "AWQ, GPTQ, AutoRound, compressed-tensors, torchao, ModelOpt, bitsandbytes and HQQ are read, "
    "and GGUF files"
)


def detect(source: Source) -> Opened:
    """The folder opened in the format that it is in. BadCheckpoint, naming what was found, else."""
    opened = _first(source)
    if opened is None and not source.settings:
        found = inferred_settings(source)
        if found is not None:
            settings, how = found
            opened = _first(replace(source, settings=settings, where=source.checkpoint.where))
            if opened is not None:
                note = f"no quantization_config was found: {how}"
                opened = replace(opened, how=how, notes=(note, *opened.notes))
    if opened is None:
        method = source.settings.get("quant_method") or source.settings.get("format")
        what = (
            f"quant_method {method!r:.60} is not read"
            if source.settings
            else "has no quantization_config, and its tensors do not tell a format"
        )
        raise BadCheckpoint(source.where, what, READ)
    if not opened.parts:
        raise BadCheckpoint(
            source.checkpoint.where,
            f"says {opened.how}, but holds no packed linear",
            "fetch the checkpoint again, or remove the quantization config if its weights are floats",
        )
    return opened


def _first(source: Source) -> Opened | None:
    for open_format in FORMATS:
        opened = open_format(source)
        if opened is not None:
            return opened
    return None
