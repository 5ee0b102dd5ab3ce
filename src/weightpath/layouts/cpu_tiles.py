"""The one layout that every CPU instruction set reads: tiles of 32 rows, each one linear stream.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g]),   g = k // group_size

Codes are 4-bit in groups (a multiple of 8 columns, or K itself: per channel), symmetric (zero = 8)
or with zero points 0..15; or 8-bit per channel, symmetric, stored + 128 (zero = 128). Scales are
kept in the dtype they have: bf16, fp16 or fp32.

Rows are padded to whole tiles, a group's columns to whole lines, with bytes of 0. Tiles follow one
another; within a tile its groups do; within a group, for every step along K:

    line 0   64 bytes, rows 0..15 of the tile
    line 1   64 bytes, rows 16..31
    8 bits   a step is 4 columns: byte 4 r + j of a line is row r, column j
    4 bits   a step is 8 columns: byte 4 r + j is row r, column j in the low nibble and column
             j + 4 in the high one

and then the group's 32 scales, row after row. Zero points lie in a line of 64 bytes before every
fourth group: byte 16 i + r holds group i of those four, row r in the low nibble and row r + 16 in
the high one. Groups that do not exist have zeros there.

So a tile is nG * (2 * 64 * steps + 32 * scale bytes) bytes, and 64 * ceil(nG / 4) more with zero
points: at 16-bit scales 4 + 16/G bits a weight, and 4 + 20/G where nG is a multiple of 4. Every
line begins at a multiple of 64 bytes. One load is 16 rows for `vpdpbusd` (AVX-512), half a line is
8 (AVX2), 8 lines unpack into one B tile of AMX, and 16 bytes feed `sdot` (NEON): the bytes are the
same for all, and no compensation is stored in the stream.

This file packs and unpacks in plain torch; cpp/pack.cpp writes the same bytes faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

VERSION = 1
"""Of these bytes; a file that keeps them (engine/tiles_cache.py) is made anew where it differs."""
ROWS = 32
LINE = 64
KINDS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Float dtypes that the kernels read and write, by the numbers that C++ knows them by."""
LONGEST_GROUP = {4: 1_118_000, 8: 131_000}
"""Columns of a group whose products with int8 activations still fit int32."""


@dataclass(frozen=True)
class CpuTiles:
    """One linear, laid out. packed uint8, one dimension; group_size in columns, K per channel."""

    packed: Tensor
    bits: int
    out_features: int
    in_features: int
    group_size: int
    zeros: bool
    scale_dtype: torch.dtype

    @property
    def groups(self) -> int:
        return self.in_features // self.group_size


def refusal(qweight: QWeight) -> str | None:
    """Why this weight cannot be laid out, as a sentence, or None."""
    scheme = qweight.scheme
    per_channel = scheme.group_size == PER_CHANNEL or qweight.scales.shape[-1] == 1
    if qweight.g_idx is not None:
        return "it keeps a column order; the CPU tiles hold columns in order"
    if qweight.minimums is not None:
        return "it has float minimums; the CPU tiles hold integer zero points"
    return scheme_refusal(scheme, qweight.in_features, qweight.scales.dtype, per_channel)


def scheme_refusal(
    scheme: Scheme,
    in_features: int,
    scale_dtype: torch.dtype = torch.bfloat16,
    per_channel: bool = False,
) -> str | None:
    """Why a weight of this scheme and K cannot be laid out, as a sentence, or None.

    per_channel: one group a row although the scheme names a size (K is that size).
    """
    if scheme.bits not in (4, 8):
        return f"it is {scheme.bits}-bit; the CPU tiles hold 4 and 8 bits"
    per_channel = per_channel or scheme.group_size == PER_CHANNEL
    if scheme.bits == 8 and not (per_channel and scheme.symmetric):
        return f"scheme {scheme.name}; 8-bit CPU tiles are symmetric, one scale a row"
    group_size = in_features if per_channel else scheme.group_size
    if not per_channel and (group_size % 8 or in_features % group_size):
        return (
            f"group size {group_size} of in_features {in_features}; the CPU tiles take multiples "
            "of 8 that divide it, or one scale a row"
        )
    if group_size > LONGEST_GROUP[scheme.bits]:
        return f"a group of {group_size} columns; int32 sums hold {LONGEST_GROUP[scheme.bits]}"
    if scale_dtype not in KINDS:
        return f"its scales are {scale_dtype}; the CPU tiles hold fp32, bf16 and fp16"
    return None


def checked(qweight: QWeight, name: str) -> QWeight:
    """The weight itself; BadTensor with the reason where it cannot be laid out."""
    qweight.check(name)
    reason = refusal(qweight)
    if reason is not None:
        raise BadTensor(name, reason, "choose another kernel, or quantize it again to fit")
    qweight.zeros_as_codes(name)
    return qweight


