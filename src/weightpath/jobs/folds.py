"""Column orders folded into the layers before: which linears' rows and columns are to be permuted.

    down_proj columns <- rows of gate_proj and up_proj
    o_proj columns    <- rows of v_proj, alike in all query heads of a key/value head

Exact: sums run in another order, every product is the same. Only for architectures whose blocks
have nothing but an elementwise product, or attention, between the two.
"""

from __future__ import annotations

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


@dataclass
class Folds:
    """columns and rows: module -> its new order (int64). outlines: as they will be afterwards.
    why_not: module -> why its order stays."""

    outlines: dict[str, Outline]
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)

    def apply(self, module: str, read: ReadLinear) -> ReadLinear:
        """A linear with its columns and rows in their new order."""
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
        return replace(read, qweight=qweight, floats=floats, column_scales=scales)

    def apply_float(self, name: str, tensor: Tensor) -> Tensor:
        """A float tensor: a weight's or bias's rows in their new order, anything else as it is."""
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias") and module in self.rows:
            return column_order.permute_rows(tensor, self.rows[module])
        return tensor


def plan_folds(
    outlines: Mapping[str, Outline],
    floats: Mapping[str, Any],
    config: Mapping[str, Any],
    read: Callable[[str], QWeight],
) -> Folds:
    """Which orders can be folded. read: a linear's integers, asked only for ordered ones.

    floats: names of the tensors that are part of no linear. A feeding layer may be low-bit or float.
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
        if section.get("model_type") not in FOLDABLE or absent:
            what = (
                f"{absent[0]} is not there"
                if absent
                else f"model_type {section.get('model_type')!r:.30} was not read"
            )
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
        if isinstance(fold, str):
            folds.why_not[module] = fold
            continue
        folds.columns[module] = fold.columns
        folds.rows |= dict.fromkeys(names, fold.rows)
        scheme = replace(outline.scheme, group_size=fold.group_size)
        folds.outlines[module] = replace(outline, scheme=scheme, ordered=False)
    return folds


def _fold_o_proj(g_idx: Tensor, size: int, config: Mapping[str, Any]) -> column_order.Fold | str:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    if type(heads) is not int or type(kv_heads) is not int or heads < 1 or kv_heads < 1:
        return "config.json does not say how many heads there are"
    try:
        return column_order.fold_o_proj(g_idx, size, heads, kv_heads, g_idx.shape[0] // heads)
    except BadRequest as error:
        return str(error)
