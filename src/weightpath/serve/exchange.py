"""A request's job and what comes of it, between the worker's thread and the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weightpath.engine.sampling import Sampling
from weightpath.engine.stream import CANCELLED, Limits, Piece, Reply, joined
from weightpath.serve.asked import Asked
from weightpath.serve.errors import api_error
from weightpath.serve.shapes import Shape
from weightpath.serve.worker import Event, Job, ShuttingDown, Worker

Log = Callable[[str], None]


@dataclass(frozen=True)
class Served:
    """What is served, and its limits. vocabulary: ids that the model has rows for. max_body: bytes
    of a request. defaults: sampling where a request names none."""

    name: str
    tokenizer: Any = field(repr=False)
    worker: Worker = field(repr=False)
    vocabulary: int
    stop_tokens: tuple[int, ...]
    defaults: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    api_key: str | None = field(default=None, repr=False)
    max_body: int = 1 << 20
    created: int = 0
    log: Log = field(default=lambda line: None, repr=False)
    encoding: Any = field(default_factory=threading.Lock, repr=False)


class ClientGone(Exception):
    """The other side closed the connection."""


class Exchange:
    """One request's job and what comes of it. Closing it cancels what is left."""

    def __init__(self, served: Served, receive: Receive) -> None:
        self._served, self._receive = served, receive
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._job: Job | None = None
        self._gone: asyncio.Task[None] | None = None

    def begin(self, prompt: tuple[int, ...], asked: Asked) -> None:
        """Queue the job. QueueFull or ShuttingDown where it cannot be."""
        room = self._served.worker.context - len(prompt)
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        limits = Limits(most, self._served.stop_tokens, asked.stop)
        job = Job(prompt, asked.sampling, limits, asked.logprobs, self._deliver)
        self._served.worker.submit(job)
        self._job = job

    def _deliver(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop of a server that is gone
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> Piece:
        """The next piece. Raises what ended the job, and ClientGone."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._watch())
        waiting = asyncio.create_task(self._events.get())
        try:
            await asyncio.wait({waiting, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientGone
            event = waiting.result()
        finally:
            waiting.cancel()
        if isinstance(event, Exception):
            raise event
        if event.finish == CANCELLED:
            raise ShuttingDown
        return event

    async def whole(self) -> Reply:
        """All pieces, joined."""
        pieces = [await self.next()]
        while pieces[-1].finish is None:
            pieces.append(await self.next())
        return joined(pieces)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Nothing more is wanted."""
        if self._gone is not None:
            self._gone.cancel()
        if self._job is not None:
            self._served.worker.cancel(self._job)


class EventStream(Response):
    """A reply as server-sent events, ended by [DONE], or by an error where one comes midway."""

    def __init__(self, exchange: Exchange, shape: Shape, first: Piece, include_usage: bool) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._exchange, self._shape, self._first = exchange, shape, first
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._pieces(send)
            await send({"type": "http.response.body", "body": b""})
        except (ClientGone, OSError):
            return
        finally:
            self._exchange.close()

    async def _pieces(self, send: Send) -> None:
        async def event(value: Any) -> None:
            text = value if isinstance(value, str) else json.dumps(value)
            body = f"data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        for chunk in self._shape.opening():
            await event(chunk)
        piece, written = self._first, 0
        try:
            while True:
                chunk = self._shape.chunk(piece, written)
                written += self._shape.width(piece)
                if chunk is not None:
                    await event(chunk)
                if piece.finish is not None:
                    break
                piece = await self._exchange.next()
        except (ClientGone, OSError):
            raise
        except Exception as error:
            await event(api_error(error).body)
            return
        if self._include_usage:
            assert piece.usage is not None
            await event(self._shape.closing(piece.usage))
        await event("[DONE]")
