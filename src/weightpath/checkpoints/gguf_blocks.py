"""GGUF's block types and QWeight, both ways, on packed bytes [N, bytes a row].

    type  values bytes  in a block                            weight           QWeight
    Q4_0     32    18   d, 16 bytes of nibbles                d (q - 8)        4 bits, symmetric
    Q4_1     32    20   d, m, nibbles                         d q + m          4 bits, minimums
    Q5_0     32    22   d, 4 bytes of fifth bits, nibbles     d (q - 16)       5 bits, symmetric
    Q5_1     32    24   d, m, fifth bits, nibbles             d q + m          5 bits, minimums
    Q8_0     32    34   d, 32 int8                            d q              8 bits, symmetric
    Q4_K    256   144   d, dmin, 8 x (sc, mn), nibbles        d sc q - dmin mn 4 bits, minimums
    Q5_K    256   176   as Q4_K, fifth bits before nibbles    d sc q - dmin mn 5 bits, minimums
    Q6_K    256   210   nibbles, upper bits, 16 x sc, d       d sc (q - 32)    6 bits, symmetric

d, m and dmin are float16. A byte of nibbles holds value j low and value j + run high, where a run
is 16 values (32 in Q4_K and Q5_K, 64 in Q6_K). Groups are 32 columns, 16 in Q6_K. Reading loses
nothing: scales and minimums of K types are products that float32 holds exactly (11 + 6 bits).
Writing turns no weight into another code: what a block cannot hold is refused, and all that may
change is a scale or minimum that float16 rounds, which is measured.
Source: the block structures of ggml, as in gguf-py 0.19 and llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

BLOCK = 32
"""Values in a block of the types that are written."""
VALUES_AT_ONCE = 1 << 22
"""Values packed or unpacked in one step, so that what comes between stays small."""

_SCHEMES = {
    "Q4_0": Scheme(4, BLOCK),
    "Q4_1": Scheme(4, BLOCK, symmetric=False),
    "Q5_0": Scheme(5, BLOCK),
    "Q5_1": Scheme(5, BLOCK, symmetric=False),
    "Q8_0": Scheme(8, BLOCK),
    "Q4_K": Scheme(4, BLOCK, symmetric=False),
    "Q5_K": Scheme(5, BLOCK, symmetric=False),
    "Q6_K": Scheme(6, 16),
}
_REQUANTIZE = "requantize it to symmetric codes in groups of 32, or keep it as F16"

_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Blocks:
    """A weight in blocks: type, bytes uint8 [N, bytes a row], and by how much weights changed.

    exactness: `exact: ...` or `lossy: ...`, with the reason. The changes are absolute.
    """

    kind: str
    data: np.ndarray
    exactness: str
    largest_change: float
    mean_change: float

    @property
    def exact(self) -> bool:
        return self.largest_change == 0.0


@dataclass(frozen=True)
class _Halves:
    """Scales and minimums as float16 [N, nG], with what that did to the weights."""

    scales: np.ndarray
    minimums: np.ndarray | None
    exactness: str
    largest_change: float
    mean_change: float


def scheme_of(kind: str) -> Scheme:
    """The scheme that a block type reads into."""
    return _SCHEMES[kind]


def bytes_of_row(kind: str, in_features: int) -> int:
    """Bytes of a row of K = in_features values, a multiple of the block."""
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return in_features // values * nbytes


def file_rows(rows: int, heads: int) -> np.ndarray:
    """The file's row of each HF row, int64 [rows]: (head, half, i) lies at (head, i, half)."""
    head_dim = rows // heads
    head, within = np.divmod(np.arange(rows), head_dim)
    half, i = np.divmod(within, head_dim // 2)
    return head * head_dim + i * 2 + half


def hf_rows(rows: int, heads: int) -> np.ndarray:
    """The HF row of each of the file's rows, int64 [rows]: what file_rows undoes."""
    head_dim = rows // heads
    head, within = np.divmod(np.arange(rows), head_dim)
    i, half = np.divmod(within, 2)
    return head * head_dim + half * (head_dim // 2) + i


def from_blocks(
    name: str, kind: str, packed: np.ndarray, order: np.ndarray | None = None
) -> QWeight:
    """A QWeight from packed uint8 [N, bytes a row], checked; order picks the rows, [N].

    Dequantizing it in float32 gives gguf-py's values bit for bit. BadTensor for a scale or minimum
    that is NaN or infinite.
    """
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    scheme, n, k = _SCHEMES[kind], packed.shape[0], packed.shape[1] // nbytes * values
    dtype = np.float32 if values > BLOCK else np.float16
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, k // scheme.group_size), dtype)
    minimums = None if scheme.symmetric else np.empty_like(scales)
    step = max(1, VALUES_AT_ONCE // k)
    for start in range(0, n, step):
        cut = slice(start, min(start + step, n))
        chosen = packed[cut] if order is None else packed[order[cut]]
        blocks = np.ascontiguousarray(chosen).reshape(-1, nbytes)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and Inf are refused by check
            found = _unpack(kind, blocks)
        codes[cut] = found[0].reshape(-1, k)
        scales[cut] = found[1].reshape(-1, scales.shape[1])
        if minimums is not None and found[2] is not None:
            minimums[cut] = found[2].reshape(-1, scales.shape[1])
    return QWeight(
        scheme,
        torch.from_numpy(codes),
        torch.from_numpy(scales),
        minimums=None if minimums is None else torch.from_numpy(minimums),
    ).check(name)


def block_type(name: str, scheme: Scheme, in_features: int, ordered: bool = False) -> str:
    """The block type that holds codes of a scheme as they are, known before there are codes.

    Up to 4 bits go to Q4_0 or Q4_1, 5 to Q5_0 or Q5_1, symmetric 6 to 8 to Q8_0: fewer bits than
    the type has are the same integers in a wider field. ordered: columns have an order of their
    own. BadTensor says why there is none.
    """
    size = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    if ordered:
        raise BadTensor(
            name,
            "has a column order (g_idx), which blocks of neighbouring columns cannot hold",
            "fold the order into its neighbours first, or " + _REQUANTIZE,
        )
    if in_features % BLOCK:
        raise BadTensor(
            name,
            f"has in_features {in_features}, GGUF's blocks want a multiple of {BLOCK}",
            "keep it as F16",
        )
    if size % BLOCK:
        raise BadTensor(
            name,
            f"has groups of {size} columns, GGUF's blocks of {BLOCK} want a multiple of it",
            _REQUANTIZE,
        )
    if scheme.symmetric:
        return "Q4_0" if scheme.bits <= 4 else "Q5_0" if scheme.bits == 5 else "Q8_0"
    if scheme.bits > 5:
        raise BadTensor(
            name,
            f"has asymmetric {scheme.bits}-bit codes; GGUF has minimums for 4 and 5 bits only",
            _REQUANTIZE,
        )
    return "Q4_1" if scheme.bits <= 4 else "Q5_1"


def block_type_for(name: str, qweight: QWeight) -> tuple[str, str]:
    """The block type for a weight, and a sentence on what it keeps: `exact: ...` or `lossy: ...`.

    BadTensor where no type holds its codes as they are, or a scale overflows float16.
    """
    kind = block_type(name, qweight.scheme, qweight.in_features, qweight.g_idx is not None)
    return kind, _halves(name, qweight.check(name)).exactness


def to_blocks(name: str, qweight: QWeight) -> Blocks:
    """A QWeight in the blocks of `block_type`, rows in their order; scales replicated per 32.

    Errors: BadTensor as block_type_for.
    """
    kind = block_type(name, qweight.scheme, qweight.in_features, qweight.g_idx is not None)
    halves = _halves(name, qweight.check(name))
    n, k = qweight.codes.shape
    each = k // BLOCK // halves.scales.shape[1]
    heads = [halves.scales] if halves.minimums is None else [halves.scales, halves.minimums]
    # symmetric codes move to the midpoint of the block's type; the others count from the minimum
    shift = _SCHEMES[kind].midpoint - qweight.scheme.midpoint if qweight.scheme.symmetric else 0
    data = np.empty((n, bytes_of_row(kind, k)), np.uint8)
    step = max(1, VALUES_AT_ONCE // k)
    for start in range(0, n, step):
        cut = slice(start, min(start + step, n))
        codes = qweight.codes[cut].numpy() + np.uint8(shift)
        parts = [np.repeat(head[cut], each, axis=1).reshape(-1, 1) for head in heads]
        data[cut] = _pack(kind, codes.reshape(-1, BLOCK), parts).reshape(-1, data.shape[1])
    return Blocks(kind, data, halves.exactness, halves.largest_change, halves.mean_change)


def _halves(name: str, qweight: QWeight) -> _Halves:
    """Scales and minimums (-scale * zero where there are zeros) in float16, and the change."""
    wide = {"scales": qweight.scales.double().numpy()}
    if qweight.minimums is not None:
        wide["minimums"] = qweight.minimums.double().numpy()
    elif qweight.zeros is not None:
        wide["minimums"] = 0.0 - wide["scales"] * qweight.zeros.double().numpy()
    halves: dict[str, np.ndarray] = {}
    rounded = []
    for part, values in wide.items():
        with np.errstate(over="ignore", under="ignore"):
            halves[part] = values.astype(np.float16)
        if not np.isfinite(halves[part]).all():
            raise BadTensor(
                name,
                f"has {part} up to {np.abs(values).max():.4g}, float16 ends at 65504",
                "write it in a format that keeps their dtype, or requantize it",
            )
        changed = int((halves[part] != values).sum())
        if changed:
            rounded.append(f"{changed} of {values.size} {part}")
    scales, minimums = halves["scales"], halves.get("minimums")
    if not rounded:
        parts = "every scale" if minimums is None else "every scale and minimum"
        return _Halves(scales, minimums, f"exact: {parts} is a float16 number", 0.0, 0.0)
    largest, mean = _change(qweight, scales, minimums)
    effect = f"weights change by up to {largest:.3g}, {mean:.3g} on average"
    if largest == 0.0:
        effect = "no weight changes"
    word = "lossy" if largest else "exact"
    sentence = f"{word}: float16 rounds {' and '.join(rounded)}; {effect}"
    return _Halves(scales, minimums, sentence, largest, mean)


def _change(
    qweight: QWeight, scales: np.ndarray, minimums: np.ndarray | None
) -> tuple[float, float]:
    """Largest and mean absolute change of a weight under other scales and minimums."""
    other = QWeight(
        qweight.scheme,
        qweight.codes,
        torch.from_numpy(scales),
        minimums=None if minimums is None else torch.from_numpy(minimums),
    )
    n, k = qweight.codes.shape
    largest, total, step = 0.0, 0.0, max(1, VALUES_AT_ONCE // k)
    for start in range(0, n, step):
        stop = min(start + step, n)
        change = other.rows(start, stop).dequantize() - qweight.rows(start, stop).dequantize()
        largest = max(largest, float(change.abs_().max()))
        total += float(change.sum(dtype=torch.float64))
    return largest, total / (n * k)


def _unpack(kind: str, blocks: np.ndarray) -> _Parts:
    """Codes [B, values], scales and minimums [B, groups] of uint8 blocks [B, bytes]."""
    if kind in ("Q4_K", "Q5_K"):
        return _unpack_k(blocks, _SCHEMES[kind].bits)
    if kind == "Q6_K":
        low, high, scales = _nibbles(blocks[:, :128], 64), blocks[:, 128:192], blocks[:, 192:208]
        pairs = high.reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        codes = low | pairs.reshape(-1, 256) << 4
        return codes, _half(blocks, 208).astype(np.float32) * scales.view(np.int8), None
    scheme, at = _SCHEMES[kind], 2
    minimums = None
    if not scheme.symmetric:
        minimums, at = _half(blocks, 2), 4
    if scheme.bits == 8:
        codes = blocks[:, at:] ^ np.uint8(0x80)  # int8 q is code q + 128
    elif scheme.bits == 5:
        fifth = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
        codes = _nibbles(blocks[:, at + 4 :], 16) | fifth << 4
    else:
        codes = _nibbles(blocks[:, at:], 16)
    return codes, _half(blocks, 0), minimums


def _unpack_k(blocks: np.ndarray, bits: int) -> _Parts:
    """Q4_K and Q5_K: 8 groups of 32, whose 6-bit scales and minimums fill 12 bytes."""
    packed = blocks[:, 4:16]
    first, second, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, both & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, both >> 4 | second >> 6 << 4], axis=1)
    codes = _nibbles(blocks[:, 16 if bits == 4 else 48 :], 32)
    if bits == 5:
        fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes |= fifth.reshape(-1, 256) << 4
    return (
        codes,
        _half(blocks, 0).astype(np.float32) * scales,
        -(_half(blocks, 2).astype(np.float32) * minimums),
    )


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of every block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """Bytes [B, n] to codes [B, 2n]: of every `run` bytes the low nibbles, then the high ones."""
    runs = packed.reshape(packed.shape[0], -1, run)
    codes = np.empty((*runs.shape[:2], 2, run), np.uint8)
    codes[:, :, 0], codes[:, :, 1] = runs & 15, runs >> 4
    return codes.reshape(packed.shape[0], -1)


def _pack(kind: str, codes: np.ndarray, heads: list[np.ndarray]) -> np.ndarray:
    """Blocks uint8 [B, bytes] from codes [B, 32] and float16 heads [B, 1] (scale, then minimum)."""
    parts = [head.astype("<f2").view(np.uint8) for head in heads]
    if kind == "Q8_0":
        return np.concatenate([*parts, codes ^ np.uint8(0x80)], axis=1)
    if kind in ("Q5_0", "Q5_1"):
        parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
    half = BLOCK // 2
    return np.concatenate([*parts, codes[:, :half] & 15 | codes[:, half:] << 4], axis=1)
