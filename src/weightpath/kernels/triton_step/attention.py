"""Decode attention in Triton: one query a sequence over its cache, the new key and value included.

    q, k  -> normed (where the family norms them), rotated, rounded to the tensors' dtype
    cache -> k and v stored at the sequence's position
    out   =  softmax(scaling * q . keys) . values

A program is one split of one kv head of one sequence: all query heads of the group share its reads
(flash-decoding). The cached positions that the query sees are cut into SPLITS equal pieces by the
length on the device, so a captured graph stays valid as sequences grow; the last split also has the
new token, which it takes from registers, and alone writes it. A split leaves its running maximum,
sum and weighted values in fp32, and a second kernel joins them, in a fixed order. A head is held as
two halves, so that rotating needs no shuffle: q . k is the sum of two products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weightpath.kernels.step_records import AttentionShape, Rotary, Rows
from weightpath.kernels.triton_step import interpreted

BLOCK = 32
"""Positions of one turn of a program's loop; half of it in fp32, for GPUs with 100 KB of shared memory."""
GROUP = 16
"""Query heads of a program at least: the smallest tensor-core product."""
MOST_SPLITS = 16
LOG2_E = 1.4426950408889634
UNKNOWN_PROCESSORS = 2
"""Processors of the interpreter: few, so that tests see more than one split and stay quick."""


