"""quantize_checkpoint and make: every tensor accounted for, planned bytes written, no loss."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import weightpath
from tiny_checkpoint import (
    build_model,
    edit_tensors,
    folder_bytes,
    make_checkpoint,
    read_header,
    save_model,
)
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.store import Checkpoint, open_checkpoint
from weightpath.errors import BadCheckpoint, BadRequest, BadTensor
from weightpath.jobs.make import make
from weightpath.jobs.plan import plan_scheme
from weightpath.jobs.quantize import Quantized, Recipe, _account, quantize_checkpoint
from weightpath.paths.tensors import TensorPlan
from weightpath.quantize.int8 import quantize_int8
from weightpath.quantize.rtn import quantize_rtn
from weightpath.scheme import INT8, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def made(
    source: Path, folder: Path, scheme: str = "w4g64", head: int = 8, **options: Any
) -> tuple[Checkpoint, TensorPlan, Quantized]:
    checkpoint = open_checkpoint(source)
    plan = plan_scheme(str(source), checkpoint, Scheme.parse(scheme), head)
    recipe = Recipe(source.name, "test", "", plan.activation_bits)
    done = quantize_checkpoint(checkpoint, plan.tensors, folder, recipe, **options)
    return checkpoint, plan.tensors, done


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def account_for(source: Path, folder: Path, done: Quantized) -> None:
    """Every source tensor went to one place, every output came from one, and values are right."""
    before, after = tensors_of(source), tensors_of(folder)
    assert set(done.outcomes) == set(before)
    for name, outcome in done.outcomes.items():
        module = name.removesuffix(".weight")
        if outcome == "quantized":
            assert name not in after
            assert after[f"{module}.weight_shape"].tolist() == list(before[name].shape)
            for part in PARTS[:3]:
                after.pop(f"{module}.{part}")
            after.pop(f"{module}.weight_zero_point", None)
        elif outcome.startswith("left out"):
            assert name not in after
            assert torch.equal(before[name], before["model.embed_tokens.weight"])
        else:
            dtype = before[name].dtype
            if outcome != "copied":
                assert outcome.startswith("rounded to ")
                dtype = getattr(torch, outcome.removeprefix("rounded to "))
                assert dtype != before[name].dtype
            kept = after.pop(name)
            assert kept.dtype == dtype
            assert torch.equal(kept, before[name].to(dtype))
    untied = {f"lm_head.{part}" for part in PARTS} if "lm_head.weight" not in before else set()
    assert set(after) <= untied, "outputs that no source tensor accounts for"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_tensor_of_the_source_has_just_one_outcome(
    tmp_path: Path, kind: str, tied: bool, dtype: torch.dtype
) -> None:
    source = make_checkpoint(tmp_path / "source", kind, tied, dtype)
    for scheme, head in (("int8", 8), ("w4g64", 16), ("w4g32-asym", 4)):
        folder = tmp_path / f"{scheme}-{head}"
        _, _, done = made(source, folder, scheme, head)
        account_for(source, folder, done)
        counts = Counter(done.outcomes.values())
        assert counts["quantized"] == 14 + (not tied and head != 16)
        assert len(done.stats) == 14 + (head != 16)


def test_the_account_is_not_blind(tmp_path: Path) -> None:
    """Sabotage: each loss that account_for is there to find is found."""
    source = make_checkpoint(tmp_path / "source", "qwen2", tied=True)
    _, _, done = made(source, tmp_path / "low")
    account_for(source, tmp_path / "low", done)
    name = f"{Q_PROJ}.bias"
    for number, spoil in enumerate(
        (
            lambda t: t.pop(name),
            lambda t: t[name].add_(1),
            lambda t: t.update({name: t[name].float()}),
            lambda t: t.pop(f"{Q_PROJ}.weight_packed"),
            lambda t: t.update({"surplus": torch.zeros(1)}),
            lambda t: t.update({f"{Q_PROJ}.weight": torch.zeros(64, 64)}),
        )
    ):
        folder = Path(shutil.copytree(tmp_path / "low", tmp_path / f"spoilt{number}"))
        edit_tensors(folder, spoil)
        with pytest.raises((AssertionError, KeyError)):
            account_for(source, folder, done)


def test_a_tensor_that_is_lost_or_invented_stops_the_write(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    outcomes = dict.fromkeys(checkpoint.tensors, "copied")
    _account(checkpoint, outcomes)
    with pytest.raises(BadTensor, match=r"invented\.weight: is not accounted for"):
        _account(checkpoint, outcomes | {"invented.weight": "copied"})
    del outcomes["model.norm.weight"]
    with pytest.raises(BadTensor, match=r"model\.norm\.weight: is not accounted for"):
        _account(checkpoint, outcomes)


def test_floats_are_kept_in_fp16_where_most_of_the_source_is_fp16(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float16)
    _, _, done = made(source, tmp_path / "low", "w4g64", 16)
    after = tensors_of(tmp_path / "low")
    assert set(done.outcomes.values()) == {"quantized", "copied"}
    assert after["model.norm.weight"].dtype == torch.float16
    assert after[f"{Q_PROJ}.weight_scale"].dtype == torch.float16
    assert json.loads((tmp_path / "low" / "config.json").read_text())["dtype"] == "float16"
    assert weightpath.load(tmp_path / "low").dtype == torch.float16


def test_int8_scales_are_fp32_and_4_bit_scales_are_the_models_dtype(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float32)
    made(source, tmp_path / "low", "w4g64", 8)
    after = tensors_of(tmp_path / "low")
    assert after["lm_head.weight_scale"].dtype == torch.float32
    assert after[f"{Q_PROJ}.weight_scale"].dtype == torch.bfloat16
    assert after["model.norm.weight"].dtype == torch.bfloat16


def test_the_few_tensors_of_another_dtype_are_rounded(tmp_path: Path) -> None:
    source = edit_tensors(
        make_checkpoint(tmp_path / "source"),
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float() * 1.001}),
    )
    _, _, done = made(source, tmp_path / "low")
    assert Counter(done.outcomes.values())["rounded to bfloat16"] == 1
    account_for(source, tmp_path / "low", done)


def test_what_is_written_is_what_the_algorithms_return(tiny_llama: Path, tmp_path: Path) -> None:
    made(tiny_llama, tmp_path / "low", "w4g32-asym", 8)
    low, source = open_low_bit(tmp_path / "low"), open_checkpoint(tiny_llama)
    scheme = Scheme.parse("w4g32-asym")
    for name in low.linears:
        weight, found = source.read(f"{name}.weight"), low.read_qweight(name)
        wanted, _ = (
            quantize_int8(weight)
            if name == "lm_head"
            else quantize_rtn(weight, scheme, torch.bfloat16)
        )
        assert found.scheme == (INT8 if name == "lm_head" else scheme)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales, wanted.scales)
        if wanted.zeros is not None:
            assert torch.equal(found.zeros, wanted.zeros)  # type: ignore[arg-type]


def test_without_the_search_the_error_is_larger(tiny_llama: Path, tmp_path: Path) -> None:
    searched = weightpath.quantize(tiny_llama, tmp_path / "a", scheme="w4g64")
    plain = weightpath.quantize(tiny_llama, tmp_path / "b", scheme="w4g64", search=False)
    assert plain.total.squared_error > 1.05 * searched.total.squared_error
    manifest = json.loads((tmp_path / "b" / "weightpath.json").read_text())
    assert manifest["method"] == "round to nearest, min-max"


# Heads


def tie_state(folder: Path) -> tuple[bool, bool, bool]:
    """(config ties, the embedding is stored, the head is packed)"""
    after = tensors_of(folder)
    config = json.loads((folder / "config.json").read_text())
    return (
        config["tie_word_embeddings"],
        "model.embed_tokens.weight" in after,
        "lm_head.weight_packed" in after,
    )


@pytest.mark.parametrize(("head", "scheme"), [(8, "w8"), (4, "w4g64")])
def test_a_tied_head_is_untied_and_made_from_the_embedding(
    tiny_tied: Path, tmp_path: Path, head: int, scheme: str
) -> None:
    _, plan, _ = made(tiny_tied, tmp_path / "low", "w4g64", head)
    assert plan.unties_head
    assert tie_state(tmp_path / "low") == (False, True, True)
    low = open_low_bit(tmp_path / "low")
    assert low.linears["lm_head"].scheme.name == scheme
    table = open_checkpoint(tiny_tied).read("model.embed_tokens.weight").float()
    error = low.read_qweight("lm_head").dequantize() - table
    assert error.abs().max() <= (0.01 if head == 8 else 0.1)
    assert json.loads((tmp_path / "low" / "weightpath.json").read_text())["untied_head"]


def test_a_tied_head_of_16_bits_stays_tied(tiny_tied: Path, tmp_path: Path) -> None:
    _, plan, _ = made(tiny_tied, tmp_path / "low", "w4g64", 16)
    assert not plan.unties_head
    assert tie_state(tmp_path / "low") == (True, True, False)
    model: Any = weightpath.load(tmp_path / "low")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_own_head_of_16_bits_stays_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    made(tiny_llama, tmp_path / "low", "w4g64", 16)
    before, after = tensors_of(tiny_llama), tensors_of(tmp_path / "low")
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    assert "lm_head" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize("head", [8, 16])
def test_a_tied_head_stored_twice_is_left_out_once(
    tiny_tied: Path, tmp_path: Path, head: int
) -> None:
    source = Path(shutil.copytree(tiny_tied, tmp_path / "source"))
    edit_tensors(
        source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    _, plan, done = made(source, tmp_path / "twice", "w4g64", head)
    made(tiny_tied, tmp_path / "once", "w4g64", head)
    assert done.outcomes["lm_head.weight"] == "left out: the embedding's second copy"
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (
        tmp_path / "once" / "model.safetensors"
    ).read_bytes()
    assert plan.source_bytes == sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for entry in read_header(tiny_tied / "model.safetensors").values()
    )


@pytest.mark.parametrize("head", [8, 16])
def test_a_head_that_differs_from_its_embedding_is_made_from_itself(
    tiny_tied: Path, tmp_path: Path, head: int
) -> None:
    source = Path(shutil.copytree(tiny_tied, tmp_path / "source"))
    edit_tensors(
        source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * -2})
    )
    _, plan, done = made(source, tmp_path / "low", "w4g64", head)
    assert not plan.unties_head
    account_for(source, tmp_path / "low", done)
    assert tie_state(tmp_path / "low") == (False, True, head == 8)
    model: Any = weightpath.load(tmp_path / "low", dtype=torch.float32)
    weight = (
        model.lm_head.dequantize() if head == 8 else model.get_output_embeddings().weight.float()
    )
    table = model.get_input_embeddings().weight.float()
    assert (weight + 2 * table).abs().max() < 0.02


# Group sizes


def test_a_width_that_no_group_divides_becomes_int8_and_the_plan_says_so(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", hidden_size=40, intermediate_size=128)
    checkpoint = open_checkpoint(source)
    plan = plan_scheme("m", checkpoint, Scheme.parse("w4g64"), 4).tensors
    by_columns = {
        (item.shape.in_features, item.scheme.name if item.scheme else None)
        for item in plan.decisions
        if item.shape.role != "embedding"
    }
    assert by_columns == {(40, "w8"), (64, "w4g64"), (128, "w4g64")}
    reasons = [item.reason for item in plan.decisions if item.shape.in_features == 40]
    assert all("in_features 40 is no multiple of" in r for r in reasons if "looked up" not in r)
    done = quantize_checkpoint(checkpoint, plan, tmp_path / "low", Recipe("m", "test"))
    account_for(source, tmp_path / "low", done)
    schemes = {
        name: outline.scheme.name
        for name, outline in open_low_bit(tmp_path / "low").linears.items()
    }
    assert schemes[Q_PROJ] == "w8"
    assert schemes["model.layers.1.mlp.down_proj"] == "w4g64"
    assert schemes["lm_head"] == "w8"
    weightpath.load(tmp_path / "low")


def test_where_no_group_divides_any_width_the_named_scheme_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", hidden_size=36, intermediate_size=40, head_dim=10)
    with pytest.raises(BadRequest, match=r"group size 64: divides no in_features .*\(36, 40\)"):
        weightpath.quantize(source, tmp_path / "low", scheme="w4g64")
    assert not list(tmp_path.glob("low*"))


@pytest.mark.parametrize(
    ("changes", "scheme", "head"),
    [
        ({}, "int8", 8),
        ({}, "w4g64", 8),
        ({}, "w4g128-asym", 8),
        ({}, "w4g32-asym", 4),
        ({}, "w4", 16),
        ({"tie_word_embeddings": True}, "w4g64", 8),
        ({"tie_word_embeddings": True}, "w4-asym", 4),
        ({"hidden_size": 40, "vocab_size": 101, "head_dim": 10}, "w4g8-asym", 4),
        ({"hidden_size": 36, "intermediate_size": 90, "head_dim": 6, "vocab_size": 129}, "w4g6-asym", 4),
        ({"hidden_size": 36, "intermediate_size": 90, "head_dim": 6, "vocab_size": 129}, "int8", 8),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_planned_bytes_are_the_bytes_written(
    tmp_path: Path, changes: dict[str, Any], scheme: str, head: int, dtype: torch.dtype
) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=dtype, **changes)
    _, plan, _ = made(source, tmp_path / "low", scheme, head)
    header = read_header(tmp_path / "low" / "model.safetensors")
    size = {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in header.items()}
    assert plan.file_bytes == sum(size.values())
    for item in plan.decisions:
        stored = sum(
            size.get(f"{item.name}.{part}", 0)
            for part in ("weight", "weight_packed", "weight_scale", "weight_zero_point")
        )
        if item.shape.role == "tied_head" and item.scheme is None:
            stored = size["model.embed_tokens.weight"]
        assert item.stored_bytes == stored, item.name


# What goes beside the weights


def test_companions_come_along_byte_for_byte_and_a_card_is_written(
    tiny_llama: Path, tmp_path: Path
) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "low", scheme="w4g64")
    before, after = folder_bytes(tiny_llama), folder_bytes(tmp_path / "low")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert after[name] == before[name]
    assert set(after) - set(before) == {"README.md", "weightpath.json"}
    card = after["README.md"].decode()
    assert "w4g64" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "w4g64"}, "--scheme w4g64"),
        ({"scheme": "w4g64", "head_bits": 16}, "--scheme w4g64 --head 16"),
        ({"scheme": "w4g64", "search": False}, "--scheme w4g64 --no-search"),
        ({"group_size": 32, "priority": "fidelity"}, "--priority fidelity --group-size 32"),
    ],
)
def test_the_cards_command_makes_the_same_weights(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    make(str(tiny_llama), tmp_path / "low", **options)
    card = (tmp_path / "low" / "README.md").read_text()
    assert f"weightpath quantize {tiny_llama.name} -o DIR {words}\n" in card


def test_the_config_keeps_what_the_source_said(tiny_llama: Path, tmp_path: Path) -> None:
    made(tiny_llama, tmp_path / "low")
    before = json.loads((tiny_llama / "config.json").read_text())
    after = json.loads((tmp_path / "low" / "config.json").read_text())
    method = after.pop("quantization_config")
    assert (method["quant_method"], method["format"]) == ("compressed-tensors", "pack-quantized")
    assert after == before | {"dtype": "bfloat16"}


def test_the_manifest_counts_outcomes_and_names_every_linear(
    tiny_llama: Path, tmp_path: Path
) -> None:
    _, plan, done = made(tiny_llama, tmp_path / "low")
    manifest = json.loads((tmp_path / "low" / "weightpath.json").read_text())
    assert sum(manifest["outcomes"].values()) == len(done.outcomes)
    assert set(manifest["linears"]) == set(done.stats)
    assert manifest["group_size"] == plan.group_size == 64
    for name, entry in manifest["linears"].items():
        assert entry["signal_to_noise_db"] == round(done.stats[name].signal_to_noise_db, 2)


def test_a_weight_of_zeros_is_exact_and_counted(tmp_path: Path) -> None:
    source = edit_tensors(
        make_checkpoint(tmp_path / "source"), lambda t: t[f"{Q_PROJ}.weight"].zero_()
    )
    _, _, done = made(source, tmp_path / "low")
    assert done.stats[Q_PROJ].zero_groups == 64
    assert done.stats[Q_PROJ].squared_error == 0
    manifest = json.loads((tmp_path / "low" / "weightpath.json").read_text())
    assert manifest["linears"][Q_PROJ]["signal_to_noise_db"] is None
    assert open_low_bit(tmp_path / "low").read_qweight(Q_PROJ).dequantize().abs().max() == 0


# The same bytes


def test_the_bytes_do_not_depend_on_shards_or_threads(tmp_path: Path) -> None:
    model = build_model("qwen3")
    single = save_model(tmp_path / "single" / "m", model)
    sharded = save_model(tmp_path / "sharded" / "m", model, shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    weightpath.quantize(single, tmp_path / "a" / "out", scheme="w4g32")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weightpath.quantize(sharded, tmp_path / "b" / "out", scheme="w4g32")
    finally:
        torch.set_num_threads(before)
    assert folder_bytes(tmp_path / "a" / "out") == folder_bytes(tmp_path / "b" / "out")


class Stop(Exception):
    """Ends a run in the middle."""


def stop_after(count: int) -> Callable[[str, int, int], None]:
    seen = []

    def progress(label: str, done: int, total: int) -> None:
        seen.append(label)
        if len(seen) == count:
            raise Stop

    return progress


@pytest.mark.parametrize("count", [1, 7, 20])
def test_a_stopped_run_is_taken_up_with_the_same_bytes(
    tiny_llama: Path, tmp_path: Path, count: int
) -> None:
    made(tiny_llama, tmp_path / "whole" / "out")
    target = tmp_path / "stopped" / "out"
    with pytest.raises(Stop):
        made(tiny_llama, target, progress=stop_after(count))
    assert not target.exists()
    _, _, done = made(tiny_llama, target)
    assert done.resumed == count
    assert folder_bytes(target) == folder_bytes(tmp_path / "whole" / "out")
    assert not list(target.parent.glob("*.partial"))


def test_a_run_of_another_recipe_is_not_taken_up(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        made(tiny_llama, tmp_path / "out", "w4g64", progress=stop_after(5))
    with pytest.raises(BadRequest, match="unfinished run of another job"):
        made(tiny_llama, tmp_path / "out", "w4g32")
    _, _, done = made(tiny_llama, tmp_path / "out", "w4g32", overwrite=True)
    assert done.resumed == 0
    assert open_low_bit(tmp_path / "out").linears[Q_PROJ].scheme.group_size == 32


def test_a_changed_source_is_not_taken_up(tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    with pytest.raises(Stop):
        made(source, tmp_path / "out", progress=stop_after(5))
    edit_tensors(source, lambda t: t[f"{Q_PROJ}.weight"].mul_(2))
    with pytest.raises(BadRequest, match="unfinished run of another job"):
        made(source, tmp_path / "out")


def test_progress_ends_at_its_total(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made(tiny_llama, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert len({total for _, _, total in seen}) == 1


# Nothing is lost


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize(
    ("name", "index"),
    [
        (f"{Q_PROJ}.weight", (3, 5)),
        (f"{Q_PROJ}.bias", (7,)),
        ("model.embed_tokens.weight", (127, 63)),
        ("model.norm.weight", (0,)),
        ("lm_head.weight", (0, 1)),
    ],
)
@pytest.mark.parametrize("scheme", ["int8", "w4g64-asym"])
def test_a_number_that_is_none_is_named_with_its_place_and_nothing_is_left(
    tmp_path: Path, name: str, index: tuple[int, ...], value: float, scheme: str
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] = value

    source = edit_tensors(make_checkpoint(tmp_path / "source", "qwen2"), spoil)
    with pytest.raises(BadTensor) as caught:
        weightpath.quantize(source, tmp_path / "out", scheme=scheme)
    assert caught.value.name == name
    assert f"element {list(index)} is {value}" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_number_beyond_the_stored_dtype_is_named(tmp_path: Path) -> None:
    source = edit_tensors(
        make_checkpoint(tmp_path / "source", dtype=torch.float16),
        lambda t: t.update({"model.norm.weight": torch.full((64,), 7e4)}),
    )
    with pytest.raises(BadTensor, match=r"model\.norm\.weight: holds 70000, float16 ends at 65504"):
        weightpath.quantize(source, tmp_path / "out", scheme="w4g64")
    assert not (tmp_path / "out").exists()


Edit = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.pop(f"{Q_PROJ}.weight"), f"{Q_PROJ}.weight"),
        (lambda t: t.pop(f"{Q_PROJ}.bias"), f"{Q_PROJ}.bias"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.update({"surplus": torch.zeros(2)}), "surplus"),
        (lambda t: t.update({"model.norm.bias": torch.zeros(64)}), "model.norm.bias"),
        (lambda t: t.update({f"{Q_PROJ}.weight": torch.zeros(64, 32)}), f"{Q_PROJ}.weight"),
        (lambda t: t.update({f"{Q_PROJ}.bias": torch.zeros(63)}), f"{Q_PROJ}.bias"),
    ],
    ids=[
        "no norm", "no linear", "no bias", "no head", "surplus tensor", "surplus bias",
        "linear of another shape", "bias of another shape",
    ],
)  # fmt: skip
def test_a_source_that_is_not_its_configs_model_is_refused_before_any_work(
    tmp_path: Path, edit: Edit, named: str
) -> None:
    source = edit_tensors(make_checkpoint(tmp_path / "source", "qwen2"), edit)
    with pytest.raises((BadTensor, BadCheckpoint)) as caught:
        weightpath.quantize(source, tmp_path / "out", scheme="w4g64")
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


def test_an_existing_folder_is_kept_unless_asked(tiny_llama: Path, tmp_path: Path) -> None:
    weightpath.quantize(tiny_llama, tmp_path / "out", scheme="int8")
    before = folder_bytes(tmp_path / "out")
    with pytest.raises(BadRequest, match="exists already; name another folder, or pass --over"):
        weightpath.quantize(tiny_llama, tmp_path / "out", scheme="w4g64")
    assert folder_bytes(tmp_path / "out") == before
    weightpath.quantize(tiny_llama, tmp_path / "out", scheme="w4g64", overwrite=True)
    assert open_low_bit(tmp_path / "out").linears[Q_PROJ].scheme.bits == 4


@pytest.mark.parametrize("where", ["source", ".", "link"])
def test_overwriting_never_removes_the_source(tmp_path: Path, where: str) -> None:
    source = make_checkpoint(tmp_path / "home" / "source")
    (tmp_path / "home" / "link").symlink_to(source)
    before = folder_bytes(tmp_path)
    with pytest.raises(BadRequest, match="holds the model that it would be made from"):
        weightpath.quantize(source, tmp_path / "home" / where, scheme="int8", overwrite=True)
    assert folder_bytes(tmp_path) == before


@pytest.mark.parametrize("kind", ["notes", "file", "nested"])
def test_overwriting_never_removes_what_is_no_checkpoint(
    tiny_llama: Path, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "mine"
    if kind == "file":
        target.write_text("mine")
    else:
        (target / "deep").mkdir(parents=True) if kind == "nested" else target.mkdir()
        (target / "notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match=r"mine.* is no checkpoint; name another folder"):
        weightpath.quantize(tiny_llama, target, scheme="int8", overwrite=True)
    assert target.exists()
    assert kind == "file" or (target / "notes.txt").read_text() == "mine"


def test_a_plan_that_leaves_everything_is_an_error_and_not_a_copy(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", hidden_size=36, intermediate_size=40, head_dim=10)
    with pytest.raises(BadRequest, match=r"nothing to quantize .*vLLM .* 4-bit weights only"):
        make(str(source), tmp_path / "out", "int8", runtime="vllm", profile=x86())
    assert not list(tmp_path.glob("out*"))


def x86() -> Any:
    """A 2-core AVX-512 machine."""
    from weightpath.device.profile import from_dict

    flags = ["avx2", "avx512f", "avx512_vnni"]
    return from_dict({"arch": "x86_64", "cpu_flags": flags, "ram_total": 8 << 30}, "test")


def test_a_named_scheme_is_bounded_by_the_runtime(tiny_llama: Path, tmp_path: Path) -> None:
    make(str(tiny_llama), tmp_path / "out", "w4g64", runtime="vllm", profile=x86())
    assert "lm_head" not in open_low_bit(tmp_path / "out").linears
    make(str(tiny_llama), tmp_path / "own", "w4g64", profile=x86())
    assert "lm_head" in open_low_bit(tmp_path / "own").linears


@pytest.mark.parametrize("options", [{"group_size": 32}, {"priority": "fidelity"}], ids=str)
def test_what_a_named_scheme_makes_idle_is_refused(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest, match="beside scheme w4g64"):
        make(str(tiny_llama), tmp_path / "out", "w4g64", **options)


def test_an_unknown_runtime_is_refused_beside_a_named_scheme(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match="runtime 'abacus': unknown"):
        make(str(tiny_llama), tmp_path / "out", "w4g64", runtime="abacus")


def test_an_encoder_is_quantized_and_loads(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    source = BertModel(BertConfig(vocab_size=128, intermediate_size=128, **sizes)).eval()
    source.save_pretrained(tmp_path / "source")
    done = weightpath.quantize(tmp_path / "source", tmp_path / "low", scheme="int8")
    assert len(done.stats) == 7  # query, key, value, output, intermediate, output, pooler
    model = weightpath.load(tmp_path / "low", dtype=torch.float32)
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        found = model(input_ids=ids).pooler_output[0]
        wanted = source(input_ids=ids).pooler_output[0]
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.999
