"""The native engine: a whole decoder step in one C++ call (cpp/decoder.hpp).

    model = NativeModel(load(folder))        from any model that `refusal` says nothing against
    session = model.session(context=4096)    one sequence and its cache
    logits = session.extend(prompt_ids)      fp32 [vocabulary], after the last token
    logits = session.extend([next_id])

Results do not depend on how a text is cut into calls, on the number of threads, or on what else
shares a step: a prompt in one piece, in many, or token by token gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weightpath.engine import native_support
from weightpath.engine.native_support import refusal
from weightpath.engine.native_weights import Weights
from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import KINDS
from weightpath.nn.low_bit_linear import LowBitLinear

__all__ = ["NativeModel", "Session", "refusal"]

CACHE_KINDS = {"bf16": 0, "int8": 1, "fp32": 2}
"""Elements of keys and values; int8 has one scale a position and head for each of the two."""
CHUNK, WIDE_CHUNK, WIDE_THREADS = 256, 512, 8
"""Rows of a step at most, where nothing is asked for: a longer prompt takes several steps. Prompts of
512 in one step instead of two: 0.95 times the speed on two Zen 4 cores, 1.12 to 1.26 times on 16
threads of an AMX machine (docs/experiments.md)."""
CONTEXT = 8192
"""A session's context where none is asked for and the model's own is longer."""


class NativeModel:
    """A transformers model's weights behind the C++ decoder. CannotRun with `refusal`'s sentence.

    Weights are in memory once: the modules hold their tiles where the decoder reads them. Activation
    bits and scales are those that the modules have now. cache: bf16, int8 or fp32. chunk: rows of a
    step at most (None: by threads). instruction_set: one by name, for tests. threads: None follows
    torch.get_num_threads() at each call.
    """

    name = "native"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache: str = "bf16",
        chunk: int | None = None,
        instruction_set: str = "",
        threads: int | None = None,
    ) -> None:
        reason = refusal(model)
        if reason is not None:
            raise CannotRun(f"native engine: {reason}")
        if cache not in CACHE_KINDS:
            raise BadRequest(f"cache '{cache}': unknown; there are {', '.join(CACHE_KINDS)}")
        if chunk is None:
            wide = (threads or torch.get_num_threads()) >= WIDE_THREADS
            chunk = WIDE_CHUNK if wide else CHUNK
        if chunk < 1:
            raise BadRequest(f"{chunk} rows of a step; use 1 or more")
        self.model, self.config, self.chunk, self.threads = model, model.config, chunk, threads
        self.cache = cache
        self.vocabulary: int = model.get_output_embeddings().out_features  # type: ignore[assignment]
        self._weights = Weights(native_support.linears(model).values())
        self._cache_shape = (
            CACHE_KINDS[cache],
            self.config.num_hidden_layers,
            self.config.num_key_value_heads,
            native_support.head_dim(self.config),
        )
        cpu.chosen_instruction_set(instruction_set)
        self._decoder = self._build(instruction_set)
        self._tables: list[tuple[Tensor, Tensor]] = []  # none is freed: a step may be reading it

    def _build(self, instruction_set: str) -> Any:
        config, weights, decoder_model = self.config, self._weights, self.model.model
        cache_kind, layers, kv_heads, head_dim = self._cache_shape
        table = self.model.get_input_embeddings().weight.detach().contiguous()  # type: ignore[union-attr]
        weights.kept.append(table)
        attention: Any = decoder_model.layers[0].self_attn  # type: ignore[union-attr, index]
        decoder = cpu.extension().Decoder(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=table.shape[0],
            most_rows=self.chunk,
            layers=layers,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scaling=attention.scaling,
            epsilon=config.rms_norm_eps,
            cache_kind=cache_kind,
            table=table.data_ptr(),
            table_kind=KINDS[table.dtype],
            instruction_set=instruction_set,
        )
        for index, layer in enumerate(decoder_model.layers):  # type: ignore[union-attr, arg-type]
            attention, mlp = layer.self_attn, layer.mlp
            mixing = [getattr(attention, name) for name in native_support.ATTENTION_LINEARS]
            gate, up, down = (getattr(mlp, name) for name in native_support.MLP_LINEARS)
            q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
            decoder.add_layer(
                index,
                weights.matrices(mixing)
                + weights.matrices([gate, up], paired=True)
                + weights.matrices([down]),
                weights.vector(layer.input_layernorm.weight),
                weights.vector(layer.post_attention_layernorm.weight),
                weights.vector(None if q_norm is None else q_norm.weight),
                weights.vector(None if k_norm is None else k_norm.weight),
                native_support.window(self.model, layer),
            )
        decoder.set_head(
            weights.vector(decoder_model.norm.weight),  # type: ignore[union-attr]
            *weights.matrices([self.model.get_output_embeddings()]),  # type: ignore[list-item]
        )
        return decoder

    @property
    def packed_blocks(self) -> list[tuple[Tensor, tuple[LowBitLinear, ...]]]:
        """The packed matrices as a step reads them (native_weights.py)."""
        return self._weights.blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one step reads, the cache and the embedding's row left out."""
        return self._weights.bytes

    def session(self, context: int | None = None) -> Session:
        """A new sequence of at most `context` tokens (default: the model's, at most CONTEXT)."""
        most = int(self.config.max_position_embeddings)
        context = min(most, CONTEXT) if context is None else context
        if not 1 <= context <= most:
            raise BadRequest(f"context {context}: the model takes 1 to {most} tokens")
        if not self._tables or self._tables[-1][0].shape[0] < context:
            cosines, sines = native_support.rope_tables(self.model, context)
            self._tables.append((cosines, sines))
            self._decoder.set_rope(cosines.data_ptr(), sines.data_ptr(), *cosines.shape)
        return Session(self, context)

    def cache_bytes(self, context: int) -> int:
        """Bytes of a session's cache when it is full."""
        module = cpu.extension()
        return -(-context // module.CACHE_BLOCK) * module.cache_block_bytes(*self._cache_shape)

    def extend_many(self, sessions: Sequence[Session], tokens: Sequence[int]) -> Tensor:
        """One token for each of B sequences in one step; logits fp32 [B, vocabulary]."""
        if len(sessions) != len(tokens) or not sessions:
            raise BadRequest(f"{len(sessions)} sessions and {len(tokens)} tokens; want one each")
        if len({id(session) for session in sessions}) != len(sessions):
            raise BadRequest("a session is named twice; a step takes one token of each")
        for session in sessions:
            if session.model is not self:
                raise BadRequest("a session of another model; each steps with its own")
            session.check_room(1)
        logits = torch.empty(len(tokens), self.vocabulary, dtype=torch.float32)
        for start in range(0, len(tokens), self.chunk):
            part, ids = sessions[start : start + self.chunk], tokens[start : start + self.chunk]
            self.step(
                [int(token) for token in ids],
                [session.address for session in part],
                [len(session.tokens) for session in part],
                list(range(len(ids))),
                logits[start:],
            )
            for session, token in zip(part, ids, strict=True):
                session.tokens.append(int(token))
        return logits

    def step(
        self,
        tokens: list[int],
        caches: list[int],
        positions: list[int],
        wanted: list[int],
        logits: Tensor | None,
    ) -> None:
        """One C++ step. Rows' tokens, cache addresses and positions; logits of the rows `wanted`."""
        address = 0 if logits is None else logits.data_ptr()
        threads = self.threads or torch.get_num_threads()
        try:
            self._decoder.step(tokens, caches, positions, wanted, address, threads)
        except (ValueError, MemoryError) as refused:
            raise BadRequest(f"native engine: {refused}") from refused

    def profile(self, on: bool = True) -> None:
        """Count nanoseconds by phase from now on, of the calling thread's walk; off at first."""
        self._decoder.profile(on)

    def nanoseconds(self) -> dict[str, int]:
        """What `profile` counted; `waiting` is time at barriers."""
        return dict(self._decoder.nanoseconds())


class Session:
    """One sequence. tokens: ids whose keys and values are cached. context: most of them.

    Memory for the whole context is mapped at once and backed by the system as it is touched.
    """

    def __init__(self, model: NativeModel, context: int) -> None:
        self.model, self.context = model, context
        self.tokens: list[int] = []
        size = model.cache_bytes(context)
        self._memory = cpu.fresh_memory(size) if size >= cpu.HUGE_PAGE else _zeros(size)
        self.address = self._memory.data_ptr()
        self._logits = torch.empty(model.vocabulary, dtype=torch.float32)

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Logits fp32 [vocabulary] after the last of `tokens`; the next call overwrites them."""
        self._run(tokens, self._logits, every=False)
        return self._logits

    def all_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits fp32 [len(tokens), vocabulary] after each token."""
        logits = torch.empty(len(tokens), self.model.vocabulary, dtype=torch.float32)
        self._run(tokens, logits, every=True)
        return logits

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not 0 <= length <= len(self.tokens):
            raise BadRequest(f"truncate to {length} of {len(self.tokens)} tokens")
        del self.tokens[length:]

    def adopt(self, other: Session, length: int) -> bool:
        """Hold the first `length` tokens of another session of this model in place of what is held:
        the cache is copied in whole blocks, and nothing is run. Always true."""
        if other.model is not self.model:
            raise BadRequest("a session of another model; each takes from its own")
        if not 0 <= length <= min(len(other.tokens), self.context):
            raise BadRequest(
                f"adopt {length} tokens of {len(other.tokens)} into a context of {self.context}"
            )
        if other is not self:
            size = self.model.cache_bytes(length)  # what lies behind `length` is never read
            self._memory[:size].copy_(other._memory[:size])
            self.tokens[:] = other.tokens[:length]
        else:
            self.truncate(length)
        return True

    def check_room(self, count: int) -> None:
        """BadRequest where `count` more tokens do not fit the context."""
        if len(self.tokens) + count > self.context:
            raise BadRequest(
                f"a context of {self.context} tokens: {len(self.tokens)} held and {count} more; "
                "open a session with a longer context, or truncate"
            )

    def _run(self, tokens: Sequence[int], logits: Tensor, every: bool) -> None:
        if not len(tokens):
            raise BadRequest("extend by no tokens; give 1 or more")
        self.check_room(len(tokens))
        ids, chunk = [int(token) for token in tokens], self.model.chunk
        for start in range(0, len(ids), chunk):
            part, held = ids[start : start + chunk], len(self.tokens)
            last = start + len(part) == len(ids)
            wanted = list(range(len(part))) if every else [len(part) - 1] if last else []
            self.model.step(
                part,
                [self.address] * len(part),
                list(range(held, held + len(part))),
                wanted,
                logits[start:] if every else logits,
            )
            self.tokens.extend(part)


def _zeros(size: int) -> Tensor:
    """uint8 [size + 64] from a multiple of 64 on."""
    whole = torch.zeros(size + 64, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][:size]
