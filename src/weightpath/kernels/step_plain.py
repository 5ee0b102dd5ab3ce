"""The kernels of a decode step (step.py) in plain torch: any device, any float dtype, slow and right.

    norm     y = x * rsqrt(mean(x^2) + epsilon) * weight
    rotary   (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head
    attend   softmax(scaling * q . k) . v over the cache, query heads of a group on one kv head

Arithmetic in fp32, one rounding to the tensors' dtype at the end of each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from weightpath.kernels.step_records import AttentionShape, Rotary, Rows


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., H] normed over its last dimension, in x's dtype."""
    exact = x.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
    return (exact * scale * weight.float()).to(x.dtype)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm), both [M, H] in x's dtype."""
    summed = x if residual is None else x + residual
    return summed, rms_norm(summed, weight, epsilon)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [M, I]."""
    return (silu(gate.float()) * up.float()).to(gate.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [L, heads, D] turned by cosines and sines fp32 [L, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cosines[:, None], sines[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def heads_rotated(
    x: Tensor, heads: int, norm: Tensor | None, epsilon: float, cosines: Tensor, sines: Tensor
) -> Tensor:
    """Queries or keys [L, heads * D] as [L, heads, D], normed where there is a norm, and rotated."""
    split = x.unflatten(-1, (heads, -1))
    if norm is not None:
        split = rms_norm(split, norm, epsilon)
    return rotate(split, cosines, sines)


def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, layer: int, rotary: Rotary, shape: AttentionShape
) -> Tensor:
    """One query a sequence over its cache, row by row."""
    out = []
    cosines, sines = rotary.cosines[rows.positions], rotary.sines[rows.positions]
    turned = heads_rotated(q, shape.heads, rotary.q_norm, shape.epsilon, cosines, sines)
    new = heads_rotated(k, shape.kv_heads, rotary.k_norm, shape.epsilon, cosines, sines)
    for row, (position, cache) in enumerate(zip(rows.positions.tolist(), rows.caches, strict=True)):
        keys, values = cache[layer]
        keys[:, position] = new[row]
        values[:, position] = v[row].unflatten(-1, (shape.kv_heads, -1))
        start = max(0, position + 1 - shape.window) if shape.window else 0
        seen = slice(start, position + 1)
        query = turned[row].unflatten(0, (shape.kv_heads, -1)).float()
        scores = query @ keys[:, seen].float().mT * shape.scaling
        mixed = scores.softmax(-1) @ values[:, seen].float()
        out.append(mixed.flatten().to(q.dtype))
    return torch.stack(out)


def pick(logits: Tensor, rows: Rows, bad: Tensor) -> None:
    """The largest logit's id (of equals the lowest) becomes the token; positions go up."""
    largest = logits == logits.amax(-1, keepdim=True)
    rows.tokens.copy_(largest.int().argmax(-1))
    bad.copy_((~torch.isfinite(logits)).any(-1))
    rows.positions.copy_(torch.minimum(rows.positions + 1, rows.capacities - 1))
