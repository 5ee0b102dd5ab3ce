"""Reported failures of shapes, group sizes and odd widths. README.md has the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import (
    DOWN,
    LINEARS,
    QUERY,
    float_model,
    logits,
    oracle,
    same,
    tensors_of,
    told,
    weights_of,
)

import weightpath
from tiny_formats import write
from weightpath.checkpoints.low_bit import open_low_bit
from weightpath.errors import BadRequest, BadTensor
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["ct-packed", "gptq-v1", "awq-gemm"])
def test_reported_a_group_over_two_shards_is_told_and_cut_without_a_loss(
    kind: str, tmp_path: Path
) -> None:
    """vllm#5675, vllm-ascend#11112: intermediate 192 in groups of 64, tp 2."""
    source = write(kind, tmp_path / "in", group_size=64, model={"intermediate_size": 192})
    found = examine(source.path, tp=(2, 3))
    assert {(split.name.rpartition(".")[2], split.tp) for split in found.splits} >= {
        ("down_proj", 2)
    }
    two = [split for split in found.splits if split.tp == 2 and "down_proj" in split.name]
    assert len(two) == 2
    for split in two:
        assert "a group of 64 straddles shards of 192 / 2 = 96 columns" in split.problem
        assert "--group-size 32" in split.mend
    assert not any(split.tp == 3 and "straddles" in split.problem for split in found.splits)
    done = weightpath.convert(
        source.path, "compressed-tensors", tmp_path / "cut", exact_only=True, group_size=32
    )
    assert not examine(done.folder, tp=(2,)).splits
    after = weights_of(done.folder)
    assert all(np.array_equal(after[name], weight) for name, weight in source.weights.items())


@pytest.mark.parametrize("kind", ["gptq-v1", "awq-gemm", "ct-packed"])
def test_reported_96_rows_run_here_and_are_told_where_a_kernel_wants_64(
    kind: str, tmp_path: Path
) -> None:
    """sglang#19406: N = 96 is no multiple of 64."""
    source = write(kind, tmp_path / "in", model={"head_dim": 24})  # q: 96 rows, k and v: 48
    model = weightpath.load(source.path, dtype=torch.float32)
    assert same(logits(model), logits(oracle(source.path, source.weights)))
    wide = write("awq-gemm", tmp_path / "g64", group_size=64, model={"intermediate_size": 192})
    assert not examine(wide.path, kernel="awq").kernel
    narrow = {"hidden_size": 192, "head_dim": 24, "intermediate_size": 192}
    odd = write("awq-gemm", tmp_path / "odd", group_size=64, symmetric=False, seed=1,
                model={**narrow, "num_attention_heads": 8, "num_key_value_heads": 4})  # fmt: skip
    limits = examine(odd.path, kernel="awq").kernel
    assert {limit.name.rpartition(".")[2] for limit in limits} == {"k_proj", "v_proj"}
    assert all("out_features in multiples of 64, got 96" in limit.problem for limit in limits)
    assert told(examine(source.path), "weightpath").startswith("yes")


def test_reported_192_columns_in_groups_of_128_are_never_forced(tmp_path: Path) -> None:
    """TGI#2639: K = 192 is no multiple of 128."""
    source = float_model(tmp_path / "m", intermediate_size=192)
    weightpath.quantize(source, tmp_path / "q", "w4g128")
    schemes = {row.pattern.rpartition(".")[2]: row.scheme
               for row in examine(tmp_path / "q").inspection.modules}  # fmt: skip
    assert schemes["down_proj"] == "w8"  # per channel, which every K takes
    assert schemes["up_proj"] == "w4g128"
    before = logits(weightpath.load(tmp_path / "q", dtype=torch.float32))
    assert bool(torch.isfinite(before).all())
    lie = write("awq-gemm", tmp_path / "lie", group_size=64,
                model={"intermediate_size": 192}, changes={"group_size": 128})  # fmt: skip
    errors = examine(lie.path).errors
    assert any(f"{DOWN}.qweight" == error.tensor and "not a multiple of group size 128"
               in error.problem for error in errors)  # fmt: skip
    with pytest.raises(BadTensor, match="not a multiple of group size 128"):
        weightpath.load(lie.path)
    with pytest.raises(BadTensor, match="not a multiple of group size 128"):
        convert(str(lie.path), "compressed-tensors", tmp_path / "out")


def test_reported_a_cut_that_no_group_allows_is_refused(tmp_path: Path) -> None:
    """TGI#2639: groups of 64 are not cut to 48, which would need other scales."""
    source = write("ct-packed", tmp_path / "in", group_size=64, model={"intermediate_size": 192})
    with pytest.raises(BadRequest, match=r"group size 48: .* has groups of 64"):
        weightpath.convert(source.path, "compressed-tensors", tmp_path / "out", group_size=48)


@pytest.mark.parametrize(("group_size", "symmetric"), [(128, True), (32, True), (64, False)])
def test_reported_2688_columns_keep_4_bit_blocks_in_gguf(
    group_size: int, symmetric: bool, tmp_path: Path
) -> None:
    """llama.cpp#28474: K = 2688 is no multiple of 256, and most tensors fell back to larger blocks."""
    source = write("ct-packed", tmp_path / "in", group_size=group_size, symmetric=symmetric,
                   tokenizer=True, model={"intermediate_size": 2688})  # fmt: skip
    done = convert(str(source.path), "gguf", tmp_path / "m.gguf", exact_only=symmetric)
    kinds = {item.target for item in done.linears}
    assert kinds == {"Q4_0" if symmetric else "Q4_1"}
    assert len(done.linears) == LINEARS
    found = examine(done.folder).inspection
    assert found.format == f"GGUF {kinds.pop()}"
    assert found.linear_bits_per_weight == (4.5 if symmetric else 5.0)
    if symmetric:
        after = weights_of(done.folder)
        assert all(np.array_equal(after[name], weight) for name, weight in source.weights.items())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["gptq-v1", "gptq-v2", "ct-packed", "ct-padded"])
def test_reported_3_bit_codes_of_64_columns_fill_their_words_and_no_more(
    kind: str, symmetric: bool, tmp_path: Path
) -> None:
    """GPTQModel#2984: the 3-bit packer overran its buffer at K = 64."""
    small = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    source = write(kind, tmp_path / "in", bits=3, symmetric=symmetric, model=small)
    assert source.weights[QUERY].shape == (64, 64)
    found = weights_of(source.path)
    assert all(np.array_equal(found[name], weight) for name, weight in source.weights.items())
    for to, part, shape in (
        ("gptq_v2", f"{QUERY}.qweight", (6, 64)),  # 64 * 3 bits are 6 words
        ("compressed-tensors", f"{QUERY}.weight_packed", (64, 6)),
    ):
        done = convert(str(source.path), to, tmp_path / to, exact_only=True)
        assert tensors_of(done.folder)[part].shape == shape
        after = weights_of(done.folder)
        assert all(np.array_equal(after[name], weight) for name, weight in source.weights.items())
    assert open_low_bit(tmp_path / "gptq_v2").read_qweight(QUERY).scheme.bits == 3
