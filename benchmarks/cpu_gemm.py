"""Products of 4-bit and 8-bit weights on the CPU beside the machine's limits and other runtimes.

    python benchmarks/cpu_gemm.py [--threads 1] [--rounds 7] [--seconds 0.05] [--only 4096x4096]
                                  [--part table,ladder,packing] [--peers FOLDER] [--write]

table    M = 1 and M = 512: everything in gemm_products.py, with read bandwidth over memory of the
         same kind (M = 1) or the int8 peak from registers, of the set that runs (M = 512)
ladder   M from 1 to 64, and the numbers of rows that would be faster as others (gemm_ladder.py)
packing  GB/s of kernels.cpu.pack at one thread and at all of them (gemm_packing.py)

Shapes (N, K), 4-bit groups of 64 and 128 with bf16 scales, and int8 per channel (beside groups of
64). Every weight is rotated through copies that together pass four times the L3 cache. Within a
part everything at one shape is measured in turns, in one run: median, lowest and highest round.
ONNX Runtime has its turns in a process of its own (.venv-ort under --peers, made by
tests/interop/install_peer.py); where it is not installed one line says so.

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
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import gemm_ladder
import gemm_packing
from common import REPOSITORY, finish
from gemm_products import OURS, Products, eight_bit, four_bit, of_a_kind
from peer_process import PeerProcess, absent, peer_python
from weightpath.bench.timing import Timing, ratio, sample_in_turns, sampler
from weightpath.device.probe import probe
from weightpath.kernels import cpu

SHAPES = ((8192, 2048), (2048, 8192), (2048, 2048), (4096, 4096))
GROUP_SIZES = (64, 128)
LADDER = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64, 65)
LADDER_OTHERS = {"torch int4", "ORT int4"}
LADDER_OF_OTHERS = (1, 4, 8, 16, 32, 64)
BURN_ROUNDS = 20_000


def samples(
    arguments: argparse.Namespace,
    products: Iterable[Products],
    rows: Iterable[int],
    peer: PeerProcess | None,
    wanted: Callable[[str, int], bool],
    limits: dict[str, Callable[[], Any]] | None = None,
) -> dict[tuple[str, int], Timing]:
    """Seconds a call of everything wanted, by name and number of rows, in turns."""
    single = arguments.threads == 1
    size = {
        "minimum_seconds": arguments.seconds,
        "clock": time.thread_time if single else time.perf_counter,
    }
    each = {(name, 0): sampler(call, 2, **size) for name, call in (limits or {}).items()}
    for m in rows:
        for held in products:
            x = torch.randn(m, held.k, generator=torch.Generator().manual_seed(m))
            x = x.to(torch.bfloat16)
            for name, call in held.calls.items():
                if wanted(name, m):
                    each[name, m] = sampler(lambda call=call, x=x: call(x), 2, **size)
            for name in held.levels:
                if peer and wanted(name, m):
                    clock = "thread" if single else "wall"
                    each[name, m] = peer.sampler(
                        arguments.seconds, do="time", name=name, rows=m, clock=clock
                    )
    names = {str(key): key for key in each}
    found = sample_in_turns({text: each[key] for text, key in names.items()}, arguments.rounds)
    return {key: Timing.of(found[text]) for text, key in names.items()}


def table(
    arguments: argparse.Namespace, products: list[Products], m: int, peer: PeerProcess | None
) -> list[dict[str, Any]]:
    """Rows of the table for one shape, group size and M."""
    module, threads, memory = cpu.extension(), arguments.threads, arguments.memory
    if m == 1:
        limit_call = lambda: module.read_all(memory.data_ptr(), memory.numel(), threads)  # noqa: E731
    else:
        limit_call = lambda: module.burn("", BURN_ROUNDS, threads)  # noqa: E731
    times = samples(arguments, products, [m], peer, lambda name, rows: True, {"limit": limit_call})
    bound = times.pop(("limit", 0)).median
    if m == 1:
        limit, unit = memory.numel() / bound / 1e9, "GB/s"
    else:
        limit, unit = 2 * module.burn("", 1, threads) * BURN_ROUNDS / bound / 1e12, "TOP/s"
    rows = []
    for held in products:
        for name in (*held.calls, *held.levels):
            if (name, m) not in times:
                continue
            timing = times[name, m]
            work = held.weight_bytes(name) / 1e9 if m == 1 else 2e-12 * m * held.n * held.k
            low, middle, high = (work / t for t in (timing.high, timing.median, timing.low))
            beside = {
                other: _ratio(theirs, timing)
                for (other, _), theirs in times.items()
                if name in OURS and other not in OURS and of_a_kind(name, other)
            }
            rows.append(
                {
                    "shape": [held.n, held.k],
                    "group_size": products[0].group_size,
                    "m": m,
                    "name": name,
                    "microseconds": timing.median * 1e6,
                    "rate": middle,
                    "low": low,
                    "high": high,
                    "unit": unit,
                    "limit": limit,
                    "beside": beside,
                }
            )
            show(rows[-1])
    return rows


def _ratio(theirs: Timing, ours: Timing) -> list[float]:
    """How many times faster ours is: median, lowest and highest round."""
    found = ratio(theirs, ours)
    return [found.median, found.low, found.high]


def show(row: dict[str, Any]) -> None:
    """One line; how many times faster than whom only for our own."""
    n, k = row["shape"]
    beside = "  ".join(f"{value[0]:.2f}x {name}" for name, value in row["beside"].items())
    print(
        f"{n:5}x{k:<5} g{row['group_size']:<4} M={row['m']:<4} {row['name']:15} "
        f"{row['microseconds']:9.0f} us  {row['rate']:7.3f} "
        f"({row['low']:.3f} to {row['high']:.3f}) "
        f"{row['unit']:6} {row['rate'] / row['limit']:5.0%} of {row['limit']:.2f}  {beside}",
        flush=True,
    )


def ladder(
    arguments: argparse.Namespace, products: list[Products], peer: PeerProcess | None
) -> dict[str, Any]:
    """Times from few rows to many at one shape and group size, and the cliffs of ours."""
    ours = set(OURS) - {"W4A8 per group"}
    times = samples(
        arguments,
        products,
        arguments.ladder,
        peer,
        lambda name, m: name in ours or (name in LADDER_OTHERS and m in LADDER_OF_OTHERS),
    )
    by_name: dict[str, dict[int, Timing]] = {}
    for (name, m), timing in times.items():
        by_name.setdefault(name, {})[m] = timing
    first = products[0]
    gemm_ladder.show(f"{first.n}x{first.k} g{first.group_size}", by_name)
    found = [
        one for name in by_name if name in ours for one in gemm_ladder.cliffs(name, by_name[name])
    ]
    for one in found:
        print(one)
    if not found:
        print("no cliffs: no number of rows from 4 to 64 is slower than as its better neighbour")
    shape = {"shape": [first.n, first.k], "group_size": first.group_size}
    return {**shape, **gemm_ladder.record(by_name, found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="least time of a sample")
    parser.add_argument("--only", help="one shape, such as 4096x4096")
    parser.add_argument("--groups", type=_numbers, default=GROUP_SIZES, help="such as 64,128")
    parser.add_argument("--rows", type=_numbers, default=(1, 512), help="values of M in the table")
    parser.add_argument("--ladder", type=_numbers, default=LADDER, help="values of M in the ladder")
    parser.add_argument("--part", default="table,ladder,packing")
    parser.add_argument("--peers", type=Path, default=REPOSITORY, help="where .venv-ort lies")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    past = max(128 << 20, 4 * probe().l3_cache)
    arguments.memory = cpu.fresh_memory(past).fill_(1)
    python = peer_python("ort", arguments.peers)
    print(
        f"instruction set {cpu.chosen_instruction_set()}, {arguments.threads} threads, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.1f} before"
    )
    body: dict[str, Any] = {
        "instruction_set": cpu.chosen_instruction_set(),
        "threads": arguments.threads,
        "rows": [],
        "ladder": [],
        "packing": [],
    }
    with PeerProcess(python, "ort_worker.py") if python else nullcontext() as peer:
        if peer:
            body.update(peer.ask(do="versions"))
            print(f"ONNX Runtime {body['onnxruntime']}")
        else:
            print(absent("ort", "ONNX Runtime"))
        for n, k in SHAPES:
            if arguments.only in (None, f"{n}x{k}"):
                one_shape(arguments, n, k, past, peer, body)
    body["load_after"] = os.getloadavg()[0]
    if arguments.write:
        finish(f"cpu-gemm-{arguments.threads}", body)
    else:
        print(json.dumps({"kind": "cpu-gemm", **body}))


def one_shape(
    arguments: argparse.Namespace,
    n: int,
    k: int,
    past: int,
    peer: PeerProcess | None,
    body: dict[str, Any],
) -> None:
    """Every part at one shape, into the body's lists."""
    parts = arguments.part.split(",")
    for number, group_size in enumerate(arguments.groups if parts != ["packing"] else ()):
        products = [four_bit(n, k, group_size, past)]
        if number == 0:
            products.append(eight_bit(n, k, past))
        if peer:
            for name, error in products[0].hold_in(peer, arguments.threads).items():
                print(f"{n}x{k} g{group_size} {name}: mean error {error:.2e} of the mean |y|")
        if "table" in parts:
            for m in arguments.rows:
                body["rows"] += table(arguments, products, m, peer)
        if "ladder" in parts:
            body["ladder"].append(ladder(arguments, products, peer))
        if peer:
            peer.ask(do="drop")
    if "packing" in parts:
        for group_size in arguments.groups:
            body["packing"] += gemm_packing.measure(
                n, k, group_size, arguments.threads, arguments.rounds, arguments.seconds
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
