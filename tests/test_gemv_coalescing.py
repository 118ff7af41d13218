"""The GEMV study: reference, cases, floors, choices, chains, tables and views by hand; what its code is."""

import dataclasses
import json
import math
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import compiled_once
import pandas as pd
import pytest
import rows as made
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton.runtime.autotuner import Autotuner

from labkit import paths
from labkit.bench import records, spec, verdict
from labkit.bench.sha import covered, kernel_sha
from labkit.bench.spec import CONTROL, Case
from labkit.bench.tables import tuning_seconds
from labkit.evidence import coalescing, compiled
from labkit.kernels import offline, target, tuned
from labkit.kernels.gemv import choose, reference
from labkit.kernels.gemv.choose import Choice
from labkit.kernels.gemv.gemv import gemv
from labkit.kernels.launch import launched
from labkit.report.figures import Picture
from labkit.shapes import LINEAR, OTHER_LINEAR, LinearModel
from labkit.studies.gemv_coalescing import (
    answer,
    chain_views,
    chains,
    ladder,
    peers,
    shown,
    study,
    tables,
    trials,
    views,
)
from labkit.studies.gemv_coalescing import variants as names
from labkit.sweep import run, tuning
from labkit.sweep import variants as sweep_variants
from labkit.sweep.trial import DTYPES, Shared

EVERY_SHAPE = list(dict.fromkeys([shape for model in LINEAR.values() for shape in model.shapes()] + [*OTHER_LINEAR]))
SMALL = LinearModel(
    "small", {"a": (2, ((4, (3, 2)), (4, (6,)))), "b": (1, ((6, (4,)),))}, ("a", "b", "a"), ((7, 4), (9, 4))
)
# Stands for every model of the made-up rows; five of its six shapes have 16 MB and more.
TOY = LinearModel(
    "toy",
    {"mixer": (3, ((2048, (4096, 1024)), (4096, (2048,)))), "wide": (3, ((2048, (8192,)),))},
    ("mixer", "wide"),
    ((32000, 2048),),
)


@pytest.fixture(autouse=True)
def models(monkeypatch):
    """SMALL is a model; few resamples, for speed."""
    monkeypatch.setitem(LINEAR, "small", SMALL)
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    monkeypatch.setattr(trials, "shared", Shared())


def gemv_case(N, K, dtype="bf16", op="gemv"):
    return Case(op, {"N": N, "K": K, "dtype": dtype})


# reference


def test_reference_by_hand():
    W, x = torch.tensor([[1.0, 2.0, 3.0], [4.0, -5.0, 0.5]]), torch.tensor([2.0, 1.0, -4.0])
    assert reference.gemv(W, x).tolist() == [-8.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reference_sums_in_float64_whatever_it_is_given(dtype):
    W, x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype) for shape in ((5, 4097), (4097,)))
    found = reference.gemv(W, x)
    assert found.dtype == torch.float64
    expected = [math.fsum(a * b for a, b in zip(row, x.tolist(), strict=True)) for row in W.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-11)
    large = torch.tensor([[1e4, 1.0, -1e4]], dtype=dtype)  # 1e8 and 1 in fp32 is 1e8
    assert reference.gemv(large, torch.tensor([1e4, 1.0, 1e4], dtype=dtype)).item() == 1.0


# cases, floors, variants


def test_weights_of_a_token_are_those_that_the_sources_stream():
    def megabytes(name):
        return sum(count * n * k * 2 for (n, k), count in LINEAR[name].token().items()) / 1e6

    assert megabytes("AutoMegaKernel h1024") == pytest.approx(155.7, abs=0.05)
    wider = (248320 - 152960) * 2560 * 2 / 1e6  # 8.41 GB is with the model card's vocabulary
    assert megabytes("Qwen3.5-4B") + wider == pytest.approx(8410, abs=5)
    for model in LINEAR.values():  # merged or not, a token has the same weights
        sizes = [sum(c * n * k for (n, k), c in model.token(merged).items()) for merged in (True, False)]
        assert sizes[0] == sizes[1]


def test_cases_are_every_shape_and_dtype_and_hold_no_choice_of_a_kernel():
    llama = [(2048, 2048), (512, 2048), (3072, 2048), (8192, 2048), (16384, 2048), (2048, 8192), (128256, 2048)]
    found = study.cases({"models": ["Llama-3.2-1B", "AutoMegaKernel h1024", study.OTHER], "dtypes": ["bf16", "fp32"]})
    bf16 = {(case["N"], case["K"]) for case in found if case.op == "gemv" and case["dtype"] == "bf16"}
    assert {*llama, *OTHER_LINEAR, (2816, 1024), (1024, 2816)} <= bf16
    assert {(c["N"], c["K"]) for c in found if c.op == "gemv" and c["dtype"] == "fp32"} == set(llama)
    assert len({(case.op, case.key) for case in found}) == len(found)
    shapes = [set((c["N"], c["K"], c["dtype"]) for c in found if c.op == op) for op in ("tune", "gemv")]
    assert shapes[0] == shapes[1]
    for case in found:
        assert set(case.params) == ({"model", "dtype"} if case.op == "chain" else {"N", "K", "dtype"})
    assert [case.key for case in found if case.op == "chain"] == [
        '{"dtype": "bf16", "model": "Llama-3.2-1B"}',
        '{"dtype": "bf16", "model": "AutoMegaKernel h1024"}',
    ]
    assert [study.STUDY.early(case) for case in found] == [case.op == "tune" for case in found]


def test_chains_are_of_bf16_models_only():
    assert {c.op for c in study.cases({"models": ["Llama-3.2-1B"], "dtypes": ["fp32", "fp16"]})} == {"tune", "gemv"}
    assert study.cases({"models": ["Qwen3.5-4B"], "dtypes": ["fp32"]}) == []
    assert {c.op for c in study.cases({"models": [study.OTHER], "dtypes": ["bf16"]})} == {"tune", "gemv"}


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_floor_of_a_gemv_by_hand(dtype, size):
    found = study.floor(gemv_case(3, 5, dtype))
    assert (found.bytes, found.set_bytes, found.flops) == ((15 + 5 + 3) * size, 15 * size, 30)
    assert found.limit == "read"


def test_floor_of_a_chain_by_hand():
    found = study.floor(Case("chain", {"model": "small", "dtype": "bf16"}))
    weights = 2 * (5 * 4 + 6 * 4) + 4 * 6  # a, b, a
    assert (found.set_bytes, found.flops) == (2 * weights, 2 * weights)
    assert found.bytes == 2 * (weights + 2 * (4 + 5 + 4 + 6) + (6 + 4))  # and x and y of each merged group


@pytest.mark.parametrize("case", [
    gemv_case(2048, 2048), gemv_case(4096, 4096, "fp16"), gemv_case(64, 2560, "fp32"), gemv_case(1, 1, op="tune"),
    Case("chain", {"model": "Qwen3.5-4B", "dtype": "bf16"}),
], ids=lambda case: f"{case.op} {case.key}")  # fmt: skip
def test_variants_of_a_case(case):
    found = study.variants(case)
    by_name = {one.name: one for one in found}
    assert len(by_name) == len(found)
    assert [one.name for one in found if one.role == "ours"] == {
        "gemv": [names.OURS], "chain": [names.CHAIN_OURS], "tune": []
    }[case.op]  # fmt: skip
    assert study.control(case) in by_name
    twin = run.with_control(study.STUDY, case)[-1]
    assert (twin.name, twin.options["repeats"]) == (CONTROL, study.control(case))
    if case.op != "tune":
        assert [by_name[name].role for name in ("torch.mv", "F.linear") if name in by_name] in ([], ["baseline"] * 2)
        assert {one.caches for one in found} == {("cold",)}
        makers = [(one.source, json.dumps(dict(one.options), sort_keys=True)) for one in found]
        assert len(set(makers)) == len(makers)  # no two variants are the same thing
    for one in found:
        assert one.role in spec.ROLES


def test_peers_are_at_their_shapes_only():
    for shape in EVERY_SHAPE:
        peers = [one.name for one in study.variants(gemv_case(*shape)) if one.role == "peer"]
        known = [name for name in names.OTHERS if name != names.SGLANG or shape[0] <= names.SGLANG_ROWS]
        assert peers == (known if shape in study.PEER_SHAPES else [])
    assert set(study.PEER_SHAPES) <= set(EVERY_SHAPE)


def test_the_hash_differs_where_the_kernel_does():
    sources = {one.name: one.source for one in study.variants(gemv_case(4096, 4096))}
    different = (names.THREAD_A_ROW, names.WARP_A_ROW, names.OURS, names.TWO_D[0], names.READ, names.EMPTY, "torch.mv")
    assert len({kernel_sha(sources[name]) for name in different}) == len(different)
    warps = (names.WARP_A_ROW, names.WIDE_LOADS, names.FOUR_ROWS, names.PIPELINED)
    for same in (warps, (names.TUNED, names.SPLIT_K, names.OURS, names.WARM), names.ROWS_VARIANTS, names.TWO_D):
        assert len({kernel_sha(sources[name]) for name in same}) == 1  # one kernel, other arguments
    chains = {one.name: one.source for one in study.variants(Case("chain", {"model": "small", "dtype": "bf16"}))}
    different = (
        *map(names.separate, (names.THREAD_A_ROW, names.WARP_A_ROW)),
        names.separate("torch.mv"),
        names.separate("F.linear"),
        names.CHAIN_OURS,
    )
    different += (names.BETWEEN_MV, names.BETWEEN_OURS, names.READ)
    assert len({kernel_sha(chains[name]) for name in different}) == len(different)


