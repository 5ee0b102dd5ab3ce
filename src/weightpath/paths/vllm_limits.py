"""What vLLM's kernels for low-bit weights take, asked of whole checkpoints.

The limits themselves are the data in runtimes.py (vLLM 0.32.0). Added here: kernels that take over
where Marlin refuses, in the order of kernels/linear/__init__.py (0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterable

from weightpath.paths.held import Held, HeldLinear, named
from weightpath.paths.runtimes import ACCEPTS, Accepts, refuses
from weightpath.scheme import INT8, PER_CHANNEL

CPU: Accepts = ACCEPTS["vllm", "x86_cpu"]
MARLIN: Accepts = ACCEPTS["vllm", "cuda_discrete"]
ON_CPU = (f"an x86 CPU with {CPU.cpu_flag}",)
ON_CUDA = ("compute capability {}.{}".format(*MARLIN.capability),)
HALF = ("--dtype float16",)
"""Where a kernel computes in fp16 alone and the model's own dtype is another."""


def half_if_needed(held: Held) -> tuple[str, ...]:
    """The flag that makes vLLM compute in fp16, unless the model does so already."""
    return () if held.dtype == "float16" else HALF


def first_refusal(held: Held, accepts: Accepts) -> str | None:
    """The first limit of a kernel that a linear breaks, with the linears that do, or None."""
    for linear in held.linears:
        if reason := _refusal(linear, accepts):
            return f"{reason} ({named(held.linears, lambda other: bool(_refusal(other, accepts)))})"
    return None


def machete_takes(held: Held) -> bool:
    """Hopper's kernel: 4 and 8 bits, zero points too, K % 64, N % 128 (machete_utils.py)."""
    return all(
        linear.scheme is not None
        and linear.scheme.bits in (4, 8)
        and linear.scheme.group_size in (PER_CHANNEL, 64, 128)
        and linear.shape[1] % 64 == 0
        and linear.shape[0] % 128 == 0
        for linear in held.linears
    )


def exllama_takes(held: Held) -> bool:
    """The fp16 kernel: symmetric 4 and 8 bits, any group that divides K (exllama.py, 0.32.0)."""
    return all(
        linear.scheme is not None
        and linear.scheme.symmetric
        and linear.scheme.bits in (4, 8)
        and linear.scheme.group_size != PER_CHANNEL
        for linear in held.linears
    )


def listed(values: Iterable[int]) -> str:
    """Group sizes or bits as words, ascending."""
    return ", ".join("whole rows" if value == PER_CHANNEL else str(value)
                     for value in sorted(values))  # fmt: skip


def _refusal(linear: HeldLinear, accepts: Accepts) -> str | None:
    if linear.scheme is None:
        return f"{accepts.kernel} takes integers, not floats of a codebook"
    n, k = linear.shape
    kind = "linears" if linear.role == "linear" else "heads"
    stored = "int8" if linear.scheme == INT8 else linear.scheme.name
    return refuses(accepts, linear.scheme, f"{stored} {kind}", k, n)
