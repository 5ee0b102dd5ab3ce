"""GatheredLinear: a linear whose activations are scaled and put in another order first.

    y = inner((x * scales)[..., order])

A weight with a column order (GPTQ's act-order) is stored with its columns sorted by group, so that
kernels see plain groups, and the activations follow; column scales [K] are factors that a checkpoint
wants activations multiplied by (AWQ's, where no norm has taken them up). x [..., K], y [..., N].
"""

from __future__ import annotations

from torch import Tensor, nn


class GatheredLinear(nn.Module):
    """order: int64 [K], column order[j] of x is column j of the inner weight. scales: float [K]."""

    order: Tensor | None
    scales: Tensor | None

    def __init__(
        self, inner: nn.Module, order: Tensor | None = None, scales: Tensor | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("order", order)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is not None:
            x = x * self.scales.to(x.dtype)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return self.inner(x)
