"""From MODEL to its budget: configs completed with what transformers assumes, and every source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, DynamicCache
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQUENCES,
)

from tiny_checkpoint import make_checkpoint
from tiny_gguf import write_tiny_gguf
from weightpath.errors import BadCheckpoint, BadRequest
from weightpath.jobs.kv import config_kv, model_kv

GEMMA3: dict[str, Any] = {  # as a hub's config.json has it: class defaults are left out
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}  # fmt: skip


def test_what_a_config_leaves_out_is_taken_from_transformers_and_named() -> None:
    budget = config_kv(GEMMA3, "test", 32768)
    assert {row.kind: row.layers for row in budget.rows} == {
        "sliding_window": 29, "full_attention": 5,
    }  # fmt: skip
    assert budget.total_bytes == (29 * 1024 + 5 * 32768) * 4 * 256 * 2 * 2
    assert {"layer_types", "num_key_value_heads", "head_dim"} <= set(budget.filled)
    assert "num_hidden_layers" not in budget.filled
    assert len(budget.towers) == 1


def test_an_older_config_without_layer_types_slides_as_its_class_does() -> None:
    gemma2 = {
        "model_type": "gemma2", "num_hidden_layers": 26, "num_attention_heads": 8, "head_dim": 256,
        "num_key_value_heads": 4, "hidden_size": 2304, "sliding_window": 4096,
    }  # fmt: skip
    budget = config_kv(gemma2, "test", 8192)
    assert [(row.kind, row.layers) for row in budget.rows] == [
        ("sliding_window", 13), ("full_attention", 13),
    ]  # fmt: skip
    assert budget.filled == ("layer_types",)


def test_fields_that_a_family_calls_otherwise_are_found() -> None:
    longcat = {
        "model_type": "longcat_flash", "num_layers": 3, "num_attention_heads": 4,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    (row,) = config_kv(longcat, "test", 10).rows
    assert (row.kind, row.layers) == ("latent_attention", 6)  # two attentions a layer
    xglm = {"model_type": "xglm", "num_layers": 3, "attention_heads": 4, "d_model": 32}
    assert config_kv(xglm, "test", 10).total_bytes == 10 * 3 * 4 * 8 * 2 * 2


@pytest.mark.slow
def test_every_default_config_of_transformers_is_counted_as_it_caches_or_refused() -> None:
    """Kinds by layer against DynamicCache; a refusal names its field and is no crash."""
    groups = {"full_attention": "full", "latent_attention": "full", "sliding_window": "sliding",
              "chunked_attention": "sliding", "linear_attention": "state", "state_space": "state",
              "short_convolution": "state"}  # fmt: skip
    agree, refused, differ = 0, 0, []
    for kind in sorted(set(CAUSAL) | set(SEQUENCES) | set(IMAGES)):
        try:
            config = AutoConfig.for_model(kind)
            cache = DynamicCache(config=config)
        except Exception:
            continue
        try:
            budget = config_kv(json.loads(config.to_json_string()), kind, 1000)
        except BadCheckpoint:
            refused += 1
            continue
        mine = Counter()
        for row in budget.rows:
            windowed = row.kind == "latent_attention" and row.tokens < 1000
            mine["sliding" if windowed else groups.get(row.kind, "none")] += row.layers
        theirs = Counter()
        for layer in cache.layers:
            name = type(layer).__name__
            theirs["state"] += name.startswith("LinearAttention")
            theirs["sliding"] += "Sliding" in name
            theirs["full"] += name in ("DynamicLayer", "DynamicIndexedLayer") or "AndFull" in name
        if any(mine[group] != theirs[group] for group in ("full", "sliding", "state")):
            differ.append(kind)
        else:
            agree += 1
    # mllama: 8 layers of cross attention; pp_formulanet: its encoder's layers
    assert set(differ) <= {"mllama", "pp_formulanet"}
    assert agree > 5 * refused


def test_a_window_that_is_switched_off_does_not_count() -> None:
    qwen = {"model_type": "qwen2", "num_hidden_layers": 4, "num_attention_heads": 4,
            "hidden_size": 32, "num_key_value_heads": 2, "sliding_window": 8,
            "use_sliding_window": False, "max_window_layers": 2}  # fmt: skip
    assert {row.kind for row in config_kv(qwen, "test", 100).rows} == {"full_attention"}


def test_a_model_type_unknown_to_transformers_is_counted_as_it_stands() -> None:
    config = {"model_type": "of-our-own", "num_hidden_layers": 2, "num_attention_heads": 4,
              "hidden_size": 32}  # fmt: skip
    budget = config_kv(config, "test", 10)
    assert budget.total_bytes == 10 * 2 * 4 * 8 * 2 * 2
    assert budget.filled == ()
    assert "unknown to transformers" in budget.notes[-1]


def test_values_that_make_no_config_are_an_error_of_one_line() -> None:
    bad = {"model_type": "llama", "num_attention_heads": "many"}
    with pytest.raises(BadCheckpoint, match="makes no llama config") as caught:
        config_kv(bad, "test", 10)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadCheckpoint, match="1000000000 layers"):
        config_kv({"model_type": "llama", "num_hidden_layers": 10**9}, "test", 10)


def test_folder_file_gguf_and_low_bit_folder_give_the_same(
    tiny_llama: Path, tiny_low_bit: Path, tmp_path: Path
) -> None:
    wanted = model_kv(str(tiny_llama), 100, 3)
    assert wanted.total_bytes == 3 * 100 * 2 * 2 * 16 * 2 * 2
    for place in (tiny_llama / "config.json", tiny_low_bit):
        assert model_kv(str(place), 100, 3).total_bytes == wanted.total_bytes
    gguf = write_tiny_gguf(tmp_path / "m.gguf")
    assert model_kv(str(gguf), 10).total_bytes > 0


def test_weights_are_not_needed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    wanted = model_kv(str(folder), 50).total_bytes
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert model_kv(str(folder), 50).total_bytes == wanted


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no such folder"):
        model_kv(str(tmp_path / "gone"), 10)


def test_the_verb_prints_one_screen_and_json_carries_it(
    weightpath_cli: Any, tmp_path: Path
) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps(GEMMA3))
    options = ("--context", 32768, "--sequences", 8, "--kv-dtype", "fp8", "--block-size", 16)
    ran = weightpath_cli("kv", place, *options)
    assert ran.code == 0, ran.err
    assert len(ran.out.splitlines()) <= 24
    for words in ("sliding window", "full attention", "siglip_vision_model", "alike", "note:"):
        assert words in ran.out
    plain = json.loads(weightpath_cli("kv", place, *options, "--json").out)
    assert plain["total_bytes"] == 8 * (29 * 1024 + 5 * 32768) * 4 * 256 * 2
    assert f"{plain['total_bytes']:,} bytes" in ran.out
    assert plain["rows"][0]["layers"] == 29


def test_a_wrong_option_of_the_verb_is_one_line_and_code_2(
    weightpath_cli: Any, tiny_llama: Path
) -> None:
    ran = weightpath_cli("kv", tiny_llama, "--kv-dtype", "int3")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "int3" in ran.err
