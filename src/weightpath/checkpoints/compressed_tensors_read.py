"""Reading a compressed-tensors linear: packed words, dense or padded, and plain int8.

    pack-quantized   weight_packed int32 [N, words]   see compressed_tensors.py
    int-quantized    weight        int8 [N, K], a code less 2**(b-1)
                     weight_scale  float [N, nG], [N, 1] or one number
                     weight_zero_point  int8, as the scales, where asymmetric

Versions up to 0.17.1 pad each word: 32 // b codes of b bits, the rest empty. From 0.18.0 on they
are dense: code i is at bit i * b of its row. That is one layout for 1, 2, 4 and 8 bits; otherwise
the number of words tells, ceil(K / (32 // b)) or ceil(K * b / 32), the zero points' too. Where
both numbers agree (K below 160 and no multiple of 32) it is padded if bits beyond K * b are set.
The bits that padding leaves empty must be: else the config's bits are another file's.
Zero points may also be int8 and not packed. Source: compressed-tensors 0.15 to 0.20
(compressors/pack_quantized and naive_quantized; quantized_compressors/pack_quantized before).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from weightpath.checkpoints import bitpack, column_order
from weightpath.errors import BadTensor
from weightpath.qweight import QWeight
from weightpath.scheme import PER_CHANNEL, Scheme

_AGAIN = "fetch the checkpoint again"


def from_tensors(name: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> QWeight:
    """A QWeight from a linear's tensors (keys are the bare suffixes), checked.

    Packed where weight_packed is there, else int8. A g_idx that is k // group_size is dropped, as
    is one that only orders whole groups (the scales take its order); another one is kept. Zero
    points of a symmetric scheme are accepted where they are all the midpoint. BadTensor names what
    is missing or does not fit, with the numbers, before a code is unpacked.
    """
    packed = "weight_packed" in tensors or "weight" not in tensors
    _require(name, scheme, packed, tensors)
    if packed:
        n, k = _packed_shape(name, scheme, tensors)
        padded = _is_padded(name, scheme.bits, (n, k), tensors)
    else:
        n, k = _int8_shape(name, tensors["weight"])
        padded = False
    scales = _scales(name, scheme, (n, k), tensors["weight_scale"], packed)
    zeros = _zeros(name, scheme, n, scales, tensors.get("weight_zero_point"), packed, padded)
    if packed:
        codes = unpack(tensors["weight_packed"], scheme.bits, k, padded)
    else:
        codes = _int8_codes(name, scheme, tensors["weight"])
    qweight = QWeight(scheme, codes, scales, zeros, g_idx=_used(tensors.get("weight_g_idx")))
    return _without_order(qweight.check(name))


def shape_of(name: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """N and K of a linear whose parts have sound shapes; BadTensor otherwise. No code is read."""
    packed = "weight_packed" in tensors or "weight" not in tensors
    _require(name, scheme, packed, tensors)
    n, k = _packed_shape(name, scheme, tensors) if packed else _int8_shape(name, tensors["weight"])
    if packed:
        _is_padded(name, scheme.bits, (n, k), tensors)
    _scales(name, scheme, (n, k), tensors["weight_scale"], packed)
    return n, k


def padded_words(count: int, bits: int) -> int:
    """32-bit words that hold `count` codes of `bits`, none of which straddles two."""
    return -(-count // (32 // bits))


def unpack(words: Tensor, bits: int, count: int, padded: bool) -> Tensor:
    """int32 [R, W] to the first `count` codes of each row, uint8 [R, count]."""
    if not padded or 32 % bits == 0:
        return bitpack.unpack(words, bits, count)
    rows, mask = words.shape[0], (1 << bits) - 1
    fields = [((words >> (bits * index)) & mask).to(torch.uint8) for index in range(32 // bits)]
    return torch.stack(fields, dim=-1).view(rows, -1)[:, :count].contiguous()


def _require(name: str, scheme: Scheme, packed: bool, tensors: Mapping[str, Tensor]) -> None:
    wanted = ["weight_packed" if packed else "weight", "weight_scale"]
    for suffix in wanted if scheme.symmetric else [*wanted, "weight_zero_point"]:
        if suffix not in tensors:
            raise BadTensor(f"{name}.{suffix}", "is missing", _AGAIN)


def _packed_shape(name: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """N and K, from weight_shape where it is there, once weight_packed is known to be words."""
    words = tensors["weight_packed"]
    if words.dtype != torch.int32 or words.ndim != 2 or not words.numel():
        raise BadTensor(
            f"{name}.weight_packed",
            f"is {words.dtype} {tuple(words.shape)}, wanted int32 [N, words]",
            "only pack-quantized linears are read",
        )
    if "weight_shape" not in tensors:
        return words.shape[0], words.shape[1] * 32 // scheme.bits
    stated = tensors["weight_shape"].reshape(-1)
    if stated.numel() != 2 or stated.is_floating_point() or int(stated.min()) < 1:
        raise BadTensor(
            f"{name}.weight_shape",
            f"holds {stated.tolist()[:4]}, wanted two whole numbers above 0",
            _AGAIN,
        )
    return int(stated[0]), int(stated[1])


def _is_padded(name: str, bits: int, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> bool:
    """Which layout the words have. BadTensor where their number fits neither."""
    (n, k), words = shape, tensors["weight_packed"]
    stored = tensors.get("weight_zero_point")
    counts = {False: bitpack.words(k, bits), True: padded_words(k, bits)}
    fits = [padded for padded, width in counts.items() if tuple(words.shape) == (n, width)]
    if not fits:
        wants = f"({n}, {counts[False]})"
        if counts[True] != counts[False]:
            wants += f", or ({n}, {counts[True]}) with padded words"
        raise BadTensor(
            f"{name}.weight_packed",
            f"has shape {tuple(words.shape)}, [{n}, {k}] at {bits} bits wants {wants}",
            "the bits in config.json do not match the file",
        )
    if len(fits) == 2 and stored is not None and stored.dtype == torch.int32 and stored.ndim == 2:
        heights = {False: bitpack.words(n, bits), True: padded_words(n, bits)}
        fits = [padded for padded in fits if stored.shape[0] == heights[padded]] or fits
    if 32 % bits == 0 or fits == [False]:
        return False
    if bool((words >> (32 // bits * bits)).any()):
        if fits == [True]:
            raise BadTensor(
                f"{name}.weight_packed",
                f"is of padded words by its shape {tuple(words.shape)}, but bits that {bits}-bit "
                "codes leave empty in a word are set",
                "the bits in config.json do not match the file",
            )
        return False
    if fits == [True]:
        return True
    last = words[:, -1].contiguous().numpy().view(np.uint32).astype(np.int64)
    return bool((last >> (k * bits - 32 * (words.shape[1] - 1)) != 0).any())


def _int8_shape(name: str, weight: Tensor) -> tuple[int, int]:
    if weight.dtype != torch.int8 or weight.ndim != 2 or not weight.numel():
        raise BadTensor(
            f"{name}.weight",
            f"is {weight.dtype} {tuple(weight.shape)}, wanted int8 [N, K]",
            "only integer weights are read: check config_groups and ignore in config.json",
        )
    return weight.shape[0], weight.shape[1]


def _int8_codes(name: str, scheme: Scheme, weight: Tensor) -> Tensor:
    """int8 [N, K] to unsigned codes. BadTensor where they do not fit the scheme's bits."""
    low, high = (int(end) for end in weight.aminmax())
    if low < -scheme.midpoint or high >= scheme.midpoint:
        raise BadTensor(
            f"{name}.weight",
            f"spans {low}..{high}, {scheme.bits} bits hold {-scheme.midpoint}.."
            f"{scheme.midpoint - 1}",
            "the bits in config.json do not match the file",
        )
    return weight.contiguous().view(torch.uint8) + scheme.midpoint  # modulo 256


