"""Humming's own products: they compile where nvcc is, and a file of it that was changed is refused."""

import os

import pytest
import torch
from missing import NO_NVCC, NO_SOURCES, sources_missing

from labkit import sources
from labkit.sources import building
from labkit.studies.moe_persistent_grid import humming, variants
from labkit.studies.moe_persistent_grid.models import QWEN35_35B

H100 = {
    "index": 0, "name": "NVIDIA H100 80GB HBM3", "is_ppu": False, "sm_count": 132, "sm_major": 9, "sm_minor": 0,
    "sm_version": 90, "max_threads_per_block": 1024, "max_threads_per_sm": 2048, "max_registers_per_sm": 65536,
    "l2_cache_size": 50 * 2**20, "l2_cache_size_mb": 50, "l1_cache_size": 2**18, "l1_cache_size_kb": 256,
    "default_smem_size": 49152, "max_smem_size": 232448,
}  # fmt: skip


@pytest.mark.skipif(sources_missing(variants.HUMMING_RELEASE), reason=NO_SOURCES)
def test_its_products_compile_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="Humming needs cuda-bindings, which PyTorch for CUDA brings")
    if not building._nvcc():
        pytest.skip(NO_NVCC)
    monkeypatch.setitem(os.environ, "HUMMING_CACHE_DIR", str(tmp_path))
    humming._modules()
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    E, H, width = QWEN35_35B.experts, QWEN35_35B.hidden, QWEN35_35B.width
    assert set(H100) == set(humming.ASKED)
    for shape in ((E, 2 * width, H), (E, H, width)):
        humming.compile_for(shape, 8 * 128, H100)
    made = list(tmp_path.glob("*/kernel.cubin"))
    assert len(made) == 2
    assert all(one.stat().st_size > 10_000 for one in made)


@pytest.mark.skipif(sources_missing(variants.HUMMING_RELEASE), reason=NO_SOURCES)
def test_a_changed_file_of_any_kind_is_refused(tmp_path, monkeypatch):
    made = sources.source(variants.HUMMING_RELEASE)
    for path in made.files:
        (tmp_path / made.name / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made.name / path).write_bytes((sources.folder(made) / path).read_bytes())
    changed = next(path for path in made.files if path.endswith(".cuh"))
    with open(tmp_path / made.name / changed, "a") as file:
        file.write("//")
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path))
    humming._modules.cache_clear()
    with pytest.raises(ImportError, match=r"\.cuh has SHA-256 [0-9a-f]{64}; allowed: .* Fetch it again\."):
        humming._modules()
