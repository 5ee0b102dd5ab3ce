"""One sequence being run: the ids in its cache, and logits for what is added to it.

An `Engine` opens sessions on one model and can run one token of several of them in one step. The
native engine sets itself as `model.weightpath.native`; where there is none, sessions run
through transformers' own modules and cache. Everything above (stream, serve, the command line)
sees these two protocols only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from weightpath.errors import BadRequest

UNBOUNDED = 1 << 20
"""Tokens of a session whose model's config names no limit."""


class Session(Protocol):
    """One sequence. tokens: ids whose keys and values are cached. context: most tokens."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def context(self) -> int: ...

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Add tokens (at least one): logits fp32 [vocabulary] on the CPU after the last of them.
        The tensor is overwritten by the next call. BadRequest beyond `context`."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; the next `extend` gives what a fresh session would."""
        ...

    def adopt(self, other: Any, length: int) -> bool:
        """Hold the first `length` tokens of another session of the same engine, by copying its
        cache. False where its cache cannot be cut there; this session is then as it was."""
        ...


class Engine(Protocol):
    """A model as sessions see it. name: as `load` takes it."""

    @property
    def name(self) -> str: ...

    def session(self, context: int | None = None) -> Session:
        """A fresh session; context None takes the model's own limit."""
        ...

    def extend_many(self, sessions: Sequence[Any], tokens: Sequence[int]) -> Tensor:
        """One token for each of this engine's sessions: logits fp32 [B, vocabulary] on the CPU."""
        ...


class TransformersSession:
    """A session on a transformers model and its DynamicCache, batch 1, on the model's device.

    Layers with a sliding window forget what lies before it, and recurrent layers (Mamba, linear
    attention) everything but a state, so neither can be cut: `truncate` then drops the cache, and
    the tokens that it kept are run again with the next `extend`. Models that bring a cache class of
    their own, and encoder-decoders, are refused with BadRequest.
    """

    def __init__(self, model: PreTrainedModel, context: int | None = None) -> None:
        if not model.can_generate():
            raise BadRequest(f"{type(model).__name__} does not generate text: use a decoder")
        decoder: Any = model
        if model.config.is_encoder_decoder or not decoder._supports_default_dynamic_cache():
            raise BadRequest(
                f"{type(model).__name__} is no plain decoder; call its own generate() instead"
            )
        config = model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None) or UNBOUNDED
        if context is not None and not 1 <= context <= longest:
            raise BadRequest(f"context {context}: the model takes 1 to {longest} tokens")
        self.tokens: list[int] = []
        self.context: int = context or longest
        self._model = decoder
        self._config = config
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._clear()

    def _clear(self) -> None:
        self._cache = DynamicCache(config=self._config)
        self._cached = 0

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int]) -> Tensor:
        """As `Session.extend`. Whatever goes wrong leaves the session as it was."""
        check_room(self, tokens)
        pending = [*self.tokens[self._cached :], *tokens]
        ids = torch.tensor([pending], device=self._model.device)
        try:
            out = self._model(
                input_ids=ids, use_cache=True, **{self._cache_name: self._cache}, **self._last
            )
        except BaseException:
            self._clear()
            raise
        self.tokens.extend(tokens)
        self._cached = len(self.tokens)
        return out.logits[0, -1].float().cpu()

    def truncate(self, length: int) -> None:
        """As `Session.truncate`."""
        if not 0 <= length <= len(self.tokens):
            raise BadRequest(f"truncate to {length}: the session holds {len(self.tokens)} tokens")
        del self.tokens[length:]
        if length >= self._cached:
            return
        if length and all(_can_be_cut(layer) for layer in self._cache.layers):
            self._cache.crop(length - self._cached)  # negative: tokens to take off the end
            self._cached = length
        else:
            self._clear()

    def adopt(self, other: TransformersSession, length: int) -> bool:
        """As `Session.adopt`."""
        if not 0 <= length <= min(len(other.tokens), self.context):
            raise BadRequest(
                f"adopt {length} tokens of {len(other.tokens)} into a context of {self.context}"
            )
        layers = other._cache.layers
        if not 0 < length <= other._cached or not all(_can_be_cut(layer) for layer in layers):
            return False
        if other is not self:
            self._cache = copy.deepcopy(other._cache)
            self.tokens[:], self._cached = other.tokens[: other._cached], other._cached
        self.truncate(length)
        return True


class TransformersEngine:
    """Sessions on a transformers model. Several sessions run one after another."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def session(self, context: int | None = None) -> TransformersSession:
        """As `Engine.session`."""
        return TransformersSession(self._model, context)

    def extend_many(self, sessions: Sequence[Session], tokens: Sequence[int]) -> Tensor:
        """As `Engine.extend_many`."""
        pairs = zip(sessions, tokens, strict=True)
        return torch.stack([session.extend([token]) for session, token in pairs])


def engine_of(model: PreTrainedModel) -> Engine:
    """The native engine that `load` put beside the model, else transformers."""
    native = getattr(getattr(model, "weightpath", None), "native", None)
    return TransformersEngine(model) if native is None else native


def open_session(model: PreTrainedModel, context: int | None = None) -> Session:
    """A fresh session on the model's engine."""
    return engine_of(model).session(context)


def check_room(session: Session, tokens: Sequence[int]) -> None:
    """BadRequest where `tokens` is empty or does not fit behind what the session holds."""
    held = len(session.tokens)
    if not tokens:
        raise BadRequest("a session is extended by at least one token")
    if held + len(tokens) > session.context:
        raise BadRequest(
            f"{held} tokens and {len(tokens)} more are beyond the context of {session.context}; "
            "shorten the prompt, or open the session with a longer context"
        )


def common_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many ids the two have in common from the start."""
    both = min(len(held), len(wanted))
    return next((i for i in range(both) if held[i] != wanted[i]), both)


def _can_be_cut(layer: Any) -> bool:
    """Whether a cache layer still holds every position. Of other kinds than these two: no."""
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.get_seq_length() < layer.sliding_window
    return type(layer) is DynamicLayer
