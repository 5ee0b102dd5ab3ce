"""The models that cpu_decode.py measures, each made once into a folder as every product reads it.

    demo    SmolLM2-135M-Instruct, fetched by weightpath (hidden 576, 30 layers, vocabulary 49152)
    135m    random weights in its shape, where it cannot be fetched
    1b      random weights in a 1B Llama's shape: hidden 2048, intermediate 8192, 16 layers, 32
            heads, 8 of keys and values, vocabulary 49152, head tied to the embedding

    CACHE/NAME-w4g64        weightpath's folder: linears 4-bit in groups of 64, head int8 per channel
    CACHE/NAME-w4g64.gguf   the same codes as Q4_0 blocks, the head as Q8_0: llama.cpp's
    CACHE/NAME-w4g64-ov     the same codes as an OpenVINO graph, made from the GGUF file by its worker

So all three hold the same weights (the head's scales go from fp32 to fp16), in their own layouts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

import weightpath
from weightpath.checkpoints.demo import fetch_demo
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.low_bit import open_low_bit

SCHEME, HEAD_BITS = "w4g64", 8
VOCABULARY = 49152
NAMES = ("demo", "1b")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class RandomShape:
    """A Llama of random weights, its head tied to the embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "135m": RandomShape(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),
    "1b": RandomShape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8),
}


@dataclass(frozen=True)
class BenchModel:
    """Where one model lies for each product; bytes of low-bit weights that a token reads."""

    name: str
    folder: Path
    gguf: Path
    openvino: Path
    vocabulary: int
    folder_bytes: int
    gguf_bytes: int


def prepare(name: str, cache: Path, tokenizer: Path | None = None) -> BenchModel:
    """The model of that name, made where it is not in the cache yet.

    tokenizer: a folder whose config and tokenizer files a random model takes; None: the demo's.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder, gguf = cache / f"{name}-{SCHEME}", cache / f"{name}-{SCHEME}.gguf"
    if not folder.exists():
        if name == "demo":
            source = fetch_demo()
        else:
            source = random_model(cache / f"{name}-bf16", SHAPES[name], tokenizer or fetch_demo())
        weightpath.quantize(source, folder, SCHEME, head_bits=HEAD_BITS, search=False)
        if name != "demo":
            shutil.rmtree(source)
    if not gguf.exists():
        weightpath.convert(folder, "gguf", gguf)
    ours, theirs = open_low_bit(folder), open_low_bit(gguf)
    assert isinstance(theirs.source, GGUFCheckpoint)
    return BenchModel(
        name,
        folder,
        gguf,
        cache / f"{name}-{SCHEME}-ov",
        ours.config["vocab_size"],
        sum(ours.stored_bytes(module) for module in ours.linears),
        sum(theirs.stored_bytes(module) for module in theirs.linears),
    )


def random_model(folder: Path, shape: RandomShape, tokenizer: Path) -> Path:
    """A bf16 checkpoint of that shape, a file a layer, with a copy of the tokenizer."""
    scratch = folder.with_suffix(".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}

    def save(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.randn(shape, generator=draw).mul_(0.02).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        save_file(tensors, scratch / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    hidden, intermediate = shape.hidden, shape.intermediate
    kv = hidden // shape.heads * shape.kv_heads
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        save(
            f"layer-{layer}.safetensors",
            {
                f"{at}.input_layernorm.weight": (hidden,),
                f"{at}.post_attention_layernorm.weight": (hidden,),
                f"{at}.self_attn.q_proj.weight": (hidden, hidden),
                f"{at}.self_attn.k_proj.weight": (kv, hidden),
                f"{at}.self_attn.v_proj.weight": (kv, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, hidden),
                f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
                f"{at}.mlp.up_proj.weight": (intermediate, hidden),
                f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            },
        )
    rest = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    save("rest.safetensors", rest)
    (scratch / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((tokenizer / "config.json").read_text())
    config.update(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=hidden // shape.heads,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    (scratch / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER:
        shutil.copy(tokenizer / file, scratch / file)
    return scratch.rename(folder)
