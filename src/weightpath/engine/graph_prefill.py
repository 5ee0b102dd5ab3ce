"""A piece of one prompt through the decoder: its keys and values into the cache, in one eager pass.

Attention is torch's own (scaled_dot_product_attention): causal over an empty cache, with a mask [L,
held + L] where the cache holds something or the layer has a window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from weightpath.engine.graph_step import widths
from weightpath.engine.graph_weights import DecoderWeights, LayerWeights, product, products
from weightpath.kernels.step import StepKernels
from weightpath.kernels.step_plain import heads_rotated
from weightpath.kernels.step_records import Rotary


def prefill(
    weights: DecoderWeights,
    kernels: StepKernels,
    rotary: Rotary,
    cache: Tensor,
    held: int,
    tokens: Tensor,
) -> Tensor:
    """tokens int64 [L] behind `held` cached ones: the last hidden states [L, H], before the norm.

    cache [layers, 2, kv_heads, capacity, head_dim], capacity >= held + L.
    """
    x = embedding(tokens, weights.table)
    residual: Tensor | None = None
    masks: dict[int, Tensor | None] = {}
    for index, layer in enumerate(weights.layers):
        window = layer.attention.window
        if window not in masks:
            masks[window] = _mask(held, len(tokens), window, x.device)
        residual, normed = kernels.add_norm(x, residual, layer.input_norm, weights.epsilon)
        mixed = _attention(layer, rotary, cache[index], held, normed, masks[window])
        x = product(layer.out, mixed)
        residual, normed = kernels.add_norm(x, residual, layer.post_norm, weights.epsilon)
        half = int(layer.down.in_features)  # type: ignore[arg-type]
        gate, up = products(layer.gate_up, normed, (half, half))
        x = product(layer.down, kernels.silu_times(gate, up))
    assert residual is not None
    return x + residual


def head(weights: DecoderWeights, kernels: StepKernels, hidden: Tensor) -> Tensor:
    """Logits [M, vocabulary] of hidden states [M, H] as `prefill` gives them."""
    _, normed = kernels.add_norm(hidden, None, weights.norm, weights.epsilon)
    return product(weights.head, normed)


def _attention(
    layer: LayerWeights,
    rotary: Rotary,
    cache: Tensor,
    held: int,
    x: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """x [L, H] -> [L, heads * head_dim]; cache [2, kv_heads, capacity, head_dim] of this layer."""
    shape, end = layer.attention, held + len(x)
    q, k, v = products(layer.qkv, x, widths(shape.heads, shape.kv_heads, shape.head_dim))
    cosines, sines = rotary.cosines[held:end], rotary.sines[held:end]
    queries = heads_rotated(q, shape.heads, layer.q_norm, shape.epsilon, cosines, sines)
    keys = heads_rotated(k, shape.kv_heads, layer.k_norm, shape.epsilon, cosines, sines)
    cache[0, :, held:end] = keys.transpose(0, 1)
    cache[1, :, held:end] = v.unflatten(-1, (shape.kv_heads, -1)).transpose(0, 1)
    group = shape.heads // shape.kv_heads
    seen = cache[:, :, :end].repeat_interleave(group, dim=1) if group > 1 else cache[:, :, :end]
    mixed = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], seen[0][None], seen[1][None],
        attn_mask=mask, is_causal=mask is None, scale=shape.scaling,
    )  # fmt: skip
    return mixed[0].transpose(0, 1).flatten(1)


def _mask(held: int, count: int, window: int, device: torch.device) -> Tensor | None:
    """bool [L, held + L], True where a query sees a key; None: causal, nothing cached."""
    if not held and (not window or window >= count):
        return None
    queries = torch.arange(held, held + count, device=device)[:, None]
    keys = torch.arange(held + count, device=device)[None]
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen
