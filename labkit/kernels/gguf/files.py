"""Weights of a GGUF file, read by the package `gguf`."""

from pathlib import Path

import torch
from gguf import GGUFEndian, GGUFReader
from torch import Tensor

from labkit.kernels.gguf.formats import FORMATS, Format


def tensor_names(path: Path | str) -> list[str]:
    """The tensors of a GGUF file, in its order. FileNotFoundError without such a file, ValueError as `read`."""
    return [one.name for one in _reader(path).tensors]


def read(path: Path | str, name: str) -> tuple[Format, Tensor]:
    """A tensor of a GGUF file: its format, and its blocks as stored, uint8 [..., rows, bytes of a row].

    FileNotFoundError without such a file. ValueError naming the file if it is damaged, cut off (a shape that is no
    multiple of the block too) or big-endian, has no such tensor, or has it empty or of a format that is not in
    `FORMATS`.
    """
    found = {one.name: one for one in _reader(path).tensors}
    if name not in found:
        raise ValueError(f"{path} has no tensor {name!r}; it has: {', '.join(found) or 'none'}")
    tensor = found[name]
    kind = tensor.tensor_type.name
    if kind not in FORMATS:
        raise ValueError(f"{path}: {name} is {kind}; allowed: {', '.join(FORMATS)}")
    if not tensor.data.ndim or not tensor.data.size:
        raise ValueError(f"{path}: {name} is {tensor.data.shape}; allowed: at least one dimension, none of them 0")
    # a copy: the reader's array is a read-only map of the file
    return FORMATS[kind], torch.from_numpy(tensor.data.copy()).view(torch.uint8)


def _reader(path: Path | str) -> GGUFReader:
    try:
        found = GGUFReader(path)
    except OSError:
        raise
    except Exception as problem:  # of a damaged file, it lets through whatever its arithmetic raises
        text = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{path} is not a GGUF file that can be read ({text}); it may be damaged or cut off") from None
    if found.endianess is not GGUFEndian.LITTLE:
        raise ValueError(f"{path} is big-endian; allowed: little-endian")
    return found
