"""torchao tensor subclasses in safetensors: the plain layouts read, kernel layouts refused by name.

A parameter MODULE.weight of a subclass is stored in parts, MODULE._weight_qdata and so on; the
files' `__metadata__` says of which type (torchao_metadata.py).

    Int4Tensor                qdata int8 [N, K/2], low nibble first, two's complement
                              scale, zero_point float [nG, N];  w = scale * q + zero_point
    Int8Tensor                qdata int8 [N, K];  scale [N, nG], zero_point int8 or none
    IntxUnpackedToInt8Tensor  the same, q of 1 to 8 bits; zero_point int8 or float
    Int4PlainInt32Tensor      (Intel XPU) qdata int32 [N, K/8], nibble i of word c is column 8c + i
                              unsigned; scale [nG, N], zero_point int8 [nG, N]

w = scale * (q - zero_point) but for Int4Tensor. Blocks of several rows share a scale, which is
repeated. act_pre_scale multiplies activations. Sources: torchao 0.19
(prototype/safetensors, quantization/quantize_/workflows), fbgemm and mslk (int4_row_quantize_zp,
pack_int4), torch-xpu-ops (WeightInt4PackKernel.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightpath.checkpoints import bitpack
from weightpath.checkpoints.read_linear import (
    FETCH,
    FLOATS,
    ReadLinear,
    column_scales,
    finite,
    part,
    zeros_or_minimums,
)
from weightpath.checkpoints.torchao_metadata import (
    AS_INTEGERS,
    INT4,
    INT4_XPU,
    INT8,
    INTX,
    TorchaoTensor,
)
from weightpath.checkpoints.torchao_metadata import METHOD as METHOD
from weightpath.checkpoints.torchao_metadata import read_metadata as read_metadata
from weightpath.checkpoints.torchao_metadata import recognise as recognise
from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme


def from_tensors(name: str, stated: TorchaoTensor, tensors: Mapping[str, Tensor]) -> ReadLinear:
    """The linear `name` from its parts (keys as stored: `_weight_qdata`), checked.

    Exact: float offsets of an Int4Tensor or of float zero points become zeros where they are whole,
    else minimums (see zeros_or_minimums). 1-bit codes are held as 2-bit ones. BadTensor names what
    is missing or does not fit, with the numbers, before a code is unpacked.
    """
    for part_name in stated.parts:
        if stated.suffix(part_name) not in tensors:
            raise BadTensor(f"{name}.{stated.suffix(part_name)}", "is missing", FETCH)
    read = {INT4: _int4, INT4_XPU: _int4_xpu}.get(stated.kind, _unpacked)
    qweight, notes = read(name, stated, tensors)
    suffix = stated.suffix("act_pre_scale")
    scales = column_scales(name, suffix, tensors, qweight.in_features)
    if scales is not None:
        notes += (f"{name}: activations are multiplied by {suffix}, kept as column scales",)
    if stated.activations:
        notes += (f"{name}: the file asks for {stated.activations}; only the weight is read",)
    return ReadLinear(qweight.check(name), column_scales=scales, notes=notes)


def _int4(
    name: str, stated: TorchaoTensor, tensors: Mapping[str, Tensor]
) -> tuple[QWeight, tuple[str, ...]]:
    qdata = _part(name, stated, "qdata", tensors, (torch.int8, torch.uint8), (None, None))
    n, half = qdata.shape
    k, size = 2 * half, _group(name, stated, (n, 2 * half))
    scales, offsets = (
        _part(name, stated, which, tensors, FLOATS, (k // size, n)).t().contiguous()
        for which in ("scale", "zero_point")
    )
    finite(name, stated.suffix("zero_point"), offsets)
    exact = offsets.double() - 8 * scales.double()
    zeros, minimums, notes = zeros_or_minimums(name, 4, scales, exact)
    pairs = qdata.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(n, k) ^ 8
    scheme = Scheme(4, PER_CHANNEL if size == k else size, zeros is None and minimums is None)
    return QWeight(scheme, codes, scales, zeros, minimums), notes


def _int4_xpu(
    name: str, stated: TorchaoTensor, tensors: Mapping[str, Tensor]
) -> tuple[QWeight, tuple[str, ...]]:
    qdata = _part(name, stated, "qdata", tensors, (torch.int32,), (None, None))
    n, k = qdata.shape[0], qdata.shape[1] * 8
    size = _group(name, stated, (n, k))
    shape = (k // size, n)
    zero = tensors.get(stated.suffix("zero_point"))
    if zero is not None and zero.is_floating_point():
        raise BadTensor(
            f"{name}.{stated.suffix('zero_point')}",
            f"is {zero.dtype}: the weight is packed by an Ascend NPU's kernel",
            AS_INTEGERS,
        )
    scales = _part(name, stated, "scale", tensors, FLOATS, shape).t().contiguous()
    stored = _part(name, stated, "zero_point", tensors, (torch.int8,), shape)
    zeros = stored.t().contiguous().to(torch.int16)
    symmetric = bool((zeros == 8).all())
    scheme = Scheme(4, PER_CHANNEL if size == k else size, symmetric)
    codes = bitpack.unpack(qdata, 4, k)
    return QWeight(scheme, codes, scales, None if symmetric else zeros), ()


def _unpacked(
    name: str, stated: TorchaoTensor, tensors: Mapping[str, Tensor]
) -> tuple[QWeight, tuple[str, ...]]:
    """Int8Tensor and IntxUnpackedToInt8Tensor: codes int8 [N, K], blocks of any rows by columns."""
    qdata = _part(name, stated, "qdata", tensors, (torch.int8,), (None, None))
    n, k = qdata.shape
    rows, size = stated.block_size[0], _group(name, stated, (n, k))
    scales = _by_row(name, stated, "scale", tensors, FLOATS, (n // rows, k // size), rows)
    stored = None
    if stated.kind == INTX or stated.suffix("zero_point") in tensors:
        dtypes = (torch.int8, *FLOATS) if stated.kind == INTX else (torch.int8,)
        stored = _by_row(name, stated, "zero_point", tensors, dtypes, (n // rows, k // size), rows)
    low, high = (int(end) for end in qdata.aminmax())
    if low < -(1 << (stated.bits - 1)) or high >= 1 << (stated.bits - 1):
        raise BadTensor(
            f"{name}.{stated.suffix('qdata')}",
            f"spans {low}..{high}, {stated.bits} bits hold {-(1 << (stated.bits - 1))}.."
            f"{(1 << (stated.bits - 1)) - 1}",
            FETCH,
        )
    bits = max(stated.bits, 2)
    middle, zeros, minimums, notes = 1 << (bits - 1), None, None, ()
    if stored is not None and stored.is_floating_point():
        finite(name, stated.suffix("zero_point"), stored)
        exact = -scales.double() * (middle + stored.double())
        zeros, minimums, notes = zeros_or_minimums(name, bits, scales, exact)
    elif stored is not None and bool(stored.any()):
        zeros = stored.to(torch.int16) + middle
    scheme = Scheme(bits, PER_CHANNEL if size == k else size, zeros is None and minimums is None)
    codes = qdata.contiguous().view(torch.uint8) + middle  # modulo 256: -middle becomes 0
    return QWeight(scheme, codes, scales, zeros, minimums), notes


def _by_row(
    name: str,
    stated: TorchaoTensor,
    part_name: str,
    tensors: Mapping[str, Tensor],
    dtypes: tuple[torch.dtype, ...],
    blocks: tuple[int, int],
    rows: int,
) -> Tensor:
    """Values of blocks [N/rows, nG] repeated for each row, [N, nG]. Old files store them flat."""
    suffix = stated.suffix(part_name)
    tensor = tensors.get(suffix)
    if tensor is not None and tensor.ndim == 1 and tensor.numel() == blocks[0] * blocks[1]:
        tensors = {suffix: tensor.view(blocks)}
    values = part(name, suffix, tensors, dtypes, blocks)
    return values.repeat_interleave(rows, dim=0) if rows > 1 else values.contiguous()


def _part(
    name: str,
    stated: TorchaoTensor,
    part_name: str,
    tensors: Mapping[str, Tensor],
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> Tensor:
    suffix = stated.suffix(part_name)
    mend = "fused experts are not read: save one linear each" if _is_3d(tensors, suffix) else FETCH
    return part(name, suffix, tensors, dtypes, shape, mend)


def _is_3d(tensors: Mapping[str, Tensor], suffix: str) -> bool:
    return suffix in tensors and tensors[suffix].ndim == 3


def _group(name: str, stated: TorchaoTensor, shape: tuple[int, int]) -> int:
    """Columns that share a scale, once blocks tile the shape that the parts have."""
    rows, size = stated.block_size
    if stated.shape not in (None, shape):
        problem = f"is {list(shape)}, the metadata says {list(stated.shape or ())}"
        raise BadTensor(f"{name}.{stated.suffix('qdata')}", problem, FETCH)
    whole_rows = rows == 1 or stated.kind in (INT8, INTX)
    if shape[0] % rows or shape[1] % size or not whole_rows:
        raise BadTensor(
            f"{name}.{stated.suffix('qdata')}",
            f"is {list(shape)}, blocks of {[rows, size]} do not tile it",
            "use a group size that divides in_features",
        )
    return size
