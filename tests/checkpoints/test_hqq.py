"""HQQ: bytes by hand, an independent reader, both axes, and hostile files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints import hqq
from weightpath.errors import BadTensor
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

FIELDS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
PACKING = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def text(value: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)


def stored(
    packed: Tensor, scale: Tensor, zero: Tensor, shape: tuple[int, int], **changes: Any
) -> dict[str, Tensor]:
    """A linear as hqq's state_dict encodes it for safetensors."""
    said: dict[str, Any] = {"nbits": 4, "group_size": 4, "axis": 1, "view_as_float": False}
    said |= changes
    tensors = {"W_q": packed, "scale": scale, "zero": zero, "shape": torch.tensor(shape)}
    for key, value in said.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, str):
            tensors[key] = text(value)
        elif value is not None:
            kind = torch.uint8 if isinstance(value, bool) else None
            kind = torch.float32 if isinstance(value, float) else kind or torch.int32
            tensors[key] = torch.tensor(value, dtype=kind)
    return tensors


def scalar_weight(tensors: dict[str, Tensor], bits: int, size: int, axis: int) -> list[list[float]]:
    """(q - zero) * scale, code by code: field f of packed row p is row f * P + p."""
    n, k = tensors["shape"].tolist()
    words, fields = tensors["W_q"].tolist(), FIELDS[bits]
    scale, zero = tensors["scale"].flatten().tolist(), tensors["zero"].flatten().tolist()
    top = 27 if bits == 3 else 8 - bits
    out = []
    for row in range(n):
        line = []
        for column in range(k):
            flat, groups = row * k + column, n * k // size
            at, inside = divmod(flat, size) if axis == 1 else divmod(flat, groups)
            group = at if axis == 1 else inside
            field, place = divmod(at, len(words))
            assert field < fields
            code = words[place][inside] >> (top - bits * field) & ((1 << bits) - 1)
            line.append((code - zero[group]) * scale[group])
        out.append(line)
    return out


