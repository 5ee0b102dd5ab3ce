"""The GPU tiles against their formula, written here apart from the packer, and back again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from random_qweight import a_qweight
from weightpath.errors import BadTensor
from weightpath.layouts import gpu_tiles
from weightpath.scheme import INT8, Scheme


def code_at(tiles: gpu_tiles.GpuTiles, row: int, column: int) -> int:
    """The code of one place, by the formula in the file's docstring."""
    block, tile, within = row // 64, row % 64 // 16, row % 16
    g, below = within % 8, within // 8
    chunk, step, right = column // 64, column % 64 // 16, column % 16 // 8
    lane = 4 * g + column % 8 // 2
    register, second = below + 2 * right, column % 2
    if tiles.bits == 4:
        word = int(tiles.codes[block, chunk, tile, lane, step])
        return word >> (4 * register + 16 * second) & 15
    word = int(tiles.codes[block, chunk, tile, step // 2, lane, 2 * (step % 2) + register // 2])
    return word >> (8 * (register % 2) + 16 * second) & 255


SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 5), st.sampled_from([32, 64, 128, 192]))


@given(shape=SHAPES, asymmetric=st.booleans(), seed=st.integers(0, 1000))
def test_four_bit_tiles_hold_every_part_at_its_place_and_give_it_back(
    shape: tuple[int, int, int], asymmetric: bool, seed: int
) -> None:
    rows, groups, size = shape
    torch.manual_seed(seed)
    codes = torch.randint(0, 16, (rows, groups * size), dtype=torch.uint8)
    scales = torch.rand(rows, groups).to(torch.bfloat16)
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8) if asymmetric else None
    tiles = gpu_tiles.from_parts(codes, scales, zeros, 4)
    again = gpu_tiles.to_parts(tiles)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert (again[2] is None) if zeros is None else torch.equal(again[2], zeros)
    for _ in range(20):
        row, column = seed % rows, (seed * 7919 + _ * 37) % (groups * size)
        assert code_at(tiles, row, column) == int(codes[row, column])
    row, group = seed % rows, seed % groups
    place = row % 64 // 16 * 16 + 2 * (row % 8) + row % 16 // 8
    assert tiles.scales[row // 64, group, place] == scales[row, group]


@given(rows=st.integers(1, 150), columns=st.integers(1, 300), seed=st.integers(0, 1000))
def test_int8_tiles_hold_every_code_at_its_place_and_give_it_back(
    rows: int, columns: int, seed: int
) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    tiles = gpu_tiles.from_parts(codes, torch.rand(rows, 1), None, 8)
    assert torch.equal(gpu_tiles.to_parts(tiles)[0], codes)
    for _ in range(20):
        row, column = seed % rows, (seed * 7919 + _ * 37) % columns
        assert code_at(tiles, row, column) == int(codes[row, column])


def test_padding_is_worth_nothing() -> None:
    codes = torch.randint(0, 16, (70, 96), dtype=torch.uint8)
    tiles = gpu_tiles.from_parts(codes, torch.ones(70, 3), None, 4)
    assert tiles.scales.shape == (2, 4, 64)
    assert not tiles.scales[:, 3].any()
    assert code_at(tiles, 0, 96) == 8
    assert code_at(tiles, 127, 0) == 8


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 64, False), INT8, Scheme(4)])
def test_a_qweight_and_its_tiles_stand_for_the_same_weight(scheme: Scheme) -> None:
    qweight = a_qweight(100, 192, scheme.group_size, bits=scheme.bits, symmetric=scheme.symmetric)
    codes, scales, zeros = gpu_tiles.to_parts(gpu_tiles.from_qweight(qweight))
    if scheme.bits == 8:
        weight = codes.view(torch.int8).float() * scales.float()
    else:
        size = 192 // scales.shape[1]
        offset = 8 if zeros is None else zeros.float().repeat_interleave(size, 1)
        weight = (codes.float() - offset) * scales.float().repeat_interleave(size, 1)
    assert torch.equal(weight, qweight.dequantize())


def test_what_the_tiles_cannot_hold_is_refused_with_the_numbers() -> None:
    assert "group size 48 of in_features 96" in str(gpu_tiles.scheme_refusal(Scheme(4, 48), 96))
    assert "3-bit" in str(gpu_tiles.scheme_refusal(Scheme(3, 32), 96))
    assert "one scale a row" in str(gpu_tiles.scheme_refusal(Scheme(8, 32), 96))
    with pytest.raises(BadTensor, match="group size 16"):
        gpu_tiles.from_qweight(a_qweight(32, 64, 16), "layers.0.weight")
