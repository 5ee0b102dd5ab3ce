"""The checkpoint writer: kills at every step, damage, refusals, disks that fill, and what readers see.

A kill is a real SIGKILL: a forked child wraps the system calls that the writer makes and kills
itself at the n-th, in the middle of its data where it writes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from tiny_checkpoint import folder_bytes
from weightpath.checkpoints import writer as writer_room
from weightpath.checkpoints.shard_layout import DTYPE_NAMES
from weightpath.checkpoints.shards import read_shards
from weightpath.checkpoints.writer import CheckpointWriter, Planned, Unit
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor

pytestmark = pytest.mark.usefixtures("one_thread")

JOB = {"source": "abc", "bits": 4}
FILES = {"config.json": '{"a": 1}\n', "README.md": b"# card\n"}


def a_tensor(
    name: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 5)
) -> Tensor:
    """The same values for the same name, any dtype."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    values = torch.randint(0, 100, shape, generator=generator)
    return values > 50 if dtype == torch.bool else values.to(dtype)


TENSORS = {
    "a": {"a.packed": a_tensor("a", torch.int32, (6, 4)), "a.scale": a_tensor("as", torch.bfloat16, (6, 1))},
    "b": {"b.weight": a_tensor("b", torch.float32, (7, 3))},
    "c": {"c.packed": a_tensor("c", torch.uint8, (5, 3)), "c.shape": a_tensor("cs", torch.int64, (2,))},
    "d": {"d.weight": a_tensor("d", torch.float16, (11,))},
}  # fmt: skip
NOTES = {"a": {"error": 0.1, "groups": [1, 2]}, "b": None, "c": {"error": 1e-300}, "d": 7}


def plan(tensors: dict[str, dict[str, Tensor]] = TENSORS) -> list[Unit]:
    return [
        Unit(key, tuple(Planned(n, t.dtype, tuple(t.shape)) for n, t in parts.items()))
        for key, parts in tensors.items()
    ]


def write_all(
    folder: Path, overwrite: bool = False, shard_bytes: int = 120, **job: Any
) -> list[str]:
    """A whole run, taking up what is there; returns the keys that an earlier run had finished."""
    with CheckpointWriter(folder, plan(), JOB | job, overwrite, shard_bytes) as writer:
        earlier = list(writer.finished)
        for key, parts in TENSORS.items():
            if key not in writer.finished:
                writer.write(key, parts, NOTES[key])
        writer.finish(FILES | {"notes.json": json.dumps(writer.finished, sort_keys=True)})
    return earlier


def write_some(folder: Path, keys: str, **options: Any) -> None:
    """A run that stops after some units."""
    with CheckpointWriter(folder, plan(), JOB, shard_bytes=120, **options) as writer:
        for key in keys:
            writer.write(key, TENSORS[key], NOTES[key])


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    write_all(folder)
    return folder_bytes(folder)


# What is written


def test_every_tensor_is_read_back_by_the_library_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_all(tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    wanted = {name: tensor for parts in TENSORS.values() for name, tensor in parts.items()}
    assert index["weight_map"].keys() == wanted.keys()
    assert list(index["weight_map"]) == sorted(wanted)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "model" / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert torch.equal(shard.get_tensor(name), wanted[name])
            assert shard.get_tensor(name).dtype == wanted[name].dtype
    shards = set(index["weight_map"].values())
    assert set(os.listdir(tmp_path / "model")) == shards | {
        "config.json", "README.md", "notes.json", "model.safetensors.index.json",
    }  # fmt: skip
    found = read_shards(tmp_path / "model")  # our own reader checks that all adds up
    assert {name for infos in found.values() for name in infos} == wanted.keys()


def test_a_unit_is_never_split_over_shards_and_shards_stay_within_their_size(
    tmp_path: Path,
) -> None:
    write_all(tmp_path / "model", shard_bytes=120)
    weight_map = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert weight_map["a.packed"] == weight_map["a.scale"]
    assert weight_map["c.packed"] == weight_map["c.shape"]
    assert sorted(set(weight_map.values())) == [
        f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
    ]


def test_one_shard_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    write_all(tmp_path / "model", shard_bytes=1 << 20)
    assert set(os.listdir(tmp_path / "model")) == {
        "model.safetensors", "config.json", "README.md", "notes.json",
    }  # fmt: skip


def test_the_bytes_of_a_small_file_are_these(tmp_path: Path) -> None:
    tensor = torch.tensor([[1, 2], [3, 258]], dtype=torch.int32)
    units = [Unit("k", (Planned("w", torch.int32, (2, 2)),))]
    with CheckpointWriter(tmp_path / "model", units, {}) as writer:
        writer.write("k", {"w": tensor})
        writer.finish({})
    header = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}'
    )
    header += b" " * (-len(header) % 8)
    data = bytes.fromhex("01000000020000000300000002010000")
    wanted = len(header).to_bytes(8, "little") + header + data
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == wanted


