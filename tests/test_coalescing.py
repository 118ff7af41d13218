"""Sectors and lines of kernels whose lane addresses can be worked out by hand."""

import math

import pytest
import torch
from answering import answered_here

from labkit import registry
from labkit.evidence import coalescing, compiled
from labkit.evidence.ttgir import Evaluator, Module, Unsupported
from labkit.kernels.launch import Launch
from labkit.sweep import variants


def copy(**arguments):
    return ("kernels_for_tests:copy", arguments)


def tile(rows, cols, row_stride, **arguments):
    return ("kernels_for_tests:tile", {"rows": rows, "cols": cols, "row_stride": row_stride} | arguments)


SOURCES = {
    "unit stride": copy(block=32),
    "two a thread": copy(block=64),
    "four a thread": copy(block=128),
    "stride 2": copy(block=32, stride=2),
    "stride 2, two a thread": copy(block=64, stride=2),
    "stride 8": copy(block=32, stride=8),
    "bf16": copy(block=256, dtype="bfloat16"),
    "unaligned": copy(block=32, offset=1),
    "masked": copy(n=20, block=32),
    "four warps": copy(block=64, num_warps=4),
    "[128, 8] of [K, V]": tile(128, 8, 128),
    "[8, 128] of [V, K]": tile(8, 128, 128),
    "[128, 8] bf16": tile(128, 8, 128, dtype="bfloat16"),
    "[128, 32] of [K, V]": tile(128, 32, 128),
    "matmul": ("kernels_for_tests:matmul", {}),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_here(tmp_path_factory):
    """Compiled code names the file that it came from: what another checkout has left in the cache names that one."""
    with answered_here(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="module")
def table():
    return coalescing.table(SOURCES)


def access(table, source, kind="load", which=-1):
    return table[(table["source"] == source) & (table["kind"] == kind)].iloc[which]


@pytest.mark.parametrize(
    ("source", "bits", "requests", "sectors", "lines", "total", "unique", "efficiency"),
    [
        ("unit stride", 32, 1, 4, 1, 4, 4, 1.0),  # 32 lanes, 4 B each, in one line
        ("two a thread", 64, 1, 8, 2, 8, 8, 1.0),
        ("four a thread", 128, 1, 16, 4, 16, 16, 1.0),
        ("stride 2", 32, 1, 8, 2, 8, 8, 0.5),  # the lanes span 256 B
        ("stride 2, two a thread", 32, 2, 16, 4, 32, 16, 0.25),  # each of both requests has lanes 16 B apart
        ("stride 8", 32, 1, 32, 8, 32, 32, 0.125),  # every lane a sector of its own
        ("bf16", 128, 1, 16, 4, 16, 16, 1.0),
        ("unaligned", 32, 1, 5, 2, 5, 5, 0.8),  # 4 … 132 B
        ("masked", 32, 1, 3, 1, 3, 3, 80 / 96),  # 20 lanes of 32
        ("four warps", 32, 4, 4, 1, 16, 8, 1.0),  # 64 values for 128 threads: two warps repeat the other two
        ("[128, 8] of [K, V]", 128, 8, 16, 16, 128, 128, 1.0),  # rows of 32 B: two lanes a row, a line a row
        ("[8, 128] of [V, K]", 128, 8, 16, 4, 128, 128, 1.0),  # rows of 512 B
        ("[128, 8] bf16", 128, 4, 32, 32, 128, 128, 0.5),  # rows of 16 B: half a sector
        ("[128, 32] of [K, V]", 128, 32, 16, 4, 512, 512, 1.0),  # rows of a whole line
    ],
)
def test_loads_by_hand(table, source, bits, requests, sectors, lines, total, unique, efficiency):
    found = access(table, source)
    assert (found["bits"], found["bits_from"]) == (bits, "ptx")
    assert (found["requests"], found["sectors"], found["lines"]) == (requests, sectors, lines)
    assert (found["sectors_max"], found["lines_max"]) == (sectors, lines)  # all requests of these are alike
    assert (found["sectors_total"], found["sectors_unique"]) == (total, unique)
    assert found["efficiency"] == pytest.approx(efficiency)
    assert found["bytes_used"] == pytest.approx(efficiency * 32 * total)
    assert found["executions"] == 1


def test_stores(table):
    found = access(table, "stride 8", "store")
    assert (found["tensor"], found["bits"], found["requests"], found["sectors"], found["lines"]) == ("y", 32, 1, 4, 1)
    repeated = access(table, "four warps", "store")
    assert (repeated["requests"], repeated["sectors_total"]) == (2, 8)  # of four warps two are predicated off


def test_scalars_and_sources(table):
    index, state = (access(table, "[128, 8] of [K, V]", which=which) for which in (0, 1))
    assert (index["tensor"], index["dtype"], index["sectors"], index["bytes_used"]) == ("indices", "i32", 1, 4)
    assert index["text"] == "slot = tl.load(indices + tl.program_id(0))"
    assert (state["tensor"], state["file"]) == ("state", "kernels_for_tests.py")
    assert state["text"].startswith("tile = tl.load(state")
    assert state["call"] == ""


def test_asynchronous_copies_of_a_pipelined_loop(table):
    copies = table[(table["source"] == "matmul") & (table["kind"] == "async copy")]
    assert set(copies["tensor"]) == {"a", "b"}
    assert (copies["bits"] == 128).all()
    assert (copies["sectors"] == 16).all()
    assert (copies["lines"] == 4).all()  # rows of 64 fp16 are a line each
    loop = copies[copies["note"] == "first iteration of a loop"]
    assert (loop["executions"] == 8).all()  # 512 / 64
    assert len(copies) - len(loop) == 4  # two stages ahead of the loop, a and b


def test_instructions_agree_with_the_machine_code(table):
    """Loads counted from TTGIR and PTX are those that the disassembled cubin has."""
    names = ("two a thread", "bf16", "unaligned", "four warps", "[128, 8] of [K, V]", "[128, 32] of [K, V]")
    straight = {name: SOURCES[name] for name in names}
    emitted = compiled.table(straight, [90]).set_index("source")["loads"]
    for name in straight:
        loads = table[(table["source"] == name) & (table["kind"] == "load")]
        counted = {str(int(bits)): int(group["instructions"].sum()) for bits, group in loads.groupby("bits")}
        assert counted == emitted[name], name


BRANCH = {"branch": ("kernels_for_tests:branch", {"flags": [1, 6, -1]})}


@pytest.mark.parametrize(("program", "sectors", "lines"), [(0, 4, 1), (1, 5, 2)])
def test_branches_loops_and_helpers(program, sectors, lines):
    """Program 1 reads from 0 + 1 + 2 + 3 + 4 * 6 + 1 = 31 on: 124 B after a line's beginning."""
    table = coalescing.table(BRANCH, program=(program, 0, 0))
    value = table[table["tensor"] == "x"].iloc[0]
    assert (value["sectors"], value["lines"]) == (sectors, lines)
    assert value["text"] == "return tl.load(pointers) + 1.0"
    assert value["call"].startswith("value = _load_twice(")
    early = table[table["text"].str.contains("tl.zeros")].iloc[0]
    assert early["executions"] == 0
    assert math.isnan(early["sectors"])
    inside = table[table["text"].str.startswith("start = shift")].iloc[0]
    assert inside["executions"] == program


def test_a_program_that_returns_early():
    table = coalescing.table(BRANCH, program=(2, 0, 0))
    assert table["executions"].tolist()[:2] == [1, 1]  # the flag and the zeros
    assert (table["executions"][2:] == 0).all()


def test_what_cannot_be_evaluated_is_named():
    with pytest.raises(Unsupported, match=r"math.exp\w* in kernel _float_kernel cannot be evaluated"):
        coalescing.table({"floats": ("kernels_for_tests:address_from_floats", {})})


def test_an_index_outside_its_tensor_is_named():
    with pytest.raises(IndexError, match=r"_tile_kernel: program \(7, 0, 0\) reads item 7 to 7 of 2"):
        coalescing.table({"tile": tile(128, 8, 128)}, program=(7, 0, 0))


def test_variants_of_a_study():
    study = registry.load("state_layout")
    case = study.tiny[0]
    variant = next(one for one in study.variants(case) if one.role != "ceiling")
    found = variants.accesses_for("state_layout", [(case, variant.name)])
    assert set(found["variant"]) == {variant.name}
    assert set(found["case"]) == {case.key}
    assert {"load", "store"} <= set(found.loc[found["tensor"] == "state", "kind"])


TTGIR = """
#loc = loc("/lab/k.py":4:0)
#loc1 = loc(unknown)
module attributes {"ttg.num-warps" = 2 : i32} {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc))) attributes {noinline = false} {
    BODY
    tt.return loc(#loc5)
  } loc(#loc)
} loc(#loc)
#loc2 = loc("/lab/k.py":7:24)
#loc3 = loc("/lab/helper.py":1:2)
#loc4 = loc("v"(#loc2))
#loc5 = loc(callsite(#loc3 at #loc4))
"""


ARITHMETIC = """%a = arith.constant -7 : i32 loc(#loc1)
    %b = arith.constant 2 : i32 loc(#loc1)
    OPERATION
    %p = tt.addptr %x, %r : !tt.ptr<f32>, i32 loc(#loc1)
    tt.store %p, %p : !tt.ptr<f32> loc(#loc1)
"""


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("%r = arith.divsi %a, %b : i32", -3),  # towards zero, unlike Python
        ("%r = arith.remsi %a, %b : i32", -1),
        ("%r = arith.divui %a, %b : i32", (2**32 - 7) // 2),
        ("%r = arith.remui %a, %b : i32", 1),
        ("%r = arith.shrsi %a, %b : i32", -2),
        ("%r = arith.shrui %a, %b : i32", 2**30 - 2),
        ("%r = arith.maxui %a, %b overflow<nsw> : i32", -7),
        ("%r = arith.minsi %a, %b : i32", -7),
        ("%r = arith.xori %a, %b : i32", -5),
        ("%w = arith.shli %a, %b : i32\n%r = arith.muli %w, %c : i32", -(2**31)),  # -7 * 2**31 wraps
        ("%w = arith.cmpi slt, %a, %b : i32\n%r = arith.extsi %w : i1 to i32", -1),
        ("%w = arith.cmpi ult, %a, %b : i32\n%r = arith.extui %w : i1 to i32", 0),
        ("%w = arith.cmpi ne, %a, %b : i32\n%r = arith.select %w, %b, %a : i32", 2),
        ("%w = arith.extui %a : i32 to i64\n%r = arith.trunci %w : i64 to i32", -7),
        ("%w = arith.sitofp %a : i32 to f32\n%r = arith.fptosi %w : f32 to i32", -7),
        ("%r = tt.get_program_id y : i32", 5),
        ("%r = tt.get_num_programs x : i32", 9),
    ],
)
def test_arithmetic_is_that_of_the_gpu(operation, expected):
    body = ARITHMETIC.replace("OPERATION", "%c = arith.constant 536870912 : i32 loc(#loc1)\n" + operation)
    module = Module.parse(TTGIR.replace("BODY", body))
    evaluator = Evaluator(module, Launch(None, (9, 8), {"x": torch.zeros(16)[4:]}), (4, 5, 6))
    store = next(op for op in module.ops() if op.name == "tt.store")
    address, mask = evaluator.addresses(store)
    assert int(address) % 2**40 == (4 * expected + 16) % 2**40  # x begins at the storage's fifth element
    assert bool(mask)


def test_places_are_the_chain_of_inlined_calls():
    module = Module.parse(TTGIR.replace("BODY", ""))
    (last,) = module.ops()
    assert module.places(last.location) == [("/lab/helper.py", 1, 2), ("/lab/k.py", 7, 24)]
    assert (module.kernel, module.num_warps) == ("k", 2)
    assert module.parameters == [("%x", "!tt.ptr<f32>", "x")]


def test_an_unknown_structure_is_refused():
    with pytest.raises(Unsupported, match="partition0"):
        Module.parse(TTGIR.replace("BODY", "partition0() num_warps(4) {"))
