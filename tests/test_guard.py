"""Functions of a reader that leave out what they are timed for: each trick is caught and named, an honest one passes.

The device is simulated; another stream is a worker thread there, and a real one in the GPU tests.
"""

import contextlib
import dataclasses
import json
import re
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import simulated
import test_added
import test_sweep
import torch
import triton.testing
from test_added import forgotten, toy, write  # noqa: F401 (fixtures)
from torch.nn.functional import silu

from labkit import isolated, registry
from labkit.bench import machine, records, timing
from labkit.bench.spec import Arguments, Case
from labkit.kernels.gguf import formats
from labkit.sweep import added, guard
from labkit.sweep import case as case_runner
from labkit.sweep import run as sweep
from labkit.sweep import trial as trials

HONEST = {
    "plain": "def mine(x, y): torch.mul(x, 2, out=y)",
    "with memory of its own, kept": """
space = {}
def mine(x, y):
    made = space.setdefault(x.shape, torch.empty_like(x))
    torch.add(x, x, out=made)
    y.copy_(made)
    return made
""",
    "reading clocks, adding names": """
import time
def mine(x, y):
    torch.Tensor.label = "a name that hides none"
    torch.cuda.Event.label = time.perf_counter()
    y.copy_(x).mul_(2)
""",
    "another thread, waited for": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
def mine(x, y): pool.submit(torch.mul, x, 2, out=y).result()
""",
}
TRICKS = {
    "results cached by address": (
        """
kept = {}
def mine(x, y):
    y.copy_(kept.setdefault(x.data_ptr(), 2 * x))
""",
        guard.CACHED,
    ),
    "results made before, by the first call": (
        """
made = {}
def mine(x, y):
    if y.data_ptr() not in made:
        made[y.data_ptr()] = 2 * x
    y.copy_(made[y.data_ptr()])
""",
        guard.CACHED,
    ),
    "results cached by values, of which it looks at one": (
        """
kept = {}
def mine(x, y):
    seen = x.data_ptr(), x.view(-1)[0].item()
    y.copy_(kept.setdefault(seen, 2 * x))
""",
        guard.CACHED,
    ),
    "results that appear later": (
        """
import threading, time
def late(x, y):
    time.sleep(0.05)
    torch.mul(x, 2, out=y)
def mine(x, y): threading.Thread(target=late, args=(x, y), daemon=True).start()
""",
        guard.LATE,
    ),
    "work on another stream": (
        """
import time
from concurrent.futures import ThreadPoolExecutor
stream = ThreadPoolExecutor(1)
def mine(x, y):
    stream.submit(time.sleep, 0.005)
    stream.submit(torch.mul, x, 2, out=y)
""",
        guard.LATE,
    ),
    "an output that becomes an input": ("def mine(x, y): y.set_(x.mul_(2))", "it gave y other memory, that of x"),
    "an output that gets other memory": ("def mine(x, y): y.data = 2 * x", "NotAllowed: it gave y other memory"),
    "an input that is changed": ("def mine(x, y): torch.mul(x, 2, out=y); x.neg_()", "it changed x, which it may only"),
}
CHECKED_ONLY = {  # right where results were checked before, and not where they are timed
    "nothing is done": (
        """
import traceback
def mine(x, y):
    if not any(one.name == "replay" for one in traceback.extract_stack()):
        torch.mul(x, 2, out=y)
""",
        guard.NOT_WRITTEN,
    ),
    "zeros are written": (
        """
import traceback
def mine(x, y):
    timed = any(one.name == "replay" for one in traceback.extract_stack())
    torch.mul(x, 0 if timed else 2, out=y)
""",
        guard.WRONG + "wrong: error of y 1.0e+00",
    ),
}
REPLACED = {  # statement -> name, its owner
    "time.perf_counter = lambda: 0.0": ("time.perf_counter", time),
    "time.monotonic_ns = lambda: 0": ("time.monotonic_ns", time),
    "torch.cuda.synchronize = lambda *_: None": ("torch.cuda.synchronize", torch.cuda),
    "torch.cuda.Event = object": ("torch.cuda.Event", torch.cuda),
    "torch.cuda.Event.elapsed_time = lambda *_: 1e-6": ("torch.cuda.Event.elapsed_time", torch.cuda.Event),
    "torch.cuda.Event.record = lambda *_: None": ("torch.cuda.Event.record", torch.cuda.Event),
    "torch.cuda.Stream.synchronize = lambda *_: None": ("torch.cuda.Stream.synchronize", torch.cuda.Stream),
    "torch.cuda.CUDAGraph.replay = lambda *_: None": ("torch.cuda.CUDAGraph.replay", torch.cuda.CUDAGraph),
    "triton.testing.do_bench = lambda *_, **__: 0.0": ("triton.testing.do_bench", triton.testing),
    "torch.Tensor.isnan = lambda one: one > one": ("torch.Tensor.isnan", torch.Tensor),
    "del torch.Tensor.norm": ("torch.Tensor.norm", torch.Tensor),
    "labkit.sweep.trial.relative_rmse = lambda *_: 0.0": ("labkit.sweep.trial.relative_rmse", trials),
    "labkit.bench.timing.measure = lambda *_, **__: None": ("labkit.bench.timing.measure", timing),
    "labkit.sweep.guard.Guard.take = lambda *_: None": ("labkit.sweep.guard.Guard.take", guard.Guard),
}
IMPORTS = "import time, torch, triton.testing, labkit.sweep.guard, labkit.sweep.trial, labkit.bench.timing\n"
DOUBLE = IMPORTS + "def mine(x, y): torch.mul(x, 2, out=y)\n"


def refused(toy, write, text, reason):  # noqa: F811
    """Whether the sweep refuses a function in every row, names what it did, and goes on with the others."""
    toy.add = [write("import torch\n" + text), write(DOUBLE.replace("mine", "good"), "good", "good.py")]
    rows = toy.run()
    bad, good = toy.of(rows, "mine"), toy.of(rows, "good")
    assert len(bad) == len(good) == 4
    assert not bad["ok"].any()
    assert bad["reason"].str.contains(reason, regex=False).all(), bad["reason"].tolist()
    assert good["ok"].all(), good["reason"].tolist()
    test_sweep.complete(rows[~added.is_added(rows)], processes=2)
    return True


def tried(toy, write, tmp_path, text):  # noqa: F811
    """The row of a function that is only checked, as without a GPU."""
    journal = records.Journal(tmp_path / "journal")
    mine = write("import torch\n" + text)
    added.try_here("toy", [mine], "added: mine", [["double", json.dumps({"n": 2})]], "cpu", False, str(journal.path))
    (row,) = journal.entries()
    return row


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_function_passes(toy, write, tmp_path, name):  # noqa: F811
    toy.add = [write("import torch\n" + HONEST[name])]
    mine = toy.of(toy.run(), "mine")
    assert len(mine) == 4
    assert mine["ok"].all(), mine["reason"].tolist()
    assert (mine["reason"] == "").all()
    assert tried(toy, write, tmp_path, HONEST[name])["ok"]


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_refused_where_functions_are_timed(toy, write, name):  # noqa: F811
    assert refused(toy, write, *TRICKS[name])


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_refused_where_functions_are_only_checked(toy, write, tmp_path, name):  # noqa: F811
    text, reason = TRICKS[name]
    row = tried(toy, write, tmp_path, text)
    assert not row["ok"]
    assert reason in row["reason"]


@pytest.mark.parametrize("name", CHECKED_ONLY)
def test_results_are_those_of_the_timed_calls(toy, write, name):  # noqa: F811
    assert refused(toy, write, *CHECKED_ONLY[name])


@pytest.mark.parametrize("statement", REPLACED)
@pytest.mark.parametrize("where", ["when it is imported", "when it is called"])
def test_a_clock_or_a_check_that_is_replaced_is_named_and_put_back(toy, write, statement, where):  # noqa: F811
    name, owner = REPLACED[statement]
    attribute = name.rpartition(".")[2]
    before = getattr(owner, attribute)
    body = f"{statement}\n{DOUBLE}" if where == "when it is imported" else f"{DOUBLE}    {statement}\n"
    text = IMPORTS + body.replace("(x, y): ", "(x, y):\n    ")
    assert refused(toy, write, text, f"NotAllowed: it replaced {name}")
    assert getattr(owner, attribute) is before


def test_a_clock_that_a_thread_replaces_while_functions_are_timed_costs_them_the_case(toy, write):  # noqa: F811
    toy.add = [write(DOUBLE)]
    real = simulated.HostDevice.time

    def time_of(device, timed, hot):
        ns = real(device, timed, hot)
        if any(one.before for one in timed):
            time.perf_counter = lambda: 0.0  # as a thread would; graphs call no Python
        return ns

    toy.patch.setattr(simulated.HostDevice, "time", time_of)
    before, call = time.perf_counter, toy.call

    def isolated_call(target, *args, **options):
        try:
            return call(target, *args, **options)
        except guard.NotAllowed as problem:  # as it comes out of a process
            raise isolated.IsolatedError(target, "NotAllowed", str(problem)) from None

    toy.patch.setattr(isolated, "call", isolated_call)
    rows = toy.run()
    mine = toy.of(rows, "mine")
    assert not mine["ok"].any()
    assert mine["reason"].str.contains("time.perf_counter replaced by a thread while functions were timed").all()
    assert time.perf_counter is before
    test_sweep.complete(rows[~added.is_added(rows)], processes=2)


def test_a_function_that_fails_leaves_no_replaced_name_behind(toy, write):  # noqa: F811
    text = "import time\ndef mine(x, y):\n    time.perf_counter = None\n    1 / 0\n"
    assert refused(toy, write, text, "NotAllowed: it replaced time.perf_counter")
    assert time.perf_counter() > 0


ON_STREAMS = {
    "the timed one": ("TIMED(work)", ""),
    "another": ("SIDE(work)", guard.NOT_WRITTEN),
    "the timed one, for zeros": ("SIDE(work); TIMED(y.zero_)", guard.WRONG),
}


@pytest.mark.parametrize("name", ON_STREAMS)
def test_only_what_a_graph_captured_counts(toy, write, name):  # noqa: F811
    body, reason = ON_STREAMS[name]
    text = "from simulated import SIDE, TIMED\nimport torch\ndef mine(x, y):\n"
    toy.add = [write(f"{text}    work = lambda: torch.mul(x, 2, out=y)\n    {body}\n")]

    def device():
        found = simulated.GraphDevice()
        found.machine = toy.machine
        return found

    toy.patch.setattr(machine, "CudaDevice", device)
    mine = toy.of(toy.run(), "mine")
    assert mine["ok"].all() if not reason else not mine["ok"].any()
    assert mine["reason"].str.contains(reason, regex=False).all(), mine["reason"].tolist()


def test_outputs_are_looked_at_right_before_and_after_what_is_timed():
    done = []

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: done.append("record")

        def elapsed_time(self, end):
            return 1.0

    def step(name):
        return lambda *_: done.append(name)

    cuda = SimpleNamespace(Event=Event, _sleep=step("sleep"), stream=lambda one: contextlib.nullcontext())
    gpu = object.__new__(machine.CudaDevice)
    gpu.torch, gpu.stream = SimpleNamespace(cuda=cuda), SimpleNamespace(synchronize=step("end"))
    own = machine.Timed(step("own"), 1, 1)
    mine = machine.Timed(step("mine"), 1, 1, before=step("poison"), after=step("take"))
    assert gpu.time([mine, own], hot=True) == [1_000_000, 1_000_000]
    timed = ["mine", "poison", "record", "mine", "record", "take", "own", "record", "own", "record"]
    assert done == ["sleep", *timed, "end"]


@pytest.mark.parametrize(
    ("us", "mode", "whole", "sets", "calls"),
    [
        (0.2, "graph", False, 1000, 4000),  # a short sample is of more rounds
        (4.0, "graph", False, 1000, 1000),
        (30.0, "graph", False, 166, 166),
        (3e4, "graph", False, 1, 1),
        (30.0, "graph", True, 1000, 1000),
        (30.0, "eager", False, 1000, 1000),
    ],
)
def test_of_calls_that_take_long_fewer_sets_are_timed(us, mode, whole, sets, calls, monkeypatch):
    """The first ones, once what is in L2 has made room for a read of more than L2 holds."""
    done, captured = [], []
    monkeypatch.setattr(machine.CudaDevice, "_capture", lambda self, all_calls, n: captured.append(n) or done.append)
    gpu = object.__new__(machine.CudaDevice)
    cuda = SimpleNamespace(synchronize=lambda: None, stream=lambda one: contextlib.nullcontext())
    read = SimpleNamespace(sum=lambda: done.append("read"))
    gpu.torch = SimpleNamespace(cuda=cuda, zeros=lambda size, device: done.append(4 * size) or read)
    gpu.stream, gpu.torch_device = SimpleNamespace(synchronize=lambda: None), "cuda"
    gpu.machine = SimpleNamespace(l2_bytes=50)
    gpu.time = lambda timed, hot: [1e3 * us]
    found = gpu.prepare([lambda: None] * 1000, mode, whole)
    assert (found.sets, found.calls) == (sets, calls)
    assert not captured if mode == "eager" else captured[-1] == calls
    if sets == 1000:
        assert found.before is None
    else:
        found.before()
        assert done == [200, "read"]


@pytest.mark.parametrize(
    ("messages", "captures"),
    [
        ([], 1),
        (["CUDA error: operation failed due to a previous error during capture"], 2),
        (["CUDA error: operation failed due to a previous error during capture"] * 2, None),
        (["CUDA error: operation not permitted when stream is capturing"], None),
    ],
)
def test_a_capture_that_was_broken_off_is_made_once_more(messages, captures):
    """And one that cannot be made is an error."""
    left, made = list(messages), []

    class Graph:
        def __init__(self):
            made.append(self)
            self.replay = lambda: self

    @contextlib.contextmanager
    def graph(one, stream):
        yield
        if left:
            raise RuntimeError(left.pop(0))

    cuda = SimpleNamespace(CUDAGraph=Graph, graph=graph, empty_cache=lambda: None, synchronize=lambda: None)
    gpu = object.__new__(machine.CudaDevice)
    gpu.torch, gpu.stream = SimpleNamespace(cuda=cuda), None
    if captures is None:
        with pytest.raises(RuntimeError, match=re.escape(messages[-1])):
            gpu._capture([lambda: None], 3)
    else:
        assert gpu._capture([lambda: None], 3)() is made[-1]
        assert len(made) == captures


# how it is done


def arguments(x, y, changes=()):
    def expected(i, count):
        return 2 * x[i].double()

    def errors(exact, found):
        return {"y": trials.relative_rmse(found["y"], exact)}

    def other(i, random):
        random.fill(x)

    return Arguments([{"x": one} for one in x], [{"y": one} for one in y], changes or (other,), expected, errors)


def test_every_set_and_every_change_has_its_turn():
    x, changed = torch.ones(5, 3), []
    y = 2 * x
    changes = [lambda i, random, n=n: changed.append((n, i)) for n in range(2)]
    held = guard.Guard(arguments(x, y, changes), {"y": 1e-6})
    held.begin(4, 1)
    for _ in range(100):
        held.before_block()
        held.poison()
        assert y[held.set].isnan().all()
        assert not torch.cat([y[: held.set], y[held.set + 1 :]]).isnan().any()
        torch.mul(x, 2, out=y)
        held.take()
        held.after_block()
    assert held.faults == []
    assert {i for _, i in changed} == {0, 1, 2, 3}  # the fifth is not timed
    assert all(one != two for (one, _), (two, _) in pairwise(changed))


def test_what_is_taken_is_what_was_there_when_the_calls_ended():
    x = torch.ones(1, 3)
    y = 2 * x
    held = guard.Guard(arguments(x, y), {"y": 1e-6})
    held.before_block()
    held.poison()
    held.take()
    torch.mul(x, 2, out=y)  # right, but later
    held.after_block()
    assert held.faults == [guard.LATE]
    held.before_block()
    assert held.faults == [guard.LATE]  # once is enough


@pytest.mark.parametrize("place", [0, 5, 1023, 1024, 9000, 9216])
def test_a_checksum_sees_every_bit(place):
    values = torch.randn(9217)
    before = guard.checksum(values)
    assert torch.equal(guard.checksum(values), before)
    values.view(torch.int32)[place] ^= 1
    assert not torch.equal(guard.checksum(values), before)
    assert len(guard.checksum(torch.ones(1 << 20))) == 512
    assert len(guard.checksum(torch.ones(3, dtype=torch.bfloat16))) == 6


# the studies


def gemv(W, x, y):
    y.copy_(W.double() @ x.double())


def product(blocks, x, y):
    width = x.shape[1]
    name = next(n for n, one in formats.FORMATS.items() if one.block_bytes * width == blocks.shape[1] * one.block)
    y.copy_(x.double() @ formats.dequantise(blocks, name).double().T)


def layer(x, ids, weights, w1, w2, out):
    out.zero_()
    for token, j in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        gate, up = (w1[ids[token, j]] @ x[token]).chunk(2)
        out[token] += weights[token, j] * (w2[ids[token, j]] @ (silu(gate) * up))


def decode(*values):
    found = {}
    exec(test_added.GOOD, found)
    found["my_decode"](*values)


RIGHT = {"state_layout": decode, "gemv_coalescing": gemv, "moe_persistent_grid": layer, "batched_ffn": product}


def of_study(name, function, case):
    study = registry.load(name)
    made = study.added.prepare(guard.held(function, study.added.signature), case, "cpu", 2, 0)
    return made, guard.Guard(made.arguments, made.tolerance)


def last(signature):
    """The place of the output that a call writes."""
    return next(i for i, name in enumerate(signature) if name in ("y", "out"))


def test_there_is_a_right_function_of_every_study_that_takes_one():
    assert set(RIGHT) == set(added.takers())


def taken(name):
    study = registry.load(name)
    return next(case for case in study.tiny if study.added.takes(case))


@pytest.mark.parametrize("name", RIGHT)
def test_every_study_changes_what_a_function_reads_and_follows_its_calls(name):
    made, held = of_study(name, RIGHT[name], taken(name))
    given = made.arguments.inputs
    for _ in range(6):
        before = [{n: one.clone() for n, one in some.items()} for some in given]
        held.begin(2, 3)
        held.before_block()
        assert any(not torch.equal(one, before[0][n]) for n, one in given[0].items())
        assert made.arguments.expected(0, 3) is not None
        held.poison()
        for _ in range(3):
            made.calls[0]()
        held.take()
        held.after_block()
        assert held.faults == []
    assert made.check().keys() == made.tolerance.keys()


@pytest.mark.parametrize("name", RIGHT)
def test_every_change_of_every_study_shows_in_results_that_are_cached(name):
    kept, place = {}, last(registry.load(name).added.signature)

    def cached(*values):
        out = values[place]
        if out.data_ptr() not in kept:
            RIGHT[name](*values)
            kept[out.data_ptr()] = out.clone()
        out.copy_(kept[out.data_ptr()])

    for number in range(len(of_study(name, cached, taken(name))[0].arguments.changes)):
        made, _ = of_study(name, cached, taken(name))
        for call in made.calls:
            call()
        only = dataclasses.replace(made.arguments, changes=made.arguments.changes[number : number + 1])
        assert guard.Guard(only, made.tolerance).try_calls(made.calls) == [guard.CACHED]
        kept.clear()


# on a GPU

SHAPE = {"model": "made up", "N": 2560, "K": 2560, "dtype": "bf16"}
STREAMS = {
    "plain": ("torch.mv(W, x, out=y)", ""),
    "a stream that is forked and joined": (
        """
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        torch.mv(W, x, out=y)
    here.wait_stream(side)
""",
        "",
    ),
    "a stream that is never joined": (
        """
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.mv(W, x, out=y)
""",
        "unjoined",
    ),
    "a stream that does not wait": (
        """
    with torch.cuda.stream(side):
        torch.mv(W, x, out=y)
""",
        guard.NOT_WRITTEN,
    ),
    "results cached by address": (
        """
    if W.data_ptr() not in kept:
        kept[W.data_ptr()] = torch.mv(W, x)
    y.copy_(kept[W.data_ptr()])
""",
        guard.CACHED,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STREAMS)
def test_other_streams_on_a_gpu(write, name):  # noqa: F811
    body, reason = STREAMS[name]
    text = f"import torch\nside, kept = torch.cuda.Stream(), {{}}\ndef mine(W, x, y):\n    {body.strip()}\n"
    case, mine = Case("gemv", SHAPE), [write(text)]
    study = added.with_added(registry.load("gemv_coalescing"), mine)
    refusals = added.refusals(study, [case], {}, print)  # a capture that failed may have ended the process that tried
    study = added.with_added(registry.load("gemv_coalescing"), mine, refusals)
    own = [one for one in study.variants(case) if one.name in (study.control(case), "added: mine")]
    only = dataclasses.replace(study, variants=lambda _: own)
    rows = case_runner.measure(only, case, 0, machine.CudaDevice(), sweep.ceilings())
    (found,) = (row for row in rows if row["variant"] == "added: mine")
    assert found["ok"] == (not reason), found["reason"]
    assert reason in found["reason"]
    assert all(row["ok"] for row in rows if row is not found)
