"""Greedy replies on the graph engine: tokens stay on the device for a burst of steps.

Sequences run `at_once` together, each in its row, and as one ends the next prompt takes its place. The
host looks every BURST steps; what a sequence made after its end is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weightpath.engine.graph_capture import MOST_ROWS, StepRunner
from weightpath.engine.graph_weights import DecoderWeights
from weightpath.engine.sampling import NOT_FINITE, Sampler
from weightpath.engine.session import Session
from weightpath.engine.stream import check_prompt
from weightpath.errors import BadRequest, CannotRun

BURST = 16


class Stepping(Protocol):
    """What a burst needs of GraphModel."""

    device: torch.device
    weights: DecoderWeights

    def session(self, context: int | None = None) -> Any: ...

    def loaded(self, sessions: Sequence[Any], tokens: Sequence[int], steps: int) -> StepRunner: ...

    def on_device(self) -> AbstractContextManager[Any]: ...


@dataclass
class _Running:
    """A sequence in its row. reply: ids picked, the last of them not in the session yet."""

    index: int
    session: Session
    reply: list[int]
    most: int


def greedy(
    model: Stepping,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    at_once: int,
) -> list[list[int]]:
    """The most likely reply to each prompt, in their order. As GraphModel.greedy."""
    if max_new_tokens < 1 or at_once < 1:
        raise BadRequest(f"{max_new_tokens} new tokens, {at_once} prompts at once; use 1 or more")
    longest, stops = model.weights.longest, set(stop_tokens)
    for prompt in prompts:
        check_prompt(prompt, longest)
    waiting = list(enumerate(prompts))[::-1]
    running: list[_Running] = []
    replies: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < min(at_once, MOST_ROWS):
            running.append(_started(model, *waiting.pop(), max_new_tokens))
        live = [one for one in running if not _done(one, stops)]
        if live:
            _burst(model, live, stops)
        for one in running:
            if _done(one, stops):
                replies[one.index] = one.reply
        running = [one for one in running if one.index not in replies]
    return [replies[index] for index in range(len(prompts))]


def _started(model: Stepping, index: int, prompt: Sequence[int], most: int) -> _Running:
    """A prompt run through, and its first token."""
    most = min(most, model.weights.longest - len(prompt))
    session = model.session(len(prompt) + most)
    first = Sampler().pick(session.extend(prompt))
    return _Running(index, session, [first.token], most)


@torch.inference_mode()
def _burst(model: Stepping, live: Sequence[_Running], stops: set[int]) -> None:
    """Up to BURST steps of all rows, with no look from the host between."""
    steps = min(BURST, min(one.most - len(one.reply) for one in live))
    with model.on_device():
        last = [one.reply[-1] for one in live]
        runner = model.loaded([one.session for one in live], last, steps)
        picked = torch.empty(steps, runner.size, dtype=torch.int64, device=model.device)
        bad = torch.zeros(runner.size, dtype=torch.int32, device=model.device)
        for step in range(steps):
            runner.run()
            picked[step].copy_(runner.rows.tokens)
            bad |= runner.bad
        rows = picked.T.tolist()
        _check(bad[: len(live)])
    for one, row in zip(live, rows, strict=False):
        one.session.tokens.extend([one.reply[-1], *row[:-1]])
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        one.reply.extend(row[:end])


def _done(one: _Running, stops: set[int]) -> bool:
    return len(one.reply) >= one.most or one.reply[-1] in stops


def _check(bad: Tensor) -> None:
    if bool(bad.any()):
        raise CannotRun(NOT_FINITE)
