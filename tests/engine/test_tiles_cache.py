"""The packed weights kept beside a checkpoint: the same model from them, and never from wrong ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weightpath
from tiny_formats import FORMATS, write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.store import companion_files
from weightpath.engine import tiles_cache
from weightpath.engine.load import load
from weightpath.engine.session import engine_of, open_session
from weightpath.engine.side_file import NAME, beside
from weightpath.nn.swap import low_bit_linears, set_backend

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [1, 5, 9, 33, 7, 2]


@pytest.fixture
def folder(tiny_low_bit: Path, tmp_path: Path) -> Path:
    """A copy without a cache."""
    return Path(shutil.copytree(tiny_low_bit, tmp_path / "w4g64", ignore=lambda *_: {NAME}))


def native(folder: Path, **options: Any) -> Any:
    return load(folder, engine="native", **options)


def about(model: Any) -> Any:
    return model.weightpath


def first_logits(model: Any) -> Tensor:
    return open_session(model, 64).extend(IDS).clone()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits


def same_model(found: Any, wanted: Any) -> None:
    """Equal bit by bit: logits on both engines, every value of state_dict, and what is told."""
    assert torch.equal(first_logits(found), first_logits(wanted))
    values = wanted.state_dict()
    assert found.state_dict().keys() == values.keys()
    for name, value in found.state_dict().items():
        assert value.dtype == values[name].dtype, name
        assert torch.equal(value, values[name]), name
    assert torch.equal(logits_of(found), logits_of(wanted))
    assert about(found).explain() == about(wanted).explain()
    assert about(found).floats == about(wanted).floats
    assert about(found).left_out == about(wanted).left_out


def is_mapped(values: Tensor, path: Path) -> bool:
    """Whether memory is of a mapping of this file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            low, high = (int(number, 16) for number in line.split()[0].split("-"))
            if low <= values.data_ptr() < high:
                return True
    return False


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_is_the_same_model_from_its_cache(name: str, tmp_path: Path) -> None:
    place = write(name, tmp_path / "low", tokenizer=name == "gguf").folder
    plain = load(place, engine="auto", cache=False)
    if about(plain).native is None:
        pytest.skip(about(plain).notes[-1])
    first, second = load(place, engine="auto"), load(place, engine="auto")
    assert [about(model).from_cache for model in (plain, first, second)] == [False, False, True]
    assert about(second).notes == about(plain).notes
    assert "are kept in" in about(first).notes[-1]
    same_model(second, plain)


def test_column_orders_and_column_scales_are_kept_too(tmp_path: Path) -> None:
    place = write("gptq-v2", tmp_path / "low", ordered=True, symmetric=False).folder
    plain = native(place, cache=False)
    native(place)
    found = native(place)
    assert about(found).from_cache
    assert any(name.endswith(".inner") for name, _ in low_bit_linears(found))
    same_model(found, plain)


@pytest.mark.parametrize("bits", [8, 16])
def test_activation_bits_are_not_part_of_the_key(folder: Path, bits: int) -> None:
    native(folder, activation_bits=24 - bits)
    found = native(folder, activation_bits=bits)
    assert about(found).from_cache
    assert torch.equal(
        first_logits(found), first_logits(native(folder, activation_bits=bits, cache=False))
    )


def test_a_gguf_file_has_its_own_and_its_dequantized_floats_are_mapped(tmp_path: Path) -> None:
    place = write("gguf", tmp_path / "low").folder
    file = place if place.is_file() else next(place.glob("*.gguf"))
    native(file)
    path = file.with_name(f".{file.name}{NAME}")
    assert path == beside(file)
    assert path.is_file()
    model = native(file)
    assert about(model).from_cache
    assert is_mapped(model.get_input_embeddings().weight, path)