@triton.jit
def _turned(
    first, second, norm, cosines, sines, halves, epsilon,
    HEAD_DIM: constexpr, HALF: constexpr, NORM: constexpr,
):  # fmt: skip
    """Both halves of heads [heads, half], in their dtype: normed and rotated."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        known = halves < HALF
        weight_1 = tl.load(norm + halves, known, other=0.0).to(tl.float32)
        weight_2 = tl.load(norm + HALF + halves, known, other=0.0).to(tl.float32)
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean + epsilon)[:, None]
        first = first * scale * weight_1[None, :]
        second = second * scale * weight_2[None, :]
    turned_1 = first * cosines - second * sines
    turned_2 = second * cosines + first * sines
    return turned_1.to(dtype), turned_2.to(dtype)


@triton.jit
def _tile(
    keys, values, places, end, halves, dims, HEAD_DIM: constexpr, HALF: constexpr
):  # fmt: skip
    """Cached keys, as two halves [half, places], and values [places, dims]; 0 from `end` on."""
    held = places < end
    at = keys + places[None, :] * HEAD_DIM + halves[:, None]
    wanted = held[None, :] & (halves < HALF)[:, None]
    key_1 = tl.load(at, wanted, other=0.0)
    key_2 = tl.load(at + HALF, wanted, other=0.0)
    value_at = values + places[:, None] * HEAD_DIM + dims[None, :]
    value = tl.load(value_at, held[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return key_1, key_2, value


@triton.jit
def _taken_up(
    q_1, q_2, key_1, key_2, value, held, peak, total, mixed, scale, PRECISION: constexpr
):  # fmt: skip
    """The running softmax after one more tile: highest score, sum of weights, weighted values."""
    scores = tl.dot(q_1, key_1, input_precision=PRECISION)
    scores = tl.dot(q_2, key_2, scores, input_precision=PRECISION) * scale
    scores = tl.where(held[None, :], scores, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet: weights of 0, no NaN
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision=PRECISION)
    return higher, total, mixed


@triton.jit(do_not_specialize=["layer"])
def attend_kernel(
    q, k, v, q_stride, k_stride, v_stride, q_norm, k_norm, cosines, sines,
    positions, addresses, capacities, layer, out, partial, peaks, sums, scale, epsilon,
    HEADS: constexpr, KV_HEADS: constexpr, HEAD_DIM: constexpr, HALF_BLOCK: constexpr,
    HEAD_BLOCK: constexpr, GROUP_BLOCK: constexpr, WINDOW: constexpr, SPLITS: constexpr,
    BLOCK: constexpr, NORM: constexpr, PRECISION: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """Program (split, kv head, sequence). scale: scaling * log2(e), for exp2."""
    GROUP_SIZE: constexpr = HEADS // KV_HEADS
    HALF: constexpr = HEAD_DIM // 2
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dtype = q.dtype.element_ty
    position = tl.load(positions + row).to(tl.int32)
    capacity = tl.load(capacities + row)
    base = tl.multiple_of(tl.load(addresses + row).to(tl.pointer_type(dtype)), 16)
    layer_start = tl.cast(layer, tl.int64) * (2 * KV_HEADS)
    keys = base + (layer_start + kv_head) * capacity * HEAD_DIM
    values = base + (layer_start + KV_HEADS + kv_head) * capacity * HEAD_DIM

    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(position + 1 - WINDOW, 0)
    piece = tl.cdiv(position - low, SPLITS)
    start = low + split * piece
    end = tl.minimum(start + piece, position)
    has_new = split == SPLITS - 1

    heads, halves = tl.arange(0, GROUP_BLOCK), tl.arange(0, HALF_BLOCK)
    dims = tl.arange(0, HEAD_BLOCK)
    in_half, in_head, in_group = halves < HALF, dims < HEAD_DIM, heads < GROUP_SIZE
    new_half = in_half[None, :] & has_new
    # All reads are under way before the first of them is used.
    places = start + tl.arange(0, BLOCK)
    key_1, key_2, value = _tile(keys, values, places, end, halves, dims, HEAD_DIM, HALF)
    q_at = q + row * q_stride + (kv_head * GROUP_SIZE + heads)[:, None] * HEAD_DIM + halves[None, :]
    q_1 = tl.load(q_at, in_group[:, None] & in_half[None, :], other=0.0)
    q_2 = tl.load(q_at + HALF, in_group[:, None] & in_half[None, :], other=0.0)
    k_at = k + row * k_stride + kv_head * HEAD_DIM + halves[None, :]
    k_1 = tl.load(k_at, new_half, other=0.0)
    k_2 = tl.load(k_at + HALF, new_half, other=0.0)
    v_at = v + row * v_stride + kv_head * HEAD_DIM + dims
    new_value = tl.load(v_at, in_head & has_new, other=0.0)
    cos = tl.load(cosines + position * HALF + halves, in_half, other=0.0)[None, :]
    sin = tl.load(sines + position * HALF + halves, in_half, other=0.0)[None, :]

    q_1, q_2 = _turned(q_1, q_2, q_norm, cos, sin, halves, epsilon, HEAD_DIM, HALF, NORM)
    k_1, k_2 = _turned(k_1, k_2, k_norm, cos, sin, halves, epsilon, HEAD_DIM, HALF, NORM)
    key_at = keys + position * HEAD_DIM + halves[None, :]
    tl.store(key_at, k_1, new_half)
    tl.store(key_at + HALF, k_2, new_half)
    tl.store(values + position * HEAD_DIM + dims, new_value, in_head & has_new)

    product = q_1.to(tl.float32) * k_1.to(tl.float32) + q_2.to(tl.float32) * k_2.to(tl.float32)
    peak = tl.where(has_new, tl.sum(product, 1) * scale, -float("inf"))
    total = tl.where(has_new, tl.full([GROUP_BLOCK], 1.0, tl.float32), 0.0)
    mixed = tl.zeros([GROUP_BLOCK, HEAD_BLOCK], tl.float32) + new_value.to(tl.float32)[None, :]
    peak, total, mixed = _taken_up(
        q_1, q_2, key_1, key_2, value, places < end, peak, total, mixed, scale, PRECISION
    )
    for first in tl.range(start + BLOCK, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        key_1, key_2, value = _tile(keys, values, places, end, halves, dims, HEAD_DIM, HALF)
        peak, total, mixed = _taken_up(
            q_1, q_2, key_1, key_2, value, places < end, peak, total, mixed, scale, PRECISION
        )

    head = kv_head * GROUP_SIZE + heads
    kept = in_group[:, None] & in_head[None, :]
    if SPLITS == 1:
        at = out + row * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
        tl.store(at, (mixed / total[:, None]).to(dtype), kept)
    else:
        place = (row * HEADS + head) * SPLITS + split
        tl.store(peaks + place, peak, in_group)
        tl.store(sums + place, total, in_group)
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mixed, kept)


@triton.jit
def join_kernel(
    partial, peaks, sums, out,
    HEAD_DIM: constexpr, HEAD_BLOCK: constexpr, SPLITS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """Program (head of a sequence): its splits [SPLITS, HEAD_DIM] joined in their order."""
    head = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, HEAD_BLOCK)
    in_head = dims < HEAD_DIM
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    peak = tl.load(peaks + head * SPLITS + splits)
    total = tl.load(sums + head * SPLITS + splits)
    at = partial + (head * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    mixed = tl.load(at, in_head[None, :], other=0.0)
    factor = tl.exp2(peak - tl.max(peak, 0))
    result = tl.sum(mixed * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), in_head)


def splits_for(programs: int, processors: int) -> int:
    """Pieces that a context is cut into, a power of two: programs (sequences times kv heads) times
    pieces fill `processors` twice, up to MOST_SPLITS pieces (twice that for under 8 programs)."""
    most = MOST_SPLITS if programs >= 8 else 2 * MOST_SPLITS
    wanted = max(1, min(most, 2 * processors // programs))
    return 1 << (wanted.bit_length() - 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    layer: int,
    rotary: Rotary,
    shape: AttentionShape,
    *,
    splits: int | None = None,
    overlap: bool = False,
) -> Tensor:
    """As step_plain.attend: [B, heads * D]. Rows of q, k, v may be apart."""
    count, head_dim = q.shape[0], shape.head_dim
    if splits is None:
        splits = splits_for(count * shape.kv_heads, _processors(q.device))
    out = torch.empty(count, shape.heads * head_dim, dtype=q.dtype, device=q.device)
    scratch = torch.empty(
        count * shape.heads * splits * (head_dim + 2) if splits > 1 else 1,
        dtype=torch.float32, device=q.device,
    )  # fmt: skip
    each = count * shape.heads * splits if splits > 1 else 0
    partial, peaks, sums = scratch, scratch[each * head_dim :], scratch[each * (head_dim + 1) :]
    norms = rotary.q_norm is not None
    wide = q.dtype == torch.float32
    kernel: Any = attend_kernel
    kernel[(splits, shape.kv_heads, count)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0),
        rotary.q_norm if norms else rotary.cosines, rotary.k_norm if norms else rotary.cosines,
        rotary.cosines, rotary.sines, rows.positions, rows.addresses, rows.capacities, layer,
        out, partial, peaks, sums, shape.scaling * LOG2_E, shape.epsilon,
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, HEAD_DIM=head_dim,
        HALF_BLOCK=max(16, triton.next_power_of_2(head_dim // 2)),
        HEAD_BLOCK=max(16, triton.next_power_of_2(head_dim)),
        GROUP_BLOCK=max(GROUP, triton.next_power_of_2(shape.heads // shape.kv_heads)),
        WINDOW=shape.window, SPLITS=splits, BLOCK=BLOCK // 2 if wide else BLOCK, NORM=norms,
        PRECISION="ieee" if wide else "tf32", OVERLAP=overlap,
        num_warps=4, num_stages=2 if wide or head_dim > 128 else 3, launch_pdl=overlap,
    )  # fmt: skip
    if splits > 1:
        join: Any = join_kernel
        join[(count * shape.heads,)](
            partial, peaks, sums, out,
            HEAD_DIM=head_dim, HEAD_BLOCK=max(16, triton.next_power_of_2(head_dim)),
            SPLITS=splits, OVERLAP=overlap, num_warps=2, launch_pdl=overlap,
        )  # fmt: skip
    return out


def _processors(device: torch.device) -> int:
    if interpreted():
        return UNKNOWN_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
