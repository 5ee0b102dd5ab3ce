"""What inspect tells when it is asked for tensor parallelism and for a kernel's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny_checkpoint import edit_json, edit_tensors
from tiny_formats import Written, write
from weightpath.errors import BadRequest
from weightpath.jobs.convert import convert
from weightpath.jobs.examine import examine

pytestmark = pytest.mark.usefixtures("one_thread")

DOWN = "model.layers.0.mlp.down_proj"
LINEARS = 14


def straddling(folder: Path) -> Written:
    return write("ct-packed", folder, group_size=64, model={"intermediate_size": 192})


def test_a_group_over_two_shards_is_told_for_the_tp_that_asks_it(tmp_path: Path) -> None:
    found = examine(straddling(tmp_path / "m").path, tp=(2, 4))
    assert found.split_checked == 2 * LINEARS
    two = [split for split in found.splits if split.tp == 2]
    assert [split.name for split in two] == [DOWN, DOWN.replace("0", "1")]
    assert {split.problem for split in two} == {
        "a group of 64 straddles shards of 192 / 2 = 96 columns"
    }
    assert any(split.tp == 4 and "o_proj" in split.name for split in found.splits)
    assert examine(straddling(tmp_path / "n").path).splits == ()


def test_splits_of_a_model_with_other_names_are_said_not_to_have_been_asked(tmp_path: Path) -> None:
    written = write("gptq-v1", tmp_path / "m")
    edit_json(written.folder / "config.json", model_type="nova")
    edit_tensors(written.folder, lambda t: [
        t.update({name.replace("mlp.down_proj", "mlp.c_proj"): t.pop(name)})
        for name in list(t) if "down_proj" in name
    ])  # fmt: skip
    found = examine(written.path, tp=(2,))
    assert (found.split_checked, found.split_unknown) == (LINEARS - 2, 2)


@pytest.mark.parametrize("tp", [(1,), (0,), (2, 1), (-2,)])
def test_a_tp_that_splits_nothing_is_refused(tp: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="give sizes of 2 and more"):
        examine(tmp_path, tp=tp)


def test_an_unknown_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="kernel 'marlin': limits are known of awq"):
        examine(tmp_path, kernel="marlin")


@pytest.mark.parametrize(
    ("kind", "options", "limits"),
    [
        ("awq-gemm", {"group_size": 64}, {}),
        ("gptq-v1", {"group_size": 128}, {}),
        ("ct-packed", {"group_size": 64, "model": {"intermediate_size": 192}}, {}),
        ("awq-gemm", {}, {"": "group size 32, wanted 64 or 128"}),
        ("ct-int8", {}, {"": "is 8-bit, the AWQ kernel takes 4 bits"}),
        ("bnb-nf4", {}, {"": "is floats, the AWQ kernel takes 4 bits"}),
        ("gptq-v1", {"group_size": 64, "ordered": True}, {"": "has a column order"}),
        ("torchao-int4", {"group_size": 64}, {"": "has float minimums"}),
        ("modelopt-int4", {"group_size": 64}, {"": "has column scales"}),
        (  # 2 KV heads of 16 are 32 rows
            "awq-gemm",
            {"group_size": 64, "model": {"head_dim": 16}},
            {"k_proj": "out_features in multiples of 64, got 32", "v_proj": "got 32"},
        ),
    ],
)
def test_the_awq_kernel_s_limits_are_told_by_linear(
    kind: str, options: dict[str, Any], limits: dict[str, str], tmp_path: Path
) -> None:
    found = examine(write(kind, tmp_path / "m", **options).path, kernel="awq")
    assert found.kernel_checked == LINEARS
    assert found.device_refuses == "" or "the AWQ kernel needs" in found.device_refuses
    names = {name for name in limits if name}
    hit = {limit.name.rpartition(".")[2] for limit in found.kernel}
    assert len(found.kernel) == (2 * len(names) if names else LINEARS if limits else 0)
    assert hit >= names
    for limit in found.kernel:
        leaf = limit.name.rpartition(".")[2]
        assert limits.get(leaf, limits.get("", "nothing")) in limit.problem
        assert limit.mend


@pytest.mark.parametrize("kind", ["torchao-int4", "modelopt-int4", "gptq-v1"])
def test_what_a_conversion_is_said_to_mend_for_the_kernel_it_mends(
    kind: str, tmp_path: Path
) -> None:
    source = write(kind, tmp_path / "m", group_size=64, ordered=kind == "gptq-v1")
    assert {limit.mend for limit in examine(source.path, kernel="awq").kernel} == {
        "convert it first: --to compressed-tensors"
    }
    done = convert(str(source.path), "compressed-tensors", tmp_path / "out")
    left = [limit.problem for limit in examine(done.folder, kernel="awq").kernel]
    assert left == []
