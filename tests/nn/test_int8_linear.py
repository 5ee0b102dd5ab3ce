"""Int8Linear: a drop-in for nn.Linear whose scale is never rounded."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightpath.errors import BadRequest, BadTensor, CannotRun
from weightpath.nn.int8_linear import Int8Linear
from weightpath.quantize.int8 import quantize_int8, quantize_per_channel
from weightpath.quantize.rtn import quantize_rtn
from weightpath.scheme import INT8, Scheme


def linear(n: int = 12, k: int = 40, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias=bias).requires_grad_(False)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_it_holds_int8_codes_and_an_fp32_scale_and_the_bias_as_it_was() -> None:
    source = linear().to(torch.bfloat16)
    module = Int8Linear.from_linear(source)
    codes, scale = quantize_per_channel(source.weight)
    assert torch.equal(module.codes, codes)
    assert torch.equal(module.scale, scale)
    assert (module.codes.dtype, module.scale.dtype) == (torch.int8, torch.float32)
    assert (tuple(module.codes.shape), tuple(module.scale.shape)) == ((12, 40), (12,))
    assert module.bias is not None
    assert torch.equal(module.bias, source.bias)
    assert module.bias.dtype == torch.bfloat16
    assert set(module.state_dict()) == {"codes", "scale", "bias"}


def test_without_a_bias_it_has_none() -> None:
    module = Int8Linear.from_linear(linear(bias=False))
    assert module.bias is None
    assert set(module.state_dict()) == {"codes", "scale"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_computes_what_a_linear_with_its_weight_would(bias: bool, dtype: torch.dtype) -> None:
    source = linear(bias=bias)
    module = Int8Linear.from_linear(source)
    x = random(3, 5, 40).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    assert y.shape == (3, 5, 12)
    exact = x.double() @ (module.codes.double() * module.scale.double()[:, None]).T
    if source.bias is not None:
        exact = exact + source.bias.double()
    loss = {torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-12}
    assert float((y.double() - exact).norm() / exact.norm()) < loss[dtype]
    module.set_backend("torch")
    plain = float((module(x).double() - exact).norm() / exact.norm())
    assert plain < (1e-6 if dtype == torch.float32 else loss[dtype])


def test_a_bias_that_is_left_out_is_noticed() -> None:
    source = linear()
    module = Int8Linear.from_linear(source)
    without = Int8Linear(module.codes, module.scale)
    torch.testing.assert_close(
        module(random(2, 40)) - without(random(2, 40)), source.bias.expand(2, 12)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_output_is_fp32_and_the_scale_is_not_rounded(
    dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    source = linear()
    module, x = Int8Linear.from_linear(source), random(64, 40).to(x_dtype)
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
    assert y.dtype == torch.float32
    low = x.to(dtype)
    product = (low.double() @ module.codes.double().T).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)  # fmt: skip
    wanted = product.float() * module.scale + source.bias
    torch.testing.assert_close(y, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    # Judged without the bias: one rounding of the product, none of the scale.
    with torch.autocast("cpu", dtype=dtype):
        bare = Int8Linear(module.codes, module.scale)(x).double()
    exact = low.double() @ module.dequantize().double().T
    rounded = low.double() @ (module.codes.double() * module.scale.to(torch.bfloat16).double()[:, None]).T  # fmt: skip
    assert float((bare - exact).norm()) < float((rounded - exact).norm()) * 1.5
    assert float((bare - exact).norm() / exact.norm()) < 2.1e-3


def test_outside_autocast_the_output_has_the_dtype_of_the_input() -> None:
    module = Int8Linear.from_linear(linear())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    assert module(random(2, 40)).dtype == torch.float32
    assert module(random(2, 40).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
def test_large_fp16_activations_give_the_finite_result_that_plain_torch_gives(
    autocast: bool,
) -> None:
    source = linear(bias=False)
    source.weight.fill_(1e-3)
    x = torch.full((1, 40), 6e4, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        y = Int8Linear.from_linear(source)(x)
    torch.testing.assert_close(y.float(), torch.full((1, 12), 2400.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: nn.Sequential(m).to(torch.float16)[0],
        lambda m: m.to(device="cpu", dtype=torch.bfloat16),
    ],
)
def test_casting_a_model_never_rounds_the_scale(cast: Any) -> None:
    module = Int8Linear.from_linear(linear())
    scale, codes = module.scale.clone(), module.codes.clone()
    module = cast(module)
    assert module.scale.dtype == torch.float32
    assert torch.equal(module.scale, scale)
    assert torch.equal(module.codes, codes)
    assert module.bias.dtype != torch.float32  # the bias follows the model


def test_it_moves_to_another_device_whole() -> None:
    module = Int8Linear.from_linear(linear()).to("meta")
    assert {t.device.type for t in module.state_dict().values()} == {"meta"}
    cast = Int8Linear.from_linear(linear()).to("meta", torch.bfloat16)
    assert cast.scale.device.type == "meta"
    assert cast.scale.dtype == torch.float32


def test_no_rows_and_one_row_work() -> None:
    module = Int8Linear.from_linear(linear())
    assert module(torch.zeros(0, 40)).shape == (0, 12)
    assert module(torch.zeros(1, 40)).shape == (1, 12)
    torch.testing.assert_close(module(torch.zeros(40)), module.bias.data)


def test_a_nan_in_the_weight_is_named() -> None:
    source = linear()
    source.weight[3, 5] = math.nan
    with pytest.raises(BadTensor, match=r"tensor mlp\.up: element \[3, 5\] is nan"):
        Int8Linear.from_linear(source, "mlp.up")


# From a QWeight


def test_it_takes_over_an_int8_qweight_exactly() -> None:
    source = linear()
    qweight, _ = quantize_int8(source.weight)
    module = Int8Linear.from_qweight(qweight, source.bias)
    twin = Int8Linear.from_linear(source)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_codes_of_minus_128_from_other_tools_are_kept() -> None:
    qweight, _ = quantize_int8(linear().weight)
    qweight.codes[0, 0] = 0
    module = Int8Linear.from_qweight(qweight)
    assert int(module.codes[0, 0]) == -128
    assert torch.equal(module.dequantize(), qweight.dequantize())


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 8), Scheme(8, 8), Scheme(8, symmetric=False), Scheme(4)]
)
def test_a_qweight_of_another_scheme_is_refused_by_name(scheme: Scheme) -> None:
    qweight, _ = quantize_rtn(linear().weight, scheme)
    with pytest.raises(BadTensor, match=r"tensor head: .*" + scheme.name):
        Int8Linear.from_qweight(qweight, name="head")


def test_minimums_and_a_column_order_are_not_lost_silently() -> None:
    qweight, _ = quantize_int8(linear().weight)
    lows = torch.zeros_like(qweight.scales)
    for change in ({"minimums": lows}, {"g_idx": torch.zeros(40, dtype=torch.int32)}):
        with pytest.raises(BadTensor):
            Int8Linear.from_qweight(replace(qweight, **change), name="head")


# Backends


def test_backends_switch_without_a_copy_and_a_refusal_changes_nothing() -> None:
    module = Int8Linear.from_linear(linear())
    place = module.codes.data_ptr()
    assert module.kernel.name == "cpu"
    assert [name for name, _ in module.kernel.rejected][:2] == ["cuda", "triton"]
    assert module.set_backend("torch") == ""
    assert module.backend == "torch"
    with pytest.raises(CannotRun, match="Triton kernels run on CUDA"):
        module.set_backend("triton")
    with pytest.raises(BadRequest, match="unknown"):
        module.set_backend("marlin")
    assert module.backend == "torch"
    assert module.kernel.rejected == ()
    assert module.codes.data_ptr() == place


def test_it_survives_a_deep_copy_and_a_state_dict_round_trip() -> None:
    module, other = Int8Linear.from_linear(linear()), Int8Linear.from_linear(linear(seed=5))
    x = random(2, 40)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))


def test_gradients_reach_the_input() -> None:
    module = Int8Linear.from_linear(linear())
    x = random(2, 40).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, module.dequantize().sum(0).expand(2, 40))


def test_it_prints_what_it_is() -> None:
    assert repr(Int8Linear.from_linear(linear())) == "Int8Linear(40, 12, bias=True, w8)"
    assert Int8Linear.scheme == INT8
