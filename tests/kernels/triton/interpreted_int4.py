"""The 4-bit kernels under Triton's interpreter. Run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import interpreter_repair  # noqa: F401
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import assert_as_good_as_torch, room_for
from tile_packer import random_tiles
from torch import Tensor

from weightpath.kernels.triton import int4_gemm, int4_gemv
from weightpath.kernels.triton.dequantize import dequantize

DTYPES = (torch.bfloat16, torch.float16)
GROUPS = (32, 64, 128, 0)


def some_x(m: int, k: int, dtype: torch.dtype, seed: int, padding: int = 0) -> Tensor:
    """x [M, K], its rows `padding` further apart than they are long."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((m, k + padding), generator=draw).to(dtype)[:, :k]


@st.composite
def cases(draw: st.DrawFn, most_rows: int):
    group_size = draw(st.sampled_from(GROUPS))
    k = draw(st.integers(1, 5)) * group_size if group_size else draw(st.integers(1, 300))
    return {
        "m": draw(st.integers(1, most_rows)),
        "n": draw(st.integers(1, 140)),
        "k": k,
        "group_size": group_size,
        "asymmetric": draw(st.booleans()),
        "scale_dtype": draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "bias": draw(st.booleans()),
        "padding": draw(st.sampled_from((0, 3))),
        "seed": draw(st.integers(0, 1000)),
    }


def check(kernel, case, chosen, **more) -> None:
    tiles = random_tiles(
        case["n"], case["k"], case["group_size"], case["seed"],
        asymmetric=case["asymmetric"], scale_dtype=case["scale_dtype"],
    )  # fmt: skip
    x = some_x(case["m"], case["k"], case["dtype"], case["seed"], case["padding"])
    bias = torch.randn(case["n"]) if case["bias"] else None
    y = room_for((case["m"], case["n"]), case["dtype"])
    parts = (x, tiles.codes, tiles.scales, tiles.zeros, bias, y, case["group_size"])
    kernel(*parts, plain=True, chosen=chosen, **more)
    assert_as_good_as_torch(y.to(x.dtype), x, tiles.weight, bias)


@settings(max_examples=14, deadline=None, derandomize=True)
@given(case=cases(16), tiles=st.sampled_from((1, 2, 4)), splits=st.sampled_from((1, 2, 3)))
def test_the_kernel_for_few_rows_is_as_good_as_torch(case, tiles: int, splits: int) -> None:
    check(int4_gemv.int4_gemv, case, int4_gemv.Config(2, tiles, splits, 4))


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    case=cases(40),
    blocks=st.sampled_from((1, 2)),
    splits=st.sampled_from((1, 2, 3)),
    wide=st.booleans(),
)
def test_the_tensor_core_kernel_is_as_good_as_torch(case, blocks: int, splits: int, wide) -> None:
    case["n"] += 64 if blocks == 2 and -(-case["n"] // 64) % 2 else 0
    check(int4_gemm.int4_gemm, case, int4_gemm.Config(16, blocks, splits, 4, 1), wide=wide)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=cases(1), bits=st.sampled_from((4, 8)))
def test_dequantized_tiles_are_the_weight_rounded_once(case, bits: int) -> None:
    asymmetric = case["asymmetric"] and bits == 4
    tiles = random_tiles(
        case["n"], case["k"], case["group_size"], case["seed"], bits, asymmetric,
        case["scale_dtype"],
    )  # fmt: skip
    weight = torch.full((case["n"], case["k"]), float("nan"), dtype=torch.float16)
    dequantize(tiles.codes, tiles.scales, tiles.zeros, weight, case["group_size"])
    assert torch.equal(weight, tiles.weight.float().half())


@pytest.mark.parametrize("kernel", ["gemv", "gemm"])
def test_sums_beyond_fp16_come_back_where_the_result_fits(kernel: str) -> None:
    """Partial sums of about 4e6 that cancel: fp16 sums would be infinite."""
    tiles = random_tiles(64, 256, 64, 3)
    x = torch.full((2, 256), 60000.0, dtype=torch.float16)
    x[:, 128:] = 0.5
    y = torch.empty((2, 64), dtype=torch.float16)
    weight = tiles.weight.clone()
    parts = (tiles.codes, tiles.scales, tiles.zeros, None, y, 64)
    if kernel == "gemv":
        int4_gemv.int4_gemv(x, *parts, plain=True)
    else:
        int4_gemm.int4_gemm(x, *parts, wide=False, plain=True)
    exact = (x.double() @ weight.t()).float()
    assert torch.allclose(y.float(), exact.half().float(), rtol=2e-3, atol=0, equal_nan=True)


def test_a_wrong_order_of_columns_is_seen() -> None:
    """The sabotage of these tests: two columns of a word changed places."""
    case = {
        "m": 2, "n": 64, "k": 128, "group_size": 64, "asymmetric": False, "bias": False,
        "scale_dtype": torch.bfloat16, "dtype": torch.float16, "padding": 0, "seed": 1,
    }  # fmt: skip
    check(int4_gemv.int4_gemv, case, None)
    tiles = random_tiles(64, 128, 64, 1)
    swapped = (tiles.codes << 16) | ((tiles.codes >> 16) & 0xFFFF)
    x, y = some_x(2, 128, torch.float16, 1), torch.empty((2, 64), dtype=torch.float16)
    int4_gemv.int4_gemv(x, swapped, tiles.scales, None, None, y, 64, plain=True)
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(y, x, tiles.weight, None)
