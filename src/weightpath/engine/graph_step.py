"""One token of each of B sequences, in few kernels a layer: what a CUDA graph captures.

    x = table[tokens]
    per layer: add and norm | q, k, v in one product | rotate, store and attend (two kernels where
               the context is split) | out | add and norm | gate and up in one | silu * up | down
    logits = head(norm(x)); the largest becomes each sequence's next token

Nothing here reads a value on the host: tokens and positions lie in `Rows` and are advanced there, so
that a replay feeds the next one.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import embedding

from weightpath.engine.graph_weights import DecoderWeights, product, products
from weightpath.kernels.step import StepKernels
from weightpath.kernels.step_records import Rotary, Rows


def decode_step(
    weights: DecoderWeights, kernels: StepKernels, rotary: Rotary, rows: Rows, bad: Tensor
) -> Tensor:
    """Logits [B, vocabulary] in the model's dtype; `rows` stands behind its next tokens then.

    bad: int32 [B], set where a sequence's logits are not finite.
    """
    x = embedding(rows.tokens, weights.table)
    residual: Tensor | None = None
    for index, layer in enumerate(weights.layers):
        shape = layer.attention
        residual, normed = kernels.add_norm(x, residual, layer.input_norm, weights.epsilon)
        q, k, v = products(layer.qkv, normed, widths(shape.heads, shape.kv_heads, shape.head_dim))
        turned = replace(rotary, q_norm=layer.q_norm, k_norm=layer.k_norm)
        x = product(layer.out, kernels.attend(q, k, v, rows, index, turned, shape))
        residual, normed = kernels.add_norm(x, residual, layer.post_norm, weights.epsilon)
        half = int(layer.down.in_features)  # type: ignore[arg-type]
        gate, up = products(layer.gate_up, normed, (half, half))
        x = product(layer.down, kernels.silu_times(gate, up))
    _, normed = kernels.add_norm(x, residual, weights.norm, weights.epsilon)
    logits = product(weights.head, normed)
    kernels.pick(logits, rows, bad)
    return logits


def widths(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Columns of q, k and v."""
    return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
