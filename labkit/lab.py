"""What the cells of a notebook use: one study, opened for the GPUs at hand.

    x = lab.open("state_layout", source="auto", models=[...], batches=[...], states=[...])
    x.provenance()                     # what is measured here, what is replayed, and why
    x.correctness()                    # every variant against its float64 reference
    x.answer()                         # the claims, the verdicts, what to do
    x.figure("times", views.times)     # one figure for all GPUs

With a GPU the study is measured here and shown beside the recorded GPUs; without one the recorded rows are shown, and
every figure says which GPU, driver and date they are from. With source "predicted" one section says what the recorded
rows would take on another GPU; everything else on the page is recorded.
"""

import ast
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache as once
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import escape

from labkit import isolated, paths, registry
from labkit.bench import ledger, machine, records, spec, timelines
from labkit.bench.claim import Claim
from labkit.bench.spec import Case, Floor, Study
from labkit.evidence import roofline
from labkit.report import figures, merged, origins, plots, programs, verdicts, words
from labkit.sweep import added, prepared, run
from labkit.sweep.correctness import COMPILER, INTERPRETER, check_here
from labkit.workflow import elsewhere, estimate, judged, lease, notebooks, predicted_words, recorded
from labkit.workflow import quick as quick_look

OWN_CAPTION = "Added functions. Ratio: the time of what each is set against over its own; above one, yours is faster."
OWN_FORMATS = {"error": "{:.1e}"} | dict.fromkeys(("ratio", "low", "high"), "{:.3f}")

EARLIER = "Some rows are of an earlier version of the kernels"

Draw = Callable[[pd.DataFrame], figures.Drawing]


@dataclass(frozen=True)
class Shown:
    """One GPU's rows. here: measured by this machine, else recorded in data/; own: of the reader's own functions.

    tiny: what the study's tiny cases gave on it, if they were run. file: the data file, if these are all of its rows.
    """

    machine: machine.Machine
    rows: pd.DataFrame
    here: bool
    own: pd.DataFrame = field(default_factory=pd.DataFrame)
    tiny: pd.DataFrame | None = None
    file: Path | None = None

    @property
    def label(self) -> str:
        """The GPU's name, with where its figures are from."""
        return f"{self.machine.name} ({'measured here' if self.here else 'recorded'})"

    @cached_property
    def kept(self) -> ledger.Kept:
        """What was made of the rows."""
        return ledger.Kept(self.rows)

    @cached_property
    def origin(self) -> str:
        """One sentence for captions: GPU, driver, versions, date."""
        return self.origin_of(self.stale)

    def origin_of(self, stale: str) -> str:
        """The same, with what is stale of the rows."""
        how = "Measured on this machine" if self.here else "Recorded measurement, not of this machine"
        about = versions_of(self.rows)
        versions = f"driver {about['driver']}, torch {about['torch']}, Triton {about['Triton']}"
        old = f" {EARLIER} ({stale})." if stale else ""
        return f"{how}: {self.machine.name}, {versions}, {about['date']}.{old}"

    @cached_property
    def stale(self) -> str:
        """The operations of which some rows are of an earlier version of the kernels: "extend, step"."""
        return ", ".join(sorted(set(self.rows["op"][recorded.stale(self.rows)].str.replace("_", " "))))


def versions_of(rows: pd.DataFrame) -> dict[str, str]:
    """Date, driver and versions of rows; all of them where the rows were not measured in one go."""
    days = rows["utc"].str[:10]
    versions = {name: ", ".join(sorted(set(rows[name.lower()]))) for name in ("driver", "torch", "Triton")}
    return {"date": " to ".join(dict.fromkeys([days.min(), days.max()]))} | versions


