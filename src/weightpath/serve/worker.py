"""The one thread that runs the engine, and the bounded queue before it.

Requests wait in order. The worker takes up to `at_once` of them, makes one step of all (a chunk of
a prompt, or a token), hands out what the step decided, and looks at the queue again. A request that
is cancelled ends at its next step.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weightpath.engine.batch import advance
from weightpath.engine.sampling import Sampling
from weightpath.engine.session import Engine
from weightpath.engine.stream import Generation, Limits, Piece
from weightpath.errors import WeightpathError
from weightpath.serve.sessions import Sessions

USUAL_SECONDS = 5.0
"""A request's time before one has been seen, for Retry-After."""


class QueueFull(Exception):
    """No room for another request. retry_after: whole seconds until there may be."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        self.waiting, self.retry_after = waiting, retry_after
        super().__init__(f"{waiting} requests wait already; try again in {retry_after} s")


class ShuttingDown(Exception):
    """The server finishes what is running and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


Event = Piece | Exception


@dataclass(eq=False)
class Job:
    """One request. deliver: gets every piece, or the exception that ended it, on the worker's
    thread; it must not block. After a piece with `finish`, or an exception, nothing more comes."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    logprobs: int | None
    deliver: Callable[[Event], None]
    generation: Generation | None = field(default=None, repr=False)
    cancelled: bool = False
    started: float = 0.0


@dataclass(frozen=True)
class Status:
    """What the worker is doing."""

    running: int
    waiting: int
    draining: bool
    finished: int


class Worker:
    """Runs requests on an engine.

    max_queue: requests that may wait, beside those running. sessions: caches kept for chats to go
    on. at_once: requests run together, each step one call of the engine. context: of each session.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        context: int | None = None,
        max_queue: int = 16,
        sessions: int = 4,
        at_once: int = 1,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sessions = Sessions(engine, max(sessions, at_once), context)
        self.context = self._sessions.context
        self._max_queue, self._at_once = max_queue, at_once
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._draining = self._closing = False
        self._finished, self._seconds = 0, USUAL_SECONDS
        self._thread = threading.Thread(target=self._run, name="weightpath-worker", daemon=True)

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request. QueueFull or ShuttingDown where it cannot be taken."""
        with self._changed:
            if self._draining:
                raise ShuttingDown
            idle = self._at_once - len(self._running)
            if len(self._waiting) >= self._max_queue + max(idle, 0):
                ahead = (len(self._waiting) + 1) / self._at_once
                raise QueueFull(len(self._waiting), max(1, math.ceil(ahead * self._seconds)))
            self._waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody wants the rest of it. Nothing more is delivered of a request that waits."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
            elif job.generation is not None:
                job.generation.cancel()

    def drain(self) -> None:
        """Take nothing new; what waits is told ShuttingDown, what runs goes on to its end."""
        with self._changed:
            self._draining = True
            waiting, self._waiting = list(self._waiting), deque()
        for job in waiting:
            job.deliver(ShuttingDown())

    def close(self, seconds: float = 10.0) -> bool:
        """Drain, cancel what runs, and wait for the thread: whether it ended in time."""
        self.drain()
        with self._changed:
            self._closing = True
            for job in self._running:
                if job.generation is not None:
                    job.generation.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def status(self) -> Status:
        with self._changed:
            return Status(len(self._running), len(self._waiting), self._draining, self._finished)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if self._closing and not self._running:
                    return
                fresh: list[Job] = []
                while self._waiting and len(self._running) < self._at_once:
                    fresh.append(self._waiting.popleft())
                    self._running.append(fresh[-1])
            for job in fresh:
                self._begin(job)
            self._step()

    def _begin(self, job: Job) -> None:
        job.started = time.perf_counter()
        session = None
        try:
            session = self._sessions.take(job.prompt)
            made = Generation(
                session, self._tokenizer, job.prompt, job.sampling, job.limits, job.logprobs
            )
        except Exception as error:  # told to the client; the next request must still be served
            _report(error)
            if session is not None:
                self._sessions.give_back(session, job.prompt)
            self._end(job, error)
            return
        with self._changed:
            job.generation = made
            if job.cancelled or self._closing:
                made.cancel()

    def _step(self) -> None:
        """One step of everything that runs. What fails in it ends the request that is at fault; its
        session is not to be trusted, the others go on."""
        by_generation = {job.generation: job for job in self._running if job.generation is not None}
        try:
            for one, piece in advance(self._engine, list(by_generation)):
                job = by_generation[one]
                if one.finish is None:
                    job.deliver(piece)
                elif piece.error is not None:
                    _report(piece.error)
                    self._sessions.drop(one.session)
                    self._end(job, piece.error)
                else:
                    self._sessions.give_back(one.session, one.prompt)
                    self._end(job, piece)
        except Exception as error:  # of no one sequence: no session can be trusted
            _report(error)
            for one, job in by_generation.items():
                if job in self._running:
                    self._sessions.drop(one.session)
                    self._end(job, error)

    def _end(self, job: Job, last: Event) -> None:
        with self._changed:
            self._running.remove(job)
            self._finished += 1
            self._seconds = 0.7 * self._seconds + 0.3 * (time.perf_counter() - job.started)
        job.deliver(last)


def _report(error: Exception) -> None:
    """What is not of ours goes to the log in whole: its client is told nothing of it."""
    if not isinstance(error, WeightpathError):
        traceback.print_exception(error)