def test_no_hash_covers_the_reference_or_what_prepares_a_trial():
    for case in study.cases({"models": ["small"], "dtypes": ["bf16"]}):
        for source in {one.source for one in study.variants(case)}:
            modules = {one.partition(":")[0] for one in covered(source)}
            assert not modules & {f"labkit.studies.gemv_coalescing.{name}" for name in ("reference", "trials")}


def test_counted_kernels_are_the_ladder_at_the_shape_nearest_to_16_mb():
    found = study.counted({"models": ["Qwen3.5-4B", "AutoMegaKernel h1024"], "dtypes": ["fp32", "bf16"]})
    assert {(case["N"], case["K"], case["dtype"]) for case, _ in found} == {(2560, 4096, "bf16")}  # 10.5 million values
    assert [name for _, name in found] == [*(name for name in names.LADDER if name != names.SPLIT_K), names.OURS]
    assert study.counted({"models": ["Llama-3.2-1B"], "dtypes": ["fp32"]}) == []


def _code(launch):
    """What the code of a kernel depends on: its constants, its options, and how its integers are aligned."""
    constants = {n: v for n, v in launch.args.items() if n.isupper() and n not in ("N", "K", "W")}
    numbers = {n: v for n, v in launch.args.items() if type(v) is int and n not in constants}
    aligned = {n: (v % 16 == 0, v == 1) for n, v in numbers.items()}
    dtypes = [one.dtype for one in launch.args.values() if isinstance(one, torch.Tensor)]
    return str((launch.kernel.fn.__name__, dtypes, aligned, constants, launch.options))


def untouched(N, K, dtype):
    """W, x and y, for what is compiled only."""
    return tuple(torch.empty(shape, dtype=DTYPES[dtype]) for shape in ((N, K), (K,), (N,)))


def compiled_for(case):
    """What differs from shape to shape: every candidate; every number of rows, and the control of them."""
    tensors, size = untouched(**case.params), DTYPES[case["dtype"]].itemsize
    if case.op == "tune":
        return [gemv(*tensors, choice) for choice in choose.candidates(case["N"], case["K"], size)]
    rule = choose.rule(case["N"], case["K"], size)
    some = [gemv(*tensors, replace(rule, rows=rows)) for rows in names.ROWS_CHOICES]
    some += [gemv(*tensors, replace(rule, rows=4, interleaved=True))]
    some += [gemv(*tensors, replace(rule, rows=rows), dependent=False) for rows in names.PLAIN_CHOICES]
    return some + [ladder.two_d_tile(*tensors, replace(rule, rows=rows)) for rows in names.TWO_D_CHOICES]


@pytest.mark.parametrize("capability", [80, 90])
def test_what_is_compiled_ahead_is_every_kernel_once(capability):
    shapes = ((512, 2048), (1, 2048), (31, 2048), (1024, 2816))
    cases = [gemv_case(*shape, op=op) for shape in shapes for op in ("tune", "gemv")]
    cases += [gemv_case(512, 2048, "fp32", op="tune"), gemv_case(1024, 2048, op="tune"), gemv_case(1024, 2048, "fp32")]
    chain = Case("chain", {"model": "small", "dtype": "bf16"})
    found = [compiled.launch_of(source, capability) for source in study.kernels([*cases, chain], capability, "")]
    with offline.offline(capability):
        wanted = {_code(launch) for case in cases for launch in compiled_for(case)}
        own = [(x, one) for x in cases for one in study.variants(x) if one.role != "peer"]
        made = [launch for x, one in own for launch in launched(one.prepare(x, "meta", 1, 0).calls[0])]
    codes = Counter(map(_code, found))
    assert set(codes.values()) == {1}
    assert wanted < codes.keys() == set(map(_code, made))
    tensors = [value for one in found for value in one.args.values() if isinstance(value, torch.Tensor)]
    assert {one.device.type for one in tensors} == {"meta"}


def test_what_is_compiled_ahead_is_what_the_table_of_the_gpu_has(tmp_path, monkeypatch):
    """Not the rule's choice; and once the table has another, that is a source of its own."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    gpu, sources = "NVIDIA Made-Up 9", []
    for warps in (2, 4):
        choice = choose.Choice(2, warps, 1024)
        choose.write(tmp_path / tuned.slug(gpu), {(512, 2048, 2): {"cold": choice, "hot": choice}})
        found = study.kernels([gemv_case(512, 2048)], 90, gpu)
        [ours] = [one for one in found if one[1]["variant"] == names.TUNED]
        launch = compiled.launch_of(ours, 90)
        assert (launch.args["ROWS"], launch.options["num_warps"]) == (2, warps)
        sources.append(ours)
    assert sources[0] != sources[1]
    assert not [one for one in study.kernels([gemv_case(512, 2048)], 90, "") if one in sources]


# chains

SMALL_CASE = Case("chain", {"model": "small", "dtype": "bf16"})


@pytest.mark.parametrize("merged", [False, True])
def test_links_of_a_chain_in_order(merged):
    weights, y, start = torch.arange(112), torch.zeros(26), torch.zeros(4)
    found = chains.links(SMALL.chain(merged), weights, y, start)
    # W's shape, what x is (start, or y from here on), and where y begins
    apart = [((3, 4), "start", 0), ((2, 4), "start", 3), ((6, 4), 0, 5), ((4, 6), 5, 11)]
    apart += [((3, 4), 11, 15), ((2, 4), 11, 18), ((6, 4), 15, 20)]
    together = [((5, 4), "start", 0), ((6, 4), 0, 5), ((4, 6), 5, 11), ((5, 4), 11, 15), ((6, 4), 15, 20)]
    place = {start.data_ptr(): "start"} | {y[i:].data_ptr(): i for i in range(26)}
    seen = [(tuple(link.W.shape), place[link.x.data_ptr()], place[link.y.data_ptr()]) for link in found]
    assert seen == (together if merged else apart)
    assert [len(link.x) for link in found] == [link.W.shape[1] for link in found]
    assert torch.cat([link.W.flatten() for link in found]).tolist() == list(range(112))  # every weight once
    assert 2 * sum(link.W.numel() for link in found) == study.floor(SMALL_CASE).set_bytes
    assert {link.source for link in found} == {None}


@pytest.mark.parametrize("merged", [False, True])
def test_links_with_kernels_between(merged):
    weights, y, start, middle = torch.arange(112), torch.arange(26), torch.zeros(4), torch.zeros(22)
    found = chains.links(SMALL.chain(merged), weights, y, start, middle)
    place = {start.data_ptr(): "start"} | {middle[i:].data_ptr(): i for i in range(22)}
    assert [place[link.x.data_ptr()] for link in found] == (
        ["start", 4, 8, 14, 18] if merged else ["start", "start", 4, 8, 14, 14, 18]
    )
    sources = [link.source.tolist() for link in found if link.source is not None]  # one for each group but the first
    assert sources == [list(range(0, 4)), list(range(5, 11)), list(range(11, 15)), list(range(15, 19))]


@pytest.mark.parametrize("name", [*LINEAR, "small"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_chain_reads_only_what_was_written_and_overwrites_nothing(name, merged):
    case = Case("chain", {"model": name, "dtype": "bf16"})
    groups = LINEAR[name].chain(merged=True)
    weights = torch.empty(study.floor(case).set_bytes // 2, dtype=torch.bfloat16, device="meta")
    places = torch.arange(sum(n for _, (n,) in groups))
    written = 0
    for link in chains.links(LINEAR[name].chain(merged), weights, places, torch.full((groups[0][0],), -1)):
        assert len(link.x) == link.W.shape[1]
        assert int(link.x.max()) < written
        assert link.y.tolist() == list(range(written, written + link.W.shape[0]))  # never written before
        written += link.W.shape[0]
    assert written == len(places)


def test_merged_and_separate_chains_give_the_same():
    generator = torch.Generator().manual_seed(0)
    weights, start = (torch.randn(n, dtype=torch.float64, generator=generator) for n in (112, 4))
    found = {}
    for merged in (False, True):
        y = torch.full((26,), math.nan, dtype=torch.float64)
        for link in chains.links(SMALL.chain(merged), weights, y, start):
            torch.mv(link.W, link.x, out=link.y)
        found[merged] = y
    assert torch.allclose(found[False], found[True], rtol=1e-12)
    W = weights[:20].view(5, 4), weights[20:44].view(6, 4), weights[44:68].view(4, 6)
    assert torch.allclose(found[True][11:15], W[2] @ (W[1] @ (W[0] @ start)[:4]), rtol=1e-12)


def squashed(times):
    """A kernel between, of torch: times y / (1 + |y|)."""
    return lambda y, x: lambda: x.copy_(times * y.double() / (1 + y.double().abs()))


@pytest.mark.parametrize("merged", [False, True])
def test_a_chain_is_checked_link_by_link(merged):
    def trial(make, between=None):
        return trials._chain(SMALL_CASE, "cpu", 2, 0, make, merged, between)

    for good in (trial(peers.mv), trial(peers.linear), trial(peers.mv, squashed(1.0))):
        assert good.check()["worst link"] <= good.tolerance["worst link"]
        good.poison()
        assert not good.written()
        good.calls[0]()
        assert not good.written()  # the other set
        good.calls[1]()
        assert good.written()
    late = []  # each link runs when the next one should: it reads what is not there yet

    def delayed(W, x, y):
        late.append(peers.mv(W, x, y))
        before = late[-2] if len(late) > 1 else lambda: None
        return before

    for make in (delayed, lambda W, x, y: peers.mv(W, x, y) if W.shape != (6, 4) else lambda: None):
        assert trial(make).check() == {"worst link": math.inf}
    assert trial(peers.mv, lambda y, x: lambda: None).check() == {"worst link": math.inf}
    assert trial(peers.mv, squashed(1.5)).check()["worst link"] == pytest.approx(0.5, abs=0.01)
    assert trial(lambda W, x, y: lambda: torch.mv(2 * W, x, out=y)).check()["worst link"] == pytest.approx(1, abs=0.01)


# choices

ITEMSIZES = st.sampled_from([2, 4])


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 40_000), ITEMSIZES, st.sampled_from([1, 66, 132, 148]))
@example(1, 1, 4, 132)
@example(248320, 2560, 2, 132)
@example(1, 10_000_000, 4, 132)  # more than `MOST_LOADS` of the widest tiles
def test_the_rule_is_sensible_for_any_shape(N, K, itemsize, sms):
    found = choose.rule(N, K, itemsize, sms)
    choose.check_choice(found)
    tiles = -(-K // found.block_k)
    assert found.rows <= 4
    assert found.num_warps <= 4
    assert found.rows * tiles <= choose.MOST_LOADS or (found.rows == 1 and found.block_k == 8192)
    assert found.rows == 1 or choose.FILL * found.rows * sms <= N
    thread_bytes = found.block_k * itemsize // (32 * found.num_warps)
    assert thread_bytes >= 16 or (thread_bytes == 8 and K % found.block_k == 0)
    assert (found.split, found.interleaved) == (1, False)


@pytest.mark.parametrize(("shape", "choice"), [
    ((4096, 4096, 2), Choice(4, 4, 1024)),  # 4 tiles; four rows leave 1024 programs, four for each of 132 and more
    ((2048, 2048, 2), Choice(2, 4, 1024)),  # four rows would leave 512, fewer than 528
    ((512, 1000, 2), Choice(1, 2, 512)),  # a row of 2000 bytes has no use for four warps of 16 bytes a thread
    ((64, 2560, 2), Choice(1, 4, 512)),  # 1024 does not divide 2560, 512 does
    ((1, 1, 4), Choice(1, 1, 128)),
])  # fmt: skip
def test_the_rule_by_hand(shape, choice):
    assert choose.rule(*shape) == choice


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 40_000), ITEMSIZES)
@example(1, 1, 2)
@example(1, 40_000, 4)
def test_every_candidate_can_be_taken(N, K, itemsize):
    found = choose.candidates(N, K, itemsize)
    assert len(set(map(str, found))) == len(found) > 0
    for choice in found:
        choose.check_choice(choice)
        if found == [choose.rule(N, K, itemsize)]:
            continue
        tiles = -(-K // choice.block_k)
        assert choice.rows * tiles <= choose.MOST_LOADS or choice.split > 1
        assert choice.rows <= max(1, N // 4)
        assert tiles * choice.block_k <= 1.5 * K
        assert choice.split == 1 or (choice.split <= tiles and N <= choose.SPLITS_BELOW and choice.rows == 1)


def test_no_candidate_has_more_tiles_than_are_unrolled():
    for choice in choose.candidates(64, 40_960, 4):
        assert -(-40_960 // (choice.block_k * choice.split)) * choice.rows <= choose.MOST_LOADS


def test_candidates_of_a_shape_differ_in_all_that_may_matter():
    found = choose.candidates(4096, 4096, 2)
    assert {c.rows for c in found} == set(choose.ROWS)
    assert {c.num_warps for c in found} == set(choose.WARPS)
    assert {c.split for c in found} == {1}
    assert {c.split for c in choose.candidates(64, 4096, 2)} == {1, 2, 4}
    assert choose.rule(4096, 4096, 2) in found


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine whose GPU has 66 multiprocessors; nothing is cached. Its folders of shipped tables and of its own."""
    cached = (choose._table, choose.choices_of, target.multiprocessors)
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "tables")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "runs"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Made-Up 9")
    properties = type("Properties", (), {"multi_processor_count": 66})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    for one in cached:
        one.cache_clear()
    yield tmp_path / "tables" / "nvidia-made-up-9", tmp_path / "runs" / "nvidia-made-up-9"
    for one in cached:
        one.cache_clear()


