"""GGUF weights: block layouts, dequantisation, a quantiser, and repacking for 16-byte loads. Reading files: files.py.

| format | bytes / weights | a block as stored (AoS)                                           | weight               |
|--------|-----------------|-------------------------------------------------------------------|----------------------|
| F32    | 4 / 1           | fp32                                                              | itself               |
| BF16   | 2 / 1           | bf16                                                              | itself               |
| Q8_0   | 34 / 32         | fp16 d, int8 q[32]                                                | d·q                  |
| Q4_K   | 144 / 256       | fp16 d, fp16 dmin, 12 B of 6-bit scales and mins, 128 B of 4 bits | d·scale·q - dmin·min |
| Q5_K   | 176 / 256       | as Q4_K, with 32 B of fifth bits before the 128 B                 | d·scale·q - dmin·min |
| Q6_K   | 210 / 256       | 128 B of 4 bits, 64 B of 2 bits, int8 scale[16], fp16 d           | d·scale·(q - 32)     |

Scales and mins are one for 32 weights (Q6_K: 16). Blocks of 34 and 210 bytes are aligned to 2 bytes only, so a thread
cannot load 16 bytes of them at once: `pack` separates their fields into arrays (SoA).

Packed: groups of 32 weights of a row, 8 rows side by side, so that a warp reads full lines while 8 lanes share the same
values of x. Of group g, weight 4i + j stands in part i of word j: a part is 4, 8, 16 or 32 bits, and 4 words (16 bytes)
are one load; weights of the same part are then adjacent in x too. Scales and mins of Q4_K and Q5_K are decoded to 8
bits each: 4 bytes more for 256 weights (2.8 % of Q4_K), for 2 instructions instead of a dozen that differ from lane
to lane. All other formats are packed in as many bytes as they are stored in.

The layout of blocks is that of llama.cpp (ggml-common.h, ggml-quants.c) and of the package `gguf`, whose bits
`dequantise` gives: d·scale·q needs at most 23 bits, so that fp32 rounds only the subtraction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.kernels.checks import check_contiguous, check_one_of

GROUP = 32  # weights of a row that one thread takes
ROWS = 8  # rows side by side
K_FORMATS = ("Q4_K", "Q5_K", "Q6_K")  # whose weights take a GPU longer to unpack than to read
Q6_K_PLACES = [4 * i + 2 * (j % 2) + 16 * (j // 2) for i in range(4) for j in range(4)]  # of bits in `Packed.high`


@dataclass(frozen=True)
class Format:
    """A GGUF format. block: weights of a block; block_bytes: bytes of one as stored."""

    name: str
    block: int
    block_bytes: int

    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its share of the scales, as stored."""
        return self.block_bytes / self.block


