"""Int4Linear: a linear layer whose weight is 4-bit codes in groups.

Buffers: packed uint8 [N, K/2] (column 2i in the low nibble of byte i), scales [N, nG] as stored,
zeros uint8 [N, nG] or None when symmetric; bias as it was, or None. `activation_bits` 8 quantizes
the activations per row as they arrive, the arithmetic of a W4A8 path; 16 leaves them float.
A cast of the model (`model.to(torch.bfloat16)`) leaves the scales as stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weightpath.errors import BadTensor
from weightpath.kernels import reference
from weightpath.kernels.choose import Choice, Layer, choose
from weightpath.quantize.rtn import quantize_rtn
from weightpath.qweight import QWeight
from weightpath.scheme import Scheme


class Int4Linear(nn.Module):
    """y = x @ ((codes - zeros) * scales).T + bias; x [..., K] float, y [..., N] in x's dtype."""

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
        super().__init__()
        self.out_features, self.in_features = packed.shape[0], packed.shape[1] * 2
        self.scheme = scheme
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.backend: str | None = None

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

    @property
    def kernel(self) -> Choice:
        """The kernel that runs this layer on its present device, with the rejections."""
        layer = Layer(self.out_features, self.in_features, self.scheme, self.packed.device)
        return choose(layer, self.backend)

    def set_backend(self, backend: str | None) -> None:
        """Use a kernel by name (None: the chooser's). CannotRun says why one cannot be had."""
        choose(Layer(self.out_features, self.in_features, self.scheme, self.packed.device), backend)
        self.backend = backend

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for."""
        return reference.dequantize_int4(self.packed, self.scales, self.zeros, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        """What `to`, `half` and the like do; scales follow to a device, never to a dtype."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return reference.int4_linear(
            x, self.packed, self.scales, self.zeros, self.bias, self.scheme.activation_bits
        )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.scheme.name}"
