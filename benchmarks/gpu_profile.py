"""Where the time of a step goes: by kernel (torch's profiler, graphs' kernels included), and what is
left when everything but the products is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from weightpath.engine.graph import GraphModel
from weightpath.kernels.step import StepKernels
from weightpath.kernels.step_records import Rows

SHOWN = 16


def profile_of(call: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Rows of name, count and microseconds, the longest first: kernels on CUDA, operators elsewhere."""
    on_cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]
    call()
    with profile(activities=kinds) as found:
        call()
        if on_cuda:
            torch.cuda.synchronize(device)
    rows = []
    for event in found.key_averages():
        took = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if took > 0 and (event.device_type == DeviceType.CUDA) == on_cuda:
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


def products_only(model: GraphModel, batch: int) -> GraphModel:
    """The same weights and products with nothing between them; what it computes means nothing."""
    weights, shape = model.weights, model.weights.attention
    size = model.runner(batch).size
    mixed = torch.zeros(size, shape.heads * shape.head_dim, dtype=weights.table.dtype, device=model.device)  # fmt: skip
    width = int(weights.layers[0].down.in_features)  # type: ignore[arg-type]
    inner = torch.zeros(size, width, dtype=weights.table.dtype, device=model.device)

    def pick(logits: Tensor, rows: Rows, bad: Tensor) -> None:
        """No token is picked."""

    bare = GraphModel(weights)
    bare.kernels = StepKernels(
        "products only",
        add_norm=lambda x, residual, weight, epsilon: (x, x),
        silu_times=lambda gate, up: inner,
        attend=lambda *_: mixed,
        pick=pick,
    )
    return bare
