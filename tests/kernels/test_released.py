"""Released kernels of others, called as the studies call them: right against float64, and changed as they say."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from missing import NO_SOURCES, sources_missing
from torch import Tensor

from labkit import registry, sources
from labkit.bench.spec import Case
from labkit.kernels.experts import int4, reference
from labkit.kernels.experts.inputs import LayerInputs
from labkit.studies.moe_persistent_grid import executorch, sglang, trials
from labkit.studies.moe_persistent_grid import variants as moe_variants
from labkit.studies.moe_persistent_grid.variants import SGLANG_RELEASE
from labkit.studies.state_layout import variants
from labkit.sweep.trial import relative_rmse

pytestmark = pytest.mark.skipif(sources_missing(), reason=NO_SOURCES)

STUDY = registry.load("state_layout")
TINY = [case for case in STUDY.tiny if case.op in ("step", "verify")]
RELEASED = [(case, one) for case in TINY for one in STUDY.variants(case) if one.name.startswith("sglang")]


def names() -> list[str]:
    return [f"{case.op} {case['gate']} {case.params['state']} {one.name}" for case, one in RELEASED]


@pytest.mark.parametrize(("case", "variant"), RELEASED, ids=names())
def test_step_and_verify_of_sglang_are_right_in_both_layouts(case, variant, device, check_right):
    check_right(variant.prepare(case, device, 2, 0))


@pytest.mark.parametrize("release", [variants.BEFORE, variants.AFTER])
def test_a_release_on_states_of_the_other_layout_is_noticed(release, device, monkeypatch, interpretable):
    """The control: what says that 0.5.10 reads [V, K] would say so if it read [K, V]."""
    from labkit.studies.state_layout import sglang

    case = Case("step", {**TINY[0].params, "K": 16, "V": 16})
    variant = next(one for one in STUDY.variants(case) if one.name == variants.released(release))
    monkeypatch.setitem(sglang.V_FIRST, release, not sglang.V_FIRST[release])
    trial = variant.prepare(case, device, 1, 0)
    interpretable()
    assert trial.check()["out"] > 0.1


def test_every_release_that_decodes_is_among_the_variants():
    assert {one.name for _, one in RELEASED} >= {variants.released(name) for name in variants.RELEASES}
    assert {one.name for _, one in RELEASED} >= {variants.released(name, "packed") for name in variants.PACKED}


# ExecuTorch: the pull request's grid, applied to what was released


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both modules with one configuration each, on a GPU of three multiprocessors; operators called directly."""
    three = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: three)
    for module in map(executorch.module, ("tiles", "persistent")):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
        for value in vars(module).values():
            if hasattr(value, "configs"):
                monkeypatch.setattr(value, "configs", value.configs[:1])
    return


def layer(device: str) -> tuple[LayerInputs, Tensor]:
    """A layer of four tokens, and its output in float64."""
    generator = torch.Generator().manual_seed(0)
    T, E, top_k, H, width = 4, 2, 1, 256, 128
    w1, w2 = (
        int4.quantise(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)
        for shape in ((E, 2 * width, H), (E, H, width))
    )
    x = torch.randn((T, H), generator=generator).bfloat16()
    ids = torch.tensor([[0], [1], [1], [0]], dtype=torch.int32)
    weights = torch.rand((T, top_k), generator=generator)
    expected = reference.layer(x, ids, weights, w1, w2)
    parts = [part.to(device) for part in (x, ids, weights)]
    w1, w2 = (int4.Int4(w.packed.to(device), w.scales.to(device)) for w in (w1, w2))
    return LayerInputs(*parts, w1, w2, torch.empty_like(parts[0])), expected


def test_executorch_s_layer_is_right_and_its_grid_changes_no_bit(device, grids):
    item, expected = layer(device)
    found = {grid: executorch.batched(item, int8=True, grid=grid)() for grid in ("tiles", "persistent")}
    assert torch.equal(found["tiles"], found["persistent"])
    assert relative_rmse(found["tiles"].cpu(), expected) < 2e-2
    assert relative_rmse(executorch.per_pair(item)().cpu(), expected) < 2e-2


