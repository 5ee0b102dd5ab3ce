"""What the graph engine runs, and one sentence for what it does not.

The families, ropes and heads of the native engine (native_support.py), on one device: on CUDA with
Triton from compute capability 8.0 on, elsewhere in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from weightpath.engine.native_support import family_refusal, linears, shape_refusal
from weightpath.kernels.triton import available
from weightpath.nn.gathered_linear import GatheredLinear
from weightpath.nn.joined_linear import JoinedLinear
from weightpath.nn.low_bit_linear import LowBitLinear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(model: PreTrainedModel) -> str | None:
    """Why the graph engine does not run this model where it is, as a sentence, or None."""
    reason = family_refusal(model, "graph") or shape_refusal(model, "graph")
    if reason is not None:
        return reason
    table: Any = model.get_input_embeddings().weight
    if table.dtype not in DTYPES:
        return f"its embedding is {table.dtype}; wanted bf16, fp16 or fp32"
    if table.device.type == "cuda":
        reason = available.refusal(table.device)
        if reason is not None:
            return reason
    for place, module in linears(model).items():
        reason = _linear_refusal(module, table.dtype)
        if reason:
            return f"{place}: {reason}"
    strays = {value.device for value in model.parameters()} - {table.device}
    if strays:
        return f"its weights are on {table.device} and {strays.pop()}; the graph engine wants one device"
    return None


def _linear_refusal(module: nn.Module, dtype: torch.dtype) -> str | None:
    while isinstance(module, (GatheredLinear, JoinedLinear)):
        module = module.inner
    if isinstance(module, LowBitLinear):
        return None
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, no linear that the graph engine knows"
    if module.weight.dtype != dtype:
        return f"weights {module.weight.dtype} beside an embedding in {dtype}"
    return None