def open(
    name: str,
    source: str = "auto",
    gpu: str = "",
    processes: int = 3,
    quick: bool = False,
    add: Sequence[str] = (),
    **parameters: Any,
) -> "Lab":
    """Open a study: measure it here if asked to and possible, and load what is recorded.

    source: auto (measure if there is a GPU, else replay), measure, recorded, predicted. gpu: slug of the one recorded
    GPU to show; empty: all of them; with source "predicted" that of the GPU to predict (`gpus.predictable`). processes:
    independent measuring processes. quick: only the cases that each claim cannot do without (`workflow.quick`), in one
    process; of recorded rows the first process. add: functions of the reader's own to check and time beside the
    study's, "FILE.py:FUNCTION". parameters: the study's own.
    Raises KeyError for an unknown study, ValueError for a wrong parameter, RuntimeError if source is "measure" and
    there is no GPU, or if no GPU that is recorded has these cases. A study that was never recorded opens without rows.
    """
    isolated.collect_seldom()
    study = registry.load(name)
    study.check(parameters)
    if missing := [rule for rule in study.parameters if rule not in parameters]:
        raise ValueError(f"{name}: parameter {missing[0]!r} is missing; needed: {', '.join(study.parameters)}")
    known = [path.parent.name for path, _ in paths.data_files(name, runs=False)]
    if source not in spec.SOURCES:
        raise ValueError(f"source is {source!r}; allowed: {', '.join(spec.SOURCES)}")
    if source == "predicted":
        elsewhere.check(gpu)
    elif gpu and gpu not in known:
        raise ValueError(f"gpu is {gpu!r}; recorded: {', '.join(known) or 'none'}")
    if type(processes) is not int or processes < 1:
        raise ValueError(f"processes is {processes!r}; allowed: an integer from 1")
    if type(quick) is not bool:
        raise ValueError(f"quick is {quick!r}; allowed: True, False")
    if quick:
        study, processes = quick_look.of(study), 1
    own = added.with_added(study, add)
    measures = source in spec.MEASURING
    here, problem = (None, f"source is {source!r}")
    if measures:
        # A run's page is made beside the next study, so that what it checks on the GPU is checked now
        checks = prepared.in_run() and not quick and name != notebooks.FIRST  # whose page shows none
        here, problem = _measure(own, parameters, processes, checks)
    if source == "measure" and problem:
        raise RuntimeError(f"cannot measure here: {problem}")
    there = [_recorded(study, parameters, slug) for slug in known if source == "predicted" or gpu in ("", slug)]
    if quick:
        there = [replace(entry, rows=quick_look.rows_of(study, entry.rows), file=None) for entry in there]
    shown = [*([here] if here else []), *(entry for entry in there if len(entry.rows))]
    if known and not shown:
        raise RuntimeError(
            f"{name}: nothing to show: not measured here ({problem}), and no recorded GPU has these cases"
        )
    return Lab(study, parameters, shown, problem, own.add, gpu if source == "predicted" else "", quick)


def defaults(name: str) -> dict[str, Any]:
    """The parameters of a study as its notebook has them, but for source, gpu and processes. KeyError if unknown."""
    study, known = registry.load(name), notebooks.defaults(name)
    return {parameter: known[parameter] for parameter in study.parameters}


def contents() -> figures.Html:
    """The notebooks: what each asks, and of which GPUs there are measurements."""
    lines = []
    for name, notebook in registry.NOTEBOOKS.items():
        study, known = registry.load(name), [path.parent.name for path, _ in paths.data_files(name)]
        title = verdicts.link(study.title, f"{notebook}.ipynb")
        lines.append({"notebook": title, "question": study.summary, "measured on": ", ".join(dict.fromkeys(known))})
    return figures.table(pd.DataFrame(lines), "The studies")


UNMEASURED = "No measurement of this study is recorded yet, of any GPU."


