"""Random decoders for GPU benchmarks, drawn on the device layer by layer: no checkpoint on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightpath.engine.graph_weights import DecoderWeights, LayerWeights
from weightpath.kernels.step_records import AttentionShape
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.scheme import Scheme

SPREAD = 0.02
"""Standard deviation of a weight; of int8 and 4-bit codes it is 73 and 4.6."""
GROUP_SIZE = 128
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. head_dim columns a head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "tiny": Shape(256, 512, 2, 4, 2, 64, 512),
}


def table_of(shape: Shape, device: torch.device) -> Tensor:
    """An embedding bf16 [vocabulary, hidden]."""
    return torch.randn(shape.vocabulary, shape.hidden, dtype=DTYPE, device=device)


def linear(kind: str, n: int, k: int, device: torch.device) -> nn.Module:
    """A random linear [n, k]: bf16, int8 per channel, or w4: 4 bits, symmetric, groups of 128."""
    if kind == "bf16":
        plain = nn.Linear(k, n, bias=False, device="meta")
        weight = torch.empty(n, k, dtype=DTYPE, device=device).normal_(std=SPREAD)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        return plain
    if kind == "int8":
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        return Int8Linear(codes, torch.full((n,), SPREAD / 73, device=device))
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.full((n, k // GROUP_SIZE), SPREAD / 4.6, dtype=DTYPE, device=device)
    return Int4Linear(packed, scales, None, Scheme(4, GROUP_SIZE))


def random_weights(
    shape: Shape, kind: str, head: str, layers: int, table: Tensor
) -> DecoderWeights:
    """A decoder whose linears are of `kind` (and its head of `head`, bf16 beside bf16), queries, keys
    and values joined, gate and up too."""
    device, ones = table.device, torch.ones(shape.hidden, dtype=DTYPE, device=table.device)
    columns = shape.heads * shape.head_dim
    attention = AttentionShape(
        shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, epsilon=1e-5
    )
    each = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=(
                linear(kind, columns + 2 * shape.kv_heads * shape.head_dim, shape.hidden, device),
            ),
            out=linear(kind, shape.hidden, columns, device),
            post_norm=ones,
            gate_up=(linear(kind, 2 * shape.intermediate, shape.hidden, device),),
            down=linear(kind, shape.hidden, shape.intermediate, device),
            attention=attention,
        )
        for _ in range(layers)
    )
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    return DecoderWeights(
        table=table,
        layers=each,
        norm=ones,
        head=linear("bf16" if kind == "bf16" else head, shape.vocabulary, shape.hidden, device),
        epsilon=1e-5,
        frequencies=500000.0 ** (-steps / shape.head_dim),
        rope_factor=1.0,
        longest=8192,
    )


def linears(layer: LayerWeights) -> list[Any]:
    """The modules that a step multiplies by."""
    return [*layer.qkv, layer.out, *layer.gate_up, layer.down]


def stored(module: nn.Module) -> int:
    """Bytes of a linear as it is held."""
    values = [*module.parameters(), *module.buffers()]
    return sum(value.numel() * value.element_size() for value in values)