def test_a_choice_is_of_the_table_and_else_of_the_rule(gpu):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    recorded, here = Choice(16, 8, 2048, 1), Choice(2, 1, 256)
    assert choose.choose(64, 4096, 2, cuda) == choose.rule(64, 4096, 2, 66)
    choose.write(gpu[0], {(64, 4096, 2): {"cold": recorded, "hot": here}, (65, 4096, 2): {"cold": recorded}})
    assert choose.choose(64, 4096, 2, cuda) == recorded
    choose.write(gpu[1], {(64, 4096, 2): {"cold": here}})  # measured on this machine
    assert choose.choose(64, 4096, 2, cuda) == here
    assert choose.choose(65, 4096, 2, cuda) == recorded
    assert choose.choose(64, 4096, 4, cuda) == choose.rule(64, 4096, 4, 66)  # another type, another shape
    assert choose.choose(4096, 64, 2, cuda) == choose.rule(4096, 64, 2, 66)
    assert choose.choose(64, 4096, 2, cpu) == choose.rule(64, 4096, 2, 132)
    assert choose.choices_of("NVIDIA Made-Up 9", "hot") == {(64, 4096, 2): here}


def test_a_look_up_costs_less_than_two_microseconds(gpu):
    choose.write(gpu[0], {(*shape, 2): {"cold": Choice()} for shape in EVERY_SHAPE})
    device, (N, K) = torch.device("cuda"), EVERY_SHAPE[-1]
    assert choose.choose(N, K, 2, device) == Choice()

    def seconds(n, k):
        start = time.perf_counter()
        for _ in range(10_000):
            choose.choose(n, k, 2, device)
        return time.perf_counter() - start

    for shape in ((N, K), (N + 1, K)):  # in the table, and by the rule
        assert min(seconds(*shape) for _ in range(5)) / 10_000 < 2e-6


@pytest.mark.parametrize("text", ['{"2 bytes": {"64x40', '{"2 bytes": {"64x4096": {"cold": {"lines": 3}}}}', "[]"])
def test_a_table_that_cannot_be_read_is_named(gpu, text):
    gpu[0].mkdir(parents=True)
    (gpu[0] / choose.TABLE).write_text(text)
    with pytest.raises(ValueError, match=r"gemv\.json: not a table of choices .*; `labkit record` writes"):
        choose.choose(64, 4096, 2, torch.device("cuda"))


# functions of the reader's own


def test_flag_gems_takes_what_its_tuner_chose_before(tmp_path, monkeypatch):
    """Of each case anew, whatever its own file has; a recorded choice is not tried against others."""
    tried = []

    class Tuner(Autotuner):
        def __init__(self):
            self.configs, self.cache, self.best_config = ["a", "b"], pytest, "of the case before"
            self.fn = self.base_fn = SimpleNamespace(__module__="flag_gems.ops.mv", __qualname__="mv_kernel")

        def prune_configs(self, kwargs):
            return self.configs

        def __call__(self, W, x):
            assert not self.cache
            assert "best_config" not in vars(self)
            tried.append(self.prune_configs({}))
            self.cache[W.shape] = tried[-1][-1]
            return W @ x

    kernel = SimpleNamespace(fn=Tuner())
    monkeypatch.setitem(sys.modules, "flag_gems", SimpleNamespace(mv=kernel.fn))
    monkeypatch.setitem(sys.modules, trials.FLAG_GEMS, SimpleNamespace(mv_kernel=kernel))
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    monkeypatch.setattr(tuning, "_file", None)
    monkeypatch.setattr(tuning, "_keeps", False)
    tuning.keep_in(tmp_path / "runs" / "gpu" / "gemv_coalescing.tuning.json")
    for _ in range(2):
        assert trials.flag_gems_mv(gemv_case(4, 8), "cpu", 1, 0).calls
    assert tried == [["a", "b"], ["b"]]


def test_what_a_function_of_ones_own_is_given_is_said():
    takes = study.STUDY.added
    assert takes.signature == ("W", "x", "y")
    for words in ("W: [N, K]", "x: [K]", "y: [N]", "contiguous", "writes y = W x"):
        assert words in takes.help
    assert takes.caches == ("cold",)
    taken = {case.op for case in study.cases({"models": ["Llama-3.2-1B"], "dtypes": ["bf16"]}) if takes.takes(case)}
    assert taken == {"gemv"}
    assert all(takes.takes(case) for case in study.STUDY.tiny)


@pytest.mark.parametrize("case", study.STUDY.tiny, ids=lambda case: case.key)
def test_a_function_of_ones_own_is_checked_on_copies(case):
    def own(function):
        trial = study.STUDY.added.prepare(function, case, "cpu", 2, 0)
        trial.poison()
        error = trial.check()["y"]
        for call in trial.calls:
            call()
        return error <= trial.tolerance["y"], trial.written()

    inputs = [tensor.clone() for tensor in trials._inputs(case, "cpu", 2, 0)]
    assert own(lambda W, x, y: torch.mv(W, x, out=y)) == (True, True)
    assert own(lambda W, x, y: y.copy_(1.01 * (W @ x))) == (False, True)
    assert own(lambda W, x, y: y[1:].copy_((W @ x)[1:])) == (False, False)
    assert own(lambda W, x, y: None) == (False, False)
    assert own(lambda W, x, y: (W.zero_(), x.zero_(), y.zero_())) == (False, True)
    assert all(map(torch.equal, inputs, trials._inputs(case, "cpu", 2, 0)))  # what the others are given
    seen = []
    own(lambda W, x, y: seen.append((W.shape, x.shape, y.shape, {W.dtype, x.dtype, y.dtype}, W.is_contiguous())))
    N, K = case["N"], case["K"]
    assert seen[0] == ((N, K), (K,), (N,), {DTYPES[case["dtype"]]}, True)


