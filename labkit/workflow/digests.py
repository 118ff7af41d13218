"""What variants launch, as hashes: run as a script, on the tree that PYTHONPATH names, which may be an older one.

Of the lab it uses no more than what older trees have, too: see `same.py`, which asks two.
argv: the capability to compile for, and the name of the GPU whose tuned tables are chosen by.
stdin: [[study, op, case, variant, hash of its sources or ""] …] in JSON. stdout: [[hash, digest] …] in its order.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+([^;]+;)")  # as cuobjdump prints one


def digest_of(launch: Any) -> str:
    """Hash of a launch: the instructions of its kernel, its grid and options, and what it is given.

    A tensor is its type, shape and strides.
    """
    from labkit.evidence.compiled import listing_of

    kernel, compiled = launch.kernel, launch.compile()
    kinds = kernel.fn.__annotations__
    given = [_told(launch.args[name]) for name in kernel.arg_names if "constexpr" not in str(kinds.get(name))]
    code = _INSTRUCTION.findall(listing_of(compiled.asm["cubin"]))
    if not code:
        raise ValueError(f"{kernel.fn.__name__}: no instructions in what cuobjdump prints")
    parts = (code, compiled.metadata.shared, tuple(launch.grid), sorted(launch.options.items()), given)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _told(value: Any) -> Any:
    if hasattr(value, "stride"):
        return str(value.dtype), tuple(value.shape), value.stride()
    return value


def _variant_of(study: str, op: str, case: str, name: str) -> tuple[Any, Any]:
    from labkit import registry
    from labkit.bench.spec import Case
    from labkit.sweep.case import with_control

    one = Case(op, json.loads(case))
    return one, next(found for found in with_control(registry.load(study), one) if found.name == name)


def _prepared(case: Any, variant: Any) -> Any:
    """Without memory where that can be done: what looks at values, as a router's, is prepared on the CPU."""
    try:
        return variant.prepare(case, "meta", 1, 0)
    except (NotImplementedError, RuntimeError):  # of torch, where there are no values
        return variant.prepare(case, "cpu", 1, 0)


def answer(study: str, op: str, case: str, name: str, sha: str, known: dict[str, str]) -> tuple[str, str]:
    """Hash of a variant's sources, and the digest of what it launches; empty where the hash is not the one given.

    Empty, too, if it launches nothing of the lab's, if the tree does not know it, or cannot prepare it without a GPU.
    known: digests of launches that were asked for before, to which new ones are added.
    """
    from labkit.bench.sha import kernel_sha
    from labkit.kernels.launch import launched
    from labkit.sweep.variants import code_of

    try:
        one, variant = _variant_of(study, op, case, name)
        present = kernel_sha(variant.source)
        if sha not in ("", present):
            return present, ""
        launches = launched(_prepared(one, variant).calls[0])
        keys = [_key(launch, code_of) for launch in launches]
        for key, launch in zip(keys, launches, strict=True):
            if key not in known:  # cuobjdump takes seconds
                known[key] = digest_of(launch)
    except Exception as problem:
        print(f"{study} {op} {case} {name}: {problem!r}", file=sys.stderr)
        return "", ""
    return present, hashlib.sha256("".join(known[key] for key in keys).encode()).hexdigest()[:16] if keys else ""


def _key(launch: Any, code_of: Any) -> str:
    return repr((code_of(launch), launch.grid, [_told(launch.args[name]) for name in launch.kernel.arg_names]))


@contextmanager
def chosen_as_on(gpu: str) -> Iterator[None]:
    """While this lasts, kernels with tuned tables choose as on the GPU of this name, whose rows are asked for."""
    from labkit.kernels import tuned
    from labkit.kernels.experts import choose as experts
    from labkit.kernels.gemv import choose as gemv

    with tuned.chosen_for(gpu, experts), tuned.chosen_for(gpu, gemv):
        yield


def main(capability: int, gpu: str) -> None:
    """Answer all that is asked for."""
    from labkit.kernels.offline import offline

    known: dict[str, str] = {}
    with offline(capability), chosen_as_on(gpu):
        json.dump([answer(*asked, known) for asked in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
