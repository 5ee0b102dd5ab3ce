"""Statistics of quantizing: they add up, and errors name the element."""

from __future__ import annotations

import math

import pytest
import torch

from weightpath.errors import BadTensor
from weightpath.quantize.stats import (
    BLOCK_WEIGHTS,
    QuantizeStats,
    require_finite,
    require_matrix,
    row_blocks,
)


def test_adding_adds_every_field() -> None:
    one = QuantizeStats(1, 2, 3.0, 4.0, 5, 6, 7)
    two = QuantizeStats(10, 20, 30.0, 40.0, 50, 60, 70)
    assert one + two == QuantizeStats(11, 22, 33.0, 44.0, 55, 66, 77)
    assert sum([one, two], QuantizeStats()) == one + two


def test_signal_to_noise_is_in_decibels() -> None:
    assert QuantizeStats(squared_error=1.0, squared_weight=1000.0).signal_to_noise_db == 30.0
    assert QuantizeStats(squared_error=2.0, squared_weight=2.0).signal_to_noise_db == 0.0
    assert QuantizeStats(squared_error=0.0, squared_weight=1.0).signal_to_noise_db == math.inf
    assert math.isfinite(QuantizeStats(squared_error=1.0).signal_to_noise_db)


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (7, BLOCK_WEIGHTS), (3, 2 * BLOCK_WEIGHTS), (1000, 700), (5, 3)]
)
def test_row_blocks_tile_the_rows_in_order_and_stay_small(rows: int, columns: int) -> None:
    blocks = list(row_blocks(rows, columns))
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(rows))
    assert all((stop - start) * columns <= max(BLOCK_WEIGHTS, columns) for start, stop in blocks)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_bad_element_is_named_in_row_order(value: float, dtype: torch.dtype) -> None:
    weight = torch.zeros(4, 5, dtype=dtype)
    weight[2, 3] = value
    weight[1, 4] = value
    with pytest.raises(BadTensor) as caught:
        require_finite(weight, "layers.0.up_proj.weight", first_row=100)
    message = str(caught.value)
    assert message.startswith("tensor layers.0.up_proj.weight: element [101, 4] is ")
    assert f"is {value}" in message
    assert "2 such" in message
    assert "\n" not in message


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 4), (4, 0)])
def test_only_a_matrix_with_elements_is_a_weight(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadTensor) as caught:
        require_matrix(torch.zeros(shape), "conv.weight")
    assert "conv.weight" in str(caught.value)
    assert str(shape) in str(caught.value)
