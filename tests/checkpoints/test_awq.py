"""AWQ: every layout against packers written here as plain loops, and every refusal in words."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weightpath.checkpoints import awq, awq_fast
from weightpath.checkpoints.shards import TensorInfo
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

GEMM_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PLAIN_ORDER = list(range(8))
Rows = list[list[int]]


def word(nibbles: list[int], bits: int = 32) -> int:
    """Nibbles, lowest first, as a signed integer of `bits`."""
    value = sum(nibble << (4 * index) for index, nibble in enumerate(nibbles))
    return value - (1 << bits) if value >> (bits - 1) else value


def packed(rows: Rows, order: list[int]) -> Tensor:
    """Rows of nibbles as int32 words, nibble i of word c being entry 8c + order[i]."""
    words = [
        [word([row[start + place] for place in order]) for start in range(0, len(row), 8)]
        for row in rows
    ]
    return torch.tensor(words, dtype=torch.int32)


def transposed(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def zeros_words(k: int, group_size: int) -> int:
    words, multiple = -(-(k // group_size) // 8), {64: 2, 32: 4}.get(group_size, 1)
    while words % multiple:
        words += 1
    return words


def gemm_file(codes: Rows, zeros: Rows, scales: Tensor, order: list[int] = GEMM_ORDER) -> Any:
    return {
        "qweight": packed(transposed(codes), order),
        "qzeros": packed(transposed(zeros), order),
        "scales": scales.t().contiguous(),
    }


def gemv_file(codes: Rows, zeros: Rows, scales: Tensor) -> Any:
    groups = len(zeros[0])
    padding = 8 * zeros_words(len(codes[0]), len(codes[0]) // groups) - groups
    return {
        "qweight": packed(codes, PLAIN_ORDER),
        "qzeros": packed([row + [0] * padding for row in zeros], PLAIN_ORDER),
        "scales": torch.cat([scales, scales.new_zeros(len(codes), padding)], dim=1),
    }


def fast_words(codes: Rows, eights: list[int] = GEMM_ORDER) -> Tensor:
    """The steps of AutoAWQ's pack_intweight, one list at a time."""
    pairs = [
        8 * part + 2 * index + side for index in range(4) for part in range(4) for side in (0, 1)
    ]
    shuffled = []
    for row in codes:
        spread = [row[start + place] for start in range(0, len(row), 32) for place in pairs]
        shuffled.append(
            [spread[start + place] for start in range(0, len(row), 8) for place in eights]
        )
    strips = []
    for top in range(0, len(codes), 4):
        stream: list[int] = []
        for start in range(0, len(codes[0]), 64):
            for row in shuffled[top : top + 4]:
                stream += row[start : start + 64]
        strips.append([word(stream[at : at + 4], 16) for at in range(0, len(stream), 4)])
    return torch.tensor(strips, dtype=torch.int16)


