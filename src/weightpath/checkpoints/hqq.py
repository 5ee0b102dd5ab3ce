"""HQQ: half-quadratic quantization, with float zero points. Integers where groups run along K.

    w = (q - zero) * scale    per group of the weight regrouped: [N*K/G, G] (axis 1), [G, N*K/G] (0)

For a linear called NAME:

    NAME.W_q    packed along rows, `fields` of them in equal runs, the first run in the highest
                bits: row r of R is field r // (R / fields) of packed row r % (R / fields)
                8bit_u8: uint8, 1 field (also 5 and 6 bits)    4bit_u8: 2      2bit_u8: 4 (1.58 too)
                1bit_u8: 8     3bit_32: int32, 10 fields from bit 27 down, rows padded to tens
    NAME.scale, NAME.zero  float, one a group: [R, 1] for axis 1, [1, C] for axis 0
    NAME.nbits, group_size, axis, shape, packing, view_as_float, ...  each a tensor: numbers as
                int32 or float32, booleans as uint8, text as uint8 character codes

view_as_float: W_q's bytes under a float dtype. Axis 1 with G dividing K is a QWeight, with integer
zeros where all are whole (4-bit rounds them at first), else minimums -scale * zero. Otherwise a
group's columns lie across rows: floats, lossy. Text is compared, never evaluated (hqq's own loader
calls eval on it). Source: hqq 0.2.8 (core/bitpack.py, core/quantize.py, core/utils.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.read_linear import (
    FETCH,
    FLOATS,
    ReadLinear,
    finite,
    part,
    zeros_or_minimums,
)
from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

METHOD = "hqq"
SUFFIXES = (
    "W_q", "scale", "zero", "nbits", "group_size", "axis", "shape", "packing", "view_as_float",
    "unpack_view_dtype", "compute_dtype", "quant_scale", "quant_zero", "channel_wise", "optimize",
    "round_zero", "offload_meta", "encoded_state_dict", "stores_quant_config",
)  # fmt: skip
_PACKINGS = {
    8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8",
    1.58: "2bit_u8", 1: "1bit_u8",
}  # fmt: skip
_FIELD_BITS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
_LONGEST_TEXT = 64


@dataclass(frozen=True)
class HqqSettings:
    """What a linear's own tensors say. bits of a code as held; field_bits as packed."""

    bits: int
    field_bits: int
    group_size: int
    axis: int
    shape: tuple[int, int]
    view_as_float: bool

    @property
    def fields(self) -> int:
        """Codes in a packed element."""
        return 10 if self.field_bits == 3 else 8 // self.field_bits

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the regrouped weight."""
        groups = self.shape[0] * self.shape[1] // self.group_size
        return (groups, self.group_size) if self.axis == 1 else (self.group_size, groups)


def recognise(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """How this is known to be HQQ, as a phrase, or None; names are tensor names."""
    if config.get("quant_method") == METHOD:
        return f"quant_method {METHOD}"
    found = next((name for name in names if name.endswith(".W_q")), None)
    return None if found is None else f"a tensor named {found}"


def from_tensors(name: str, tensors: Mapping[str, Tensor]) -> ReadLinear:
    """A linear from its tensors (keys are SUFFIXES), checked.

    Floats are float32 [N, K]; HQQ itself computes in 16 bits. 1-bit codes are held as 2-bit ones.
    BadTensor names what is missing or does not fit, with the numbers, before a code is unpacked.
    """
    stated = settings(name, tensors)
    rows, columns = stated.sides
    packed = _packed(name, stated, tensors)
    wanted = (rows, 1) if stated.axis == 1 else (1, columns)
    scale, zero = (part(name, which, tensors, FLOATS, wanted) for which in ("scale", "zero"))
    finite(name, "zero", zero)
    finite(name, "scale", scale)
    codes = unpack(packed, stated.field_bits)[:rows]
    if int(codes.max()) >= 1 << stated.bits:
        problem = (
            f"holds code {int(codes.max())}, {stated.bits} bits end at {(1 << stated.bits) - 1}"
        )
        raise BadTensor(f"{name}.W_q", problem, FETCH)
    n, k = stated.shape
    if stated.axis == 1 and k % stated.group_size == 0:
        groups = k // stated.group_size
        scales = scale.contiguous().view(n, groups)
        offsets = -(scale.double() * zero.double()).view(n, groups)
        zeros, minimums, notes = zeros_or_minimums(name, stated.bits, scales, offsets)
        size = PER_CHANNEL if groups == 1 else stated.group_size
        scheme = Scheme(stated.bits, size, zeros is None and minimums is None)
        qweight = QWeight(scheme, codes.reshape(n, k), scales, zeros, minimums)
        return ReadLinear(qweight.check(name), notes=notes)
    weight = ((codes.float() - zero.float()) * scale.float()).reshape(n, k)
    why = "axis is 0" if stated.axis == 0 else f"groups of {stated.group_size} do not divide {k}"
    note = (
        f"{name}: {why}, so its groups lie across rows; read as float32, and any integer format "
        "with groups along in_features changes its values"
    )
    return ReadLinear(None, floats=weight, notes=(note,))


def settings(name: str, tensors: Mapping[str, Tensor]) -> HqqSettings:
    """What the tensors beside W_q say, checked; BadTensor with what is missing or not read."""
    for key in ("quant_scale", "quant_zero"):
        if key in tensors and _number(name, key, tensors):
            raise BadTensor(
                f"{name}.{key}",
                "is true: quantized scales and zeros, which hqq after 0.1.8 does not store",
                "quantize it again without them",
            )
    number = round(_number(name, "nbits", tensors), 2)
    if number not in _PACKINGS:
        raise BadTensor(f"{name}.nbits", f"is {number:g}", "1, 1.58, 2, 3, 4, 5, 6 and 8 are read")
    packing = _PACKINGS[number]
    if "packing" in tensors and (found := _text(name, "packing", tensors)) != packing:
        raise BadTensor(
            f"{name}.packing", f"is {found!r}, {number:g} bits are packed as {packing}", FETCH
        )
    shape = part(name, "shape", tensors, (torch.int64, torch.int32), (2,)).tolist()
    size, axis = (_number(name, key, tensors) for key in ("group_size", "axis"))
    if axis not in (0, 1) or size != int(size) or size < 1 or min(shape) < 1:
        raise BadTensor(
            f"{name}.axis",
            f"is {axis:g}, group_size {size:g}, shape {shape}; wanted axis 0 or 1 and sizes "
            "above 0",
            FETCH,
        )
    if shape[0] * shape[1] % int(size):
        raise BadTensor(
            f"{name}.group_size",
            f"is {size:g}, which does not divide {shape[0]} * {shape[1]}",
            FETCH,
        )
    floats = "view_as_float" in tensors and bool(_number(name, "view_as_float", tensors))
    bits = max(2, int(number) if number != 1.58 else 2)
    pair = (shape[0], shape[1])
    return HqqSettings(bits, _FIELD_BITS[packing], int(size), int(axis), pair, floats)


def unpack(packed: Tensor, field_bits: int) -> Tensor:
    """Packed rows [P, C] to codes uint8 [P * fields, C], the highest field's rows first.

    packed: int32 for 3 bits, else uint8.
    """
    top = 27 if field_bits == 3 else 8 - field_bits
    mask = (1 << field_bits) - 1
    runs = [((packed >> shift) & mask).to(torch.uint8) for shift in range(top, -1, -field_bits)]
    return torch.cat(runs)


def _packed(name: str, stated: HqqSettings, tensors: Mapping[str, Tensor]) -> Tensor:
    """W_q as uint8, or int32 for 3 bits, of the size that the settings want."""
    rows, columns = stated.sides
    dtype = torch.int32 if stated.field_bits == 3 else torch.uint8
    if stated.field_bits != 3 and rows % stated.fields:
        raise BadTensor(
            f"{name}.W_q", f"has {rows} rows of codes, packed {stated.fields} to a byte", FETCH
        )
    wanted = (-(-rows // stated.fields), columns)
    stored = tensors.get("W_q")
    if not stated.view_as_float or stored is None:
        return part(name, "W_q", tensors, (dtype,), wanted)
    whole, wide = columns * dtype.itemsize, stored.element_size()
    if whole % wide:
        raise BadTensor(f"{name}.W_q", f"is {stored.dtype}, a row of codes is {whole} bytes", FETCH)
    part(name, "W_q", tensors, FLOATS, (wanted[0], whole // wide))
    return stored.contiguous().view(dtype)


def _number(name: str, key: str, tensors: Mapping[str, Tensor]) -> float:
    """A number stored as a tensor of one element."""
    tensor = tensors.get(key)
    if tensor is None:
        raise BadTensor(f"{name}.{key}", "is missing", FETCH)
    value = float(tensor) if tensor.numel() == 1 else torch.nan
    if abs(value) < 1 << 53:
        return value
    raise BadTensor(f"{name}.{key}", f"holds {tensor.numel()} numbers, wanted a finite one", FETCH)


def _text(name: str, key: str, tensors: Mapping[str, Tensor]) -> str:
    """Text stored as character codes."""
    tensor = part(name, key, tensors, (torch.uint8,), (None,))
    if tensor.numel() > _LONGEST_TEXT:
        raise BadTensor(f"{name}.{key}", f"is {tensor.numel()} characters long", FETCH)
    return "".join(map(chr, tensor.tolist()))
