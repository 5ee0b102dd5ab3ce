"""The AWQ kernel layout, proved by its read formula written out here value by value."""

from __future__ import annotations

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

from weightpath.checkpoints import awq
from weightpath.errors import BadRequest, BadTensor
from weightpath.layouts.awq_kernel import (
    HF_AWQ_PACK_ORDER,
    KernelAwq,
    awq_zeros_w,
    from_qweight,
    kernel_refuses,
    layout_refuses,
    repack_hf_awq_for_kernel,
)
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SHAPES = [(1152, 64, 128), (512, 64, 64), (2048, 64, 128), (1536, 128, 64)]
"""in_features, out_features, group size."""
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Rows = list[list[int]]


def hf_words(rows: Rows, order: list[int]) -> Tensor:
    """HF AWQ words of rows [R][N]: nibble i of word c is column 8c + order[i]."""
    words = []
    for row in rows:
        line = []
        for first in range(0, len(row), 8):
            value = 0
            for index, place in enumerate(order):
                value += row[first + place] * 16**index
            line.append(value - 2**32 if value >= 2**31 else value)
        words.append(line)
    return torch.tensor(words, dtype=torch.int32)


def some_linear(k: int, n: int, group_size: int, seed: int = 0) -> tuple[Rows, Rows, Tensor]:
    """Codes [K][N], zeros [nG][N] and scales fp16 [nG, N], as an HF file orders them."""
    draw = random.Random(seed)
    codes = [[draw.randrange(16) for _ in range(n)] for _ in range(k)]
    zeros = [[draw.randrange(16) for _ in range(n)] for _ in range(k // group_size)]
    scales = [[draw.uniform(1e-4, 0.2) for _ in range(n)] for _ in range(k // group_size)]
    return codes, zeros, torch.tensor(scales, dtype=torch.float16)


def repacked(
    codes: Rows, zeros: Rows, scales: Tensor, group_size: int, order: list[int] = ORDER
) -> KernelAwq:
    return repack_hf_awq_for_kernel(
        hf_words(codes, order),
        hf_words(zeros, order),
        scales,
        len(codes),
        len(codes[0]),
        group_size,
    )


def nibble(words: list[int], index: int) -> int:
    """Nibble index % 8 of word index // 8: the kernel's way of reading codes and zeros."""
    return (words[index // 8] & 0xFFFFFFFF) >> (4 * (index % 8)) & 15


def kernel_weight(buffers: KernelAwq, n: int, k: int, group_size: int) -> list[list[float]]:
    """Every weight [N][K] by the kernel's read formula: integer subtraction, then the scale."""
    words, zeros = buffers.weight.tolist(), buffers.zeros.tolist()
    scales = buffers.scales.float().tolist()
    weight = []
    for row in range(n):
        line = []
        for column in range(k):
            group = column // group_size
            step = nibble(words[row], column) - nibble(zeros[row], group)
            line.append(scales[row][group] * step)
        weight.append(line)
    return weight


def plain_weight(codes: Rows, zeros: Rows, scales: Tensor, group_size: int) -> list[list[float]]:
    steps = scales.float().tolist()
    return [
        [
            steps[k // group_size][n] * (codes[k][n] - zeros[k // group_size][n])
            for k in range(len(codes))
        ]
        for n in range(len(codes[0]))
    ]


@pytest.mark.parametrize(("k", "n", "group_size"), SHAPES)
def test_the_kernels_read_formula_gives_the_checkpoints_weights(
    k: int, n: int, group_size: int
) -> None:
    parts = some_linear(k, n, group_size)
    buffers = repacked(*parts, group_size)
    width = awq_zeros_w(k, group_size)
    assert buffers.weight.shape == (n, k // 8)
    assert buffers.zeros.shape == (n, width)
    assert buffers.scales.shape == (n, 8 * width)
    assert (buffers.weight.dtype, buffers.zeros.dtype) == (torch.int32, torch.int32)
    assert buffers.scales.dtype == torch.float16
    assert all(part.is_contiguous() for part in (buffers.weight, buffers.zeros, buffers.scales))
    assert kernel_weight(buffers, n, k, group_size) == plain_weight(*parts, group_size)


@pytest.mark.parametrize(("k", "n", "group_size"), SHAPES)
def test_padding_is_zero(k: int, n: int, group_size: int) -> None:
    buffers = repacked(*some_linear(k, n, group_size), group_size)
    groups, width = k // group_size, awq_zeros_w(k, group_size)
    assert bool((buffers.scales[:, :groups] != 0).all())
    assert not bool(buffers.scales[:, groups:].any())
    padding = [nibble(row, g) for row in buffers.zeros.tolist() for g in range(groups, 8 * width)]
    assert len(padding) == n * (8 * width - groups)
    assert not any(padding)


@pytest.mark.parametrize(("k", "n", "group_size"), SHAPES)
def test_a_checkpoint_in_plain_nibble_order_does_not_give_the_right_codes(
    k: int, n: int, group_size: int
) -> None:
    codes, zeros, scales = some_linear(k, n, group_size)
    buffers = repacked(codes, zeros, scales, group_size, order=list(range(8)))
    words = buffers.weight.tolist()
    wrong = sum(nibble(words[row], 0) != codes[0][row] for row in range(n))
    assert wrong > n // 4
    assert kernel_weight(buffers, n, k, group_size) != plain_weight(
        codes, zeros, scales, group_size
    )


@hypothesis_settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 3), st.sampled_from([64, 128]), st.integers())
def test_any_shape_that_is_not_refused_reads_back(
    groups: int, words: int, group_size: int, seed: int
) -> None:
    k, n = groups * group_size, 8 * words
    parts = some_linear(k, n, group_size, seed)
    buffers = repacked(*parts, group_size)
    assert kernel_weight(buffers, n, k, group_size) == plain_weight(*parts, group_size)


def test_bytes_packed_by_hand_are_laid_out_as_documented() -> None:
    qweight = torch.zeros(128, 1, dtype=torch.int32)
    qweight[0, 0], qweight[9, 0] = 0x75316420, 0x75316420  # columns 0..7
    buffers = repack_hf_awq_for_kernel(
        qweight,
        torch.tensor([[0x75316420]], dtype=torch.int32),
        torch.arange(1, 9).half()[None],
        in_features=128,
        out_features=8,
        group_size=128,
    )
    assert buffers.weight[:, 0].tolist() == list(range(8))
    assert buffers.weight[:, 1].tolist() == [n << 4 for n in range(8)]
    assert not bool(buffers.weight[:, 2:].any())
    assert buffers.zeros.tolist() == [[n] for n in range(8)]
    assert buffers.scales.tolist() == [[n + 1.0] + [0.0] * 7 for n in range(8)]


def test_words_above_the_sign_bit_show_unsigned_through_a_view() -> None:
    fifteens = [[15] * 8] * 64
    buffers = repacked(fifteens, [[15] * 8], torch.ones(1, 8, dtype=torch.float16), 64)
    assert set(buffers.weight.view(torch.uint32).flatten().tolist()) == {0xFFFFFFFF}


@pytest.mark.parametrize(
    ("k", "group_size", "width"), [(1152, 128, 2), (512, 64, 2), (2048, 128, 2), (1536, 64, 4)]
)
def test_the_width_of_zeros_is_as_documented(k: int, group_size: int, width: int) -> None:
    assert awq_zeros_w(k, group_size) == width


def test_the_width_of_zeros_refuses_what_has_no_groups() -> None:
    with pytest.raises(BadRequest, match="group size 32, wanted 64 or 128"):
        awq_zeros_w(512, 32)
    with pytest.raises(BadRequest, match="in_features 192 is not a multiple of group size 128"):
        awq_zeros_w(192, 128)


def test_flat_and_unsigned_tensors_are_taken_too() -> None:
    codes, zeros, scales = some_linear(128, 16, 64)
    qweight, qzeros = hf_words(codes, ORDER), hf_words(zeros, ORDER)
    shaped = repack_hf_awq_for_kernel(qweight, qzeros, scales, 128, 16, 64)
    flat = repack_hf_awq_for_kernel(
        qweight.flatten().view(torch.uint32), qzeros.flatten(), scales.flatten(), 128, 16, 64
    )
    for name in ("weight", "zeros", "scales"):
        assert torch.equal(getattr(shaped, name), getattr(flat, name))


@pytest.mark.parametrize("n", [8, 16])
def test_transposed_views_are_taken_as_their_values(n: int) -> None:
    codes, zeros, scales = some_linear(128, n, 64)
    turned = [
        part.t().contiguous().t()
        for part in (hf_words(codes, ORDER), hf_words(zeros, ORDER), scales)
    ]
    buffers = repack_hf_awq_for_kernel(turned[0], turned[1], turned[2], 128, n, 64)
    assert kernel_weight(buffers, n, 128, 64) == plain_weight(codes, zeros, scales, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": 32}, "tensor q_proj: AWQ kernel layout: group size 32, wanted 64 or 128"),
        ({"group_size": -1}, "group size -1, wanted 64 or 128"),
        ({"in_features": 124}, "in_features 124 is not a multiple of 8"),
        ({"in_features": 0}, "in_features 0 is not a multiple of 8"),
        ({"in_features": 192, "group_size": 128}, "192 is not a multiple of group size 128"),
        ({"out_features": 12}, "out_features 12 is not a multiple of 8"),
        ({"out_features": 0}, "out_features 0 is not a multiple of 8"),
        (
            {"in_features": 256},
            "tensor q_proj.qweight: has shape (128, 2) (256 values), wanted (256, 2) (512 values)",
        ),
        ({"qzeros": torch.zeros(3, dtype=torch.int32)}, "q_proj.qzeros: has shape (3,) (3 values)"),
        ({"qweight": torch.zeros(2, 128, dtype=torch.int32)}, "has shape (2, 128) (256 values)"),
        ({"scales": torch.ones(1, 16).half()}, "q_proj.scales: has shape (1, 16) (16 values)"),
        ({"scales": torch.ones(2, 16)}, "q_proj.scales: is torch.float32"),
        ({"qweight": torch.zeros(128, 2)}, "q_proj.qweight: is torch.float32"),
    ],
)
def test_the_repack_refuses_by_name_with_the_numbers(change: dict[str, Any], words: str) -> None:
    codes, zeros, scales = some_linear(128, 16, 64)
    call: dict[str, Any] = {
        "qweight": hf_words(codes, ORDER),
        "qzeros": hf_words(zeros, ORDER),
        "scales": scales,
        "in_features": 128,
        "out_features": 16,
        "group_size": 64,
        "name": "q_proj",
    }
    repack_hf_awq_for_kernel(**call)
    with pytest.raises(BadTensor) as caught:
        repack_hf_awq_for_kernel(**(call | change))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("n", "k", "group_size", "problem", "mend"),
    [
        (64, 256, 32, "group size 32, wanted 64 or 128", "quantize it again with one of these"),
        (64, 256, -1, "group size -1, wanted 64 or 128", "quantize it again with one of these"),
        (64, 192, 128, "in_features 192 is not a multiple of group size 128", "that divides it"),
        (64, 124, 64, "in_features 124 is not a multiple of 8", "choose another kernel"),
        (12, 256, 64, "out_features 12 is not a multiple of 8", "choose another kernel"),
        (0, 256, 64, "out_features 0 is not a multiple of 8", "choose another kernel"),
    ],
)
def test_what_the_layout_cannot_hold_is_told_before_anything_is_read_with_the_mend(
    n: int, k: int, group_size: int, problem: str, mend: str
) -> None:
    refusal = layout_refuses(n, k, group_size)
    assert refusal is not None
    assert refusal[0] == problem
    assert mend in refusal[1]


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20), st.sampled_from([8, 60, 64, 96, 128, 192, 256, 384]),
    st.sampled_from([16, 32, 64, 96, 128, 256]),
)  # fmt: skip
def test_the_layout_refuses_by_shape_just_what_laying_out_refuses(
    n: int, k: int, group_size: int
) -> None:
    refusal = layout_refuses(n, k, group_size)
    groups = -(-k // group_size)
    codes, scales = torch.zeros(n, k, dtype=torch.uint8), torch.ones(n, groups).half()
    qweight = QWeight(Scheme(4, group_size), codes, scales)
    if refusal is None:
        assert from_qweight(qweight).weight.shape == (n, k // 8)
        return
    with pytest.raises(BadTensor) as caught:
        from_qweight(qweight, "q_proj")
    assert str(caught.value) == f"tensor q_proj: AWQ kernel layout: {refusal[0]}; {refusal[1]}"


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_repack_takes_as_many_operators_for_any_size() -> None:
    counts = []
    for size in (128, 4160):  # both with padded groups
        qweight = torch.randint(-(2**31), 2**31, (size, size // 8)).int()
        qzeros, scales = qweight[: size // 64].clone(), torch.ones(size // 64, size).half()
        with _Operators() as operators:
            repack_hf_awq_for_kernel(qweight, qzeros, scales, size, size, 64)
        counts.append(operators.count)
    assert counts[0] == counts[1]
    assert counts[0] < 100


# --- from any QWeight


def a_qweight(group_size: int = 64, symmetric: bool = False) -> QWeight:
    scheme = Scheme(4, group_size, symmetric)
    shape = (16, scheme.groups(256))
    return QWeight(
        scheme,
        torch.randint(0, 16, (16, 256), dtype=torch.uint8),
        torch.rand(shape).half() + 0.01,
        None if symmetric else torch.randint(0, 16, shape, dtype=torch.int16),
    )


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_qweight_and_its_awq_file_give_the_same_buffers(group_size: int, symmetric: bool) -> None:
    qweight = a_qweight(group_size, symmetric)
    file = awq.to_tensors("x", qweight)
    direct = from_qweight(qweight)
    through = repack_hf_awq_for_kernel(
        file["x.qweight"], file["x.qzeros"], file["x.scales"], 256, 16, group_size
    )
    for name in ("weight", "zeros", "scales"):
        assert torch.equal(getattr(direct, name), getattr(through, name))
    weight = torch.tensor(kernel_weight(direct, 16, 256, group_size))
    assert torch.equal(weight, qweight.dequantize())


def test_the_formats_and_the_layouts_name_the_same_order() -> None:
    assert list(HF_AWQ_PACK_ORDER) == list(awq.ORDER) == ORDER


def test_a_plain_column_order_is_dropped_and_another_one_is_refused() -> None:
    qweight = a_qweight()
    plain = replace(qweight, g_idx=torch.arange(256, dtype=torch.int32) // 64)
    assert torch.equal(from_qweight(plain).weight, from_qweight(qweight).weight)
    assert plain.g_idx is not None
    moved = replace(qweight, g_idx=plain.g_idx.flip(0))
    with pytest.raises(BadTensor, match="keeps a column order: 256 of 256 columns"):
        from_qweight(moved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scheme": Scheme(8, 64, False)}, "is 8-bit, the AWQ kernel takes 4 bits"),
        ({"minimums": torch.zeros(16, 4), "zeros": None}, "has float minimums"),
        ({"scheme": Scheme(4, 32, False)}, "group size 32, wanted 64 or 128"),
        ({"scheme": Scheme(4, -1, False)}, "group size 256, wanted 64 or 128"),
        ({"codes": torch.zeros(12, 256, dtype=torch.uint8)}, "out_features 12 is not a multiple"),
        ({"zeros": torch.full((16, 4), 16, dtype=torch.int16)}, "has zeros 16..16"),
        ({"zeros": torch.full((16, 4), -1, dtype=torch.int16)}, "has zeros -1..-1"),
        ({"scales": torch.full((16, 4), torch.inf)}, "scale [0, 0] is inf"),
        ({"scales": torch.full((16, 4), 0.1)}, "64 of 64 torch.float32 scales change in the fp16"),
    ],
)
def test_a_qweight_that_the_layout_cannot_hold_is_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadTensor) as caught:
        from_qweight(replace(a_qweight(), **change), "down_proj")
    assert str(caught.value).startswith("tensor down_proj: ")
    assert words in str(caught.value)


def test_scales_that_fp16_rounds_need_leave_and_those_beyond_it_get_none() -> None:
    rounded = replace(a_qweight(), scales=torch.full((16, 4), 0.1))
    buffers = from_qweight(rounded, lossy=True)
    assert float(buffers.scales[0, 0]) == float(torch.tensor(0.1).half())
    beyond = replace(a_qweight(), scales=torch.full((16, 4), 7e4))
    with pytest.raises(BadTensor, match="the largest is 7e"):
        from_qweight(beyond, lossy=True)


# --- the kernel's own limits


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "words"),
    [
        ((4096, 4096, 8), torch.float16, None, "needs a CUDA device"),
        (
            (4096, 4096, 8),
            torch.float16,
            (7, 5),
            "needs compute capability 8.0, this device has 7.5",
        ),
        ((4096, 4096, 8), torch.bfloat16, (9, 0), "computes in torch.float16, not torch.bfloat16"),
        ((96, 4096, 8), torch.float16, (8, 0), "out_features in multiples of 64, got 96"),
        ((0, 4096, 8), torch.float16, (8, 0), "out_features in multiples of 64, got 0"),
        ((64, 1152, 8), torch.float16, (8, 0), "in_features in multiples of 256, got 1152"),
        ((64, 1152, 0), torch.float16, (8, 0), "split_k of 1 or more, got 0"),
    ],
)
def test_the_kernel_says_why_it_cannot_run(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    words: str,
) -> None:
    sentence = kernel_refuses(*shape, dtype, capability)
    assert sentence is not None
    assert words in sentence


def test_the_kernel_runs_what_meets_its_limits() -> None:
    assert kernel_refuses(4096, 4096, 8, torch.float16, (8, 0)) is None
    assert kernel_refuses(64, 1152, 4, torch.float16, (9, 0)) is None
