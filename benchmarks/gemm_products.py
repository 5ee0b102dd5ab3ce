"""The products that cpu_gemm.py compares at one shape: this package's, torch's and ONNX Runtime's.

    y [M, N] = x [M, K] times a weight [N, K]

name             weight, and what is done with x
W4A8             4-bit groups, bf16 scales; x to int8, one scale a row
W4A8 per group   the same, one scale a row and group
W4A16            the same weight; x in 16 bits (two int8 planes)
W8A8, W8A16      int8 per channel, fp32 scales
torch int4       _weight_int4pack_mm_for_cpu: bf16 x, bf16 scale and zero a group
torch bf16       functional.linear: what is not quantized
torch int8 A16   _weight_int8pack_mm: int8 per channel, bf16 x and scales
torch int8 A8    quantized.linear_dynamic, engine x86: fp32 x to uint8, one scale for all of x
torch _int_mm    x to int8 by rows in plain torch, int32 product, scaled back in plain torch
ORT int4         MatMulNBits at accuracy_level 4 (x to int8), fp32 x and scales
ORT int4 fp32    the same at accuracy_level 0: x stays fp32

Ours and torch's take bf16 x where nothing else is said. Left out: onednn.qlinear_pointwise, which
takes x that somebody else has quantized; fp16 in ONNX Runtime, slower than fp32 since it is widened
first; bf16 there, which did not load.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peer_process import PeerProcess
from weightpath.kernels import cpu
from weightpath.layouts import tinygemm
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme

OURS = ("W4A8", "W4A8 per group", "W4A16", "W8A8", "W8A16")
INT8 = ("W8A8", "W8A16", "torch int8 A16", "torch int8 A8", "torch _int_mm")
ORT_LEVELS = {"ORT int4": 4, "ORT int4 fp32": 0}
TORCH_INT8_ENGINE = "x86"

Product = Callable[[Tensor], Tensor]


def of_a_kind(name: str, other: str) -> bool:
    """Whether both hold weights of as many bits; bf16 stands beside either."""
    return other == "torch bf16" or (name in INT8) == (other in INT8)


def rotated(make: Callable[[], Any], bytes_each: int, bytes_wanted: int) -> Callable[[], Any]:
    """A function that gives one copy after another, of enough copies to pass the caches."""
    copies = [make() for _ in range(copies_past(bytes_each, bytes_wanted))]
    turn = iter(())

    def following() -> Any:
        nonlocal turn
        for copy in turn:
            return copy
        turn = iter(copies)
        return next(turn)

    return following


def copies_past(bytes_each: int, bytes_wanted: int) -> int:
    """How many copies together pass so many bytes; at least two."""
    return max(2, -(-bytes_wanted // bytes_each))


@dataclass(frozen=True)
class Products:
    """What is compared at one shape: products of this process by name, and ONNX Runtime's levels."""

    n: int
    k: int
    group_size: int
    past: int  # bytes that copies of one weight must pass
    calls: dict[str, Product] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)  # accuracy levels that ORT's worker holds

    def hold_in(self, peer: PeerProcess, threads: int) -> dict[str, float]:
        """Have ONNX Runtime's worker hold this shape at every level; mean errors beside fp64."""
        copies = copies_past(self.n * self.k // 2, self.past)
        return {
            name: peer.ask(
                do="make", name=name, n=self.n, k=self.k, group_size=self.group_size, level=level,
                copies=copies, threads=threads,
            )["error_mean"]
            for name, level in self.levels.items()
        }  # fmt: skip

    def weight_bytes(self, name: str) -> float:
        """Bytes of weight that one call reads."""
        n, k = self.n, self.k
        if name == "torch bf16":
            return 2 * n * k
        if name in INT8:
            return n * k + (2 if name == "torch int8 A16" else 4) * n
        scale_bytes = 2 if name in OURS else 4  # torch: scale and zero; ORT: fp32
        return n * k / 2 + scale_bytes * n * k / self.group_size


def four_bit(n: int, k: int, group_size: int, past: int) -> Products:
    """Products of one 4-bit weight."""
    made = Products(n, k, group_size, past, levels=ORT_LEVELS)
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(n, k // group_size, generator=draw) * 0.01).to(torch.bfloat16)
    qweight = QWeight(Scheme(4, group_size), codes, scales)
    ours = rotated(lambda: cpu.pack(qweight), n * k // 2, past)
    packed = tinygemm.from_qweight(qweight, tinygemm.detect_layout())
    torch_int4 = rotated(packed.packed.clone, n * k // 2, past)
    made.calls.update(
        {
            "W4A8": lambda x: cpu.linear(x, ours(), activation_bits=8),
            "W4A8 per group": lambda x: cpu.linear(x, ours(), activation_bits=8, per_group=True),
            "W4A16": lambda x: cpu.linear(x, ours(), activation_bits=16),
            "torch int4": lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, torch_int4(), group_size, packed.scales_and_zeros
            ),
        }
    )
    return made


def eight_bit(n: int, k: int, past: int) -> Products:
    """Products of one int8 weight, and of the bf16 weight that it stands for."""
    made = Products(n, k, k, past)
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 256, (n, k), dtype=torch.uint8, generator=draw)
    scales = torch.rand(n, 1, generator=draw) * 0.01
    qweight = QWeight(Scheme(8), codes, scales)
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    weight = qweight.dequantize()
    ours = rotated(lambda: cpu.pack(qweight), n * k, past)
    bf16 = rotated(weight.to(torch.bfloat16).clone, 2 * n * k, past)
    plain = rotated(signed.clone, n * k, past)
    by_channel, by_channel_bf16 = scales.T.contiguous(), scales.flatten().to(torch.bfloat16)

    def int_mm(x: Tensor) -> Tensor:
        rows = x.abs().amax(-1, keepdim=True).float() / 127
        quantized = (x / rows).round().to(torch.int8)
        return (torch._int_mm(quantized, plain().T) * (rows * by_channel)).to(x.dtype)

    made.calls.update(
        {
            "W8A8": lambda x: cpu.linear(x, ours(), activation_bits=8),
            "W8A16": lambda x: cpu.linear(x, ours(), activation_bits=16),
            "torch bf16": lambda x: torch.nn.functional.linear(x, bf16()),
            "torch int8 A16": lambda x: torch.ops.aten._weight_int8pack_mm(
                x, plain(), by_channel_bf16
            ),
            "torch _int_mm": int_mm,
        }
    )
    if TORCH_INT8_ENGINE in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = TORCH_INT8_ENGINE
        dynamic = rotated(lambda: _dynamic(weight, scales.flatten()), n * k, past)
        made.calls["torch int8 A8"] = lambda x: torch.ops.quantized.linear_dynamic(
            x.float(), dynamic(), reduce_range=False
        ).to(x.dtype)
    return made


def _dynamic(weight: Tensor, scales: Tensor) -> Any:
    """A weight as torch's dynamic int8 linear holds it."""
    with warnings.catch_warnings():  # deprecated, and still what torch has
        warnings.simplefilter("ignore")
        zeros = torch.zeros(len(scales), dtype=torch.long)
        whole = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(whole, None)
