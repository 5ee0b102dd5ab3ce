"""inspect's counts against the safetensors header, read from its bytes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import weightpath
from tiny_checkpoint import build_model, edit_tensors, make_checkpoint, read_header, save_model
from tiny_gguf import write_tiny_gguf
from weightpath.errors import BadCheckpoint, WeightpathError
from weightpath.jobs.inspect import inspect_folder

pytestmark = pytest.mark.usefixtures("one_thread")
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def counted(folder: Path) -> dict[str, Any]:
    """Bits per weight from headers: bytes of codes, scales and zeros over rows times columns."""
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        entries |= read_header(file)
    size = {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in entries.items()}
    bits = {"linear": [0, 0], "head": [0, 0], "other": [0, 0]}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight_scale", "weight_zero_point", "weight_shape"):
            continue
        stored, weights = size[name], numel(entry["shape"])
        if leaf == "weight_packed":
            code_bits = 8 if entries[f"{module}.weight_scale"]["dtype"] == "F32" else 4
            stored += size[f"{module}.weight_scale"] + size.get(f"{module}.weight_zero_point", 0)
            weights = weights * 32 // code_bits
        role = "head" if module == HEAD else "linear" if "proj" in module else "other"
        role = "other" if leaf == "bias" else role
        bits[role][0] += stored
        bits[role][1] += weights
    weights = sum(count for _, count in bits.values())
    both = [a + b for a, b in zip(bits["linear"], bits["head"], strict=True)]
    return {
        "tensor_bytes": sum(size.values()),
        "weights": weights,
        "linear": 8 * bits["linear"][0] / bits["linear"][1],
        "matmul": 8 * both[0] / both[1],
        "head_weights": bits["head"][1],
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("scheme", "head"),
    [("int8", 8), ("w4g64", 8), ("w4g32-asym", 4), ("w4g64", 16), ("w4g128-asym", 8)],
)
def test_bits_per_weight_are_those_of_the_header(
    tmp_path: Path, kind: str, tied: bool, scheme: str, head: int
) -> None:
    source = make_checkpoint(tmp_path / "source", kind, tied)
    weightpath.quantize(source, tmp_path / "low", scheme=scheme, head_bits=head)
    found, wanted = inspect_folder(tmp_path / "low"), counted(tmp_path / "low")
    untied = tied and head != 16
    weights = wanted["weights"] - (wanted["head_weights"] if untied else 0)
    assert found.tensor_bytes == wanted["tensor_bytes"]
    assert found.file_bytes == (tmp_path / "low" / "model.safetensors").stat().st_size
    assert found.linear_bits_per_weight == pytest.approx(wanted["linear"], rel=1e-12)
    assert found.matmul_bits_per_weight == pytest.approx(wanted["matmul"], rel=1e-12)
    assert found.weights == weights
    assert found.file_bits_per_weight == pytest.approx(8 * wanted["tensor_bytes"] / weights)
    assert sum(kind.tensors for kind in found.kinds) == found.tensors


def test_the_figures_are_those_that_the_plan_announced(tiny_tied: Path, tmp_path: Path) -> None:
    planned = weightpath.plan(tiny_tied).tensors
    weightpath.quantize(tiny_tied, tmp_path / "low")
    found = inspect_folder(tmp_path / "low")
    assert found.linear_bits_per_weight == pytest.approx(planned.linear_bits_per_weight)
    assert found.matmul_bits_per_weight == pytest.approx(planned.matmul_bits_per_weight)
    assert found.file_bits_per_weight == pytest.approx(planned.file_bits_per_weight)
    assert found.tensor_bytes == planned.file_bytes


def test_the_arithmetic_of_4_bit_groups_and_int8_rows_comes_out(
    tiny_llama: Path, tmp_path: Path
) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "low", scheme="w4g64")
    found = inspect_folder(tmp_path / "low")
    by_role = {kind.role: kind for kind in found.kinds if kind.role != "other"}
    assert by_role["linear"].bits_per_weight == 4 + 16 / 64
    assert by_role["head"].bits_per_weight == 8 + 32 / 64  # K = 64 columns a row
    assert by_role["embedding"].bits_per_weight == 16
    assert by_role["linear"].weights == 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)


def test_a_float_folder_counts_as_its_dtype(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path, build_model("llama", tied=True), torch.float32, shard_size="100KB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 1
    found = inspect_folder(folder)
    assert found.format == "safetensors, float"
    assert found.file_bits_per_weight == 32
    assert found.weights == sum(p.numel() for p in build_model("llama", tied=True).parameters())
    assert found.made_by == {}


def test_a_gguf_file_is_counted(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = inspect_folder(path)
    assert found.format == "GGUF Q8_0"
    assert {kind.bits_per_weight for kind in found.kinds if kind.scheme == "w8g32"} == {8.5}
    assert found.tensor_bytes < found.file_bytes < 1.5 * found.tensor_bytes
    assert found.file_bytes == path.stat().st_size
    assert found.architecture == "LlamaForCausalLM"


def test_the_json_form_holds_every_figure(tiny_low_bit: Path) -> None:
    plain = json.loads(json.dumps(inspect_folder(tiny_low_bit).to_dict()))
    assert plain["kinds"][0].keys() == {
        "scheme", "role", "tensors", "weights", "stored_bytes", "bits_per_weight"
    }  # fmt: skip
    assert plain["made_by"]["kind"] == "weightpath-build"


@pytest.mark.parametrize("name", ["none", "none.gguf", "none/model.safetensors"])
def test_what_does_not_exist_is_said_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"{name}: does not exist"):
        inspect_folder(tmp_path / name)


@pytest.mark.parametrize("name", ["plain.txt", "folder", "folder.gguf", "empty.gguf"])
def test_what_is_no_checkpoint_is_one_clear_line(tmp_path: Path, name: str) -> None:
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("")
    with pytest.raises(WeightpathError) as caught:
        inspect_folder(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


def test_damaged_codes_are_found(tiny_low_bit: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(tiny_low_bit, tmp_path / "copy"))
    name = "model.layers.1.mlp.up_proj"
    edit_tensors(folder, lambda t: t[f"{name}.weight_scale"].fill_(float("inf")))
    with pytest.raises(WeightpathError, match=name):
        inspect_folder(folder)
