"""Audit of skip lists: which linears a config leaves float, as each runtime reads it.

    qkv_proj = q_proj, k_proj, v_proj       gate_up_proj = gate_proj, up_proj

vLLM fuses such linears into one layer, and refuses it (ValueError) where some of its shards are
quantized and some are not; the experts of a block are one layer too. A skip entry is read
differently:

    AWQ modules_to_not_convert   vLLM: a piece of the name ("layers.1" is in layers.10 too);
                                 transformers: a pattern from the start up to a dot, or an ending
    compressed-tensors ignore    exact names and `re:` patterns; class names in transformers alone
    GPTQ dynamic                 GPTQModel asks by the linear's name, vLLM by the fused name

Sources: vLLM 0.33 (quant_utils.is_layer_skipped, compressed_tensors/utils.should_ignore_layer,
gptq_utils.get_dynamic_override, auto_awq), transformers 5.24 (should_convert_module),
compressed-tensors 0.20 (utils.match), GPTQModel 7.3.4, AutoRound, ModelOpt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from weightpath.checkpoints.audit_finding import Finding, finding_of, plural, shown
from weightpath.checkpoints.audit_readings import FUSED, LONGEST_NAME, Reading, readings_of
from weightpath.checkpoints.gptq_config import GptqSettings
from weightpath.errors import BadCheckpoint

_SECONDS = 10.0
"""Time that matching may take: a file must not hang its reader."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Leaves that runtimes build as floats whatever the config says."""


def audit_fused(
    quantized: Mapping[str, bool], settings: Mapping[str, Any], head: str | None = "lm_head"
) -> tuple[Finding, ...]:
    """Findings about fused layers and skip lists. All are warnings: the tensors are what they are.

    quantized: every linear of the checkpoint -> whether it is packed. settings: the raw
    quantization config, {} for none. head: the output head's module.
    """
    found = [*_split_layers(quantized)]
    try:
        readings, rules = readings_of(settings, head)
        stop = time.monotonic() + _SECONDS
        for reading in readings:
            found.extend(_disagreements(reading, quantized, stop))
        if rules is not None:
            found.extend(_fused_rules(rules, quantized, stop))
    except BadCheckpoint as error:
        found.append(finding_of(error))
    except TimeoutError:
        problem = f"matching {len(quantized)} linears against it takes over {_SECONDS:g} s"
        mend = "shorten its skip list; it was not checked to the end"
        found.append(Finding("warning", "quantization_config", problem, mend, "skip list too long"))
    return tuple(found)


def fused_layers(modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Layers that vLLM makes of several linears -> those of them that there are.

    The experts of a block, of whatever number, are one layer `....experts`.
    """
    layers: dict[str, list[str]] = {}
    for module in modules:
        prefix, _, leaf = module.rpartition(".")
        block, is_expert, _ = module.partition(".experts.")
        if is_expert:
            layers.setdefault(f"{block}.experts", []).append(module)
            continue
        for fused, shards in FUSED.items():
            if leaf in shards:
                layers.setdefault(f"{prefix}.{fused}".lstrip("."), []).append(module)
    return {layer: tuple(shards) for layer, shards in layers.items() if len(shards) > 1}


def _split_layers(quantized: Mapping[str, bool]) -> Iterable[Finding]:
    """Fused layers with shards on both sides."""
    for layer, shards in fused_layers(quantized).items():
        packed = [shard.removeprefix(_common(layer)) for shard in shards if quantized[shard]]
        floats = [shard.removeprefix(_common(layer)) for shard in shards if not quantized[shard]]
        if packed and floats:
            yield Finding(
                "warning",
                layer,
                f"{_few(floats)} of it {_are(floats)} float, {_few(packed)} {_are(packed)} quantized: "
                "vLLM makes one layer of them and cannot load it",
                "quantize all of them or none; weightpath and transformers load it as it is",
                "fused layers split by the skip list",
                "layer",
            )


def _disagreements(
    reading: Reading, quantized: Mapping[str, bool], stop: float
) -> Iterable[Finding]:
    """Quantized linears that an entry covers, by entry, and float ones that none covers."""
    wrong: dict[str, list[str]] = {}
    uncovered: list[str] = []
    blocks = {_block(module) for module, packed in quantized.items() if packed}
    for module, packed in quantized.items():
        if time.monotonic() > stop:
            raise TimeoutError
        entry = reading.skips(module)
        if packed and entry is not None:
            wrong.setdefault(entry, []).append(module)
        elif not packed and entry is None and reading.needs != "none":
            router = module.rpartition(".")[2] in _ROUTERS
            if not router and (reading.needs == "all" or _block(module) in blocks):
                uncovered.append(module)
    for entry, modules in wrong.items():
        yield Finding(
            "warning",
            modules[0],
            f"{reading.runtime} takes {plural(len(modules), 'quantized linear')} for float because of "
            f"{shown(entry)}, and looks for float weights there",
            reading.mend,
            f"skip entries that {reading.runtime} reads as covering quantized linears",
            "entry",
        )
    if uncovered:
        floats = sum(not packed for packed in quantized.values())
        yield Finding(
            "warning",
            uncovered[0],
            f"{len(uncovered)} of {plural(floats, 'float linear')}: no entry of {reading.key} covers "
            f"them as {reading.runtime} reads it, and it looks for packed weights there",
            f"add their full names to {reading.key}",
            f"float linears that no skip entry covers for {reading.runtime}",
            "list",
        )


def _fused_rules(
    settings: GptqSettings, quantized: Mapping[str, bool], stop: float
) -> Iterable[Finding]:
    """Fused layers for which GPTQ's rules say another thing than for their shards."""
    for layer, shards in fused_layers(quantized).items():
        if time.monotonic() > stop:
            raise TimeoutError
        packed = all(quantized[shard] for shard in shards)
        if layer.endswith(".experts") or not packed or len(layer) > LONGEST_NAME:
            continue
        asked, own = settings.for_module(layer), settings.for_module(shards[0])
        if asked is None or own is None:
            continue  # told as a skip entry
        if any(settings.for_module(shard) != asked for shard in shards):
            yield Finding(
                "warning",
                layer,
                f"the rules of dynamic give {_said(own)} for {shards[0]}, and {_said(asked)} for "
                "the fused name, by which vLLM asks",
                "write rules that match the fused name too, as (?:q_proj|k_proj|v_proj|qkv_proj)",
                "rules that miss the fused name",
                "layer",
            )


def _said(settings: GptqSettings) -> str:
    symmetry = "symmetric" if settings.sym else "asymmetric"
    return f"{settings.bits} bits, groups of {settings.group_size}, {symmetry}"


def _common(layer: str) -> str:
    """What the names of a layer's shards start with."""
    return f"{layer}." if layer.endswith(".experts") else layer.rpartition(".")[0] + "."


def _block(module: str) -> str:
    """A name up to and with its first number: the decoder block it is in."""
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])}, ... ({len(names)})"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
