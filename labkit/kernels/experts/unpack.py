"""INT4 weights out of their packed bytes or words, in a kernel."""

import triton
import triton.language as tl

# Nibbles to bf16 by their bits: those of 128 with a nibble in the mantissa are 128 + nibble, so that a mask and a
# subtraction of 136 make two values a register. Converting them as integers has a quarter of that rate.
_HEAD = """{
.reg .b32 a, b, c, d, one, bias;
mov.b32 one, 0x3F803F80;
mov.b32 bias, 0xC308C308;
"""

_TAIL = """
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, bias;
fma.rn.bf16x2 $1, b, one, bias;
fma.rn.bf16x2 $2, c, one, bias;
fma.rn.bf16x2 $3, d, one, bias;
}"""

_FROM_BYTES = tl.constexpr(  # four bytes: their low nibbles, then their high ones
    _HEAD + "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; shr.u32 c, a, 4; shr.u32 d, b, 4;" + _TAIL
)

_FROM_HALVES = tl.constexpr(  # two halves of a word: their lowest nibbles, the next, …
    _HEAD + "mov.b32 a, $4; shr.u32 b, a, 4; shr.u32 c, a, 8; shr.u32 d, a, 12;" + _TAIL
)


@triton.jit
def _whole(u4, scale, SCALE_SUMS: tl.constexpr, dtype: tl.constexpr):
    """Weights from nibbles; times their scale, unless that multiplies the sums."""
    if SCALE_SUMS:
        return u4.to(tl.int8).to(dtype) - tl.full([], 8.0, dtype)
    else:
        return ((u4.to(tl.float32) - 8.0) * scale).to(dtype)


@triton.jit
def _from_bytes(packed, scale, SCALE_SUMS: tl.constexpr, dtype: tl.constexpr):
    """Weights of even and of odd k, from bytes; as `_whole` makes them, the same bits."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _FROM_BYTES, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        if not SCALE_SUMS:  # u4 - 8 and the scale are exact in bf16: their product is rounded once, as in fp32
            low *= scale.to(tl.bfloat16)
            high *= scale.to(tl.bfloat16)
        return low, high
    else:
        return _whole(packed & 15, scale, SCALE_SUMS, dtype), _whole(packed >> 4, scale, SCALE_SUMS, dtype)


@triton.jit
def _from_halves(packed, scale, SCALE_SUMS: tl.constexpr, dtype: tl.constexpr):
    """Weights of every fourth k, from 0, 1, 2 and 3 on, of words of 16 bits; as `_whole` makes them, the same bits."""
    if dtype == tl.bfloat16:
        zero, one, two, three = tl.inline_asm_elementwise(
            _FROM_HALVES, "=r,=r,=r,=r,r", [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        if not SCALE_SUMS:
            scale = scale.to(tl.bfloat16)
            return zero * scale, one * scale, two * scale, three * scale
        return zero, one, two, three
    else:
        zero, one = _whole(packed & 15, scale, SCALE_SUMS, dtype), _whole(packed >> 4 & 15, scale, SCALE_SUMS, dtype)
        two, three = (
            _whole(packed >> 8 & 15, scale, SCALE_SUMS, dtype),
            _whole(packed >> 12 & 15, scale, SCALE_SUMS, dtype),
        )
        return zero, one, two, three
