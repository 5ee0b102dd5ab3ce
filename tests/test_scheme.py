"""Schemes: names, arithmetic and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.errors import BadRequest
from weightpath.scheme import GROUP_SIZES, INT8, PER_CHANNEL, Scheme

SCHEMES = st.builds(
    Scheme,
    bits=st.integers(2, 8),
    group_size=st.one_of(st.just(PER_CHANNEL), st.integers(1, 4096)),
    symmetric=st.booleans(),
    activation_bits=st.sampled_from((8, 16)),
)


@given(SCHEMES)
def test_a_scheme_is_read_back_from_its_name(scheme: Scheme) -> None:
    assert Scheme.parse(scheme.name) == scheme


def test_names_are_the_ones_that_people_write() -> None:
    assert Scheme.parse("w4g64") == Scheme(4, 64)
    assert Scheme.parse("w4a16g64") == Scheme(4, 64)
    assert Scheme.parse("w4a8g128-asym") == Scheme(4, 128, symmetric=False, activation_bits=8)
    assert Scheme.parse("w3-asym") == Scheme(3, PER_CHANNEL, symmetric=False)
    assert Scheme.parse("int8") == Scheme.parse("w8") == INT8


@pytest.mark.parametrize(
    "name",
    ["", "int4", "w4g", "W4g64", "w4g64-sym", "w44", "w4g-1", "w4a7g64", "w4g64 ", " w4", "w4g64-asym-asym",
     "w4g6.4", "q4_k", "w4g64x"],
)  # fmt: skip
def test_an_unknown_name_is_one_line_that_quotes_it(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Scheme.parse(name)
    assert f"'{name}'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["w0g64", "w1", "w9g64", "w4g0"])
def test_a_name_in_the_right_form_with_impossible_numbers_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=r"scheme: "):
        Scheme.parse(name)


@pytest.mark.parametrize(
    "fields", [{"bits": 1}, {"bits": 9}, {"bits": 4, "group_size": 0}, {"bits": 4, "group_size": -2},
               {"bits": 4, "activation_bits": 4}]
)  # fmt: skip
def test_a_scheme_out_of_range_cannot_be_built(fields: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match=r"scheme: "):
        Scheme(**fields)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("w4g128", 4.125),  # 4 + 16/128
        ("w4g64", 4.25),
        ("w4g128-asym", 4.15625),  # 4 + 20/128: a packed 4-bit zero
        ("w4g32-asym", 4.625),
        ("w3g64-asym", 3 + 19 / 64),
    ],
)
def test_bits_per_weight_are_codes_and_one_scale_and_packed_zero_a_group(
    name: str, wanted: float
) -> None:
    assert Scheme.parse(name).bits_per_weight(1024) == pytest.approx(wanted, abs=1e-12)


def test_int8_costs_one_fp32_scale_a_row() -> None:
    assert INT8.bits_per_weight(576, scale_bits=32) == 8 + 32 / 576


@given(SCHEMES, st.integers(1, 8192))
def test_groups_tile_a_row_exactly_or_are_refused_with_the_numbers(
    scheme: Scheme, columns: int
) -> None:
    if scheme.divides(columns):
        size = columns if scheme.group_size == PER_CHANNEL else scheme.group_size
        assert scheme.groups(columns) * size == columns
        return
    with pytest.raises(BadRequest) as caught:
        scheme.groups(columns)
    assert str(columns) in str(caught.value)
    assert str(scheme.group_size) in str(caught.value)


def test_the_midpoint_is_half_of_the_codes() -> None:
    for bits in range(2, 9):
        assert Scheme(bits).top_code == 2**bits - 1
        assert 2 * Scheme(bits).midpoint == Scheme(bits).top_code + 1


def test_activation_bits_change_nothing_else() -> None:
    scheme = Scheme(4, 64, symmetric=False)
    assert scheme.with_activations(8).with_activations(16) == scheme
    assert scheme.with_activations(8).bits_per_weight(128) == scheme.bits_per_weight(128)


def test_group_sizes_are_tried_from_the_cheapest() -> None:
    costs = [Scheme(4, size).bits_per_weight(1024) for size in GROUP_SIZES]
    assert costs == sorted(costs)