def packed_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes [R, C] packed in runs of rows, written from hqq's description of it."""
    fields = FIELDS[bits]
    rows = -(-codes.shape[0] // fields) * fields
    padded = torch.zeros(rows, codes.shape[1], dtype=torch.int64)
    padded[: codes.shape[0]] = codes
    top = 27 if bits == 3 else 8 - bits
    runs = padded.view(fields, rows // fields, -1)
    words = torch.zeros(runs.shape[1:], dtype=torch.int64)
    for field in range(fields):
        words += runs[field] << (top - bits * field)
    return words.to(torch.int32 if bits == 3 else torch.uint8)


# --- bytes by hand ----------------------------------------------------------------------------


def golden(**changes: Any) -> dict[str, Tensor]:
    """[2, 8] in 4 groups of 4: codes 0..3, 4..7 / 8..11, 12..15; rows 0, 1 in the high nibbles."""
    packed = torch.tensor([[0x08, 0x19, 0x2A, 0x3B], [0x4C, 0x5D, 0x6E, 0x7F]], dtype=torch.uint8)
    scale = torch.tensor([[1.0], [0.5], [2.0], [0.25]], dtype=torch.float16)
    zero = torch.tensor([[0.5], [4.0], [8.25], [15.0]], dtype=torch.float16)
    return stored(packed, scale, zero, (2, 8)) | stored(packed, scale, zero, (2, 8), **changes)


GOLDEN_WEIGHT = [
    [-0.5, 0.5, 1.5, 2.5, 0.0, 0.5, 1.0, 1.5],
    [-0.5, 1.5, 3.5, 5.5, -0.75, -0.5, -0.25, 0.0],
]


def test_bytes_packed_by_hand_are_read_as_integers_with_float_minimums() -> None:
    got = hqq.from_tensors("m", golden())
    assert not got.lossy
    assert got.qweight is not None
    assert got.qweight.codes.tolist() == [list(range(8)), list(range(8, 16))]
    assert got.qweight.scheme == Scheme(4, 4, symmetric=False)
    assert got.qweight.minimums is not None
    assert got.qweight.minimums.tolist() == [[-0.5, -2.0], [-16.5, -3.75]]
    assert got.weight().tolist() == GOLDEN_WEIGHT
    assert "2 of 4 zero points are not whole" in got.notes[0]


def test_sabotage_neighbours_in_a_byte_are_another_weight() -> None:
    pairs = torch.arange(16, dtype=torch.uint8).view(4, 2, 2)
    adjacent = (pairs[..., 0] << 4 | pairs[..., 1]).view(2, 4)
    got = hqq.from_tensors("m", golden() | {"W_q": adjacent})
    assert got.weight().tolist() != GOLDEN_WEIGHT


def test_sabotage_the_first_half_in_the_low_nibbles_is_another_weight() -> None:
    packed = golden()["W_q"]
    got = hqq.from_tensors("m", golden() | {"W_q": packed << 4 | packed >> 4})
    assert got.weight().tolist() != GOLDEN_WEIGHT


def test_whole_zero_points_become_integer_zeros_and_middle_ones_none() -> None:
    zero = torch.tensor([[0.0], [4.0], [8.0], [15.0]], dtype=torch.float16)
    got = hqq.from_tensors("m", golden() | {"zero": zero})
    assert got.qweight is not None
    assert got.qweight.zeros is not None
    assert got.qweight.zeros.tolist() == [[0, 4], [8, 15]]
    assert got.notes == ()
    same = hqq.from_tensors("m", golden() | {"zero": torch.full((4, 1), 8.0)})
    assert same.qweight is not None
    assert same.qweight.scheme.symmetric


def test_a_3_bit_word_by_hand_has_ten_rows_from_bit_27_down_and_the_rest_is_padding() -> None:
    word = sum(code << shift for code, shift in ((5, 27), (1, 24), (7, 21), (2, 18)))
    scale, zero = torch.ones(4, 1), torch.zeros(4, 1)
    packed = torch.full((1, 8), word, dtype=torch.int32)
    tensors = stored(packed, scale, zero, (4, 8), nbits=3, group_size=8, packing="3bit_32")
    got = hqq.from_tensors("m", tensors)
    assert got.weight().tolist() == [[5.0] * 8, [1.0] * 8, [7.0] * 8, [2.0] * 8]


def test_1_bit_codes_are_held_as_2_bit_ones() -> None:
    packed = torch.tensor([[0b10000001] * 4], dtype=torch.uint8)
    tensors = stored(packed, torch.ones(8, 1), torch.full((8, 1), 0.5), (8, 4), nbits=1)
    got = hqq.from_tensors("m", tensors)
    assert got.qweight is not None
    assert got.qweight.scheme == Scheme(2, -1, symmetric=False)
    assert got.weight()[:, 0].tolist() == [0.5, *[-0.5] * 6, 0.5]


# --- against the formula ----------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 8]),
    axis=st.sampled_from([0, 1]),
    n=st.sampled_from([8, 16, 24]),
    k=st.sampled_from([8, 16, 24, 40]),
    size=st.sampled_from([8, 16]),
    whole=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_bits_axis_and_shape_is_the_published_formula(
    bits: int, axis: int, n: int, k: int, size: int, whole: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = n * k // size
    if axis == 1 and groups % FIELDS[bits] and bits != 3:
        groups, n = groups * 8, n * 8  # hqq cannot pack an uneven number of rows
    sides = (groups, size) if axis == 1 else (size, groups)
    each = (groups, 1) if axis == 1 else (1, groups)
    codes = torch.randint(0, 1 << bits, sides, generator=generator)
    zero = torch.rand(each, generator=generator) * (1 << bits)
    tensors = stored(
        packed_rows(codes, bits),
        (torch.rand(each, generator=generator) + 0.1).half(),
        (zero.floor() if whole else zero).half(),
        (n, k),
        nbits=bits,
        group_size=size,
        axis=axis,
        packing=PACKING[bits],
    )
    got = hqq.from_tensors("m", tensors)
    wanted = torch.tensor(scalar_weight(tensors, bits, size, axis), dtype=torch.float64)
    torch.testing.assert_close(got.weight().double(), wanted, rtol=3e-7, atol=1e-5)
    assert got.lossy == (axis == 0 or k % size != 0)
    if whole and not got.lossy:
        assert got.qweight is not None
        assert got.qweight.minimums is None
        assert torch.equal(got.weight(), wanted.float())


def test_axis_0_is_read_as_floats_and_labelled_lossy() -> None:
    packed = packed_rows(torch.arange(16).view(8, 2), 4)
    tensors = stored(
        packed, torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 1.5]]), (2, 8),
        group_size=8, axis=0,
    )  # fmt: skip
    got = hqq.from_tensors("m", tensors)
    assert got.lossy
    assert got.qweight is None
    assert got.floats is not None
    assert got.floats.dtype == torch.float32
    assert got.floats[0].tolist() == [-0.5, -1.0, 1.5, 3.0, 3.5, 7.0, 5.5, 11.0]
    assert "axis is 0" in got.notes[0]