class Lab:
    """A study with the rows of every GPU shown.

    shown: measured here first; problem: why nothing is measured here; add: the reader's own functions; target: the GPU
    to predict, if one was asked for. quick: a quick look, whose page compiles and checks nothing beside what is timed.
    """

    def __init__(
        self,
        study: Study,
        parameters: Mapping[str, Any],
        shown: Sequence[Shown],
        problem: str,
        add: Sequence[str] = (),
        target: str = "",
        quick: bool = False,
    ):
        self.study, self.parameters, self.shown, self.problem, self.add = study, parameters, shown, problem, add
        self.target, self.quick = target, quick
        self.cases = study.cases(parameters)
        self._judged: dict[str, list[verdicts.Said]] = {}

    def provenance(self) -> figures.Html:
        """What is measured here and what is replayed, and why; one row a GPU."""
        if not self.shown:
            return figures.note(f"{UNMEASURED} Here nothing is measured: {self.problem}.")
        why = f" Nothing was measured on this machine: {self.problem}." if self.problem else ""
        why += f" {predicted_words.page(self.target)}" if self.target else ""
        why += " A quick look: others' kernels that no claim rests on are left out." if self.quick else ""
        rows = [self._provenance(entry) for entry in self.shown]
        return figures.table(pd.DataFrame(rows), f"Where the figures on this page are from.{why}")

    def _provenance(self, entry: Shown) -> dict[str, Any]:
        rows = entry.rows
        absent = len(self.cases) - rows.groupby(["op", "case"]).ngroups
        figures_are = "measured here" if entry.here else "recorded"
        if entry.here and (taken := recorded.taken(self.study, entry.machine.slug, rows)):
            figures_are += f", {taken} cases of choices recorded"
        row = {"GPU": entry.machine.name, "figures": figures_are} | versions_of(rows)
        row |= {"processes": records.processes(rows["run"]), "rows": len(rows)}
        row |= {"unusable": int((~rows["ok"]).sum()), "missing": absent}
        return row | {"stale": int(recorded.stale(rows).sum())}

    def rows(self) -> pd.DataFrame:
        """All that is shown, to query and plot: a line a GPU, case and variant, with the case's parameters as columns.

        µs: median of the samples. Parameters that a case has not are NaN. To draw in the lab's style: `plots.style`.
        """
        parts = []
        for gpu, entry in self._entries.items():
            cases = pd.DataFrame(list(map(json.loads, entry.rows["case"])), index=entry.rows.index)
            told = entry.rows[["variant", "role", "mode", "cache"]]
            times = pd.DataFrame({"µs": records.times_us(entry.rows)}).join(entry.rows[["error", "ok"]])
            head = pd.DataFrame({"GPU": gpu, "op": entry.rows["op"]}, index=entry.rows.index)
            parts.append(head.join([cases.drop(columns=[*told, *times, "op"], errors="ignore"), told, times]))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def published(self) -> figures.Html:
        """The published numbers that this page tests, before anything is measured."""
        rows = [
            {"source": verdicts.link(claim.source, claim.url), "claim": claim.statement, "published": claim.published}
            | {"condition": claim.condition}
            for claim in self.study.claims
        ]
        return figures.table(pd.DataFrame(rows), caption="What was published")

    def floors(self, cases: Sequence[Case]) -> figures.Html:
        """Least bytes and operations of cases, least time at each GPU's ceiling; no constant columns."""
        rows = []
        for case in cases:
            floor = self.study.floor(case)
            row = dict(case.params) | {"MB moved": floor.bytes / 1e6, "FLOP a byte": floor.flops / floor.bytes}
            least = {f"least µs, {e.label}": self._least_us(floor, e) for e in self.shown}
            rows.append(row | {name: us for name, us in least.items() if us == us})
        table = pd.DataFrame(rows)
        varying = [name for name in table if len(table) == 1 or table[name].nunique() > 1]
        text = "The floor of each case: bytes over the machine's measured ceiling"
        return figures.table(table[varying], text, folded=True)

    @staticmethod
    def _least_us(floor: Floor, entry: Shown) -> float:
        path = (paths.RUNS if entry.here else paths.DATA) / entry.machine.slug / "machine.parquet"
        if not path.exists():
            return math.nan
        return roofline.predict(floor, roofline.Ceilings.from_rows(records.read(path))).floor_us

    @staticmethod
    def source(module: str, *names: str) -> Any:
        """The source of functions, highlighted; read from the file, so that it works without Triton."""
        from IPython.display import Code

        found = find_spec(module)
        text = Path(found.origin).read_text()
        nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        lines = text.splitlines()
        first = {name: min([node.lineno, *(one.lineno for one in node.decorator_list)]) for name, node in nodes.items()}
        parts = ["\n".join(lines[first[name] - 1 : nodes[name].end_lineno]) for name in names]
        return Code("\n\n\n".join(parts), language="python")

    @staticmethod
    def show_table(table: pd.DataFrame, caption: str, formats: Mapping | None = None) -> figures.Html:
        """A table that belongs to no GPU."""
        if table.empty:
            why = "no case shown has it" if find_spec("triton") else "Triton is not installed here"
            return figures.note(f"{caption} Not available: {why}.")
        return figures.table(table, caption, formats, folded=True)

    def correctness(self) -> figures.Html:
        """Every variant on the study's tiny cases; and the largest error of the timed cases on each GPU."""
        checked = [(entry.label, entry.rows[entry.rows["error"].notna()]) for entry in self.shown]
        if find_spec("triton") and not self.quick:  # of a quick look what is timed is checked, and nothing else
            here = [entry for entry in self.shown if entry.here]
            found = _tiny_here(self.study.name, here[0].tiny) if here else check_here(self.study.name, True)
            checked.insert(0, (_tiny(not here), found))
        for name, own in self._own.groupby("function", sort=False) if self.add else ():
            checked.append((f"{name} (added), {self._own_inputs}", own.assign(variant=name)))
        rows = [
            {"where": where, "variants": part["variant"].nunique(), "cases": part["case"].nunique()}
            | {"largest error": part["error"].max(), "wrong": int((~part["ok"]).sum())}
            for where, part in checked
            if len(part)
        ]
        if not rows:
            return figures.note("Nothing was checked: no row shown has an error, and no kernel was run here.")
        return figures.table(
            pd.DataFrame(rows),
            "Relative error against the float64 reference, by the study's own metric",
            {"largest error": "{:.1e}"},
        )

    @property
    def _own_inputs(self) -> str:
        return _tiny(bool(machine.why_no_gpu()))

    @cached_property
    def _own(self) -> pd.DataFrame:
        """The reader's own functions on the study's tiny cases, here."""
        study = added.with_added(self.study, self.add)
        return added.check_tiny(study, *(("cpu", INTERPRETER) if machine.why_no_gpu() else ("cuda", COMPILER)))

    def added(self) -> "Gallery":
        """The reader's own functions (`add`) against the study's choice; or how to have one checked and timed."""
        takes = self.study.added
        if takes is None:
            return Gallery([figures.note(f"{added.why_none(self.study)}.")])
        if not self.add:
            call = f"labkit run {self.study.name} --add my_kernels.py:my_function"
            text = f"No function was added. `{call}` has one checked and timed beside these: a Python file that defines"
            return Gallery([figures.note(f"{text} my_function({', '.join(takes.signature)}). {takes.help}")])
        if measured := [self._one_added(entry) for entry in self.shown if entry.here]:
            return Gallery(measured)
        if self._own.empty:
            return Gallery([figures.note("Added functions were neither checked nor timed: no tiny case takes them.")])
        said = f"Added functions against the float64 reference: {self._own_inputs}. None was timed: {self.problem}."
        cases = [", ".join(f"{name} {value}" for name, value in json.loads(key).items()) for key in self._own["case"]]
        return Gallery([figures.table(self._own.assign(case=cases), said, {"error": "{:.1e}"})])

    def _one_added(self, entry: Shown) -> figures.Html:
        table = added.compared(self.study, pd.concat([entry.rows, entry.own], ignore_index=True))
        if table.empty:
            return figures.note(f"{entry.label}: no case shown takes added functions.")
        table["verdict"] = [figures.badge(text) for text in table["verdict"]]
        cases = table.columns[: list(table.columns).index("µs")]  # those that say the same in every row are left out
        table = table.drop(columns=[name for name in cases if name != "function" and table[name].nunique() == 1])
        return figures.table(table, f"{OWN_CAPTION} {entry.origin}", OWN_FORMATS)

    @property
    def _entries(self) -> dict[str, Shown]:
        """The GPUs shown, by short names."""
        known = list(dict.fromkeys(entry.machine.name for entry in self.shown))
        short = dict(zip(known, words.short_names(known), strict=True))
        names = [f"{short[e.machine.name]}{' (measured here)' if e.here else ''}" for e in self.shown]
        if len(set(names)) < len(names):
            names = [entry.label for entry in self.shown]
        return dict(zip(names, self.shown, strict=True))

    def _read(self, entry: Shown, make: Callable[[pd.DataFrame], Any]) -> tuple[Any, origins.Pool]:
        """What is made of a GPU's rows, and where its numbers are looked for."""
        with ledger.recording(entry.kept) as book:
            made = make(entry.rows)
        return made, origins.Pool(entry.rows, book, self._place(entry))

    @cached_property
    def _origin(self) -> str:
        """One sentence for captions: which GPUs were measured where, and when."""
        return self._origin_of(self._entries)

    @staticmethod
    def _origin_of(entries: Mapping[str, Shown]) -> str:
        days = {gpu: f"{gpu}, {versions_of(entry.rows)['date']}" for gpu, entry in entries.items()}
        here = [day.replace(" (measured here)", "") for gpu, day in days.items() if entries[gpu].here]
        there = [day for gpu, day in days.items() if not entries[gpu].here]
        old = [f"{gpu}, {entry.stale}" for gpu, entry in entries.items() if entry.stale]
        said = [f"Measured on this machine: {here[0]}."] if here else []
        said += [f"Recorded measurements: {'; '.join(there)}."] if there else []
        return " ".join([*said, *([f"{EARLIER} ({'; '.join(old)})."] if old else [])])

    @property
    def _folder(self) -> str:
        """Where figures go: those of all recorded GPUs, of one, or with this machine's."""
        if any(entry.here for entry in self.shown):
            return "here"
        return "recorded" if len(self.shown) > 1 else self.shown[0].machine.slug

    def figure(self, name: str, draw: Draw) -> figures.Html:
        """One figure for all GPUs. draw: the rows of one -> a drawing, or a sentence why there is none."""
        if not self.shown:
            return figures.note(UNMEASURED)
        pools, drawn = {}, {}
        for gpu, entry in self._entries.items():
            drawn[gpu], pools[gpu] = self._read(entry, draw)
        pictures = {gpu: one for gpu, one in drawn.items() if isinstance(one, figures.Picture)}
        without = {gpu: origins.marked(one, pools[gpu]) for gpu, one in drawn.items() if isinstance(one, str)}
        if not pictures:
            return figures.note(figures.by_gpu(without))
        picture = merged.picture(pictures)
        fig = picture.fig
        plots.add_to_title(fig, " and ".join(self._named(gpu) for gpu in pictures))
        caption = _caption(pictures, pools, without)
        alt = f"{', '.join(map(self._named, pictures))}: {_alt(pictures)}"
        texts = {"alt": alt, "caption": caption.before(f" {self._origin}"), "table": picture.table}
        return figures.show(fig, name=f"{self.study.name}-{name}", gpu=self._folder, **texts)

    def _named(self, gpu: str) -> str:
        """The full name of a GPU for its short one."""
        return self._entries[gpu].machine.name

    def table(
        self, make: Callable[[pd.DataFrame], pd.DataFrame], caption: str, formats: Mapping | None = None
    ) -> figures.Html:
        """One table for all GPUs, made from the rows of each; a long one is folded."""
        made = {gpu: make(entry.rows) for gpu, entry in self._entries.items()}
        none = f"{caption} There is no such measurement." if self.shown else UNMEASURED
        return self._tabled(made, f"{caption} {self._origin}", formats, none)

    def launched(
        self,
        make: Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame],
        caption: str,
        formats: Mapping | None = None,
    ) -> figures.Html:
        """The same of the recorded GPUs, made from the rows of each and from what its launches do."""
        facts = recorded.launches()
        there = {gpu: entry for gpu, entry in self._entries.items() if len(facts) and not entry.here}
        made = {gpu: make(entry.rows, facts[facts["gpu"] == entry.machine.slug]) for gpu, entry in there.items()}
        none = f"{caption} What launches do is known of recorded rows alone, and of none that is shown."
        return self._tabled(made, f"{caption} {self._origin_of(there)}", formats, none)

    @staticmethod
    def _tabled(made: Mapping[str, pd.DataFrame], caption: str, formats: Mapping | None, none: str) -> figures.Html:
        """One table of those of several GPUs. none: what is said where there is none."""
        tables = {gpu: one for gpu, one in made.items() if len(one)}
        if not tables:
            return figures.note(none)
        table = merged.table(tables)
        return figures.table(table, caption, merged.formats(table, formats), folded=True)

    def counters(
        self,
        caption: str = "Requests and sectors of a whole launch, counted and predicted.",
        names: Mapping[str, str] | None = None,
    ) -> figures.Html:
        """What ncu counted beside what the code predicts; or a sentence where nothing was counted.

        names: recorded name of a variant -> what the page calls it.
        """
        from labkit.evidence import counters

        found = {gpu: counters.table(entry.rows) for gpu, entry in self._entries.items()}
        counted = {gpu: one for gpu, one in found.items() if len(one)}
        if not self.shown:
            return figures.note(UNMEASURED)
        if not counted:
            why = "they were measured without ncu, or it could not be used (`labkit doctor` says what is here)"
            return figures.note(f"Hardware counters are not recorded in these rows: {why}.")
        said = figures.by_gpu({gpu: _plain(counters.in_short(one)) for gpu, one in counted.items()})
        agree = {gpu: one.assign(agree=one["agree"].map({True: "yes", False: "no"})) for gpu, one in counted.items()}
        table = merged.table(agree).replace({"variant": dict(names or {})})
        text = said.after(f"{caption} Cold, caches flushed by ncu. ").before(f" {self._origin}")
        return figures.table(table, text, merged.formats(table, counters.FORMATS), folded=True)

    def side_by_side(
        self, make: Callable[[pd.DataFrame], pd.DataFrame], key: str, value: str, caption: str
    ) -> figures.Html:
        """One table for all GPUs, a column each. make: rows -> a table with the columns `key` and `value`."""
        tables = {gpu: make(entry.rows) for gpu, entry in self._entries.items()}
        columns = {label: table.set_index(key)[value] for label, table in tables.items() if len(table)}
        if not columns:
            return figures.note(f"{caption} There is no such measurement.")
        return figures.table(pd.DataFrame(columns).rename_axis(key), f"{caption} {self._origin}", folded=True)

    def timelines(self, caption: str, picture: bool = True) -> "Gallery | figures.Html":
        """Programs over time, a picture a GPU, the first one open; where none was taken, that it was not.

        caption: what is shown, with the case's parameters: "{model}". picture: False: only what it comes to, a sentence
        a GPU.
        """
        caption = caption.format(**self.study.timelines.case.params)
        rows = {gpu: timelines.of(self.study, entry.machine.slug, entry.here) for gpu, entry in self._entries.items()}
        taken = {gpu: one for gpu, one in rows.items() if len(one)}
        without = " and ".join(gpu for gpu in rows if gpu not in taken)
        none = f"No timeline has been taken yet on {without}; a run that measures takes one."
        if not taken:
            return figures.note(none if rows else UNMEASURED)
        notes = [figures.note(none)] if len(taken) < len(rows) else []
        if not picture:
            said = {gpu: self._told(gpu, one, programs.said) for gpu, one in taken.items()}
            return Gallery([figures.note(figures.by_gpu(said)), *notes])
        first, *others = [self._timeline(gpu, one, caption) for gpu, one in taken.items()]
        others = [figures.folded("The same on another GPU", one) for one in others]
        return Gallery([first, *others, *notes])

    def _timeline(self, gpu: str, rows: pd.DataFrame, caption: str) -> figures.Html:
        entry, said = self._entries[gpu], self._told(gpu, rows, programs.said)
        old = "timelines" if timelines.stale(self.study, rows) else ""
        text = said.after(f"{gpu}. {caption} ").before(" ")
        cost = self._told(gpu, rows, programs.cost).before(f" {Shown(entry.machine, rows, entry.here).origin_of(old)}")
        name = f"{self.study.name}-timeline-{entry.machine.slug}"
        alt = f"{entry.machine.name}: {caption} {said.plain}"
        return programs.shown(
            rows, name, self._folder, figures.Html(text.html + cost.html, text.plain + cost.plain), alt
        )

    def _told(self, gpu: str, rows: pd.DataFrame, make: Callable[[pd.DataFrame], str]) -> figures.Html:
        """What is made of a GPU's timelines, with where its numbers are from."""
        with ledger.recording() as book:
            text = make(rows)
        return origins.marked(text, origins.Pool(rows, book, self._place(self._entries[gpu])))

    def say(self, sentence: Callable[[pd.DataFrame], str]) -> figures.Html:
        """One generated sentence a GPU: results are never typed into prose, since they differ from GPU to GPU."""
        if not self.shown:
            return figures.note(UNMEASURED)
        said = {gpu: origins.marked(*self._read(entry, sentence)) for gpu, entry in self._entries.items()}
        return figures.note(figures.by_gpu(said))

    def compare(self, make: Callable[[pd.DataFrame], Mapping[str, str]], caption: str, key: str = "") -> figures.Html:
        """A table of short answers, a line a question and a column a GPU. make: rows of one GPU -> question -> answer.

        key: heading of the questions.
        """
        columns = {}
        for gpu, entry in self._entries.items():
            found, pool = self._read(entry, make)
            columns[gpu] = {question: origins.marked_answer(question, text, pool) for question, text in found.items()}
        questions = list(dict.fromkeys(question for found in columns.values() for question in found))
        if not questions:
            return figures.note(f"{caption} There is no such measurement." if self.shown else UNMEASURED)
        table = pd.DataFrame({gpu: [found.get(q) for q in questions] for gpu, found in columns.items()}, dtype=object)
        table.insert(0, key, questions)
        return figures.table(table, f"{caption} {self._origin}")

    def answer(self) -> figures.Html:
        """The first screen, by the study's module `answer`: HEADLINE, facts, conclusion, advice, hero.

        HEADLINE: ids of the claims to show. facts: rows of one GPU -> what the sentences are made from, empty of none.
        conclusion, advice: facts by GPU -> one sentence, or nothing. hero: rows of one GPU -> a drawing.
        """
        how = registry.answer(self.study.name)
        if how is None:
            raise ValueError(f"{self.study.name} has no module `answer`, by which a first screen is made")
        if not self.shown:
            return figures.note(UNMEASURED)
        entries = {gpu: (entry.kept, self._place(entry)) for gpu, entry in self._entries.items()}
        said = judged.told(how, entries, [entry.file for entry in self.shown])
        chosen = [claim for claim in self.study.claims if claim.id in how.HEADLINE]
        table = verdicts.headline(chosen, {claim.id: self._said(claim) for claim in chosen})
        return verdicts.answer(said["conclusion"], table, self.figure("answer", how.hero), said["advice"])

    def _place(self, entry: Shown) -> origins.Place:
        """Where this study's sentences on a GPU stand."""
        slug = entry.machine.slug + ("-here" if entry.here else "")
        notebook = registry.NOTEBOOKS.get(self.study.name, self.study.name)
        return origins.Place(notebook, slug, entry.machine.name, self.study.claims)

    def claims(self) -> figures.Html:
        """The published numbers, what each GPU measured, and the verdict."""
        if not self.shown:
            return figures.note(UNMEASURED)
        said = {claim.id: self._said(claim) for claim in self.study.claims}
        text = "Judged from the rows shown on this page; the index judges from all recorded rows."
        return verdicts.cards(self.study.claims, said, text)

    def _said(self, claim: Claim) -> list[verdicts.Said]:
        """What each GPU says of a claim; of one that is predicted, that this is no verdict."""
        if claim.id in self._judged:
            return self._judged[claim.id]
        found = []
        for gpu, entry in self._entries.items():
            one = judged.claim(claim, entry.kept, replace(self._place(entry), claims=[claim]), entry.file)
            if one.error:
                recorded.judgement_of(claim, entry.rows)  # raises it, with its trace
            found.append(verdicts.Said(gpu, one.judgement, one.figure, one.why, one.changed))
        found += predicted_words.no_verdict(self.target) if self.target else []
        self._judged[claim.id] = found
        return found

    def predictions(self) -> "Gallery":
        """How wrong predictions of this study's rows are: by the model, on each GPU, and from one GPU to another."""
        return Gallery(predicted_words.errors(self.study.name))

    def predicted(self) -> "Gallery":
        """The pairs that the claims are about on the GPU that was asked for, else on those known by data sheet, folded.

        ValueError naming what is missing, if that GPU cannot be predicted from the rows shown.
        """
        rows = {entry.machine.slug: entry.rows for entry in self.shown if not entry.here}
        show = predicted_words.asked if self.target else predicted_words.shipped
        return Gallery(show(self.study, self.cases, rows, *([self.target] if self.target else [])))

    def accesses(self, wanted: Sequence[tuple[Case, str]], capability: int = 90) -> pd.DataFrame:
        """Sectors and lines a request of every global access, derived without a GPU.

        Empty where Triton is missing, and in a quick look.
        """
        from labkit.sweep import variants

        if self.quick or not find_spec("triton"):
            return pd.DataFrame()
        return variants.accesses_for(self.study.name, wanted, capability)

    def compiled(self, wanted: Sequence[tuple[Case, str]], capabilities: Sequence[int]) -> pd.DataFrame:
        """Compiled evidence for several GPUs' generations, of the present sources.

        Where Triton is missing, and in a quick look, that of the rows shown.
        """
        from labkit.sweep import variants

        if find_spec("triton") and not self.quick:
            return variants.compiled_for(self.study.name, wanted, capabilities)
        parts = [recorded_evidence(entry.rows, wanted) for entry in self.shown]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


