"""Products of low-bit weights on the CPU, compiled from cpp/.

    y[m, n] = sum_g scale[n, g] * sum_k (code[n, k] - zero[n, g]) * x[m, k] + bias[n]

x float [..., K] (fp32, bf16, fp16), quantized as it arrives; y [..., N] in x's dtype or another.
Inner sums are exact in int32. What is rounded is x, once:

    activation_bits 8    x ~ s * q,               q int8,             s = max|x| / 127
    activation_bits 16   x ~ s * (256 h + l),     h and l int8,       s = max|x| / 32512

with one s a row, or one a row and group. A row (or group) whose largest |x| is under 2^-100 counts
as zeros; one with NaN or infinity in it makes its outputs NaN. The weight is in
`layouts/cpu_tiles.py`'s bytes, the same for every instruction set; results are the same bits too,
since all follow the roundings of cpp/scalar.cpp.

The instruction set is picked by cpuid in C++; `instruction_sets()` says which can run and why the
others cannot, and an argument forces one. Threads follow `torch.get_num_threads()`.
"""

from __future__ import annotations

import mmap
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weightpath.errors import BadRequest, CannotRun
from weightpath.layouts.cpu_tiles import KINDS, CpuTiles, checked, group_columns, to_qweight
from weightpath.qweight import QWeight

BYTES, NIBBLES, INT8 = 0, 1, 2
"""How codes arrive at the packer: a byte each, two a byte, or int8."""
HUGE_PAGE = 2 << 20
SCALAR_ROWS = 8
MOST_SWITCH_ROWS = 64
"""Rows up to which instruction sets are asked whether they begin to be the fastest."""


@cache
def _load() -> ModuleType | ImportError:
    try:
        from weightpath import _cpu
    except ImportError as missing:
        return missing
    return _cpu


def extension() -> Any:
    """The compiled module; CannotRun where this install has none."""
    module = _load()
    if isinstance(module, ImportError):
        raise CannotRun(
            f"the CPU kernels are not in this install ({module}); install weightpath where a C++20 "
            "compiler is found, or use the torch kernel"
        )
    return module


def instruction_sets() -> dict[str, str | None]:
    """Every instruction set, fastest first: None where it can run here, else the sentence why not.

    Empty of compiled kernels, the one entry names what is missing.
    """
    try:
        found = extension().instruction_sets()
    except CannotRun as missing:
        return {"scalar": str(missing)}
    return {name: reason or None for name, reason in found}


def chosen_instruction_set(wanted: str = "", rows: int = 1) -> str:
    """The fastest that runs for so many rows of x, or `wanted` itself; CannotRun with the reason
    where it cannot."""
    try:
        return extension().chosen(wanted, rows)
    except ValueError as refused:
        raise CannotRun(str(refused)) from refused


def refusal() -> str | None:
    """Why no compiled kernel runs in this install, as a sentence, or None."""
    try:
        extension()
    except CannotRun as missing:
        return str(missing)
    return None


@cache
def instruction_set_here() -> tuple[str, tuple[tuple[str, str], ...]]:
    """What runs one row of x and from how many rows another does, in words; and (name, sentence)
    for every faster one that this machine cannot run."""
    ladder = [(rows, chosen_instruction_set(rows=rows)) for rows in range(1, MOST_SWITCH_ROWS + 1)]
    said, last = ladder[0][1], ladder[0][1]
    for rows, name in ladder:
        if name != last:
            said, last = f"{said}, {name} from {rows} rows", name
    if fewest := fewest_torch_rows():
        said = f"{said}, torch from {fewest} rows"
    used = {name for _, name in ladder}
    passed_over = []
    for name, reason in instruction_sets().items():
        if name in used:
            break
        passed_over.append((name, reason or "another one is faster here"))
    return said, tuple(passed_over)


@cache
def fewest_torch_rows() -> int:
    """Rows of x from which plain torch on unpacked tiles is faster than what runs here; 0: never.

    Only where nothing but the scalar instruction set runs: on one Zen 4 core [2048, 2048] took it
    2.9 ms a row against torch's 22 to 32 ms for 1 to 256 rows.
    """
    return SCALAR_ROWS if chosen_instruction_set() == "scalar" else 0


def pack(qweight: QWeight, name: str = "weight") -> CpuTiles:
    """A weight laid out by the C++ packer: the bytes of `cpu_tiles.from_qweight`.

    BadTensor where the layout cannot hold it.
    """
    checked(qweight, name)
    return pack_parts(
        qweight.codes,
        BYTES,
        qweight.scales,
        qweight.zeros_as_codes(name),
        bits=qweight.scheme.bits,
        group_size=group_columns(qweight),
    )