def fast_file(codes: Rows, zeros: Rows, scales: Tensor, suffix: str = "qzeros") -> Any:
    groups = len(zeros[0])
    padding = 8 * zeros_words(len(codes[0]), len(codes[0]) // groups) - groups
    offsets = -(scales.float() * torch.tensor(zeros)).to(scales.dtype)
    empty = scales.new_zeros(padding, len(codes))
    return {
        "qweight": fast_words(codes),
        suffix: torch.cat([offsets.t(), empty]),
        "scales": torch.cat([scales.t(), empty]),
    }


def some_linear(n: int, k: int, group_size: int, seed: int = 0) -> tuple[Rows, Rows, Tensor]:
    """Random codes [N][K], zeros [N][nG] and fp16 scales [N, nG], none of them 0."""
    draw = random.Random(seed)
    codes = [[draw.randrange(16) for _ in range(k)] for _ in range(n)]
    zeros = [[draw.randrange(16) for _ in range(k // group_size)] for _ in range(n)]
    scales = [[draw.uniform(1e-4, 0.2) for _ in range(k // group_size)] for _ in range(n)]
    return codes, zeros, torch.tensor(scales, dtype=torch.float16)


def said(version: str, group_size: int, zero_point: bool = True) -> awq.AwqSettings:
    return awq.settings(
        {"bits": 4, "group_size": group_size, "zero_point": zero_point, "version": version}
    )


def refusal(stated: awq.AwqSettings, tensors: dict[str, Tensor]) -> str:
    with pytest.raises(BadTensor) as caught:
        awq.from_tensors("mlp.up", stated, tensors)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(read: QWeight, codes: Rows, zeros: Rows, scales: Tensor) -> None:
    assert read.codes.tolist() == codes
    assert read.zeros is not None
    assert read.zeros.tolist() == zeros
    assert torch.equal(read.scales, scales)


# --- bytes packed by hand


def test_gemm_bytes_packed_by_hand_are_read_as_documented() -> None:
    words = [[0x75316420], [0x8ACE9BDF - (1 << 32)]]  # columns 0..7, then 15..8
    tensors = {
        "qweight": torch.tensor(words, dtype=torch.int32),
        "qzeros": torch.tensor([[0x75316420]], dtype=torch.int32),
        "scales": torch.arange(1, 9).half()[None],
    }
    read = awq.from_tensors("x", said("gemm", -1), tensors).qweight
    assert read.codes.tolist() == [[n, 15 - n] for n in range(8)]
    assert read.dequantize().tolist() == [[0, (n + 1) * (15 - 2 * n)] for n in range(8)]
    assert awq.to_tensors("x", read)["x.qweight"].numpy().tobytes().hex() == "20643175" + "df9bce8a"


def test_gemv_bytes_packed_by_hand_are_read_as_documented() -> None:
    row = [0x76543210, 0xFEDCBA98 - (1 << 32)] * 2
    tensors = {
        "qweight": torch.tensor([row], dtype=torch.int32),
        "qzeros": torch.tensor([[5, 0, 0, 0]], dtype=torch.int32),
        "scales": torch.tensor([[0.5] + [0.0] * 31], dtype=torch.float16),
    }
    read = awq.from_tensors("x", said("gemv", 32), tensors).qweight
    assert read.dequantize().tolist() == [[0.5 * (k % 16 - 5) for k in range(32)]]


def test_gemv_fast_words_packed_by_hand_are_read_as_documented() -> None:
    sixteens = [0x8080, 0x9191, 0xA2A2, 0xB3B3, 0xC4C4, 0xD5D5, 0xE6E6, 0xF7F7] * 2  # k % 16
    quarters = [0x6420] * 4 + [0x7531] * 4 + [0xECA8] * 4 + [0xFDB9] * 4  # k // 4
    words = sixteens + quarters + [0x2222] * 16 + [0x3333] * 16
    signed = [value - (1 << 16) if value >> 15 else value for value in words]
    tensors = {
        "qweight": torch.tensor([signed], dtype=torch.int16),
        "qzeros": torch.zeros(16, 4, dtype=torch.float16),
        "scales": torch.zeros(16, 4, dtype=torch.float16),
    }
    tensors["scales"][0], tensors["qzeros"][0] = 0.5, -1.5
    read = awq.from_tensors("x", said("gemv_fast", 64), tensors).qweight
    assert read.codes.tolist() == [
        [k % 16 for k in range(64)],
        [k // 4 for k in range(64)],
        [2] * 64,
        [3] * 64,
    ]
    assert read.zeros is not None
    assert read.zeros.tolist() == [[3]] * 4


# --- against the loops above, over shapes


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 16, 32, 64]), st.integers())
def test_gemm_files_of_any_shape_are_read_and_written_back_bit_for_bit(
    words: int, groups: int, group_size: int, seed: int
) -> None:
    parts = some_linear(8 * words, groups * group_size, group_size, seed)
    tensors = gemm_file(*parts)
    read = awq.from_tensors("x", said("gemm", group_size), tensors)
    assert_same(read.qweight, *parts)
    assert (read.version, read.notes) == ("gemm", ())
    written = awq.to_tensors("x", read.qweight)
    assert set(written) == {"x.qweight", "x.qzeros", "x.scales"}
    for suffix, stored in tensors.items():
        assert written[f"x.{suffix}"].dtype == stored.dtype
        assert torch.equal(written[f"x.{suffix}"], stored)


@hypothesis_settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.sampled_from([32, 64, 128]), st.integers())
def test_gemv_files_of_any_shape_are_read(n: int, groups: int, group_size: int, seed: int) -> None:
    parts = some_linear(n, groups * group_size, group_size, seed)
    read = awq.from_tensors("x", said("gemv", group_size), gemv_file(*parts))
    assert_same(read.qweight, *parts)
    assert (read.version, read.notes) == ("gemv", ())


@hypothesis_settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(32, 2), (64, 1), (128, 1)]),
    st.sampled_from([("gemv_fast", "qzeros"), ("llm-awq", "scaled_zeros")]),
    st.integers(),
)
def test_gemv_fast_and_llm_awq_files_of_any_shape_are_read(
    strips: int, many: int, group: tuple[int, int], kind: tuple[str, str], seed: int
) -> None:
    parts = some_linear(4 * strips, many * group[0] * group[1], group[0], seed)
    read = awq.from_tensors("x", said(kind[0], group[0]), fast_file(*parts, kind[1]))
    assert_same(read.qweight, *parts)
    assert read.version == kind[0]
    assert not any("config says" in note for note in read.notes)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast", "llm-awq"])
def test_one_linear_is_the_same_weight_in_every_layout(version: str) -> None:
    codes, zeros, scales = some_linear(8, 256, 64, seed=3)
    files = {
        "gemm": gemm_file(codes, zeros, scales),
        "gemv": gemv_file(codes, zeros, scales),
        "gemv_fast": fast_file(codes, zeros, scales),
        "llm-awq": fast_file(codes, zeros, scales, "scaled_zeros"),
    }
    weight = awq.from_tensors("x", said(version, 64), files[version]).qweight.dequantize()
    for n, k in ((0, 0), (3, 70), (7, 255)):
        expected = float(scales[n, k // 64]) * (codes[n][k] - zeros[n][k // 64])
        assert float(weight[n, k]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("group_size", [64, 128])
def test_whole_rows_as_groups_are_read_in_padded_layouts(group_size: int) -> None:
    parts = some_linear(4, group_size, group_size)
    for version, tensors in (("gemv", gemv_file(*parts)), ("gemv_fast", fast_file(*parts))):
        read = awq.from_tensors("x", said(version, -1), tensors).qweight
        assert_same(read, *parts)
        assert read.scheme.group_size == -1


@pytest.mark.parametrize("n", [8, 16])
def test_tensors_that_are_transposed_views_are_read_as_their_values(n: int) -> None:
    parts = some_linear(n, 64, 32)  # one word a row where n is 8: torch calls any stride contiguous
    for version, tensors in (("gemm", gemm_file(*parts)), ("gemv_fast", fast_file(*parts))):
        turned = {suffix: part.t().contiguous().t() for suffix, part in tensors.items()}
        assert_same(awq.from_tensors("x", said(version, 32), turned).qweight, *parts)


# --- sabotage: the orders are load-bearing


def test_a_gemm_file_in_plain_nibble_order_does_not_give_its_codes() -> None:
    codes, zeros, scales = some_linear(16, 64, 32)
    wrong = gemm_file(codes, zeros, scales, PLAIN_ORDER)
    read = awq.from_tensors("x", said("gemm", 32), wrong).qweight
    assert read.codes.tolist() != codes
    assert read.zeros is not None
    assert read.zeros.tolist() != zeros


def test_a_gemv_fast_file_without_its_shuffle_of_eights_does_not_give_its_codes() -> None:
    codes, zeros, scales = some_linear(4, 64, 64)
    wrong = fast_file(codes, zeros, scales) | {"qweight": fast_words(codes, PLAIN_ORDER)}
    assert awq.from_tensors("x", said("gemv_fast", 64), wrong).qweight.codes.tolist() != codes


# --- zeros


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_zero_point_is_recovered_from_every_scale_of_16_bits(dtype: torch.dtype) -> None:
    scales = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    scales = scales[torch.isfinite(scales) & (scales != 0)][:, None]
    zeros = torch.arange(16)[None]
    offsets = (-(scales.float() * zeros)).to(dtype)
    held = torch.isfinite(offsets)
    found, agrees = awq_fast.whole_zeros(scales.expand_as(offsets), offsets)
    assert bool(agrees[held].all())
    assert torch.equal(found[held].int(), zeros.expand_as(offsets)[held].int())


def test_a_scale_of_zero_leaves_the_zero_at_the_midpoint() -> None:
    zero = torch.zeros(1, 1, dtype=torch.float16)
    found, agrees = awq_fast.whole_zeros(zero, zero)
    assert found.item() == 8
    assert bool(agrees)


def test_what_a_gemv_fast_file_rounded_is_said_with_its_size() -> None:
    codes, _, scales = some_linear(4, 64, 64)
    scales = torch.full_like(scales, 1 + 2**-10)  # 15 times it needs 14 bits; fp16 has 11
    read = awq.from_tensors("x", said("gemv_fast", 64), fast_file(codes, [[15]] * 4, scales))
    exact = 15 * (1 + 2**-10)
    share = abs(float(torch.tensor(exact).half()) - exact) / (1 + 2**-10)
    assert f"by up to {share:.2g} of a step" in read.notes[0]
    powers = awq.from_tensors(
        "x", said("gemv_fast", 64), fast_file(codes, [[15]] * 4, torch.full_like(scales, 0.5))
    )
    assert powers.notes == ()


def test_offsets_that_are_no_whole_zero_are_kept_as_minimums_and_noted() -> None:
    codes, zeros, scales = some_linear(4, 128, 64)
    tensors = fast_file(codes, zeros, scales)
    tensors["qzeros"][1, 2] = -float(scales[2, 1]) * 7.5
    read = awq.from_tensors("x", said("gemv_fast", 64), tensors)
    assert read.qweight.zeros is None
    assert read.qweight.minimums is not None
    assert torch.equal(read.qweight.minimums, tensors["qzeros"][:2].t())
    assert "1 of 8 scaled zeros" in read.notes[0]
    expected = float(scales[2, 1]) * codes[2][100] + float(tensors["qzeros"][1, 2])
    assert float(read.qweight.dequantize()[2, 100]) == pytest.approx(expected, rel=1e-6)


def test_an_infinite_offset_is_refused() -> None:
    tensors = fast_file(*some_linear(4, 64, 64))
    tensors["qzeros"][0, 1] = -torch.inf
    assert "scaled zero [1, 0] is -inf" in refusal(said("gemv_fast", 64), tensors)


def test_zeros_of_eight_without_zero_points_are_a_symmetric_linear() -> None:
    codes, _, scales = some_linear(8, 64, 32)
    eights = [[8, 8]] * 8
    read = awq.from_tensors("x", said("gemm", 32, False), gemm_file(codes, eights, scales))
    assert read.qweight.scheme == Scheme(4, 32)
    assert read.qweight.zeros is None
    assert read.notes == ()
    kept = awq.from_tensors("x", said("gemm", 32, True), gemm_file(codes, eights, scales))
    assert kept.qweight.zeros is not None
    assert torch.equal(read.qweight.dequantize(), kept.qweight.dequantize())


def test_zeros_that_contradict_zero_point_false_are_used_and_noted() -> None:
    codes, zeros, scales = some_linear(8, 64, 32)
    zeros[0][0], zeros[5][1] = 0, 15
    read = awq.from_tensors("x", said("gemm", 32, False), gemm_file(codes, zeros, scales))
    assert_same(read.qweight, codes, zeros, scales)
    assert "the stored zeros are 0..15, not all 8" in read.notes[0]


def test_a_symmetric_file_without_zeros_is_read_and_noted() -> None:
    codes, _, scales = some_linear(8, 64, 32)
    tensors = gemm_file(codes, [[8, 8]] * 8, scales)
    del tensors["qzeros"]
    read = awq.from_tensors("x", said("gemm", 32, False), tensors)
    assert read.qweight.scheme.symmetric
    assert "no zeros are stored" in read.notes[0]
    assert "mlp.up.qzeros: is missing" in refusal(said("gemm", 32, True), tensors)


# --- shapes and labels


@pytest.mark.parametrize("n", [8, 16, 24, 40])
def test_outputs_that_are_no_multiple_of_32_are_read_and_written(n: int) -> None:
    parts = some_linear(n, 64, 64)
    read = awq.from_tensors("x", said("gemm", 64), gemm_file(*parts)).qweight
    assert_same(read, *parts)
    assert awq.to_tensors("x", read)["x.qweight"].shape == (64, n // 8)


@pytest.mark.parametrize("group_rows", [1, 2])
def test_a_row_of_192_at_group_size_128_is_refused_in_words(group_rows: int) -> None:
    tensors = gemm_file(*some_linear(8, 192, 192 // group_rows))
    message = refusal(said("gemm", 128), tensors)
    assert "in_features 192, which is not a multiple of group size 128" in message
    assert "quantize it again with a group size that divides it" in message


def test_a_wrong_group_size_is_refused_with_the_one_that_fits() -> None:
    message = refusal(said("gemm", 128), gemm_file(*some_linear(8, 256, 64)))
    assert message.startswith("tensor mlp.up.scales: has shape (4, 8), gemm [8, 256]")
    assert "wants (2, 8); group_size 64 would fit" in message


def test_scales_beyond_the_groups_of_a_padded_file_are_refused() -> None:
    tensors = gemv_file(*some_linear(4, 512, 128))
    assert awq.from_tensors("x", said("gemv", 128), tensors).qweight.scales.shape == (4, 4)
    message = refusal(said("gemv", 256), tensors)
    assert "scales of 4 groups, in_features 512 at group size 256 has 2" in message
    assert "group_size 128 would fit" in message
    fast = fast_file(*some_linear(4, 512, 128))
    assert "group_size 128 would fit" in refusal(said("gemv_fast", 256), fast)


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("gemm", "gemv"),
        ("gemv", "gemm"),
        ("gemm", "gemv_fast"),
        ("gemv_fast", "llm-awq"),
        ("llm-awq", "gemm"),
    ],
)
def test_a_label_that_the_shapes_contradict_is_noted_and_the_shapes_win(
    label: str, version: str
) -> None:
    codes, zeros, scales = some_linear(16, 256, 64)
    files = {
        "gemm": gemm_file(codes, zeros, scales),
        "gemv": gemv_file(codes, zeros, scales),
        "gemv_fast": fast_file(codes, zeros, scales),
        "llm-awq": fast_file(codes, zeros, scales, "scaled_zeros"),
    }
    read = awq.from_tensors("x", said(label, 64), files[version])
    assert_same(read.qweight, codes, zeros, scales)
    assert read.version == version
    assert read.notes[0] == (
        f"x: the config says version {label}, the tensors are {version}; read as {version}"
    )


def test_gptq_shapes_under_an_awq_label_are_named() -> None:
    tensors = {
        "qweight": torch.zeros(32, 64, dtype=torch.int32),
        "qzeros": torch.zeros(2, 8, dtype=torch.int32),
        "scales": torch.ones(2, 64, dtype=torch.float16),
    }
    assert "these are GPTQ's shapes" in refusal(said("gemm", 128), tensors)


def test_the_layout_is_known_from_a_header_alone() -> None:
    shapes = {
        "qweight": ((11008, 4096), torch.int16),
        "scaled_zeros": ((32, 44032), torch.float16),
        "scales": ((32, 44032), torch.float16),
    }
    header = {
        suffix: TensorInfo(f"x.{suffix}", shape, dtype, 0)
        for suffix, (shape, dtype) in shapes.items()
    }
    found = awq.layout_of("x", said("gemm", 128), header)
    assert (found.version, found.out_features, found.in_features) == ("llm-awq", 44032, 4096)
    assert (found.groups, found.zeros_suffix) == (32, "scaled_zeros")
    assert len(found.notes) == 1


def test_layouts_that_do_not_exist_are_refused() -> None:
    small = fast_file(*some_linear(4, 64, 16))
    assert "group size 16, gemv_fast is defined for 32, 64" in refusal(said("gemv_fast", 16), small)
    odd = fast_file(*some_linear(4, 64, 32)) | {"qweight": torch.zeros(1, 96, dtype=torch.int16)}
    assert "in_features 96, gemv_fast needs a multiple of 64" in refusal(said("gemv_fast", 32), odd)


@pytest.mark.parametrize(
    ("suffix", "value", "words"),
    [
        ("qweight", None, "mlp.up.qweight: is missing"),
        ("scales", None, "mlp.up.scales: is missing"),
        ("qweight", torch.zeros(64, 1), "mlp.up.qweight: is torch.float32"),
        ("qweight", torch.zeros(0, 1, dtype=torch.int32), "has shape (0, 1)"),
        ("qweight", torch.zeros(2, 64, 1, dtype=torch.int32), "has shape (2, 64, 1)"),
        ("qzeros", torch.zeros(2, 1, dtype=torch.float16), "mlp.up.qzeros: is torch.float16"),
        ("qzeros", torch.zeros(2, 2, dtype=torch.int32), "mlp.up.qzeros: has shape (2, 2)"),
        ("scales", torch.ones(2, 8, dtype=torch.int32), "mlp.up.scales: is torch.int32"),
        ("scales", torch.full((2, 8), torch.nan).half(), "scale [0, 0] is nan"),
    ],
)
def test_damage_is_refused_by_the_tensors_name(
    suffix: str, value: Tensor | None, words: str
) -> None:
    tensors = gemm_file(*some_linear(8, 64, 32))
    if value is None:
        del tensors[suffix]
    else:
        tensors[suffix] = value
    assert words in refusal(said("gemm", 32), tensors)


# --- writing


def a_qweight(scheme: Scheme, n: int = 8, k: int = 64) -> QWeight:
    codes = torch.randint(0, scheme.top_code + 1, (n, k), dtype=torch.uint8)
    shape = (n, scheme.groups(k))
    zeros = None if scheme.symmetric else torch.randint(0, 16, shape, dtype=torch.int16)
    return QWeight(scheme, codes, torch.rand(shape).half() + 0.01, zeros)


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, -1), Scheme(4, 64, symmetric=False)])
def test_a_plan_is_what_is_written(scheme: Scheme) -> None:
    written = awq.to_tensors("x", a_qweight(scheme))
    plan = {part.name: (part.dtype, part.shape) for part in awq.planned("x", scheme, (8, 64))}
    assert plan == {name: (part.dtype, tuple(part.shape)) for name, part in written.items()}


def test_a_symmetric_linear_is_written_with_zeros_of_eight_and_read_back() -> None:
    qweight = a_qweight(Scheme(4, 32))
    written = awq.to_tensors("x", qweight)
    assert set(written["x.qzeros"].flatten().tolist()) == {-0x77777778}  # 0x88888888
    bare = {name.removeprefix("x."): tensor for name, tensor in written.items()}
    read = awq.from_tensors("x", said("gemm", 32, False), bare).qweight
    assert read.scheme == qweight.scheme
    assert torch.equal(read.codes, qweight.codes)
    assert torch.equal(read.scales, qweight.scales)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minimums": torch.zeros(8, 2), "zeros": None}, "float minimums cannot be stored"),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, "a column order cannot be stored"),
        ({"zeros": torch.full((8, 2), 16, dtype=torch.int16)}, "has zeros 16..16, AWQ holds 0..15"),
        ({"zeros": torch.full((8, 2), -1, dtype=torch.int16)}, "has zeros -1..-1"),
        ({"codes": torch.full((8, 64), 16, dtype=torch.uint8)}, "code 16 exceeds 15"),
        ({"scales": torch.full((8, 2), 7e4)}, "has scales up to 7e+04, fp16 ends at 65504"),
        ({"scales": torch.full((8, 2), torch.nan)}, "scale [0, 0] is nan"),
        ({"scales": torch.full((8, 2), 0.1)}, "torch.float32 scales change by up to 0.000244"),
    ],
)
def test_what_awq_cannot_hold_is_not_written(change: dict[str, Any], words: str) -> None:
    qweight = replace(a_qweight(Scheme(4, 32, symmetric=False)), **change)
    with pytest.raises(BadTensor, match=r"mlp\.up") as caught:
        awq.to_tensors("mlp.up", qweight)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "n", "words"),
    [
        (Scheme(8, 32), 8, "is 8-bit, AWQ stores 4 bits"),
        (Scheme(3, 32), 8, "is 3-bit"),
        (Scheme(4, 32), 12, "out_features 12 is not a multiple of 8"),
    ],
)
def test_other_bits_and_odd_outputs_are_refused_before_anything_is_packed(
    scheme: Scheme, n: int, words: str
) -> None:
    for attempt in (
        lambda: awq.planned("x", scheme, (n, 64)),
        lambda: awq.to_tensors("x", a_qweight(scheme, n)),
    ):
        with pytest.raises(BadTensor) as caught:
            attempt()
        assert words in str(caught.value)


