"""GPUs that nobody measured here: which can be asked for, and what recorded rows would take on them.

Such a GPU is known by its data sheet, or by a run of `00_machine` alone. The recorded rows of another GPU, where a
prediction starts, are taken to it by `evidence.predict.transfer`. How far that may be off is what it is off between the
recorded GPUs, of which both are known. What is predicted is no measurement: it has no samples, is in no table of
measured rows, and no claim is judged by it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

import pandas as pd

from labkit import paths
from labkit.bench.records import times_us
from labkit.bench.spec import Case, Study
from labkit.evidence import predict, sheets
from labkit.evidence.predict import Gpu
from labkit.workflow import gpus, predictions, recorded

VERDICT = "predicted, not measured"
SHIFT = "floor's shift: "  # begins columns of the baseline's errors
ROW = ["op", "case", "variant", "mode"]
NEEDED = ("read", "in_place", "bf16")  # ceilings of `00_machine`

Rows = Mapping[str, pd.DataFrame]  # folder name of a recorded GPU -> its rows of a study


def check(name: str) -> None:
    """ValueError for a GPU that cannot be predicted; the message names those that can be."""
    if name not in (known := gpus.predictable()):
        raise ValueError(f"gpu is {name!r}; can be predicted: {', '.join(known)}")


def target(name: str, start: str) -> Gpu:
    """The GPU of that folder name, by a run of `00_machine`, or from a recorded one by the ratio of their data sheets.

    ValueError if it cannot be asked for, if the recorded one has no data sheet, or if `00_machine` left out what is
    needed.
    """
    check(name)
    if name in (bare := gpus.bare()):
        return _complete(predictions.gpu_in(bare[name]), str(bare[name]))
    if not (like := sheets.of_recorded(start)):
        known = [sheet["recorded"] for sheet in sheets.sheets().values() if "recorded" in sheet]
        raise ValueError(f"no data sheet of {start!r}, where the prediction would start; there are: {', '.join(known)}")
    return predict.by_sheet(sheets.unmeasured()[name], recorded_gpu(start), like)


def recorded_gpu(name: str) -> Gpu:
    """A recorded GPU. ValueError if `00_machine` was not recorded of it, or left out what is needed."""
    return _complete(predictions.gpu_in(paths.DATA / name), f"data/{name}")


def _complete(gpu: Gpu | None, where: str) -> Gpu:
    if gpu is None:
        raise ValueError(f"{where}: no rows of 00_machine, by which times are predicted: `labkit run machine`")
    if missing := [what for what in NEEDED if math.isnan(gpu.ceilings.best(what))]:
        raise ValueError(f"{where}: 00_machine has no rows of {missing[0]!r}; needed: {', '.join(NEEDED)}")
    return gpu


def can_start(name: str) -> bool:
    """Whether a prediction by data sheets can start at a recorded GPU."""
    return bool(sheets.of_recorded(name)) and predictions.gpu_in(paths.DATA / name) is not None


def nearest(name: str, starts: Iterable[str]) -> tuple[str, Gpu, Gpu]:
    """Of recorded GPUs the one whose memory is most like that of a GPU that is asked for; it, and the other, by it.

    ValueError as in `target`, and if there is none.
    """
    found = [(start, recorded_gpu(start), target(name, start)) for start in starts]
    if not found:
        raise ValueError(f"nothing to predict {name!r} from: no recorded GPU has these cases")
    return min(found, key=lambda one: abs(math.log(one[2].memory("read") / one[1].memory("read"))))


# ---- pairs of a study


def _times(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that can be taken to another GPU: cold, usable, replayed from a graph, so that no host is in them."""
    return rows[(rows["cache"] == "cold") & (rows["mode"] == "graph") & rows["ok"]].reset_index(drop=True)


def pairs(study: Study, cases: Sequence[Case], us: pd.Series) -> pd.DataFrame:
    """The pairs that the claims are about (`Study.pairs`): op, case, variant, against, µs of both, ratio.

    us: by op, case and variant. ratio: time of `against` over that of `variant`; above 1, `variant` is faster.
    """
    known = us.to_dict()
    found = []
    for case in cases:
        for both in study.pairs(case):
            times = [known.get((case.op, case.key, name)) for name in both]
            if None not in times:
                line = {"op": case.op, "case": case.key, "variant": both[0], "against": both[1]}
                found.append(line | {"us": times[0], "against us": times[1], "ratio": times[1] / times[0]})
    return pd.DataFrame(found, columns=["op", "case", "variant", "against", "us", "against us", "ratio"])


def _by_name(rows: pd.DataFrame, us: pd.Series) -> pd.Series:
    return pd.Series(us.to_numpy(), pd.MultiIndex.from_frame(rows[["op", "case", "variant"]]))


def measured(study: Study, cases: Sequence[Case], rows: pd.DataFrame) -> pd.DataFrame:
    """`pairs` as they were measured."""
    some = _times(rows)
    return pairs(study, cases, _by_name(some, times_us(some)))


def predicted(study: Study, cases: Sequence[Case], rows: pd.DataFrame, old: Gpu, new: Gpu) -> pd.DataFrame:
    """`pairs` as they would be on another GPU."""
    some = _times(rows)
    return pairs(study, cases, _by_name(some, predict.transfer(some, old, new)["us_new"]))


