"""The file of tensors beside a checkpoint: every byte is checked, and a broken one is as good as none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from weightpath.engine.side_file import (
    NAME,
    ROOM_LEFT,
    SideFile,
    beside,
    read_side_file,
    write_side_file,
)
from weightpath.kernels import cpu

KEY = "what it was made from"
RECORD = {"linears": ["a"], "findings": []}


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "bytes": torch.randint(256, (70_000, 3), generator=draw, dtype=torch.uint8)[:64_000],
        "order": torch.randperm(40, generator=draw),
        "floats": torch.randn(5, 7, generator=draw).bfloat16(),
    }


@pytest.fixture
def written(tmp_path: Path) -> Path:
    like = tmp_path / "model.safetensors"
    like.write_bytes(b"")
    like.chmod(0o640)
    path = beside(tmp_path)
    assert write_side_file(path, KEY, tensors(), RECORD, like) == ""
    return path


def test_tensors_and_record_come_back_and_the_container_is_safetensors(written: Path) -> None:
    found = read_side_file(written, KEY, threads=2)
    assert isinstance(found, SideFile)
    assert found.record == RECORD
    assert found.tensors.keys() == tensors().keys()
    for name, value in tensors().items():
        assert torch.equal(found.tensors[name], value), name
    assert found.tensors["bytes"].data_ptr() % 64 == 0
    assert written.name == NAME
    assert written.stat().st_mode & 0o777 == 0o640
    with safe_open(str(written), framework="pt") as file:
        assert torch.equal(file.get_tensor("floats"), tensors()["floats"])
    assert sorted(path.name for path in written.parent.iterdir()) == [NAME, "model.safetensors"]


def test_where_there_is_none_and_where_the_key_is_another(written: Path) -> None:
    assert read_side_file(written.with_name("other"), KEY, 1) == ""
    said = read_side_file(written, "another", 1)
    assert said == "was made from other files, or by another version"
    assert beside(written.parent / "model.gguf").name == ".model.gguf.weightpath-tiles"


def test_a_file_cut_short_at_any_length_or_grown_is_refused(written: Path) -> None:
    whole = written.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    lengths = [0, 4, 8, 9, start // 2, start - 1, start, start + 1, len(whole) // 2, len(whole) - 1]
    for data in (*(whole[:length] for length in lengths), whole + b"\0"):
        written.write_bytes(data)
        assert isinstance(read_side_file(written, KEY, 1), str), len(data)
    written.write_bytes(whole)
    assert isinstance(read_side_file(written, KEY, 1), SideFile)


def test_one_changed_bit_anywhere_is_refused(written: Path) -> None:
    whole = written.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    text = len(whole[:start].rstrip(b" "))  # spaces behind the header mean nothing
    places = [
        0,
        8,
        9,
        *range(10, text, 97),
        text - 1,
        *range(start, len(whole), 20_011),
        len(whole) - 1,
    ]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 4
        written.write_bytes(data)
        assert isinstance(read_side_file(written, KEY, 1), str), place


def test_offsets_that_point_outside_are_refused_even_under_a_sound_checksum(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightpath.engine import side_file

    real: Any = side_file._entries

    def shifted(given: Any) -> tuple[dict[str, Any], int]:
        entries, end = real(given)
        entries["order"]["data_offsets"] = [-320, 0]
        return entries, end

    monkeypatch.setattr(side_file, "_entries", shifted)
    assert write_side_file(written, KEY, tensors(), RECORD, written) == ""
    said = read_side_file(written, KEY, 1)
    assert isinstance(said, str)
    assert said.startswith("has tensors that do not fit it")


def test_writing_to_memory_of_the_mapping_leaves_the_file_alone(written: Path) -> None:
    before = written.read_bytes()
    found = read_side_file(written, KEY, 1)
    assert isinstance(found, SideFile)
    found.tensors["bytes"].zero_()
    assert written.read_bytes() == before
    written.unlink()
    assert torch.equal(found.tensors["order"], tensors()["order"])  # its pages stay


def test_what_killed_writers_left_goes_and_what_is_being_written_stays(written: Path) -> None:
    left, busy = (written.with_name(f"{NAME}.{word}.partial") for word in ("left", "busy"))
    left.write_bytes(b"half")
    other = written.with_name("other.partial")
    other.write_bytes(b"of someone else")
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert write_side_file(written, KEY, tensors(), RECORD, other) == ""
        assert not left.exists()
        assert busy.exists()
        assert other.exists()


def test_a_disk_without_room_or_a_folder_that_refuses_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like, path = tmp_path / "model.gguf", tmp_path / NAME
    like.write_bytes(b"")

    def wrote() -> str:
        return write_side_file(path, KEY, tensors(), RECORD, like)

    with monkeypatch.context() as changed:
        full: Any = shutil.disk_usage(tmp_path)._replace(free=ROOM_LEFT + 1000)
        changed.setattr(shutil, "disk_usage", lambda _: full)
        assert wrote() == (
            f"192390 bytes and {ROOM_LEFT} to spare are wanted on its disk, {ROOM_LEFT + 1000} are free"
        )
    with monkeypatch.context() as changed:

        def refuse(*_: object) -> Any:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        changed.setattr(tempfile, "mkstemp", refuse)
        assert wrote() == "its folder cannot be written (Permission denied)"
    with monkeypatch.context() as changed:

        def no_space(*_: object) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        changed.setattr(os, "fsync", no_space)
        assert wrote() == "its folder cannot be written (No space left on device)"
    path.mkdir()  # in the way of the file
    assert wrote().startswith("its folder cannot be written (Is a directory")
    assert sorted(found.name for found in tmp_path.iterdir()) == [NAME, "model.gguf"]


def test_the_checksum_sees_every_byte_and_the_order_and_no_threads() -> None:
    def of(values: Tensor, threads: int = 1) -> int:
        return cpu.extension().checksum(values.data_ptr(), values.numel(), threads)

    draw = torch.Generator().manual_seed(1)
    values = torch.randint(256, (200_003,), generator=draw, dtype=torch.uint8)
    wanted = of(values)
    assert [of(values, threads) for threads in (2, 3, 16)] == [wanted] * 3
    for place in (0, 63, 64, 65_535, 65_536, 131_072, 199_999, 200_002):
        changed = values.clone()
        changed[place] ^= 1
        assert of(changed) != wanted, place
    assert of(values[:-1].clone()) != wanted
    assert of(torch.cat((values, torch.zeros(1, dtype=torch.uint8)))) != wanted
    for first, second in ((0, 64), (0, 8), (0, 65_536), (65_536, 131_072)):  # words, lines, blocks
        swapped = values.clone()
        size = 65_536 if first % 65_536 == second % 65_536 == 0 and second > 64 else 8
        swapped[first : first + size] = values[second : second + size]
        swapped[second : second + size] = values[first : first + size]
        assert of(swapped) != wanted, (first, second)
    assert json.dumps(wanted)  # a plain number
