"""The Triton kernels of a decode step without a GPU: interpreted, and compiled for three of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from weightpath.errors import CannotRun
from weightpath.kernels.step import step_kernels

pytest.importorskip("triton")
HERE = Path(__file__).parent
STATE = dict.fromkeys(("positions", "addresses", "capacities", "tokens"), "*i64")
FLOATS = dict.fromkeys(
    ("cosines", "sines", "partial", "peaks", "sums", "values"), "*fp32"
) | dict.fromkeys(("scale", "epsilon"), "fp32")
WHOLE = dict.fromkeys(
    ("q_stride", "k_stride", "v_stride", "layer", "width", "gate_stride", "up_stride", "stride",
     "count", "parts"), "i32",
)  # fmt: skip
INDICES = dict.fromkeys(("indices", "bad_parts", "bad"), "*i32")


def own_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python on this repository's tests, with its output."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_the_kernels_agree_with_torch_in_the_interpreter() -> None:
    ran = own_process("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted_step.py"))  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert "passed" in ran.stdout


def test_the_package_and_its_engines_are_imported_and_run_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tiny_checkpoint import build_model; import weightpath, weightpath.engine.load\n"
        "from weightpath.engine.graph import GraphModel\n"
        "print(GraphModel.of(build_model('llama')).greedy([[1, 2]], 2))\n"
        "sys.exit(any(name.startswith('weightpath.kernels.triton_step') for name in sys.modules))"
    )
    ran = own_process("-c", code)
    assert (ran.returncode, ran.stdout[:2]) == (0, "[["), ran.stderr[-1000:]


def test_triton_is_refused_in_words_where_there_is_no_gpu() -> None:
    with pytest.raises(CannotRun, match="Triton kernels run on CUDA; this layer is on cpu"):
        step_kernels(torch.device("cpu"), "triton")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", "*fp32"])
def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(capability: int, dtype: str) -> None:
    from weightpath.kernels.triton_step import attention, rows

    wide = dtype == "*fp32"
    overlap = {"OVERLAP": capability >= 90}
    heads = {
        "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "HALF_BLOCK": 64, "HEAD_BLOCK": 128,
        "GROUP_BLOCK": 16, "SPLITS": 16, "BLOCK": 16 if wide else 32, "NORM": True, "WINDOW": 4096,
        "PRECISION": "ieee" if wide else "tf32",
    }  # fmt: skip
    for kernel, constants in (
        (rows.add_norm_kernel, {"ADD": True, "BLOCK": 4096}),
        (rows.silu_times_kernel, {"BLOCK": 1024}),
        (rows.largest_kernel, {"BLOCK": 2048}),
        (rows.advance_kernel, {"BLOCK": 64}),
        (attention.attend_kernel, heads),
        (attention.join_kernel, {"HEAD_DIM": 128, "HEAD_BLOCK": 128, "SPLITS": 16}),
    ):
        made = compiled(kernel, dtype, {**constants, **overlap}, capability)
        assert f".target sm_{capability}" in made.asm["ptx"]
        assert ("griddepcontrol" in made.asm["ptx"]) == overlap["OVERLAP"]
        if kernel is attention.attend_kernel:
            assert ("mma.sync" in made.asm["ptx"]) != wide
            assert made.metadata.shared <= 99 * 1024  # what GPUs of 8.6 and 8.9 have
            assert "cp.async.cg.shared.global" in made.asm["ptx"]  # 16 bytes at once


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], capability: int) -> Any:
    """A kernel made for a GPU that need not be here; pointers of no other kind are to `dtype`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = STATE | FLOATS | WHOLE | INDICES | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, dtype) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))