# ---- how wrong that is: between recorded GPUs


def recorded_rows(study: str) -> dict[str, pd.DataFrame]:
    """All recorded rows of a study of the GPUs of which `00_machine` is recorded too."""
    found = {one.gpu: one.rows for one in recorded.all_rows(study, runs=False) if len(one.rows)}
    return {name: rows for name, rows in found.items() if predictions.gpu_in(paths.DATA / name)}


def transfers(rows: Rows) -> pd.DataFrame:
    """From each recorded GPU to each other: errors of the transfer, and of the floor's shift, of rows of ours, percent.

    The rows that the model can predict: role ours, cold, with known launches. The shift is
    t_old + (floor_new - floor_old), which any prediction must beat.
    """
    found = []
    for old, new in permutations(rows, 2):
        here, there = _of_one_kernel(rows[old], rows[new])
        one, two = (predictions.beside(some).set_index(ROW) for some in (here, there))
        both = one.index.intersection(two.index)
        start = predictions.ours(here).set_index(ROW, drop=False).loc[both].reset_index(drop=True)
        if start.empty:
            continue
        truth = two.loc[both, "measured"].reset_index(drop=True)
        moved = predict.transfer(start, recorded_gpu(old), recorded_gpu(new))["us_new"]
        shift = (two.loc[both, "floor"] - one.loc[both, "floor"]).reset_index(drop=True) + times_us(start)
        line = {"from": old, "to": new, "rows": len(both)} | _errors(moved, truth)
        found.append(line | _errors(shift, truth, SHIFT))
    return pd.DataFrame(found)


def _of_one_kernel(one: pd.DataFrame, two: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of two GPUs the rows that the other has of the same kernel: one that was changed since is another."""
    of_one, of_two = (pd.MultiIndex.from_frame(rows[[*ROW, "kernel_sha"]]) for rows in (one, two))
    return one[of_one.isin(of_two)], two[of_two.isin(of_one)]


def _errors(found: pd.Series, truth: pd.Series, what: str = "") -> dict[str, float]:
    median, most = predictions.percent_off(found, truth)
    return {f"{what}median error %": median, f"{what}90 % are within %": most}


def tested(study: Study, rows: Rows) -> pd.DataFrame:
    """From each recorded GPU to each other: errors of the study's pairs, times and ratios, percent; `distance`."""
    cases = _cases(rows)
    found = []
    for old, new in permutations(rows, 2):
        ends = recorded_gpu(old), recorded_gpu(new)
        here, there = _of_one_kernel(rows[old], rows[new])
        told = predicted(study, cases, here, *ends)
        truth = measured(study, cases, there)
        both = told.merge(truth, on=["op", "case", "variant", "against"], suffixes=("", " measured"))
        if both.empty:
            continue
        times = [pd.concat([both[f"{name}{end}"] for name in ("us", "against us")]) for end in ("", " measured")]
        line = {"from": old, "to": new, "pairs": len(both), "distance": distance(*ends)} | _errors(*times, "times: ")
        found.append(line | _errors(both["ratio"], both["ratio measured"], "ratios: "))
    return pd.DataFrame(found)


def _cases(rows: Rows) -> list[Case]:
    keys = dict.fromkeys(key for some in rows.values() for key in zip(some["op"], some["case"], strict=True))
    return [Case(op, json.loads(case)) for op, case in keys]


def distance(old: Gpu, new: Gpu) -> float:
    """How much the rates of two GPUs differ against each other: memory, bf16 products, multiprocessors times clock.

    Of the logarithms of the three rates' ratios, the largest less the smallest: 0 where all are larger by one factor,
    which changes no ratio of times.
    """
    ratios = (new.memory("read") / old.memory("read"), new.flops / old.flops, new.cycles / old.cycles)
    return max(map(math.log, ratios)) - min(map(math.log, ratios))


def bound(errors: pd.DataFrame, what: str, far: float = 0.0) -> float:
    """By which factor times or ratios may be off; NaN where none was tested.

    The larger of what 90 % are within in all ways that were tested, and as often that as `far`, a `distance`, is that
    of the test: two GPUs that are further apart than those tested are taken to be wrong by as much more.
    """
    logs = [
        math.log1p(line[f"{what}: 90 % are within %"] / 100) * max(1.0, far / line["distance"])
        for line in errors.to_dict("records")
    ]
    return math.exp(max(logs)) if logs else math.nan


# ---- a GPU that is asked for


def table(study: Study, cases: Sequence[Case], rows: Rows, name: str, errors: pd.DataFrame) -> pd.DataFrame:
    """`pairs` predicted for a GPU, from the recorded one that is nearest (`start`), with bounds of the ratios.

    errors: as `tested` gives them. factor: by which a ratio may be off, of all the same. ValueError as in `nearest`.
    """
    start, old, new = nearest(name, rows)
    found, factor = predicted(study, cases, rows[start], old, new), bound(errors, "ratios", distance(old, new))
    return found.assign(low=found["ratio"] / factor, high=found["ratio"] * factor, start=start, factor=factor)
