"""What a kernel needs to know of the GPU that it is launched on or compiled for."""

from functools import cache

import torch

from labkit.kernels.offline import offline_capability


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; for a device that is none, the H100's number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device can start before the one before them has ended.

    For tensors that are on no GPU: whether the target of `compiled.offline` has it.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return (offline_capability() or 0) >= 90


COPY_ENGINE = (9, 0)  # compute capability that has the copy engine


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Of the GPU, or of that which is compiled for; None in the interpreter, which takes everything."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    known = offline_capability()
    return (known // 10, known % 10) if known else None


def check_hopper(device: torch.device, what: str = "x") -> None:
    """Raise ValueError for a device whose matrix instructions are not those of a warpgroup."""
    found = capability_of(device)
    if found is None or found[0] != 9:
        name = f"on compute capability {found[0]}.{found[1]}" if found else f"on {device}"
        raise ValueError(f"{what} is {name}; allowed: a GPU of compute capability 9.0 (Hopper)")
