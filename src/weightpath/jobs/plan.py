"""Decide what a model becomes on a device: the weight path, then every tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from weightpath.checkpoints.store import Checkpoint
from weightpath.device.profile import HardwareProfile
from weightpath.errors import BadRequest
from weightpath.jobs.memory_fit import PlanFit, plan_fit
from weightpath.jobs.shapes import ConfigOnly, config_shapes, model_shapes
from weightpath.paths.evidence import Evidence
from weightpath.paths.select import Selection, select_weight_path
from weightpath.paths.tensors import TensorPlan, plan_tensors
from weightpath.scheme import INT8, Scheme


@dataclass(frozen=True)
class Plan:
    """The path chosen for a device (None where a scheme was given instead) and the tensors'
    schemes. `activation_bits` is what the 4-bit linears run with. fit: what it takes of the
    device's memory, and what a decode step reads."""

    model: str
    selection: Selection | None
    tensors: TensorPlan
    activation_bits: int
    fit: PlanFit | None = None

    @property
    def path_name(self) -> str:
        """The path's name, or "" where a scheme was given."""
        return self.selection.path.name if self.selection else ""

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of most linears, with the activations it runs with; None where all stay."""
        counts = Counter(
            item.scheme
            for item in self.tensors.decisions
            if item.scheme is not None and item.shape.role == "linear"
        )
        if not counts:
            return None
        chosen = counts.most_common(1)[0][0]
        return INT8 if chosen == INT8 else chosen.with_activations(self.activation_bits)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        chosen = self.selection.to_dict() if self.selection else None
        return {
            "model": self.model,
            "selection": chosen,
            "activation_bits": self.activation_bits,
            "tensors": self.tensors.to_dict(),
            "fit": None if self.fit is None else self.fit.to_dict(),
        }


def plan_model(
    model: str,
    checkpoint: Checkpoint | ConfigOnly,
    profile: HardwareProfile,
    priority: str = "speed",
    runtime: str = "weightpath",
    head_bits: int = 8,
    group_size: int | None = None,
    evidence: Evidence | None = None,
    context: int | None = None,
    sequences: int = 1,
    kv_dtype: str = "auto",
) -> Plan:
    """The path that suits `profile`, what it makes of every tensor of the checkpoint, and whether
    that fits its memory with `sequences` sequences of `context` tokens (jobs/memory_fit.py)."""
    if isinstance(checkpoint, ConfigOnly):
        shapes = config_shapes(checkpoint.config, checkpoint.where)
    else:
        shapes = model_shapes(checkpoint)
    selection = select_weight_path(profile, priority, runtime, shapes, evidence)
    scheme = selection.path.scheme
    tensors = plan_tensors(shapes, scheme, head_bits, group_size, runtime, profile)
    fit = plan_fit(
        checkpoint.config, checkpoint.where, shapes, tensors, profile, runtime, context, sequences,
        kv_dtype,
    )  # fmt: skip
    return Plan(model, selection, tensors, scheme.activation_bits if scheme else 16, fit)


def plan_scheme(
    model: str,
    checkpoint: Checkpoint,
    scheme: Scheme,
    head_bits: int = 8,
    runtime: str = "weightpath",
    profile: HardwareProfile | None = None,
) -> Plan:
    """The tensors' schemes where the user names the linears' scheme.

    A runtime other than weightpath bounds them by what it loads on `profile`. BadRequest for a
    scheme that no module runs: linears are int8 per channel or 4-bit.
    """
    if scheme.bits != 4 and scheme.with_activations(16) != INT8:
        raise BadRequest(
            f"scheme {scheme.name}: this version makes int8 (w8) and 4-bit linears (w4g64, w4g128-asym, ...)"
        )
    group_size = scheme.group_size if scheme.bits == 4 else None
    bound = None if runtime == "weightpath" else profile
    tensors = plan_tensors(model_shapes(checkpoint), scheme, head_bits, group_size, runtime, bound)
    return Plan(model, None, tensors, scheme.activation_bits)
