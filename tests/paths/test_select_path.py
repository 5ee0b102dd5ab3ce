"""The decision table: every device, priority and runtime, with every rejection explained."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weightpath.device.profile import device_class
from weightpath.errors import BadRequest
from weightpath.paths.catalog import CATALOG
from weightpath.paths.evidence import Evidence, Record, Speed
from weightpath.paths.select import PREFERENCES, PRIORITIES, Selection, select_weight_path
from weightpath.paths.tensors import LinearShape, ModelShapes

NO_EVIDENCE = Evidence()
NAMES = [path.name for path in CATALOG]

TABLE = {  # device: (speed, fidelity) in weightpath's own runtime
    "amx xeon": ("w4a8-amx", "w4a16-tinygemm"),
    "amx without int8": ("w4a8-vnni", "w4a16-tinygemm"),
    "zen4": ("w4a8-vnni", "w4a16-tinygemm"),
    "avx_vnni laptop": ("w4a8-vnni", "w4a16-tinygemm"),
    "plain avx512": ("w4a8-avx2", "w4a16-tinygemm"),
    "avx2 laptop": ("w4a8-avx2", "w4a16-tinygemm"),
    "avx only": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "arm server": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "raspberry pi": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "jetson orin": ("w4a16-cuda", "w8a16-cuda"),
    "jetson xavier": ("fp16", "fp16"),
    "h100": ("w4a16-cuda", "w8a16-cuda"),
    "t4": ("w4a16-cuda", "w8a16-cuda"),
    "unknown gpu": ("bf16", "bf16"),
    "maxwell": ("fp32", "fp32"),
    "phone": ("export-qnn-w8a16", "export-qnn-w8a16"),
    "riscv": ("w8a16", "w8a16"),
}

UNDER_VLLM = {  # device: (speed, fidelity), None where vLLM runs nothing
    "amx xeon": ("w4a8-amx", "w4a16-tinygemm"),
    "zen4": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "plain avx512": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "avx2 laptop": ("fp32", "fp32"),
    "avx only": None,
    "arm server": ("bf16", "bf16"),
    "raspberry pi": ("fp32", "fp32"),
    "jetson orin": ("w4a16-cuda", "w8a16-cuda"),
    "h100": ("w4a16-cuda", "w8a16-cuda"),
    "t4": ("w4a16-cuda", "w8a16-cuda"),
    "jetson xavier": ("fp16", "fp16"),
    "phone": None,
    "riscv": None,
}

UNDER_TRANSFORMERS = {
    "amx xeon": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "avx2 laptop": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "arm server": ("w4a16-tinygemm", "w4a16-tinygemm"),
    "h100": ("w4a16-cuda", "w8a16-cuda"),
    "riscv": ("w8a16", "w8a16"),
    "phone": None,
}


def choose(profiles, device, priority="speed", runtime="weightpath", **more) -> Selection:
    more.setdefault("evidence", NO_EVIDENCE)
    return select_weight_path(profiles[device], priority, runtime, **more)


def a_record(selection: Selection, ratio: float, **changes) -> Record:
    speed = Speed(10 * ratio, 10.0, ratio, ratio * 0.98, ratio * 1.02)
    made = Record(
        path=selection.path.name,
        device_class=selection.device_class,
        model="a-model",
        scheme="w4a8g64",
        decode=speed,
        date="2026-01-02",
        version="0.1.0",
        runtime=selection.runtime,
        source="records/one.json",
    )
    return replace(made, **changes)


@pytest.mark.parametrize("device", TABLE)
@pytest.mark.parametrize(("column", "priority"), list(enumerate(PRIORITIES)))
def test_each_device_gets_the_path_of_the_table(profiles, device, column, priority):
    assert choose(profiles, device, priority).path.name == TABLE[device][column]


@pytest.mark.parametrize(
    ("runtime", "table"), [("vllm", UNDER_VLLM), ("transformers", UNDER_TRANSFORMERS)]
)
@pytest.mark.parametrize(("column", "priority"), list(enumerate(PRIORITIES)))
def test_a_runtime_bounds_the_choice_to_what_it_loads(profiles, runtime, table, column, priority):
    for device, expected in table.items():
        if expected is None:
            with pytest.raises(BadRequest, match=f"no weight path for .* with {runtime}: "):
                choose(profiles, device, priority, runtime)
        else:
            found = choose(profiles, device, priority, runtime).path.name
            assert found == expected[column], device


def test_every_device_of_the_fixtures_is_in_the_table(profiles):
    assert set(profiles) == set(TABLE)


@pytest.mark.parametrize("device", TABLE)
@pytest.mark.parametrize("priority", PRIORITIES)
def test_every_other_path_is_rejected_with_a_sentence_in_catalog_order(profiles, device, priority):
    chosen = choose(profiles, device, priority)
    assert [name for name, _ in chosen.rejected] == [n for n in NAMES if n != chosen.path.name]
    for name, sentence in chosen.rejected:
        assert len(sentence.split()) > 4, name
        assert "\n" not in sentence


def test_rejections_name_the_missing_flag_or_class(profiles):
    zen4 = dict(choose(profiles, "zen4").rejected)
    assert "amx_tile and amx_int8" in zen4["w4a8-amx"]
    assert "this device is x86_cpu" in zen4["w4a16-cuda"]
    assert "amx_int8" in dict(choose(profiles, "amx without int8").rejected)["w4a8-amx"]
    assert "amx_tile" not in dict(choose(profiles, "amx without int8").rejected)["w4a8-amx"]
    assert "7.2" in dict(choose(profiles, "jetson xavier").rejected)["w4a16-cuda"]
    assert "avx512_vnni" in dict(choose(profiles, "avx2 laptop").rejected)["w4a8-vnni"]


def test_a_rejected_path_that_could_run_says_what_it_would_cost_or_lose(profiles):
    speed = dict(choose(profiles, "zen4").rejected)
    assert "8.01 bits a weight, not 4.16" in speed["w8a16"]
    fidelity = dict(choose(profiles, "zen4", "fidelity").rejected)
    assert "int8 activations lose more" in fidelity["w4a8-vnni"]
    assert (
        "4 bits lose more than 8"
        in dict(choose(profiles, "h100", "fidelity").rejected)["w4a16-cuda"]
    )


def test_the_gpu_rows_say_that_they_answer_what_the_source_left_open(profiles):
    for priority in PRIORITIES:
        assert any("left" in reason for reason in choose(profiles, "h100", priority).reasons)


def test_a_path_refused_by_the_runtime_is_named_in_the_reasons(profiles):
    reasons = " ".join(choose(profiles, "zen4", runtime="vllm").reasons)
    assert "w4a8-vnni would come first, but vLLM 0.32.0" in reasons
    assert "VLLM_CPU_INT4_W4A8=0" in reasons


def test_transformers_is_said_to_decompress(profiles):
    reasons = choose(profiles, "zen4", runtime="transformers").reasons
    assert any("memory and speed are those of the float model" in reason for reason in reasons)


def test_llama_cpp_is_said_to_want_the_written_folder_as_gguf(profiles):
    reasons = choose(profiles, "zen4", runtime="llama.cpp").reasons
    assert any("weightpath convert DIR --to gguf" in reason for reason in reasons)


def test_unknown_words_are_refused_with_the_known_ones(profiles):
    with pytest.raises(BadRequest, match="speed or fidelity"):
        choose(profiles, "zen4", "size")
    with pytest.raises(BadRequest, match=r"weightpath, vllm, transformers, llama\.cpp"):
        choose(profiles, "zen4", runtime="onnx")


def test_preferences_name_catalog_paths_for_every_class_and_priority():
    assert {priority for _, priority in PREFERENCES} == set(PRIORITIES)
    assert {name for order in PREFERENCES.values() for name in order} == set(NAMES)


def test_nothing_is_verified_without_a_record(profiles):
    chosen = choose(profiles, "zen4")
    assert not chosen.verified
    assert chosen.records == ()
    assert any("not verified: no record of w4a8-vnni" in reason for reason in chosen.reasons)


def test_a_record_of_this_path_and_class_verifies_it_and_names_its_file(profiles):
    record = a_record(choose(profiles, "zen4"), 1.5)
    chosen = choose(profiles, "zen4", evidence=Evidence((record,)))
    assert chosen.verified
    assert chosen.records == (record,)
    spoken = " ".join(chosen.reasons)
    assert "measured faster than bf16" in spoken
    assert "records/one.json" in spoken
    assert "1.50 times bf16 (1.47 to 1.53)" in spoken


@pytest.mark.parametrize(
    "changes",
    [
        {"device_class": "x86_cpu/avx2"},
        {"device_class": "x86_cpu"},
        {"path": "w4a8-avx2"},
        {"runtime": "vllm"},
    ],
)
def test_a_record_of_another_class_path_or_runtime_does_not_count(profiles, changes):
    record = a_record(choose(profiles, "zen4"), 1.5, **changes)
    assert not choose(profiles, "zen4", evidence=Evidence((record,))).verified


def test_evidence_against_a_path_is_a_warning_and_does_not_flip_the_choice(profiles):
    record = a_record(choose(profiles, "zen4"), 0.5)
    chosen = choose(profiles, "zen4", evidence=Evidence((record,)))
    assert chosen.path.name == "w4a8-vnni"
    assert any(r.startswith("warning: measured slower than bf16") for r in chosen.reasons)


def test_a_ratio_whose_spread_holds_one_is_called_level(profiles):
    record = a_record(choose(profiles, "zen4"), 1.0)
    reasons = choose(profiles, "zen4", evidence=Evidence((record,))).reasons
    assert any("no faster than bf16 beyond the spread" in reason for reason in reasons)


def test_a_path_that_measured_faster_is_named_and_not_taken(profiles):
    own = a_record(choose(profiles, "zen4"), 1.5)
    rival = a_record(choose(profiles, "zen4"), 2.0, path="w8a16", source="records/two.json")
    chosen = choose(profiles, "zen4", evidence=Evidence((own, rival)))
    assert chosen.path.name == "w4a8-vnni"
    assert any("w8a16 measured faster here" in r and "two.json" in r for r in chosen.reasons)
    other_model = replace(rival, model="another")
    quiet = choose(profiles, "zen4", evidence=Evidence((own, other_model)))
    assert not any("w8a16 measured faster" in reason for reason in quiet.reasons)


def test_a_model_sets_the_group_size_and_the_bytes(profiles):
    linears = (LinearShape("up", 1536, 576), LinearShape("down", 576, 1536))
    model = ModelShapes(linears, tied=False, dtype="bfloat16", total_bytes=2 * 2 * 1536 * 576)
    chosen = choose(profiles, "zen4", model=model)
    assert chosen.path.group_size == 64
    assert chosen.path.bits_per_weight == 4.3125
    assert chosen.path.built_by.endswith("--scheme w4g64-asym")
    assert any("4.31 bits a weight" in reason for reason in chosen.reasons)
    small = replace(profiles["zen4"], ram_total=1000)
    said = select_weight_path(small, model=model, evidence=NO_EVIDENCE).reasons
    assert any(reason.startswith("warning: that exceeds") for reason in said)


@pytest.mark.parametrize("device", TABLE)
def test_a_selection_is_plain_json(profiles, device):
    chosen = choose(profiles, device)
    plain = json.loads(json.dumps(chosen.to_dict()))
    assert plain["path"]["name"] == chosen.path.name
    assert plain["device_class"] == device_class(profiles[device])
    assert len(plain["rejected"]) == len(NAMES) - 1


def test_damaged_records_are_passed_on_as_warnings(profiles):
    chosen = choose(profiles, "zen4", evidence=Evidence(warnings=("record x is left out",)))
    assert chosen.warnings == ("record x is left out",)
