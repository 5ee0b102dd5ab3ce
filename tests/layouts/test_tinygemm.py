"""The tinygemm layouts, proved by read formulas written out here and by torch's own operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.errors import BadTensor, CannotRun
from weightpath.layouts import tinygemm
from weightpath.layouts.tinygemm import (
    CPU_LAYOUTS,
    CUDA,
    TinygemmWeight,
    codes_of,
    detect_cpu_layout,
    detect_layout,
    from_qweight,
    pack_cpu,
    pack_cuda,
    scales_and_zeros,
    shape_refuses,
)
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

CPU_NAMES = [layout.name for layout in CPU_LAYOUTS]
BLOCKS = {
    "cpu-split64": (64, True),
    "cpu-split32": (32, True),
    "cpu-pairs32": (32, False),
    "cpu-pairs16": (16, False),
    "cpu-pairs64": (64, False),
}
"""Rows of a block, and whether its halves share bytes: stated again, not taken from the code."""
SHAPES = [(16, 32, 32), (48, 96, 32), (64, 256, 256), (112, 128, 64), (144, 384, 128)]
"""N, K, group size."""
KINDS = ["symmetric", "zeros", "minimums"]
quick = hypothesis_settings(max_examples=40, deadline=None)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def some_codes(n: int, k: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)


def a_qweight(
    n: int = 64,
    k: int = 256,
    group_size: int = 64,
    kind: str = "zeros",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> QWeight:
    """Scales of 0.001 to 0.021, zeros 0..15 or minimums near -7.5 scales."""
    draw = torch.Generator().manual_seed(seed)
    groups = (n, 1 if group_size == -1 else k // group_size)
    scales = (torch.rand(groups, generator=draw) * 0.02 + 0.001).to(dtype)
    zeros = torch.randint(0, 16, groups, dtype=torch.int16, generator=draw)
    minimums = (-7.5 * scales.float() * (1 + 0.2 * torch.rand(groups, generator=draw))).to(dtype)
    return QWeight(
        Scheme(4, group_size, kind == "symmetric"),
        some_codes(n, k, seed),
        scales,
        zeros if kind == "zeros" else None,
        minimums if kind == "minimums" else None,
    )


def plain_weight(qweight: QWeight) -> Tensor:
    """w [N, K] in fp64 by the QWeight's own formula."""
    n, k = qweight.codes.shape
    scales = qweight.scales.double()
    codes = qweight.codes.double().view(n, scales.shape[1], -1)
    if qweight.minimums is not None:
        weight = codes * scales[..., None] + qweight.minimums.double()[..., None]
    else:
        zeros = 8.0 if qweight.zeros is None else qweight.zeros.double()[..., None]
        weight = (codes - zeros) * scales[..., None]
    return weight.view(n, k)


def operators_weight(codes: Tensor, table: Tensor) -> Tensor:
    """w [N, K] in fp64 by the operator's formula on its table [nG, N, 2]."""
    n, k = codes.shape
    scale, zero = (part.t().double()[..., None] for part in table.unbind(-1))
    return ((codes.double().view(n, table.shape[0], -1) - 8) * scale + zero).view(n, k)


