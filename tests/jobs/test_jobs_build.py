"""build end to end on a tiny model, with stores of its own."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import weightpath
from tiny_checkpoint import build_tokenizer, make_checkpoint
from tiny_gguf import write_tiny_gguf
from weightpath.device.probe import probe
from weightpath.device.profile import device_class
from weightpath.errors import BadCheckpoint, BadRequest
from weightpath.jobs.build import Build, BuildOptions, build, default_folder
from weightpath.jobs.inspect import inspect_folder
from weightpath.jobs.verify import VerifyOptions
from weightpath.nn.int4_linear import Int4Linear

STAGES = ["device", "plan", "written", "fidelity", "speed", "answer", "files"]


def options(text: Path, **changes: Any) -> BuildOptions:
    small = {
        "verify": VerifyOptions(text=text, length=96, limit=4, prompt_tokens=4, floor_windows=2),
        "prompt_length": 8, "decode_tokens": 2, "rounds": 2, "speed_seconds": 1.0, "answer_tokens": 6,
        "question": "Why?",
    }  # fmt: skip
    return BuildOptions(**(small | changes))


@dataclass(frozen=True)
class Done:
    """One build, what it told on the way, and where its stores are."""

    result: Build
    stages: list[tuple[str, Any]]
    labels: list[str]
    source: Path
    text: Path
    records: Path
    cache: Path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"# file: {i}\n" + "A cat sat on a mat. " * 60 + "\n" for i in range(6))
    )
    return path


@pytest.fixture(scope="module")
def done(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One build that every test of this file looks at."""
    root = tmp_path_factory.mktemp("build")
    stages: list[tuple[str, Any]] = []
    labels: list[str] = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTPATH_RECORDS", str(root / "records"))
        patch.setenv("WEIGHTPATH_CACHE", str(root / "cache"))
        result = build(
            str(tiny_llama), options(text), stage=lambda *step: stages.append(step),
            progress=lambda label, *_: labels.append(label), command="weightpath build tiny",
        )  # fmt: skip
    torch.set_num_threads(before)
    return Done(result, stages, labels, tiny_llama, text, root / "records", root / "cache")


def test_the_stages_come_in_order_and_each_when_it_is_done(done: Done) -> None:
    assert [name for name, _ in done.stages] == STAGES
    by_name = dict(done.stages)
    assert by_name["plan"] is done.result.plan
    assert by_name["fidelity"] is done.result.verification
    assert by_name["answer"] == ("Why?", done.result.answer)
    assert by_name["files"] is done.result


def test_progress_covers_the_long_parts(done: Done) -> None:
    words = list(dict.fromkeys(label.split(" ")[0] for label in done.labels))
    assert words == ["quantizing", "loading", "comparing", "noise", "greedy", "measuring"]


def test_the_files_are_where_it_says(done: Done) -> None:
    result = done.result
    assert result.folder.parent == done.cache / "builds"
    assert {"README.md", "report.html", "config.json", "model.safetensors", "weightpath.json"} <= {
        path.name for path in result.folder.iterdir()
    }
    assert result.report == result.folder / "report.html"
    assert result.report.read_text().lstrip().lower().startswith("<!doctype html")
    assert inspect_folder(result.folder) == result.inspection
    assert not list(result.folder.parent.glob("*.partial"))
    assert not list(result.folder.glob("*.part"))


def test_the_card_and_the_report_show_the_figures(done: Done) -> None:
    result = done.result
    card = (result.folder / "README.md").read_text()
    page = result.report.read_text()
    kl = result.verification.fidelity.mean_kl.value
    for shown in (card, page):
        assert f"{kl:.4f}" in shown
        assert f"{result.inspection.linear_bits_per_weight:.3f}" in shown
        assert result.plan.path_name in shown
    assert "weightpath build tiny" in card
    assert str(done.source) not in card


def test_speed_is_of_bf16_and_the_path_in_one_run(done: Done) -> None:
    speed = done.result.speed
    assert [model.name for model in speed.models] == ["bf16", done.result.plan.path_name]
    assert speed.rounds >= 2
    assert all(model.decode.median > 0 and model.prefill.median > 0 for model in speed.models)
    assert speed.models[1].decode_ratio is not None


def test_the_answer_is_the_low_bit_models_own(done: Done) -> None:
    from weightpath.engine.generate import answer
    from weightpath.engine.load import load_tokenizer

    folder = done.result.folder
    bits = done.result.plan.activation_bits
    again = answer(
        weightpath.load(folder, dtype=torch.bfloat16, activation_bits=bits),
        load_tokenizer(folder), [{"role": "user", "content": "Why?"}], 6,
    )  # fmt: skip
    assert again.text == done.result.answer.text


