"""The layout that the GPU kernels read: codes in the order of the tensor cores' left operand.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g]),   g = k // group_size

Codes are 4-bit in groups of 32 or of a multiple of 64 columns, or per channel, symmetric (zero = 8)
or with zero points 0..15; or int8 per channel, symmetric (zero = 0). Rows and columns are padded to
multiples of 64; padded columns and rows have codes of zero's value, padded groups scales of 0.

A tile is 16 rows by 64 columns: four steps of the instruction `mma.m16n8k16`, whose left operand a
warp holds so (lane l, g = l / 4, q = l % 4; the same for a warp's share of `wgmma.m64nNk16`):

    register p of a step    row g + 8 (p & 1), columns 2q and 2q + 1, + 8 for p >= 2

    codes, 4 bits   int32 [N/64, K/64, 4, 32, 4]      block of rows, of columns, tile, lane, step j
                    the two codes of register p lie at bits 4p and 4p + 16 of word j
    codes, 8 bits   int32 [N/64, K/64, 4, 2, 32, 4]   ..., pair of steps s, lane, word i
                    step 2s + i / 2; bytes e and e + 2 are register 2 (i % 2) + e, two's complement
    scales          [N/64, nG, 64] as stored;  zeros  uint8 [N/64, nG, 64], or None
                    place 16 t + 2 g + h of the 64 is row 16 t + g + 8 h

so that a lane's share of a tile is one load of 16 bytes (two for 8 bits), already in place, and a
step is unpacked by masks alone: no shuffle and no shared memory between a weight and its product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

BLOCK = 64
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GpuTiles:
    """One linear [out_features, in_features], laid out. group_size in columns; the padded K itself
    per channel. zeros: None where symmetric."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    out_features: int
    in_features: int
    group_size: int

    @property
    def groups(self) -> int:
        """nG of the padded K."""
        return self.scales.shape[1]

    @property
    def chunks(self) -> int:
        """Blocks of 64 columns."""
        return self.codes.shape[1]

    @property
    def weight_bytes(self) -> int:
        """What a product reads of it."""
        held = (self.codes, self.scales, *(() if self.zeros is None else (self.zeros,)))
        return sum(part.numel() * part.element_size() for part in held)


def scheme_refusal(
    scheme: Scheme, in_features: int, scale_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Why a weight of this scheme and K cannot be laid out, as a sentence, or None."""
    per_channel = scheme.group_size == PER_CHANNEL or scheme.group_size == in_features
    if scheme.bits not in (4, 8):
        return f"it is {scheme.bits}-bit; the GPU tiles hold 4 and 8 bits"
    if scheme.bits == 8 and not (per_channel and scheme.symmetric):
        return f"scheme {scheme.name}; 8-bit GPU tiles are symmetric, one scale a row"
    size = scheme.group_size
    if not per_channel and ((size != 32 and size % BLOCK) or in_features % size):
        return (
            f"group size {size} of in_features {in_features}; the GPU tiles take 32 or a multiple "
            "of 64 that divides it, or one scale a row"
        )
    if scale_dtype not in SCALE_DTYPES:
        return f"its scales are {scale_dtype}; the GPU tiles hold fp32, bf16 and fp16"
    return None


def from_qweight(qweight: QWeight, name: str = "weight") -> GpuTiles:
    """A weight laid out, on its own device. BadTensor where the layout cannot hold it."""
    qweight.check(name)
    reason = (
        "it keeps a column order; the GPU tiles hold columns in order"
        if qweight.g_idx is not None
        else "it has float minimums; the GPU tiles hold integer zero points"
        if qweight.minimums is not None
        else scheme_refusal(qweight.scheme, qweight.in_features, qweight.scales.dtype)
    )
    if reason is not None:
        raise BadTensor(name, reason, "choose another kernel, or quantize it again to fit")
    zeros = qweight.zeros_as_codes(name)
    codes = qweight.codes if qweight.scheme.bits == 4 else qweight.codes ^ 128
    return from_parts(codes, qweight.scales, zeros, qweight.scheme.bits)


def from_parts(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> GpuTiles:
    """Lay out codes uint8 [N, K] (0..15, or the bytes of int8), scales [N, nG], zeros uint8."""
    n, k = codes.shape
    groups = scales.shape[1]
    size = k // groups
    over_n, over_k = -n % BLOCK, -k % BLOCK
    nothing = 8 if bits == 4 and zeros is None else 0
    codes = pad(codes, (0, over_k, 0, over_n), value=nothing)
    blocks, chunks = codes.shape[0] // BLOCK, codes.shape[1] // BLOCK
    # [block, tile, h, g, chunk, step, p's column half, q, pair's half]: row, then column.
    spread = codes.view(blocks, 4, 2, 8, chunks, 4, 2, 4, 2)
    if bits == 4:
        order = spread.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)  # ..., lane, step, half, p
        fields = order.reshape(blocks, chunks, 4, 32, 4, 8)
    else:
        order = spread.view(blocks, 4, 2, 8, chunks, 2, 2, 2, 4, 2)
        # block, chunk, tile, pair of steps, lane (g, q), word (step, column half), half, h
        order = order.permute(0, 4, 1, 5, 3, 8, 6, 7, 9, 2)
        fields = order.reshape(blocks, chunks, 4, 2, 32, 4, 4)
    packed = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for place in range(fields.shape[-1]):
        packed |= fields[..., place].to(torch.int32) << (bits * place)
    if groups == 1:
        size, held = k + over_k, 1
    else:
        held = (k + over_k) // size
    scales = _arranged(scales, held, over_n)
    zeros = None if zeros is None else _arranged(zeros, held, over_n)
    return GpuTiles(packed, scales, zeros, bits, n, k, size)


def _arranged(values: Tensor, groups: int, over_n: int) -> Tensor:
    """[N, nG] -> [N/64, nG, 64], rows in the order that lanes read them."""
    values = pad(values, (0, groups - values.shape[1], 0, over_n))
    blocks = values.shape[0] // BLOCK
    return (
        values.view(blocks, 4, 2, 8, groups).permute(0, 4, 1, 3, 2).reshape(blocks, groups, BLOCK)
    )


def to_parts(tiles: GpuTiles) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [N, K] (0..15, or the bytes of int8), scales [N, nG], zeros uint8 or None."""
    n, k = tiles.out_features, tiles.in_features
    blocks, chunks = tiles.codes.shape[:2]
    words = tiles.codes.to(torch.int64)
    if tiles.bits == 4:
        shifts = torch.tensor([0, 4, 8, 12, 16, 20, 24, 28], device=words.device)
        fields = (words[..., None] >> shifts) & 15
        spread = fields.view(blocks, chunks, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    else:
        shifts = torch.tensor([0, 8, 16, 24], device=words.device)
        fields = (words[..., None] >> shifts) & 255
        spread = fields.view(blocks, chunks, 4, 2, 8, 4, 2, 2, 2, 2)
        spread = spread.permute(0, 2, 9, 4, 1, 3, 6, 7, 5, 8)
    codes = spread.reshape(blocks * BLOCK, chunks * BLOCK)[:n, :k].to(torch.uint8)
    groups = 1 if tiles.groups == 1 else k // tiles.group_size
    scales = _rows(tiles.scales)[:n, :groups]
    zeros = None if tiles.zeros is None else _rows(tiles.zeros)[:n, :groups]
    return codes, scales, zeros


def _rows(values: Tensor) -> Tensor:
    """[N/64, nG, 64] -> [N, nG]."""
    blocks, groups = values.shape[:2]
    return values.view(blocks, groups, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(-1, groups)
