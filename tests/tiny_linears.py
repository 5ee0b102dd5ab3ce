"""One linear in every low-bit format: its tensors, and the float32 weight they stand for.

The weight is computed from the integers by the formula of the format, never from the bytes. Each
maker takes the float weight [N, K] and what was asked for, and gives {suffix: tensor} and float32
[N, K]. numpy and tiny_packers only; torch holds the result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiny_packers import (
    awq_gemm,
    awq_strips,
    dense,
    hqq_rows,
    padded,
    signed,
)

Made = tuple[dict[str, Tensor], np.ndarray]
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""The table that bitsandbytes publishes, as float32."""


@dataclass(frozen=True)
class Asked:
    """What a checkpoint is to be. group_size -1: one group a row. Not every format uses all.

    ordered: columns are grouped in a random order. static_groups: act-order was used in making it,
    but the groups are of neighbours. lowest_zero: asymmetric zero points are at least that.
    negative_scales: AutoRound's, on half of the groups. pack_dtype: GPTQ's words. kind: GGUF's
    block type. nested: bitsandbytes' absmax is quantized too. whole_zeros, axis: HQQ's.
    by_word: v1 zeros are made by subtracting 1 from the fields of a word at once, as GPTQModel does.
    """

    bits: int
    group_size: int
    symmetric: bool
    seed: int = 0
    ordered: bool = False
    static_groups: bool = False
    scale_dtype: torch.dtype = torch.float16
    lowest_zero: int = 1
    negative_scales: bool = False
    pack_dtype: torch.dtype = torch.int32
    by_word: bool = False
    kind: str = "Q4_0"
    nested: bool = False
    whole_zeros: bool = True
    axis: int = 1
    quant_type: str = "nf4"
    more: dict[str, Any] = field(default_factory=dict)

    def size(self, in_features: int) -> int:
        return in_features if self.group_size == -1 else self.group_size


@dataclass(frozen=True)
class Integers:
    """codes [N, K], scales float32 and zeros [N, nG], the group of every column [K]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of: np.ndarray

    def weight(self) -> np.ndarray:
        steps = (self.codes - self.zeros[:, self.group_of]).astype(np.float32)
        return steps * self.scales[:, self.group_of]


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 numbers that `dtype` holds."""
    return torch.from_numpy(np.asarray(values, np.float32)).to(dtype).float().numpy()


