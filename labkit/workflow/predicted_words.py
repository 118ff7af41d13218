"""What pages show of predictions, the same for every study: tables and sentences that say they are no measurement."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit import paths
from labkit.bench.machine import Machine
from labkit.bench.spec import Case, Study
from labkit.evidence import sheets
from labkit.report import figures
from labkit.report.figures import Html
from labkit.report.verdicts import Said
from labkit.report.words import gains
from labkit.workflow import elsewhere, gpus, predictions
from labkit.workflow.elsewhere import VERDICT, Rows

PAIR = ["op", "case", "variant", "against"]
PERCENT = {"median error %": "{:.1f}", "90 % are within %": "{:.1f}"}
RATIO = "Ratio: the time of “against” over that of “variant”; above one, “variant” is faster."
FURTHER = (
    "The bounds are what 90 % of ratios were within, the worse way, and wider where the rates of memory, products and "
    "multiprocessors differ more against each other than between these: by as much, in logarithms."
)
NO_PAIRS = "no recorded GPU has a pair that the claims are about, cold and in a CUDA graph, in the cases shown."
NOT_KNOWN = (
    "The recorded GPUs have the same multiprocessors and differ in their memory alone. Of another GPU the transfer "
    "knows the rates of memory, of bf16 products, and of multiprocessors times clock. It does not know the size of its "
    "L2, the waves of a grid, or its instructions; there the error may be larger than the bounds."
)


def name_of(gpu: str) -> str:
    """The name of a GPU, recorded or not, for its folder's name."""
    machine = Machine.load(gpus.bare().get(gpu, paths.DATA / gpu))
    return sheets.unmeasured().get(gpu) or (machine.name if machine else gpu)


def page(gpu: str) -> str:
    """The sentence at the top of a page for a GPU that was not measured."""
    said = f"{name_of(gpu)} was not measured: what is marked “{VERDICT}” is a prediction for it"
    return f"{said}; everything else on this page is of the GPUs in this table."


def no_verdict(gpu: str) -> list[Said]:
    """What a GPU that was not measured says of a claim."""
    return [Said(name_of(gpu), None, why="a prediction judges no claim", verdict=VERDICT)]


# ---- how wrong predictions are


def errors(study: str) -> list[Html]:
    """Of all recorded rows of a study: the model's error on each GPU, the floor's, and that from one GPU to another."""
    rows = elsewhere.recorded_rows(study)
    found = [predictions.errors(some).assign(GPU=name_of(name)) for name, some in rows.items()]
    table = pd.concat(found, ignore_index=True) if found else pd.DataFrame()
    if table.empty:
        return [figures.note("No prediction of these rows is kept: `labkit record --predict` makes them.")]
    said = (
        "How far predictions are off: all recorded rows of role ours, cold. A model's prediction is that of a fit "
        "without the row's own kernel, where the model was fitted to it; the floor is bytes or products at the "
        "ceiling, and a launch."
    )
    columns = ["GPU", *(name for name in table if name != "GPU")]
    return [figures.table(table[columns], said, {"measured / predicted": "{:.2f}"} | PERCENT), *_transfers(rows)]


def _transfers(rows: Rows) -> list[Html]:
    table = elsewhere.transfers(rows)
    if table.empty:
        return []
    table = table.assign(**{way: table[way].map(name_of) for way in ("from", "to")})
    said = (
        "The same rows from one recorded GPU to another: the error of the transfer by which other GPUs are predicted, "
        "and that of the plainest one, the measured time and the difference of the two floors."
    )
    return [figures.table(table, said, PERCENT | {f"{elsewhere.SHIFT}{name}": form for name, form in PERCENT.items()})]


# ---- GPUs that nobody measured


def asked(study: Study, cases: Sequence[Case], rows: Rows, gpu: str) -> list[Html]:
    """The pairs on a GPU that was asked for, with their bounds. ValueError as in `elsewhere.table`."""
    tested = elsewhere.tested(study, elsewhere.recorded_rows(study.name))
    found = elsewhere.table(study, cases, rows, gpu, tested)
    if found.empty:
        return [figures.note(f"{name_of(gpu)}: {NO_PAIRS}")]
    table = _readable(found).rename(columns={"us": "µs", "against us": "against, µs"}).drop(columns=["start", "factor"])
    table["verdict"] = [figures.badge(VERDICT)] * len(table)
    said = f"{VERDICT.capitalize()}: {_way(gpu, found)}. {RATIO} {_tested(tested, {gpu: found})}"
    forms = {"µs": "{:.1f}", "against, µs": "{:.1f}", **dict.fromkeys(("ratio", "low", "high"), "{:.2f}")}
    return [_sentence(gpu, found), figures.table(table, said, forms), figures.note(NOT_KNOWN)]


