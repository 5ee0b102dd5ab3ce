"""AMX: the bits of the scalar oracle, for every shape of tile; what is said where it is refused.

On a CPU without AMX, a build with `-C cmake.define.WEIGHTPATH_EMULATED_AMX=ON` runs the same file
on tiles in plain C++.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.errors import CannotRun
from weightpath.kernels import cpu
from weightpath.layouts.cpu_tiles import CpuTiles

REFUSAL = cpu.instruction_sets().get("amx-int8", "the CPU kernels are not in this install")
amx = pytest.mark.skipif(REFUSAL is not None, reason=f"amx-int8: {REFUSAL}")


def weight_of(
    n: int, k: int, size: int, bits: int, zeros: bool, dtype: torch.dtype, seed: int = 0
) -> CpuTiles:
    """Random codes over their whole range, scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator).to(torch.uint8)
    scales = (torch.randn(n, k // size, generator=generator) * 0.1).to(dtype)
    points = torch.randint(0, 16, (n, k // size), generator=generator).to(torch.uint8)
    return cpu.pack_parts(
        codes, cpu.BYTES, scales, points if zeros else None, bits=bits, group_size=size
    )


def both(x: Tensor, weight: CpuTiles, **options: object) -> tuple[Tensor, Tensor]:
    """AMX's product and the scalar one."""
    return (
        cpu.linear(x, weight, instruction_set="amx-int8", **options),  # type: ignore[arg-type]
        cpu.linear(x, weight, instruction_set="scalar", **options),  # type: ignore[arg-type]
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


@amx
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 64), (4, 128), (4, 0), (8, 0)])
@pytest.mark.parametrize("m", [1, 9, 15, 16, 17, 31, 32, 33, 48, 64, 127])
def test_every_number_of_rows_gives_the_oracle_s_bits(
    m: int, bits: int, size: int, activation_bits: int
) -> None:
    k = 1152
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    for zeros in (False, True) if bits == 4 else (False,):
        for per_group in (False, True):
            weight = weight_of(45, k, size or k, bits, zeros, torch.bfloat16)
            found, wanted = both(x, weight, activation_bits=activation_bits, per_group=per_group)
            assert same_bits(found, wanted)


@amx
@settings(deadline=None, max_examples=150)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 100),
    groups=st.integers(1, 21),
    size=st.sampled_from([8, 16, 24, 32, 40, 64, 72, 96, 128, 136, 256]),
    bits=st.sampled_from([4, 4, 8]),
    ragged=st.integers(0, 7),
    zeros=st.booleans(),
    scales=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    activation_bits=st.sampled_from([8, 16]),
    per_group=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_gives_the_oracle_s_bits(
    m: int,
    n: int,
    groups: int,
    size: int,
    bits: int,
    ragged: int,
    zeros: bool,
    scales: torch.dtype,
    dtype: torch.dtype,
    activation_bits: int,
    per_group: bool,
    bias: bool,
    seed: int,
) -> None:
    if bits == 8 or groups == 1:  # per channel: any K
        groups, size = 1, groups * size + ragged
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(n, groups * size, size, bits, zeros and bits == 4, scales, seed)
    x = torch.randn(m, groups * size, generator=generator).to(dtype)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    found, wanted = both(x, weight, bias=b, activation_bits=activation_bits, per_group=per_group)
    assert same_bits(found, wanted)


@amx
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_activations_that_overflow_the_cache_and_several_panels_change_nothing(
    activation_bits: int,
) -> None:
    """Packed tiles then take slices in turn; rows come in panels of 512 and a rest."""
    weight = weight_of(300, 2048, 128, 4, True, torch.bfloat16)
    x = torch.randn(531, 2048, generator=torch.Generator().manual_seed(1))
    for per_group in (False, True):
        found, wanted = both(x, weight, activation_bits=activation_bits, per_group=per_group)
        assert same_bits(found, wanted)


@amx
def test_threads_share_the_work_without_changing_a_bit() -> None:
    weight = weight_of(613, 768, 64, 4, True, torch.float16)
    x = torch.randn(150, 768, generator=torch.Generator().manual_seed(2))
    alone, _ = both(x, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        together = cpu.linear(x, weight, instruction_set="amx-int8")
    finally:
        torch.set_num_threads(before)
    assert same_bits(alone, together)


@amx
@pytest.mark.parametrize("size", [32, 64, 128])
def test_extreme_activations_give_the_oracle_s_bits(size: int) -> None:
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(3))
    x[0] = 0.0
    x[1] = 1e-42
    x[2, 7] = 3e38
    x[3, 100] = 7e4
    x[4] = torch.where(torch.arange(512) % 2 == 0, 5.0, -5.0)
    x[5, 11] = float("nan")
    x[6, 12] = float("inf")
    weight = weight_of(33, 512, size, 4, True, torch.float32)
    for activation_bits in (8, 16):
        for per_group in (False, True):
            found, wanted = both(x, weight, activation_bits=activation_bits, per_group=per_group)
            assert torch.equal(found.isnan(), wanted.isnan())
            assert same_bits(found.nan_to_num(), wanted.nan_to_num())


@amx
def test_one_wrong_code_is_seen() -> None:
    """The sabotage of the tests above."""
    weight = weight_of(45, 1152, 128, 4, True, torch.bfloat16)
    x = torch.randn(33, 1152, generator=torch.Generator().manual_seed(4))
    wanted = cpu.linear(x, weight, instruction_set="scalar")
    weight.packed[4 * 300] ^= 1
    assert not same_bits(cpu.linear(x, weight, instruction_set="amx-int8"), wanted)


@pytest.mark.skipif(REFUSAL is None, reason="AMX runs here")
def test_where_amx_cannot_run_a_sentence_says_why() -> None:
    if "amx-int8" not in cpu.instruction_sets():
        pytest.skip(str(REFUSAL))
    assert len(str(REFUSAL).split()) >= 4
    with pytest.raises(CannotRun, match="amx-int8: "):
        cpu.chosen_instruction_set("amx-int8")


@amx
def test_few_rows_go_to_avx512_and_many_to_amx() -> None:
    assert cpu.chosen_instruction_set(rows=1) == "avx512-vnni"
    assert cpu.chosen_instruction_set("amx-int8", rows=1) == "amx-int8"


SMALL_SIGNAL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from weightpath import _cpu
print(dict(_cpu.instruction_sets())["amx-int8"], "|", _cpu.chosen("", 512))
"""


def has_amx() -> bool:
    """Whether the CPU itself lists AMX int8 (an emulated build asks Linux for nothing)."""
    try:
        with open("/proc/cpuinfo") as file:
            return "amx_int8" in file.read()
    except OSError:
        return False


@amx
@pytest.mark.skipif(not has_amx(), reason="Linux is only asked where the CPU has AMX")
def test_a_refusal_by_linux_is_said_and_avx512_runs_instead() -> None:
    """Linux refuses tile data while a thread's signal stack (8 KiB here) cannot hold it."""
    done = subprocess.run(
        [sys.executable, "-c", SMALL_SIGNAL_STACK], capture_output=True, text=True, check=True
    )
    reason, chosen = done.stdout.strip().split(" | ")
    assert "ARCH_REQ_XCOMP_PERM" in reason
    assert "signal stack is too small" in reason
    assert chosen == "avx512-vnni"
