"""Generating: a prompt in, pieces of text out.

A `Generation` is one sequence's state: it takes logits and gives the next token and the text that
is decided by then (batch.py runs several). What a session holds of a prompt already is not run
again: the longest common prefix is kept, so a chat's next turn costs what is new in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weightpath.engine.pieces import StopStrings, TextPieces
from weightpath.engine.sampling import GREEDY, Sampler, Sampling, TokenLogprob
from weightpath.engine.session import Session, common_prefix
from weightpath.errors import BadRequest

CHUNK = 512
"""Prompt tokens of one step, between which a request can be cancelled."""
STOP, LENGTH, CANCELLED, FAILED = "stop", "length", "cancelled", "failed"
MOST_STOPS = 16


@dataclass(frozen=True)
class Limits:
    """When a reply ends: after so many tokens, at a token (not part of the text) or at a string
    (the text ends before it). BadRequest for what cannot be."""

    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadRequest(f"max_new_tokens {self.max_new_tokens}: use 1 or more")
        if not all(self.stop_strings):
            raise BadRequest("an empty stop string would end every reply; leave it out")
        if len(self.stop_strings) > MOST_STOPS:
            raise BadRequest(f"{len(self.stop_strings)} stop strings; use at most {MOST_STOPS}")


@dataclass(frozen=True)
class Usage:
    """Tokens counted, and wall time. cached_tokens: of the prompt, found in the session. Prefill
    ends with the first token picked; decode is the time of the tokens after it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens run a second."""
        return (self.prompt_tokens - self.cached_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def decode_speed(self) -> float:
        """Tokens a second after the first; 0 where there is none."""
        after_first = self.completion_tokens - 1
        return after_first / max(self.decode_seconds, 1e-9) if after_first > 0 else 0.0


@dataclass(frozen=True)
class Piece:
    """What one step decided. text: may be empty while something is held back. tokens: those picked
    in it. finish: None until the last piece: "stop", "length", "cancelled" or "failed"; usage comes
    with it. stopped_by: the stop string or token id, where one ended it. error: what failed."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    stopped_by: str | int | None = None
    error: Exception | None = None


class Generation:
    """One reply on a session, a step at a time. tokenizer None: tokens only, no text.

    BadRequest for an empty prompt, and for one that leaves no room in the session's context; a
    reply is cut ("length") where the context ends. `cancel` may be called from another thread.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Any,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        limits: Limits | None = None,
        logprobs: int | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        limits = limits or Limits()
        check_prompt(self.prompt, session.context)
        if tokenizer is None and limits.stop_strings:
            raise BadRequest("stop strings need a tokenizer")
        self.session = session
        self.token: int | None = None  # picked, and not in the session yet
        self.finish: str | None = None
        self._limits = limits
        self._most = min(limits.max_new_tokens, session.context - len(self.prompt))
        self._sampler = Sampler(sampling, self.prompt, logprobs)
        self._pieces = None if tokenizer is None else TextPieces(tokenizer)
        self._stops = StopStrings(limits.stop_strings)
        self._count = 0
        self._cancelled = False
        self._cached: int | None = None
        self._started = self._first = time.perf_counter()

    def cancel(self) -> None:
        """The next step is the last."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def prefill(self, chunk: int = CHUNK) -> Tensor | None:
        """Run the next chunk of the prompt: logits after its last token, None before that."""
        if self._cached is None:
            self._started = time.perf_counter()
            held = common_prefix(self.session.tokens, self.prompt)
            self._cached = min(held, len(self.prompt) - 1)  # logits come from running the last
            self.session.truncate(self._cached)
        done = len(self.session.tokens)
        logits = self.session.extend(self.prompt[done : done + chunk])
        return logits if len(self.session.tokens) == len(self.prompt) else None

    def take(self, logits: Tensor) -> Piece:
        """Pick the next token from logits fp32 [vocabulary]."""
        picked = self._sampler.pick(logits)
        self.token = picked.token
        self._count += 1
        if self._count == 1:
            self._first = time.perf_counter()
        stopped_by: str | int | None = None
        text = ""
        if picked.token in self._limits.stop_tokens:
            self.finish, stopped_by = STOP, picked.token
        elif self._pieces is not None:
            text = self._stops.add(self._pieces.add(picked.token))
            if self._stops.found is not None:
                self.finish, stopped_by = STOP, self._stops.found
        if self.finish is None and self._count >= self._most:
            self.finish = LENGTH
        if self.finish is None:
            return Piece(text, (picked,))
        if self._stops.found is None:
            more, found = self._rest()
            text += more
            if found is not None:
                self.finish, stopped_by = STOP, found
        return Piece(text, (picked,), self.finish, self.usage(), stopped_by)

    def step(self, chunk: int = CHUNK) -> Piece | None:
        """The next chunk of the prompt, or the next token; None while the prompt is being read."""
        if self._cancelled:
            return self.end()
        if self.token is None:
            logits = self.prefill(chunk)
            return None if logits is None else self.take(logits)
        return self.take(self.session.extend([self.token]))

    def end(self) -> Piece:
        """The last piece of a generation that was cancelled."""
        self.finish = CANCELLED
        return Piece(self._rest()[0], (), self.finish, self.usage())

    def fail(self, error: Exception) -> Piece:
        """The last piece of a generation whose step raised. Its session is not to be trusted."""
        self.finish = FAILED
        return Piece("", (), self.finish, self.usage(), error=error)

    def usage(self) -> Usage:
        """Counts and times so far."""
        now = time.perf_counter()
        first = self._first if self._count else now
        decode = now - first if self._count else 0.0
        return Usage(
            len(self.prompt), self._cached or 0, self._count, first - self._started, decode
        )

    def _rest(self) -> tuple[str, str | None]:
        """Text that was held back, and the stop string that its end completes, if one."""
        if self._pieces is None:
            return "", None
        text = self._stops.add(self._pieces.finish())
        return text + self._stops.finish(), self._stops.found


def check_prompt(prompt: Sequence[int], context: int) -> None:
    """BadRequest for an empty prompt, or one that leaves no room for a reply."""
    if not prompt:
        raise BadRequest("the prompt is empty; give it some text")
    if len(prompt) >= context:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens and the context is {context}; shorten the prompt, "
            "or use a longer context"
        )


def stream(
    session: Session,
    tokenizer: Any,
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    limits: Limits | None = None,
    logprobs: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Piece]:
    """A reply in pieces. Their texts join to the whole; the last has `finish` and `usage`.

    prompt: ids, of which the session's own beginning is not run again. logprobs: how many of the
    most likely tokens to give with each one picked; None: none. `cancelled` is asked before every
    step, and before every chunk of the prompt.
    """
    one = Generation(session, tokenizer, prompt, sampling, limits, logprobs)
    while one.finish is None:
        if cancelled():
            one.cancel()
        piece = one.step()
        if piece is not None:
            yield piece


@dataclass(frozen=True)
class Reply:
    """A whole reply. tokens: as picked, a stop token included. error: what ended it, where its
    finish is "failed"."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    finish: str
    usage: Usage
    stopped_by: str | int | None = None
    error: Exception | None = None


def joined(pieces: Sequence[Piece]) -> Reply:
    """The reply that pieces make, the last of them included."""
    last = pieces[-1]
    assert last.finish is not None
    assert last.usage is not None
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    text = "".join(piece.text for piece in pieces)
    return Reply(text, tokens, last.finish, last.usage, last.stopped_by, last.error)