def shipped(study: Study, cases: Sequence[Case], rows: Rows) -> list[Html]:
    """The pairs as measured on the recorded GPUs, and as predicted for those known by data sheet: one table, folded.

    And a sentence for each of these GPUs that a source of the study names.
    """
    starts = {gpu: some for gpu, some in rows.items() if elsewhere.can_start(gpu)}
    tested = elsewhere.tested(study, elsewhere.recorded_rows(study.name))
    told = {gpu: elsewhere.table(study, cases, starts, gpu, tested) for gpu in (sheets.unmeasured() if starts else ())}
    told = {gpu: table for gpu, table in told.items() if len(table)}
    if not told:
        return [figures.note(f"Nothing is predicted of other GPUs: {NO_PAIRS}")]
    ratios = {f"{name_of(gpu)}, recorded": elsewhere.measured(study, cases, some) for gpu, some in rows.items()}
    ratios |= {f"{name_of(gpu)}, predicted": table for gpu, table in told.items()}
    table = pd.DataFrame({name: one.set_index(PAIR)["ratio"] for name, one in ratios.items() if len(one)})
    said = f"{RATIO} Columns that say so are predicted, not measured. {_tested(tested, told)} {NOT_KNOWN}"
    inner = figures.table(_readable(table.reset_index()), said, dict.fromkeys(table, "{:.2f}"))
    sentences = [_sentence(gpu, found) for gpu, found in told.items() if _is_named(study, name_of(gpu))]
    return [folded("GPUs that were not measured, predicted by their data sheets", inner), *sentences]


def _tested(errors: pd.DataFrame, told: Mapping[str, pd.DataFrame]) -> str:
    """How wrong the transfer is between the recorded GPUs, and the bounds that follow for others."""
    if errors.empty:
        return "How far these may be off is not known: the pairs are recorded on one GPU alone."
    ways = []
    for line in errors.to_dict("records"):
        off = [
            " % in the median, 90 % of them by at most ".join(f"{line[f'{what}: {one}']:.1f}" for one in PERCENT)
            for what in ("ratios", "times")
        ]
        ways.append(f"{name_of(line['from'])} → {name_of(line['to'])} ratios by {off[0]} %, times by {off[1]} %")
    said = f"Tested on the same pairs between the recorded GPUs, predictions were off: {'; '.join(ways)}."
    bounds = ", ".join(f"{name_of(gpu)} ×/÷ {table['factor'].iloc[0]:.2f}" for gpu, table in told.items())
    return f"{said} {FURTHER} Bounds of a ratio: {bounds}."


def _way(gpu: str, table: pd.DataFrame) -> str:
    return f"{name_of(gpu)}, from the rows of the {name_of(table['start'].iloc[0])}"


def _sentence(gpu: str, table: pd.DataFrame) -> Html:
    """What is predicted of a GPU, by pair: from which ratio to which, and in how many cases one is out of bounds."""
    parts = []
    for (op, variant, against), some in table.groupby(["op", "variant", "against"], sort=False):
        clear = int(((some["low"] > 1) | (some["high"] < 1)).sum())
        said = f"in {clear} of {len(some)} cases the bounds leave out one"
        parts.append(f"{op}, “{variant}” against “{against}”: {gains(some['ratio'])}, {said}")
    return figures.note(f"{VERDICT.capitalize()}: {_way(gpu, table)}. {'; '.join(parts)}.")


def _is_named(study: Study, name: str) -> bool:
    """Whether a source of the study names that GPU: "A100" for an A100 80GB, "RTX 5090 Laptop" for an RTX 5090."""
    return any(one.startswith(name) or name.startswith(one) for claim in study.claims for one in claim.gpus)


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its cases in words: the parameters in which those of an operation differ."""
    said: dict[tuple[str, str], str] = {}
    for op, some in table.groupby("op"):
        params = {key: json.loads(key) for key in some["case"]}
        said |= {(op, key): _differing(one, list(params.values())) for key, one in params.items()}
    return table.assign(case=[said[key] for key in zip(table["op"], table["case"], strict=True)])


def _differing(one: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The parameters of a case that not all others share; all of the only one's."""
    some = {name: value for name, value in one.items() if any(other.get(name) != value for other in others)}
    return ", ".join(f"{name} {value}" for name, value in (some or one).items())


def folded(summary: str, inner: Html) -> Html:
    """Something that a page shows when it is asked to."""
    return Html(f"<details><summary>{summary}</summary>{inner.html}</details>", f"{summary}\n{inner.plain}")
