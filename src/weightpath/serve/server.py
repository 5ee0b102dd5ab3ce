"""Running the application until a signal, and ending so that no reply is cut.

SIGTERM or Ctrl-C: the socket closes, what waits is told 503, what runs is finished (for `grace`
seconds at most), then the worker ends. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from weightpath.errors import BadRequest
from weightpath.serve.worker import Worker

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """uvicorn's, which drains the worker first and does not die of the signal that stopped it."""

    def __init__(self, config: uvicorn.Config, worker: Worker, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._worker, self._ready = worker, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.drain()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. BadRequest where it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise BadRequest(f"cannot listen on {host} port {port} ({error}); use another --port or --host") from None  # fmt: skip


def make_server(
    app: Starlette, worker: Worker, grace: int = 60, ready: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """The server of an application and its worker. ready: called once it listens. Setting its
    `should_exit` ends it as a signal does."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", http="h11", ws="none",
        server_header=False, timeout_graceful_shutdown=grace,
    )  # fmt: skip
    return _Server(config, worker, ready)


def run_server(server: uvicorn.Server, worker: Worker, bound: socket.socket) -> None:
    """Serve until a signal. The worker is started here, and is closed at the end."""
    worker.start()
    try:
        server.run([bound])
    finally:
        worker.close()
        bound.close()
