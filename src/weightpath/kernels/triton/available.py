"""Whether the Triton kernels can run on a device. Triton is looked for, and imported only by them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from weightpath.layouts.awq_kernel import GROUP_SIZES, KERNEL_COLUMNS, kernel_refuses

CAPABILITY = (8, 0)
"""The least compute capability: bf16 products and asynchronous copies begin there."""

AWQ_PROGRAMS = 264
"""Twice the SMs of the largest GPUs of compute capability 9.0."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The CUDA device's compute capability; None where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def refusal(device: torch.device | str) -> str | None:
    """Why the Triton kernels cannot run on `device`, as a sentence, or None if they can."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"Triton kernels run on CUDA; this layer is on {device.type}"
    if torch.version.cuda is None:
        return f"Triton kernels run on CUDA; this torch {torch.__version__} is built without it"
    if not torch.cuda.is_available():
        return "Triton kernels run on CUDA; torch finds no CUDA device here"
    if not has_triton():
        return "Triton is not installed; install the package triton, or use the torch kernel"
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return (
            f"the Triton kernels need compute capability {CAPABILITY[0]}.{CAPABILITY[1]}; "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
        )
    return None


def awq_refusal(
    device: torch.device | str,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
    split_k: int = 1,
) -> str | None:
    """Why the product from the AWQ kernel layout cannot run, as a sentence, or None if it can.

    dtype is the activations'; split_k is how many parts K is split into (`awq_split` picks it).
    """
    device = torch.device(device)
    reason = refusal(device)
    if reason is not None:
        return reason
    if group_size not in GROUP_SIZES:
        return f"the AWQ kernel takes groups of 64 or 128 columns, not {group_size}"
    return kernel_refuses(out_features, in_features, split_k, dtype, capability_of(device))


def awq_split(rows: int, out_features: int, in_features: int) -> int:
    """The split of K for x [rows, in_features] and the AWQ kernel layout: 1, 2, 4, 8 or 16 parts of
    at least 512 columns each, until about AWQ_PROGRAMS programs run."""
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64
    programs = max(1, out_features // 64) * -(-rows // tokens)
    split = 1
    while (
        split < 16
        and programs * split < AWQ_PROGRAMS
        and in_features % (KERNEL_COLUMNS * 2 * split) == 0
        and in_features >= 2 * split * 512
    ):
        split *= 2
    return split
