"""The oracle: products of low-bit weights in plain torch, slow and right.

    int4:  y[m, n] = sum_k x[m, k] * scale[n, g] * (code[n, k] - zero[n, g]) + bias[n]
    int8:  y[m, n] = scale[n] * sum_k x[m, k] * code[n, k] + bias[n]

x float [..., K]; packed uint8 [N, K/2], column 2i in the low nibble of byte i (the byte view of
compressed-tensors' little-endian words); scales [N, nG]; zeros uint8 [N, nG] or None (then 8);
codes int8 [N, K]; scale fp32 [N]; bias [N] or None. Works on any device and in any float dtype,
float64 included, which is how the fast kernels are judged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from weightpath.errors import BadRequest

MIDPOINT = 8


def pack_nibbles(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [N, K], K even, to bytes uint8 [N, K/2]. BadRequest where K is odd."""
    if codes.shape[1] % 2:
        raise BadRequest(f"codes {list(codes.shape)}: K is odd; 4-bit codes are packed in pairs")
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes uint8 [N, K/2] to 4-bit codes uint8 [N, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(packed.shape[0], -1)


def dequantize_int4(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The weight [N, K] in `dtype`; arithmetic in fp32, or in float64 where that is asked for."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    n, groups = scales.shape
    codes = unpack_nibbles(packed).to(work).view(n, groups, -1)
    zero = MIDPOINT if zeros is None else zeros.to(work)[:, :, None]
    return ((codes - zero) * scales.to(work)[:, :, None]).view(n, -1).to(dtype)


def quantize_activations(x: Tensor, groups: int = 1) -> Tensor:
    """x [..., K] as symmetric int8 would carry it: round(x / s) * s, s = max|x| / 127 over a row, or
    over each of `groups` equal parts of a row.

    Returned in x's dtype: what an 8-bit-activation path multiplies by. A row of zeros stays zero.
    """
    if groups > 1:
        return quantize_activations(x.unflatten(-1, (groups, -1))).flatten(-2)
    exact = x.float()
    scale = exact.abs().amax(dim=-1, keepdim=True) / 127
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (torch.round(exact / divisor).clamp_(-127, 127) * scale).to(x.dtype)


def int4_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    activation_bits: int = 16,
    scale_per_group: bool = False,
) -> Tensor:
    """x times a 4-bit weight, in x's dtype [..., N]. scale_per_group: of 8-bit activations; else a
    scale a row."""
    if activation_bits == 8:
        x = quantize_activations(x, scales.shape[1] if scale_per_group else 1)
    weight = dequantize_int4(packed, scales, zeros, x.dtype)
    return linear(x, weight, None if bias is None else bias.to(x.dtype))


def int8_linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """x times an int8 weight; the product in x's dtype, scale and bias in fp32, cast to `out`.

    The cast of an int8 code to bf16, fp16 or wider is exact. fp16 ends at 65504, which a product
    with codes of up to 127 passes long before the scaled result does: it is taken in fp32.
    """
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.dtype == torch.float16:
        with torch.autocast(x.device.type, enabled=False):
            y = linear(x.float(), codes.float())
    else:
        y = linear(x, codes.to(x.dtype)).to(work)
    y = y * scale.to(work)
    if bias is not None:
        y = y + bias.to(work)
    return y.to(out)
