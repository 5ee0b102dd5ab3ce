"""A tiny Llama's tensors by name and shape, as headers of files that were never written.

2 layers, hidden 128, intermediate 256, vocabulary 64, 4 query and 2 KV heads of 32.
"""

from __future__ import annotations

import math

import torch

from weightpath.checkpoints.audit import Finding
from weightpath.checkpoints.shards import TensorInfo

LINEARS = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}  # fmt: skip
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def modules(layers: int = 2) -> dict[str, tuple[int, int]]:
    """Every linear of the decoder -> [N, K]."""
    return {
        f"model.layers.{layer}.{leaf}": shape
        for layer in range(layers)
        for leaf, shape in LINEARS.items()
    }


def wanted(layers: int = 2, head: bool = True) -> dict[str, tuple[int, ...]]:
    """The float model's parameters."""
    names: dict[str, tuple[int, ...]] = {TABLE: (64, 128), "model.norm.weight": (128,)}
    names |= {f"{module}.weight": shape for module, shape in modules(layers).items()}
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            names[f"model.layers.{layer}.{norm}.weight"] = (128,)
    return names | ({HEAD: (64, 128)} if head else {})


def info(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> TensorInfo:
    return TensorInfo(name, shape, dtype, math.prod(shape) * dtype.itemsize)


def floats(layers: int = 2, head: bool = True) -> dict[str, TensorInfo]:
    """A sound float checkpoint's headers."""
    return {name: info(name, shape) for name, shape in wanted(layers, head).items()}


def packed(layers: int = 2) -> tuple[dict[str, TensorInfo], dict[str, dict[str, str]]]:
    """A sound AWQ checkpoint's headers, and the parts of its linears."""
    tensors, parts = floats(layers), {}
    for module, (n, k) in modules(layers).items():
        del tensors[f"{module}.weight"]
        shapes = {"qweight": (k, n // 8), "qzeros": (k // 64, n // 8), "scales": (k // 64, n)}
        parts[module] = {suffix: f"{module}.{suffix}" for suffix in shapes}
        for suffix, shape in shapes.items():
            dtype = torch.float16 if suffix == "scales" else torch.int32
            tensors[f"{module}.{suffix}"] = info(f"{module}.{suffix}", shape, dtype)
    return tensors, parts


def kinds(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    """(severity, kind) of every finding."""
    return [(finding.severity, finding.kind) for finding in findings]


def the_one(findings: tuple[Finding, ...], kind: str) -> Finding:
    """The only finding of a kind."""
    found = [finding for finding in findings if finding.kind == kind]
    assert len(found) == 1, [finding.line for finding in findings]
    return found[0]
