"""4-bit weights as PyTorch's own int4 operators read them, on CPU and on CUDA.

    w[n, k] = scale[g, n] * (code[n, k] - 8) + zero[g, n],   g = k // group_size
    zero    = s * (8 - z)  for an integer zero z;  m + 8 s  for a float minimum m;  0 if symmetric

scales_and_zeros: bf16 [nG, N, 2], scale then zero. Rounding them to bf16 moves weights by what
`TinygemmWeight` states; on top, a CUDA device rounds each w to bf16, a CPU computes it in fp32.

CPU, uint8 [N, K/2]. Rows lie in blocks of B, a block's bytes column after column, B/2 a column:
    split   byte i of a column: row i in the low nibble, row i + B/2 in the high one
    pairs   byte i of a column: row 2i in the low nibble, row 2i + 1 in the high one
The last block may be of fewer rows (a multiple of 16), and is in pairs. B and the kind follow the
instruction set (CPU_LAYOUTS), so packed bytes are for one machine: never written to a file.

CUDA, int32 [N/8, K/(16 T), 32, T/2], T = inner_k_tiles of 2, 4 or 8. Lane l of word
[t, o, l, j] is row 8t + l // 4 and, with c = 16 T o + 32 j + 2 (l % 4), for i = 0..3:
    nibble i      column c + 8i         (bits 4i..4i+3)
    nibble i + 4  column c + 8i + 1
which is where a tensor core's m16n8k16 wants its second operand.

Operators: aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scales_and_zeros) and
aten._weight_int4pack_mm(...), x bf16 [M, K], result bf16 [M, N].
Source: PyTorch's aten/src/ATen/native/cpu/int4mm_kernel.cpp and native/cuda/int4mm.cu (uint8
input, even columns in the high nibble: torch 2.5 on).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightpath.errors import BadTensor, CannotRun
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL

GROUP_SIZES = (32, 64, 128, 256)
CPU_ROWS, CUDA_ROWS = 16, 8
"""out_features come in multiples of these."""
INNER_K_TILES = (8, 4, 2)
"""16-column tiles that a CUDA lane loads at once, best first: 16, 8 or 4 bytes."""
CUDA_CAPABILITY = (8, 0)
CUDA = "cuda"
BLOCK_WEIGHTS = 1 << 20
"""Weights whose change is measured at a time, 8 MiB of fp64."""


@dataclass(frozen=True)
class CpuLayout:
    """Rows of a whole block, and whether its halves share bytes (split) or neighbours do."""

    name: str
    rows: int
    split: bool


CPU_LAYOUTS = (
    CpuLayout("cpu-split64", 64, True),  # AVX-512
    CpuLayout("cpu-split32", 32, True),  # AVX2
    CpuLayout("cpu-pairs32", 32, False),  # no vector path, 8 floats a vector: x86 default, SVE 256
    CpuLayout("cpu-pairs16", 16, False),  # 4 floats a vector: NEON
    CpuLayout("cpu-pairs64", 64, False),  # 16 floats a vector, built by MSVC
)
CPU_NAMES = ", ".join(layout.name for layout in CPU_LAYOUTS)


@dataclass(frozen=True)
class TinygemmWeight:
    """One linear as the operator takes it.

    packed: uint8 [N, K/2] or int32 [N/8, K/(16 T), 32, T/2], as `layout` says.
    scales_and_zeros: bf16 [nG, N, 2]. largest_change and mean_change: of |w|'s difference between
    the operator's formula on these and the QWeight, both in fp64, in the weight's own units.
    """

    packed: Tensor
    scales_and_zeros: Tensor
    group_size: int
    layout: str
    largest_change: float
    mean_change: float

    @property
    def exact(self) -> bool:
        """Whether scales and zeros went into bf16 without moving any weight."""
        return self.largest_change == 0.0


def from_qweight(qweight: QWeight, layout: str, name: str = "weight") -> TinygemmWeight:
    """Any 4-bit linear in groups, laid out; `layout` is what `detect_layout` says of the device.

    A column order that is the plain one is dropped. For CUDA, inner_k_tiles is the largest that
    divides K. BadTensor, with the numbers, for other bits, another column order, what
    `shape_refuses`, and scales or zeros beyond bf16; CannotRun for an unknown layout.
    """
    if layout != CUDA:
        _cpu_layout(layout)
    if qweight.scheme.bits != 4:
        raise BadTensor(name, f"is {qweight.scheme.bits}-bit, the tinygemm operators take 4 bits",
                        "quantize it to 4 bits, or choose another kernel")  # fmt: skip
    qweight.check(name)
    n, k = qweight.codes.shape
    size = k if qweight.scheme.group_size == PER_CHANNEL else qweight.scheme.group_size
    refusal = shape_refuses(n, k, size, layout)
    if refusal is not None:
        raise BadTensor(name, refusal, "choose another kernel, or quantize it again to fit")
    if qweight.g_idx is not None:
        moved = int((qweight.g_idx != torch.arange(k, device=qweight.g_idx.device) // size).sum())
        if moved or qweight.scales.shape[1] != k // size:
            raise BadTensor(
                name,
                f"keeps a column order: {moved} of {k} columns are in another group",
                "fold or requantize it without act-order, or choose another kernel",
            )
    table = scales_and_zeros(qweight, name)
    largest, mean = _change(qweight, table)
    if layout == CUDA:
        tiles = next(tiles for tiles in INNER_K_TILES if k % (16 * tiles) == 0)
        packed = pack_cuda(qweight.codes, tiles, name)
    else:
        packed = pack_cpu(qweight.codes, layout, name)
    return TinygemmWeight(packed, table, size, layout, largest, mean)


def shape_refuses(out_features: int, in_features: int, group_size: int, layout: str) -> str | None:
    """Why the operator cannot take a weight [N, K] in this layout, as a sentence, or None.

    group_size is the number of columns in a group: K itself for per channel.
    """
    rows = CUDA_ROWS if layout == CUDA else CPU_ROWS
    if group_size not in GROUP_SIZES:
        return f"group size {group_size}, the tinygemm operators take 32, 64, 128 or 256"
    if in_features < 1 or in_features % group_size:
        return f"in_features {in_features} is not a multiple of group size {group_size}"
    if out_features < 1 or out_features % rows:
        return f"out_features {out_features} is not a multiple of {rows}, as {layout} needs"
    return None


def scales_and_zeros(qweight: QWeight, name: str = "weight") -> Tensor:
    """The operator's table, bf16 [nG, N, 2], zeros computed in fp64.

    BadTensor where one is beyond bf16 (3.39e38).
    """
    table = torch.stack(_exact_table(qweight), dim=-1).to(torch.bfloat16)
    if not bool(torch.isfinite(table).all()):
        row, group, part = (~torch.isfinite(table)).nonzero()[0].tolist()
        scale = float(qweight.scales[row, group])
        raise BadTensor(
            name,
            f"{('scale', 'zero')[part]} [{row}, {group}] is beyond the bf16 that the tinygemm "
            f"operators take (its scale is {scale:.4g})",
            "quantize it again, or choose another kernel",
        )
    return table.transpose(0, 1).contiguous()


def pack_cpu(codes: Tensor, layout: str, name: str = "weight") -> Tensor:
    """Codes uint8 [N, K] to uint8 [N, K/2] in one of the CPU_LAYOUTS.

    BadTensor where N is not a multiple of 16, K is odd, or a code is beyond 15; CannotRun for an
    unknown layout.
    """
    kind = _cpu_layout(layout)
    _require_codes(name, codes, CPU_ROWS, 2)
    n, k = codes.shape
    whole = n // kind.rows * kind.rows
    blocks = codes[:whole].reshape(-1, kind.rows, k).transpose(1, 2)
    if kind.split:
        low, high = blocks.chunk(2, dim=-1)
    else:
        low, high = blocks[..., 0::2], blocks[..., 1::2]
    last = codes[whole:].t()
    tail = last[:, 0::2] | (last[:, 1::2] << 4)
    return torch.cat(((low | (high << 4)).flatten(), tail.flatten())).view(n, k // 2)


def pack_cuda(codes: Tensor, inner_k_tiles: int = 8, name: str = "weight") -> Tensor:
    """Codes uint8 [N, K] to int32 [N/8, K/(16 T), 32, T/2], T = inner_k_tiles.

    BadTensor where N is not a multiple of 8, K not one of 16 T, or a code is beyond 15;
    CannotRun for a T other than 2, 4 or 8.
    """
    if inner_k_tiles not in INNER_K_TILES:
        raise CannotRun(f"tinygemm on CUDA: {inner_k_tiles} inner k-tiles; it takes 2, 4 or 8")
    _require_codes(name, codes, CUDA_ROWS, 16 * inner_k_tiles)
    n, k = codes.shape
    outer, words = k // (16 * inner_k_tiles), inner_k_tiles // 2
    # dims: tile of rows, row, outer, word, strip of 8 columns, pair in the strip, which of the pair
    spread = codes.reshape(n // 8, 8, outer, words, 4, 4, 2)
    nibbles = spread.permute(0, 2, 1, 5, 3, 6, 4).reshape(n // 8, outer, 32, words, 8)
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).view(torch.int32).squeeze(-1)


def codes_of(packed: Tensor, layout: str) -> Tensor:
    """The codes uint8 [N, K] that packed weights hold: the inverse of both packers."""
    if layout == CUDA:
        tiles, outer, _, words = packed.shape
        stored = packed.contiguous().view(torch.uint8).view(tiles, outer, 32, words, 4)
        nibbles = torch.stack((stored & 15, stored >> 4), dim=-1)
        spread = nibbles.view(tiles, outer, 8, 4, words, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)
        return spread.reshape(tiles * 8, outer * words * 32)
    kind = _cpu_layout(layout)
    n, k = packed.shape[0], packed.shape[1] * 2
    whole = n // kind.rows * kind.rows
    blocks = packed[:whole].reshape(-1, k, kind.rows // 2)
    halves = (blocks & 15, blocks >> 4)
    rows = torch.cat(halves, -1) if kind.split else torch.stack(halves, -1).flatten(-2)
    last = packed[whole:].reshape(k, (n - whole) // 2)
    tail = torch.stack((last & 15, last >> 4), -1).view(k, n - whole)
    return torch.cat((rows.transpose(1, 2).reshape(whole, k), tail.t()))


def detect_layout(device: torch.device | str = "cpu") -> str:
    """The layout that the operator of this device reads: one of CPU_LAYOUTS by name, or CUDA.

    Found by packing a probe with torch's own operator there and comparing the bytes. CannotRun
    where the device has no such operator, or its bytes are in no layout known here.
    """
    where = torch.device(device)
    if where.type == "cpu":
        return detect_cpu_layout()
    if where.type != "cuda":
        raise CannotRun(f"tinygemm: device {where.type} is not known; cpu and cuda are")
    if not torch.cuda.is_available():
        raise CannotRun("tinygemm: torch sees no CUDA device; use the cpu layout")
    capability = torch.cuda.get_device_capability(where)
    if torch.version.hip is None and capability < CUDA_CAPABILITY:
        raise CannotRun(
            "tinygemm on CUDA needs compute capability 8.0, this device has {}.{}; "
            "choose another kernel".format(*capability)
        )
    probe = _probe(rows=16, columns=256).to(where)
    pairs = (probe[:, 0::2] << 4) | probe[:, 1::2]
    for tiles in INNER_K_TILES:
        theirs = _convert("_convert_weight_to_int4pack", pairs, tiles)
        if not torch.equal(theirs, pack_cuda(probe, tiles)):
            raise CannotRun(
                f"tinygemm on CUDA: with {tiles} inner k-tiles torch {torch.__version__} packs "
                "no layout known here; choose another kernel"
            )
    return CUDA


def detect_cpu_layout() -> str:
    """Which of CPU_LAYOUTS this process's CPU operator reads; see `detect_layout`."""
    # 64 + 48 rows: whole blocks of every layout, and the longest last block
    probe = _probe(rows=112, columns=6)
    theirs = _convert("_convert_weight_to_int4pack_for_cpu", probe.to(torch.int32), 2)
    for layout in CPU_LAYOUTS:
        if torch.equal(theirs, pack_cpu(probe, layout.name)):
            return layout.name
    raise CannotRun(
        f"tinygemm on CPU: torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}) "
        f"packs none of {CPU_NAMES}; choose another kernel"
    )


