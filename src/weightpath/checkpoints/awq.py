"""AWQ checkpoints: every layout read, the gemm layout written. 4-bit only.

    w[n, k] = scales[g, n] * (q[n, k] - z[g, n]),   g = k // G,   q and z in 0..15

For a linear called NAME with weight [N, K], the gemm layout is

    NAME.qweight  int32 [K, N/8]    nibble i of word c is column 8c + ORDER[i]
    NAME.qzeros   int32 [nG, N/8]   the same
    NAME.scales   fp16  [nG, N]

gemv, gemv_fast and llm-awq are in awq_fast.py, the config in awq_config.py. Which layout a file
has is decided by dtypes and shapes; the config's `version` is only compared, since files lie.
Symmetric weights store z = 8. Sources: AutoAWQ gemm.py and packing_utils.py, vLLM auto_awq.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weightpath.checkpoints import awq_fast
from weightpath.checkpoints.awq_config import GEMM, GEMV, GEMV_FAST, LLM_AWQ, AwqSettings
from weightpath.checkpoints.awq_config import quantization_config as quantization_config
from weightpath.checkpoints.awq_config import recognise as recognise
from weightpath.checkpoints.awq_config import settings as settings
from weightpath.checkpoints.writer import Planned
from weightpath.errors import BadTensor
from weightpath.qweight import QWeight, scale_change
from weightpath.scheme import PER_CHANNEL, Scheme

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column within its eight that nibble i of a gemm word holds."""
SUFFIXES = ("qweight", "qzeros", "scales", "scaled_zeros")

FETCH = "fetch the checkpoint again"
CONFIG = "check group_size and version in the quantization config"
GPTQ = "these are GPTQ's shapes: set quant_method to gptq"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MIDPOINT = 8
"""The zero of symmetric 4-bit codes."""


@dataclass(frozen=True)
class AwqLayout:
    """Layout of one linear, weight [N, K] = [out_features, in_features], nG groups a row."""

    version: str
    out_features: int
    in_features: int
    groups: int
    zeros_suffix: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class AwqLinear:
    """A linear as read: its integers, the layout its shapes have, and what a user should know."""

    qweight: QWeight
    version: str
    notes: tuple[str, ...]


