"""The KV budget against transformers' caches, to the byte, for random models of each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tiny_caches import (
    FAMILIES,
    SIZES,
    WINDOW,
    cache_after,
    cache_bytes,
    cache_in,
    settings_of,
    tiny_decoder,
    token_ids,
)
from weightpath.jobs.kv import config_kv
from weightpath.paths.kv_budget import KVBudget
from weightpath.paths.kv_rows import DIFFERENCES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*past_key_values. is deprecated"),
]
ROWS = 2
AS_NEEDED = {
    "llama", "qwen3", "olmo2", "granite", "glm4", "smollm3", "gpt2", "gpt_bigcode", "gpt_neox", "opt",
    "bloom", "phi", "stablelm", "ernie4_5", "seed_oss",
    "falcon", "deepseek_v3", "deepseek_v32", "minicpm3", "minimax",
}  # fmt: skip
"""Families whose cache in transformers is what the formulas say, without a named difference."""


def held(config: dict[str, Any], context: int, **options: Any) -> KVBudget:
    return config_kv(config, "test", context, ROWS, held_by="transformers", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_budget_is_what_the_cache_of_transformers_holds(family: str) -> None:
    model, config = tiny_decoder(family)
    for length, steps in ((3, 0), (WINDOW, 1), (WINDOW + 12, 2)):
        found = cache_after(model, length, steps, ROWS)
        assert held(config, length + steps).total_bytes == found, (length, steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_holds_beyond_the_formulas_is_named(family: str) -> None:
    settings = {"model_type": family, "dtype": "bfloat16", **settings_of(family)}
    needed = config_kv(settings, "test", 64, ROWS)
    kept = held(settings, 64)
    assert needed.differences == ()
    assert (kept.differences == ()) == (family in AS_NEEDED)
    if family in AS_NEEDED:
        assert kept.total_bytes == needed.total_bytes
    elif family != "recurrent_gemma":  # keeps kernel - 1 inputs, and window - 1 tokens
        assert kept.total_bytes != needed.total_bytes


@pytest.mark.parametrize(
    "family", ["gemma2", "llama4_text", "gemma3n_text", "qwen3_next", "zamba2"]
)
def test_counting_every_layer_alike_would_be_wrong(family: str) -> None:
    model, config = tiny_decoder(family)
    budget = held(config, 40)
    assert cache_after(model, 40, 0, ROWS) == budget.total_bytes != budget.flat_bytes


def test_falcons_repeated_heads_are_named_and_counted() -> None:
    config = AutoConfig.for_model(
        "falcon", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        new_decoder_architecture=True, num_kv_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain = model.config.to_dict()
    assert cache_after(model, 10, 1, ROWS) == held(plain, 11).total_bytes
    assert held(plain, 11).differences == (DIFFERENCES["expanded"],)
    assert 2 * config_kv(plain, "test", 11, ROWS).total_bytes == held(plain, 11).total_bytes


@torch.inference_mode()
def test_an_encoder_decoder_keeps_its_own_tokens_and_the_sources() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2,
                      num_decoder_layers=3, num_heads=4, decoder_start_token_id=0)  # fmt: skip
    model: Any = T5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    for own, source in ((5, 20), (12, 3)):
        output = model(input_ids=token_ids(ROWS, source), decoder_input_ids=token_ids(ROWS, own),
                       use_cache=True)  # fmt: skip
        budget = held(model.config.to_dict(), own, source_tokens=source)
        assert cache_bytes(cache_in(output)) == budget.total_bytes
        assert {row.kind: row.layers for row in budget.rows} == {
            "full_attention": 3,
            "cross_attention": 3,
        }


@torch.inference_mode()
def test_whisper_attends_to_all_positions_of_its_encoder() -> None:
    config = WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=8,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=30, max_target_positions=40, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    model: Any = WhisperForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    sound = torch.zeros(ROWS, 8, 60, dtype=torch.bfloat16)
    output = model(input_features=sound, decoder_input_ids=token_ids(ROWS, 7), use_cache=True)
    budget = held(model.config.to_dict(), 7)
    assert cache_bytes(cache_in(output)) == budget.total_bytes
    assert budget.source_tokens == 30


@torch.inference_mode()
def test_layers_that_attend_to_an_image_alone_keep_the_image() -> None:
    text = SIZES | {
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    del text["head_dim"]
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4,
        "intermediate_size": 64, "vision_output_dim": 96, "image_size": 16, "patch_size": 8,
        "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        "intermediate_layers_indices": [0, 1],
    }  # fmt: skip
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=60)
    model: Any = MllamaForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    ids = token_ids(ROWS, 20)
    ids[:, 2] = 60
    output = model(
        input_ids=ids, pixel_values=torch.zeros(ROWS, 1, 2, 3, 16, 16, dtype=torch.bfloat16),
        aspect_ratio_ids=torch.full((ROWS, 1), 2), use_cache=True,
        aspect_ratio_mask=torch.ones(ROWS, 1, 2, dtype=torch.long),
        cross_attention_mask=torch.ones(ROWS, 20, 1, 2, dtype=torch.long),
    )  # fmt: skip
    budget = held(model.config.to_dict(), 20)
    assert cache_bytes(cache_in(output)) == budget.total_bytes
    assert [row.kind for row in budget.rows] == ["full_attention", "cross_attention"]
    assert "vision_config" in budget.towers[0]
