"""Time against rows of x, and whether any number of rows would do better as another.

For neighbours M- < M < M+ of the ladder and t(M) the time of one call, M is a cliff where

    t(M) > min( t(M-) * M / M-,  t(M+) )

that is, where M rows cost more than in calls of the smaller neighbour, at its price a row, or more
than the larger neighbour with the rows that are missing filled up. (The other reading, time a row
at most that of *both* neighbours, would forbid a line that falls.) The ratio of the two sides is
taken round by round, in one run; a cliff is `sure` where every round agrees. Checked from 4 to 64.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weightpath.bench.timing import Ratio, Timing

CHECKED = range(4, 65)
NOISE = 1.02
"""Medians this near to 1 are not called cliffs."""


@dataclass(frozen=True)
class Cliff:
    """Rows that would be faster as others: how many times slower they are, round by round."""

    name: str
    rows: int
    instead: int  # the neighbour that does better
    slower: Ratio

    def __str__(self) -> str:
        how = "sure" if self.slower.low > 1 else "within the spread"
        return (
            f"cliff: {self.name} at {self.rows} rows, {self.slower.median:.2f}x the time by "
            f"{self.instead} ({self.slower.low:.2f} to {self.slower.high:.2f}, {how})"
        )


def cliffs(name: str, times: dict[int, Timing]) -> list[Cliff]:
    """Every cliff of one product. times: rows to the time of a call, all from the same rounds."""
    ladder = sorted(times)
    found = []
    for below, rows, above in zip(ladder, ladder[1:], ladder[2:], strict=False):
        if rows not in CHECKED:
            continue
        own = times[rows].samples
        split = [t * rows / below for t in times[below].samples]
        filled = list(times[above].samples)
        worst = max(
            (_slower(own, split), below), (_slower(own, filled), above), key=lambda x: x[0].median
        )
        if worst[0].median > NOISE:
            found.append(Cliff(name, rows, worst[1], worst[0]))
    return found


def _slower(own: tuple[float, ...], other: list[float]) -> Ratio:
    each = sorted(a / b for a, b in zip(own, other, strict=True))
    return Ratio(each[len(each) // 2], each[0], each[-1], each[0] > 1 or each[-1] < 1)


def show(title: str, times: dict[str, dict[int, Timing]]) -> None:
    """Microseconds a row, a line for every number of rows; '-' where one was not measured."""
    ladder = sorted({rows for found in times.values() for rows in found})
    print(f"{title}, us a row (lowest to highest round in brackets)")
    print("   M  " + "".join(f"{name:>27}" for name in times))
    for rows in ladder:
        line = ""
        for found in times.values():
            if rows not in found:
                line += f"{'-':>27}"
                continue
            time = found[rows]
            low, middle, high = (1e6 * t / rows for t in (time.low, time.median, time.high))
            line += f"{f'{middle:.1f} ({low:.1f} to {high:.1f})':>27}"
        print(f"{rows:4}  {line}", flush=True)


def record(times: dict[str, dict[int, Timing]], found: list[Cliff]) -> dict[str, Any]:
    """The same as plain dicts: seconds a call by rows, and the cliffs."""
    return {
        "seconds": {
            name: {rows: [t.median, t.low, t.high] for rows, t in sorted(by_rows.items())}
            for name, by_rows in times.items()
        },
        "cliffs": [asdict(one) for one in found],
    }
