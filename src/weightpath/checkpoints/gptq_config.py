"""GPTQ's quantization_config: what its keys say of every linear, and the one that we write.

    base:  bits, group_size (-1: one group a row), desc_act, sym, checkpoint_format, pack_dtype
    rules: dynamic = {"+:pattern" or "pattern": overrides, "-:pattern": {}}   the first match wins

Patterns are matched with `re.match` on the module's name. The same keys stand in config.json under
quantization_config and, in older folders, in quantize_config.json; `checkpoint_format` and
`format`, `quant_method` and `method` are spellings of one thing. Source: GPTQModel 7.3.4
(quantization/config.py), AutoGPTQ 0.7 (quantization/config.py), transformers 5.24 (GPTQConfig),
vLLM 0.33 (auto_gptq.py and gptq_utils.py, which need bits, group_size, desc_act and sym).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from typing import Any, Literal

import torch

from weightpath.errors import BadCheckpoint
from weightpath.scheme import Scheme

METHOD = "gptq"
Convention = Literal["v1", "v2"]
LABELS: dict[str, Convention] = {"gptq": "v1", "gptq_v2": "v2", "gptq_p": "v2"}
"""checkpoint_format -> the zero convention that it stands for."""
METHODS = ("gptq", "auto_gptq", "auto-gptq", "gptq_marlin")  # the last two are vLLM's aliases
_WORDS = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
_SPELLINGS = {"bits": ("bits", "w_bit", "wbits"), "group_size": ("group_size", "q_group_size")}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that vLLM fuses, and asks the rules for by the fused name."""


@dataclass(frozen=True)
class Rule:
    """A `dynamic` rule: names that it matches are skipped, or take `changes`."""

    pattern: re.Pattern[str]
    skip: bool
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class GptqSettings:
    """What the configuration says of one linear, or of all that no rule names.

    group_size -1 is one group a row. checkpoint_format None: not stated, or stated twice and
    differently. zeros_by_word: v1 zeros were made by subtracting 1 from every field of a whole
    word at once, so that a zero of 0 borrows from the next field. notes: what a reader assumed.
    """

    bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str | None = None
    pack_dtype: torch.dtype = torch.int32
    static_groups: bool = False
    lm_head: bool = False
    zeros_by_word: bool = False
    dynamic: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    where: str = "quantization_config"

    @property
    def planar(self) -> bool:
        """Whether codes are split into planes: 5, 6 and 7 bits, and 3 bits under gptq_p."""
        return self.bits in (5, 6, 7) or (self.bits == 3 and self.checkpoint_format == "gptq_p")

    def for_module(self, name: str) -> GptqSettings | None:
        """The settings of the module `name`, or None where a rule skips it."""
        for rule in self.dynamic:
            if rule.pattern.match(name):
                return None if rule.skip else replace(self, dynamic=(), **rule.changes)
        return replace(self, dynamic=())


def settings(config: Mapping[str, Any], where: str = "quantization_config") -> GptqSettings:
    """The settings in a quantization_config, or in the content of quantize_config.json.

    `where` names the file in messages. A missing `sym` is taken as true, as GPTQModel does, with a
    note. BadCheckpoint names the key, what was found and what is read.
    """
    method = config.get("quant_method") or config.get("method") or METHOD
    if str(method).lower() not in METHODS:
        raise BadCheckpoint(
            where, f"quant_method {shown(method)} is not GPTQ", "read it as that method"
        )
    if config.get("is_marlin_format"):
        raise BadCheckpoint(
            where,
            "is_marlin_format: the weights are in Marlin's kernel layout, which is not read",
            "fetch the checkpoint that it was made from",
        )
    values = _values(config, where)
    for key in ("bits", "group_size"):
        if key not in values:
            raise BadCheckpoint(where, f"'{key}' is missing", f"add the {key} it was made with")
    notes = []
    if "sym" not in values:
        notes.append("sym is missing: taken as true, as GPTQModel does; the stored zeros decide")
    label, note = _label(config, where)
    notes.extend(note)
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise BadCheckpoint(
            where, f"dynamic is {shown(rules)}", "write an object from patterns to overrides"
        )
    return GptqSettings(
        **values,
        checkpoint_format=label,
        pack_dtype=_word(config.get("pack_dtype"), where),
        static_groups=_static_groups(config),
        lm_head=bool(config.get("lm_head", False)),
        zeros_by_word="gptqmodel" in _writers(config),
        dynamic=tuple(_rule(key, rule, where) for key, rule in rules.items()),
        notes=tuple(notes),
        where=where,
    )


