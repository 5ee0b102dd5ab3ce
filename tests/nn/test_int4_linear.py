"""Int4Linear: 4-bit codes in groups on the reference kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightpath.errors import BadRequest, BadTensor, CannotRun
from weightpath.kernels import reference
from weightpath.nn.int4_linear import Int4Linear
from weightpath.quantize.rtn import quantize_rtn
from weightpath.scheme import Scheme

SCHEMES = (Scheme(4, 16), Scheme(4, 16, symmetric=False), Scheme(4), Scheme(4, symmetric=False))


def linear(n: int = 10, k: int = 48, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias).requires_grad_(False)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_a_linear_with_its_weight_would(
    scheme: Scheme, bias: bool, backend: str
) -> None:
    source = linear(bias=bias)
    qweight, _ = quantize_rtn(source.weight, scheme)
    module = Int4Linear.from_linear(source, scheme)
    module.set_backend(backend)
    assert torch.equal(module.dequantize(), qweight.dequantize())
    for x in (random(2, 3, 48), random(48), torch.zeros(0, 48)):
        wanted = nn.functional.linear(x, qweight.dequantize(), source.bias)
        exact = {"rtol": 1.3e-6, "atol": 1e-5} if backend == "torch" else {"rtol": 0, "atol": 2e-4}
        torch.testing.assert_close(module(x), wanted, **exact)
        assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_its_buffers_are_packed_codes_scales_as_stored_and_zeros_only_if_asymmetric(
    scheme: Scheme,
) -> None:
    module = Int4Linear.from_linear(linear(), scheme, scale_dtype=torch.float16)
    groups = scheme.groups(48)
    assert module.packed.shape == (10, 24)
    assert module.packed.dtype == torch.uint8
    assert (module.scales.dtype, tuple(module.scales.shape)) == (torch.float16, (10, groups))
    assert (module.zeros is None) == scheme.symmetric
    names = {"packed", "scales", "bias"} | (set() if scheme.symmetric else {"zeros"})
    assert set(module.state_dict()) == names


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double()])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
def test_casting_a_model_leaves_the_scales_as_stored(cast: Any, stored: torch.dtype) -> None:
    module = Int4Linear.from_linear(linear(), SCHEMES[1], scale_dtype=stored)
    weight = module.dequantize()
    module = cast(module)
    assert module.scales.dtype == stored
    assert torch.equal(module.dequantize(), weight)
    moved = Int4Linear.from_linear(linear(), SCHEMES[1]).to("meta", torch.float16)
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}


def test_under_autocast_it_is_in_the_autocast_dtype_as_a_linear_is() -> None:
    module, x = Int4Linear.from_linear(linear(), SCHEMES[0]), random(4, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == linear()(x).dtype == torch.bfloat16


def test_8_bit_activations_change_the_product_as_the_formula_says() -> None:
    eight = Int4Linear.from_linear(linear(), SCHEMES[1].with_activations(8))
    sixteen = Int4Linear.from_linear(linear(), SCHEMES[1])
    x = random(4, 48)
    compiled = eight(x)
    eight.set_backend("torch")
    sixteen.set_backend("torch")
    torch.testing.assert_close(compiled, eight(x))
    assert torch.equal(eight(x), sixteen(reference.quantize_activations(x, groups=3)))
    eight.scale_per_group = False
    assert torch.equal(eight(x), sixteen(reference.quantize_activations(x)))
    eight.set_backend("cpu")
    torch.testing.assert_close(eight(x), sixteen(reference.quantize_activations(x)))
    assert not torch.equal(eight(x), compiled)
    assert not torch.equal(eight(x), sixteen(x))
    assert torch.equal(eight.dequantize(), sixteen.dequantize())


# From a QWeight


def test_what_is_not_4_bit_codes_in_column_order_is_refused_by_name() -> None:
    qweight, _ = quantize_rtn(linear().weight, SCHEMES[1])
    three, _ = quantize_rtn(linear().weight, Scheme(3, 16))
    lows = replace(qweight, zeros=None, minimums=torch.zeros_like(qweight.scales))
    ordered = replace(qweight, g_idx=torch.zeros(48, dtype=torch.int32))
    for bad, word in ((three, "3 bits"), (lows, "minimums"), (ordered, "column order")):
        with pytest.raises(BadTensor, match=rf"tensor up: .*{word}"):
            Int4Linear.from_qweight(bad, name="up")


def test_an_odd_row_is_refused_with_its_length() -> None:
    qweight, _ = quantize_rtn(random(4, 47), Scheme(4))
    with pytest.raises(BadTensor, match="in_features 47 is odd"):
        Int4Linear.from_qweight(qweight)


@pytest.mark.parametrize("wrong", [-1, 16, 300])
def test_a_zero_that_does_not_fit_is_an_error_not_another_zero(wrong: int) -> None:
    qweight, _ = quantize_rtn(linear().weight, SCHEMES[1])
    assert qweight.zeros is not None
    zeros = qweight.zeros.clone()
    zeros[2, 1] = wrong
    with pytest.raises(BadTensor, match=r"4 bits hold 0\.\.15"):
        Int4Linear.from_qweight(replace(qweight, zeros=zeros))


def test_a_code_that_does_not_fit_is_an_error_and_does_not_spill() -> None:
    qweight, _ = quantize_rtn(linear().weight, SCHEMES[0])
    codes = qweight.codes.clone()
    codes[0, 0] = 16
    with pytest.raises(BadTensor, match="code 16 exceeds 15"):
        Int4Linear.from_qweight(replace(qweight, codes=codes))


# Backends


def test_backends_switch_and_a_refusal_says_why() -> None:
    module = Int4Linear.from_linear(linear(), SCHEMES[0])
    assert module.kernel.name == "cpu"
    with pytest.raises(CannotRun, match="Triton kernels run on CUDA"):
        module.set_backend("triton")
    with pytest.raises(BadRequest, match="unknown"):
        module.set_backend("gpu")
    assert module.backend is None
    module.set_backend("torch")
    assert module.kernel.rejected == ()


def test_it_prints_what_it_is() -> None:
    module = Int4Linear.from_linear(linear(bias=False), SCHEMES[1])
    assert repr(module) == "Int4Linear(48, 10, bias=False, w4g16-asym)"