# what the compiler makes of the kernels, for sm_90 and the Triton installed here

EVERY = (*names.LADDER, names.OURS)
SOME = (EVERY[0], EVERY[2], EVERY[3], EVERY[5])  # of fp32: as each kind of request first comes
STEPS = {
    dtype: [(gemv_case(256, 2048, dtype), name) for name in some] for dtype, some in (("bf16", EVERY), ("fp32", SOME))
}
# bits a thread, sectors and lines of a request of W: 32 lanes of one value each, or of 16 bytes
REQUESTS = {
    "bf16": [(16, 32, 32), (16, 2, 1), (16, 2, 1), *[(128, 16, 4)] * 6],
    "fp32": [(32, 32, 32), (32, 4, 1), (128, 16, 4), (128, 16, 4)],
}


@pytest.fixture(scope="module")
def launches():
    """By dtype and step. Compiled here, not in workers: both fixtures below look at the same code."""
    every = [(dtype, case, name) for dtype, steps in STEPS.items() for case, name in steps]
    return {
        (dtype, case.key, name): compiled.launch_of(sweep_variants.variant_source("gemv_coalescing", case, name), 90)
        for dtype, case, name in every
    }


@pytest.fixture(scope="module")
def code(launches):
    columns = ("dtype", "case", "variant")
    return pd.DataFrame(
        [dict(zip(columns, of, strict=True)) | compiled_once.evidence(one, 90) for of, one in launches.items()]
    )


@pytest.fixture(scope="module")
def loads(launches):
    columns = ("dtype", "case", "variant")
    found = pd.DataFrame(
        [
            dataclasses.asdict(access) | dict(zip(columns, of, strict=True))  # whose own dtype is the element's
            for of, one in launches.items()
            for access in coalescing.requests(one, 90)
        ]
    )
    return found[(found["tensor"] == "W") & found["kind"].isin(["load", "async copy"])]


@pytest.mark.parametrize("dtype", REQUESTS)
def test_what_a_request_of_each_step_costs(loads, dtype):
    some = loads[loads["dtype"] == dtype]
    figures = ["bits", "sectors", "lines"]
    found = {name: set(one[figures].itertuples(index=False, name=None)) for name, one in some.groupby("variant")}
    assert found == {name: {want} for (_, name), want in zip(STEPS[dtype], REQUESTS[dtype], strict=True)}
    assert set(some["bits_from"]) == {"ptx"}
    table = views.predicted_accesses(some).set_index("variant")
    assert list(table.index) == [shown.name(name) for _, name in STEPS[dtype]]
    assert table.loc["one thread per row", "lines a request"] == 32
    assert [name for name, kind in table["kind"].items() if kind == "async copy"] == ["pipelined copies"]


def test_no_step_spills_and_each_is_what_it_says(code):
    assert code["spill_bytes"].max() == code["spill_loads"].max() == 0
    some = code[code["dtype"] == "bf16"].set_index("variant")
    assert views.compiled_table(some.reset_index())["variant"].tolist() == list(map(shown.name, EVERY))
    steps = [some.loc[name] for name in names.LADDER]
    assert [set(step["loads"]) for step in steps[:7]] == [{"16"}] * 3 + [{"128"}] * 4
    assert [step["shuffles"] for step in steps[:5]] == [0, 0, 5, 5, 4 * 5]  # the sum of a warp takes five
    assert [step["shared_bytes"] > 1024 for step in steps] == [number == 6 for number in range(1, 9)]
    assert [step["atomics"] for step in steps] == [0] * 7 + [1]
    wide = code[code["dtype"] == "fp32"].set_index("variant")
    assert [set(wide.loc[name, "loads"]) for name in SOME] == [{"32"}] * 2 + [{"128"}] * 2


def built(choice, dependent, two_d=False):
    tensors = untouched(64, 2560, "bf16")
    launch = ladder.two_d_tile(*tensors, choice) if two_d else gemv(*tensors, choice, None, dependent)
    return launch, compiled.build(launch, 90).asm


def test_dependent_launch_reads_w_before_the_wait_and_x_after_it():
    launch, asm = built(Choice(2, 4, 512), True)
    ahead = launch.args["AHEAD"]
    assert launch.options["launch_pdl"]
    assert 1 < ahead < 5
    events = re.findall(r"griddepcontrol\.\w+|ld\.global\S*evict_first|[ls][dt]\.global", asm["ptx"])
    begin, wait = events.index("griddepcontrol.launch_dependents"), events.index("griddepcontrol.wait")
    before, after = events[begin + 1 : wait], [event.partition("::")[0] for event in events[wait + 1 :]]
    assert begin == 0
    assert len(before) == 2 * ahead  # W alone, so many tiles of two rows
    assert all("evict_first" in event for event in before)
    assert Counter(after) == {"ld.global.L1": 2 * (5 - ahead), "ld.global": 5, "st.global": 2}  # W, x, y


def test_without_dependent_launch_nothing_waits():
    launch, asm = built(Choice(2, 4, 512), False)
    assert "launch_pdl" not in launch.options
    assert "griddepcontrol" not in asm["ptx"]
    assert launch.args["AHEAD"] == 0


def test_the_control_alone_lets_the_rows_change_the_layout():
    layouts = {}
    for two_d in (False, True):
        texts = [built(Choice(rows, 4, 512), False, two_d)[1]["ttgir"] for rows in (1, 4, 16)]
        layouts[two_d] = [frozenset(re.findall(r"^#blocked\d* = (.*)$", text, re.M)) for text in texts]
    assert len(set(layouts[False])) == 1
    assert len(set(layouts[True])) > 1


def _longest():
    """Sources of the rule's kernels at every published shape: of each choice's kind the one with most tiles a row."""
    found = {}
    for dtype in ("bf16", "fp32"):
        for n, k in EVERY_SHAPE:
            choice = choose.rule(n, k, DTYPES[dtype].itemsize)
            kind = (dtype, choice, k % choice.block_k == 0)
            found[kind] = max((k, n, gemv_case(n, k, dtype)), found.get(kind, (0,)), key=lambda one: one[0])
    cases = [case for _, _, case in found.values()]
    ours = [(case, one) for case in cases for one in study.variants(case) if one.name == names.OURS]
    return sweep_variants.ahead("gemv_coalescing", ours, 90)


