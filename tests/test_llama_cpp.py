"""llama.cpp's own products: what they are built of, that the lab's call of them compiles, and whose bytes they read."""

import ctypes
import dataclasses
import errno
import gc
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rows as made
import torch
from missing import NO_NVCC, NO_SOURCES

from labkit import sources
from labkit.bench.sha import covered, kernel_sha
from labkit.bench.spec import Case
from labkit.kernels.gguf import formats
from labkit.sources import building
from labkit.studies.batched_ffn import ahead, llama_cpp, llama_views, routed_trials, tables, trials, variants

MADE = sources.source(llama_cpp.SOURCE)
fetched = pytest.mark.skipif(not sources.is_fetched(MADE), reason=NO_SOURCES)
INTEGERS = ("Q8_0", "Q4_K", "Q5_K", "Q6_K")


def product_case(**changes) -> Case:
    return Case("product", {"rows": 96, "K": 512, "N": 3, "format": "Q4_K", "activations": "bf16"} | changes)


def routed_case(**changes) -> Case:
    shape = {"model": "tiny", "hidden": 512, "width": 512, "E": 3, "top_k": 2, "N": 3, "trace": "uniform"}
    return Case("routed", shape | {"format": "Q4_K", "activations": "bf16"} | changes)


def test_a_row_s_hash_is_of_the_release_the_caller_and_the_file_that_calls_it(monkeypatch):
    own = llama_cpp.recipe().own
    assert hashlib.sha256(own.read_bytes()).hexdigest() == llama_cpp.GLUE_SHA
    for op in ("product", "routed"):
        [variant] = [one for one in variants.VARIANTS[op] if one.name == variants.LLAMA]
        assert variant.source == (f"source:{llama_cpp.SOURCE}", f"{llama_cpp.__name__}:{op}")
        names = {name.rpartition(":")[2] for name in covered(variant.source)}
        assert {op, "Work", "UNITS", "FLAGS", "GLUE_SHA"} <= names
        assert kernel_sha(variant.source) != kernel_sha(variant.source[1])


def test_all_that_is_compiled_is_named_by_the_manifest():
    assert set(llama_cpp.UNITS) <= set(MADE.files)
    assert len(llama_cpp.UNITS) == len(set(llama_cpp.UNITS))
    compiled = {path for path in MADE.files if path.endswith((".cu", ".c", ".cpp"))}
    assert compiled == set(llama_cpp.UNITS)


def test_it_is_timed_where_it_takes_the_rows():
    def timed(x: Case) -> bool:
        return variants.LLAMA in {one.name for one in variants.of(x)}

    assert timed(product_case())
    assert timed(product_case(format="F32"))
    assert not timed(product_case(K=544))
    assert not timed(product_case(activations="fp32"))
    assert timed(routed_case())
    assert not timed(routed_case(width=256))
    assert not timed(routed_case(format="BF16"))


def test_it_is_built_ahead_where_cases_need_it_and_what_it_lacks_does_not_keep_the_others(monkeypatch):
    asked = []

    def library(capability: int) -> Path:
        asked.append(capability)
        raise building.NotBuilt("not built: needs nvcc")

    monkeypatch.setattr(llama_cpp, "library", library)
    # What compiles ahead is kept from the GPU, which another study may be timed on: it has none to ask about.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ahead.sources([product_case(N=1)], 90, "")
    assert asked == [90]
    assert ahead.sources([product_case(N=1, activations="fp32")], 90, "")
    assert asked == [90]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": 544}, "rows have 544 values; allowed: multiples of 512"),
        ({"bytes": 8}, r"blocks has 8 bytes a row; allowed for 512 values of Q4_K: 288"),
        ({"step": 2}, "a tensor is not contiguous"),
    ],
)
def test_what_its_kernels_would_read_wrongly_is_refused(change, message):
    K, size, step = ({"K": 512, "bytes": 288, "step": 1} | change).values()
    x, y = torch.zeros(3, step * K)[:, ::step], torch.zeros(3, 8)
    with pytest.raises(ValueError, match=message):
        llama_cpp.product("Q4_K", torch.zeros((8, size), dtype=torch.uint8), x, y)


def test_without_its_library_the_reason_is_all_that_is_said(monkeypatch, recwarn):
    def opened(device: torch.device) -> None:
        raise building.NotBuilt("not built: needs nvcc")

    monkeypatch.setattr(llama_cpp, "opened", opened)
    gc.collect()  # what other tests left behind
    recwarn.clear()
    with pytest.raises(building.NotBuilt, match=r"^not built: needs nvcc$"):
        trials.llama_cpp(product_case(), "cpu", 1, 0)
    gc.collect()
    assert not recwarn.list