def cpu_read(data: list[int], n: int, k: int, rows: int, split: bool) -> list[list[int]]:
    """Every code [N][K] by the CPU kernel's reading: block, then column, then byte, then nibble."""
    codes = []
    for row in range(n):
        block = row // rows
        size = min(rows, n - block * rows)
        place = row - block * rows
        line = []
        for column in range(k):
            start = block * rows * k // 2 + column * size // 2
            if split and size == rows:
                byte, high = place % (rows // 2), place >= rows // 2
            else:
                byte, high = place // 2, place % 2 == 1
            line.append(data[start + byte] // 16 if high else data[start + byte] % 16)
        codes.append(line)
    return codes


def cuda_read(packed: Tensor) -> list[list[int]]:
    """Every code [N][K] by what each lane feeds to its tensor core.

    A 16 x 8 operand tile takes two registers of two values from each lane: register r holds rows
    2 (lane % 4) + 8 r and the next, of column lane // 4. A word feeds two tiles: register r of its
    tile h is nibbles 2h + r and 2h + r + 4.
    """
    tiles, outer, lanes, words = packed.shape
    assert lanes == 32
    stored = packed.tolist()
    columns = outer * words * 32
    codes = [[-1] * columns for _ in range(tiles * 8)]
    for tile in range(tiles):
        for chunk in range(outer):
            for lane in range(32):
                for k_tile in range(2 * words):
                    word = stored[tile][chunk][lane][k_tile // 2] & 0xFFFFFFFF
                    first = (chunk * 2 * words + k_tile) * 16 + 2 * (lane % 4)
                    for register in (0, 1):
                        for which in (0, 1):
                            nibble = (k_tile % 2) * 2 + register + 4 * which
                            row, column = tile * 8 + lane // 4, first + 8 * register + which
                            assert codes[row][column] == -1
                            codes[row][column] = (word >> (4 * nibble)) & 15
    return codes


# --- the layouts by their read formulas


@pytest.mark.parametrize("layout", CPU_NAMES)
@quick
@given(blocks=st.integers(1, 10), pairs=st.integers(1, 8), seed=st.integers(0, 99))
def test_the_cpu_kernels_reading_gives_the_codes(
    layout: str, blocks: int, pairs: int, seed: int
) -> None:
    n, k = 16 * blocks, 2 * pairs
    codes = some_codes(n, k, seed)
    packed = pack_cpu(codes, layout)
    assert (packed.shape, packed.dtype) == ((n, k // 2), torch.uint8)
    assert packed.is_contiguous()
    assert cpu_read(packed.flatten().tolist(), n, k, *BLOCKS[layout]) == codes.tolist()
    assert torch.equal(codes_of(packed, layout), codes)


@quick
@given(
    tiles=st.integers(1, 3),
    outer=st.integers(1, 3),
    inner=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
)
def test_what_each_cuda_lane_reads_gives_the_codes(
    tiles: int, outer: int, inner: int, seed: int
) -> None:
    n, k = 8 * tiles, 16 * inner * outer
    codes = some_codes(n, k, seed)
    packed = pack_cuda(codes, inner)
    assert (packed.shape, packed.dtype) == ((tiles, outer, 32, inner // 2), torch.int32)
    assert packed.is_contiguous()
    assert cuda_read(packed) == codes.tolist()
    assert torch.equal(codes_of(packed, CUDA), codes)


@pytest.mark.parametrize("layout", CPU_NAMES)
@pytest.mark.parametrize("row", [0, 63, 79])
def test_sabotage_one_nibble_swapped_with_its_neighbour_is_seen_on_cpu(
    layout: str, row: int
) -> None:
    codes = some_codes(80, 8)
    codes[row, 3], codes[row, 4] = 1, 2
    good = pack_cpu(codes, layout)
    codes[row, 3], codes[row, 4] = 2, 1
    bad = pack_cpu(codes, layout)
    codes[row, 3], codes[row, 4] = 1, 2
    assert cpu_read(good.flatten().tolist(), 80, 8, *BLOCKS[layout]) == codes.tolist()
    assert cpu_read(bad.flatten().tolist(), 80, 8, *BLOCKS[layout]) != codes.tolist()


@pytest.mark.parametrize("layout", CPU_NAMES)
def test_sabotage_the_bytes_of_one_layout_read_as_another_are_wrong(layout: str) -> None:
    codes = some_codes(112, 8)
    packed = pack_cpu(codes, layout)
    for other in CPU_NAMES:
        same = torch.equal(codes_of(packed, other), codes)
        assert same == (other == layout)


def test_sabotage_a_cuda_word_with_two_nibbles_swapped_is_seen() -> None:
    codes = some_codes(8, 128)
    codes[0, 0], codes[0, 1] = 3, 12
    packed = pack_cuda(codes)
    assert cuda_read(packed) == codes.tolist()
    word = int(packed[0, 0, 0, 0]) & 0xFFFFFFFF
    assert (word & 15, (word >> 16) & 15) == (3, 12)
    word = (word & ~0xF000F) | 12 | (3 << 16)
    packed[0, 0, 0, 0] = word - 2**32 if word >= 2**31 else word
    assert cuda_read(packed) != codes.tolist()


def test_sabotage_even_columns_in_the_low_nibble_is_another_cuda_layout() -> None:
    codes = some_codes(8, 128)
    swapped = codes.view(8, 64, 2).flip(-1).reshape(8, 128)
    assert cuda_read(pack_cuda(swapped)) != codes.tolist()


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        # column 0 of 64 rows holds n // 4, column 1 holds 15 - n // 4
        ("cpu-split64", {0: 0x80, 31: 0xF7, 32: 0x7F, 63: 0x08}),
        ("cpu-split32", {0: 0x40, 15: 0x73, 16: 0xBF, 31: 0x8C, 32: 0xC8, 63: 0x04}),
        ("cpu-pairs32", {0: 0x00, 15: 0x77, 16: 0xFF, 31: 0x88, 32: 0x88, 63: 0x00}),
        ("cpu-pairs16", {0: 0x00, 7: 0x33, 8: 0xFF, 15: 0xCC, 16: 0x44, 63: 0x00}),
        ("cpu-pairs64", {0: 0x00, 31: 0xFF, 32: 0xFF, 63: 0x00}),
    ],
)
def test_cpu_bytes_packed_by_hand(layout: str, wanted: dict[int, int]) -> None:
    ramp = torch.arange(64, dtype=torch.uint8) // 4
    packed = pack_cpu(torch.stack((ramp, 15 - ramp), dim=1), layout).flatten().tolist()
    assert {index: packed[index] for index in wanted} == wanted


def test_pairs_keep_the_even_row_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, 2)
    for layout in CPU_NAMES:  # 16 rows: one whole block of pairs16, a last block elsewhere
        row = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
        assert pack_cpu(codes, layout).flatten().tolist() == row * 2


def test_cuda_words_packed_by_hand() -> None:
    codes = torch.zeros(8, 64, dtype=torch.uint8)
    for nibble, column in enumerate([0, 8, 16, 24, 1, 9, 17, 25]):
        codes[0, column] = nibble + 1
        codes[5, column + 32 + 6] = nibble  # row 5, lane % 4 = 3: lane 23, second word
    packed = pack_cuda(codes, 4)
    assert int(packed[0, 0, 0, 0]) & 0xFFFFFFFF == 0x87654321
    assert int(packed[0, 0, 23, 1]) & 0xFFFFFFFF == 0x76543210
    assert int((packed != 0).sum()) == 2


# --- torch's own CPU operators, on the machine at hand


def cpu_convert(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 2)


def cpu_product(x: Tensor, packed: Tensor, group_size: int, table: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, table)


@quick
@given(
    blocks=st.integers(1, 12),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 128, 256]),
    rows=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_bytes_and_products_are_those_of_torchs_own_packing(
    blocks: int, groups: int, group_size: int, rows: int, kind: str, seed: int
) -> None:
    n, k = 16 * blocks, groups * group_size
    qweight = a_qweight(n, k, group_size, kind, seed=seed)
    weight = from_qweight(qweight, detect_layout())
    theirs = cpu_convert(qweight.codes)
    assert torch.equal(weight.packed, theirs)
    assert torch.equal(codes_of(theirs, weight.layout), qweight.codes)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).bfloat16()
    table = weight.scales_and_zeros
    assert torch.equal(
        cpu_product(x, weight.packed, group_size, table), cpu_product(x, theirs, group_size, table)
    )


UNDER_ANOTHER_CAPABILITY = """
import json, torch
from weightpath.layouts.tinygemm import detect_layout, pack_cpu
layout, same, right = detect_layout(), True, True
for n in (16, 32, 48, 64, 80, 112, 144):
    codes = torch.randint(0, 16, (n, 64), dtype=torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)
    packed = pack_cpu(codes, layout)
    same &= torch.equal(packed, theirs)
    table = torch.tensor([1.0, 0.0]).bfloat16().expand(2, n, 2).contiguous()
    eye = torch.eye(64).bfloat16()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, packed, 32, table)
    right &= torch.equal(product.t().float(), codes.float() - 8)
capability = torch.backends.cpu.get_cpu_capability()
print(json.dumps({"capability": capability, "layout": layout, "same": same, "right": right}))
"""


@pytest.mark.parametrize(
    ("capability", "layout"), [("avx2", "cpu-split32"), ("default", "cpu-pairs32")]
)
def test_a_lower_instruction_set_is_detected_and_its_operator_agrees(
    capability: str, layout: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNDER_ANOTHER_CAPABILITY],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout)
    if found["capability"].lower() != capability:
        pytest.skip(f"this machine runs torch as {found['capability']}, not {capability}")
    if capability == "default" and not {"AVX2", "AVX512"} & {
        torch.backends.cpu.get_cpu_capability()
    }:
        pytest.skip("the default of another architecture has vectors of its own")
    assert found == {
        "capability": found["capability"], "layout": layout, "same": True, "right": True
    }  # fmt: skip


def test_the_layout_follows_the_instruction_set_that_torch_uses() -> None:
    wanted = {"AVX512": "cpu-split64", "AVX2": "cpu-split32"}
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in wanted or sys.platform == "win32":
        pytest.skip(f"no layout is stated for {capability} on {sys.platform}")
    assert detect_cpu_layout() == wanted[capability] == detect_layout("cpu")


def weights_read(
    product: Callable[[Tensor, Tensor, int, Tensor], Tensor], weight: TinygemmWeight
) -> Tensor:
    """Every weight [N, K] as the operator sees it: its product with the identity."""
    columns = codes_of(weight.packed, weight.layout).shape[1]
    eye = torch.eye(columns, dtype=torch.bfloat16, device=weight.packed.device)
    return product(eye, weight.packed, weight.group_size, weight.scales_and_zeros).t().float().cpu()


def steps_off(read: Tensor, qweight: QWeight) -> float:
    """Largest difference from the QWeight's weights, in steps of their group."""
    size = qweight.in_features // qweight.scales.shape[1]
    steps = qweight.scales.double().repeat_interleave(size, dim=1)
    return float(((read.double() - plain_weight(qweight)) / steps).abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_the_operator_reads_every_weight_within_an_eighth_of_a_step(
    kind: str, n: int, k: int, group_size: int
) -> None:
    qweight = a_qweight(n, k, group_size, kind)
    weight = from_qweight(qweight, detect_layout())
    assert steps_off(weights_read(cpu_product, weight), qweight) < 1 / 8


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_sabotage_a_byte_with_its_nibbles_swapped_changes_bytes_and_products(place: int) -> None:
    qweight = a_qweight(112, 128, 64)
    weight = from_qweight(qweight, detect_layout())
    flat = weight.packed.view(-1)
    if int(flat[place]) % 17 == 0:  # both nibbles alike
        place += 1
    flat[place] = (flat[place] >> 4) | (flat[place] << 4)
    assert not torch.equal(weight.packed, cpu_convert(qweight.codes))
    assert steps_off(weights_read(cpu_product, weight), qweight) > 7 / 8


def root_mean_square(values: Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())


def within_twice_plain(ours: Tensor, plain: Tensor, exact: Tensor) -> tuple[float, float]:
    """Error of ours over error of plain bf16, against fp64: root mean square, and largest."""
    error, allowed = ours.double().cpu() - exact, plain.double().cpu() - exact
    return (
        root_mean_square(error) / root_mean_square(allowed),
        float(error.abs().max() / allowed.abs().max()),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_errs_no_more_than_twice_a_plain_bf16_product(
    kind: str, dtype: torch.dtype
) -> None:
    n, k, group_size = 208, 512, 64
    qweight = a_qweight(n, k, group_size, kind, dtype)
    weight = from_qweight(qweight, detect_layout())
    x = torch.randn(32, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = cpu_product(x, weight.packed, group_size, weight.scales_and_zeros)
    for real in (
        plain_weight(qweight),
        operators_weight(qweight.codes, weight.scales_and_zeros),
    ):
        plain = x @ real.bfloat16().t()
        typical, largest = within_twice_plain(ours, plain, x.double() @ real.t())
        assert typical <= 2
        assert largest <= 2


def test_sabotage_a_zero_off_by_one_errs_more_than_twice_a_plain_bf16_product() -> None:
    qweight = a_qweight(208, 512, 64)
    assert qweight.zeros is not None
    weight = from_qweight(replace(qweight, zeros=qweight.zeros - 1), detect_layout())
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = cpu_product(x, weight.packed, 64, weight.scales_and_zeros)
    real = plain_weight(qweight)
    typical, _ = within_twice_plain(ours, x @ real.bfloat16().t(), x.double() @ real.t())
    assert typical > 2


# --- scales, zeros, and what bf16 makes of them


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_formula_on_its_table_gives_the_weights(kind: str) -> None:
    # scales of few bits and small minimums: bf16 holds them all, so nothing may change
    qweight = a_qweight(16, 128, 32, kind)
    scales = torch.tensor([0.5, 0.25, 0.125, 1.0]).expand(16, 4).half()
    qweight = replace(
        qweight, scales=scales, minimums=None if qweight.minimums is None else -3.5 * scales
    )
    table = scales_and_zeros(qweight)
    assert (table.shape, table.dtype) == ((4, 16, 2), torch.bfloat16)
    assert table.is_contiguous()
    assert torch.equal(operators_weight(qweight.codes, table), plain_weight(qweight))
    weight = from_qweight(qweight, "cpu-split64")
    assert (weight.exact, weight.largest_change, weight.mean_change) == (True, 0.0, 0.0)


def test_the_zero_is_that_of_the_stated_formula() -> None:
    scales = torch.full((16, 1), 0.5)
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    zeros = QWeight(
        Scheme(4, 32, False), codes, scales, torch.arange(16, dtype=torch.int16)[:, None]
    )
    assert scales_and_zeros(zeros)[0].tolist() == [[0.5, 0.5 * (8 - z)] for z in range(16)]
    minimums = QWeight(Scheme(4, 32, False), codes, scales, None, torch.full((16, 1), -3.0))
    assert scales_and_zeros(minimums)[0].tolist() == [[0.5, 1.0]] * 16
    symmetric = QWeight(Scheme(4, 32), codes, scales)
    assert scales_and_zeros(symmetric)[0].tolist() == [[0.5, 0.0]] * 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_stated_change_is_that_of_every_weight(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinygemm, "BLOCK_WEIGHTS", 5 * 128)  # blocks of 5 of 48 rows
    qweight = a_qweight(48, 128, 32, kind, dtype)
    weight = from_qweight(qweight, "cpu-split64")
    change = operators_weight(qweight.codes, weight.scales_and_zeros) - plain_weight(qweight)
    assert not weight.exact
    assert weight.largest_change == pytest.approx(float(change.abs().max()), rel=1e-6)
    assert weight.mean_change == pytest.approx(float(change.abs().mean()), rel=1e-6)


def test_bf16_scales_without_zeros_change_nothing_and_with_zeros_say_that_they_do() -> None:
    symmetric = a_qweight(kind="symmetric", dtype=torch.bfloat16)
    assert from_qweight(symmetric, "cpu-split64").exact
    assert not from_qweight(a_qweight(dtype=torch.bfloat16), "cpu-split64").exact


def test_zeros_beyond_the_codes_are_taken_since_the_operators_zero_is_a_float() -> None:
    qweight = replace(a_qweight(16, 64, 32), zeros=torch.full((16, 2), 16, dtype=torch.int16))
    weight = from_qweight(qweight, detect_layout())
    assert steps_off(weights_read(cpu_product, weight), qweight) < 1 / 8


@pytest.mark.parametrize("layout", [*CPU_NAMES, CUDA])
def test_every_layout_holds_the_qweights_codes(layout: str) -> None:
    qweight = a_qweight(112, 576, 64)
    weight = from_qweight(qweight, layout)
    assert (weight.layout, weight.group_size) == (layout, 64)
    assert torch.equal(codes_of(weight.packed, layout), qweight.codes)


@pytest.mark.parametrize(("k", "inner"), [(1152, 8), (576, 4), (96, 2)])
def test_cuda_packs_the_most_inner_tiles_that_divide_the_columns(k: int, inner: int) -> None:
    weight = from_qweight(a_qweight(8, k, 32), CUDA)
    assert weight.packed.shape == (1, k // (16 * inner), 32, inner // 2)


@pytest.mark.parametrize("k", [32, 64, 128, 256])
def test_per_channel_is_taken_where_a_row_is_one_of_the_operators_groups(k: int) -> None:
    qweight = a_qweight(16, k, -1)
    weight = from_qweight(qweight, detect_layout())
    assert (weight.group_size, weight.scales_and_zeros.shape) == (k, (1, 16, 2))
    assert steps_off(weights_read(cpu_product, weight), qweight) < 1 / 8


def test_views_that_are_not_contiguous_are_packed_as_their_values() -> None:
    codes = some_codes(80, 128)
    turned = codes.t().contiguous().t()
    for layout in CPU_NAMES:
        assert torch.equal(pack_cpu(turned, layout), pack_cpu(codes, layout))
    assert torch.equal(pack_cuda(turned), pack_cuda(codes))


def test_a_plain_column_order_is_dropped_and_another_one_is_refused() -> None:
    qweight = a_qweight()
    plain = replace(qweight, g_idx=torch.arange(256, dtype=torch.int32) // 64)
    assert torch.equal(
        from_qweight(plain, "cpu-split64").packed, from_qweight(qweight, "cpu-split64").packed
    )
    assert plain.g_idx is not None
    moved = replace(qweight, g_idx=plain.g_idx.flip(0))
    with pytest.raises(BadTensor, match="keeps a column order: 256 of 256 columns"):
        from_qweight(moved, "cpu-split64")


# --- refusals


def test_more_groups_than_the_columns_fill_are_refused() -> None:
    qweight = a_qweight(16, 128, 32)
    order = torch.arange(128, dtype=torch.int32) // 64
    with pytest.raises(BadTensor, match="keeps a column order: 0 of 128 columns"):
        from_qweight(replace(qweight, scheme=Scheme(4, 64, False), g_idx=order), "cpu-split64")


@pytest.mark.parametrize(
    ("change", "layout", "words"),
    [
        ({"scheme": Scheme(8, 64, False)}, "cpu-split64", "is 8-bit, the tinygemm operators take"),
        ({"scheme": Scheme(3, 64, False)}, CUDA, "is 3-bit, the tinygemm operators take 4 bits"),
        ({"codes": some_codes(56, 256)}, "cpu-split64", "shape (64, 4), wanted (56, 4)"),
        ({"codes": torch.full((64, 256), 16, dtype=torch.uint8)}, CUDA, "code 16 exceeds 15"),
        ({"scales": torch.full((64, 4), torch.inf)}, CUDA, "scale [0, 0] is inf"),
        (
            {"scales": torch.full((64, 4), 3.4e38)},
            "cpu-split64",
            "beyond the bf16 that the tinygemm operators take (its scale is 3.4e+38)",
        ),
        (
            {"scales": torch.full((64, 4), 1e38), "zeros": torch.zeros(64, 4).short()},
            "cpu-split64",
            "zero [0, 0] is beyond the bf16",
        ),
    ],
)  # fmt: skip
def test_a_qweight_that_the_operators_cannot_take_is_refused_by_name(
    change: dict[str, Any], layout: str, words: str
) -> None:
    qweight = a_qweight()
    from_qweight(qweight, layout, "down_proj")
    with pytest.raises(BadTensor) as caught:
        from_qweight(replace(qweight, **change), layout, "down_proj")
    assert str(caught.value).startswith("tensor down_proj: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("n", "k", "group_size", "layout", "words"),
    [
        (56, 256, 64, "cpu-split64", "out_features 56 is not a multiple of 16, as cpu-split64"),
        (60, 256, 64, CUDA, "out_features 60 is not a multiple of 8, as cuda needs"),
        (64, 96, 48, CUDA, "group size 48, the tinygemm operators take 32, 64, 128 or 256"),
        (64, 64, 16, "cpu-pairs32", "group size 16, the tinygemm operators take 32, 64, 128"),
        (64, 512, -1, "cpu-split64", "group size 512, the tinygemm operators take 32, 64, 128"),
    ],
)
def test_shapes_that_the_operators_cannot_take_are_refused_with_the_numbers(
    n: int, k: int, group_size: int, layout: str, words: str
) -> None:
    assert words in str(shape_refuses(n, k, k if group_size == -1 else group_size, layout))
    with pytest.raises(BadTensor) as caught:
        from_qweight(a_qweight(n, k, group_size), layout, "o_proj")
    assert str(caught.value).startswith("tensor o_proj: ")
    assert words in str(caught.value)


def test_shapes_that_the_operators_take_are_not_refused() -> None:
    assert shape_refuses(16, 32, 32, "cpu-split64") is None
    assert shape_refuses(8, 32, 32, CUDA) is None
    assert "not a multiple of group size 64" in str(shape_refuses(16, 96, 64, "cpu-split64"))
    assert "in_features 0 is not a multiple" in str(shape_refuses(16, 0, 64, CUDA))
    assert "out_features 0 is not a multiple" in str(shape_refuses(0, 64, 64, CUDA))


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (
            some_codes(8, 128),
            "codes [8, 128] do not fill tinygemm's tiles of 16 rows and 2 columns",
        ),
        (some_codes(16, 127), "codes [16, 127] do not fill"),
        (some_codes(16, 128) + 1, "code 16 exceeds 15"),
        (some_codes(16, 128).int(), "codes are torch.int32 (16, 128), wanted torch.uint8 [N, K]"),
        (some_codes(16, 128)[0], "codes are torch.uint8 (128,)"),
        (some_codes(16, 128)[:0], "codes are torch.uint8 (0, 128)"),
    ],
)
def test_the_packers_refuse_codes_that_do_not_fit(codes: Tensor, words: str) -> None:
    with pytest.raises(BadTensor) as caught:
        pack_cpu(codes, "cpu-split64", "q_proj")
    assert words in str(caught.value)
    assert str(caught.value).startswith("tensor q_proj: ")


def test_cuda_tiles_that_the_columns_do_not_fill_are_refused() -> None:
    with pytest.raises(BadTensor, match=r"codes \[8, 96\] do not fill .* 8 rows and 128 columns"):
        pack_cuda(some_codes(8, 96))
    with pytest.raises(BadTensor, match=r"codes \[12, 128\] do not fill .* 8 rows"):
        pack_cuda(some_codes(12, 128))
    with pytest.raises(CannotRun, match="3 inner k-tiles; it takes 2, 4 or 8"):
        pack_cuda(some_codes(8, 96), 3)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda name: from_qweight(a_qweight(), name),
        lambda name: pack_cpu(some_codes(16, 32), name),
        lambda name: codes_of(torch.zeros(16, 16, dtype=torch.uint8), name),
    ],
)
def test_an_unknown_layout_is_refused_with_those_that_are_known(
    attempt: Callable[[str], object],
) -> None:
    with pytest.raises(CannotRun, match=r"'avx1024': unknown; the layouts are cpu-split64, .*cuda"):
        attempt("avx1024")


def test_a_machine_whose_bytes_fit_no_known_layout_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = detect_cpu_layout()
    others = tuple(layout for layout in CPU_LAYOUTS if layout.name != here)
    monkeypatch.setattr(tinygemm, "CPU_LAYOUTS", others)
    with pytest.raises(CannotRun, match=r"tinygemm on CPU: torch .* packs none of cpu-") as caught:
        detect_cpu_layout()
    assert "\n" not in str(caught.value)


def test_a_device_without_the_operator_is_refused_in_one_line() -> None:
    with pytest.raises(CannotRun, match="device meta is not known; cpu and cuda are"):
        detect_layout("meta")
    with pytest.raises(
        CannotRun, match=r"cannot run aten\._convert_weight_to_int4pack on cpu: "
    ) as it:
        tinygemm._convert("_convert_weight_to_int4pack", some_codes(16, 64), 2)
    assert "\n" not in str(it.value)
    with pytest.raises(CannotRun, match=r"cannot run aten\._no_such_operator on cpu: "):
        tinygemm._convert("_no_such_operator", some_codes(16, 64), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(CannotRun, match="torch sees no CUDA device"):
        detect_layout("cuda")


# --- torch's own CUDA operators


def cuda_convert(codes: Tensor, inner: int) -> Tensor:
    pairs = (codes[:, 0::2] << 4) | codes[:, 1::2]
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous().cuda(), inner).cpu()


def cuda_product(x: Tensor, packed: Tensor, group_size: int, table: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm(x, packed, group_size, table)


def on_cuda(weight: TinygemmWeight) -> TinygemmWeight:
    return replace(
        weight, packed=weight.packed.cuda(), scales_and_zeros=weight.scales_and_zeros.cuda()
    )


@pytest.mark.gpu
@needs_cuda
def test_the_cuda_layout_is_found_by_probe() -> None:
    assert detect_layout("cuda") == CUDA


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("inner", [2, 4, 8])
@pytest.mark.parametrize(("n", "outer"), [(8, 1), (16, 3), (72, 5), (256, 8), (4096, 32)])
def test_cuda_words_are_those_of_torchs_own_packing(n: int, outer: int, inner: int) -> None:
    codes = some_codes(n, 16 * inner * outer)
    theirs = cuda_convert(codes, inner)
    assert torch.equal(pack_cuda(codes, inner), theirs)
    assert torch.equal(pack_cuda(codes.cuda(), inner).cpu(), theirs)
    assert torch.equal(codes_of(theirs, CUDA), codes)


@pytest.mark.gpu
@needs_cuda
def test_sabotage_two_codes_swapped_give_other_words_than_torchs_own() -> None:
    codes = some_codes(8, 128)
    codes[3, 17], codes[3, 18] = 4, 5
    theirs = cuda_convert(codes, 8)
    codes[3, 17], codes[3, 18] = 5, 4
    assert not torch.equal(pack_cuda(codes, 8), theirs)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(8, 32, 32), (16, 96, 32), (24, 576, 64), (64, 1152, 128), (128, 1280, 256), (512, 2048, 128)],
)
def test_the_cuda_operator_reads_every_weight_and_its_products_are_those_of_torchs_words(
    kind: str, n: int, k: int, group_size: int
) -> None:
    qweight = a_qweight(n, k, group_size, kind)
    weight = on_cuda(from_qweight(qweight, detect_layout("cuda")))
    assert steps_off(weights_read(cuda_product, weight), qweight) < 1 / 8
    theirs = cuda_convert(qweight.codes, 2 * weight.packed.shape[3]).cuda()
    assert torch.equal(weight.packed, theirs)
    for rows in (1, 7, 33):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16().cuda()
        table = weight.scales_and_zeros
        assert torch.equal(
            cuda_product(x, weight.packed, group_size, table),
            cuda_product(x, theirs, group_size, table),
        )


@pytest.mark.gpu
@needs_cuda
def test_sabotage_a_cuda_word_with_two_nibbles_swapped_changes_the_weights_read() -> None:
    qweight = a_qweight(16, 256, 64)
    qweight.codes[0, 0], qweight.codes[0, 1] = 3, 12
    weight = from_qweight(qweight, CUDA)
    assert steps_off(weights_read(cuda_product, on_cuda(weight)), qweight) < 1 / 8
    word = int(weight.packed[0, 0, 0, 0]) & 0xFFFFFFFF
    word = (word & ~0xF000F) | 12 | (3 << 16)
    weight.packed[0, 0, 0, 0] = word - 2**32 if word >= 2**31 else word
    assert steps_off(weights_read(cuda_product, on_cuda(weight)), qweight) > 7 / 8


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cuda_product_errs_no_more_than_twice_a_plain_bf16_product(
    kind: str, dtype: torch.dtype
) -> None:
    qweight = a_qweight(512, 1024, 64, kind, dtype)
    weight = on_cuda(from_qweight(qweight, CUDA))
    x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = cuda_product(x.cuda(), weight.packed, 64, weight.scales_and_zeros)
    for real in (
        plain_weight(qweight),
        operators_weight(qweight.codes, weight.scales_and_zeros.cpu()),
    ):
        plain = x.cuda() @ real.bfloat16().cuda().t()
        typical, largest = within_twice_plain(ours, plain, x.double() @ real.t())
        assert typical <= 2
        assert largest <= 2
