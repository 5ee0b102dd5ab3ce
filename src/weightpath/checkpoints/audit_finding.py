"""A finding: one thing that an audit saw in a checkpoint, and many of them told in few lines.

    error    the model would be wrong, or cannot be loaded from these files
    warning  some runtime misreads it or refuses it
    note     worth knowing; nothing is wrong

Names come from the files themselves, so a line never holds control characters and is cut short.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from weightpath.errors import BadCheckpoint, BadTensor, printable

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""
_LONGEST = 160


@dataclass(frozen=True)
class Finding:
    """One thing seen. tensor: a tensor's, a linear's or a file's name. problem: what was found and
    wanted, with numbers. mend: what the user can do. kind: the few words under which findings that
    are alike are counted together. unit: what they are counted in.
    """

    severity: Severity
    tensor: str
    problem: str
    mend: str
    kind: str = ""
    unit: str = "tensor"

    @property
    def line(self) -> str:
        """All of it as one printable line."""
        return f"{self.severity}: {shown(self.tensor)}: {shown(self.problem, 600)}; {self.mend}"


def finding_of(error: BadTensor | BadCheckpoint) -> Finding:
    """What a reader refused, as an error among the findings."""
    name = error.name if isinstance(error, BadTensor) else error.where
    return Finding("error", name, error.problem, error.mend, "cannot be read", "place")


def require_sound(found: Iterable[Finding], where: str) -> None:
    """BadCheckpoint for the first error among findings, with how many more there are."""
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        first = errors[0]
        more = f" ({len(errors) - 1} more such findings)" if len(errors) > 1 else ""
        raise BadCheckpoint(where, f"{first.tensor}: {first.problem}{more}", first.mend)


def summarise(
    findings: Iterable[Finding], limit: int = 20, linears: int | None = None
) -> tuple[str, ...]:
    """At most `limit` lines, worst first: findings of one kind as one line with their number.

    "warning: zero scales in 32 of 210 linears, first model.layers.0.mlp.up_proj: ...; ..."
    linears: how many were audited, for the kinds that are counted in linears. What goes beyond the
    limit is counted in the last line.
    """
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        kind = finding.kind or re.sub(r"[\d.,]+", "#", finding.problem)
        alike.setdefault((finding.severity, kind), []).append(finding)
    ordered = sorted(alike.values(), key=lambda found: SEVERITIES.index(found[0].severity))
    lines = [_line_of(found, linears) for found in ordered]
    if len(lines) <= limit:
        return tuple(lines)
    kept = max(limit - 1, 0)
    left = ordered[kept:]
    counts = [sum(found[0].severity == severity for found in left) for severity in SEVERITIES]
    told = ", ".join(
        f"{count} {severity}{'s' if count > 1 else ''}"
        for count, severity in zip(counts, SEVERITIES, strict=True)
        if count
    )
    return (*lines[:kept], f"and {len(left)} more kinds of finding ({told})")


def shown(text: str, longest: int = _LONGEST) -> str:
    """A text from a file as one printable piece, cut in the middle where it is longer."""
    return printable(text, longest)


def plural(count: int, what: str) -> str:
    """ "1 tensor", "2 tensors"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _line_of(found: list[Finding], linears: int | None) -> str:
    first = found[0]
    if len(found) == 1:
        return first.line
    whole = f" of {linears}" if first.unit == "linear" and linears else ""
    kind = f"{first.kind} in " if first.kind else ""
    return (
        f"{first.severity}: {kind}{len(found)}{whole} {first.unit}s, first {shown(first.tensor)}: "
        f"{shown(first.problem, 600)}; {first.mend}"
    )
