"""Where the time of one call goes, by kernel: torch's profiler, graphs' kernels included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 16


def profile_of(call: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Rows of name, count and microseconds, the longest first: kernels on CUDA, operators elsewhere."""
    on_cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    call()
    with profile(activities=kinds) as found:
        call()
        if on_cuda:
            torch.cuda.synchronize(device)
    rows = []
    for event in found.key_averages():
        on_device = event.self_device_time_total
        took = on_device if on_cuda else event.self_cpu_time_total
        if took > 0:
            rows.append({"name": event.key, "count": event.count, "us": float(took)})
    return sorted(rows, key=lambda row: -row["us"])


def show_profile(title: str, step_us: float, rows: list[dict[str, Any]]) -> None:
    """The table of one step; what the kernels do not fill of `step_us` is gaps between them."""
    total = sum(row["us"] for row in rows)
    if not rows:
        print(f"{title}: the profiler saw no kernels")
        return
    print(f"{title}: kernels {total:.0f} us of a step of {step_us:.0f} us")
    for row in rows[:SHOWN]:
        each = row["us"] / row["count"]
        print(f"  {row['us']:9.1f} us {row['count']:5} x {each:8.2f} us  {row['name'][:90]}")
