"""Choosing a kernel: every rejection is kept, and a name that cannot run is an error that says why."""

from __future__ import annotations

import pytest
import torch

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.kernels.choose import KERNELS, Layer, choose
from weightpath.scheme import INT8, Scheme

CPU = torch.device("cpu")


META = torch.device("meta")


@pytest.mark.parametrize(
    ("scheme", "k"),
    [(INT8, 33), (Scheme(4, 64), 128), (Scheme(4), 6), (Scheme(4, 8, False), 16)],
)
def test_a_compiled_kernel_runs_what_tiles_hold_and_names_its_instruction_set(
    scheme: Scheme, k: int
) -> None:
    choice = choose(Layer(8, k, scheme, CPU))
    assert choice.name == "cpu"
    assert choice.instruction_set.split(",")[0] == cpu.chosen_instruction_set()
    assert [name for name, _ in choice.rejected[:2]] == ["cuda", "triton"]
    for _, reason in choice.rejected[:2]:
        assert "run on CUDA; this layer is on cpu" in reason
    refused = {name: reason for name, reason in cpu.instruction_sets().items() if reason}
    assert set(choice.rejected[2:]) <= set(refused.items())


@pytest.mark.parametrize(
    ("scheme", "k", "device", "scales", "word"),
    [
        (Scheme(8, 64), 64, CPU, torch.bfloat16, "one scale a row"),
        (Scheme(4, 2, False), 4, CPU, torch.bfloat16, "multiples of 8"),
        (Scheme(4, 64), 128, CPU, torch.float64, "float64"),
        (INT8, 64, META, torch.float32, "on meta"),
    ],
)
def test_torch_runs_the_rest_and_the_rejections_before_it_are_kept(
    scheme: Scheme, k: int, device: torch.device, scales: torch.dtype, word: str
) -> None:
    choice = choose(Layer(8, k, scheme, device, scales))
    assert choice.name == "torch"
    assert choice.instruction_set == ""
    assert [name for name, _ in choice.rejected] == ["cuda", "triton", "cpu"]
    assert word in choice.rejected[2][1]


def test_an_install_without_compiled_kernels_says_so_and_runs_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_load", lambda: ImportError("no module named _cpu"))
    choice = choose(Layer(8, 64, INT8, CPU))
    assert choice.name == "torch"
    assert "not in this install" in dict(choice.rejected)["cpu"]
    with pytest.raises(CannotRun, match=r"cpu: .*not in this install.* C\+\+20 compiler"):
        choose(Layer(8, 64, INT8, CPU), "cpu")


def test_triton_by_name_on_the_cpu_is_an_error_with_its_reason() -> None:
    with pytest.raises(CannotRun) as caught:
        choose(Layer(8, 64, INT8, CPU), "triton")
    message = str(caught.value)
    assert "w8 [8, 64] on cpu" in message
    assert "Triton kernels run on CUDA" in message
    assert "torch:" not in message  # it was not asked for


def test_torch_by_name_passes_nothing_over() -> None:
    assert choose(Layer(8, 64, INT8, CPU), "torch").rejected == ()


@pytest.mark.parametrize("name", ["", "gpu", "Torch", "marlin"])
def test_an_unknown_backend_lists_the_known(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        choose(Layer(8, 64, INT8, CPU), name)
    for kernel in KERNELS:
        assert kernel.name in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "k", "word"),
    [
        (Scheme(3, 32), 64, "w3g32"),
        (Scheme(8, 32), 64, "w8g32"),
        (Scheme(8, symmetric=False), 64, "w8-asym"),
        (Scheme(4), 63, "63 is odd"),
        (Scheme(4, 64), 96, "64 does not divide in_features 96"),
        (Scheme(8, 64), 100, "64 does not divide in_features 100"),
    ],
)
def test_where_nothing_runs_every_kernel_says_why(scheme: Scheme, k: int, word: str) -> None:
    with pytest.raises(CannotRun) as caught:
        choose(Layer(8, k, scheme, CPU))
    message = str(caught.value)
    assert "triton: " in message
    assert word in message
    assert "\n" not in message
