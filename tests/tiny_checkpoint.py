"""Tiny seeded checkpoints on disk, made in code: no files of ours, no network.

Two layers, hidden 64, intermediate 128, vocabulary 128, 4 query and 2 KV heads of 16. Weights are
drawn wide enough that a model's choices are not near ties. The tokenizer has one token a printable
character, two special turn marks, and a chat template.
"""

from __future__ import annotations

import json
import string
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BOS, EOS, TURN = 0, 1, 2
"""Ids of <s>, </s> and <|end|>, which closes a chat turn."""
VOCABULARY = 128
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a printable character; the ids left over are words that no text has."""
    names = ["<s>", "</s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>"]
    names += [*string.printable]
    names += [f" word{i}" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
    )
    if chat:
        made.chat_template = TEMPLATE
    return made


def build_model(
    kind: str = "llama", tied: bool = False, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random decoder in fp32 whose norms and biases are not the trivial 1 and 0."""
    config_class, model_class = KINDS[kind]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 1024, "tie_word_embeddings": tied,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None,
    }  # fmt: skip
    model = model_class(config_class(**(sizes | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + (1.0 if "norm" in name else 0.0))
    return model


def save_model(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype = torch.bfloat16,
    chat: bool | None = True,
    shard_size: str | int = "5GB",
) -> Path:
    """Write model and tokenizer (chat None: no tokenizer) as a checkpoint of `dtype`."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    if chat is not None:
        build_tokenizer(chat).save_pretrained(folder)
    return folder


def make_checkpoint(
    folder: Path,
    kind: str = "llama",
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    chat: bool | None = True,
    shard_size: str | int = "5GB",
    **changes: Any,
) -> Path:
    """`build_model`, then `save_model`."""
    model = build_model(kind, tied, **changes)
    return save_model(folder, model, dtype, chat, shard_size)


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of a single-file checkpoint in place."""
    path = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Entries of a safetensors file by name, read from its bytes alone."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def prompt_ids(length: int = 24) -> Tensor:
    """Token ids [1, length], the same every time."""
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
def logits_of(model: Any, length: int = 24) -> Tensor:
    """Logits [length, V] on `prompt_ids`."""
    return model(input_ids=prompt_ids(length)).logits[0]


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(str(folder))