def test_from_a_cache_the_engine_and_the_modules_read_the_mapped_file_and_copy_nothing(
    folder: Path,
) -> None:
    native(folder)
    model = native(folder)
    engine: Any = engine_of(model)
    assert engine._weights._arena.numel() == 0
    for name, module in low_bit_linears(model):
        assert is_mapped(module.tiles, folder / NAME), name
        assert set(module._buffers) == {"tiles"}, name


def test_kernels_of_another_form_run_from_a_mapped_file_and_leave_it_as_it_is(folder: Path) -> None:
    native(folder)
    before = (folder / NAME).read_bytes()
    model, plain = native(folder), native(folder, cache=False)
    set_backend(model, "torch")
    set_backend(plain, "torch")
    assert torch.equal(logits_of(model), logits_of(plain))
    set_backend(model, None)
    set_backend(plain, None)
    same_model(model, plain)
    for _, module in low_bit_linears(model):
        module.tiles.zero_()
    assert (folder / NAME).read_bytes() == before


def test_a_second_engine_on_the_same_model_reads_the_same_memory(folder: Path) -> None:
    from weightpath.engine.decode import NativeModel

    model = native(folder, cache=False)
    again = NativeModel(model)
    assert again._weights._arena.numel() == 0
    assert torch.equal(again.session(64).extend(IDS), first_logits(model))


def test_a_model_outlives_its_cache_being_deleted(folder: Path) -> None:
    native(folder)
    model, plain = native(folder), native(folder, cache=False)
    (folder / NAME).unlink()
    same_model(model, plain)
    assert not about(native(folder)).from_cache
    assert about(native(folder)).from_cache


