"""What each verb prints: help with an example, text, and JSON that carries what the text shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightpath
from tiny_checkpoint import make_checkpoint, read_header
from tiny_gguf import write_tiny_gguf
from weightpath.device.profile import FACTS, from_dict
from weightpath.version import __version__

pytestmark = pytest.mark.usefixtures("one_thread")
VERBS = ("probe", "plan", "kv", "build", "quantize", "inspect", "verify", "run", "serve")
Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"# file: {i}\n" + "A cat sat on a mat. " * 60 + "\n" for i in range(6))
    )
    return path


def words(text: str) -> str:
    """Text with its line breaks and paddings made single blanks, as tables fold."""
    return " ".join(text.split())


def parsed(ran: Any) -> Any:
    """The one JSON document on stdout; NaN and Infinity are not JSON."""
    assert ran.code == 0, ran.err

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(ran.out, parse_constant=refuse)


def shown(ran: Any) -> str:
    assert ran.code == 0, ran.err
    return words(ran.out)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verbs_help_has_an_example_that_names_the_verb(
    weightpath_cli: Cli, verb: str
) -> None:
    ran = weightpath_cli(verb, "--help")
    assert f"Example: weightpath {verb}" in shown(ran)
    assert "--json" in ran.out
    assert ran.err == ""


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_in_every_example_exist(weightpath_cli: Cli, verb: str) -> None:
    out = weightpath_cli(verb, "--help").out
    usage, example = out.split("Example:")
    for option in re.findall(r"(?<!\w)--?[a-z][\w-]*", example):
        if option != "--device":  # of plan, in probe's example
            assert re.search(rf"(?<![\w-]){re.escape(option)}\b", usage), option


def test_the_program_names_its_verbs_and_version(weightpath_cli: Cli) -> None:
    for arguments in ((), ("--help",)):
        out = shown(weightpath_cli(*arguments))
        assert all(f" {verb} " in f"{out} " for verb in VERBS)
    assert weightpath_cli("--version").out == f"{__version__}\n"


def test_probe_prints_every_fact_and_json_reads_back(weightpath_cli: Cli, tmp_path: Path) -> None:
    plain = parsed(weightpath_cli("probe", "--json"))
    assert set(plain["sources"]) == set(FACTS)
    profile = from_dict(plain, "test")
    out = shown(weightpath_cli("probe"))
    assert f"{profile.logical_cores} usable, {profile.physical_cores} physical" in out
    assert profile.arch in out
    assert words(profile.sources["cpu_model"])[:20] in out
    (tmp_path / "here.json").write_text(json.dumps(plain))
    again = parsed(weightpath_cli("probe", "--device", tmp_path / "here.json", "--json"))
    assert {k: v for k, v in again.items() if k != "sources"} == {
        k: v for k, v in plain.items() if k != "sources"
    }


def test_plan_prints_reasons_and_every_rejection(weightpath_cli: Cli, tiny_llama: Path) -> None:
    arguments = ("plan", tiny_llama, "--device", "xeon-amx-h200", "--priority", "fidelity")
    out, plain = shown(weightpath_cli(*arguments)), parsed(weightpath_cli(*arguments, "--json"))
    selection = plain["selection"]
    assert selection["path"]["name"] in out
    assert ("verified" if selection["verified"] else "not verified") in out
    for reason in selection["reasons"]:
        assert words(reason) in out
    assert len(selection["rejected"]) >= 8
    for row in selection["rejected"]:
        assert words(f"- {row['path']}: {row['reason']}") in out
    tensors = plain["tensors"]
    assert words(tensors["group_reason"]) in out
    assert f"{tensors['file_bits_per_weight']:.3f}" in out
    assert f"{tensors['linear_bits_per_weight']:.3f}" in out


def test_plan_hands_over_to_vllm_with_the_exact_command(
    weightpath_cli: Cli, tiny_llama: Path
) -> None:
    arguments = ("plan", tiny_llama, "--device", "xeon-amx-h200", "--runtime", "vllm")
    out, plain = shown(weightpath_cli(*arguments)), parsed(weightpath_cli(*arguments, "--json"))
    path = plain["selection"]["path"]
    assert path["vllm_command"] in out
    assert "serve, one user: weightpath serve DIR" in out
    assert "vllm serve DIR --quantization compressed-tensors" in path["vllm_command"]
    out = shown(weightpath_cli("plan", tiny_llama, "--device", "snapdragon-8-elite"))
    assert "vLLM does not run this path here" in out
    assert "weightpath serve" not in out


def test_plan_why_lists_every_tensor(weightpath_cli: Cli, tiny_llama: Path) -> None:
    ran = weightpath_cli("plan", tiny_llama, "--why")
    folded = re.sub(r"\s+", "", ran.out)
    plain = parsed(weightpath_cli("plan", tiny_llama, "--json"))
    assert len(plain["tensors"]["decisions"]) == 16
    for item in plain["tensors"]["decisions"]:
        assert f"{item['stored_bytes']:,}" in folded


def test_quantize_prints_what_was_written(
    weightpath_cli: Cli, tiny_tied: Path, tmp_path: Path
) -> None:
    arguments = ("--scheme", "w4g64")
    out = shown(weightpath_cli("quantize", tiny_tied, "-o", tmp_path / "a", *arguments))
    ran = weightpath_cli("quantize", tiny_tied, "-o", tmp_path / "b", *arguments, "--json")
    plain = parsed(ran)
    assert set(plain["outcomes"]) == set(read_header(tiny_tied / "model.safetensors"))
    assert set(plain["outcomes"].values()) == {"quantized", "copied"}
    assert len(plain["linears"]) == 15
    assert plain["resumed_units"] == 0
    assert plain["folder"] == str(tmp_path / "b")
    assert f"{len(plain['linears'])} linears quantized" in out
    assert f"{plain['total']['signal_to_noise_db']:.1f} dB" in out
    written = plain["written"]
    assert f"{written['linear_bits_per_weight']:.3f}" in out
    assert f"whole file {written['file_bits_per_weight']:.3f}" in out
    assert f"{written['tensors']} tensors" in out


def test_quantize_without_a_scheme_takes_the_devices_plan(
    weightpath_cli: Cli, tiny_llama: Path, tmp_path: Path
) -> None:
    device = ("--device", "xeon-amx-h200", "--priority", "fidelity")
    planned = parsed(weightpath_cli("plan", tiny_llama, *device, "--json"))
    made = parsed(weightpath_cli("quantize", tiny_llama, "-o", tmp_path / "out", *device, "--json"))
    assert made["written"]["made_by"]["path"] == planned["selection"]["path"]["name"]
    wanted = {d["name"]: d["scheme"] for d in planned["tensors"]["decisions"] if d["scheme"]}
    assert set(made["linears"]) == set(wanted)


def test_quantize_resumes_and_says_so(
    weightpath_cli: Cli, tiny_llama: Path, tmp_path: Path
) -> None:
    steps = 0

    def stop(label: str, done: int, total: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightpath.quantize(tiny_llama, tmp_path / "out", scheme="int8", progress=stop)
    out = shown(weightpath_cli("quantize", tiny_llama, "-o", tmp_path / "out", "--scheme", "int8"))
    assert "4 tensors were finished by an earlier run and kept" in out


def test_inspect_prints_every_count(weightpath_cli: Cli, tiny_low_bit: Path) -> None:
    out = shown(weightpath_cli("inspect", tiny_low_bit))
    plain = parsed(weightpath_cli("inspect", tiny_low_bit, "--json"))
    assert len(plain["kinds"]) == 4
    for kind in plain["kinds"]:
        row = (kind["scheme"], kind["role"], kind["tensors"], f"{kind['weights']:,}",
               f"{kind['stored_bytes']:,}", f"{kind['bits_per_weight']:.3f}")  # fmt: skip
        assert " ".join(map(str, row)) in out
    for figure in ("linear_bits_per_weight", "matmul_bits_per_weight", "file_bits_per_weight"):
        assert f"{plain[figure]:.3f}" in out
    assert "compressed-tensors pack-quantized, LlamaForCausalLM" in out
    assert f"made by weightpath {__version__}" in out


def test_inspect_reads_float_folders_and_gguf_files(
    weightpath_cli: Cli, tiny_llama: Path, tmp_path: Path
) -> None:
    assert "safetensors, float" in shown(weightpath_cli("inspect", tiny_llama))
    path = write_tiny_gguf(tmp_path / "m.gguf")
    plain = parsed(weightpath_cli("inspect", path, "--json"))
    assert plain["format"] == "GGUF Q8_0"
    rows = {(kind["scheme"], kind["role"]): kind["bits_per_weight"] for kind in plain["kinds"]}
    assert rows["w8g32", "linear"] == 8.5  # as stored: 32 int8 codes and an fp16 scale a block
    assert "GGUF Q8_0, LlamaForCausalLM" in shown(weightpath_cli("inspect", path))


def test_a_gguf_file_is_a_model_for_every_verb(
    weightpath_cli: Cli, tmp_path: Path, text: Path
) -> None:
    path, low = write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "low"
    assert "groups of 64" in shown(weightpath_cli("plan", path))
    assert "14 linears" in shown(
        weightpath_cli("quantize", path, "-o", low, "--scheme", "w4g32", "--head", "16")
    )
    ran = weightpath_cli("run", low, "--prompt", "he", "--max-tokens", "3", "--json")
    assert len(parsed(ran)["tokens"]) <= 3
    few = ("--text", text, "--length", "96", "--windows", "3", "--prompt-tokens", "2")
    ran = weightpath_cli("verify", low, "--reference", path, *few, "--json")
    assert parsed(ran)["fidelity"]["mean_kl"]["value"] > 0


def test_verify_prints_every_figure(
    weightpath_cli: Cli, tiny_llama: Path, tiny_low_bit: Path, text: Path
) -> None:
    few = ("--text", text, "--length", "96", "--windows", "3", "--prompt-tokens", "4")
    arguments = ("verify", tiny_low_bit, "--reference", tiny_llama, *few)
    out, plain = shown(weightpath_cli(*arguments)), parsed(weightpath_cli(*arguments, "--json"))
    fidelity, greedy = plain["fidelity"], plain["greedy"]
    for name, places in (("mean_kl", 4), ("median_kl", 4), ("p999_kl", 4), ("perplexity_ratio", 4),
                         ("perplexity_candidate", 3)):  # fmt: skip
        low, value, high = (f"{fidelity[name][k]:.{places}f}" for k in ("low", "value", "high"))
        assert f"{value} ({low} to {high})" in out, name
    low, value, high = (f"{100 * fidelity['top1'][k]:.1f}%" for k in ("low", "value", "high"))
    assert f"{value} ({low} to {high})" in out
    assert f"bf16 {fidelity['perplexity_reference']['value']:.3f}" in out
    assert f"{plain['noise_floor']['mean_kl']['value']:.1e}" in out
    assert f"greedy text reproduced: {greedy['k']} of {greedy['n']} prompts" in out
    assert (
        f"{fidelity['tokens']:,} tokens, reference in {plain['compute']}; the native engine" in out
    )
    assert f"keys and values in {plain['kv_cache']}, 16-bit activations" in out
    eight = parsed(weightpath_cli(*arguments, "--engine", "native", "--kv-cache", "int8", "--json"))
    assert (eight["engine"], eight["kv_cache"]) == ("native", "int8")
    modules = shown(weightpath_cli(*arguments, "--engine", "transformers"))
    assert "transformers' modules, 16-bit activations" in modules
    assert words(plain["text"]) in out


@pytest.fixture(scope="module")
def small_build() -> dict[str, Any]:
    """Build's own amounts, cut down for a tiny model."""
    return {
        "prompt_length": 8,
        "decode_tokens": 2,
        "rounds": 2,
        "speed_seconds": 1.0,
        "answer_tokens": 6,
    }


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, small_build: dict[str, Any]) -> None:
    """Make the amounts that have no option smaller; nothing else of build changes."""
    from dataclasses import replace

    from weightpath.jobs import build as room

    def smaller(**chosen: Any) -> Any:
        made = real(**chosen)
        verify = replace(made.verify, length=96, prompt_tokens=4, floor_windows=2)
        return replace(made, verify=verify, **small_build)

    real = room.BuildOptions
    monkeypatch.setattr(room, "BuildOptions", smaller)


