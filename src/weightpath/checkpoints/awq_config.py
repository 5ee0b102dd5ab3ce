"""What an AWQ checkpoint's config says, read in both spellings, and the one that is written.

    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm",
     "modules_to_not_convert": null}

Legacy files (quant_config.json) say w_bit and q_group_size, and upper-case versions.
Sources: AutoAWQ AwqConfig, transformers AwqConfig (5.24), vLLM auto_awq.py (0.33).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightpath.errors import BadCheckpoint
from weightpath.scheme import PER_CHANNEL

METHODS = ("awq", "auto_awq", "awq_marlin")
GEMM, GEMV, GEMV_FAST, LLM_AWQ = "gemm", "gemv", "gemv_fast", "llm-awq"
VERSIONS = (GEMM, GEMV, GEMV_FAST, LLM_AWQ)


@dataclass(frozen=True)
class AwqSettings:
    """What a quantization config says. group_size -1 is one group a row."""

    bits: int
    group_size: int
    version: str
    zero_point: bool
    modules_to_not_convert: tuple[str, ...]


def recognise(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """How this is known to be AWQ, as a phrase, or None.

    config is a quantization_config (or a legacy quant_config.json); names are tensor names.
    """
    method = config.get("quant_method")
    if isinstance(method, str) and method.lower() in METHODS:
        return f"quant_method {method}"
    if method is None and "w_bit" in config and "q_group_size" in config:
        return "the keys w_bit and q_group_size"
    if method is None and any(name.endswith(".scaled_zeros") for name in names):
        return "tensors named scaled_zeros"
    return None


def settings(config: Mapping[str, Any], where: str = "quantization_config") -> AwqSettings:
    """Read a quantization_config or a legacy quant_config.json; `where` names it in messages.

    Keys: bits | w_bit (4 if absent), group_size | q_group_size (required), version | format (gemm
    if absent), zero_point (true if absent), modules_to_not_convert (a list or null); backend
    "llm-awq" means that version. BadCheckpoint for anything else in them.
    """
    bits = _either(config, ("bits", "w_bit"), where)
    bits = 4 if bits is None else bits
    if bits != 4:
        raise BadCheckpoint(where, f"AWQ with {bits!r} bits", "AWQ files are 4-bit: set bits to 4")
    size = _either(config, ("group_size", "q_group_size"), where)
    if type(size) is not int or (size != PER_CHANNEL and size < 1):
        raise BadCheckpoint(
            where, f"group_size is {size!r}", "set it to the size of a group, or -1 for whole rows"
        )
    named = config.get("version") or config.get("format") or GEMM
    if config.get("backend") == LLM_AWQ:
        named = LLM_AWQ
    found = {version.replace("-", "_"): version for version in VERSIONS}
    version = found.get(str(named).lower().replace("-", "_"))
    if version is None:
        known = f"the versions read are {', '.join(VERSIONS)}"
        raise BadCheckpoint(where, f"AWQ version {named!r} is not read", known)
    zero_point = config.get("zero_point", True)
    if not isinstance(zero_point, bool):
        raise BadCheckpoint(where, f"zero_point is {zero_point!r}", "set it to true or false")
    skip = config.get("modules_to_not_convert")
    if skip is not None and not (
        isinstance(skip, list) and all(isinstance(entry, str) for entry in skip)
    ):
        raise BadCheckpoint(
            where, "modules_to_not_convert is not a list of names", "set it to a list, or to null"
        )
    return AwqSettings(4, size, version, zero_point, tuple(skip or ()))


def quantization_config(group_size: int, zero_point: bool, skip: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for the gemm layout.

    vLLM needs bits, group_size and zero_point; transformers 5 reads version too. skip: modules left
    float. vLLM skips every module whose name contains an entry as plain text (`layers.1` skips
    `layers.10`), transformers matches whole parts of names: give full names. None are written as
    null, which has vLLM look for them in the files.
    """
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": zero_point,
        "version": GEMM,
        "modules_to_not_convert": sorted(skip) or None,
    }


def _either(config: Mapping[str, Any], keys: tuple[str, str], where: str) -> Any:
    """The value under either spelling, None if neither; BadCheckpoint if the two disagree."""
    first, second = (config.get(key) for key in keys)
    if first is not None and second is not None and first != second:
        raise BadCheckpoint(
            where, f"{keys[0]} is {first!r} and {keys[1]} is {second!r}", "remove the wrong one"
        )
    return second if first is None else first
