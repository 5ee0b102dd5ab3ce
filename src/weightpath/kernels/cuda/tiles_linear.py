"""y = x @ w.T + bias on CUDA, w in GPU tiles (layouts/gpu_tiles.py), x bf16 or fp16.

Products are summed in fp32; two runs give the same bits. Few rows of x go to tiles_mma.cu (sm_80 and
later), more to tiles_wgmma.cu (sm_90), or, where that cannot run, in passes of 32 rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from weightpath.errors import BadRequest
from weightpath.kernels.cuda import compiler, driver
from weightpath.kernels.cuda.configurations import MOST_MMA_ROWS, Mma, Wgmma, mma_for, wgmma_for
from weightpath.layouts.gpu_tiles import GpuTiles

DTYPES = (torch.bfloat16, torch.float16)
X_ALIGNMENT = 16
"""Bytes: of x's address and row stride, since rows are copied 16 bytes at a time."""
OLDEST = (8, 0)
HOPPER = "sm_90a"
EARLIEST = (9, 0)
"""The first compute capability with programmatic dependent launch."""
EARLY = True
"""Whether a launch may start, copying weights, before the kernel before it has ended (sm_90 on)."""


@cache
def refusal(device: torch.device) -> str | None:
    """Why these kernels cannot run on that device, as a sentence, or None."""
    if device.type != "cuda":
        return f"the CUDA kernels run on CUDA; this layer is on {device.type}"
    if torch.version.hip is not None:
        return "the CUDA kernels run on NVIDIA GPUs; this torch is built for AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return (
            f"the CUDA kernels need compute capability 8.0 or newer; this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    return compiler.refusal()


def linear(
    x: Tensor,
    tiles: GpuTiles,
    bias: Tensor | None = None,
    out: torch.dtype | None = None,
    configuration: Mma | Wgmma | None = None,
) -> Tensor:
    """y [..., N] in `out` (x's dtype, or fp32) for x [..., K] bf16 or fp16; bias [N].

    configuration: one kernel by its settings, else that of the shape. The weight may be read before
    the kernel ahead in the stream has ended: who has just written it synchronizes first. BadRequest
    for x of another dtype or width.
    """
    if x.dtype not in DTYPES:
        raise BadRequest(f"activations are {x.dtype}; the CUDA kernels take bf16 and fp16")
    if x.shape[-1] != tiles.in_features:
        raise BadRequest(
            f"activations {list(x.shape)} for a weight of {tiles.in_features} in_features"
        )
    flat = _aligned(x.reshape(-1, tiles.in_features))
    y = torch.empty((*x.shape[:-1], tiles.out_features), dtype=out or x.dtype, device=x.device)
    if not y.numel():
        return y
    bias = None if bias is None else bias.to(x.dtype)
    with torch.cuda.device(x.device):
        _run(flat, tiles, bias, y, configuration or _configured(flat, tiles))
    return y


def _operate(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    out: torch.dtype,
) -> Tensor:
    bits = 4 if codes.ndim == 5 else 8
    tiles = GpuTiles(codes, scales, zeros, bits, n, x.shape[-1], group_size)
    return linear(x, tiles, bias, out)


_operator = torch.library.custom_op(
    "weightpath::cuda_tiles_linear", _operate, mutates_args=(), device_types="cuda"
)


@_operator.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    out: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out)


