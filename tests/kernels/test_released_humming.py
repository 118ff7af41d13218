"""Humming's products in a layer of ours: what is ours about it is right; what is theirs compiles where nvcc is."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from missing import NO_NVCC, NO_SOURCES, sources_missing

from labkit import sources
from labkit.kernels.experts.inputs import LayerInputs
from labkit.sources import building
from labkit.studies.moe_persistent_grid import humming, variants
from labkit.studies.moe_persistent_grid.models import QWEN35_35B

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H100 = {
    "index": 0, "name": "NVIDIA H100 80GB HBM3", "is_ppu": False, "sm_count": 132, "sm_major": 9, "sm_minor": 0,
    "sm_version": 90, "max_threads_per_block": 1024, "max_threads_per_sm": 2048, "max_registers_per_sm": 65536,
    "l2_cache_size": 50 * 2**20, "l2_cache_size_mb": 50, "l1_cache_size": 2**18, "l1_cache_size_kb": 256,
    "default_smem_size": 49152, "max_smem_size": 232448,
}  # fmt: skip


def sorted_by_hand(ids: torch.Tensor, block_m: int, experts: int) -> tuple[list[int], list[int]]:
    """Rows and the expert of each block, as `moe_align_block_size` is described."""
    flat, rows, owners = ids.flatten().tolist(), [], []
    for e in range(experts):
        own = [slot for slot, expert in enumerate(flat) if expert == e]
        count = -(-len(own) // block_m)
        rows += own + [len(flat)] * (count * block_m - len(own))
        owners += [e] * count
    return rows, owners


@settings(max_examples=15 if DEVICE == "cpu" else 100, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.sampled_from((8, 16, 24, 40, 56, 96)),
    st.integers(0, 2**16), st.booleans(),
)  # fmt: skip
def test_slots_are_sorted_into_blocks_of_any_number_of_rows(T, experts, top_k, block_m, seed, one_expert):
    generator = torch.Generator().manual_seed(seed)
    top_k = min(top_k, experts)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(T)]).int()
    ids = torch.full_like(ids, experts - 1) if one_expert and top_k == 1 else ids
    launches, found = humming.tables(ids.to(DEVICE), block_m, experts)
    for launch in launches:
        launch()
    padded = int(found["num_tokens_padded"])
    rows, owners = sorted_by_hand(ids, block_m, experts)
    if T == 1:  # in the order of the slots
        owners = ids.flatten().tolist()
        rows = [row for slot in range(top_k) for row in [slot] + [top_k] * (block_m - 1)]
    assert padded == len(rows)
    assert found["sorted_ids"][:padded].tolist() == rows
    assert found["expert_ids"].tolist()[: len(owners)] == owners
    assert set(found["expert_ids"].tolist()[len(owners) :]) <= {-1}
    assert set(found["sorted_ids"][padded:].tolist()) <= {T * top_k}


def test_many_blocks_are_more_than_one_look(device):
    """More blocks of 16 than a program looks at at once."""
    T, experts = 8, 1100
    ids = torch.arange(T * 150, dtype=torch.int32).view(T, 150) % experts
    launches, found = humming.tables(ids.to(device), 24, experts)
    for launch in launches:
        launch()
    rows, owners = sorted_by_hand(ids, 24, experts)
    assert found["sorted_ids"][: len(rows)].tolist() == rows
    assert found["expert_ids"][: len(owners)].tolist() == owners


def test_the_sum_is_weighted(device):
    T, top_k, H = 3, 2, 1100
    parts, weights = torch.randn(T * top_k, H).to(device), torch.rand(T, top_k).to(device)
    out = torch.empty(T, H, device=device)
    w = torch.empty(4, H, 8, device=device)
    x = LayerInputs(out, torch.zeros((T, top_k), dtype=torch.int32, device=device), weights, w, w.mT, out)
    humming.total(parts, SimpleNamespace(shape=(T, 4, top_k, H, 8), weights=x.weights, out=out))()
    assert torch.allclose(out, (parts.view(T, top_k, H) * weights[..., None]).sum(1), atol=1e-5)


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
