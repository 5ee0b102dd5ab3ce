"""Int8Linear: a linear layer whose weight is int8 per output channel; activations stay float.

Buffers: codes int8 [N, K], scale fp32 [N] (low_bit_linear.py: held as CPU tiles where the compiled
kernels run); bias as it was, or None. A drop-in for nn.Linear. The compiled kernels take activations
as two int8 planes, 16 bits (max|x| / 32512 a step); the torch kernel takes the floats.
Under autocast the product runs in the autocast dtype and the output stays fp32, so that the scale
is never rounded to bf16; nor is it when the model is cast (`model.to(torch.bfloat16)`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightpath.errors import BadTensor
from weightpath.kernels import cpu, reference
from weightpath.kernels.triton import ops
from weightpath.layouts import gpu_tiles
from weightpath.layouts.cpu_tiles import CpuTiles, unpack
from weightpath.layouts.gpu_tiles import GpuTiles
from weightpath.nn.low_bit_linear import LowBitLinear, Plain
from weightpath.quantize.int8 import quantize_per_channel
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, PER_CHANNEL


class Int8Linear(LowBitLinear):
    """y = scale * (x @ codes.T) + bias; x [..., K] float, y [..., N] in x's dtype."""

    PLAIN = ("codes", "scale")
    codes: Tensor
    scale: Tensor
    scheme = INT8

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """codes int8 [N, K], scale fp32 [N], bias [N] or None. Nothing is copied."""
        super().__init__(bias)
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    @classmethod
    def from_linear(cls, linear: nn.Linear, name: str = "weight") -> Int8Linear:
        """Quantize a float linear; its bias is carried. BadTensor on NaN or Inf."""
        codes, scale = quantize_per_channel(linear.weight.detach(), name)
        return cls(codes, scale, None if linear.bias is None else linear.bias.detach())

    @classmethod
    def from_qweight(
        cls, qweight: QWeight, bias: Tensor | None = None, name: str = "weight"
    ) -> Int8Linear:
        """Take over an 8-bit per-channel symmetric QWeight (codes stored +128)."""
        scheme = qweight.scheme
        per_channel = scheme.group_size == PER_CHANNEL or qweight.scales.shape[1] == 1
        plain = qweight.g_idx is None and qweight.minimums is None
        if scheme.bits != 8 or not scheme.symmetric or not per_channel or not plain:
            raise BadTensor(
                name,
                f"scheme {scheme.name} is not int8 per channel",
                "load it as 4-bit groups, or requantize",
            )
        qweight.check(name)
        codes = (qweight.codes.to(torch.int16) - 128).to(torch.int8)
        return cls(codes, qweight.scales[:, 0].float(), bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for."""
        plain = self._plain()
        codes, scale = plain["codes"], plain["scale"]
        return (codes.float() * scale[:, None]).to(dtype)

    def _to_tiles(self) -> CpuTiles:
        scale = self.scale[:, None]
        return cpu.pack_parts(
            self.codes, cpu.INT8, scale, None, bits=8, group_size=self.in_features
        )

    def _from_tiles(self, tiles: CpuTiles) -> Plain:
        codes, scales, _ = unpack(tiles)
        return {"codes": (codes ^ 128).view(torch.int8), "scale": scales[:, 0].contiguous()}

    def _to_gpu_tiles(self) -> GpuTiles:
        return gpu_tiles.from_parts(self.codes.view(torch.uint8), self.scale[:, None], None, bits=8)

    def _from_gpu_tiles(self, tiles: GpuTiles) -> Plain:
        codes, scales, _ = gpu_tiles.to_parts(tiles)
        return {"codes": codes.view(torch.int8), "scale": scales[:, 0].contiguous()}

    def _multiply_triton(self, x: Tensor, out: torch.dtype) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return ops.int8_linear(x, self.codes, self.scale, bias, out)

    def _multiply_plain(self, x: Tensor, plain: Plain) -> Tensor:
        codes, scale = plain["codes"], plain["scale"]
        out = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
        return reference.int8_linear(x, codes, scale, self.bias, out)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
            return self._multiply(x, torch.float32)
        return self._multiply(x, x.dtype)
