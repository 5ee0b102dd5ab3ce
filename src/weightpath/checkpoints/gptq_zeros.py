"""GPTQ's zero points: unpacked, and whether a file stores them less one (v1) or as they are (v2).

Files lie about it, so the data are asked first: all fields the midpoint less one -> v1, all the
midpoint -> v2, else the label, else the mean of the codes, else nothing is read.

A zero of 0 does not fit v1: less one, its field is all ones. AutoGPTQ's readers add 1 to each
field and mask, and that is done here too. GPTQModel makes and reads 2, 4 and 8-bit v1 zeros by
arithmetic on whole words, where such a field borrows from the next one, so the files that name it
as their writer are added to by the word. AutoGPTQ's own packer, on x86, fills the rest of the word
with ones: what stood there is lost, and said so. Sources: AutoGPTQ 0.7 (qlinear_cuda_old.py,
exllamav2/cuda/q_gemm_kernel_gptq.cuh), GPTQModel 7.3.4 (utils/model.py, utils/model_dequant.py,
utils/planar_packing.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from weightpath.checkpoints import bitpack
from weightpath.checkpoints.gptq_config import LABELS, Convention, GptqSettings
from weightpath.errors import BadCheckpoint, BadTensor

WORD_DTYPES = (torch.int32, torch.int16, torch.int8, torch.int64)
WHOLE_BITS = (2, 4, 8)
"""Widths of which a word holds a whole number."""
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # widths of the planes, lowest bits first


class ZeroConvention(NamedTuple):
    """v1 or v2, the sentence that says how that was decided, and what speaks against it if any."""

    convention: Convention
    how: str
    contradiction: str | None


@dataclass(frozen=True)
class ZeroCounts:
    """Counts over stored zero fields of b bits, before any convention is applied.

    below: fields equal to the midpoint less one. middle: to the midpoint. ones: all ones.
    overrun: words that end in two or more fields of all ones and have none before another value;
    clean: words that have one before another value, which AutoGPTQ's packer cannot make.
    """

    fields: int = 0
    below: int = 0
    middle: int = 0
    ones: int = 0
    overrun: int = 0
    clean: int = 0

    def __add__(self, other: ZeroCounts) -> ZeroCounts:
        return ZeroCounts(
            self.fields + other.fields,
            self.below + other.below,
            self.middle + other.middle,
            self.ones + other.ones,
            self.overrun + other.overrun,
            self.clean + other.clean,
        )


def word_bits(words: Tensor) -> int:
    """Bits of one word of a packed tensor."""
    return words.element_size() * 8


def unpack(words: Tensor, settings: GptqSettings, count: int) -> Tensor:
    """Packed rows [R, W] of any word size to their first `count` codes, uint8 [R, count]."""
    if not settings.planar:
        return bitpack.unpack(words, settings.bits, count)
    blocks = words.contiguous().view(-1, settings.bits)
    codes = torch.zeros(blocks.shape[0], 32, dtype=torch.uint8)
    first = 0  # the plane's first word, and its lowest bit
    for width in _PLANES[settings.bits]:
        plane = bitpack.unpack(blocks[:, first : first + width].contiguous(), width, 32)
        codes |= plane << first
        first += width
    return codes.view(words.shape[0], -1)[:, :count]


def zero_points(
    words: Tensor, settings: GptqSettings, out_features: int, convention: Convention
) -> Tensor:
    """qzeros [nG, words] as zero points, uint8 [nG, N]. Planes are v2 whatever is said."""
    bits = settings.bits
    if convention == "v2" or settings.planar:
        return unpack(words, settings, out_features)
    if settings.zeros_by_word and bits in WHOLE_BITS:
        ones = sum(1 << start for start in range(0, word_bits(words), bits))
        unsigned = words.contiguous().numpy().view(f"u{words.element_size()}")
        added = (unsigned + unsigned.dtype.type(ones)).view(f"i{words.element_size()}")
        return unpack(torch.from_numpy(added), settings, out_features)
    return (unpack(words, settings, out_features) + 1) & ((1 << bits) - 1)


def count_zeros(
    words: Tensor, settings: GptqSettings, out_features: int | None = None, name: str = "qzeros"
) -> ZeroCounts:
    """The counts of one qzeros [nG, words], of N = out_features fields a row (default: all).

    BadTensor under `name` where it is not such a tensor.
    """
    bits, lanes = settings.bits, word_bits(words) // settings.bits
    allowed = WORD_DTYPES if bits in WHOLE_BITS else WORD_DTYPES[:1]
    if words.ndim != 2 or not words.numel() or words.dtype not in allowed:
        raise BadTensor(
            name,
            f"is {words.dtype} {tuple(words.shape)}, wanted {allowed[0]} [groups, words]",
            "fetch the checkpoint again",
        )
    if settings.planar and words.shape[1] % bits:
        raise BadTensor(
            name,
            f"has {words.shape[1]} words a row, planes of {bits} bits come {bits} at a time",
            "check the bits in the checkpoint's quantization config",
        )
    count = words.shape[1] * word_bits(words) // bits
    values = unpack(words, settings, count if out_features is None else min(out_features, count))
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    overrun = clean = 0
    if bits in WHOLE_BITS and lanes > 1:
        ones = unpack(words, settings, count).view(-1, lanes) == top
        stopped = (ones[:, :-1] & ~ones[:, 1:]).any(1)
        overrun, clean = int((ones[:, -2:].all(1) & ~stopped).sum()), int(stopped.sum())
    return ZeroCounts(
        values.numel(),
        int((values == middle - 1).sum()),
        int((values == middle).sum()),
        int((values == top).sum()),
        overrun,
        clean,
    )


def zero_convention(
    samples: Iterable[Tensor | ZeroCounts],
    bits: int,
    settings: GptqSettings,
    offset: float | None = None,
) -> ZeroConvention:
    """Whether a model's zero points are stored less one (v1) or as they are (v2).

    samples: every qzeros of the model at `bits`, or its `count_zeros` (for modules of other bits,
    or of an N that does not fill its words). Decided from the data where all fields are the
    midpoint less one (v1) or the midpoint (v2); else by checkpoint_format; else by `offset`, the
    mean of `gptq.code_offset` over the model; else BadCheckpoint says what would settle it.
    """
    total, base = ZeroCounts(), replace(settings, bits=bits)
    for sample in samples:
        total += sample if isinstance(sample, ZeroCounts) else count_zeros(sample, base)
    label = settings.checkpoint_format
    stated: Convention | None = None if label is None else LABELS[label]
    shown, shown_how = _from_data(total, offset)
    uniform = total.fields > 0 and total.fields in (total.below, total.middle)
    against = []
    if stated is not None and shown is not None and stated != shown:
        against.append(f"checkpoint_format {label} means {stated}, but {shown_how}, as in {shown}")
    if shown is not None and (uniform or stated is None):
        found, how = shown, shown_how
    elif stated is not None:
        found, how = (
            stated,
            f"checkpoint_format is {label}; {total.fields} stored zeros do not tell",
        )
    else:
        raise BadCheckpoint(
            settings.where,
            f"{total.fields} stored zeros are not all alike, and no checkpoint_format says whether "
            "they are less one",
            'add "checkpoint_format": "gptq" (less one) or "gptq_v2", or compare the float weights',
        )
    if settings.sym and total.fields and not any("sym" in r.changes for r in settings.dynamic):
        others = total.fields - (total.below if found == "v1" else total.middle)
        if others:
            against.append(
                f"sym is true, but {others} of {total.fields} zero points are not the midpoint"
            )
    if found == "v1" and total.ones:
        by_word = settings.zeros_by_word and bits in WHOLE_BITS
        way = "word by word, as their writer packs them" if by_word else "field by field"
        how += f"; {total.ones} fields of all ones are zero points of 0, read {way}"
        if total.overrun and not total.clean and not by_word:
            against.append(
                f"{total.overrun} words of qzeros end in fields of all ones and none has one "
                "before another value, as AutoGPTQ leaves words after a zero of 0: some are lost"
            )
    return ZeroConvention(found, how, "; ".join(against) or None)


def _from_data(total: ZeroCounts, offset: float | None) -> tuple[Convention | None, str]:
    """What the fields alone say, or the codes' mean, and the sentence for it."""
    if total.fields and total.below == total.fields:
        return "v1", f"all {total.fields} stored zeros are the midpoint less one"
    if total.fields and total.middle == total.fields:
        return "v2", f"all {total.fields} stored zeros are the midpoint"
    if offset is not None and min(abs(offset), abs(offset - 1)) < 0.25:
        how = f"the codes exceed the stored zeros by {offset:.2f} on average"
        return ("v1" if offset > 0.5 else "v2"), how
    return None, ""
