"""Device functions that read the tiles of layouts/gpu_tiles.py: words of codes into weights.

A tile is 16 rows of 64 columns: 32 lanes of 4 words, 16 bytes a lane. Nibble p (0..3), half h (0..1)
of word j of lane l = 4g + q lies at bits 4p + 16h, and is the code of

    row g + 8*(p & 1),   column 16j + 2q + h + 8*(p >> 1)

which is what that lane holds of the left operand of a 16x16 tensor-core product: the codes go from
memory to the product in registers. A half of a word makes two codes of one register at a time:

    fp16   (w & 0x000F000F) | 0x64006400 = 1024 + code;  (w & 0x00F000F0) | 0x64006400 = 1024 + 16*code
    bf16   (w >> 4p & 0x000F000F) | 0x43004300 = 128 + code

and one addition or multiply-add leaves code - zero, exactly. PLAIN does the same with whole integers:
the interpreter knows no inline assembly, and no bf16 products, so there these are taken in fp32.

Triton's layout for a product of mma.sync is four columns a lane wide where a `join` lies before it
(a fact of its AcceleratedMatmul pass); WIDE orders the columns of 16 so that this needs no exchange
between lanes: place 4q + 2*(p >> 1) + h instead of 8*(p >> 1) + 2q + h. Both operands are ordered
alike, so the product is the same.
"""

# The body of a kernel is Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

FP16_LOW = tl.constexpr(0xE400E400 - 2**32)
"""-1024 twice: a code of the low nibble is 1024 + code."""
FP16_HIGH = tl.constexpr(0xD400D400 - 2**32)
"""-64 twice: a sixteenth of 1024 + 16 * code is 64 + code."""
BF16_ALL = tl.constexpr(0xC300C300 - 2**32)
"""-128 twice."""


@triton.jit
def _expand_fp16(words, less0, less8):
    """Four pairs of codes minus zeros, fp16: nibbles 0..3 of both halves."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high, part;
        mov.b32 part, 0x2C002C00;
        shr.u32 high, $4, 8;
        lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 $2, high, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $3, high, 0x00F000F0, 0x64006400, 0xEA;
        add.rn.f16x2 $0, $0, $5;
        fma.rn.f16x2 $1, $1, part, $6;
        add.rn.f16x2 $2, $2, $5;
        fma.rn.f16x2 $3, $3, part, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, less0, less8],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _expand_bf16(words, less0, less8):
    """Four pairs of codes minus zeros, bf16: nibbles 0..3 of both halves."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 one, two, three, unit;
        mov.b32 unit, 0x3F803F80;
        shr.u32 one, $4, 4;
        shr.u32 two, $4, 8;
        shr.u32 three, $4, 12;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $1, one, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, two, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $3, three, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, $0, unit, $5;
        fma.rn.bf16x2 $1, $1, unit, $6;
        fma.rn.bf16x2 $2, $2, unit, $5;
        fma.rn.bf16x2 $3, $3, unit, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, less0, less8],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """Words of two 16-bit floats as a tensor of one more dimension, [..., h]."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def nibbles(words, zero, nibble: tl.constexpr):
    """Nibble p of both halves minus the zero, fp32 [..., h]."""
    low = ((words >> (4 * nibble)) & 15) - zero
    high = ((words >> (4 * nibble + 16)) & 15) - zero
    return tl.join(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def expand(words, zero0, zero8, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """Words int32 [...] and the zeros int32 of their rows g and g + 8, to code - zero of `dtype`
    (fp32 if PLAIN) [..., h, row half p & 1, column half p >> 1]."""
    if PLAIN:
        first = tl.join(nibbles(words, zero0, 0), nibbles(words, zero8, 1))
        second = tl.join(nibbles(words, zero0, 2), nibbles(words, zero8, 3))
    else:
        if dtype == tl.float16:
            less0 = FP16_LOW | (zero0 * 0x10001)
            less8 = FP16_HIGH | (zero8 * 0x100010)
            o0, o1, o2, o3 = _expand_fp16(words, less0, less8)
        else:
            less0 = BF16_ALL | (zero0 * 0x10001)
            less8 = BF16_ALL | (zero8 * 0x10001)
            o0, o1, o2, o3 = _expand_bf16(words, less0, less8)
        first = tl.join(_halves(o0, dtype), _halves(o1, dtype))
        second = tl.join(_halves(o2, dtype), _halves(o3, dtype))
    return tl.join(first, second)


@triton.jit
def scale_place(row):
    """Where the scale of row 16t + g + 8i of a block lies: at 16t + 2g + i."""
    return row // 16 * 16 + 2 * (row % 8) + row % 16 // 8
