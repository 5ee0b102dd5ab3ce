"""Files of a folder: shards that no index names, numbers left out, and what is refused on opening."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from audit_cases import kinds, the_one
from safetensors.torch import save_file

from weightpath.checkpoints.audit import audit_files
from weightpath.checkpoints.shards import LARGEST_HEADER, read_shards
from weightpath.errors import BadCheckpoint

INDEX = "model.safetensors.index.json"


def shard(number: int, total: int = 5) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def write(folder: Path, files: dict[str, list[str]], indexed: list[str] | None = None) -> Path:
    """Files with tensors of these names; the index names the files in `indexed`, or all."""
    folder.mkdir(exist_ok=True)
    for file, names in files.items():
        save_file({name: torch.ones(2) for name in names}, folder / file)
    chosen = list(files) if indexed is None else indexed
    weight_map = {name: file for file in chosen for name in files[file]}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def five(tmp_path: Path) -> Path:
    return write(tmp_path / "five", {shard(i): [f"t{i}"] for i in range(1, 6)})


def test_a_whole_folder_has_no_finding(five: Path, tmp_path: Path) -> None:
    assert audit_files(five) == ()
    single = tmp_path / "single"
    single.mkdir()
    save_file({"a": torch.ones(1)}, single / "model.safetensors")
    assert audit_files(single) == ()
    assert audit_files(single / "model.safetensors") == ()


def test_shards_numbered_from_0_are_whole_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "zero", {shard(i, 3): [f"t{i}"] for i in range(3)})
    assert audit_files(folder) == ()


def test_a_shard_of_the_series_that_the_index_forgets_is_an_error(tmp_path: Path) -> None:
    files = {shard(i): [f"t{i}", f"u{i}"] for i in range(1, 6)}
    folder = write(tmp_path / "m", files, [shard(i) for i in (1, 2, 4, 5)])
    (finding,) = audit_files(folder)
    assert (finding.severity, finding.kind) == ("error", "shard not in the index")
    assert finding.tensor == shard(3)
    assert "holds 2 tensors, 2 of them in no file of the model (first t3)" in finding.problem


def test_a_number_that_is_nowhere_is_told_with_its_file_name(five: Path) -> None:
    (five / shard(3)).unlink()
    weight_map = json.loads((five / INDEX).read_text())["weight_map"]
    del weight_map["t3"]
    (five / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (finding,) = audit_files(five)
    assert (finding.severity, finding.tensor) == ("warning", shard(3))
    assert "of 5, and 1 number of these is nowhere" in finding.problem


def test_a_stale_shard_of_another_series_is_a_warning(five: Path) -> None:
    save_file({"t1": torch.ones(2)}, five / shard(1, 2))
    finding = the_one(audit_files(five), "stale shard")
    assert finding.tensor == shard(1, 2)
    assert "1 tensor, 0 of them in no file" in finding.problem
    assert "llama.cpp" in finding.problem


def test_a_file_beside_a_single_one_is_read_by_vllm(tmp_path: Path) -> None:
    for file, name in (("model.safetensors", "a"), ("adapter_model.safetensors", "lora")):
        save_file({name: torch.ones(1)}, tmp_path / file)
    (finding,) = audit_files(tmp_path)
    assert finding.tensor == "adapter_model.safetensors"
    assert "only model.safetensors is read" in finding.problem
    assert "vLLM reads every .safetensors" in finding.problem


def test_a_damaged_file_beside_the_model_is_a_finding_and_no_refusal(five: Path) -> None:
    (five / "old.safetensors").write_bytes(b"\xff" * 64)
    finding = the_one(audit_files(five), "stale shard")
    assert "cannot be read (header of" in finding.problem


def test_an_index_over_two_series_is_told(tmp_path: Path) -> None:
    files = {shard(1, 2): ["a"], shard(2, 2): ["b"], shard(1, 1): ["c"]}
    assert kinds(audit_files(write(tmp_path / "mixed", files))) == [("warning", "mixed shards")]


def test_a_huge_number_in_a_file_name_is_counted_and_not_walked(tmp_path: Path) -> None:
    name = "model-999999998-of-999999999.safetensors"
    (finding,) = audit_files(write(tmp_path / "huge", {name: ["a"]}))
    assert "999999998 numbers of these is nowhere" in finding.problem
    assert finding.tensor == "model-000000001-of-999999999.safetensors"


# What opening refuses, and test_store.py does not show.


def header_of(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_a_name_given_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    path = header_of(
        tmp_path / "model.safetensors", b'{"a":' + entry + b',"a":' + entry + b"}", b"0"
    )
    with pytest.raises(BadCheckpoint, match="a is given twice"):
        read_shards(path)


def test_a_file_cut_inside_its_header_is_refused_with_both_sizes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:20])
    with pytest.raises(BadCheckpoint, match="in a file of 20 bytes"):
        read_shards(tmp_path)


def test_a_header_longer_than_the_library_takes_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", LARGEST_HEADER + 1))
        file.truncate(LARGEST_HEADER + 64)  # sparse
    with pytest.raises(BadCheckpoint, match=f"header of {LARGEST_HEADER + 1} bytes"):
        read_shards(path)


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_refused(five: Path) -> None:
    (five / shard(2)).unlink()
    with pytest.raises(BadCheckpoint, match="shard is missing"):
        audit_files(five)
