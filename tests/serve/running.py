"""A real server on a thread, and a client that speaks plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from weightpath.engine.session import TransformersEngine, TransformersSession
from weightpath.serve.api import create_app
from weightpath.serve.exchange import Served
from weightpath.serve.server import listening_socket, make_server, run_server
from weightpath.serve.worker import Worker

JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Gate(threading.Event):
    """Open: sessions run freely. Closed: each step waits for it."""


class GatedEngine(TransformersEngine):
    """The real engine, whose steps can be held up from outside."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.gate = Gate()
        self.gate.set()
        self.steps = 0

    def session(self, context: int | None = None) -> TransformersSession:
        engine = self

        class Gated(TransformersSession):
            def extend(self, tokens: Sequence[int]) -> torch.Tensor:
                engine.steps += 1
                assert engine.gate.wait(60)
                return super().extend(tokens)

        return Gated(self._model, context)


@dataclass
class Answered:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Client:
    """Requests to one server."""

    port: int
    worker: Worker
    engine: GatedEngine
    served: Served
    lines: list[str] = field(default_factory=list)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answered:
        """One request; `body` as JSON, or as it is where it is bytes or an iterator of them."""
        made = self.connection()
        raw = body if body is None or not isinstance(body, (dict, list)) else json.dumps(body)
        made.request(method, path, raw, JSON if headers is None else headers)
        response = made.getresponse()
        text = response.read()
        made.close()
        return Answered(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            json.loads(text) if text[:1] in (b"{", b"[") else text,
        )

    def post(self, path: str, **body: Any) -> Any:
        """The reply's JSON; it must be a 200."""
        answered = self.ask("POST", path, body)
        assert answered.status == 200, answered.body
        return answered.body

    def chat(self, text: str, **body: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.post(CHAT, **{"messages": messages, "temperature": 0, **body})

    def open_stream(self, path: str, **body: Any) -> http.client.HTTPResponse:
        made = self.connection()
        made.request("POST", path, json.dumps({"stream": True, **body}), JSON)
        return made.getresponse()

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Every event of a stream, [DONE] at its end checked and left out."""
        response = self.open_stream(path, **body)
        assert response.status == 200, response.read()
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        found = list(events(response))
        assert found.pop() == "[DONE]"
        return found


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events, as it comes."""
    for line in response:
        if line.startswith(b"data: "):
            text = line[6:].strip().decode()
            yield text if text == "[DONE]" else json.loads(text)


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something is so; fails where it never is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


@contextmanager
def running(
    model: Any,
    tokenizer: Any,
    *,
    stop_tokens: tuple[int, ...] = (),
    grace: int = 30,
    api_key: str | None = None,
    max_body: int = 1 << 20,
    **options: Any,
) -> Iterator[Client]:
    """A server while this lasts. options: the worker's."""
    engine = GatedEngine(model)
    worker = Worker(engine, tokenizer, **options)
    lines: list[str] = []
    served = Served(
        "tiny", tokenizer, worker, model.config.vocab_size, stop_tokens, api_key=api_key,
        max_body=max_body, log=lines.append,
    )  # fmt: skip
    bound = listening_socket("127.0.0.1", 0)
    ready = threading.Event()
    server = make_server(create_app(served), worker, grace, ready.set)
    client = Client(bound.getsockname()[1], worker, engine, served, lines)
    thread = threading.Thread(target=run_server, args=(server, worker, bound), daemon=True)
    thread.start()
    assert ready.wait(30)
    client.server = server  # type: ignore[attr-defined]
    client.thread = thread  # type: ignore[attr-defined]
    try:
        yield client
    finally:
        engine.gate.set()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
