"""Evidence of a study's variants: compiled code, accesses and hardware counters of its launches."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labkit import registry
from labkit.bench import records
from labkit.bench.spec import Case, Study, Trial, Variant
from labkit.evidence import coalescing, compiled
from labkit.evidence.compiled import Source
from labkit.evidence.counters import NotTaken, count
from labkit.kernels.launch import Launch, launched
from labkit.kernels.offline import CAPABILITIES, offline


def compiled_for(
    study_name: str, wanted: Sequence[tuple[Case, str]], capabilities: Sequence[int] = CAPABILITIES
) -> pd.DataFrame:
    """`compiled.table` for variants of a study, (case, variant name) each, with columns op, case, variant for `source`.

    Every case is prepared on the CPU at its full size: ask for small batches where the code does not depend on it.
    KeyError for an unknown study or variant; IsolatedError for a library call, which has no kernel of its own.
    """
    return with_cases(study_name, wanted, lambda sources: compiled.table(sources, capabilities))


def with_cases(
    study_name: str, wanted: Sequence[tuple[Case, str]], ask: Callable[[Mapping[str, Source]], pd.DataFrame]
) -> pd.DataFrame:
    """What `ask` answers for the sources of (case, variant name), its column `source` replaced by op, case, variant."""
    if not wanted:
        return pd.DataFrame(columns=["op", "case", "variant"])
    known = registry.load(study_name)
    for case, name in wanted:
        if name not in (names := [variant.name for variant in known.variants(case)]):
            raise KeyError(f"{study_name} has no variant {name!r} for {case.key}; known: {', '.join(names)}")
    pairs = {f"{case.op} {case.key} {name}": (case, name) for case, name in wanted}
    found = ask({key: variant_source(study_name, case, name) for key, (case, name) in pairs.items()})
    labels = [(case.op, case.key, name) for case, name in map(pairs.__getitem__, found["source"])]
    labels = pd.DataFrame(labels, index=found.index, columns=["op", "case", "variant"])
    return pd.concat([labels, found.drop(columns="source")], axis=1)


def variant_source(study_name: str, case: Case, variant: str) -> Source:
    """A source, as `table` takes it, for a variant of a study."""
    arguments = {"study": study_name, "op": case.op, "params": dict(case.params), "variant": variant}
    return "labkit.sweep.variants:variant_launch", arguments


def variant_launch(study: str, op: str, params: Mapping[str, Any], variant: str, device: str = "cpu") -> Launch:
    """The launch of a variant, prepared with one buffer set. ValueError if it is a library call, which has none."""
    launch = _prepared(study, op, params, variant, device).launch
    if launch is None:
        raise ValueError(f"{study}: {variant} is a library call and has no kernel of its own")
    return launch


def _prepared(study: str, op: str, params: Mapping[str, Any], variant: str, device: str) -> Trial:
    case = Case(op, params)
    found = next(one for one in registry.load(study).variants(case) if one.name == variant)
    return found.prepare(case, device, 1, 0)


def ahead(study_name: str, calls: Iterable[tuple[Case, Variant]], capability: int) -> list[Source]:
    """Sources, for `compiled.prebuild`, of all that calls of (case, variant) launch; of the same code the first.

    Calls of others are left out. All are prepared on the device `meta`, whose tensors have no memory, here and where
    they are compiled. Of a variant that searches it is all that it tries.
    """
    found: dict[str, Source] = {}
    with offline(capability):
        for case, variant in (pair for pair in calls if pair[1].role != "peer"):
            _, arguments = variant_source(study_name, case, variant.name)
            trial = variant.prepare(case, "meta", 1, 0)
            dissected = code_of(trial.launch) if trial.dissect and trial.launch else ""
            for place, launch in enumerate(launched(trial.calls[0])):
                code = code_of(launch)
                named = hashlib.sha256(code.encode()).hexdigest()[:16]  # with another choice it is to be compiled, too
                wanted = {**arguments, "place": place, "code": named, compiled.DISSECT: code == dissected}
                once(found, code, (f"{__name__}:launch_of_call", wanted))
    return list(found.values())


def once(found: dict[str, Source], code: str, source: Source) -> None:
    """Keep a source of some code: the first, or the first whose evidence is asked for."""
    if code not in found or (compiled.dissected(source) and not compiled.dissected(found[code])):
        found[code] = source


def launch_of_call(study: str, op: str, params: Mapping[str, Any], variant: str, place: int, code: str = "") -> Launch:
    """The launch at a place in the order of a variant's call, on `meta`. code: a name of what it is compiled for."""
    return launched(_prepared(study, op, params, variant, "meta").calls[0])[place]


