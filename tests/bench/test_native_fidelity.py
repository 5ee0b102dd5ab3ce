"""Partings of greedy texts: where they are, and what is called a tie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_fidelity import LENGTH, agreed, changes, parting
from peer_agreement import LENGTH as PLACES
from peer_agreement import Case, interval, measure

V = 8


def text(
    favoured: list[int], heights: list[float], length: int = LENGTH
) -> tuple[list[int], Tensor]:
    """A text whose logits are a favoured token's height over 1.0 of token 0; the last go on."""
    logits = torch.zeros(length, V)
    logits[:, 0] = 1.0
    for i in range(length):
        logits[i, favoured[min(i, len(favoured) - 1)]] = heights[min(i, len(heights) - 1)]
    return logits.argmax(-1).tolist(), logits


def test_texts_that_are_equal_have_no_parting_and_their_margins_change_by_what_they_do() -> None:
    first, other = text([3], [2.0]), text([3], [2.5, 1.75])
    assert agreed(first, other) == LENGTH
    assert parting("p", first, other) is None
    assert changes(first, other).tolist() == pytest.approx([0.5] + [0.25] * (LENGTH - 1))


def test_a_parting_is_at_the_first_difference_with_the_references_margin_there() -> None:
    first, other = text([3, 3, 5, 6], [2.0, 2.0, 1.3, 2.0]), text([3, 3, 5], [2.0, 2.1, 0.9])
    found = parting("p", first, other)
    assert found is not None
    assert (found.prompt, found.agreed) == ("p", 2)
    assert found.margin == pytest.approx(0.3)
    assert found.change == pytest.approx(0.4)
    assert found.largest == pytest.approx(0.4)
    assert changes(first, other).tolist() == pytest.approx([0.0, 0.1])


def test_a_product_is_measured_by_its_logits_at_every_place(capsys: Any) -> None:
    ids, wanted = text([3], [2.0], PLACES)
    same = Case("chat", [1, 2], ids, wanted)
    asked: list[tuple[list[int], int]] = []

    def other(tokens: list[int], first: int) -> Tensor:
        asked.append((tokens, first))
        found = wanted.clone()
        found[:4, 3] = 2.25
        found[4, 3] = 0.8  # here token 0 is its choice, a margin of 1.0 in the reference
        return found

    row = measure("p", other, [same, Case("random", [5], ids, wanted)])
    assert asked == [([1, 2, *ids[:-1]], 1), ([5, *ids[:-1]], 0)]
    assert row["noise"] == pytest.approx(0.25)
    for kind in ("chat", "random"):
        assert row[kind]["agreed_median"] == 4
        assert row[kind]["top1"] == pytest.approx(1 - 1 / PLACES)
        assert (row[kind]["parted"], row[kind]["ties"]) == (1, 0)
        assert row[kind]["largest_margin"] == pytest.approx(1.0)
        assert row[kind]["mean_kl"]["value"] > 0
    assert "| p | chat |" in capsys.readouterr().out


def test_an_interval_holds_its_mean() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found["low"] <= found["value"] == 2.0 <= found["high"]
