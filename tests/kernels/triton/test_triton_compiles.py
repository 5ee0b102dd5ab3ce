"""Every Triton kernel becomes machine code for GPUs of compute capability 8.0, 9.0 and 10.0, here,
without one, and that code does what the files say: tensor cores, 16 bytes a load, no local memory.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: it has no build here", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from compiled import KERNELS, compile_for, instructions

TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""The instruction of a product of two-dimensional tiles; three-dimensional ones are HMMA on all."""
PRODUCTS = [name for name in KERNELS if name not in ("dequantize", "partials")]


HALF = ("awq", "int4_gemv_one", "int4_gemm_32", "int8_gemv_one")
"""Compiled for fp16; the others for bf16."""


def x_type(name: str) -> str:
    return "*fp16" if name in HALF else "*bf16"


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_on_the_tensor_cores_and_out_of_local_memory(
    name: str, capability: int, tmp_path: Path
) -> None:
    found = instructions(compile_for(name, capability, x_type(name)), tmp_path)
    wanted = "HMMA" if "gemv" in name else TENSOR_CORES[capability]
    assert any(each.startswith(wanted + ".") or each == wanted for each in found), found
    assert not [each for each in found if each.startswith(("LDL", "STL"))], found


@pytest.mark.parametrize(
    "name", ["int4_gemv", "int4_gemv_one", "int4_gemm", "int8_gemv", "int8_gemm"]
)
def test_codes_are_read_sixteen_bytes_at_a_time(name: str, tmp_path: Path) -> None:
    found = instructions(compile_for(name, 90, x_type(name)), tmp_path)
    wide = sum(
        count
        for each, count in found.items()
        if each.startswith(("LDG.E.128", "LDGSTS")) and "128" in each
    )
    assert wide >= 2, found


@pytest.mark.parametrize("name", ["int4_gemv_one", "int4_gemm"])
def test_codes_go_to_the_product_in_registers(name: str, tmp_path: Path) -> None:
    """More 16-bit stores to shared memory than tokens need would be weights that pass through it."""
    found = instructions(compile_for(name, 90, x_type(name)), tmp_path)
    halves = sum(count for each, count in found.items() if each.startswith("STS.U16"))
    assert halves <= 8, found


@pytest.mark.parametrize("name", ["dequantize", "partials"])
def test_the_other_kernels_compile(name: str) -> None:
    for capability in (80, 90, 100):
        assert compile_for(name, capability, "*bf16").asm["cubin"]
