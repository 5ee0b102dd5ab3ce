"""What a request's JSON asks for: checked field by field, in OpenAI's names.

A field is read, or it may be there (it changes no reply: `user`, `metadata`, ...), or it is taken
at the values that change nothing (`n` 1, no `tools`, ...). Any other field or value is a 400 that
names it: a server that drops what it was asked for gives answers that nobody asked for. Beyond
OpenAI's there are top_k, min_p and repetition_penalty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightpath.engine.generate import Message
from weightpath.engine.sampling import Sampling
from weightpath.serve.errors import ApiError

MOST_TOP_LOGPROBS = 20
MOST_SEED = 2**63
READ = frozenset(
    ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop",
     "max_tokens", "stream", "stream_options", "logprobs")
)  # fmt: skip
CHAT = READ | {"messages", "max_completion_tokens", "top_logprobs"}
COMPLETION = READ | {"prompt"}
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "parallel_tool_calls")
)  # fmt: skip
"""Fields that may say anything: they change no reply."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip
"""Fields of OpenAI's that are taken at these values (or null) alone."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Asked:
    """A request understood. text: a prompt, or its ids, where `messages` is empty. max_tokens None:
    as many as the context has room for. logprobs None: none asked for."""

    messages: tuple[Message, ...]
    text: str | tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    stream: bool
    include_usage: bool


def asked_of_chat(body: Any, model: str, defaults: Sampling) -> Asked:
    """A request to /v1/chat/completions. ApiError 400 or 404 naming the field."""
    fields = _fields(body, CHAT, model)
    wanted = _boolean(fields, "logprobs")
    top = _whole(fields, "top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    most = _whole(fields, "max_completion_tokens", 1)
    return _asked(
        fields, defaults, _messages(fields.get("messages")), "",
        most if most is not None else _whole(fields, "max_tokens", 1),
        (top or 0) if wanted else None,
    )  # fmt: skip


def asked_of_completion(body: Any, model: str, defaults: Sampling) -> Asked:
    """A request to /v1/completions. max_tokens is 16 where it is not given, as in OpenAI's."""
    fields = _fields(body, COMPLETION, model)
    most = _whole(fields, "max_tokens", 1)
    return _asked(
        fields, defaults, (), _prompt(fields.get("prompt")), 16 if most is None else most,
        _whole(fields, "logprobs", 0, MOST_TOP_LOGPROBS),
    )  # fmt: skip


def _asked(
    fields: Mapping[str, Any],
    defaults: Sampling,
    messages: tuple[Message, ...],
    text: str | tuple[int, ...],
    max_tokens: int | None,
    logprobs: int | None,
) -> Asked:
    stream = _boolean(fields, "stream")
    options = fields.get("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise ApiError(400, "stream_options is an object, with stream: true", "stream_options")
    for name in set(options or {}) - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, f"stream_options.{name} is not known", "stream_options")
    sampling = Sampling(
        _number(fields, "temperature", defaults.temperature, 0.0, 2.0),
        _or(_whole(fields, "top_k", 0), defaults.top_k),
        _number(fields, "top_p", defaults.top_p, 0.0, 1.0),
        _number(fields, "min_p", defaults.min_p, 0.0, 1.0),
        _number(fields, "repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        _whole(fields, "seed", -MOST_SEED, MOST_SEED),
    )
    return Asked(
        messages, text, sampling, max_tokens, _stops(fields.get("stop")), logprobs, stream,
        _boolean(options or {}, "include_usage"),
    )  # fmt: skip


def _fields(body: Any, read: frozenset[str], model: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    for name, value in body.items():
        if name in read or name in HARMLESS:
            continue
        if name not in NEUTRAL:
            raise ApiError(400, f"field {name} is not known; leave it out", name)
        if value is not None and not any(_same(value, one) for one in NEUTRAL[name]):
            raise ApiError(400, f"{name} is not done by this server; leave it out", name)
    if body.get("model") not in (None, model):
        raise ApiError(404, f"model '{body['model']}' is not here; this server has '{model}'",
                       "model", "model_not_found")  # fmt: skip
    return body


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages is a list of at least one message", "messages")
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(value))


def _message(one: Any, where: str) -> Message:
    if not isinstance(one, dict):
        raise ApiError(400, f"{where} is no object with role and content", "messages")
    role = one.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}: role is one of {', '.join(ROLES)}", "messages")
    for name in set(one) - {"role", "content", "name", "refusal", "annotations"}:
        if one[name] not in (None, []):
            raise ApiError(400, f"{where}: {name} is not done by this server", "messages")
    content = one.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
                 for part in content]  # fmt: skip
        known = [text for text in texts if isinstance(text, str)]
        if len(known) < len(texts):
            raise ApiError(400, f"{where}: content has a part that is no text", "messages")
        content = "".join(known)
    return {"role": ROLES[role], "content": _text(content, f"{where}.content", "messages")}


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return tuple(value)
    if not isinstance(value, str):
        raise ApiError(400, "prompt is one text, or a list of token ids", "prompt")
    return _text(value, "prompt", "prompt")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_text(one, "stop", "stop") for one in stops)


def _text(value: Any, where: str, param: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{where} is no text", param)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ApiError(400, f"{where} holds half a surrogate pair", param) from None
    return value


def _number(fields: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise ApiError(400, f"{name} is a number from {low:g} to {high:g}", name)
    return float(value)


def _whole(fields: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"from {low}" if high is None else f"from {low} to {high}"
        raise ApiError(400, f"{name} is a whole number {bound}", name)
    return value


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} is true or false", name)
    return bool(value)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
