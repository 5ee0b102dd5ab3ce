"""JoinedLinear: one of several linears that share their input, whose weights lie in one matrix.

    inner: rows of all of them, [N_1 + N_2 + ..., K];  y = inner(x)[..., start:end]

An engine that multiplies by all of them at once uses `inner`; each by itself still works, at the cost
of the whole product. Weights are in memory once, in whichever form `inner` holds them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weightpath.nn.low_bit_linear import LowBitLinear


class JoinedLinear(nn.Module):
    """Columns start to end of the output of `inner`. `state_dict` gives its own rows, under the names
    that it had alone."""

    def __init__(self, inner: LowBitLinear, start: int, end: int) -> None:
        super().__init__()
        self.inner = inner
        self.start, self.end = start, end
        self.in_features, self.out_features = inner.in_features, end - start

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[..., self.start : self.end]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]  # fmt: skip
        """Its rows of the inner linear's plain values."""
        destination = {} if destination is None else destination
        for name in (*self.inner.PLAIN, "bias"):
            value = getattr(self.inner, name)
            if value is not None:
                destination[prefix + name] = value.detach()[self.start : self.end]
        return destination
