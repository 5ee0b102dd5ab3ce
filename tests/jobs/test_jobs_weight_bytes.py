"""Weight bytes from shapes alone, against the files that quantize and convert write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_gguf
import weightpath
from tiny_caches import settings_of
from tiny_checkpoint import make_checkpoint
from weightpath.checkpoints.store import open_checkpoint
from weightpath.errors import BadRequest
from weightpath.jobs.shapes import config_shapes, model_shapes
from weightpath.nn.swap import weight_bytes as bytes_in_memory
from weightpath.paths.tensors import LinearShape, ModelShapes, plan_tensors
from weightpath.paths.weight_bytes import (
    WeightBytes,
    fitted_scheme,
    in_tower,
    linear_bytes,
    weight_bytes,
)
from weightpath.scheme import INT8, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = (("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False), ("mistral", True))
SCHEMES = ("w4g64", "w4g32-asym", "int8")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def counted(config: dict[str, Any], scheme: str, format: str = "compressed-tensors") -> WeightBytes:
    """From a config and a scheme's name, as `quantize --scheme` plans it."""
    shapes = config_shapes(config)
    asked = Scheme.parse(scheme)
    group = asked.group_size if asked.bits == 4 else None
    plan = plan_tensors(shapes, asked, group_size=group)
    return weight_bytes(shapes, plan, format)


def data_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors without their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8))
        total += path.stat().st_size - 8 - header
    return total


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_a_config_alone_gives_the_shapes_that_the_files_have(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, kind, tied)
    assert config_shapes(config_of(folder)) == model_shapes(open_checkpoint(folder))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_the_count_is_what_quantize_writes(
    kind: str, tied: bool, scheme: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "m", kind, tied)
    weightpath.quantize(folder, tmp_path / "out", scheme=scheme)
    found = counted(config_of(folder), scheme)
    assert found.resident_bytes == data_bytes(tmp_path / "out")