_SIZES = {"F32": (1, 4), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
FORMATS = {name: Format(name, *sizes) for name, sizes in _SIZES.items()}


@dataclass(frozen=True)
class Packed:
    """Weights [rows, columns] as the kernels read them; rows padded to a multiple of 8 with weights of zero.

    words:  int32 [rows/8, columns/32, planes, 8, 4]; 1 plane of 4-bit parts (Q4_K, Q5_K, Q6_K), 2 of 8, 4 of 16, 8 of
            32 bits; part i of plane p is part p · (parts of a word) + i of the group. Q8_0: q + 128, unsigned.
    high:   bits above the four, int32, of part i of word j: Q5_K [rows/8, columns/32, 8], bit 4i + j; Q6_K [rows/8,
            columns/32, 2, 8], of plane i // 4 bits 4 · (i % 4) + 2 · (j % 2) + 16 · (j // 2) and the next; or None. One
            rotation brings them above the four bits of all parts of a half word.
    scales: [rows/8, columns/32, 8]: Q8_0 fp16 d; Q4_K, Q5_K int16 scale | min << 8; Q6_K int16, int8 scales of the
            first and last 16 weights; or None.
    d:      [rows/8, columns/256, 8]: Q4_K, Q5_K int32, bits of fp16 d | dmin << 16; Q6_K fp16; or None.
    """

    format: Format
    rows: int
    columns: int
    words: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    d: Tensor | None = None

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays that its format has, by name."""
        found = {"words": self.words, "high": self.high, "scales": self.scales, "d": self.d}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding rows included."""
        return sum(one.nbytes for one in self.arrays.values())

    def to(self, device: torch.device | str) -> "Packed":
        """The same weights on a device."""
        return replace(self, **{name: one.to(device) for name, one in self.arrays.items()})


def find(name: str) -> Format:
    """The format of this name. ValueError naming the known ones."""
    check_one_of("format", name, FORMATS)
    return FORMATS[name]


def dequantise(blocks: Tensor, format: str) -> Tensor:
    """Weights fp32 [..., columns] of blocks as stored, uint8 [..., bytes of a row]; the bits of `gguf.quants`.

    Of F32 perhaps a view. ValueError for an unknown format, another dtype, or a row that is no whole number of blocks.
    """
    kind = find(format)
    raw = _blocks(blocks, kind)
    if format in ("F32", "BF16"):
        weights = raw.view(torch.float32 if format == "F32" else torch.bfloat16).float()
    elif format == "Q8_0":
        weights = _half(raw[..., :2]) * raw[..., 2:].contiguous().view(torch.int8).float()
    elif format == "Q6_K":
        q, scales, d = _q6_k(raw)
        weights = (d * scales.float()).unsqueeze(-1) * (q.unflatten(-1, (16, 16)).float() - 32)
    else:
        q, scales, mins, d, dmin = _q45_k(raw, format)
        step, low = (d * scales.float()).unsqueeze(-1), (dmin * mins.float()).unsqueeze(-1)
        weights = step * q.unflatten(-1, (8, 32)).float() - low
    return weights.reshape(*blocks.shape[:-1], -1)


def quantise(weights: Tensor, format: str) -> Tensor:
    """Blocks as stored, uint8 [..., bytes of a row], of weights [..., columns], which are first rounded to fp32.

    F32 (perhaps a view), BF16 and Q8_0 have the bits of `gguf.quants.quantize`; a NaN stays one in BF16. Of the K
    formats, which it cannot quantise, min and scale of a sub-block are rounded up to their 6 (Q6_K: 8) bits, so that no
    weight is clipped: each is at most half a step, |d·scale|/2, from its value, plus rounding of fp32. (llama.cpp
    searches for scales with a smaller error.)
    ValueError for an unknown format, columns that are no multiple of its block, or weights that fp16 scales cannot hold
    (not finite, or too large).
    """
    kind = find(format)
    if not weights.ndim or not weights.shape[-1] or weights.shape[-1] % kind.block:
        raise ValueError(f"weights is {tuple(weights.shape)}; allowed for {format}: [.., multiple of {kind.block}]")
    weights = weights.float()
    if format in ("F32", "BF16"):
        return _bytes(weights if format == "F32" else weights.bfloat16())
    if not weights.isfinite().all():
        raise ValueError(f"weights are not all finite; allowed for {format}: finite")
    make = {"Q8_0": _quantise_q8_0, "Q6_K": _quantise_q6_k}.get(format, _quantise_q45_k)
    raw = make(weights.reshape(-1, kind.block), format)
    return raw.reshape(*weights.shape[:-1], -1)


def pack(blocks: Tensor, format: str) -> Packed:
    """`Packed` of a matrix's blocks as stored, uint8 [rows, bytes of a row], on their device.

    ValueError as of `dequantise`, and for columns that are no multiple of 32 (F32, BF16) or blocks of other dimensions.
    """
    kind, raw = find(format), _matrix_blocks(blocks, format)
    rows, columns = blocks.shape[0], raw.shape[-2] * kind.block
    if columns % GROUP:
        raise ValueError(f"columns is {columns}; allowed for {format}: a multiple of {GROUP}")
    if format in ("F32", "BF16"):
        values = raw.flatten(-2).contiguous().view(torch.int32 if format == "F32" else torch.int16)
        return Packed(kind, rows, columns, _words(values, 32 if format == "F32" else 16))
    if format == "Q8_0":
        q = (raw[..., 2:] ^ 128).contiguous().view(torch.int8).flatten(-2)
        return Packed(kind, rows, columns, _words(q, 8), scales=_groups(_half(raw[..., :2]).squeeze(-1).half()))
    if format == "Q6_K":
        q, scales, d = _q6_k(raw)
        q, pairs = q.flatten(-2), scales.view(torch.int16)
        d = _groups(d.squeeze(-1).half())
        return Packed(kind, rows, columns, _words(q & 15, 4), _q6_k_high(q >> 4), _groups(pairs.flatten(-2)), d)
    q, scales, mins, _, _ = _q45_k(raw, format)
    q, pairs = q.flatten(-2), torch.stack([scales, mins], -1).view(torch.int16).squeeze(-1)
    high = _groups(_placed((q >> 4).unflatten(-1, (-1, 32)), range(32))) if format == "Q5_K" else None
    d = raw[..., :4].contiguous().view(torch.int32).squeeze(-1)
    return Packed(kind, rows, columns, _words(q & 15, 4), high, _groups(pairs.flatten(-2)), _groups(d))


def matrix(blocks: Tensor, format: str) -> Tensor:
    """The matrix bf16 [rows, columns] that blocks of BF16 as stored are, uint8 [rows, bytes of a row]: a view of them.

    `wide.wide` reads it as it is: there is nothing to unpack. ValueError for another format, blocks that are not
    contiguous, and as of `pack`.
    """
    check_one_of("format", format, ("BF16",))
    raw = _matrix_blocks(blocks, format)
    check_contiguous("blocks", blocks)
    return raw.flatten(-2).view(torch.bfloat16)


def _matrix_blocks(blocks: Tensor, format: str) -> Tensor:
    """As `_blocks`, of a matrix."""
    if blocks.ndim != 2 or 0 in blocks.shape:
        raise ValueError(f"blocks is {tuple(blocks.shape)}; allowed: [rows, bytes of a row], both at least 1")
    return _blocks(blocks, find(format))


def _blocks(blocks: Tensor, kind: Format) -> Tensor:
    """uint8 [..., blocks of a row, bytes of a block]."""
    check_one_of("blocks", blocks.dtype, (torch.uint8,))
    if not blocks.ndim or not blocks.shape[-1] or blocks.shape[-1] % kind.block_bytes:
        allowed = f"[.., bytes of a row], a multiple of {kind.block_bytes}"
        raise ValueError(f"blocks is {tuple(blocks.shape)}; allowed for {kind.name}: {allowed}")
    return blocks.unflatten(-1, (-1, kind.block_bytes)).contiguous()


def _half(raw: Tensor) -> Tensor:
    """fp32 [..., 1] of the two bytes of an fp16."""
    return raw.contiguous().view(torch.float16).float()


def _q45_k(raw: Tensor, format: str) -> Sequence[Tensor]:
    """Of blocks [..., 144 or 176]: q uint8 [..., 256], scales and mins uint8 [..., 8], d and dmin fp32 [..., 1]."""
    first, second, third = raw[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1)
    mins = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1)
    low = raw[..., -128:].unflatten(-1, (4, 32))
    q = torch.stack([low & 15, low >> 4], -2).flatten(-3, -2)  # [..., 8, 32]
    if format == "Q5_K":
        q = q | (_shifted(raw[..., 16:48], range(8)) & 1) << 4
    return q.flatten(-2), scales, mins, _half(raw[..., :2]), _half(raw[..., 2:4])


