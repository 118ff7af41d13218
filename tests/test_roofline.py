"""Occupancy against hand-worked figures, predictions against a made-up machine whose curve is known."""

import json
import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.bench import records
from labkit.bench.spec import Floor
from labkit.evidence.roofline import LIMITS, Ceilings, occupancy, predict, waves

MIB = 2**20


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "capability", "expected"),
    [
        (16, 0, 1, 90, 32),  # blocks
        (16, 0, 1, 120, 24),
        (16, 0, 4, 90, 16),  # 64 warps
        (32, 0, 32, 120, 1),  # 48 warps
        (64, 0, 4, 90, 8),  # 2048 registers a warp: 8 warps in each quarter of the register file
        (72, 0, 1, 90, 28),  # 2304 registers a warp: 7 in each quarter, so 28 and not the 28.4 of the whole file
        (65, 0, 1, 90, 28),  # allocated as 72
        (255, 0, 4, 90, 2),
        (256, 0, 1, 90, 0),
        (32, 82_180, 4, 90, 2),  # the chunk-state kernel of [K, V] and of [V, K]
        (32, 73_988, 4, 90, 3),
        (32, 82_180, 4, 80, 2),
        (32, 82_180, 4, 120, 1),
        (32, 227 * 1024, 4, 90, 1),
        (32, 227 * 1024 + 1, 4, 90, 0),
        (32, 100 * 1024, 4, 120, 0),  # 1 KiB of the 100 is the system's
    ],
)
def test_occupancy_by_hand(registers, shared, warps, capability, expected):
    assert occupancy(registers, shared, warps, capability) == expected


@given(st.integers(1, 255), st.integers(0, 100_000), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from(sorted(LIMITS)))
def test_more_of_anything_never_fits_more(registers, shared, warps, capability):
    here = occupancy(registers, shared, warps, capability)
    assert occupancy(min(registers + 8, 255), shared, warps, capability) <= here
    assert occupancy(registers, shared + 128, warps, capability) <= here
    assert occupancy(registers, shared, 2 * warps, capability) <= here


def test_unknown_capability_names_the_known_ones():
    with pytest.raises(ValueError, match=r"capability is 70; allowed: 80, 86, .*120"):
        occupancy(32, 0, 4, 70)


def test_waves():
    assert waves(264, 132, 2) == 1.0
    assert waves(330, 132, 1) == 2.5
    with pytest.raises(ValueError, match="per_sm is 0"):
        waves(1, 132, 0)


def row(op, case, samples_us, floor_bytes=0, floor_flops=0, **other):
    empty = dict.fromkeys(records.SCHEMA.names)
    plain = {"mode": "graph", "cache": "cold", "role": "ceiling", "ok": True, "variant": "a"}
    figures = {"samples_ns": [round(us * 1e3) for us in samples_us], "floor_bytes": floor_bytes}
    case = {"case": json.dumps(case, sort_keys=True), "op": op, "floor_flops": floor_flops}
    return empty | plain | figures | case | other


def read(mib, samples_us, **other):
    return row("ceiling", {"what": "read", "mib": mib}, samples_us, int(mib * MIB), **other)


@pytest.fixture
def ceilings():
    """2 µs of launch, then 1 MiB a µs for large sizes; 500 TFLOP/s."""
    rows = [
        read(1, [3.0, 3.0, 90.0]),  # the median counts
        read(16, [18.0]),
        read(16, [25.0], variant="slower"),
        read(1024, [1024.0]),
        read(1024, [1.0], ok=False),
        read(1024, [1.0], role="control"),
        read(1024, [1.0], mode="eager", variant="another timer"),
        read(16, [6.0], cache="hot"),
        row("launch", {"what": "empty"}, [2.0]),
        row("launch", {"what": "empty"}, [9.0], mode="eager"),
        row("ceiling", {"what": "bf16", "n": 1024}, [10.0], floor_flops=2 * 1024**3),
        row("ceiling", {"what": "bf16", "n": 8192}, [2 * 8192**3 / 500e6], floor_flops=2 * 8192**3),
        row("copy", {"what": "h2d", "bytes": MIB}, [0.1], MIB),
    ]
    return Ceilings.from_rows(pd.DataFrame(rows))


def test_best_rates(ceilings):
    assert ceilings.best("read") == pytest.approx(MIB * 1e6)
    assert ceilings.best("read", "hot") == pytest.approx(16 / 6 * MIB * 1e6)
    assert ceilings.best("bf16") == pytest.approx(500e12, rel=1e-4)
    assert math.isnan(ceilings.best("copy"))
    assert math.isnan(ceilings.best("fp8"))
    with pytest.raises(ValueError, match="limit is 'write'; allowed: read, in_place"):
        ceilings.best("write")


@pytest.mark.parametrize(
    ("mib", "expected"),
    [(1, 3.0), (16, 18.0), (0.25, 3.0), (4, math.sqrt(3 * 18)), (2048, 2048.0)],  # 4 is halfway in the logarithm
)
def test_time_against_bytes(ceilings, mib, expected):
    assert ceilings.transfer_us("read", mib * MIB) == pytest.approx(expected)


def test_memory_prediction(ceilings):
    found = predict(Floor(16 * MIB, limit="read"), ceilings)
    assert found.floor_us == pytest.approx(16.0)
    assert found.predicted_us == pytest.approx(18.0)
    assert found.ceiling == pytest.approx(MIB / 1e6)
    assert predict(Floor(16 * MIB, limit="read"), ceilings, cache="hot").predicted_us == pytest.approx(6.0)


def test_a_last_wave_that_is_partly_empty_costs_a_whole_one(ceilings):
    floor = Floor(0, 5_000_000_000, "bf16")
    assert predict(floor, ceilings, 250, 100, 1).predicted_us == pytest.approx(2 + 10 * 3 / 2.5, rel=1e-4)
    assert predict(floor, ceilings, 300, 100, 1).predicted_us == pytest.approx(12.0, rel=1e-4)
    assert predict(floor, ceilings, 50, 100, 1).predicted_us == pytest.approx(12.0, rel=1e-4)  # less than a wave is one
    assert predict(floor, ceilings, 250, 100, None).predicted_us == pytest.approx(12.0, rel=1e-4)


def test_waves_do_not_count_where_bytes_are_moved(ceilings):
    floor = Floor(16 * MIB, limit="read")
    assert predict(floor, ceilings, 250, 100, 1).predicted_us == predict(floor, ceilings).predicted_us


def test_matrix_prediction(ceilings):
    flops = 5_000_000_000
    found = predict(Floor(0, flops, "bf16"), ceilings)
    assert found.floor_us == pytest.approx(10.0, rel=1e-4)
    assert found.predicted_us == pytest.approx(12.0, rel=1e-4)
    assert predict(Floor(0, flops, "bf16"), ceilings, mode="eager").predicted_us == pytest.approx(19.0, rel=1e-4)
    # Thin matrices are bound by their bytes.
    assert predict(Floor(64 * MIB, flops, "bf16"), ceilings).predicted_us == pytest.approx(66.0)


def test_nothing_measured_predicts_nothing(ceilings):
    empty = Ceilings.from_rows(pd.DataFrame(columns=records.SCHEMA.names))
    for floor in (Floor(MIB, limit="read"), Floor(MIB, 10, "bf16")):
        assert all(math.isnan(value) for value in predict(floor, empty, 250, 100, 1))
    assert all(math.isnan(value) for value in predict(Floor(MIB, limit=""), ceilings))
