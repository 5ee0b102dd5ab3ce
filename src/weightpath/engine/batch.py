"""Several sequences at once: one token of each in one step of the engine.

Weights are read once a step for all of them, so on a native engine a few sequences together take
little longer than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightpath.engine.sampling import GREEDY, Sampling
from weightpath.engine.session import Engine
from weightpath.engine.stream import (
    CHUNK,
    Generation,
    Limits,
    Piece,
    Reply,
    check_prompt,
    joined,
)
from weightpath.errors import BadRequest


def advance(
    engine: Engine, running: Sequence[Generation], chunk: int = CHUNK
) -> Iterator[tuple[Generation, Piece]]:
    """One step of every sequence that is not finished: their pieces, as they are made.

    A chunk of each prompt that is not read yet, then one token of all others in one call.
    """
    live = [one for one in running if one.finish is None]
    decoding = [one for one in live if one.token is not None and not one.cancelled]
    if len(decoding) == 1:
        decoding = []
    for one in live:
        if one not in decoding:
            piece = one.step(chunk)
            if piece is not None:
                yield one, piece
    if decoding:
        tokens = [one.token for one in decoding if one.token is not None]
        logits = engine.extend_many([one.session for one in decoding], tokens)
        for one, row in zip(decoding, logits, strict=True):
            yield one, one.take(row)


def generate_many(
    engine: Engine,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    limits: Limits | None = None,
    logprobs: int | None = None,
    at_once: int = 8,
    context: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    emit: Callable[[int, Piece], None] = lambda index, piece: None,
) -> list[Reply]:
    """A reply to every prompt, in their order, `at_once` of them a step.

    As one ends the next prompt takes its session. sampling: one for all, or one each. Each has a
    sampler of its own, so a reply does not depend on its neighbours. emit(index, piece) gets pieces as they come.
    """
    if at_once < 1:
        raise BadRequest(f"{at_once} prompts at once; use 1 or more")
    if not prompts:
        return []
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(each) != len(prompts):
        raise BadRequest(f"{len(each)} sampling settings for {len(prompts)} prompts")
    waiting = list(enumerate(prompts))[::-1]
    free = [engine.session(context) for _ in range(min(at_once, len(prompts)))]
    for _, prompt in waiting:  # before anything is run
        check_prompt(prompt, free[0].context)
    pieces: dict[int, list[Piece]] = {}
    running: dict[Generation, int] = {}
    while waiting or running:
        while waiting and free:
            index, prompt = waiting.pop()
            one = Generation(free.pop(), tokenizer, prompt, each[index], limits, logprobs)
            running[one], pieces[index] = index, []
        if cancelled():
            for one in running:
                one.cancel()
        for one, piece in advance(engine, list(running)):
            pieces[running[one]].append(piece)
            emit(running[one], piece)
        for one in [one for one in running if one.finish is not None]:
            del running[one]
            free.append(one.session)
    return [joined(pieces[index]) for index in range(len(prompts))]
