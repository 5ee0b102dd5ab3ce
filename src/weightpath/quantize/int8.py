"""int8 per output channel, symmetric: the least a weight can lose for half its bytes.

    scale[n] = max |W[n, :]| / 127        codes[n, k] = round(W[n, k] / scale[n]) in -127..127
    y[n] = scale[n] * sum_k x[k] codes[n, k]     the scale leaves the product exactly

W [N, K] float; codes int8 [N, K] (-128 unused); scale fp32 [N]. A row of zeros gets scale 0 and
codes 0. A row so small that its scale would be subnormal in fp32 gets the smallest normal scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightpath.errors import BadRequest
from weightpath.quantize.stats import QuantizeStats, over_blocks, require_finite, require_matrix
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, Scheme

TINY = torch.finfo(torch.float32).tiny


def quantize_per_channel(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scale fp32 [N] of a float weight [N, K].

    Raises BadTensor naming the first NaN or infinite element.
    """
    require_matrix(weight, name)
    exact = weight.detach().float()
    require_finite(exact, name)
    largest = exact.abs().amax(dim=1)
    scale = torch.where(largest > 0, (largest / 127).clamp_min(TINY), torch.zeros_like(largest))
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = torch.round(exact / divisor[:, None]).clamp_(-127, 127).to(torch.int8)
    return codes, scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [N, K] that codes int8 [N, K] and scale fp32 [N] stand for."""
    return (codes.float() * scale.float()[:, None]).to(dtype)


def quantize_int8(
    weight: Tensor, scheme: Scheme = INT8, name: str = "weight"
) -> tuple[QWeight, QuantizeStats]:
    """`quantize_per_channel` as a QWeight (codes stored +128, scales fp32 [N, 1]) and its stats.

    Proceeds in blocks of rows, so that temporaries stay small beside the weight.
    """
    require_matrix(weight, name)
    if scheme.bits != 8 or not scheme.symmetric or scheme.groups(weight.shape[1]) != 1:
        raise BadRequest(f"scheme {scheme.name}: int8 is 8 bits, symmetric, per channel; use int8")
    n, k = weight.shape
    unsigned = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((n, 1), dtype=torch.float32, device=weight.device)

    def quantize_rows(start: int, stop: int) -> QuantizeStats:
        exact = weight[start:stop].detach().float()
        require_finite(exact, name, start)
        codes, scale = quantize_per_channel(exact, name)
        unsigned[start:stop] = codes.to(torch.int16).add_(128).to(torch.uint8)
        scales[start:stop, 0] = scale
        error = dequantize(codes, scale).double().sub_(exact)
        largest = exact.abs().amax(dim=1)
        return QuantizeStats(
            weights=exact.numel(),
            groups=stop - start,
            squared_error=float(error.square_().sum()),
            squared_weight=float(exact.double().square_().sum()),
            zero_groups=int((largest == 0).sum()),
            raised_scales=int(((largest > 0) & (largest / 127 < TINY)).sum()),
        )

    stats = over_blocks(n, k, quantize_rows)
    return QWeight(scheme, unsigned, scales), stats
