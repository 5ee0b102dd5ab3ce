"""What a converted folder says of itself, whom it goes with, and that transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reopened import check_told, tensors_of

from tiny_checkpoint import edit_json, edit_tensors
from tiny_formats import write
from weightpath.checkpoints.low_bit import MANIFEST, open_low_bit
from weightpath.errors import BadTensor
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")

SIDE_FILES = ("quant_config.json", "quantize_config.json", "hf_quant_config.json")
DOWN = "model.layers.1.mlp.down_proj"


def test_a_bf16_model_s_fp16_scales_are_reported_with_what_the_runtime_will_round(
    tmp_path: Path,
) -> None:
    source = write("gptq-v1", tmp_path / "in")
    edit_json(source.folder / "config.json", dtype="bfloat16")
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", exact_only=True)
    scales = torch.cat([t.flatten() for n, t in tensors_of(done.folder).items() if "scale" in n])
    rounded = scales.to(torch.bfloat16).double()
    relative = ((rounded - scales.double()) / scales.double()).abs()
    assert done.served is not None
    assert done.served == pytest.approx((float(relative.max()), float(relative.mean())))
    assert 0.001 < done.served[1] < done.served[0] < 0.004
    edit_json(source.folder / "config.json", dtype="float16")
    assert convert(str(source.path), "gptq", tmp_path / "same").served is None


@pytest.mark.parametrize("place", ["config", "legacy", "both", "nested"])
def test_the_new_settings_stand_alone_wherever_the_old_ones_were(
    place: str, tmp_path: Path
) -> None:
    source = write("gptq-v1", tmp_path / "in", place=place, tokenizer=True)
    if place == "config":  # a stale file of another method
        (source.folder / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128}')
    (source.folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (source.folder / "modeling_own.py").write_text("pass\n")
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    config = json.loads((done.folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in config.get("text_config", {})
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert not any((done.folder / name).exists() for name in SIDE_FILES)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "modeling_own.py"):  # fmt: skip
        assert (done.folder / name).read_bytes() == (source.folder / name).read_bytes()
    manifest = json.loads((done.folder / MANIFEST).read_text())
    assert manifest["linears"].keys() == source.weights.keys()
    check_told(done, source.weights)


def test_gptq_has_its_settings_in_both_files_and_compressed_tensors_none_of_them(
    tmp_path: Path,
) -> None:
    source = write("awq-gemm", tmp_path / "in")
    done = convert(str(source.path), "gptq_v2", tmp_path / "out")
    config = json.loads((done.folder / "config.json").read_text())
    side = json.loads((done.folder / "quantize_config.json").read_text())
    assert side == config["quantization_config"]
    assert (side["checkpoint_format"], side["sym"], side["desc_act"]) == ("gptq_v2", False, False)
    back = convert(str(done.folder), "compressed-tensors", tmp_path / "back", exact_only=True)
    assert not (back.folder / "quantize_config.json").exists()
    check_told(back, source.weights)


def test_shards_make_the_same_bytes_as_one_file(tmp_path: Path) -> None:
    one, three = (write("awq-gemm", tmp_path / f"in{n}", shards=n) for n in (1, 3))
    for place, source in (("a", one), ("b", three)):
        convert(str(source.path), "compressed-tensors", tmp_path / place)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


def test_a_tied_head_is_named_as_float_so_that_no_runtime_looks_for_its_codes(
    tmp_path: Path,
) -> None:
    source = write("gptq-v1", tmp_path / "in", model={"tied": True})
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    config = json.loads((done.folder / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors_of(done.folder)


@pytest.mark.parametrize(("tied", "symmetric"), [(False, True), (True, True), (False, False)])
def test_transformers_loads_what_was_written_and_has_its_weights(
    tied: bool, symmetric: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = write("gptq-v2", tmp_path / "in", symmetric=symmetric, model={"tied": tied})
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    ways = [{"quantization_config": CompressedTensorsConfig(dequantize=True)}]
    if symmetric:  # with zero points transformers 5.24 has another shape in mind
        ways.append({})
    for options in ways:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(done.folder), dtype=torch.float16, **options
        )
        model(input_ids=torch.tensor([[3, 4, 5]]))  # unpacks what is still packed
        for module, wanted in source.weights.items():
            found = model.get_submodule(module).weight.detach().numpy()
            assert np.array_equal(found, wanted.astype(np.float16)), module
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_manifest_names_the_source_s_folder_even_where_it_is_the_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write("gptq-v1", tmp_path / "in")
    monkeypatch.chdir(source.folder)
    done = convert(".", "awq", tmp_path / "out")
    manifest = json.loads((done.folder / MANIFEST).read_text())
    assert (manifest["base_model"], manifest["kind"]) == ("in", "weightpath-conversion")
    assert manifest["linears"][DOWN]["exact"] is True


def test_a_linear_stored_packed_and_as_floats_is_refused(tmp_path: Path) -> None:
    source = write("gptq-v1", tmp_path / "in")
    edit_tensors(source.folder, lambda t: t.update({f"{DOWN}.weight": torch.zeros(128, 256)}))
    with pytest.raises(BadTensor, match=rf"{DOWN}\.weight: is stored both packed and as floats"):
        convert(str(source.path), "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_source_that_turns_out_bad_leaves_nothing_behind(tmp_path: Path) -> None:
    written = write("gptq-v1", tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.scales"
    edit_tensors(written.folder, lambda tensors: tensors[name][0].fill_(float("nan")))
    with pytest.raises(BadTensor, match=r"model\.layers\.1\.mlp\.up_proj"):
        convert(str(written.folder), "compressed-tensors", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_norms_of_a_gguf_file_that_16_bits_would_round_stay_float32(tmp_path: Path) -> None:
    written = write("gguf", tmp_path / "source", tokenizer=True)
    done = convert(str(written.path), "compressed-tensors", tmp_path / "out", exact_only=False)
    tensors = tensors_of(done.folder)
    norms = {name: tensors[name] for name in tensors if "norm" in name}
    low = open_low_bit(written.path)
    for name, values in norms.items():
        assert torch.equal(values.float(), low.source.read(name))
    assert not [item.name for item in done.floats if "norm" in item.name]
