"""How many bytes of KV cache and state a model needs for its sequences and context.

    flat      sequences * attention_layers * context * bytes a token
    hybrid    sequences * sum over layers of min(window, context) * bytes a token  + states

    bytes a token of one layer = kv_heads * head_dim * 2 * dtype bytes

From the edge selector (shared reference, section A). Its worked example: 28 layers, 21 of them
sliding with a window of 512, 2 KV heads of 256 in 2 bytes, 32,768 tokens: 917,504 against 240,128
token-layers, 1792 against 469 MiB. The flat figure counts every attention layer as one that grows
with the context, latent attention as the keys and values of every head, and no state.

`held_by="transformers"` counts what transformers' DynamicCache holds instead, which differs in the
ways that kv_rows.DIFFERENCES names. `block_size` rounds each length up to whole blocks, as vLLM and
other paged caches do (16 there). int8 is weightpath's own: a scale in fp32 for each head's keys and
each head's values of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightpath.errors import BadRequest
from weightpath.paths.kv_fields import Fields, section_at, text_path, towers
from weightpath.paths.kv_layers import DecoderCache, decoder_cache
from weightpath.paths.kv_notes import notes
from weightpath.paths.kv_rows import (
    KVAsked,
    KVRow,
    differences,
    dtype_named,
    grows,
    kv_rows,
    repeats,
)

HEADROOM = 1.25
"""What a reservation adds over the count for fragmentation and growth: the edge selector's."""
MOST = 1 << 40


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
    shape = KVAsked(context, sequences, kv, model, state, block_size, source, held_by,
                   repeats(fields) if held_by == "transformers" else 1)  # fmt: skip
    rows = kv_rows(cache, shape)
    return KVBudget(
        context=context, sequences=sequences, kv_dtype=kv, state_dtype=state, model_dtype=model,
        block_size=block_size, source_tokens=source, held_by=held_by, rows=rows,
        total_bytes=sum(row.total_bytes for row in rows),
        flat_bytes=sum(row.flat_bytes for row in rows),
        token_layers=sequences * sum(r.layers * r.tokens for r in rows if grows(r)),
        flat_token_layers=sequences * sum(
            r.layers * shape.rounded(context) for r in rows if grows(r) or r.kind == "shared_kv"
        ),
        towers=towers(config, path),
        differences=differences(cache, fields) if held_by == "transformers" else (),
        notes=notes(cache, fields, context, kv, block_size, source_tokens, towers(config, path)),
        fields=dict(fields.used),
    )  # fmt: skip


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