def test_the_rule_gives_wide_loads_and_no_spills_at_every_published_shape():
    every = _longest()
    assert len(every) > 10
    for source in every:
        found = compiled_once.evidence(compiled.launch_of(source, 90), 90)
        assert found["spill_bytes"] == found["spill_loads"] == 0
        assert found["ctas_per_sm"] > 0
        N, K, dtype = (source[1]["params"][key] for key in ("N", "K", "dtype"))
        size = DTYPES[dtype].itemsize
        choice = choose.rule(N, K, size)
        bits = min(128, 8 * choice.block_k * size // (32 * choice.num_warps))
        assert set(found["loads"]) == {str(bits)}
        assert bits == 128 or K % (2 * choice.block_k)  # 8 bytes only where 16 do not divide K


# tables, on rows with made-up times

CHAIN_THREADS = names.separate(names.THREAD_A_ROW)
OVER = {  # times over those of reading: 2 µs and the bytes at 3 TB/s; 1.25 for the others
    **dict(zip(names.LADDER, (9.0, 4.5, 2.0, 1.6, 1.8, 1.5, 1.2, 1.3), strict=True)),
    **{names.OURS: 1.1, names.READ: 1.0, "torch.mv": 1.65, "F.linear": 1.54, names.WARM: 1.21},
    **dict(zip(names.ROWS_VARIANTS, (1.3, 1.25, 1.2, 1.4, 1.6, 1.26), strict=True)),
    **{CHAIN_THREADS: 12.0, names.separate(names.WARP_A_ROW): 4.0},
    **{names.separate(names.WIDE_LOADS): 3.0, names.separate(names.FOUR_ROWS): 2.0},
    **{"torch.mv, separate": 1.8, "F.linear, separate": 1.7, "torch.mv, merged": 1.43, "F.linear, merged": 1.5},
    **{"ours, separate": 1.25, names.CHAIN_PLAIN: 1.3, names.CHAIN_OURS: 1.1},
    **{names.BETWEEN_MV: 1.8, names.BETWEEN_OURS: 1.5, names.BETWEEN_TRIGGER: 1.2},
}
SHAPES = [(1024, 2048), (4096, 2048), (2048, 4096), (5120, 2048), (8192, 2048), (32000, 2048)]
TALL = gemv_case(8192, 2048).key


@pytest.fixture
def toy(monkeypatch):
    """Every model of the rows is TOY, under its own name."""
    for name in made.GEMV["models"]:
        monkeypatch.setitem(LINEAR, name, TOY)


def frame(over=None, of=None, **changes):
    """Rows with times of OVER; over: other ones, by name of a variant; of: by case and variant, None for OVER."""
    times = OVER | (over or {})

    def factor(case, name):
        found = of(case, name) if of else None
        return times.get(name, 1.25) if found is None else found

    return made.make("gemv_coalescing", made.GEMV, made.gemv_us(factor), **{"evidence": '{"sms": 132}'} | changes)


@pytest.fixture
def rows(toy):
    return frame()


def reading(n, k, size=2):
    return 2 + (n * k + n + k) * size / 3e6


def test_times_are_percent_of_the_ceiling_by_hand(rows):
    one = tables.times(rows).set_index(["dtype", "N", "K", "variant"]).loc[("fp32", 2048, 4096, names.THREAD_A_ROW)]
    size = 4 * (2048 * 4096 + 2048 + 4096)
    assert one["us"] == pytest.approx(9 * reading(2048, 4096, 4), rel=2e-3)
    assert one["tbs"] == pytest.approx(size / one["us"] / 1e6)
    assert one["percent"] == pytest.approx(100 * one["tbs"] / 3.0)
    assert one["MB"] == size / 1e6
    table = tables.times(rows.assign(ceiling=[3.5 if "4096" in case else 3.0 for case in rows["case"]]))
    assert (table["percent"] / table["tbs"]).tolist() == pytest.approx([100 / 3.5] * len(table))  # of the best
    assert tables.times(made.unusable(rows)).empty
    assert tables.times(rows.assign(cache="hot")).empty


def test_against_the_faster_of_the_two_callers(toy):
    found = tables.against_cublas(frame(of=lambda x, name: 1.32 if (name, x.key) == ("torch.mv", TALL) else None))
    assert len(found) == 12
    some = found[found["dtype"] == "bf16"].set_index(["N", "K"])
    assert set(some.index) == set(SHAPES)
    for shape, library, over in (((8192, 2048), "torch.mv", 1.32), ((5120, 2048), "F.linear", 1.54)):
        assert some.loc[shape, "cuBLAS by"] == library
        assert some.loc[shape, "cuBLAS µs"] == pytest.approx(over * reading(*shape), rel=2e-3)
        assert some.loc[shape, "ratio"] == pytest.approx(over / 1.1, rel=2e-3)
    assert set(found["verdict"]) == {"faster"}
    assert found["no slower"].all()
    plain = tables.against_cublas(frame(), names.TUNED)
    assert plain["ratio"].tolist() == pytest.approx([1.54 / 1.2] * 12, rel=2e-3)
    assert set(tables.against_cublas(made.without(frame(), variant="F.linear"))["cuBLAS by"]) == {"torch.mv"}
    assert tables.against_cublas(made.without(frame(), variant=names.OURS)).empty


def test_allowed_is_the_bytes_an_empty_kernel_and_a_microsecond(toy):
    for factor, within in ((1.0, True), (1.2, False)):  # 2 µs and the bytes, against 2.5 µs and the bytes
        found = tables.against_cublas(frame({names.OURS: factor}))
        assert found["allowed µs"].tolist() == pytest.approx(found["MB"].div(3.0).add(2.5).tolist(), rel=1e-3)
        assert set(found["within"]) == {within}


def test_geometric_mean():
    assert verdict.geometric_mean(pd.Series([1.0, 4.0, 2.0])) == pytest.approx(2.0)
    assert math.isnan(verdict.geometric_mean(pd.Series([], dtype=float)))


def test_chains_by_hand(rows):
    table = tables.chains(rows)
    assert list(table["variant"]) == 3 * [one.name for one in names.CHAINS]
    found = table[table["model"] == "Qwen3.5-4B"].set_index("variant")
    base = 2 + study.floor(Case("chain", {"model": "Qwen3.5-4B", "dtype": "bf16"})).bytes / 3e6
    for name, gemvs, over, library in (
        (names.CHAIN_OURS, 3, 1.1, 1.43),
        (names.separate("ours"), 4, 1.25, 1.7),
        (CHAIN_THREADS, 4, 12.0, 1.7),
        ("torch.mv, merged", 3, 1.43, 1.43),
        (names.BETWEEN_OURS, 3, 1.5, 1.8),  # against cuBLAS with kernels between
    ):
        one = found.loc[name]
        assert one["GEMVs"] == gemvs
        assert one["us"] == pytest.approx(over * base, rel=2e-3)
        assert one["beyond reading"] == pytest.approx((over - 1) * base / gemvs, rel=0.03)
        assert one["% of reading W"] == pytest.approx(100 / over, rel=3e-3)
        assert one["at most"] == pytest.approx(library, rel=3e-3)
        assert one["ratio"] == pytest.approx(library / over, rel=3e-3)
        assert one["% of ceiling"] == pytest.approx(100 * (base - 2) / (over * base), rel=3e-3)
    assert math.isnan(found.loc[names.READ, "ratio"])
    assert found.loc[names.READ, "% of reading W"] == 100


COUNTS = {(32000, 2048): 1, (5120, 2048): 3, (2048, 4096): 3, (8192, 2048): 3}


def token_us(most=10**9):
    """µs of reading a token's matrices of up to so many rows."""
    return sum(count * reading(*shape) for shape, count in COUNTS.items() if shape[0] <= most)


def test_token_total_by_hand(rows):
    found = tables.token_total(rows, "Qwen3.5-4B").set_index("rule")
    us, total = found["us"], token_us()
    assert us[tables.RULE] == pytest.approx(1.2 * total + 0.1 * token_us(4096), rel=2e-3)
    expected = {"always 1 row": 1.3, tables.FOUR: 1.2, tables.BEST: 1.2, tables.TUNED: 1.1, tables.CUBLAS: 1.54}
    expected |= dict.fromkeys([tables.RULE_PLAIN, tables.ONE_PLAIN, tables.FOUR_PLAIN], 1.25)
    assert set(us.index) == {tables.RULE, *expected}
    for rule, over in expected.items():
        assert us[rule] == pytest.approx(over * total, rel=2e-3)
    size = 2 * sum(count * n * k for (n, k), count in COUNTS.items())
    assert found.loc[tables.TUNED, "% of ceiling"] == pytest.approx(100 * size / us[tables.TUNED] / 1e6 / 3.0)
    assert tables.token_total(made.without(rows, case=gemv_case(2048, 4096).key), "Qwen3.5-4B").empty
    less = tables.token_total(made.without(rows, variant="rows=1"), "Qwen3.5-4B")
    assert set(us.index) - set(less["rule"]) == {tables.RULE, "always 1 row"}
    assert tables.token_total(rows[rows["case"].str.contains("fp32")], "Qwen3.5-4B").empty


def test_a_token_from_chains_by_hand(rows):
    found = tables.from_chain(rows, "Qwen3.5-4B").set_index("of")
    base = 2 + study.floor(Case("chain", {"model": "Qwen3.5-4B", "dtype": "bf16"})).bytes / 3e6
    for rule, alone, chain in ((tables.TUNED, 1.1, 1.1), (tables.CUBLAS, 1.54, 1.43)):
        assert found.loc[rule, "sum"] == pytest.approx(alone * token_us(), rel=2e-3)
        assert found.loc[rule, "chain"] == pytest.approx(3 * chain * base + alone * reading(32000, 2048), rel=2e-3)
    assert tables.from_chain(rows[rows["op"] == "chain"], "Qwen3.5-4B").empty


def test_rows_map_is_over_the_best_number(rows):
    found = tables.rows_map(rows)
    assert len(found) == 6 * 5
    over = {1: 1.3 / 1.2, 2: 1.25 / 1.2, 4: 1.0, 8: 1.4 / 1.2, 16: 1.6 / 1.2}
    assert found.groupby("rows")["over best"].mean().to_dict() == pytest.approx(over, rel=2e-3)
    assert set(tables.rows_map(made.without(rows, variant="rows=4"))["rows"]) == {1, 2, 8, 16}


def test_choices_are_each_with_their_best_tile(toy):
    def of(case, name):
        return (3.0 if "8 warps" in name else 2.0 if "4 rows" in name else 1.0) if case.op == "tune" else None

    found = tables.choices(frame(of=of), "Qwen3.5-4B")
    assert set(found["shape"]) == {f"{n} × {k}" for n, k in SHAPES}
    assert not found.duplicated(["shape", "warps", "rows"]).any()
    wide, four = found["warps"] == 8, found["rows"] == 4
    for some, over in ((wide, 3.0), (four & ~wide, 2.0), (~four & ~wide, 1.0)):
        assert found[some]["over best"].tolist() == pytest.approx([over] * some.sum(), rel=3e-3)
    found = tables.choices(frame(of=lambda x, name: 1.0 if "BK=512" in name else None), "Qwen3.5-4B")
    one = found.set_index(["shape", "warps", "rows"]).loc[("8192 × 2048", 2, 4)]
    assert (one["tile"], one["over best"]) == (512, pytest.approx(1.0, rel=3e-3))


def test_what_the_rule_and_a_split_take_over_the_fastest(toy, monkeypatch):
    rule = {str(choose.rule(*shape, 2)) for shape in SHAPES}
    found = tables.unseen(frame(of=lambda x, name: 1.5 if x.op == "tune" and name in rule else None))
    bf16 = found[found["dtype"] == "bf16"]
    assert set(zip(bf16["N"], bf16["K"], strict=True)) == set(SHAPES)
    assert bf16["rule / fastest"].tolist() == pytest.approx([1.5 / 1.25] * 6, rel=3e-3)
    assert tables.splits(frame()).empty  # no W is so short
    monkeypatch.setitem(LINEAR, "Qwen3.5-4B", LinearModel("short", TOY.layers, TOY.period, ((64, 4096),)))
    found = tables.splits(frame(of=lambda x, name: 1.0 if x.op == "tune" and "split 2" in name else None))
    assert found[["N", "K"]].to_numpy().tolist() == [[64, 4096]]
    assert found["split / whole"].tolist() == pytest.approx([1 / 1.25], rel=3e-3)


def walking(case, name):
    """W stored [K, N] makes step 2 the slower one up to 4096 rows."""
    return (18.0 if case["N"] <= 4096 else 4.5) if name == names.THREAD_A_ROW_TURNED and case.op == "gemv" else None


def test_pattern_and_from_where_it_pays(toy):
    found = tables.pattern(frame(of=walking))
    assert len(found) == 12
    found = found[found["dtype"] == "bf16"].reset_index(drop=True)
    assert found["N"].tolist() == [1024, 2048, 4096, 5120, 8192, 32000]
    assert found["CTAs an SM"].tolist() == [1, 1, 1, 1, 1, 4]  # 16 to 128 CTAs, and 500, on 132
    assert found["look-ups, ns"].tolist() == pytest.approx([64 / 1.98] * 5 + [4 * 64 / 1.98])
    assert found["pattern alone"].tolist() == pytest.approx([0.5] * 3 + [2.0] * 3, rel=3e-3)
    assert found["with width"].tolist() == pytest.approx([9 / 1.6] * 6, rel=3e-3)
    for step, over in zip(tables.STEPS, (9, 18), strict=True):
        assert found.loc[0, step] == pytest.approx(1e3 * over * reading(1024, 2048) / 2048, rel=3e-3)
    assert tables.pays_from(found) == 5120
    hole = [2.0, 2.0, 0.9, 2.0, 2.0, 2.0]
    for alone, start in (([2.0] * 6, 1024), ([0.5] * 6, None), ([1.0] * 6, None), (hole, 5120)):
        assert tables.pays_from(found.assign(**{"pattern alone": alone})) == start
    assert tables.pays_from(found.assign(**{"pattern alone": [2.0] * 5 + [0.9]})) is None


def test_steps_are_over_the_one_that_they_change(rows):
    found = tables.steps(rows).set_index(["step", "over"])
    one, two, three, four, five, six, seven, eight = names.LADDER
    expected = {(two, one): 2.0, (three, one): 4.5, (four, three): 1.25, (five, four): 1.6 / 1.8, (six, five): 1.2}
    expected |= {(seven, six): 1.25, (seven, four): 1.6 / 1.2, (eight, seven): 1.2 / 1.3}
    expected |= {(names.OURS, seven): 1.2 / 1.1, (names.HINT, four): 1.6 / 1.25}
    assert found["mean ratio"].to_dict() == pytest.approx(expected, rel=2e-3)
    assert set(found["cases"]) == {12}
    assert found["slower"].to_dict() == {name: 12 * (over < 1) for name, over in expected.items()}
    assert (found["faster"] + found["slower"] == 12).all()


def evident(rows, make):
    """The rows with evidence. make: case and variant -> its JSON object."""
    texts = [json.dumps(make(*one)) for one in zip(rows["case"], rows["variant"], strict=True)]
    return rows.assign(evidence=texts)


def in_bits(rows):
    """The control has other bits with each number of rows, at one shape in bf16 alone."""
    return evident(rows, lambda case, name: {"bits": name if "2-D" in name and case == TALL else case})


def test_same_bits_counts_the_outcomes(rows):
    ours, control = (tables.same_bits(in_bits(rows), some) for some in (names.ROWS_VARIANTS, names.TWO_D))
    assert len(ours) == len(control) == 12
    assert set(ours["outcomes"]) == {1}
    assert control[control["outcomes"] > 1][["dtype", "N", "outcomes"]].to_numpy().tolist() == [["bf16", 8192, 3]]
    assert tables.same_bits(rows, names.TWO_D).empty


def chosen(rows):
    """The warm cache chose something else at one shape."""
    return evident(rows, lambda case, name: {"choice": [name, case] if name == names.WARM and case == TALL else case})


def test_a_warm_cache_is_compared_where_it_chose_something_else(rows):
    found = tables.other_choice(chosen(rows))
    assert found[["dtype", "N", "K"]].to_numpy().tolist() == [["bf16", 8192, 2048]]
    assert found["ratio"].tolist() == pytest.approx([1.1], rel=3e-3)


def test_the_table_is_the_fastest_candidate_cold_and_hot(toy, gpu):
    cold, hot = (candidates[i] for candidates in [choose.candidates(1024, 2048, 2)] for i in (3, 7))
    found = frame(of=lambda x, name: 1.0 if (x.op, name) == ("tune", str(cold)) else None)
    quick = [
        [1] * len(ns) if op == "tune" and ((cache == "hot" and variant == str(hot)) or variant == CONTROL) else ns
        for op, cache, variant, ns in zip(*(found[n] for n in ("op", "cache", "variant", "samples_ns")), strict=True)
    ]
    rows = found.assign(samples_ns=quick)
    rows.loc[(rows["case"] == gemv_case(1024, 2048).key) & (rows["variant"] == str(cold)), "ok"] = False
    records.write(gpu[0] / "gemv_coalescing.parquet", rows)
    study.settle(gpu[0] / "gemv_coalescing.parquet", gpu[0])
    table = choose.read(gpu[0])
    assert len(table) == 12
    assert table[(8192, 2048, 2)] == cold
    assert table[(1024, 2048, 2)] not in (cold, hot)  # that row may not be used
    assert choose.read(gpu[0], "hot")[(4096, 2048, 2)] == hot
    assert (32000, 2048, 2) not in choose.read(gpu[0], "hot")  # 131 MB are in no cache
    assert choose.choose(8192, 2048, 2, torch.device("cuda")) == cold
    records.write(gpu[1] / "gemv_coalescing.parquet", rows[rows["op"] == "gemv"])
    study.settle(gpu[1] / "gemv_coalescing.parquet", gpu[1])
    assert choose.read(gpu[1]) == {}


@pytest.mark.parametrize(("us", "stays"), [(0.995, True), (0.98, False)])
def test_a_choice_stays_until_another_is_faster_beyond_what_runs_differ_by(toy, gpu, us, stays):
    first, other = (candidates[i] for candidates in [choose.candidates(8192, 2048, 2)] for i in (3, 7))
    file, shape = gpu[1] / "gemv_coalescing.parquet", (8192, 2048, 2)
    for times in ({str(first): 1.0}, {str(first): 1.0, str(other): us}):
        records.write(file, frame(of=lambda x, name, times=times: times.get(name) if x.op == "tune" else None))
        study.settle(file, gpu[1])
        assert choose.read(gpu[1])[shape] == (first if len(times) == 1 or stays else other)
    assert tables.fastest(file)[shape]["cold"] == other


# views


def view_of(name):
    return getattr(views, name, None) or getattr(chain_views, name)


def caption(drawn):
    """All that a view says in words."""
    if isinstance(drawn, dict):
        return "\n".join(f"{question}: {answer}" for question, answer in drawn.items())
    return drawn.caption if isinstance(drawn, Picture) else drawn


SAID = [  # view, times by case and variant, what it says
    ("beside_cublas", None, "loads of 16 bytes: 1.04× slower (1.04× slower), slower in 5"),
    ("beside_cublas", None, "dependent launch: 1.40× faster (1.40× faster), faster in 5"),
    ("ladder", None, "Best 87 %, at 32000 × 2048, dependent launch."),  # 43.7 µs of bytes in 1.1 × 45.7
    ("ladder_of", None, "Fastest 2.67 TB/s, at 32000 × 2048, fp32, dependent launch"),  # twice the bytes
    ("speeds", None, "Measured read speed: 3.00 TB/s."),
    ("walk", walking, "Lanes side by side pay from N = 5120 on"),
    ("walk", lambda x, name: 20.0 if name == names.THREAD_A_ROW_TURNED else None, "Lanes side by side do not pay"),
    ("why_not_32", walking, "loads of 16 bytes per lane, against one thread per row: 5.6× faster"),
    ("why_not_32", walking, "W [K, N] pays from: N = 5120"),
    ("why_not_32", walking, "of that with loads of 16 bytes: 2.0× of 5.6×"),
    ("why_not_32", lambda x, name: 20.0 if name == names.THREAD_A_ROW_TURNED else None, "pays from: no N measured"),
    ("cublas", lambda x, name: 1.21 if (name, x.key) == ("F.linear", TALL) else None,
     "Dependent launch 1.10× to 1.40× faster; 1 of 6 within the limit"),
    ("cublas", lambda x, name: 1.0 if name == names.OURS else None, "6 of 6 within the limit"),
    ("gains", None, "loads of 16 bytes → evict-first hint: 1.28× faster; never slower in 12"),
    ("gains", None, "tuned, ordinary launch → split K: 1.08× slower; slower in 12 of 12"),
    ("gains", None, "tuned, ordinary launch → dependent launch: 1.09× faster; never slower in 12"),
    ("chain", None, "Dependent launch, merged: 91 %."),
    ("limits", None, "Qwen3.5-4B, separate: 1.36× faster, at most 1.70×"),
    ("limits", None, "Qwen3.5-4B, merged: 1.30× faster, at most 1.43×"),
    ("between", None, "kernels with the trigger between 1.50×; ordinary kernels between 1.20×"),
    ("rows_map", None, "Four rows are within 2% of the best at 6 of 6 shapes"),
    ("choices", None, "1, 2 and 4 rows each come within 2% of the fastest at 6 of 6 shapes"),
    ("choices", lambda x, name: 1.5 if "2 rows" in name and x["N"] == 8192 else None, "at 5 of 6 shapes"),
    ("unseen", None, "against the fastest tried: as fast, at most 1.00×"),
    ("prediction", None, "dependent launch 0.95; tuned, ordinary launch 0.95; torch.mv 0.95"),
    ("warm", None, "another choice: in 0 of 5 cases whose W fits"),
    ("interleaving", None, "adjacent ones: 1.05× slower (1.05× slower); slower in 12"),
]  # fmt: skip


@pytest.mark.parametrize(("view", "of", "said"), SAID, ids=[f"{view}-{i}" for i, (view, _, _) in enumerate(SAID)])
def test_what_a_view_says_follows_from_the_rows(toy, view, of, said):
    assert said in caption(view_of(view)(frame(of=of)))


TITLES = [  # view, times by case and variant, its message
    ("speeds", None, "Coalescing alone pays little"),
    ("speeds", lambda x, name: 10.0 if name == names.THREAD_A_ROW_TURNED else None, "Coalescing alone seldom pays;"),
    ("speeds", lambda x, name: 2.1 if name == names.THREAD_A_ROW_TURNED else None, "Coalescing alone pays most"),
    ("walk", walking, "Coalescing alone pays in tall matrices only"),
    ("walk", None, "Coalescing alone pays at every height"),
    ("walk", lambda x, name: 20.0 if name == names.THREAD_A_ROW_TURNED else None, "Coalescing alone never pays"),
    ("overhead", None, "Every GEMV of a chain costs more than its bytes"),
    ("overhead", lambda x, name: 0.9 if name in chain_views.SHOWN_CHAINS else None, "What a GEMV of"),
    ("cublas", lambda x, name: 3.0 if name == "F.linear" and x["N"] < 4096 else None, "The smaller the matrix"),
    ("cublas", lambda x, name: 3.0 if name == names.OURS and x["N"] < 4096 else None, "One GEMV against cuBLAS"),
    ("between", None, "Dependent launch needs its trigger in the kernel in front"),
    ("between", lambda x, name: 1.2 if name == names.BETWEEN_OURS else None, "Whole layers with small kernels between"),
]  # fmt: skip


@pytest.mark.parametrize(("view", "of", "title"), TITLES, ids=[f"{view}-{i}" for i, (view, _, _) in enumerate(TITLES)])
def test_the_message_of_a_figure_follows_from_the_rows(toy, view, of, title):
    assert view_of(view)(frame(of=of)).options["title"].startswith(title)


def test_what_views_say_of_the_evidence(rows):
    assert views.bits(in_bits(rows)) == {
        "a sum for each row, bf16": "same bits at 6 of 6 shapes",
        "one tile of several rows (control), bf16": "same bits at 5 of 6 shapes",
        "a sum for each row, fp32": "same bits at 6 of 6 shapes",
        "one tile of several rows (control), fp32": "same bits at 6 of 6 shapes",
    }
    assert views.warm(chosen(rows)) == {
        "tuned in a warm cache: another choice": "in 1 of 5 cases whose W fits",
        "what that choice costs, cold": "1.10× slower (1.10× slower); slower in 1",
    }


def test_overhead_says_what_dependent_launch_takes(rows):
    base = 2 + study.floor(Case("chain", {"model": "Qwen3.5-4B", "dtype": "bf16"})).bytes / 3e6
    said = re.search(r"Dependent launch, merged: ([\d.]+) µs", caption(chain_views.overhead(rows)))
    assert float(said[1]) == pytest.approx((1.1 - 1) * base / 3, abs=0.1)


def test_a_cost_of_every_launch_is_told_from_one_of_every_byte(rows):
    """Of two models, one with matrices ten times as large."""

    def made_up(size, beyond):
        columns = {"variant": names.CHAIN_OURS, "us": size + beyond, "tbs": size / (size + beyond), "GEMVs": 1}
        return columns | {"beyond reading": beyond}

    def said(least, most):
        table = pd.DataFrame([made_up(3.0, least), made_up(30.0, most)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "chains", lambda rows: table)
            return chain_views.grows(rows)

    name = "dependent launch, merged"
    assert said(1.0, 1.2) == {name: "1.0 µs at 3 MB, 1.2 µs at 30 MB: mostly a cost of every launch"}
    assert said(1.0, 9.0)[name].endswith("grows with the bytes")
    assert said(0.0, 0.0)[name].endswith("mostly a cost of every launch")


def test_best_peer_is_the_fastest_at_each_shape():
    us = made.gemv_us(OVER | {"torch.compile": 1.21, "flag_gems.mv": 1.3})
    said = views.best_peer(made.make("gemv_coalescing", {"models": [study.OTHER], "dtypes": ["bf16"]}, us))
    at = f"{len(set(OTHER_LINEAR) & set(study.PEER_SHAPES))} shapes"
    assert said == {
        "dependent launch, against the fastest library": f"1.10× faster; {at}",
        "tuned, ordinary launch, against the fastest library": f"1.01× faster; {at}",
    }
    slow = made.gemv_us(OVER | {"torch.compile": 1.1, names.TUNED: 1.21})
    said = views.best_peer(made.make("gemv_coalescing", {"models": [study.OTHER], "dtypes": ["bf16"]}, slow))
    assert said["tuned, ordinary launch, against the fastest library"] == f"1.10× slower; {at}"


def test_an_engine_whose_kernels_were_not_there_is_named_beside_the_fastest():
    rows = made.make("gemv_coalescing", {"models": [study.OTHER], "dtypes": ["bf16"]}, made.gemv_us(OVER))
    said = views.best_peer(rows[~rows["variant"].isin(names.VLLM)])
    assert all(one.endswith(" shapes, without vLLM") for one in said.values())
    assert len(said) == 2


def test_merging_and_questions_by_hand(rows):
    merged = chain_views.merging(rows)
    for kernel, ratio in (("cuBLAS", 1.8 / 1.43), ("the lab's GEMV", 1.25 / 1.1)):
        assert merged[merged["kernel"] == kernel]["ratio"].tolist() == pytest.approx([ratio] * 3, rel=3e-3)
    worth = views.questions(rows)["worth here"].tolist()
    expected = [9 / 2, 9 / 4.5, 2 / 1.6, 1.8 / 1.6, 1.8 / 1.43, 1.25 / 1.1, 1.26 / 1.2]
    assert [float(re.match(r"([\d.]+)×", text)[1]) for text in worth] == pytest.approx(expected, abs=0.01)
    assert ["slower" in text for text in worth] == [False] * 3 + [True] + [False] * 3


def test_whole_layers_are_a_row_a_model(rows):
    table = chain_views.whole_layers(rows).set_index("model")
    assert len(table) == len(made.GEMV["models"])
    assert table.loc["Qwen3.5-4B"].tolist() == [
        f"{ratio:.2f} [{ratio:.2f}, {ratio:.2f}]" for ratio in (1.8 / 1.5, 1.8 / 1.2, 1.43 / 1.1, 1.7 / 1.25)
    ]
    less = made.without(rows, variant=names.BETWEEN_OURS)
    assert chain_views.whole_layers(less)["ordinary kernels between"].isna().all()


def test_peers_are_shown_at_the_shapes_where_they_were_asked():
    us = made.gemv_us(OVER | {"torch.compile": 1.3})
    found = views.peers(made.make("gemv_coalescing", {"models": [study.OTHER], "dtypes": ["bf16"]}, us))
    assert set(zip(found["N"], found["K"], strict=True)) == set(OTHER_LINEAR) & set(study.PEER_SHAPES)
    assert (found["torch.compile"] / found["dependent launch"]).tolist() == pytest.approx(
        [1.3 / 1.1] * len(found), rel=3e-3
    )


def test_engines_are_set_beside_ours_and_cublas_or_said_to_be_missing():
    name, parameters = "vllm 0.33.0 skinny_gemm", {"models": [study.OTHER], "dtypes": ["bf16"]}
    rows = made.make("gemv_coalescing", parameters, made.gemv_us(OVER | {names.SGLANG: 1.32, name: 2.2}))
    asked = set(OTHER_LINEAR) & set(study.PEER_SHAPES)
    taken = sum(rows <= names.SGLANG_ROWS for rows, _ in asked)
    over = min(OVER[one] for one in names.LIBRARY)
    said = views.engines(rows)
    sglang = f"1.20× slower than dependent launch, {over / 1.32:.2f}× faster than cuBLAS; {taken} shapes"
    assert said["SGLang hopper_bf16_gemv"] == sglang
    vllm = f"2.00× slower than dependent launch, {2.2 / over:.2f}× slower than cuBLAS; {len(asked)} shapes"
    assert said["vLLM skinny_gemm"] == vllm
    missing = rows["variant"].str.startswith("vllm")
    rows.loc[missing, ["ok", "reason"]] = False, "NotFetched: not fetched: labkit fetch vllm"
    assert [views.engines(rows)[shown.name(one)] for one in names.VLLM] == ["not fetched: labkit fetch vllm"] * 2
    rows = rows[~rows["variant"].isin(names.OTHERS)]
    assert views.engines(rows) == dict.fromkeys(
        map(shown.name, (names.SGLANG, *names.VLLM)), "not measured on this GPU"
    )
    assert views.rivals(rows) == views.engines(rows)


def test_no_name_that_is_shown_begins_with_a_number_or_is_that_of_another():
    every = [*names.LADDER, names.HINT, names.OURS, *names.OTHERS, *chain_views.SHOWN_CHAINS, *names.BETWEEN]
    assert not [name for name in every if shown.name(name)[0].isdigit() or "ours" in shown.name(name)]
    assert len(set(shown.NAMES.values())) == len(shown.NAMES)


# the answer


def told(**gpus):
    """Conclusion and advice of some GPUs' rows."""
    facts = {gpu: answer.facts(rows) for gpu, rows in gpus.items()}
    return answer.conclusion(facts), answer.advice(facts)


def test_the_answer_says_what_the_rows_say(rows):
    conclusion, advice = told(H100=rows)
    assert conclusion == (
        "On average, yes: coalescing alone (W stored [K, N], one thread per row) slows 0 of 12 GEMVs. "
        "One warp per row is coalesced too, and has more threads: it makes all on the H100 4.50× faster."
    )
    assert advice == "Keep cuBLAS: one warp per row with loads of 16 bytes is no faster here."


def test_the_answer_changes_with_the_rows(toy):
    slow = {names.THREAD_A_ROW_TURNED: 18.0, names.WIDE_LOADS: 1.3}
    first, second = frame(slow), frame(slow | {names.WARP_A_ROW: 3.0, names.BETWEEN_TRIGGER: 1.0})
    conclusion, advice = told(H100=first, H200=second)
    assert conclusion == (
        "Not by itself: coalescing alone (W stored [K, N], one thread per row) slows 12 of 12 GEMVs on each GPU. One "
        "warp per row is coalesced too, and has more threads: it makes all on the H100 4.50× faster, on the H200 "
        "3.00× faster."
    )
    assert advice == (
        "Give each row of W [N, K] one warp, with 16-byte loads; one thread per row over W [K, N] is slower than that "
        "at every shape. Merge matrices with the same x. Add dependent launch, triggered early by the kernel in front: "
        "Qwen3.5-4B's layers are then 1.50× faster (H100), 1.80× faster (H200) than with cuBLAS, launched as usual."
    )
    differs, _ = told(H100=first, H200=frame({names.WARP_A_ROW: 10.0}))
    assert differs == (
        "On some GPUs alone: coalescing alone (W stored [K, N], one thread per row) slows 12 of 12 (H100), 0 of 12 "
        "(H200) GEMVs. One warp per row is coalesced too, and has more threads: it makes all on the H100 4.50× faster, "
        "on the H200 1.11× slower."
    )
    split = frame(slow | {names.separate("ours"): 1.0})
    assert "Merge matrices" not in told(H100=split)[1]
    flat = frame(slow | {names.BETWEEN_TRIGGER: 1.5})
    assert told(H100=flat)[1].endswith(" Merge matrices with the same x.")


def test_the_answer_names_the_rows_from_which_on_coalescing_alone_pays(toy):
    """It is slower at most shapes, and much faster at the tallest."""

    def tall(x, name):
        return (3.0 if x["N"] >= 8192 else 18.0) if name == names.THREAD_A_ROW_TURNED and x.op == "gemv" else None

    conclusion, _ = told(H100=frame({names.WIDE_LOADS: 1.3}, of=tall))
    assert conclusion.startswith("Not by itself: ")
    assert "; from 8192 rows on all gain, at best 3.00× faster (H100). One warp" in conclusion


def test_w_stored_k_n_is_advised_against_only_where_it_is_slower(toy):
    fast = frame({names.THREAD_A_ROW_TURNED: 1.1, names.WIDE_LOADS: 1.3})
    assert "[K, N]" not in told(H100=fast)[1]


def test_the_answer_is_of_the_model_that_was_timed(toy):
    rows = frame({names.THREAD_A_ROW_TURNED: 18.0, names.WIDE_LOADS: 1.3})
    assert "Llama-3.2-1B's layers are then 1.50× faster" in told(H100=rows[~rows["case"].str.contains("Qwen3.5-4B")])[1]


@pytest.mark.parametrize("which", ["none", "all failed", "chains only"])
def test_there_is_no_answer_without_the_steps(few, which):
    some = PARTIAL[which](few).reset_index(drop=True)
    assert answer.facts(some) == {}
    assert (answer.conclusion({}), answer.advice({})) == ("", "")
    assert isinstance(answer.hero(some), str)


@pytest.mark.parametrize("which", ["no libraries", "one small shape", "no production", "no step 7, no kernels between"])
def test_an_answer_of_partial_rows_is_short(few, which):
    some = PARTIAL[which](few).reset_index(drop=True)
    for text in told(H100=some, H200=few):
        assert text
        assert "nan" not in text
        assert max(len(one.split()) for one in text.split(". ")) <= 40


def test_no_sentence_of_the_answer_is_long(toy):
    slow = {names.THREAD_A_ROW_TURNED: 18.0, names.WIDE_LOADS: 1.3}
    for gpus in ({"H100": frame(slow), "H200": frame(slow | {names.BETWEEN_TRIGGER: 1.0})}, {"H100": frame()}):
        conclusion, advice = told(**gpus)
        assert max(len(one.split()) for one in conclusion.split(". ")) <= 40
        assert max(len(one.split()) for one in advice.split(". ")) <= 40
    assert set(answer.HEADLINE) <= {claim.id for claim in study.STUDY.claims}
    assert 1 <= len(answer.HEADLINE) <= 3


VIEWS = (
    "speeds", "whole_layers", "beside_cublas", "gains",
    "ladder", "ladder_of", "walk", "why_not_32", "cublas", "beyond_limit", "steps", "peers",
    "best_peer", "engines", "rivals", "chain", "overhead", "grows",
    "limits", "between", "rows_map", "choices", "choosing", "unseen", "splits", "tuning", "token", "cross_check",
    "prediction", "bits", "warm", "interleaving", "merging", "questions",
)  # fmt: skip


def _less(*variants):
    return lambda rows: rows[~rows["variant"].isin(variants)]


PARTIAL = {
    "all": lambda rows: rows,
    "none": lambda rows: rows.iloc[:0],
    "all failed": made.unusable,
    "fp32 only": lambda rows: rows[rows["case"].str.contains("fp32")],
    "one small shape": lambda rows: rows[rows["case"] == gemv_case(1024, 2048).key],
    "chains only": lambda rows: rows[rows["op"] == "chain"],
    "candidates only": lambda rows: rows[rows["op"] == "tune"],
    "no libraries": _less(*names.LIBRARY, *map(names.separate, names.LIBRARY), *map(names.merged, names.LIBRARY)),
    "no F.linear": _less("F.linear", "F.linear, separate", "F.linear, merged"),
    "no control": _less(CONTROL),
    "no reading, no evidence": lambda rows: _less(names.READ)(rows).assign(evidence="{}"),  # nor both of these
    "no production": _less(names.OURS, names.CHAIN_OURS, names.separate("ours")),
    "no step 7, no kernels between": _less(names.TUNED, *names.BETWEEN),  # of which no view needs both
    "no numbers of rows": _less(*names.ROWS_VARIANTS),
    "no empty kernel": _less(names.EMPTY, names.EMPTY_DEPENDENT),
    "no ceiling": lambda rows: rows.assign(ceiling=math.nan, predicted_us=math.nan),
}


def _problem(view, rows):
    try:
        drawn = view_of(view)(rows)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    if not isinstance(drawn, Picture | pd.DataFrame | str | dict):
        return f"a {type(drawn).__name__}"
    said = "" if isinstance(drawn, pd.DataFrame) else caption(drawn)
    return f"a sentence with nan: {said}" if re.search(r"\bnan\b", said) else ""


@pytest.fixture
def few(monkeypatch):
    """Rows of models with few shapes."""
    short = LinearModel("short", {"mixer": (3, ((2048, (4096, 1024)),))}, ("mixer",), ((32000, 2048),))
    for name in made.GEMV["models"]:
        monkeypatch.setitem(LINEAR, name, short)
    monkeypatch.setattr(verdict, "RESAMPLES", 20)
    return frame()


@pytest.mark.parametrize("which", PARTIAL)
def test_every_view_of_partial_rows_is_a_sentence_or_a_drawing(few, which):
    if which not in ("all", "fp32 only"):  # what is missing is missing in each type
        few = few[~few["case"].str.contains("fp32")]
    some = PARTIAL[which](few).reset_index(drop=True)
    problems = {view: _problem(view, some) for view in VIEWS}
    assert {view: problem for view, problem in problems.items() if problem} == {}


def test_tuning_is_timed_from_the_start_of_one_shape_to_that_of_the_next():
    starts = {"a": "10:00:00", "b": "10:00:07", "c": "10:00:09"}
    rows = pd.DataFrame(
        [{"op": "tune", "case": key, "utc": f"2026-01-01T{time}+00:00"} for key, time in starts.items()]
        + [{"op": "tune", "case": "a", "utc": "2026-01-01T10:00:05+00:00"}]
        + [{"op": "gemv", "case": "a", "utc": "2026-01-01T10:00:01+00:00"}]
    )
    assert tuning_seconds(rows).tolist() == [7, 2]


def test_shapes_beyond_the_limit_are_named_beside_reading_them(toy):
    rows = frame({names.OURS: 1.0})  # 2 µs and the bytes, of 2.5 µs and the bytes
    assert views.beyond_limit(rows) == {"bf16 shapes within the limit": "6 of 6"}
    some = frame(of=lambda x, name: 1.5 if (name, x.key) == (names.OURS, TALL) else 1.0 if name == names.OURS else None)
    said = views.beyond_limit(some)
    assert said["bf16 shapes within the limit"] == "5 of 6"
    assert said["furthest beyond it"] == "8192 × 2048: 19.8 µs, limit 13.7 µs"
    assert said["beyond it, and a plain read of W is too"] == "0 of 1"
    assert said["speed there, of a plain read"] == "67%"
    both = frame(of=lambda x, name: 1.5 if x.key == TALL and name in (names.OURS, names.READ) else None)
    assert views.beyond_limit(both)["beyond it, and a plain read of W is too"].startswith("1 of ")


@pytest.mark.parametrize("which", ["no ceiling", "no empty kernel"])
def test_no_shape_is_said_to_be_beyond_a_limit_that_is_not_known(rows, which):
    assert "0 of 6 within the limit" not in caption(views.cublas(PARTIAL[which](rows)))