def test_as_many_experts_a_token_as_its_sum_is_fused_for():
    gate, down = torch.zeros((3, 512, 288), dtype=torch.uint8), torch.zeros((3, 512, 288), dtype=torch.uint8)
    x, ids, weights = torch.zeros(4, 512), torch.zeros((4, 1), dtype=torch.int32), torch.zeros(4, 1)
    with pytest.raises(ValueError, match="top_k is 1; allowed: 2 to 15"):
        llama_cpp.routed("Q4_K", (gate, gate, down), x, ids, weights, torch.zeros(4, 512))


class Reference:
    """Stands for a released product: computes it, in float64, from blocks as stored."""

    def __init__(self, function):
        self.function = function
        function()

    def __call__(self):
        self.function()


def test_the_trials_hand_it_fp32_and_its_own_tolerance(monkeypatch):
    def product(format, blocks, x, y):
        assert (x.dtype, y.dtype, blocks.dtype) == (torch.float32, torch.float32, torch.uint8)
        W = formats.dequantise(blocks, format)
        return Reference(lambda: y.copy_(x.double() @ W.double().T))

    monkeypatch.setattr(llama_cpp, "product", product)
    for format, tolerance in (("Q4_K", trials.LLAMA_TOLERANCE), ("F32", trials.TOLERANCE["bf16"])):
        made = trials.llama_cpp(product_case(format=format), "cpu", 2, 0)
        assert made.tolerance["y"] == tolerance
        made.poison()
        assert not made.written()
        for call in made.calls:
            call()
        assert made.written()
        assert made.check()["y"] < 1e-6
        assert made.facts()["alone"] <= 1


def test_routed_trials_hand_it_fp32_too(monkeypatch):
    def routed(format, blocks, x, ids, weights, y):
        assert {one.dtype for one in (x, weights, y)} == {torch.float32}
        gate, up, down = (formats.dequantise(one, format).double() for one in blocks)

        def layer():
            for n, chosen in enumerate(ids.tolist()):
                v = x[n].double()
                parts = [down[e] @ (torch.nn.functional.silu(gate[e] @ v) * (up[e] @ v)) for e in chosen]
                y[n] = sum(weight * part for weight, part in zip(weights[n].double(), parts, strict=True))

        return Reference(layer)

    monkeypatch.setattr(llama_cpp, "routed", routed)
    made = routed_trials.llama_cpp(routed_case(), "cpu", 2, 0)
    assert made.tolerance == {"y": routed_trials.LLAMA_TOLERANCE}
    assert made.check()["y"] < 1e-6
    assert made.facts()["alone"] < 0.1


# The page

VIEWS = ("times", "errors", "routed")


@pytest.fixture(scope="module")
def rows():
    return made.batched_ffn()


def test_its_times_and_errors_stand_beside_ours(rows):
    table = tables.beside_llama(rows, "product")
    assert len(table) == len(tables.cases(rows, "product")) > 0
    assert table["ratio"].tolist() == (table["llama.cpp µs"] / table["tensor_core µs"]).tolist()
    assert (table["fastest µs"] <= table["tensor_core µs"]).all()
    assert (table["mixed ratio"] >= table["ratio"]).all()
    assert {"llama.cpp error", "tensor_core error"} <= set(table)
    assert len(tables.beside_llama(rows, "routed")) == len(tables.cases(rows, "routed")) > 0
    made.check_views(llama_views, VIEWS, rows)


def test_what_was_aimed_at_is_judged_at_few_tokens(rows, monkeypatch):
    few = rows[rows["op"] == "product"]
    found = llama_views.bars(few)
    assert next(iter(found.items())) == (
        "up to 32 tokens, geometric mean (aim: 1.4×)",
        "1.15× faster: not reached",
    )
    assert found["formats timed on this GPU"] == ", ".join(sorted({json.loads(case)["format"] for case in few["case"]}))
    worst = "at worst (aim: never slower)"
    assert found[worst].startswith("1.15× faster (")
    assert found[worst].endswith("): reached")
    monkeypatch.setattr(llama_views, "MEAN", 1.1)
    assert "1.15× faster: reached" in llama_views.bars(few).values()
    monkeypatch.setattr(llama_views, "LEAST", 1.2)
    assert llama_views.bars(few)[worst].endswith("): not reached")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (None, "not measured on this GPU"),
        ("NotFetched: not fetched: labkit fetch llama-cpp-python", "not fetched: labkit fetch llama-cpp-python"),
        ("NotBuilt: not built: needs nvcc", "not built: needs nvcc"),
    ],
)
def test_where_it_could_not_be_timed_the_page_says_why(rows, reason, said):
    own = rows["variant"] == variants.LLAMA
    some = rows[~own] if reason is None else made.unusable(rows, own, reason)
    assert llama_views.bars(some) == {}
    assert llama_views.errors(some).empty
    for view, kind in {"times": "products", "routed": "routed products"}.items():
        assert getattr(llama_views, view)(some) == f"llama.cpp's own {kind}: {said}."


