"""The rows of a KV budget: each distinct cache of a decoder, multiplied out for what was asked.

Also what transformers 5.24 holds beyond the formulas (DIFFERENCES): kv_budget.py says when either
counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weightpath.errors import BadRequest
from weightpath.paths.kv_fields import Fields
from weightpath.paths.kv_layers import DecoderCache, TokenCache
from weightpath.paths.kv_states import StateCache

KV_DTYPES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 0), "int8": (1, 4)}
"""Name -> (bytes an element, bytes of scale a head's vector)."""
_SAME = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8",
         "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8"}  # fmt: skip
DIFFERENCES = {
    "window": "transformers keeps window - 1 tokens of a sliding or chunked layer: the newest "
    "token joins them in the step itself",
    "columns": "transformers keeps kernel inputs of a convolution, of which kernel - 1 are needed",
    "expanded": "transformers repeats Falcon's KV heads to all query heads before it keeps them",
}
"""How transformers 5.24's cache differs from what a decoder needs."""


@dataclass(frozen=True)
class KVRow:
    """Layers that keep the same thing. `layers` of them; bytes are for all of the row.

    bytes_per_token: what one token adds while it is kept (0 for a state). tokens: kept a sequence.
    bytes_per_sequence, total_bytes: at the context asked, for one and for all sequences.
    read_bytes: what a decode step of all sequences reads, a shared layer the other layer's again.
    """

    kind: str
    what: str
    layers: int
    bytes_per_token: int
    tokens: int
    bytes_per_sequence: int
    total_bytes: int
    flat_bytes: int
    read_bytes: int


def dtype_named(name: str, otherwise: str | None = None) -> str:
    """A key of KV_DTYPES by any of its spellings; `otherwise` for auto. BadRequest if unknown."""
    plain = _SAME.get(name.removeprefix("torch."), name)
    if plain == "auto" and otherwise is not None:
        return otherwise
    if plain not in KV_DTYPES:
        raise BadRequest(f"dtype '{name:.40}': unknown; use auto, {', '.join(KV_DTYPES)}")
    return plain


@dataclass(frozen=True)
class KVAsked:
    """What a budget is worked out for: tokens, sequences, dtypes of keys and values (kv), of the
    model and of states, tokens of a block, tokens that cross attention attends to (source), and
    how often each KV head is kept (repeats)."""

    context: int
    sequences: int
    kv: str
    model: str
    state: str
    block_size: int
    source: int
    held_by: str
    repeats: int

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_size


def kv_rows(cache: DecoderCache, shape: KVAsked) -> tuple[KVRow, ...]:
    """One row a distinct cache, in order of first appearance."""
    counts = Counter(part for parts in cache.layers for part in parts)
    return tuple(
        _token_row(part, count, shape)
        if isinstance(part, TokenCache)
        else _state_row(part, count, shape)
        for part, count in counts.items()
    )


def _token_row(part: TokenCache, layers: int, shape: KVAsked) -> KVRow:
    each, scale = KV_DTYPES[shape.kv]
    per_token = layers * shape.repeats * (part.elements * each + part.vectors * scale)
    wanted = shape.source if part.kind == "cross_attention" else shape.context
    window = part.window
    if window is not None and shape.held_by == "transformers" and window > 1:
        window -= 1
    kept = shape.rounded(wanted if window is None else min(window, wanted))
    total = per_token * kept * shape.sequences
    reads = total
    if part.kind == "shared_kv":
        reads = layers * (part.flat_elements * each + part.flat_vectors * scale)
        reads, kept = reads * kept * shape.sequences, 0
    flat = layers * (part.flat_elements * each + part.flat_vectors * scale)
    flat *= shape.rounded(wanted) * shape.sequences
    return KVRow(part.kind, part.shape, layers, per_token, kept, per_token * kept, total, flat,
                 reads)  # fmt: skip


def _state_row(part: StateCache, layers: int, shape: KVAsked) -> KVRow:
    model, state = KV_DTYPES[shape.model][0], KV_DTYPES[shape.state][0]
    columns = _columns(part) if shape.held_by == "transformers" else None
    own = layers * part.nbytes(model, state, columns)
    inputs = f"convolution {part.channels} x {part.kernel - 1}, " if part.channels else ""
    what = f"{part.family}: {inputs}state {part.recurrent}"
    total = own * shape.sequences
    return KVRow(part.kind, what, layers, 0, 0, own, total, 0, total)


def grows(row: KVRow) -> bool:
    return row.bytes_per_token > 0 and row.kind != "cross_attention"


def differences(cache: DecoderCache, fields: Fields) -> tuple[str, ...]:
    """The differences of transformers' cache that touch this model."""
    parts = [part for parts in cache.layers for part in parts]
    found = {
        "window": any(isinstance(part, TokenCache) and part.window for part in parts),
        "columns": any(isinstance(part, StateCache) and _columns(part) for part in parts),
        "expanded": repeats(fields) > 1,
    }
    return tuple(DIFFERENCES[name] for name, touches in found.items() if touches)


def _columns(part: StateCache) -> int | None:
    """Inputs of the convolution that transformers keeps; None where it is what is needed."""
    return None if part.family == "RG-LRU" or not part.channels else part.kernel


def repeats(fields: Fields) -> int:
    """How often transformers keeps each KV head: Falcon's are repeated before they are kept."""
    values = fields.values
    if values.get("model_type") != "falcon" or not values.get("new_decoder_architecture"):
        return 1
    return fields.need("num_attention_heads") // (fields.first("num_kv_heads") or 1)