SECTIONS = [
    "device", "plan", "what was written", "fidelity", "speed, measured in turns",
    "an answer from the low-bit model", "files",
]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_build_prints_every_section_in_order_and_the_files_are_there(
    weightpath_cli: Cli, tiny_llama: Path, text: Path, own_stores: Path
) -> None:
    arguments = ("build", tiny_llama, "--text", text, "--windows", "3", "--question", "Why?")
    ran = weightpath_cli(*arguments)
    assert ran.code == 0, ran.err
    found = [line for line in ran.out.splitlines() if line in SECTIONS]
    assert list(dict.fromkeys(found)) == SECTIONS
    places = dict(re.findall(r"^(weights|report|record):\s+(\S+)$", ran.out, re.M))
    assert Path(places["weights"], "README.md").is_file()
    assert Path(places["report"]).name == "report.html"
    assert Path(places["report"]).is_file()
    assert Path(places["record"]).parent == own_stores / "records"
    assert "> Why?" in ran.out
    assert "tok/s" in words(ran.out)
    assert f'weightpath run {places["weights"]} --prompt "..."' in words(ran.out)
    after = shown(weightpath_cli("plan", tiny_llama))
    assert "bits per weight, verified" in after
    assert places["record"] in after
    again = parsed(weightpath_cli(*arguments, "--json"))
    assert set(again) >= {"device", "plan", "written", "fidelity", "speed", "answer", "report"}
    assert again["folder"] == places["weights"]
    assert f"{again['written']['linear_bits_per_weight']:.3f}" in ran.out
    assert f"{again['fidelity']['fidelity']['mean_kl']['value']:.4f}" in ran.out
    assert again["plan"]["selection"]["path"]["name"] in ran.out
    assert words(again["answer"]["text"]) in words(ran.out)


