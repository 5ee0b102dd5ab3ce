"""The product from the AWQ kernel layout under Triton's interpreter. Run by test_interpreted.py."""

from __future__ import annotations

import interpreter_repair  # noqa: F401
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import assert_as_good_as_torch
from torch import Tensor

from weightpath.kernels.triton.awq_kernel import awq_linear
from weightpath.layouts.awq_kernel import KernelAwq, from_qweight
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme


def laid_out(n: int, k: int, group_size: int, seed: int) -> tuple[KernelAwq, Tensor]:
    """A random linear in the kernel's layout, and its weight float64 [N, K]."""
    draw = torch.Generator().manual_seed(seed)
    groups = k // group_size
    qweight = QWeight(
        Scheme(4, group_size, symmetric=False),
        torch.randint(0, 16, (n, k), generator=draw).to(torch.uint8),
        (torch.rand((n, groups), generator=draw) * 0.02 + 1e-3).half(),
        torch.randint(0, 16, (n, groups), generator=draw).to(torch.int16),
    )
    return from_qweight(qweight), qweight.dequantize(torch.float32).double()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 20),
    blocks=st.integers(1, 2),
    group_size=st.sampled_from((64, 128)),
    groups=st.integers(1, 9),
    split_k=st.sampled_from((1, 2)),
    bias=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_as_good_as_torch(m, blocks, group_size, groups, split_k, bias, wide, seed) -> None:
    n, k = 64 * blocks, group_size * groups
    layout, weight = laid_out(n, k, group_size, seed)
    x = torch.randn((m, k + 8), generator=torch.Generator().manual_seed(seed)).half()[:, :k]
    some_bias = torch.randn(n) if bias else None
    y = torch.full((m, n), float("nan"), dtype=torch.float16)
    parts = (layout.weight, layout.zeros, layout.scales, some_bias, y)
    awq_linear(x, *parts, group_size, split_k, wide)
    assert_as_good_as_torch(y, x, weight, some_bias)


def test_a_plain_order_of_rows_in_a_word_is_seen() -> None:
    """The sabotage: the nibbles of a word, halves changed."""
    layout, weight = laid_out(64, 128, 128, 1)
    x, y = torch.randn((2, 128)).half(), torch.empty((2, 64), dtype=torch.float16)
    swapped = (layout.weight << 16) | ((layout.weight >> 16) & 0xFFFF)
    awq_linear(x, swapped, layout.zeros, layout.scales, None, y, 128, 1, False)
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(y, x, weight, None)
