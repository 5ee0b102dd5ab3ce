"""Scheme: how a linear layer's weight is reduced to integers.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g]),   g = k // group_size

N = out_features, K = in_features, nG = K / group_size. Codes are unsigned, 0 .. 2**bits - 1;
a symmetric scheme has zero = 2**(bits-1) everywhere and stores none. `group_size` -1 means one
group a row (per output channel). `activation_bits` is a run-time property: 16 keeps activations
floating point, 8 quantizes them as they arrive; it changes nothing on disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from weightpath.errors import BadRequest

PER_CHANNEL = -1
GROUP_SIZES = (128, 64, 32)
"""Group sizes tried in this order: the largest that divides every K costs the fewest bits."""

_NAME = re.compile(r"w(?P<bits>\d)(a(?P<act>8|16))?(g(?P<group>\d+))?(?P<asym>-asym)?")


@dataclass(frozen=True)
class Scheme:
    """Bits, group size, symmetry and activation bits of one linear layer."""

    bits: int
    group_size: int = PER_CHANNEL
    symmetric: bool = True
    activation_bits: int = 16

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise BadRequest(f"scheme: {self.bits} bits; weights take 2 to 8 bits")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise BadRequest(
                f"scheme: group size {self.group_size}; use a positive size, or -1 for per channel"
            )
        if self.activation_bits not in (8, 16):
            raise BadRequest(f"scheme: {self.activation_bits}-bit activations; use 8 or 16")

    @property
    def top_code(self) -> int:
        """Largest code, 2**bits - 1."""
        return (1 << self.bits) - 1

    @property
    def midpoint(self) -> int:
        """The zero of a symmetric scheme, 2**(bits-1)."""
        return 1 << (self.bits - 1)

    @property
    def name(self) -> str:
        """Short name that `parse` reads back: w8, w4g64, w4a8g128-asym."""
        act = "a8" if self.activation_bits == 8 else ""
        group = "" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return f"w{self.bits}{act}{group}{'' if self.symmetric else '-asym'}"

    def groups(self, in_features: int) -> int:
        """nG for a row of K = in_features columns. Error if the group does not divide K."""
        if self.group_size == PER_CHANNEL:
            return 1
        if in_features % self.group_size:
            raise BadRequest(
                f"scheme {self.name}: in_features {in_features} is not a multiple of group size "
                f"{self.group_size}; use a group size that divides it, or int8 per channel"
            )
        return in_features // self.group_size

    def divides(self, in_features: int) -> bool:
        """Whether whole groups tile a row of K = in_features columns."""
        return self.group_size == PER_CHANNEL or in_features % self.group_size == 0

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """Stored bits per weight: codes, one scale a group, one packed zero a group if asymmetric.

        Arithmetic only: 4 + 16/G symmetric, 4 + 20/G asymmetric for 4-bit codes and 16-bit scales.
        """
        per_group = scale_bits + (0 if self.symmetric else self.bits)
        return self.bits + per_group * self.groups(in_features) / in_features

    def with_activations(self, bits: int) -> Scheme:
        """The same weights with activations of `bits`."""
        return replace(self, activation_bits=bits)

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """Read a scheme's name: `int8`, or w{bits}[a8][g{group}][-asym] such as w4g64-asym."""
        if name == "int8":
            return INT8
        found = _NAME.fullmatch(name)
        if not found:
            raise BadRequest(
                f"scheme '{name}': unknown; write int8, or a name such as w4g64, w4g32-asym or w4a8g128"
            )
        return cls(
            bits=int(found["bits"]),
            group_size=int(found["group"]) if found["group"] else PER_CHANNEL,
            symmetric=not found["asym"],
            activation_bits=int(found["act"] or 16),
        )


INT8 = Scheme(bits=8)
"""Per output channel, symmetric, codes -127..127 (stored +128), fp32 scales."""
