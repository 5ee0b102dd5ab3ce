"""A job's results as the plain dicts that the report and the model card are made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weightpath.bench.decode import SpeedResult
from weightpath.device.profile import HardwareProfile, to_dict
from weightpath.engine.generate import Answer
from weightpath.jobs.inspect import Inspection
from weightpath.jobs.plan import Plan
from weightpath.jobs.verify import Verification
from weightpath.version import __version__


def report_data(
    model: str,
    profile: HardwareProfile,
    plan: Plan,
    inspection: Inspection,
    verification: Verification | None = None,
    speed: SpeedResult | None = None,
    question: str = "",
    reply: Answer | None = None,
    command: str = "",
) -> dict[str, Any]:
    """What the report and the model card are made from (see report.data)."""
    data: dict[str, Any] = {
        "model": model,
        "scheme": plan.path_name,
        "version": __version__,
        "command": command,
        "base_model": Path(model).name,
        "device": to_dict(profile),
        "plan": plan_section(plan),
        "written": written_section(inspection),
    }
    if verification is not None:
        data["fidelity"] = {
            "text": verification.text,
            "summary": verification.fidelity.to_dict(),
            "noise_floor": verification.noise_floor.to_dict(),
            "greedy": verification.greedy.to_dict(),
        }
    if speed is not None:
        data["speed"] = speed.to_dict()
    if reply is not None:
        data["answer"] = {"prompt": question, "text": reply.text}
    return data


def plan_section(plan: Plan) -> dict[str, Any]:
    """The plan as the report reads it: tensors grouped by scheme and reason."""
    groups: dict[tuple[str, str, str], int] = {}
    for item in plan.tensors.decisions:
        name = item.scheme.name if item.scheme else "as it is"
        key = (item.shape.role.replace("_", " "), name, item.reason)
        groups[key] = groups.get(key, 0) + 1
    tensors = [
        {"what": role, "scheme": scheme, "count": count, "reason": reason}
        for (role, scheme, reason), count in groups.items()
    ]
    section: dict[str, Any] = {
        "chosen": plan.path_name,
        "reasons": [],
        "rejected": [],
        "tensors": tensors,
    }
    if plan.selection is not None:
        section["reasons"] = list(plan.selection.reasons)
        section["rejected"] = [
            {"name": name, "reason": why} for name, why in plan.selection.rejected
        ]
    return section


def written_section(inspection: Inspection) -> dict[str, Any]:
    """What was written, as the report reads it."""
    by_scheme: dict[str, int] = {}
    for kind in inspection.kinds:
        by_scheme[kind.scheme] = by_scheme.get(kind.scheme, 0) + kind.tensors
    return {
        "folder": inspection.where,
        "tensors": inspection.tensors,
        "bytes": inspection.file_bytes,
        "linear_bits_per_weight": inspection.linear_bits_per_weight,
        "file_bits_per_weight": inspection.file_bits_per_weight,
        "by_scheme": by_scheme,
    }


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name and move into place."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