def disagreements(first: GptqSettings, second: GptqSettings) -> tuple[str, ...]:
    """One sentence a setting that two files of a folder state differently.

    GPTQModel reads quantize_config.json first; vLLM and transformers read config.json first.
    """
    keys = ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "pack_dtype")
    return tuple(
        f"{key} is {getattr(first, key)} in {first.where}, {getattr(second, key)} in {second.where}"
        for key in keys
        if getattr(first, key) != getattr(second, key)
    )


def rule_pattern(text: object, where: str) -> re.Pattern[str]:
    """A pattern of a configuration, compiled; a file must not hang its reader.

    BadCheckpoint where it is no pattern, or has what makes matching explode: a repeated group,
    more than five repeats or ten optional signs, more than six groups.
    """
    if not isinstance(text, str) or len(text) > 4096:
        raise BadCheckpoint(where, f"rule {shown(text)}", "write a pattern of at most 4096 signs")
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", text))
    limits = ((r"\)[*+{]", 0), (r"[*+{]", 5), (r"(?<![(*+}])\?", 10), (r"\(", 6))
    if any(len(re.findall(sign, plain)) > most for sign, most in limits):
        raise BadCheckpoint(
            where,
            f"rule {shown(text)} repeats a group, or has too many repeats or groups",
            "split it into plain rules",
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadCheckpoint(
            where, f"rule {shown(text)} is no pattern ({error})", "correct it"
        ) from None


def quantization_config(
    schemes: Mapping[str, Scheme],
    ignored: Iterable[str] = (),
    version: str = "v1",
    desc_act: bool = False,
) -> dict[str, Any]:
    """The `quantization_config` for linears name -> scheme and linears left float.

    The commonest scheme is the base; linears of another one, and the ignored ones, get exact rules
    that also match vLLM's fused name where all parts of a fused layer agree. desc_act: whether any
    linear keeps a column order. The same content serves as quantize_config.json.
    """
    counts: dict[Scheme, int] = {}
    for scheme in schemes.values():
        scheme = scheme.with_activations(16)
        counts[scheme] = counts.get(scheme, 0) + 1
    if not counts:
        raise BadCheckpoint("quantization_config", "no linear is quantized", "quantize some first")
    base = max(counts, key=lambda scheme: counts[scheme])
    others: dict[str, Scheme | None] = dict.fromkeys(ignored)
    others |= {name: s.with_activations(16) for name, s in schemes.items()}
    rules: dict[str, Any] = {}
    for pattern, scheme in _exact_rules({n: s for n, s in others.items() if s != base}):
        rules[f"{'-' if scheme is None else '+'}:{pattern}"] = (
            {} if scheme is None else _keys(scheme)
        )
    label = "gptq" if version == "v1" else "gptq_v2"
    return {
        "quant_method": METHOD,
        "method": METHOD,
        "checkpoint_format": label,
        "format": label,
        **_keys(base),
        "desc_act": desc_act,
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in schemes),
        "pack_dtype": "int32",
        **({"dynamic": rules} if rules else {}),
        "meta": {"quantizer": [f"weightpath:{version_of('weightpath')}"]},
    }


