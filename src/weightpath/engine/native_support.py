"""What the native engine runs, and one sentence for what it does not.

Families: Llama 2 and 3 (SmolLM is one), Mistral with its sliding window, Qwen2 with biases, Qwen3
with norms on queries and keys. Rope: plain, linear, llama3 and yarn; a kind whose tables depend on
the length of the text (dynamic, longrope) is refused, and so is one that turns a part of each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weightpath.errors import CannotRun
from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import KINDS
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.low_bit_linear import LowBitLinear

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def refusal(model: PreTrainedModel) -> str | None:
    """Why the native engine does not run this model, as a sentence, or None."""
    reason = family_refusal(model, "native")
    if reason is not None:
        return reason
    try:
        cpu.extension()
    except CannotRun as missing:
        return str(missing)
    reason = shape_refusal(model, "native")
    if reason is not None:
        return reason
    for place, module in linears(model).items():
        reason = _linear_refusal(module)
        if reason:
            return f"{place}: {reason}"
    table = model.get_input_embeddings().weight
    if table.dtype not in KINDS or table.device.type != "cpu":
        return f"its embedding is {table.dtype} on {table.device}; wanted fp32, bf16 or fp16 on cpu"
    return None


def family_refusal(model: PreTrainedModel, engine: str) -> str | None:
    """Why no engine of ours, `engine` by name, has this model's family, or None."""
    name = type(model).__name__
    if name in FAMILIES:
        return None
    return f"{name} is not a family of the {engine} engine ({', '.join(FAMILIES)})"


def shape_refusal(model: PreTrainedModel, engine: str) -> str | None:
    """Why a model of FAMILIES has an activation, rope or heads that our engines do not, or None."""
    config = model.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}; the {engine} engine has silu"
    rope = rope_type(config)
    if rope not in ROPES:
        return f"its rope scaling is '{rope}'; the {engine} engine has {', '.join(ROPES)}"
    part = rotary_part(config)
    if part != 1:
        return f"its rope turns {part:g} of each head (partial_rotary_factor); the {engine} engine turns all"
    if head_dim(config) % 16 or head_dim(config) > 256:
        return f"its head_dim {head_dim(config)} is no multiple of 16 up to 256"
    if config.num_attention_heads % config.num_key_value_heads:
        return (
            f"its {config.num_attention_heads} query heads are no multiple of its "
            f"{config.num_key_value_heads} key-value heads"
        )
    return None


def linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear that a step multiplies by, under its name."""
    found: dict[str, nn.Module] = {}
    decoder: Any = model.model
    for index, layer in enumerate(decoder.layers):
        for part, names in (("self_attn", ATTENTION_LINEARS), ("mlp", MLP_LINEARS)):
            for name in names:
                module = getattr(getattr(layer, part), name)
                found[f"model.layers.{index}.{part}.{name}"] = module
    head = model.get_output_embeddings()
    assert head is not None  # every one of FAMILIES has it
    found["lm_head"] = head
    return found


def rope_type(config: Any) -> str:
    """The kind of rope that a config asks for, by transformers' name."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def rotary_part(config: Any) -> float:
    """The share of a head's columns that rope turns. transformers' Llama, Mistral and Qwen know no
    other than 1: of plain rope they leave the setting out, of scaled rope they fail."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return 1.0 if found is None else float(found)


def head_dim(config: Any) -> int:
    """Columns of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window(model: PreTrainedModel, layer: Any) -> int:
    """Positions that a query of this layer sees, its own among them; 0 is all."""
    if type(model).__name__ == "MistralForCausalLM":
        return model.config.sliding_window or 0
    return getattr(layer.self_attn, "sliding_window", None) or 0


def rope_tables(model: PreTrainedModel, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines fp32 [positions, half], from transformers' own frequencies and factor.

    The module is built anew from the config, so that a cast of the model rounds no frequency.
    """
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    fresh = type(rotary)(model.config)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * fresh.inv_freq.float()
    factor = float(fresh.attention_scaling)
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()


def _linear_refusal(module: nn.Module) -> str | None:
    if isinstance(module, GatheredLinear):
        if not isinstance(module.inner, LowBitLinear):
            return "a column order over floats; the native engine gathers for low-bit linears"
        module = module.inner
    if isinstance(module, LowBitLinear):
        try:
            module.refuse_or("cpu")
        except CannotRun as refused:
            return str(refused)
        return None
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, no linear that the native engine knows"
    if module.weight.dtype not in KINDS or module.weight.device.type != "cpu":
        return f"weights {module.weight.dtype} on {module.weight.device}"
    return None
