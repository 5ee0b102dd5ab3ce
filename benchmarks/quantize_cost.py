"""Quantizing time and peak RssAnon, the clip search on and off, in a process of its own each time.

    python benchmarks/quantize_cost.py [--rounds 3] [--wide]

Models: the demo, pycode-42m, and with --wide a random model of the 1B shape (hidden 2048,
intermediate 8192, 16 layers, vocabulary 49152; 2 GB of bf16), written to a temporary folder. The
bound beside each peak is the project's own: the interpreter with torch loaded, plus 400 MB, plus
the three largest tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import finish, shared
from weightpath.checkpoints.locate import open_model

CHILD = """
import json, sys, time
from pathlib import Path
import torch, transformers
from weightpath.device.memory import PeakMemory, rss_anon
base = rss_anon()
from weightpath.checkpoints.locate import open_model
from weightpath.jobs.plan import plan_scheme
from weightpath.jobs.quantize import Recipe, quantize_checkpoint
from weightpath.scheme import Scheme
model, scheme, folder, search = sys.argv[1:5]
checkpoint = open_model(model)
plan = plan_scheme(model, checkpoint, Scheme.parse(scheme))
started = time.perf_counter()
with PeakMemory() as memory:
    quantize_checkpoint(checkpoint, plan.tensors, Path(folder), Recipe("x", "0", search=search == "1"))
print(json.dumps({"seconds": time.perf_counter() - started, "base": base, "peak": memory.peak}))
"""


def once(model: str, scheme: str, search: bool) -> dict[str, float]:
    """Seconds, RssAnon with torch loaded, and the peak, of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", CHILD, model, scheme, f"{scratch}/out", str(int(search))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def wide_model(folder: Path) -> str:
    """Random weights of the 1B shape, bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=49152, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
    return str(folder)


def measure(name: str, model: str, rounds: int) -> list[dict[str, Any]]:
    """One row a scheme and search, in turns over the rounds."""
    checkpoint = open_model(model)
    sizes = sorted((info.nbytes for info in checkpoint.tensors.values()), reverse=True)
    total, largest = sum(sizes), sum(sizes[:3])
    cases = [("int8", True), ("w4g64", True), ("w4g64", False), ("w4g64-asym", True)]
    samples: dict[tuple[str, bool], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            samples[case].append(once(model, *case))
    found = []
    for (scheme, search), runs in samples.items():
        seconds = [run["seconds"] for run in runs]
        peak = max(run["peak"] - run["base"] for run in runs)
        found.append({
            "model": name, "scheme": scheme, "range": "searched" if search else "min-max",
            "source_bytes": total, "seconds": median(seconds), "seconds_low": min(seconds),
            "seconds_high": max(seconds), "megabytes_per_second": total / median(seconds) / 1e6,
            "peak_over_base": peak, "bound": largest + 400_000_000, "rounds": rounds,
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    rows = measure("pycode-42m", str(shared("models/pycode-42m")), options.rounds)
    rows += measure("demo", "demo", options.rounds)
    if options.wide:
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure("1B shape, random", wide_model(Path(scratch) / "wide"), 1)
    print(
        "| model | scheme | range | seconds (spread) | MB/s of source | peak RssAnon over base | bound |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['scheme']} | {row['range']} | {row['seconds']:.1f} "
            f"({row['seconds_low']:.1f} to {row['seconds_high']:.1f}) | {row['megabytes_per_second']:.0f} "
            f"| {row['peak_over_base'] / 1e6:.0f} MB | {row['bound'] / 1e6:.0f} MB |"
        )
    finish("quantize-cost", {"rows": rows})


if __name__ == "__main__":
    main()
