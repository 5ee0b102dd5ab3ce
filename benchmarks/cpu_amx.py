"""AMX and AVX-512 VNNI on one machine: its limits, few rows, many rows, and where one passes the other.

    python benchmarks/cpu_amx.py [--threads 16] [--seconds 0.02] [--rounds 5] [--memory 1000]
                                 [--part limits,few,many,switch]

limits  read bandwidth by number of threads over twice the rotated memory; int8 peaks from registers
few     M = 1: W4A8 and W4A16 as a share of the read bandwidth measured beside them
many    M = 512: this package on AMX and on VNNI, torch's bf16 linear, and the same with the weight
        laid out beforehand for oneDNN
switch  M = 1 to 64: VNNI's time over AMX's, W4A8 and W4A16

Weights rotate through copies of --memory MB in all, past the L3 cache. Wall time, in turns; median,
lowest and highest round. Writes results/cpu-amx.json and ends with it as one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common import finish
from gemm_products import rotated
from weightpath.bench.timing import in_turns
from weightpath.kernels import cpu
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

SHAPES = ((8192, 2048), (2048, 8192), (4096, 4096))
GROUP_SIZES = (64, 128)
SETS = ("amx-int8", "avx512-vnni")
ROWS = (1, 4, 8, 12, 16, 17, 20, 24, 32, 48, 64)


def a_weight(n: int, k: int, group_size: int) -> tuple[QWeight, Tensor]:
    """Random codes with bf16 scales, and a bf16 weight of the same shape."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(n, k // group_size, generator=draw) * 0.01).to(torch.bfloat16)
    weight = torch.randn(n, k, generator=draw).to(torch.bfloat16)
    return QWeight(Scheme(4, group_size), codes, scales), weight


