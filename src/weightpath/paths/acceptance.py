"""The acceptance table: which runtimes load a checkpoint, why not, and the conversion that helps.

One row a runtime, device and span of releases; neighbouring releases that do the same share a row.
The conversion is found and not looked up: of the formats that `weightpath convert` writes, the
first that the same runtime loads as it would then be, those that keep every weight first. So what
is advised loads, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable

from weightpath.paths.converted import TARGETS, after_convert
from weightpath.paths.held import Answer, Held, Verdict
from weightpath.paths.other_accepts import (
    llama_cpp_answer,
    transformers_answer,
    weightpath_answer,
)
from weightpath.paths.runtimes import find_runtime
from weightpath.paths.vllm_accepts import DEVICES, FIRST_OF_SPAN, span_label, vllm_answer

Judge = Callable[[Held], Answer]
_RANK: dict[bool | None, int] = {True: 0, None: 1, False: 2}
"""Exact conversions before those that depend on values, and these before lossy ones."""

OTHERS: tuple[tuple[str, str, Judge, str], ...] = (
    ("transformers", ">= 5.0", transformers_answer, TARGETS[0]),
    ("llama.cpp", "any", llama_cpp_answer, "gguf"),
    ("weightpath", find_runtime("weightpath").read_from, weightpath_answer, TARGETS[0]),
)
"""Runtime, versions, what it does, and the format that is its own, where one row is enough."""


def accepts(held: Held) -> tuple[Verdict, ...]:
    """The table: vLLM on CUDA and CPU by release, transformers 5, llama.cpp, weightpath itself."""
    rows: list[Verdict] = []
    for device in DEVICES:
        rows.extend(_vllm_rows(held, device))
    for name, versions, judge, own in OTHERS:
        rows.append(_row(name, versions, "", judge, held, own))
    return tuple(rows)


def _vllm_rows(held: Held, device: str) -> list[Verdict]:
    """A row for every run of spans that do the same."""
    rows: list[tuple[int, Verdict]] = []
    for first in FIRST_OF_SPAN:
        row = _row("vLLM", "", device, lambda other, at=first: vllm_answer(other, at, device), held)
        if not rows or rows[-1][1] != row:
            rows.append((first, row))
    ends = [first for first, _ in rows[1:]]
    return [
        _with_versions(row, span_label(first, end))
        for (first, row), end in zip(rows, (*ends, None), strict=True)
    ]


def _row(
    runtime: str, versions: str, device: str, judge: Judge, held: Held, own: str = TARGETS[0]
) -> Verdict:
    """One runtime's answer, with the conversion that would make the file load.

    own: the target whose refusal is told where no conversion helps.
    """
    answer = judge(held)
    if answer.loads == "yes":
        return Verdict(runtime, versions, device, "yes", answer.why, answer.needs)
    fit, refusals = [], {}
    for target in TARGETS:
        made = after_convert(held, target)
        if isinstance(made, str):
            refusals[target] = made
            continue
        after, lossless = made
        then = judge(after)
        if then.loads == "yes":
            fit.append((_RANK[lossless], target, lossless))
        else:
            refusals[target] = f"as {target}, {then.why}"
    if not fit:
        why = f"{answer.why}; no convert helps: {refusals[own]}"
        return Verdict(runtime, versions, device, answer.loads, why, answer.needs)
    _, target, lossless = min(fit, key=lambda found: found[0])
    return Verdict(runtime, versions, device, answer.loads, answer.why, answer.needs,
                   f"--to {target}", lossless)  # fmt: skip


def _with_versions(row: Verdict, versions: str) -> Verdict:
    return Verdict(row.runtime, versions, row.device, row.loads, row.why, row.needs, row.convert,
                   row.lossless)  # fmt: skip
