"""The kernels of one decode step beside the products: what they share, and choosing them by device.

A step runs one token of each of B sequences. Where each stands lies on the device, int64 [4, B]:

    tokens       the id to run                    positions    how many tokens its cache holds
    addresses    of its cache's first element     capacities   positions that its cache has room for

so that a captured graph serves any sequences. A cache is one tensor [layers, 2, kv_heads, capacity,
head_dim], keys then values. Two sets of kernels do the same: `step_plain` in torch, on any device;
`triton_step` on CUDA, whose module is imported when it is first chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels.step_records import AttentionShape, Rotary, Rows
from weightpath.kernels.triton.available import refusal

KINDS = ("triton", "plain")
OVERLAPPING = (9, 0)
"""The oldest with programmatic dependent launch: Hopper."""


@dataclass(frozen=True)
class StepKernels:
    """add_norm(x [M, H], residual [M, H] or None, weight [H], epsilon) -> (sum, its RMS norm).
    silu_times(gate [M, I], up [M, I]) -> silu(gate) * up.
    attend(q, k, v [B, heads * D] rows, rows, layer, rotary, shape) -> [B, heads * D]; rotates q and
    k, adds k and v to the caches and attends to what they hold then.
    pick(logits [B, V], rows, bad int32 [B]): the largest logit's id becomes the row's token and its
    position goes one up; bad is set to 1 where a logit is NaN or infinite."""

    name: str
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    silu_times: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Rows, int, Rotary, AttentionShape], Tensor]
    pick: Callable[[Tensor, Rows, Tensor], None]


def overlap_refusal(device: torch.device, kernels: str) -> str | None:
    """Why a device does not start one of these kernels while another ends, or None."""
    if kernels != "triton" or device.type != "cuda":
        return f"overlap is of Triton kernels on CUDA, not of {kernels} ones on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < OVERLAPPING:
        return f"overlap needs compute capability 9.0; {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
    return None


def step_kernels(
    device: torch.device, wanted: str | None = None, overlap: bool = False
) -> StepKernels:
    """The kernels for a device: Triton's on CUDA, else plain torch; or those `wanted` by name.

    overlap: Triton kernels start while the one before them ends (programmatic dependent launch, from
    compute capability 9.0 on). CannotRun where what is wanted does not run there.
    """
    if wanted is not None and wanted not in KINDS:
        raise BadRequest(f"step kernels '{wanted}': unknown; there are {', '.join(KINDS)}")
    if wanted is None:
        wanted = "triton" if device.type == "cuda" else "plain"
    if overlap:
        reason = overlap_refusal(device, wanted)
        if reason is not None:
            raise CannotRun(f"step kernels: {reason}")
    if wanted == "plain":
        from weightpath.kernels import step_plain as plain

        return StepKernels("plain", plain.add_norm, plain.silu_times, plain.attend, plain.pick)
    from weightpath.kernels.triton_step import interpreted

    if not interpreted():
        reason = refusal(device)
        if reason is not None:
            raise CannotRun(f"step kernels: {reason}")
    from weightpath.kernels.triton_step import attention, rows

    return StepKernels(
        "triton",
        partial(rows.add_norm, overlap=overlap),
        partial(rows.silu_times, overlap=overlap),
        partial(attention.attend, overlap=overlap),
        partial(rows.pick, overlap=overlap),
    )