class _Sized(Protocol):
    """A tensor, or a file header's entry for one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def layout_of(name: str, stated: AwqSettings, parts: Mapping[str, _Sized]) -> AwqLayout:
    """Which layout a linear's tensors have, from dtypes and shapes alone (keys: bare suffixes).

    Tensors or the entries of a file's header will do. The config's own version is tried first;
    another one that fits is noted. BadTensor names what is missing or fits none, with the mend.
    """
    zeros_suffix = "scaled_zeros" if "scaled_zeros" in parts else "qzeros"
    _require(name, stated, parts, zeros_suffix)
    if parts["qweight"].dtype == torch.int16:
        named = LLM_AWQ if zeros_suffix == "scaled_zeros" else GEMV_FAST
        unnamed = zeros_suffix not in parts and stated.version == LLM_AWQ
        possible = [LLM_AWQ if unnamed else named]
    else:
        possible = [GEMV, GEMM] if stated.version == GEMV else [GEMM, GEMV]
    misfits = [_misfit(version, stated.group_size, parts, zeros_suffix) for version in possible]
    if None not in misfits:
        suffix, problem, mend = misfits[0] or ("", "", "")
        raise BadTensor(f"{name}.{suffix}", problem, GPTQ if _is_gptq(parts) else mend)
    version = possible[misfits.index(None)]
    notes: tuple[str, ...] = ()
    if version != stated.version:
        notes = (f"{name}: the config says version {stated.version}, the tensors are {version}; "
                 f"read as {version}",)  # fmt: skip
    n, k = _size(version, parts["qweight"])
    groups = 1 if stated.group_size == PER_CHANNEL else k // stated.group_size
    return AwqLayout(version, n, k, groups, zeros_suffix, notes)


def from_tensors(name: str, stated: AwqSettings, tensors: Mapping[str, Tensor]) -> AwqLinear:
    """A linear from its tensors (keys are the bare suffixes), in whichever layout they have.

    Every shape is checked (layout_of) before a code is unpacked. zero_point false gives a symmetric
    QWeight if the stored zeros are all 8 or absent; zeros that contradict it are used, and noted.
    BadTensor as layout_of, and for scales that are not finite.
    """
    layout = layout_of(name, stated, tensors)
    qweight, scales = tensors["qweight"], tensors["scales"]
    stored, groups, notes = tensors.get(layout.zeros_suffix), layout.groups, layout.notes
    minimums = None
    if layout.version == GEMM:
        codes, scales = outputs_first(qweight), scales.t().contiguous()
        zeros = None if stored is None else outputs_first(stored).to(torch.int16)
    elif layout.version == GEMV:
        codes, scales, zeros = awq_fast.read_gemv(name, qweight, stored, scales, groups)
    else:
        codes, scales, zeros, minimums, more = awq_fast.read_fast(
            name, qweight, stored, scales, groups
        )
        notes += more
    if stored is None:
        notes += (f"{name}: no zeros are stored; zero_point is false, so all are {MIDPOINT}",)
    if zeros is not None and not stated.zero_point:
        low, high = int(zeros.min()), int(zeros.max())
        if low == high == MIDPOINT:
            zeros = None
        else:
            notes += (f"{name}: zero_point is false, but the stored zeros are {low}..{high}, "
                      f"not all {MIDPOINT}; the stored zeros are used",)  # fmt: skip
    scheme = Scheme(4, stated.group_size, symmetric=zeros is None and minimums is None)
    read = QWeight(scheme, codes, scales, zeros, minimums).check(name)
    return AwqLinear(read, layout.version, notes)


def planned(name: str, scheme: Scheme, shape: tuple[int, int]) -> tuple[Planned, ...]:
    """The gemm tensors that a linear [N, K] of `scheme` becomes, or BadTensor if it cannot."""
    n, k = shape
    groups = scheme.groups(k)
    if scheme.bits != 4:
        raise BadTensor(name, f"is {scheme.bits}-bit, AWQ stores 4 bits",
                        "write it as compressed-tensors, or quantize it to 4 bits")  # fmt: skip
    if n % 8 or not n:
        raise BadTensor(name, f"out_features {n} is not a multiple of 8, which AWQ packs to a word",
                        "write it as compressed-tensors, or leave it float")  # fmt: skip
    return (
        Planned(f"{name}.qweight", torch.int32, (k, n // 8)),
        Planned(f"{name}.qzeros", torch.int32, (groups, n // 8)),
        Planned(f"{name}.scales", torch.float16, (groups, n)),
    )


def to_tensors(name: str, qweight: QWeight, lossy: bool = False) -> dict[str, Tensor]:
    """A QWeight as gemm tensors; a symmetric one gets zeros of 8.

    BadTensor for anything but 4 bits, float minimums, a column order, N % 8 != 0, codes or zeros
    beyond 15, scales beyond fp16's range, and scales that fp16 rounds unless `lossy`.
    """
    if qweight.minimums is not None or qweight.g_idx is not None:
        what = "float minimums" if qweight.minimums is not None else "a column order"
        raise BadTensor(
            name, f"{what} cannot be stored as AWQ", "requantize it to integer zero points"
        )
    planned(name, qweight.scheme, (qweight.out_features, qweight.in_features))
    qweight.check(name)
    zeros = qweight.zeros
    if zeros is None:
        zeros = torch.full(qweight.scales.shape, MIDPOINT, dtype=torch.int16)
    low, high = int(zeros.min()), int(zeros.max())
    if low < 0 or high > 15:
        raise BadTensor(name, f"has zeros {low}..{high}, AWQ holds 0..15",
                        "write it as compressed-tensors, or quantize it again")  # fmt: skip
    change = scale_change(qweight, torch.float16)
    if change.largest == torch.inf:
        raise BadTensor(
            name,
            f"has scales up to {float(qweight.scales.abs().max()):.4g}, fp16 ends at 65504",
            "write it as compressed-tensors, which keeps their dtype",
        )
    if not change.exact and not lossy:
        raise BadTensor(
            name,
            f"{qweight.scales.dtype} scales change by up to {change.largest:.3g} (mean "
            f"{change.mean:.3g}) of their size in fp16",
            "allow a lossy conversion, or write it as compressed-tensors",
        )
    return {
        f"{name}.qweight": words_of_outputs(qweight.codes),
        f"{name}.qzeros": words_of_outputs(zeros.to(torch.uint8)),
        f"{name}.scales": qweight.scales.to(torch.float16).t().contiguous(),
    }


def outputs_first(words: Tensor) -> Tensor:
    """gemm words int32 [R, N/8] to their nibbles by output column, uint8 [N, R]."""
    rows, width = words.shape
    stored = words.contiguous().view(-1).view(torch.uint8).view(rows, width * 4)
    pairs = stored.t().contiguous().view(width, 4, rows)
    nibbles = torch.empty((width, 8, rows), dtype=torch.uint8)
    for byte in range(4):
        torch.bitwise_and(pairs[:, byte], 15, out=nibbles[:, ORDER[2 * byte]])
        torch.bitwise_right_shift(pairs[:, byte], 4, out=nibbles[:, ORDER[2 * byte + 1]])
    return nibbles.view(width * 8, rows)


def words_of_outputs(nibbles: Tensor) -> Tensor:
    """The inverse of outputs_first: uint8 [N, R] below 16 to int32 [R, N/8]."""
    outputs, rows = nibbles.shape
    eights = nibbles.reshape(outputs // 8, 8, rows)
    pairs = torch.empty((outputs // 8, 4, rows), dtype=torch.uint8)
    for byte in range(4):
        pairs[:, byte] = eights[:, ORDER[2 * byte]] | (eights[:, ORDER[2 * byte + 1]] << 4)
    stored = pairs.view(outputs // 2, rows).t().contiguous()
    return stored.view(-1).view(torch.int32).view(rows, outputs // 8)


def _require(
    name: str, stated: AwqSettings, parts: Mapping[str, _Sized], zeros_suffix: str
) -> None:
    """BadTensor unless the parts are there, two-dimensional, not empty and of a dtype read here."""
    for suffix in ("qweight", "scales", zeros_suffix)[: 3 if stated.zero_point else 2]:
        if suffix not in parts:
            raise BadTensor(f"{name}.{suffix}", "is missing", FETCH)
    packed = parts["qweight"].dtype
    wanted = {
        "qweight": (torch.int32, torch.int16),
        "scales": FLOATS,
        zeros_suffix: (torch.int32 if packed == torch.int32 else parts["scales"].dtype,),
    }
    for suffix, dtypes in wanted.items():
        if suffix not in parts:
            continue
        dtype, shape = parts[suffix].dtype, tuple(parts[suffix].shape)
        if dtype not in dtypes:
            raise BadTensor(
                f"{name}.{suffix}",
                f"is {dtype} (qweight {packed}), wanted {' or '.join(map(str, dtypes))}",
                "this is no AWQ linear: check quant_method in the quantization config",
            )
        if len(shape) != 2 or 0 in shape:
            raise BadTensor(
                f"{name}.{suffix}",
                f"has shape {shape}, wanted two dimensions, none of them 0",
                FETCH,
            )


def _size(version: str, qweight: _Sized) -> tuple[int, int]:
    """N and K of a packed weight."""
    rows, words = qweight.shape
    if version == GEMM:
        return words * 8, rows
    return (rows, words * 8) if version == GEMV else (rows * 4, words)


def _misfit(
    version: str, group_size: int, parts: Mapping[str, _Sized], zeros_suffix: str
) -> tuple[str, str, str] | None:
    """Why the tensors are not of this layout: suffix, problem and mend; None if they are."""
    n, k = _size(version, parts["qweight"])
    size = k if group_size == PER_CHANNEL else group_size
    if version in (GEMV_FAST, LLM_AWQ) and k % awq_fast.STRIP:
        return "qweight", f"has in_features {k}, {version} needs a multiple of 64", FETCH
    if k % size:
        return (
            "qweight",
            f"has in_features {k}, which is not a multiple of group size {size}",
            "quantize it again with a group size that divides it, or leave it float",
        )
    groups = k // size
    if version == GEMM:
        wanted = {"scales": (groups, n), zeros_suffix: (groups, n // 8)}
    else:
        width = awq_fast.zeros_width(k, size)
        if width is None:
            problem = f"has group size {size}, {version} is defined for 32, 64 and from 128 up"
            return "qweight", problem, CONFIG
        if version == GEMV:
            wanted = {"scales": (n, 8 * width), zeros_suffix: (n, width)}
        else:
            wanted = dict.fromkeys(("scales", zeros_suffix), (8 * width, n))
    for suffix, shape in wanted.items():
        found = tuple(parts[suffix].shape) if suffix in parts else shape
        if found != shape:
            fits = version == GEMM and found[1] == shape[1] and k % found[0] == 0
            mend = f"group_size {k // found[0]} would fit: {CONFIG}" if fits else CONFIG
            problem = f"has shape {found}, {version} [{n}, {k}] at group size {size} wants {shape}"
            return suffix, problem, mend
    return None


def _is_gptq(parts: Mapping[str, _Sized]) -> bool:
    """Whether the shapes are GPTQ's: qweight [K/8, N], scales [nG, N], qzeros [nG, N/8]."""
    words, n = parts["qweight"].shape
    groups, columns = parts["scales"].shape
    zeros = (groups, n // 8)
    same = "qzeros" in parts and tuple(parts["qzeros"].shape) == zeros
    return same and columns == n and words * 8 % groups == 0
