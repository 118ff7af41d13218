"""`labkit check`: a function of the reader's own, its errors in all dtypes and, on a GPU, how it stands in one case."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from labkit import registry
from labkit.bench.spec import Case, Study
from labkit.sweep import added
from labkit.sweep import check as checks
from labkit.sweep.correctness import COMPILER, INTERPRETER
from labkit.workflow import lease, notebooks, quick


def check(function: str, study: str | None, wanted: str, say: Callable[[str], None]) -> dict[str, Any]:
    """What is found of FILE.py:FUNCTION: function, study, why it was not timed (or ""), case, errors, times.

    wanted: "NAME=VALUE,…" of the case that is timed; empty: the first headline case that takes functions, else the
    first. ValueError for what does not exist, before anything runs.
    """
    known = registry.load(study) if study else checks.study_of(function)
    made = added.with_added(known, [added.absolute(function)])
    case = checks.case_of(known, known.cases(notebooks.defaults(known.name)), _parts(wanted))
    problem = notebooks.why_not_measure()
    if not (wanted or problem):
        case = _headline(known, case)
    found = {"function": function, "study": known.name, "case": dict(case.params), "not timed": problem}
    if problem:
        return found | {"errors": _plain(checks.errors(made, "cpu", INTERPRETER)), "times": []}
    with lease.gpu_lease(say=say) as gpu:
        env = lease.environment(gpu)
        errors = checks.errors(made, "cuda", {**COMPILER, **env})
        times = checks.timed(made, case, env, say) if all(line["ok"] for line in errors) else []
    return found | {"errors": _plain(errors), "times": _plain(times)}


def _headline(study: Study, otherwise: Case) -> Case:
    """The first headline case that takes functions. Only on a GPU: to find it may take longer than all the rest."""
    some = quick.of(study).cases(notebooks.defaults(study.name))
    return next((case for case in some if study.added.takes(case)), otherwise)


def _parts(text: str) -> Mapping[str, str]:
    """ "N=4096,dtype=bf16" as a mapping. ValueError for text of another form."""
    found = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--case is {text!r}; allowed: NAME=VALUE, or several with commas between")
        found[name.strip()] = value.strip()
    return found


def _plain(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As JSON has it: NaN is no number."""
    values = [{name: value.item() if hasattr(value, "item") else value for name, value in one.items()} for one in lines]
    return [{n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in one.items()} for one in values]


def fine(found: Mapping[str, Any]) -> bool:
    """Whether it is right, and could be timed where there is a GPU."""
    timed = found["times"] or found["not timed"]
    return bool(timed) and all(line["ok"] for line in found["errors"]) and not any(map(_failed, found["times"]))


def _failed(line: Mapping[str, Any]) -> bool:
    return line.get("verdict", "failed") == "failed"


def text(found: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{found['function']}, as {found['study']} gives its arguments; relative errors against float64:"]
    for line in found["errors"]:
        error = "     –" if line["error"] is None else f"{line['error']:.1e}"
        lines.append(f"  {'ok   ' if line['ok'] else 'WRONG'} {error}  {line['case']}  {line['reason']}".rstrip())
    if found["not timed"]:
        return "\n".join([*lines, f"not timed: {found['not timed']}"])
    lines.append(f"in {', '.join(f'{name} {value}' for name, value in found['case'].items())}:")
    return "\n".join([*lines, *map(_time, found["times"])])


def _time(line: Mapping[str, Any]) -> str:
    if _failed(line):
        return f"  failed: {line['remark']}"
    ratio = f"{line['ratio']:.3f} [{line['low']:.3f}, {line['high']:.3f}]" if line["ratio"] else "–"
    how = f"{line['cache']}, {line['mode']}"
    return (
        f"  {line['verdict']} {ratio}  {line['µs']:.2f} µs against {line['its µs']:.2f} µs of {line['against']} ({how})"
    )
