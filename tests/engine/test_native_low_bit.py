"""Low-bit linears in the native engine against transformers on the same modules."""

from __future__ import annotations

import pytest
import torch
from native_models import divergence, some_ids, wanted_logits
from torch import Tensor, nn

from tiny_checkpoint import build_model
from weightpath.engine.decode import NativeModel
from weightpath.engine.native_weights import SMALL, tiles_of
from weightpath.layouts import cpu_tiles
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.swap import (
    low_bit_linears,
    quantize_model,
    replace_module,
    set_activation_bits,
)
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")


def both(model, ids: list[int]) -> tuple[Tensor, Tensor]:
    """The native engine's logits, and transformers'."""
    return NativeModel(model, cache="fp32").session().all_logits(ids), wanted_logits(model, ids)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("scheme", ["int8", "w4g32", "w4g64-asym", "w4"])
def test_sixteen_bit_activations_lose_next_to_nothing(kind: str, scheme: str) -> None:
    model = build_model(kind)
    quantize_model(model, scheme)
    found, wanted = both(model, some_ids(200))
    assert divergence(found, wanted) < 1e-6


def test_eight_bit_activations_are_those_of_the_transformers_path() -> None:
    model = build_model("llama")
    quantize_model(model, "w4g32")
    set_activation_bits(model, 8)
    eight, wanted = both(model, some_ids(200))
    set_activation_bits(model, 16)
    sixteen, _ = both(model, some_ids(200))
    assert divergence(eight, wanted) < 1e-3
    assert divergence(eight, sixteen) > 10 * divergence(eight, wanted)


def test_schemes_may_differ_in_every_linear() -> None:
    model = build_model("qwen2", hidden_size=128)
    schemes = ["w4g32", "int8", None, "w4g64-asym", "w4a8g32", "w4"]
    for layer in model.model.layers:  # type: ignore[union-attr]
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if not isinstance(module, nn.Linear):
                    continue
                scheme = schemes[0]
                schemes = schemes[1:] + schemes[:1]
                if scheme == "int8":
                    setattr(part, name, Int8Linear.from_linear(module))
                elif scheme is not None:
                    setattr(part, name, Int4Linear.from_linear(module, Scheme.parse(scheme)))
    found, wanted = both(model, some_ids(200))
    assert divergence(found, wanted) < 1e-3
    native = NativeModel(model)
    ids = some_ids(150)
    rows = torch.stack([native_row.clone() for native_row in _one_by_one(native, ids)])
    assert torch.equal(rows, native.session().all_logits(ids))


def _one_by_one(native: NativeModel, ids: list[int]):
    session = native.session()
    for token in ids:
        yield session.extend([token])


def test_a_column_order_and_column_scales_are_followed() -> None:
    model = build_model("llama")
    generator = torch.Generator().manual_seed(3)
    quantize_model(model, "w4g32")
    for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        place = f"model.layers.0.{name}"
        inner = model.get_submodule(place)
        order = torch.randperm(inner.in_features, generator=generator)  # type: ignore[arg-type]
        scales = torch.rand(inner.in_features, generator=generator) + 0.5  # type: ignore[arg-type]
        scaled = scales if name != "self_attn.v_proj" else None
        replace_module(model, place, GatheredLinear(inner, order, scaled))
    found, wanted = both(model, some_ids(200))
    assert divergence(found, wanted) < 1e-6
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.q_proj").order += 0  # type: ignore[operator]
        order = model.get_submodule("model.layers.0.self_attn.q_proj").order
        order.copy_(order.flip(0))  # type: ignore[union-attr, operator]
    assert divergence(found, wanted_logits(model, some_ids(200))) > 1e-4


@pytest.mark.parametrize("scheme", ["int8", "w4g32", "w4g32-asym"])
def test_the_tiles_hold_the_weight_that_the_module_stands_for(scheme: str) -> None:
    linear = nn.Linear(96, 70)
    module = (
        Int8Linear.from_linear(linear)
        if scheme == "int8"
        else Int4Linear.from_linear(linear, Scheme.parse(scheme))
    )
    unpacked = cpu_tiles.to_qweight(tiles_of(module)).dequantize()
    assert torch.equal(unpacked.float(), module.dequantize())


def test_matrices_past_the_joint_mapping_run_where_they_were_packed() -> None:
    model = build_model("llama", hidden_size=1024, intermediate_size=8192, num_hidden_layers=1)
    quantize_model(model, "w4g64")
    gate = model.model.layers[0].mlp.gate_proj  # type: ignore[union-attr, index]
    assert tiles_of(gate).packed.numel() > SMALL  # type: ignore[arg-type]
    found, wanted = both(model, some_ids(30))
    assert divergence(found, wanted) < 1e-6


def test_activation_scales_of_every_group_are_no_worse() -> None:
    model = build_model("llama", hidden_size=256)
    with torch.no_grad():  # outliers in some columns, which one scale a row is spoilt by
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.input_layernorm.weight[::64] *= 30.0
            layer.post_attention_layernorm.weight[::64] *= 30.0
    quantize_model(model, "w4a8g32")
    ids = some_ids(100)
    set_activation_bits(model, 16)
    wanted = wanted_logits(model, ids)
    set_activation_bits(model, 8)
    group = NativeModel(model, cache="fp32").session().all_logits(ids)
    for _, module in low_bit_linears(model):
        module.scale_per_group = False
    row = NativeModel(model, cache="fp32").session().all_logits(ids)
    assert divergence(group, wanted) < divergence(row, wanted)
