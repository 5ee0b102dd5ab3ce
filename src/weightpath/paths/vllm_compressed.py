"""Which compressed-tensors checkpoints vLLM loads, by release and device.

Read: 0.24.0 (4 and 8 bits alone), 0.27.1 (2 to 8 bits, zero points with 4 and 8), 0.32.0
(compressed_tensors.py, schemes/compressed_tensors_wNa16.py and _w8a8_int8.py, the kernel list): all
widths with zero points, codes packed densely. Group and dynamic column orders: refused since 0.30
(vllm#54809), where every g_idx is dropped by the weight mapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightpath.paths.held import Answer, Held, asymmetric, named, ordered, schemes_of
from weightpath.paths.vllm_limits import (
    CPU,
    MARLIN,
    ON_CPU,
    ON_CUDA,
    exllama_takes,
    first_refusal,
    half_if_needed,
    listed,
    machete_takes,
)
from weightpath.scheme import PER_CHANNEL


def compressed_tensors(held: Held, release: int, device: str) -> Answer | None:
    """What vLLM 0.`release` does, or None for another format."""
    if not held.format.startswith("compressed-tensors"):
        return None
    sparsity = held.settings.get("sparsity_config")
    if release >= 30 and isinstance(sparsity, Mapping) and sparsity.get("targets"):
        return Answer("no", "its support of sparsity_config was removed")
    groups = _groups(held.settings)
    asked = any(group.get("input_activations") for group in groups)
    if held.format.endswith("int-quantized"):
        return _int_quantized(held, asked)
    by_group = any(
        _weights(group).get("actorder") in ("group", "dynamic", True) for group in groups
    )
    answer = _order(held, release, by_group) or _widths(held, release, device)
    if asked and answer.loads == "yes":
        clause = "what it does with the quantized activations that the config asks for was not read"
        return Answer("yes", f"{answer.why}; {clause}", answer.needs)
    return answer


def _int_quantized(held: Held, activations: bool) -> Answer:
    if not activations:
        return Answer(
            "no",
            "it runs int8 weights of this layout with int8 activations alone, and the config asks "
            "for none",
        )
    odd = named(
        held.linears,
        lambda linear: (
            linear.scheme is None
            or linear.scheme.bits != 8
            or not linear.scheme.symmetric
            or linear.scheme.group_size != PER_CHANNEL
        ),
    )
    if odd:
        return Answer(
            "no", f"its W8A8 takes symmetric int8 with a scale a row or a tensor, not {odd}"
        )
    return Answer("yes", "int8 weights multiplied by int8 activations (W8A8)")


def _order(held: Held, release: int, by_group: bool) -> Answer | None:
    """What is refused or misread because of a column order; None where it is not in the way."""
    disordered = ordered(held)
    if by_group and release >= 30:
        if disordered:
            what = f"and the columns of {disordered} do have an order of their own"
        else:
            what = "though every g_idx here is the plain one and it could run"
        return Answer("no", f"it refuses actorder group since 0.30 (vllm#54809), {what}")
    if disordered and not by_group:
        if release >= 30:
            return Answer(
                "wrong", f"it drops every g_idx and reads {disordered} in the plain order"
            )
        return Answer(
            "no",
            f"the config states no actorder, so the g_idx of {disordered} has no place (inferred)",
        )
    return None


def _widths(held: Held, release: int, device: str) -> Answer:
    bits = {scheme.bits for scheme in schemes_of(held)}
    if held.padded_words:
        return Answer(
            "no",
            f"{listed(bits - {2, 4, 8})}-bit codes are in words padded to whole codes, as "
            "compressed-tensors up to 0.17.1 wrote them, and it wants them dense: shapes differ",
        )
    if device == "CPU":
        if refusal := first_refusal(held, CPU):
            return Answer("no", refusal)
        if ordered(held) and asymmetric(held):
            return Answer("no", "its CPU kernel took a column order or zero points, not both")
        order = ", in the order of g_idx" if ordered(held) else ""
        return Answer("yes", f"its CPU kernel for packed 4-bit weights{order}", ON_CPU)
    refusal = first_refusal(held, MARLIN)
    if refusal is None:
        order = ", which reorders activations by g_idx" if ordered(held) else ""
        return Answer("yes", f"its Marlin kernel{order}", ON_CUDA)
    uneven = asymmetric(held)
    if release >= 32 or (release >= 27 and not (uneven and bits - {4, 8})):
        return Answer(
            "yes",
            f"its Humming kernels where Marlin refuses ({refusal}); their own limits were not read",
            (*ON_CUDA, "humming-kernels"),
        )
    if bits - {4, 8}:
        side = "with zero points " if release >= 27 else ""
        return Answer("no", f"before 0.{32 if side else 27} it takes 4 and 8 bits {side}alone, not "
                      f"{listed(bits - {4, 8})}")  # fmt: skip
    if machete_takes(held):
        return Answer(
            "yes", f"Hopper's Machete kernel alone ({refusal})", ("compute capability 9.0",)
        )
    if exllama_takes(held):
        needs = (*ON_CUDA, *half_if_needed(held))
        return Answer("yes", f"its exllama kernel, in fp16 ({refusal})", needs)
    return Answer("no", refusal)


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in found if isinstance(group, Mapping)]


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, Mapping) else {}
