"""On a GPU: a chain of GEMVs launched dependently is right, and its check sees one that does not wait."""

import importlib.util
from itertools import pairwise

import pytest

from labkit.bench.spec import Case
from labkit.studies.gemv_coalescing import trials

CASE = Case("chain", {"model": "AutoMegaKernel h1024", "dtype": "bf16"})
WAIT = "cuda.gdc_wait()"
TRIGGER = "tl.extra.cuda.gdc_launch_dependents()"  # without the wait before it


def chain(make, **options):
    """Errors of a chain under one CUDA graph, and what is allowed."""
    trial = trials._chain(CASE, "cuda", 1, 0, make, merged=False, **options)
    return trial.check()["worst link"], trial.tolerance["worst link"]


def without_wait(name, wait, count, instead, folder):
    """A module of kernels, else the same, in which another statement is in the place of each wait."""
    source = importlib.util.find_spec(name).loader.get_source(name)
    assert source.count(wait) == count
    path = folder / "hasty.py"
    path.write_text(source.replace(wait, instead))
    spec = importlib.util.spec_from_file_location("hasty", path)
    hasty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hasty)
    return hasty


def skip_without_dependent_launch():
    from labkit.kernels.target import has_dependent_launch

    if not has_dependent_launch(trials.torch.device("cuda")):
        pytest.skip("this GPU launches no kernel before the one before has ended")


@pytest.mark.gpu
@pytest.mark.parametrize("between", [None, False, True], ids=["alone", "kernels between", "with the trigger between"])
def test_a_chain_reads_what_the_link_before_wrote(between):
    from labkit.kernels.gemv.gemv import linear

    options = {} if between is None else {"between": trials._between(between)}
    worst, allowed = chain(linear, **options)
    assert worst <= allowed


@pytest.mark.gpu
def test_a_kernel_that_does_not_wait_is_seen(tmp_path):
    """The control: the production kernel without its wait, else the same."""
    skip_without_dependent_launch()
    hasty = without_wait("labkit.kernels.gemv.gemv", WAIT, 1, "pass", tmp_path)
    worst, allowed = chain(hasty.linear)
    assert not worst <= allowed


LINKS = 12


def products(kernels, **how):
    """What a chain of products leaves, each of what the one before wrote, under one CUDA graph."""
    import torch

    from labkit.kernels.gguf import formats
    from labkit.kernels.gguf.choose import TileChoice
    from labkit.studies.batched_ffn import trials as ffn

    W = formats.pack(ffn.blocks(4096, 4096, "Q8_0", torch.device("cuda"), 1), "Q8_0")
    xs = [torch.randn((2, 4096), generator=torch.Generator("cuda").manual_seed(2), device="cuda").bfloat16()]
    xs += [torch.empty_like(xs[0]) for _ in range(LINKS)]
    chained = [kernels.tensor_core(W, x, y, TileChoice(**how)) for x, y in pairwise(xs)]
    for launch in chained:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in chained:
            launch()
    for y in xs[1:]:
        y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return xs[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_a_chain_of_batched_products_has_the_bits_of_one_that_waits(ahead):
    from labkit.kernels.gguf import products as kernels

    assert products(kernels, ahead=ahead, dependent=True).equal(products(kernels, ahead=0, dependent=False))


@pytest.mark.gpu
def test_batched_products_that_do_not_wait_are_seen(tmp_path):
    from labkit.kernels.gguf import products as kernels

    skip_without_dependent_launch()
    hasty = without_wait("labkit.kernels.gguf.products", "wait_for_inputs(DEPENDENT)", 2, TRIGGER, tmp_path)
    assert not products(hasty, ahead=1, dependent=True).equal(products(kernels, ahead=0, dependent=False))


LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 4, 32, 4, 1024, 512, 48


def routed_layers(routed, at_once, **how):
    """What a chain of routed layers leaves, each of what the one before wrote: in one CUDA graph, or one by one."""
    import torch

    from labkit.kernels.gguf import experts
    from labkit.kernels.gguf.choose import TileChoice
    from labkit.studies.batched_ffn import trials as ffn

    device = torch.device("cuda")
    torch.manual_seed(3)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    raw = [
        ffn.blocks(EXPERTS * rows, K, "Q8_0", device, i).unflatten(0, (EXPERTS, rows))
        for i, (rows, K) in enumerate(shapes)
    ]
    held, table = experts.pack(*raw, "Q8_0"), torch.arange(EXPERTS, dtype=torch.int32, device=device)
    x, launches = torch.randn((TOKENS, HIDDEN), device=device).bfloat16(), []
    for _ in range(LAYERS):
        ids = torch.rand((TOKENS, EXPERTS), device=device).topk(TOP_K).indices.int()
        work = routed.Work.of(x, ids, torch.ones((TOKENS, TOP_K), device=device), WIDTH)
        launches += [
            *routed.grouped_indexed(held, table, work, TileChoice(**how), matrix=True),
            routed.weighted_sum(work),
        ]
        x = work.y
    for launch in launches:
        launch()
        torch.cuda.synchronize()
    if at_once:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        for launch in launches:  # order, tiles, intermediate and final results: nothing of the first time is left
            for name in ("order", "tiles", "y"):
                if name in launch.args:
                    launch.args[name].fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"ahead": 3}, {"ahead": 5}], ids=str)
def test_a_chain_of_routed_layers_has_the_bits_of_one_that_waits(how):
    from labkit.kernels.gguf import routed

    found = routed_layers(routed, True, dependent=True, **how)
    assert found.isfinite().all()
    assert found.any()
    assert found.equal(routed_layers(routed, False))


@pytest.mark.gpu
def test_routed_layers_that_do_not_wait_are_seen(tmp_path):
    from labkit.kernels.gguf import routed

    skip_without_dependent_launch()
    hasty = without_wait("labkit.kernels.gguf.routed", "wait_for_inputs(DEPENDENT)", 4, TRIGGER, tmp_path)
    assert not routed_layers(hasty, True, dependent=True, ahead=3).equal(routed_layers(routed, False))