# Building


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> building.Recipe:
    """llama.cpp's recipe, with caches of its own."""
    monkeypatch.setenv("LABKIT_BUILT", str(tmp_path / "built"))
    return llama_cpp.recipe()


def test_without_its_files_or_nvcc_it_says_so(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "_nvcc", lambda: None)
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path / "none"))
    with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch llama-cpp-python$"):
        building.library(recipe, 90)
    monkeypatch.setattr(building, "is_fetched", lambda made: True)
    with pytest.raises(building.NotBuilt, match=r"^not built: needs nvcc$"):
        building.library(recipe, 90)
    copied = tmp_path / "built" / f"{MADE.name}-{recipe.key()}-sm_90-cuda13.0.so"
    copied.parent.mkdir()
    copied.touch()
    assert building.library(recipe, 90) == copied  # of another machine
    with pytest.raises(building.NotBuilt):
        building.library(recipe, 100)


@pytest.fixture
def buildable(monkeypatch) -> None:
    """As if all were there that building needs."""
    for name, value in {"_nvcc": "nvcc", "_release": "13.0", "is_fetched": True, "problems": []}.items():
        monkeypatch.setattr(building, name, lambda *arguments, value=value: value)


def test_only_what_was_asked_for_is_built(recipe, buildable, monkeypatch):
    with pytest.raises(building.NotBuilt, match=r"^not built: llama_cpp\.cu has SHA-256 \w{64}; allowed: 0$"):
        building.library(dataclasses.replace(recipe, own_sha="0"), 90)
    monkeypatch.setattr(building, "problems", lambda made, root: ["a.cu has SHA-256 0; allowed: 1"])
    with pytest.raises(building.NotBuilt, match=r"^not built: a\.cu has SHA-256 0; allowed: 1\. Fetch it again\.$"):
        building.library(recipe, 90)


@pytest.mark.parametrize(
    ("problem", "message"),
    [(OSError(errno.ENOSPC, "No space left on device"), "not built: .*No space left"), (KeyboardInterrupt(), "^$")],
)
def test_what_is_cut_off_leaves_nothing(recipe, buildable, tmp_path, monkeypatch, problem, message):
    def build(recipe: building.Recipe, capability: int, nvcc: str, scratch: Path) -> Path:
        (scratch / "half.o").touch()
        raise problem

    monkeypatch.setattr(building, "_build", build)
    with pytest.raises((building.NotBuilt, KeyboardInterrupt), match=message):
        building.library(recipe, 90)
    assert list((tmp_path / "built").iterdir()) == []


@pytest.fixture
def toy(tmp_path, monkeypatch) -> building.Recipe:
    """A recipe of one file, which calls what is left out."""
    monkeypatch.setenv("LABKIT_BUILT", str(tmp_path / "built"))
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path / "sources"))
    text = '#include "size.h"\nextern "C" void toy_gone();\nextern "C" int one() { return SIZE; }\n'
    text += 'extern "C" void two() { toy_gone(); }\n'
    source = sources.Source("toy", "1.0", "MIT", "", {"unit.cu": hashlib.sha256(text.encode()).hexdigest()})
    sources.folder(source).mkdir(parents=True)
    (sources.folder(source) / "unit.cu").write_text(text)
    own = tmp_path / "own.cu"
    own.write_text("__global__ void kernel(int *x) { *x = 1; }\n")
    sha = hashlib.sha256(own.read_bytes()).hexdigest()
    return building.Recipe(source, ("unit.cu",), own, sha, (".",), {"size.h": "#define SIZE 7\n"}, ("-O1",), "toy")


@pytest.mark.skipif(not building._nvcc(), reason=NO_NVCC)
def test_a_library_is_built_once_and_says_what_is_left_out_of_it(toy, monkeypatch):
    path = building.library(toy, 90)
    assert ctypes.CDLL(str(path)).one() == 7
    call = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r}).two()"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode
    assert done.stderr.startswith("not built, but called: toy_gone")
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(building, "_build", None)
    assert building.library(toy, 90) == path
    with pytest.raises(TypeError):  # of another size
        building.library(dataclasses.replace(toy, headers={"size.h": "#define SIZE 8\n"}), 90)


@pytest.mark.skipif(not building._nvcc(), reason=NO_NVCC)
def test_what_does_not_compile_is_named_by_its_first_error(toy):
    with pytest.raises(building.NotBuilt, match=r"^not built: .*unit\.cu.*error.*size\.h") as raised:
        building.library(dataclasses.replace(toy, headers={}), 90)
    assert "\n" not in str(raised.value)
    assert list(building.kept().iterdir()) == []


@fetched
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_our_blocks_are_ggml_s(tmp_path):
    """Its own file, compiled here for the processor, makes of our blocks the weights that we do, bit for bit."""
    root = sources.folder(MADE) / llama_cpp.ROOT
    options = ["-O1", "-fPIC", "-ffp-contract=off", "-w", "-D_GNU_SOURCE"]
    options += [f"-I{root / name}" for name in ("include", "src")]
    made, out = tmp_path / "quants.o", tmp_path / "quants.so"
    subprocess.run(["cc", *options, "-c", str(root / "src" / "ggml-quants.c"), "-o", str(made)], check=True)
    stubs = building.write_stubs([made], "ggml", tmp_path)
    subprocess.run(["cc", "-shared", "-fPIC", str(made), str(stubs), "-o", str(out), "-lm"], check=True)
    library = ctypes.CDLL(str(out))
    weights = torch.randn((4, 1024), generator=torch.Generator().manual_seed(1))
    for format in INTEGERS:
        blocks = formats.quantise(weights, format)
        found = torch.empty_like(weights)
        function = getattr(library, f"dequantize_row_{format[:-1].lower()}{format[-1]}")
        function(ctypes.c_void_p(blocks.data_ptr()), ctypes.c_void_p(found.data_ptr()), ctypes.c_int64(found.numel()))
        assert torch.equal(found, formats.dequantise(blocks, format)), format


@fetched
def test_the_file_that_calls_it_compiles_for_an_h100(recipe, tmp_path):
    nvcc = building._nvcc()
    if not nvcc:
        pytest.skip(NO_NVCC)
    building.prepare(recipe, tmp_path)
    try:
        made = building.compile_unit(recipe, 90, nvcc, recipe.own, tmp_path)
    except building.NotBuilt as problem:
        if "cublas" not in str(problem):
            raise
        pytest.skip(NO_NVCC)
    names = subprocess.run(["nm", "--defined-only", str(made)], capture_output=True, text=True, check=True).stdout
    assert {"lab_product", "lab_routed", "lab_launch", "lab_free"} <= set(names.split())


@pytest.mark.gpu
@fetched
@pytest.mark.parametrize("x", [product_case(), product_case(N=40), product_case(format="BF16", N=40), routed_case()])
def test_it_is_right_and_the_same_in_a_graph(x):
    [variant] = [one for one in variants.of(x) if one.name == variants.LLAMA]
    try:
        trial = variant.prepare(x, torch.device("cuda", torch.cuda.current_device()), 2, 0)
    except building.NotBuilt:
        pytest.skip(NO_NVCC)
    assert trial.check()["y"] <= trial.tolerance["y"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in trial.calls:
            call()
    trial.poison()
    graph.replay()
    torch.cuda.synchronize()
    assert trial.written()
    assert trial.check()["y"] <= trial.tolerance["y"]


def test_headers_of_another_source_are_checked_and_count_as_its_own_files_do(toy, monkeypatch):
    monkeypatch.setattr(building, "_nvcc", lambda: "nvcc")
    monkeypatch.setattr(building, "_release", lambda nvcc: "13.0")
    text = "#define SIZE 7\n"
    other = sources.Source("headers", "1.0", "MIT", "", {"size.h": hashlib.sha256(text.encode()).hexdigest()})
    both = dataclasses.replace(toy, needs=[other])
    assert both.key() != toy.key()
    assert both.key() != dataclasses.replace(toy, needs=[dataclasses.replace(other, version="1.1")]).key()
    with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch headers$"):
        building.library(both, 90)
    sources.folder(other).mkdir(parents=True)
    (sources.folder(other) / "size.h").write_text("#define SIZE 8\n")
    with pytest.raises(building.NotBuilt, match=r"^not built: size\.h has SHA-256 \w{64}; allowed: \w{64}"):
        building.library(both, 90)
