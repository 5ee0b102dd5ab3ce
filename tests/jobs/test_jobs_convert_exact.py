"""What keeps its values in another format, scheme by scheme: asymmetric, narrow, wide and mixed
ones; what a format has no place for, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reopened import check_told, difference, of, tensors_of, weights_of

from tiny_checkpoint import edit_tensors
from tiny_formats import Written, write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.errors import BadRequest
from weightpath.jobs.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("name", ["gptq-v1", "gptq-v2", "awq-gemm", "awq-gemv", "awq-llm"])
@pytest.mark.parametrize("group_size", [64, 128])
def test_asymmetric_gptq_and_awq_are_exact_as_compressed_tensors_with_their_own_scales(
    name: str, group_size: int, tmp_path: Path
) -> None:
    low = 0 if "v2" in name or "awq" in name else 1
    source = write(
        name, tmp_path / "in", symmetric=False, group_size=group_size, lowest_zero=low, seed=3
    )
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out", exact_only=True)
    check_told(done, source.weights)
    assert done.lossy == 0
    assert done.floats == ()
    tensors = tensors_of(done.folder)
    assert tensors[f"{Q_PROJ}.weight_scale"].dtype == torch.float16
    assert tensors[f"{Q_PROJ}.weight_zero_point"].shape == (16, 128 // group_size)
    group = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert group["config_groups"]["group_0"]["weights"]["symmetric"] is False


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_two_and_three_bits_are_widened_exactly(bits: int, symmetric: bool, tmp_path: Path) -> None:
    source = write("gptq-v2", tmp_path / "in", bits=bits, symmetric=symmetric)
    done = convert(str(source.path), "awq", tmp_path / "awq", exact_only=True)
    check_told(done, source.weights)
    assert f"{bits}-bit codes in 4-bit fields" in of(done, Q_PROJ).how
    for to in ("compressed-tensors", "gptq"):  # which have fields of that width
        kept = convert(str(source.path), to, tmp_path / to, exact_only=True)
        check_told(kept, source.weights)
        assert of(kept, Q_PROJ).target == f"w{bits}g32{'' if symmetric else '-asym'}"


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_odd_widths_go_into_gptq_s_eight_bits_and_no_awq_field(bits: int, tmp_path: Path) -> None:
    source = write("ct-packed", tmp_path / "in", bits=bits, symmetric=bits != 6)
    done = convert(str(source.path), "gptq_v2", tmp_path / "out", exact_only=True)
    check_told(done, source.weights)
    assert of(done, DOWN).target == f"w8g32{'-asym' if bits == 6 else ''}"
    with pytest.raises(BadRequest, match=f"{bits} bits, AWQ has 4"):
        convert(str(source.path), "awq", tmp_path / "awq")


def test_four_bits_per_channel_widen_to_int8_exactly(tmp_path: Path) -> None:
    source = write("ct-packed", tmp_path / "in", group_size=-1)
    done = convert(str(source.path), "int8", tmp_path / "out", exact_only=True)
    check_told(done, source.weights)
    assert tensors_of(done.folder)[f"{DOWN}.weight_scale"].dtype == torch.float32


def mixed(folder: Path, group_sizes: tuple[int, int] = (32, 64)) -> Written:
    """compressed-tensors with an int8 head, and down_proj in groups of their own."""
    source = write("ct-packed", folder / "in", group_size=group_sizes[0], head=True)
    other = write("ct-packed", folder / "other", group_size=group_sizes[1])
    wide = write("ct-packed", folder / "wide", bits=8, group_size=-1, head=True)
    taken, head = tensors_of(other.folder), tensors_of(wide.folder)
    downs = [name for name in other.weights if name.endswith("down_proj")]

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {n: t for n, t in taken.items() if n.rpartition(".")[0] in downs}
        tensors |= {n: t for n, t in head.items() if n.startswith("lm_head.")}

    edit_tensors(source.folder, mix)
    config = json.loads((source.folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    for label, made, targets in (("down", other, downs), ("head", wide, ["lm_head"])):
        groups[label] = made.settings["config_groups"]["group_0"] | {"targets": targets}
    (source.folder / "config.json").write_text(json.dumps(config))
    chosen = {**source.weights, **{name: other.weights[name] for name in downs}}
    return Written(
        source.folder, source.folder, chosen | {"lm_head": wide.weights["lm_head"]}, {}, True
    )


def test_an_int8_head_and_two_group_sizes_keep_their_own_schemes(tmp_path: Path) -> None:
    source = mixed(tmp_path)
    done = convert(str(source.path), "compressed-tensors", tmp_path / "ct", exact_only=True)
    check_told(done, source.weights)
    targets = {item.name: item.target for item in done.linears}
    assert (targets[Q_PROJ], targets[DOWN], targets["lm_head"]) == ("w4g32", "w4g64", "w8")
    done = convert(str(source.path), "gptq_v2", tmp_path / "gptq", exact_only=True)
    check_told(done, source.weights)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["quantization_config"]["lm_head"] is True
    assert config["tie_word_embeddings"] is False


def test_awq_cuts_groups_to_its_one_size_and_leaves_an_int8_head_float_and_says_so(
    tmp_path: Path,
) -> None:
    source = mixed(tmp_path)
    done = convert(str(source.path), "awq", tmp_path / "out")
    check_told(done, source.weights)
    assert "groups of 64 cut to 32" in of(done, DOWN).how
    head = of(done, "lm_head")
    assert head.target == "float"
    assert head.how.startswith("stored as float16: 8 bits, AWQ has 4")
    config = json.loads((done.folder / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert all(item.exact for item in done.linears if item.name != "lm_head")


def test_awq_leaves_float_what_cannot_be_cut_to_its_group_size(tmp_path: Path) -> None:
    source = mixed(tmp_path, (64, -1))  # whole rows of 256 are cut, groups of 64 stay
    done = convert(str(source.path), "awq", tmp_path / "out")
    check_told(done, source.weights)
    assert "groups of 256 cut to 64" in of(done, DOWN).how
    sizes = {"intermediate_size": 192, "hidden_size": 192, "head_dim": 48}
    odd, other = (
        write("ct-packed", tmp_path / f"{size}", group_size=size, model=sizes) for size in (96, 64)
    )
    packed = tensors_of(other.folder)
    edit_tensors(odd.folder, lambda t: t.update({n: v for n, v in packed.items() if "down" in n}))
    config = json.loads((odd.folder / "config.json").read_text())
    group = other.settings["config_groups"]["group_0"] | {"targets": [r"re:.*down_proj"]}
    config["quantization_config"]["config_groups"]["down"] = group
    (odd.folder / "config.json").write_text(json.dumps(config))
    done = convert(str(odd.path), "awq", tmp_path / "cut")
    assert "groups of 96 cannot be cut to 64" in of(done, Q_PROJ).how
    assert of(done, DOWN).target == "w4g64-asym"
    skipped = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert Q_PROJ in skipped["modules_to_not_convert"]
    assert DOWN not in skipped["modules_to_not_convert"]
    assert set(open_low_bit(done.folder).parts) == {
        item.name for item in done.linears if item.target != "float"
    }


def test_linears_of_odd_size_stay_float_in_gptq_with_the_reason(tmp_path: Path) -> None:
    source = write("ct-packed", tmp_path / "in", group_size=16, model={"intermediate_size": 144})
    done = convert(str(source.path), "gptq", tmp_path / "out")
    check_told(done, source.weights)
    for item in done.linears:
        assert ("multiples of 32" in item.how) == ("mlp" in item.name)
    rules = json.loads((done.folder / "quantize_config.json").read_text())["dynamic"]
    assert len([rule for rule in rules if rule.startswith("-:")]) == 5  # four gate/up/down, head


def test_minimums_that_are_whole_zero_points_are_exact_and_others_say_how_far(
    tmp_path: Path,
) -> None:
    whole = write("torchao-int4", tmp_path / "whole", symmetric=True)  # offsets of 0
    done = convert(str(whole.path), "compressed-tensors", tmp_path / "a", exact_only=True)
    check_told(done, whole.weights)
    odd = write("hqq", tmp_path / "odd", whole_zeros=False)
    done = convert(str(odd.path), "compressed-tensors", tmp_path / "b")
    assert done.exact == 0
    found = weights_of(done.folder)
    for item in done.linears:
        assert "minimums" in item.how
        largest, mean = difference(odd.weights[item.name], found[item.name])
        assert largest == pytest.approx(item.largest_change, rel=1e-3)
        assert mean == pytest.approx(item.mean_change, rel=1e-3)


@pytest.mark.parametrize("to", ["compressed-tensors", "awq", "gptq"])
def test_groups_are_cut_on_request_and_every_value_stays(to: str, tmp_path: Path) -> None:
    source = write("gptq-v1", tmp_path / "in", group_size=64, symmetric=False)
    done = convert(str(source.path), to, tmp_path / "out", group_size=32, exact_only=True)
    check_told(done, source.weights)
    assert {(item.target, item.how) for item in done.linears} == {
        ("w4g32-asym", "groups of 64 cut to 32")
    }


@pytest.mark.parametrize(
    ("to", "size", "options", "words"),
    [
        ("compressed-tensors", 128, {}, "groups of 64, which cannot be cut to it"),
        ("compressed-tensors", 48, {}, "groups of 64, which cannot be cut to it"),
        ("awq", 0, {}, "groups of 64, which cannot be cut to it"),
        ("gptq", -1, {}, "groups of 64, which cannot be cut to it"),
        ("gptq", 32, {"ordered": True}, "keeps a column order, whose groups of 64 cannot be cut"),
        ("int8", 32, {}, "int8 has one scale a row"),
        ("gguf", 32, {}, "a GGUF file's blocks have their own"),
    ],
)
def test_groups_that_cannot_be_cut_are_refused_before_anything_is_written(
    to: str, size: int, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = write("gptq-v1", tmp_path / "in", group_size=64, **options)
    with pytest.raises(BadRequest, match=f"group size {size}: .*{words}"):
        convert(str(source.path), to, tmp_path / "out", group_size=size)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
