"""One function of the reader's own, looked at in seconds: its errors, and on a GPU how it stands beside the others.

What `run --add` does with a whole study, by the same code (`added`), with one case in one process.
"""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import isolated, registry
from labkit.bench import machine
from labkit.bench.spec import Case, Study, Variant
from labkit.sweep import added, run
from labkit.sweep import case as case_runner


def study_of(text: str) -> Study:
    """The study whose functions take the parameters that FILE.py:FUNCTION takes; the file is read, not run.

    ValueError if there is none, or more than one.
    """
    file, _, name = added.absolute(text).rpartition(":")
    takers = [registry.load(one) for one in added.takers()]
    added.functions(takers[0], [text])  # that there is such a function
    node = next((n for n in ast.parse(Path(file).read_text("utf-8")).body if getattr(n, "name", "") == name), None)
    takes = tuple(one.arg for one in (*node.args.posonlyargs, *node.args.args)) if node else ()
    found = [study for study in takers if takes[: len(study.added.signature)] == study.added.signature]
    if len(found) != 1:
        known = "; ".join(f"{study.name} ({', '.join(study.added.signature)})" for study in takers)
        raise ValueError(f"{text}: takes ({', '.join(takes)}); name the study (--study); they give: {known}")
    return found[0]


def case_of(study: Study, cases: Sequence[Case], wanted: Mapping[str, str]) -> Case:
    """The first of the cases that takes functions and has these parameters. ValueError naming what there is."""
    some = [case for case in cases if study.added.takes(case)]
    for name, text in wanted.items():
        values = list(dict.fromkeys(str(case.params[name]) for case in some if name in case.params))
        some = [case for case in some if str(case.params.get(name)) == text]
        if not some:
            known = ", ".join(values) or f"none; parameters are {', '.join(study.cases and cases[0].params)}"
            raise ValueError(f"{study.name}: no case has {name}={text}; allowed: {known}")
    return some[0]


def errors(study: Study, device: str, env: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Of every added function and tiny case, in all dtypes: function, case, error, ok, reason."""
    return added.check_tiny(study, device, env).to_dict("records")


def timed(study: Study, case: Case, env: Mapping[str, str | None], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Of every added function: its time and, against ours and each fetched source, the ratio with its interval.

    study: as `added.with_added` returns it. A function that ends its process has a line with the reason.
    """
    refused = added.refusals(study, [case], env, say)
    names = [one.variant for one in added.functions(study, study.add)]
    if all(name in refused for name in names):
        return [
            {"function": name.removeprefix(added.ADDED), "remark": refused[name][added.key(case)]} for name in names
        ]
    run.compile_ahead(replace(study, variants=few(study)), [case], say)
    arguments = (study.name, list(study.add), case.op, case.key, refused)
    return isolated.call(f"{__name__}:compared_here", *arguments, env={**env, "TRITON_INTERPRET": None}, on_line=say)


def few(study: Study) -> Callable[[Case], list[Variant]]:
    """The variants of a case that a function is held against: ours, those of releases, what the A/A control repeats."""

    def variants(case: Case) -> list[Variant]:
        return [one for one in study.variants(case) if _counts(one, study.control(case))]

    return variants


def _counts(variant: Variant, twin: str) -> bool:
    sources = (variant.source,) if isinstance(variant.source, str) else variant.source
    released = any(text.startswith("source:") for text in sources)
    return released or variant.role == "ours" or variant.name == twin or variant.name.startswith(added.ADDED)


def compared_here(name: str, add: Sequence[str], op: str, key: str, refused: added.Refused) -> list[dict[str, Any]]:
    """In a process of its own, on its GPU: time one case, and compare."""
    study, case = added.with_added(registry.load(name), add, refused), Case(op, json.loads(key))
    study = replace(study, variants=few(study))
    rows = pd.DataFrame(case_runner.measure(study, case, 0, machine.CudaDevice(), run.ceilings()))
    rows["run"] = rows["samples_ns"].map(lambda samples: [0] * len(samples))
    return against_each(study, case, rows)


def against_each(study: Study, case: Case, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Each added function against every other variant of a case that could be timed, `added.compared` line by line."""
    others = [one.name for one in few(study)(case) if not one.name.startswith(added.ADDED)]
    return added.compared(study, rows, others).to_dict("records")
