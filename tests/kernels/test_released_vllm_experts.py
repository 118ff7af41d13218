"""vLLM's expert layer in Triton, called as study 04 calls it: right against float64, bf16's way and INT4's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from missing import NO_SOURCES
from torch import Tensor

from labkit import sources
from labkit.kernels.experts import int4, reference
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import Int4
from labkit.studies.moe_persistent_grid import study, trials, variants, vllm
from labkit.sweep.trial import relative_rmse

pytestmark = pytest.mark.skipif(not sources.is_fetched(sources.source(variants.VLLM_RELEASE)), reason=NO_SOURCES)

TILES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")


def routed(
    dtype: torch.dtype, device: str, T: int = 21, E: int = 5, top_k: int = 3, quantised: bool = False
) -> tuple[LayerInputs, Tensor]:
    """A layer whose last expert gets no token, and its output in float64; quantised: INT4 weights."""
    H, width = 256, 128
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (
        torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in ((E, 2 * width, H), (E, H, width))
    )
    w1, w2 = (int4.quantise(w) if quantised else w.to(dtype) for w in (w1, w2))
    x = torch.randn((T, H), generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:top_k] for _ in range(T)]).int()
    weights = torch.rand((T, top_k), generator=generator)
    expected = reference.layer(x, ids, weights, w1, w2)
    w1, w2 = (Int4(*(part.to(device) for part in w)) if quantised else w.to(device) for w in (w1, w2))
    return LayerInputs(*(part.to(device) for part in (x, ids, weights)), w1, w2, torch.empty_like(x)), expected


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("T", "E", "top_k"), [(1, 5, 3), (1, 9, 2), (21, 5, 2), (70, 5, 1)])
def test_the_layer_is_right(dtype, quantised, T, E, top_k, device):
    """(1, 9, 2) is so few slots that weights which are not quantised are sorted by nobody."""
    item, expected = routed(dtype, device, T, E, top_k, quantised)
    assert relative_rmse(vllm.layer(item)().cpu(), expected) < 2e-3
    found = vllm.configuration(item)
    assert found["shipped"] is False
    assert found["tile"]["BLOCK_SIZE_M"] == {1: (16, 16), 21: (16, 32), 70: (32, 64)}[T][quantised]


@pytest.mark.parametrize("tile", [(16, 32, 32), (64, 64, 128)])
def test_other_tiles_are_right_as_files_have_them(tile, device, monkeypatch):
    item, expected = routed(torch.float32, device)
    shipped = dict(zip(TILES, tile, strict=True)) | {"GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(vllm._module(), "get_moe_configs", lambda *sizes: {8: shipped, 64: {}})
    assert relative_rmse(vllm.layer(item)().cpu(), expected) < 2e-3
    assert vllm.configuration(item) == {"tile": shipped, "shipped": True}


@pytest.mark.parametrize("quantised", [False, True])
def test_a_slot_that_is_left_out_is_noticed(quantised, device, monkeypatch):
    """The control: one row of the sorted ones is padding."""
    item, expected = routed(torch.float32, device, quantised=quantised)

    def one_left_out(*args: object, **how: object) -> tuple[Tensor, ...]:
        slots, owners, padded = vllm.aligned(*args, **how)
        return torch.where(slots == 4, item.ids.numel(), slots), owners, padded

    monkeypatch.setattr(vllm._module(), "moe_align_block_size", one_left_out)
    # New memory is NaN: it may hold the very row that an earlier test left there.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = vllm.layer(item)().cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not relative_rmse(found, expected) < 2e-2


@pytest.mark.parametrize("wrong", ["nibbles", "zero point"])
def test_weights_that_are_packed_otherwise_are_noticed(wrong, device):
    """The control of the INT4 layer: nibbles the other way round, or the eight of their zero point left out."""
    item, expected = routed(torch.float32, device, quantised=True)
    packed = item.w1.packed
    packed = packed >> 4 | packed << 4 if wrong == "nibbles" else packed ^ 0x88
    other = replace(item, w1=Int4(packed, item.w1.scales))
    assert not relative_rmse(vllm.layer(other)().cpu(), expected) < 0.1


@pytest.mark.parametrize(("T", "top_k", "experts", "block_m"), [(1, 8, 256, 16), (40, 2, 8, 64), (33, 3, 5, 32)])
def test_tables_have_as_many_blocks_as_vllm_s(T, top_k, experts, block_m, device):
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(T)]).int().to(device)
    slots, owners, padded = vllm.aligned(ids, block_m, experts)
    count = T * top_k
    rows = min(count * block_m, count + experts * (block_m - 1)) if count < experts else count + experts * (block_m - 1)
    assert len(slots) // block_m == len(owners) == -(-rows // block_m)
    live = slots[: int(padded)]
    assert sorted(live[live < count].tolist()) == list(range(count))
    assert all(owners[place // block_m] == ids.flatten()[slot] for place, slot in enumerate(live) if slot < count)


@pytest.mark.parametrize(("gpu", "E", "width", "shipped"), [
    ("NVIDIA H200", 128, 768, True), ("NVIDIA H200", 512, 512, True), ("NVIDIA H200", 8, 14336, True),
    ("NVIDIA H200", 256, 512, False), ("NVIDIA H100 80GB HBM3", 256, 512, True),
    ("NVIDIA H100 80GB HBM3", 512, 512, True), ("NVIDIA H100 80GB HBM3", 128, 768, False),
    ("NVIDIA H100 80GB HBM3", 8, 14336, False), ("another", 256, 512, False),
])  # fmt: skip
def test_configurations_are_those_that_are_shipped_for_a_gpu(gpu, E, width, shipped, monkeypatch):
    layers = vllm._module()
    monkeypatch.setattr(layers, "get_device_name_as_file_name", layers.get_device_name_as_file_name)
    vllm.choose_for(gpu)
    found = vllm.configuration(_of(E, width))
    of_int4 = vllm.configuration(_of(E, width, int4=True))
    layers.get_moe_configs.cache_clear()
    assert found["shipped"] is shipped
    assert of_int4 == {"tile": {"BLOCK_SIZE_M": 64, "GROUP_SIZE_M": 1, "SPLIT_K": 1}, "shipped": False}


def _of(E: int, width: int, int4: bool = False) -> SimpleNamespace:
    return SimpleNamespace(shape=(128, E, 8, 2048, width), int4=int4, x=torch.empty(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("x", study.STUDY.tiny[:2], ids=["fp32", "INT4"])
def test_its_trial_is_within_its_tolerance_and_says_its_configuration(x, device):
    found = trials.vllm_layer(x, device, 2, 0)
    errors = found.check()
    assert all(errors[name] <= found.tolerance[name] for name in errors), errors
    assert found.facts()["config"]["shipped"] is False
    assert variants.VLLM in {line.name for line in variants.lines(x)}