def test_scales_that_fp16_rounds_are_written_only_when_loss_is_allowed() -> None:
    qweight = a_qweight(Scheme(4, 32))
    wide = replace(qweight, scales=qweight.scales.float() * (1 + 2**-14))
    with pytest.raises(BadTensor, match="allow a lossy conversion"):
        awq.to_tensors("x", wide)
    written = awq.to_tensors("x", wide, lossy=True)
    assert torch.equal(written["x.scales"], wide.scales.half().t())
    over = replace(qweight, scales=torch.full((8, 2), 7e4))
    with pytest.raises(BadTensor, match="fp16 ends at 65504"):
        awq.to_tensors("x", over, lossy=True)


def test_bf16_scales_within_fp16_range_are_written_exactly() -> None:
    qweight = a_qweight(Scheme(4, 32))
    brain = replace(qweight, scales=qweight.scales.bfloat16())
    written = awq.to_tensors("x", brain)["x.scales"]
    assert torch.equal(written.float(), brain.scales.float().t())


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_packing_and_unpacking_take_as_many_operators_for_any_size() -> None:
    counts = []
    for size in (128, 4096):
        qweight = a_qweight(Scheme(4, 64, symmetric=False), n=size, k=size)
        with _Operators() as operators:
            written = awq.to_tensors("x", qweight)
            bare = {name.removeprefix("x."): part for name, part in written.items()}
            read = awq.from_tensors("x", said("gemm", 64), bare).qweight
        assert torch.equal(read.codes, qweight.codes)
        counts.append(operators.count)
    assert counts[0] == counts[1]
    assert counts[0] < 200


