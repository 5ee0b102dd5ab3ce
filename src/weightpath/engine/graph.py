"""The graph engine: generation on a static cache, a decode step replayed from a CUDA graph.

    model = GraphModel.of(load(folder, device="cuda"))   or load(folder, device="cuda", engine="graph")
    session = model.session()
    logits = session.extend(prompt_ids)                  fp32 [vocabulary], on the CPU
    replies = model.greedy(prompts, 100, ends)           tokens picked on the device

A step runs 1 to 64 sequences, each at its own length, in graphs for 1, 2, 4 ... 64 rows. A session's
cache begins small and doubles into a new place as it fills; graphs follow its address. On the CPU the
same code runs in plain torch, for tests. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weightpath.engine import graph_greedy, graph_prefill
from weightpath.engine.graph_capture import MOST_ROWS, StepRunner
from weightpath.engine.graph_step import decode_step
from weightpath.engine.graph_support import refusal
from weightpath.engine.graph_weights import DecoderWeights, rotary_tables, weights_of
from weightpath.engine.session import check_room
from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels.step import overlap_refusal, step_kernels
from weightpath.kernels.step_records import Rows

CHUNK = 2048
"""Prompt tokens of one eager pass."""
FIRST_CAPACITY = 1024
"""Positions of a session's first cache; it doubles from there."""
FIRST_TABLES = 8192
"""Positions of the rotary tables at first. Longer ones make graphs be captured anew."""
IDLE_CAPACITY = 16