def _keys(scheme: Scheme) -> dict[str, Any]:
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _exact_rules(schemes: Mapping[str, Scheme | None]) -> list[tuple[str, Scheme | None]]:
    """Patterns that match exactly these names; siblings of a fused layer that agree share one."""
    rules: list[tuple[str, Scheme | None]] = []
    done: set[str] = set()
    for name, scheme in schemes.items():
        if name in done:
            continue
        prefix, _, leaf = name.rpartition(".")
        start = f"{prefix}." if prefix else ""
        leaves: Sequence[str] = (leaf,)
        for fused, parts in _FUSED.items():
            names = [start + part for part in parts]
            if leaf in parts and all(n in schemes and schemes[n] == scheme for n in names):
                leaves = (*parts, fused)
        done.update(start + part for part in leaves)
        ending = re.escape(leaf) if len(leaves) == 1 else f"(?:{'|'.join(leaves)})"
        rules.append((f"{re.escape(start)}{ending}$", scheme))
    return rules


def _values(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """bits, group_size, desc_act and sym where they are stated, checked."""
    found: dict[str, Any] = {}
    for key, spellings in _SPELLINGS.items():
        value = next((config[name] for name in spellings if config.get(name) is not None), None)
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not (2 <= value <= 8 if key == "bits" else value == -1 or value > 0):
            wanted = "2 to 8" if key == "bits" else "-1 or a positive number"
            raise BadCheckpoint(where, f"{key} is {shown(value)}", f"{wanted} is read")
        found[key] = value
    for key in ("desc_act", "sym"):
        if config.get(key) is not None:
            if not isinstance(config[key], bool):
                raise BadCheckpoint(where, f"{key} is {shown(config[key])}", "write true or false")
            found[key] = config[key]
    return found


def _label(config: Mapping[str, Any], where: str) -> tuple[str | None, list[str]]:
    """checkpoint_format under both its spellings, and a note where they differ."""
    stated = {key: config[key] for key in ("checkpoint_format", "format") if config.get(key)}
    for key, value in stated.items():
        if str(value).lower() not in LABELS:
            raise BadCheckpoint(
                where, f"{key} {shown(value)} is not read", f"GPTQ files of {', '.join(LABELS)} are"
            )
    labels = sorted({str(value).lower() for value in stated.values()})
    if len(labels) > 1:
        said = ", ".join(f"{key} {value}" for key, value in stated.items())
        return None, [f"the config contradicts itself ({said}): neither label is trusted"]
    return (labels[0] if labels else None), []


def _rule(key: object, value: object, where: str) -> Rule:
    text = key if isinstance(key, str) else ""
    skip = text.startswith("-:")
    if value is not None and not isinstance(value, Mapping):
        raise BadCheckpoint(where, f"rule {shown(key)} holds {shown(value)}", "write an object")
    changes = {} if skip else _values(value or {}, f"{where}: rule {shown(key)}")
    return Rule(rule_pattern(text.removeprefix("-:").removeprefix("+:"), where), skip, changes)


def _static_groups(config: Mapping[str, Any]) -> bool:
    meta = config.get("meta")
    inner = meta.get("static_groups") if isinstance(meta, Mapping) else None
    return bool(config.get("static_groups") or inner)


def _writers(config: Mapping[str, Any]) -> set[str]:
    """Names of the programs that made the file, from meta.quantizer ("gptqmodel:7.3.4")."""
    meta = config.get("meta")
    stated = meta.get("quantizer") if isinstance(meta, Mapping) else None
    listed = stated if isinstance(stated, list) else [stated]
    return {text.split(":")[0].strip().lower() for text in listed if isinstance(text, str)}


def _word(value: object, where: str) -> torch.dtype:
    name = "int32" if value is None else str(value).lower().removeprefix("torch.")
    if name not in _WORDS:
        raise BadCheckpoint(where, f"pack_dtype is {shown(value)}", f"{', '.join(_WORDS)} are read")
    return _WORDS[name]


def shown(value: object) -> str:
    """A value for a one-line message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
