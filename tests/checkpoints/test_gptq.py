"""GPTQ files: golden words, an independent reader, the zero conventions, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints import gptq
from weightpath.checkpoints.gptq import GptqSettings
from weightpath.checkpoints.gptq_zeros import count_zeros, unpack
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

# --- an independent reader: whole columns as one big integer, element by element -------------


def stream_of(words: list[int], width: int) -> int:
    """A run of `width`-bit words as one integer, the first word lowest."""
    return sum((word & ((1 << width) - 1)) << (width * place) for place, word in enumerate(words))


def field(stream: int, bits: int, index: int) -> int:
    return (stream >> (bits * index)) & ((1 << bits) - 1)


def planar_field(words: list[int], bits: int, index: int) -> int:
    """Field `index` of a run of 32-bit words in gptq_p's planes."""
    block, inside = divmod(index, 32)
    words, value, first = words[block * bits : (block + 1) * bits], 0, 0
    while first < bits:
        width = {3: {0: 2, 2: 1}}.get(bits, {0: 4, 4: 2 if bits > 5 else 1, 6: 1})[first]
        value |= field(stream_of(words[first : first + width], 32), width, inside) << first
        first += width
    return value


def scalar_weight(tensors: dict[str, Tensor], bits: int, size: int, convention: str) -> Tensor:
    """The weight [N, K] by the published formula, one element at a time."""
    qweight, scales = tensors["qweight"], tensors["scales"].tolist()
    n, width = qweight.shape[1], qweight.element_size() * 8
    k = qweight.shape[0] * width // bits
    group_of = [column // size for column in range(k)]
    if "g_idx" in tensors:
        group_of = tensors["g_idx"].tolist()
    zeros = [stream_of(words, width) for words in tensors["qzeros"].tolist()]
    less_one = 1 if convention == "v1" else 0
    out = []
    for row in range(n):
        codes = stream_of(qweight[:, row].tolist(), width)
        for column, group in enumerate(group_of):
            zero = (field(zeros[group], bits, row) + less_one) % (1 << bits)
            out.append((field(codes, bits, column) - zero) * scales[group][row])
    return torch.tensor(out).view(n, k)


def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}