def pack_parts(
    codes: Tensor,
    source: int,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> CpuTiles:
    """The same from a module's buffers, whose soundness is the caller's.

    codes uint8 [N, K] (BYTES), uint8 [N, K/2] (NIBBLES: column 2i in the low one) or int8 [N, K]
    (INT8); scales [N, nG]; zeros uint8 [N, nG] or None. Huge pages are asked for, and each thread
    writes the tiles that it will read.
    """
    module = extension()
    n, k = codes.shape[0], codes.shape[1] * (2 if source == NIBBLES else 1)
    if scales.shape != (n, k // group_size) or (zeros is not None and zeros.shape != scales.shape):
        raise BadRequest(
            f"CPU tiles: scales {list(scales.shape)} for a weight [{n}, {k}] in groups of "
            f"{group_size}; wanted [{n}, {k // group_size}], zeros alike"
        )
    codes, scales = codes.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    shape = (bits, n, k, group_size, zeros is not None, KINDS[scales.dtype])
    packed = fresh_memory(module.packed_bytes(*shape))
    module.pack(
        *shape,
        codes.data_ptr(),
        source,
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return CpuTiles(packed, bits, n, k, group_size, zeros is not None, scales.dtype)


def fresh_memory(size: int) -> Tensor:
    """uint8 [size], untouched; from HUGE_PAGE bytes on, in huge pages where the system gives them.

    A mapping of its own from a huge page's boundary: memory that malloc hands out again is in
    pages of 4 KiB already. Only whole huge pages are asked for, so none is held for a short tail.
    """
    if size < HUGE_PAGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(size, dtype=torch.uint8)
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    memory = whole[start : start + size]
    extension().advise_huge_pages(memory.data_ptr(), size // HUGE_PAGE * HUGE_PAGE)
    return memory


def linear(
    x: Tensor,
    weight: CpuTiles,
    bias: Tensor | None = None,
    *,
    activation_bits: int = 16,
    per_group: bool = False,
    out: torch.dtype | None = None,
    instruction_set: str = "",
) -> Tensor:
    """x [..., K] times the weight, plus bias [N]; y [..., N] in `out`, by default x's dtype.

    per_group: an activation scale for every group instead of every row. instruction_set: one by
    name; CannotRun says why it cannot be had. Under torch.compile and export one operator,
    `weightpath::cpu_linear`.
    """
    if activation_bits not in (8, 16):
        raise BadRequest(f"{activation_bits}-bit activations; use 8 or 16")
    arguments = (
        x,
        weight.packed,
        bias,
        weight.bits,
        weight.out_features,
        weight.in_features,
        weight.group_size,
        weight.zeros,
        KINDS[weight.scale_dtype],
        activation_bits // 8,
        per_group,
        x.dtype if out is None else out,
        instruction_set,
    )
    return torch.ops.weightpath.cpu_linear(*arguments) if _traced(x) else _multiply(*arguments)


def _traced(x: Tensor) -> bool:
    """Whether anything but the result is wanted of the operator: a graph, a fake, a gradient.

    Else it is called past the dispatcher, which costs more than a small product (19 us against 4).
    """
    return (
        type(x) is not Tensor
        or (x.requires_grad and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
    )


def _multiply(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    zeros: bool,
    scales: int,
    planes: int,
    per_group: bool,
    out: torch.dtype,
    instruction_set: str,
) -> Tensor:
    module = extension()
    if x.dtype not in KINDS or out not in KINDS or x.shape[-1:] != (k,) or not x.is_cpu:
        raise BadRequest(
            f"CPU linear: x is {x.dtype} {list(x.shape)} on {x.device} and the output {out}; wanted "
            f"fp32, bf16 or fp16 and K = {k}, on cpu"
        )
    if bias is not None and (bias.dtype not in KINDS or bias.shape != (n,)):
        raise BadRequest(f"CPU linear: bias is {bias.dtype} {list(bias.shape)}, wanted [{n}]")
    shape = (bits, n, k, group_size, zeros, scales)
    if packed.numel() != module.packed_bytes(*shape) or not packed.is_contiguous():
        raise BadRequest(
            f"CPU linear: {packed.numel()} packed bytes for [{n}, {k}], wanted "
            f"{module.packed_bytes(*shape)}, contiguous"
        )
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(*x.shape[:-1], n, dtype=out)
    rows = x.numel() // k
    if rows == 0:
        return y
    try:
        module.linear(
            instruction_set,
            *shape,
            packed.data_ptr(),
            x.data_ptr(),
            KINDS[x.dtype],
            rows,
            planes,
            per_group,
            y.data_ptr(),
            KINDS[out],
            0 if bias is None else bias.data_ptr(),
            0 if bias is None else KINDS[bias.dtype],
            torch.get_num_threads(),
        )
    except ValueError as refused:
        raise CannotRun(str(refused)) from refused
    return y


_cpu_linear = torch.library.custom_op(
    "weightpath::cpu_linear", _multiply, mutates_args=(), device_types="cpu"
)


@_cpu_linear.register_fake
def _(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    zeros: bool,
    scales: int,
    planes: int,
    per_group: bool,
    out: torch.dtype,
    instruction_set: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n, dtype=out)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, bias, bits, n, k, group_size, zeros, scales = inputs[:9]
    dtype = next(dtype for dtype, kind in KINDS.items() if kind == scales)
    ctx.weight = CpuTiles(packed, bits, n, k, group_size, zeros, dtype)
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Of x and bias; the rounding of x counts as none, as is usual (straight-through)."""
    weight = to_qweight(ctx.weight).dequantize()
    of_x = (gradient.float() @ weight).to(ctx.x_dtype)
    of_bias = None
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        of_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
    return (of_x, None, of_bias, *(None,) * 10)


_cpu_linear.register_autograd(_backward, setup_context=_keep)
