"""Logits of a checkpoint by transformers, which reads it through compressed-tensors.

    python transformers_logits.py CHECKPOINT TOKENS.json OUT.safetensors [--dtype float32] [--dequantize]

TOKENS.json is a list of token id lists. OUT gets `logits.0`, `logits.1`, ... fp32 [T, V], one for
each list, every position. Prints one JSON object: the versions used, how the weights were read, and
the sha256 of every linear layer's decompressed weight (its bytes, row by row, in --dtype). Without --dequantize the packed tensors are loaded as they are and decompressed at the first forward
pass; with it each is decompressed as it is read. Run by this project's python or by a peer's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from importlib.metadata import version
from typing import Any


def weight_hashes(model: Any) -> dict[str, str]:
    """sha256 of the weight of every linear layer but the head, by the layer's name."""
    import torch

    head = model.get_output_embeddings()
    return {
        name: hashlib.sha256(
            module.weight.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def main() -> None:
    """Load, run every token list, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("tokens")
    parser.add_argument("out")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--dequantize", action="store_true")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    extra = (
        {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        if options.dequantize
        else {}
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=getattr(torch, options.dtype), **extra
    ).eval()
    with open(options.tokens, encoding="utf-8") as file:
        token_lists = json.load(file)
    logits = {}
    with torch.inference_mode():
        for index, ids in enumerate(token_lists):
            rows = model(torch.tensor([ids]), use_cache=False).logits[0]
            logits[f"logits.{index}"] = rows.float().contiguous()
    save_file(logits, options.out)
    print(
        json.dumps(
            {
                "transformers": version("transformers"),
                "compressed_tensors": version("compressed-tensors"),
                "torch": version("torch"),
                "dtype": options.dtype,
                "dequantize": options.dequantize,
                "weights": weight_hashes(model),
            }
        )
    )


if __name__ == "__main__":
    main()
