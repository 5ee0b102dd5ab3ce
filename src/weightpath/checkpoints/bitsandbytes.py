"""bitsandbytes: int8 rows read into integers, nf4 and fp4 read as floats (lossy for any target).

For a linear called NAME with weight [N, K]:

    int8      NAME.weight int8 [N, K], NAME.SCB float [N], NAME.weight_format uint8 (0: rows)
              w[n, k] = weight[n, k] * SCB[n] / 127
    nf4, fp4  NAME.weight                   bytes of any dtype; element 2i of the flattened weight
                                            is the high nibble of byte i, 2i + 1 the low one
              NAME.weight.absmax            float32 [blocks], one for `blocksize` elements
              NAME.weight.quant_map         float32 [16], the type's table
              NAME.weight.quant_state.bitsandbytes__nf4   uint8, JSON
              w = table[code] * absmax[element // blocksize], blocks may cross rows
    nested    absmax is uint8, and absmax = nested_quant_map[absmax] *
              nested_absmax[block // nested_blocksize] + nested_offset

Readers use the type's own table, not quant_map. Source: bitsandbytes 0.50 (functional.py
QuantState and get_4bit_type, backends/default/ops.py, nn/modules.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightpath.checkpoints.read_linear import FETCH, FLOATS, ReadLinear, finite, part
from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

METHOD = "bitsandbytes"
STATE = "weight.quant_state.bitsandbytes__"
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value / 12
        for sign in (1, -1)
        for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
    ),
}  # fmt: skip
"""Values of the 16 codes. nf4: quantiles of the normal distribution; fp4: sign, 2-bit exponent,
1-bit mantissa, divided by the largest."""
SUFFIXES = (
    "weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
    "weight.nested_quant_map", f"{STATE}nf4", f"{STATE}fp4",
)  # fmt: skip
ROW_FORMAT = 0
TO_SCALE = 7.874015718698502e-3
"""1 / 127 as bitsandbytes writes it, which is the float32 nearest to it."""
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_LARGEST_STATE = 4096
"""Bytes of JSON in a quant_state; bitsandbytes writes about 200."""
_STEP = 1 << 22
"""Bytes of packed weight turned into floats at a time: 32 MiB of float32."""


@dataclass(frozen=True)
class QuantState:
    """What a quant_state says. shape [N, K]; nested_* are 0 where absmax is not quantized."""

    quant_type: str
    blocksize: int
    dtype: torch.dtype
    shape: tuple[int, int]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def recognise(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """How this is known to be bitsandbytes, as a phrase, or None; names are tensor names."""
    if config.get("quant_method") == METHOD:
        return f"quant_method {METHOD}"
    for name in names:
        if name.endswith((".weight.absmax", ".SCB")):
            return f"a tensor named {name}"
    return None


def part_of(tensor: str) -> tuple[str, str] | None:
    """Module and bare suffix of a tensor's name where the suffix is one of SUFFIXES, else None.

    `a.weight.absmax` is part weight.absmax of module a.
    """
    for suffix in SUFFIXES:
        module = tensor.removesuffix(f".{suffix}")
        if module != tensor:
            return module, suffix
    return None


def from_tensors(name: str, tensors: Mapping[str, Tensor]) -> ReadLinear:
    """A linear from its tensors (keys are SUFFIXES), checked.

    int8: a QWeight with the file's codes and scales of SCB / 127, rounded once to float32 (so
    within 2**-23 of bitsandbytes' own product). nf4 and fp4: floats in the dtype of the quant
    state, bit for bit as dequantize_4bit gives them; lossy. BadTensor names what is missing or
    does not fit, with the numbers, before a code is unpacked.
    """
    if "SCB" in tensors:
        return ReadLinear(_int8(name, tensors).check(name))
    types = [kind for kind in TABLES if STATE + kind in tensors]
    if len(types) != 1:
        raise BadTensor(
            f"{name}.weight",
            f"has {len(types)} quant states, wanted one, or SCB",
            "nothing else says what its bytes are: " + FETCH,
        )
    state = quant_state(name, types[0], tensors[STATE + types[0]])
    weight = _four_bit(name, state, tensors)
    note = (
        f"{name}: {state.quant_type} values are not evenly spaced, so it is read as {state.dtype} "
        "floats; any integer format changes them"
    )
    return ReadLinear(None, floats=weight, notes=(note,))


def quant_state(name: str, quant_type: str, tensor: Tensor) -> QuantState:
    """The JSON in a quant_state tensor, checked; BadTensor with what is wrong in it."""
    where = f"{name}.{STATE}{quant_type}"
    part(name, STATE + quant_type, {STATE + quant_type: tensor}, (torch.uint8,), (None,))
    if tensor.numel() > _LARGEST_STATE:
        raise BadTensor(where, f"is {tensor.numel()} bytes, wanted at most {_LARGEST_STATE}", FETCH)
    try:
        stated = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise BadTensor(where, "is not a JSON object", FETCH)
    shape = stated.get("shape")
    n, k = shape if isinstance(shape, list) and len(shape) == 2 else (0, 0)
    size, nested = stated.get("blocksize", 0), stated.get("nested_blocksize")
    offset, dtype = stated.get("nested_offset", 0.0), str(stated.get("dtype"))
    checks = {
        "quant_type": stated.get("quant_type") == quant_type,
        "shape": _is_size(n) and _is_size(k),
        "blocksize": _is_size(size) and size in _BLOCK_SIZES,
        "dtype": dtype in _DTYPES,
        "nested_blocksize": nested is None or _is_size(nested),
        "nested_offset": isinstance(offset, int | float) and abs(offset) < torch.inf,
    }
    for key, sound in checks.items():
        if not sound:
            raise BadTensor(where, f"says {key} {stated.get(key)!r:.40}, which is not read", FETCH)
    return QuantState(quant_type, size, _DTYPES[dtype], (n, k), nested or 0, float(offset))


def _int8(name: str, tensors: Mapping[str, Tensor]) -> QWeight:
    weight = part(name, "weight", tensors, (torch.int8,), (None, None))
    stored = tensors["SCB"]
    if tuple(stored.shape) == (weight.shape[0], 1):
        stored = stored.view(-1)
    scales = part(name, "SCB", {"SCB": stored}, FLOATS, (weight.shape[0],))
    order = tensors.get("weight_format")
    if order is not None and (order.numel() != 1 or int(order) != ROW_FORMAT):
        raise BadTensor(
            f"{name}.weight_format",
            f"is {order.tolist()!r:.40}: tiled for one GPU's kernel, not in rows (0)",
            "save it again with bitsandbytes 0.43 or later, which writes rows",
        )
    codes = weight.contiguous().view(torch.uint8) ^ 128
    return QWeight(Scheme(8), codes, (scales.float() * TO_SCALE).view(-1, 1))


def _four_bit(name: str, state: QuantState, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight [N, K] in the state's dtype."""
    n, k = state.shape
    stored = tensors.get("weight")
    held = 0 if stored is None else stored.numel() * stored.element_size()
    if stored is None or held != (n * k + 1) // 2 or stored.ndim > 2:
        shape = None if stored is None else tuple(stored.shape)
        raise BadTensor(
            f"{name}.weight", f"is {shape}, {held} bytes; [{n}, {k}] is {(n * k + 1) // 2}", FETCH
        )
    if stored.ndim == 2 and stored.shape[0] == 1 and held > 1:
        raise BadTensor(
            f"{name}.weight", f"is {tuple(stored.shape)}, a transposed weight", "save it as [N, 1]"
        )
    table = torch.tensor(TABLES[state.quant_type], dtype=torch.float32)
    if "weight.quant_map" in tensors:
        found = part(name, "weight.quant_map", tensors, FLOATS, (16,)).float()
        if not torch.allclose(found, table, rtol=0.0, atol=1e-6):
            off = int((found - table).abs().nan_to_num(torch.inf).argmax())
            raise BadTensor(
                f"{name}.weight.quant_map",
                f"[{off}] is {float(found[off]):.6g}, {state.quant_type} has "
                f"{float(table[off]):.6g}",
                "no reader follows another table: " + FETCH,
            )
    absmax = _absmax(name, state, tensors)
    flat = stored.contiguous().view(-1).view(torch.uint8)
    weight = torch.empty(held * 2, dtype=state.dtype)
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=-1)  # by byte
    step = _STEP // state.blocksize * state.blocksize
    for start in range(0, held, step):
        values = pairs.index_select(0, flat[start : start + step].int()).view(-1)
        blocks = -(-values.numel() // state.blocksize)
        first = start * 2 // state.blocksize
        factors = absmax[first : first + blocks].repeat_interleave(state.blocksize)
        weight[start * 2 : start * 2 + values.numel()] = values * factors[: values.numel()]
    return weight[: n * k].view(n, k)


def _absmax(name: str, state: QuantState, tensors: Mapping[str, Tensor]) -> Tensor:
    """One float32 a block, un-nested."""
    blocks = -(-state.shape[0] * state.shape[1] // state.blocksize)
    if "weight.nested_absmax" not in tensors:
        stored = part(name, "weight.absmax", tensors, FLOATS, (blocks,))
        return finite(name, "weight.absmax", stored).float()
    if not state.nested_blocksize:
        problem = "is there, but the quant state names no nested_blocksize"
        raise BadTensor(f"{name}.weight.nested_absmax", problem, FETCH)
    stored = part(name, "weight.absmax", tensors, (torch.uint8,), (blocks,))
    table = part(name, "weight.nested_quant_map", tensors, FLOATS, (256,)).float()
    outer = -(-blocks // state.nested_blocksize)
    scales = part(name, "weight.nested_absmax", tensors, FLOATS, (outer,)).float()
    finite(name, "weight.nested_quant_map", table)
    finite(name, "weight.nested_absmax", scales)
    spread = scales[torch.arange(blocks) // state.nested_blocksize]
    return table[stored.int()] * spread + state.nested_offset


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