def test_a_grid_that_leaves_out_tiles_is_noticed(device, grids, monkeypatch):
    """The control of the test above: nobody takes the first tile."""
    wrong = executorch._LOOP.replace("range(tl.program_id(0),", "range(tl.program_id(0) + 1,")

    def one_left_out(tree: ast.Module) -> ast.Module:
        return executorch.persistent(tree)

    assert wrong != executorch._LOOP
    monkeypatch.setattr(executorch, "_LOOP", wrong)
    module = sources.changed(executorch.RELEASE, executorch.MODULE, one_left_out)
    for value in vars(module).values():
        if hasattr(value, "configs"):
            value.configs = value.configs[:1]
    item, _ = layer(device)
    right = executorch.batched(item, int8=True)()
    assert not torch.equal(executorch._bound(module.fused_moe_batched, item, activation_dtype="int8")(), right)


def test_the_change_is_of_launch_and_loop_alone():
    """Of the four batched kernels, everything below the lines that find the tile is as it was released."""
    released, changed = (
        {
            one.name: [ast.unparse(part) for part in ast.walk(one) if isinstance(part, ast.stmt)]
            for one in tree.body
            if isinstance(one, ast.FunctionDef) and one.name.endswith("kernel")
        }
        for tree in (_tree(), executorch.persistent(_tree()))
    )
    assert released.keys() == changed.keys()
    touched = {name for name in released if released[name] != changed[name]}
    assert len(touched) == 4
    for name in touched:
        assert "batched" in name
        finds_tile = {
            "pid = tl.program_id(0)",
            "expert_block_idx = pid // num_n_blocks",
            "n_block = pid % num_n_blocks",
        }
        body = [text for text in released[name][1:] if text not in finds_tile]
        assert [text for text in body if text not in changed[name]] == []


def test_a_release_that_is_written_otherwise_is_refused():
    tree = _tree()
    tree.body = [one for one in tree.body if getattr(one, "name", "") != "_fused_moe_batched_int8_kernel"]
    with pytest.raises(ValueError, match="3 kernels and 4 launches were changed; expected: 4 of each"):
        executorch.persistent(tree)
    with pytest.raises(ValueError, match="grid is 'rows'; allowed: tiles, persistent"):
        executorch.module("rows")


# ExecuTorch in blocks of 16 rows


def test_executorch_s_layer_in_narrow_blocks_is_right(device, grids, monkeypatch):
    module = sources.changed(executorch.RELEASE, executorch.MODULE, executorch.blocks_of_16)
    for value in vars(module).values():
        if hasattr(value, "configs"):
            monkeypatch.setattr(value, "configs", value.configs[:1])
    seen, align = [], module.moe_align_block_size
    monkeypatch.setattr(module, "moe_align_block_size", lambda *args: seen.append(args[1]) or align(*args))
    item, expected = layer(device)
    found = executorch.narrow(item, int8=True)()
    assert seen == [16]
    assert relative_rmse(found.cpu(), expected) < 2e-2
    assert torch.equal(found, executorch.batched(item, int8=True)())  # a row's sum does not depend on its block
    case = Case("layer", product_case("gemm1").params | {"T": 21})
    trial = trials.narrow(case, device, 1, 0, int8=True)
    errors = trial.check()
    assert all(errors[name] <= trial.tolerance[name] for name in errors), errors


def test_rows_of_a_block_are_all_that_is_changed():
    """One number; and that no operator is registered, and no kernel wrapped for one."""
    before, after = (ast.unparse(tree).splitlines() for tree in (_tree(), executorch.blocks_of_16(_tree())))
    registered = [line for line in before if line.startswith("@") and ("register_fake" in line or "triton::" in line)]
    assert len(registered) == 6
    before = [re.sub(r"wrap_triton\((\w+)\)", r"\1", line) for line in before if line not in registered]
    differing = [both for both in zip(before, after, strict=True) if both[0] != both[1]]
    assert differing == [("_BATCHED_BLOCK_M = 64", "_BATCHED_BLOCK_M = 16")]


