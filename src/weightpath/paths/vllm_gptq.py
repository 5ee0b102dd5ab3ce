"""Which AWQ, GPTQ and AutoRound checkpoints vLLM loads, by release and device.

Read: 0.19 to 0.21 (gptq.py, gptq_marlin.py, awq.py, awq_marlin.py, cpu_wna16.py); 0.22 to 0.29
(auto_gptq.py with g_idx); 0.32.0 (auto_gptq.py, gptq_utils.py, auto_awq.py, marlin_utils.py, inc/);
0.33 (auto_gptq.py, auto_awq.py). AutoRound's reader: 0.32.0 alone, inferred before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weightpath.paths.held import Answer, Held, asymmetric, named, ordered, schemes_of
from weightpath.paths.vllm_limits import (
    CPU,
    MARLIN,
    ON_CPU,
    ON_CUDA,
    first_refusal,
    half_if_needed,
    listed,
)
from weightpath.scheme import PER_CHANNEL

_GPTQ_BITS = (2, 3, 4, 8)
"""What gptq.py took, up to 0.21."""
_OTHER_WIDTHS = {2, 3, 5, 6, 7}
"""What AutoRound's reader gives to Humming (0.32.0)."""


def awq(held: Held, release: int, device: str) -> Answer | None:
    """AWQ, or None for another format. The gemm layout stores zeros, whatever zero_point says."""
    if not held.format.startswith("AWQ"):
        return None
    if held.format != "AWQ gemm":
        return Answer(
            "no",
            f"it reads the gemm layout alone and never looks at `version`: {held.format} stops it "
            "at the first tensor of another shape or name",
        )
    for keys in (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)):
        if all(held.settings.get(key) is None for key in keys):
            return Answer("no", f"its AWQ reader asks for {keys[0]}, which the config lacks")
    if held.no_zeros:
        return Answer(
            "wrong",
            f"it makes qzeros for every AWQ linear and leaves in them what memory held where the "
            f"file has none ({len(held.no_zeros)} linears, first {held.no_zeros[0]})",
        )
    return _packed_head(held) or _awq_kernels(
        held, release, device, held.settings["zero_point"] is not False
    )


def gptq(held: Held, release: int, device: str) -> Answer | None:
    """GPTQ, or None for another format."""
    if not held.format.startswith("GPTQ"):
        return None
    asked = ["bits", "group_size", "desc_act"] + (["sym"] if release >= 22 else [])
    absent = [key for key in asked if held.settings.get(key) is None]
    if absent:
        return Answer(
            "no",
            f"its GPTQ reader asks for {', '.join(asked[:-1])} and {asked[-1]}, and the config "
            f"lacks {' and '.join(absent)}",
        )
    return _packed_head(held) or _gptq_kernels(held, held.settings, release, device)


def autoround(held: Held, release: int, device: str) -> Answer | None:
    """AutoRound, whose packing_format gives the layout, or None for another format."""
    if not held.format.startswith("AutoRound"):
        return None
    layout = held.format.removeprefix("AutoRound (").removesuffix(")")
    if layout in ("gptq_v2", "compressed-tensors"):
        return Answer(
            "no",
            "its AutoRound reader takes integers packed as auto_round:auto_gptq or "
            f"auto_round:auto_awq, and these are {layout}",
        )
    sym = held.settings.get("sym") is not False
    if layout == "awq":
        if device == "CPU" and sym:
            return Answer(
                "no", "symmetric AWQ goes to its plain AWQ kernels, which are CUDA's (inferred)"
            )
        return _awq_kernels(held, release, device, not sym)
    schemes = sorted(schemes_of(held), key=lambda scheme: scheme.name)
    if device == "CUDA" and release >= 27:
        rest = [scheme for scheme in schemes if scheme.bits not in _OTHER_WIDTHS]
        if not rest:
            bits = listed({scheme.bits for scheme in schemes})
            return Answer(
                "yes",
                f"its Humming kernels take {bits} bits; their limits of shape were not read",
                (*ON_CUDA, "humming-kernels"),
            )
        schemes = rest
    keys = [
        {"bits": scheme.bits, "group_size": scheme.group_size, "sym": sym, "desc_act": False}
        for scheme in schemes
    ] or [{"bits": 4, "group_size": PER_CHANNEL, "sym": sym, "desc_act": False}]
    rules = {f"+:{index}": other for index, other in enumerate(keys[1:])}
    return _gptq_kernels(held, keys[0] | {"dynamic": rules}, release, device)


