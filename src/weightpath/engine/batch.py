"""Several sequences at once: one token of each in one step of the engine.

Weights are read once a step for all of them, so on a native engine a few sequences together take
little longer than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from warnings import warn

from weightpath.engine.sampling import GREEDY, Sampling
from weightpath.engine.session import Engine
from weightpath.engine.stream import (
    CHUNK,
    FAILED,
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

    A chunk of each prompt that is not read yet, then one token of all others in one call. What
    raises in it ends that sequence alone, with a piece that holds the error: where the one call
    for all raises, each is run again by itself, from where its session was before.
    """
    live = [one for one in running if one.finish is None]
    decoding = [one for one in live if one.token is not None and not one.cancelled]
    if len(decoding) == 1:
        decoding = []
    for one in live:
        if one not in decoding:
            try:
                piece = one.step(chunk)
            except Exception as error:  # handed to whoever wants this sequence's reply
                piece = one.fail(error)
            if piece is not None:
                yield one, piece
    if decoding:
        held = [len(one.session.tokens) for one in decoding]
        tokens = [one.token for one in decoding if one.token is not None]
        logits = None
        try:
            logits = engine.extend_many([one.session for one in decoding], tokens)
        except Exception as error:  # it comes again below, from the sequence that is at fault
            warn(f"a step of {len(decoding)} sequences failed ({error}); each runs by itself",
                 RuntimeWarning, stacklevel=2)  # fmt: skip
        for index, one in enumerate(decoding):
            try:
                piece = _again(one, held[index]) if logits is None else one.take(logits[index])
            except Exception as error:  # as above
                piece = one.fail(error)
            yield one, piece


def _again(one: Generation, held: int) -> Piece:
    """A step by itself of a sequence that may have been run in part; it held so many tokens."""
    one.session.truncate(held)
    piece = one.step()
    assert piece is not None  # its prompt is read
    return piece


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
    isolate: bool = False,
) -> list[Reply]:
    """A reply to every prompt, in their order, `at_once` of them a step.

    As one ends the next prompt takes its session. sampling: one for all, or one each. Each has a
    sampler of its own, so a reply does not depend on its neighbours. emit(index, piece) gets pieces
    as they come. isolate: what the engine raises of one reply ends that one, with finish "failed"
    and its error; else it is raised, and ends all.
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
            if piece.error is not None and not isolate:
                raise piece.error
            pieces[running[one]].append(piece)
            emit(running[one], piece)
        for one in [one for one in running if one.finish is not None]:
            del running[one]
            free.append(engine.session(context) if one.finish == FAILED else one.session)
    return [joined(pieces[index]) for index in range(len(prompts))]