def test_a_release_without_that_number_is_refused():
    tree = _tree()
    tree.body = [one for one in tree.body if not ast.unparse(one).startswith("_BATCHED_BLOCK_M")]
    with pytest.raises(ValueError, match="0 numbers of rows were changed, which 2 layers use; expected: 1 and 2"):
        executorch.blocks_of_16(tree)


def _tree() -> ast.Module:
    made = sources.source(executorch.RELEASE)
    [path] = made.files
    return ast.parse((sources.folder(made) / path).read_text())


# SGLang: its layer with the lab's sort of the tokens


def routed(dtype: torch.dtype, device: str, T: int = 21, E: int = 5, top_k: int = 3) -> tuple[LayerInputs, Tensor]:
    """A layer whose last expert gets no token, and its output in float64."""
    H, width = 128, 64
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (
        (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)
        for shape in ((E, 2 * width, H), (E, H, width))
    )
    x = torch.randn((T, H), generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:top_k] for _ in range(T)]).int()
    weights = torch.rand((T, top_k), generator=generator)
    expected = reference.layer(x, ids, weights, w1, w2)
    return LayerInputs(*(part.to(device) for part in (x, ids, weights, w1, w2)), torch.empty_like(x)), expected


@pytest.mark.parametrize("tile", [None, (16, 32, 32), (32, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("T", "top_k"), [(1, 3), (21, 3), (21, 2), (70, 1)])
def test_sglang_s_layer_is_right(dtype, tile, T, top_k, device, monkeypatch):
    """In its default configuration and in others, as its files have them."""
    item, expected = routed(dtype, device, T, top_k=top_k)
    config = sources.load(SGLANG_RELEASE, f"{sglang.FOLDER}.fused_moe_triton_config")
    if tile:
        names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
        shipped = {8: dict(zip(names, tile, strict=True)) | {"GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2}}
        monkeypatch.setattr(config, "get_moe_configs", lambda *sizes, down_moe=False, **how: shipped)
    assert relative_rmse(sglang.layer(item)().cpu(), expected) < 2e-3
    found = sglang.configuration(item)
    assert found["shipped"] is (tile is not None)
    assert found["gemm1"]["BLOCK_SIZE_M"] == (tile[0] if tile else 16 if T <= 5 else 64)


def test_sglang_s_layer_without_a_slot_is_noticed(device, monkeypatch):
    """The control: one row of the sorted ones is padding."""
    item, expected = routed(torch.float32, device)

    def one_left_out(ids: Tensor, block_m: int, experts: int) -> tuple[Tensor, ...]:
        slots, owners, padded = sglang.aligned(ids, block_m, experts)
        return torch.where(slots == 4, ids.numel(), slots), owners, padded

    monkeypatch.setattr(sglang._modules()[0], "moe_align_block_size", one_left_out)
    assert not relative_rmse(sglang.layer(item)().cpu(), expected) < 2e-2


@pytest.mark.parametrize(("T", "top_k", "experts", "block_m"), [(1, 8, 256, 16), (40, 2, 8, 64), (33, 3, 5, 32)])
def test_tables_are_as_long_as_sglang_s_and_sorted(T, top_k, experts, block_m, device):
    """Its kernels have as many programs as the tables have blocks; between the products are as many rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(T)]).int().to(device)
    slots, owners, padded = sglang.aligned(ids, block_m, experts)
    count = T * top_k
    rows = count * block_m if count < experts + 1 else count + (experts + 1) * (block_m - 1)
    assert len(slots) // block_m == len(owners) == -(-(-(-rows // 4) * 4) // block_m)
    live = slots[: int(padded)]
    assert sorted(live[live < count].tolist()) == list(range(count))
    assert all(owners[place // block_m] == ids.flatten()[slot] for place, slot in enumerate(live) if slot < count)
    assert set(owners[int(padded) // block_m :].tolist()) <= {-1}


@pytest.mark.parametrize(("gpu", "E", "width", "shipped"), [
    ("NVIDIA H200", 256, 512, True), ("NVIDIA H200", 8, 14336, True), ("NVIDIA H200", 128, 768, True),
    ("NVIDIA H100 80GB HBM3", 128, 768, True), ("NVIDIA H100 80GB HBM3", 256, 512, False),
    ("NVIDIA H100 80GB HBM3", 8, 14336, False), ("another", 128, 768, False),
])  # fmt: skip
def test_configurations_are_those_that_are_shipped_for_a_gpu(gpu, E, width, shipped, monkeypatch):
    config = sources.load(SGLANG_RELEASE, f"{sglang.FOLDER}.fused_moe_triton_config")
    monkeypatch.setattr(config, "get_device_name", config.get_device_name)
    sglang.choose_for(gpu)
    x = SimpleNamespace(x=torch.empty((128, 64), dtype=torch.bfloat16), ids=torch.empty((128, 8)))
    x.w1 = torch.empty((E, 2 * width, 64), dtype=torch.bfloat16, device="meta")
    found = sglang.configuration(x)
    config.get_moe_configs.cache_clear()
    assert found["shipped"] is shipped
    assert (found["gemm2"] is not None) is shipped


# ExecuTorch's products alone


def product_case(op: str) -> Case:
    shape = {"model": "tiny", "E": 2, "H": 128, "I": 128, "top_k": 1, "T": 5, "routing": "one expert"}
    return Case(op, shape | {"weights": "INT4", "activations": "bf16"})


@pytest.mark.parametrize("op", ["gemm1", "gemm2"])
def test_executorch_s_products_alone_are_right_whatever_the_launch_decides(op, device, grids):
    options = [one for one in moe_variants.RELEASED_GEMMS.values() if one["int8"]]  # products of bf16 need a GPU
    options = [one for one in options if not one.get("filled")]  # nothing says here how many programs fit
    bits = set()
    for how in options:
        trial = trials.released_gemm(product_case(op), device, 1, 0, **how)
        errors = trial.check()
        assert trial.written()
        assert all(errors[name] <= trial.tolerance[name] for name in errors), (how, errors)
        found = trial.facts()
        assert found["live"] < found["blocks"]
        per_block = found["tiles"] // (found["live"] if how.get("live") else found["blocks"])
        assert found["tiles"] == per_block * (found["live"] if how.get("live") else found["blocks"])
        assert found["programs"] == (found["tiles"] if how["grid"] == "tiles" else min(found["tiles"], 3))
        bits.add(found["bits"])
    assert len(bits) == 1


def test_products_of_a_case_are_tuned_once_for_a_grid(device, grids, monkeypatch):
    """Else the same code, launched otherwise, might be other code."""
    anew = []
    monkeypatch.setattr(trials, "tune_anew", lambda modules: anew.extend(modules) or modules)
    monkeypatch.setattr(trials, "_described", lambda kernel: {})
    found = SimpleNamespace(args={"C": torch.zeros(1)}, config={}, blocks=1, live=1)
    monkeypatch.setattr(executorch, "product", lambda *args: found)
    monkeypatch.setattr(executorch, "launcher", lambda *args, **how: lambda: None)
    case = Case("gemm2", product_case("gemm2").params | {"T": 6})  # none of the others
    for how in moe_variants.RELEASED_GEMMS.values():
        trials.released_gemm(case, device, 1, 1, **how)
    assert len(anew) == 4


def test_a_product_whose_last_live_block_is_left_off_is_noticed(device, grids, monkeypatch):
    """The control of the test above."""
    counted = executorch.product

    def fewer(*args: object) -> executorch.Product:
        found = counted(*args)
        return replace(found, live=found.live - 1)

    monkeypatch.setattr(executorch, "product", fewer)
    trial = trials.released_gemm(product_case("gemm1"), device, 1, 0, "tiles", True, live=True)
    trial.check()
    assert not trial.written()
