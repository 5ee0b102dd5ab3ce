"""How many bytes of KV cache and state a model needs for its sequences and context.

    flat      sequences * attention_layers * context * bytes a token
    hybrid    sequences * sum over layers of min(window, context) * bytes a token  + states

    bytes a token of one layer = kv_heads * head_dim * 2 * dtype bytes

From the edge selector (shared reference, section A). Its worked example: 28 layers, 21 of them
sliding with a window of 512, 2 KV heads of 256 in 2 bytes, 32,768 tokens: 917,504 against 240,128
token-layers, 1792 against 469 MiB. The flat figure counts every attention layer as one that grows
with the context, latent attention as the keys and values of every head, and no state.

`held_by="transformers"` counts what transformers' DynamicCache holds instead, which differs in the
ways that DIFFERENCES names. `block_size` rounds each length up to whole blocks, as vLLM and other
paged caches do (16 there). int8 is weightpath's own: a scale in fp32 for each head's keys and each
head's values of a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightpath.errors import BadRequest
from weightpath.paths.kv_fields import Fields, section_at, text_path, towers
from weightpath.paths.kv_layers import DecoderCache, TokenCache, decoder_cache
from weightpath.paths.kv_notes import notes
from weightpath.paths.kv_states import StateCache

KV_DTYPES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 0), "int8": (1, 4)}
"""Name -> (bytes an element, bytes of scale a head's vector)."""
_SAME = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8",
         "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8"}  # fmt: skip
HEADROOM = 1.25
"""What a reservation adds over the count for fragmentation and growth: the edge selector's."""
MOST = 1 << 40
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


