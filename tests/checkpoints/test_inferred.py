"""A lost quantization_config is inferred from shapes only where these leave no doubt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tiny_checkpoint import edit_tensors
from tiny_formats import FORMATS, write
from weightpath.checkpoints import compressed_tensors as ct
from weightpath.checkpoints.inferred import inferred_settings
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.checkpoints.opened import source_of
from weightpath.checkpoints.store import open_checkpoint
from weightpath.errors import BadCheckpoint, BadTensor, WeightpathError
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("awq-gemm", {}, "AWQ's at 4 bits in groups of 32"),
    ("awq-gemm", {"group_size": 128}, "AWQ's at 4 bits in groups of 128"),
    ("autoround-awq", {}, "AWQ's at 4 bits in groups of 32"),
    ("gptq-v1", {}, "GPTQ's at 4 bits in groups of 32"),
    ("gptq-v2", {}, "GPTQ's at 4 bits in groups of 32"),
    ("gptq-v1", {"bits": 3}, "GPTQ's at 3 bits in groups of 32"),
    ("gptq-v2", {"bits": 8, "group_size": 64}, "GPTQ's at 8 bits in groups of 64"),
    ("gptq-v1", {"ordered": True}, "GPTQ's at 4 bits in groups of 32"),
    ("autoround-gptq", {}, "GPTQ's at 4 bits in groups of 32"),
    *(
        ("ct-packed", {"bits": bits, "symmetric": symmetric}, f"{bits} bits in groups of 32")
        for bits in (2, 3, 4, 5, 6, 7, 8)
        for symmetric in (True, False)
    ),
    ("ct-packed", {"group_size": 64, "shards": 2}, "compressed-tensors's at 4 bits in groups of 64"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "told"), TOLD)
def test_shapes_that_settle_it_are_read_bit_for_bit_and_that_is_said(
    name: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    written = write(name, tmp_path / "in", place="missing", **options)
    opened = open_low_bit(written.path)
    assert told in opened.how
    assert opened.notes[0] == f"no quantization_config was found: {opened.how}"
    assert opened.settings == {}
    for module, wanted in written.weights.items():
        assert np.array_equal(opened.read_linear(module).weight().numpy(), wanted), module


@pytest.mark.parametrize("name", ["torchao-int4", "torchao-int8", "bnb-nf4", "bnb-int8", "hqq"])
def test_formats_that_describe_themselves_need_no_config(name: str, tmp_path: Path) -> None:
    written = write(name, tmp_path / "in", place="missing")
    opened = open_low_bit(written.path)
    assert "no quantization_config" not in " ".join(opened.notes)
    for module, wanted in written.weights.items():
        assert np.array_equal(opened.read_linear(module).weight().numpy(), wanted), module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ct-padded", {"bits": 3}),
        ("ct-padded", {"bits": 5}),
        ("ct-padded", {"bits": 6}),
        ("ct-padded", {"bits": 7}),  # as many words as 8 bits would be
        ("ct-padded", {"bits": 7, "symmetric": False}),
        ("ct-int8", {}),
        ("modelopt-int4", {}),
        ("awq-gemv", {}),
        ("awq-gemv_fast", {}),
    ],
)
def test_what_shapes_do_not_settle_is_refused_and_never_guessed(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    written = write(name, tmp_path / "in", place="missing", **options)
    with pytest.raises(BadCheckpoint, match="do not tell a format") as caught:
        open_low_bit(written.path)
    assert "\n" not in str(caught.value)


def test_every_format_is_either_read_right_or_refused_without_its_config(tmp_path: Path) -> None:
    """No format's own numbers are taken for another's."""
    for name in FORMATS:
        if name in ("gguf", "weightpath-int8"):  # which have no config, or are written with one
            continue
        written = write(name, tmp_path / name, place="missing", seed=2)
        try:
            opened = open_low_bit(written.path)
        except BadCheckpoint:
            continue
        for module, wanted in written.weights.items():
            assert np.array_equal(opened.read_linear(module).weight().numpy(), wanted), name


def test_asymmetric_gptq_without_a_label_is_told_by_the_mean_of_its_codes(
    tmp_path: Path,
) -> None:
    for name in ("gptq-v1", "gptq-v2"):
        written = write(name, tmp_path / name, place="missing", symmetric=False, group_size=128)
        opened = open_low_bit(written.path)
        assert opened.format == f"GPTQ {name[-2:]}"
        assert any("codes" in note for note in opened.notes), opened.notes
        module = "model.layers.0.mlp.up_proj"
        assert np.array_equal(opened.read_linear(module).weight().numpy(), written.weights[module])


def test_linears_that_tell_different_things_are_refused(tmp_path: Path) -> None:
    one = write("gptq-v1", tmp_path / "one", place="missing")
    other = write("gptq-v1", tmp_path / "other", place="missing", group_size=64)
    taken = load_file(other.folder / "model.safetensors")
    edit_tensors(one.folder, lambda t: t.update({n: v for n, v in taken.items() if "up_proj" in n}))
    with pytest.raises(BadCheckpoint, match="do not tell a format"):
        open_low_bit(one.path)


def folder_of(folder: Path, qweight: QWeight) -> Path:
    """A folder of one packed linear and no quantization config."""
    folder.mkdir(exist_ok=True)
    save_file(ct.to_tensors("a.b", qweight), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bits=st.integers(2, 8), symmetric=st.booleans(), n=st.integers(1, 40),
    words=st.integers(1, 12), groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9),
)  # fmt: skip
def test_whatever_is_inferred_of_dense_words_is_what_was_packed(
    bits: int, symmetric: bool, n: int, words: int, groups: int, seed: int, tmp_path: Path
) -> None:
    draw, k = np.random.default_rng(seed), 32 * words
    scheme = Scheme(bits, k // groups, symmetric)
    qweight = QWeight(
        scheme,
        torch.from_numpy(draw.integers(0, 1 << bits, (n, k), np.uint8)),
        torch.from_numpy(draw.uniform(0.1, 1, (n, groups))).half(),
        None if symmetric else torch.from_numpy(draw.integers(0, 1 << bits, (n, groups), np.int16)),
    )
    source = source_of(open_checkpoint(folder_of(tmp_path / "in", qweight), float_only=False))
    found = inferred_settings(source)
    assert found is not None
    weights = found[0]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (
        bits, k // groups, symmetric,
    )  # fmt: skip
    read = open_low_bit(tmp_path / "in").read_qweight("a.b")
    assert torch.equal(read.codes, qweight.codes)
    assert torch.equal(read.dequantize(), qweight.dequantize())


@pytest.mark.parametrize(
    "shape",
    [[0, 0], [-1, 64], [4, 63], [4, 1 << 62], [4], [4, 64, 1], [4.0, 64.0]],
)
def test_a_shape_that_lies_is_not_believed(shape: list[Any], tmp_path: Path) -> None:
    qweight = QWeight(Scheme(4, 32), torch.zeros((4, 64), dtype=torch.uint8), torch.ones(4, 2))
    folder = folder_of(tmp_path / "in", qweight)
    edit_tensors(folder, lambda t: t.update({"a.b.weight_shape": torch.tensor(shape)}))
    with pytest.raises(WeightpathError) as caught:
        open_low_bit(folder).read_linear("a.b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_a_linear_without_a_part_leaves_it_unsettled(missing: str, tmp_path: Path) -> None:
    written = write("awq-gemm", tmp_path / "in", place="missing")
    edit_tensors(written.folder, lambda t: t.pop(f"model.layers.1.mlp.up_proj.{missing}"))
    with pytest.raises(BadCheckpoint, match="do not tell a format"):
        open_low_bit(written.path)


def test_a_config_that_is_there_is_believed_before_any_shape(tmp_path: Path) -> None:
    written = write("gptq-v1", tmp_path / "in")
    config = json.loads((written.folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (written.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadTensor, match="scales"):
        _ = open_low_bit(written.path).linears
