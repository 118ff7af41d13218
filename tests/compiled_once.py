"""What is known of kernels that were compiled once: to compile and disassemble them all takes minutes of the tests.

An answer is kept in `compiled_once.json` by what is asked, and by all that the compiler is given: the source of the
kernel and of what it calls, its constants, the kinds of its other arguments, its options, the target, and Triton's
version, with which its ptxas comes. Where one of them is another, the kernel is compiled. So is one in `EVERY` in any
case, and compared with what is kept of it.

    LABKIT_COMPILED=folder make test       # also writes what was asked for to the folder
    python tests/compiled_once.py folder   # then keeps this, and nothing else
"""

import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource
from triton.runtime import driver

from labkit.bench.records import write_atomic
from labkit.evidence import compiled, roofline
from labkit.kernels import offline
from labkit.kernels.launch import Launch

FILE = Path(__file__).with_suffix(".json")
FOLDER = "LABKIT_COMPILED"  # in the environment: where to write what was asked for
EVERY = 16
OWN = Path(triton.__file__).parent
TOOLS = ("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH")  # in the environment: what may not be Triton's own


class _Asked(offline._Offline):
    """A target for which nothing was compiled in this process, so that Triton looks for no kernel in its memory."""

    def get_current_device(self) -> str:
        return f"asked about sm_{self.capability}"


def evidence(launch: Launch, capability: int) -> dict[str, Any]:
    """`compiled.evidence`; what fits on a multiprocessor is not of the kernel's code, and found anew."""
    found = known(launch, capability, compiled.evidence)
    fits = roofline.occupancy(found["registers"], found["shared_bytes"], found["num_warps"], found["arch"])
    return found | {"ctas_per_sm": fits}


def known(launch: Launch, capability: int, make: Callable[[Launch, int], Any]) -> Any:
    """What `make` says of a launch's compiled kernel, JSON.

    It is asked again where its file has changed, or the one by which all of them read what the compiler made.
    """
    file = Path(inspect.getfile(make))
    files = dict.fromkeys([Path(compiled.__file__), file])
    read = hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()[:8]
    name = f"{file.stem}.{make.__name__.lstrip('_')}"
    key = f"{name} {read} {key_of(launch, capability)}"
    if key not in _kept():
        found = json.loads(json.dumps(make(launch, capability)))
    else:
        found = _kept()[key]
        if int(key[-4:], 16) % EVERY == 0:
            assert (key, json.loads(json.dumps(make(launch, capability)))) == (key, found)
    if folder := os.environ.get(FOLDER):
        name = hashlib.sha256(key.encode()).hexdigest()[:20]
        write_atomic(Path(folder) / f"{name}.json", json.dumps([key, found]).encode())
    return found


def key_of(launch: Launch, capability: int) -> str:
    """Hash of all that Triton would compile; nothing is compiled."""
    given: dict[str, Any] = {}

    def hook(**told: Any) -> bool:
        given.update(told)
        return True  # done: it compiles nothing

    with offline.offline(capability):
        driver.set_active(_Asked(capability))
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
        try:
            launch.compile()
        finally:
            knobs.runtime.jit_cache_hook = before
    told = given["compile"]
    [attrs] = told["configs"]
    source = ASTSource(given["fn"].jit_function, told["signature"], told["constants"], attrs).hash()
    options = [told[name] for name in ("num_warps", "num_ctas", "num_stages", "launch_cooperative_grid")]
    parts = [triton.__version__, capability, source, options, given["key"].rpartition("]")[2]]
    tools = [path for path in map(os.environ.get, TOOLS) if path and not Path(path).is_relative_to(OWN)]
    parts += [value for value in (get_cache_invalidating_env_vars(), knobs.nvidia.ptxas_options, *tools) if value]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def _kept() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def keep(folder: Path) -> None:
    """Keep what was asked for in the tests that wrote to a folder, and nothing else."""
    found = dict(json.loads(path.read_text()) for path in folder.glob("*.json"))
    lines = [f"{json.dumps(key)}: {json.dumps(found[key], sort_keys=True)}" for key in sorted(found)]
    write_atomic(FILE, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
