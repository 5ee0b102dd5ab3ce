"""AWQ and GPTQ files that GPTQModel and auto-round wrote, against what these read back themselves.

Both run in an environment of their own (install_peer.py, writers-requirements.txt) and write every
case of write_low_bit.py from a tiny seeded model. Equal means every weight of every linear, in fp16
arithmetic as theirs: scale * (code - zero) rounded once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import relabelled
from peers import peer
from safetensors.torch import load_file, save_file
from torch import Tensor
from write_low_bit import CASES

from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit

pytestmark = pytest.mark.interop

LINEARS = 14  # 2 layers of 7
FORMATS = {
    "gptqmodel-awq-gemm-asym": "AWQ gemm",
    "autoround-awq-sym": "AWQ gemm",
    "autoround-awq-asym": "AWQ gemm",
    "gptqmodel-v2-asym": "GPTQ v2",
    "gptqmodel-v2-asym-2bit": "GPTQ v2",
    "gptqmodel-v2-asym-int16-words": "GPTQ v2",
    "gptqmodel-planar-asym-3bit": "GPTQ v2",
    "autoround-own-sym": "AutoRound (gptq)",
    "autoround-own-asym-3bit": "AutoRound (gptq_v2)",
}
"""What each case is read as; GPTQ v1 where it is not named."""


@pytest.fixture(scope="module")
def files(
    peer_python: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    table: list[str],
) -> dict[str, dict[str, Any]]:
    """Every case: `folder` with the file, `weights` as its writer reads it."""
    folder = tmp_path_factory.mktemp("writers")
    found = peer(peer_python("writers"), "write_low_bit.py", folder)
    table.append(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for name, case in found["cases"].items():
        case["weights"] = load_file(folder / f"{name}.safetensors")
    return found["cases"]


def differing(checkpoint: LowBitCheckpoint, weights: dict[str, Tensor]) -> list[str]:
    """Linears with a weight that is not the writer's own, in fp16."""
    return [
        name
        for name, weight in weights.items()
        if not torch.equal(checkpoint.read_qweight(name).dequantize(torch.float16), weight)
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_weight_of_a_file_that_a_peer_wrote_is_what_that_peer_reads(
    case: str, files: dict[str, dict[str, Any]], table: list[str]
) -> None:
    file = files[case]
    checkpoint = open_low_bit(Path(file["folder"]))
    assert checkpoint.format == FORMATS.get(case, "GPTQ v1")
    assert checkpoint.parts.keys() == file["weights"].keys()
    assert file["layers"] == LINEARS
    assert all(bool(weight.isfinite().all()) for weight in file["weights"].values())
    assert not differing(checkpoint, file["weights"])
    schemes = {outline.scheme.name for outline in checkpoint.linears.values() if outline.scheme}
    ordered = any(outline.ordered for outline in checkpoint.linears.values())
    table.append(
        f"{case:33} read as {checkpoint.format} {', '.join(schemes)}"
        f"{' with a column order' if ordered else ''}: {LINEARS} linears equal bit for bit"
    )


def test_the_cases_have_a_column_order_and_negative_scales_among_them(
    files: dict[str, dict[str, Any]],
) -> None:
    def read(case: str) -> LowBitCheckpoint:
        return open_low_bit(Path(files[case]["folder"]))

    ordered = read("gptqmodel-v1-asym-ordered").linears
    assert all(outline.ordered for outline in ordered.values())
    for case in ("autoround-gptq-sym", "autoround-awq-sym", "autoround-own-sym"):
        checkpoint = read(case)
        scales = [checkpoint.read_qweight(name).scales for name in checkpoint.parts]
        assert any(bool((own < 0).any()) for own in scales), case


@pytest.mark.parametrize(
    ("case", "label"), [("gptqmodel-v1-asym", "gptq_v2"), ("gptqmodel-v2-asym", "gptq")]
)
def test_a_peers_file_under_the_other_zero_convention_is_no_longer_equal(
    case: str, label: str, files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    folder = relabelled(Path(files[case]["folder"]), tmp_path / "relabelled", label)
    assert len(differing(open_low_bit(folder), files[case]["weights"])) == LINEARS


def test_one_flipped_bit_of_a_peers_awq_file_shows_in_its_linear_alone(
    files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    file, module = files["gptqmodel-awq-gemm-asym"], "model.layers.1.mlp.up_proj"
    folder = tmp_path / "flipped"
    shutil.copytree(file["folder"], folder)
    shard = next(folder.glob("*.safetensors"))
    tensors = load_file(shard)
    tensors[f"{module}.qweight"][5, 3] ^= 1 << 17
    save_file(tensors, shard, metadata={"format": "pt"})
    assert differing(open_low_bit(folder), file["weights"]) == [module]