def prepacked(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """torch's bf16 linear with the weight in oneDNN's own layout for so many rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def report(calls: dict[str, Any], a: argparse.Namespace) -> dict[str, Any]:
    return in_turns(calls, a.rounds, warmup=2, minimum_seconds=a.seconds)


def limits(a: argparse.Namespace) -> list[dict[str, Any]]:
    module, rows = cpu.extension(), []
    memory = cpu.fresh_memory(2 * a.memory * 10**6).fill_(1)
    counts = [2**i for i in range(a.threads.bit_length()) if 2**i < a.threads]
    for count in [*counts, a.threads]:
        read = report(
            {"read": lambda count=count: module.read_all(memory.data_ptr(), memory.numel(), count)},
            a,
        )
        row: dict[str, Any] = {"threads": count}
        row["read GB/s"] = memory.numel() / read["read"].median / 1e9
        for name in SETS:
            if cpu.instruction_sets()[name] is None:
                done = module.burn(name, 100_000, count)
                time = report(
                    {name: lambda name=name, count=count: module.burn(name, 100_000, count)}, a
                )[name]
                row[f"{name} TOP/s"] = 2 * done / time.median / 1e12
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        rows.append(row)
    return rows


def few(a: argparse.Namespace, n: int, k: int, size: int, weights: Callable[[], Any]) -> list[dict]:
    module, rows = cpu.extension(), []
    x = torch.randn(1, k).to(torch.bfloat16)
    memory = cpu.fresh_memory(a.memory * 10**6).fill_(1)
    calls = {
        "W4A8": lambda: cpu.linear(x, weights(), activation_bits=8),
        "W4A16": lambda: cpu.linear(x, weights(), activation_bits=16),
        "read": lambda: module.read_all(memory.data_ptr(), memory.numel(), a.threads),
    }
    times = report(calls, a)
    limit = memory.numel() / times["read"].median / 1e9
    for name in ("W4A8", "W4A16"):
        each = weights().packed.numel() / 1e9
        median, low, high = (
            each / t for t in (times[name].median, times[name].high, times[name].low)
        )
        print(
            f"{n}x{k} g{size} M=1 {name}: {median:.1f} GB/s ({low:.1f} to {high:.1f}), "
            f"{median / limit:.0%} of {limit:.1f}, {times[name].median * 1e6:.0f} us",
            flush=True,
        )
        rows.append(
            {"shape": [n, k], "group_size": size, "name": name, "GB/s": [median, low, high],
             "read GB/s": limit}
        )  # fmt: skip
    return rows


def many(
    a: argparse.Namespace, n: int, k: int, size: int, weights: Callable[[], Any], weight: Tensor
) -> list[dict]:
    m, rows = 512, []
    x = torch.randn(m, k).to(torch.bfloat16)
    bf16 = rotated(weight.clone, 2 * n * k, a.memory * 10**6)
    laid_out = rotated(lambda: prepacked(weight, m), 2 * n * k, a.memory * 10**6)
    calls: dict[str, Callable[[], Any]] = {
        "torch bf16": lambda: torch.nn.functional.linear(x, bf16()),
        "torch bf16 prepacked": lambda: laid_out()(x),
    }
    for name in SETS:
        if cpu.instruction_sets()[name] is not None:
            continue
        for bits in (8, 16):
            calls[f"W4A{bits} {name}"] = lambda bits=bits, name=name: cpu.linear(
                x, weights(), activation_bits=bits, instruction_set=name
            )
    times = report(calls, a)
    for name, time in times.items():
        rate, low, high = (2e-12 * m * n * k / t for t in (time.median, time.high, time.low))
        beside = {
            other: sorted(s / t for s, t in zip(times[other].samples, time.samples, strict=True))
            for other in ("torch bf16", "torch bf16 prepacked")
        }
        print(
            f"{n}x{k} g{size} M={m} {name}: {rate:.2f} TOP/s ({low:.2f} to {high:.2f}), "
            + ", ".join(f"{r[len(r) // 2]:.2f}x {other}" for other, r in beside.items()),
            flush=True,
        )
        rows.append(
            {"shape": [n, k], "group_size": size, "name": name, "TOP/s": [rate, low, high],
             "beside": beside}
        )  # fmt: skip
    return rows


def switch(
    a: argparse.Namespace, n: int, k: int, size: int, weights: Callable[[], Any]
) -> list[dict]:
    rows = []
    for bits in (8, 16):
        shown = []
        for m in ROWS:
            x = torch.randn(m, k).to(torch.bfloat16)
            calls = {
                name: (
                    lambda name=name, x=x, bits=bits: cpu.linear(
                        x,
                        weights(),
                        activation_bits=bits,
                        instruction_set=name,
                    )
                )
                for name in SETS
            }
            times = report(calls, a)
            amx, vnni = (times[name] for name in SETS)
            ratios = sorted(v / t for v, t in zip(vnni.samples, amx.samples, strict=True))
            shown.append(f"{m}: {ratios[len(ratios) // 2]:.2f} ({amx.median * 1e6:.0f} us)")
            rows.append(
                {"shape": [n, k], "group_size": size, "activation_bits": bits, "m": m,
                 "amx_us": amx.median * 1e6, "vnni_us": vnni.median * 1e6, "ratios": ratios}
            )  # fmt: skip
        print(f"{n}x{k} g{size} W4A{bits} VNNI/AMX by M  " + "  ".join(shown), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="least time of a sample")
    parser.add_argument("--memory", type=int, default=1000, help="MB that weights rotate through")
    parser.add_argument("--part", default="limits,few,many,switch")
    parser.add_argument("--only", help="one shape, such as 4096x4096")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    print(
        f"instruction sets {cpu.instruction_sets()}, {a.threads} threads, torch {torch.__version__}"
    )
    parts = a.part.split(",")
    body: dict[str, Any] = {part: [] for part in parts}
    if "limits" in parts:
        body["limits"] = limits(a)
    for n, k in SHAPES:
        if a.only and a.only != f"{n}x{k}":
            continue
        for size in GROUP_SIZES:
            qweight, weight = a_weight(n, k, size)
            weights = rotated(lambda q=qweight: cpu.pack(q), n * k // 2, a.memory * 10**6)
            if "few" in parts:
                body["few"] += few(a, n, k, size, weights)
            if "many" in parts:
                body["many"] += many(a, n, k, size, weights, weight)
            if "switch" in parts and all(cpu.instruction_sets()[name] is None for name in SETS):
                body["switch"] += switch(a, n, k, size, weights)
    finish("cpu-amx", {"threads": a.threads, "torch": torch.__version__, **body})


if __name__ == "__main__":
    main()
