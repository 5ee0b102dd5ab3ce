"""GPTQ: what AutoGPTQ, GPTQModel, optimum and AutoRound write, read into QWeight and written back.

    w[n, k] = scales[g, n] * (code[n, k] - zero[g, n]),   g = g_idx[k], or k // group_size

For a linear called NAME with weight [N, K], b bits and nG = ceil(K / group_size) groups a row:

    NAME.qweight  int32 [K*b/32, N]   codes along K
    NAME.qzeros   int32 [nG, N*b/32]  zero points along N: v1 stores zero - 1, v2 the zero itself
    NAME.scales   float [nG, N]       negative ones are AutoRound's, and sound
    NAME.g_idx    int32 [K]           group of each column; AutoRound leaves it out

Both are packed densely and little-endian: 32 codes of b bits fill b words, and of 3-bit codes
numbers 10 and 21 straddle two. Words of 8, 16 or 64 bits (`pack_dtype`) hold the same bytes. Under
gptq_p (and always for 5 to 7 bits) the b words of 32 codes are planes instead: words of the lowest
4 bits (2 where b is 3), then of the bits above. Sources: AutoGPTQ 0.7 and GPTQModel 7.3.4
(nn_modules/qlinear), auto-round 0.14 (auto_round_extension/torch).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightpath.checkpoints import bitpack, column_order
from weightpath.checkpoints.gptq_config import (
    METHOD,
    METHODS,
    Convention,
    GptqSettings,
    disagreements,
    quantization_config,
    settings,
)
from weightpath.checkpoints.gptq_zeros import (
    WHOLE_BITS,
    WORD_DTYPES,
    ZeroConvention,
    ZeroCounts,
    count_zeros,
    unpack,
    word_bits,
    zero_convention,
    zero_points,
)
from weightpath.checkpoints.writer import Planned
from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

__all__ = [
    "METHOD", "METHODS", "SUFFIXES", "Convention", "GptqSettings", "ZeroConvention", "ZeroCounts",
    "code_offset", "count_zeros", "disagreements", "from_tensors", "in_column_order", "layout_of",
    "planned", "quantization_config", "settings", "to_tensors", "unstorable_zeros",
    "zero_convention",
]  # fmt: skip

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
WRITTEN_BITS = (2, 3, 4, 8)
SIDE = 32
"""AutoGPTQ and GPTQModel pack N and K in whole multiples of it."""
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WANTED = {
    "qweight": (WORD_DTYPES, 2),
    "qzeros": (WORD_DTYPES, 2),
    "scales": (_SCALE_DTYPES, 2),
    "g_idx": ((torch.int32, torch.int64), 1),
}
_AGAIN = "fetch the checkpoint again"
_CONFIG = "check bits and group_size in the checkpoint's quantization config"


def planned(
    name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype = torch.float16
) -> tuple[Planned, ...]:
    """The tensors that a linear [N, K] of `scheme` becomes, before its codes are known.

    BadTensor where GPTQ's readers would refuse it: other than 2, 3, 4 or 8 bits, N or K no
    multiple of 32.
    """
    n, k = shape
    if scheme.bits not in WRITTEN_BITS or n % SIDE or k % SIDE:
        raise BadTensor(
            name,
            f"[{n}, {k}] at {scheme.bits} bits cannot be stored as GPTQ, which takes 2, 3, 4 or 8 "
            f"bits and multiples of {SIDE}",
            "write compressed-tensors",
        )
    groups = scheme.groups(k)
    return (
        Planned(f"{name}.qweight", torch.int32, (bitpack.words(k, scheme.bits), n)),
        Planned(f"{name}.qzeros", torch.int32, (groups, bitpack.words(n, scheme.bits))),
        Planned(f"{name}.scales", scale_dtype, (groups, n)),
        Planned(f"{name}.g_idx", torch.int32, (k,)),
    )


def unstorable_zeros(qweight: QWeight) -> int:
    """How many zero points are 0, which v1 has no field for; v2 has."""
    return 0 if qweight.zeros is None else int((qweight.zeros == 0).sum())


def to_tensors(
    name: str, qweight: QWeight, version: Convention = "v1", wrap_zeros: bool = False
) -> dict[str, Tensor]:
    """A QWeight as the tensors above; a column order is kept in g_idx, else g_idx is k // G.

    wrap_zeros: store a zero of 0 as all ones in v1, which AutoGPTQ's readers and this one take
    for 0, GPTQModel's for 0 with the next field one too high, llama.cpp's for 2**bits. Without it
    such a zero is a BadTensor; so are float minimums and values that do not fit their bits.
    """
    if qweight.minimums is not None:
        raise BadTensor(
            name, "float minimums cannot be stored as GPTQ", "requantize it to integer zero points"
        )
    qweight.check(name)
    bits, top, (n, k) = qweight.scheme.bits, qweight.scheme.top_code, qweight.codes.shape
    planned(name, qweight.scheme, (n, k))
    zeros = qweight.zeros
    if zeros is None:
        zeros = torch.full(qweight.scales.shape, qweight.scheme.midpoint, dtype=torch.int16)
    if int(zeros.min()) < 0 or int(zeros.max()) > top:
        raise BadTensor(
            name,
            f"zero points span {int(zeros.min())}..{int(zeros.max())}, {bits} bits hold 0..{top}",
            "store them unsigned, 2**(bits-1) added to signed ones",
        )
    if version == "v1":
        lost = unstorable_zeros(qweight)
        if lost and not wrap_zeros:
            raise BadTensor(
                name,
                f"{lost} of {zeros.numel()} zero points are 0, which GPTQ v1's readers differ on",
                "write gptq_v2, or compressed-tensors",
            )
        zeros = (zeros - 1) & top
    fields = zeros.to(torch.uint8).t().contiguous()
    return {
        f"{name}.qweight": bitpack.pack(qweight.codes, bits).t().contiguous(),
        f"{name}.qzeros": bitpack.pack(fields, bits),
        f"{name}.scales": qweight.scales.t().contiguous(),
        f"{name}.g_idx": qweight.group_of_column().to(torch.int32),
    }


def from_tensors(
    name: str, settings: GptqSettings, tensors: Mapping[str, Tensor], convention: Convention
) -> QWeight:
    """A QWeight from the tensors above (keys are the bare suffixes), checked.

    settings: those of this module. A g_idx of k // group_size is dropped, as is one that only
    orders whole groups (the scales take its order); another one is kept. Where group_size does not
    divide K, groups are cut so that it does. None of that changes a weight. zeros are None where
    all are the midpoint. BadTensor names what is missing or does not fit, with the numbers, before
    anything is unpacked.
    """
    n, k, groups = layout_of(name, settings, tensors)
    g_idx = tensors.get("g_idx")
    if in_column_order(settings, k, g_idx):
        order = None
    elif g_idx is not None:
        order = g_idx
    elif _lost_order(settings, groups):
        raise BadTensor(
            f"{name}.g_idx",
            "is missing though desc_act is true: the order of the columns is lost",
            _AGAIN,
        )
    else:
        order = torch.arange(k) // _size(settings, k)
    zeros = zero_points(tensors["qzeros"], settings, n, convention).t().contiguous()
    symmetric = bool((zeros == 1 << (settings.bits - 1)).all())
    qweight = QWeight(
        Scheme(settings.bits, settings.group_size, symmetric),
        unpack(tensors["qweight"].t(), settings, k),
        tensors["scales"].t().contiguous(),
        None if symmetric else zeros.to(torch.int16),
        g_idx=None if order is None else order.to(torch.int32),
    )
    return column_order.without_order(qweight).check(name)


def in_column_order(settings: GptqSettings, in_features: int, g_idx: Tensor | None) -> bool:
    """Whether column k is of group k // group_size and whole groups tile K: no order to keep."""
    size = _size(settings, in_features)
    if in_features % size:
        return False
    if g_idx is None:
        return not _lost_order(settings, in_features // size)
    return column_order.trivial(g_idx, size)


def code_offset(name: str, settings: GptqSettings, tensors: Mapping[str, Tensor]) -> float:
    """Mean of code minus stored zero field over one linear: evidence where no label tells.

    Weights average to about zero, so it is near 0 where the zeros are stored as they are (v2) and
    near 1 where they are stored less one (v1).
    """
    n, k, groups = layout_of(name, settings, tensors)
    codes = unpack(tensors["qweight"].t(), settings, k)
    fields = unpack(tensors["qzeros"], settings, n).float()
    g_idx = tensors.get("g_idx")
    group = torch.arange(k) // _size(settings, k) if g_idx is None else g_idx.long()
    share = torch.bincount(group, minlength=groups) / k
    return float(codes.sum(dtype=torch.int64)) / (n * k) - float(share @ fields.mean(1))


def layout_of(
    name: str, settings: GptqSettings, tensors: Mapping[str, Tensor]
) -> tuple[int, int, int]:
    """N, K and the number of groups, once every dtype, shape and group index has been checked.

    Of the values only g_idx is read. BadTensor names the tensor, the numbers and the mend.
    """
    for suffix, (dtypes, sides) in _WANTED.items():
        tensor = tensors.get(suffix)
        if tensor is None:
            if suffix == "g_idx":
                continue
            raise BadTensor(f"{name}.{suffix}", "is missing", _AGAIN)
        if tensor.dtype not in dtypes or tensor.ndim != sides or not tensor.numel():
            raise BadTensor(
                f"{name}.{suffix}",
                f"is {tensor.dtype} {tuple(tensor.shape)}, wanted {dtypes[0]} and {sides} "
                "dimensions that are not empty",
                _AGAIN,
            )
    bits, qweight, qzeros = settings.bits, tensors["qweight"], tensors["qzeros"]
    if bits not in WHOLE_BITS and {qweight.dtype, qzeros.dtype} != {torch.int32}:
        raise BadTensor(
            f"{name}.qweight",
            f"holds {bits}-bit codes in {qweight.dtype}, zeros in {qzeros.dtype}; wanted int32",
            "no writer makes that: " + _AGAIN,
        )
    words, n = qweight.shape
    held, g_idx = words * word_bits(qweight), tensors.get("g_idx")
    k = held // bits if g_idx is None else g_idx.shape[0]
    if k * bits != held:
        raise BadTensor(
            f"{name}.qweight",
            f"has {words} rows of {qweight.dtype}, {held} bits; {k} columns at {bits} bits fill "
            f"{k * bits}",
            _CONFIG,
        )
    if settings.planar and (k % SIDE or n % SIDE):
        raise BadTensor(
            f"{name}.qweight", f"is [{n}, {k}], planes come in blocks of {SIDE} codes", _AGAIN
        )
    groups, fields = -(-k // _size(settings, k)), -(-n * bits // word_bits(qzeros))
    for suffix, shape in (("scales", (groups, n)), ("qzeros", (groups, fields))):
        if tuple(tensors[suffix].shape) != shape:
            raise BadTensor(
                f"{name}.{suffix}",
                f"has shape {tuple(tensors[suffix].shape)}, [{n}, {k}] at {bits} bits in groups of "
                f"{_size(settings, k)} wants {shape}",
                _CONFIG,
            )
    if g_idx is not None and (int(g_idx.min()) < 0 or int(g_idx.max()) >= groups):
        raise BadTensor(
            f"{name}.g_idx",
            f"spans {int(g_idx.min())}..{int(g_idx.max())}, wanted 0..{groups - 1}",
            _AGAIN,
        )
    return n, k, groups


def _lost_order(settings: GptqSettings, groups: int) -> bool:
    """Whether columns were put in an order that only a g_idx would tell."""
    return settings.desc_act and not settings.static_groups and groups > 1


def _size(settings: GptqSettings, k: int) -> int:
    return k if settings.group_size == PER_CHANNEL else settings.group_size
