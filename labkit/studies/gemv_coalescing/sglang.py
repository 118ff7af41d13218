"""SGLang's own GEMV of one token for Hopper, as it released it, on torch's current stream.

It is an instance of a template for each N and K, which SGLang compiles when it first needs it. Its Python file chooses
the instance here too; `sglang.cu` hands it torch's memory and stream, and `sources.building` compiles the two once.
The headers of its tensors are those of apache-tvm-ffi. Without these files `gemv` raises `NotFetched` or `NotBuilt`.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from labkit import sources
from labkit.sources import building

SOURCE, HEADERS = "sglang-gemv-0.5.23", "apache-tvm-ffi-0.1.15.post2"
# Of sglang.cu: named here, it counts for a row's `kernel_sha`.
GLUE_SHA = "ab11f28bab89adb48ff374624447317d85ffcd792d9dd099ca263b0714590889"
MODULE = "sglang.kernels.ops.gemm.hopper_bf16_gemv"
FILE = "gemm/hopper_bf16_gemv.cuh"
ROOT = "sglang/kernels/jit"
INCLUDES = (f"{ROOT}/include", f"{ROOT}/csrc", f"../{HEADERS}/tvm_ffi/include")
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-w")  # its own build's
ALIGNED = 16  # bytes of a load
# Its own function that names the stream, where a package of tvm's that has one, too, was imported before: that one
# names another stream, on which a CUDA graph would not record the kernel.
LINK = ("-Xlinker=-Bsymbolic",)
FAMILIES = (9, 12)  # compute capabilities, their first number, for which its engine takes it


def gemv(W: Tensor, x: Tensor, y: Tensor) -> Callable[[], None]:
    """y = W x as a call. W: [N, K], x: [K], y: [N], bf16, contiguous, on a GPU of compute capability 9 or 12.

    Raises ValueError for what its engine multiplies by another kernel.
    """
    (N, K), device = W.shape, W.device
    check_taken(W, x, y)
    function = opened(N, K, device).lab_gemv
    arguments = [ctypes.c_int64(size) for size in (N, K)] + [ctypes.c_void_p(one.data_ptr()) for one in (W, x, y)]

    def call() -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        if function(device.index or 0, ctypes.c_void_p(stream), *arguments):
            raise RuntimeError("SGLang's GEMV was not launched; its own words are on stderr")

    return call


def check_taken(W: Tensor, x: Tensor, y: Tensor) -> None:
    """Refuse what its engine does not hand to it."""
    major, _ = torch.cuda.get_device_capability(W.device)
    if major not in FAMILIES:
        raise ValueError(f"compute capability {major}.x; SGLang takes its GEMV for {', '.join(map(str, FAMILIES))}")
    if not takes(*W.shape):
        raise ValueError(f"{len(W)} × {W.shape[1]}: SGLang leaves this shape to cuBLAS")
    for one in (W, x, y):
        if one.dtype != torch.bfloat16 or not one.is_contiguous() or one.data_ptr() % ALIGNED:
            raise ValueError(f"a tensor is not bf16, contiguous and at a multiple of {ALIGNED} bytes")


def takes(N: int, K: int) -> bool:
    """Whether its engine multiplies a W of this shape by it on the GPU at hand."""
    return sources.load(SOURCE, MODULE).use_hopper_bf16_gemv(1, N, K)


@cache
def opened(N: int, K: int, device: torch.device) -> ctypes.CDLL:
    """The library of a shape, for a GPU."""
    return ctypes.CDLL(str(library(N, K, torch.cuda.get_device_capability(device))))


def library(N: int, K: int, capability: tuple[int, int]) -> Path:
    """The built library of a shape, (9, 0) for compute capability 9.0."""
    if not sources.is_fetched(headers := sources.source(HEADERS)):  # asked first: the recipe itself needs SOURCE
        raise sources.NotFetched(f"not fetched: labkit fetch {headers.package}")
    major, minor = capability
    return building.library(recipe(N, K, 10 * major + minor), 10 * major + minor)


def recipe(N: int, K: int, capability: int) -> building.Recipe:
    """What it is built of; the stub of SGLang's compiler returns what it would have compiled, KERNEL."""
    kernel = sources.load(SOURCE, MODULE)._jit_hopper_bf16_gemv_module(N, K)
    headers = {"released_kernel.h": f'#include "{FILE}"\n#define KERNEL {kernel}\n'}
    flags, own = (*FLAGS, f"-DSGL_CUDA_ARCH={10 * capability}"), Path(__file__).with_suffix(".cu")
    made, needs = sources.source(SOURCE), [sources.source(HEADERS)]
    return building.Recipe(made, (), own, GLUE_SHA, INCLUDES, headers, flags, "^TVMFFI", needs, LINK)
