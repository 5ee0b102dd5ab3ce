"""The second pass of a product whose K was split: partial sums added in their order.

y[m, n] = sum_s partial[s, m, n] (* scale[n]) (+ bias[n])     partial fp32 [S, M, N]
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def add_partials_kernel(
    partial, scale, bias, y, size, N, splits,
    SCALE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds BLOCK of the M * N sums."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(partial + at, mask=inside, other=0)
    for split in range(1, splits):
        total += tl.load(partial + split * size + at, mask=inside, other=0)
    if SCALE:
        total *= tl.load(scale + at % N, mask=inside, other=0)
    if BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def add_partials(
    partial: Tensor, bias: Tensor | None, y: Tensor, scale: Tensor | None = None
) -> None:
    """y [M, N] contiguous from partial fp32 [S, M, N]; scale fp32 [N] and bias [N] or None."""
    size = y.numel()
    add_partials_kernel[(triton.cdiv(size, BLOCK),)](
        partial, partial if scale is None else scale, partial if bias is None else bias, y,
        size, y.shape[1], partial.shape[0],
        SCALE=scale is not None, BIAS=bias is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
