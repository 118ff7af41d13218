"""Weights of the GGUF formats out of their packed words, and the values of x beside them, in a kernel.

Of K formats also their products with x, which are made of bytes (`_add_bytes`).
"""

import triton
import triton.language as tl

MAGIC = 0x4B000000  # the fp32 2^23
BASE = 0x43000000  # the fp32 128: the lowest bit of its exponent is 0, so that a byte less than 128 fits in below
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # which the interpreter has not


@triton.jit
def _value(bits, ZERO: tl.constexpr):
    """fp32 of an integer less than 2^23 that stands in the mantissa of 2^23, minus ZERO."""
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _low_half(bits):
    """fp32 of the fp16 in the lower half of an int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """MASKED: 1: zeros where the mask is not set; 2: anything, which is not used; 0: it is set everywhere."""
    if MASKED == 1:
        return tl.load(pointers, mask=mask, other=0, eviction_policy=POLICY)
    if MASKED == 2:
        return tl.load(pointers, mask=mask, eviction_policy=POLICY)
    return tl.load(pointers, eviction_policy=POLICY)


@triton.jit
def _block(words, high, scales, d, block, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """The arrays of a `Packed` from a block of 8 rows on."""
    block = block.to(tl.int64)
    group = block * GROUPS
    HIGH: tl.constexpr = 16 if FORMAT == "Q6_K" else 8
    return words + group * (PLANES * 32), high + group * HIGH, scales + group * 8, d + block * (GROUPS // 8 * 8)


@triton.jit
def _read(W, groups, above, lanes, inside, MASKED: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """Of units, groups of one row: the words of every plane, [units, 4], the bits above, scales and d, [units].

    Units are one dimension, 8 rows of a group and then the next group, so that Triton's lanes go along it in memory
    order. W: the arrays of a `Packed`. groups, above: of each unit, its group and that one's block of 256 weights.
    lanes: its row of the 8.
    """
    words, high, scales, d = W
    wide = inside[:, None]
    planes = ()
    for p in tl.static_range(PLANES):
        at = (groups * PLANES + p) * 32 + lanes * 4
        planes = planes + (_load(words + at[:, None] + tl.arange(0, 4)[None, :], wide, MASKED, "evict_first"),)
    bits, scale_bits, d_bits = (), 0, 0
    if FORMAT == "Q5_K":
        bits = (_load(high + groups * 8 + lanes, inside, MASKED, "evict_first"),)
    if FORMAT == "Q6_K":
        first = _load(high + groups * 16 + lanes, inside, MASKED, "evict_first")
        bits = (first, _load(high + groups * 16 + 8 + lanes, inside, MASKED, "evict_first"))
    if FORMAT != "F32" and FORMAT != "BF16":
        scale_bits = _load(scales + groups * 8 + lanes, inside, MASKED, "evict_first")
        if FORMAT != "Q8_0":
            d_bits = _load(d + above * 8 + lanes, inside, MASKED, "evict_first")
    return planes, bits, scale_bits, d_bits


@triton.jit
def _rotated(bits, places):
    """A word [units] rotated to the left by each of places (1 … 31), [units, 4]; one instruction."""
    bits = bits.to(tl.uint32, bitcast=True)[:, None]
    places = places[None, :]
    return ((bits << places) | (bits >> (32 - places))).to(tl.int32, bitcast=True)


@triton.jit
def _turned(bits, LEFT: tl.constexpr):
    """Words rotated to the left by LEFT, or to the right by -LEFT."""
    bits = bits.to(tl.uint32, bitcast=True)
    return ((bits << LEFT % 32) | (bits >> -LEFT % 32)).to(tl.int32, bitcast=True)


@triton.jit
def _fields(tile, FORMAT: tl.constexpr):
    """Of Q5_K or Q6_K, the parts of all words with the bits above them: even parts in one word, odd ones in the other.

    Part i begins at bit 4i; what is above part 7 goes on at bit 0.
    """
    planes, high, _, _ = tile
    quad = tl.arange(0, 4)
    if FORMAT == "Q5_K":
        above = _rotated(high[0], 4 - quad)
    else:
        turn = 4 - quad % 2 * 2 + quad // 2 * 16
        above = _chosen(0x000FFFF0, _rotated(high[0], turn), _rotated(high[1], (turn + 16) % 32))
    return _chosen(0x0F0F0F0F, planes[0], above), _chosen(0x0F0F0F0F, above, planes[0])


@triton.jit
def _scales(tile, FORMAT: tl.constexpr):
    """The step of the first and of the last 16 weights of each group, and what is subtracted; [units, 1]."""
    _, _, scales, d = tile
    first, last, low = 0.0, 0.0, 0.0
    if FORMAT == "Q8_0":
        first = scales.to(tl.float32)[:, None]
        last = first
    elif FORMAT == "Q6_K":
        both = scales.to(tl.int32)
        step = d.to(tl.float32)
        first = (step * ((both << 24) >> 24).to(tl.float32))[:, None]
        last = (step * (both >> 8).to(tl.float32))[:, None]
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        both = scales.to(tl.int32)
        first = (_low_half(d) * (both & 63).to(tl.float32))[:, None]
        low = (_low_half(d >> 16) * (both >> 8).to(tl.float32))[:, None]
        last = first
    return first, last, low


@triton.jit
def _weights(tile, scales, magic, i: tl.constexpr, FORMAT: tl.constexpr):
    """Weights 4i … 4i + 3 of every group as fp32, [units, 4]: the values that `formats.dequantise` gives.

    magic: bits of the fp32 2^23, as an argument of the kernel: an instruction takes one constant only, the mask.
    """
    planes = tile[0]
    first, last, low = scales
    if FORMAT == "F32":
        return planes[i].to(tl.float32, bitcast=True)
    elif FORMAT == "BF16":
        words = planes[i // 2]
        return (words << 16 if i % 2 == 0 else words & -65536).to(tl.float32, bitcast=True)
    elif FORMAT == "Q8_0":
        PLACE: tl.constexpr = 8 * (i % 2)
        bits = (planes[i // 4] >> 16 * (i % 4 // 2) & 255 << PLACE) ^ magic
        return _value(bits, 128 << PLACE) * (first * (1.0 / (1 << PLACE)))
    else:
        PLACE: tl.constexpr = 4 * (i % 4)
        if FORMAT == "Q4_K":
            bits = (planes[0] >> 16 * (i // 4) & 15 << PLACE) ^ magic
        else:
            BITS: tl.constexpr = 5 if FORMAT == "Q5_K" else 6
            bits = (_turned(_fields(tile, FORMAT)[i % 2], -16 * (i // 4)) & (1 << BITS) - 1 << PLACE) ^ magic
            if FORMAT == "Q6_K":
                return _value(bits, 32 << PLACE) * ((first if i < 4 else last) * (1.0 / (1 << PLACE)))
        step = tl.broadcast_to(first * (1.0 / (1 << PLACE)), bits.shape)
        return tl.fma(_value(bits, 0), step, tl.broadcast_to(-low, bits.shape))


@triton.jit
def _rounded(tile, scales, magic, i: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """As `_weights`, in DTYPE; of 16 bits, in fewer instructions, before the rounding up to 2^-7 of a step off."""
    if FORMAT == "F32" or tl.float32 == DTYPE:
        return _weights(tile, scales, magic, i, FORMAT).to(DTYPE)
    elif FORMAT == "BF16":
        return (tile[0][i // 2] >> 16 * (i % 2)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(DTYPE)
    else:
        bits, step, less = _raised(tile, scales, magic, i, FORMAT)
        bits = bits.to(tl.float32, bitcast=True)
        return tl.fma(bits, tl.broadcast_to(step, bits.shape), tl.broadcast_to(less, bits.shape)).to(DTYPE)


@triton.jit
def _raised(tile, scales, magic, i: tl.constexpr, FORMAT: tl.constexpr):
    """Of weights 4i … 4i + 3: the integers as high in the mantissa of 2^23 as they go, their step, what is added.

    The higher they stand, the less of a step is the rounding of what takes 2^23 away again.
    """
    planes = tile[0]
    first, last, low = scales
    if FORMAT == "Q8_0":
        PLACE: tl.constexpr = 7 + 8 * (i % 2)
        word = planes[i // 4]
        bits = ((word << 7 if i % 4 < 2 else word >> 9) & 255 << PLACE) ^ magic
        step = first * (1.0 / (1 << PLACE))
        return bits, step, step * (-8388608.0 - (128 << PLACE))
    elif FORMAT == "Q4_K":
        PLACE: tl.constexpr = 7 + 4 * (i % 4)
        bits = ((planes[0] << 7 if i < 4 else planes[0] >> 9) & 15 << PLACE) ^ magic
        step = first * (1.0 / (1 << PLACE))
        return bits, step, tl.fma(step, tl.full(step.shape, -8388608.0, tl.float32), -low)
    else:
        BITS: tl.constexpr = 5 if FORMAT == "Q5_K" else 6
        PLACE: tl.constexpr = 15 - BITS + 8 * (i // 2 % 2)  # of two parts, the upper one ends where the mantissa does
        bits = (_turned(_fields(tile, FORMAT)[i % 2], PLACE - 4 * i) & (1 << BITS) - 1 << PLACE) ^ magic
        if FORMAT == "Q6_K":
            step = (first if i < 4 else last) * (1.0 / (1 << PLACE))
            return bits, step, step * (-8388608.0 - (32 << PLACE))
        step = first * (1.0 / (1 << PLACE))
        return bits, step, tl.fma(step, tl.full(step.shape, -8388608.0, tl.float32), -low)


@triton.jit
def _silu_up(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _tiles(
    W, up, first_block, last_block, groups, lanes,
    MATRICES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """What `_read` has of BLOCKS blocks of W, of two MATRICES each followed by that of up; each four arrays."""
    tiles = ()
    for b in tl.static_range(BLOCKS):
        for s in tl.static_range(MATRICES):
            # beyond the last block: it again, but it is not stored
            block = tl.minimum(first_block + b, last_block)
            if s == 0:
                words, high, scales, d = W
            else:
                words, high, scales, d = up
            arrays = _block(words, high, scales, d, block, GROUPS, FORMAT, PLANES)
            tiles = tiles + (_read(arrays, groups, groups // 8, lanes, groups < GROUPS, MASKED, FORMAT, PLANES),)
    return tiles


@triton.jit
def _beside_128(words, p: tl.constexpr, base):
    """fp32 of 128 plus byte p of words, which is less than 128 and goes into the mantissa of base, the bits of 128."""
    if ASSEMBLY:  # one instruction, for which the compiler has two
        select = tl.full([1], 0x7044 + 0x100 * p, tl.int32)
        raised = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [words, base, select], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        raised = (words >> 8 * p & 255) << 16 | base
    return raised.to(tl.float32, bitcast=True)


@triton.jit
def _chosen(mask: tl.constexpr, a, b):
    """Bits of a where the mask has ones, of b elsewhere."""
    if ASSEMBLY:  # one instruction, which the compiler takes apart when it knows that bits of a or b are 0
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xe4;", "=r,r,r,r", [a, b, tl.full([1, 1], mask, tl.int32)], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (a & mask) | (b & ~mask)


@triton.jit
def _to_fp32(values):
    """fp32 of values; of bf16 in one instruction each, for which the compiler has three for two."""
    if ASSEMBLY and values.dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [values], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _columns(values):
    """Of [units, 4], the four columns, [units] each; they stay in their threads."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def _four(x_at, inside, MASKED: tl.constexpr):
    """x_at[0 … 3] of every unit as fp32, [units, 4]."""
    return _to_fp32(_load(x_at[:, None] + tl.arange(0, 4)[None, :], inside[:, None], MASKED, ""))


