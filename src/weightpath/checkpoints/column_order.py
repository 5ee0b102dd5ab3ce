"""Column order (act-order): whether a g_idx says anything, and how one is folded into neighbours.

    w[n, k] = scales[n, g_idx[k]] * (code[n, k] - zero[n, g_idx[k]])

g_idx [K] gives each column its group; `k // group_size` is trivial and may be dropped. Elsewhere
no target format has it, but a linear's columns may be put in any order if the rows that feed them
are put in the same one, and that is exact:

    down_proj columns <- gate_proj and up_proj rows     (elementwise between them: any order)
    o_proj columns    <- v_proj rows                    (within a head, alike for all query heads
                                                         that share its key/value head)

q, k, v, gate and up read the residual stream, which all layers share: theirs cannot be folded. A
bias, or a norm's weight between the two, must take the row order too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from weightpath.errors import BadRequest
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL

SMALLEST_GROUP = 16
"""Groups are not cut below this to drop an order: a 16-bit scale would cost a bit a weight."""

Rows = TypeVar("Rows", QWeight, Tensor)


@dataclass(frozen=True)
class Fold:
    """Orders that make an order disappear: new column j is old column `columns[j]`, likewise rows.

    columns: int64 [K] of the linear that has the g_idx. rows: int64 [rows of each linear that
    feeds it]. group_size: of the linear afterwards, smaller than before only where its groups had
    to be cut.
    """

    columns: Tensor
    rows: Tensor
    group_size: int


def trivial(g_idx: Tensor, group_size: int) -> bool:
    """Whether g_idx [K] is k // group_size (all zeros where group_size is -1)."""
    count = g_idx.shape[0]
    size = count if group_size == PER_CHANNEL else group_size
    return torch.equal(g_idx.long(), torch.arange(count) // size)


def contiguous_order(g_idx: Tensor) -> Tensor:
    """The order, int64 [K], that sorts columns by group and keeps their order within one."""
    return torch.argsort(g_idx.long(), stable=True)


def aligned_group(g_idx: Tensor, group_size: int) -> int:
    """The largest divisor of group_size whose aligned blocks of columns lie in one group each."""
    count = g_idx.shape[0]
    size = count if group_size == PER_CHANNEL else group_size
    changes = (g_idx[1:] != g_idx[:-1]).nonzero().flatten() + 1
    return gcd(size, count, int(np.gcd.reduce(changes.numpy())) if changes.numel() else count)


def without_order(qweight: QWeight) -> QWeight:
    """The same weights without g_idx where aligned blocks of columns share a group; else itself.

    Scales are put in the blocks' order, and repeated where a group had to be cut (K no multiple
    of group_size); never into groups smaller than 16.
    """
    if qweight.g_idx is None:
        return qweight
    stated = qweight.scheme.group_size
    size = aligned_group(qweight.g_idx, stated)
    whole = qweight.in_features if stated == PER_CHANNEL else stated
    if size < min(SMALLEST_GROUP, whole):
        return qweight
    groups = qweight.g_idx.long()[::size]
    keep = stated if size == whole else size
    return replace(
        qweight,
        scheme=replace(qweight.scheme, group_size=keep),
        scales=qweight.scales[:, groups],
        zeros=None if qweight.zeros is None else qweight.zeros[:, groups],
        minimums=None if qweight.minimums is None else qweight.minimums[:, groups],
        g_idx=None,
    )


def permute_columns(qweight: QWeight, order: Tensor) -> QWeight:
    """Column j of the result is column order[j]; g_idx follows, and goes where it can."""
    _check_order(order, qweight.in_features, "columns")
    group = qweight.group_of_column()[order].to(torch.int32)
    return without_order(replace(qweight, codes=qweight.codes[:, order], g_idx=group))


def permute_rows(weight: Rows, order: Tensor) -> Rows:
    """Row j of the result is row order[j], of a QWeight, a float weight [N, K] or a bias [N]."""
    if isinstance(weight, Tensor):
        _check_order(order, weight.shape[0], "rows")
        return weight[order]
    _check_order(order, weight.out_features, "rows")
    return replace(
        weight,
        codes=weight.codes[order],
        scales=weight.scales[order],
        zeros=None if weight.zeros is None else weight.zeros[order],
        minimums=None if weight.minimums is None else weight.minimums[order],
    )


def fold_down_proj(g_idx: Tensor, group_size: int) -> Fold | str:
    """How to fold down_proj's g_idx [K] into the rows of gate_proj and up_proj, or why not."""
    order = contiguous_order(g_idx)
    return _fold(g_idx, group_size, order, order, "its groups are of unequal size")


def fold_o_proj(
    g_idx: Tensor, group_size: int, heads: int, kv_heads: int, head_dim: int
) -> Fold | str:
    """How to fold o_proj's g_idx [heads * head_dim] into v_proj's rows, or why not.

    Column h * head_dim + i reads row (h // (heads / kv_heads)) * head_dim + i of v_proj, so one
    order of head_dim rows serves every query head of a key/value head.
    """
    if heads % kv_heads or g_idx.shape[0] != heads * head_dim:
        raise BadRequest(
            f"o_proj: {g_idx.shape[0]} columns are not {heads} query heads of {head_dim} over "
            f"{kv_heads} key/value heads; take the numbers from the model's config"
        )
    shared = g_idx.long().view(kv_heads, heads // kv_heads, head_dim)
    within = torch.stack(
        [contiguous_order(torch.unique(part, dim=1, return_inverse=True)[1]) for part in shared]
    )
    first_row = torch.arange(kv_heads)[:, None] * head_dim
    first_column = torch.arange(heads)[:, None] * head_dim
    columns = first_column + within.repeat_interleave(heads // kv_heads, dim=0)
    why = f"its groups do not fall alike in the {heads // kv_heads} query heads of a key/value head"
    return _fold(g_idx, group_size, columns.flatten(), (first_row + within).flatten(), why)


def _fold(g_idx: Tensor, group_size: int, columns: Tensor, rows: Tensor, why: str) -> Fold | str:
    size = aligned_group(g_idx[columns], group_size)
    whole = g_idx.shape[0] if group_size == PER_CHANNEL else group_size
    if size < min(SMALLEST_GROUP, whole):
        return (
            f"the column order cannot be folded: {why}, the best order leaves blocks of {size} "
            f"columns for groups of {whole}; requantize it"
        )
    return Fold(columns, rows, group_size if size == whole else size)


def _check_order(order: Tensor, count: int, what: str) -> None:
    if order.shape != (count,) or not torch.equal(order.sort().values, torch.arange(count)):
        raise BadRequest(
            f"an order of {tuple(order.shape)} does not name {count} {what} once each; "
            "take it from contiguous_order or a fold"
        )
