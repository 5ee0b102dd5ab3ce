"""`weightpath convert`: what it prints, as text and as JSON, and one line where it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_checkpoint import edit_json, edit_tensors, folder_bytes, make_checkpoint
from tiny_formats import write

pytestmark = pytest.mark.usefixtures("one_thread")
UP = "model.layers.0.mlp.up_proj"


def flat(text: str) -> str:
    """Text with its line breaks and runs of spaces as one space."""
    return " ".join(text.split())


def only_line(ran: Any) -> str:
    """The one line of stderr of a refusal."""
    assert ran.code == 2, ran.err
    lines = [line for line in ran.err.splitlines() if line.strip()]
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("weightpath: ")
    assert "Traceback" not in ran.out + ran.err
    assert ran.out == ""
    return lines[0]


@pytest.mark.parametrize(
    ("name", "to"),
    [("awq-gemm", "compressed-tensors"), ("gptq-v1", "int8"), ("ct-ordered", "awq"), ("gguf", "gptq")],
)  # fmt: skip
def test_text_and_json_tell_the_same(
    name: str, to: str, tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    source = write(name, tmp_path / "in")
    text = weightpath_cli("convert", source.path, "--to", to, "-o", tmp_path / "text")
    ran = weightpath_cli("convert", source.path, "--to", to, "-o", tmp_path / "json", "--json")
    assert (text.code, ran.code) == (0, 0), text.err + ran.err
    told, shown = json.loads(ran.out), flat(text.out)
    assert (tmp_path / "text" / "model.safetensors").read_bytes() == (
        tmp_path / "json" / "model.safetensors"
    ).read_bytes()
    assert told["folder"] == str(tmp_path / "json")
    assert f"{told['source_format']} to {to}: {tmp_path / 'text'}" in shown
    linears = told["linears"]
    assert {item["name"] for item in linears} == set(source.weights)
    assert told["exact"] == sum(item["exact"] for item in linears)
    assert told["exact"] + told["lossy"] == len(linears) == 14
    rounded = sum(not item["exact"] for item in told["floats"])
    totals = (
        f"{told['exact']} of 14 linears exact, {told['lossy']} lossy; "
        f"{told['copied']} other tensors copied, {rounded} rounded"
    )
    assert shown.endswith(totals)
    lossy = [item for item in linears if not item["exact"]]
    for item in lossy:
        assert 0 < item["mean_change"] < item["largest_change"]
        assert item["name"] in shown
        assert f"{item['largest_change']:.3g}" in shown
    assert ("exact" in shown.split("changed most")[0]) == bool(told["exact"])
    for note in told["notes"]:
        assert flat(note) in shown


def test_a_bf16_model_s_fp16_scales_are_noted_with_their_percentages(
    tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    source = write("gptq-v1", tmp_path / "in")
    edit_json(source.folder / "config.json", dtype="bfloat16")
    arguments = ("convert", source.path, "--to", "compressed-tensors", "-o")
    told = json.loads(weightpath_cli(*arguments, tmp_path / "a", "--json").out)
    shown = flat(weightpath_cli(*arguments, tmp_path / "b").out)
    found = re.search(r"changes them by up to ([\d.]+)% \(([\d.]+)% on average\)", shown)
    assert found
    assert [float(number) / 100 for number in found.groups()] == pytest.approx(
        told["served"], rel=0.05
    )
    edit_json(source.folder / "config.json", dtype="float16")
    assert "changes them" not in weightpath_cli(*arguments, tmp_path / "c").out


def test_a_gguf_file_is_named_and_its_types_are_shown(
    tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    source = write("gptq-v1", tmp_path / "in", tokenizer=True)
    ran = weightpath_cli("convert", source.path, "--to", "gguf", "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"to gguf: {tmp_path / 'out' / 'in.gguf'}" in flat(ran.out)
    assert "Q4_0" in ran.out
    assert "14 of 14 linears exact, 0 lossy; 7 other tensors copied, 0 rounded" in flat(ran.out)


def test_a_folder_s_name_is_shown_as_it_is_brackets_too(
    tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    source = write("gptq-v1", tmp_path / "in")
    ran = weightpath_cli("convert", source.path, "--to", "awq", "-o", tmp_path / "a[bold]b")
    assert ran.code == 0, ran.err
    assert "a[bold]b" in ran.out


def test_what_an_earlier_run_finished_is_counted(
    tmp_path: Path, weightpath_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightpath.jobs import convert_folder

    source = write("gptq-v1", tmp_path / "in")
    original, calls = convert_folder.linear_note, []

    def stop_at_five(*arguments: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(convert_folder, "linear_note", stop_at_five)
    arguments = ("convert", source.path, "--to", "gptq_v2", "-o", tmp_path / "out")
    ran = weightpath_cli(*arguments)
    assert ran.code == 130
    assert "Traceback" not in ran.out + ran.err
    monkeypatch.undo()
    ran = weightpath_cli(*arguments)
    assert ran.code == 0, ran.err
    assert re.search(r"\d tensors were finished by an earlier run and kept", flat(ran.out))


def test_help_says_what_it_writes_and_ends_with_an_example(
    weightpath_cli: Callable[..., Any],
) -> None:
    ran = weightpath_cli("convert", "--help")
    assert ran.code == 0
    shown = flat(re.sub(r"[│╭╮╰╯─]", " ", ran.out))
    assert "weightpath convert awq-model --to compressed-tensors -o out" in shown
    for word in ("--exact-only", "--overwrite", "--json", "gptq_v2", "gguf", "hub id"):
        assert word in shown


def prepared(what: str, folder: Path) -> Path:
    """A source that is wrong in one way."""
    if what == "float":
        return make_checkpoint(folder)
    source = write("awq-gemm", folder)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    if what == "missing tensor":
        edit_tensors(folder, lambda t: t.pop(f"{UP}.scales"))
    elif what == "nan scale":
        edit_tensors(folder, lambda t: t[f"{UP}.scales"].__setitem__((1, 3), float("nan")))
    elif what == "a zero of 0":
        edit_tensors(folder, lambda t: t[f"{UP}.qzeros"].__setitem__((0, 0), 0))
    elif what == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "unknown method":
        edit_json(folder / "config.json", quantization_config=settings | {"quant_method": "aqlm"})
    elif what == "wrong group":
        edit_json(folder / "config.json", quantization_config=settings | {"group_size": 64})
    elif what == "packed twice":
        edit_tensors(folder, lambda t: t.update({f"{UP}.weight": torch.zeros(256, 128)}))
    return source.folder


@pytest.mark.parametrize(
    ("what", "to", "words"),
    [
        ("sound", "exl2", "format 'exl2': not written; use one of compressed-tensors, awq, gptq"),
        ("sound", "AWQ", "format 'AWQ': not written"),
        ("float", "awq", "holds float weights; quantize it first: weightpath quantize"),
        ("missing tensor", "compressed-tensors", f"{UP}.scales: is missing"),
        ("nan scale", "compressed-tensors", f"{UP}: scale [3, 1] is nan"),
        ("truncated", "gptq", "model.safetensors"),
        ("unknown method", "gptq", "quant_method 'aqlm' is not read"),
        ("wrong group", "gptq", "group_size 32 would fit"),
        ("packed twice", "compressed-tensors", f"{UP}.weight: is stored both packed and as floats"),
        ("sound", "gguf", "tokenizer.json: is missing"),
        ("a zero of 0", "gptq", f"{UP}: 8 of 1024 zero points are 0, which GPTQ v1's readers"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_exit_code_2(
    what: str, to: str, words: str, tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    source = prepared(what, tmp_path / "in")
    before = folder_bytes(source)
    line = only_line(weightpath_cli("convert", source, "--to", to, "-o", tmp_path / "out"))
    assert words in line
    assert folder_bytes(source) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("IN --to awq -o IN", "holds the model that it would be made from"),
        ("IN --to awq -o THERE", "exists already"),
        ("IN --to awq -o FILE", "exists and is no checkpoint"),
        ("IN --to int8 -o NEW --exact-only", "cannot be converted exactly"),
        ("IN --to gguf -o THERE.gguf --exact-only", "exists already"),
        ("NONE --to awq -o NEW", "no such folder or file"),
        ("IN -o NEW", "Missing option '--to'"),
        ("IN --to awq", "Missing option '-o'"),
        ("IN --to", "requires an argument"),
    ],
)
def test_a_request_that_cannot_be_met_changes_nothing(
    arguments: str, words: str, tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    write("gptq-v1", tmp_path / "IN", tokenizer=True)
    write("gptq-v1", tmp_path / "THERE")
    for name in ("FILE", "THERE.gguf"):
        (tmp_path / name).write_text("text")
    before = folder_bytes(tmp_path)
    words_of = [
        str(tmp_path / word) if word.isupper() or word == "THERE.gguf" else word
        for word in arguments.split()
    ]
    assert words in only_line(weightpath_cli("convert", *words_of))
    assert folder_bytes(tmp_path) == before
    assert not (tmp_path / "NEW").exists()


def test_overwrite_replaces_a_folder_that_is_there(
    tmp_path: Path, weightpath_cli: Callable[..., Any]
) -> None:
    source = write("gptq-v1", tmp_path / "in")
    arguments = ("convert", source.path, "-o", tmp_path / "out", "--to")
    assert weightpath_cli(*arguments, "awq").code == 0
    assert weightpath_cli(*arguments, "gptq", "--overwrite").code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