def _q6_k(raw: Tensor) -> Sequence[Tensor]:
    """Of blocks [..., 210]: q uint8 [..., 256] (32 stands for 0), scales int8 [..., 16], d fp32 [..., 1]."""
    low = raw[..., :128].unflatten(-1, (2, 64))
    low = torch.stack([low & 15, low >> 4], -2)  # [..., half, nibble, 64]
    high = _shifted(raw[..., 128:192].unflatten(-1, (2, 32)), range(0, 8, 2)) & 3  # [..., half, 4, 32]
    q = low.flatten(-3) | high.flatten(-3) << 4
    return q, raw[..., 192:208].contiguous().view(torch.int8), _half(raw[..., 208:])


def _shifted(values: Tensor, shifts: Sequence[int]) -> Tensor:
    """[..., shifts, n] of [..., n]: shifted to the right by each."""
    return torch.stack([values >> shift for shift in shifts], -2)


def _quantise_q8_0(weights: Tensor, format: str) -> Tensor:
    exact = weights.abs().amax(1, keepdim=True) / 127
    check_scale(d := exact.half(), exact, format)
    inverse = 1 / exact
    scaled = weights * torch.where(inverse.isinf(), 0, inverse)  # of a block of zeros, or of less than fp16 can hold
    size = scaled.abs()
    whole = size.floor()
    q = scaled.sign() * (whole + (2 * (size - whole)).floor())  # a half goes away from zero
    return torch.cat([_bytes(d), _bytes(q.to(torch.int8))], 1)