def made(
    bits: int,
    n: int,
    k: int,
    size: int,
    seed: int = 0,
    lowest: int = 1,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
) -> QWeight:
    """A seeded QWeight whose zeros are `lowest` or more."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if size == PER_CHANNEL else k // size
    zeros = torch.randint(lowest, 1 << bits, (n, groups), generator=generator).to(torch.int16)
    zeros[0, 0] = 1  # not all the midpoint, whatever the seed
    return QWeight(
        Scheme(bits, size, symmetric),
        torch.randint(0, 1 << bits, (n, k), generator=generator).to(torch.uint8),
        (torch.rand(n, groups, generator=generator) + 0.5).to(dtype),
        None if symmetric else zeros,
    )


def same(a: QWeight, b: QWeight) -> bool:
    zeros = (a.zeros is None) == (b.zeros is None) and (
        a.zeros is None or torch.equal(a.zeros, b.zeros)  # type: ignore[arg-type]
    )
    return (
        a.scheme == b.scheme
        and torch.equal(a.codes, b.codes)
        and torch.equal(a.scales, b.scales)
        and a.scales.dtype == b.scales.dtype
        and zeros
    )


def signed(words: list[int], bits: int = 32) -> list[int]:
    return [word - (1 << bits) if word >> (bits - 1) else word for word in words]


# --- golden words, packed by hand ------------------------------------------------------------

# Codes 0, 1, 2, ... modulo 2**bits down each column: 32 codes, as `bits` words.
GOLDEN = {
    2: [0xE4E4E4E4] * 2,
    3: [0x88FAC688, 0xC688FAC6, 0xFAC688FA],
    4: [0x76543210, 0xFEDCBA98] * 2,
    8: [0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C,
        0x13121110, 0x17161514, 0x1B1A1918, 0x1F1E1D1C],
}  # fmt: skip


def golden_tensors(bits: int) -> dict[str, Tensor]:
    words = torch.tensor(signed(GOLDEN[bits]), dtype=torch.int32)
    return {
        "qweight": words[:, None].repeat(1, 32),  # every column the same codes along K
        "qzeros": words[None],  # zero n of the only group is n modulo 2**bits
        "scales": torch.ones(1, 32, dtype=torch.float16),
    }


def sequence(bits: int) -> Tensor:
    return torch.arange(32) % (1 << bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_packed_by_hand_are_read_as_their_codes_and_zeros(bits: int) -> None:
    config = GptqSettings(bits, 32)
    got = gptq.from_tensors("x", config, golden_tensors(bits), "v2")
    assert torch.equal(got.codes.long(), sequence(bits).repeat(32, 1))
    assert got.zeros is not None
    assert torch.equal(got.zeros[:, 0].long(), sequence(bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_same_codes_are_written_as_the_words_packed_by_hand(bits: int) -> None:
    qweight = QWeight(
        Scheme(bits, 32, False),
        sequence(bits).to(torch.uint8).repeat(32, 1),
        torch.ones(32, 1, dtype=torch.float16),
        sequence(bits).to(torch.int16)[:, None],
    )
    wrote, wanted = bare(gptq.to_tensors("x", qweight, "v2")), golden_tensors(bits)
    assert torch.equal(wrote["qweight"], wanted["qweight"])
    assert torch.equal(wrote["qzeros"], wanted["qzeros"])
    assert torch.equal(wrote["g_idx"], torch.zeros(32, dtype=torch.int32))


def test_sabotage_awq_nibble_order_does_not_give_the_golden_codes() -> None:
    wrong = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    got = gptq.from_tensors("x", GptqSettings(4, 32), golden_tensors(4), "v2").codes
    assert not torch.equal(got.view(32, 4, 8)[..., wrong].reshape(32, 32), got)


def test_sabotage_padded_3_bit_words_do_not_give_the_golden_codes() -> None:
    padded = [(GOLDEN[3][code // 10] >> (3 * (code % 10))) & 7 for code in range(30)]
    got = gptq.from_tensors("x", GptqSettings(3, 32), golden_tensors(3), "v2").codes[0, :30]
    assert got.tolist() != padded
    assert got.tolist()[:10] == padded[:10]


def test_words_of_the_sign_bit_are_read() -> None:
    assert int(golden_tensors(4)["qweight"].min()) < 0
    got = gptq.from_tensors("x", GptqSettings(4, 32), golden_tensors(4), "v2")
    assert got.codes[0, 8:16].tolist() == list(range(8, 16))


# --- against the scalar formula --------------------------------------------------------------


@hypothesis_settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 2),
    groups=st.integers(1, 3),
    size=st.sampled_from([32, 64, PER_CHANNEL]),
    convention=st.sampled_from(["v1", "v2"]),
    seed=st.integers(0, 1000),
)
def test_any_shape_agrees_with_the_formula_read_element_by_element(
    bits: int, rows: int, groups: int, size: int, convention: gptq.Convention, seed: int
) -> None:
    k = 64 if size == PER_CHANNEL else size * groups
    qweight = made(bits, 32 * rows, k, size, seed)
    tensors = bare(gptq.to_tensors("x", qweight, convention))
    got = gptq.from_tensors("x", GptqSettings(bits, size, sym=False), tensors, convention)
    assert same(got, qweight)
    assert got.g_idx is None
    wanted = scalar_weight(tensors, bits, k if size == PER_CHANNEL else size, convention)
    assert torch.equal(got.dequantize(), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_scales_of_any_type_and_either_sign_come_back_as_they_were(
    dtype: torch.dtype, symmetric: bool, version: gptq.Convention
) -> None:
    qweight = made(4, 64, 128, 64, dtype=dtype, symmetric=symmetric)
    qweight = replace(qweight, scales=qweight.scales * torch.tensor([[-1, 1]], dtype=dtype))
    tensors = bare(gptq.to_tensors("x", qweight, version))
    got = gptq.from_tensors("x", GptqSettings(4, 64, sym=symmetric), tensors, version)
    assert same(got, qweight)
    assert bool((got.scales < 0).any())
    assert (got.zeros is None) == symmetric


@pytest.mark.parametrize("word", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("by_word", [False, True])
def test_words_of_any_pack_dtype_hold_the_same_codes(
    word: torch.dtype, bits: int, by_word: bool
) -> None:
    qweight = made(bits, 64, 128, 64)
    tensors = bare(gptq.to_tensors("x", qweight, "v1"))
    stream = tensors["qweight"].t().contiguous().view(word).t().contiguous()
    tensors |= {"qweight": stream, "qzeros": tensors["qzeros"].view(word)}
    config = GptqSettings(bits, 64, pack_dtype=word, zeros_by_word=by_word)
    got = gptq.from_tensors("x", config, tensors, "v1")
    assert same(got, qweight)
    assert torch.equal(got.dequantize(), scalar_weight(tensors, bits, 64, "v1"))


def test_3_bit_rows_of_64_codes_fill_6_words_and_nothing_after_them() -> None:
    qweight = made(3, 32, 64, 32)
    tensors = bare(gptq.to_tensors("x", qweight, "v2"))
    assert tuple(tensors["qweight"].shape) == (6, 32)
    assert tuple(tensors["qzeros"].shape) == (2, 3)
    assert same(gptq.from_tensors("x", GptqSettings(3, 32), tensors, "v2"), qweight)


def test_3_bit_codes_in_words_other_than_32_bits_are_refused() -> None:
    tensors = bare(gptq.to_tensors("x", made(3, 32, 64, 32), "v2"))
    tensors["qweight"] = tensors["qweight"].t().contiguous().view(torch.int16).t()
    with pytest.raises(BadTensor, match=r"3-bit codes in torch.int16"):
        gptq.from_tensors("x", GptqSettings(3, 32), tensors, "v2")


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_planes_of_gptq_p_agree_with_a_reader_that_goes_plane_by_plane(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(1 << 31), 1 << 31, (2 * bits, 32), generator=generator).to(torch.int32)
    zeros = words[:bits, :1].t().contiguous()
    tensors = {"qweight": words, "qzeros": zeros, "scales": torch.ones(1, 32)}
    config = GptqSettings(bits, PER_CHANNEL, checkpoint_format="gptq_p")
    got = gptq.from_tensors("x", config, tensors, "v1")  # planes are v2 whatever is asked
    for row in range(32):
        column = words[:, row].tolist()
        assert got.codes[row].tolist() == [planar_field(column, bits, i) for i in range(64)]
    assert got.zeros is not None
    assert got.zeros[:, 0].tolist() == [planar_field(zeros[0].tolist(), bits, i) for i in range(32)]


def test_sabotage_3_bit_planes_read_without_the_label_give_other_codes() -> None:
    words = torch.tensor(signed(GOLDEN[3]), dtype=torch.int32)[None]
    dense = unpack(words, GptqSettings(3, 32), 32)
    assert not torch.equal(
        unpack(words, GptqSettings(3, 32, checkpoint_format="gptq_p"), 32), dense
    )
    assert dense[0].tolist() == sequence(3).tolist()


# --- zero points -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_wrong_convention_gives_other_weights_everywhere_by_one_scale(bits: int) -> None:
    qweight = made(bits, 32, 64, 32)
    tensors = bare(gptq.to_tensors("x", qweight, "v1"))
    right = gptq.from_tensors("x", GptqSettings(bits, 32), tensors, "v1").dequantize()
    wrong = gptq.from_tensors("x", GptqSettings(bits, 32), tensors, "v2").dequantize()
    assert torch.equal(right, qweight.dequantize())
    scales = qweight.scales.float().repeat_interleave(32, 1)
    torch.testing.assert_close(wrong - right, scales)


def test_v1_zeros_of_0_beside_15_are_read_field_by_field() -> None:
    stored = 0x77777EF7  # lanes from the lowest: 7, 15, 14, 7, 7, 7, 7, 7
    words = torch.tensor([[stored]], dtype=torch.int32)
    got = _zeros_of(words, GptqSettings(4, 32))
    assert got == [8, 0, 15, 8, 8, 8, 8, 8]


def test_v1_zeros_of_a_word_writer_are_read_word_by_word() -> None:
    zeros = [8, 0, 15, 8, 0, 0, 15, 1]
    whole = sum(zero << (4 * lane) for lane, zero in enumerate(zeros))
    words = torch.tensor([signed([(whole - 0x11111111) % (1 << 32)])], dtype=torch.int32)
    assert _zeros_of(words, GptqSettings(4, 32, zeros_by_word=True)) == zeros
    assert _zeros_of(words, GptqSettings(4, 32)) != zeros  # the borrow reached a neighbour


def _zeros_of(words: Tensor, config: GptqSettings) -> list[int]:
    tensors = {"qweight": torch.zeros(4, 8, dtype=torch.int32), "qzeros": words,
               "scales": torch.ones(1, 8)}  # fmt: skip
    zeros = gptq.from_tensors("x", config, tensors, "v1").zeros
    assert zeros is not None
    return zeros[:, 0].tolist()


def test_writing_a_zero_of_0_as_v1_is_refused_with_its_count_unless_asked_for() -> None:
    qweight = made(4, 32, 64, 32)
    zeros = torch.full((32, 2), 8, dtype=torch.int16)
    zeros[1], zeros[2] = 0, 15
    qweight = replace(qweight, zeros=zeros)
    assert gptq.unstorable_zeros(qweight) == 2
    with pytest.raises(BadTensor, match=r"2 of 64 zero points are 0.*gptq_v2"):
        gptq.to_tensors("x", qweight, "v1")
    tensors = bare(gptq.to_tensors("x", qweight, "v1", wrap_zeros=True))
    assert tensors["qzeros"][0, 0].item() == signed([0x77777EF7])[0]
    assert same(gptq.from_tensors("x", GptqSettings(4, 32), tensors, "v1"), qweight)
    as_v2 = bare(gptq.to_tensors("x", qweight, "v2"))
    assert same(gptq.from_tensors("x", GptqSettings(4, 32), as_v2, "v2"), qweight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("version", "label"), [("v1", "gptq"), ("v2", "gptq_v2")])
def test_symmetric_files_are_told_apart_by_their_data_alone(
    bits: int, version: gptq.Convention, label: str
) -> None:
    words = gptq.to_tensors("x", made(bits, 32, 64, 32, symmetric=True), version)["x.qzeros"]
    config = GptqSettings(bits, 32)
    found = gptq.zero_convention([words, words], bits, config)
    assert found.convention == version
    assert "all 128 stored zeros" in found.how
    assert found.contradiction is None
    honest = replace(config, checkpoint_format=label)
    assert gptq.zero_convention([words], bits, honest).contradiction is None


def test_eights_under_a_v1_label_are_read_as_v2_and_the_label_is_reported() -> None:
    words = torch.full((4, 4), signed([0x88888888])[0], dtype=torch.int32)
    config = gptq.settings(
        {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}, "config.json"
    )
    convention, how, contradiction = gptq.zero_convention([words], 4, config)
    assert convention == "v2"
    assert "midpoint" in how
    assert contradiction is not None
    assert "gptq means v1" in contradiction


def test_sabotage_the_lying_label_believed_gives_other_weights() -> None:
    qweight = made(4, 32, 64, 32, symmetric=True)
    tensors = bare(gptq.to_tensors("x", qweight, "v2"))
    believed = gptq.from_tensors("x", GptqSettings(4, 32), tensors, "v1")
    assert not torch.equal(believed.dequantize(), qweight.dequantize())


def test_asymmetric_files_follow_the_label_and_without_one_are_refused() -> None:
    words = gptq.to_tensors("x", made(4, 32, 64, 32), "v1")["x.qzeros"]
    config = GptqSettings(4, 32, sym=False, where="config.json")
    for label, convention in (("gptq", "v1"), ("gptq_v2", "v2")):
        found = gptq.zero_convention([words], 4, replace(config, checkpoint_format=label))
        assert (found.convention, found.contradiction) == (convention, None)
    with pytest.raises(BadCheckpoint, match=r"config.json: 64 stored zeros.*checkpoint_format"):
        gptq.zero_convention([words], 4, config)


def test_the_mean_of_the_codes_settles_what_no_label_does_and_contradicts_a_false_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator).view(64, 8, 32)
    low, high = weight.amin(2, keepdim=True), weight.amax(2, keepdim=True)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = (weight / scales + zeros).round().clamp(0, 15).to(torch.uint8).view(64, 256)
    qweight = QWeight(
        Scheme(4, 32, False), codes, scales[..., 0].half(), zeros[..., 0].to(torch.int16)
    )
    config = GptqSettings(4, 32, sym=False)
    for version, label in (("v1", "gptq_v2"), ("v2", "gptq")):
        tensors = bare(gptq.to_tensors("x", qweight, version))  # type: ignore[arg-type]
        offset = gptq.code_offset("x", config, tensors)
        assert abs(offset - (version == "v1")) < 0.1
        assert gptq.zero_convention([tensors["qzeros"]], 4, config, offset).convention == version
        lying = replace(config, checkpoint_format=label)
        found = gptq.zero_convention([tensors["qzeros"]], 4, lying, offset)
        assert found.convention == ("v1" if label == "gptq" else "v2")  # the label still decides
        assert found.contradiction is not None
        assert f"as in {version}" in found.contradiction


def test_zero_points_off_the_midpoint_under_sym_true_are_reported_with_their_count() -> None:
    words = gptq.to_tensors("x", made(4, 32, 64, 32), "v1")["x.qzeros"]
    config = GptqSettings(4, 32, sym=True, checkpoint_format="gptq")
    found = gptq.zero_convention([words], 4, config)
    assert found.contradiction is not None
    assert "sym is true, but" in found.contradiction
    ruled = gptq.settings({"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq",
                           "dynamic": {"+:x$": {"sym": False}}})  # fmt: skip
    assert gptq.zero_convention([words], 4, ruled).contradiction is None


def test_modules_of_other_bits_and_unfilled_words_are_counted_as_themselves() -> None:
    four = torch.full((1, 4), 0x77777777, dtype=torch.int32)
    eight = torch.full((1, 8), 0x7F7F7F7F, dtype=torch.int32)
    config = GptqSettings(4, 32)
    counts = count_zeros(eight, replace(config, bits=8))
    assert gptq.zero_convention([four, counts], 4, config).convention == "v1"
    with pytest.raises(BadCheckpoint):  # counted at the wrong width they are no longer alike
        gptq.zero_convention([four, eight], 4, config)
    part = torch.tensor([[0x77777777, 0x00007777]], dtype=torch.int32)
    assert count_zeros(part, config, out_features=12).below == 12
    assert count_zeros(part, config).below == 12 != count_zeros(part, config).fields


def test_words_that_autogptq_overran_are_reported_as_lost() -> None:
    overran = torch.tensor([signed([0xFFFFFFF7, 0x37777777])], dtype=torch.int32)
    config = GptqSettings(4, 32, sym=False, checkpoint_format="gptq")
    found = gptq.zero_convention([overran], 4, config)
    assert found.contradiction is not None
    assert "1 words of qzeros" in found.contradiction
    sound = torch.tensor([signed([0x37777EF7])], dtype=torch.int32)  # a 0, and then other values
    assert gptq.zero_convention([overran, sound], 4, config).contradiction is None


def test_zeros_and_codes_that_do_not_fit_their_bits_are_not_written() -> None:
    qweight = made(4, 32, 64, 32)
    signed_zeros = replace(qweight, zeros=torch.full((32, 2), -1, dtype=torch.int16))
    with pytest.raises(BadTensor, match=r"zero points span -1\.\.-1, 4 bits hold 0\.\.15"):
        gptq.to_tensors("x", signed_zeros, "v2")
    spilling = replace(qweight, codes=torch.full((32, 64), 16, dtype=torch.uint8))
    with pytest.raises(BadTensor, match="code 16 exceeds 15"):
        gptq.to_tensors("x", spilling, "v2")
    floats = replace(qweight, zeros=None, minimums=torch.zeros(32, 2))
    with pytest.raises(BadTensor, match="float minimums"):
        gptq.to_tensors("x", floats)


# --- column order ----------------------------------------------------------------------------


def test_a_trivial_g_idx_is_dropped_and_a_permuted_one_is_kept_whatever_desc_act_says() -> None:
    qweight = made(4, 32, 128, 32)
    shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    for desc_act in (True, False):
        config = GptqSettings(4, 32, desc_act=desc_act)
        tensors = bare(gptq.to_tensors("x", qweight))
        assert gptq.from_tensors("x", config, tensors, "v1").g_idx is None
        tensors["g_idx"] = (shuffled // 32).to(torch.int32)
        got = gptq.from_tensors("x", config, tensors, "v1")
        assert got.g_idx is not None
        assert torch.equal(got.g_idx, tensors["g_idx"])
        assert torch.equal(got.dequantize(), scalar_weight(tensors, 4, 32, "v1"))
        again = bare(gptq.to_tensors("x", got))
        assert all(torch.equal(again[part], tensors[part]) for part in tensors)


def test_sabotage_ignoring_a_permuted_g_idx_gives_other_weights() -> None:
    tensors = bare(gptq.to_tensors("x", made(4, 32, 128, 32)))
    tensors["g_idx"] = tensors["g_idx"].flip(0)[torch.arange(128) ^ 32]
    right = gptq.from_tensors("x", GptqSettings(4, 32), tensors, "v1").dequantize()
    del tensors["g_idx"]
    assert not torch.equal(
        gptq.from_tensors("x", GptqSettings(4, 32), tensors, "v1").dequantize(), right
    )


def test_a_g_idx_that_orders_whole_groups_is_dropped_without_changing_a_weight() -> None:
    tensors = bare(gptq.to_tensors("x", made(4, 32, 128, 32)))
    tensors["g_idx"] = torch.tensor([3, 0, 2, 1]).repeat_interleave(32).to(torch.int32)
    got = gptq.from_tensors("x", GptqSettings(4, 32), tensors, "v1")
    assert got.g_idx is None
    assert torch.equal(got.dequantize(), scalar_weight(tensors, 4, 32, "v1"))


@pytest.mark.parametrize("with_g_idx", [True, False])
def test_a_group_that_does_not_divide_k_is_cut_without_changing_a_weight(with_g_idx: bool) -> None:
    finer = made(4, 32, 192, 64)
    tensors = bare(gptq.to_tensors("x", finer))
    tensors |= {part: tensors[part][:2].contiguous() for part in ("qzeros", "scales")}
    tensors["g_idx"] = (torch.arange(192) // 128).to(torch.int32)
    wanted = scalar_weight(tensors, 4, 128, "v1")
    if not with_g_idx:
        del tensors["g_idx"]
    got = gptq.from_tensors("x", GptqSettings(4, 128), tensors, "v1")
    assert (got.scheme.group_size, got.g_idx) == (64, None)
    assert torch.equal(got.dequantize(), wanted)


def test_desc_act_without_a_g_idx_is_refused_unless_groups_were_static() -> None:
    tensors = bare(gptq.to_tensors("x", made(4, 32, 128, 32)))
    del tensors["g_idx"]
    config = GptqSettings(4, 32, desc_act=True)
    with pytest.raises(BadTensor, match=r"x.g_idx: is missing though desc_act is true"):
        gptq.from_tensors("x", config, tensors, "v1")
    gptq.from_tensors("x", replace(config, static_groups=True), tensors, "v1")


# --- hostile and damaged input ---------------------------------------------------------------


def _damaged(**parts: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {**bare(gptq.to_tensors("x", made(4, 64, 128, 64)))}
    return {part: tensor for part, tensor in (tensors | parts).items() if tensor is not None}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"qweight": None}, "x.qweight: is missing"),
        ({"qzeros": None}, "x.qzeros: is missing"),
        ({"scales": None}, "x.scales: is missing"),
        ({"qweight": torch.zeros(16, 64)}, r"x.qweight: is torch.float32 \(16, 64\)"),
        ({"qweight": torch.zeros(1024, dtype=torch.int32)}, r"x.qweight: is torch.int32 \(1024,\)"),
        ({"qweight": torch.zeros(16, 0, dtype=torch.int32)}, r"\(16, 0\)"),
        (
            {"qweight": torch.zeros(15, 64, dtype=torch.int32)},
            "15 rows .* 480 bits; 128 .* fill 512",
        ),
        (
            {"qweight": torch.zeros(32, 64, dtype=torch.int32)},
            "32 rows .*1024 bits; 128 .* fill 512",
        ),
        ({"scales": torch.ones(2, 64, dtype=torch.int32)}, "x.scales: is torch.int32"),
        ({"scales": torch.ones(3, 64)}, r"x.scales: has shape \(3, 64\).*wants \(2, 64\)"),
        ({"scales": torch.ones(64, 2)}, r"x.scales: has shape \(64, 2\).*wants \(2, 64\)"),
        ({"qzeros": torch.zeros(2, 9, dtype=torch.int32)}, r"\(2, 9\).*wants \(2, 8\)"),
        ({"qzeros": torch.zeros(1, 8, dtype=torch.int32)}, r"\(1, 8\).*wants \(2, 8\)"),
        ({"g_idx": torch.zeros(127, dtype=torch.int32)}, "512 bits; 127 columns .* fill 508"),
        ({"g_idx": torch.full((128,), 2, dtype=torch.int32)}, r"spans 2\.\.2, wanted 0\.\.1"),
        ({"g_idx": torch.full((128,), -1, dtype=torch.int32)}, r"spans -1\.\.-1"),
        ({"g_idx": torch.zeros(128)}, "x.g_idx: is torch.float32"),
        ({"scales": torch.full((2, 64), float("nan"))}, "scale .* is nan"),
        ({"scales": torch.full((2, 64), float("inf"))}, "scale .* is inf"),
    ],
)
def test_damaged_parts_are_refused_with_their_name_and_numbers(
    parts: dict[str, Tensor | None], message: str
) -> None:
    gptq.from_tensors("x", GptqSettings(4, 64), _damaged(), "v1")  # sound before the damage
    with pytest.raises(BadTensor, match=message):
        gptq.from_tensors("x", GptqSettings(4, 64), _damaged(**parts), "v1")


@pytest.mark.parametrize("config", [GptqSettings(8, 64), GptqSettings(2, 64), GptqSettings(3, 64),
                                    GptqSettings(4, 128), GptqSettings(4, 32),
                                    GptqSettings(4, PER_CHANNEL), GptqSettings(5, 64)])  # fmt: skip
def test_a_config_of_other_bits_or_groups_than_the_file_is_refused(config: GptqSettings) -> None:
    for g_idx in ({}, {"g_idx": None}):
        with pytest.raises(BadTensor, match=r"quantization config|blocks of 32"):
            gptq.from_tensors("x", config, _damaged(**g_idx), "v1")


def test_shapes_are_refused_before_any_memory_is_taken() -> None:
    word = torch.zeros(1, 1, dtype=torch.int32)
    huge = {"qweight": word.expand(1 << 24, 1 << 24), "qzeros": word, "scales": torch.ones(1, 1)}
    with pytest.raises(BadTensor, match="wants"):  # unpacked it would be 2 PiB
        gptq.from_tensors("x", GptqSettings(4, PER_CHANNEL), huge, "v1")


@hypothesis_settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_parts_of_any_type_shape_and_content_are_read_or_refused_by_name(
    data: st.DataObject,
) -> None:
    side = st.integers(0, 40)
    dtypes = st.sampled_from([torch.int32, torch.int64, torch.int8, torch.float16, torch.float32])
    tensors: dict[str, Tensor] = _damaged()
    for part in data.draw(st.sets(st.sampled_from(gptq.SUFFIXES), max_size=3)):
        shape = tuple(data.draw(st.lists(side, min_size=0, max_size=3)))
        tensors[part] = torch.randint(-99, 99, shape).to(data.draw(dtypes))
    config = GptqSettings(
        data.draw(st.integers(2, 8)),
        data.draw(st.sampled_from([-1, 1, 7, 32, 64, 128])),
        checkpoint_format=data.draw(st.sampled_from([None, "gptq", "gptq_p"])),
        zeros_by_word=data.draw(st.booleans()),
    )
    for read in (
        lambda: gptq.from_tensors("x", config, tensors, "v1"),
        lambda: gptq.code_offset("x", config, tensors),
        lambda: gptq.zero_convention([tensors["qzeros"]], config.bits, config),
    ):
        said = ""
        try:
            read()
        except (BadTensor, BadCheckpoint) as error:
            said = str(error)
        assert "\n" not in said


@pytest.mark.parametrize(
    ("bits", "n", "k"), [(4, 96, 130), (4, 100, 128), (5, 64, 64), (3, 32, 48)]
)
def test_shapes_that_no_reader_takes_are_refused_before_the_work(bits: int, n: int, k: int) -> None:
    with pytest.raises(BadTensor, match=rf"\[{n}, {k}\] at {bits} bits cannot be stored as GPTQ"):
        gptq.planned("x", Scheme(bits), (n, k))


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (3, 64), (8, PER_CHANNEL), (2, 96)])
def test_the_plan_names_every_tensor_that_is_written_with_its_shape(bits: int, size: int) -> None:
    qweight = made(bits, 96, 192, size)
    wrote = gptq.to_tensors("m.x", qweight, "v2")
    plan = gptq.planned("m.x", qweight.scheme, (96, 192))
    assert {item.name for item in plan} == set(wrote)
    for item in plan:
        assert (item.dtype, item.shape) == (wrote[item.name].dtype, tuple(wrote[item.name].shape))
        assert wrote[item.name].is_contiguous()
