"""Cliffs of benchmarks/gemm_ladder.py: what counts as one, on times made up by hand."""

from __future__ import annotations

import pytest

from gemm_ladder import cliffs
from weightpath.bench.timing import Timing


def times(seconds: dict[int, float], spread: float = 0.0) -> dict[int, Timing]:
    """Three rounds of each; `spread` widens the first one."""
    return {m: Timing.of([s * (1 - spread), s, s]) for m, s in seconds.items()}


def test_a_line_that_falls_and_then_lies_flat_has_no_cliff() -> None:
    assert cliffs("W4A8", times({3: 3.0, 4: 3.2, 5: 3.5, 6: 3.6, 8: 4.8, 12: 7.2, 16: 9.6})) == []


def test_rows_that_cost_more_than_the_next_number_of_them_are_a_cliff() -> None:
    (found,) = cliffs("W4A8", times({6: 6.0, 7: 6.9, 8: 6.0, 9: 6.1}))
    assert (found.rows, found.instead) == (7, 8)
    assert found.slower.median == pytest.approx(6.9 / 6.0)
    assert "sure" in str(found)


def test_rows_that_cost_more_a_row_than_fewer_of_them_are_a_cliff() -> None:
    (found,) = cliffs("W4A16", times({4: 4.0, 5: 6.0, 6: 6.1}))
    assert (found.rows, found.instead) == (5, 4)
    assert found.slower.median == pytest.approx(6.0 / 5.0)


def test_rounds_that_disagree_are_said_to() -> None:
    own = {**times({6: 6.0, 8: 6.0, 9: 6.2}), 7: Timing.of([5.0, 6.9, 6.9])}
    (found,) = cliffs("W4A8", own)
    assert "within the spread" in str(found)


def test_the_ends_and_what_lies_outside_4_to_64_are_not_checked() -> None:
    assert cliffs("W4A8", times({1: 1.0, 2: 9.0, 3: 9.0, 4: 9.1})) == []
    assert cliffs("W4A8", times({64: 64.0, 65: 99.0, 66: 99.0})) == []