@settings(deadline=None, max_examples=25)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(list(DTYPE_NAMES)),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=9,
    ),
    shard_bytes=st.sampled_from((1, 64, 1 << 20)),
)
def test_any_mix_of_dtypes_and_shapes_is_aligned_and_read_back(
    shapes: list[tuple[torch.dtype, tuple[int, ...], int]],
    shard_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("mix") / "model"
    units: dict[str, dict[str, Tensor]] = {}
    for index, (dtype, shape, unit) in enumerate(shapes):
        units.setdefault(f"unit{unit}", {})[f"tensor{index}"] = a_tensor(f"t{index}", dtype, shape)
    with CheckpointWriter(folder, plan(units), {}, shard_bytes=shard_bytes) as writer:
        for key, parts in units.items():
            writer.write(key, parts)
        writer.finish({})
    seen: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert (8 + length) % 8 == 0
        assert header.keys() - {"__metadata__"}  # no shard is empty
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                seen[name] = shard.get_tensor(name)
                start = 8 + length + header[name]["data_offsets"][0]
                assert start % seen[name].element_size() == 0
    wanted = {name: tensor for parts in units.values() for name, tensor in parts.items()}
    assert seen.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(seen[name], tensor)


def test_a_strided_tensor_is_written_in_row_order(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    units = [Unit("k", (Planned("w", torch.float32, (4, 3)),))]
    with CheckpointWriter(tmp_path / "model", units, {}) as writer:
        writer.write("k", {"w": tensor})
        writer.finish({})
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as shard:
        assert torch.equal(shard.get_tensor("w"), tensor)


def test_files_to_copy_and_texts_go_in_beside_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(b"\x00\xff{}")
    write_some(tmp_path / "model", "abcd")
    with CheckpointWriter(tmp_path / "model", plan(), JOB, shard_bytes=120) as writer:
        writer.finish({"tokenizer.json": source, "a.txt": "ä", "b.bin": b"\x01"})
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == b"\x00\xff{}"
    assert (tmp_path / "model" / "a.txt").read_text(encoding="utf-8") == "ä"
    assert (tmp_path / "model" / "b.bin").read_bytes() == b"\x01"


# Kills


STEPS = ("pwrite", "write", "ftruncate", "fsync", "rename", "unlink", "rmdir")


def in_child(work: Callable[[], Any]) -> int:
    """Run in a forked child; the wait status."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def count_or_die(at: int) -> list[int]:
    """Wrap the writer's system calls: at call number `at`, half of the data, then SIGKILL."""
    count = [0]

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                if name in ("pwrite", "write"):
                    data = bytes(arguments[1])
                    real(arguments[0], data[: len(data) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(os, name, call)

    for name in STEPS:
        wrap(name)
    return count


def steps_of(run: Callable[[], Any], report: Path) -> int:
    """How many of those calls a whole run makes."""

    def work() -> None:
        count = count_or_die(-1)
        run()
        report.write_text(str(count[0]))

    assert in_child(work) == 0
    return int(report.read_text())


def killed_at(step: int, run: Callable[[], Any]) -> None:
    def work() -> None:
        count_or_die(step)
        run()

    assert os.WTERMSIG(in_child(work)) == signal.SIGKILL


def test_a_run_killed_at_any_step_is_taken_up_and_ends_in_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    steps = steps_of(lambda: write_all(tmp_path / "count"), tmp_path / "steps")
    assert steps > 15
    resumed = set()
    for step in range(1, steps + 1):
        place = tmp_path / f"at{step}"
        folder = place / "model"
        killed_at(step, lambda folder=folder: write_all(folder))
        if folder.exists():  # killed after the move: all is there, and perhaps the journal too
            left = {"journal.jsonl", "lock"}
            found = {n: b for n, b in folder_bytes(folder).items() if n not in left}
            assert found == whole, step
            continue
        resumed.add(len(write_all(folder)))
        assert folder_bytes(folder) == whole, step
        assert os.listdir(place) == ["model"], step
    assert resumed == {0, 1, 2, 3, 4}  # kills fell before, between and after all units


def test_a_run_that_is_killed_every_time_still_gets_on(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    folder, runs = tmp_path / "model", 0
    while not folder.exists():
        # opening takes 6 steps, a unit 2 or 3, the end 6
        killed_at(10 + runs % 2, lambda: write_all(folder))
        runs += 1
        assert runs < 20
    assert runs > 2
    found = {n: b for n, b in folder_bytes(folder).items() if n not in ("journal.jsonl", "lock")}
    assert found == whole


def test_overwriting_never_leaves_neither_the_old_nor_the_new(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    def old(place: Path) -> Path:
        (place / "model").mkdir(parents=True)
        (place / "model" / "config.json").write_text("old")
        return place / "model"

    counted = old(tmp_path / "count")
    steps = steps_of(lambda: write_all(counted, overwrite=True), tmp_path / "steps")
    for step in range(1, steps + 1):
        place = tmp_path / f"at{step}"
        folder = old(place)
        killed_at(step, lambda folder=folder: write_all(folder, overwrite=True))
        kept = [
            path.read_text() for path in place.rglob("config.json") if "partial" not in str(path)
        ]
        assert kept, step
        assert set(kept) <= {"old", FILES["config.json"]}
        write_all(folder, overwrite=True)
        assert folder_bytes(folder) == whole, step
        assert not partial_of(folder).exists()


@pytest.mark.slow
def test_a_process_killed_from_outside_is_taken_up(tmp_path: Path, whole: dict[str, bytes]) -> None:
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        sys.path[:0] = sys.argv[2:]
        from test_writer import JOB, NOTES, TENSORS, CheckpointWriter, plan
        with CheckpointWriter(Path(sys.argv[1]), plan(), JOB, shard_bytes=120) as writer:
            for key in "ab":
                writer.write(key, TENSORS[key], NOTES[key])
            print("written", flush=True)
            time.sleep(600)
    """)
    here = Path(__file__).resolve().parent
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "model"), str(here), str(here.parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        with pytest.raises(BadRequest, match="another process is writing here"):
            write_all(tmp_path / "model")
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert write_all(tmp_path / "model") == ["a", "b"]
    assert folder_bytes(tmp_path / "model") == whole


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, whole: dict[str, bytes]) -> None:
    def work() -> None:
        with CheckpointWriter(tmp_path / "model", plan(), JOB, shard_bytes=120) as writer:
            writer.write("a", TENSORS["a"], NOTES["a"])
            signal.raise_signal(signal.SIGINT)
            writer.write("b", TENSORS["b"])

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not (tmp_path / "model").exists()
    assert write_all(tmp_path / "model") == ["a"]
    assert folder_bytes(tmp_path / "model") == whole


# Damage


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_journal_line_cut_short_costs_only_its_unit(
    tmp_path: Path, whole: dict[str, bytes], cut: int
) -> None:
    write_some(tmp_path / "model", "abc")
    journal = partial_of(tmp_path / "model") / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert write_all(tmp_path / "model") == ["a", "b"]
    assert folder_bytes(tmp_path / "model") == whole


def test_lines_written_after_one_cut_short_are_not_run_into_it(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    write_some(tmp_path / "model", "ab")
    journal = partial_of(tmp_path / "model") / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    write_some(tmp_path / "model", "cd")
    assert write_all(tmp_path / "model") == ["a", "c", "d"]
    assert folder_bytes(tmp_path / "model") == whole


@pytest.mark.parametrize("junk", [b"{", b"\xff\xfe\x00", b"[]", b"{}", b'{"unit": ["a"], "crc32": 1, "note": 2}',
                                  b'{"unit": "z", "crc32": {}, "note": null}', b'{"unit": "b", "crc32": 5, "note": 1}', b"nan"])  # fmt: skip
def test_a_journal_line_that_is_junk_is_passed_over(
    tmp_path: Path, whole: dict[str, bytes], junk: bytes
) -> None:
    write_some(tmp_path / "model", "abc")
    journal = partial_of(tmp_path / "model") / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    lines[2] = junk  # b's
    journal.write_bytes(b"\n".join(lines))
    assert write_all(tmp_path / "model") == ["a", "c"]
    assert folder_bytes(tmp_path / "model") == whole


def test_an_empty_journal_starts_afresh(tmp_path: Path, whole: dict[str, bytes]) -> None:
    for folder, text in ((tmp_path / "one", ""), (tmp_path / "two", '{"job": {"sour')):
        write_some(folder, "ab")
        (partial_of(folder) / "journal.jsonl").write_text(text)
        assert write_all(folder) == []
        assert folder_bytes(folder) == whole


@pytest.mark.parametrize("name", ["b.weight", "c.shape"])
def test_a_finished_unit_whose_bytes_were_damaged_is_done_again(
    tmp_path: Path, whole: dict[str, bytes], name: str
) -> None:
    write_some(tmp_path / "model", "abcd")
    writer = CheckpointWriter(tmp_path / "model", plan(), JOB, shard_bytes=120)
    place = writer.places[name]
    shard = partial_of(tmp_path / "model") / place.shard
    raw = bytearray(shard.read_bytes())
    raw[place.offset + 3] ^= 0x10
    shard.write_bytes(raw)
    assert write_all(tmp_path / "model") == [key for key in "abcd" if key != name[0]]
    assert folder_bytes(tmp_path / "model") == whole


def test_a_shard_that_was_cut_removed_or_given_another_header_is_mended(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    def spoil(path: Path) -> None:
        path.write_bytes(b"x" * 20 + path.read_bytes()[20:])

    def lengthen(path: Path) -> None:
        path.write_bytes(path.read_bytes() + b"tail")

    for number, (change, left) in enumerate(
        ((cut, "abd"), (Path.unlink, "ad"), (spoil, "abcd"), (lengthen, "abcd"))
    ):
        folder = tmp_path / str(number)
        write_some(folder, "abcd")
        change(partial_of(folder) / "model-00002-of-00003.safetensors")
        assert "".join(write_all(folder)) == left
        assert folder_bytes(folder) == whole


def test_large_tensors_are_checked_piece_by_piece(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(tmp_path / "model", "abcd")
    monkeypatch.setattr(writer_room, "READ_BYTES", 7)
    assert write_all(tmp_path / "model") == ["a", "b", "c", "d"]
    assert folder_bytes(tmp_path / "model") == whole


def test_strays_in_the_partial_folder_do_not_reach_the_checkpoint(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    write_some(tmp_path / "model", "ab")
    partial = partial_of(tmp_path / "model")
    (partial / "model-00009-of-00009.safetensors").write_text("stray")
    (partial / "folder").mkdir()
    (partial / "folder" / "file").write_text("stray")
    write_all(tmp_path / "model")
    assert folder_bytes(tmp_path / "model") == whole
    assert os.listdir(tmp_path) == ["model"]


def test_a_resumed_run_reads_the_notes_that_a_whole_run_has(tmp_path: Path) -> None:
    note = {"pair": (1, 2), "error": 0.1}
    with CheckpointWriter(tmp_path / "model", plan(), JOB) as writer:
        writer.write("a", TENSORS["a"], note)
        whole = writer.finished["a"]
    with CheckpointWriter(tmp_path / "model", plan(), JOB) as writer:
        assert writer.finished["a"] == whole == {"pair": [1, 2], "error": 0.1}


# Refusals


def test_an_existing_folder_or_file_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("model", "file"):
        with pytest.raises(BadRequest, match="exists already"):
            write_all(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "model"]
    assert (tmp_path / "file").read_text() == "mine"


def test_overwrite_replaces_a_folder_of_files_as_a_whole(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old.bin").write_text("old")
    write_all(tmp_path / "model", overwrite=True)
    assert folder_bytes(tmp_path / "model") == whole
    assert os.listdir(tmp_path) == ["model"]


def test_overwrite_refuses_a_folder_that_has_folders_in_it(tmp_path: Path) -> None:
    (tmp_path / "home" / "photos").mkdir(parents=True)
    with pytest.raises(BadRequest, match="photos"):
        write_all(tmp_path / "home", overwrite=True)
    assert os.listdir(tmp_path) == ["home"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_meanwhile_is_not_replaced_unless_asked(
    tmp_path: Path, whole: dict[str, bytes], overwrite: bool
) -> None:
    def work() -> None:
        with CheckpointWriter(tmp_path / "model", plan(), JOB, overwrite, 120) as writer:
            for key, parts in TENSORS.items():
                writer.write(key, parts, NOTES[key])
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "mine").write_text("mine")
            writer.finish(FILES)

    if overwrite:
        work()
        assert not (tmp_path / "model" / "mine").exists()
        return
    with pytest.raises(BadRequest, match="exists already"):
        work()
    assert (tmp_path / "model" / "mine").read_text() == "mine"
    (tmp_path / "model" / "mine").unlink()
    (tmp_path / "model").rmdir()
    assert write_all(tmp_path / "model") == ["a", "b", "c", "d"]
    assert folder_bytes(tmp_path / "model") == whole


def test_folders_of_the_user_beside_it_are_left_alone(tmp_path: Path) -> None:
    for name in ("model.old", ".model.replaced-mine", "model.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    write_all(tmp_path / "model")
    write_all(tmp_path / "model", overwrite=True)
    for name in ("model.old", ".model.replaced-mine", "model.new"):
        assert (tmp_path / name / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_partial_folder_that_no_run_left_is_refused_and_untouched(
    tmp_path: Path, overwrite: bool
) -> None:
    partial = partial_of(tmp_path / "model")
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(BadRequest, match=r"thesis\.txt"):
        write_all(tmp_path / "model", overwrite=overwrite)
    assert (partial / "thesis.txt").read_text() == "mine"


def test_a_partial_run_of_another_job_is_refused_unless_overwritten(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    write_some(tmp_path / "model", "ab")
    with pytest.raises(BadRequest, match="another job") as caught:
        write_all(tmp_path / "model", source="def")
    assert "\n" not in str(caught.value)
    assert write_all(tmp_path / "other") == []
    assert write_all(tmp_path / "model", overwrite=True, source="def") == []
    assert folder_bytes(tmp_path / "model") == whole  # the job itself is not in the bytes


@pytest.mark.parametrize("change", ["dtype", "shape", "name", "order", "key"])
def test_another_plan_is_another_job(tmp_path: Path, change: str) -> None:
    write_some(tmp_path / "model", "ab")
    units = plan()
    first = units[1].tensors[0]
    units[1] = {
        "dtype": Unit("b", (Planned(first.name, torch.float16, first.shape),)),
        "shape": Unit("b", (Planned(first.name, first.dtype, (3, 7)),)),
        "name": Unit("b", (Planned("other", first.dtype, first.shape),)),
        "key": Unit("other", (first,)),
        "order": units[1],
    }[change]
    units = units[::-1] if change == "order" else units
    with (
        pytest.raises(BadRequest, match="another job"),
        CheckpointWriter(tmp_path / "model", units, JOB),
    ):
        pass
    assert write_all(tmp_path / "model") == ["a", "b"]


def test_two_writers_at_once_are_refused_in_one_process_and_in_two(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    with CheckpointWriter(tmp_path / "model", plan(), JOB, shard_bytes=120) as writer:
        writer.write("a", TENSORS["a"], NOTES["a"])
        for overwrite in (False, True):
            with pytest.raises(BadRequest, match="another process is writing here"):
                write_all(tmp_path / "model", overwrite=overwrite)

            def work(overwrite: bool = overwrite) -> None:
                with pytest.raises(BadRequest, match="another process is writing here"):
                    write_all(tmp_path / "model", overwrite=overwrite)

            assert in_child(work) == 0
        writer.write("b", TENSORS["b"], NOTES["b"])
    assert write_all(tmp_path / "model") == ["a", "b"]
    assert folder_bytes(tmp_path / "model") == whole


# Plans that do not hold


def test_a_unit_never_written_or_written_otherwise_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    with CheckpointWriter(tmp_path / "model", plan(), JOB) as writer:
        writer.write("a", TENSORS["a"])
        with pytest.raises(BadTensor, match=r"tensor b: was planned but not written \(3 such\)"):
            writer.finish(FILES)
        with pytest.raises(BadTensor, match=r"b\.weight.*float16.*float32"):
            writer.write("b", {"b.weight": TENSORS["b"]["b.weight"].half()})
        with pytest.raises(BadTensor, match=r"b\.weight.*\(3, 7\).*\(7, 3\)"):
            writer.write("b", {"b.weight": TENSORS["b"]["b.weight"].t()})
        for parts in ({}, TENSORS["a"], TENSORS["b"] | {"extra": torch.zeros(1)}):
            with pytest.raises(BadTensor, match="tensor b"):
                writer.write("b", parts)
        assert set(writer.finished) == {"a"}
    assert not (tmp_path / "model").exists()
    with CheckpointWriter(tmp_path / "model", plan(), JOB) as writer:
        assert set(writer.finished) == {"a"}


def test_a_tensor_or_a_unit_planned_twice_is_refused_by_name(tmp_path: Path) -> None:
    one, two = Planned("w", torch.float32, (1,)), Planned("v", torch.float32, (1,))
    for units, name in (
        ([Unit("a", (one,)), Unit("b", (one,))], "w"),
        ([Unit("a", (one, one))], "w"),
        ([Unit("a", (one,)), Unit("a", (two,))], "a"),
    ):
        with pytest.raises(BadTensor, match=f"tensor {name}: would be written twice"):
            CheckpointWriter(tmp_path / "model", units, {})
    assert os.listdir(tmp_path) == []


def test_odd_names_for_the_folder_work(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_all(Path("new/deep/model"))
    assert folder_bytes(tmp_path / "new" / "deep" / "model") == whole
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "link")
    write_all(Path("link"), overwrite=True)  # the folder that it points at is written
    assert (tmp_path / "link").is_symlink()
    assert folder_bytes(tmp_path / "disk") == whole
    with pytest.raises(BadRequest, match="exists already"):
        write_all(Path("."))
    with pytest.raises(BadRequest, match="exists already"):
        write_all(Path("new/.."))


# Disks


def test_too_little_room_is_said_before_the_work_and_leaves_nothing(tmp_path: Path) -> None:
    units = [Unit("big", (Planned("w", torch.float32, (1 << 50,)),))]
    with (
        pytest.raises(BadCheckpoint, match=rf"needs {4 << 50} bytes, \d+ are free") as caught,
        CheckpointWriter(tmp_path / "model", units, {}),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadCheckpoint, match="cannot be written") as caught:
        write_all(tmp_path / "file" / "model")
    assert "\n" not in str(caught.value)


def test_a_failed_start_lets_go_of_the_lock(tmp_path: Path, whole: dict[str, bytes]) -> None:
    write_some(tmp_path / "model", "ab")
    shard = partial_of(tmp_path / "model") / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.mkdir()
    with pytest.raises(BadCheckpoint, match="Is a directory"):
        write_all(tmp_path / "model")
    shard.rmdir()
    assert write_all(tmp_path / "model") == ["a"]
    assert folder_bytes(tmp_path / "model") == whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("full", ["shard", "journal"])
def test_a_disk_that_fills_up_is_one_line_and_what_was_finished_stays(
    tmp_path: Path, whole: dict[str, bytes], full: str
) -> None:
    with CheckpointWriter(tmp_path / "model", plan(), JOB, shard_bytes=120) as writer:
        writer.write("a", TENSORS["a"], NOTES["a"])
        handle = (
            writer.journal if full == "journal" else writer.files[writer.places["b.weight"].shard]
        )
        device = os.open("/dev/full", os.O_WRONLY)
        os.dup2(device, handle)  # every write to it now fails with ENOSPC
        os.close(device)
        with pytest.raises(BadCheckpoint, match="No space left on device") as caught:
            writer.write("b", TENSORS["b"], NOTES["b"])
        assert "\n" not in str(caught.value)
        assert set(writer.finished) == {"a"}
    assert write_all(tmp_path / "model") == ["a"]
    assert folder_bytes(tmp_path / "model") == whole


def test_a_file_size_limit_is_one_line_and_leaves_a_run_to_take_up(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    write_some(tmp_path / "model", "ab")

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = partial_of(tmp_path / "model").joinpath("journal.jsonl").stat().st_size + 5
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(BadCheckpoint, match="File too large"):
            write_all(tmp_path / "model")

    assert in_child(work) == 0
    assert write_all(tmp_path / "model") == ["a", "b"]
    assert folder_bytes(tmp_path / "model") == whole
