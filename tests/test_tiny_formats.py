"""Every tiny checkpoint is read as exactly the weight that its integers stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_formats import BLOCK_TYPES, FORMATS, Written, write
from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES = {
    f"model.layers.{layer}.{part}_proj"
    for layer in range(2)
    for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FORMATS),
    *((name, {"group_size": 64}) for name in FORMATS if name.startswith("awq")),
    ("awq-gemm", {"place": "legacy"}),
    ("awq-gemm", {"place": "nested"}),
    ("awq-gemm", {"place": "missing"}),
    ("awq-gemm", {"symmetric": True, "group_size": -1}),
    *(
        (f"gptq-{version}", {"bits": bits, "symmetric": symmetric})
        for version in ("v1", "v2")
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
    ),
    ("gptq-v1", {"ordered": True, "symmetric": False}),
    ("gptq-v1", {"static_groups": True}),
    ("gptq-v1", {"place": "legacy"}),
    ("gptq-v1", {"place": "both", "shards": 3}),
    ("gptq-v1", {"by_word": True, "symmetric": False, "lowest_zero": 0}),
    ("gptq-v1", {"without": ("checkpoint_format", "quant_method"), "changes": {"format": "gptq"}}),
    ("gptq-v2", {"changes": {"checkpoint_format": "gptq"}}),  # the label lies, the zeros tell
    ("gptq-v2", {"ordered": True, "bits": 3}),
    *(("gptq-v2", {"pack_dtype": dtype}) for dtype in (torch.int8, torch.int16, torch.int64)),
    ("autoround-gptq", {"negative_scales": True}),
    ("autoround-gptq", {"by_word": True, "symmetric": False}),
    *(
        ("ct-packed", {"bits": bits, "symmetric": symmetric})
        for bits in (2, 3, 5, 6, 7, 8)
        for symmetric in (True, False)
    ),
    ("ct-packed", {"symmetric": False, "group_size": -1, "scale_dtype": torch.bfloat16}),
    ("ct-packed", {"place": "missing", "head": True}),
    *(("ct-padded", {"bits": bits, "symmetric": False}) for bits in (3, 5, 6, 7)),
    ("ct-int8", {"symmetric": False}),
    ("torchao-int4", {"symmetric": True, "shards": 2}),
    ("modelopt-int4", {"place": "legacy"}),
    ("modelopt-int4", {"place": "config"}),
    ("bnb-nf4", {"nested": True, "place": "missing"}),
    ("hqq", {"bits": 3}),
    ("hqq", {"whole_zeros": False}),
    ("hqq", {"axis": 0, "group_size": 64}),
    *(("gguf", {"kind": kind}) for kind in BLOCK_TYPES),
    ("gguf", {"tokenizer": False}),
]


def read_weight(opened: LowBitCheckpoint, module: str) -> np.ndarray:
    return opened.read_linear(module).weight().numpy()


@pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=[f"{name}-{options}" for name, options in VARIANTS]
)
def test_every_linear_is_read_as_the_weight_its_integers_stand_for(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    written = write(name, tmp_path / "made", **options)
    opened = open_low_bit(written.path)
    assert set(opened.parts) == set(written.weights) >= MODULES
    for module, wanted in written.weights.items():
        read = read_weight(opened, module)
        if written.exact:
            assert np.array_equal(read, wanted), module
        else:
            np.testing.assert_allclose(read, wanted, rtol=3e-7, atol=1e-6)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The model in 8 bits."""
    return write("ct-packed", tmp_path_factory.mktemp("near"), bits=8).weights


@pytest.mark.parametrize("name", FORMATS)
def test_the_integers_are_near_the_seeded_model_and_follow_the_seed(
    name: str, near: dict[str, np.ndarray], tmp_path: Path
) -> None:
    first, same, other = (
        write(name, tmp_path / f"{place}", seed=seed, tokenizer=False).weights
        for place, seed in enumerate((0, 0, 1))
    )
    for module, wanted in first.items():
        assert np.array_equal(wanted, same[module])
        assert not np.array_equal(wanted, other[module])
        if module in near:
            change = np.abs(wanted - near[module])
            assert change.mean() < 0.25 * np.abs(near[module]).mean(), module


def bits_flipped(written: Written) -> None:
    """The lowest bit of one packed word of q_proj, in the file."""
    path = written.folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    codes = ("qweight", "weight_packed", "weight")
    name = next(name for name in tensors if name.endswith(tuple(f"q_proj.{c}" for c in codes)))
    tensors[name].view(-1).view(torch.uint8)[0] ^= 1
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    "name", ["awq-gemm", "awq-gemv", "gptq-v2", "ct-packed", "ct-int8", "bnb-int8"]
)
def test_sabotage_one_flipped_bit_of_a_code_is_another_weight(name: str, tmp_path: Path) -> None:
    written = write(name, tmp_path / "made")
    bits_flipped(written)
    opened = open_low_bit(written.path)
    changed = [
        module
        for module, wanted in written.weights.items()
        if not np.array_equal(read_weight(opened, module), wanted)
    ]
    assert changed == ["model.layers.0.self_attn.q_proj"]


def test_orders_are_shared_by_linears_of_one_input_and_are_no_neighbours(tmp_path: Path) -> None:
    write("gptq-v1", tmp_path / "made", ordered=True)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    layer = "model.layers.0.self_attn"
    order = tensors[f"{layer}.q_proj.g_idx"]
    assert torch.equal(order, tensors[f"{layer}.k_proj.g_idx"])
    assert not torch.equal(order, tensors[f"{layer}.o_proj.g_idx"])
    assert sorted(order.tolist()) == [column // 32 for column in range(128)]
    assert order.tolist() != sorted(order.tolist())


def test_shards_hold_every_tensor_once_where_the_index_says(tmp_path: Path) -> None:
    whole, parts = (write("awq-gemm", tmp_path / str(n), shards=n).folder for n in (1, 3))
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) == 3
    joined: dict[str, torch.Tensor] = {}
    for file in files:
        joined |= load_file(file)
    single = load_file(whole / "model.safetensors")
    assert joined.keys() == single.keys()
    assert all(torch.equal(value, single[name]) for name, value in joined.items())


def test_an_option_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="group"):
        write("awq-gemm", tmp_path / "made", group=3)