def test_the_compressed_tensors_converter_reads_the_same_integers() -> None:
    peer = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    tensors = gemm_file(*some_linear(24, 128, 64))
    read = awq.from_tensors("x", said("gemm", 64), tensors).qweight
    converter = peer.AutoAWQConverter(group_size=64)
    codes, scales, zeros = converter._convert_gemm_module(
        tensors["qweight"], tensors["scales"], tensors["qzeros"]
    )
    assert read.zeros is not None
    assert torch.equal(read.codes.int() - 8, codes.int())
    assert torch.equal(read.zeros.int() - 8, zeros.int())
    assert torch.equal(read.scales, scales)


# --- config


def test_both_spellings_of_the_config_are_read_alike() -> None:
    modern = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
              "version": "gemm", "modules_to_not_convert": ["visual"]}  # fmt: skip
    legacy = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM",
              "modules_to_not_convert": ["visual"]}  # fmt: skip
    assert awq.settings(modern) == awq.AwqSettings(4, 64, "gemm", True, ("visual",))
    assert awq.settings(legacy) == awq.settings(modern)
    assert awq.recognise(modern, ()) == "quant_method awq"
    assert awq.recognise(legacy, ()) == "the keys w_bit and q_group_size"
    assert awq.recognise({}, ["a.scaled_zeros"]) == "tensors named scaled_zeros"
    assert awq.recognise({"quant_method": "gptq"}, ["a.scaled_zeros"]) is None
    assert awq.recognise({}, ["a.qweight", "a.qzeros"]) is None


