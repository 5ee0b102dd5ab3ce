"""The instruction sets of one build beside each other, on one thread and in turns.

    python benchmarks/cpu_sets.py [--sets avx512-vnni,avx2-vnni,avx2] [--rounds 7] [--rows 1,512]
                                  [--shape 2048x2048] [--seconds 0.05]

W4A8 and W4A16 in groups of 64 and 128, W8A8 per channel. M = 1 in GB/s of packed bytes, weights
rotated past four times the L3 cache, beside the read bandwidth measured in the same turns; more
rows in GMAC/s beside the set's own peak from registers. The clock is the thread's CPU time. Then
each set's time over the first one's, median, lowest and highest round. For the emulated sets:
`make emulated`, then .sanitize/emulated/bin/python benchmarks/cpu_sets.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch

from cpu_gemm import BURN_ROUNDS, ratio, rotated
from weightpath.bench.timing import in_turns
from weightpath.device.probe import probe
from weightpath.kernels import cpu
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

CASES = ((4, 64, 8), (4, 128, 8), (4, 64, 16), (8, -1, 8))
"""Weight bits, group size (-1: per channel) and activation bits."""


def measure(
    a: argparse.Namespace, sets: list[str], case: tuple[int, int, int], m: int, memory: torch.Tensor
) -> list[dict[str, Any]]:
    """Rows of the table for one case and M."""
    n, k = (int(size) for size in a.shape.split("x"))
    bits, group_size, activation_bits = case
    module, draw = cpu.extension(), torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=draw)
    groups = 1 if group_size < 0 else k // group_size
    scales = (torch.rand(n, groups, generator=draw) * 0.01).to(torch.bfloat16)
    scheme = Scheme(bits) if group_size < 0 else Scheme(bits, group_size)
    qweight = QWeight(scheme, codes, scales)
    x = torch.randn(m, k, generator=draw).to(torch.bfloat16)
    weights = rotated(lambda: cpu.pack(qweight), n * k * bits // 8, memory.numel() if m == 1 else 1)
    calls: dict[str, Any] = {
        name: lambda name=name: cpu.linear(
            x, weights(), activation_bits=activation_bits, instruction_set=name
        )
        for name in sets
    }
    if m == 1:
        calls["read"] = lambda: module.read_all(memory.data_ptr(), memory.numel(), 1)
    else:
        for name in sets:
            calls["peak " + name] = lambda name=name: module.burn(name, BURN_ROUNDS, 1)
    times = in_turns(calls, a.rounds, warmup=2, minimum_seconds=a.seconds, clock=time.thread_time)
    rows = []
    for name in sets:
        if m == 1:
            work, limit = weights().packed.numel(), memory.numel() / times["read"].median
        else:
            done = module.burn(name, 1, 1) * BURN_ROUNDS
            work, limit = m * n * k, done / times["peak " + name].median
        rate = work / times[name].median
        row = {"set": name, "bits": bits, "group_size": group_size, "m": m,
               "activation_bits": activation_bits, "rate": rate / 1e9, "limit": limit / 1e9,
               "over_first": ratio(times[name], times[sets[0]])}  # fmt: skip
        over = row["over_first"]
        print(
            f"M={m:<4} W{bits}A{activation_bits} g{group_size:<4} {name:12} {rate / 1e9:6.1f} "
            f"{'GB/s' if m == 1 else 'GMAC/s'}, {rate / limit:4.0%} of {limit / 1e9:.0f}; time "
            f"over {sets[0]}'s {over[0]:.2f} ({over[1]:.2f} to {over[2]:.2f})",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", default="avx512-vnni,avx2-vnni,avx2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="1,512")
    parser.add_argument("--shape", default="2048x2048")
    parser.add_argument("--seconds", type=float, default=0.05, help="least time of a sample")
    a = parser.parse_args()
    torch.set_num_threads(1)
    known = cpu.instruction_sets()
    sets = [name for name in a.sets.split(",") if known.get(name, "unknown") is None]
    print(f"{cpu.extension().__file__}: {known}, load {os.getloadavg()[0]:.1f}")
    memory = cpu.fresh_memory(max(128 << 20, 4 * probe().l3_cache)).fill_(1)
    rows = []
    for m in (int(m) for m in a.rows.split(",")):
        for case in CASES:
            rows += measure(a, sets, case, m, memory)
    print(json.dumps({"kind": "cpu-sets", "shape": a.shape, "rows": rows}))


if __name__ == "__main__":
    main()
