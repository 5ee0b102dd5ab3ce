"""A device function: int8 codes to the dtype of a product, exactly.

fp16: a byte u = code + 128 under 0x64 is the fp16 number 1024 + u, and 1152 less is the code: two
codes an addition.
bf16: the byte of a code under 0x43 has its low seven bits in the mantissa, 128 + low, and its sign in
the exponent, 128 or 256; the first less the second is the code.
Triton's own cast converts one at a time (all but bf16 on 9.0), on a unit of a quarter of the speed.
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast_codes(codes, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """int8 to `dtype`; to fp32 if PLAIN, without inline assembly."""
    if PLAIN:
        cast = codes.to(tl.float32)
    elif dtype == tl.float16:
        cast = tl.inline_asm_elementwise(
            """{
            .reg .b32 raised, less;
            mov.b32 less, 0xE480E480;
            xor.b32 raised, $2, 0x80808080;
            prmt.b32 $0, raised, 0x64646464, 0x4140;
            prmt.b32 $1, raised, 0x64646464, 0x4342;
            add.rn.f16x2 $0, $0, less;
            add.rn.f16x2 $1, $1, less;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        cast = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, low, high, minus;
            mov.b32 minus, 0xBF80BF80;
            prmt.b32 first, $2, 0x43434343, 0x4140;
            prmt.b32 second, $2, 0x43434343, 0x4342;
            and.b32 low, first, 0xFF7FFF7F;
            and.b32 high, first, 0xFF80FF80;
            fma.rn.bf16x2 $0, high, minus, low;
            and.b32 low, second, 0xFF7FFF7F;
            and.b32 high, second, 0xFF80FF80;
            fma.rn.bf16x2 $1, high, minus, low;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return cast
