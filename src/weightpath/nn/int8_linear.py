"""Int8Linear: a linear layer whose weight is int8 per output channel; activations stay float.

Buffers: codes int8 [N, K], scale fp32 [N]; bias as it was, or None. A drop-in for nn.Linear.
Under autocast the product runs in the autocast dtype and the output stays fp32, so that the scale
is never rounded to bf16; nor is it when the model is cast (`model.to(torch.bfloat16)`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weightpath.errors import BadTensor
from weightpath.kernels import reference
from weightpath.kernels.choose import Choice, Layer, choose
from weightpath.quantize.int8 import quantize_per_channel
from weightpath.qweight import QWeight
from weightpath.scheme import INT8, PER_CHANNEL


class Int8Linear(nn.Module):
    """y = scale * (x @ codes.T) + bias; x [..., K] float, y [..., N] in x's dtype."""

    codes: Tensor
    scale: Tensor
    scheme = INT8

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """codes int8 [N, K], scale fp32 [N], bias [N] or None. Nothing is copied."""
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.backend: str | None = None

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

    @property
    def kernel(self) -> Choice:
        """The kernel that runs this layer on its present device, with the rejections."""
        layer = Layer(self.out_features, self.in_features, self.scheme, self.codes.device)
        return choose(layer, self.backend)

    def set_backend(self, backend: str | None) -> None:
        """Use a kernel by name (None: the chooser's). CannotRun says why one cannot be had."""
        choose(Layer(self.out_features, self.in_features, self.scheme, self.codes.device), backend)
        self.backend = backend

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for."""
        return (self.codes.float() * self.scale[:, None]).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """What `to`, `half` and the like do; the scale follows to a device, never to a dtype."""
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
            return reference.int8_linear(x, self.codes, self.scale, self.bias, torch.float32)
        return reference.int8_linear(x, self.codes, self.scale, self.bias, x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, w8"
