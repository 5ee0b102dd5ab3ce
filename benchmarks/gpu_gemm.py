"""Products of low-bit weights on a GPU beside cuBLAS in bf16, tinygemm and Humming, in one run.

    python benchmarks/gpu_gemm.py [--rounds 7] [--rows 1,2,4,...] [--int8] [--late] [--write]

4-bit weights, groups of 128, symmetric, bf16 activations (--int8: int8 per channel at 1, 4 and 16
rows too). A product is timed by replaying a CUDA graph of one call for each of enough copies of the
weight that they pass the L2 cache four times; the products of a shape take turns, round by round.
Microseconds a call, median (lowest to highest); the floor is the larger of the weight's bytes over
the read bandwidth and the operations over the bf16 peak, both measured in this run. Ours starts
copying weights before the kernel before it has ended (--late: not). Humming is timed where its
package can be imported (its kernels are compiled at the first call, 14 s a shape).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from common import finish
from gpu_decode import read_bandwidth
from weightpath.bench.timing import Timing, ratio, sample_in_turns
from weightpath.kernels.cuda import tiles_linear
from weightpath.layouts.gpu_tiles import GpuTiles

SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)
GROUP = 128
L2_BYTES = 60 << 20
TINYGEMM_ROWS = 64
"""Rows beyond which tinygemm takes milliseconds."""
Product = Callable[[], float]


def captured(calls: list[Callable[[], object]]) -> Product:
    """Seconds a call, from a replay of one graph of all `calls`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def sample() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / len(calls)

    return sample


def copies(bytes_each: int) -> int:
    """Weights of so many bytes that pass the L2 cache four times; at least two."""
    return max(2, -(-4 * L2_BYTES // bytes_each))


def random_tiles(n: int, k: int, bits: int) -> GpuTiles:
    """Any bits are codes: random ones, with scales about 0.01."""
    blocks, chunks = n // 64, k // 64
    shape = (blocks, chunks, 4, 32, 4) if bits == 4 else (blocks, chunks, 4, 2, 32, 4)
    codes = torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, device="cuda")
    groups = k // GROUP if bits == 4 else 1
    scales = torch.rand(blocks, groups, 64, device="cuda") * 0.02
    scales = scales.to(torch.bfloat16) if bits == 4 else scales
    return GpuTiles(codes, scales, None, bits, n, k, GROUP if bits == 4 else k)


def ours(n: int, k: int, bits: int) -> tuple[list[GpuTiles], Callable[[Tensor], Product]]:
    first = random_tiles(n, k, bits)
    weights = [first, *(random_tiles(n, k, bits) for _ in range(copies(first.weight_bytes) - 1))]
    return weights, lambda x: captured([lambda w=w: tiles_linear.linear(x, w) for w in weights])


def cublas(n: int, k: int) -> Callable[[Tensor], Product]:
    count = copies(2 * n * k)
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    return lambda x: captured([lambda w=w: linear(x, w) for w in weights])


def tinygemm(n: int, k: int) -> Callable[[Tensor], Product]:
    """torch's own int4 product: 4 bits, groups of 128, a scale and a minimum each."""
    pack, multiply = torch.ops.aten._convert_weight_to_int4pack, torch.ops.aten._weight_int4pack_mm
    weights = []
    for _ in range(copies(n * k // 2)):
        bytes_ = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.rand(k // GROUP, n, 2, dtype=torch.bfloat16, device="cuda")
        weights.append((pack(bytes_, 8), scales))
    return lambda x: captured([lambda w=w: multiply(x, w[0], GROUP, w[1]) for w in weights])


def humming(n: int, k: int) -> Callable[[Tensor], Product] | None:
    if importlib.util.find_spec("humming") is None:
        return None
    layer_of: Any = importlib.import_module("humming").HummingLayer
    config = {"dtype": "uint4", "group_size": GROUP}
    layers = []
    for _ in range(copies(n * k // 2)):
        layer = layer_of(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16)
        layer = layer.cuda()
        layer.load_from_unquantized(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"))
        layer.transform()
        layers.append(layer)
    return lambda x: captured([lambda w=w: w(x) for w in layers])


def machine() -> tuple[float, float]:
    """Bytes a second that a sum reads of a large buffer, and bf16 operations a second."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = min(captured([lambda: a @ b])() for _ in range(3))
    return read_bandwidth(torch.device("cuda")), 2 * 8192**3 / product


def row_of(rows: int, name: str, got: dict[str, list[float]], floor: float) -> dict[str, Any]:
    """One cell: ours beside each peer, in microseconds."""
    own = got[name]
    cell: dict[str, Any] = {"rows": rows, "floor_us": floor * 1e6}
    for key, values in got.items():
        timing = Timing.of([value * 1e6 for value in values])
        cell[key] = [timing.median, timing.low, timing.high]
        if key != name:
            cell[f"{key} over ours"] = ratio(Timing.of(values), Timing.of(own)).median
    return cell


def show(shape: tuple[int, int], name: str, cell: dict[str, Any]) -> None:
    """One line of the table on stdout."""
    times = [f"{key} {value[0]:.2f}" for key, value in cell.items() if isinstance(value, list)]
    over = [f"{value:.2f}x {key}" for key, value in cell.items() if key.endswith("over ours")]
    share = cell["floor_us"] / cell[name][0]
    print(f"{shape!s:14} {cell['rows']:5} rows  {'  '.join(times)} us  {share:.0%} of the limit  {'  '.join(over)}", flush=True)  # fmt: skip


def one_shape(
    shape: tuple[int, int],
    rows_asked: list[int],
    rounds: int,
    limits: tuple[float, float],
    bits: int,
) -> list[dict[str, Any]]:
    """Every number of rows for one weight."""
    n, k = shape
    name = f"ours, {bits} bits"
    weights, own = ours(n, k, bits)
    products = {name: own, "cuBLAS bf16": cublas(n, k)}
    if bits == 4:
        products["tinygemm"] = tinygemm(n, k)
        other = humming(n, k)
        if other is not None:
            products["Humming"] = other
    cells = []
    for rows in rows_asked:
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        runs = {
            key: make(x)
            for key, make in products.items()
            if key != "tinygemm" or rows <= TINYGEMM_ROWS
        }
        floor = max(weights[0].weight_bytes / limits[0], 2 * rows * n * k / limits[1])
        cells.append(row_of(rows, name, sample_in_turns(runs, rounds), floor))
        show(shape, name, cells[-1])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    tiles_linear.EARLY = not arguments.late
    limits = machine()
    print(f"{torch.cuda.get_device_name()}: reads {limits[0] / 1e12:.2f} TB/s, bf16 {limits[1] / 1e12:.0f} TFLOP/s")  # fmt: skip
    rows = [int(each) for each in arguments.rows.split(",")]
    table = {}
    for shape in SHAPES:
        cells = one_shape(shape, rows, arguments.rounds, limits, 4)
        eight = one_shape(shape, [1, 4, 16], arguments.rounds, limits, 8) if arguments.int8 else []
        table["x".join(map(str, shape))] = {"w4g128": cells, "int8": eight}
        torch.cuda.empty_cache()
    body = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_gb_per_s": limits[0] / 1e9,
        "bf16_tflops": limits[1] / 1e12,
        "early_starts": not arguments.late,
        "shapes": table,
    }
    if arguments.write:
        finish("gpu-gemm", body)


if __name__ == "__main__":
    main()
