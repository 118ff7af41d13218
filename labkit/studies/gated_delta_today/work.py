"""The least bytes and operations of a case: what must go through memory, whoever computes it.

Of a decode on a ring of L entries, per sequence and value head: the state is read, and written once in L tokens. Where
a token finds j entries, it reads them, and adds its own unless it writes the state: j is 0 to L - 1, each as often. An
entry is a correction of V values and a key of K in the activations' dtype, the key shared by the value heads of its
head, and the logarithm of its decay in fp32, for KDA one a channel. Beside that, what every token brings and takes.
"""

from collections.abc import Sequence
from typing import Any

from labkit.bench.spec import Case, Floor

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
LONGEST = 64  # entries of a ring
CHUNK = 64  # tokens, of a prefill
Params = Case | dict[str, Any]


def state_bytes(x: Params) -> int:
    """Of a batch in one layer."""
    return x["batch"] * x["HV"] * x["K"] * x["V"] * ITEMSIZE[x["state"]]


def entry_bytes(x: Params) -> int:
    """Of one entry of the ring, of all heads of one sequence."""
    size = ITEMSIZE[x["activations"]]
    return x["HV"] * (x["V"] * size + 4 * _gates(x)) + x["H"] * x["K"] * size


def token_bytes(x: Params) -> int:
    """Of what one token brings and takes: q, k, v, a, b and the output, and the int32 indices of slot and ring."""
    values = 2 * x["H"] * x["K"] + 2 * x["HV"] * x["V"] + x["HV"] * (1 + _gates(x))
    return values * ITEMSIZE[x["activations"]] + 12


def ring_bytes(x: Params, length: int) -> float:
    """Bytes of one decode step, mean over the positions of a ring with L = length; 1: the state is written always."""
    state, entry = state_bytes(x), x["batch"] * entry_bytes(x)
    read, written = (length - 1) / 2, (length - 1) / length
    return state * (1 + 1 / length) + entry * (read + written) + x["batch"] * token_bytes(x)


def best_length(x: Params) -> int:
    """The L of the least bytes."""
    return min(range(1, LONGEST + 1), key=lambda length: ring_bytes(x, length))


def ring_memory(x: Params, length: int) -> int:
    """Bytes that the rings of a batch take in one layer, beside the states."""
    return x["batch"] * length * entry_bytes(x)


def ring_floor(x: Case) -> Floor:
    """Of a decode step with the L of the least bytes; of a case in which no token writes, without the writes."""
    length = best_length(x)
    moved = ring_bytes(x, length) - (state_bytes(x) / length if x.params.get("writes") == "never" else 0)
    flops = 4 * x["batch"] * x["HV"] * x["K"] * x["V"]  # two products of the state with a vector
    return Floor(round(moved), flops, "read", set_bytes=state_bytes(x))


def verify_floor(x: Case, entries: int) -> Floor:
    """Of T drafts: the states and, in the mean, half of the ring's other entries read; T entries written."""
    tokens, n = x["T"], x["batch"]
    moved = state_bytes(x) + n * entry_bytes(x) * ((entries - tokens) / 2 + tokens) + n * tokens * token_bytes(x)
    return Floor(round(moved), 4 * n * tokens * x["HV"] * x["K"] * x["V"], "read", set_bytes=state_bytes(x))


def prefill_floor(x: Case, lengths: Sequence[int]) -> Floor:
    """The tokens with their gates in fp32, the first and last state of every sequence; the chunked form's products."""
    H, HV, K, V, tokens = x["H"], x["HV"], x["K"], x["V"], sum(lengths)
    values = tokens * (2 * H * K + 2 * HV * V) * ITEMSIZE[x["activations"]]
    gates, states = tokens * HV * 4 * (1 + _gates(x)), 2 * len(lengths) * HV * K * V * 4
    flops = tokens * HV * (6 * K * V + 2 * CHUNK * (2 * K + 2 * V))
    return Floor(values + gates + states, flops, "copy")


def _gates(x: Params) -> int:
    """Decays of a token and value head."""
    return int(x["K"]) if x["gate"] == "KDA" else 1
