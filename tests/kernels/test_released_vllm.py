"""vLLM's own kernels before and after their change of layout: right against the token-by-token float64 reference."""

import ast
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from missing import NO_SOURCES

from labkit import registry, sources
from labkit.bench.spec import Case
from labkit.kernels.gated_delta import reference
from labkit.kernels.gated_delta.chunked import ExtendInputs
from labkit.studies.state_layout import variants, vllm
from labkit.sweep.trial import relative_rmse, tune_anew

pytestmark = pytest.mark.skipif(
    not all(sources.is_fetched(sources.source(name)) for name in vllm.V_FIRST), reason=NO_SOURCES
)
STUDY = registry.load("state_layout")
TINY = [case for case in STUDY.tiny if case.op == "step"]
STEPS = [(case, one) for case in TINY for one in STUDY.variants(case) if one.name.startswith("vllm")]
TOLERANCE = 2e-3  # of fp16, in which it keeps w, u and the states between chunks


@pytest.fixture
def chunked(monkeypatch):
    """What Triton's interpreter, or a CPU, cannot do in its modules is done in its own words."""
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    for name in vllm.V_FIRST:
        sources.load(name, vllm.CHUNK)
    for name, module in list(sys.modules.items()):
        if name.startswith("labkit_sources.vllm_0_1"):
            for word in ("exp", "log"):
                if getattr(module, word, None) is getattr(tl, word):
                    monkeypatch.setattr(module, word, lambda x, word=word: getattr(tl, word)(x))
            for one in tune_anew([module]):
                monkeypatch.setattr(one, "configs", one.configs[:1])


def inputs(device: str, lengths: tuple[int, ...] = (5, 70, 17), K: int = 32, V: int = 16) -> ExtendInputs:
    """Two value heads of a query head; states [N, HV, V, K]."""
    generator = torch.Generator().manual_seed(0)
    T, H, HV = sum(lengths), 1, 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    initial = random(len(lengths), HV, V, K)
    return ExtendInputs(
        q=random(T, H, K).half(), k=random(T, H, K).half(), v=random(T, HV, V).half(), g=-random(T, HV).abs(),
        beta=torch.sigmoid(random(T, HV)), cu_seqlens=torch.tensor([0, *accumulate(lengths)], device=device),
        initial=initial, final=torch.empty_like(initial), out=torch.empty(0), scale=K**-0.5,
    )  # fmt: skip


def errors(x: ExtendInputs, source: str, v_first: bool) -> dict[str, float]:
    """v_first: the layout that the release is handed."""
    o, S = reference.extend(x.initial, x.q, x.k, x.v, x.g.double().exp(), x.beta, x.scale, x.cu_seqlens)
    handed = x if v_first else replace(x, initial=x.initial.transpose(-1, -2).contiguous())
    out, final = vllm.extend(handed, source, x.cu_seqlens)()
    final = final if v_first else final.transpose(-1, -2)
    return {"out": relative_rmse(out[0], o), "state": relative_rmse(final.reshape(S.shape), S)}


@pytest.mark.parametrize("source", vllm.V_FIRST)
def test_extend_is_right_in_the_layout_of_its_release(source, device, chunked):
    found = errors(inputs(device), source, vllm.V_FIRST[source])
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("source", vllm.V_FIRST)
def test_states_of_the_other_layout_are_noticed(source, device, chunked):
    """The control: K = V, so that only what is read tells the layouts apart."""
    found = errors(inputs(device, K=32, V=32), source, not vllm.V_FIRST[source])
    assert min(found.values()) > 0.1, found


def test_its_kernels_that_make_descriptors_are_given_memory(monkeypatch):
    given = []
    monkeypatch.setattr(vllm.triton, "set_allocator", given.append)
    monkeypatch.setattr(vllm.sources, "load", lambda *names: SimpleNamespace(chunk_gated_delta_rule=None))
    x = inputs("cpu")
    vllm.extend(x, "vllm-0.16.0", x.cu_seqlens)
    [allocate] = given
    assert allocate(384, 128, None).nbytes == 384


def test_the_releases_differ_in_the_layout_alone():
    """Files of both: what is not the same is what has the state in it; of decode see `test_released`."""
    one, other = (sources.source(name).files for name in vllm.V_FIRST)
    assert one.keys() == other.keys()
    changed = {path.rpartition("/")[2] for path in one if one[path] != other[path]}
    assert changed == {"chunk.py", "chunk_delta_h.py", "chunk_o.py", "fused_recurrent.py"}


# decode


@pytest.mark.parametrize(
    ("case", "variant"), STEPS, ids=[f"{case['gate']} {case.params['state']} {one.name}" for case, one in STEPS]
)
def test_a_step_is_right_in_both_layouts(case, variant, device, check_right):
    check_right(variant.prepare(case, device, 2, 0))


def test_every_release_has_its_steps():
    names = {one.name for _, one in STEPS}
    assert names == {name for source in variants.OWN if source.startswith("vLLM") for name in variants.OWN[source]}


@pytest.mark.parametrize("gate", ["GDN", "KDA"])
@pytest.mark.parametrize("release", [variants.VLLM_BEFORE, variants.VLLM_AFTER])
def test_vllm_s_step_on_states_of_the_other_layout_is_noticed(release, gate, device, monkeypatch, interpretable):
    params = next(case.params for case in TINY if case.op == "step" and case["gate"] == gate)
    case = Case("step", {**params, "K": 16, "V": 16})
    variant = next(one for one in STUDY.variants(case) if one.name == variants.released(release))
    monkeypatch.setitem(vllm.V_FIRST, release, not vllm.V_FIRST[release])
    trial = variant.prepare(case, device, 1, 0)
    interpretable()
    assert trial.check()["out"] > 0.1


def test_the_look_at_the_slot_is_all_that_is_taken_out():
    source = variants.VLLM_AFTER
    before = ast.parse(
        (sources.folder(sources.source(source)) / vllm.MODULE.replace(".", "/")).with_suffix(".py").read_text()
    )
    after = ast.unparse(vllm.unchecked(ast.parse(ast.unparse(before)))).splitlines()
    gone = [line.strip() for line in ast.unparse(before).splitlines()]
    for line in after:
        gone.remove(line.strip())
    assert sorted(gone) == ["if final_state_idx >= 0:", "if state_idx < 0:", "return"]


def test_a_kernel_that_does_not_look_at_the_slot_is_refused():
    with pytest.raises(ValueError, match="0 looks at the slot"):
        vllm.unchecked(ast.parse("x = 1"))
