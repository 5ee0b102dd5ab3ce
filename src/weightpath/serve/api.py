"""The HTTP surface: OpenAI's chat and completions, /v1/models and /health, on one worker.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health

A request is read (bounded), understood (asked.py), turned into ids, queued (worker.py), and its
pieces come back through the event loop. Whoever goes away is cancelled at the next token. JSON must
say it is application/json: a web page elsewhere cannot send that without asking first, and it is
told no.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weightpath.engine.generate import encode, encode_text
from weightpath.engine.stream import Reply
from weightpath.serve.asked import Asked, asked_of_chat, asked_of_completion
from weightpath.serve.errors import ApiError, api_error
from weightpath.serve.exchange import ClientGone, EventStream, Exchange, Served
from weightpath.serve.shapes import Shape

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def create_app(served: Served) -> Starlette:
    """The application. The worker must have been started."""

    async def chat(request: Request) -> Response:
        asked = asked_of_chat(await _json_of(request, served), served.name, served.defaults)
        if not getattr(served.tokenizer, "chat_template", None):
            raise ApiError(400, "the model has no chat template; use /v1/completions", "messages")
        return await _reply(request, served, asked, chat=True)

    async def completion(request: Request) -> Response:
        body = await _json_of(request, served)
        asked = asked_of_completion(body, served.name, served.defaults)
        return await _reply(request, served, asked, chat=False)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(served)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != served.name:
            message = f"model '{name}' is not here; this server has '{served.name}'"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(_model(served))

    async def health(request: Request) -> Response:
        status = served.worker.status
        said = "draining" if status.draining else "ok"
        body = {
            "status": said, "model": served.name, "context": served.worker.context,
            "running": status.running, "waiting": status.waiting, "finished": status.finished,
        }  # fmt: skip
        return JSONResponse(body, 503 if status.draining else 200)

    def answered(handler: Handler, secret: bool = True) -> Handler:
        async def run(request: Request) -> Response:
            try:
                if secret:
                    _authorised(request, served.api_key)
                return await handler(request)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                return _error(request, error)

        return run

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _error(request, ApiError(status, message, headers=dict(error.headers or {})))

    def _error(request: Request, error: Exception) -> Response:
        answer = api_error(error)
        served.log(f"{request.url.path}: {answer.status}, {answer.body['error']['message']}")
        return JSONResponse(answer.body, answer.status, answer.headers)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", answered(chat), methods=["POST"]),
            Route("/v1/completions", answered(completion), methods=["POST"]),
            Route("/v1/models", answered(models)),
            Route("/v1/models/{name:path}", answered(model)),
            Route("/health", answered(health, secret=False)),
        ],
        exception_handlers={HTTPException: unknown},
    )


async def _reply(request: Request, served: Served, asked: Asked, chat: bool) -> Response:
    prompt = await run_in_threadpool(_ids, served, asked)
    shape = Shape(chat, served.name, served.tokenizer, asked.logprobs is not None)
    exchange = Exchange(served, request.receive)
    streaming = False
    try:
        exchange.begin(prompt, asked)
        if not asked.stream:
            reply = await exchange.whole()
            served.log(_line(request, reply))
            return JSONResponse(shape.reply(reply))
        first = await exchange.next()  # what fails before it has a status of its own
        served.log(f"{request.url.path}: streaming, prompt of {len(prompt)}")
        streaming = True
        return EventStream(exchange, shape, first, asked.include_usage)
    finally:
        if not streaming:
            exchange.close()


def _ids(served: Served, asked: Asked) -> tuple[int, ...]:
    """The prompt's ids. ApiError 400 where they are none, too many, or not the model's."""
    if isinstance(asked.text, tuple):
        ids = list(asked.text)
    else:
        with served.encoding:  # a fast tokenizer may not be used by two threads at once
            if asked.messages:
                ids = encode(served.tokenizer, asked.messages)[0].tolist()
            else:
                ids = encode_text(served.tokenizer, asked.text)
    param = "messages" if asked.messages else "prompt"
    if not ids:
        raise ApiError(400, "the prompt is empty; give it some text", param)
    if len(ids) >= served.worker.context:
        message = (
            f"the prompt has {len(ids)} tokens and the context is {served.worker.context}; shorten "
            "it, or start the server with a longer --context"
        )
        raise ApiError(400, message, param, "context_length_exceeded")
    if min(ids) < 0 or max(ids) >= served.vocabulary:
        raise ApiError(400, f"prompt ids are 0 to {served.vocabulary - 1}", param)
    return tuple(ids)


async def _json_of(request: Request, served: Served) -> Any:
    """The body as JSON. ApiError 415, 413 (before more than the limit is read) or 400."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type is '{kind}'; send application/json")
    too_large = ApiError(413, f"the body is over {served.max_body} bytes", None, "body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > served.max_body:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > served.max_body:
            raise too_large
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error})") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _authorised(request: Request, key: str | None) -> None:
    """ApiError 401 where a key is wanted and another, or none, was sent."""
    if key is None:
        return
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), key.encode()):
        raise ApiError(
            401, "send the server's key: Authorization: Bearer KEY", None, "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name, "object": "model", "created": served.created,
        "owned_by": "weightpath", "max_model_len": served.worker.context,
    }  # fmt: skip


def _line(request: Request, reply: Reply) -> str:
    usage = reply.usage
    return (
        f"{request.url.path}: prompt of {usage.prompt_tokens} ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} tokens at {usage.decode_speed:.1f} a second, {reply.finish}"
    )