def stored(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(dtype)


def quantized(weight: np.ndarray, asked: Asked, order: np.ndarray | None = None) -> Integers:
    """Round to nearest in groups of the columns as `order` ranks them (None: neighbours)."""
    n, k = weight.shape
    size, top, middle = asked.size(k), (1 << asked.bits) - 1, 1 << (asked.bits - 1)
    group_of = (np.arange(k) if order is None else order) // size
    scales, zeros = (np.empty((n, k // size), np.float32) for _ in range(2))
    codes = np.empty((n, k), np.int64)
    signs = np.random.default_rng(asked.seed).choice([-1, 1], scales.shape)
    for group in range(k // size):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if asked.symmetric:
            scale = np.maximum(-low, high) / (middle - 1)
            scale = scale * (signs[:, group] if asked.negative_scales else 1)
        else:
            scale = (high - low) / top
        scales[:, group] = scale = rounded(scale, asked.scale_dtype)
        found = np.round(-low / scale).clip(asked.lowest_zero, top)
        zeros[:, group] = middle if asked.symmetric else found
        steps = np.round(part / scale[:, None]) + zeros[:, group, None]
        codes[:, group_of == group] = steps.clip(0, top)
    return Integers(codes, scales, zeros.astype(np.int64), group_of)


def awq(weight: np.ndarray, asked: Asked, version: str) -> Made:
    """gemm, gemv, gemv_fast or llm-awq. The last two store -(scale * zero) in float16."""
    made, dtype = quantized(weight, asked), asked.scale_dtype
    groups = made.scales.shape[1]
    if version == "gemm":
        tensors = {
            "qweight": torch.from_numpy(awq_gemm(made.codes)),
            "qzeros": torch.from_numpy(awq_gemm(made.zeros)),
            "scales": stored(made.scales.T, dtype),
        }
        return tensors, made.weight()
    words = -(-groups // 8)
    while words % {32: 4, 64: 2}.get(asked.size(weight.shape[1]), 1):
        words += 1
    zeros, scales = (
        np.pad(values, ((0, 0), (0, 8 * words - groups))) for values in (made.zeros, made.scales)
    )
    if version == "gemv":
        tensors = {
            "qweight": torch.from_numpy(signed(dense(made.codes, 4))),
            "qzeros": torch.from_numpy(signed(dense(zeros, 4))),
            "scales": stored(scales, dtype),
        }
    else:
        tensors = {
            "qweight": torch.from_numpy(awq_strips(made.codes)),
            "qzeros" if version == "gemv_fast" else "scaled_zeros": stored(
                -(scales * zeros).T, dtype
            ),
            "scales": stored(scales.T, dtype),
        }
    return tensors, made.weight()


def gptq(
    weight: np.ndarray, asked: Asked, order: np.ndarray | None, v1: bool, g_idx: bool = True
) -> Made:
    """Codes packed along K, zeros along N and less one where v1."""
    made, bits = quantized(weight, asked, order), asked.bits
    zeros = made.zeros.T
    if v1 and asked.by_word:
        whole = dense(zeros, bits) - np.uint64(sum(1 << start for start in range(0, 32, bits)))
        zero_words = whole & np.uint64(0xFFFFFFFF)
    else:
        zero_words = dense((zeros - 1) % (1 << bits) if v1 else zeros, bits)
    word = {torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}[asked.pack_dtype]  # fmt: skip
    tensors = {
        "qweight": torch.from_numpy(signed(dense(made.codes, bits), word).T.copy()),
        "qzeros": torch.from_numpy(signed(zero_words, word)),
        "scales": stored(made.scales.T, asked.scale_dtype),
    }
    if g_idx:
        tensors["g_idx"] = torch.from_numpy(made.group_of.astype(np.int32))
    return tensors, made.weight()


def ct_packed(
    weight: np.ndarray, asked: Asked, order: np.ndarray | None = None, pads: bool = False
) -> Made:
    """Unsigned codes along K; zero points along N where asymmetric; dense or padded words."""
    made, pack = quantized(weight, asked, order), padded if pads else dense
    tensors = {
        "weight_packed": torch.from_numpy(signed(pack(made.codes, asked.bits))),
        "weight_scale": stored(made.scales, asked.scale_dtype),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not asked.symmetric:
        columns = signed(pack(made.zeros.T, asked.bits))
        tensors["weight_zero_point"] = torch.from_numpy(columns.T.copy())
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(made.group_of.astype(np.int32))
    return tensors, made.weight()


def ct_int8(weight: np.ndarray, asked: Asked) -> Made:
    """int8 [N, K] with a scale a row, and int8 zero points where asymmetric."""
    made = quantized(weight, asked)
    tensors = {
        "weight": torch.from_numpy((made.codes - 128).astype(np.int8)),
        "weight_scale": stored(made.scales, asked.scale_dtype),
    }
    if not asked.symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((made.zeros - 128).astype(np.int8))
    return tensors, made.weight()


def torchao_int4(weight: np.ndarray, asked: Asked) -> Made:
    """w = scale * q + zero_point, q of -8..7 two to a byte, low first; parts [nG, N]."""
    made = quantized(weight, asked)
    nibbles = (made.codes - 8) & 15
    offsets = rounded((8 - made.zeros) * made.scales, asked.scale_dtype)
    steps = (made.codes - 8).astype(np.float32)
    tensors = {
        "_weight_qdata": torch.from_numpy((nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8).view(np.int8)),
        "_weight_scale": stored(made.scales.T, asked.scale_dtype),
        "_weight_zero_point": stored(offsets.T, asked.scale_dtype),
    }  # fmt: skip
    return tensors, steps * made.scales[:, made.group_of] + offsets[:, made.group_of]


def torchao_int8(weight: np.ndarray, asked: Asked) -> Made:
    """w = scale * q, int8 [N, K], scales [N, nG]."""
    made = quantized(weight, asked)
    tensors = {
        "_weight_qdata": torch.from_numpy((made.codes - 128).astype(np.int8)),
        "_weight_scale": stored(made.scales, asked.scale_dtype),
    }
    return tensors, made.weight()


def modelopt_int4(weight: np.ndarray, asked: Asked) -> Made:
    """w = scale * q * pre_quant_scale: two rows to a byte, the even one low, two's complement."""
    draw = np.random.default_rng(asked.seed)
    pre = rounded(draw.uniform(0.5, 2.0, weight.shape[1]), asked.scale_dtype)
    made = quantized(weight / pre, asked)
    nibbles = (made.codes - 8) & 15
    tensors = {
        "weight": torch.from_numpy((nibbles[::2] | nibbles[1::2] << 4).astype(np.uint8)),
        "weight_scale": stored(made.scales, asked.scale_dtype),
        "pre_quant_scale": stored(pre, asked.scale_dtype),
    }
    return tensors, made.weight() * pre


def bnb_int8(weight: np.ndarray, asked: Asked) -> Made:
    """w = q * SCB / 127 a row, the division being a product with float32's 1 / 127."""
    scb = np.abs(weight).max(1).astype(np.float32)
    codes = np.round(weight * (127 / scb[:, None])).clip(-127, 127)
    tensors = {
        "weight": torch.from_numpy(codes.astype(np.int8)),
        "SCB": torch.from_numpy(scb),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.astype(np.float32) * (scb * np.float32(1 / 127))[:, None]


def bnb_nf4(weight: np.ndarray, asked: Asked) -> Made:
    """w = table[code] * absmax of its 64 elements, in asked.scale_dtype; the high nibble first."""
    table, flat = np.array(NF4, np.float32), weight.reshape(-1, 64)
    absmax = np.abs(flat).max(1).astype(np.float32)
    said: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape),
        "dtype": str(asked.scale_dtype).removeprefix("torch."),
    }  # fmt: skip
    tensors = {"weight.absmax": torch.from_numpy(absmax)}
    if asked.nested:
        outer, offset = np.linspace(-1, 1, 256, dtype=np.float32), float(absmax.mean())
        blocks = absmax.size
        tops = [np.abs(absmax[at : at + 256] - offset).max() for at in range(0, blocks, 256)]
        spread = np.array(tops, np.float32)[np.arange(blocks) // 256]
        places = np.abs(((absmax - offset) / spread)[:, None] - outer).argmin(1)
        absmax = outer[places] * spread + np.float32(offset)
        tensors = {
            "weight.absmax": torch.from_numpy(places.astype(np.uint8)),
            "weight.nested_absmax": torch.from_numpy(np.array(tops, np.float32)),
            "weight.nested_quant_map": torch.from_numpy(outer),
        }
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = np.abs((flat / absmax[:, None])[..., None] - table).argmin(-1).reshape(-1)
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    tensors |= {
        "weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        "weight.quant_map": torch.from_numpy(table),
        "weight.quant_state.bitsandbytes__nf4": state,
    }
    values = table[codes].reshape(-1, 64) * absmax[:, None]
    return tensors, rounded(values.reshape(weight.shape), asked.scale_dtype)


def hqq(weight: np.ndarray, asked: Asked) -> Made:
    """w = (q - zero) * scale over the weight regrouped [N*K/G, G] (axis 1) or [G, N*K/G] (0)."""
    n, k = weight.shape
    size, top = asked.size(k), (1 << asked.bits) - 1
    rows = weight.reshape(-1, size) if asked.axis == 1 else weight.reshape(size, -1)
    low, high = (f(rows, axis=asked.axis, keepdims=True) for f in (np.min, np.max))
    scale = rounded((high - low) / top, torch.float16)
    zero = -low / scale
    zero = rounded(np.round(zero).clip(0, top) if asked.whole_zeros else zero, torch.float16)
    codes = np.round(rows / scale + zero).clip(0, top)
    packing = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}[asked.bits]
    tensors = {
        "W_q": torch.from_numpy(hqq_rows(codes.astype(np.int64), asked.bits)),
        "scale": stored(scale, torch.float16),
        "zero": stored(zero, torch.float16),
        "shape": torch.tensor(weight.shape),
        "nbits": torch.tensor(asked.bits, dtype=torch.int32),
        "group_size": torch.tensor(size, dtype=torch.int32),
        "axis": torch.tensor(asked.axis, dtype=torch.int32),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, ((codes.astype(np.float32) - zero) * scale).reshape(n, k)