@pytest.mark.parametrize(
    ("extra", "version"),
    [
        ({}, "gemm"),
        ({"version": None}, "gemm"),
        ({"version": "GEMV"}, "gemv"),
        ({"version": "gemv_fast"}, "gemv_fast"),
        ({"format": "llm-awq"}, "llm-awq"),
        ({"version": "gemv", "format": "gemm"}, "gemv"),
        ({"version": "gemm", "backend": "llm-awq"}, "llm-awq"),
    ],
)
def test_versions_are_read_where_writers_put_them(extra: dict[str, Any], version: str) -> None:
    assert awq.settings({"group_size": 128} | extra).version == version


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"version": "marlin"}, "AWQ version 'marlin' is not read"),
        ({"version": 7}, "AWQ version 7 is not read"),
        ({"bits": 8}, "AWQ with 8 bits"),
        ({"bits": 4, "w_bit": 3}, "bits is 4 and w_bit is 3"),
        ({"q_group_size": 64}, "group_size is 128 and q_group_size is 64"),
        ({"group_size": None}, "group_size is None"),
        ({"group_size": True}, "group_size is True"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"zero_point": "yes"}, "zero_point is 'yes'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is not a list of names"),
        ({"modules_to_not_convert": [1]}, "modules_to_not_convert is not a list of names"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        awq.settings({"bits": 4, "group_size": 128} | extra, "model/config.json")
    assert str(caught.value).startswith(f"model/config.json: {words}; ")
    assert "\n" not in str(caught.value)


def test_the_config_that_is_written_is_read_here_and_by_transformers() -> None:
    from transformers.utils.quantization_config import AwqConfig

    config = json.loads(json.dumps(awq.quantization_config(64, False, ["visual", "lm_head"])))
    assert awq.settings(config) == awq.AwqSettings(4, 64, "gemm", False, ("lm_head", "visual"))
    theirs = AwqConfig.from_dict(config)
    assert isinstance(theirs, AwqConfig)
    assert (theirs.bits, theirs.group_size, theirs.zero_point) == (4, 64, False)
    assert (theirs.format, theirs.modules_to_not_convert) == ("gemm", ["lm_head", "visual"])
    assert {"bits", "group_size", "zero_point", "quant_method"} <= set(config)  # vLLM's required
    assert awq.quantization_config(-1, True, ())["modules_to_not_convert"] is None