def test_groups_that_cross_rows_are_read_as_floats_and_labelled_lossy() -> None:
    codes = torch.arange(24).view(2, 12) % 16  # [4, 6] in groups of 12
    tensors = stored(
        packed_rows(codes, 4), torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1), (4, 6),
        group_size=12,
    )  # fmt: skip
    got = hqq.from_tensors("m", tensors)
    assert got.lossy
    assert got.weight()[1].tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert got.weight()[2].tolist() == [24.0, 26.0, 28.0, 30.0, 0.0, 2.0]
    assert "groups of 12 do not divide 6" in got.notes[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [4, 3])
def test_view_as_float_holds_the_same_bytes(bits: int, dtype: torch.dtype) -> None:
    codes = torch.arange(32).view(4, 8) % (1 << bits)
    packed = packed_rows(codes, bits)
    said: dict[str, Any] = {"nbits": bits, "group_size": 8}
    plain = stored(packed, torch.ones(4, 1), torch.zeros(4, 1), (4, 8), **said)
    viewed = stored(
        packed.view(dtype), torch.ones(4, 1), torch.zeros(4, 1), (4, 8), view_as_float=True, **said
    )
    assert torch.equal(hqq.from_tensors("m", viewed).weight(), codes.float())
    assert torch.equal(hqq.from_tensors("m", plain).weight(), codes.float())


def test_ternary_5_and_6_bit_weights_are_read_as_they_are_packed() -> None:
    ternary = stored(
        packed_rows(torch.tensor([[0, 1, 2, 0]] * 4), 2),
        torch.ones(4, 1), torch.ones(4, 1), (4, 4),
        nbits=1.58, packing="2bit_u8",
    )  # fmt: skip
    assert hqq.from_tensors("m", ternary).weight()[0].tolist() == [-1.0, 0.0, 1.0, -1.0]
    five = stored(
        torch.tensor([[0, 31, 7, 16]], dtype=torch.uint8),
        torch.ones(1, 1), torch.ones(1, 1), (1, 4),
        nbits=5, packing="8bit_u8",
    )  # fmt: skip
    got = hqq.from_tensors("m", five)
    assert got.qweight is not None
    assert got.qweight.scheme.bits == 5
    assert got.weight()[0].tolist() == [-1.0, 30.0, 6.0, 15.0]
    five["W_q"] = five["W_q"] + 1
    with pytest.raises(BadTensor, match=r"m\.W_q: holds code 32, 5 bits end at 31"):
        hqq.from_tensors("m", five)