def _scales(
    name: str, scheme: Scheme, shape: tuple[int, int], scales: Tensor, packed: bool
) -> Tensor:
    """Scales [N, nG]; one number for the whole tensor, or [N], is spread where not packed."""
    n, k = shape
    groups = scheme.groups(k) if scheme.divides(k) else -(-k // scheme.group_size)
    if not packed and scheme.group_size == PER_CHANNEL:
        scales = _spread(scales, n)
    if tuple(scales.shape) != (n, groups):
        raise BadTensor(
            f"{name}.weight_scale",
            f"has shape {tuple(scales.shape)}, [{n}, {k}] of {scheme.name} wants ({n}, {groups})",
            "the group size in config.json does not match the file",
        )
    return scales


def _spread(values: Tensor, rows: int) -> Tensor:
    """One number, or one a row, as [N, 1]; other shapes as they are."""
    if values.numel() == 1 and values.ndim < 3:
        return values.reshape(1, 1).repeat(rows, 1)
    return values.view(rows, 1) if tuple(values.shape) == (rows,) else values


def _zeros(
    name: str,
    scheme: Scheme,
    n: int,
    scales: Tensor,
    stored: Tensor | None,
    packed: bool,
    padded: bool,
) -> Tensor | None:
    """Zeros int16 [N, nG]; None where the scheme is symmetric."""
    if stored is None:
        return None
    if scheme.symmetric and not bool(stored.any()):  # signed and not packed: zero is the midpoint
        return None
    groups, bits = scales.shape[1], scheme.bits
    plain = stored
    if stored.dtype == torch.int8 and scheme.group_size == PER_CHANNEL:
        plain = _spread(stored, n)
    height = padded_words(n, bits) if padded else bitpack.words(n, bits)
    if plain.dtype == torch.int8 and tuple(plain.shape) == (n, groups):
        zeros = plain.to(torch.int16) + scheme.midpoint
    elif packed and stored.dtype == torch.int32 and tuple(stored.shape) == (height, groups):
        fields = unpack(stored.t().contiguous(), bits, n, padded)
        zeros = fields.t().contiguous().to(torch.int16)
    else:
        wanted = f"int32 {(height, groups)} or " if packed else ""
        raise BadTensor(
            f"{name}.weight_zero_point",
            f"is {stored.dtype} {tuple(stored.shape)}, wanted {wanted}int8 {(n, groups)}",
            _AGAIN,
        )
    if scheme.symmetric and bool((zeros != scheme.midpoint).any()):
        raise BadTensor(
            f"{name}.weight_zero_point",
            f"is there, but config.json says {scheme.name}, which has none",
            "the config is another checkpoint's: fetch it again",
        )
    return None if scheme.symmetric else zeros


def _used(g_idx: Tensor | None) -> Tensor | None:
    """A column order, or None: the package writes -1 where there is none."""
    return None if g_idx is None or bool((g_idx < 0).any()) else g_idx


def _without_order(qweight: QWeight) -> QWeight:
    """A checked QWeight without a g_idx that says nothing or only orders whole groups."""
    if qweight.g_idx is None:
        return qweight
    if column_order.trivial(qweight.g_idx, qweight.scheme.group_size) and qweight.scheme.divides(
        qweight.in_features
    ):
        return replace(qweight, g_idx=None)
    return column_order.without_order(replace(qweight, g_idx=qweight.g_idx.to(torch.int32)))