class Gallery:
    """Several pieces of HTML, shown one under the other."""

    def __init__(self, parts: Sequence[figures.Html]):
        self.parts = list(parts)

    def _repr_html_(self) -> str:
        return "\n".join(part.html for part in self.parts)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.parts))


def _caption(
    pictures: Mapping[str, figures.Picture],
    pools: Mapping[str, origins.Pool],
    without: Mapping[str, figures.Html],
) -> figures.Html:
    """What a figure is, said once, and what it comes to on each GPU."""
    about = {gpu: origins.marked(one.about, pools[gpu]) for gpu, one in pictures.items()}
    said = {gpu: origins.marked(f"{one.said}.", pools[gpu]) for gpu, one in pictures.items() if one.said}
    parts = [figures.by_gpu(one) for one in (about, {**said, **without}) if one]
    html = " ".join(part.html for part in parts)
    return figures.Html(html, " ".join(part.plain for part in parts))


def _alt(pictures: Mapping[str, figures.Picture]) -> str:
    shows = list(dict.fromkeys(one.shows for one in pictures.values()))
    said = [f"{gpu}: {one.said}." for gpu, one in pictures.items() if one.said]
    return " ".join([*shows, *said])


def _plain(text: str) -> figures.Html:
    return figures.Html(str(escape(text)), text)


def recorded_evidence(rows: pd.DataFrame, wanted: Sequence[tuple[Case, str]]) -> pd.DataFrame:
    """What the recorded kernels were compiled to, in the columns of `compiled.for_variants`."""
    keys = {(case.op, case.key, variant) for case, variant in wanted}
    found = rows[[key in keys for key in zip(rows["op"], rows["case"], rows["variant"], strict=True)]]
    found = found[found["evidence"] != "{}"].drop_duplicates(["op", "case", "variant"])
    evidence = pd.DataFrame([json.loads(text) for text in found["evidence"]], index=found.index)
    return pd.concat([found[["op", "case", "variant"]], evidence.drop(columns="accesses", errors="ignore")], axis=1)


def _recorded(study: Study, parameters: Mapping[str, Any], slug: str) -> Shown:
    folder = paths.DATA / slug
    file = folder / f"{study.name}.parquet"
    recorded_rows = records.read(file)
    rows = records.of_cases(recorded_rows, {case.id for case in study.cases(parameters)})
    here = machine.Machine.load(folder)
    if here is None:
        raise records.RecordError(f"{folder / 'machine.json'}: missing or not readable")
    return Shown(here, rows, here=False, file=file if len(rows) == len(recorded_rows) else None)


def _tiny(interpreted: bool) -> str:
    return "tiny inputs, " + ("Triton's interpreter" if interpreted else "this machine")