@triton.jit
def _columns_of_x(x_at, inside, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """x_at[0 … COUNT - 1], 4 or 8, of every unit as fp32, [units] each; 8 of 16 bits, 16 bytes, are one load."""
    if COUNT == 4:
        return _columns(_four(x_at, inside, MASKED))
    elif x_at.dtype.element_ty.primitive_bitwidth == 16:
        both = _to_fp32(_load(x_at[:, None] + tl.arange(0, 8)[None, :], inside[:, None], MASKED, ""))
        first, second = tl.split(tl.permute(tl.reshape(both, (both.shape[0], 2, 4)), (0, 2, 1)))
        return _columns(first) + _columns(second)
    else:
        return _columns(_four(x_at, inside, MASKED)) + _columns(_four(x_at + 4, inside, MASKED))


@triton.jit
def _sum_of_x(x_at, lanes, inside, SPAN: tl.constexpr, MASKED: tl.constexpr):
    """Of every unit, x_at[0] + … + x_at[SPAN - 1]: lanes that share these add four each."""
    LANES: tl.constexpr = SPAN // 4
    part = tl.sum(_four(x_at + lanes % LANES * 4, inside, MASKED), 1)
    total = tl.sum(tl.reshape(part, (part.shape[0] // LANES, LANES)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (part.shape[0] // LANES, LANES)), part.shape)


@triton.jit
def _bytes(tile, FORMAT: tl.constexpr):
    """The integers of a K format in bytes: byte p of word c is weight 8p + c; eight words, [units] each."""
    words = tile[0][0]
    if FORMAT == "Q4_K":
        return _columns(words & 0x0F0F0F0F) + _columns((words >> 4) & 0x0F0F0F0F)
    else:
        quad = tl.arange(0, 4)
        if FORMAT == "Q5_K":
            above = _rotated(tile[1][0], 4 - quad) & 0x11111111
        else:  # of words 0 and 1, and of 2 and 3
            first, second = tile[1]
            lower = (first & 0xFFFF) | (second << 16)
            upper = ((first >> 16) & 0xFFFF) | (second & ~0xFFFF)
            above = tl.where(quad[None, :] < 2, _rotated(lower, 4 - quad % 2 * 2), _rotated(upper, 4 - quad % 2 * 2))
            above = above & 0x33333333
        even, odd = _chosen(0x0F0F0F0F, words, above), _chosen(0x0F0F0F0F, above, words)
        return _columns(even) + _columns(_turned(odd, -4))


@triton.jit
def _steps(tile, base, FORMAT: tl.constexpr):
    """As `_scales`, of a K format, [units]."""
    _, _, scales, d = tile
    both = scales.to(tl.int32)
    if FORMAT == "Q6_K":
        step = d.to(tl.float32)
        return step * ((both << 24) >> 24).to(tl.float32), step * (both >> 8).to(tl.float32), 0.0
    else:
        first = _low_half(d) * (_beside_128(both, 0, base) - 128.0)
        return first, first, _low_half(d >> 16) * (_beside_128(both, 1, base) - 128.0)


@triton.jit
def _add_bytes(sums, tiles, x_rows, groups, inside, base, MASKED: tl.constexpr, FORMAT: tl.constexpr):
    """`products._add_multiplied` for the K formats, by Σ x (128 + q) - 128 Σ x. sums: [units]; base: `BASE`."""
    SPANS: tl.constexpr = 2 if FORMAT == "Q6_K" else 1  # of weights with one scale
    LESS: tl.constexpr = -160.0 if FORMAT == "Q6_K" else -128.0
    N: tl.constexpr = len(x_rows)
    STEP: tl.constexpr = 8 if N == 1 else 4  # columns; more tokens have no registers for 16 bytes of each
    lanes = tl.arange(0, groups.shape[0]) % 8
    words = ()
    for m in tl.static_range(len(tiles)):
        words = words + (_bytes(tiles[m], FORMAT),)
    for span in tl.static_range(SPANS):
        totals, dots = (), ()
        for n in tl.static_range(N):
            x_at = x_rows[n] + groups * 32 + 32 // SPANS * span
            totals = totals + (_sum_of_x(x_at, lanes, inside, 32 // SPANS, MASKED),)
        for i in tl.static_range(len(tiles) * N):
            dots = dots + (totals[i % N] * LESS,)
        for k in tl.static_range(32 // SPANS * span, 32 // SPANS * (span + 1), STEP):
            values = ()
            for n in tl.static_range(N):
                values = values + (_columns_of_x(x_rows[n] + groups * 32 + k, inside, STEP, MASKED),)
            for c in tl.static_range(STEP):
                new = ()
                for m in tl.static_range(len(tiles)):
                    weight = _beside_128(words[m][(k + c) % 8], k // 8, base)
                    for n in tl.static_range(N):
                        new = new + (tl.fma(weight, values[n][c], dots[m * N + n]),)
                dots = new
        new = ()
        for m in tl.static_range(len(tiles)):
            first, last, low = _steps(tiles[m], base, FORMAT)
            for n in tl.static_range(N):
                total = tl.fma(dots[m * N + n], first if span == 0 else last, sums[m * N + n])
                if FORMAT != "Q6_K":
                    total = tl.fma(totals[n], -low, total)
                new = new + (total,)
        sums = new
    return sums
