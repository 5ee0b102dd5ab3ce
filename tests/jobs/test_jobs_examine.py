"""What inspect tells: how a format was recognised, and what is wrong with damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_checkpoint import edit_json, edit_tensors, make_checkpoint
from tiny_formats import FORMATS, write
from tiny_gguf import write_tiny_gguf
from weightpath.engine.load import load
from weightpath.errors import BadCheckpoint, WeightpathError
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import Examination, examine

pytestmark = pytest.mark.usefixtures("one_thread")

DOWN = "model.layers.0.mlp.down_proj"
QUERY = "model.layers.0.self_attn.q_proj"
LINEARS = 14
RECOGNISED = {
    "awq-gemm": ("AWQ gemm", "quant_method awq in"),
    "awq-gemv": ("AWQ gemv", "quant_method awq in"),
    "awq-gemv_fast": ("AWQ gemv_fast", "quant_method awq in"),
    "awq-llm": ("AWQ llm-awq", "quant_method awq in"),
    "gptq-v1": ("GPTQ v1", "quant_method gptq in"),
    "gptq-v2": ("GPTQ v2", "quant_method gptq in"),
    "autoround-gptq": ("AutoRound (gptq)", "quant_method auto-round in"),
    "autoround-gptqmodel": ("AutoRound (gptq_v2)", "quant_method auto-round in"),
    "autoround-awq": ("AutoRound (awq)", "quant_method auto-round in"),
    "autoround-ct": ("AutoRound (compressed-tensors)", "quant_method auto-round in"),
    "ct-packed": ("compressed-tensors pack-quantized", "quant_method compressed-tensors in"),
    "ct-padded": ("compressed-tensors pack-quantized", "quant_method compressed-tensors in"),
    "ct-int8": ("compressed-tensors int-quantized", "quant_method compressed-tensors in"),
    "ct-ordered": ("compressed-tensors pack-quantized", "quant_method compressed-tensors in"),
    "torchao-int4": ("torchao", "quant_method torchao in"),
    "torchao-int8": ("torchao", "quant_method torchao in"),
    "modelopt-int4": ("ModelOpt", "producer modelopt in hf_quant_config.json"),
    "bnb-nf4": ("bitsandbytes", "quant_method bitsandbytes"),
    "bnb-int8": ("bitsandbytes", "quant_method bitsandbytes"),
    "hqq": ("HQQ", "quant_method hqq"),
    "weightpath-int8": ("compressed-tensors pack-quantized", "quant_method compressed-tensors in"),
    "gguf": ("GGUF Q4_0", "the file's magic number"),
}
WITHOUT_CONFIG = {
    "awq-gemm": "AWQ's at 4 bits in groups of 32",
    "gptq-v1": "GPTQ's at 4 bits in groups of 32",
    "gptq-v2": "GPTQ's at 4 bits in groups of 32",
    "ct-packed": "compressed-tensors's at 4 bits in groups of 32",
    "bnb-nf4": "a tensor named model.layers.0.mlp.down_proj.weight.absmax",
    "bnb-int8": "a tensor named model.layers.0.mlp.down_proj.SCB",
    "hqq": "a tensor named model.layers.0.mlp.down_proj.W_q",
}


def counted(found: Examination) -> int:
    return sum(row.count for row in found.inspection.modules)


def verdict(found: Examination, runtime: str, device: str = "") -> str:
    """What a runtime, the newest vLLM, does."""
    rows = [row for row in found.acceptance if (row.runtime, row.device) == (runtime, device)]
    return rows[-1].loads


def test_every_format_has_its_row() -> None:
    assert RECOGNISED.keys() == FORMATS.keys()


@pytest.mark.parametrize("kind", RECOGNISED)
def test_every_format_is_recognised_by_name_with_what_told_it(kind: str, tmp_path: Path) -> None:
    found = examine(write(kind, tmp_path / "m").path)
    name, how = RECOGNISED[kind]
    assert found.inspection.format == name
    assert how in found.how
    assert [finding.line for finding in found.findings if finding.severity != "note"] == []
    assert counted(found) == LINEARS + (kind == "weightpath-int8")  # which has a packed head too
    plain = json.loads(json.dumps(found.to_dict()))
    assert (plain["format"], plain["how"]) == (name, found.how)
    assert verdict(found, "weightpath") == "yes"


@pytest.mark.parametrize("kind", WITHOUT_CONFIG)
def test_a_lost_config_is_told_with_what_the_tensors_say(kind: str, tmp_path: Path) -> None:
    found = examine(write(kind, tmp_path / "m", place="missing").path)
    assert WITHOUT_CONFIG[kind] in found.how
    assert found.errors == ()
    assert counted(found) == LINEARS
    assert verdict(found, "vLLM", "CUDA") == "no"
    assert verdict(found, "transformers") == "wrong"
    assert verdict(found, "weightpath") == "yes"


@pytest.mark.parametrize("kind", ["awq-gemm", "gptq-v1", "ct-packed"])
def test_a_config_nested_in_a_section_is_named_with_the_section(kind: str, tmp_path: Path) -> None:
    found = examine(write(kind, tmp_path / "m", place="nested").path)
    assert found.how.endswith("config.json: text_config")
    assert verdict(found, "vLLM", "CUDA") == "yes"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("awq-gemm", "the keys w_bit and q_group_size in"),
        ("gptq-v1", "the keys bits and group_size beside qweight in"),
        ("modelopt-int4", "producer modelopt in hf_quant_config.json"),
    ],
)
def test_a_config_in_a_file_of_older_writers_is_named(
    kind: str, words: str, tmp_path: Path
) -> None:
    found = examine(write(kind, tmp_path / "m", place="legacy").path)
    assert words in found.how
    assert verdict(found, "vLLM", "CUDA") == "no"


def test_an_architecture_that_transformers_does_not_know_is_inspected_and_said_not_to_run(
    tmp_path: Path,
) -> None:
    written = write("gptq-v1", tmp_path / "m")
    edit_json(written.folder / "config.json", model_type="nova", architectures=["NovaForCausalLM"])
    found = examine(written.path, tp=(2,), kernel="awq")
    assert found.inspection.architecture == "NovaForCausalLM"
    assert counted(found) == LINEARS
    assert {row.role for row in found.inspection.kinds} == {"linear", "head", "embedding", "other"}
    assert found.errors == ()
    assert found.split_checked == LINEARS
    for runtime in ("transformers", "weightpath"):
        (row,) = (row for row in found.acceptance if row.runtime == runtime)
        assert row.loads == "no"
        assert "model_type 'nova' is unknown to transformers" in row.why
    with pytest.raises(BadCheckpoint, match="model_type 'nova' is unknown"):
        load(written.path)
    assert convert(str(written.path), "compressed-tensors", tmp_path / "out").lossy == 0


# damaged files

Edit = Callable[[dict[str, Tensor]], object]
DAMAGE: dict[str, tuple[str, Edit, str, str]] = {
    "no scales": ("gptq-v1", lambda t: t.pop(f"{DOWN}.scales"), DOWN, "but no scales"),
    "no codes": ("gptq-v1", lambda t: t.pop(f"{DOWN}.qweight"), DOWN, "but no qweight"),
    "no zeros": ("gptq-v1", lambda t: t.pop(f"{DOWN}.qzeros"), DOWN, "13 of 14 linears do"),
    "no packed scale": (
        "ct-packed", lambda t: t.pop(f"{DOWN}.weight_scale"), DOWN, "but no weight_scale"
    ),
    "NaN": ("awq-gemm", lambda t: t[f"{DOWN}.scales"][0].fill_(torch.nan), DOWN, "is nan"),
    "a short tensor": (
        "awq-gemm", lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"][1:]}), DOWN, "(7, 128)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_linear_is_an_error_and_the_others_are_counted(case: str, tmp_path: Path) -> None:
    kind, edit, name, words = DAMAGE[case]
    written = write(kind, tmp_path / "m")
    edit_tensors(written.folder, edit)
    found = examine(written.path)
    assert found.errors
    assert all(name in finding.tensor for finding in found.errors)
    assert any(words in finding.problem for finding in found.errors), found.errors
    assert all("\n" not in finding.line for finding in found.findings)
    assert counted(found) == LINEARS - 1
    assert any(row.pattern.endswith("down_proj") and row.count == 1
               for row in found.inspection.modules)  # fmt: skip
    with pytest.raises(WeightpathError, match=name):
        load(written.path)


OTHER: dict[str, tuple[Edit, str, str]] = {
    "a norm is missing": (
        lambda t: t.pop("model.norm.weight"), "model.norm.weight", "the model wants (128,)"
    ),
    "a linear is missing": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(DOWN)],
        f"{DOWN}.weight", "the model wants (128, 256)",
    ),
    "a wrapper's prefix": (
        lambda t: [t.update({f"module.{name}": t.pop(name)}) for name in list(t)],
        f"module.{DOWN}", "names start with 'module.'",
    ),
    "a bias with values": (
        lambda t: t.update({f"{QUERY}.bias": torch.ones(128).half()}),
        f"{QUERY}.bias", "the architecture has no such bias, and 128 of its values",
    ),
    "a table of another size": (
        lambda t: t.update({"model.embed_tokens.weight": torch.ones(63, 128).half()}),
        "model.embed_tokens.weight", "has shape (63, 128), the model wants (64, 128)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER)
def test_what_does_not_fit_the_model_is_an_error_that_load_and_convert_refuse_too(
    case: str, tmp_path: Path
) -> None:
    edit, name, words = OTHER[case]
    written = write("gptq-v1", tmp_path / "m")
    edit_tensors(written.folder, edit)
    (error,) = examine(written.path).errors
    assert error.tensor == name
    assert words in error.problem
    with pytest.raises(WeightpathError):
        load(written.path)
    with pytest.raises(WeightpathError):
        convert(str(written.path), "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sound_numbers_that_cost_something_are_warnings_and_no_errors(tmp_path: Path) -> None:
    written = write("gptq-v1", tmp_path / "m")
    edit_tensors(written.folder, lambda t: t[f"{DOWN}.scales"][0, 3].fill_(0))
    found = examine(written.path)
    (finding,) = found.findings
    assert (finding.severity, finding.tensor, finding.kind) == ("warning", DOWN, "zero scales")
    assert "first [3, 0]" in finding.problem


def test_a_bf16_model_s_fp16_scales_are_noted_with_what_serving_rounds(tmp_path: Path) -> None:
    written = write("awq-gemm", tmp_path / "m")
    edit_json(written.folder / "config.json", dtype="bfloat16")
    found = examine(written.path)
    assert {finding.severity for finding in found.findings} == {"note"}
    assert len(found.findings) == LINEARS
    assert all("float16 scales served in bfloat16" in f.problem for f in found.findings)
    why = next(row.why for row in found.acceptance if row.runtime == "vLLM")
    assert "float16 scales are rounded to bf16, by up to 0.39%" in why


def test_a_label_that_the_data_contradict_is_noted(tmp_path: Path) -> None:
    written = write("gptq-v2", tmp_path / "m", changes={"checkpoint_format": "gptq"})
    found = examine(written.path)
    assert found.inspection.format == "GPTQ v2"
    assert any(note.startswith("contradiction: checkpoint_format gptq") for note in found.notes)
    assert verdict(found, "transformers") == "wrong"


@pytest.mark.parametrize("name", ["none", "none.gguf"])
def test_what_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="does not exist"):
        examine(tmp_path / name)


def test_float_checkpoints_are_recognised_and_asked_for_no_splits(
    tmp_path: Path, tiny_llama: Path
) -> None:
    found = examine(tiny_llama, tp=(2,))
    assert (found.how, found.inspection.format) == ("float weights", "safetensors, float")
    assert found.splits == ()
    assert any("linears are floats" in note for note in found.notes)
    assert [verdict(found, name) for name in ("transformers", "weightpath")] == ["yes", "no"]
    with pytest.raises(BadCheckpoint, match="float weights"):
        load(tiny_llama)
    broken = make_checkpoint(tmp_path / "m")
    edit_tensors(broken, lambda t: t.pop("model.norm.weight"))
    assert [finding.tensor for finding in examine(broken).errors] == ["model.norm.weight"]


def test_a_gguf_of_floats_alone_is_told_apart_from_one_with_blocks(tmp_path: Path) -> None:
    source = write(
        "ct-packed", tmp_path / "m", group_size=16, tokenizer=True,
        model={"intermediate_size": 144, "hidden_size": 144, "head_dim": 36},
    )  # fmt: skip
    made = convert(str(source.path), "gguf", tmp_path / "floats.gguf")  # rows no block tiles
    assert {item.target for item in made.linears} == {"F16"}
    found = examine(made.folder)
    assert (found.inspection.format, found.how) == ("GGUF", "the file's magic number")
    assert verdict(found, "llama.cpp") == "yes"
    blocks = examine(write_tiny_gguf(tmp_path / "b.gguf"))
    assert blocks.inspection.format == "GGUF Q8_0"
