"""The library as others use it: the snippets of its README, what its packages give out, and a wheel of it alone."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_extend import make

import labkit.kernels
from labkit.kernels import decoder, experts, gated_delta, gemv, gguf
from labkit.kernels.decoder import reference as decoder_reference
from labkit.kernels.experts import reference as experts_reference
from labkit.kernels.gated_delta import fused, segmented
from labkit.kernels.gated_delta import reference as gated_delta_reference

README = Path(labkit.kernels.__file__).with_name("README.md")
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(package, device, number=0):
    """What a snippet of the README leaves behind, run on this device."""
    [*found] = (text for text in SNIPPETS if f"import {package}\n" in text)
    torch.manual_seed(0)
    names = {}
    exec(found[number].replace('"cuda"', repr(device)), names)
    return names


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_every_package_with_a_function_has_a_snippet():
    named = {re.search(r"from labkit.kernels import (\w+)\n", text)[1] for text in SNIPPETS}
    assert named == {"gemv", "gated_delta", "experts", "gguf", "decoder"}


def test_the_snippet_of_a_gemv(device):
    made = run("gemv", device)
    assert error(made["y"], made["W"].double() @ made["x"].double()) < 1e-3


def test_the_snippet_of_a_decode(device):
    made = run("gated_delta", device)
    torch.manual_seed(0)
    before = torch.randn(made["pool"].shape, device=device)
    step = made["step"]
    alpha, beta = gated_delta_reference.decay_and_beta(step.a, step.b, step.A_log, step.dt_bias)
    some = step.indices.long()
    out, states = gated_delta_reference.decode_step(before[some], step.q, step.k, step.v, alpha, beta, step.scale)
    assert error(step.out, out) < 1e-5
    assert error(step.state[some], states) < 1e-5


def test_the_snippet_of_a_ring(device):
    made = run("gated_delta", device, 2)
    torch.manual_seed(0)
    step, drafted = made["step"], made["drafted"]
    before = torch.randn(step.state.shape, device=device)
    assert torch.equal(step.state, before)  # no ring is full yet
    states = before[step.indices.long()]
    gates = {id(x): gated_delta_reference.decay_and_beta(x.a, x.b, x.A_log, x.dt_bias) for x in (step, drafted)}
    for _ in range(5):
        out, states = gated_delta_reference.decode_step(states, step.q, step.k, step.v, *gates[id(step)], step.scale)
    assert error(step.out, out) < 1e-5
    tokens = drafted.q, drafted.k, drafted.v
    out, _ = gated_delta_reference.verify(states, *tokens, *gates[id(drafted)], drafted.scale)
    assert error(drafted.out, out) < 1e-5
    assert made["ring"].counts.tolist() == [7, 5, 9]


@pytest.mark.parametrize(("rule", "kernels"), [("GDN", fused), ("KDA", segmented)])
def test_an_extend_is_that_of_its_decay(rule, kernels):
    """Bit for bit; the segments of the batch are the rule's."""
    x = make([600, 40], K=16, V=16, rule=rule)
    found = gated_delta.extend(x, True, gated_delta.segments(x.cu_seqlens, 1, rule == "KDA", x.v.device))
    y = replace(x, out=torch.empty_like(x.out), final=torch.empty_like(x.final))
    expected = kernels.extend(y, True)
    assert found.launches.keys() == expected.launches.keys()
    found()
    expected()
    assert torch.equal(x.out, y.out)
    assert torch.equal(x.final, y.final)


def test_the_snippet_of_an_extend(device):
    made = run("gated_delta", device, 1)
    prompt = made["prompt"]
    assert not prompt.out.isnan().any()
    assert made["states"].abs().amax((1, 2, 3)).gt(0).all()


def test_the_snippet_of_an_expert_layer(device):
    made = run("experts", device)
    w1, w2 = (experts.dequantise(experts.quantise(made[name])) for name in ("w1", "w2"))
    expected = experts_reference.layer(made["x"], made["ids"], made["weights"], w1, w2)
    assert error(made["out"], expected) < 1e-2
    assert error(made["wide"], experts_reference.layer(*map(made.get, ("x", "ids", "weights", "w1", "w2")))) < 1e-2


def test_the_snippet_of_a_gguf_product(device):
    made = run("gguf", device)
    expected = made["x"].double() @ gguf.dequantise(made["blocks"], "Q4_K").to(device).double().T
    assert error(made["y"], expected) < 1e-3


def test_the_snippet_of_a_decoder(device):
    made = run("decoder", device)
    expected = decoder_reference.generate(made["model"], made["weights"], [5, 1, 60], 3)
    assert made["tokens"] == expected.tokens


@pytest.mark.parametrize("package", [decoder, gemv, gated_delta, experts, gguf])
def test_a_package_gives_out_what_it_names_and_nothing_else(package):
    assert all(getattr(package, name).__doc__ for name in package.__all__ if name not in ("FORMATS",))
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'nothing'; it has: "):
        package.nothing  # noqa: B018
    assert not math.isnan(len(package.__doc__))
