"""What a case must move and compute at least, from its routing; arithmetic and torch only."""

from functools import cache

from labkit.bench import ledger
from labkit.bench.spec import Case, Floor
from labkit.kernels.experts.int4 import GROUP
from labkit.studies.moe_persistent_grid.routings import synthetic

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
# The routing of a case is one and the same in every process, so that its floor can be told. With this seed the experts
# that get a token under uniform routing are, in every model, nearly as many as there are on average.
ROUTING_SEED = 2
# Matrices [H, I] of an expert that an operation has, of the three of a layer. "waves" is GEMM1; candidates ("tune") are
# of either GEMM: the least that any of them must do.
MATRICES = {"gemm1": 2, "waves": 2, "gemm2": 1, "tune": 1}
BALANCE = 266  # FLOP a byte, from which on an H100 is bound by its bf16 products rather than by reading


@cache
def counts(kind: str, tokens: int, experts: int, top_k: int) -> tuple[int, ...]:
    """Slots of each expert in the routing of a case."""
    ids = synthetic(kind, tokens, experts, top_k, ROUTING_SEED).ids
    return tuple(ids.flatten().long().bincount(minlength=experts).tolist())


def counts_of(x: Case) -> tuple[int, ...]:
    """Slots of each expert."""
    return counts(x["routing"], x["T"], x["E"], x["top_k"])


def active(x: Case) -> int:
    """Experts that got a token."""
    return sum(count > 0 for count in counts_of(x))


def weight_bytes(x: Case) -> int:
    """Of the experts that got a token, of the GEMMs that the case has; INT4 with its scales."""
    values = MATRICES.get(x.op, 3) * active(x) * x["H"] * x["I"]
    if x["weights"] == "INT4":
        return values // 2 + values // GROUP * 2
    return values * SIZES[x["weights"]]


def flops(x: Case) -> int:
    """Of the products: two for each weight and slot."""
    return 2 * MATRICES.get(x.op, 3) * x["T"] * x["top_k"] * x["H"] * x["I"]


def floor(x: Case) -> Floor:
    """Weights of the experts that got a token, what comes in and what goes out, each once.

    Of a whole layer, what one GEMM leaves for the next is not counted: a kernel of the whole need not write it.
    """
    slots, size = x["T"] * x["top_k"], SIZES[x["activations"]]
    rows = {"gemm1": x["T"] * x["H"] + slots * x["I"], "gemm2": slots * (x["I"] + x["H"])}
    rows |= {"tune": min(rows.values()), "waves": rows["gemm1"]}
    weights, products = weight_bytes(x), flops(x)
    moved = weights + rows.get(x.op, 2 * x["T"] * x["H"]) * size
    limit = "bf16" if products > BALANCE * moved else "read"
    return Floor(moved, products, limit, set_bytes=weights)


ledger.watch(__name__)
