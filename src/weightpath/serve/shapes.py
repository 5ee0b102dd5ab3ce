"""Replies in OpenAI's shapes: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weightpath.engine.sampling import TokenLogprob
from weightpath.engine.stream import Piece, Reply, Usage


@dataclass(frozen=True)
class Shape:
    """How one request's replies look. chat: of /v1/chat/completions, else of /v1/completions.
    logprobs: whether they were asked for."""

    chat: bool
    model: str
    tokenizer: Any = field(repr=False)
    logprobs: bool = False
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def reply(self, reply: Reply) -> dict[str, Any]:
        """The whole reply."""
        probabilities = self._logprobs(reply.tokens, 0)
        said: dict[str, Any] = {"text": reply.text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": reply.text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": probabilities, "finish_reason": reply.finish}
        return {**self._head(whole=True), "choices": [choice], "usage": usage(reply.usage)}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first piece: a chat says whose turn it is."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)] if self.chat else []

    def chunk(self, piece: Piece, offset: int) -> dict[str, Any] | None:
        """A piece as a chunk; None where there is nothing to say. offset: characters
        of the tokens before it."""
        if not piece.text and piece.finish is None and not self.logprobs:
            return None
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        text = delta if self.chat else piece.text
        return self._chunk(text, self._logprobs(piece.tokens, offset), piece.finish)

    def width(self, piece: Piece) -> int:
        """Characters of a piece's tokens, counted where log-probabilities give offsets."""
        return sum(len(self._text(token.token)) for token in piece.tokens) if self.logprobs else 0

    def closing(self, counts: Usage) -> dict[str, Any]:
        """The chunk after the last piece, where usage was asked for."""
        return {**self._head(whole=False), "choices": [], "usage": usage(counts)}

    def _chunk(self, said: Any, probabilities: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.chat else "text": said, "logprobs": probabilities,
                  "finish_reason": finish}  # fmt: skip
        return {**self._head(whole=False), "choices": [choice]}

    def _head(self, whole: bool) -> dict[str, Any]:
        if self.chat:
            kind, prefix = "chat.completion" if whole else "chat.completion.chunk", "chatcmpl"
        else:
            kind, prefix = "text_completion", "cmpl"
        return {
            "id": f"{prefix}-{self.identity}", "object": kind, "created": self.created,
            "model": self.model,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.chat:
            return {"content": [self._one(token) for token in tokens], "refusal": None}
        texts = [self._text(token.token) for token in tokens]
        offsets = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
        best = [{self._text(i): p for i, p in token.best} for token in tokens]
        return {
            "tokens": texts, "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": best, "text_offset": offsets,
        }  # fmt: skip

    def _one(self, token: TokenLogprob) -> dict[str, Any]:
        best = [self._entry(index, logprob) for index, logprob in token.best]
        return {**self._entry(token.token, token.logprob), "top_logprobs": best}

    def _entry(self, index: int, logprob: float) -> dict[str, Any]:
        text = self._text(index)
        # A token that is part of a character has no text of its own, and its bytes are not told.
        whole = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": whole}

    def _text(self, index: int) -> str:
        return self.tokenizer.decode([index], clean_up_tokenization_spaces=False)


def usage(counts: Usage) -> dict[str, Any]:
    """Token counts, those of the prompt found in a cache beside them."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }
