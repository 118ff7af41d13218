"""No kernel of the lab is compiled wrongly in a way that is known: compiled for sm_90, and its code searched.

What is searched for are the errors of `labkit.evidence.compiler_errors`, so that these tests fail where a change of a
kernel, or of the compiler, brings one back.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from labkit.batched_ffn import formats
from labkit.batched_ffn import kernels as ffn_kernels
from labkit.bench.spec import Case
from labkit.evidence import compiled, workers
from labkit.gemv_coalescing import names as gemv_names
from labkit.moe_persistent_grid import choose, routing
from labkit.moe_persistent_grid.kernels import GROUP, Int4, LayerInputs, layer
from labkit.shapes import QWEN3_NEXT
from labkit.state_layout import extend, recurrent, study

GATES = ("GDN", "KDA")
SIZES = ((128, 128), (16, 16), (64, 16), (32, 32), (48, 20))  # K and V

# the launches; what they are launched on is never touched


def empty(*shape, dtype="bfloat16"):
    return torch.empty(shape, dtype=getattr(torch, dtype))


def extend_launch(name, size, gate, form, **choices):
    """Of an extend of two sequences; form: KV, VK or transposed; choices: of chunk_state."""
    (K, V), T, H, HV, v_first = size, 128, 2, 4, form != "KV"
    q, v, state = empty(T, H, K), empty(T, HV, V), torch.empty((2, HV, V, K) if v_first else (2, HV, K, V))
    g, beta = torch.empty((T, HV, K) if gate == "KDA" else (T, HV)), torch.empty(T, HV)
    x = extend.ExtendInputs(q, q, v, g, beta, torch.tensor([0, 70, T]), state, state, torch.empty_like(v), 1.0)
    return extend.extend(x, v_first, transposed=form == "transposed", **choices).launches[name]


def step_launch(op, size, gate, v_first, state):
    """A decode of two sequences, or a verify of a tree of four draft tokens each."""
    (K, V), N, H, HV = size, 2, 2, 4
    tokens = (N,) if op == "decode" else (N, 4)
    inner, gates = (HV, V, K) if v_first else (HV, K, V), (HV, K) if gate == "KDA" else (HV,)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[state]
    qkv = {"q": empty(*tokens, H, K), "k": empty(*tokens, H, K), "v": empty(*tokens, HV, V)}
    gate_inputs = {"a": empty(*tokens, *gates), "b": empty(*tokens, HV), "A_log": empty(HV), "dt_bias": empty(*gates)}
    out = {"out": empty(*tokens, HV, V), "scale": 1.0, "v_first": v_first}
    x = {"state": empty(N, *inner, dtype=dtype), "indices": torch.arange(N)} | qkv | gate_inputs | out
    if op == "decode":
        return recurrent.decode(recurrent.StepInputs(**x))
    x |= {"intermediate_states": empty(N, 4, *inner, dtype=dtype), "cache_indices": torch.arange(N)}
    x["parents"] = torch.zeros(tokens, dtype=torch.int64)
    return recurrent.verify(recurrent.VerifyInputs(**x))


def expert_launch(name, choice, number, int4):
    """Of an expert layer as wide as Qwen3-30B-A3B's.

    choice: the rule's tiles for `number` tokens, the source's blocks, or what it has for one token alone.
    """
    experts, hidden, width, tokens = 8, 2048, 768, 1 if choice == "rows" else 8
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    if int4:
        w1, w2 = (Int4(empty(e, n, k // 2, dtype="uint8"), empty(e, n, k // GROUP)) for e, n, k in shapes)
    else:
        w1, w2 = (empty(*shape) for shape in shapes)
    x, ids = empty(tokens, hidden), torch.zeros(tokens, 8, dtype=torch.int32)
    config = choose.source(number) if choice == "source" else choose.rule(number, 128, 8, hidden, width, int4)
    config = config if choice == "rows" else replace(config, rows=None)
    return layer(LayerInputs(x, ids, torch.ones(tokens, 8), w1, w2, torch.empty_like(x)), config).launches[name]


def routing_launch(name, tokens):
    ids = torch.zeros(tokens, 8, dtype=torch.int32)
    return routing.route(ids, 128, 64).launches[name]


def ffn_launch(weights, tokens, columns):
    """A product of a GGUF matrix with so many tokens; 0 tokens: one token on the matrix units."""
    kind = formats.FORMATS[weights]
    W = formats.pack(torch.zeros((64, columns // kind.block * kind.block_bytes), dtype=torch.uint8), weights)
    x, y = empty(max(1, tokens), W.columns), empty(max(1, tokens), W.rows)
    if not tokens:
        return ffn_kernels.tensor_core(W, x, y)
    return ffn_kernels.weight_stationary(W, x, y)


# which of them


def every(function, **choices):
    """Sources for all combinations: name -> source."""
    found = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    return {f"{function} {some}": (f"{__name__}:{function}", some) for some in found}


def variants(name, cases, wanted):
    """Sources of variants of a study's cases."""
    return {f"{name} {x.key} {one}": compiled.variant_source(name, x, one) for x in cases for one in wanted}


