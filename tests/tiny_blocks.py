"""A weight in GGUF's block types: its bytes, and the float32 values its integers stand for."""

from __future__ import annotations

import numpy as np
import torch

from tiny_linears import Asked, quantized, rounded
from tiny_packers import gguf_k, gguf_plain, gguf_q6_k


def gguf_blocks(weight: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [N, bytes a row] of a block type, and the float32 weight [N, K] they stand for."""
    n, k = weight.shape
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        packed, values = _k_blocks(weight.reshape(-1, 256), kind)
    else:
        bits, symmetric = {"Q4": 4, "Q5": 5, "Q8": 8}[kind[:2]], kind.endswith("_0")
        made = quantized(weight.reshape(-1, 32), Asked(bits, 32, symmetric, lowest_zero=0))
        heads, values = [made.scales[:, 0]], made.weight()
        if not symmetric:
            minimum = rounded(-made.scales * made.zeros, torch.float16)
            heads.append(minimum[:, 0])
            values = made.codes.astype(np.float32) * made.scales + minimum
        packed = gguf_plain(kind, made.codes, heads)
    return packed.reshape(n, -1), values.reshape(n, k)


def _k_blocks(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Superblocks of 256 [B, 256] to their bytes and values."""
    if kind == "Q6_K":
        groups = rows.reshape(-1, 16, 16)
        wanted = np.abs(groups).max(2) / 31
        d = rounded(wanted.max(1) / 127, torch.float16)
        scales = np.round(wanted / d[:, None]).clip(1, 127).astype(np.int64)
        step = d[:, None] * scales.astype(np.float32)
        codes = (np.round(groups / step[..., None]) + 32).clip(0, 63).astype(np.int64)
        values = step[..., None] * (codes - 32).astype(np.float32)
        return gguf_q6_k(d, scales, codes.reshape(-1, 256)), values
    bits = int(kind[1])
    groups, top = rows.reshape(-1, 8, 32), (1 << bits) - 1
    low, high = np.minimum(groups.min(2), 0), groups.max(2)
    d, dmin = (
        rounded(part.max(1) / 63, torch.float16) for part in ((high - low) / top, -low)
    )  # fmt: skip
    scales = np.round((high - low) / top / d[:, None]).clip(1, 63).astype(np.int64)
    minimums = np.round(-low / dmin[:, None]).clip(0, 63).astype(np.int64)
    step, offset = (
        d[:, None] * scales.astype(np.float32),
        dmin[:, None] * minimums.astype(np.float32),
    )
    codes = np.round((groups + offset[..., None]) / step[..., None]).clip(0, top).astype(np.int64)
    values = step[..., None] * codes.astype(np.float32) - offset[..., None]
    return gguf_k(bits, d, dmin, (scales, minimums), codes), values
