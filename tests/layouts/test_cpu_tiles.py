"""The CPU tiles, proved by a read formula written out here, golden bytes, and both packers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from random_qweight import a_qweight
from weightpath.errors import BadTensor
from weightpath.kernels import cpu
from weightpath.layouts import cpu_tiles
from weightpath.layouts.cpu_tiles import CpuTiles, from_qweight, refusal, to_qweight, unpack
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, PER_CHANNEL

quick = hypothesis_settings(max_examples=60, deadline=None)
compiled = pytest.mark.skipif(
    "avx2" not in cpu.instruction_sets(), reason="this install has no compiled kernels"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def read_code(weight: CpuTiles, row: int, column: int) -> int:
    """The layout as its text says, byte by byte: nothing is shared with the packers."""
    width = 8 if weight.bits == 4 else 4
    steps = -(-weight.group_size // width)
    group_bytes = steps * 128 + 32 * weight.scale_dtype.itemsize
    tile_bytes = weight.groups * group_bytes + (64 * -(-weight.groups // 4) if weight.zeros else 0)
    group, within = divmod(column, weight.group_size)
    start = row // 32 * tile_bytes + group * group_bytes
    if weight.zeros:
        start += 64 * (group // 4 + 1)
    step, j = divmod(within, width)
    line = start + step * 128 + (64 if row % 32 >= 16 else 0)
    byte = int(weight.packed[line + 4 * (row % 16) + j % 4])
    if weight.bits == 8:
        return byte
    return byte >> 4 if j >= 4 else byte & 15


def test_four_bits_by_hand() -> None:
    codes = torch.zeros(17, 8, dtype=torch.uint8)
    codes[0] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    codes[1] = 15
    codes[16] = torch.tensor([0, 0, 0, 9, 0, 0, 0, 10])
    scales = torch.zeros(17, 1, dtype=torch.bfloat16)
    scales[0], scales[16] = 1.0, -2.0  # 0x3F80 and 0xC000
    zeros = torch.zeros(17, 1, dtype=torch.uint8)
    zeros[0], zeros[1], zeros[16] = 3, 7, 12
    packed = cpu_tiles.pack(codes, scales, zeros, 4)
    expected = bytearray(64 + 128 + 64)
    expected[0], expected[1] = 0xC3, 0x07
    expected[64:68] = bytes([0x51, 0x62, 0x73, 0x84])
    expected[68:72] = bytes([0xFF] * 4)
    expected[128 + 3] = 0xA9
    expected[192:194] = bytes([0x80, 0x3F])
    expected[192 + 32 : 192 + 34] = bytes([0x00, 0xC0])
    assert bytes(packed.tolist()) == bytes(expected)


def test_eight_bits_by_hand() -> None:
    codes = torch.full((2, 5), 128, dtype=torch.uint8)
    codes[0, 0], codes[1, 3], codes[1, 4] = 1, 255, 7
    packed = cpu_tiles.pack(codes, torch.tensor([[1.0], [0.5]]), None, 8)
    expected = bytearray(2 * 128 + 128)
    expected[0:8] = bytes([1, 128, 128, 128, 128, 128, 128, 255])
    expected[128:136] = bytes([128, 0, 0, 0, 7, 0, 0, 0])
    expected[256:264] = bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x3F])
    assert bytes(packed.tolist()) == bytes(expected)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [
        (32, 64, 32),
        (1, 32, 32),
        (33, 320, 64),
        (95, 128, 128),
        (48, 192, 64),
        (5, 100, PER_CHANNEL),
    ],
)
def test_both_packers_write_the_bytes_that_the_formula_reads(
    n: int, k: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    qweight = a_qweight(n, k, group_size, symmetric=symmetric, dtype=dtype)
    slow, fast = from_qweight(qweight), cpu.pack(qweight)
    assert torch.equal(slow.packed, fast.packed)
    assert replace(slow, packed=fast.packed) == fast
    for row, column in [(0, 0), (n - 1, k - 1), (n // 2, k // 3), (n // 3, 4), (n - 1, 7)]:
        assert read_code(slow, row, column) == int(qweight.codes[row, column])


@compiled
def test_a_byte_moved_is_seen() -> None:
    """The sabotage of the test above: the formula must disagree with lines that are swapped."""
    qweight = a_qweight(32, 64, 32)
    weight = from_qweight(qweight)
    swapped = weight.packed.clone()
    swapped[:64], swapped[64:128] = weight.packed[64:128], weight.packed[:64]
    assert not torch.equal(swapped, cpu.pack(qweight).packed)
    broken = replace(weight, packed=swapped)
    assert any(read_code(broken, r, 0) != int(qweight.codes[r, 0]) for r in range(32))


@compiled
@quick
@given(
    st.integers(1, 80),
    st.integers(1, 6),
    st.sampled_from([8, 32, 64, 128, PER_CHANNEL]),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.sampled_from([4, 8]),
)
def test_packing_round_trips(
    n: int, groups: int, group_size: int, symmetric: bool, dtype: torch.dtype, bits: int
) -> None:
    k = 13 * groups if group_size == PER_CHANNEL or bits == 8 else group_size * groups
    if bits == 8:
        group_size, symmetric = PER_CHANNEL, True
    qweight = a_qweight(n, k, group_size, bits=bits, symmetric=symmetric, dtype=dtype)
    weight = cpu.pack(qweight)
    assert torch.equal(weight.packed, from_qweight(qweight).packed)
    codes, scales, zeros = unpack(weight)
    assert torch.equal(codes, qweight.codes)
    assert torch.equal(scales, qweight.scales)
    back = to_qweight(weight)
    assert torch.equal(back.dequantize(), qweight.dequantize())
    if zeros is not None:
        assert qweight.zeros is not None
        assert torch.equal(zeros.to(torch.int16), qweight.zeros)


@compiled
def test_modules_pack_from_what_they_hold() -> None:
    from weightpath.kernels.reference import pack_nibbles

    qweight = a_qweight(40, 192, 64)
    nibbles = pack_nibbles(qweight.codes)
    fast = cpu.pack_parts(nibbles, cpu.NIBBLES, qweight.scales, None, bits=4, group_size=64)
    assert torch.equal(fast.packed, from_qweight(qweight).packed)
    eight = a_qweight(40, 30, PER_CHANNEL, bits=8, dtype=torch.float32)
    signed = (eight.codes.to(torch.int16) - 128).to(torch.int8)
    fast = cpu.pack_parts(signed, cpu.INT8, eight.scales, None, bits=8, group_size=30)
    assert torch.equal(fast.packed, from_qweight(eight).packed)


def test_bits_stored_are_those_the_text_states() -> None:
    for symmetric, wanted in ((True, 4 + 16 / 64), (False, 4 + 20 / 64)):
        weight = from_qweight(a_qweight(64, 1024, 64, symmetric=symmetric))
        assert weight.packed.numel() * 8 / (64 * 1024) == wanted


def _ordered(qweight: QWeight) -> QWeight:
    return replace(qweight, g_idx=(torch.arange(64) // 32).flip(0).to(torch.int32))


def _minimums(qweight: QWeight) -> QWeight:
    scheme = replace(qweight.scheme, symmetric=False)
    return replace(qweight, scheme=scheme, minimums=torch.zeros(8, 2))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: _ordered(a_qweight(8, 64, 32)), "column order"),
        (lambda: _minimums(a_qweight(8, 64, 32)), "float minimums"),
        (lambda: a_qweight(8, 64, 32, bits=3), "3-bit"),
        (lambda: a_qweight(8, 64, 32, bits=8), "one scale a row"),
        (lambda: a_qweight(8, 24, 4), "multiples of 8"),
        (lambda: a_qweight(8, 64, 32, dtype=torch.float64), "float64"),
        (lambda: a_qweight(1, 132_000, PER_CHANNEL, bits=8), "131000"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(make: Callable[[], QWeight], word: str) -> None:
    qweight = make()
    assert word in (refusal(qweight) or "")
    with pytest.raises(BadTensor) as caught:
        from_qweight(qweight, "layer.weight")
    assert "layer.weight" in str(caught.value)
    assert word in str(caught.value)


def test_zero_points_beyond_four_bits_are_refused() -> None:
    qweight = a_qweight(8, 64, 32, symmetric=False)
    assert qweight.zeros is not None
    qweight.zeros[3, 1] = 16
    with pytest.raises(BadTensor, match=r"0\.\.15"):
        from_qweight(qweight)


def test_int8_weights_fit_as_they_are() -> None:
    codes: Tensor = torch.randint(1, 256, (9, 11), dtype=torch.uint8)
    weight = from_qweight(QWeight(INT8, codes, torch.rand(9, 1) + 0.1))
    assert weight.group_size == 11
    assert torch.equal(unpack(weight)[0], codes)
