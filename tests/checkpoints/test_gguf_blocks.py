"""GGUF blocks as QWeights and back: values bit for bit, codes, refusals, what float16 rounds."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from block_formulas import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_gguf import file_tensors, interleave, tiny_model, write_gguf
from weightpath.checkpoints import gguf_blocks
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.gguf_blocks import (
    block_type,
    block_type_for,
    file_rows,
    from_blocks,
    hf_rows,
    scheme_of,
    to_blocks,
)
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

KIND = gguf.GGMLQuantizationType
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
NAME = "model.layers.0.mlp.up_proj"


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes [rows, bytes a row] whose float16 numbers are finite, of both signs."""
    _, values, size, halves = FORMULAS[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in halves:
        numbers = (random.standard_normal(len(blocks)) * 2).astype("<f2")
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def random_weight(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QWeight:
    """Random codes, float16 scales of both signs, and zeros where the scheme has some."""
    generator = torch.Generator().manual_seed(seed)
    n, k = shape
    groups = scheme.groups(k)
    codes = torch.randint(0, scheme.top_code + 1, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.randn(n, groups, generator=generator) * 0.01).half()
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, scheme.top_code + 1, (n, groups), generator=generator)
    return QWeight(scheme, codes, scales, None if zeros is None else zeros.to(torch.int16))


def dequantized(kind: str, data: np.ndarray) -> torch.Tensor:
    """What gguf-py makes of blocks."""
    return torch.from_numpy(gguf.quants.dequantize(data, KIND[kind]))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("kind", FORMULAS)
@given(rows=st.integers(1, 6), blocks=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_every_block_type_reads_to_the_values_of_gguf_py_bit_for_bit(
    kind: str, rows: int, blocks: int, seed: int
) -> None:
    packed = random_blocks(kind, rows, blocks * FORMULAS[kind][1], seed)
    qweight = from_blocks(NAME, kind, packed)
    assert qweight.scheme == scheme_of(kind)
    assert same_bits(qweight.dequantize(), dequantized(kind, packed))


@pytest.mark.parametrize("kind", FORMULAS)
def test_every_block_type_reads_to_the_values_of_its_formula(kind: str) -> None:
    formula, values, size, _ = FORMULAS[kind]
    packed = random_blocks(kind, 5, values * 2, seed=4)
    flat = [v for block in packed.reshape(-1, size) for v in formula(block.tobytes())]
    wanted = torch.tensor(flat, dtype=torch.float64).view(5, -1)
    got = from_blocks(NAME, kind, packed).dequantize().double()
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-7


@pytest.mark.parametrize("kind", sorted(FORMULAS.keys() - {"Q8_0"}))
def test_sabotage_swapped_nibbles_give_other_codes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two comparisons above can fail: with high and low nibbles taken for each other."""
    packed = random_blocks(kind, 3, FORMULAS[kind][1], seed=2)
    right = gguf_blocks._nibbles

    def swapped(packed: np.ndarray, run: int) -> np.ndarray:
        return right((packed << 4) | (packed >> 4), run)

    monkeypatch.setattr(gguf_blocks, "_nibbles", swapped)
    assert not same_bits(from_blocks(NAME, kind, packed).dequantize(), dequantized(kind, packed))


@pytest.mark.parametrize(
    ("kind", "block", "codes", "scales", "minimums"),
    [
        ("Q4_0", struct.pack("<e", 2) + b"\xf0" * 16, [0] * 16 + [15] * 16, [2.0], None),
        ("Q4_1", struct.pack("<ee", 0.5, -1) + b"\x42" * 16, [2] * 16 + [4] * 16, [0.5], [-1.0]),
        # fifth bits of the first half only: 16 + 1, then 0
        ("Q5_0", struct.pack("<eI", 1, 0xFFFF) + b"\x01" * 16, [17] * 16 + [0] * 16, [1.0], None),
        # int8 -128, 0 and 127 are codes 0, 128 and 255
        (
            "Q8_0",
            struct.pack("<e32b", 0.25, *([-128, 0, 127, -1] * 8)),
            [0, 128, 255, 127] * 8,
            [0.25],
            None,
        ),
        # d 1, dmin 2; scales 3, 3, 3, 3, 2, 2, 2, 2 and minimums 1, 1, 1, 1, 5, 5, 5, 5
        (
            "Q4_K",
            struct.pack("<ee", 1, 2) + bytes([3] * 4 + [1] * 4 + [0x52] * 4) + b"\x41" * 128,
            ([1] * 32 + [4] * 32) * 4,
            [3.0] * 4 + [2.0] * 4,
            [-2.0] * 4 + [-10.0] * 4,
        ),
        # upper bits 2 everywhere: 32 + nibble
        (
            "Q6_K",
            b"\x31" * 128 + b"\xaa" * 64 + b"\x02" * 16 + struct.pack("<e", 0.5),
            ([33] * 64 + [35] * 64) * 2,
            [1.0] * 16,
            None,
        ),
    ],
)
def test_blocks_written_by_hand_give_the_codes_computed_by_hand(
    kind: str,
    block: bytes,
    codes: list[int],
    scales: list[float],
    minimums: list[float] | None,
) -> None:
    qweight = from_blocks(NAME, kind, np.frombuffer(block, np.uint8).reshape(1, -1))
    assert qweight.codes.tolist() == [codes]
    assert qweight.scales.tolist() == [scales]
    if minimums is None:
        assert qweight.minimums is None
    else:
        assert qweight.minimums is not None
        assert qweight.minimums.tolist() == [minimums]
    if kind in WRITTEN:
        assert to_blocks(NAME, qweight).data.tobytes() == block


def test_a_weight_written_by_hand_is_the_bytes_computed_by_hand() -> None:
    """Codes 0..15 then 15..0 with scale 0.5: byte j has code j low and 15 - j high."""
    codes = torch.tensor([[*range(16), *reversed(range(16))]], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5]]).half(), torch.tensor([[3]], dtype=torch.int16)
    nibbles = bytes(j | (15 - j) << 4 for j in range(16))
    symmetric = to_blocks(NAME, QWeight(Scheme(4, 32), codes, scales))
    assert symmetric.data.tobytes() == struct.pack("<e", 0.5) + nibbles
    asymmetric = to_blocks(NAME, QWeight(Scheme(4, 32, False), codes, scales, zeros))
    assert asymmetric.data.tobytes() == struct.pack("<ee", 0.5, -1.5) + nibbles


@pytest.mark.parametrize("kind", WRITTEN)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_blocks_to_weight_to_blocks_are_the_same_bytes(
    kind: str, rows: int, blocks: int, seed: int
) -> None:
    packed = random_blocks(kind, rows, blocks * 32, seed)
    again = to_blocks(NAME, from_blocks(NAME, kind, packed))
    assert (again.kind, again.exact) == (kind, True)
    assert np.array_equal(again.data, packed)


@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 5),
    group=st.sampled_from([32, 64, 96, 128, PER_CHANNEL]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_symmetric_codes_with_float16_scales_come_back_exactly(
    bits: int, rows: int, group: int, groups: int, seed: int
) -> None:
    size = 64 if group == PER_CHANNEL else group
    qweight = random_weight(Scheme(bits, group), (rows, size * groups), seed)
    blocks = to_blocks(NAME, qweight)
    assert blocks.exact
    assert blocks.exactness.startswith("exact")
    again = from_blocks(NAME, blocks.kind, blocks.data)
    shift = again.scheme.midpoint - qweight.scheme.midpoint
    assert torch.equal(again.codes, qweight.codes + shift)
    assert same_bits(dequantized(blocks.kind, blocks.data), qweight.dequantize())
    each = qweight.in_features // 32 // qweight.scales.shape[1]
    assert torch.equal(again.scales, qweight.scales.repeat_interleave(each, dim=1))


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (Scheme(2, 32), "Q4_0"), (Scheme(4, 128), "Q4_0"), (Scheme(4), "Q4_0"),
        (Scheme(3, 64, False), "Q4_1"), (Scheme(4, 32, False), "Q4_1"), (Scheme(5, 32), "Q5_0"),
        (Scheme(5, 32, False), "Q5_1"), (Scheme(6, 64), "Q8_0"), (Scheme(8), "Q8_0"),
    ],
)  # fmt: skip
def test_a_scheme_tells_its_block_type_before_there_are_codes(scheme: Scheme, kind: str) -> None:
    assert block_type(NAME, scheme, 256) == kind
    assert to_blocks(NAME, random_weight(scheme, (2, 256))).kind == kind


def test_bfloat16_scales_are_exact_and_float32_scales_are_lossy_with_their_change() -> None:
    qweight = random_weight(Scheme(8), (16, 64))
    wide = torch.randn(16, 1, generator=torch.Generator().manual_seed(1)) * 0.01
    rounded = QWeight(qweight.scheme, qweight.codes, wide.bfloat16())
    assert to_blocks(NAME, rounded).exact
    assert same_bits(dequantized("Q8_0", to_blocks(NAME, rounded).data), rounded.dequantize())
    lossy = QWeight(qweight.scheme, qweight.codes, wide)
    blocks = to_blocks(NAME, lossy)
    change = (dequantized("Q8_0", blocks.data) - lossy.dequantize()).abs()
    assert not blocks.exact
    assert blocks.largest_change == float(change.max())
    assert blocks.mean_change == pytest.approx(float(change.double().mean()), rel=1e-12)
    assert float((change / lossy.dequantize().abs().clamp_min(1e-9)).max()) < 2**-10
    kind, sentence = block_type_for(NAME, lossy)
    assert kind == "Q8_0"
    assert sentence == blocks.exactness
    assert sentence.startswith("lossy: float16 rounds 16 of 16 scales; weights change by up to")


def test_integer_zeros_are_exact_where_their_minimum_fits_float16_and_measured_where_not() -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (8, 64), generator=generator, dtype=torch.uint8)
    powers = torch.full((8, 2), 2.0**-7).half()
    zeros = torch.randint(0, 16, (8, 2), generator=generator).to(torch.int16)
    exact = QWeight(Scheme(4, 32, False), codes, powers, zeros)
    blocks = to_blocks(NAME, exact)
    assert blocks.exact
    assert torch.equal(dequantized("Q4_1", blocks.data), exact.dequantize())

    scales = (torch.rand(8, 2, generator=generator) * 0.01).half()
    lossy = QWeight(Scheme(4, 32, False), codes, scales, zeros)
    blocks = to_blocks(NAME, lossy)
    change = (dequantized("Q4_1", blocks.data) - lossy.dequantize()).abs()
    assert 0 < blocks.largest_change == float(change.max())
    assert blocks.mean_change == pytest.approx(float(change.double().mean()), rel=1e-12)
    assert blocks.largest_change < float(scales.max()) * 15 * 2**-11
    assert "minimums" in blocks.exactness
    assert "scales" not in blocks.exactness


def test_a_minimum_is_rounded_once_from_its_exact_product() -> None:
    """-s*z in float32 and then float16 would be rounded twice; here the two differ."""
    scales = torch.tensor([[float.fromhex("0x1.55d554p-2")]], dtype=torch.float32)
    zeros = torch.tensor([[3]], dtype=torch.int16)
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    assert np.float16((-scales * 3).numpy()[0, 0]) != np.float16(-float(scales[0, 0]) * 3)
    blocks = to_blocks(NAME, QWeight(Scheme(4, 32, False), codes, scales, zeros))
    wanted = np.float16(-float(scales[0, 0]) * 3)
    assert blocks.data[0, 2:4].view("<f2")[0] == wanted


def test_a_scale_that_no_weight_uses_makes_nothing_lossy() -> None:
    codes = torch.full((1, 32), 128, dtype=torch.uint8)
    blocks = to_blocks(NAME, QWeight(Scheme(8), codes, torch.tensor([[0.1]])))
    assert blocks.exact
    assert blocks.exactness == "exact: float16 rounds 1 of 1 scales; no weight changes"


def test_k_types_can_become_q4_1_with_the_rounding_told() -> None:
    qweight = from_blocks(NAME, "Q4_K", random_blocks("Q4_K", 2, 256, seed=1))
    blocks = to_blocks(NAME, qweight)
    assert blocks.kind == "Q4_1"
    assert not blocks.exact
    change = (dequantized("Q4_1", blocks.data) - qweight.dequantize()).abs().max()
    assert blocks.largest_change == float(change)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"g_idx": torch.arange(64, dtype=torch.int32) % 2}, "g_idx"),
        ({"scales": torch.full((2, 2), 7e4)}, "65504"),
        ({"scales": torch.tensor([[1.0, float("nan")]] * 2)}, "nan"),
    ],
)
def test_a_weight_that_no_block_holds_is_refused_with_the_reason(
    changes: dict[str, Any], words: str
) -> None:
    good = random_weight(Scheme(4, 32), (2, 64))
    bad = QWeight(**{"scheme": good.scheme, "codes": good.codes, "scales": good.scales} | changes)
    for refuse in (to_blocks, block_type_for):
        with pytest.raises(BadTensor, match=words) as told:
            refuse(NAME, bad)
        assert NAME in str(told.value)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("scheme", "columns", "words"),
    [
        (Scheme(6, 16), 256, "groups of 16"),
        (Scheme(4, 48), 96, "groups of 48"),
        (Scheme(4), 80, "in_features 80"),
        (Scheme(8, 32, False), 64, "asymmetric 8-bit"),
        (Scheme(6, 32, False), 64, "asymmetric 6-bit"),
    ],
)
def test_a_scheme_that_no_block_type_has_is_refused_by_its_numbers(
    scheme: Scheme, columns: int, words: str
) -> None:
    with pytest.raises(BadTensor, match=words):
        block_type(NAME, scheme, columns)
    with pytest.raises(BadTensor, match=words):
        to_blocks(NAME, random_weight(scheme, (2, columns)))


def test_an_infinite_scale_in_a_block_is_refused_with_its_place() -> None:
    packed = random_blocks("Q4_0", 3, 64, seed=0)
    packed[1, 18:20] = np.frombuffer(struct.pack("<e", float("inf")), np.uint8)
    with pytest.raises(BadTensor, match=r"scale \[1, 1\] is inf"):
        from_blocks(NAME, "Q4_0", packed)


@given(heads=st.integers(1, 6), half=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_the_two_row_orders_undo_each_other_and_are_the_converters(heads: int, half: int) -> None:
    rows = heads * half * 2
    there, back = hf_rows(rows, heads), file_rows(rows, heads)
    assert np.array_equal(there[back], np.arange(rows))
    values = np.arange(rows)
    assert np.array_equal(values[there], interleave(values, heads))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_linears_of_a_file_read_as_codes_give_the_values_of_the_file(
    kind: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 8}
    tensors = file_tensors(tiny_model("llama", **sizes), "llama")
    blocks = {
        name: KIND[kind] for name, values in tensors.items()
        if values.ndim == 2 and values.shape[1] % 256 == 0 and "ffn_up" not in name
    }  # fmt: skip
    for name in blocks:
        rows, columns = tensors[name].shape
        tensors[name] = random_blocks(kind, rows, columns, seed=rows)
    path = write_gguf(
        tmp_path / "m.gguf", tiny_model("llama", **sizes), "llama", tensors, blocks=blocks
    )
    checkpoint = GGUFCheckpoint(path)
    layer = "model.layers.0."
    assert set(checkpoint.linears) == {
        "lm_head", *(f"{layer}self_attn.{part}_proj" for part in "qkvo"),
        f"{layer}mlp.gate_proj", f"{layer}mlp.down_proj",
    }  # fmt: skip
    for module, described in checkpoint.linears.items():
        assert described == (kind, scheme_of(kind))
        values = checkpoint.read(f"{module}.weight")
        assert same_bits(checkpoint.read_qweight(module).dequantize(), values)
        values_a_byte = FORMULAS[kind][1] / FORMULAS[kind][2]
        assert checkpoint.stored_bytes(module) * values_a_byte == values.numel()
    embedding = checkpoint.read_qweight("model.embed_tokens").dequantize()
    assert same_bits(embedding, checkpoint.read("model.embed_tokens.weight"))
    with pytest.raises(BadTensor, match="is F32, which has no codes"):
        checkpoint.read_qweight(f"{layer}mlp.up_proj")
    with pytest.raises(BadCheckpoint, match="has no tensor"):
        checkpoint.read_qweight("nothing")
