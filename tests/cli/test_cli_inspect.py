"""weightpath inspect: text and JSON tell the same, and the exit code says whether it is sound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_checkpoint import edit_json, edit_tensors
from tiny_formats import write
from weightpath.checkpoints.audit import Finding, summarise

pytestmark = pytest.mark.usefixtures("one_thread")
Cli = Callable[..., Any]

DOWN = "model.layers.0.mlp.down_proj"


def words(text: str) -> str:
    return " ".join(text.split())


def section(out: str, title: str) -> str:
    """The lines below a title, up to the next blank one."""
    return out.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]


def both(run: Cli, folder: Path, *more: object, code: int = 0) -> tuple[str, dict[str, Any], str]:
    """Text, JSON and stderr of one inspection; stderr and exit code are the same for both."""
    text, plain = run("inspect", folder, *more), run("inspect", folder, *more, "--json")
    assert (text.code, plain.code) == (code, code), text.err
    assert text.err == plain.err
    return text.out, json.loads(plain.out), text.err


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gptq-v1", {"symmetric": False, "ordered": True}),
        ("awq-gemv", {}),
        ("gguf", {"kind": "Q6_K"}),
        ("bnb-nf4", {}),
        ("weightpath-int8", {}),
    ],
)
def test_the_text_tells_what_the_json_holds(
    weightpath_cli: Cli, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = write(kind, tmp_path / "m", **options)
    out, plain, err = both(weightpath_cli, source.path, "--tp", "2,4", "--kernel", "awq")
    assert err == ""
    folded = words(out)
    assert f"{plain['where']}: {plain['format']}, {plain['architecture']}" in folded
    assert f"recognised by {plain['how']}" in out
    for row in plain["modules"]:
        shapes = ", ".join(f"[{n}, {k}]" for n, k in row["shapes"])
        figures = (row["pattern"], row["scheme"], row["count"], shapes)
        assert f"{' '.join(map(str, figures))} {row['bits_per_weight']:.3f}" in folded
    for note in plain["notes"]:
        assert f"note: {note}" in out
    findings = [Finding(**finding) for finding in plain["findings"]]
    count = sum(row["count"] for row in plain["modules"])
    expected = summarise(findings, 20, count) or ("none found",)
    assert section(out, "problems").splitlines() == list(expected)
    table = words(section(out, "who loads it"))
    assert plain["acceptance"]
    for row in plain["acceptance"]:
        name = f"{row['runtime']} {row['versions']} {row['device']}".strip()
        assert f"{name} {row['loads']}" in table
        assert words(row["why"]) in table
        if row["convert"]:
            kept = {True: ", exact", False: ", lossy", None: ""}[row["lossless"]]
            assert f"weightpath convert {row['convert']}{kept}" in table
        for need in row["needs"]:
            assert need in table
    told = section(out, "tensor parallelism")
    assert plain["splits"] or "splits asked work" in told
    for split in plain["splits"]:
        assert f"tp {split['tp']}: " in told
        assert f"{split['problem']}; {split['mend']}" in told
    limits = section(out, "the AWQ kernel's limits")
    for limit in plain["kernel"]:
        assert f"{limit['problem']}; {limit['mend']}" in limits
    assert not plain["device_refuses"] or plain["device_refuses"] in limits


def test_a_sound_checkpoint_ends_with_0_and_says_that_nothing_was_found(
    weightpath_cli: Cli, tmp_path: Path
) -> None:
    out, plain, err = both(weightpath_cli, write("ct-packed", tmp_path / "m").path)
    assert section(out, "problems") == "none found"
    assert (plain["findings"], err) == ([], "")
    assert "tensor parallelism" not in out
    assert "AWQ kernel" not in out


def test_warnings_and_notes_end_with_0(weightpath_cli: Cli, tmp_path: Path) -> None:
    source = write("gptq-v1", tmp_path / "m")
    edit_tensors(source.folder, lambda t: t[f"{DOWN}.scales"][0, 3].fill_(0))
    out, plain, err = both(weightpath_cli, source.path)
    assert [finding["severity"] for finding in plain["findings"]] == ["warning"]
    assert section(out, "problems").startswith(f"warning: {DOWN}: zero scales: 1 of 1024")
    assert err == ""


@pytest.mark.parametrize("several", [False, True])
def test_an_error_ends_with_2_and_one_line_after_the_whole_report(
    weightpath_cli: Cli, several: bool, tmp_path: Path
) -> None:
    source = write("gptq-v1", tmp_path / "m")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}.scales"][0, 3] = torch.nan
        if several:
            del tensors["model.norm.weight"]

    edit_tensors(source.folder, damage)
    out, plain, err = both(weightpath_cli, source.path, code=2)
    errors = [finding for finding in plain["findings"] if finding["severity"] == "error"]
    assert len(errors) == 1 + several
    (line,) = err.splitlines()
    first = errors[0]
    assert line.startswith(f"weightpath: {source.path}: {first['tensor']}: {first['problem']}")
    assert line.endswith(first["mend"])
    assert ("(1 more above)" in line) == several
    assert f"error: {first['tensor']}: {first['problem']}" in section(out, "problems")
    assert "who loads it, with the errors mended" in out
    assert sum(row["count"] for row in plain["modules"]) == 13
    assert len(plain["acceptance"]) >= 5


@pytest.mark.parametrize(
    ("options", "words_of"),
    [
        (("--tp", "two"), "--tp 'two': give sizes with commas between, such as 2,4,8"),
        (("--tp", "2,,4"), "--tp '2,,4': give sizes with commas between"),
        (("--tp", "2;4"), "--tp '2;4': give sizes"),
        (("--tp", "-2"), "--tp '-2': give sizes"),
        (("--tp", "1"), "tp 1: give sizes of 2 and more"),
        (("--tp", "2,0"), "tp 0: give sizes of 2 and more"),
        (("--tp", "9" * 60), "give sizes with commas between"),
        (("--kernel", "marlin"), "kernel 'marlin': limits are known of awq"),
        (("--kernel", ""), "kernel '': limits are known of awq"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    weightpath_cli: Cli, options: tuple[str, ...], words_of: str, tmp_path: Path
) -> None:
    source = write("ct-packed", tmp_path / "m")
    ran = weightpath_cli("inspect", source.path, *options)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert words_of in ran.err


def test_what_is_no_checkpoint_is_refused_with_nothing_on_stdout(
    weightpath_cli: Cli, tmp_path: Path
) -> None:
    for place in (tmp_path / "none", tmp_path):
        ran = weightpath_cli("inspect", place, "--json")
        assert (ran.code, ran.out) == (2, "")
        assert len(ran.err.splitlines()) == 1


def test_alike_splits_are_one_line_with_their_number_and_the_fix(
    weightpath_cli: Cli, tmp_path: Path
) -> None:
    source = write("ct-packed", tmp_path / "m", group_size=64, model={"intermediate_size": 192})
    out, plain, _ = both(weightpath_cli, source.path, "--tp", "2")
    assert len(plain["splits"]) == 2
    (line,) = section(out + "\n", "tensor parallelism").splitlines()
    assert line.startswith("tp 2: model.layers.*.mlp.down_proj (2): a group of 64 straddles shards")
    assert "--group-size 32" in line
    out, plain, _ = both(weightpath_cli, write("ct-packed", tmp_path / "n").path, "--tp", "2,4")
    assert plain["splits"] == []
    assert "all 28 splits asked work" in out


def test_the_fix_that_a_split_is_given_is_a_command_that_works(
    weightpath_cli: Cli, tmp_path: Path
) -> None:
    source = write("ct-packed", tmp_path / "m", group_size=64, model={"intermediate_size": 192})
    command = ("convert", source.path, "--to", "compressed-tensors", "--group-size", "32")
    assert weightpath_cli(*command, "-o", tmp_path / "cut", "--exact-only").code == 0
    _, plain, _ = both(weightpath_cli, tmp_path / "cut", "--tp", "2")
    assert plain["splits"] == []
    assert plain["split_checked"] == 14


def test_names_that_tell_no_side_are_said_not_to_have_been_asked(
    weightpath_cli: Cli, tmp_path: Path
) -> None:
    source = write("gptq-v1", tmp_path / "m")
    edit_json(source.folder / "config.json", model_type="nova")
    edit_tensors(source.folder, lambda t: [
        t.update({name.replace("_proj", "_linear"): t.pop(name)}) for name in list(t)
    ])  # fmt: skip
    out, plain, _ = both(weightpath_cli, source.path, "--tp", "2")
    assert (plain["split_checked"], plain["split_unknown"]) == (0, 14)
    assert "14 linears were not asked: their names tell neither rows nor columns" in out
    assert "splits asked work" not in out


def test_many_findings_of_a_kind_are_one_line_in_text_and_all_in_json(
    weightpath_cli: Cli, tmp_path: Path
) -> None:
    source = write("awq-gemm", tmp_path / "m")
    edit_json(source.folder / "config.json", dtype="bfloat16")
    out, plain, _ = both(weightpath_cli, source.path)
    assert len(plain["findings"]) == 14
    (line,) = section(out, "problems").splitlines()
    assert "float16 scales served in bfloat16 in 14 of 14 linears" in line
