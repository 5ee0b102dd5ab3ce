"""The operator around the compiled products: choice, reasons, shapes, tracing, threads, forks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import CpuTiles
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SETS = [name for name, reason in cpu.instruction_sets().items() if reason is None]
pytestmark = pytest.mark.skipif(not SETS, reason="this install has no compiled kernels")


def a_weight(n: int = 96, k: int = 128) -> CpuTiles:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    return cpu.pack(QWeight(Scheme(4, 32), codes, torch.rand(n, k // 32, generator=draw)))


@pytest.mark.parametrize("size", [1, 4096, cpu.HUGE_PAGE - 1, cpu.HUGE_PAGE, cpu.HUGE_PAGE + 65])
def test_fresh_memory_is_aligned_whole_and_stays_while_it_is_held(size: int) -> None:
    memory = cpu.fresh_memory(size)
    assert memory.shape == (size,)
    assert memory.data_ptr() % (64 if size < cpu.HUGE_PAGE else cpu.HUGE_PAGE) == 0
    memory.fill_(7)
    gc.collect()
    other = cpu.fresh_memory(size).fill_(1)
    assert bool((memory == 7).all())
    assert bool((other == 1).all())


def test_every_instruction_set_runs_or_says_why_not() -> None:
    sets = cpu.instruction_sets()
    assert list(sets)[-1] == "scalar"
    assert sets["scalar"] is None
    assert cpu.chosen_instruction_set(rows=1024) == SETS[0]
    for name, reason in sets.items():
        if reason is None:
            assert cpu.chosen_instruction_set(name) == name
        else:
            assert len(reason) > 10
            with pytest.raises(CannotRun) as caught:
                cpu.linear(torch.ones(1, 128), a_weight(), instruction_set=name)
            assert reason in str(caught.value)


def test_instruction_sets_are_listed_fastest_first() -> None:
    wanted = ["amx-int8", "avx512-vnni", "avx2-vnni", "avx2", "scalar"]
    assert [name for name in cpu.instruction_sets() if name in wanted] == wanted


@pytest.mark.parametrize("name", [name for name in SETS if name != "scalar"])
def test_the_int8_peak_is_counted_from_products_that_were_done(name: str) -> None:
    module = cpu.extension()
    once = module.burn(name, 1, 1)
    assert once > 0
    assert module.burn(name, 50, 1) == 50 * once


def test_an_unknown_instruction_set_lists_the_known() -> None:
    with pytest.raises(CannotRun) as caught:
        cpu.chosen_instruction_set("mmx")
    for name in cpu.instruction_sets():
        assert name in str(caught.value)


def test_without_the_compiled_module_every_door_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_load", lambda: ImportError("No module named 'weightpath._cpu'"))
    (reason,) = cpu.instruction_sets().values()
    assert reason is not None
    assert "_cpu" in reason
    with pytest.raises(CannotRun, match="C\\+\\+20"):
        cpu.extension()


def test_any_leading_shape_and_stride_is_taken() -> None:
    weight = a_weight()
    x = torch.randn(2, 3, 4, 128)
    y = cpu.linear(x, weight)
    assert y.shape == (2, 3, 4, 96)
    turned = x.transpose(0, 2)
    assert not turned.is_contiguous()
    assert torch.equal(cpu.linear(turned, weight), y.transpose(0, 2))
    assert torch.equal(cpu.linear(x[0, 0, 0], weight), y[0, 0, 0])
    assert cpu.linear(x[:0], weight).shape == (0, 3, 4, 96)


@pytest.mark.parametrize(
    ("x", "bias", "word"),
    [
        (torch.ones(1, 127), None, "K = 128"),
        (torch.ones(1, 128, dtype=torch.float64), None, "float64"),
        (torch.ones(1, 128), torch.ones(95), "wanted [96]"),
    ],
)
def test_wrong_shapes_and_dtypes_are_errors_with_numbers(
    x: torch.Tensor, bias: torch.Tensor | None, word: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        cpu.linear(x, a_weight(), bias)
    assert word in str(caught.value)


def test_fewer_packed_bytes_than_the_shape_needs_are_an_error() -> None:
    weight = a_weight()
    short = CpuTiles(weight.packed[:-64], 4, 96, 128, 32, False, weight.scale_dtype)
    with pytest.raises(BadRequest, match="packed bytes"):
        cpu.linear(torch.ones(1, 128), short)
    with pytest.raises(BadRequest, match="4-bit activations"):
        cpu.linear(torch.ones(1, 128), weight, activation_bits=4)


def test_the_operator_is_sound_for_tracing() -> None:
    weight = a_weight()
    arguments = (torch.randn(3, 128), weight.packed, torch.randn(96), 4, 96, 128, 32, False, 0, 2,
                 False, torch.float32, "")  # fmt: skip
    torch.library.opcheck(
        torch.ops.weightpath.cpu_linear.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_export_traces_through_one_operator() -> None:
    weight = a_weight()

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cpu.linear(x, weight, activation_bits=8) + 1

    x = torch.randn(5, 128)
    exported = torch.export.export(Layer(), (x,))
    assert "cpu_linear" in str(exported.graph)
    assert torch.equal(exported.module()(x), Layer()(x))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 40])
def test_the_thread_count_changes_no_bit(threads: int, m: int) -> None:
    weight = a_weight(333)
    x = torch.randn(m, 128)
    alone = cpu.linear(x, weight)
    torch.set_num_threads(threads)  # set back by the fixture
    for _ in range(50):
        assert torch.equal(cpu.linear(x, weight), alone)
    torch.set_num_threads(1)
    assert torch.equal(cpu.linear(x, weight), alone)


def test_many_python_threads_at_once_neither_wait_for_ever_nor_mix() -> None:
    weight = a_weight(333)
    inputs = [torch.randn(3, 128) for _ in range(4)]
    wanted = [cpu.linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        torch.set_num_threads(3)
        for _ in range(200):
            if not torch.equal(cpu.linear(inputs[index], weight), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    script = (
        "import os, signal, torch\n"
        "from weightpath.kernels import cpu\n"
        "from weightpath.qweight import QWeight\n"
        "from weightpath.scheme import Scheme\n"
        "torch.set_num_threads(3)\n"
        "codes = torch.randint(0, 16, (320, 128), dtype=torch.uint8)\n"
        "weight = cpu.pack(QWeight(Scheme(4, 32), codes, torch.rand(320, 4)))\n"
        "x = torch.randn(2, 128)\n"
        "y = cpu.linear(x, weight)\n"
        "assert cpu.extension().workers() == 2\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    assert cpu.extension().workers() == 0\n"
        "    same = all(bool((cpu.linear(x, weight) == y).all()) for _ in range(20))\n"
        "    os._exit(0 if same and cpu.extension().workers() == 2 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert bool((cpu.linear(x, weight) == y).all())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
