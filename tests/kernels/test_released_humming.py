"""Humming's products in a layer of ours: what is ours about it is right."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels.experts.inputs import LayerInputs
from labkit.studies.moe_persistent_grid import humming

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    humming.total(parts, SimpleNamespace(shape=(T, 4, top_k, H, 8), ids=x.ids, weights=x.weights, out=out))()
    assert torch.allclose(out, (parts.view(T, top_k, H) * weights[..., None]).sum(1), atol=1e-5)
