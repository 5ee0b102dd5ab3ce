"""What a report and a model card are made from: plain dicts, every section optional.

Records are passed as their own `to_dict()` (or `dataclasses.asdict`); the keys below are those
that are read. A section that is absent is left out of the page, not shown empty.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Rejected(TypedDict):
    """A path that was not taken, and why."""

    name: str
    reason: str


class TensorPlan(TypedDict, total=False):
    """One line of what happens to which tensors: "linears", "w4g64", 210, "64 divides 576"."""

    what: str
    scheme: str
    count: int
    reason: str


class Plan(TypedDict, total=False):
    chosen: str
    reasons: list[str]
    rejected: list[Rejected]
    tensors: list[TensorPlan]


class Written(TypedDict, total=False):
    folder: str
    tensors: int
    bytes: int
    linear_bits_per_weight: float
    file_bits_per_weight: float
    by_scheme: dict[str, int]  # scheme name -> number of tensors


class Fidelity(TypedDict, total=False):
    text: str  # what it was measured on, as read_documents or default_documents describe it
    ran: str  # in words, what ran the low-bit model, with its cache and activations
    summary: dict[str, Any]  # fidelity.metrics.FidelitySummary
    noise_floor: dict[str, Any] | None  # FidelitySummary of the reference against itself
    greedy: dict[str, Any] | None  # fidelity.greedy.GreedyResult


class Answer(TypedDict):
    prompt: str
    text: str


class RunWith(TypedDict, total=False):
    """One runtime that loads what was written."""

    name: str
    command: str
    note: str
    language: str  # of the command; "sh" where absent


class ReportData(TypedDict, total=False):
    model: str  # what was asked for: a folder, a hub id, "demo"
    scheme: str
    version: str  # weightpath's own
    command: str  # what was typed
    base_model: str  # hub id of the source, where known
    license: str  # of the source, where its files told one
    device: dict[str, Any]  # device.profile.HardwareProfile
    plan: Plan
    written: Written
    fidelity: Fidelity
    speed: dict[str, Any]  # bench.decode.SpeedResult
    answer: Answer
    run_with: list[RunWith]  # default: card.ways_to_run(data)
