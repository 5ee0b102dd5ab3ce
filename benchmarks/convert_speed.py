"""Converting a synthetic 7B-shaped AWQ checkpoint: MB/s of input, and peak RssAnon.

    python benchmarks/convert_speed.py [--to compressed-tensors gptq_v2] [--layers 32] [--rounds 3]

Llama shape: hidden 4096, intermediate 11008, 32 layers, vocabulary 32000, 4-bit groups of 128 with
zero points (AWQ gemm), 3.9 GB, random words; every layer's file holds its own. The input is read
once before each run, so that it comes from the page cache. Each run is a process of its own, and
targets take turns. Bars: 250 MB/s on two cores, 1.5 GB of RssAnon, the interpreter with torch
included. A run of `cat` over the input, and one that writes as many bytes, are timed beside them:
what the machine allows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from common import finish

HIDDEN, INTERMEDIATE, VOCABULARY, GROUP = 4096, 11008, 32000, 128
CHUNK = 16 << 20
CHILD = """
import json, sys, time
from pathlib import Path
import torch, transformers
from weightpath.device.memory import PeakMemory, rss_anon
from weightpath.jobs.convert import convert
base = rss_anon()
started = time.perf_counter()
with PeakMemory() as memory:
    done = convert(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
print(json.dumps({"seconds": time.perf_counter() - started, "base": base, "peak": memory.peak,
                  "exact": done.exact, "lossy": done.lossy}))
"""


def awq_model(folder: Path, layers: int) -> int:
    """Write the checkpoint, one file a layer, and return its bytes."""
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}

    def save(tensors: dict[str, torch.Tensor], number: int) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    shapes = {
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {
            f"{prefix}.{norm}.weight": torch.ones(HIDDEN, dtype=torch.float16)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name, (n, k) in shapes.items():
            words = torch.randint(-(1 << 31), 1 << 31, (k, n // 8), generator=generator)
            zeros = torch.randint(-(1 << 31), 1 << 31, (k // GROUP, n // 8), generator=generator)
            scales = torch.rand(k // GROUP, n, generator=generator) * 0.01 + 0.001
            tensors[f"{prefix}.{name}.qweight"] = words.to(torch.int32)
            tensors[f"{prefix}.{name}.qzeros"] = zeros.to(torch.int32)
            tensors[f"{prefix}.{name}.scales"] = scales.half()
        save(tensors, layer + 1)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator).half()
    rest = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone(),
            "model.norm.weight": torch.ones(HIDDEN, dtype=torch.float16)}  # fmt: skip
    save(rest, layers + 1)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP,
                                "zero_point": True, "version": "gemm"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_through(folder: Path) -> float:
    """Read every file once; seconds. Also what puts the input into the page cache."""
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass
    return time.perf_counter() - started


def write_plain(path: Path, nbytes: int) -> float:
    """Write as many bytes as one file, and have them on the disk; seconds."""
    data = os.urandom(CHUNK)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // CHUNK):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def once(source: Path, to: str, out: Path) -> dict[str, Any]:
    """One conversion in a process of its own."""
    command = [sys.executable, "-c", CHILD, str(source), to, str(out)]
    environment = {"GOMP_SPINCOUNT": "10000", **os.environ}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    shutil.rmtree(out)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Make the model, convert it in turns, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", nargs="+", default=["compressed-tensors", "gptq_v2"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Where to work (default: a temporary one).")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source = Path(scratch) / "awq"
        source.mkdir()
        nbytes = awq_model(source, options.layers)
        print(f"input of {nbytes / 1e9:.2f} GB written", file=sys.stderr)
        runs: dict[str, list[dict[str, Any]]] = {to: [] for to in options.to}
        reads, writes = [], []
        for _ in range(options.rounds):
            for to in options.to:
                reads.append(read_through(source))
                runs[to].append(once(source, to, Path(scratch) / "out"))
                print(f"{to}: {nbytes / 1e6 / runs[to][-1]['seconds']:.0f} MB/s", file=sys.stderr)
            writes.append(write_plain(Path(scratch) / "plain", nbytes))
    rates = {to: [nbytes / 1e6 / run["seconds"] for run in found] for to, found in runs.items()}
    finish(
        "convert-speed",
        {
            "input_bytes": nbytes,
            "layers": options.layers,
            "read_mb_per_s": round(nbytes / 1e6 / median(reads)),
            "plain_write_mb_per_s": round(nbytes / 1e6 / median(writes)),
            "targets": {
                to: {
                    "mb_per_s": round(median(rates[to])),
                    "spread": [round(min(rates[to])), round(max(rates[to]))],
                    "peak_rss_anon_mb": round(max(run["peak"] for run in runs[to]) / 1e6),
                    "base_rss_anon_mb": round(max(run["base"] for run in runs[to]) / 1e6),
                    "exact": runs[to][0]["exact"],
                    "lossy": runs[to][0]["lossy"],
                }
                for to in options.to
            },
        },
    )


if __name__ == "__main__":
    main()
