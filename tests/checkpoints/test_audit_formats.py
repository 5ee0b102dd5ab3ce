"""Every format's sound checkpoint, opened from disk, has no finding; a damaged one has its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from audit_cases import the_one
from safetensors.torch import load_file, save_file

from tiny_formats import FORMATS, write
from weightpath.checkpoints.audit import (
    Finding,
    audit_files,
    audit_fused,
    audit_names,
    audit_qweight,
)
from weightpath.checkpoints.low_bit import LowBitCheckpoint, open_low_bit
from weightpath.engine import skeleton

pytestmark = pytest.mark.usefixtures("one_thread")


def audit_all(checkpoint: LowBitCheckpoint, path: Path) -> list[Finding]:
    """What a caller runs over a low-bit checkpoint."""
    source = checkpoint.source
    model = skeleton.build(checkpoint.config, torch.bfloat16)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    shapes = {module: outline.shape for module, outline in checkpoint.linears.items()}
    quantized = {module: module in checkpoint.parts for module in skeleton.linears(model)}
    found = [
        *audit_files(path),
        *audit_names(source.tensors, checkpoint.parts, wanted, shapes=shapes, read=source.read),
        *audit_fused(quantized, checkpoint.settings),
    ]
    for module in checkpoint.parts:
        read = checkpoint.read_linear(module)
        if read.qweight is not None:
            found.extend(audit_qweight(module, read.qweight, read.column_scales))
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_a_sound_checkpoint_of_every_format_has_no_finding(kind: str, tmp_path: Path) -> None:
    written = write(kind, tmp_path / "m")
    found = audit_all(open_low_bit(written.path), written.path)
    assert [finding.line for finding in found] == []


def test_a_zero_scale_a_bias_and_a_stale_shard_in_a_folder_are_all_told(tmp_path: Path) -> None:
    written = write("gptq-v1", tmp_path / "m")
    module, path = next(iter(written.weights)), written.folder / "model.safetensors"
    values = load_file(path)
    values[f"{module}.scales"][1, 5] = 0
    values[f"{module}.bias"] = torch.zeros(len(written.weights[module]), dtype=torch.float16)
    save_file(values, path)
    save_file({"old": torch.ones(1)}, written.folder / "model-00001-of-00002.safetensors")
    found = tuple(audit_all(open_low_bit(written.path), written.path))
    assert the_one(found, "zero scales").problem.startswith("zero scales: 1 of")
    assert "first [5, 1]" in the_one(found, "zero scales").problem
    assert the_one(found, "biases that the architecture does not have").severity == "note"
    assert the_one(found, "stale shard").severity == "warning"
    assert len(found) == 3
