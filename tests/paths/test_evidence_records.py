"""Records: written whole, read strictly, and never a reason to crash."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightpath.device.profile import device_class, to_dict
from weightpath.errors import BadRequest
from weightpath.paths.evidence import (
    KIND,
    Evidence,
    Record,
    Speed,
    load_records,
    save_record,
    shipped_folder,
    user_folder,
)
from weightpath.paths.select import select_weight_path

FAST = Speed(20.0, 10.0, 2.0, 1.9, 2.1)


def a_record(**changes) -> Record:
    made = Record(
        path="w4a8-vnni",
        device_class="x86_cpu/avx512_vnni",
        model="SmolLM2-135M",
        scheme="w4a8g64",
        decode=FAST,
        prefill=Speed(100.0, 90.0, 1.1, 0.9, 1.3),
        kld=0.25,
        kld_text="code-test",
        date="2026-01-02T03:04:05",
        version="0.1.0",
        kernel="reference",
        profile={"arch": "x86_64", "gpu_capability": None},
    )
    return replace(made, **changes)


def test_a_record_comes_back_as_it_was_saved_with_its_file(tmp_path):
    file = save_record(a_record(), tmp_path)
    assert load_records([tmp_path]) == Evidence((a_record(source=str(file)),))


finite = st.floats(min_value=1e-6, max_value=1e6)


@settings(deadline=None, max_examples=25)
@given(low=finite, middle=finite, high=finite, model=st.text(min_size=1).filter(str.strip))
def test_any_sound_record_survives_its_file(tmp_path_factory, low, middle, high, model):
    low, middle, high = sorted((low, middle, high))
    record = a_record(decode=Speed(1.0, 1.0, middle, low, high), model=model)
    folder = tmp_path_factory.mktemp("records")
    file = save_record(record, folder)
    assert load_records([folder]).records == (replace(record, source=str(file)),)


def test_the_name_of_a_file_is_decided_by_what_was_measured(tmp_path):
    first = save_record(a_record(), tmp_path)
    again = save_record(a_record(decode=replace(FAST, tokens_per_second=21.0)), tmp_path)
    assert first == again
    assert len(load_records([tmp_path]).records) == 1
    for changes in ({"path": "w8a16"}, {"model": "b"}, {"date": "2026-01-03"}, {"runtime": "vllm"}):
        assert save_record(a_record(**changes), tmp_path) != first
    assert "/" not in first.name
    assert first.name.startswith("w4a8-vnni--x86-cpu-avx512-vnni--SmolLM2-135M--")


def test_saving_leaves_no_part_behind_and_keeps_the_old_file_when_it_fails(tmp_path):
    file = save_record(a_record(), tmp_path)
    before = file.read_bytes()
    with pytest.raises(BadRequest, match="not plain JSON"):
        save_record(a_record(profile={"flags": {"avx2"}}), tmp_path)
    with pytest.raises(BadRequest, match="not plain JSON"):
        save_record(a_record(profile={"ghz": math.nan}), tmp_path)
    assert file.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == [file.name]


def test_a_real_profile_can_be_kept_in_a_record(tmp_path, profiles):
    record = a_record(profile=to_dict(profiles["h100"]))
    save_record(record, tmp_path)
    assert load_records([tmp_path]).records[0].profile == record.profile


def test_a_file_of_another_kind_is_passed_over_quietly(tmp_path):
    (tmp_path / "table.json").write_text('{"kind": "quantize-time", "rows": []}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "notes.txt").write_text("not json")
    assert load_records([tmp_path]) == Evidence()


def damaged(change) -> str:
    data = a_record().to_dict()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "left out"),
        ("[" * 100_000, "left out"),
        (b"\xff\xfe\x00", "left out"),
        (damaged(lambda data: data.pop("decode")), "decode missing"),
        (damaged(lambda data: data["decode"].pop("ratio_low")), "ratio_low"),
        (damaged(lambda data: data["decode"].update(ratio="fast")), "'fast'"),
        (damaged(lambda data: data["decode"].update(ratio=math.nan)), "above 0"),
        (damaged(lambda data: data["decode"].update(ratio_low=2.5)), "outside its spread"),
        (damaged(lambda data: data.update(decode=3)), "decode"),
        (damaged(lambda data: data.update(path=7)), "path is 7"),
        (damaged(lambda data: data.update(date=" ")), "date is empty"),
        (damaged(lambda data: data.update(kld=-1)), "kld is -1"),
        (damaged(lambda data: data.update(profile=[])), "profile"),
    ],
)
def test_a_damaged_file_is_one_warning_that_names_it_and_the_rest_is_read(tmp_path, content, said):
    save_record(a_record(), tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = load_records([tmp_path])
    assert len(found.records) == 1
    assert len(found.warnings) == 1
    assert str(bad) in found.warnings[0]
    assert said in found.warnings[0]
    assert "\n" not in found.warnings[0]


def test_a_key_of_a_later_version_is_no_damage(tmp_path):
    (tmp_path / "later.json").write_text(damaged(lambda data: data.update(energy=1.0)))
    found = load_records([tmp_path])
    assert found.warnings == ()
    assert len(found.records) == 1


def test_the_users_store_is_found_through_the_environment_at_call_time(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTPATH_RECORDS", str(tmp_path / "own"))
    file = save_record(a_record(model="mine"))
    assert file.parent == tmp_path / "own"
    assert "mine" in {record.model for record in load_records().records}
    monkeypatch.delenv("WEIGHTPATH_RECORDS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_folder() == tmp_path / "data" / "weightpath" / "records"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_folder() == tmp_path / "home" / ".local" / "share" / "weightpath" / "records"
    assert "mine" not in {record.model for record in load_records().records}


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path):
    assert load_records([tmp_path / "none"]) == Evidence()


def test_the_shipped_folder_is_that_of_the_checkout_or_of_the_wheel():
    folder = shipped_folder()
    assert folder is not None
    assert folder.parts[-2:] in (("benchmarks", "results"), ("weightpath", "records"))


def test_every_shipped_record_is_sound():
    folder = shipped_folder()
    assert folder is not None
    assert load_records([folder]).warnings == ()


def test_a_record_in_the_users_store_verifies_a_plan_and_its_absence_does_not(
    tmp_path, monkeypatch, profiles
):
    monkeypatch.setenv("WEIGHTPATH_RECORDS", str(tmp_path))
    laptop = profiles["avx2 laptop"]
    before = select_weight_path(laptop, evidence=load_records([tmp_path]))
    assert not before.verified
    other = a_record(path="w4a8-avx2", device_class="x86_cpu/avx512")
    save_record(other)
    assert not select_weight_path(laptop, evidence=load_records([tmp_path])).verified
    file = save_record(replace(other, device_class=device_class(laptop)))
    after = select_weight_path(laptop)
    assert after.verified
    assert str(file) in " ".join(after.reasons)


def test_a_damaged_store_does_not_stop_a_plan(tmp_path, monkeypatch, profiles):
    monkeypatch.setenv("WEIGHTPATH_RECORDS", str(tmp_path))
    (tmp_path / "x.json").write_text("{")
    assert any("x.json" in warning for warning in select_weight_path(profiles["zen4"]).warnings)


def test_a_verdict_needs_the_whole_spread_on_one_side():
    assert FAST.verdict == "faster"
    assert Speed(1.0, 2.0, 0.5, 0.4, 0.9).verdict == "slower"
    assert Speed(1.0, 1.0, 0.9, 0.8, 1.1).verdict == "level"


def test_a_record_is_marked_with_its_kind_and_without_its_file():
    plain = a_record(source="somewhere").to_dict()
    assert plain["kind"] == KIND
    assert "source" not in plain


def test_the_rooms_of_paths_do_not_import_torch():
    rooms = "catalog, evidence, runtimes, select, tensors"
    check = f"import sys; from weightpath.paths import {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_evidence_of_asks_for_path_class_and_runtime():
    store = Evidence((a_record(), a_record(runtime="vllm")))
    assert len(store.of("w4a8-vnni", "x86_cpu/avx512_vnni", "weightpath")) == 1
    assert store.of("w4a8-vnni", "x86_cpu/avx2", "weightpath") == ()


def test_saved_files_are_readable_by_others(tmp_path: Path):
    assert save_record(a_record(), tmp_path).stat().st_mode & 0o777 == 0o644
