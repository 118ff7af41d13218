"""Prefill in segments against the token-by-token float64 reference, and the reference's maps against itself."""

import itertools
from dataclasses import replace

import pytest
import torch
from pairwise import pairwise
from test_extend import (
    DEVICE,
    FP32,
    NARROW,
    RULES,
    TOLERANCE,
    check_a_map_left_out_is_noticed,
    check_state_in_place,
    check_two_runs_are_bit_equal,
    error,
    expected,
    make,
)

from labkit.kernels.gated_delta import chunked, reference, segmented
from labkit.kernels.gated_delta.segmented import Tile, choose, cut, extend

SEGMENTS = (2, 3, 5)
SMALL = dict.fromkeys(("maps", "scan", "walk"), Tile(16, 4, 2))
TURNED = dict.fromkeys(("maps", "scan", "walk"), Tile(16, 4, 2, False))
SCORED = SMALL | {"scores": Tile(16, 4, 2)}


def run(x, segments, v_first=True, chunk=16, choices=SMALL):
    """Output and final state [N, HV, V, K] of V-first inputs; every value of both must be written."""
    initial = x.initial if v_first else x.initial.transpose(-1, -2).contiguous()
    y = replace(x, initial=initial, final=torch.full_like(initial, float("nan")), out=x.out.clone())
    extend(y, v_first, cut(y.cu_seqlens, segments, chunk, DEVICE), choices)()
    assert not y.out.isnan().any()
    assert not y.final.isnan().any()
    return y.out, y.final if v_first else y.final.transpose(-1, -2)


def compare(x, segments, tolerance=FP32, **choices):
    for name, one, other in zip(("out", "final"), run(x, segments, **choices), expected(x), strict=True):
        assert error(one, other) < tolerance, name


def maps_of(x, cuts):
    """The reference's maps of the parts of a single sequence."""
    alpha = x.g.double().exp()
    parts = [slice(*ends) for ends in itertools.pairwise(cuts)]
    return [reference.segment_map(x.k[p], x.v[p], alpha[p], x.beta[p]) for p in parts]


