"""Prefill with factors alone stored between its launches, against the token-by-token float64 reference."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from pairwise import pairwise
from test_extend import (
    DEVICE,
    FP32,
    NARROW,
    TOLERANCE,
    check_a_map_left_out_is_noticed,
    check_state_in_place,
    check_two_runs_are_bit_equal,
    error,
    expected,
    make,
)

from labkit.kernels.gated_delta.fused import CHUNK, Ways, choose, cut, extend

SMALL = Ways(16, 4, 2)
WAYS = [SMALL, Ways(32, 2, 3, solve=(1, 2, 3), scan=(32, 4, 2))]


def run(x, segments=1, v_first=True, chunk=16, ways=SMALL):
    """Output and final state [N, HV, V, K] of V-first inputs; every value of both must be written."""
    initial = x.initial if v_first else x.initial.transpose(-1, -2).contiguous()
    y = replace(x, initial=initial, final=torch.full_like(initial, float("nan")), out=x.out.clone())
    extend(y, v_first, cut(y.cu_seqlens, segments, chunk, DEVICE), ways)()
    assert not y.out.isnan().any()
    assert not y.final.isnan().any()
    return y.out, y.final if v_first else y.final.transpose(-1, -2)


def compare(x, tolerance=FP32, **choices):
    for name, one, other in zip(("out", "final"), run(x, **choices), expected(x), strict=True):
        assert error(one, other) < tolerance, name


BATCHES = [[100], [16, 100, 0, 33], [81, 5, 64, 1], [0]]  # in chunks of 16


@pytest.mark.parametrize(("lengths", "segments", "v_first", "ways"), pairwise(BATCHES, (1, 2, 5), (True, False), WAYS))
def test_any_length(lengths, segments, v_first, ways):
    compare(make(lengths), segments=segments, v_first=v_first, ways=ways)


@pytest.mark.parametrize(
    ("sizes", "segments", "ways"),
    pairwise([(2, 1, 16, 24), (1, 3, 40, 16), (2, 2, 7, 3), (1, 1, 72, 80)], (1, 3), WAYS),
)
def test_heads_and_dimensions(sizes, segments, ways):
    """K differs from V, since equal ones would hide a transposition."""
    compare(make([70], *sizes), segments=segments, ways=ways)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("segments", [1, 5])
def test_dtypes(dtype, segments):
    """The choices by default."""
    compare(make([330, 70], K=128, V=128, dtype=dtype), TOLERANCE[dtype], segments=segments, chunk=CHUNK, ways=None)


def test_other_sequences_do_no_harm():
    """What lies behind a sequence's last token is another's, and may be anything."""
    x = make([40, 50], V=32)
    for values in (x.q, x.k, x.v, x.g, x.beta):
        values[40:] = float("nan")
    initial = torch.full_like(x.initial, float("nan"))
    initial[0] = x.initial[0]
    extend(replace(x, initial=initial), True, cut(x.cu_seqlens, 2, 16, DEVICE), SMALL)()
    out, final = expected(x)
    assert error(x.out[:40], out[:40]) < FP32
    assert error(x.final[:1], final[:1]) < FP32


@pytest.mark.parametrize(("log_decay", "ways"), pairwise([0.0, -1e-4, -5.0, -40.0], WAYS))
def test_weak_and_strong_decay(log_decay, ways):
    compare(make([90], log_decay=log_decay), segments=2, ways=ways)


def test_equal_keys():
    """Every token rewrites what the last one wrote: the series of the inverse would cancel."""
    x = make([64], K=16, log_decay=0.0)
    x.k[:] = x.k[0].clone()
    x.beta[:] = 1.0
    compare(x)


@pytest.mark.parametrize(("heads", "most"), [(1, 4), (3, 4), (4, 2), (4, 3), (6, 4)])
def test_value_heads_of_one_program(heads, most):
    """Those of one key, some at a time: 4 at most of 6 are 3."""
    compare(make([50], H=2, group=heads, K=16, V=16), ways=replace(SMALL, solve=(most, 1, 2)))


@pytest.mark.parametrize(
    ("lengths", "HV", "counts"),
    [
        ([2048], 8, (8,)), ([8192], 8, (8,)), ([65536], 8, (16,)), ([65536], 12, (11,)), ([8192], 32, (2,)),
        ([65536], 16, (8,)), ([65536], 24, (4,)), ([65536], 32, (3,)), ([200, 100], 8, (1, 1)),
        ([600, 40], 8, (2, 1)), ([1024] * 8, 8, (1,) * 8), ([0], 8, (1,)),
        ([4096, 0, 8192], 8, (2, 1, 5)),
    ],
)  # fmt: skip
def test_segments_by_rule(lengths, HV, counts):
    """One walk's program a multiprocessor (132, of two a value head), two where segments are long.

    But with 24 and 32 value heads as many as the maps take in one round of two programs a multiprocessor.
    """
    assert choose(torch.tensor([0, *accumulate(lengths)]), HV, "cpu").counts == counts


def cut_in(x, segments):
    return extend(x, True, cut(x.cu_seqlens, segments, 16, DEVICE), SMALL)


@pytest.mark.parametrize("segments", [1, 3])
def test_state_in_place(segments):
    check_state_in_place(cut_in, segments)


def test_two_runs_are_bit_equal():
    check_two_runs_are_bit_equal(run)


def test_a_map_left_out_is_noticed():
    check_a_map_left_out_is_noticed(cut_in)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ways": Ways(columns=8)}, "columns is 8; allowed: a power of two from 16"),
        ({"ways": Ways(num_warps=3)}, "num_warps is 3"),
        ({"ways": Ways(scan=(16, 3, 2))}, "scan's num_warps is 3; allowed: 1, 2, 4, 8"),
        ({"ways": Ways(num_stages=1)}, "num_stages is 1"),
        ({"ways": Ways(solve=(0, 1, 2))}, "solve's value heads are 0; allowed: from 1"),
        ({"ways": Ways(solve=(1, 3, 2))}, "solve's num_warps is 3"),
        ({"segments": 0}, "segments is 0"),
        ({"segments": cut(torch.tensor([0, 70]), 2, 16)}, r"segments .* is of 70 tokens of 1 sequences"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        extend(make([40]), True, **change)


def test_refuses_what_it_is_not_for():
    with pytest.raises(ValueError, match="one decay a value head"):
        extend(make([40], rule="KDA"), True)
    with pytest.raises(ValueError, match="K is 130; allowed in segments: up to 128"):
        extend(make([2000], K=130, V=16), True, 2)
