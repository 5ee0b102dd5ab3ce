"""Speed of kernels.cpu.pack: a weight's integers to the layout that the kernels read.

In GB/s of the bf16 weight that the integers stand for, 2 N K bytes a call, memory for the result
included (fresh pages each time, as at a load):

    4-bit from bytes     `pack` of a QWeight, its check included
    4-bit from nibbles   `pack_parts` of two codes a byte, as Int4Linear holds them
    int8                 `pack_parts` of int8, as Int8Linear holds them
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from weightpath.bench.timing import in_turns
from weightpath.kernels import cpu
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme


def calls(n: int, k: int, group_size: int) -> dict[str, Callable[[], Any]]:
    """The three ways in."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(n, k // group_size, generator=draw) * 0.01).to(torch.bfloat16)
    qweight = QWeight(Scheme(4, group_size), codes, scales)
    nibbles = codes[:, ::2] | (codes[:, 1::2] << 4)
    signed = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=draw)
    by_channel = torch.rand(n, 1, generator=draw)
    return {
        "4-bit from bytes": lambda: cpu.pack(qweight),
        "4-bit from nibbles": lambda: cpu.pack_parts(
            nibbles, cpu.NIBBLES, scales, None, bits=4, group_size=group_size
        ),
        "int8": lambda: cpu.pack_parts(signed, cpu.INT8, by_channel, None, bits=8, group_size=k),
    }


def measure(
    n: int, k: int, group_size: int, most_threads: int, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Rows for one thread and for `most_threads`; torch's thread count is put back after."""
    before, rows = torch.get_num_threads(), []
    for threads in sorted({1, most_threads}):
        torch.set_num_threads(threads)
        times = in_turns(
            calls(n, k, group_size),
            rounds,
            minimum_seconds=seconds,
            clock=time.thread_time if threads == 1 else time.perf_counter,
        )
        for name, timing in times.items():
            rate, low, high = (2e-9 * n * k / t for t in (timing.median, timing.high, timing.low))
            print(
                f"{n:5}x{k:<5} packing {name:18} {threads} threads  {rate:6.2f} GB/s of bf16 "
                f"({low:.2f} to {high:.2f})",
                flush=True,
            )
            rows.append(
                {"shape": [n, k], "group_size": group_size, "name": name, "threads": threads,
                 "gb_per_s": [rate, low, high]}
            )  # fmt: skip
    torch.set_num_threads(before)
    return rows