@pytest.mark.parametrize("rule", RULES)
def test_a_map_gives_the_state_after_its_tokens(rule):
    """The reference's maps, whatever the state is, against the recurrence."""
    x = make([9], H=2, group=2, K=6, V=5, rule=rule)
    ((A, B),) = maps_of(x, [0, 9])
    _, final = expected(x)
    torch.testing.assert_close(x.initial.double()[0] @ A + B, final[0], rtol=1e-12, atol=1e-12)
    other = replace(x, initial=x.initial * 3.0 - 1.0)
    torch.testing.assert_close(other.initial.double()[0] @ A + B, expected(other)[1][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_scan_gives_the_state_at_every_cut(rule):
    x, cuts = make([11], H=1, group=3, K=6, V=5, rule=rule), [0, 4, 5, 5, 11]
    states = reference.scan(x.initial[0], maps_of(x, cuts))
    assert len(states) == len(cuts)
    for end, state in zip(cuts, states, strict=True):
        tokens = {name: getattr(x, name)[:end] for name in ("q", "k", "v", "g", "beta")}
        part = replace(x, **tokens, cu_seqlens=torch.tensor([0, end]))
        torch.testing.assert_close(state, expected(part)[1][0], rtol=1e-12, atol=1e-12)


def test_a_map_of_one_token():
    """Worked by hand: A = α (I - β k kᵀ), B = β v kᵀ."""
    k, v = torch.tensor([[[0.6, 0.8]]], dtype=torch.float64), torch.tensor([[[2.0, -1.0, 4.0]]])
    A, B = reference.segment_map(k, v, torch.tensor([[0.5]]), torch.tensor([[0.25]]))
    unit = k[0, 0]
    torch.testing.assert_close(A[0], 0.5 * (torch.eye(2) - 0.25 * unit[:, None] * unit), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(B[0], 0.25 * v[0, 0].double()[:, None] * unit, rtol=1e-5, atol=1e-5)


BATCHES = [[100], [16, 100, 0, 33], [81, 5, 64, 1]]  # in chunks of 16


@pytest.mark.parametrize(("lengths", "rule", "segments", "v_first"), pairwise(BATCHES, RULES, SEGMENTS, (True, False)))
def test_any_length(lengths, rule, segments, v_first):
    compare(make(lengths, rule=rule), segments, v_first=v_first)


@pytest.mark.parametrize(("choices", "rule"), [(TURNED, "GDN"), (TURNED, "KDA"), (SCORED, "GDN")])
def test_ways(choices, rule):
    compare(make([81, 5, 64], 2, 2, rule=rule), 3, choices=choices)


@pytest.mark.parametrize(
    ("sizes", "rule", "v_first"),
    pairwise([(2, 1, 16, 24), (1, 3, 40, 16), (2, 2, 7, 3), (1, 1, 72, 80)], RULES, (True, False)),
)
def test_heads_and_dimensions(sizes, rule, v_first):
    """K differs from V, since equal ones would hide a transposition."""
    compare(make([70], *sizes, rule=rule), 3, v_first=v_first)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", NARROW)
def test_dtypes(dtype, rule):
    """The tiles of the rule, and its chunks of 64 tokens."""
    compare(make([330, 70], K=128, V=128, dtype=dtype, rule=rule), 5, TOLERANCE[dtype], chunk=64, choices=None)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("log_decay", "rule"), pairwise([0.0, -1e-4, -5.0, -40.0], RULES))
def test_weak_and_strong_decay(log_decay, rule, segments):
    """A near the identity and A near zero."""
    compare(make([90], rule=rule, log_decay=log_decay), segments)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", NARROW)
def test_errors_do_not_grow_with_segments(dtype, rule):
    """Long and hardly decaying, so that the states of all segments come through the scan."""
    x = make([16 * 24], K=32, V=32, dtype=dtype, rule=rule, log_decay=-1e-3)
    x.beta[:] *= 0.1
    wanted = expected(x)
    plain, cut_often = run(x, 1), run(x, 24)
    for one, other, exact in zip(plain, cut_often, wanted, strict=True):
        assert error(other, exact) < 1.1 * error(one, exact)


@pytest.mark.parametrize("rule", RULES)
def test_equal_keys(rule):
    """Every token rewrites what the last one wrote: A has lost a direction, and holds the others."""
    x = make([64], K=16, rule=rule, log_decay=0.0)
    x.k[:] = x.k[0].clone()
    x.beta[:] = 1.0
    compare(x, 3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("v_first", [True, False])
def test_one_segment_is_the_extend_of_today(rule, v_first):
    """The same launches, and so the same bits; also where the rule finds no multiprocessor without work."""
    x = make([50, 20], rule=rule)
    plain = chunked.extend(x, v_first) if v_first else None
    if plain is None:
        x = replace(x, initial=x.initial.transpose(-1, -2).contiguous(), final=x.final.transpose(-1, -2).contiguous())
        plain = chunked.extend(x, v_first)
    plain()
    out, final = x.out.clone(), x.final.clone()
    for segments in (1, None):
        found = extend(x, v_first, segments)
        assert list(found.launches) == list(plain.launches)
        for name, launch in found.launches.items():
            assert (launch.kernel, launch.grid, launch.options) == (
                plain.launches[name].kernel,
                plain.launches[name].grid,
                plain.launches[name].options,
            )
        x.out.fill_(float("nan"))
        x.final.fill_(float("nan"))
        found()
        assert torch.equal(x.out, out)
        assert torch.equal(x.final, final)


def test_two_segments_need_no_scan():
    """The first segment's map is that of its true state."""
    x = make([50])
    launches = extend(x, True, cut(x.cu_seqlens, 2, 16, DEVICE), SMALL).launches
    assert launches["scan"].grid == (0,)
    assert extend(x, True, cut(x.cu_seqlens, 3, 16, DEVICE), SMALL).launches["scan"].grid > (0,)


def cut_in(x, segments):
    return extend(x, True, cut(x.cu_seqlens, segments, 16, DEVICE), SMALL)


def test_state_in_place():
    check_state_in_place(cut_in, 3)


def test_two_runs_are_bit_equal():
    check_two_runs_are_bit_equal(run)


def test_a_map_left_out_is_noticed():
    check_a_map_left_out_is_noticed(cut_in)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cuts(dtype):
    found = cut(torch.tensor([0, 50, 50, 60], dtype=dtype), 3, 16)
    assert found.counts == (3, 1, 1)  # an empty sequence has a segment too: its final state is its first one
    assert found.spans.tolist() == [[0, 16, 0, 0], [16, 32, 1, 0], [32, 50, 2, 0], [50, 50, 4, 1], [50, 60, 4, 2]]
    assert found.first_segments.tolist() == [0, 3, 4, 5]
    assert found.batch.spans.tolist() == chunked.plan(torch.tensor([0, 50, 50, 60]), 16).spans.tolist()
    assert found.spans.dtype == found.first_segments.dtype == torch.int32


@pytest.mark.parametrize(
    ("lengths", "heads", "counts"),
    [
        ([8192], 8, (8,)),  # 132 multiprocessors, two programs of maps a head
        ([65536], 12, (5,)),
        ([8192], 32, (1,)),  # room for two: what is done twice costs more
        ([128] * 64, 8, (1,) * 64),
        ([1024] * 8, 32, (1,) * 8),
        ([8192, 128, 0], 8, (7, 1, 1)),
        ([128], 1, (1,)),  # short
        ([], 8, ()),
    ],
)
def test_the_rule(lengths, heads, counts):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    assert choose(bounds, heads).counts == counts


@pytest.mark.parametrize("segments", [0, -1, 2.0, True, "3"])
def test_refuses_segments(segments):
    with pytest.raises(ValueError, match=f"segments is {segments!r}; allowed: a whole number from 1"):
        cut(torch.tensor([0, 4]), segments)


def test_refuses_bounds_and_chunks():
    with pytest.raises(ValueError, match=r"cu_seqlens is \[1, 2\]"):
        cut(torch.tensor([1, 2]), 2)
    with pytest.raises(ValueError, match="chunk is 48; allowed: 16, 32, 64"):
        choose(torch.tensor([0, 1]), 8, 48)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"walk": Tile(8, 4, 2)}, "walk's columns are 8; allowed: a power of two from 16"),
        ({"maps": Tile(48, 4, 2)}, "maps's columns are 48"),
        ({"scan": Tile(16, 3, 2)}, "scan's num_warps is 3; allowed: 1, 2, 4, 8"),
        ({"walk": Tile(16, 4, 1)}, "walk's num_stages is 1; allowed: 2, 3, 4"),
        ({"output": Tile(16, 4, 2)}, "choices' launch is 'output'; allowed: maps, scores, scan, walk"),
    ],
)
def test_refuses_choices(choices, message):
    with pytest.raises(ValueError, match=message):
        extend(make([40]), True, 2, choices)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda t: t[0], "q is"),
        ("initial", lambda t: t.transpose(-1, -2).contiguous(), "initial is"),
        ("out", lambda t: t.to("meta"), "out is on meta"),
    ],
)
def test_refuses_tensors(name, change, message):
    x = make([40])
    with pytest.raises(ValueError, match=message):
        extend(replace(x, **{name: change(getattr(x, name))}), True, 2)


def test_large_k_is_not_cut():
    x = make([2000], K=130, V=16)
    assert "maps" not in extend(x, True).launches
    with pytest.raises(ValueError, match="K is 130; allowed in segments: up to 128"):
        extend(x, True, 2)


def test_refuses_segments_of_another_batch():
    other = cut(torch.tensor([0, 70]), 2, 16)
    with pytest.raises(ValueError, match=r"batch .* is of 70 tokens of 1 sequences"):
        extend(make([40]), True, other, SMALL)


def test_segments_are_refused_before_anything_runs():
    x = make([40])
    for segments in (0, 1.5, "2"):
        with pytest.raises(ValueError, match=f"segments is {segments!r}"):
            extend(x, True, segments)
    assert segmented.extend is extend
    assert x.out.isnan().all()