class GraphModel:
    """A decoder's weights behind captured steps. kernels: "triton" or "plain" (None: by device).
    capture None: on CUDA. overlap: kernels start while others end (step.step_kernels); None: in
    captured steps of one row, where it made 4-bit steps of an 8B shape 1.17 times as fast, and not
    in larger ones, where it lost 4% at 16 rows (benchmarks/gpu_decode.py on an H200)."""

    name = "graph"

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        kernels: str | None = None,
        capture: bool | None = None,
        overlap: bool | None = None,
    ) -> None:
        self.weights = weights
        self.device = weights.table.device
        self.kernels = step_kernels(self.device, kernels, overlap or False)
        on_cuda = self.device.type == "cuda"
        self.capture = on_cuda if capture is None else capture
        if self.capture and not on_cuda:
            raise CannotRun(f"CUDA graphs are captured on CUDA; this model is on {self.device}")
        can_overlap = overlap_refusal(self.device, self.kernels.name) is None
        alone = overlap is None and self.capture and can_overlap
        self._alone = step_kernels(self.device, kernels, True) if alone else self.kernels
        self._pool = self._fresh_pool()
        self._runners: dict[int, StepRunner] = {}
        self._tables = rotary_tables(weights, min(weights.longest, FIRST_TABLES))
        self._idle = self.cache(IDLE_CAPACITY)
        self._pinned = torch.empty(0)

    @classmethod
    def of(cls, model: PreTrainedModel, **options: Any) -> GraphModel:
        """Of a transformers model. CannotRun with `refusal`'s sentence."""
        reason = refusal(model)
        if reason is not None:
            raise CannotRun(f"graph engine: {reason}")
        with torch.no_grad():
            return cls(weights_of(model), **options)

    @property
    def vocabulary(self) -> int:
        return self.weights.vocabulary

    def on_device(self) -> AbstractContextManager[Any]:
        """Kernels go to the current device, which is this model's within it."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def cache(self, capacity: int) -> Tensor:
        """An empty cache [layers, 2, kv_heads, capacity, head_dim]."""
        shape = self.weights.attention
        sizes = (len(self.weights.layers), 2, shape.kv_heads, capacity, shape.head_dim)
        return torch.zeros(sizes, dtype=self.weights.table.dtype, device=self.device)

    def session(self, context: int | None = None) -> GraphSession:
        """A new sequence of at most `context` tokens (default: the model's own limit)."""
        most = self.weights.longest
        if context is not None and not 1 <= context <= most:
            raise BadRequest(f"context {context}: the model takes 1 to {most} tokens")
        return GraphSession(self, most if context is None else context)

    @torch.inference_mode()
    def extend_many(self, sessions: Sequence[GraphSession], tokens: Sequence[int]) -> Tensor:
        """One token for each of B sequences in one step (of up to 64): logits fp32 [B, vocabulary] on
        the CPU, overwritten by the next call."""
        if len(sessions) != len(tokens) or not sessions:
            raise BadRequest(f"{len(sessions)} sessions and {len(tokens)} tokens; want one each")
        if len({id(session) for session in sessions}) != len(sessions):
            raise BadRequest("a session is named twice; a step takes one token of each")
        for session, token in zip(sessions, tokens, strict=True):
            if session.model is not self:
                raise BadRequest("a session of another model; each steps with its own")
            check_room(session, [token])
        out = self.on_cpu(len(tokens))
        with self.on_device():
            for start in range(0, len(tokens), MOST_ROWS):
                part = slice(start, start + MOST_ROWS)
                runner = self.loaded(sessions[part], [int(token) for token in tokens[part]], 1)
                out[part].copy_(runner.run()[: len(out[part])].float())
        for session, token in zip(sessions, tokens, strict=True):
            session.tokens.append(int(token))
        return out

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int] = (),
        at_once: int = MOST_ROWS,
    ) -> list[list[int]]:
        """The most likely reply to each prompt, picked on the device: no logits come to the host. A
        stop token ends a reply and is its last. CannotRun for logits that are not finite."""
        return graph_greedy.greedy(self, prompts, max_new_tokens, stop_tokens, at_once)

    def loaded(
        self, sessions: Sequence[GraphSession], tokens: Sequence[int], steps: int
    ) -> StepRunner:
        """The runner for so many rows, standing on these sessions, with room for `steps` steps."""
        for session in sessions:
            session.reserve(len(session.tokens) + steps)
        runner = self.runner(len(sessions))
        lengths = [len(session.tokens) for session in sessions]
        runner.load(tokens, lengths, [session.cache for session in sessions])
        return runner

    def runner(self, count: int) -> StepRunner:
        """The step for `count` rows, of the next power of two; captured when first asked for."""
        if not 1 <= count <= MOST_ROWS:
            raise BadRequest(f"a step of {count} rows; use 1 to {MOST_ROWS}")
        size = 1 << (count - 1).bit_length()
        if size not in self._runners:
            self._runners[size] = StepRunner(self._step, size, self._idle, self.capture, self._pool)
        return self._runners[size]

    def _fresh_pool(self) -> Any:
        """Memory for graphs to share; of a pool whose graphs are gone there is no second use."""
        return torch.cuda.graph_pool_handle() if self.capture else None

    def _step(self, rows: Rows, bad: Tensor) -> Tensor:
        kernels = self._alone if len(rows.caches) == 1 else self.kernels
        return decode_step(self.weights, kernels, self._tables, rows, bad)

    def reach(self, positions: int) -> None:
        """Rotary tables of at least so many positions; graphs on shorter ones are dropped."""
        if len(self._tables.cosines) < positions:
            self._tables = rotary_tables(self.weights, positions)
            self._runners.clear()
            self._pool = self._fresh_pool()

    def prefill(self, cache: Tensor, held: int, tokens: Sequence[int]) -> Tensor:
        """Hidden states [L, H] of tokens behind `held` cached ones, in one eager pass."""
        ids = torch.tensor(tokens, device=self.device)
        return graph_prefill.prefill(self.weights, self.kernels, self._tables, cache, held, ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [M, vocabulary] of hidden states [M, H]."""
        return graph_prefill.head(self.weights, self.kernels, hidden)

    def on_cpu(self, count: int) -> Tensor:
        """fp32 [count, vocabulary] on the CPU, the same memory every time, pinned beside a GPU."""
        if len(self._pinned) < count:
            pinned = self.device.type == "cuda"
            self._pinned = torch.empty(count, self.vocabulary, pin_memory=pinned)
        return self._pinned[:count]


class GraphSession:
    """One sequence. tokens: ids whose keys and values are cached. context: most of them."""

    def __init__(self, model: GraphModel, context: int) -> None:
        self.model, self.context = model, context
        self.tokens: list[int] = []
        with torch.inference_mode():
            self.cache = model.cache(min(context, FIRST_CAPACITY))

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Logits fp32 [vocabulary] on the CPU after the last of `tokens`; the next call of the model
        overwrites them. One token is a step, several are run in eager passes."""
        check_room(self, tokens)
        if len(tokens) == 1:
            return self.model.extend_many([self], tokens)[0]
        out = self.model.on_cpu(1)
        hidden = self._run(tokens)[-1][-1:]
        with self.model.on_device():
            out.copy_(self.model.head(hidden).float())
        return out[0]

    @torch.inference_mode()
    def all_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits fp32 [len(tokens), vocabulary] on the CPU after each token."""
        check_room(self, tokens)
        hidden = self._run(tokens)
        with self.model.on_device():
            return torch.cat([self.model.head(part).float().cpu() for part in hidden])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= len(self.tokens):
            raise BadRequest(f"truncate to {length}: the session holds {len(self.tokens)} tokens")
        del self.tokens[length:]

    @torch.inference_mode()
    def adopt(self, other: GraphSession, length: int) -> bool:
        """Hold the first `length` tokens of another session of this model in place of what is held:
        its cache is copied and nothing is run. Always true."""
        if other.model is not self.model:
            raise BadRequest("a session of another model; each takes from its own")
        if not 0 <= length <= min(len(other.tokens), self.context):
            raise BadRequest(
                f"adopt {length} tokens of {len(other.tokens)} into a context of {self.context}"
            )
        if other is self:
            self.truncate(length)
            return True
        self.reserve(length)
        self.cache[:, :, :, :length] = other.cache[:, :, :, :length]
        self.tokens[:] = other.tokens[:length]
        return True

    def reserve(self, count: int) -> None:
        """Room for `count` positions: the cache doubles until it has it, up to the context."""
        capacity = self.cache.shape[3]
        if count <= capacity:
            return
        while capacity < count:
            capacity *= 2
        capacity = min(capacity, self.context)
        self.model.reach(capacity)
        larger, held = self.model.cache(capacity), len(self.tokens)
        larger[:, :, :, :held] = self.cache[:, :, :, :held]
        self.cache = larger

    def _run(self, tokens: Sequence[int]) -> list[Tensor]:
        """Hidden states of `tokens`, in parts of at most CHUNK rows."""
        ids = [int(token) for token in tokens]
        self.reserve(len(self.tokens) + len(ids))
        parts = []
        with self.model.on_device():
            for start in range(0, len(ids), CHUNK):
                part = ids[start : start + CHUNK]
                parts.append(self.model.prefill(self.cache, len(self.tokens), part))
                self.tokens.extend(part)
        return parts
