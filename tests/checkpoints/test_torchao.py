"""torchao's safetensors: bytes by hand, the published formula, metadata, and hostile files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightpath.checkpoints import torchao
from weightpath.checkpoints.torchao_metadata import REFUSED, TorchaoTensor
from weightpath.errors import BadCheckpoint, BadTensor
from weightpath.scheme import PER_CHANNEL, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

INT4_PARTS = ("qdata", "scale", "zero_point")


def stated(kind: str, rows: int, columns: int, bits: int = 4, **changes: Any) -> TorchaoTensor:
    plain = TorchaoTensor(kind, "weight", bits, (rows, columns), None, ())
    return replace(plain, **changes)


def parts(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {f"_weight_{key}": value for key, value in tensors.items() if value is not None}


# --- an independent reader, one element at a time ---------------------------------------------


def signed(nibble: int) -> int:
    return nibble - 16 if nibble >= 8 else nibble


def scalar_int4(tensors: dict[str, Tensor], size: int) -> list[list[float]]:
    """w = scale * q + zero_point, scales stored [nG, N], two columns a byte."""
    data, scale, zero = (tensors[f"_weight_{key}"].tolist() for key in INT4_PARTS)
    out = []
    for n, row in enumerate(data):
        line = []
        for k in range(2 * len(row)):
            nibble = (row[k // 2] & 255) >> (4 * (k % 2)) & 15
            line.append(scale[k // size][n] * signed(nibble) + zero[k // size][n])
        out.append(line)
    return out


def scalar_unpacked(tensors: dict[str, Tensor], rows: int, size: int) -> list[list[float]]:
    """w = scale * (q - zero_point), a scale for each block of rows by columns."""
    data, scale = tensors["_weight_qdata"].tolist(), tensors["_weight_scale"].tolist()
    zero = tensors["_weight_zero_point"].tolist() if "_weight_zero_point" in tensors else None
    return [
        [
            scale[n // rows][k // size]
            * (code - (zero[n // rows][k // size] if zero is not None else 0))
            for k, code in enumerate(row)
        ]
        for n, row in enumerate(data)
    ]


def random_int4(n: int, k: int, size: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return parts(
        qdata=torch.randint(-128, 128, (n, k // 2), generator=generator).to(torch.int8),
        scale=(torch.rand(k // size, n, generator=generator) + 0.1).to(dtype),
        zero_point=torch.randn(k // size, n, generator=generator).to(dtype),
    )


# --- Int4Tensor -------------------------------------------------------------------------------

# Codes -8, 7, -1, 0 / 1, 2, 3, -4: the first column of a pair in the low nibble.
GOLDEN = torch.tensor([[0x78, 0x0F], [0x21, 0xC3]], dtype=torch.uint8).view(torch.int8)


def golden_int4() -> dict[str, Tensor]:
    """Groups of two columns: scales and offsets [nG, N] = [2, 2]."""
    return parts(
        qdata=GOLDEN,
        scale=torch.tensor([[0.5, 2.0], [1.0, 4.0]], dtype=torch.bfloat16),
        zero_point=torch.tensor([[0.25, 0.0], [3.0, -1.0]], dtype=torch.bfloat16),
    )


def test_int4_bytes_packed_by_hand_are_read_as_their_weight() -> None:
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), golden_int4())
    assert got.qweight is not None
    assert got.qweight.codes.tolist() == [[0, 15, 7, 8], [9, 10, 11, 4]]
    assert got.weight().tolist() == [[-3.75, 3.75, 2.0, 3.0], [2.0, 4.0, 11.0, -17.0]]
    assert got.qweight.scheme == Scheme(4, 2, symmetric=False)
    assert not got.lossy


def test_sabotage_the_high_nibble_first_is_another_weight() -> None:
    tensors = golden_int4()
    data = tensors["_weight_qdata"].view(torch.uint8)
    tensors["_weight_qdata"] = ((data << 4) | (data >> 4)).view(torch.int8)
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors).weight()
    assert got.tolist() != [[-3.75, 3.75, 2.0, 3.0], [2.0, 4.0, 11.0, -17.0]]


def test_sabotage_scales_by_row_first_are_another_weight() -> None:
    tensors = golden_int4()  # [2, 2], so that the wrong way has the right shape
    tensors["_weight_scale"] = tensors["_weight_scale"].t().contiguous()
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors).weight()
    assert got.tolist() != [[-3.75, 3.75, 2.0, 3.0], [2.0, 4.0, 11.0, -17.0]]


@settings(deadline=None, max_examples=30)
@example(n=9, groups=4, size=32, dtype=torch.float16, seed=973)
@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 4),
    size=st.sampled_from([2, 8, 32]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_int4_of_any_shape_is_the_published_formula_bit_for_bit(
    n: int, groups: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    tensors = random_int4(n, groups * size, size, seed, dtype)
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, size), tensors)
    exact = torch.tensor(scalar_int4(tensors, size), dtype=torch.float64)
    if any("rounded to float32" in note for note in got.notes):  # and then says so
        steps = (got.weight().double() - exact).abs() / tensors["_weight_scale"].abs().max()
        assert float(steps.max()) < 1e-5
    else:
        assert torch.equal(got.weight(), exact.float())  # one rounding, of the exact sum


def test_offsets_of_zero_are_a_symmetric_weight_and_whole_ones_integer_zeros() -> None:
    tensors = golden_int4()
    tensors["_weight_zero_point"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors).qweight
    assert got is not None
    assert got.scheme.symmetric
    tensors["_weight_zero_point"] = tensors["_weight_scale"] * torch.tensor([[3.0, 8.0], [-7.0, 0]])
    whole = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert whole.qweight is not None
    assert whole.qweight.zeros is not None
    assert whole.qweight.zeros.tolist() == [[5, 15], [0, 8]]  # 8 - offset / scale
    assert torch.equal(whole.weight(), torch.tensor(scalar_int4(tensors, 2)))
    assert whole.notes == ()


def test_float_offsets_are_kept_as_minimums_and_a_rounding_of_them_is_said() -> None:
    tensors = golden_int4()
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert got.qweight is not None
    assert got.qweight.minimums is not None
    assert "float minimums" in got.notes[0]
    assert "rounded" not in " ".join(got.notes)
    tensors["_weight_zero_point"][0, 0] = 2.0**-30  # 8 * 0.5 less that does not fit float32
    lossy = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert "rounded to float32, by up to 1.9e-09 of a step" in lossy.notes[1]


def test_a_group_of_the_whole_row_is_per_channel() -> None:
    tensors = random_int4(4, 32, 32, 0, torch.float16)
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 32), tensors).qweight
    assert got is not None
    assert got.scheme.group_size == PER_CHANNEL


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1,), ()])
def test_act_pre_scale_stands_beside_the_weight_and_multiplies_its_columns(
    shape: tuple[int, ...],
) -> None:
    factors = torch.tensor([2.0, 0.5, 1.0, 4.0]) if 4 in shape else torch.tensor(2.0)
    tensors = golden_int4() | parts(act_pre_scale=factors.view(shape).to(torch.bfloat16))
    plain = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), golden_int4())
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert got.column_scales is not None
    assert got.column_scales.shape == (4,)
    assert torch.equal(got.weight(), plain.weight() * factors)
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    assert torch.equal(x @ got.weight().t(), (x * factors) @ plain.weight().t())
    assert any("act_pre_scale" in note for note in got.notes)


def test_act_pre_scales_of_one_are_dropped() -> None:
    tensors = golden_int4() | parts(act_pre_scale=torch.ones(4))
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert got.column_scales is None


# --- Int8Tensor and IntxUnpackedToInt8Tensor --------------------------------------------------


def test_int8_codes_by_hand_are_read_exactly() -> None:
    tensors = parts(
        qdata=torch.tensor([[-128, 127, 0], [-1, 1, 5]], dtype=torch.int8),
        scale=torch.tensor([[0.5], [0.25]]),
    )
    got = torchao.from_tensors("m", stated("Int8Tensor", 1, 3, 8), tensors)
    assert got.qweight is not None
    assert got.qweight.scheme == Scheme(8)
    assert got.qweight.codes.tolist() == [[0, 255, 128], [127, 129, 133]]
    assert got.weight().tolist() == [[-64.0, 63.5, 0.0], [-0.25, 0.25, 1.25]]


@settings(deadline=None, max_examples=40)
@given(
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    rows=st.integers(1, 4),
    size=st.sampled_from([1, 4, 16]),
    bits=st.integers(1, 8),
    zero=st.sampled_from([None, torch.int8, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_unpacked_codes_of_any_blocks_and_bits_are_the_published_formula(
    blocks: tuple[int, int],
    rows: int,
    size: int,
    bits: int,
    zero: torch.dtype | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, k, half = blocks[0] * rows, blocks[1] * size, 1 << (bits - 1)
    zeros = torch.randint(-half, half, blocks, generator=generator)
    if zero == torch.bfloat16:
        zeros = zeros + torch.rand(blocks, generator=generator)
    tensors = parts(
        qdata=torch.randint(-half, half, (n, k), generator=generator).to(torch.int8),
        scale=(torch.rand(blocks, generator=generator) + 0.1).to(torch.bfloat16),
        zero_point=torch.zeros(blocks, dtype=torch.int8) if zero is None else zeros.to(zero),
    )
    kind = stated("IntxUnpackedToInt8Tensor", rows, size, bits)
    got = torchao.from_tensors("m", kind, tensors)
    assert got.qweight is not None
    assert got.qweight.scheme.bits == max(bits, 2)
    wanted = torch.tensor(scalar_unpacked(tensors, rows, size), dtype=torch.float64)
    torch.testing.assert_close(got.weight().double(), wanted, rtol=1e-6, atol=1e-6)
    if zero != torch.bfloat16:
        assert torch.equal(got.weight(), wanted.float())
        assert got.qweight.minimums is None
    assert got.qweight.scheme.symmetric == (got.qweight.zeros is got.qweight.minimums is None)


def test_one_scale_for_the_tensor_and_flat_scales_of_old_files_are_spread() -> None:
    data = torch.arange(12, dtype=torch.int8).view(3, 4)
    one = torchao.from_tensors(
        "m", stated("Int8Tensor", 3, 4, 8), parts(qdata=data, scale=torch.tensor([[0.5]]))
    )
    assert torch.equal(one.weight(), data * 0.5)
    flat = torch.tensor([1.0, 2.0, 4.0])
    got = torchao.from_tensors("m", stated("Int8Tensor", 1, 4, 8), parts(qdata=data, scale=flat))
    assert torch.equal(got.weight(), data * flat[:, None])


def test_integer_zero_points_of_an_int8_tensor_become_zeros() -> None:
    data = torch.arange(-4, 4, dtype=torch.int8).view(2, 4)
    zero = torch.tensor([[-128], [3]], dtype=torch.int8)
    tensors = parts(qdata=data, scale=torch.ones(2, 1), zero_point=zero)
    got = torchao.from_tensors("m", stated("Int8Tensor", 1, 4, 8), tensors)
    assert got.qweight is not None
    assert got.qweight.zeros is not None
    assert got.qweight.zeros.tolist() == [[0], [131]]
    assert torch.equal(got.weight(), data.float() - zero)


# --- Int4PlainInt32Tensor ---------------------------------------------------------------------


def xpu() -> dict[str, Tensor]:
    words = torch.tensor([[0x76543210], [0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    return parts(
        qdata=words,
        scale=torch.tensor([[0.5, 1.0], [2.0, 4.0]], dtype=torch.float16),
        zero_point=torch.tensor([[0, 8], [15, 1]], dtype=torch.int8),
    )


def test_xpu_words_packed_by_hand_are_read_as_unsigned_codes_less_their_zeros() -> None:
    got = torchao.from_tensors("m", stated("Int4PlainInt32Tensor", 1, 4), xpu())
    assert got.weight().tolist() == [
        [0.0, 0.5, 1.0, 1.5, -22.0, -20.0, -18.0, -16.0],
        [0.0, 1.0, 2.0, 3.0, 44.0, 48.0, 52.0, 56.0],
    ]
    symmetric = xpu() | parts(zero_point=torch.full((2, 2), 8, dtype=torch.int8))
    found = torchao.from_tensors("m", stated("Int4PlainInt32Tensor", 1, 4), symmetric).qweight
    assert found is not None
    assert found.scheme.symmetric


def test_words_of_an_ascend_npu_are_refused_by_name() -> None:
    tensors = xpu() | parts(zero_point=torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(BadTensor, match=r"_weight_zero_point: is torch.float16.*Ascend NPU"):
        torchao.from_tensors("m", stated("Int4PlainInt32Tensor", 1, 4), tensors)


# --- metadata ---------------------------------------------------------------------------------


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


ENTRIES: dict[str, dict[str, Any]] = {
    "l.0.q_proj.weight": {
        "_type": "Int4Tensor",
        "_data": {
            "activation_dtype": dtype("bfloat16"), "block_size": [1, 128], "shape": [64, 256],
        },
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    },
    "l.0.up_proj.weight": {
        "_type": "Int8Tensor",
        "_data": {
            "act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs", "_data": {}},
            "block_size": [1, 256],
            "dtype": dtype("bfloat16"),
        },
        "_tensor_data_names": ["zero_point", "qdata", "scale"],
    },
    "l.0.k_proj.weight": {
        "_type": "IntxUnpackedToInt8Tensor",
        "_data": {
            "target_dtype": dtype("int3"), "block_size": [1, 32], "dtype": dtype("float32"),
            "activation_quantization": None,
        },
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    },
    "l.0.q_proj.bias": {"_type": "Tensor"},
}  # fmt: skip


def metadata(entries: dict[str, Any]) -> dict[str, str]:
    texts = {name: json.dumps(entry) for name, entry in entries.items()}
    return texts | {"tensor_names": json.dumps(list(entries))}


def test_metadata_says_the_type_blocks_bits_and_parts_of_every_parameter() -> None:
    found = torchao.read_metadata(metadata(ENTRIES), "here")
    assert found == {
        "l.0.q_proj.weight": TorchaoTensor(
            "Int4Tensor", "weight", 4, (1, 128), (64, 256), INT4_PARTS
        ),
        "l.0.up_proj.weight": TorchaoTensor(
            "Int8Tensor", "weight", 8, (1, 256), None, ("zero_point", "qdata", "scale"),
            "int8 activations",
        ),
        "l.0.k_proj.weight": TorchaoTensor(
            "IntxUnpackedToInt8Tensor", "weight", 3, (1, 32), None, INT4_PARTS
        ),
    }  # fmt: skip
    assert found["l.0.q_proj.weight"].suffix("qdata") == "_weight_qdata"


def test_a_file_with_its_metadata_is_read_from_disk(tmp_path: Path) -> None:
    entry = ENTRIES["l.0.q_proj.weight"] | {"_data": {"block_size": [1, 2], "shape": [2, 4]}}
    path = tmp_path / "model.safetensors"
    stored = {f"l.0.q_proj.{key}": value for key, value in golden_int4().items()}
    save_file(stored, path, metadata=metadata({"l.0.q_proj.weight": entry}))
    with safe_open(path, framework="pt") as file:
        said = torchao.read_metadata(file.metadata(), str(path))["l.0.q_proj.weight"]
        leaves = {key.rpartition(".")[2]: file.get_tensor(key) for key in stored}
    got = torchao.from_tensors("l.0.q_proj", said, leaves)
    assert torch.equal(got.weight(), torch.tensor(scalar_int4(golden_int4(), 2)))


def test_int8_activations_are_said_and_not_read() -> None:
    said = stated("Int8Tensor", 1, 4, 8, activations="int8 activations")
    data = parts(qdata=torch.ones(2, 4, dtype=torch.int8), scale=torch.ones(2, 1))
    assert "asks for int8 activations" in torchao.from_tensors("m", said, data).notes[0]


@pytest.mark.parametrize("kind", [*REFUSED, "AffineQuantizedTensor"])
def test_kernel_layouts_floats_and_unknown_types_are_refused_by_name(kind: str) -> None:
    entries = {"l.w.weight": {"_type": kind, "_data": {}, "_tensor_data_names": []}}
    with pytest.raises(BadCheckpoint) as caught:
        torchao.read_metadata(metadata(entries), "folder")
    message = str(caught.value)
    assert message.startswith(f"folder: l.w.weight is a {kind}, {REFUSED.get(kind, 'not a type')}")
    assert "\n" not in message


def entry_with(name: str = "l.0.k_proj.weight", **changes: Any) -> dict[str, str]:
    entry = ENTRIES[name]
    return metadata({name: entry | {"_data": entry["_data"] | changes}})


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        ({}, "says nothing of tensor_names"),
        ({"tensor_names": "["}, "no JSON"),
        ({"tensor_names": "[" * 100_000}, "no JSON"),
        ({"tensor_names": "{}"}, "wanted a list"),
        ({"tensor_names": "[1]"}, "wanted a list"),
        ({"tensor_names": '["a.weight"]'}, "says nothing of a.weight"),
        ({"tensor_names": '["a.weight"]', "a.weight": "7"}, "wanted its _type"),
        ({"tensor_names": '["a.weight"]', "a.weight": '{"_type": 4}'}, "wanted its _type"),
        (metadata({"a.weight": {"_type": "Int4Tensor"}}), "lacks _data"),
        (metadata({"weight": ENTRIES["l.0.q_proj.weight"]}), "lacks"),
        (entry_with(block_size=[1, 1, 32]), "block_size is [1, 1, 32]"),
        (entry_with(block_size=None), "block_size is None"),
        (entry_with(block_size=[1, 0]), "block_size is [1, 0]"),
        (entry_with(block_size=[True, 32]), "[True, 32]"),
        (entry_with("l.0.q_proj.weight", shape=[8, 64, 256]), "shape is [8, 64, 256]"),
        (entry_with(target_dtype=dtype("int9")), "'int9'"),
        (entry_with(target_dtype="int4"), "target_dtype is None"),
    ],
)
def test_malformed_metadata_is_one_line(texts: dict[str, str], word: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        torchao.read_metadata(texts, "folder")
    assert word in str(caught.value)
    assert str(caught.value).startswith("folder")
    assert "\n" not in str(caught.value)


def test_it_is_recognised_by_its_config_or_its_metadata() -> None:
    assert torchao.recognise({"quant_method": "torchao"}, {}) == "quant_method torchao"
    assert torchao.recognise({}, metadata(ENTRIES)) == "tensor_names in the files' metadata"
    assert torchao.recognise({"quant_method": "hqq"}, {"format": "pt"}) is None


# --- hostile tensors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qdata": None}, ["_weight_qdata", "missing"]),
        ({"scale": None}, ["_weight_scale", "missing"]),
        ({"zero_point": None}, ["_weight_zero_point", "missing"]),
        ({"qdata": torch.zeros(2, 2)}, ["_weight_qdata", "float32 (2, 2)", "int8"]),
        ({"qdata": torch.zeros(2, 0, dtype=torch.int8)}, ["_weight_qdata", "(2, 0)"]),
        ({"qdata": torch.zeros(3, 2, 2, dtype=torch.int8)}, ["(3, 2, 2)", "fused experts"]),
        ({"qdata": torch.zeros(2, 3, dtype=torch.int8)}, ["[2, 6]", "metadata says [2, 4]"]),
        ({"scale": torch.ones(2, 3)}, ["_weight_scale", "(2, 3)", "(2, 2)"]),
        ({"scale": torch.ones(2, 2, dtype=torch.int32)}, ["_weight_scale", "int32"]),
        ({"scale": torch.full((2, 2), float("nan"))}, ["nan"]),
        ({"zero_point": torch.full((2, 2), float("inf"))}, ["_weight_zero_point", "inf"]),
        ({"zero_point": torch.ones(4)}, ["_weight_zero_point", "(4,)"]),
        ({"act_pre_scale": torch.ones(3)}, ["_weight_act_pre_scale", "(3,)", "(4)"]),
        ({"act_pre_scale": torch.ones(0)}, ["_weight_act_pre_scale", "(0,)"]),
        ({"act_pre_scale": torch.full((4,), float("inf"))}, ["_weight_act_pre_scale", "inf"]),
        ({"act_pre_scale": torch.ones(4, dtype=torch.int8)}, ["_weight_act_pre_scale", "int8"]),
    ],
)  # fmt: skip
def test_a_malformed_int4_linear_is_one_line_with_the_part_and_the_numbers(
    change: dict[str, Tensor | None], words: list[str]
) -> None:
    said = stated("Int4Tensor", 1, 2, shape=(2, 4), parts=INT4_PARTS)
    tensors = golden_int4() | {f"_weight_{key}": value for key, value in change.items()}
    with pytest.raises(BadTensor) as caught:
        torchao.from_tensors("m", said, {k: v for k, v in tensors.items() if v is not None})
    message = str(caught.value)
    assert message.startswith("tensor m")
    assert "\n" not in message
    for word in words:
        assert word in message


def int8(**changes: Tensor | None) -> dict[str, Tensor]:
    plain: dict[str, Tensor | None] = {
        "qdata": torch.ones(2, 4, dtype=torch.int8), "scale": torch.ones(2, 1),
    }  # fmt: skip
    return parts(**plain | changes)


@pytest.mark.parametrize(
    ("said", "tensors", "word"),
    [
        (stated("Int8Tensor", 1, 3, 8), int8, "blocks of [1, 3] do not tile"),
        (stated("Int8Tensor", 3, 4, 8), int8, "blocks of [3, 4] do not tile"),
        (stated("Int8Tensor", 1, 4, 8), lambda: int8(scale=torch.ones(2, 2)), "(2, 2)"),
        (stated("Int8Tensor", 1, 4, 8, parts=("zero_point",)), int8, "zero_point: is missing"),
        (stated("Int8Tensor", 1, 4, 8), lambda: int8(zero_point=torch.ones(2, 1)), "float32"),
        (stated("IntxUnpackedToInt8Tensor", 1, 4, 4), int8, "_weight_zero_point: is missing"),
        (
            stated("IntxUnpackedToInt8Tensor", 1, 4, 1),
            lambda: int8(zero_point=torch.zeros(2, 1, dtype=torch.int8)),
            "spans 1..1, 1 bits hold -1..0",
        ),
        (stated("Int4Tensor", 2, 2), golden_int4, "blocks of [2, 2] do not tile"),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit_and_codes_out_of_range_are_refused(
    said: TorchaoTensor, tensors: Callable[[], dict[str, Tensor]], word: str
) -> None:
    with pytest.raises(BadTensor) as caught:
        torchao.from_tensors("m", said, tensors())
    assert word in str(caught.value)


def test_a_group_of_scale_zero_is_its_offset() -> None:
    tensors = golden_int4() | parts(scale=torch.zeros(2, 2), zero_point=torch.zeros(2, 2))
    got = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert got.qweight is not None
    assert got.qweight.scheme.symmetric
    assert torch.equal(got.weight(), torch.zeros(2, 4))
    tensors["_weight_zero_point"][0, 1] = 3.0
    constant = torchao.from_tensors("m", stated("Int4Tensor", 1, 2), tensors)
    assert torch.equal(constant.weight(), torch.tensor([[0.0] * 4, [3.0, 3.0, 0.0, 0.0]]))
