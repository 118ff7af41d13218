"""On a GPU: a chain of GEMVs launched dependently is right, and its check sees one that does not wait."""

import importlib.util

import pytest

from labkit.bench.spec import Case
from labkit.gemv_coalescing import trials

CASE = Case("chain", {"model": "AutoMegaKernel h1024", "dtype": "bf16"})
WAIT = "cuda.gdc_wait()"


def chain(make, **options):
    """Errors of a chain under one CUDA graph, and what is allowed."""
    trial = trials._chain(CASE, "cuda", 1, 0, make, merged=False, **options)
    return trial.check()["worst link"], trial.tolerance["worst link"]


@pytest.mark.gpu
@pytest.mark.parametrize("between", [None, False, True], ids=["alone", "kernels between", "with the trigger between"])
def test_a_chain_reads_what_the_link_before_wrote(between):
    from labkit.gemv.kernels import linear

    options = {} if between is None else {"between": trials._between(between)}
    worst, allowed = chain(linear, **options)
    assert worst <= allowed


@pytest.mark.gpu
def test_a_kernel_that_does_not_wait_is_seen(tmp_path):
    """The control: the production kernel without its wait, else the same."""
    from labkit.gemv import kernels

    if not kernels.has_dependent_launch(trials.torch.device("cuda")):
        pytest.skip("this GPU launches no kernel before the one before has ended")
    source = importlib.util.find_spec("labkit.gemv.kernels").loader.get_source("labkit.gemv.kernels")
    assert source.count(WAIT) == 1
    path = tmp_path / "hasty.py"
    path.write_text(source.replace(WAIT, "pass"))
    spec = importlib.util.spec_from_file_location("hasty", path)
    hasty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hasty)
    worst, allowed = chain(hasty.linear)
    assert not worst <= allowed