def _probe(rows: int, columns: int) -> Tensor:
    """Codes [rows, columns] that no two layouts here pack alike."""
    index = torch.arange(rows * columns).view(rows, columns)
    return (((index * 2654435761) >> 7) & 15).to(torch.uint8)


def _convert(operator: str, weight: Tensor, inner_k_tiles: int) -> Tensor:
    """torch's own packing; CannotRun where this build has none for the device."""
    try:
        return getattr(torch.ops.aten, operator)(weight, inner_k_tiles)
    except (AttributeError, RuntimeError) as missing:
        reason = str(missing).splitlines()[0]
        raise CannotRun(
            f"tinygemm: torch {torch.__version__} cannot run aten.{operator} on "
            f"{weight.device.type}: {reason}; choose another kernel"
        ) from missing


def _exact_table(qweight: QWeight) -> tuple[Tensor, Tensor]:
    """Scales and the operator's zeros, fp64 [N, nG], unrounded."""
    scales = qweight.scales.double()
    if qweight.minimums is not None:
        return scales, qweight.minimums.double() + 8 * scales
    if qweight.zeros is not None:
        return scales, scales * (8 - qweight.zeros.double())
    return scales, torch.zeros_like(scales)


def _change(qweight: QWeight, table: Tensor) -> tuple[float, float]:
    """Largest and mean |w| difference that rounding the table made, in fp64.

    The change of a weight is ds * (code - 8) + dz, of its group's changes: no weight is needed.
    """
    n, k = qweight.codes.shape
    scales, zeros = _exact_table(qweight)
    moved_scale = table[..., 0].t().double() - scales
    moved_zero = table[..., 1].t().double() - zeros
    if not bool(moved_scale.any()) and not bool(moved_zero.any()):
        return 0.0, 0.0
    groups = scales.shape[1]
    largest, total = 0.0, 0.0
    rows = max(1, BLOCK_WEIGHTS // k)
    for start in range(0, n, rows):
        cut = slice(start, start + rows)
        steps = qweight.codes[cut].double().view(-1, groups, k // groups) - 8
        change = steps.mul_(moved_scale[cut, :, None]).add_(moved_zero[cut, :, None]).abs_()
        largest = max(largest, float(change.max()))
        total += float(change.sum())
    return largest, total / (n * k)


def _cpu_layout(name: str) -> CpuLayout:
    """The layout of this name; CannotRun where there is none."""
    for layout in CPU_LAYOUTS:
        if layout.name == name:
            return layout
    raise CannotRun(f"tinygemm layout '{name}': unknown; the layouts are {CPU_NAMES}, {CUDA}")


def _require_codes(name: str, codes: Tensor, rows: int, columns: int) -> None:
    """BadTensor unless codes are uint8 [N, K] of 0..15, N and K multiples of rows and columns."""
    if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.numel():
        raise BadTensor(
            name,
            f"codes are {codes.dtype} {tuple(codes.shape)}, wanted torch.uint8 [N, K]",
            "convert them to unsigned codes, a row for every output",
        )
    n, k = codes.shape
    if n % rows or k % columns:
        raise BadTensor(
            name,
            f"codes [{n}, {k}] do not fill tinygemm's tiles of {rows} rows and {columns} columns",
            "choose another kernel for this linear",
        )
    if int(codes.max()) > 15:
        raise BadTensor(name, f"code {int(codes.max())} exceeds 15",
                        "the file is damaged: fetch it again")  # fmt: skip