def _tiny_here(name: str, known: pd.DataFrame | None) -> pd.DataFrame:
    """What a study's tiny cases give on this GPU, beside which nothing is timed; known: if they were run."""
    if known is not None:
        return known
    with lease.gpu_lease(stop=lease.Orphaned(), say=_progress()):
        return check_here(name, False)


def _measure(
    study: Study, parameters: Mapping[str, Any], processes: int, checks: bool = False
) -> tuple[Shown | None, str]:
    """The study measured here and "", or None and why not. checks: run its tiny cases too, while it has the GPU.

    It has it until nothing more is timed or counted: what the counters are held against is figured after that.
    """
    if not lease.visible():
        return None, lease.why_none()
    machine.load_libraries()
    with ExitStack() as held:
        early = held.enter_context(_imported(study, processes))
        env = held.enter_context(_leased())
        if problem := machine.why_no_gpu():
            return None, problem
        if not prepared.in_run():  # which has said it
            _progress()(str(estimate.of_study(study, parameters, processes, machine.this_machine().slug)))
        with ThreadPoolExecutor(1) as pool:
            begin = once(lambda: pool.submit(check_here, study.name, False) if checks else None)

            def done() -> None:
                if checking := begin():  # where nothing was left to measure they begin now
                    wait([checking])
                held.close()

            rows, tiny = run.run(study, parameters, processes, env, _progress(), begin, done, early), None
            with suppress(isolated.IsolatedError):  # the page asks again, and says it
                tiny = checking.result() if (checking := begin()) else None
    if prepared.in_run():  # what the page compiles leaves the next study, which it is made beside, the other cores
        os.environ.setdefault("OMP_NUM_THREADS", "2")
    asked = {one.variant for one in added.functions(study, study.add)}
    own = rows[rows["variant"].isin(asked)].reset_index(drop=True)
    rows = rows[~added.is_added(rows)].reset_index(drop=True)
    return Shown(machine.this_machine(), rows, here=True, own=own, tiny=tiny), ""


def _imported(study: Study, processes: int) -> AbstractContextManager[Sequence[isolated.Started]]:
    """Processes that measure, started before their turn, where it is known on which GPU, and there is something to."""
    gpus = lease.visible() if prepared.in_run() else []
    if len(gpus) != 1 or any(paths.RUNS.glob(f"*/{study.name}.parquet")):
        return nullcontext(())
    return run.imported(study.name, processes, lease.environment(gpus[0]))


@contextmanager
def _leased() -> Iterator[Mapping[str, str]]:
    """Hold this process's GPU while it measures; under `labkit run` it may have it already."""
    try:
        with lease.gpu_lease(stop=lease.Orphaned(), say=_progress()) as gpu:
            _progress()(f"{lease.TAKEN}{gpu.id}")
            env = lease.environment(gpu)
            os.environ.update({lease.VISIBLE: gpu.id})  # before this process first touches CUDA
            yield env
    finally:
        _progress()(lease.FREED)


def _progress() -> Callable[[str], None]:
    """Show one line that the next one replaces, so that the page does not keep a log."""
    from IPython import get_ipython
    from IPython.display import clear_output

    if get_ipython() is None:
        return print

    def say(line: str) -> None:
        clear_output(wait=True)
        print(line)

    return say