def touch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    stat = (folder / "model.safetensors").stat()
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def change_config(folder: Path, patch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def another_shard(folder: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.copy(folder / "model.safetensors", folder / "stale.safetensors")


def another_version(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tiles_cache, "__version__", "0.0.0")


def another_layout(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tiles_cache, "VERSION", -1)


@pytest.mark.parametrize(
    "change", [touch, change_config, another_shard, another_version, another_layout]
)
def test_a_stale_cache_is_said_and_made_anew(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native(folder)
    change(folder, monkeypatch)
    stale = native(folder)
    assert not about(stale).from_cache
    said = f"{NAME} was made from other files, or by another version; packed anew"
    assert said in about(stale).notes
    again = native(folder)
    assert about(again).from_cache
    assert said not in about(again).notes
    same_model(again, native(folder, cache=False))


def test_another_dtype_is_another_cache(folder: Path) -> None:
    native(folder)
    assert not about(native(folder, dtype=torch.float32)).from_cache
    found = native(folder, dtype=torch.float32)
    assert about(found).from_cache
    same_model(found, native(folder, dtype=torch.float32, cache=False))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_cache_cut_short_is_said_and_made_anew(folder: Path, share: float) -> None:
    native(folder)
    path = folder / NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    found = native(folder)
    assert not about(found).from_cache
    assert any(note.startswith(f"{NAME} has ") for note in about(found).notes)
    assert path.stat().st_size == len(whole)
    assert about(native(folder)).from_cache


def test_a_record_that_does_not_fit_the_model_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = tiles_cache._described
    narrow = {"shape": [32, 64], "group_size": 8}
    with monkeypatch.context() as patch:
        patch.setattr(tiles_cache, "_described", lambda module: real(module) | narrow)
        native(folder)
    found = native(folder)
    assert not about(found).from_cache
    assert any("does not fit the model" in note for note in about(found).notes)
    assert about(native(folder)).from_cache


def test_a_folder_that_cannot_be_written_costs_a_note_each_time(folder: Path) -> None:
    (folder / NAME).mkdir()  # in the way
    model, again = native(folder), native(folder)
    for found in (model, again):
        assert not about(found).from_cache
        assert (
            about(model)
            .notes[-1]
            .startswith(
                "the packed weights are not kept for the next load: its folder cannot be written"
            )
        )
    same_model(model, native(folder, cache=False))


def test_cache_off_and_transformers_engine_neither_read_nor_write(folder: Path) -> None:
    before = sorted(os.listdir(folder))
    native(folder, cache=False)
    load(folder)
    load(folder, engine="auto", backend="torch")
    assert sorted(os.listdir(folder)) == before
    native(folder)
    (folder / NAME).write_bytes(b"")
    assert not any(NAME in note for note in about(native(folder, cache=False)).notes)
    assert (folder / NAME).read_bytes() == b""


def test_what_the_audit_found_is_said_again_from_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightpath.checkpoints.audit_finding import Finding
    from weightpath.engine import load as loading

    def found(name: str, *_: object) -> tuple[Finding, ...]:
        return (Finding("warning", name, "has zero scales", "quantize again", "zeros", "linear"),)

    monkeypatch.setattr(loading, "audit_qweight", found)
    first = native(folder)
    monkeypatch.setattr(loading, "audit_qweight", lambda *_: pytest.fail("it was read"))
    second = native(folder)
    assert about(second).from_cache
    assert any("has zero scales" in note for note in about(second).notes)
    assert about(first).notes[:-1] == about(second).notes


def test_loads_at_once_all_run_and_leave_one_sound_file(folder: Path) -> None:
    wanted = first_logits(native(folder, cache=False))
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: native(folder), range(4)))
    for model in models:
        assert torch.equal(first_logits(model), wanted)
    assert about(native(folder)).from_cache
    assert not [name for name in os.listdir(folder) if name.endswith(".partial")]


KILLED = """
import os, sys, time
def stop(handle):
    print("writing", flush=True)
    time.sleep(600)
os.fsync = stop
from weightpath.engine.load import load
load(sys.argv[1], engine="native")
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_used(folder: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not (folder / NAME).exists()
    assert [name for name in os.listdir(folder) if name.endswith(".partial")]
    model = native(folder)
    assert not about(model).from_cache
    assert not [name for name in os.listdir(folder) if name.endswith(".partial")]
    assert about(native(folder)).from_cache


def test_other_verbs_do_not_see_the_file(
    folder: Path, tiny_llama: Path, tmp_path: Path, weightpath_cli: Any
) -> None:
    def seen() -> tuple[Any, ...]:
        inspected = weightpath_cli("inspect", folder, "--json")
        assert inspected.code == 0
        low = open_low_bit(folder)
        return json.loads(inspected.out), low.source.fingerprint, companion_files(folder)

    before = seen()
    native(folder)
    assert (folder / NAME).exists()
    assert seen() == before
    weightpath.convert(folder, "awq", tmp_path / "awq")
    assert NAME not in os.listdir(tmp_path / "awq")
    short = ("--windows", 8, "--length", 64, "--prompt-tokens", 2)
    assert weightpath_cli("verify", folder, "--reference", tiny_llama, *short).code == 0
    weightpath.quantize(tiny_llama, folder, scheme="w4g64", overwrite=True)
    assert NAME not in os.listdir(folder)


def test_run_takes_no_cache(folder: Path, weightpath_cli: Any) -> None:
    asked = ("run", folder, "--prompt", "hi", "--max-tokens", 3, "--json")
    off = weightpath_cli(*asked, "--no-cache")
    assert (off.code, (folder / NAME).exists()) == (0, False)
    first = weightpath_cli(*asked)
    assert (first.code, (folder / NAME).exists()) == (0, True)
    assert "the packed weights are kept in" in " ".join(first.err.split())
    second = weightpath_cli(*asked)
    texts = [json.loads(ran.out) for ran in (off, first, second)]
    assert len({json.dumps(text.get("answer", text.get("text"))) for text in texts}) == 1


def test_logits_are_fp32_whatever_torchs_default_dtype_is(folder: Path) -> None:
    model = native(folder, cache=False)
    wanted = first_logits(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = first_logits(model)
        every = engine_of(model).session(64).all_logits(IDS)  # type: ignore[attr-defined]
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == every.dtype == torch.float32
    assert torch.equal(found, wanted)
    assert torch.equal(every[-1], wanted)