def _quantise_q45_k(weights: Tensor, format: str) -> Tensor:
    top = 15 if format == "Q4_K" else 31
    parts = weights.unflatten(1, (8, 32))
    dmin, mins = _scales_up((-parts.amin(-1)).clamp(min=0), 63, format)
    lifted = parts + (dmin.float() * mins).unsqueeze(-1)
    d, scales = _scales_up((lifted.amax(-1) / top).clamp(min=0), 63, format)
    step = (d.float() * scales).unsqueeze(-1)
    q = torch.where(step == 0, 0, lifted / step).round().clamp(0, top).to(torch.uint8)
    sc, m = scales.to(torch.uint8), mins.to(torch.uint8)
    ends = [one[:, :4] | (one[:, 4:] >> 4) << 6 for one in (sc, m)]
    header = [_bytes(d), _bytes(dmin), *ends, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4]
    if format == "Q5_K":
        header.append(_merged(q >> 4, 1, 1))
    low = (q & 15).unflatten(1, (4, 2))  # sub-blocks 2c and 2c + 1 share their bytes
    return torch.cat([*header, _merged(low, 4, 2).flatten(1)], 1)


def _quantise_q6_k(weights: Tensor, format: str) -> Tensor:
    parts = weights.unflatten(1, (16, 16))
    d, scales = _scales_up(parts.abs().amax(-1) / 31, 127, format)
    step = (d.float() * scales).unsqueeze(-1)
    q = (torch.where(step == 0, 0, parts / step).round().clamp(-32, 31) + 32).to(torch.uint8).flatten(1)
    low = _merged((q & 15).reshape(-1, 2, 2, 64), 4, 2).flatten(1)
    high = _merged((q >> 4).reshape(-1, 2, 4, 32), 2, 2).flatten(1)
    return torch.cat([low, high, _bytes(scales.to(torch.int8)), _bytes(d)], 1)


def _merged(values: Tensor, bits: int, dim: int) -> Tensor:
    """uint8: values of `bits` bits along a dimension, the first in the lowest bits, merged into one byte."""
    parts = values.unbind(dim)
    return torch.stack([one << bits * i for i, one in enumerate(parts)]).sum(0, dtype=torch.uint8)


def _scales_up(wanted: Tensor, top: int, format: str) -> tuple[Tensor, Tensor]:
    """d fp16 [n, 1] and whole numbers of at most `top`, fp32 like wanted [n, m]: d · number is at least wanted."""
    largest = wanted.amax(-1, keepdim=True)
    d = (largest / top).half()
    above = (d.view(torch.int16) + 1).view(torch.float16)  # the next fp16, d being no less than 0
    d = torch.where(d.float() * top < largest, above, d)
    check_scale(d, largest / top, format)
    numbers = torch.where(d == 0, 0, wanted / d.float()).ceil()
    return d, numbers.clamp(max=top)


def check_scale(d: Tensor, exact: Tensor, format: str) -> None:
    """Every scale that was rounded to fp16 is finite."""
    if not d.isfinite().all():
        raise ValueError(f"a scale is {float(exact.max()):g}; allowed for {format}: up to 65504, the largest fp16")


def _bytes(values: Tensor) -> Tensor:
    """uint8: the last dimension's values as bytes."""
    return values.contiguous().view(torch.uint8)


def _groups(values: Tensor) -> Tensor:
    """[rows/8, n, 8, ...] of [rows, n, ...], missing rows zero."""
    missing = values.new_zeros((-len(values) % ROWS, *values.shape[1:]))
    return torch.cat([values, missing]).unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _placed(values: Tensor, places: Sequence[int]) -> Tensor:
    """int32 [...] of [..., n]: value i from bit places[i] on."""
    return sum(value.to(torch.int32) << place for value, place in zip(values.unbind(-1), places, strict=True))


def _q6_k_high(values: Tensor) -> Tensor:
    """`Packed.high` of Q6_K from the upper two bits of each weight, [rows, columns]."""
    return _groups(_placed(values.unflatten(-1, (-1, 2, 16)), Q6_K_PLACES)).transpose(2, 3).contiguous()


def _words(values: Tensor, bits: int) -> Tensor:
    """`Packed.words` of integers [rows, columns], each of `bits` bits."""
    if bits == 4:
        parts = values.unflatten(1, (-1, 8, 4)).transpose(2, 3)  # [rows, groups, 4, 8]
        return _groups(_placed(parts, range(0, 32, 4))).unsqueeze(2)
    # [rows, groups, planes, parts of a word, 4] with the first part in the lowest bits
    parts = values.unflatten(1, (-1, bits // 4, 32 // bits, 4)).transpose(3, 4).contiguous()
    return _groups(parts.view(torch.int32).squeeze(-1)).transpose(2, 3).contiguous()
