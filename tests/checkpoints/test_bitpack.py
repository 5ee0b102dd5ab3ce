"""Codes in 32-bit words, densely: by hand, by the package, and with the order spoiled."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints import bitpack

pytestmark = pytest.mark.usefixtures("one_thread")


def random_codes(rows: int, count: int, bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, count), generator=generator).to(torch.uint8)


def by_hand(codes: Tensor, bits: int) -> Tensor:
    """One whole number a row, code i at bit i * bits, cut into signed 32-bit words."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * index) for index, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def test_eight_4_bit_codes_are_one_word_with_the_first_lowest() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8)
    assert bitpack.pack(codes, 4).tolist() == [[signed(0x87654321)]]
    assert bitpack.pack(torch.full((1, 8), 15, dtype=torch.uint8), 4).tolist() == [[-1]]


def test_other_widths_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 0]], dtype=torch.uint8)
    assert bitpack.pack(codes, 2).tolist() == [[0b00111001]]
    assert bitpack.pack(codes, 8).tolist() == [[0x00030201]]
    # 3 bits: the eleventh code starts at bit 30 and straddles into the second word
    codes = torch.zeros(1, 11, dtype=torch.uint8)
    codes[0, 10] = 0b110
    assert bitpack.pack(codes, 3).tolist() == [[signed(0b10 << 30), 0b1]]
    # 5 bits: code 6 spans bits 30..34
    codes = torch.zeros(1, 7, dtype=torch.uint8)
    codes[0, 6] = 0b10111
    assert bitpack.pack(codes, 5).tolist() == [[signed(0b11 << 30), 0b101]]


def test_the_last_word_is_padded_with_zero_bits() -> None:
    codes = torch.full((2, 3), 15, dtype=torch.uint8)
    assert bitpack.pack(codes, 4).tolist() == [[0xFFF], [0xFFF]]
    assert bitpack.pack(codes[:, :1], 4).tolist() == [[0xF], [0xF]]


@pytest.mark.parametrize("bits", range(2, 9))
def test_reversed_or_shifted_codes_are_not_taken_for_the_right_ones(bits: int) -> None:
    codes = random_codes(3, 64, bits)
    wrong = bitpack.pack(codes.view(3, -1, 8).flip(2).reshape(3, 64), bits)
    assert not torch.equal(bitpack.unpack(wrong, bits, 64), codes)
    other = 4 if bits != 4 else 8
    count = min(64, bitpack.words(64, bits) * 32 // other)
    assert not torch.equal(
        bitpack.unpack(bitpack.pack(codes, bits), other, count), codes[:, :count]
    )


@settings(deadline=None, max_examples=150)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 5),
    count=st.integers(1, 70),
    seed=st.integers(0, 999),
)
def test_words_are_those_of_the_bit_stream_and_of_the_package_and_come_back(
    bits: int, rows: int, count: int, seed: int
) -> None:
    codes = random_codes(rows, count, bits, seed)
    words = bitpack.pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, bitpack.words(count, bits))
    assert torch.equal(words, by_hand(codes, bits))
    signed_codes = (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(words, pack_to_int32(signed_codes, bits))
    assert torch.equal(bitpack.unpack(words, bits, count), codes)
    theirs = unpack_from_int32(words, bits, torch.Size((rows, count)))
    assert torch.equal(theirs, signed_codes)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("n", [1, 5, 8, 12, 32, 33])
def test_zero_points_packed_along_the_rows_are_those_of_the_package(bits: int, n: int) -> None:
    zeros = random_codes(n, 3, bits)  # [N, nG]
    ours = bitpack.pack(zeros.t().contiguous(), bits).t().contiguous()
    signed_zeros = (zeros.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(ours, pack_to_int32(signed_zeros, bits, packed_dim=0))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (5, 33)])
def test_strided_inputs_pack_and_unpack_as_contiguous_ones(
    bits: int, shape: tuple[int, int]
) -> None:
    codes = random_codes(*shape, bits)
    wide = torch.zeros(shape[0], 2 * shape[1], dtype=torch.uint8)
    wide[:, ::2] = codes
    words = bitpack.pack(codes, bits)
    for same in (codes.t().contiguous().t(), wide[:, ::2], codes.expand(*shape)):
        assert torch.equal(bitpack.pack(same, bits), words)
    assert torch.equal(bitpack.unpack(words.t().contiguous().t(), bits, shape[1]), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_column_of_words_cut_from_a_row_is_read_although_its_stride_is_odd(bits: int) -> None:
    codes = random_codes(6, 4, bits)
    column = bitpack.pack(codes, bits).view(1, 6).t()  # stride 6 along its one column
    assert column.stride() == (1, 6)
    assert torch.equal(bitpack.unpack(column, bits, 4), codes)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_rows_beyond_one_block_are_packed_alike(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(37, 50, bits)
    whole = bitpack.pack(codes, bits)
    monkeypatch.setattr(bitpack, "BLOCK_CODES", 120)  # two rows at a time
    assert torch.equal(bitpack.pack(codes, bits), whole)
    assert torch.equal(bitpack.unpack(whole, bits, 50), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_leaves_the_codes_alone_and_shares_nothing_with_them(bits: int) -> None:
    codes = random_codes(4, 32, bits)
    before = codes.clone()
    bitpack.pack(codes, bits).zero_()
    assert torch.equal(codes, before)
