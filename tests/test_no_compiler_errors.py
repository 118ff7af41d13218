"""No kernel of the lab is compiled wrongly in a way that is known: compiled for sm_90, and its code searched.

What is searched for are the errors of `compiler_errors`, so that these tests fail where a change of a
kernel, or of the compiler, brings one back.
"""

import itertools
import re
from dataclasses import replace
from functools import cache

import compiler_errors
import pytest
import torch
from pairwise import pairwise
from test_workers import modules as lab_modules

from labkit import registry
from labkit.bench.spec import Case
from labkit.evidence import compiled
from labkit.kernels.experts import choose, expert_layer, few_rows, routing, specialised
from labkit.kernels.experts import wide as experts_wide
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.tiles import GROUP, Int4
from labkit.kernels.gated_delta import apart, buffered, chunked, direct, drafts, fused, in_turn, recurrent, segmented
from labkit.kernels.gguf import continued, formats, integers, routed, routed_integers, wide
from labkit.kernels.gguf import products as ffn_kernels
from labkit.kernels.gguf import specialised as gguf_specialised
from labkit.kernels.gguf.experts import pack as pack_experts
from labkit.kernels.launch import launched
from labkit.shapes import QWEN3_NEXT
from labkit.studies.gemv_coalescing import variants as gemv_names
from labkit.studies.moe_persistent_grid import humming, vllm
from labkit.studies.persistent_tables import baseline
from labkit.studies.state_layout import study
from labkit.sweep import variants as sweep_variants

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
    x = chunked.ExtendInputs(q, q, v, g, beta, torch.tensor([0, 70, T]), state, state, torch.empty_like(v), 1.0)
    return chunked.extend(x, v_first, transposed=form == "transposed", **choices).launches[name]


def fused_launch(name, size, ways):
    """Of an extend of one sequence in three segments."""
    (K, V), T, H, HV = size, 512, 2, 4
    q, v, state = empty(T, H, K), empty(T, HV, V), torch.empty((1, HV, V, K))
    g, beta = torch.empty((T, HV)), torch.empty(T, HV)
    x = chunked.ExtendInputs(q, q, v, g, beta, torch.tensor([0, T]), state, state, torch.empty_like(v), 1.0)
    return fused.extend(x, True, 3, fused.Ways(**ways)).launches[name]


def segmented_launch(name, size, gate, v_first, **choices):
    """Of an extend of one sequence in three segments; choices: of each launch, the values of its tile."""
    (K, V), T, H, HV = size, 512, 2, 4
    q, v, state = empty(T, H, K), empty(T, HV, V), torch.empty((1, HV, V, K) if v_first else (1, HV, K, V))
    g, beta = torch.empty((T, HV, K) if gate == "KDA" else (T, HV)), torch.empty(T, HV)
    x = chunked.ExtendInputs(q, q, v, g, beta, torch.tensor([0, T]), state, state, torch.empty_like(v), 1.0)
    tiles = {launch: segmented.Tile(*values) for launch, values in choices.items()}
    return segmented.extend(x, v_first, 3, tiles).launches[name]


def step_launch(op, size, gate, v_first, state):
    """A decode of two sequences or a verify of a tree of four drafts each; the inputs alone (ring, drafts)."""
    (K, V), N, H, HV = size, 2, 2, 4
    tokens = (N,) if op in ("decode", "ring") else (N, 4)
    inner, gates = (HV, V, K) if v_first else (HV, K, V), (HV, K) if gate == "KDA" else (HV,)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[state]
    qkv = {"q": empty(*tokens, H, K), "k": empty(*tokens, H, K), "v": empty(*tokens, HV, V)}
    gate_inputs = {"a": empty(*tokens, *gates), "b": empty(*tokens, HV), "A_log": empty(HV), "dt_bias": empty(*gates)}
    out = {"out": empty(*tokens, HV, V), "scale": 1.0, "v_first": v_first}
    x = {"state": empty(N, *inner, dtype=dtype), "indices": torch.arange(N)} | qkv | gate_inputs | out
    if op == "decode":
        return recurrent.decode(recurrent.StepInputs(**x))
    if op in ("ring", "drafts"):
        return (recurrent.StepInputs if op == "ring" else buffered.DraftInputs)(**x)
    x |= {"intermediate_states": empty(N, 4, *inner, dtype=dtype), "cache_indices": torch.arange(N)}
    x["parents"] = torch.zeros(tokens, dtype=torch.int64)
    return recurrent.verify(recurrent.VerifyInputs(**x))


