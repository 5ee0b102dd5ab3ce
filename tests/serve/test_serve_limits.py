"""What the server refuses, and how: OpenAI's error shape, one clear line, the right status."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import CHAT, COMPLETIONS, JSON, Answered, Client, running, until

from tiny_checkpoint import build_model, build_tokenizer
from weightpath.engine.session import TransformersSession
from weightpath.errors import BadRequest, CannotRun
from weightpath.serve.server import listening_socket

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def refused(answered: Answered, status: int, message: str, param: str | None = None) -> dict[str, Any]:  # fmt: skip
    """The error of an answer, its shape checked."""
    assert answered.status == status, answered.body
    assert set(answered.body) == {"error"}
    error = answered.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert len(error["message"].splitlines()) == 1
    assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("changes", "message", "param"),
    [
        ({"messages": None}, "messages is a list", "messages"),
        ({"messages": []}, "messages is a list", "messages"),
        ({"messages": ["x"]}, "messages[0] is no object", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role is one of", "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is no text", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text", "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate", "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "tool_calls", "messages"),
        ({"temperature": "hot"}, "temperature is a number from 0 to 2", "temperature"),
        ({"temperature": True}, "temperature is a number", "temperature"),
        ({"temperature": 3}, "temperature is a number", "temperature"),
        ({"top_p": -1}, "top_p is a number from 0 to 1", "top_p"),
        ({"top_k": 1.5}, "top_k is a whole number from 0", "top_k"),
        ({"seed": 2**70}, "seed is a whole number", "seed"),
        ({"max_tokens": 0}, "max_tokens is a whole number from 1", "max_tokens"),
        ({"stop": 5}, "stop is no text", "stop"),
        ({"stop": [""]}, "an empty stop string", None),
        ({"stop": ["x"] * 17}, "17 stop strings", None),
        ({"stream": 1}, "stream is true or false", "stream"),
        ({"stream_options": {"include_usage": True}}, "with stream: true", "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20", "top_logprobs"),
        ({"n": 2}, "n is not done by this server", "n"),
        ({"tools": [{"type": "function"}]}, "tools is not done", "tools"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not done", "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        ({"abacus": 1}, "field abacus is not known", "abacus"),
        ({"prompt": "x"}, "field prompt is not known", "prompt"),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_cannot_be_is_a_400_that_names_it(
    client: Client, changes: dict[str, Any], message: str, param: str | None
) -> None:
    refused(client.ask("POST", CHAT, HELLO | changes), 400, message, param)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt is one text"),
        (["a", "b"], "prompt is one text"),
        ([1.5], "prompt is one text"),
        ("", "the prompt is empty"),
        ([128], "prompt ids are 0 to 127"),
        ([-1], "prompt ids are 0 to 127"),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_is_a_400(client: Client, prompt: Any, message: str) -> None:
    refused(client.ask("POST", COMPLETIONS, {"prompt": prompt}), 400, message, "prompt")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"a": NaN}', b"\xff\xfe", b"[" * 100_000, b"1" * 5000], ids=len
)
def test_a_body_that_is_no_json_object_is_a_400(client: Client, body: bytes) -> None:
    refused(client.ask("POST", CHAT, body), 400, "the body is no JSON")


def test_another_content_type_path_or_method_is_told_so(client: Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    refused(client.ask("POST", CHAT, json.dumps(HELLO), form), 415, "send application/json")
    refused(client.ask("GET", "/v1/nowhere"), 404, "GET /v1/nowhere")
    refused(client.ask("GET", CHAT), 405, "GET /v1/chat/completions")
    refused(client.ask("GET", "/v1/models/other"), 404, "this server has 'tiny'", "model")
    error = refused(client.ask("POST", CHAT, HELLO | {"model": "x"}), 404, "'x' is not here", "model")  # fmt: skip
    assert error["code"] == "model_not_found"


def test_a_body_over_the_limit_is_a_413_whether_its_length_is_told_or_not(
    model: Any, tokenizer: Any
) -> None:
    with running(model, tokenizer, max_body=400) as client:
        large = json.dumps(HELLO | {"user": "x" * 400}).encode()
        assert refused(client.ask("POST", CHAT, large), 413, "over 400 bytes")["code"] == "body_too_large"  # fmt: skip

        def parts() -> Iterator[bytes]:  # sent chunked, without a length
            for start in range(0, len(large), 50):
                yield large[start : start + 50]

        refused(client.ask("POST", CHAT, parts()), 413, "over 400 bytes")
        assert client.ask("POST", CHAT, HELLO).status == 200


def test_a_prompt_beyond_the_context_is_a_400_and_a_reply_is_cut_where_it_ends(
    model: Any, tokenizer: Any
) -> None:
    with running(model, tokenizer, context=32) as client:
        error = refused(
            client.ask("POST", COMPLETIONS, {"prompt": "x" * 32}), 400,
            "the prompt has 32 tokens and the context is 32", "prompt",
        )  # fmt: skip
        assert error["code"] == "context_length_exceeded"
        reply = client.post(COMPLETIONS, prompt="x" * 20, max_tokens=500, temperature=0)
        assert reply["usage"]["completion_tokens"] == 12
        assert reply["choices"][0]["finish_reason"] == "length"
        assert client.ask("GET", "/health").body["context"] == 32


def test_a_key_is_wanted_of_everything_but_health(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer, api_key="sésame") as client:
        for sent in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic sésame"}):
            headers = {name: value.encode() for name, value in (JSON | sent).items()}
            answered = client.ask("POST", CHAT, HELLO, headers)  # type: ignore[arg-type]
            assert refused(answered, 401, "Authorization: Bearer KEY")["code"] == "invalid_api_key"
        assert client.ask("GET", "/v1/models").status == 401
        assert client.ask("GET", "/health").status == 200
    with running(model, tokenizer, api_key="sesame") as client:
        headers = JSON | {"Authorization": "Bearer sesame"}
        assert client.ask("POST", CHAT, HELLO, headers).status == 200


def test_a_full_queue_is_a_429_that_says_when_to_come_back(model: Any, tokenizer: Any) -> None:
    with running(model, tokenizer, max_queue=2) as client:
        client.engine.gate.clear()
        streams = []
        for count in range(3):  # one runs, two wait
            made = client.connection()
            made.request("POST", CHAT, json.dumps(HELLO), JSON)
            streams.append(made)
            until(lambda n=count: sum(vars(client.worker.status)[k] for k in ("running", "waiting")) == n + 1)  # fmt: skip
        answered = client.ask("POST", CHAT, HELLO)
        error = refused(answered, 429, "2 requests wait already")
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(answered.headers["retry-after"]) >= 1
        client.engine.gate.set()
        assert [made.getresponse().status for made in streams] == [200] * 3
        assert client.ask("POST", CHAT, HELLO).status == 200


def test_an_engine_that_fails_is_a_500_and_the_next_request_is_served(tokenizer: Any) -> None:
    model = build_model()
    with running(model, tokenizer) as client:
        good = client.chat("Hello", max_tokens=6)["choices"]
        with torch.no_grad():
            head: Any = model.get_output_embeddings()
            before = head.weight.clone()
            head.weight[3] = float("nan")
        answered = client.ask("POST", CHAT, HELLO)
        assert refused(answered, 500, "logits are not finite")["type"] == "server_error"
        response = client.open_stream(CHAT, **HELLO)
        assert response.status == 500  # it failed before its first piece
        with torch.no_grad():
            head.weight.copy_(before)
        assert client.chat("Hello", max_tokens=6)["choices"] == good
        assert client.worker.status.running == 0


@pytest.mark.filterwarnings("ignore:a step of . sequences failed")
def test_of_requests_that_run_together_only_the_one_that_fails_is_a_500(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tokenizer, at_once=3) as client:
        alone = [client.chat(text, max_tokens=12)["choices"] for text in ("Hello", "Hi", "Hey")]
        bad = tokenizer.convert_tokens_to_ids("%")
        real = TransformersSession.extend

        def checked(self: TransformersSession, tokens: Any) -> torch.Tensor:
            if bad in self.tokens:
                raise CannotRun("no more of this")
            return real(self, tokens)

        monkeypatch.setattr(TransformersSession, "extend", checked)
        found: dict[str, Any] = {}

        def one(text: str) -> None:
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 12}
            found[text] = client.ask("POST", CHAT, body)

        client.engine.gate.clear()
        asked = ["Hello", "Hi", "100 % of it", "Hey"]
        threads = [threading.Thread(target=one, args=(text,)) for text in asked]
        for thread in threads:
            thread.start()
        until(lambda: client.worker.status.running + client.worker.status.waiting == 4)
        client.engine.gate.set()
        for thread in threads:
            thread.join(60)
        refused(found["100 % of it"], 500, "no more of this")
        for text, wanted in zip(("Hello", "Hi", "Hey"), alone, strict=True):
            assert found[text].status == 200, found[text].body
            assert found[text].body["choices"] == wanted
        assert client.worker.status.running == 0
        for _ in range(5):  # no session was lost with it
            assert client.chat("Hello", max_tokens=12)["choices"] == alone[0]


def test_what_is_not_ours_is_logged_and_tells_nothing(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(model, tokenizer) as client:
        monkeypatch.setattr(
            "weightpath.engine.stream.Generation.take",
            lambda self, logits: (_ for _ in ()).throw(ValueError("a secret path")),
        )
        answered = client.ask("POST", CHAT, HELLO)
        assert "secret" not in refused(answered, 500, "the engine failed")["message"]
        assert "a secret path" in capfd.readouterr().err


def test_a_session_that_cannot_be_opened_is_a_500_and_the_next_request_is_served(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, tokenizer, sessions=2) as client:
        client.post(COMPLETIONS, prompt="one", max_tokens=2)
        real = client.engine.session

        def no_room(context: int | None = None) -> Any:
            raise MemoryError("no room for keys and values")

        monkeypatch.setattr(client.engine, "session", no_room)
        other = {"prompt": "quite another", "max_tokens": 2}
        refused(client.ask("POST", COMPLETIONS, other), 500, "the engine failed")
        assert client.post(COMPLETIONS, prompt="one", max_tokens=2)["object"] == "text_completion"
        monkeypatch.setattr(client.engine, "session", real)
        assert client.ask("POST", COMPLETIONS, other).status == 200


def test_without_a_chat_template_chat_is_a_400(model: Any) -> None:
    with running(model, build_tokenizer(chat=False)) as client:
        refused(client.ask("POST", CHAT, HELLO), 400, "use /v1/completions", "messages")
        assert client.post(COMPLETIONS, prompt="Hello", max_tokens=3)["usage"]["completion_tokens"] == 3  # fmt: skip


def test_a_template_that_refuses_is_a_400(model: Any) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must take turns') }}"
    with running(model, tokenizer) as client:
        refused(client.ask("POST", CHAT, HELLO), 400, "roles must take turns")


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"cannot listen on 127.0.0.1 port {port}"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(BadRequest, match="use another --port or --host"):
        listening_socket("no.such.host.invalid", 0)
