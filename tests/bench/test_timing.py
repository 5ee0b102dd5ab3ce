from __future__ import annotations

import pytest

from weightpath.bench.timing import Ratio, Timing, in_turns, ratio, sample_in_turns
from weightpath.errors import BadRequest


class Clock:
    """A clock that moves only when something is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float):
        """A function that takes the given times, call after call, the last one for ever."""
        left = list(seconds)

        def function() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return function


def test_functions_run_in_turns_and_the_order_alternates():
    calls: list[str] = []
    in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warmup=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"


def test_a_timing_has_the_median_and_the_extremes_of_its_rounds_without_the_warm_up():
    clock = Clock()
    found = in_turns({"a": clock.takes(100, 3, 1, 2, 9, 4)}, rounds=5, clock=clock)
    assert found["a"] == Timing(median=3, low=1, high=9, samples=(3, 1, 2, 9, 4))


def test_short_calls_are_repeated_to_fill_the_minimum():
    clock = Clock()
    calls: list[int] = []
    step = clock.takes(0.01)

    def function() -> None:
        calls.append(1)
        step()

    found = in_turns({"a": function}, rounds=2, minimum_seconds=0.1, clock=clock)
    assert len(calls) == 1 + 2 * 10
    assert found["a"].median == pytest.approx(0.01)


def test_the_budget_ends_the_rounds_but_never_before_two():
    clock = Clock()
    found = in_turns({"a": clock.takes(1)}, rounds=50, budget_seconds=5.5, clock=clock)
    assert len(found["a"].samples) == 5
    found = in_turns({"a": clock.takes(100)}, rounds=50, budget_seconds=1, clock=clock)
    assert len(found["a"].samples) == 2


def test_what_functions_return_is_kept_by_round():
    count = iter(range(100))
    found = sample_in_turns({"a": lambda: next(count), "b": lambda: next(count)}, rounds=3)
    assert found == {"a": [0, 3, 4], "b": [1, 2, 5]}


def test_a_ratio_is_the_median_of_the_rounds_not_the_ratio_of_the_medians():
    a, b = Timing.of([2.0, 30.0, 8.0]), Timing.of([1.0, 10.0, 2.0])
    assert ratio(a, b) == Ratio(median=3.0, low=2.0, high=4.0, decided=True)
    assert ratio(b, a).decided


def test_rounds_that_disagree_leave_the_ratio_undecided():
    found = ratio(Timing.of([1.0, 2.1, 3.0]), Timing.of([1.1, 2.0, 2.0]))
    assert not found.decided
    assert "within the spread" in str(found)
    assert "spread" not in str(ratio(Timing.of([2.0, 2.0]), Timing.of([1.0, 1.0])))


def test_bad_requests_name_the_numbers():
    with pytest.raises(BadRequest, match="1 rounds; a spread needs at least 2"):
        in_turns({"a": lambda: None}, rounds=1)
    with pytest.raises(BadRequest, match="nothing to measure"):
        in_turns({}, rounds=2)
    with pytest.raises(BadRequest, match="warm up"):
        in_turns({"a": lambda: None}, rounds=2, warmup=0, minimum_seconds=1)
    with pytest.raises(BadRequest, match="2 samples in s to 3 in s"):
        ratio(Timing.of([1.0, 2.0]), Timing.of([1.0, 2.0, 3.0]))
    with pytest.raises(BadRequest, match="in turns"):
        ratio(Timing.of([1.0, 2.0]), Timing.of([1.0, 2.0], "tokens/s"))
