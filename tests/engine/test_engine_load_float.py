"""Float checkpoints through the engine, against transformers' own from_pretrained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel, PreTrainedModel

from tiny_checkpoint import (
    VOCABULARY,
    build_model,
    edit_json,
    edit_tensors,
    logits_of,
    make_checkpoint,
    prompt_ids,
    save_model,
)
from weightpath.checkpoints.store import open_checkpoint
from weightpath.engine.load import load_float, load_tokenizer, model_dtype
from weightpath.errors import BadCheckpoint, BadTensor, WeightpathError

pytestmark = pytest.mark.usefixtures("one_thread")


def ours(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    return load_float(open_checkpoint(folder), dtype, **options)


def theirs(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def one_line(error: BaseException) -> str:
    """The message, which must be one line."""
    assert len(str(error).splitlines()) == 1
    return str(error)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a checkpoint that a test may edit."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_engine_gives_the_logits_of_from_pretrained_bit_for_bit(
    tmp_path: Path, kind: str, tied: bool, dtype: torch.dtype
) -> None:
    folder = make_checkpoint(tmp_path, kind, tied, dtype)
    model = ours(folder, dtype)
    assert model.dtype == dtype
    assert not model.training
    assert torch.equal(logits_of(model), logits_of(theirs(folder, dtype)))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 16}},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
    ],
    ids=["rope llama3", "rope dynamic", "rope yarn", "biases", "one KV head", "wide heads"],
)  # fmt: skip
def test_what_a_config_changes_is_computed_as_transformers_does(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, "llama", **changes)
    model = ours(folder, torch.bfloat16)
    assert torch.equal(logits_of(model, 40), logits_of(theirs(folder, torch.bfloat16), 40))


def test_a_sliding_window_shorter_than_the_text_is_kept(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "short", "mistral", sliding_window=4)
    wide = make_checkpoint(tmp_path / "wide", "mistral", sliding_window=None)
    found = logits_of(ours(folder, torch.float32))
    assert torch.equal(found, logits_of(theirs(folder, torch.float32)))
    assert not torch.equal(found, logits_of(ours(wide, torch.float32)))


def test_a_sharded_source_loads_as_the_single_file_does(tmp_path: Path) -> None:
    model = build_model("qwen3")
    single = save_model(tmp_path / "single", model)
    sharded = save_model(tmp_path / "sharded", model, shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(
        logits_of(ours(single, torch.bfloat16)), logits_of(ours(sharded, torch.bfloat16))
    )


def test_bf16_weights_in_fp32_arithmetic_are_the_rounded_weights(tmp_path: Path) -> None:
    model = build_model("llama")
    folder = save_model(tmp_path, model, torch.float32)
    rounded = build_model("llama")
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    loaded = ours(folder, torch.bfloat16, compute=torch.float32)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits_of(loaded), logits_of(rounded))
    assert not torch.equal(logits_of(loaded), logits_of(model))


def test_tensors_of_mixed_dtypes_come_out_in_the_one_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {name: value.float() for name, value in tensors.items() if "norm" in name}
        ),
    )
    model = ours(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits_of(model), logits_of(theirs(folder, torch.bfloat16)))


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_named(
    tiny_llama: Path, copy_of: Callable[[Path], Path], name: str
) -> None:
    folder = edit_tensors(copy_of(tiny_llama), lambda tensors: tensors.pop(name))
    with pytest.raises(BadCheckpoint, match=r"is missing \(1 such\)") as caught:
        ours(folder, torch.bfloat16)
    assert name in one_line(caught.value)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.bias"
    folder = edit_tensors(make_checkpoint(tmp_path, "qwen2"), lambda tensors: tensors.pop(name))
    with pytest.raises(BadCheckpoint, match=name):
        ours(folder, torch.bfloat16)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale_of_mine",
        "model.layers.0.weight",
        "surplus",
        "..",
    ],
)
def test_a_tensor_that_the_model_has_no_place_for_is_named(
    tiny_llama: Path, copy_of: Callable[[Path], Path], name: str
) -> None:
    folder = edit_tensors(
        copy_of(tiny_llama), lambda tensors: tensors.update({name: torch.zeros(64)})
    )
    with pytest.raises(BadCheckpoint, match="has no place in LlamaForCausalLM") as caught:
        ours(folder, torch.bfloat16)
    assert f"tensor {name} has" in one_line(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (64, 64)),
        ("model.norm.weight", (63,)),
        ("model.embed_tokens.weight", (127, 64)),
        ("model.layers.1.mlp.down_proj.weight", (128, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tiny_llama: Path, copy_of: Callable[[Path], Path], name: str, shape: tuple[int, ...]
) -> None:
    wanted = tuple(open_checkpoint(tiny_llama).tensors[name].shape)
    folder = edit_tensors(
        copy_of(tiny_llama), lambda tensors: tensors.update({name: torch.zeros(shape)})
    )
    with pytest.raises(BadTensor) as caught:
        ours(folder, torch.bfloat16)
    assert str(shape) in one_line(caught.value)
    assert str(wanted) in str(caught.value)
    assert caught.value.name == name


def test_a_tied_head_stored_twice_and_equal_stays_one_matrix(
    tiny_tied: Path, copy_of: Callable[[Path], Path]
) -> None:
    def twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = edit_tensors(copy_of(tiny_tied), twice)
    model = ours(folder, torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(logits_of(model), logits_of(ours(tiny_tied, torch.bfloat16)))


def test_a_tied_head_stored_twice_and_differing_is_a_head_of_its_own(
    tiny_tied: Path, copy_of: Callable[[Path], Path]
) -> None:
    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.5

    folder = edit_tensors(copy_of(tiny_tied), other)
    model = ours(folder, torch.bfloat16)
    assert not model.config.tie_word_embeddings
    assert torch.equal(logits_of(model), logits_of(theirs(folder, torch.bfloat16)))
    assert not torch.equal(logits_of(model), logits_of(ours(tiny_tied, torch.bfloat16)))


def test_a_tied_head_stored_twice_in_another_dtype_is_compared_by_value(
    tiny_tied: Path, copy_of: Callable[[Path], Path]
) -> None:
    def wider(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()

    model = ours(edit_tensors(copy_of(tiny_tied), wider), torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(logits_of(model), logits_of(ours(tiny_tied, torch.bfloat16)))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_model"},
        {"model_type": 7},
        {"model_type": ["llama"]},
        {"model_type": ""},
        {"hidden_size": "64"},
        {"hidden_size": None},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"hidden_act": "no_such_function"},
        {"rope_parameters": {"rope_type": "no_such_rope", "rope_theta": 1e4}},
        {"architectures": ["BertModel"]},
        {"tie_word_embeddings": "yes"},
        {"vocab_size": 2**40},
    ],
    ids=str,
)
def test_a_config_that_describes_no_model_is_one_clear_line(
    tiny_llama: Path, copy_of: Callable[[Path], Path], changes: dict[str, Any]
) -> None:
    folder = copy_of(tiny_llama)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(WeightpathError) as caught:
        ours(folder, torch.bfloat16)
    message = one_line(caught.value)
    assert "config.json" in message or str(folder) in message
    assert len(message) < 700


def test_generation_settings_come_along(tiny_llama: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_llama)
    edit_json(folder / "generation_config.json", eos_token_id=[1, 2], top_k=7)
    settings = ours(folder, torch.bfloat16).generation_config
    assert settings is not None
    assert (settings.eos_token_id, settings.top_k) == ([1, 2], 7)


def test_a_damaged_generation_config_is_one_clear_line(
    tiny_llama: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_llama)
    (folder / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(BadCheckpoint, match=r"generation_config\.json") as caught:
        ours(folder, torch.bfloat16)
    one_line(caught.value)


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, chat=None)
    with pytest.raises(BadCheckpoint, match="has no tokenizer that loads") as caught:
        load_tokenizer(folder)
    one_line(caught.value)


def test_a_damaged_tokenizer_is_one_clear_line(
    tiny_llama: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_llama)
    for damage in ("", "{}", "[1]", '{"model": {"type": "No"}}', "\xff"):
        (folder / "tokenizer.json").write_text(damage, encoding="latin-1")
        with pytest.raises(BadCheckpoint, match="has no tokenizer that loads") as caught:
            load_tokenizer(folder)
        one_line(caught.value)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"text_config": {"dtype": "float32"}}, torch.float32),
        ({"dtype": "no_such"}, torch.bfloat16),
        ({"dtype": 3, "text_config": None}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_dtype_is_what_the_config_names_and_bf16_otherwise(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    assert model_dtype(config) == dtype


def encoder(folder: Path) -> Path:
    """A small BERT with biases, as a checkpoint without a tokenizer."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=VOCABULARY, intermediate_size=128, **sizes)).eval()
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def test_an_encoder_loads_as_from_pretrained_does(tmp_path: Path) -> None:
    folder = encoder(tmp_path)
    ids = prompt_ids()
    found = ours(folder, torch.float32)(input_ids=ids).last_hidden_state
    wanted = AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state
    assert torch.equal(found, wanted)


@torch.inference_mode()
def test_a_buffer_that_older_versions_saved_is_taken(tmp_path: Path) -> None:
    plain = ours(encoder(tmp_path), torch.float32)
    positions = torch.arange(512)[None]
    edit_tensors(tmp_path, lambda tensors: tensors.update({"embeddings.position_ids": positions}))
    found = ours(tmp_path, torch.float32)(input_ids=prompt_ids()).last_hidden_state
    assert torch.equal(found, plain(input_ids=prompt_ids()).last_hidden_state)
