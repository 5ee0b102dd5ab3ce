"""A job's results as the plain dicts that the report and the model card are made from."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from weightpath.bench.decode import SpeedResult
from weightpath.checkpoints.demo import DEMO_HUB_ID
from weightpath.device.profile import HardwareProfile, to_dict
from weightpath.engine.generate import Answer
from weightpath.jobs.inspect import Inspection
from weightpath.jobs.plan import Plan
from weightpath.jobs.verify import Verification
from weightpath.report import data as report_data_types
from weightpath.report.data import ReportData
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
) -> ReportData:
    """What the report and the model card are made from (see report.data)."""
    data: ReportData = {
        "model": model,
        "scheme": plan.path_name,
        "version": __version__,
        "command": command,
        "base_model": base_model(model),
        "device": to_dict(profile),
        "plan": plan_section(plan),
        "written": written_section(inspection),
    }
    if verification is not None:
        data["fidelity"] = {
            "text": verification.text,
            "ran": verification.ran,
            "summary": verification.fidelity.to_dict(),
            "noise_floor": verification.noise_floor.to_dict(),
            "greedy": verification.greedy.to_dict(),
        }
    if speed is not None:
        data["speed"] = speed.to_dict()
    if reply is not None:
        data["answer"] = {"prompt": question, "text": reply.text}
    return data


def command_line(
    verb: str,
    arguments: str,
    head_bits: int = 8,
    priority: str = "speed",
    runtime: str = "weightpath",
    group_size: int | None = None,
    scheme: str | None = None,
) -> str:
    """What was typed, with the options that are not at their default."""
    options = {
        "--scheme": scheme,
        "--head": head_bits if head_bits != 8 else None,
        "--priority": priority if priority != "speed" else None,
        "--runtime": runtime if runtime != "weightpath" else None,
        "--group-size": group_size,
    }
    words = [f"{name} {value}" for name, value in options.items() if value is not None]
    return " ".join([f"weightpath {verb} {arguments}", *words])


def base_model(model: str) -> str:
    """The source's name for a card: a hub id where it is one, else a folder's or file's last name."""
    if model == "demo":
        return DEMO_HUB_ID
    return Path(model).name if Path(model).expanduser().exists() else model


def plan_section(plan: Plan) -> report_data_types.Plan:
    """The plan as the report reads it: tensors grouped by scheme and reason."""
    groups = Counter(
        (d.shape.role.replace("_", " "), d.scheme.name if d.scheme else "as it is", d.reason)
        for d in plan.tensors.decisions
    )
    section: report_data_types.Plan = {
        "chosen": plan.path_name,
        "tensors": [
            {"what": role, "scheme": scheme, "count": count, "reason": reason}
            for (role, scheme, reason), count in groups.items()
        ],
    }
    if plan.selection is not None:
        section["reasons"] = list(plan.selection.reasons)
        section["rejected"] = [{"name": n, "reason": why} for n, why in plan.selection.rejected]
    return section


def written_section(inspection: Inspection) -> report_data_types.Written:
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
