"""The CUDA kernels on a GPU: beside float64, in graphs, twice, and through the modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weightpath.kernels.cuda import tiles_linear
from weightpath.layouts import gpu_tiles
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.low_bit_linear import LowBitLinear
from weightpath.scheme import Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    (256, 512, 4, 128, False),
    (256, 512, 4, 64, True),
    (192, 576, 4, 64, True),
    (70, 96, 4, 32, True),
    (200, 320, 4, 32, False),
    (136, 256, 4, 0, True),
    (100, 200, 8, 0, False),
    (4096, 4096, 4, 128, False),
]
ROWS = (1, 3, 8, 13, 30, 33, 64, 100, 300)


def case(
    n: int, k: int, bits: int, group: int, asymmetric: bool
) -> tuple[gpu_tiles.GpuTiles, Tensor]:
    """Random tiles and the weight that they stand for, in float64."""
    size = group or k
    codes = torch.randint(0, 16 if bits == 4 else 256, (n, k), dtype=torch.uint8, device="cuda")
    dtype = torch.float32 if bits == 8 else torch.bfloat16 if n % 3 else torch.float16
    scales = (torch.rand(n, k // size, device="cuda") * 0.02 + 0.001).to(dtype)
    zeros = None
    if asymmetric:
        zeros = torch.randint(0, 16, (n, k // size), dtype=torch.uint8, device="cuda")
    wide = scales.double().repeat_interleave(size, 1)
    if bits == 8:
        return gpu_tiles.from_parts(codes, scales, zeros, bits), codes.view(
            torch.int8
        ).double() * wide
    offset = 8 if zeros is None else zeros.double().repeat_interleave(size, 1)
    return gpu_tiles.from_parts(codes, scales, zeros, bits), (codes.double() - offset) * wide


def error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_products_are_as_near_to_float64_as_torch_and_the_same_twice(
    shape: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    tiles, weight = case(*shape)
    n, k = shape[:2]
    for rows in ROWS:
        x = torch.randn(rows, k + 8, device="cuda", dtype=dtype)[:, 5 : k + 5]  # strided, unaligned
        bias = torch.randn(n, device="cuda", dtype=dtype) if rows % 2 else None
        wanted = x.double() @ weight.T + (0 if bias is None else bias.double())
        plain = x @ weight.to(dtype).T + (0 if bias is None else bias)
        y = tiles_linear.linear(x, tiles, bias)
        assert error(y, wanted) <= 2 * error(plain, wanted), rows
        assert torch.equal(y, tiles_linear.linear(x, tiles, bias)), rows
        wide = tiles_linear.linear(x, tiles, bias, torch.float32)
        assert error(wide, wanted) <= 2 * error(plain, wanted), rows


@pytest.mark.parametrize("rows", [1, 20, 200])
def test_activations_whose_sums_pass_fp16_come_out_as_fp32_sums_do(rows: int) -> None:
    tiles, weight = case(256, 512, 4, 128, False)
    x = torch.full((rows, 512), 7e4, device="cuda").clamp(max=65504).half()
    x[:, 256:] *= -1
    wanted = (x.double() @ weight.T).float().half()
    assert torch.allclose(tiles_linear.linear(x, tiles), wanted, rtol=2e-3, atol=32)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_captured_product_follows_its_input(rows: int) -> None:
    tiles, _ = case(512, 1024, 4, 128, False)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    tiles_linear.tiles_linear(x, tiles, None, x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tiles_linear.tiles_linear(x, tiles, None, x.dtype)
        z = tiles_linear.tiles_linear(y.repeat(1, 2), tiles, None, x.dtype)
    x.copy_(torch.randn_like(x))
    graph.replay()
    once = tiles_linear.linear(x, tiles)
    assert torch.equal(y, once)
    assert torch.equal(z, tiles_linear.linear(once.repeat(1, 2), tiles))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("scheme", ["w4g64", "w4g32-asym", "int8"])
def test_modules_run_each_kernel_and_give_their_plain_values_back(
    scheme: str, backend: str
) -> None:
    linear = nn.Linear(320, 200, dtype=torch.bfloat16)
    module: LowBitLinear = (
        Int8Linear.from_linear(linear)
        if scheme == "int8"
        else Int4Linear.from_linear(linear, Scheme.parse(scheme))
    )
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(5, 320, dtype=torch.bfloat16)
    wanted = module.dequantize(torch.float64)
    wanted = x.double() @ wanted.T + linear.bias.double()
    module.to("cuda")
    module.set_backend(backend)
    assert module.kernel.name == backend
    y = module(x.cuda())
    assert error(y.cpu(), wanted) < 6e-3
    assert all(torch.equal(value.cpu(), saved[name]) for name, value in module.state_dict().items())
    module.to("cpu")
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    module.set_backend(None)
    assert error(module(x), wanted) < 6e-3


def test_gradients_and_wide_floats_go_through_torch() -> None:
    linear = nn.Linear(128, 64)
    module = Int4Linear.from_linear(linear, Scheme(4, 64)).to("cuda")
    assert module.set_backend("cuda") == "plain codes to GPU tiles"
    x = torch.randn(3, 128, device="cuda", requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, module.dequantize().sum(0).expand(3, -1), rtol=1e-4, atol=1e-5)