@pytest.mark.usefixtures("quick")
def test_build_without_a_record_keeps_none_and_overwrites_when_asked(
    weightpath_cli: Cli, tiny_llama: Path, text: Path, tmp_path: Path, own_stores: Path
) -> None:
    arguments = ("build", tiny_llama, "-o", tmp_path / "out", "--text", text, "--windows", "2",
                 "--no-record", "--json")  # fmt: skip
    assert parsed(weightpath_cli(*arguments))["record"] is None
    assert not (own_stores / "records").exists()
    assert weightpath_cli(*arguments).code == 2
    assert parsed(weightpath_cli(*arguments, "--overwrite"))["folder"] == str(tmp_path / "out")


def test_infinities_become_null_in_json(weightpath_cli: Cli, tmp_path: Path) -> None:
    from tiny_checkpoint import edit_tensors

    name = "model.layers.0.mlp.up_proj"
    source = edit_tensors(make_checkpoint(tmp_path / "m"), lambda t: t[f"{name}.weight"].zero_())
    ran = weightpath_cli("quantize", source, "-o", tmp_path / "out", "--scheme", "int8", "--json")
    plain = parsed(ran)
    assert plain["linears"][name]["signal_to_noise_db"] is None
    assert plain["linears"][name]["zero_groups"] == 128
