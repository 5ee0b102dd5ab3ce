"""AWQ in the layouts of its vector kernels: gemv, gemv_fast and llm-awq, read only.

    gemv                qweight int32 [N, K/8]   nibble i of word c is column 8c + i
                        qzeros  int32 [N, ZW]    nibble i of word c is group 8c + i
                        scales  fp16  [N, 8*ZW]
    gemv_fast, llm-awq  qweight int16 [N/4, K]   4 rows interleaved, 64 columns at a time (below)
                        qzeros or scaled_zeros   fp16 [8*ZW, N], -(scale * zero) rounded to fp16
                        scales  fp16  [8*ZW, N]

Groups are padded with zeros to ZW words a row: ZW = ceil(ceil(nG/8) / m) * m with m = 1 for
G >= 128, 2 for 64, 4 for 32; other sizes are not defined.

gemv_fast, a strip of 4 rows and 64 columns as 64 words: nibble j of word c is row c // 16 and
position p = 4 * (c % 16) + j of its 64; within 32 positions p = 8a + 4h + b holds column
8b + 2a + h (a, b in 0..3, h in 0..1).

Sources: AutoAWQ gemv.py and gemv_fast.py, llm-awq qmodule.py, GPTQModel gemv_fast_awq.py. Some
writers of gemv_fast call the offsets scaled_zeros, others qzeros; the layout is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightpath.checkpoints import bitpack
from weightpath.errors import BadTensor

STRIP = 64
"""Columns that gemv_fast interleaves at a time: K must be a multiple."""

MULTIPLES = {32: 4, 64: 2}


def zeros_width(in_features: int, group_size: int) -> int | None:
    """ZW, the words of zeros a row; None where these kernels define no layout."""
    if group_size < 128 and group_size not in MULTIPLES:
        return None
    multiple = MULTIPLES.get(group_size, 1)
    words = -(-(in_features // group_size) // 8)
    return -(-words // multiple) * multiple


def read_gemv(
    name: str, qweight: Tensor, qzeros: Tensor | None, scales: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [N, K], scales [N, nG] and zeros int16 [N, nG] of a gemv linear.

    Shapes are as above already. BadTensor where the padding is not empty: the group size is wrong.
    """
    codes = bitpack.unpack(qweight, 4, qweight.shape[1] * 8)
    kept = _unpadded(f"{name}.scales", scales, groups, codes.shape[1])
    if qzeros is None:
        return codes, kept, None
    return codes, kept, bitpack.unpack(qzeros, 4, groups).to(torch.int16)


def read_fast(
    name: str, qweight: Tensor, offsets: Tensor | None, scales: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[str, ...]]:
    """Codes, scales, zeros, minimums and notes of a gemv_fast or llm-awq linear.

    Shapes are as above already; offsets are None where the file stores none. Zeros are the whole
    numbers that reproduce every stored offset; where there are none, the offsets are kept as
    minimums and zeros are None. Notes say either. BadTensor for padding that is not empty and for
    offsets that are not finite.
    """
    codes = unpack_strips(qweight)
    kept = _unpadded(f"{name}.scales", scales.t(), groups, codes.shape[1])
    if offsets is None:
        return codes, kept, None, None, ()
    minimums = offsets.t()[:, :groups].contiguous()
    if not bool(torch.isfinite(minimums).all()):
        row, group = (~torch.isfinite(minimums)).nonzero()[0].tolist()
        raise BadTensor(
            name,
            f"scaled zero [{row}, {group}] is {float(minimums[row, group])}",
            "the checkpoint is damaged: quantize or fetch it again",
        )
    zeros, agrees = whole_zeros(kept, minimums)
    if not bool(agrees.all()):
        wrong = int((~agrees).sum())
        note = (
            f"{name}: {wrong} of {agrees.numel()} scaled zeros are not a whole zero point 0..15 "
            "times their scale; all are kept as float minimums"
        )
        return codes, kept, None, minimums, (note,)
    steps = (minimums.float() + kept.float() * zeros).abs() / kept.float().abs()
    rounded = float(torch.nan_to_num(steps).max())  # 0/0 where the scale is 0
    notes = ()
    if rounded > 0:
        notes = (
            f"{name}: the file rounds scale * zero to {minimums.dtype}, by up to {rounded:.2g} of "
            "a step; the zero points are read exactly, so weights differ by that much from "
            "kernels that add the rounded product",
        )
    return codes, kept, zeros.to(torch.int16), None, notes


def unpack_strips(qweight: Tensor) -> Tensor:
    """Codes uint8 [N, K] of a gemv_fast weight, int16 [N/4, K]."""
    strips, columns = qweight.shape
    flat = qweight.contiguous().view(-1).view(torch.uint8)
    stored = flat.view(strips, columns // STRIP, 4, STRIP // 2)
    nibbles = torch.stack((stored & 15, stored >> 4), dim=-1)
    split = nibbles.view(strips, columns // STRIP, 4, 2, 4, 2, 4)  # strip, 64s, row, 32s, a, h, b
    return split.permute(0, 2, 1, 3, 6, 4, 5).reshape(strips * 4, columns)


def whole_zeros(scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The zero points 0..15 nearest to -offset / scale, and where they reproduce the offset.

    Reproduce: -(scale * zero), rounded to the dtype of both, is the stored offset bit for bit (but
    for the sign of 0). At most one zero can: the rounding is below 0.03 of a step, even in bf16. A
    scale of 0 leaves the zero open; it is then the midpoint 8, as the weight is 0 either way.
    """
    step = scales.float()
    zeros = torch.where(step == 0, 8.0, torch.round(-offsets.float() / step)).clamp(0, 15)
    return zeros, (-(step * zeros)).to(offsets.dtype) == offsets


def _unpadded(name: str, scales: Tensor, groups: int, in_features: int) -> Tensor:
    """The first nG columns of padded scales [N, 8*ZW], the rest being zero, or BadTensor."""
    used = (scales != 0).any(0).nonzero()
    last = int(used[-1]) + 1 if used.numel() else 0
    if last > groups:
        mend = "check group_size in the quantization config"
        if in_features % last == 0:
            mend = f"group_size {in_features // last} would fit: {mend}"
        raise BadTensor(
            name,
            f"holds scales of {last} groups, in_features {in_features} at group size "
            f"{in_features // groups} has {groups}",
            mend,
        )
    return scales[:, :groups].contiguous()