def code_of(launch: Launch) -> str:
    """What a launch is compiled for: its kernel, constants and options, and what Triton asks of the other arguments."""
    kinds, params = launch.kernel.fn.__annotations__, getattr(launch.kernel, "params", ())  # the interpreter has none
    plain = {one.name for one in params if one.do_not_specialize}
    args = {n: _kind(value, "constexpr" in str(kinds.get(n)), n not in plain) for n, value in launch.args.items()}
    return repr((launch.kernel.fn.__name__, sorted(args.items()), sorted(launch.options.items())))


def _kind(value: Any, is_constant: bool, is_specialised: bool) -> Any:
    """What Triton asks of an argument that it compiles for."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if is_constant:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, is_specialised and value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), value.padding
    if type(value) is int:
        return value.bit_length() > 31, is_specialised and (value == 1, value % 16 == 0)
    return type(value) if isinstance(value, float) else value


def accesses_for(
    study_name: str, wanted: Sequence[tuple[Case, str]], capability: int = 90, program: tuple[int, int, int] = (0, 0, 0)
) -> pd.DataFrame:
    """`coalescing.table`, as `compiled_for` is `compiled.table`."""
    return with_cases(study_name, wanted, lambda sources: coalescing.table(sources, capability, program))


def complete(
    study: Study,
    parameters: Mapping[str, Any],
    path: Path,
    env: Mapping[str, str | None],
    say: Callable[[str], None],
    idle: Callable[[], Any] = lambda: None,
) -> None:
    """Count what the study asks for (`Study.counted`) and its Parquet file does not have yet, and rewrite the file.

    Counters are kept with the cold graph row of a variant that may be used. Where they cannot be taken one line says
    why, and the rows stay as they are: the next run tries again. idle: as in `counters.count`.
    """
    wanted = {(case.op, case.key, name): (case, name) for case, name in study.counted(parameters)}
    if not wanted:
        return
    rows = records.read(path)
    usable = rows[rows["ok"] & (rows["cache"] == "cold") & (rows["mode"] == "graph") & (rows["counters"] == "{}")]
    keys = zip(usable["op"], usable["case"], usable["variant"], strict=True)
    missing = {key: index for key, index in zip(keys, usable.index, strict=True) if key in wanted}
    if not missing:
        return
    say(f"{study.name}: counters of {len(missing)} kernels to take with ncu")
    try:
        sources = [variant_source(study.name, *wanted[key]) for key in missing]
        found = count([(function, {**arguments, "device": "cuda"}) for function, arguments in sources], env, idle)
    except NotTaken as problem:
        say(f"{study.name}: counters: not taken: {problem}")
        return
    for key, one in zip(missing, found, strict=True):
        if "problem" in one:
            say(f"{study.name}: counters: not taken of {key[2]}, {key[1]}: {one['problem']}")
    with records.changing(path):
        rows = records.read(path)  # others may have written meanwhile
        for (op, case, variant), one in zip(missing, found, strict=True):
            of_this = (rows["op"] == op) & (rows["case"] == case) & (rows["variant"] == variant)
            if "problem" not in one:
                cold = (rows["cache"] == "cold") & (rows["mode"] == "graph")
                rows.loc[of_this & cold, "counters"] = json.dumps(one, sort_keys=True)
        records.write(path, rows)