def _awq_kernels(held: Held, release: int, device: str, zero_point: bool) -> Answer:
    if device == "CPU":
        if refusal := first_refusal(held, CPU):
            return Answer("no", refusal)
        if not zero_point and release < 22:
            return Answer("no", "its CPU reader of AWQ asserts zero_point true")
        uneven = asymmetric(held)
        if not zero_point and uneven:
            return Answer(
                "wrong",
                f"under zero_point false its CPU kernel assumes 8, and {uneven} stores other zeros",
            )
        return Answer("yes", "its CPU kernel for packed 4-bit weights", ON_CPU)
    groups = {scheme.group_size for scheme in schemes_of(held)}
    if zero_point and groups <= set(MARLIN.group_sizes or ()):
        return Answer("yes", "its Marlin kernel", ON_CUDA)
    why = f"groups of {listed(groups)} are" if zero_point else "zero_point false is"
    return Answer(
        "yes",
        f"its plain AWQ kernels, since {why} not for Marlin; they use the stored zeros, in fp16",
        (*ON_CUDA, *half_if_needed(held)),
    )


def _gptq_kernels(held: Held, settings: Mapping[str, Any], release: int, device: str) -> Answer:
    rules = list(_rules(settings))
    refusal = _marlin_refuses(rules) or (first_refusal(held, CPU) if device == "CPU" else None)
    by_order = any(rule.get("desc_act") and rule.get("group_size") != PER_CHANNEL for rule in rules)
    disordered = ordered(held)
    if by_order and release >= 30:
        if disordered:
            what = f"and the columns of {disordered} do have an order of their own"
        else:
            what = "though every g_idx here is the plain one and it could run"
        return Answer("no", f"it refuses desc_act true since 0.30 (vllm#54809), {what}")
    if refusal is not None and (release >= 22 or device == "CPU"):
        return Answer("no", refusal)
    if disordered and not by_order:
        return Answer(
            "wrong",
            f"under desc_act false it drops every g_idx and reads {disordered} in the plain order",
        )
    if refusal is not None:
        return _exllama(held, settings)
    if uneven := asymmetric(held):
        return Answer(
            "wrong",
            f"under sym true it never uses qzeros, and the zeros of {uneven} are not the midpoint",
        )
    order = ", which reorders by g_idx" if disordered else ""
    if device == "CPU":
        return Answer("yes", f"its CPU kernel for packed 4-bit weights{order}", ON_CPU)
    return Answer(
        "yes",
        f"its Marlin kernel{order}; checkpoint_format is not read, nor needed where all zeros are "
        "the midpoint",
        ON_CUDA,
    )


def _marlin_refuses(rules: list[Mapping[str, Any]]) -> str | None:
    """Why the one GPTQ reader since 0.22 refuses a config: (bits, sym) and group size."""
    for rule in rules:
        bits, sym, size = rule.get("bits"), rule.get("sym"), rule.get("group_size")
        if bits not in MARLIN.bits or sym is not True:
            kind = "asymmetric" if sym is False else f"{bits}-bit"
            return (
                f"it refuses {kind} GPTQ: all it takes is 4 and 8 bits with sym true, and the "
                f"config says bits {bits}, sym {str(sym).lower()}"
            )
        if size not in (MARLIN.group_sizes or ()):
            sizes = listed(size for size in MARLIN.group_sizes or () if size > 0)
            return f"its GPTQ takes groups of {sizes} or whole rows, not {size}"
    return None


def _exllama(held: Held, settings: Mapping[str, Any]) -> Answer:
    """gptq.py, for what Marlin did not take up to 0.21: its kernels used the stored zeros."""
    for scheme in schemes_of(held):
        if scheme.bits not in _GPTQ_BITS:
            return Answer("no", f"its GPTQ takes 2, 3, 4 and 8 bits, not {scheme.bits}")
    label = "v2" if settings.get("checkpoint_format") == "gptq_v2" else "v1"
    stored = "v2" if held.format.endswith("v2") else "v1"
    if label != stored:
        return Answer(
            "wrong",
            f"by checkpoint_format it takes the zeros for {label}, and they are stored as "
            f"{stored}: every zero point is off by one",
        )
    return Answer(
        "yes",
        "its exllama kernels, which use the stored zeros, in fp16 (read in 0.19 to 0.21; older "
        "ones took v2 zeros for v1, vllm#26343)",
        half_if_needed(held),
    )


def _packed_head(held: Held) -> Answer | None:
    """Both readers give a packed head its method only where the config says lm_head true."""
    head = named(held.linears, lambda linear: linear.role == "head")
    if head and held.settings.get("lm_head") is not True:
        return Answer("no", f"{head} is packed and the config does not say lm_head true (inferred)")
    return None


def _rules(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The base settings, and those of every dynamic rule that does not skip its linears."""
    yield settings
    dynamic = settings.get("dynamic")
    for pattern, changes in (dynamic if isinstance(dynamic, Mapping) else {}).items():
        if not str(pattern).startswith("-:") and isinstance(changes, Mapping):
            yield {**settings, **changes}