def group_columns(qweight: QWeight) -> int:
    """Columns of a group: K itself for per channel."""
    return qweight.in_features // qweight.scales.shape[1]


def steps_of(bits: int, group_size: int) -> int:
    """Pairs of lines that a group takes: 8 columns each at 4 bits, 4 at 8 bits."""
    return -(-group_size // (8 if bits == 4 else 4))


def from_qweight(qweight: QWeight, name: str = "weight") -> CpuTiles:
    """Any 4-bit linear in groups, or int8 per channel, laid out; scales keep their dtype."""
    checked(qweight, name)
    scheme, (n, k) = qweight.scheme, qweight.codes.shape
    size = group_columns(qweight)
    packed = pack(qweight.codes, qweight.scales, qweight.zeros_as_codes(name), scheme.bits)
    return CpuTiles(
        packed, scheme.bits, n, k, size, qweight.zeros is not None, qweight.scales.dtype
    )


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """codes uint8 [N, K], scales [N, nG], zeros uint8 [N, nG] or None, to uint8 [tiles * B]."""
    (n, k), groups = codes.shape, scales.shape[1]
    tiles, size = -(-n // ROWS), k // groups
    steps, spare = steps_of(bits, size), tiles * ROWS - n
    width = 8 if bits == 4 else 4
    whole = pad(codes.view(n, groups, size), (0, steps * width - size, 0, 0, 0, spare))
    # [tile, line, row, group, step, columns] -> [tile, group, step, line, row, columns]
    lines = whole.view(tiles, 2, 16, groups, steps, width).permute(0, 3, 4, 1, 2, 5)
    if bits == 4:
        lines = lines[..., :4] | (lines[..., 4:] << 4)
    stored = pad(scales, (0, 0, 0, spare)).view(tiles, ROWS, groups).transpose(1, 2).contiguous()
    parts = [lines.reshape(tiles, groups, -1), stored.view(torch.uint8).view(tiles, groups, -1)]
    body = torch.cat(parts, dim=-1)
    if zeros is None:
        return body.flatten()
    fours = -(-groups // 4)
    spread = pad(zeros, (0, fours * 4 - groups, 0, spare)).view(tiles, 2, 16, fours * 4)
    zero_lines = (spread[:, 0] | (spread[:, 1] << 4)).transpose(1, 2).reshape(tiles, fours, LINE)
    pieces: list[Tensor] = []
    for four in range(fours):
        pieces += [zero_lines[:, four], body[:, 4 * four : 4 * four + 4].flatten(1)]
    return torch.cat(pieces, dim=1).flatten()


def unpack(weight: CpuTiles) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [N, K], scales [N, nG] and zeros uint8 [N, nG] or None: the inverse of `pack`."""
    n, k, groups, size = weight.out_features, weight.in_features, weight.groups, weight.group_size
    tiles, fours = -(-n // ROWS), -(-groups // 4)
    steps, width = steps_of(weight.bits, size), 8 if weight.bits == 4 else 4
    line_bytes = steps * 2 * LINE
    group_bytes = line_bytes + ROWS * weight.scale_dtype.itemsize
    rows = weight.packed.view(tiles, -1)
    zeros = None
    if weight.zeros:
        zero_lines, groups_of = [], []
        for four in range(fours):
            start = four * (LINE + 4 * group_bytes)
            zero_lines.append(rows[:, start : start + LINE])
            groups_of.append(rows[:, start + LINE : start + LINE + 4 * group_bytes])
        rows = torch.cat(groups_of, dim=1)
        pairs = torch.stack(zero_lines, dim=1).view(tiles, fours * 4, 16).transpose(1, 2)
        zeros = torch.stack((pairs & 15, pairs >> 4), dim=1).reshape(tiles * ROWS, fours * 4)
        zeros = zeros[:n, :groups].contiguous()
    body = rows.reshape(tiles, groups, group_bytes)
    lines = body[..., :line_bytes].reshape(tiles, groups, steps, 2, 16, 4)
    if weight.bits == 4:
        lines = torch.cat((lines & 15, lines >> 4), dim=-1)
    codes = lines.permute(0, 3, 4, 1, 2, 5).reshape(tiles * ROWS, groups, steps * width)
    codes = codes[:n, :, :size].reshape(n, k)
    stored = body[..., line_bytes:].contiguous().view(weight.scale_dtype)
    scales = stored.transpose(1, 2).reshape(tiles * ROWS, groups)[:n].contiguous()
    return codes, scales, zeros


def to_qweight(weight: CpuTiles) -> QWeight:
    """The QWeight that these bytes hold. Per channel where one group spans the row."""
    codes, scales, zeros = unpack(weight)
    size = PER_CHANNEL if weight.groups == 1 else weight.group_size
    scheme = Scheme(weight.bits, size, symmetric=zeros is None)
    return QWeight(scheme, codes, scales, None if zeros is None else zeros.to(torch.int16))
