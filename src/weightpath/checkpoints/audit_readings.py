"""How runtimes read the skip list of a quantization config: Reading.skips(module) -> why, or None.

See audit_skips.py for the rules and their sources. Patterns come from a file, so they are bounded
(gptq_config.rule_pattern), and no name of more than 160 signs is matched against one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightpath.checkpoints import autoround, awq_config, compressed_tensors, gptq_config, modelopt
from weightpath.checkpoints.gptq_config import GptqSettings, rule_pattern, shown
from weightpath.errors import BadCheckpoint

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Layers that vLLM fuses -> their shards (packed_modules_mapping of its models)."""
LONGEST_NAME = 160
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
_PLAIN = re.compile(r"[\w.\-]+")
_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "skip_modules")
_FULL = "write the full names of the float linears, and nothing that is part of another name"

Skips = Callable[[str], str | None]


@dataclass(frozen=True)
class Reading:
    """One runtime's reading. skips: a module -> what leaves it float, as a phrase, or None.

    key: where the entries stand. needs: which float linears an entry must cover: "all"; those of
    "blocks" that hold quantized linears; or "none", where the runtime finds out from the files.
    """

    runtime: str
    key: str
    skips: Skips
    mend: str = _FULL
    needs: Literal["all", "blocks", "none"] = "all"


def readings_of(
    settings: Mapping[str, Any], head: str | None
) -> tuple[list[Reading], GptqSettings | None]:
    """The readings of a quantization config, and GPTQ's rules where it is GPTQ's.

    BadCheckpoint for a list that is not one, or a pattern that is not read.
    """
    method = settings.get("quant_method") or settings.get("method")
    method = method.lower() if isinstance(method, str) else ""
    if awq_config.recognise(settings, ()):
        return _awq(settings, head), None
    if method == compressed_tensors.METHOD or (not method and "config_groups" in settings):
        return _compressed_tensors(settings, head), None
    if method in gptq_config.METHODS or (not method and {"bits", "group_size"} <= settings.keys()):
        rules = gptq_config.settings(settings)
        return _gptq(settings, rules, head), rules
    if method in autoround.METHODS:
        stated = autoround.settings(settings)
        where = "extra_config or block_name_to_quantize"
        return [Reading("AutoRound", where, _asked(stated.for_module, where))], None
    if modelopt.recognise(settings):
        excluded = modelopt.settings(settings)
        key = "exclude_modules"
        return [Reading("ModelOpt", key, _asked(excluded.for_module, f"a pattern in {key}"))], None
    for key in _LISTS:
        entries = _entries(settings, key)
        if entries:
            return [Reading("transformers", key, _transformers(entries, key, head))], None
    return [], None


def _awq(settings: Mapping[str, Any], head: str | None) -> list[Reading]:
    """vLLM derives an empty list from the files; transformers adds the head of its own accord."""
    key = "modules_to_not_convert"
    entries = _entries(settings, key)

    def pieces(name: str) -> str | None:
        return next((_named(entry, key) for entry in entries if entry in name), None)

    transformers = Reading("transformers", key, _transformers(entries, key, head))
    vllm = Reading("vLLM", key, _with_head(pieces, settings, head))
    return [vllm, transformers] if entries else [transformers]


def _compressed_tensors(settings: Mapping[str, Any], head: str | None) -> list[Reading]:
    """vLLM ignores no classes, and its head is not of class Linear, so a target must name it."""
    ignore = _entries(settings, "ignore")
    groups = settings.get("config_groups")
    targets: list[str] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and group.get("weights") is not None:
            targets.extend(_entries(group, "targets"))
    ignored = _exact_or_pattern(ignore, "ignore")
    targeted = _exact_or_pattern(targets, "targets")

    def vllm(name: str) -> str | None:
        by_class = "Linear" in targets and name != head
        unnamed = None if by_class or targeted(name) else "targets, which do not name it"
        return ignored(name) or unnamed

    def transformers(name: str) -> str | None:
        if "Linear" in ignore:
            return _named("Linear", "ignore")
        unnamed = None if "Linear" in targets or targeted(name) else "targets, which do not name it"
        return ignored(name) or unnamed

    mend = f"{_FULL}; name a quantized head in targets"
    return [
        Reading("vLLM", "ignore", vllm, mend),
        Reading("transformers", "ignore", transformers, mend),
    ]


