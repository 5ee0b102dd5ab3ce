"""The two forms of a low-bit linear's codes, plain and CPU tiles: held once, and the same outside."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.nn.int4_linear import Int4Linear
from weightpath.nn.int8_linear import Int8Linear
from weightpath.nn.low_bit_linear import LowBitLinear
from weightpath.scheme import Scheme

Make = Callable[[], LowBitLinear]


def linear(n: int = 40, k: int = 64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n).requires_grad_(False)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


MAKES: dict[str, Make] = {
    "int8": lambda: Int8Linear.from_linear(linear()),
    "w4g32": lambda: Int4Linear.from_linear(linear(), Scheme(4, 32)),
    "w4g32-asym": lambda: Int4Linear.from_linear(linear(), Scheme(4, 32, symmetric=False)),
    "w4-fp16-scales": lambda: Int4Linear.from_linear(
        linear(), Scheme(4), scale_dtype=torch.float16
    ),
}
every_kind = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())


def tiled(make: Make) -> LowBitLinear:
    module = make()
    assert module.set_backend("cpu") == "plain codes to CPU tiles"
    return module


@every_kind
def test_codes_are_held_once_and_read_the_same_in_either_form(make: Make) -> None:
    plain, module = make(), tiled(make)
    assert set(dict(module.named_buffers())) == {"tiles"}
    assert set(module.state_dict()) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
        assert torch.equal(getattr(module, name), value)
        assert getattr(module, name).dtype == value.dtype
    assert torch.equal(module.dequantize(), plain.dequantize())
    assert module.set_backend("torch") == "CPU tiles to plain codes"
    assert module.cpu_tiles is None
    assert set(dict(module.named_buffers())) == set(dict(plain.named_buffers()))
    assert torch.equal(module(random(3, 64)), plain_product(plain, random(3, 64)))


def plain_product(module: LowBitLinear, x: Tensor) -> Tensor:
    module.set_backend("torch")
    return module(x)


@every_kind
def test_the_first_product_lays_codes_out(make: Make) -> None:
    module = make()
    assert module.cpu_tiles is None
    y = module(random(2, 64))
    assert module.cpu_tiles is not None
    assert torch.equal(y, tiled(make)(random(2, 64)))


@every_kind
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_of_tiles_compute_the_same_from_memory_of_their_own(
    make: Make, again: Callable[[LowBitLinear], LowBitLinear]
) -> None:
    module = tiled(make)
    other, x = again(module), random(2, 64)
    wanted = module(x)
    assert torch.equal(other(x), wanted)
    assert other.cpu_tiles is not None
    assert other.cpu_tiles.packed is other.tiles
    other.tiles.zero_()
    assert torch.equal(module(x), wanted)
    assert not torch.equal(other(x), wanted)


@every_kind
def test_a_state_dict_loads_into_tiles(make: Make) -> None:
    module, other, x = tiled(make), tiled(make), random(2, 64)
    changed = {name: value.clone() for name, value in make().state_dict().items()}
    codes = changed["codes"] if "codes" in changed else changed["packed"]
    codes[0] ^= 5
    other.load_state_dict(changed)
    assert torch.equal(other.state_dict()["codes" if "codes" in changed else "packed"], codes)
    assert (other(x) != module(x)).nonzero()[:, 1].unique().tolist() == [0]


@every_kind
def test_another_device_takes_the_plain_form_and_casts_leave_tiles(make: Make) -> None:
    names = set(make().state_dict())
    module = tiled(make)
    with pytest.raises(CannotRun, match="this layer is on meta"):
        copy.deepcopy(module).to("meta").prepare()  # it was asked for by name
    module.set_backend(None)
    moved = module.to("meta")
    assert {name: value.device.type for name, value in moved.state_dict().items()} == dict.fromkeys(
        names, "meta"
    )
    assert moved.kernel.name == "torch"
    module, x = tiled(make), random(2, 64).bfloat16()
    before = module.tiles.clone()
    cast = module.bfloat16()
    assert torch.equal(cast.tiles, before)
    assert cast.bias is not None
    assert cast.bias.dtype == torch.bfloat16
    assert cast(x).dtype == torch.bfloat16


@every_kind
def test_fp64_goes_to_torch_and_is_exact(make: Make) -> None:
    module, x = tiled(make), random(3, 64).double()
    wanted = x @ module.dequantize(torch.float64).T + module.bias.double()  # type: ignore[union-attr]
    if isinstance(module, Int8Linear):
        wanted = x @ (module.codes.double() * module.scale.double()[:, None]).T
        wanted = wanted + module.bias.double()  # type: ignore[union-attr]
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)


@every_kind
def test_where_only_the_scalar_set_runs_many_rows_go_to_torch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "fewest_torch_rows", lambda: 4)
    module = tiled(make)
    plain = make()
    plain.set_backend("torch")
    assert torch.equal(module(random(4, 64)), plain(random(4, 64)))
    assert not torch.equal(module(random(3, 64)), plain(random(3, 64)))


@every_kind
def test_gradients_of_x_and_bias_are_those_of_the_weight(make: Make) -> None:
    module = tiled(make)
    assert module.bias is not None
    module.bias.requires_grad_()
    x = random(2, 3, 64).requires_grad_()
    module(x).pow(2).sum().backward()
    assert x.grad is not None
    assert module.bias.grad is not None
    twice = 2 * module(x).detach()
    torch.testing.assert_close(x.grad, twice @ module.dequantize())
    torch.testing.assert_close(module.bias.grad, twice.sum((0, 1)))


@every_kind
def test_export_and_compile_trace_through_a_module(make: Make) -> None:
    module, x = tiled(make), random(5, 64)
    wanted = module(x)
    exported = torch.export.export(module, (x,))
    assert "weightpath.cpu_linear" in str(exported.graph)
    assert torch.equal(exported.module()(x), wanted)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), wanted)


def test_export_of_codes_that_are_not_laid_out_says_what_to_call() -> None:
    with pytest.raises(CannotRun, match=r"set_backend\(model, None\) before export"):
        torch.export.export(MAKES["w4g32"](), (random(2, 64),))


@every_kind
def test_first_products_of_several_threads_agree(make: Make) -> None:
    module, x = make(), random(4, 64)
    wanted = tiled(make)(x)
    gate, found = threading.Barrier(4), []

    def product() -> None:
        gate.wait()
        found.append(module(x))

    threads = [threading.Thread(target=product) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, wanted) for y in found)
    assert len(found) == 4


def test_activations_on_another_device_are_refused_not_read() -> None:
    tiles = tiled(MAKES["int8"]).cpu_tiles
    assert tiles is not None
    with pytest.raises(BadRequest, match=r"on meta .*wanted .* on cpu"):
        cpu.linear(torch.zeros(2, 64, device="meta"), tiles)


@every_kind
def test_tiles_may_lie_in_rows_that_another_engine_holds(make: Make) -> None:
    module, x = tiled(make), random(3, 64)
    wanted, saved = module(x), {n: v.clone() for n, v in module.state_dict().items()}
    assert module.cpu_tiles is not None
    rows = module.cpu_tiles.packed.view(2, -1)  # 40 outputs: two tiles
    joint = torch.cat((rows, torch.zeros_like(rows)), dim=1)
    module.hold_rows(joint[:, : rows.shape[1]])
    assert module.cpu_tiles.packed.data_ptr() == joint.data_ptr()
    assert all(torch.equal(module.state_dict()[name], value) for name, value in saved.items())
    assert module.cpu_tiles.packed.data_ptr() == joint.data_ptr()  # nothing was copied for that
    assert torch.equal(module(x), wanted)
    joint.zero_()
    assert torch.equal(module(x), wanted)  # its own by now
    with pytest.raises(BadRequest, match=r"rows \[1, 8\] cannot stand for"):
        module.hold_rows(torch.zeros(1, 8, dtype=torch.uint8))
