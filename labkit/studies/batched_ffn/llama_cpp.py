"""llama.cpp's own CUDA products, as it released them, from blocks as stored, on torch's current stream.

| function | what llama.cpp runs                                                                                 |
|----------|-----------------------------------------------------------------------------------------------------|
| product  | MUL_MAT: by its own choice one of its vector, matrix or cuBLAS products                             |
| routed   | MUL_MAT_ID of gate, up and down, SiLU and the weighted sum between and after them, fused as it does |

x and y are fp32, as ggml has them. Quantised weights: it quantises x to Q8_1 in every call, which is part of it.
`llama_cpp.cu` makes ggml's tensors of torch's memory and hands its backend the stream; the files are compiled for the
GPU at hand once (`sources.building`). Without them each function raises `NotFetched` or `NotBuilt`.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit import sources
from labkit.kernels.gguf import formats
from labkit.sources import building

SOURCE = "llama-cpp-python-0.3.36"
# Of llama_cpp.cu: named here, it counts for a row's `kernel_sha`.
GLUE_SHA = "125d08adf3b4ade8ec204745ca2c775ea556f8f05b2f26f947b095cfb2d65daa"
ROOT = "vendor/llama.cpp/ggml"
CUDA = f"{ROOT}/src/ggml-cuda"
INSTANCES = f"{CUDA}/template-instances"
UNITS = (  # those that take long first
    *(f"{INSTANCES}/mmq-instance-{kind}.cu" for kind in ("q4_k", "q5_k", "q6_k", "q8_0")),
    *(f"{CUDA}/{name}.cu" for name in ("mmvq", "mmvf", "ggml-cuda")),
    *(f"{INSTANCES}/mmf-instance-ncols_{count}.cu" for count in range(1, 17)),
    *(f"{CUDA}/{name}.cu" for name in ("getrows", "convert", "mmq", "mmf", "mmid", "quantize", "unary", "fwht")),
    f"{CUDA}/moe-weighted-reduction.cu",
    *(f"{ROOT}/src/{name}" for name in ("ggml-backend.cpp", "ggml-backend-meta.cpp", "ggml-threading.cpp")),
    *(f"{ROOT}/src/{name}" for name in ("ggml-quants.c", "ggml-alloc.c", "ggml.c")),
)
# Its own build's, without FlashAttention; and memory from cudaMalloc, which asks nothing of the driver's library.
FLAGS = (
    "-O3", "-use_fast_math", "-extended-lambda", "-compress-mode=size", "-w",
    "-DNDEBUG", "-D_GNU_SOURCE", "-DGGML_CUDA_NO_FA", "-DGGML_CUDA_NO_VMM",
)  # fmt: skip
HEADERS = {"ggml-version.h": f'#define GGML_VERSION "{SOURCE}"\n#define GGML_COMMIT ""\n'}
TOP_K = range(2, 16)
ROW = 512  # values of a row are a multiple of this: it pads others, and reads behind their end


class Work:
    """A graph of ggml's over tensors of torch's; called, it is launched on the current stream. tensors: kept alive."""

    handle: int | None = None

    def __init__(self, name: str, device: torch.device, arguments: Sequence[Any], tensors: Sequence[Tensor]):
        self.device, self.tensors, self.library = device, tensors, opened(device)
        make = getattr(self.library, name)
        make.restype = ctypes.c_void_p
        numbers = [one.encode() if isinstance(one, str) else ctypes.c_int64(one) for one in arguments]
        self.handle = make(device.index or 0, *numbers, *(ctypes.c_void_p(one.data_ptr()) for one in tensors))
        self()  # the first launch allocates, which a capture must not

    def __call__(self) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if status := self.library.lab_launch(ctypes.c_void_p(self.handle), ctypes.c_void_p(stream)):
            raise RuntimeError(f"llama.cpp's backend gave {status}")

    def __del__(self) -> None:
        if self.handle:
            self.library.lab_free(ctypes.c_void_p(self.handle))


def product(format: str, blocks: Tensor, x: Tensor, y: Tensor) -> Work:
    """y = x Wᵀ. blocks: uint8 [rows, bytes of a row] as stored; x: fp32 [N, K]; y: fp32 [N, rows].

    Raises ValueError for what it would refuse by ending the process.
    """
    check_rows(format, x.shape[1], blocks, x, y)
    return Work("lab_product", x.device, (format, len(blocks), x.shape[1], len(x)), (blocks, x, y))


def routed(format: str, blocks: Sequence[Tensor], x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> Work:
    """y of routed experts, weighted and summed in the order of the slots.

    blocks: gate and up, uint8 [E, width, bytes of a row], and down, [E, hidden, bytes of a row]; x, y: fp32
    [N, hidden]; ids: int32, weights: fp32 [N, top_k]. Raises ValueError for what it would refuse by ending the process.
    """
    (E, width, _), (N, hidden), top_k = blocks[0].shape, x.shape, ids.shape[1]
    check_top_k(top_k)
    check_rows(format, hidden, blocks[0], blocks[1], x, y, ids, weights)
    check_rows(format, width, blocks[2])
    sizes = (format, E, top_k, hidden, width, N)
    return Work("lab_routed", x.device, sizes, (*blocks, x, ids, weights, y))


def check_rows(format: str, K: int, blocks: Tensor, *others: Tensor) -> None:
    """Refuse what its kernels would read wrongly."""
    kind = formats.find(format)
    size = K // kind.block * kind.block_bytes
    if K % ROW:
        raise ValueError(f"rows have {K} values; allowed: multiples of {ROW}")
    if blocks.shape[-1] != size:
        raise ValueError(f"blocks has {blocks.shape[-1]} bytes a row; allowed for {K} values of {format}: {size}")
    if any(not one.is_contiguous() for one in (blocks, *others)):
        raise ValueError("a tensor is not contiguous; allowed: contiguous tensors")


def check_top_k(top_k: int) -> None:
    """Refuse what its weighted sum is not fused for."""
    if top_k not in TOP_K:
        raise ValueError(f"top_k is {top_k}; allowed: {TOP_K.start} to {TOP_K.stop - 1}")


@cache
def opened(device: torch.device) -> ctypes.CDLL:
    """Its library for a GPU. cuBLAS is the one that torch has loaded: its symbols are made visible to it."""
    major, minor = torch.cuda.get_device_capability(device)
    path = library(10 * major + minor)
    ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def library(capability: int) -> Path:
    """The built library, 90 for compute capability 9.0."""
    return building.library(recipe(), capability)


def recipe() -> building.Recipe:
    """What it is built of."""
    own, includes = Path(__file__).with_suffix(".cu"), (f"{ROOT}/include", f"{ROOT}/src")
    return building.Recipe(sources.source(SOURCE), UNITS, own, GLUE_SHA, includes, HEADERS, FLAGS, "ggml")
