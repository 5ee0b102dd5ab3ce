"""A decoder's weights as the graph engine runs them, read from a transformers model.

Queries, keys and values are one product where their schemes are the same, and so are gate and up
(graph_join.py). Nothing is copied but what is joined; weights are in memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from weightpath.engine import native_support
from weightpath.engine.graph_join import Products, join
from weightpath.kernels.step_records import AttentionShape, Rotary


@dataclass(frozen=True)
class LayerWeights:
    """qkv and gate_up: joined or apart. Norm weights [H], those on queries and keys [head_dim]."""

    input_norm: Tensor
    qkv: Products
    out: nn.Module
    post_norm: Tensor
    gate_up: Products
    down: nn.Module
    attention: AttentionShape
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """table [vocabulary, H] and norms in the model's dtype. frequencies fp32 [head_dim / 2] and
    rope_factor: of the rotary tables. longest: positions that the model was made for."""

    table: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: nn.Module
    epsilon: float
    frequencies: Tensor
    rope_factor: float
    longest: int

    @property
    def vocabulary(self) -> int:
        return int(self.head.out_features)  # type: ignore[arg-type]

    @property
    def attention(self) -> AttentionShape:
        """Of the first layer; windows differ between layers, heads do not."""
        return self.layers[0].attention


def product(module: nn.Module, x: Tensor) -> Tensor:
    """x [M, K] times a linear's weight: [M, N], its bias added. Low-bit modules choose a kernel."""
    if type(module) is nn.Linear:
        return linear(x, module.weight, module.bias)
    return module(x)


def products(modules: Products, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """The outputs [M, width] of linears of one input, views of one tensor where they are joined."""
    if len(modules) == 1:
        return product(modules[0], x).split(list(widths), dim=1)
    return [product(module, x) for module in modules]


def weights_of(model: PreTrainedModel) -> DecoderWeights:
    """The weights of a model that `graph_support.refusal` says nothing against."""
    decoder: Any = model.model
    config = model.config
    fresh: Any = type(decoder.rotary_emb)(config)  # a cast of the model rounds its frequencies
    table: Any = model.get_input_embeddings().weight
    return DecoderWeights(
        table=table.detach(),
        layers=tuple(_layer(model, layer) for layer in decoder.layers),
        norm=decoder.norm.weight.detach(),
        head=model.get_output_embeddings(),  # type: ignore[arg-type]
        epsilon=config.rms_norm_eps,
        frequencies=fresh.inv_freq.float().to(table.device),
        rope_factor=float(fresh.attention_scaling),
        longest=int(config.max_position_embeddings),
    )


def _layer(model: PreTrainedModel, layer: Any) -> LayerWeights:
    attention, mlp, config = layer.self_attn, layer.mlp, model.config
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=join(attention, native_support.ATTENTION_LINEARS[:3]),
        out=attention.o_proj,
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=join(mlp, native_support.MLP_LINEARS[:2]),
        down=mlp.down_proj,
        attention=AttentionShape(
            config.num_attention_heads, config.num_key_value_heads, native_support.head_dim(config),
            attention.scaling, native_support.window(model, layer), config.rms_norm_eps,
        ),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
    )  # fmt: skip


def rotary_tables(weights: DecoderWeights, positions: int) -> Rotary:
    """Cosines and sines fp32 [positions, head_dim / 2] on the weights' device."""
    steps = torch.arange(positions, dtype=torch.float32, device=weights.frequencies.device)
    angles = steps[:, None] * weights.frequencies
    return Rotary(angles.cos() * weights.rope_factor, angles.sin() * weights.rope_factor)
