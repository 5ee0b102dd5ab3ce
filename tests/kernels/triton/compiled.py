"""The kernels compiled for GPUs that are not here, and the machine code that comes out."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weightpath.kernels.triton import (
    awq_kernel,
    dequantize,
    int4_gemm,
    int4_gemv,
    int8_gemm,
    int8_gemv,
    partials,
)

INT4 = {"codes": "*i32", "zeros": "*i16", "scales": "*bf16", "bias": "*bf16", "y": "*bf16"}
INT4_CONST = {"GROUP": 128, "ASYMMETRIC": True, "BIAS": True, "SPLIT": False, "PLAIN": False}
GEMV = dict(
    INT4_CONST, TOKENS=8, CHUNKS=32, TILES=1, ONE=False, num_warps=8, num_stages=1
)  # fmt: skip
GEMM = dict(
    INT4_CONST, TOKENS=64, BLOCKS=1, CHUNKS=2, WIDE=True, EVEN=True, num_warps=4, num_stages=4
)
INT8 = {"codes": "*i8", "scale": "*fp32", "bias": "*fp32", "y": "*bf16"}
INT8_CONST = {"BIAS": True, "SPLIT": False, "PLAIN": False}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "int4_gemv": (int4_gemv.int4_gemv_kernel, INT4, GEMV),
    "int4_gemv_one": (int4_gemv.int4_gemv_kernel, INT4, dict(GEMV, ONE=True, ASYMMETRIC=False)),
    "int4_gemv_32": (int4_gemv.int4_gemv_kernel, INT4, dict(GEMV, GROUP=32, CHUNKS=16, SPLIT=True)),
    "int4_gemm": (int4_gemm.int4_gemm_kernel, INT4, GEMM),
    "int4_gemm_32": (int4_gemm.int4_gemm_kernel, INT4, dict(GEMM, GROUP=32, CHUNKS=1, SPLIT=True)),
    "int8_gemv": (
        int8_gemv.int8_gemv_kernel,
        INT8,
        dict(INT8_CONST, TOKENS=8, CHUNKS=16, ONE=False, num_warps=8, num_stages=1),
    ),
    "int8_gemv_one": (
        int8_gemv.int8_gemv_kernel,
        INT8,
        dict(INT8_CONST, TOKENS=8, CHUNKS=16, ONE=True, num_warps=8, num_stages=1),
    ),
    "int8_gemm": (
        int8_gemm.int8_gemm_kernel,
        INT8,
        dict(
            INT8_CONST,
            TOKENS=64,
            ROWS=64,
            COLUMNS=128,
            PERMUTED=True,
            EVEN=True,
            num_warps=4,
            num_stages=3,
        ),
    ),
    "awq": (
        awq_kernel.awq_kernel,
        {"weight": "*i32", "zeros": "*i32", "scales": "*fp16", "bias": "*fp16", "y": "*fp16"},
        {
            "GROUP": 128,
            "TOKENS": 16,
            "COLUMNS": 128,
            "WIDE": True,
            "BIAS": True,
            "SPLIT": False,
            "num_warps": 4,
            "num_stages": 3,
        },
    ),
    "dequantize": (
        dequantize.dequantize_kernel,
        {"codes": "*i32", "scales": "*bf16", "zeros": "*i16", "weight": "*bf16"},
        {"BITS": 4, "COLUMNS": 128, "ASYMMETRIC": True, "num_warps": 4},
    ),
    "partials": (
        partials.add_partials_kernel,
        {"partial": "*fp32", "scale": "*fp32", "bias": "*bf16", "y": "*bf16"},
        {"SCALE": True, "BIAS": True, "BLOCK": 256, "num_warps": 4},
    ),
}
"""Name to kernel, the types of its pointers, and its constants and options."""
UNALIGNED = {"M", "splits", "groups", "chunks", "chunks_of_part", "steps_of_part", "zeros_w"}


@cache
def compile_for(name: str, capability: int, x: str) -> Any:
    """A kernel for sm_`capability`, with x of the type `x`, pointers and sizes multiples of 16."""
    kernel, pointers, given = KERNELS[name]
    options = {key: value for key, value in given.items() if key.startswith("num_")}
    constants = {key: value for key, value in given.items() if key not in options}
    if "PERMUTED" in constants:
        constants["PERMUTED"] = capability == 90
    if "WIDE" in constants:
        constants["WIDE"] = capability == 80
    signature = {
        key: "constexpr" if key in constants else pointers.get(key, x if key == "x" else "i32")
        for key in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (key, kind) in enumerate(signature.items())
        if kind != "constexpr" and key not in UNALIGNED
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def instructions(compiled: Any, folder: Path) -> Counter[str]:
    """How often each instruction, suffixes included, is in the machine code."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run(
        [str(tool), "-sass", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return Counter(re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", listing))
