"""Products of 4-bit and 8-bit weights on the CPU beside the machine's limits and torch's own.

    python benchmarks/cpu_gemm.py [--threads 1] [--rounds 7] [--seconds 0.05] [--only 4096x4096]
                                  [--write]

Shapes (N, K) of M = 1 and M = 512, 4-bit groups of 64 and 128 with bf16 scales, and int8 per
channel. Every weight is rotated through copies that together pass four times the L3 cache. In one
run, in turns: read bandwidth over memory of the same kind, the int8 peak from registers, this
package's W4A8, W4A8 with a scale a group, W4A16, W8A8 and W8A16, torch's 4-bit operator and its
bf16 linear, each with its median, lowest and highest round.

With several threads run it under GOMP_SPINCOUNT=10000, or torch's own threads spin on beside ours.
With one thread the clock is that thread's CPU time, so that a neighbour on the core costs nothing
(on the memory it still does); with more it is the wall's. --write keeps the result in
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common import finish
from weightpath.bench.timing import Timing, in_turns
from weightpath.device.probe import probe
from weightpath.kernels import cpu
from weightpath.layouts import tinygemm
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SHAPES = ((8192, 2048), (2048, 8192), (2048, 2048), (4096, 4096))
GROUP_SIZES = (64, 128)
BURN_ROUNDS = 20_000


def rotated(make: Callable[[], Any], bytes_each: int, bytes_wanted: int) -> Callable[[], Any]:
    """A function that gives one copy after another, of enough copies to pass the caches."""
    copies = [make() for _ in range(max(2, -(-bytes_wanted // bytes_each)))]
    turn = iter(())

    def following() -> Any:
        nonlocal turn
        for copy in turn:
            return copy
        turn = iter(copies)
        return next(turn)

    return following


def products(n: int, k: int, group_size: int, m: int, past: int) -> dict[str, Callable[[], Any]]:
    """Everything that is compared at one shape: name to a call."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(n, k // group_size, generator=draw) * 0.01).to(torch.bfloat16)
    qweight = QWeight(Scheme(4, group_size), codes, scales)
    x = torch.randn(m, k, generator=draw).to(torch.bfloat16)
    if m > 1:
        past = 1  # its weights stay in the cache for many rows anyway
    ours = rotated(lambda: cpu.pack(qweight), n * k // 2, past)
    calls: dict[str, Callable[[], Any]] = {
        "W4A8": lambda: cpu.linear(x, ours(), activation_bits=8),
        "W4A8 per group": lambda: cpu.linear(x, ours(), activation_bits=8, per_group=True),
        "W4A16": lambda: cpu.linear(x, ours(), activation_bits=16),
    }
    layout = tinygemm.detect_layout()
    packed = tinygemm.from_qweight(qweight, layout)
    torch_int4 = rotated(lambda: packed.packed.clone(), n * k // 2, past)
    calls["torch int4"] = lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, torch_int4(), group_size, packed.scales_and_zeros
    )
    if group_size == GROUP_SIZES[0]:
        weight = torch.randn(n, k, generator=draw).to(torch.bfloat16)
        bf16 = rotated(weight.clone, 2 * n * k, past)
        calls["torch bf16"] = lambda: torch.nn.functional.linear(x, bf16())
        eight = QWeight(Scheme(8), codes, torch.rand(n, 1, generator=draw))
        int8 = rotated(lambda: cpu.pack(eight), n * k, past)
        calls["W8A8"] = lambda: cpu.linear(x, int8(), activation_bits=8)
        calls["W8A16"] = lambda: cpu.linear(x, int8(), activation_bits=16)
    return calls


def weight_bytes(name: str, n: int, k: int, group_size: int) -> float:
    """Bytes of weight that one call reads."""
    if name == "torch bf16":
        return 2 * n * k
    if name.startswith("W8"):
        return n * k + 4 * n
    scale_bytes = 4 if name == "torch int4" else 2
    return n * k / 2 + scale_bytes * n * k / group_size


def measure(
    arguments: argparse.Namespace, memory: Tensor, n: int, k: int, group_size: int, m: int
) -> list[dict[str, Any]]:
    """Rows of the table for one shape."""
    threads = torch.get_num_threads()
    module = cpu.extension()
    calls = products(n, k, group_size, m, arguments.past)
    if m == 1:
        calls["read"] = lambda: module.read_all(memory.data_ptr(), memory.numel(), threads)
    else:
        calls["peak"] = lambda: module.burn("", BURN_ROUNDS, threads)
    times = in_turns(
        calls,
        arguments.rounds,
        warmup=2,
        minimum_seconds=arguments.seconds,
        clock=time.thread_time if threads == 1 else time.perf_counter,
    )
    rows = []
    if m == 1:
        limit, unit = memory.numel() / times["read"].median / 1e9, "GB/s"
    else:
        done = module.burn("", 1, threads) * BURN_ROUNDS
        limit, unit = 2 * done / times["peak"].median / 1e12, "TOP/s"
    for name, timing in times.items():
        if name in ("read", "peak"):
            continue
        work = weight_bytes(name, n, k, group_size) / 1e9 if m == 1 else 2 * m * n * k / 1e12
        low, middle, high = (work / t for t in (timing.high, timing.median, timing.low))
        rows.append(
            {
                "shape": [n, k],
                "group_size": group_size,
                "m": m,
                "name": name,
                "microseconds": timing.median * 1e6,
                "rate": middle,
                "low": low,
                "high": high,
                "unit": unit,
                "limit": limit,
                "beside": {
                    other: ratio(times[other], timing)
                    for other in ("torch int4", "torch bf16")
                    if other in times
                },
            }
        )
    return rows


def ratio(theirs: Timing, ours: Timing) -> list[float]:
    """How many times faster ours is: median, lowest and highest round."""
    each = sorted(a / b for a, b in zip(theirs.samples, ours.samples, strict=True))
    return [each[len(each) // 2], each[0], each[-1]]


def show(row: dict[str, Any]) -> None:
    n, k = row["shape"]
    beside = "  ".join(f"{value[0]:.2f}x {name}" for name, value in row["beside"].items())
    print(
        f"{n:5}x{k:<5} g{row['group_size']:<4} M={row['m']:<4} {row['name']:15} "
        f"{row['microseconds']:9.0f} us  {row['rate']:7.3f} "
        f"({row['low']:.3f} to {row['high']:.3f}) "
        f"{row['unit']:6} {row['rate'] / row['limit']:5.0%} of {row['limit']:.2f}  {beside}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="least time of a sample")
    parser.add_argument("--only", help="one shape, such as 4096x4096")
    parser.add_argument("--rows", default="1,512", help="values of M")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.past = max(128 << 20, 4 * probe().l3_cache)
    memory = cpu.fresh_memory(arguments.past).fill_(1)
    print(
        f"instruction set {cpu.chosen_instruction_set()}, {arguments.threads} threads, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.1f} before"
    )
    rows = []
    for n, k in SHAPES:
        if arguments.only and arguments.only != f"{n}x{k}":
            continue
        for group_size in GROUP_SIZES:
            for m in (int(m) for m in arguments.rows.split(",")):
                for row in measure(arguments, memory, n, k, group_size, m):
                    show(row)
                    rows.append(row)
    body = {
        "instruction_set": cpu.chosen_instruction_set(),
        "threads": arguments.threads,
        "load_after": os.getloadavg()[0],
        "rows": rows,
    }
    if arguments.write:
        finish(f"cpu-gemm-{arguments.threads}", body)
    else:
        print(json.dumps({"kind": "cpu-gemm", **body}))


if __name__ == "__main__":
    main()
