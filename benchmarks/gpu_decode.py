"""Decode on the graph engine: an 8B-shaped random Llama in bf16, int8 and 4 bits, in turns in one run.

    python benchmarks/gpu_decode.py [--batches 1,16,64] [--context 512] [--layers 32] [--rounds 9]
                                    [--head int8] [--overlap] [--tiny] [--json OUT] [--write]

Weights are drawn on the device as packed codes and scales, layer by layer; the head is int8 beside
int8 and 4-bit linears, the embedding one table for all. With --overlap each runs a second time, its
kernels started while others end. A sample is STEPS replays of the captured step from `context`
cached positions on, each feeding the next. The limit is the bytes that a step reads (weights, cached
keys and values, embedding rows) over the read bandwidth measured in this run. Beside each step its
products alone are timed, and a profile of one replay by kernel follows each batch. --tiny: small
shapes, on the CPU too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gpu_models
from common import finish
from gpu_models import SHAPES, Shape
from gpu_profile import products_only, profile_of, show_profile
from weightpath.bench.timing import Timing, ratio, sample_in_turns
from weightpath.engine.graph import GraphModel

STEPS = 16
READ_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}


@dataclass(frozen=True)
class Machine:
    """What is measured on. read_bandwidth: bytes a second of a sum over a large buffer."""

    device: torch.device
    name: str
    read_bandwidth: float


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Wall time of a call: between events on CUDA, by the clock elsewhere."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second: the fastest of five sums over a buffer far beyond the caches."""
    buffer = torch.ones(READ_BYTES[device.type] // 4, device=device)
    buffer.sum()
    found = min(seconds(device, buffer.sum) for _ in range(5))
    return buffer.numel() * 4 / found


def bytes_of_step(model: GraphModel, batch: int, context: int) -> dict[str, int]:
    """What one step reads: weights once; cached keys and values, and an embedding row, a sequence."""
    weights, shape = model.weights, model.weights.attention
    modules = [module for layer in weights.layers for module in gpu_models.linears(layer)]
    linears = sum(gpu_models.stored(module) for module in [*modules, weights.head])
    row = weights.table.element_size()
    held = context + STEPS // 2
    cached = batch * held * len(weights.layers) * 2 * shape.kv_heads * shape.head_dim * row
    return {"weights": linears, "cache": cached, "embedding": batch * weights.table.shape[1] * row}


def one_batch(
    models: dict[str, GraphModel], machine: Machine, batch: int, context: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for every model at one batch: times, their limit and the profile."""
    first = next(iter(models.values()))
    capacity = context + STEPS + 1
    caches = [first.cache(capacity).normal_() for _ in range(batch)]
    tokens = list(range(1, batch + 1))

    def sampler(model: GraphModel) -> Callable[[], float]:
        runner = model.runner(batch)  # captured here

        def replays() -> None:
            for _ in range(STEPS):
                runner.run()

        def sample() -> float:
            runner.load(tokens, [context] * batch, caches)
            return seconds(machine.device, replays) / STEPS

        sample()
        if bool(runner.bad.any()):
            raise SystemExit("logits are not finite: the random weights are drawn too wide")
        return sample

    bare = {name: products_only(model, batch) for name, model in models.items() if "+" not in name}
    measured = models | {f"{name} products": model for name, model in bare.items()}
    samples = sample_in_turns({name: sampler(model) for name, model in measured.items()}, rounds)
    times = {name: Timing.of(values) for name, values in samples.items()}
    rows = []
    for name, model in models.items():
        sizes = bytes_of_step(model, batch, context)
        limit = sum(sizes.values()) / machine.read_bandwidth
        found = times[name]
        faster = ratio(times["bf16"], found)
        runner = model.runner(batch)
        runner.load(tokens, [context] * batch, caches)
        row = {
            "weights": name, "batch": batch, "context": context,
            "ms": [found.median * 1e3, found.low * 1e3, found.high * 1e3],
            "tokens_per_s": batch / found.median,
            "bytes": sizes, "limit_ms": limit * 1e3, "of_limit": limit / found.median,
            "faster_than_bf16": [faster.median, faster.low, faster.high],
            "products_ms": times[f"{name.split('+')[0]} products"].median * 1e3,
            "profile": profile_of(runner.run, machine.device),
        }  # fmt: skip
        rows.append(row)
        print(
            f"batch {batch:3} {name:12} {row['ms'][0]:7.3f} ms ({row['ms'][1]:.3f} to "
            f"{row['ms'][2]:.3f})  {row['tokens_per_s']:8.0f} tokens/s  limit {row['limit_ms']:.3f} ms, "
            f"{row['of_limit']:.0%} of it  products alone {row['products_ms']:.3f} ms  bf16 / it {faster}",
            flush=True,
        )
    for row in rows:
        show_profile(f"batch {batch} {row['weights']}", row["ms"][0] * 1e3, row["profile"])
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole run's body."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        raise SystemExit("needs a CUDA device; --tiny runs small shapes on the CPU")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    machine = Machine(device, name, read_bandwidth(device))
    shape: Shape = SHAPES["tiny" if arguments.tiny else "8b"]
    layers = arguments.layers or shape.layers
    print(
        f"{name}, torch {torch.__version__}, read {machine.read_bandwidth / 1e12:.2f} TB/s; "
        f"{layers} layers, context {arguments.context}, head {arguments.head}"
    )
    table = gpu_models.table_of(shape, device)
    models: dict[str, GraphModel] = {}
    for kind in arguments.weights.split(","):
        weights = gpu_models.random_weights(shape, kind, arguments.head, layers, table)
        models[kind] = GraphModel(weights, overlap=False)
        if arguments.overlap:
            models[f"{kind}+overlap"] = GraphModel(weights, overlap=True)
    for kind, model in models.items():
        print(f"{kind}: {bytes_of_step(model, 1, 0)['weights'] / 1e9:.2f} GB of weights a step")
    rows = []
    for batch in (int(part) for part in arguments.batches.split(",")):
        rows += one_batch(models, machine, batch, arguments.context, arguments.rounds)
    return {
        "gpu": name, "torch": torch.__version__, "layers": layers, "head": arguments.head,
        "captured": device.type == "cuda", "shape": vars(shape),
        "read_gb_per_s": machine.read_bandwidth / 1e9, "steps": STEPS, "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", default="1,16,64", help="sequences a step")
    parser.add_argument("--context", type=int, default=512, help="cached positions of each")
    parser.add_argument("--layers", type=int, help="fewer than the shape's, for a quick look")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--weights", default="bf16,int8,w4", help="bf16 first; others beside it")
    parser.add_argument("--head", default="int8", choices=("int8", "w4", "bf16"))
    parser.add_argument(
        "--overlap", action="store_true", help="each with programmatic dependent launch too"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the result to a file of its own")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    arguments = parser.parse_args()
    if not arguments.weights.startswith("bf16"):
        parser.error("--weights begins with bf16, which the others are compared with")
    with torch.inference_mode():
        body = measure(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"kind": "gpu-decode", **body}, indent=1) + "\n")
    if arguments.write:
        finish("gpu-decode", body)
    else:
        print(json.dumps({"kind": "gpu-decode", **body}))


if __name__ == "__main__":
    main()