def _gptq(settings: Mapping[str, Any], rules: GptqSettings, head: str | None) -> list[Reading]:
    """vLLM asks the rules by the fused name, and derives a missing list of linears from the files."""
    key = "modules_in_block_to_quantize"
    listed = settings.get(key) or []
    if isinstance(listed, list) and all(isinstance(item, list) for item in listed):
        listed = [name for item in listed for name in item]
    listed = _entries({key: listed}, key)

    def skips(name: str, asked: str) -> str | None:
        if len(name) > LONGEST_NAME:
            return None
        rule = next((rule for rule in rules.dynamic if rule.pattern.match(asked)), None)
        if rule is not None and rule.skip:
            return _named(f"-:{rule.pattern.pattern}", "dynamic")
        return f"{key}, which lacks it" if listed and not any(e in name for e in listed) else None

    vllm = _with_head(lambda name: skips(name, _vllm_name(name)), settings, head)
    return [
        Reading("GPTQModel", "dynamic", lambda name: skips(name, name), needs="blocks"),
        Reading("vLLM", "dynamic", vllm, needs="all" if listed else "none"),
    ]


def _vllm_name(name: str) -> str:
    """The layer that a linear becomes a shard of in vLLM, or itself."""
    block, is_expert, _ = name.partition(".experts.")
    if is_expert:
        return f"{block}.experts"
    prefix, dot, leaf = name.rpartition(".")
    fused = next((fused for fused, shards in FUSED.items() if leaf in shards), leaf)
    return f"{prefix}{dot}{fused}"


def _with_head(skips: Skips, settings: Mapping[str, Any], head: str | None) -> Skips:
    """vLLM's head is float unless the config's `lm_head` is true."""

    def with_head(name: str) -> str | None:
        if name == head and not settings.get("lm_head"):
            return "lm_head, which is not true in the config"
        return skips(name)

    return with_head


def _transformers(entries: list[str], key: str, head: str | None) -> Skips:
    """should_convert_module, over the entries and the head, which it always leaves float."""
    plain = [entry for entry in entries if _PLAIN.fullmatch(entry)]
    patterns = {e: _bounded(e, rf"(?:{e}){_BOUNDARY}") for e in entries if e not in plain}
    anyone = re.compile(rf"(?:{'|'.join(plain)}){_BOUNDARY}") if plain else None

    def entry_of(name: str) -> str | None:
        start = anyone.match(name) if anyone else None
        if start is not None:  # a dot in an entry is any sign, as in every pattern
            text = start[0]
            return next(
                e for e in plain
                if len(e) == len(text) and all(a in (b, ".") for a, b in zip(e, text, strict=True))
            )  # fmt: skip
        return next((e for e in entries if name.endswith(e)), None) or next(
            (e for e, pattern in patterns.items() if pattern.match(name)), None
        )

    def skips(name: str) -> str | None:
        if name == head:
            return "its own rule for heads"
        found = entry_of(name) if len(name) <= LONGEST_NAME else None
        return None if found is None else _named(found, key)

    return skips


def _exact_or_pattern(entries: list[str], key: str) -> Skips:
    """compressed-tensors: `re:` patterns from the start of the name, else the very name."""
    exact = {entry for entry in entries if not entry.startswith("re:")}
    patterns = [(e, _bounded(e[3:], e[3:])) for e in entries if e.startswith("re:")]

    def covers(name: str) -> str | None:
        if name in exact:
            return _named(name, key)
        if len(name) > LONGEST_NAME:
            return None
        return next((_named(e, key) for e, pattern in patterns if pattern.match(name)), None)

    return covers


def _named(entry: str, key: str) -> str:
    return f"{shown(entry)} in {key}"


def _asked(for_module: Callable[[str], object], where: str) -> Skips:
    """From a config's own answer, None for float, to the place that says so."""

    def skips(name: str) -> str | None:
        return where if len(name) <= LONGEST_NAME and for_module(name) is None else None

    return skips


def _bounded(entry: str, pattern: str) -> re.Pattern[str]:
    rule_pattern(entry, "quantization_config")
    return re.compile(pattern)


def _entries(settings: Mapping[str, Any], key: str) -> list[str]:
    value = settings.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise BadCheckpoint(
            "quantization_config", f"{key} is {shown(value)}, wanted a list of names", "correct it"
        )
    return [entry for entry in value if entry]
