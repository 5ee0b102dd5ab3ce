"""Which session a request gets: its chat's own before any other."""

from __future__ import annotations

from typing import Any

import pytest

from weightpath.engine.session import Session, TransformersEngine
from weightpath.serve.sessions import Sessions

ONE, TWO = [5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 50, 51, 52, 53, 54, 55]


@pytest.fixture
def kept(model: Any) -> Sessions:
    return Sessions(TransformersEngine(model), most=2)


def used(kept: Sessions, prompt: list[int], reply: list[int]) -> Session:
    """A request that ran to its end."""
    session = kept.take(prompt)
    session.truncate(0)
    session.extend([*prompt, *reply])
    kept.give_back(session, prompt)
    return session


def test_a_chat_that_goes_on_gets_its_own_session_whatever_came_between(kept: Sessions) -> None:
    first, second = used(kept, ONE, [20, 21, 22]), used(kept, TWO, [30])
    assert first is not second
    assert kept.take([*ONE, 20, 21, 22, 40, 41]) is first
    assert kept.take([*TWO, 90]) is second


def test_a_reply_that_comes_back_changed_is_still_the_same_chat(kept: Sessions) -> None:
    first = used(kept, ONE, list(range(20, 60)))
    used(kept, TWO, [30])
    assert kept.take([*ONE[:-1], 99, 98, 97]) is first


def test_another_chat_gets_a_new_session_and_then_the_longest_unused(kept: Sessions) -> None:
    first, second = used(kept, ONE, [20]), used(kept, TWO, [30])
    third = used(kept, [70, 71, 72], [73])
    assert third is first  # two at most
    assert used(kept, [80], [81]) is second


def test_a_session_in_use_is_nobody_elses_and_a_dropped_one_is_replaced(kept: Sessions) -> None:
    first = kept.take(ONE)
    second = kept.take(ONE)
    assert first is not second
    kept.drop(first)
    third = kept.take(ONE)
    assert third is not first
    assert third is not second
    assert third.tokens == []


def test_a_second_chat_copies_the_beginning_that_it_shares(kept: Sessions) -> None:
    system = list(range(20, 60))
    asked = [*system, *range(70, 80)]
    first = used(kept, asked, [80, 81])
    second = kept.take([*system, 90, 91, 92, 93, 94, 95])
    assert second is not first
    assert second.tokens == system
    assert first.tokens == [*asked, 80, 81]


def test_a_beginning_is_copied_from_a_session_in_use_too(kept: Sessions) -> None:
    system = list(range(20, 60))
    first = kept.take([*system, 70])
    first.extend(system[:30])  # its prompt is half read
    assert kept.take([*system, 90]).tokens == system[:30]


def test_a_short_beginning_is_not_copied_and_a_chats_own_longer_one_is_kept(kept: Sessions) -> None:
    first = used(kept, [*range(20, 35), *range(70, 80)], [80])
    second = kept.take([*range(20, 35), 90])
    assert second is not first
    assert second.tokens == []  # 15 tokens are run faster
    kept.give_back(second, [])
    asked = [*range(20, 60), 70]
    third = used(kept, asked, [80, 81, 82])
    assert kept.take([*asked, 80, 81, 82, 99]) is third
    assert third.tokens == [*asked, 80, 81, 82]


def test_a_session_that_was_dropped_is_not_copied_from(kept: Sessions) -> None:
    system = list(range(20, 60))
    first = kept.take(system)
    first.extend(system)
    kept.drop(first)
    assert kept.take([*system, 90]).tokens == []


def test_an_empty_session_is_taken_before_a_new_one_is_made(kept: Sessions) -> None:
    session = kept.take(ONE)
    kept.give_back(session, ONE)  # cancelled before it ran
    assert kept.take(TWO) is session
