"""Writes small GGUF files from transformers models, with the converter's row order written here
on its own: every q and k head [2, d/2] is turned to [d/2, 2]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny_checkpoint import build_model

PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """2 layers, hidden 128, intermediate 256, vocabulary 64, 4 query and 2 KV heads, seeded."""
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[architecture]
    sizes = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.1 if name.endswith("bias") else 0.08
            parameter.copy_(torch.randn(parameter.shape) * scale + (1.0 if "norm" in name else 0.0))
    return model


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, ending = name.rsplit(".", 1)
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{ending}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{ending}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order: within a head, rows 0, d/2, 1, d/2 + 1, ..."""
    half = values.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(heads)
        for i in range(half)
        for part in range(2)
    ]
    return values[order]


def file_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """The model's tensors under GGUF names, in the order that a file of the architecture has."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = interleave(values, heads[part])
        tensors[gguf_name(name)] = np.ascontiguousarray(values)
    return tensors


def writer_of(path: Path, model: PreTrainedModel, architecture: str, **options: Any) -> Any:
    """A GGUFWriter with the model's metadata set; tensors and vocabulary are for the caller."""
    writer, config = gguf.GGUFWriter(path, architecture, **options), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    blocks: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF of the model. tensors replace the model's own; metadata is set with add_*(value);
    blocks: tensors given as bytes of a block type, or to be quantized into it."""
    writer = writer_of(path, model, architecture)
    for method, value in (metadata or {}).items():
        getattr(writer, method)(value)
    for name, values in (file_tensors(model, architecture) if tensors is None else tensors).items():
        kind = (blocks or {}).get(name)
        if kind is not None and values.dtype != np.uint8:
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    finish(writer)
    return path


def write_tiny_gguf(path: Path) -> Path:
    """Q8_0 matrices and F32 norms of the verbs' tiny Llama (tiny_checkpoint), with a vocabulary."""
    model = build_model("llama", vocab_size=len(vocabulary()))
    tensors = file_tensors(model, "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = {name: kind for name, values in tensors.items() if values.ndim == 2}
    return write_gguf(path, model, "llama", tensors, byte_level(), blocks)


def byte_letters() -> list[str]:
    """How byte-level BPE writes each of the 256 bytes: printable ones as themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, unprintable = {}, 0
    for byte in range(256):
        if byte in printable:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + unprintable)
            unprintable += 1
    return [letters[byte] for byte in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ġ 1", "Ċ Ċ"]


def vocabulary() -> list[str]:
    """Two special tokens, the 256 bytes, what MERGES makes, a token kept whole, and padding."""
    made = [merge.replace(" ", "") for merge in MERGES]
    return ["<|end|>", "<|start|>", *byte_letters(), *made, "<think>", "[PAD]"]


def byte_level(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """Vocabulary metadata, as writer methods."""
    tokens = vocabulary()
    types = [3, 3, *[1] * (len(tokens) - 4), 4, 5]
    return {
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": pre,
        "add_token_list": tokens,
        "add_token_types": types,
        "add_token_merges": MERGES,
        "add_bos_token_id": 1,
        "add_eos_token_id": 0,
        "add_pad_token_id": 0,
        **more,
    }


def make_tokenizer(pre: pre_tokenizers.PreTokenizer | None = None, **options: Any) -> Tokenizer:
    """A byte-level BPE as SmolLM2's, with two special tokens and one kept whole."""
    tokens = vocabulary()[:-1]
    pairs = [(line.split(" ")[0], line.split(" ")[1]) for line in MERGES]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, **options)
    )
    tokenizer.pre_tokenizer = pre or pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:2]])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def make_folder(folder: Path, tokenizer: Tokenizer | None = None, **settings_: Any) -> Path:
    """A tokenizer's files; settings_ go into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or make_tokenizer()).save(str(folder / "tokenizer.json"))
    stated = {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|end|>"} | settings_
    stated = {key: value for key, value in stated.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder
