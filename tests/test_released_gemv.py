"""SGLang's and vLLM's own GEMVs: what is built of what, that it compiles, what is refused, and results."""

import ctypes
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from missing import NO_DSL, NO_NVCC, NO_SOURCES

from labkit import isolated, sources
from labkit.bench.sha import covered, kernel_sha
from labkit.bench.spec import Case
from labkit.sources import building
from labkit.studies.gemv_coalescing import sglang, study, trials, vllm
from labkit.studies.gemv_coalescing import variants as names
from labkit.sweep import run as sweep
from labkit.sweep.trial import Shared

SGLANG, HEADERS, VLLM = map(sources.source, (sglang.SOURCE, sglang.HEADERS, vllm.SOURCE))


def fetched(*needed: sources.Source) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not all(map(sources.is_fetched, needed)), reason=NO_SOURCES)


def gemv_case(N: int, K: int) -> Case:
    return Case("gemv", {"N": N, "K": K, "dtype": "bf16"})


def variant_of(name: str, N: int = 64, K: int = 2560):
    return next(one for one in study.variants(gemv_case(N, K)) if one.name == name)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Without a GPU: what is asked is asked of an H100."""
    monkeypatch.setattr(trials, "shared", Shared())
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_a_row_s_hash_is_of_the_release_and_of_what_calls_it():
    assert names.SGLANG_RELEASES == (sglang.SOURCE, sglang.HEADERS)
    assert names.VLLM_RELEASES == (vllm.SOURCE,)
    source = variant_of(names.SGLANG).source
    assert {f"source:{one}" for one in names.SGLANG_RELEASES} < set(source)
    assert {"FLAGS", "INCLUDES", "GLUE_SHA", "LINK", "recipe"} <= {one.rpartition(":")[2] for one in covered(source)}
    glue = Path(sglang.__file__).with_suffix(".cu")
    assert hashlib.sha256(glue.read_bytes()).hexdigest() == sglang.GLUE_SHA
    hashes = {kernel_sha(variant_of(name).source) for name in (names.SGLANG, *names.VLLM, names.OURS)}
    assert len(hashes) == 4


# SGLang


@fetched(SGLANG)
def test_sglang_is_timed_at_the_shapes_that_it_takes():
    for N, K in study.PEER_SHAPES:
        timed = names.SGLANG in {one.name for one in study.variants(gemv_case(N, K))}
        assert timed == sglang.takes(N, K)


@fetched(SGLANG)
@pytest.mark.parametrize(
    ("N", "K", "instance"), [(1024, 2560, "1024, 2560, 1, 2, 8, true"), (9216, 2560, "9216, 2560, 2, 2, 8, true")]
)
def test_the_release_chooses_the_instance(N, K, instance):
    recipe = sglang.recipe(N, K, 90)
    assert f"#define KERNEL sglang::HopperBf16GemvKernel<{instance}>::run\n" in recipe.headers["released_kernel.h"]
    assert "-DSGL_CUDA_ARCH=900" in recipe.flags


@fetched(SGLANG)
def test_before_hopper_it_would_not_start_early(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert "true" not in sglang.recipe(1024, 2560, 89).headers["released_kernel.h"]


@fetched(SGLANG)
@pytest.mark.parametrize(
    ("shape", "capability", "message"),
    [
        ((152064, 2560), (9, 0), "152064 × 2560: SGLang leaves this shape to cuBLAS"),
        ((64, 2560), (8, 0), r"compute capability 8\.x; SGLang takes its GEMV for 9, 12"),
    ],
)
def test_what_its_engine_does_not_hand_to_it_is_refused(monkeypatch, shape, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    W = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=message):
        sglang.gemv(W, W[0], W[:, 0])


@fetched(SGLANG)
@pytest.mark.parametrize("wrong", ["dtype", "stride", "place"])
def test_what_it_would_read_wrongly_is_refused(wrong):
    W, x, y = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 512), (512 + 8,), (64,)))
    x = {"dtype": x[:512].half(), "stride": torch.zeros(1024, dtype=torch.bfloat16)[::2], "place": x[1:513]}[wrong]
    with pytest.raises(ValueError, match="a tensor is not bf16, contiguous and at a multiple of 16 bytes"):
        sglang.gemv(W, x, y)


def test_without_its_files_it_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path))
    W = torch.empty((64, 512), dtype=torch.bfloat16, device="meta")
    with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch sglang$"):
        sglang.gemv(W, W[0], W[:, 0])
    with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch apache-tvm-ffi$"):
        sglang.library(64, 512, (9, 0))
    for call in names.VLLM.values():
        with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch vllm$"):
            getattr(vllm, call)(W, W[0])


@fetched(SGLANG, HEADERS)
@pytest.mark.skipif(not building._nvcc(), reason=NO_NVCC)
def test_it_compiles_for_an_h100_and_a_launch_that_fails_is_noticed(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("LABKIT_BUILT", str(tmp_path))
    path = sglang.library(64, 512, (9, 0))
    assert sglang.library(64, 512, (9, 0)) == path
    function = ctypes.CDLL(str(path)).lab_gemv
    if not torch.cuda.is_available():
        assert function(0, None, ctypes.c_int64(64), ctypes.c_int64(512), None, None, None)
        assert "hopper_bf16_gemv.cuh" in (said := capfd.readouterr().err)
        assert "CUDA error" in said


@fetched(SGLANG, HEADERS)
@pytest.mark.skipif(not building._nvcc(), reason=NO_NVCC)
def test_the_stream_is_its_own_where_another_library_names_one_too(monkeypatch, tmp_path):
    """tvm's own package is loaded for all to see. Without -Bsymbolic it is asked, and a graph records nothing."""
    monkeypatch.setenv("LABKIT_BUILT", str(tmp_path))
    (tmp_path / "other.c").write_text("int asked; void *TVMFFIEnvGetStream(int a, int b) { asked++; return 0; }\n")
    other = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "other.c", "-o", other], check=True)
    build = sglang.recipe(64, 512, 90)
    for link, asked in ((build.link, 0), ((), 1)):
        path = building.library(replace(build, link=link), 90)
        calls = f"""
import ctypes
other = ctypes.CDLL({str(other)!r}, ctypes.RTLD_GLOBAL)
ctypes.CDLL({str(path)!r}).lab_gemv(0, None, ctypes.c_int64(64), ctypes.c_int64(512), None, None, None)
print(ctypes.c_int.in_dll(other, "asked").value)
"""
        said = subprocess.run([sys.executable, "-c", calls], capture_output=True, text=True, check=True).stdout
        assert int(said) == asked


def test_it_is_built_before_anything_is_timed():
    """Of vLLM's nothing would be kept, and torch.compile and FlagGems would choose by times beside other calls."""
    calls = sweep.calls_of(study.STUDY, [gemv_case(64, 2560), gemv_case(152064, 2560), gemv_case(8, 8)])
    assert [(call.variant, call.case) for call in calls] == [(names.SGLANG, gemv_case(64, 2560).key)]
    anew = sweep.first_calls(study.STUDY, [gemv_case(64, 2560), gemv_case(4096, 4096)])
    assert [(call.variant, call.case) for call in anew] == [(name, gemv_case(64, 2560).key) for name in names.VLLM]


# vLLM


@fetched(VLLM)
@pytest.mark.parametrize("call", names.VLLM.values())
def test_vllm_refuses_in_its_own_words(call):
    """Its files load with the stubs alone, and ours is a call that it knows."""
    with pytest.raises(ValueError, match=r"(?i)\bcuda\b"):
        getattr(vllm, call)(torch.zeros((64, 512), dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16))


@fetched(VLLM)
def test_its_rules_take_every_shape_that_is_timed():
    module = sources.load(vllm.SOURCE, f"{vllm.FOLDER}.skinny_gemm")
    for N, K in study.PEER_SHAPES:
        config = module.shape_dynamic_skinny_gemm._config(1, N, K)
        assert N % config.outputs_per_block == 0
        assert K % (config.block_size * config.vector_width) == 0
    low = sources.load(vllm.SOURCE, f"{vllm.FOLDER}.ll_bf16").ll_bf16_gemm_c1_pdl_kernel
    assert {low.dispatch(M=1, K=K, N=N).backend for N, K in study.PEER_SHAPES} == {"dotprod"}


def compiled_for_hopper(N: int, K: int) -> list[str]:
    """Compiles both for a shape, as their first calls would, and says what the rules chose."""
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    low = sources.load(vllm.SOURCE, f"{vllm.FOLDER}.ll_bf16").ll_bf16_gemm_c1_pdl_kernel
    low.compile(key := low.dispatch(M=1, K=K, N=N, output_dtype=torch.bfloat16))
    skinny = sources.load(vllm.SOURCE, f"{vllm.FOLDER}.skinny_gemm").shape_dynamic_skinny_gemm
    skinny._compile(torch.bfloat16, config := skinny._config(1, N, K), False)
    return [repr(key), repr(config)]


@fetched(VLLM)
@pytest.mark.skipif(not find_spec("cutlass"), reason=NO_DSL)
def test_vllm_s_compile_for_an_h100():
    env = {"CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    found = isolated.call("test_released_gemv:compiled_for_hopper", 64, 2560, env=env)
    assert ["dotprod" in found[0], "num_rows=1" in found[1]] == [True, True]


# Results, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", [names.SGLANG, *names.VLLM])
def test_results_are_right(name):
    try:
        trial = variant_of(name).prepare(gemv_case(64, 2560), "cuda", 2, 0)
        errors = trial.check()
    except sources.NotFetched:
        pytest.skip(NO_SOURCES)
    except building.NotBuilt:
        pytest.skip(NO_NVCC)
    except ImportError:
        pytest.skip(NO_DSL)
    assert errors["y"] <= trial.tolerance["y"]
