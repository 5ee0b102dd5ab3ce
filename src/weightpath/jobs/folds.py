"""Column orders folded into the layers before: which linears' rows and columns are to be permuted.

    down_proj columns <- rows of gate_proj and up_proj
    o_proj columns    <- rows of v_proj, alike in all query heads of a key/value head

Exact: sums run in another order, every product is the same. Only for architectures whose blocks
have nothing but an elementwise product, or attention, between the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from weightpath.checkpoints import column_order
from weightpath.checkpoints.opened import Outline
from weightpath.checkpoints.read_linear import ReadLinear
from weightpath.errors import BadRequest
from weightpath.qweight import QWeight

FOLDABLE = ("llama", "mistral", "qwen2", "qwen3")
"""model_type of architectures that were read: transformers' modeling files of 5.24."""
DECODER_BLOCK = re.compile(r"((model|language_model)\.)*layers\.\d+\.(self_attn|mlp)")
"""Blocks of the language model, whose heads the config counts; a vision tower has others."""


@dataclass
class Folds:
    """columns and rows: module -> its new order (int64). outlines: as they will be afterwards.
    why_not: module -> why its order, or its column scales, stay. Of column scales (scale_folds.py):
    unscaled: linears that have none any more; row_scales: module -> factors of its rows [N]; norms:
    norm weight's name -> its factors [K]."""

    outlines: dict[str, Outline]
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)
    unscaled: set[str] = field(default_factory=set)
    row_scales: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, module: str, read: ReadLinear) -> ReadLinear:
        """A linear with its columns and rows in their new order, and without scales that were
        folded; scales that take factors are float32."""
        qweight, floats, scales = read.qweight, read.floats, read.column_scales
        if module in self.columns:
            order = self.columns[module]
            assert qweight is not None  # only integers have a column order
            qweight = column_order.permute_columns(qweight, order)
            scales = None if scales is None else scales[order]
        if module in self.rows:
            order = self.rows[module]
            qweight = None if qweight is None else column_order.permute_rows(qweight, order)
            floats = None if floats is None else column_order.permute_rows(floats, order)
        if module in self.row_scales:
            factors = self.row_scales[module][:, None]
            qweight = None if qweight is None else _times(qweight, factors)
            floats = None if floats is None else floats.float() * factors
        if module in self.unscaled:
            scales = None
        return replace(read, qweight=qweight, floats=floats, column_scales=scales)

    def apply_float(self, name: str, tensor: Tensor) -> Tensor:
        """A float tensor: a weight's or bias's rows in their new order, times their factors in
        float32; a norm's weight times its factors; anything else as it is."""
        module, _, leaf = name.rpartition(".")
        if name in self.norms:
            return tensor.float() * self.norms[name]
        if leaf not in ("weight", "bias"):
            return tensor
        if module in self.rows:
            tensor = column_order.permute_rows(tensor, self.rows[module])
        if module in self.row_scales:
            factors = self.row_scales[module]
            tensor = tensor.float() * (factors[:, None] if tensor.ndim == 2 else factors)
        return tensor

    def step(self, module: str) -> str:
        """What was folded at a linear, in words, or nothing."""
        said = (
            ("column order folded into the rows of the layer before", module in self.columns),
            ("activation scales folded into the layer before", module in self.unscaled),
            ("rows take the column order of the layer after", module in self.rows),
            ("rows take the activation scales of the layer after", module in self.row_scales),
        )
        return "; ".join(sentence for sentence, is_so in said if is_so)

    def float_step(self, name: str) -> str:
        """The same for a float tensor."""
        module = name.rpartition(".")[0]
        if name in self.norms:
            return "takes the activation scales of the linears after it"
        return self.step(module) if name.endswith((".weight", ".bias")) else ""


def _times(qweight: QWeight, factors: Tensor) -> QWeight:
    """Rows times factors [N, 1]: scales and minimums in float32, codes as they are."""
    minimums = qweight.minimums
    return replace(
        qweight,
        scales=qweight.scales.float() * factors,
        minimums=None if minimums is None else minimums.float() * factors,
    )


def plan_folds(
    outlines: Mapping[str, Outline],
    floats: Mapping[str, Any],
    config: Mapping[str, Any],
    read: Callable[[str], QWeight],
) -> Folds:
    """Which orders can be folded. read: a linear's integers, asked only for ordered ones.

    floats: tensors that are part of no linear, with their shapes. A feeding layer may be low-bit or float.
    """
    folds = Folds(dict(outlines))
    section = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(section, Mapping)
    for module, outline in outlines.items():
        if not outline.ordered:
            continue
        prefix, _, leaf = module.rpartition(".")
        feeding = {"down_proj": ("gate_proj", "up_proj"), "o_proj": ("v_proj",)}.get(leaf)
        if feeding is None:
            folds.why_not[module] = "its input is the residual stream, which all layers share"
            continue
        names = [f"{prefix}.{name}" if prefix else name for name in feeding]
        absent = [n for n in names if n not in outlines and f"{n}.weight" not in floats]
        what = ""
        if section.get("model_type") not in FOLDABLE:
            what = f"model_type {section.get('model_type')!r:.30} was not read"
        elif not DECODER_BLOCK.fullmatch(prefix):
            what = "it is no block of the language model"
        elif absent:
            what = f"{absent[0]} is not there"
        if what:
            folds.why_not[module] = f"{what}, so what feeds it is not known"
            continue
        g_idx = read(module).g_idx
        assert g_idx is not None
        assert outline.scheme is not None
        size = outline.scheme.group_size
        fold = (
            column_order.fold_down_proj(g_idx, size)
            if leaf == "down_proj"
            else _fold_o_proj(g_idx, size, section)
        )
        if not isinstance(fold, str):
            fold = _fitting(fold, names, outlines, floats)
        if isinstance(fold, str):
            folds.why_not[module] = fold
            continue
        folds.columns[module] = fold.columns
        folds.rows |= dict.fromkeys(names, fold.rows)
        scheme = replace(outline.scheme, group_size=fold.group_size)
        folds.outlines[module] = replace(outline, scheme=scheme, ordered=False)
    return folds


def _fitting(
    fold: column_order.Fold,
    feeding: list[str],
    outlines: Mapping[str, Outline],
    floats: Mapping[str, Any],
) -> column_order.Fold | str:
    """The fold, if the layers that feed it have as many rows as it orders; else why not."""
    for name in feeding:
        shape = outlines[name].shape if name in outlines else floats[f"{name}.weight"].shape
        if shape[0] != fold.rows.numel():
            return f"{name} has {shape[0]} rows, the fold would order {fold.rows.numel()}"
    return fold


def _fold_o_proj(g_idx: Tensor, size: int, config: Mapping[str, Any]) -> column_order.Fold | str:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    if type(heads) is not int or type(kv_heads) is not int or heads < 1 or kv_heads < 1:
        return "config.json does not say how many heads there are"
    try:
        return column_order.fold_o_proj(g_idx, size, heads, kv_heads, g_idx.shape[0] // heads)
    except BadRequest as error:
        return str(error)
