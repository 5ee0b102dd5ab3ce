"""bitsandbytes: bytes by hand, an independent reader in float32, nesting, and hostile files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightpath.checkpoints import bitsandbytes as bnb
from weightpath.errors import BadTensor
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

# The published tables, as float32: nf4 in order of value, fp4 in order of bits (0.0625 / 12 ...).
NF4 = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    dtype=np.float32,
)  # fmt: skip
_HALF = np.array([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], dtype=np.float32)
FP4 = np.concatenate([_HALF, -_HALF]) / np.float32(12)
TABLES = {"nf4": NF4, "fp4": FP4}


def state_tensor(**said: Any) -> Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def nf4(
    packed: Tensor, absmax: Tensor, shape: tuple[int, int], kind: str = "nf4", **changes: Any
) -> dict[str, Tensor]:
    said = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    return {
        "weight": packed,
        "weight.absmax": absmax,
        "weight.quant_map": torch.from_numpy(TABLES[kind]),
        f"weight.quant_state.bitsandbytes__{kind}": state_tensor(**said | changes),
    }


def scalar_floats(
    packed: bytes, absmax: list[np.float32], blocksize: int, kind: str, count: int
) -> list[np.float32]:
    """Element by element in float32: the high nibble first, blocks over the flattened weight."""
    table = TABLES[kind]
    out = []
    for index in range(count):
        byte = packed[index // 2]
        code = byte & 15 if index % 2 else byte >> 4
        out.append(np.float32(table[code] * absmax[index // blocksize]))
    return out


# --- int8 -------------------------------------------------------------------------------------


def int8(**changes: Tensor | None) -> dict[str, Tensor]:
    plain: dict[str, Tensor | None] = {
        "weight": torch.tensor([[-127, 0, 127], [1, -128, 5]], dtype=torch.int8),
        "SCB": torch.tensor([127.0, 254.0]),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return {key: value for key, value in (plain | changes).items() if value is not None}


def test_int8_rows_are_read_exactly_into_integers() -> None:
    got = bnb.from_tensors("m", int8())
    assert got.qweight is not None
    assert not got.lossy
    assert got.qweight.scheme == Scheme(8)
    assert got.qweight.codes.tolist() == [[1, 128, 255], [129, 0, 133]]
    assert got.weight().tolist() == [[-127.0, 0.0, 127.0], [2.0, -256.0, 10.0]]


def test_int8_weights_are_within_one_rounding_of_the_package_s_own_product() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (16, 32), generator=generator).to(torch.int8)
    scb = (torch.rand(16, generator=generator) * 3).half().float()
    got = bnb.from_tensors("m", int8(weight=weight, SCB=scb)).weight()
    theirs = weight * scb.view(-1, 1) * 7.874015718698502e-3  # int8_vectorwise_dequant
    assert float(((got - theirs).abs() / theirs.abs().clamp(min=1e-9)).max()) <= 2**-23
    assert torch.equal(got.half(), theirs.half())


def test_sabotage_scales_not_divided_by_127_are_another_weight() -> None:
    got = bnb.from_tensors("m", int8(SCB=torch.tensor([1.0, 2.0]))).weight()
    assert got[0, 2] == pytest.approx(1.0)
    assert float(got[0, 2]) != 127.0


def test_the_weight_format_may_be_missing_and_scb_a_column() -> None:
    tensors = int8(weight_format=None, SCB=torch.tensor([[127.0], [254.0]]))
    assert torch.equal(
        bnb.from_tensors("m", tensors).weight(), bnb.from_tensors("m", int8()).weight()
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": None}, ["m.weight", "missing"]),
        ({"weight": torch.ones(2, 3)}, ["m.weight", "float32"]),
        ({"SCB": torch.ones(3)}, ["m.SCB", "(3,)", "(2)"]),
        ({"SCB": torch.ones(2, dtype=torch.int32)}, ["m.SCB", "int32"]),
        ({"SCB": torch.tensor([1.0, float("nan")])}, ["scale [1, 0] is nan"]),
        ({"weight_format": torch.tensor(3, dtype=torch.uint8)}, ["m.weight_format", "is 3"]),
        ({"weight_format": torch.zeros(2, dtype=torch.uint8)}, ["m.weight_format", "[0, 0]"]),
    ],
)  # fmt: skip
def test_a_malformed_int8_linear_is_one_line(
    change: dict[str, Tensor | None], words: list[str]
) -> None:
    with pytest.raises(BadTensor) as caught:
        bnb.from_tensors("m", int8(**change))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# --- nf4 and fp4 ------------------------------------------------------------------------------


def test_bytes_packed_by_hand_are_read_high_nibble_first_and_labelled_lossy() -> None:
    packed = torch.tensor([0x0F, 0x7E, 0xF0, 0x12], dtype=torch.uint8)[:, None]
    got = bnb.from_tensors("m", nf4(packed, torch.tensor([2.0]), (2, 4), dtype="float32"))
    assert got.lossy
    assert got.qweight is None
    assert got.floats is not None
    wanted = [[-2.0, 2.0, 0.0, 2 * NF4[14]], [2.0, -2.0, 2 * NF4[1], 2 * NF4[2]]]
    assert torch.equal(got.floats, torch.tensor(wanted))
    assert "not evenly spaced" in got.notes[0]


def test_sabotage_the_low_nibble_first_is_another_weight() -> None:
    packed = torch.tensor([0x0F, 0x7E, 0xF0, 0x12], dtype=torch.uint8)[:, None]
    swapped = (packed << 4) | (packed >> 4)
    right, wrong = (
        bnb.from_tensors("m", nf4(each, torch.tensor([2.0]), (2, 4))).floats
        for each in (packed, swapped)
    )
    assert right is not None
    assert wrong is not None
    assert not torch.equal(right, wrong)


def test_fp4_codes_are_sign_exponent_and_mantissa() -> None:
    packed = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF], dtype=torch.uint8)
    tensors = nf4(packed[:, None], torch.tensor([12.0]), (1, 16), "fp4", dtype="float32")
    got = bnb.from_tensors("m", tensors).floats
    assert got is not None
    values = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
    torch.testing.assert_close(got[0], torch.tensor(values + [-value for value in values]))
    with pytest.raises(BadTensor, match=r"quant_map: \[\d+\] is .*, fp4 has"):
        bnb.from_tensors("m", tensors | {"weight.quant_map": torch.from_numpy(NF4)})


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 9),
    k=st.sampled_from([1, 2, 7, 30, 64, 96]),
    blocksize=st.sampled_from([32, 64, 128]),
    kind=st.sampled_from(["nf4", "fp4"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 999),
)
def test_any_shape_is_the_published_formula_bit_for_bit_with_blocks_across_rows(
    n: int, k: int, blocksize: int, kind: str, dtype: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    held, blocks = (n * k + 1) // 2, -(-n * k // blocksize)
    packed = torch.randint(0, 256, (held, 1), generator=generator).to(torch.uint8)
    absmax = torch.rand(blocks, generator=generator)
    got = bnb.from_tensors(
        "m", nf4(packed, absmax, (n, k), kind, blocksize=blocksize, dtype=dtype)
    ).floats
    assert got is not None
    assert got.dtype == getattr(torch, dtype)
    wanted = scalar_floats(
        bytes(packed.flatten().tolist()), list(absmax.numpy()), blocksize, kind, n * k
    )
    assert torch.equal(got, torch.tensor(np.array(wanted)).view(n, k).to(got.dtype))


@settings(deadline=None, max_examples=20)
@given(blocks=st.integers(1, 9), nested=st.sampled_from([2, 4, 256]), seed=st.integers(0, 999))
def test_nested_scales_are_un_nested_in_float32_as_the_package_does(
    blocks: int, nested: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (blocks * 32, 1), generator=generator).to(torch.uint8)
    codes = torch.randint(0, 256, (blocks,), generator=generator).to(torch.uint8)
    table = torch.randn(256, generator=generator)
    outer = torch.rand(-(-blocks // nested), generator=generator)
    tensors = nf4(
        packed, codes, (blocks, 64), dtype="float32",
        nested_blocksize=nested, nested_dtype="float32", nested_offset=0.03,
    ) | {"weight.nested_absmax": outer, "weight.nested_quant_map": table}  # fmt: skip
    got = bnb.from_tensors("m", tensors).floats
    assert got is not None
    absmax = [
        np.float32(table.numpy()[int(code)] * outer.numpy()[index // nested]) + np.float32(0.03)
        for index, code in enumerate(codes)
    ]
    wanted = scalar_floats(bytes(packed.flatten().tolist()), absmax, 64, "nf4", blocks * 64)
    assert torch.equal(got, torch.tensor(np.array(wanted)).view(blocks, 64))


def test_sabotage_a_forgotten_nested_offset_is_another_weight() -> None:
    packed = torch.full((32, 1), 0xFF, dtype=torch.uint8)
    codes = torch.zeros(1, dtype=torch.uint8)
    extra = {"weight.nested_absmax": torch.ones(1), "weight.nested_quant_map": torch.ones(256)}
    with_offset, without = (
        bnb.from_tensors(
            "m", nf4(packed, codes, (1, 64), nested_blocksize=256, nested_offset=offset) | extra
        ).weight()
        for offset in (1.0, 0.0)
    )
    assert with_offset[0, 0] == 2.0
    assert without[0, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_any_storage_dtype_holds_the_same_bytes(dtype: torch.dtype) -> None:
    packed = torch.arange(64, dtype=torch.uint8)[:, None]
    absmax = torch.tensor([0.5, 2.0])
    plain = bnb.from_tensors("m", nf4(packed, absmax, (2, 64))).weight()
    stored = packed.view(-1).view(dtype)[:, None]
    assert torch.equal(bnb.from_tensors("m", nf4(stored, absmax, (2, 64))).weight(), plain)


def test_a_weight_of_several_steps_is_the_same_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.randint(0, 256, (333, 1), generator=torch.Generator().manual_seed(0))
    tensors = nf4(packed.to(torch.uint8), torch.rand(11), (6, 111))
    whole = bnb.from_tensors("m", tensors).weight()
    monkeypatch.setattr(bnb, "_STEP", 64)
    assert torch.equal(bnb.from_tensors("m", tensors).weight(), whole)


def small(**changes: Tensor | None) -> dict[str, Tensor]:
    packed = torch.zeros(64, 1, dtype=torch.uint8)
    plain: dict[str, Tensor | None] = {**nf4(packed, torch.ones(2), (2, 64))}
    renamed = {key.replace("__", "."): value for key, value in changes.items() if key != "state"}
    if "state" in changes:
        renamed["weight.quant_state.bitsandbytes__nf4"] = changes["state"]
    return {key: value for key, value in (plain | renamed).items() if value is not None}


def said(**changes: Any) -> Tensor:
    return state_tensor(
        **{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64]} | changes
    )


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (small(weight=None), ["m.weight", "None, 0 bytes", "64"]),
        (small(weight=torch.zeros(63, 1, dtype=torch.uint8)), ["m.weight", "63 bytes", "is 64"]),
        (small(weight=torch.zeros(1, 64, dtype=torch.uint8)), ["m.weight", "transposed"]),
        (small(state=None), ["m.weight", "0 quant states"]),
        (small(state=torch.zeros(9, dtype=torch.uint8)), ["bitsandbytes__nf4", "not a JSON"]),
        (small(state=torch.tensor(list(b"[1]"), dtype=torch.uint8)), ["not a JSON object"]),
        (small(state=torch.zeros(5000, dtype=torch.uint8)), ["5000 bytes", "at most 4096"]),
        (small(state=torch.zeros(9)), ["bitsandbytes__nf4", "float32"]),
        (small(state=said(shape=[2, 1 << 60])), ["m.weight", "64 bytes"]),
        (small(state=said(shape=[2, 64, 1])), ["says shape [2, 64, 1]"]),
        (small(state=said(shape=[2, -64])), ["says shape [2, -64]"]),
        (small(state=said(shape=None)), ["says shape None"]),
        (small(state=said(blocksize=48)), ["says blocksize 48"]),
        (small(state=said(blocksize="64")), ["says blocksize '64'"]),
        (small(state=said(dtype="float64")), ["says dtype 'float64'"]),
        (small(state=said(quant_type="fp4")), ["says quant_type 'fp4'"]),
        (small(state=said(nested_blocksize=0)), ["says nested_blocksize 0"]),
        (small(state=said(nested_offset="x")), ["says nested_offset 'x'"]),
        (small(state=said(nested_offset=float("inf"))), ["says nested_offset inf"]),
        (small(state=said(nested_offset=float("nan"))), ["says nested_offset nan"]),
        (small(weight__absmax=torch.ones(3)), ["m.weight.absmax", "(3,)", "(2)"]),
        (small(weight__absmax=torch.tensor([1.0, float("inf")])), ["m.weight.absmax", "inf"]),
        (small(weight__absmax=torch.ones(2, dtype=torch.uint8)), ["m.weight.absmax", "uint8"]),
        (small(weight__quant_map=torch.ones(15)), ["m.weight.quant_map", "(15,)"]),
        (small(weight__quant_map=torch.full((16,), float("nan"))), ["m.weight.quant_map", "nan"]),
        (small(weight__nested_absmax=torch.ones(1)), ["weight.nested_absmax", "nested_blocksize"]),
        (
            small(weight__nested_absmax=torch.ones(1), state=said(nested_blocksize=256)),
            ["m.weight.absmax", "float32", "uint8"],
        ),
    ],
)  # fmt: skip
def test_a_malformed_4_bit_linear_is_one_line_with_the_part_and_the_numbers(
    tensors: dict[str, Tensor], words: list[str]
) -> None:
    with pytest.raises(BadTensor) as caught:
        bnb.from_tensors("m", tensors)
    message = str(caught.value)
    assert message.startswith("tensor m")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_two_quant_states_are_refused() -> None:
    packed = torch.zeros(64, 1, dtype=torch.uint8)
    both = nf4(packed, torch.ones(2), (2, 64)) | nf4(packed, torch.ones(2), (2, 64), "fp4")
    with pytest.raises(BadTensor, match="2 quant states"):
        bnb.from_tensors("m", both)


# --- names ------------------------------------------------------------------------------------


def test_names_are_split_into_module_and_part() -> None:
    assert bnb.part_of("a.b.weight") == ("a.b", "weight")
    assert bnb.part_of("a.b.weight.absmax") == ("a.b", "weight.absmax")
    assert bnb.part_of("a.SCB") == ("a", "SCB")
    state = "weight.quant_state.bitsandbytes__nf4"
    assert bnb.part_of(f"a.b.{state}") == ("a.b", state)
    assert bnb.part_of("a.b.bias") is None
    assert bnb.part_of("a.bweight") is None


def test_it_is_recognised_by_its_config_or_its_names() -> None:
    assert bnb.recognise({"quant_method": "bitsandbytes"}, []) == "quant_method bitsandbytes"
    assert bnb.recognise({}, ["a.weight", "a.SCB"]) == "a tensor named a.SCB"
    assert bnb.recognise({}, ["a.weight.absmax"]) == "a tensor named a.weight.absmax"
    assert bnb.recognise({}, ["a.weight"]) is None
