"""Clients that go away, and a server that does: nothing is run for nobody, no reply is cut."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from running import CHAT, COMPLETIONS, JSON, events, running, until

LONG = {"prompt": "Hello", "temperature": 0, "max_tokens": 900}


def test_a_client_that_leaves_a_stream_frees_the_worker(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer) as client:
        response = client.open_stream(COMPLETIONS, **LONG)
        next(events(response))
        response.close()
        until(lambda: client.worker.status.running == 0)
        assert client.engine.steps < 800
        assert client.post(COMPLETIONS, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_client_that_leaves_while_it_waits_for_a_whole_reply_frees_the_worker(
    model: Any, tokenizer: Any
) -> None:
    with running(model, tokenizer) as client:
        client.engine.gate.clear()
        made = client.connection()
        made.request("POST", COMPLETIONS, json.dumps(LONG), JSON)
        until(lambda: client.engine.steps == 1)
        made.close()
        job = client.worker._running[0]
        until(lambda: job.cancelled)
        client.engine.gate.set()
        until(lambda: client.worker.status.running == 0)
        assert client.engine.steps <= 2


def test_a_client_that_leaves_the_queue_is_never_run(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer) as client:
        client.engine.gate.clear()
        first = client.connection()
        first.request("POST", COMPLETIONS, json.dumps(LONG | {"max_tokens": 3}), JSON)
        until(lambda: client.worker.status.running == 1)
        second = client.connection()
        second.request("POST", COMPLETIONS, json.dumps(LONG | {"stream": True}), JSON)
        until(lambda: client.worker.status.waiting == 1)
        second.close()
        until(lambda: client.worker.status.waiting == 0)
        client.engine.gate.set()
        assert first.getresponse().status == 200
        assert client.worker.status.finished == 1


def test_ending_finishes_what_runs_and_tells_what_waits(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer) as client:
        client.engine.gate.clear()
        first, second = client.connection(), client.connection()
        for made in (first, second):
            made.request("POST", COMPLETIONS, json.dumps(LONG | {"max_tokens": 30}), JSON)
            until(lambda: client.worker.status.running == 1)
        until(lambda: client.worker.status.waiting == 1)
        client.server.should_exit = True  # type: ignore[attr-defined]
        refused = second.getresponse()
        assert refused.status == 503
        assert json.loads(refused.read())["error"]["code"] == "shutting_down"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", client.port), timeout=5).close()
        client.engine.gate.set()
        answered = first.getresponse()
        assert answered.status == 200
        assert json.loads(answered.read())["usage"]["completion_tokens"] == 30
        client.thread.join(30)  # type: ignore[attr-defined]
        assert not client.thread.is_alive()  # type: ignore[attr-defined]


def test_what_is_not_done_within_the_grace_is_cancelled(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer, grace=1) as client:
        response = client.open_stream(COMPLETIONS, **LONG)
        next(events(response))
        client.engine.gate.clear()
        client.server.should_exit = True  # type: ignore[attr-defined]
        opener = threading.Timer(3.0, client.engine.gate.set)
        opener.start()
        client.thread.join(30)  # type: ignore[attr-defined]
        opener.join()
        assert not client.thread.is_alive()  # type: ignore[attr-defined]
        assert client.engine.steps < 800


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_the_command_serves_and_a_signal_ends_it_after_its_reply(
    tiny_low_bit: Path, sent: signal.Signals
) -> None:
    line = "from weightpath.cli.app import main; main()"
    arguments = ["serve", str(tiny_low_bit), "--port", "0", "--json", "--context", "700"]
    process = subprocess.Popen(
        [sys.executable, "-c", line, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        read = process.stdout.readline()
        assert read, process.communicate()[1]
        text += read
    facts = json.loads(text)
    assert (facts["model"], facts["context"], facts["api_key"]) == (tiny_low_bit.name, 700, False)
    port = int(facts["url"].rsplit(":", 1)[1].removesuffix("/v1"))
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "stream": True,
            "max_tokens": 400, "stream_options": {"include_usage": True}}  # fmt: skip
    made.request("POST", CHAT, json.dumps(body), JSON)
    coming = events(made.getresponse())
    next(coming)
    process.send_signal(sent)
    rest = list(coming)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["usage"]["completion_tokens"] > 1
    assert rest[-3]["choices"][0]["finish_reason"] in ("stop", "length")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
