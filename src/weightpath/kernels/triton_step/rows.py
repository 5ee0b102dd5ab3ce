"""Triton kernels over rows: residual add with RMS norm, silu(gate) * up, the largest logit.

One program a row and block of columns; fp32 inside, the tensors' dtype in and out. Functions have
the signatures of step_plain.py, and `overlap` for programmatic dependent launch: a kernel then
waits for the one before it after reading what no kernel writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weightpath.kernels.step_records import Rows

SILU_BLOCK = 1024
PICK_BLOCK = 2048
NEVER = constexpr(2**31 - 1)


@triton.jit
def add_norm_kernel(
    x, residual, weight, summed, normed, width, epsilon,
    ADD: constexpr, BLOCK: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """One program a row: summed = x + residual, normed = its RMS norm times the weight."""
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factors = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + start + columns, inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + start + columns, inside, other=0.0).to(tl.float32)
        rounded = values.to(summed.dtype.element_ty)
        tl.store(summed + start + columns, rounded, inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 0) / width
    result = values * tl.rsqrt(mean + epsilon) * factors
    tl.store(normed + start + columns, result.to(normed.dtype.element_ty), inside)


@triton.jit
def silu_times_kernel(
    gate, up, out, gate_stride, up_stride, width, BLOCK: constexpr, OVERLAP: constexpr
):
    """out = gate / (1 + exp(-gate)) * up; program (block of columns, row)."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    a = tl.load(gate + row * gate_stride + columns, inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + columns, inside, other=0.0).to(tl.float32)
    result = a * tl.sigmoid(a) * b
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), inside)


@triton.jit
def largest_kernel(
    logits, stride, count, values, indices, bad_parts, BLOCK: constexpr, OVERLAP: constexpr
):
    """Of a block of one row: the largest logit, its lowest column, whether any is not finite."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < count
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    found = tl.load(logits + row * stride + columns, inside, other=-float("inf")).to(tl.float32)
    finite = (tl.abs(found) < float("inf")) | (columns >= count)
    best = tl.max(found, 0)
    place = row * tl.num_programs(0) + part
    tl.store(values + place, best)
    tl.store(indices + place, tl.min(tl.where(found == best, columns, NEVER), 0))
    tl.store(bad_parts + place, tl.max((finite == 0).to(tl.int32), 0))


@triton.jit
def advance_kernel(
    values, indices, bad_parts, parts, tokens, positions, capacities, bad,
    BLOCK: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """One program a row: the best of its blocks becomes the token, and its position goes up."""
    row = tl.program_id(0)
    place = row * parts + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < parts
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    best = tl.load(values + place, inside, other=-float("inf"))
    columns = tl.load(indices + place, inside, other=NEVER)
    wrong = tl.max(tl.load(bad_parts + place, inside, other=0), 0)
    token = tl.min(tl.where(best == tl.max(best, 0), columns, NEVER), 0)
    tl.store(tokens + row, tl.where(wrong == 0, token, 0).to(tl.int64))
    tl.store(bad + row, wrong)
    position, capacity = tl.load(positions + row), tl.load(capacities + row)
    tl.store(positions + row, tl.minimum(position + 1, capacity - 1))


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, *, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm), both [M, H] in x's dtype."""
    x = x.contiguous()
    count, width = x.shape
    normed = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    kernel: Any = add_norm_kernel
    kernel[(count,)](
        x, x if residual is None else residual, weight, summed, normed, width, epsilon,
        ADD=residual is not None, BLOCK=block, OVERLAP=overlap,
        num_warps=min(16, max(1, block // 512)), launch_pdl=overlap,
    )  # fmt: skip
    return summed, normed


def silu_times(gate: Tensor, up: Tensor, *, overlap: bool = False) -> Tensor:
    """silu(gate) * up, [M, I]; rows may be apart."""
    count, width = gate.shape
    out = torch.empty(count, width, dtype=gate.dtype, device=gate.device)
    kernel: Any = silu_times_kernel
    kernel[(-(-width // SILU_BLOCK), count)](
        gate, up, out, gate.stride(0), up.stride(0), width,
        BLOCK=SILU_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


def pick(logits: Tensor, rows: Rows, bad: Tensor, *, overlap: bool = False) -> None:
    """The largest logit's id (of equals the lowest) becomes the token; positions go up."""
    count, vocabulary = logits.shape
    parts = -(-vocabulary // PICK_BLOCK)
    values = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    indices, wrong = torch.empty(2, count, parts, dtype=torch.int32, device=logits.device)
    largest: Any = largest_kernel
    largest[(parts, count)](
        logits, logits.stride(0), vocabulary, values, indices, wrong,
        BLOCK=PICK_BLOCK, OVERLAP=overlap, num_warps=8, launch_pdl=overlap,
    )  # fmt: skip
    advance: Any = advance_kernel
    advance[(count,)](
        values, indices, wrong, parts, rows.tokens, rows.positions, rows.capacities, bad,
        BLOCK=triton.next_power_of_2(parts), OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
