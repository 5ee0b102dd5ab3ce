"""The KV budget's arithmetic, from configs alone: kinds, windows, states, rounding, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightpath.errors import BadCheckpoint, BadRequest
from weightpath.paths.kv_budget import KVBudget, kv_budget

MIB = 1 << 20
WORKED: dict[str, Any] = {
    "num_hidden_layers": 28, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "sliding_window": 512, "dtype": "bfloat16",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7,
}  # fmt: skip
PLAIN: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}


def total(config: dict[str, Any], context: int = 100, **options: Any) -> int:
    return kv_budget(config, context, **options).total_bytes


def kinds(budget: KVBudget) -> dict[str, int]:
    return {row.kind: row.layers for row in budget.rows}


def test_the_edge_selectors_worked_example_comes_out_to_the_byte() -> None:
    budget = kv_budget(WORKED, 32768, block_size=16)
    assert budget.bytes_per_token == 56 * 1024
    assert (budget.flat_token_layers, budget.token_layers) == (917_504, 240_128)
    assert budget.flat_bytes == 1792 * MIB
    assert budget.total_bytes == 469 * MIB
    assert budget.difference_bytes == 1323 * MIB
    assert budget.reserved_bytes() == 469 * MIB * 5 // 4


def test_sequences_and_dtypes_scale_the_total() -> None:
    one = total(WORKED, 32768)
    assert total(WORKED, 32768, sequences=8) == 8 * one
    assert total(WORKED, 32768, kv_dtype="fp8") == one // 2
    assert total(WORKED, 32768, kv_dtype="float32") == 2 * one
    assert total(WORKED, 32768, kv_dtype="int8") == one // 2 + 240_128 * 2 * 2 * 4


def test_lengths_round_up_to_whole_blocks_and_windows_too() -> None:
    budget = kv_budget(WORKED | {"sliding_window": 100}, 1001, block_size=16)
    assert {row.kind: row.tokens for row in budget.rows} == {
        "sliding_window": 112, "full_attention": 1008,
    }  # fmt: skip
    assert budget.flat_token_layers == 28 * 1008


def test_a_context_within_the_window_saves_nothing_and_says_so() -> None:
    budget = kv_budget(WORKED, 512)
    assert budget.difference_bytes == 0
    assert any("windows save nothing" in note for note in budget.notes)


def test_a_nested_text_config_is_resolved_and_towers_are_named() -> None:
    nested = {
        "text_config": WORKED, "vision_config": {"model_type": "siglip", "num_hidden_layers": 27},
        "audio_config": {"model_type": "conformer"}, "quantization_config": {"bits": 4},
    }  # fmt: skip
    budget = kv_budget(nested, 32768)
    assert budget.total_bytes == 469 * MIB
    assert budget.towers == (
        "vision_config (siglip, 27 layers)", "audio_config (conformer)",
    )  # fmt: skip
    omni = kv_budget({"thinker_config": nested, "talker_config": {"model_type": "talker"}}, 32768)
    assert omni.total_bytes == 469 * MIB
    assert len(omni.towers) == 3


def test_a_window_without_layer_types_counts_as_flat_and_says_so() -> None:
    config = {key: value for key, value in WORKED.items() if key != "layer_types"}
    budget = kv_budget(config, 32768)
    assert budget.total_bytes == budget.flat_bytes == 1792 * MIB
    assert "upper bound" in budget.notes[0]
    off = kv_budget(config | {"use_sliding_window": False}, 32768)
    assert not any("upper bound" in note for note in off.notes)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"sliding_window": 8, "sliding_window_pattern": 2},
         {"sliding_window": 2, "full_attention": 2}),
        ({"sliding_window": 8, "sliding_window_pattern": "LLLG"},
         {"sliding_window": 3, "full_attention": 1}),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
         {"full_attention": 3, "sliding_window": 1}),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0]},
         {"chunked_attention": 3, "full_attention": 1}),
        ({"attention_chunk_size": 8, "no_rope_layer_interval": 2},
         {"chunked_attention": 2, "full_attention": 2}),
        ({"layers_block_type": ["mamba", "attention", "mamba", "moe"], "mamba_d_state": 4,
          "mamba_d_conv": 4, "mamba_expand": 2}, {"state_space": 2, "full_attention": 1}),
        ({"full_attn_idxs": [2], "conv_L_cache": 3}, {"short_convolution": 3, "full_attention": 1}),
        ({"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 4,
          "mamba_expand": 2}, {"state_space": 3, "full_attention": 1}),
        ({"attn_type_list": [0, 0, 0, 1]}, {"linear_attention": 3, "full_attention": 1}),
        ({"cross_attention_layers": [1]}, {"full_attention": 3, "cross_attention": 1}),
        ({"num_kv_shared_layers": 1}, {"full_attention": 3, "shared_kv": 1}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_pattern_fields_place_the_kinds(fields: dict[str, Any], wanted: dict[str, int]) -> None:
    assert kinds(kv_budget(PLAIN | fields, 100)) == wanted


def test_linear_attention_keeps_the_selectors_state_whatever_the_context() -> None:
    config = PLAIN | {
        "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_num_value_heads": 4, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    state = 3 * (2 * 2 * 8 + 4 * 12) * 2 + 4 * 12 * 8 * 4
    for context in (1, 100_000):
        budget = kv_budget(config, context, sequences=5)
        assert budget.state_bytes == 5 * 3 * state
        assert budget.total_bytes == 5 * (3 * state + context * 4 * 8 * 2 * 2)
    half = kv_budget(config, 10, state_dtype="bf16")
    assert half.state_bytes == 3 * (state - 4 * 12 * 8 * 2)
    narrow = kv_budget(config, 10, kv_dtype="fp8")
    assert narrow.state_bytes == 3 * state
    assert any("fp8 narrows keys and values alone" in note for note in narrow.notes)
    said = kv_budget(config | {"mamba_ssm_dtype": "bfloat16"}, 10)
    assert said.state_bytes == half.state_bytes


def test_latent_attention_keeps_the_latent_and_names_what_expanding_costs() -> None:
    config = {  # DeepSeek-V3
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    budget = kv_budget(config, 1000)
    assert budget.bytes_per_token == 61 * 576 * 2
    assert budget.flat_bytes == 1000 * 61 * 128 * (192 + 128) * 2
    assert any("tensor parallelism copies" in note for note in budget.notes)
    indexed = kv_budget(config | {"index_head_dim": 128}, 1000)
    assert indexed.bytes_per_token == 61 * (576 + 128) * 2


def test_shared_layers_keep_nothing_and_count_in_the_flat_figure() -> None:
    plain, sharing = kv_budget(PLAIN, 50), kv_budget(PLAIN | {"num_kv_shared_layers": 2}, 50)
    assert sharing.total_bytes == plain.total_bytes // 2
    assert sharing.flat_bytes == plain.flat_bytes
    assert sharing.flat_token_layers == plain.token_layers == 200


def test_a_step_reads_what_is_kept_and_a_shared_layers_source_again() -> None:
    assert kv_budget(WORKED, 32768, 2).read_bytes == kv_budget(WORKED, 32768, 2).total_bytes
    plain, sharing = kv_budget(PLAIN, 50, 3), kv_budget(PLAIN | {"num_kv_shared_layers": 2}, 50, 3)
    assert sharing.read_bytes == plain.read_bytes == plain.total_bytes
    windows = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 10}
    assert kv_budget(PLAIN | windows | {"num_kv_shared_layers": 2}, 50, 3).read_bytes == (
        kv_budget(PLAIN | windows, 50, 3).total_bytes
    )


def test_geometry_of_single_layers_is_taken() -> None:
    half = PLAIN | {"head_dim": 8, "num_key_value_heads": 2}
    listed = kv_budget(PLAIN | {"head_dim": 8, "num_key_value_heads": [1, 1, 2, 4]}, 10)
    assert listed.bytes_per_token == 8 * 8 * 2 * 2
    own = kv_budget(half | {"per_layer_config": {"03": {"head_dim": 16}}}, 10)
    assert own.bytes_per_token == 2 * (3 * 8 + 16) * 2 * 2
    split = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
    wide = kv_budget(half | split | {"global_head_dim": 16, "num_global_key_value_heads": 1}, 10)
    assert wide.bytes_per_token == 2 * 2 * (2 * 8 + 16) * 2


def test_one_query_head_a_key_head_where_no_field_says_other_and_one_with_multi_query() -> None:
    assert kv_budget(PLAIN, 1).bytes_per_token == 4 * 4 * 8 * 2 * 2
    assert kv_budget(PLAIN | {"multi_query": True}, 1).bytes_per_token == 4 * 8 * 2 * 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "head_dim"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 32}, "head_dim"),
        (PLAIN | {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        (PLAIN | {"layer_types": ["chunked_attention"] * 4}, "attention_chunk_size"),
        (PLAIN | {"layer_types": ["linear_attention"] * 4}, "linear_num_value_heads"),
        (PLAIN | {"mamba_d_state": 4}, "layer_types"),
        (PLAIN | {"layer_types": ["linear_attention"] * 4, "mamba_d_state": 4}, "mamba_d_conv"),
        (PLAIN | {"kv_lora_rank": 16}, "qk_rope_head_dim"),
        (PLAIN | {"layer_types": ["full_attention"] * 3}, "3 layers"),
        (PLAIN | {"layer_types": ["telepathy"] * 4}, "telepathy"),
        (PLAIN | {"num_key_value_heads": "four"}, "num_key_value_heads"),
        (PLAIN | {"num_key_value_heads": 0}, "num_key_value_heads"),
        (PLAIN | {"num_hidden_layers": 10**9}, "1000000000 layers"),
        (PLAIN | {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        (PLAIN | {"cross_attention_layers": [9]}, "cross_attention_layers"),
        ({"model_type": "bert", **PLAIN}, "encoder"),
    ],
)
def test_missing_or_wrong_geometry_names_its_field(config: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        kv_budget(config, 100)


def test_the_error_names_the_section() -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json\.text_config: has no num_hidden_layers"):
        kv_budget({"text_config": {"model_type": "x"}}, 100)


@pytest.mark.parametrize(
    "options",
    [{"context": 0}, {"context": 1, "sequences": 0}, {"context": 1, "block_size": 0},
     {"context": 1, "kv_dtype": "int3"}, {"context": 1, "state_dtype": "x"},
     {"context": 1, "held_by": "vllm"}, {"context": 1, "source_tokens": 0}],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        kv_budget(PLAIN, **options)


@given(
    context=st.integers(1, 300), window=st.integers(1, 200), block=st.integers(1, 64),
    layers=st.lists(
        st.sampled_from(["sliding_attention", "full_attention"]), min_size=1, max_size=6
    ),
)  # fmt: skip
def test_by_kind_is_never_more_than_flat_and_equals_it_without_windows(
    context: int, window: int, block: int, layers: list[str]
) -> None:
    config = PLAIN | {
        "num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": window,
    }  # fmt: skip
    budget = kv_budget(config, context, block_size=block)
    tokens = sum(
        -(-(min(window, context) if kind == "sliding_attention" else context) // block) * block
        for kind in layers
    )
    assert budget.total_bytes == tokens * 4 * 8 * 2 * 2
    assert budget.total_bytes <= budget.flat_bytes
    if "sliding_attention" not in layers:
        assert budget.total_bytes == budget.flat_bytes
