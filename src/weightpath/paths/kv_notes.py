"""What misleads about a KV cache: the sentences that go under a budget, those that apply to it."""

from __future__ import annotations

from weightpath.paths.kv_fields import Fields
from weightpath.paths.kv_layers import DecoderCache, TokenCache
from weightpath.paths.kv_states import StateCache


def notes(
    cache: DecoderCache,
    fields: Fields,
    context: int,
    kv_dtype: str,
    block_size: int,
    source_tokens: int | None,
    beside: tuple[str, ...],
) -> tuple[str, ...]:
    """The traps of this model at this context, a sentence each; () where there are none."""
    parts = [part for parts in cache.layers for part in parts]
    tokens = [part for part in parts if isinstance(part, TokenCache)]
    kinds = {part.kind for part in parts}
    states = [part for part in parts if isinstance(part, StateCache)]
    windows = sorted({part.window for part in tokens if part.window is not None})
    said = [cache.note] if cache.note else []
    if windows and context > windows[0]:
        said.append(
            f"a window ({', '.join(map(str, windows))}) saves only where the runtime frees what "
            "has left it; vLLM holds window - 1 tokens, those of a step in flight, and a block more"
        )
    if windows and context <= windows[0]:
        said.append(f"the context is within the window of {windows[0]}: windows save nothing here")
    if "latent_attention" in kinds:
        said.append(
            "the latent is one for all heads: tensor parallelism copies it to every device, and a "
            "runtime that expands it needs the naive figure"
        )
    if states and kv_dtype in ("fp8", "int8"):
        said.append(f"{kv_dtype} narrows keys and values alone: states keep their dtypes")
    if states and not tokens:
        said.append("no layer attends: the context costs no memory")
    if any(part.recurrent and not part.in_model_dtype for part in states):
        said.append(
            "a recurrent state is fp32 in transformers and in the model's dtype in vLLM, unless "
            "--mamba-ssm-cache-dtype says another: --state-dtype counts it so"
        )
    if "shared_kv" in kinds:
        count = sum(part.kind == "shared_kv" for part in tokens)
        said.append(f"{count} layers read another layer's keys and values and keep none")
    if cache.cross_attends and source_tokens is None:
        said.append(
            "cross attention is counted at the longest source that the config allows, or at the "
            "context where it says none: --source-tokens says another"
        )
    if beside:
        said.append(
            "towers keep nothing between steps, but what they see takes context: images and sound "
            "count as tokens, and a tower's weights and activations as memory"
        )
    if block_size > 1 and context % block_size:
        said.append(f"each length is rounded up to whole blocks of {block_size}")
    longest = fields.values.get("max_position_embeddings")
    if isinstance(longest, int) and not isinstance(longest, bool) and context > longest > 0:
        said.append(f"the model was made for {longest} positions (max_position_embeddings)")
    return tuple(said)
