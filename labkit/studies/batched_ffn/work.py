"""How much work a case is: which experts its tokens need, and the bytes of weights that it must read."""

from collections.abc import Sequence
from functools import cache as once

from labkit.bench import ledger
from labkit.bench.spec import Case
from labkit.studies.batched_ffn import variants

TRACE_TOKENS = 256  # of a trace at least, which then begins again: so many that a cache cannot know it by heart
LEAST_STEPS = 32

Routing = list[list[list[list[int]]]]  # experts of every token, [steps][layers][N][top_k]


def routing(x: Case) -> Routing:
    """Experts of every token of a case; of the case alone, so that every process has the same."""
    count = steps(x["N"]) if x.op == "cache" else 1
    return _drawn(x["trace"], x["N"], count, x.params.get("layers", 1), x["E"], x["top_k"])


def steps(N: int) -> int:
    """Of a trace, N tokens each."""
    return max(LEAST_STEPS, -(-TRACE_TOKENS // N))


@once
def _drawn(trace: str, N: int, steps: int, layers: int, E: int, top_k: int) -> Routing:
    drawn = variants.TRACES[trace](N * steps, layers, E, top_k, seed=N)  # a dispatch a token and layer
    chosen = [[expert for _, expert in dispatch] for dispatch in drawn]
    of_step = [chosen[first : first + N * layers] for first in range(0, len(chosen), N * layers)]
    return [[step[layer::layers] for layer in range(layers)] for step in of_step]


def distinct(ids: Sequence[Sequence[int]]) -> list[int]:
    """The experts that any token needs, ascending."""
    return sorted({expert for chosen in ids for expert in chosen})


def weight_bytes(x: Case, whole: bool = False) -> int:
    """Bytes of the weights that a case must read, as stored; of the cache, those of its first step.

    whole: of all experts of all layers, needed or not.
    """
    from labkit.kernels.gguf.formats import FORMATS

    each = FORMATS[x["format"]].bytes_per_weight()
    if x.op in variants.ONE_MATRIX:
        return round(x["rows"] * x["K"] * each)
    expert = 3 * x["hidden"] * x["width"] * each
    if x.op == "ffn":
        return round(expert)
    count = x["layers"] * x["E"] if whole else sum(len(distinct(ids)) for ids in routing(x)[0])
    return round(count * expert)


ledger.watch(__name__)
