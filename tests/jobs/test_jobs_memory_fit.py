"""The plan's fit in memory: with the weights of its runtime's format and the cache of its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weightpath
from weightpath.checkpoints.store import open_checkpoint
from weightpath.device.profile import HardwareProfile, from_dict
from weightpath.errors import BadCheckpoint, BadRequest
from weightpath.jobs.memory_fit import plan_fit
from weightpath.jobs.plan import Plan
from weightpath.jobs.shapes import model_shapes
from weightpath.paths.memory_fit import MemoryFit
from weightpath.paths.tensors import plan_tensors

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}  # fmt: skip
A_TOKEN = 32 * 8 * 128 * 2 * 2


def machine(ram: int) -> HardwareProfile:
    flags = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]
    return from_dict({"arch": "x86_64", "cpu_flags": flags, "ram_total": ram}, "test")


def fit_of(made: Plan) -> MemoryFit:
    assert made.fit is not None
    return made.fit.fit


@pytest.fixture
def config_8b(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_a_config_alone_is_planned_and_fitted(config_8b: Path) -> None:
    made = weightpath.plan(config_8b, machine(16 << 30), context=8192, sequences=2)
    found = fit_of(made)
    assert made.tensors.source_bytes == 16_060_522_496
    assert found.weights == made.tensors.file_bytes
    assert found.kv == 2 * 8192 * A_TOKEN
    assert found.fits
    plain = json.loads(json.dumps(made.to_dict()))["fit"]
    assert plain["needed"] == found.needed
    assert plain["cache"]["rows"][0]["layers"] == 32
    assert plain["step_bytes"] == plain["weight_bytes"]["step_bytes"] + 8192 + 2 * 8192 * A_TOKEN


def test_context_sequences_and_the_caches_dtype_decide_the_fit(config_8b: Path) -> None:
    def fits(**options: Any) -> bool | None:
        return fit_of(weightpath.plan(config_8b, machine(16 << 30), **options)).fits

    assert fits(context=32768) is True
    assert fits(context=32768, sequences=4) is False
    assert fits(context=32768, sequences=3, kv_dtype="fp8") is True
    assert fits(context=131072) is False


def test_without_a_context_4096_tokens_are_taken_or_what_the_model_was_made_for(
    config_8b: Path, tiny_llama: Path
) -> None:
    for place, wanted in ((config_8b, 4096), (tiny_llama, 1024)):
        assert fit_of(weightpath.plan(place, machine(64 << 30))).context == wanted


def test_vllm_counts_whole_blocks_and_llama_cpp_the_gguf(config_8b: Path) -> None:
    vllm = weightpath.plan(config_8b, machine(64 << 30), runtime="vllm", context=1001)
    assert fit_of(vllm).kv == 1008 * A_TOKEN
    gguf = weightpath.plan(config_8b, machine(64 << 30), runtime="llama.cpp", context=1001)
    assert fit_of(gguf).kv == 1001 * A_TOKEN
    assert fit_of(gguf).weights != gguf.tensors.file_bytes


def test_a_cache_that_cannot_be_counted_is_said_and_an_error_where_a_context_was_asked(
    tiny_llama: Path,
) -> None:
    shapes = model_shapes(open_checkpoint(tiny_llama))
    given = ({"model_type": "bert"}, "test", shapes, plan_tensors(shapes, None), machine(8 << 30))
    found = plan_fit(*given)
    assert found.cache is None
    assert (found.fit.kv, found.fit.fits) == (0, True)
    assert "is an encoder (bert)" in found.note
    assert found.step_bytes == found.weights.step_bytes()
    with pytest.raises(BadCheckpoint, match="is an encoder"):
        plan_fit(*given, context=100)
    with pytest.raises(BadRequest, match="0 sequences"):
        plan_fit(*given, sequences=0)


def test_the_verb_prints_the_fit(weightpath_cli: Any, config_8b: Path, tmp_path: Path) -> None:
    (tmp_path / "laptop.json").write_text(
        json.dumps({"arch": "x86_64", "cpu_flags": ["avx2"], "ram_total": 16 << 30})
    )
    device = ("--device", tmp_path / "laptop.json")
    ran = weightpath_cli("plan", config_8b, *device, "--context", 32768, "--sequences", 8)
    assert ran.code == 0, ran.err
    assert "does not fit: needs" in ran.out
    assert "8 x 32,768 tokens" in ran.out
    ran = weightpath_cli("plan", config_8b, *device, "--context", 8192, "--kv-dtype", "fp8")
    assert " fits: needs" in ran.out
    assert "a decode step at that context reads" in ran.out
    assert "KV in fp8" in ran.out
