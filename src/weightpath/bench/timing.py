"""Times of several things measured in turns in one run: A B, B A, A B, ...

A machine's speed drifts (clock, heat, neighbours), so two things are compared only through rounds
that hold one sample of each, close together, in an order that alternates:

    ratio = median over rounds of a[r] / b[r]

It is undecided where the rounds disagree about which is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

from weightpath.errors import BadRequest

MINIMUM_ROUNDS = 2
"""Fewer rounds have no spread, and their order favours one side."""

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Samples of one thing, one a round: median, lowest and highest. `unit` is theirs."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    unit: str = "s"

    @classmethod
    def of(cls, samples: list[float], unit: str = "s") -> Timing:
        return cls(median(samples), min(samples), max(samples), tuple(samples), unit)


@dataclass(frozen=True)
class Ratio:
    """Median, lowest and highest of the per-round ratios; `decided` if all lie on one side of 1."""

    median: float
    low: float
    high: float
    decided: bool

    def __str__(self) -> str:
        text = f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"
        return text if self.decided else f"{text}, within the spread"


def in_turns(
    functions: dict[str, Callable[[], Any]],
    rounds: int = 5,
    warmup: int = 1,
    *,
    minimum_seconds: float = 0.0,
    budget_seconds: float | None = None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Timing]:
    """Seconds per call of each function, in turns.

    Every function first runs `warmup` times, untimed. Where a call is shorter than
    `minimum_seconds`, a sample is the mean of as many calls as fill it. After MINIMUM_ROUNDS, no
    round is begun that would end after `budget_seconds`. A function that starts work on an
    accelerator must wait for it itself.
    """
    samples = sample_in_turns(
        {
            name: sampler(function, warmup, minimum_seconds=minimum_seconds, clock=clock)
            for name, function in functions.items()
        },
        rounds,
        budget_seconds=budget_seconds,
        clock=clock,
    )
    return {name: Timing.of(values) for name, values in samples.items()}


def sampler(
    function: Callable[[], Any],
    warmup: int = 1,
    *,
    minimum_seconds: float = 0.0,
    clock: Callable[[], float] = perf_counter,
) -> Callable[[], float]:
    """A function that times one sample of another: seconds a call, for `sample_in_turns`.

    Runs it `warmup` times, untimed, and sizes a sample by the last: as many calls as fill
    `minimum_seconds`, at least one.
    """
    if minimum_seconds > 0 and warmup < 1:
        raise BadRequest("timing: minimum_seconds with no warm-up call to size by; warm up once")
    seconds = 0.0
    for _ in range(warmup):
        start = clock()
        function()
        seconds = clock() - start
    repeats = max(1, round(minimum_seconds / max(seconds, 1e-9)))

    def sample() -> float:
        start = clock()
        for _ in range(repeats):
            function()
        return (clock() - start) / repeats

    return sample


def sample_in_turns(
    functions: dict[str, Callable[[], T]],
    rounds: int,
    *,
    budget_seconds: float | None = None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[T]]:
    """What each function returned, a value a round, called in turns in alternating order.

    For functions that time a part of themselves. Rounds and budget as `in_turns`.
    """
    if not functions:
        raise BadRequest("timing: nothing to measure; give at least one function")
    if rounds < MINIMUM_ROUNDS:
        raise BadRequest(f"timing: {rounds} rounds; a spread needs at least {MINIMUM_ROUNDS}")
    values: dict[str, list[T]] = {name: [] for name in functions}
    begin = clock()
    for done in range(rounds):
        spent = clock() - begin
        if (
            budget_seconds is not None
            and done >= MINIMUM_ROUNDS
            and spent * (done + 1) / done > budget_seconds
        ):
            break
        names = list(functions)
        for name in names if done % 2 == 0 else reversed(names):
            values[name].append(functions[name]())
    return values


def ratio(a: Timing, b: Timing) -> Ratio:
    """a over b, round by round. Both must come from the same rounds."""
    if len(a.samples) != len(b.samples) or a.unit != b.unit:
        raise BadRequest(
            f"ratio of {len(a.samples)} samples in {a.unit} to {len(b.samples)} in {b.unit}; "
            "compare things that were measured in turns"
        )
    each = [x / y for x, y in zip(a.samples, b.samples, strict=True)]
    return Ratio(median(each), min(each), max(each), decided=min(each) > 1 or max(each) < 1)