def tiles_linear(x: Tensor, tiles: GpuTiles, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """`linear` as the torch operator weightpath::cuda_tiles_linear, for tracing; nothing is read
    back, so a CUDA graph can hold it. Each shape must have run once before it is captured."""
    parts = (tiles.codes, tiles.scales, tiles.zeros)
    return _operator(x, *parts, bias, tiles.out_features, tiles.group_size, out)


def _aligned(x: Tensor) -> Tensor:
    """x itself where its rows can be copied 16 bytes at a time, else a copy, padded if need be."""
    step = X_ALIGNMENT // x.element_size()
    if x.stride(-1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % X_ALIGNMENT == 0:
        return x
    wide = x.new_zeros((x.shape[0], -(-x.shape[1] // step) * step))
    wide[:, : x.shape[1]] = x
    return wide


@cache
def _machine(index: int) -> tuple[int, str]:
    """Multiprocessors and the compiler's name of the architecture."""
    properties = torch.cuda.get_device_properties(index)
    suffix = "a" if properties.major == 9 else ""
    return properties.multi_processor_count, f"sm_{properties.major}{properties.minor}{suffix}"


def _configured(x: Tensor, tiles: GpuTiles) -> Mma | Wgmma:
    multiprocessors, architecture = _machine(x.get_device())
    n, k = tiles.out_features, tiles.in_features
    if x.shape[0] <= MOST_MMA_ROWS or architecture != HOPPER:
        chosen = mma_for(x.shape[0], n, tiles.bits, multiprocessors)
        return fitted(chosen, tiles, x.dtype, driver.most_shared(x.get_device()))
    return wgmma_for(x.shape[0], n, k, multiprocessors)


def fitted(chosen: Mma, tiles: GpuTiles, dtype: torch.dtype, limit: int) -> Mma:
    """The configuration with fewer stages, then fewer warps along K, until a block takes no more than
    `limit` bytes of shared memory (227 KiB on sm_90, 99 on sm_86 and sm_89)."""
    while shared_bytes(settings_of(tiles, dtype, chosen), chosen) > limit:
        if chosen.stages > 2:
            chosen = replace(chosen, stages=chosen.stages - 1)
        elif chosen.warps_k > 1:
            chosen = replace(chosen, warps_k=chosen.warps_k // 2)
        else:
            chosen = replace(chosen, row_tiles=1, blocks_a_step=1)
    return chosen


def settings_of(tiles: GpuTiles, dtype: torch.dtype, configuration: Mma | Wgmma) -> dict[str, int]:
    """What common.cuh is compiled for."""
    scale, wide = (
        tiles.scales.dtype,
        isinstance(configuration, Mma) and configuration.blocks_a_step > 1,
    )
    group = 0 if tiles.groups == 1 else 32 if tiles.group_size == 32 else 64
    if group == 64 and wide and tiles.group_size % 128 == 0:
        group = 128
    return {
        "BITS": tiles.bits,
        "BF16": int(dtype == torch.bfloat16),
        "ASYM": int(tiles.zeros is not None),
        "GROUP": group,
        "SCALE_BYTES": scale.itemsize,
        "SCALE_BF16": int(scale == torch.bfloat16),
    }


def shared_bytes(settings: dict[str, int], configuration: Mma | Wgmma) -> int:
    """Dynamic shared memory of a block."""
    bits, scale = settings["BITS"], settings["SCALE_BYTES"]
    parts = {0: 0, 32: 2, 64: 1, 128: 1}[settings["GROUP"]]
    if isinstance(configuration, Mma):
        c = configuration
        parts *= c.blocks_a_step // 2 if settings["GROUP"] == 128 else c.blocks_a_step
        rows = 16 * c.row_tiles * c.warps_n
        columns = c.blocks_a_step * (rows * 8 * bits + c.tokens * 128)
        stage = columns + rows * parts * (scale + settings["ASYM"])
        ring = c.warps_k * c.stages * stage
        return max(ring, c.warps_k * c.tokens * (rows + 4) * 4)
    tokens, rows = configuration.tokens, 64 * configuration.groups
    a_row = parts * (scale + settings["ASYM"])  # bytes of scales and zeros a row and block
    stage = tokens * 128 + rows * (8 * bits + a_row)
    ring = configuration.stages * (-(-stage // 1024) * 1024)
    last = tokens * rows * 2 if configuration.split == 1 else 0
    partial = tokens * (rows + 4) * 4 if configuration.split > 1 else 0
    return max(ring + last + 16 * configuration.stages, partial + 16 * configuration.stages) + 1024


@cache
def _function(
    settings: tuple[tuple[str, int], ...], configuration: Mma | Wgmma, index: int
) -> driver.Function:
    architecture = _machine(index)[1]
    text, name, all_settings = program(dict(settings), configuration)
    cubin = compiler.compile_cubin(text, all_settings, architecture)
    return driver.load(cubin, name, shared_bytes(dict(settings), configuration))


def program(
    settings: dict[str, int], configuration: Mma | Wgmma
) -> tuple[str, str, dict[str, int]]:
    """The text to compile, the kernel's name in it, and every setting."""
    c = configuration
    common = compiler.source("common.cuh")
    if isinstance(c, Mma):
        own = {
            "ROWS": c.rows, "NT": c.tokens // 8, "R": c.row_tiles, "WN": c.warps_n,
            "WK": c.warps_k, "STAGES": c.stages, "C": c.blocks_a_step, "BLOCKS": c.blocks,
        }  # fmt: skip
        return common + compiler.source("tiles_mma.cu"), "tiles_mma", {**settings, **own}
    own = {
        "GROUPS": c.groups,
        "COLUMNS": c.tokens,
        "STAGES": c.stages,
        "SPLIT": c.split,
        "BLOCKS": c.blocks,
    }
    instruction = _wgmma_instruction(c.tokens, bool(settings["BF16"]))
    text = common + instruction + compiler.source("tiles_wgmma.cu")
    return text, "tiles_wgmma", {**settings, **own}


def _wgmma_instruction(tokens: int, bf16: bool) -> str:
    """The macro WGMMA(d, a, at): d += a times the 16 columns of x that descriptor `at` shows."""
    sums, kind = tokens // 2, "bf16" if bf16 else "f16"
    registers = ", ".join(f"%{i}" for i in range(sums))
    left = ", ".join(f"%{sums + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    inputs = ", ".join(f'"r"((a)[{i}])' for i in range(4))
    return (
        f'#define WGMMA(d, a, at) asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.'
        f'{kind}.{kind} {{{registers}}}, {{{left}}}, %{sums + 4}, 1, 1, 1, 0;" : {outputs} : '
        f'{inputs}, "l"(at))\n'
    )


def _run(
    x: Tensor, tiles: GpuTiles, bias: Tensor | None, y: Tensor, configuration: Mma | Wgmma
) -> None:
    c, index = configuration, x.get_device()
    early = EARLY and torch.cuda.get_device_capability(index) >= EARLIEST
    settings = {**settings_of(tiles, x.dtype, c), "EARLY": int(early)}
    function = _function(tuple(settings.items()), c, index)
    m, n = x.shape[0], tiles.out_features
    whole = max(1, tiles.group_size // 64)  # blocks of columns a group; its inverse for __umulhi
    inverse = 0 if whole == 1 else -(-(1 << 32) // whole)
    numbers = [tiles.chunks, tiles.groups, inverse, int(y.dtype == torch.float32)]
    weight = [driver.pointer(t) for t in (tiles.codes, tiles.scales, tiles.zeros)]
    if isinstance(c, Mma):
        rows = 16 * c.row_tiles * c.warps_n
        grid = (-(-n // rows), -(-m // c.rows))
        own = [driver.pointer(x), driver.pointer(bias), driver.pointer(y)]
        integers = [m, n, tiles.in_features, x.stride(0), *numbers]
        arguments = [*weight, *own, *map(ctypes.c_int, integers)]
        driver.launch(function, grid, 32 * c.warps_n * c.warps_k, arguments, early)
        return
    count = -(-n // (64 * c.groups)) * -(-m // c.tokens)
    grid = (c.split * count if c.split > 1 else min(count, _machine(index)[0] * c.blocks), 1)
    own = [driver.tensor_map(x, c.tokens), driver.pointer(bias), driver.pointer(y)]
    arguments = [*weight, *own, *map(ctypes.c_int, [m, n, *numbers])]
    driver.launch(function, grid, 128 * (c.groups + 1), arguments, early)
