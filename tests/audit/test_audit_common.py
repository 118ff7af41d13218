"""The audit itself: it shares nothing with the lab, and takes no other method than the documented one for right."""

import ast
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from common import NOTHING, T_975, End, differences, interval, judged, noise, over, table, verdict

HERE = Path(__file__).parent
AUDITS = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))
ALLOWED = {"numpy", "pandas", "pyarrow", *sys.stdlib_module_names, *(path.stem for path in AUDITS)}


def imported(path):
    """The packages that a module imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", AUDITS, ids=lambda path: path.stem)
def test_an_audit_imports_nothing_of_the_lab(path):
    assert imported(path) <= ALLOWED
    assert not imported(path) & {"importlib", "runpy"}
    assert not {"labkit", "__import__", "exec", "eval"} & called(path)


def called(path):
    """Names that a module uses in its code."""
    return {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}


# Intervals


def processes(runs, blocks=10, apart=0.001, seed=1):
    """Made-up log ratios: blocks of a process differ by 1 %, processes by `apart`."""
    rng = np.random.default_rng(seed)
    return [list(rng.normal(rng.normal(0.05, apart), 0.01, blocks)) for _ in range(runs)]


def drawn(values, choose_process=True, choose_block=True, draws=20_000):
    """Means of resampled medians, by drawing them."""
    rng = np.random.default_rng(7)
    some = [rng.choice(one, (draws, len(one))) if choose_block else np.tile(one, (draws, 1)) for one in values]
    medians = np.array([np.median(one, axis=1) for one in some])
    runs = [rng.integers(0, len(values), draws) if choose_process else place for place in range(len(values))]
    return np.mean([rng.permuted(medians, axis=1)[run, np.arange(draws)] for run in runs], axis=0)


@pytest.mark.parametrize("blocks", [5, 9, 10, 30])
def test_ends_of_an_interval_are_the_quantiles_of_the_drawn_means(blocks):
    values = processes(12, blocks)  # as many processes as make the drawn ends wider than Student's, or as wide
    low, high = np.percentile(drawn(values), [2.5, 97.5])
    found, half = interval(values), student(values)
    for end, value in ((found.low, min(low, found.mid - half)), (found.high, max(high, found.mid + half))):
        assert end.least <= value <= end.most
        assert end.value == pytest.approx(value, abs=0.1 * (high - low) / 2)


def student(values):
    """Half width of Student's interval of the processes' medians."""
    medians = [np.median(one) for one in values]
    return T_975[min(len(medians) - 1, len(T_975)) - 1] * np.std(medians, ddof=1) / math.sqrt(len(medians))


def within(found, low, high):
    return found.low.least <= low <= found.low.most and found.high.least <= high <= found.high.most


@pytest.mark.parametrize("ends", [(5, 95), (0.5, 99.5), (16, 84)])
def test_another_level_is_beyond_the_tolerance(ends):
    values = processes(1, 30)  # of one process there is no Student's interval: the bootstrap's is all
    assert not within(interval(values), *np.percentile(drawn(values), ends))


def test_means_for_medians_are_beyond_the_tolerance():
    for values in (processes(1, 30, seed=seed) for seed in range(10)):
        found, half = interval(values), 1.96 * np.std(values) / math.sqrt(30)
        if not within(found, found.mid - half, found.mid + half):
            return
    pytest.fail("an interval of means passes for one of medians")


@pytest.mark.parametrize("how", [{"choose_process": False}, {"choose_block": False}, {}])
def test_a_bootstrap_of_one_level_or_without_students_interval_is_beyond_the_tolerance(how):
    values = processes(3, 10, apart=0.02)
    assert not within(interval(values), *np.percentile(drawn(values, **how), [2.5, 97.5]))


def test_all_blocks_in_one_heap_are_beyond_the_tolerance():
    values = processes(3, 10, apart=0.02)
    assert not within(interval(values), *np.percentile(drawn([np.ravel(values)]), [2.5, 97.5]))


def test_one_value_has_no_width():
    found = interval([[0.5]])
    assert found.low.value == pytest.approx(0.5)
    assert found.high.value == pytest.approx(0.5)
    assert found.runs == 1


def test_nothing_has_no_interval():
    assert interval([]) == NOTHING


def row(variant, ns, repeats=None, ok=True):
    chosen = {"repeats": repeats} if repeats else {}
    numbers = {"run": [0] * len(ns), "block": list(range(len(ns))), "samples_ns": ns}
    return {"variant": variant, "ok": ok, "mode": "graph", "chosen": chosen} | numbers


def test_noise_is_the_farther_end_of_the_control_against_what_it_repeats():
    group = [row("ours", [98] * 10), row("A/A control", [100] * 10, repeats="ours")]
    assert noise(group).value == pytest.approx(0.02)
    assert math.isnan(noise(group[:1]).value)


@pytest.mark.parametrize(
    ("low", "high", "aa", "word"),
    [
        (1.02, 1.03, 0.005, "faster"),
        (0.96, 0.98, 0.005, "slower"),
        (0.995, 1.005, 0.005, "same"),
        (1.02, 1.03, 0.02, "unclear"),
        (1.07, 1.08, 0.02, "faster"),
        (0.995, 1.005, 0.02, "unclear"),
        (0.99, 1.2, 0.005, "unclear"),
        (1.5, 1.6, math.nan, "unclear"),
        (math.nan, math.nan, 0.005, "unclear"),
    ],
)
def test_verdicts_are_those_of_the_readme(low, high, aa, word):
    assert verdict(low, high, aa) == word


def test_a_verdict_that_turns_inside_the_tolerance_names_both_words():
    found = interval(processes(1, 30)).each(math.exp)
    aa = (found.low.value - 1) / 3  # as wide as makes a threefold of it reach the interval's end
    line = judged(found, End(aa, aa, aa))
    assert line["verdict"] == "faster|unclear"


# Comparing


def test_cells_lines_and_columns_that_differ_are_named():
    audit = table(
        [{"case": "a", "us": 1.0, "low": 0.9, "low from": 0.8, "low to": 1.0}, {"case": "b", "us": 2.0}],
        ["case", "us", "low"],
    )
    lab = pd.DataFrame({"case": ["a", "b"], "us": [1.0, 2.0], "low": [0.81, math.nan]})
    assert differences(lab, audit, ["case"]) == (4, [])
    assert differences(lab.assign(us=[1.0, 2.00001]), audit, ["case"])[1] == [
        "('b',), us: 2.00001 in the lab's table, 2.0 in the audit"
    ]
    assert len(differences(lab.assign(low=[1.01, math.nan]), audit, ["case"])[1]) == 1
    assert differences(lab.iloc[:1], audit, ["case"])[1] == ["('b',): only in the audit"]
    assert differences(lab, audit.iloc[:1], ["case"])[1] == ["('b',): only in the lab's table"]
    assert differences(lab.drop(columns="us"), audit, ["case"])[1] == ["us: no such column in the lab's table"]


def test_over_calls_a_table_for_each_combination():
    found = over(lambda n, twice: pd.DataFrame({"x": [n * (1 + twice)]}), 3, twice=[False, True])
    assert found.to_dict("list") == {"x": [3, 6], "twice": [False, True]}