@dataclass(frozen=True)
class KVBudget:
    """The budget: a row a kind, the total, and the naive figure. Bytes throughout.

    token_layers, flat_token_layers: tokens kept times layers, without states and cross attention.
    filled: fields that came from defaults and not from the config (set by who read it).
    """

    context: int
    sequences: int
    kv_dtype: str
    state_dtype: str
    model_dtype: str
    block_size: int
    source_tokens: int
    held_by: str
    rows: tuple[KVRow, ...]
    total_bytes: int
    flat_bytes: int
    token_layers: int
    flat_token_layers: int
    towers: tuple[str, ...]
    differences: tuple[str, ...]
    notes: tuple[str, ...]
    fields: dict[str, Any]
    filled: tuple[str, ...] = ()

    @property
    def difference_bytes(self) -> int:
        """The flat figure less the total: what counting by kind saves (negative: what it adds)."""
        return self.flat_bytes - self.total_bytes

    @property
    def bytes_per_token(self) -> int:
        """What one token adds to one sequence before any window is full."""
        return sum(row.bytes_per_token for row in self.rows if row.kind != "cross_attention")

    @property
    def read_bytes(self) -> int:
        """What one decode step of all sequences reads at the context asked: every key and value
        kept, a shared layer's from the layer that has them, and the states."""
        return sum(row.read_bytes for row in self.rows)

    @property
    def state_bytes(self) -> int:
        """Bytes of all sequences that no context changes: states and cross attention."""
        fixed = [
            row for row in self.rows if not row.bytes_per_token or row.kind == "cross_attention"
        ]
        return sum(row.total_bytes for row in fixed)

    def reserved_bytes(self, headroom: float = HEADROOM) -> int:
        """The total with headroom over it, rounded up."""
        return -int(-self.total_bytes * headroom // 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with what follows from the fields."""
        return asdict(self) | {
            "difference_bytes": self.difference_bytes,
            "bytes_per_token": self.bytes_per_token,
            "state_bytes": self.state_bytes,
            "read_bytes": self.read_bytes,
            "reserved_bytes": self.reserved_bytes(),
        }


def kv_budget(
    config: Mapping[str, Any],
    context: int,
    sequences: int = 1,
    kv_dtype: str = "auto",
    *,
    block_size: int = 1,
    source_tokens: int | None = None,
    state_dtype: str = "auto",
    held_by: str = "formula",
    where: str = "config.json",
) -> KVBudget:
    """The cache of `sequences` sequences of `context` tokens of the model that a config describes.

    kv_dtype: auto (the model's), fp32, bf16, fp16, fp8 or int8. state_dtype: of recurrent states;
    auto is what the config says, else fp32. source_tokens: what cross attention attends to, where
    the config does not fix it. held_by: "formula" or "transformers". BadRequest for a wrong option,
    BadCheckpoint for geometry that is missing, naming the field.
    """
    for name, value in (("context", context), ("sequences", sequences), ("block size", block_size)):
        if not 1 <= value <= MOST:
            raise BadRequest(f"{name} {value}: use a whole number above 0")
    if held_by not in ("formula", "transformers"):
        raise BadRequest(f"held_by '{held_by}': use formula or transformers")
    path = text_path(config)
    fields = Fields(section_at(config, path), ".".join((where, *path)))
    encoder_decoder = any(
        section.get(name)
        for section in (config, fields.values)
        for name in ("is_encoder_decoder", "add_cross_attention")
    )
    cache = decoder_cache(fields, encoder_decoder)
    model = dtype_named(_model_dtype(config, fields))
    kv, state = dtype_named(kv_dtype, model), dtype_named(state_dtype, _state_dtype(fields))
    source = _source_tokens(config, fields, cache, source_tokens, context)
    shape = _Shape(context, sequences, kv, model, state, block_size, source, held_by,
                   _repeats(fields) if held_by == "transformers" else 1)  # fmt: skip
    rows = _rows(cache, shape)
    return KVBudget(
        context=context, sequences=sequences, kv_dtype=kv, state_dtype=state, model_dtype=model,
        block_size=block_size, source_tokens=source, held_by=held_by, rows=rows,
        total_bytes=sum(row.total_bytes for row in rows),
        flat_bytes=sum(row.flat_bytes for row in rows),
        token_layers=sequences * sum(r.layers * r.tokens for r in rows if _grows(r)),
        flat_token_layers=sequences * sum(
            r.layers * shape.rounded(context) for r in rows if _grows(r) or r.kind == "shared_kv"
        ),
        towers=towers(config, path),
        differences=_differences(cache, fields) if held_by == "transformers" else (),
        notes=notes(cache, fields, context, kv, block_size, source_tokens, towers(config, path)),
        fields=dict(fields.used),
    )  # fmt: skip


def dtype_named(name: str, otherwise: str | None = None) -> str:
    """A key of KV_DTYPES by any of its spellings; `otherwise` for auto. BadRequest if unknown."""
    plain = _SAME.get(name.removeprefix("torch."), name)
    if plain == "auto" and otherwise is not None:
        return otherwise
    if plain not in KV_DTYPES:
        raise BadRequest(f"dtype '{name:.40}': unknown; use auto, {', '.join(KV_DTYPES)}")
    return plain


@dataclass(frozen=True)
class _Shape:
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


def _rows(cache: DecoderCache, shape: _Shape) -> tuple[KVRow, ...]:
    """One row a distinct cache, in order of first appearance."""
    counts = Counter(part for parts in cache.layers for part in parts)
    return tuple(
        _token_row(part, count, shape)
        if isinstance(part, TokenCache)
        else _state_row(part, count, shape)
        for part, count in counts.items()
    )


def _token_row(part: TokenCache, layers: int, shape: _Shape) -> KVRow:
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


def _state_row(part: StateCache, layers: int, shape: _Shape) -> KVRow:
    model, state = KV_DTYPES[shape.model][0], KV_DTYPES[shape.state][0]
    columns = _columns(part) if shape.held_by == "transformers" else None
    own = layers * part.nbytes(model, state, columns)
    inputs = f"convolution {part.channels} x {part.kernel - 1}, " if part.channels else ""
    what = f"{part.family}: {inputs}state {part.recurrent}"
    total = own * shape.sequences
    return KVRow(part.kind, what, layers, 0, 0, own, total, 0, total)


def _grows(row: KVRow) -> bool:
    return row.bytes_per_token > 0 and row.kind != "cross_attention"


def _differences(cache: DecoderCache, fields: Fields) -> tuple[str, ...]:
    """The differences of transformers' cache that touch this model."""
    parts = [part for parts in cache.layers for part in parts]
    found = {
        "window": any(isinstance(part, TokenCache) and part.window for part in parts),
        "columns": any(isinstance(part, StateCache) and _columns(part) for part in parts),
        "expanded": _repeats(fields) > 1,
    }
    return tuple(DIFFERENCES[name] for name, touches in found.items() if touches)


def _columns(part: StateCache) -> int | None:
    """Inputs of the convolution that transformers keeps; None where it is what is needed."""
    return None if part.family == "RG-LRU" or not part.channels else part.kernel


def _repeats(fields: Fields) -> int:
    """How often transformers keeps each KV head: Falcon's are repeated before they are kept."""
    values = fields.values
    if values.get("model_type") != "falcon" or not values.get("new_decoder_architecture"):
        return 1
    return fields.need("num_attention_heads") // (fields.first("num_kv_heads") or 1)


def _model_dtype(config: Mapping[str, Any], fields: Fields) -> str:
    """The dtype the config names, of its decoder's section first; bf16 where it names none."""
    for section in (fields, Fields(config, fields.where, fields.used)):
        for name in ("dtype", "torch_dtype"):
            if isinstance(said := section.get(name), str) and said != "auto":
                return said
    return "bf16"


def _state_dtype(fields: Fields) -> str:
    """The recurrent state's dtype as the config says it, else fp32, as transformers keeps it."""
    for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        said = fields.get(name)
        if isinstance(said, str) and said != "auto":
            return dtype_named(said)
    return "fp32"


def _source_tokens(
    config: Mapping[str, Any], fields: Fields, cache: DecoderCache, said: int | None, context: int
) -> int:
    """Tokens that cross attention attends to: as asked, as the config fixes it, else `context`."""
    if said is not None:
        if not 1 <= said <= MOST:
            raise BadRequest(f"source tokens {said}: use a whole number above 0")
        return said
    if not cache.cross_attends:
        return 0
    fixed = fields.first("max_source_positions")
    if fixed is not None:
        return fixed
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and vision.get("max_num_tiles") is not None:
        seen = Fields(vision, "vision_config", fields.used)
        side = seen.need("image_size") // seen.need("patch_size")
        return seen.need("max_num_tiles") * (side * side + 1)
    return context
