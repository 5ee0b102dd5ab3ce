"""The Triton operators on a CUDA device: right, bit for bit the same twice, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from judged import assert_as_good_as_torch
from tile_packer import random_tiles
from torch import Tensor

from weightpath.errors import BadRequest
from weightpath.kernels.triton import ops
from weightpath.layouts.awq_kernel import from_qweight
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# n, k, group size, asymmetric, scales, x, bias
FORMS = [
    (4096, 4096, 128, False, torch.bfloat16, torch.bfloat16, False),
    (1000, 4096, 128, True, torch.float16, torch.float16, True),
    (300, 1152, 64, True, torch.bfloat16, torch.bfloat16, True),
    (130, 352, 32, True, torch.float16, torch.float16, False),
    (576, 1000, 0, False, torch.float32, torch.bfloat16, False),
]
ROWS = (1, 3, 16, 33, 150, 300)


def some_x(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """x [M, K] whose rows are 8 further apart than they are long."""
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((m, k + 8), generator=draw, device="cuda").to(dtype)[:, :k]


def int8_parts(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(-127, 128, (n, k), generator=draw, device="cuda", dtype=torch.int8)
    return codes, torch.rand(n, generator=draw, device="cuda") * 0.02 + 1e-3


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_four_bits_are_as_good_as_torch(form) -> None:
    n, k, group_size, asymmetric, scale_dtype, dtype, has_bias = form
    tiles = random_tiles(
        n, k, group_size, 1, asymmetric=asymmetric, scale_dtype=scale_dtype, device="cuda"
    )
    bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
    parts = (tiles.codes, tiles.scales, tiles.zeros, bias, n, tiles.group_size)
    for m in ROWS:
        x = some_x(m, k, dtype, m)
        y = ops.int4_linear(x, *parts)
        assert y.dtype == dtype
        assert_as_good_as_torch(y, x, tiles.weight, bias)


def test_the_tensor_core_kernel_serves_any_rows() -> None:
    tiles = random_tiles(4096, 4096, 128, 1, device="cuda")
    for m in (3, 16, 600):
        x = some_x(m, 4096, torch.bfloat16)
        parts = (tiles.codes, tiles.scales, None, None, 4096, 128)
        assert_as_good_as_torch(ops.int4_linear(x, *parts, kernel="gemm"), x, tiles.weight, None)


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantized_weights_are_rounded_once(bits: int) -> None:
    tiles = random_tiles(1000, 1152, 128, 1, bits, asymmetric=bits == 4, device="cuda")
    weight = ops.dequantize(tiles.codes, tiles.scales, tiles.zeros, 1000, 1152, 128, torch.bfloat16)
    assert torch.equal(weight, tiles.weight.float().bfloat16())


@pytest.mark.parametrize(
    ("n", "k", "dtype", "has_bias"),
    [
        (4096, 4096, torch.bfloat16, False),
        (1000, 4096, torch.float16, True),
        (77, 333, torch.bfloat16, True),
    ],
)
def test_int8_is_as_good_as_torch(n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    codes, scale = int8_parts(n, k)
    weight = codes.double() * scale.double()[:, None]
    bias = torch.randn(n, device="cuda") if has_bias else None
    for m in ROWS:
        x = some_x(m, k, dtype, m)
        assert_as_good_as_torch(ops.int8_linear(x, codes, scale, bias), x, weight, bias)
    x = some_x(5, k, dtype)
    wide = ops.int8_linear(x, codes, scale, bias, torch.float32)
    exact = x.double() @ weight.t() + (0 if bias is None else bias.double())
    assert float((wide - exact).abs().max()) <= 2e-5 * float(exact.abs().max())


@pytest.mark.parametrize(("n", "k", "group_size"), [(4096, 4096, 128), (64, 1152, 64)])
def test_the_awq_kernel_layout_is_as_good_as_torch(n: int, k: int, group_size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    groups = k // group_size
    qweight = QWeight(
        Scheme(4, group_size, symmetric=False),
        torch.randint(0, 16, (n, k), generator=draw).to(torch.uint8),
        (torch.rand((n, groups), generator=draw) * 0.02 + 1e-3).half(),
        torch.randint(0, 16, (n, groups), generator=draw).to(torch.int16),
    )
    made = from_qweight(qweight)
    parts = (made.weight.cuda(), made.zeros.cuda(), made.scales.cuda())
    weight = qweight.dequantize(torch.float32).double().cuda()
    bias = torch.randn(n, device="cuda").half()
    for m in (1, 20, 100):
        x = some_x(m, k, torch.float16, m)
        assert_as_good_as_torch(ops.awq_linear(x, *parts, bias, group_size), x, weight, bias)


def test_sums_beyond_fp16_come_back_where_the_result_fits() -> None:
    """Partial sums far above 65504 that end below it, in every kernel: 7e4 is infinite in fp16, so
    x is its largest number."""
    x = torch.full((200, 4096), 65504.0, dtype=torch.float16, device="cuda")
    x[:, 1::2] = -65504.0
    x[:, 5] = 0
    codes = torch.full((64, 4096), 100, dtype=torch.int8, device="cuda")
    scale = torch.full((64,), 1e-3, device="cuda")
    exact = x[:1].double().sum() * 100 * float(scale[0])
    for m in (1, 7, 16, 200):
        y = ops.int8_linear(x[:m], codes, scale)
        assert torch.allclose(y.double(), exact.expand_as(y), rtol=2e-3)
    tiles = random_tiles(64, 4096, 128, 2, device="cuda")
    words = torch.full_like(tiles.codes, -1)  # every code 15: the weight is 7 * scale
    scales = torch.full_like(tiles.scales, 2**-10)
    exact = x[:1].double().sum() * 7 * 2**-10
    for m, kernel in ((1, "gemv"), (16, "gemv"), (200, "gemm")):
        y = ops.int4_linear(x[:m], words, scales, None, None, 64, 128, kernel=kernel)
        assert torch.allclose(y.double(), exact.expand_as(y), rtol=2e-3)


def products() -> list[tuple[str, Callable[[Tensor], Tensor], int]]:
    """Names, products of x bf16 [M, 4096] that split K, and rows."""
    tiles = random_tiles(1000, 4096, 128, 1, asymmetric=True, device="cuda")
    codes, scale = int8_parts(1000, 4096)
    bias = torch.randn(1000, device="cuda").bfloat16()

    def int4(x: Tensor) -> Tensor:
        return ops.int4_linear(x, tiles.codes, tiles.scales, tiles.zeros, bias, 1000, 128)

    def int8(x: Tensor) -> Tensor:
        return ops.int8_linear(x, codes, scale, bias)

    return [
        (f"{name} {m}", function, m)
        for name, function in (("int4", int4), ("int8", int8))
        for m in (1, 3, 33, 300)
    ]


def test_two_runs_give_the_same_bits() -> None:
    for name, function, m in products():
        x = some_x(m, 4096, torch.bfloat16, m)
        first = function(x)
        for _ in range(20):
            assert torch.equal(first, function(x)), name


def test_a_graph_replays_them_on_new_activations() -> None:
    for name, function, m in products():
        x, other = (some_x(m, 4096, torch.bfloat16, seed).contiguous() for seed in (1, 2))
        wanted, held = function(other), x.clone()
        function(held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = function(held)
        held.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, wanted), name


def test_any_strides_of_x_and_any_leading_shape() -> None:
    codes, scale = int8_parts(77, 256)
    x = torch.randn((256, 2, 3), device="cuda").bfloat16().permute(1, 2, 0)
    assert x.stride(2) != 1
    y = ops.int8_linear(x, codes, scale)
    assert y.shape == (2, 3, 77)
    assert torch.equal(y, ops.int8_linear(x.contiguous(), codes, scale))
    assert ops.int8_linear(x[:0], codes, scale).shape == (0, 3, 77)


def test_what_does_not_fit_is_named() -> None:
    codes, scale = int8_parts(77, 256)
    x = torch.randn((20, 256), device="cuda")
    with pytest.raises(BadRequest, match="x is float32"):
        ops.int8_linear(x, codes, scale)
    with pytest.raises(BadRequest, match=r"wanted int8 \[N, 255\]"):
        ops.int8_linear(x[:, :255].half(), codes, scale)
    with pytest.raises(BadRequest, match="takes 16 rows at most"):
        ops.int8_linear(x.half(), codes, scale, kernel="gemv")
    tiles = random_tiles(64, 64, 64, 0, device="cuda")
    with pytest.raises(BadRequest, match="codes are int32"):
        ops.int4_linear(x.half(), tiles.codes, tiles.scales, None, None, 64, 64)
