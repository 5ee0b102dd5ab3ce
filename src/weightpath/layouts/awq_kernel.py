"""HF AWQ weights as llm-awq's m128n64k32 W4A16 kernel reads them: output channels first.

    from HF (gemm)  qweight int32 [K, N/8], qzeros int32 [nG, N/8]: nibble i of word c is column
                    8c + HF_AWQ_PACK_ORDER[i]; scales fp16 [nG, N]
    to  weight      u32  [N, K/8]        nibble k % 8 of word k // 8 in row n
        zeros       u32  [N, zeros_w]    nibble g % 8 of word g // 8 in row n, the rest zero
        scales      fp16 [N, 8*zeros_w]  entry g of row n, the rest zero

    w[n, k] = scales[n, g] * (weight nibble k - zeros nibble g),   g = k // G
    zeros_w = ceil(ceil(nG / 8) / mult) * mult,   mult = 128 / G

u32 words are kept in torch.int32, since torch.uint32 has few operators: the same 32 bits, and
`.view(torch.uint32)` shows them unsigned without a copy. Bytes are little-endian.

What the repack refuses is about the layout; what the kernel itself needs is `kernel_refuses`.
Source: the read formula of that kernel (llm-awq, gemv layout) and AutoAWQ's gemm packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightpath.errors import BadRequest, BadTensor
from weightpath.qweight import QWeight, scale_change
from weightpath.scheme import PER_CHANNEL

HF_AWQ_PACK_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column within its eight that nibble i of an HF AWQ word holds."""

GROUP_SIZES = (64, 128)
KERNEL_ROWS, KERNEL_COLUMNS = 64, 32
"""The kernel's tile of the weight: output channels, and input columns of one split."""
KERNEL_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class KernelAwq:
    """One linear in the kernel's layout, contiguous: weight and zeros u32 as int32, scales fp16."""

    weight: Tensor
    zeros: Tensor
    scales: Tensor


