"""Whether what a plan makes fits its device, with the context and sequences that are asked for.

The weights are counted in the format that the plan's runtime reads, the cache from the model's
config (kv.py), and both against the device's memory (paths/memory_fit.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightpath.device.profile import HardwareProfile
from weightpath.errors import BadCheckpoint, BadRequest
from weightpath.jobs.kv import completed
from weightpath.paths.kv_budget import KVBudget, kv_budget
from weightpath.paths.kv_fields import section_at, text_path
from weightpath.paths.memory_fit import MemoryFit, memory_fit
from weightpath.paths.tensors import ModelShapes, TensorPlan
from weightpath.paths.weight_bytes import WeightBytes, decode_step_bytes, weight_bytes

USUAL_CONTEXT = 4096
"""Tokens where none are asked for, if the model was made for so many."""
BLOCK_SIZES = {"vllm": 16}
"""Tokens of a block of a runtime's cache, where it has blocks."""


@dataclass(frozen=True)
class PlanFit:
    """The fit, the bytes it rests on, and "" or why no cache is counted (cache is then None)."""

    fit: MemoryFit
    weights: WeightBytes
    cache: KVBudget | None
    note: str = ""

    @property
    def step_bytes(self) -> int:
        """What one decode step of all sequences reads at the context: weights and cache."""
        return decode_step_bytes(self.weights, self.cache)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.fit.to_dict() | {
            "weight_bytes": self.weights.to_dict(),
            "cache": None if self.cache is None else self.cache.to_dict(),
            "step_bytes": self.step_bytes,
            "note": self.note,
        }


def plan_fit(
    config: Mapping[str, Any],
    where: str,
    shapes: ModelShapes,
    tensors: TensorPlan,
    profile: HardwareProfile,
    runtime: str = "weightpath",
    context: int | None = None,
    sequences: int = 1,
    kv_dtype: str = "auto",
) -> PlanFit:
    """Whether a plan's tensors fit a device beside their cache.

    context None: 4096 tokens, or as many as the model was made for; a config whose cache cannot
    be counted (an encoder) is then fitted without one, and the reason returned. BadCheckpoint for
    the same where a context was asked, BadRequest for numbers out of range.
    """
    if sequences < 1 or (context is not None and context < 1):
        raise BadRequest(f"{context} tokens, {sequences} sequences: use whole numbers above 0")
    whole, _ = completed(config, where)
    longest = section_at(whole, text_path(whole)).get("max_position_embeddings")
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        longest = None
    tokens = context or min(longest or USUAL_CONTEXT, USUAL_CONTEXT)

    def budget(count: int) -> KVBudget:
        return kv_budget(whole, count, sequences, kv_dtype,
                         block_size=BLOCK_SIZES.get(runtime, 1), where=where)  # fmt: skip

    found: KVBudget | None = None
    why = ""
    try:
        found = budget(tokens)
    except BadCheckpoint as problem:
        if context is not None:
            raise
        why = f"no KV cache is counted: {problem}"
    weights = weight_bytes(
        shapes, tensors, "gguf" if runtime == "llama.cpp" else "compressed-tensors"
    )
    fit = memory_fit(
        profile, shapes, weights.resident_bytes,
        (lambda count: budget(count).total_bytes) if found else (lambda count: 0),
        tokens, sequences, found.kv_dtype if found else "none", longest,
    )  # fmt: skip
    return PlanFit(fit, weights, found, why)
