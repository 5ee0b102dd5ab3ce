"""The block formats one value at a time, in plain Python from their description.

Each takes the bytes of one block and gives its values. d, m and dmin are float16, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable


def _half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def _bit(words: bytes, index: int) -> int:
    return words[index // 8] >> (index % 8) & 1


def _fives(block: bytes, head: int) -> list[int]:
    """32 5-bit codes: 4 bytes of high bits at `head`, then low nibbles 0..15 and high 16..31."""
    high, low = block[head : head + 4], block[head + 4 :]
    first = [(low[j] & 15) | _bit(high, j) << 4 for j in range(16)]
    return first + [low[j] >> 4 | _bit(high, j + 16) << 4 for j in range(16)]


def q4_0(block: bytes) -> list[float]:
    codes = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [_half(block, 0) * (code - 8) for code in codes]


def q4_1(block: bytes) -> list[float]:
    codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [_half(block, 0) * code + _half(block, 2) for code in codes]


def q5_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (code - 16) for code in _fives(block, 2)]


def q5_1(block: bytes) -> list[float]:
    return [_half(block, 0) * code + _half(block, 2) for code in _fives(block, 4)]


def q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * code for code in struct.unpack("<32b", block[2:])]


def _six_bit_pairs(packed: bytes) -> list[tuple[int, int]]:
    """Eight (scale, minimum) pairs of 6 bits from 12 bytes: 0..3 plain, 4..7 in two parts."""
    plain = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    return plain + [
        (packed[j + 8] & 15 | packed[j] >> 6 << 4, packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4)
        for j in range(4)
    ]


def q4_k(block: bytes) -> list[float]:
    d, dmin, pairs, codes = (
        _half(block, 0),
        _half(block, 2),
        _six_bit_pairs(block[4:16]),
        block[16:],
    )
    values = []
    for group, (scale, minimum) in enumerate(pairs):
        part = codes[group // 2 * 32 : group // 2 * 32 + 32]
        for byte in part:
            code = byte & 15 if group % 2 == 0 else byte >> 4
            values.append(d * scale * code - dmin * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    d, dmin, pairs = _half(block, 0), _half(block, 2), _six_bit_pairs(block[4:16])
    high, codes, values = block[16:48], block[48:], []
    for group, (scale, minimum) in enumerate(pairs):
        for j in range(32):
            byte = codes[group // 2 * 32 + j]
            code = (byte & 15 if group % 2 == 0 else byte >> 4) | (high[j] >> group & 1) << 4
            values.append(d * scale * code - dmin * minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    d, values = _half(block, 208), []
    for index in range(256):
        half, within = divmod(index, 128)
        quarter, j = divmod(within, 32)
        byte = low[half * 64 + quarter % 2 * 32 + j]
        nibble = byte & 15 if quarter < 2 else byte >> 4
        code = nibble | (high[half * 32 + j] >> 2 * quarter & 3) << 4
        values.append(d * scales[index // 16] * (code - 32))
    return values


FORMULAS: dict[str, tuple[Callable[[bytes], list[float]], int, int, tuple[int, ...]]] = {
    "Q4_0": (q4_0, 32, 18, (0,)),
    "Q4_1": (q4_1, 32, 20, (0, 2)),
    "Q5_0": (q5_0, 32, 22, (0,)),
    "Q5_1": (q5_1, 32, 24, (0, 2)),
    "Q8_0": (q8_0, 32, 34, (0,)),
    "Q4_K": (q4_k, 256, 144, (0, 2)),
    "Q5_K": (q5_k, 256, 176, (0, 2)),
    "Q6_K": (q6_k, 256, 210, (208,)),
}
"""Type -> formula, values a block, bytes a block, and where its float16 numbers lie."""