# --- hostile files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"W_q": None}, ["m.W_q", "missing"]),
        ({"scale": None}, ["m.scale", "missing"]),
        ({"zero": None}, ["m.zero", "missing"]),
        ({"nbits": None}, ["m.nbits", "missing"]),
        ({"shape": None}, ["m.shape", "missing"]),
        ({"axis": None}, ["m.axis", "missing"]),
        ({"W_q": torch.zeros(2, 4)}, ["m.W_q", "float32", "uint8"]),
        ({"W_q": torch.zeros(3, 4, dtype=torch.uint8)}, ["m.W_q", "(3, 4)", "(2, 4)"]),
        ({"scale": torch.ones(4)}, ["m.scale", "(4,)", "(4, 1)"]),
        ({"scale": torch.ones(1, 4)}, ["m.scale", "(1, 4)"]),
        ({"scale": torch.full((4, 1), float("inf"))}, ["m.scale", "inf"]),
        ({"zero": torch.full((4, 1), float("nan"))}, ["m.zero", "nan"]),
        ({"zero": torch.ones(4, 1, dtype=torch.uint8)}, ["m.zero", "uint8"]),
        ({"shape": torch.tensor([1 << 40, 1 << 40])}, ["m.W_q", "(2, 4)"]),
        ({"shape": torch.tensor([2, 0])}, ["wanted axis 0 or 1 and sizes above 0"]),
        ({"shape": torch.tensor([2, 8, 1])}, ["m.shape", "(3,)"]),
        ({"shape": torch.tensor([2.0, 8.0])}, ["m.shape", "float32"]),
        ({"shape": torch.tensor([3, 7])}, ["m.group_size", "is 4", "3 * 7"]),
        ({"shape": torch.tensor([3, 4])}, ["m.W_q", "3 rows of codes, packed 2 to a byte"]),
        ({"nbits": torch.tensor(7)}, ["m.nbits", "is 7"]),
        ({"nbits": torch.tensor(float("nan"))}, ["m.nbits"]),
        ({"nbits": torch.tensor([4, 4])}, ["m.nbits", "holds 2 numbers"]),
        ({"axis": torch.tensor(2)}, ["m.axis", "is 2"]),
        ({"group_size": torch.tensor(0)}, ["group_size 0"]),
        ({"group_size": torch.tensor(2.5)}, ["group_size 2.5"]),
        ({"packing": text("8bit_u8")}, ["m.packing", "'8bit_u8'", "4bit_u8"]),
        ({"packing": text("x" * 99)}, ["m.packing", "99 characters"]),
        ({"packing": torch.tensor(4)}, ["m.packing", "int64"]),
        ({"quant_scale": torch.tensor(1, dtype=torch.uint8)}, ["quant_scale", "quantized scales"]),
        ({"quant_zero": torch.tensor(True)}, ["m.quant_zero", "hqq after 0.1.8"]),
        ({"view_as_float": torch.tensor(True)}, ["m.W_q", "uint8"]),
        (
            {"view_as_float": torch.tensor(True), "W_q": torch.zeros(2, 4)},
            ["m.W_q", "(2, 4)", "(2, 1)"],
        ),
    ],
)  # fmt: skip
def test_a_malformed_linear_is_one_line_with_the_part_and_the_numbers(
    change: dict[str, Tensor | None], words: list[str]
) -> None:
    tensors = {key: value for key, value in (golden() | change).items() if value is not None}
    with pytest.raises(BadTensor) as caught:
        hqq.from_tensors("m", tensors)
    message = str(caught.value)
    assert message.startswith("tensor m")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_text_that_is_code_is_compared_and_never_run() -> None:
    bomb = text("exec('raise SystemExit')")
    got = hqq.from_tensors("m", golden() | {"compute_dtype": bomb, "unpack_view_dtype": bomb})
    assert got.weight().tolist() == GOLDEN_WEIGHT
    with pytest.raises(BadTensor, match=r"exec\('raise SystemExit'\)"):
        hqq.from_tensors("m", golden() | {"packing": bomb})


def test_it_is_recognised_by_its_config_or_its_names() -> None:
    assert hqq.recognise({"quant_method": "hqq"}, []) == "quant_method hqq"
    assert hqq.recognise({}, ["a.W_q", "a.scale"]) == "a tensor named a.W_q"
    assert hqq.recognise({}, ["a.weight"]) is None