def test_a_following_plan_is_verified_by_the_record_and_names_its_file(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightpath.paths.evidence.shipped_folder", lambda: None)
    before = weightpath.plan(done.source)
    assert before.selection is not None
    assert not before.selection.verified
    assert any(reason.startswith("not verified: no record") for reason in before.selection.reasons)
    monkeypatch.setenv("WEIGHTPATH_RECORDS", str(done.records))
    after = weightpath.plan(done.source)
    assert after.selection is not None
    assert after.selection.verified
    assert done.result.record is not None
    assert any(str(done.result.record) in reason for reason in after.selection.reasons)
    other = weightpath.plan(done.source, probe(device="xeon-amx-h200"))
    assert other.selection is not None
    assert not other.selection.verified


def test_the_record_holds_what_was_measured(done: Done) -> None:
    assert done.result.record is not None
    record = json.loads(done.result.record.read_text())
    result = done.result
    assert result.plan.scheme is not None
    assert record["path"] == result.plan.path_name
    assert record["scheme"] == result.plan.scheme.name
    assert record["device_class"] == device_class(result.profile)
    assert record["model"] == done.source.name
    assert record["kld"] == result.verification.fidelity.mean_kl.value
    assert record["kld_text"] == result.verification.text
    assert record["decode"]["ratio"] == result.speed.models[1].decode_ratio.median  # type: ignore[union-attr]
    explained = weightpath.load(result.folder).weightpath.explain()  # type: ignore[union-attr,operator]
    kernels = {f"{row['kernel']} ({row['instruction_set']})" for row in explained.values()}
    assert record["kernel"] == "native engine, " + " and ".join(sorted(kernels))
    assert all(kernel.startswith("cpu (") for kernel in kernels)
    assert list(done.records.iterdir()) == [result.record]


def test_the_json_form_is_whole(done: Done) -> None:
    plain = done.result.to_dict()
    assert json.loads(json.dumps(plain, default=str))
    assert set(plain) == {
        "model", "device", "plan", "written", "fidelity", "speed", "answer", "folder", "report", "record"
    }  # fmt: skip
    assert plain["answer"]["prompt"] == "Why?"
    assert (
        plain["written"]["linear_bits_per_weight"] == done.result.inspection.linear_bits_per_weight
    )


@pytest.mark.usefixtures("one_thread")
def test_a_second_build_replaces_its_own_folder_but_not_one_that_was_named(
    tiny_llama: Path, text: Path, tmp_path: Path, own_stores: Path
) -> None:
    first = build(str(tiny_llama), options(text, record=False))
    assert first.record is None
    assert not (own_stores / "records").exists()
    modified = (first.folder / "model.safetensors").stat().st_mtime_ns
    time.sleep(0.01)
    second = build(str(tiny_llama), options(text, record=False))
    assert second.folder == first.folder
    assert (second.folder / "model.safetensors").stat().st_mtime_ns > modified
    named = options(text, record=False, output=first.folder)
    with pytest.raises(BadRequest, match="exists already"):
        build(str(tiny_llama), named)


@pytest.mark.usefixtures("one_thread")
def test_a_gguf_file_is_built(text: Path, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    result = build(str(source), options(text, record=False, output=tmp_path / "out"))
    assert result.inspection.made_by["base_model"] == "tiny.gguf"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert result.verification.fidelity.mean_kl.value > 0


def test_the_scheme_of_most_linears_names_the_folder(tmp_path: Path, own_stores: Path) -> None:
    source = make_checkpoint(tmp_path / "m", hidden_size=64, intermediate_size=72)
    plan = weightpath.plan(source, probe(device="xeon-amx-h200"), runtime="weightpath")
    names = {d.scheme.with_activations(16).name for d in plan.tensors.decisions if d.scheme}
    assert "w8" in names
    folder = default_folder(str(source), plan)
    assert plan.scheme is not None
    assert folder.name == f"m-{plan.path_name}-{plan.scheme.with_activations(16).name}"
    assert folder.parent == own_stores / "cache" / "builds"


def test_a_model_without_a_tokenizer_is_refused_before_the_work(tmp_path: Path, text: Path) -> None:
    source = make_checkpoint(tmp_path / "m", chat=None)
    seen: list[str] = []
    with pytest.raises(BadCheckpoint, match="no tokenizer that loads"):
        build(
            str(source),
            options(text, output=tmp_path / "out"),
            stage=lambda name, _: seen.append(name),
        )
    assert seen == ["device", "plan"]
    assert not list(tmp_path.glob("out*"))


def test_a_device_that_needs_an_export_or_keeps_floats_is_told_so(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    phone = probe(device="snapdragon-8-gen-3")
    with pytest.raises(BadRequest, match="path export-qnn-w8a16 on this device"):
        build(str(tiny_llama), options(text, output=tmp_path / "out"), phone)
    assert not list(tmp_path.glob("out*"))


def test_a_model_that_the_runtime_leaves_whole_is_refused_before_the_work(
    tmp_path: Path, text: Path
) -> None:
    from weightpath.device.profile import from_dict

    flags = ["avx2", "avx512f", "avx512_vnni"]
    profile = from_dict({"arch": "x86_64", "cpu_flags": flags, "ram_total": 8 << 30}, "test")
    source = make_checkpoint(tmp_path / "m", hidden_size=36, intermediate_size=40, head_dim=10)
    with pytest.raises(BadRequest, match="nothing to quantize"):
        build(str(source), options(text, runtime="vllm", output=tmp_path / "out"), profile)


@pytest.mark.usefixtures("one_thread")
def test_the_models_of_the_comparison_are_gone_before_speed_is_measured(
    tiny_llama: Path, text: Path
) -> None:
    def alive() -> int:
        return sum(type(item) is Int4Linear for item in gc.get_objects())

    seen: dict[str, int] = {}
    gc.collect()
    before = alive()
    build(
        str(tiny_llama),
        options(text, record=False),
        stage=lambda name, _: seen.update({name: alive() - before}),
    )
    assert seen["fidelity"] == 0


def test_an_encoder_is_refused_before_the_work(tmp_path: Path, text: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    source = BertModel(BertConfig(vocab_size=128, intermediate_size=128, **sizes))
    source.save_pretrained(tmp_path / "m")
    build_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(BadRequest, match="BertModel predicts no next token"):
        build(str(tmp_path / "m"), options(text, output=tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))
    weightpath.quantize(tmp_path / "m", tmp_path / "low", scheme="int8")
    with pytest.raises(BadRequest, match="BertModel predicts no next token"):
        weightpath.verify(tmp_path / "low", tmp_path / "m", options(text).verify)
