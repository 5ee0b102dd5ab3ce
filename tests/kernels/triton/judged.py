"""How a product is judged: by float64, against plain torch in the dtype of x."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def room_for(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A result [M, N] for the interpreter: NaN, and fp32 for bf16, which it cuts off, not rounds."""
    return torch.full(
        shape, float("nan"), dtype=torch.float32 if dtype == torch.bfloat16 else dtype
    )


def error(y: Tensor, exact: Tensor) -> float:
    """Root mean square of what y is off, over that of the exact product."""
    off = (y.double() - exact).square().mean().sqrt()
    return float(off / exact.square().mean().sqrt().clamp_min(1e-30))


def assert_as_good_as_torch(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """y is at most twice as far from the float64 product as torch's product with the weight rounded
    to x's dtype, or as the exact product rounded to y's (a few numbers may be exact by luck); the
    largest single error is held to three times the larger."""
    exact = linear(x.double(), weight, None if bias is None else bias.double())
    plain = linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    assert y.shape == exact.shape
    assert bool(torch.isfinite(y).all())
    others = (plain, exact.to(y.dtype))
    assert error(y, exact) <= 2 * max(error(each, exact) for each in others) + 1e-7
    largest = max(float((each.double() - exact).abs().max()) for each in others)
    assert float((y.double() - exact).abs().max()) <= 3 * largest + 1e-6 * float(exact.abs().max())
