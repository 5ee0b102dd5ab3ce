"""Column scales folded into the layers before: into a norm's weight, or into rows.

    y = w @ (s * x)      s [K], what ModelOpt's AWQ asks of activations

    q, k, v_proj         <- input_layernorm.weight * s            where all of them have the same s
    gate, up_proj        <- post_attention_layernorm.weight * s   likewise
    down_proj            <- rows of up_proj * s
    o_proj               <- rows of v_proj * s                    where s is alike in all query heads
                                                                  of a key/value head

Codes stay; what changes is the rounding of the norm's weight, or of the row's scales, to 16 bits,
which is measured where it is done. What cannot be folded is quantized again with its scales in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.jobs.folds import DECODER_BLOCK, FOLDABLE, Folds

_NORMS = {
    "q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm", "up_proj": "post_attention_layernorm",
}  # fmt: skip
_SIBLINGS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_FEEDS = {"down_proj": "up_proj", "o_proj": "v_proj"}


def fold_scales(folds: Folds, low: LowBitCheckpoint) -> None:
    """Add to `folds` every column scale that can be folded; say of the others why not."""
    scaled = [module for module, outline in folds.outlines.items() if outline.scaled]
    if not scaled:
        return
    section = low.config.get("text_config")
    config = section if isinstance(section, dict) else low.config
    if config.get("model_type") not in FOLDABLE:
        why = f"model_type {config.get('model_type')!r:.30} was not read, so what feeds it is not known"
        folds.why_not |= dict.fromkeys(scaled, why)
        return
    scales = {module: low.read_linear(module).column_scales for module in scaled}
    for module in scaled:
        own, leaf = scales[module], module.rpartition(".")[2]
        assert own is not None  # its outline says so
        if not DECODER_BLOCK.fullmatch(module.rpartition(".")[0]):
            why = "it is in no block of the language model"
        elif leaf in _NORMS:
            why = _into_norm(folds, low, scales, module)
        elif leaf in _FEEDS:
            why = _into_rows(folds, low, own, module, config)
        else:
            why = "what feeds it is not known"
        if why:
            folds.why_not[module] = why
        else:
            folds.unscaled.add(module)
            folds.outlines[module] = replace(folds.outlines[module], scaled=False)


def _into_norm(
    folds: Folds, low: LowBitCheckpoint, scales: Mapping[str, Tensor | None], module: str
) -> str:
    """Fold into the norm that all siblings read; why not, or nothing."""
    layer = module.rpartition(".")[0].rpartition(".")[0]
    norm = _NORMS[module.rpartition(".")[2]]
    name = f"{layer}.{norm}.weight"
    siblings = [f"{layer}.{sibling}" for sibling in _SIBLINGS[norm]]
    own = scales[module]
    if name not in low.floats or own is None or low.floats[name].shape != tuple(own.shape):
        return f"{name} is not there, in its size, to take its activation scales"
    for sibling in siblings:
        other = scales.get(sibling)
        if other is None or not torch.equal(own, other):
            return f"{sibling} reads the same norm and has other activation scales"
    folds.norms[name] = own
    return ""


def _into_rows(
    folds: Folds, low: LowBitCheckpoint, scales: Tensor, module: str, config: Mapping[str, Any]
) -> str:
    """Fold into the rows of the linear that feeds it; why not, or nothing."""
    prefix, _, leaf = module.rpartition(".")
    feeding = f"{prefix}.{_FEEDS[leaf]}"
    if feeding not in low.parts and f"{feeding}.weight" not in low.floats:
        return f"{feeding} is not there to take its activation scales"
    if module in folds.columns:
        return "its columns have an order of their own too"
    rows = scales
    if leaf == "o_proj":
        heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
        kv_heads = heads if kv_heads is None else kv_heads
        if type(heads) is not int or type(kv_heads) is not int or heads < 1 or kv_heads < 1:
            return "config.json does not say how many heads there are"
        if heads % kv_heads or scales.shape[0] % heads:
            return f"{scales.shape[0]} columns are not {heads} heads over {kv_heads}"
        shared = scales.view(kv_heads, heads // kv_heads, -1)
        if not bool((shared == shared[:, :1]).all()):
            return "its activation scales differ between query heads of a key/value head"
        rows = shared[:, 0].reshape(-1)
    packed = feeding in folds.outlines
    shape = folds.outlines[feeding].shape if packed else low.floats[f"{feeding}.weight"].shape
    if shape[0] != rows.shape[0]:
        return f"{feeding} has {shape[0]} rows, {rows.shape[0]} scales would go there"
    folds.row_scales[feeding] = rows
    return ""