@pytest.mark.parametrize("format", ["awq", "gptq", "gptq_v2", "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_count_is_what_convert_writes(
    tied: bool, scheme: str, format: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", tied)
    if format == "awq" and scheme == "int8":
        return  # nothing is left to write as AWQ
    weightpath.quantize(folder, tmp_path / "low", scheme=scheme)
    weightpath.convert(tmp_path / "low", format, tmp_path / "out")
    found = counted(config_of(folder), scheme, format)
    assert found.resident_bytes == data_bytes(tmp_path / "out")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_count_is_what_a_gguf_file_holds_to_within_its_padding(
    tied: bool, scheme: str, tmp_path: Path
) -> None:
    rows = len(tiny_gguf.vocabulary())
    folder = make_checkpoint(tmp_path / "m", "llama", tied, chat=None, vocab_size=rows)
    tiny_gguf.make_folder(folder)
    weightpath.quantize(folder, tmp_path / "low", scheme=scheme)
    weightpath.convert(tmp_path / "low", "gguf", tmp_path / "m.gguf")
    reader = GGUFReader(tmp_path / "m.gguf")
    found = counted(config_of(folder), scheme, "gguf")
    assert found.resident_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    padding = (tmp_path / "m.gguf").stat().st_size - reader.data_offset - found.resident_bytes
    assert 0 <= padding < 32 * len(reader.tensors)


def test_the_demo_model_comes_to_what_is_written(demo_model: Path, tmp_path: Path) -> None:
    config = config_of(demo_model)
    weightpath.quantize(demo_model, tmp_path / "out", scheme="int8")
    assert counted(config, "int8").resident_bytes == data_bytes(tmp_path / "out")
    linears = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    assert counted(config, "w4g64").linears == linears * 4.25 / 8 + 30 * 7 * 16


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_step_reads_is_apart_from_what_is_held(tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tied)
    shapes = config_shapes(config_of(folder))
    kept = weight_bytes(shapes, plan_tensors(shapes, None))
    held = bytes_in_memory(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    assert kept.resident_bytes == held.matmul + held.embedding + held.rest
    assert kept.linears + kept.head == held.matmul
    assert kept.step_bytes() == held.matmul + held.rest + 64 * 2
    assert kept.step_bytes(5) == kept.step_bytes() + 4 * 64 * 2
    low = weight_bytes(shapes, plan_tensors(shapes, Scheme(4, 64)))
    table = 128 * 64 * 2
    assert low.embedding == table  # an untied head leaves the table beside it
    assert low.step_bytes() == low.resident_bytes - table + 64 * 2


@pytest.mark.parametrize(
    ("family", "per_token"),
    [("mixtral", 1), ("qwen3_next", 1), ("gpt_oss", 1), ("deepseek_v3", 1), ("llama4_text", 1)],
)
def test_a_step_reads_the_experts_of_its_tokens_alone(family: str, per_token: int) -> None:
    config = AutoConfig.for_model(family, **settings_of(family))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = config_shapes({**config.to_dict(), "dtype": "bfloat16"})
    found = weight_bytes(shapes, plan_tensors(shapes, None))
    assert found.resident_bytes == sum(
        tensor.numel() * 2
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name in model.state_dict()
    )
    fused = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n and p.ndim == 3)
    count = shapes.experts[0].count
    assert found.experts == 2 * fused
    assert (found.experts_per_token, found.expert_count) == (per_token, count)
    unread = found.experts * (count - per_token) // count
    table = 64 * 32 * 2
    tables = 0 if shapes.tied else table - 32 * 2
    assert found.step_bytes() == found.resident_bytes - unread - tables + (64 if shapes.tied else 0)
    assert {(e.out_features, e.in_features) for e in shapes.experts if "gate_up" in e.name} <= {
        (128, 32), (32, 32),
    }  # fmt: skip


def test_more_sequences_touch_more_experts_and_never_more_than_there_are() -> None:
    sizes = dict.fromkeys(("linears", "head", "towers", "embedding", "tables", "other", "rows"), 0)
    found = WeightBytes(format="x", experts=1000, expert_count=8, experts_per_token=2, **sizes)
    assert found.experts_touched(1) == 2
    assert found.experts_touched(2) == pytest.approx(8 * (1 - 0.75**2))
    assert found.step_bytes(1) == 250
    assert found.step_bytes(10_000) == 1000
    whole = WeightBytes(format="x", experts=1000, expert_count=8, experts_per_token=8, **sizes)
    assert whole.step_bytes() == 1000


def test_experts_count_quantized_where_asked() -> None:
    config = AutoConfig.for_model("mixtral", **settings_of("mixtral")).to_dict()
    shapes = config_shapes(config)
    plan = plan_tensors(shapes, Scheme(4, 32))
    low = weight_bytes(shapes, plan, expert_scheme=Scheme(4, 32))
    assert weight_bytes(shapes, plan).experts == sum(
        e.count * e.out_features * e.in_features * 2 for e in shapes.experts
    )
    assert low.experts == sum(
        e.count * (e.out_features * (e.in_features // 2 + e.in_features // 16) + 16)
        for e in shapes.experts
    )


def test_towers_are_held_and_not_read() -> None:
    assert in_tower("model.vision_tower.layers.0.q_proj")
    assert in_tower("model.encoder.layers.0.fc1")
    assert not in_tower("model.layers.0.mlp.down_proj")
    linears = (
        LinearShape("model.visual.fc", 32, 32), LinearShape("model.layers.0.fc", 32, 32),
        LinearShape("lm_head", 64, 32, "head"), LinearShape("embed", 64, 32, "embedding"),
    )  # fmt: skip
    shapes = ModelShapes(linears, False, "bfloat16", 2 * (2 * 32 * 32 + 2 * 64 * 32))
    found = weight_bytes(shapes, plan_tensors(shapes, None))
    assert found.towers == 2 * 32 * 32
    assert found.step_bytes() == 2 * (32 * 32 + 64 * 32 + 32)


@pytest.mark.parametrize(
    ("n", "k", "scheme", "format", "wanted"),
    [
        (12, 64, Scheme(4, 32), "awq", None),
        (16, 64, INT8, "awq", None),
        (48, 64, Scheme(4, 32), "gptq", None),
        (64, 48, Scheme(4, 16), "gguf", None),
        (64, 64, Scheme(4, 16), "gguf", None),
        (64, 64, Scheme(8, 32, symmetric=False), "gguf", None),
    ],
)
def test_what_a_format_cannot_hold_stays_float(
    n: int, k: int, scheme: Scheme, format: str, wanted: None
) -> None:
    assert fitted_scheme(LinearShape("a", n, k), scheme, format) is wanted
    assert linear_bytes(LinearShape("a", n, k), None, format, "float16") == 2 * n * k


def test_an_unknown_format_is_refused() -> None:
    shapes = ModelShapes((LinearShape("a", 32, 32),), False, "bfloat16", 2048)
    with pytest.raises(BadRequest, match="exl3"):
        weight_bytes(shapes, plan_tensors(shapes, None), "exl3")