def awq_zeros_w(in_features: int, group_size: int) -> int:
    """Words of zeros a row: 2 for K = 1152, G = 128 (nG = 9), 4 for K = 1536, G = 64 (nG = 24).

    BadRequest for a group size other than 64 or 128, or one that does not divide in_features.
    """
    refusal = _refuses_groups(in_features, group_size)
    if refusal is not None:
        raise BadRequest(f"AWQ kernel layout: {refusal[0]}; {refusal[1]}")
    multiple = 128 // group_size
    words = -(-(in_features // group_size) // 8)
    return -(-words // multiple) * multiple


def repack_hf_awq_for_kernel(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    in_features: int,
    out_features: int,
    group_size: int,
    name: str = "weight",
) -> KernelAwq:
    """HF AWQ (gemm) tensors of one linear to the kernel's layout, bit for bit.

    The tensors are shaped as above, or flat; qweight and qzeros int32 or uint32, scales fp16.
    BadTensor, with the numbers, for a group size other than 64 or 128, in_features not a multiple
    of 8 or of the group size, out_features not a multiple of 8, and a tensor of the wrong length,
    shape or dtype. `name` is the linear's, for messages.
    """
    _require_shape(name, out_features, in_features, group_size)
    groups, words = in_features // group_size, out_features // 8
    integers = (torch.int32, torch.uint32)
    weight = _shaped(f"{name}.qweight", qweight, (in_features, words), integers)
    zeros = _shaped(f"{name}.qzeros", qzeros, (groups, words), integers)
    steps = _shaped(f"{name}.scales", scales, (groups, out_features), (torch.float16,))
    return _lay_out(_outputs_first(weight), _outputs_first(zeros), steps.t(), group_size)


def from_qweight(qweight: QWeight, name: str = "weight", lossy: bool = False) -> KernelAwq:
    """Any 4-bit linear in integers (AWQ, GPTQ, compressed-tensors) in the kernel's layout.

    A symmetric one gets zeros of 8; a column order that is the plain one is dropped. BadTensor,
    with the numbers, for other bits, float minimums, another column order, zeros beyond 0..15, the
    shapes that the repack refuses, and scales that fp16 cannot hold, or rounds unless `lossy`.
    """
    if qweight.scheme.bits != 4:
        raise BadTensor(name, f"is {qweight.scheme.bits}-bit, the AWQ kernel takes 4 bits",
                        "quantize it to 4 bits, or choose another kernel")  # fmt: skip
    if qweight.minimums is not None:
        raise BadTensor(name, "has float minimums, the AWQ kernel takes integer zero points",
                        "requantize it, or choose another kernel")  # fmt: skip
    n, k = qweight.codes.shape
    size = k if qweight.scheme.group_size == PER_CHANNEL else qweight.scheme.group_size
    _require_shape(name, n, k, size)
    qweight.check(name)
    if qweight.g_idx is not None:
        moved = int((qweight.g_idx != torch.arange(k) // size).sum())
        if moved or qweight.scales.shape[1] != k // size:
            raise BadTensor(
                name,
                f"keeps a column order: {moved} of {k} columns are in another group",
                "requantize it without act-order, or choose another kernel",
            )
    zeros = qweight.zeros
    if zeros is None:
        zeros = torch.full(qweight.scales.shape, qweight.scheme.midpoint, dtype=torch.uint8)
    low, high = int(zeros.min()), int(zeros.max())
    if low < 0 or high > 15:
        raise BadTensor(name, f"has zeros {low}..{high}, the AWQ kernel takes 0..15",
                        "quantize it again, or choose another kernel")  # fmt: skip
    scales, change = qweight.scales.to(torch.float16), scale_change(qweight, torch.float16)
    if not change.exact and (not lossy or change.largest == torch.inf):
        raise BadTensor(
            name,
            f"{change.changed} of {scales.numel()} {qweight.scales.dtype} scales change in the fp16 that "
            f"the AWQ kernel takes (the largest is {float(qweight.scales.abs().max()):.4g})",
            "allow a lossy layout if they only round (fp16 ends at 65504), or use another kernel",
        )
    return _lay_out(qweight.codes, zeros.to(torch.uint8), scales, size)


def kernel_refuses(
    out_features: int,
    in_features: int,
    split_k: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> str | None:
    """Why the kernel cannot run this product, as a sentence, or None if it can.

    capability is the CUDA device's compute capability, None without one; dtype is the
    activations'; split_k is how many parts K is split into.
    """
    if capability is None:
        return "the AWQ kernel needs a CUDA device"
    if capability < KERNEL_CAPABILITY:
        return "the AWQ kernel needs compute capability 8.0, this device has {}.{}".format(
            *capability
        )
    if dtype != torch.float16:
        return f"the AWQ kernel computes in torch.float16, not {dtype}"
    if out_features < 1 or out_features % KERNEL_ROWS:
        return (
            f"the AWQ kernel needs out_features in multiples of {KERNEL_ROWS}, got {out_features}"
        )
    if split_k < 1:
        return f"the AWQ kernel needs split_k of 1 or more, got {split_k}"
    if in_features < 1 or in_features % (KERNEL_COLUMNS * split_k):
        return (f"the AWQ kernel with split_k {split_k} needs in_features in multiples of "
                f"{KERNEL_COLUMNS * split_k}, got {in_features}")  # fmt: skip
    return None


def _lay_out(codes: Tensor, zeros: Tensor, scales: Tensor, group_size: int) -> KernelAwq:
    """Codes uint8 [N, K], zeros uint8 [N, nG] and scales fp16 [N, nG] as the three buffers."""
    padding = (0, 8 * awq_zeros_w(codes.shape[1], group_size) - zeros.shape[1])
    return KernelAwq(
        weight=_words(codes),
        zeros=_words(torch.nn.functional.pad(zeros, padding)),
        scales=torch.nn.functional.pad(scales, padding).contiguous(),
    )


def _outputs_first(words: Tensor) -> Tensor:
    """HF words int32 [R, N/8] to their nibbles by output channel, uint8 [N, R].

    The twin of checkpoints.awq.outputs_first: layouts and formats do not import each other.
    """
    rows, width = words.shape
    stored = words.view(-1).view(torch.uint8).view(rows, width * 4)
    pairs = stored.t().contiguous().view(width, 4, rows)
    nibbles = torch.empty((width, 8, rows), dtype=torch.uint8)
    for byte in range(4):
        even, odd = HF_AWQ_PACK_ORDER[2 * byte : 2 * byte + 2]
        torch.bitwise_and(pairs[:, byte], 15, out=nibbles[:, even])
        torch.bitwise_right_shift(pairs[:, byte], 4, out=nibbles[:, odd])
    return nibbles.view(width * 8, rows)


def _words(nibbles: Tensor) -> Tensor:
    """Nibbles uint8 [N, C], C a multiple of 8, to int32 [N, C/8] in plain order."""
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).contiguous().view(torch.int32)


def _shaped(
    name: str, tensor: Tensor, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    """The tensor as `shape`, contiguous, words as int32; BadTensor for another length or dtype."""
    if tensor.dtype not in dtypes:
        raise BadTensor(
            name,
            f"is {tensor.dtype}, HF AWQ stores {dtypes[0]}",
            "read the checkpoint's own tensors, or lay out a QWeight with from_qweight",
        )
    if tuple(tensor.shape) not in (shape, (shape[0] * shape[1],)):
        raise BadTensor(
            name,
            f"has shape {tuple(tensor.shape)} ({tensor.numel()} values), wanted {shape} "
            f"({shape[0] * shape[1]} values)",
            "check in_features, out_features and group_size against the checkpoint",
        )
    plain = tensor.contiguous().reshape(shape)
    return plain.view(torch.int32) if plain.dtype == torch.uint32 else plain


def layout_refuses(out_features: int, in_features: int, group_size: int) -> tuple[str, str] | None:
    """What the layout cannot hold about a linear [N, K] in groups, and the mend; None if it can."""
    refusal = _refuses_groups(in_features, group_size)
    if refusal is None and (out_features < 8 or out_features % 8):
        refusal = (
            f"out_features {out_features} is not a multiple of 8",
            "choose another kernel for this linear",
        )
    return refusal


def _require_shape(name: str, out_features: int, in_features: int, group_size: int) -> None:
    """BadTensor for what the layout cannot hold."""
    refusal = layout_refuses(out_features, in_features, group_size)
    if refusal is not None:
        raise BadTensor(name, f"AWQ kernel layout: {refusal[0]}", refusal[1])


def _refuses_groups(in_features: int, group_size: int) -> tuple[str, str] | None:
    """What is wrong with the groups of a row, and the mend."""
    if group_size not in GROUP_SIZES:
        return f"group size {group_size}, wanted 64 or 128", "quantize it again with one of these"
    if in_features < 8 or in_features % 8:
        return (
            f"in_features {in_features} is not a multiple of 8",
            "choose another kernel for this linear",
        )
    if in_features % group_size:
        return (
            f"in_features {in_features} is not a multiple of group size {group_size}",
            "quantize it again with a group size that divides it",
        )
    return None
