"""Int4Linear: a linear layer whose weight is 4-bit codes in groups.

Buffers: packed uint8 [N, K/2] (column 2i in the low nibble of byte i), scales [N, nG] as stored,
zeros uint8 [N, nG] or None when symmetric (low_bit_linear.py: held as CPU tiles where the compiled
kernels run); bias as it was, or None. `activation_bits` 8 quantizes the activations to int8 as they
arrive, the arithmetic of a W4A8 path, with a scale for each group of a row (`scale_per_group` False:
one a row; what either loses and costs is in docs/experiments.md); 16 keeps them at 16 bits: floats as they come in the
torch kernel, two int8 planes (max|x| / 32512 a step) in the compiled ones.
A cast of the model (`model.to(torch.bfloat16)`) leaves the scales as stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightpath.errors import BadTensor
from weightpath.kernels import cpu, reference
from weightpath.layouts import gpu_tiles
from weightpath.layouts.cpu_tiles import CpuTiles, unpack
from weightpath.layouts.gpu_tiles import GpuTiles
from weightpath.nn.low_bit_linear import LowBitLinear, Plain
from weightpath.quantize.rtn import quantize_rtn
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme


class Int4Linear(LowBitLinear):
    """y = x @ ((codes - zeros) * scales).T + bias; x [..., K] float, y [..., N] in x's dtype."""

    PLAIN = ("packed", "scales", "zeros")
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        scheme: Scheme,
        bias: Tensor | None = None,
    ) -> None:
        """packed uint8 [N, K/2], scales [N, nG], zeros uint8 [N, nG] or None. Nothing is copied."""
        super().__init__(bias)
        self.out_features, self.in_features = packed.shape[0], packed.shape[1] * 2
        self.scheme = scheme
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: Scheme,
        name: str = "weight",
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> Int4Linear:
        """Quantize a float linear by round-to-nearest; its bias is carried."""
        qweight, _ = quantize_rtn(linear.weight.detach(), scheme, scale_dtype, name=name)
        return cls.from_qweight(
            qweight, None if linear.bias is None else linear.bias.detach(), name
        )

    @classmethod
    def from_qweight(
        cls, qweight: QWeight, bias: Tensor | None = None, name: str = "weight"
    ) -> Int4Linear:
        """Pack a 4-bit QWeight. BadTensor where it is not 4-bit codes in plain column order."""
        if qweight.scheme.bits != 4 or qweight.minimums is not None or qweight.g_idx is not None:
            what = (
                "float minimums"
                if qweight.minimums is not None
                else "a column order"
                if qweight.g_idx is not None
                else f"{qweight.scheme.bits} bits"
            )
            raise BadTensor(
                name,
                f"{what}, wanted 4-bit codes in column order",
                "requantize it, or load it as float",
            )
        if qweight.in_features % 2:
            raise BadTensor(
                name,
                f"in_features {qweight.in_features} is odd",
                "4-bit codes are packed in pairs: use int8",
            )
        qweight.check(name)
        packed = reference.pack_nibbles(qweight.codes)
        zeros = qweight.zeros_as_codes(name)
        return cls(packed, qweight.scales, zeros, qweight.scheme, bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for."""
        plain = self._plain()
        return reference.dequantize_int4(plain["packed"], plain["scales"], plain["zeros"], dtype)

    def _to_tiles(self) -> CpuTiles:
        size = self.in_features // self.scales.shape[1]
        parts = (self.packed, cpu.NIBBLES, self.scales, self.zeros)
        return cpu.pack_parts(*parts, bits=4, group_size=size)

    def _from_tiles(self, tiles: CpuTiles) -> Plain:
        codes, scales, zeros = unpack(tiles)
        return {"packed": reference.pack_nibbles(codes), "scales": scales, "zeros": zeros}

    def _to_gpu_tiles(self) -> GpuTiles:
        codes = reference.unpack_nibbles(self.packed)
        return gpu_tiles.from_parts(codes, self.scales, self.zeros, bits=4)

    def _from_gpu_tiles(self, tiles: GpuTiles) -> Plain:
        codes, scales, zeros = gpu_tiles.to_parts(tiles)
        return {"packed": reference.pack_nibbles(codes), "scales": scales, "zeros": zeros}

    def _multiply_plain(self, x: Tensor, plain: Plain) -> Tensor:
        parts = (plain["packed"], plain["scales"], plain["zeros"])
        taken = (self.activation_bits, self.scale_per_group)
        return reference.int4_linear(x, *parts, self.bias, *taken)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self._multiply(x, x.dtype)