def extends():
    """Every launch of an extend, each code once: the state's layout is no matter to the first."""
    chunk_state = {"name": ["chunk_state"], "gate": GATES}
    found = every("extend_launch", name=["prepare"], size=SIZES, gate=GATES, form=["KV"])
    found |= every("extend_launch", name=["output"], size=SIZES, gate=GATES, form=["KV", "VK"])
    found |= every("extend_launch", **chunk_state, size=SIZES, form=["KV", "VK"], tile=[16, 64])
    found |= every("extend_launch", **chunk_state, size=SIZES[:1], form=["KV", "VK"], tile=[32])
    found |= every("extend_launch", **chunk_state, size=SIZES, form=["KV", "VK"])  # few sequences: loads far ahead
    for warps, stages in [(4, 4), (8, 3)]:
        choice = {"tile": [32], "num_warps": [warps], "num_stages": [stages]}
        found |= every("extend_launch", **chunk_state, size=SIZES[:1], form=["KV", "VK"], **choice)
    return found | every("extend_launch", **chunk_state, size=SIZES, form=["transposed"], tile=[64])


def steps():
    layouts = {"gate": GATES, "v_first": [True, False]}
    found = every("step_launch", op=["decode"], size=SIZES[:1], **layouts, state=["fp32", "bf16"])
    found |= every("step_launch", op=["tree"], size=SIZES[:1], **layouts, state=["fp32"])
    return found | every("step_launch", op=["decode", "tree"], size=SIZES[-1:], **layouts, state=["fp32"])


def grid():
    """One warp a program: with more of them the code differs by little."""
    cases = [study.case(QWEN3_NEXT, 1, state) for state in study.DTYPES]
    wanted = [one.name for one in study.variants(cases[0]) if one.options.get("warps") == 1]
    return variants("state_layout", cases, wanted)


def experts():
    gemms = {"name": ["gemm1", "gemm2"], "int4": [False, True]}
    found = every("expert_launch", **gemms, choice=["rule"], number=[1, 512, 1642, 16384])
    found |= every("expert_launch", **gemms, choice=["rows"], number=[1])
    found |= every("expert_launch", **gemms, choice=["source"], number=[16, 64])
    found |= every("expert_launch", name=["sum"], int4=[False], choice=["rule"], number=[1])
    return found | every("routing_launch", name=["place"], tokens=[1, 512])


def gemv():
    case = Case("gemv", {"N": 256, "K": 2048, "dtype": "bf16"})
    return variants("gemv_coalescing", [case], [*gemv_names.LADDER, gemv_names.OURS])


def machine():
    cases = [Case("ceiling", {"what": what, "mib": 1}) for what in ("read", "in_place", "copy")]
    return variants("machine", cases, ["Triton"])


def persistent():
    choices = [{"rows": 4}, {"rows": 4, "position_from": "device"}, {"rows": 8, "block_k": 512, "block_t": 8}]
    source = "labkit.persistent_tables.kernels:compilable"
    return {f"persistent {some}": (source, {"model": "Llama-3.2-1B", **some}) for some in choices}


GROUPS = {
    "extend": extends,
    "decode and verify": steps,
    "grid of layouts": grid,
    "expert layers": experts,
    "feed-forward": lambda: (
        every("ffn_launch", weights=list(formats.FORMATS), tokens=[0, 1, 17], columns=[1024])
        | every("ffn_launch", weights=list(formats.FORMATS), tokens=[17], columns=[512])  # as of experts
    ),
    "GEMV": gemv,
    "machine": machine,
    "persistent tables": persistent,
}


@pytest.fixture(scope="module")
def found():
    """Name -> errors that are found in it; compiled on all cores, answers are kept on disk."""
    sources = {name: source for group in GROUPS.values() for name, source in group().items()}
    requests = [{"source": list(source), "capability": 90} for source in sources.values()]
    answers = workers.ask("labkit.evidence.compiler_errors:errors_of", requests, compiled.modules_of(sources))
    return dict(zip(sources, answers, strict=True))


@pytest.mark.parametrize("group", GROUPS)
def test_no_known_error_of_a_compiler(group, found):
    names = GROUPS[group]()
    assert names
    assert {name: found[name] for name in names if found[name]} == {}