def expert_launch(name, choice, number, int4):
    """Of an expert layer as wide as Qwen3-30B-A3B's.

    choice: the rule's tiles for `number` tokens, the source's blocks, what it has for one token alone (rows, words), or
    another design (wide, split, few, specialised: of blocks of `number` tokens).
    """
    experts, hidden, width, tokens = 8, 2048, 768, 1 if choice in ("rows", "words") else 8
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    if int4:
        w1, w2 = (Int4(empty(e, n, k // 2, dtype="uint8"), empty(e, n, k // GROUP)) for e, n, k in shapes)
    else:
        w1, w2 = (empty(*shape) for shape in shapes)
    x, ids = empty(tokens, hidden), torch.zeros(tokens, 8, dtype=torch.int32)
    config = choose.source(number) if choice == "source" else choose.rule(number, 128, 8, hidden, width, int4)
    rows = {"rows": config.rows, "words": choose.by_words(8, width)}.get(choice)
    config, given = replace(config, rows=rows), LayerInputs(x, ids, torch.ones(tokens, 8), w1, w2, torch.empty_like(x))
    if choice == "few":
        return few_rows.by_few_rows(given).launches[name]
    if choice == "specialised":
        return specialised.by_specialised_warps(given, None, number).launches[name]
    if choice in ("wide", "split"):
        tiles = experts_wide.WideChoice(choose.WIDE_ROWS // config.block_m, splits=4 if choice == "split" else 1)
        return experts_wide.by_wide_tiles(given, config, None, tiles, tiles).launches[name]
    return expert_layer.layer(given, config).launches[name]


def routing_launch(name, tokens):
    ids = torch.zeros(tokens, 8, dtype=torch.int32)
    found = routing.route(ids, 128, 64)
    return routing.at_once(found, ids, 128).launches["place"] if name == "at once" else found.launches[name]


def gguf(weights, columns, rows=64):
    kind = formats.FORMATS[weights]
    return formats.pack(torch.zeros((rows, columns // kind.block * kind.block_bytes), dtype=torch.uint8), weights)


def activations(tokens, columns, rows=64):
    """x and y."""
    return empty(tokens, columns), empty(tokens, rows)


def ffn_launch(weights, tokens, columns):
    """A product of a GGUF matrix with so many tokens; 0 tokens: one token on the matrix units."""
    W, (x, y) = gguf(weights, columns), activations(max(1, tokens), columns)
    return ffn_kernels.weight_stationary(W, x, y) if tokens else ffn_kernels.tensor_core(W, x, y)


def integers_launch(columns, tokens):
    return integers.integers(integers.tiled(gguf("Q4_K", columns)), *activations(tokens, columns))


def warps_launch(weights, tokens):
    """Of so many tokens the products; of -tokens the launch that makes x before them."""
    x, y = activations(abs(tokens), 1024)
    return gguf_specialised.by_specialised_warps(gguf(weights, 1024), x, y)[0 if tokens < 0 else -1]


def continued_launch(rows, tokens):
    """A product of so many rows by continued sums."""
    return continued.by_continued_sums(empty(rows, 1024), *activations(tokens, 1024, rows))


def wide_launch(tokens, stored):
    """A product with many tokens, of packed weights or of weights in bf16."""
    return wide.wide(empty(64, 1024) if stored else gguf("Q4_K", 1024), *activations(tokens, 1024))


def router_launch():
    logits, ids = torch.empty(2, 64), torch.empty(2, 8, dtype=torch.int32)
    return routed.router(gguf("Q8_0", 1024), activations(2, 1024)[0], logits, ids, torch.empty(2, 8))[1]


def grouped_integers_launch():
    """All launches of routed experts by integers, for two tokens."""
    kind, (count, width, hidden) = formats.FORMATS["Q4_K"], (2, 256, 512)

    def blocks(rows, columns):
        return torch.zeros(count, rows, columns // kind.block * kind.block_bytes, dtype=torch.uint8)

    given = pack_experts(blocks(width, hidden), blocks(width, hidden), blocks(hidden, width), "Q4_K")
    ids = torch.zeros(2, 2, dtype=torch.int32)
    work = routed.Work.of(empty(2, hidden), ids, torch.ones(2, 2), width)
    tiled = routed_integers.tiled(given)
    return routed_integers.grouped_integers(tiled, torch.arange(count, dtype=torch.int32), work)


def engine_launch(kernel):
    """What the lab adds to engines' products: of vLLM's layer, and of Humming's the sort of 16 tokens."""
    found = launched(lambda: vllm._activated(None, empty(128, 768), empty(128, 2 * 768)))
    found += launched(lambda: vllm._summed(empty(16, 8, 2048), empty(16, 2048)))
    found += humming.tables(torch.zeros(16, 8, dtype=torch.int32), 8, 128)[0]
    return next(launch for launch in found if launch.kernel.fn.__name__ == kernel)


# which of them: every two values of two parameters meet, and each kernel has every size of its products


def every(function, **choices):
    """Sources in which every two values of two parameters meet: name -> source."""
    return named(function, (dict(zip(choices, values, strict=True)) for values in pairwise(*choices.values())))


def named(function, choices):
    return {f"{function} {some}": (f"{__name__}:{function}", some) for some in choices}


def variants(name, pairs):
    """Sources of variants of a study: of (case, variant)."""
    return {f"{name} {case.key} {one}": sweep_variants.variant_source(name, case, one) for case, one in pairs}


def chunks():
    """Products of an extend's chunks with themselves: the state's layout is no matter here."""
    return every("extend_launch", name=["prepare"], size=SIZES, gate=GATES, form=["KV"])


def outputs():
    return every("extend_launch", name=["output"], size=SIZES, gate=GATES, form=["KV", "VK"])


def states():
    chunk_state = {"name": ["chunk_state"], "gate": GATES}
    found = every("extend_launch", **chunk_state, size=SIZES, form=["KV", "VK"], tile=[16, 64])
    found |= every("extend_launch", **chunk_state, size=SIZES, form=["KV", "VK"])  # few sequences: loads far ahead
    ahead = [{}, {"num_warps": 4, "num_stages": 4}, {"num_warps": 8, "num_stages": 3}]
    wide = [{"size": SIZES[0], "tile": 32, "gate": g, "form": f} for g, f in (("GDN", "KV"), ("KDA", "VK"))]
    turned = [{"size": s, "tile": 64, "gate": g, "form": "transposed"} for s, g in zip(SIZES, 3 * GATES, strict=False)]
    more = [*(one | choice for one in wide for choice in ahead), *turned]
    return found | named("extend_launch", [{"name": "chunk_state"} | one for one in more])


def ring_launch(launch, size, gate, v_first, state, ahead=True, matrix=False):
    """A decode of two sequences with a ring of 16 tokens: what is multiplied ahead (0), or the step (the last)."""
    x = step_launch("ring", size, gate, v_first, state)
    choice = buffered.BufferedChoice(recurrent.StepChoice(32, 2, 1), ahead, matrix)
    return buffered.decode(x, buffered.empty_ring(x, 16), 16, x.indices.int(), choice).launches[launch]


def drafts_launch(launch, size, gate, v_first, state, tree):
    """A verify on the ring (0 to 2: its launches), a write of states ("write"), the moving of a path ("accept")."""
    x = step_launch("drafts", size, gate, v_first, state)
    x = replace(x, parents=torch.zeros(x.a.shape[:2], dtype=torch.int32) if tree else None)
    ring, some = buffered.empty_ring(x, 16), x.indices.int()
    if launch == "write":
        return buffered.write(x, ring, some)
    if launch == "accept":
        return buffered.accept(x, ring, torch.zeros((2, 4), dtype=torch.int32), some)
    return buffered.verify(x, ring).launches[launch]


def apart_launch(launch, size, gate, v_first, state):
    """A decode whose states are written apart: the step (1), what writes them (2)."""
    x = step_launch("ring", size, gate, v_first, state)
    choice = buffered.BufferedChoice(recurrent.StepChoice(32, 2, 1), ahead=True)
    return apart.decode(x, buffered.empty_ring(x, 16), 16, x.indices.int(), choice).launches[launch]


def direct_launch(launch, size, state):
    """A decode with little between state and result: the sums (0), the step (1), both in one (None)."""
    x = step_launch("ring", size, "GDN", True, state)
    choice = direct.choose(x)
    choice = replace(choice, ahead=launch is not None, matrix=choice.matrix or launch is None)
    return direct.decode(x, buffered.empty_ring(x, 16), 16, x.indices.int(), choice).launches[launch or 0]


def in_turn_launch(size, state):
    """A verify of all drafts at once that takes states in turn."""
    x = step_launch("drafts", size, "GDN", True, state)
    choice = in_turn.TurnsChoice(recurrent.StepChoice(32, 1, 4), 2, 3)
    return in_turn.verify(x, buffered.empty_ring(x, 16), choice).launches[1]


def at_once_launch(launch, size, v_first, state, tree):
    """A verify of all drafts at once: what is prepared (0), the drafts (1)."""
    x = step_launch("drafts", size, "GDN", v_first, state)
    x = replace(x, parents=torch.zeros(x.a.shape[:2], dtype=torch.int32) if tree else None)
    return drafts.verify(x, buffered.empty_ring(x, 16)).launches[launch]


def rings():
    both = {"size": SIZES[::4], "gate": GATES}
    forms = {"v_first": [True, False], "state": ["fp32", "bf16"], "ahead": [True, False]}
    found = every("ring_launch", launch=[-1], **both, **forms)
    found |= every("ring_launch", launch=[0], **both, v_first=[True], state=["fp32"])
    found |= every("ring_launch", launch=[-1], **both, v_first=[True], state=["bf16"], matrix=[True])
    found |= every("drafts_launch", launch=[0, 1], **both, v_first=[True], state=["fp32"], tree=[True, False])
    found |= every("drafts_launch", launch=[2, "write"], **both, v_first=[True, False], state=["bf16"], tree=[False])
    found |= every("apart_launch", launch=[1, 2], **both, v_first=[True, False], state=["fp32"])
    found |= every("direct_launch", launch=[0], size=both["size"], state=["bf16"])
    found |= every("direct_launch", launch=[1, None], size=both["size"], state=["fp32", "bf16"])
    found |= every("in_turn_launch", size=[(128, 128)], state=["fp32", "bf16"])
    found |= every("at_once_launch", launch=[0], size=both["size"], v_first=[True], state=["fp32"], tree=[True, False])
    found |= every(
        "at_once_launch", launch=[1], size=both["size"], v_first=[True, False], state=["fp32", "bf16"], tree=[False]
    )
    return found | every("drafts_launch", launch=["accept"], **both, v_first=[True], state=["fp32"], tree=[True])


def segments():
    found = every("segmented_launch", name=["maps", "scan", "walk"], size=SIZES, gate=GATES, v_first=[True, False])
    one = {"size": SIZES[:1], "gate": ["GDN"], "v_first": [True]}
    found |= every("segmented_launch", name=["scores", "walk"], **one, scores=[(64, 4, 2)])
    solves = [{"solve": solve} for solve in ((1, 2, 3), (2, 1, 2))]
    found |= every("fused_launch", name=["solve"], size=SIZES, ways=solves)
    walks = [{"columns": 16, "num_stages": 2}, {"columns": 64, "num_stages": 4}]
    found |= every("fused_launch", name=["maps", "walk"], size=SIZES, ways=walks)
    return found | every("fused_launch", name=["maps", "walk"], size=SIZES[:1], ways=[{"columns": 128, "num_warps": 8}])


def steps():
    both = {"size": SIZES[::4], "gate": GATES, "v_first": [True, False]}
    found = every("step_launch", op=["decode"], **both, state=["fp32", "bf16"])
    return found | every("step_launch", op=["tree"], **both, state=["fp32"])


def grid():
    """One warp a program: with more of them the code differs by little."""
    cases = [study.case(QWEN3_NEXT, 1, state) for state in study.STATES]
    wanted = [one.name for one in study.variants(cases[0]) if one.options.get("warps") == 1]
    return variants("state_layout", zip(itertools.cycle(cases), wanted, strict=False))


def experts():
    gemms = {"name": ["gemm1", "gemm2"], "int4": [False, True]}
    found = every("expert_launch", **gemms, choice=["rule"], number=[1, 512, 1642, 16384])
    found |= every("expert_launch", **gemms, choice=["rows"], number=[1])
    found |= every("expert_launch", name=["gemm1", "gemm2"], int4=[True], choice=["words"], number=[1])
    found |= every("expert_launch", **gemms, choice=["source"], number=[16, 64])
    found |= every("expert_launch", name=["gemm1", "gemm2"], int4=[False], choice=["wide", "split"], number=[128, 512])
    found |= every("expert_launch", name=["gemm1", "gemm2"], int4=[True], choice=["few"], number=[1])
    found |= every("expert_launch", name=["gemm1", "gemm2"], int4=[True], choice=["specialised"], number=[16, 64])
    found |= every("expert_launch", name=["gather"], int4=[True], choice=["specialised"], number=[16])
    found |= every("expert_launch", name=["sum"], int4=[False], choice=["rule"], number=[1])
    found |= every("routing_launch", name=["at once"], tokens=[16, 256])
    return found | every("routing_launch", name=["count", "place"], tokens=[512, 4096])


def feed_forward():
    """0 tokens: by matrix instructions; of the formats whose tiles are dealt, which compile long, one has many."""
    plain = every("ffn_launch", weights=["F32", "BF16", "Q8_0"], tokens=[0, 1, 17], columns=[512, 1024])
    dealt = [("Q4_K", 1, 1024), ("Q4_K", 9, 512), ("Q5_K", 0, 1024), ("Q6_K", 1, 512)]
    found = plain | named("ffn_launch", [{"weights": w, "tokens": n, "columns": c} for w, n, c in dealt])
    found |= named("integers_launch", [{"columns": 1024, "tokens": 9}])
    found |= every("warps_launch", weights=["Q4_K", "Q6_K"], tokens=[8, 64])
    found |= every("continued_launch", rows=[5120, 17408], tokens=[1, 200, 512])
    found |= named("warps_launch", [{"weights": "Q5_K", "tokens": n} for n in (-32, 16)])
    found |= every("wide_launch", tokens=[16, 128], stored=[False, True])
    return found | named("router_launch", [{}]) | named("grouped_integers_launch", [{}])


def gemv():
    case = Case("gemv", {"N": 256, "K": 2048, "dtype": "bf16"})
    return variants("gemv_coalescing", [(case, one) for one in [*gemv_names.LADDER, gemv_names.OURS]])


def machine():
    return variants("machine", [(Case("ceiling", {"what": what, "mib": 1}), "Triton") for what in RATES])


def persistent():
    choices = [{"rows": 4, "position_from": "device"}, {"rows": 8, "block_k": 512, "block_t": 8}]
    source = "labkit.kernels.decoder.step:compilable"
    found = {f"persistent {some}": (source, {"model": "Llama-3.2-1B", **some}) for some in choices}
    found["streamed"] = ("labkit.kernels.decoder.streamed:compilable", {"model": "Llama-3.2-1B"})
    source = "labkit.studies.persistent_tables.baseline:compilable"
    found |= {f"baseline {name}": (source, {"model": "Llama-3.2-1B", "kernel": name}) for name in baseline.KERNELS}
    return found | {"patch": ("labkit.studies.persistent_tables.ways:compilable", {})}


def kernels_of(source):
    """The kernels of a source, "module.function"; none of a library's own launch."""
    found = compiled.launch_of(source, 90)
    made = [launch.kernel for launch in (found if isinstance(found, list) else [found]) if launch.kernel is not None]
    return {f"{kernel.fn.__module__}.{kernel.fn.__name__}" for kernel in made}


def others():
    """Of what studies compile ahead of their tiny cases, the first source of each kernel that is in no other group."""
    seen = set().union(*(kernels_in(group) for group in GROUPS if group != OTHERS))
    found = {}
    for loaded in map(registry.load, registry.NOTEBOOKS):
        for source in loaded.kernels(loaded.tiny, 90, "") if loaded.kernels else ():
            if not (kernels := kernels_of(source)) <= seen:
                found[str(source)] = source
                seen |= kernels
    return found


def engines():
    names = ("_activate_kernel", "_sum_kernel", "_counts_kernel", "_blocks_kernel")
    return named("engine_launch", ({"kernel": name} for name in names))


RATES = ("read", "in_place", "copy")
OTHERS = "other kernels"
GROUPS = {
    "extend: chunks": chunks,
    "extend: outputs": outputs,
    "extend: states": states,
    "extend: segments": segments,
    "decode and verify": steps,
    "decode with a ring": rings,
    "grid of layouts": grid,
    "expert layers": experts,
    "engines' expert layers": engines,
    "feed-forward": feed_forward,
    "GEMV": gemv,
    "machine": machine,
    "persistent tables": persistent,
    OTHERS: others,
}


@cache
def sources_of(group):
    return GROUPS[group]()


@cache
def kernels_in(group):
    return set().union(*map(kernels_of, sources_of(group).values()))


@pytest.mark.parametrize("group", GROUPS)
def test_no_known_error_of_a_compiler(group):
    sources = sources_of(group)
    assert sources
    found = {name: compiler_errors.errors_of(source, 90) for name, source in sources.items()}
    assert {name: errors for name, errors in found.items() if errors} == {}


# They read, or do nothing: there is no product in them, and nothing is loaded ahead.
NOT_SEARCHED = (
    "_read_kernel",
    "ceilings._sum_kernel",
    "_empty_kernel",
    "_empty_dependent_kernel",
    "_between_kernel",
    "_where_kernel",
)


def test_every_kernel_is_searched():
    """Those that are launched: a function of Triton's whose name says that it is a kernel."""
    known = {
        f"{module}.{name}"
        for module, text in lab_modules().items()
        for name in re.findall(r"^@triton\.jit\b.*\ndef (\w+_kernel)\(", text, re.MULTILINE)
    }
    assert len(known) > 40
    searched = set().union(*map(kernels_in, GROUPS))
    assert {name for name in known - searched if not name.endswith(NOT_SEARCHED)} == set()
