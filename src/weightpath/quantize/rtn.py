"""Round-to-nearest in groups, with a search of the clipping range by weighted squared error.

Per group of G weights the range [lo, hi] always contains zero. Symmetric: codes 0..2**b-1 with
the zero at the midpoint. Asymmetric: an integer zero point.

    scale = range / (2**b - 1)      code = clamp(round(w / scale) + zero, 0, 2**b - 1)

The range that keeps every weight is rarely the best: shrinking it clips the few largest weights
and makes every other step finer. A grid of shrink factors is tried (for asymmetric groups each
end shrinks on its own), and the winner is polished by alternating the least-squares scale for its
codes with the nearest codes for that scale. The scale is rounded to its stored type *before* codes
are chosen, so codes make up for the rounding. Every candidate's error is that of the stored form:

    error = sum over the group of (|w| + rms) * (w - w_hat)**2,   rms of the group

Plain squared error clips the few large weights that a model leans on: on SmolLM2-135M it was worse
than no search at all, and this weighting gained a fifth (docs/experiments.md, the clip search).

Shapes: weight [N, K] float; codes uint8 [N, K]; scales [N, nG] in `scale_dtype`; zeros int16
[N, nG] or None. Work proceeds in blocks of rows so that temporaries stay near the caches.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from weightpath.quantize.stats import QuantizeStats, over_blocks, require_finite, require_matrix
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SHRINK_SYMMETRIC = tuple(1.0 - 0.03 * step for step in range(17))
SHRINK_ASYMMETRIC = tuple(product((1.0, 0.92, 0.84, 0.76, 0.68), repeat=2))
POLISH_ROUNDS = 3


def quantize_rtn(
    weight: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.bfloat16,
    search: bool = True,
    name: str = "weight",
) -> tuple[QWeight, QuantizeStats]:
    """Quantize a float weight [N, K] and say what that did.

    search=False keeps the whole range of every group (min-max). Raises BadTensor on NaN or Inf,
    naming the index, and BadRequest when the group size does not divide K.
    """
    require_matrix(weight, name)
    n, k = weight.shape
    groups = scheme.groups(k)
    device = weight.device
    codes = torch.empty((n, k), dtype=torch.uint8, device=device)
    scales = torch.empty((n, groups), dtype=scale_dtype, device=device)
    zeros = None if scheme.symmetric else torch.empty_like(scales, dtype=torch.int16)

    def quantize_rows(start: int, stop: int) -> QuantizeStats:
        block = weight[start:stop].detach().float()
        require_finite(block, name, start)
        chosen = _quantize_groups(block.reshape(-1, k // groups), scheme, scale_dtype, search)
        codes[start:stop] = chosen.codes.view(stop - start, k)
        scales[start:stop] = chosen.scale.view(stop - start, groups)
        if zeros is not None:
            zeros[start:stop] = chosen.zero.view(stop - start, groups).to(torch.int16)
        return chosen.stats

    stats = over_blocks(n, k, quantize_rows)
    return QWeight(scheme, codes, scales, zeros), stats


class _Best:
    """The best codes so far for a block of groups [B, G], and the error of each group.

    weight and scale are held in units of a power of two near each group's largest weight, which is
    exact and keeps squared errors clear of overflow and underflow; `stored` sees the real scale.
    """

    def __init__(self, weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> None:
        self.real, self.scheme, self.scale_dtype = weight, scheme, scale_dtype
        self.low = weight.amin(1, keepdim=True).clamp_max_(0)
        self.high = weight.amax(1, keepdim=True).clamp_min_(0)
        self.empty = (self.low == 0) & (self.high == 0)
        self.unit = _power_of_two(torch.maximum(self.low.neg(), self.high))
        self.weight = weight / self.unit
        size = self.weight.abs()
        self.importance = size + size.square().mean(1, keepdim=True).sqrt()
        self.low, self.high = self.low / self.unit, self.high / self.unit
        self.error = torch.full_like(self.unit, torch.inf)
        self.scale = torch.ones_like(self.error)
        self.zero = torch.full_like(self.error, float(scheme.midpoint))
        self.limits = torch.finfo(scale_dtype)
        self.stats = QuantizeStats()

    def stored(self, scale: Tensor) -> Tensor:
        """The scale as its stored type holds it, never zero, subnormal or infinite."""
        held = (scale * self.unit).clamp(self.limits.tiny, self.limits.max).to(self.scale_dtype)
        return held.float() / self.unit

    def codes_for(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Nearest codes, as floats [B, G]."""
        return torch.round(self.weight / scale).add_(zero).clamp_(0, self.scheme.top_code)

    def offer(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Keep (scale, zero) for the groups where it beats what is kept; returns its codes."""
        scale = self.stored(scale)
        codes = self.codes_for(scale, zero)
        missed = codes.sub(zero).mul_(scale).sub_(self.weight).square_()
        error = missed.mul_(self.importance).sum(1, keepdim=True)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        return codes

    def finish(self, raw_scale: Tensor) -> _Best:
        """Final codes; groups of zeros get scale 1 and the code of zero. Counts what was mended."""
        codes = self.codes_for(self.scale, self.zero)
        self.scale = torch.where(self.empty, torch.ones_like(self.scale), self.scale * self.unit)
        final = codes.sub(self.zero).mul_(self.scale).double().sub_(self.real)
        self.codes = codes.to(torch.uint8)
        raw = raw_scale * self.unit
        self.stats = QuantizeStats(
            weights=self.real.numel(),
            groups=self.real.shape[0],
            squared_error=float(final.square_().sum()),
            squared_weight=float(self.real.double().square_().sum()),
            zero_groups=int(self.empty.sum()),
            raised_scales=int(((raw < self.limits.tiny) & ~self.empty).sum()),
            lowered_scales=int((raw > self.limits.max).sum()),
        )
        return self


def _power_of_two(largest: Tensor) -> Tensor:
    """The power of two at or below each fp32 value >= 0, read from its exponent bits; at least
    the smallest normal number."""
    exponent = largest.view(torch.int32) & 0x7F800000
    return exponent.view(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)


def _quantize_groups(
    weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype, search: bool
) -> _Best:
    """Scale, zero and codes for a block of groups [B, G]."""
    best = _Best(weight, scheme, scale_dtype)
    low, high = best.low, best.high
    if scheme.symmetric:
        raw = torch.maximum(low.neg(), high).mul_(2 / scheme.top_code)
        zero = torch.full_like(raw, float(scheme.midpoint))
        for shrink in SHRINK_SYMMETRIC if search else (1.0,):
            best.offer(raw * shrink, zero)
    else:
        raw = (high - low).div_(scheme.top_code)
        for shrink_low, shrink_high in SHRINK_ASYMMETRIC if search else ((1.0, 1.0),):
            scale = best.stored((high * shrink_high - low * shrink_low) / scheme.top_code)
            zero = torch.round(-low * shrink_low / scale).clamp_(0, scheme.top_code)
            best.offer(scale, zero)
    if search:
        for _ in range(POLISH_ROUNDS):
            _polish(best)
    return best.finish(raw)


def _polish(best: _Best) -> None:
    """Least-squares scale for the kept codes; for asymmetric groups the zero point too."""
    shifted = best.codes_for(best.scale, best.zero).sub_(best.zero)
    weighted = shifted * best.importance
    power = (weighted * shifted).sum(1, keepdim=True)
    scale = (weighted * best.weight).sum(1, keepdim=True) / power.clamp_min(1e-30)
    best.offer(torch.where((power > 0) & (scale > 0), scale, best.scale), best.zero)
    if not best.scheme.symmetric:
        for move in (-1.0, 1.0):
            best.offer(best.scale, (best.zero + move).clamp(0, best.scheme.top_code))
