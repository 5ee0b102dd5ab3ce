"""Codes to 32-bit words and back, densely: 32 codes of b bits fill exactly b words.

Code i of a row sits at bits i*b .. i*b+b-1 of the row's little-endian bit stream; a row's last
word is padded with zero bits. For b of 2, 4 and 8 this is also the layout that pads each word.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK_CODES = 1 << 22
"""Codes expanded to bits at a time for odd widths: 32 MiB of bits."""


def words(count: int, bits: int) -> int:
    """32-bit words that hold `count` codes of `bits`."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [R, C] below 2**bits to int32 [R, ceil(C*bits/32)]."""
    rows, count = codes.shape
    width = words(count, bits)
    per_word = 32 // bits
    if bits in (2, 4, 8):
        padded = codes
        if count % per_word:
            padded = torch.nn.functional.pad(codes, (0, width * per_word - count))
        per_byte = 8 // bits
        parts = padded.reshape(rows, -1, per_byte)
        packed = parts[..., 0].clone()
        for index in range(1, per_byte):
            packed |= parts[..., index] << (bits * index)
        return packed.contiguous().view(torch.int32)
    out = np.zeros((rows, width * 4), dtype=np.uint8)
    step = max(1, BLOCK_CODES // max(count, 1))
    for start in range(0, rows, step):
        block = codes[start : start + step].numpy()
        stream = np.unpackbits(block[..., None], axis=-1, count=bits, bitorder="little")
        part = np.packbits(stream.reshape(len(block), -1), axis=-1, bitorder="little")
        out[start : start + step, : part.shape[1]] = part
    return torch.from_numpy(out.view(np.int32))


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """int32 [R, W] to the first `count` codes of each row, uint8 [R, count].

    Whole 8-bit rows are the words' own bytes: a view, to be read only.
    """
    rows = packed.shape[0]
    # Flattened first: a one-column tensor counts as contiguous whatever its stride, and .view
    # to another width then refuses it.
    stream = packed.contiguous().view(-1).view(torch.uint8).view(rows, -1)
    if bits == 8:
        return stream[:, :count].contiguous()
    if bits in (2, 4):
        mask = (1 << bits) - 1
        parts = [(stream >> (bits * index)) & mask for index in range(8 // bits)]
        return torch.stack(parts, dim=-1).view(rows, -1)[:, :count].contiguous()
    out = np.empty((rows, count), dtype=np.uint8)
    step = max(1, BLOCK_CODES // max(count, 1))
    for start in range(0, rows, step):
        block = stream[start : start + step].numpy()
        flat = np.unpackbits(block, axis=-1, count=count * bits, bitorder="little")
        grouped = flat.reshape(len(block), count, bits)
        out[start : start + step] = np.packbits(grouped, axis=-1, bitorder="little")[..., 0]
    return torch.from_numpy(out)
