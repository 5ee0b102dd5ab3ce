"""Low-bit packings written on their own, from their descriptions, for tests to read against.

Nothing here is the package's. Codes are int64 [R, C]; a packer goes column by column, so that the
place of each code is in plain sight. R and C are rows and columns of what is packed.
"""

from __future__ import annotations

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of its eight, that nibble i of an AWQ gemm word holds."""


def signed(words: np.ndarray, dtype: type = np.int32) -> np.ndarray:
    """Unsigned words of 32 bits as the signed ones that a file stores, or others of their bytes."""
    return np.ascontiguousarray(words.astype(np.uint32)).view(dtype)


def dense(codes: np.ndarray, bits: int) -> np.ndarray:
    """Code i at bits i*b .. i*b+b-1 of its row: uint64 words of 32 bits [R, ceil(C*b/32)]."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint64)
    for index in range(count):
        word, start = divmod(index * bits, 32)
        spread = codes[:, index].astype(np.uint64) << np.uint64(start)
        words[:, word] |= spread & np.uint64(0xFFFFFFFF)
        if start + bits > 32:
            words[:, word + 1] |= spread >> np.uint64(32)
    return words


def padded(codes: np.ndarray, bits: int) -> np.ndarray:
    """32 // b codes a word and its other bits empty: uint64 words of 32 bits."""
    rows, count = codes.shape
    each = 32 // bits
    words = np.zeros((rows, -(-count // each)), np.uint64)
    for index in range(count):
        word, place = divmod(index, each)
        words[:, word] |= codes[:, index].astype(np.uint64) << np.uint64(place * bits)
    return words


def awq_gemm(codes: np.ndarray) -> np.ndarray:
    """Codes [N, R] to int32 [R, N/8]: nibble i of word c is output 8c + AWQ_ORDER[i]."""
    words = np.zeros((codes.shape[1], codes.shape[0] // 8), np.uint64)
    for word in range(words.shape[1]):
        for nibble, place in enumerate(AWQ_ORDER):
            words[:, word] |= codes[8 * word + place].astype(np.uint64) << np.uint64(4 * nibble)
    return signed(words)


def awq_strips(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] to gemv_fast's int16 [N/4, K]: 4 rows, 64 columns at a time, shuffled by 32."""
    rows, columns = codes.shape
    pairs = [
        8 * part + 2 * index + side for index in range(4) for part in range(4) for side in (0, 1)
    ]
    run = [pairs[8 * (place // 8) + AWQ_ORDER[place % 8]] for place in range(32)]
    shuffled = codes[:, [start + place for start in range(0, columns, 32) for place in run]]
    strips = []
    for top in range(0, rows, 4):
        stream = np.concatenate(
            [
                shuffled[row, start : start + 64]
                for start in range(0, columns, 64)
                for row in range(top, top + 4)
            ]
        )
        strips.append(sum(stream[nibble::4] << (4 * nibble) for nibble in range(4)))
    return np.ascontiguousarray(np.array(strips).astype(np.uint16)).view(np.int16)


def hqq_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [R, C] in runs of rows, the first run in the highest bits: uint8, int32 for 3 bits."""
    fields, top = (10, 27) if bits == 3 else (8 // bits, 8 - bits)
    packed_rows = -(-codes.shape[0] // fields)
    filled = np.zeros((packed_rows * fields, codes.shape[1]), np.int64)
    filled[: codes.shape[0]] = codes
    words = sum(
        filled[field * packed_rows : (field + 1) * packed_rows] << (top - bits * field)
        for field in range(fields)
    )
    return np.asarray(words).astype(np.int32 if bits == 3 else np.uint8)


def halves(values: np.ndarray) -> np.ndarray:
    """float16 numbers [B] as their bytes, little-endian, [B, 2]."""
    return np.ascontiguousarray(values.astype("<f2").reshape(-1, 1)).view(np.uint8)


def gguf_plain(kind: str, codes: np.ndarray, heads: list[np.ndarray]) -> np.ndarray:
    """Blocks of 32 codes [B, 32] and float16 heads [B] to bytes [B, bytes a block].

    Q4_0, Q4_1: nibbles, value j low and j + 16 high. Q5_0, Q5_1: 4 bytes of fifth bits before.
    Q8_0: int8, the code less 128.
    """
    parts = [halves(head) for head in heads]
    if kind == "Q8_0":
        return np.concatenate([*parts, (codes - 128).astype(np.int8).view(np.uint8)], axis=1)
    if kind.startswith("Q5"):
        fifths = np.zeros((len(codes), 4), np.uint8)
        for value in range(32):
            fifths[:, value // 8] |= (codes[:, value] >> 4 << (value % 8)).astype(np.uint8)
        parts.append(fifths)
    low, high = codes[:, :16] & 15, codes[:, 16:] & 15
    return np.concatenate([*parts, (low | high << 4).astype(np.uint8)], axis=1)


def gguf_k(
    bits: int, d: np.ndarray, dmin: np.ndarray, pairs: tuple[np.ndarray, np.ndarray], codes
) -> np.ndarray:
    """Q4_K or Q5_K: d, dmin [B], scales and minimums of 6 bits [B, 8], codes [B, 8, 32]."""
    scales, minimums = pairs
    six = np.zeros((len(codes), 12), np.uint8)
    for j in range(4):
        six[:, j] = scales[:, j] | scales[:, j + 4] >> 4 << 6
        six[:, j + 4] = minimums[:, j] | minimums[:, j + 4] >> 4 << 6
        six[:, j + 8] = scales[:, j + 4] & 15 | (minimums[:, j + 4] & 15) << 4
    parts = [halves(d), halves(dmin), six]
    if bits == 5:
        parts.append(np.sum([codes[:, g] >> 4 << g for g in range(8)], axis=0).astype(np.uint8))
    for pair in range(4):
        low, high = codes[:, 2 * pair] & 15, codes[:, 2 * pair + 1] & 15
        parts.append((low | high << 4).astype(np.uint8))
    return np.concatenate(parts, axis=1)


def gguf_q6_k(d: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Q6_K: d [B], int8 scales [B, 16], codes [B, 256] of 0..63."""
    low, high = np.zeros((len(codes), 128), np.int64), np.zeros((len(codes), 64), np.int64)
    for index in range(256):
        half, quarter, j = index // 128, index % 128 // 32, index % 32
        low[:, half * 64 + quarter % 2 * 32 + j] |= (codes[:, index] & 15) << 4 * (quarter // 2)
        high[:, half * 32 + j] |= codes[:, index] >> 4 << 2 * quarter
    stored = [low.astype(np.uint8), high.astype(np.uint8), scales.astype(np.int8).view(np.uint8)]
    return np.concatenate([*stored, halves(d)], axis=1)
