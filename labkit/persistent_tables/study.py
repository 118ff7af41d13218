"""Study 03: a decoder step from tables on the device; what each way to keep the tables right costs a token."""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.bench.spec import Case, Floor, Rule, Study, Trial, Variant, integer, list_of, one_of
from labkit.persistent_tables import claims, names, trials
from labkit.persistent_tables.model import TINY, decoder

HERE = "labkit.persistent_tables.trials"
ONE_SET = 2**40  # bytes: one buffer set, since a decode reads the same weights for every token
GRAPHS = {names.OURS: "ours", names.LONGEST: "step", names.UNORDERED: "control"}
GRAPHS |= dict.fromkeys(names.ABLATIONS, "step")
GRAPHS |= dict.fromkeys((*names.SEPARATE, *names.DEPENDENT), "baseline") | {names.READ: "ceiling"}


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """Whole tokens of every model; further numbers of records, contexts and types of some; then the host's work."""
    wanted = [_params(model) for model in parameters["models"]]
    if names.H1024 in parameters["models"]:
        wanted += [_params(names.H1024, parts=n) for n in parameters["parts"]]
        wanted += [_params(names.H1024, dtype=name) for name in parameters["dtypes"] if name != "bf16"]
    longer = [name for name in (names.H1024, names.LLAMA) if name in parameters["models"]]
    wanted += [_params(name, start=n) for name in longer for n in parameters["starts"]]
    idle = [one | {"queued_us": 0} for one in wanted if one["start"] == names.START and one["dtype"] == "bf16"]
    busy = [one | {"queued_us": names.QUEUED_US} for one in idle if one["parts"] == names.PUBLISHED_PARTS]
    found = [Case("token", one) for one in wanted] + [Case("host", one) for one in idle + busy]
    return sorted(found, key=lambda x: parameters["models"].index(x["model"]))  # cases that share weights together


def _params(model: str, start: int = names.START, parts: int = 0, dtype: str = "bf16") -> dict[str, Any]:
    """parts: records of a projection at most; 0: as many as programs."""
    return {"model": model, "dtype": dtype, "start": start, "parts": parts}


def floor(x: Case) -> Floor:
    """All weights once; the keys and values of the context read, those of the token written. None of the host's work.

    The context is the mean one of a timed sequence.
    """
    if x.op == "host":
        return Floor(0, limit="", set_bytes=ONE_SET)
    model, size = decoder(x["model"]), trials.DTYPES[x["dtype"]].itemsize
    context = x["start"] + (trials.sequence(x) + 1) / 2
    cache = round(2 * model.layers * model.kv_width * (context + 1))
    weights = model.streamed_weights()
    attention = round(4 * model.layers * model.q_width * context)
    return Floor((weights + cache) * size, 2 * weights + attention, "read", set_bytes=ONE_SET)


def variants(x: Case) -> list[Variant]:
    """The tables and the separate kernels without the host; the ways with it; the host's parts of each way."""
    if x.op == "host":
        return [_part(name, which) for name in hosted(x) for which in names.PARTS]
    whole = not x["parts"] and x["start"] == names.START and x["dtype"] == "bf16"
    some = (names.OURS, names.GEMV, names.GEMV_DEPENDENT) if x["start"] != names.START else (names.OURS,)
    graphs = {name: role for name, role in GRAPHS.items() if whole or name in some}
    found = [_variant(name, role, *_GRAPH[name], "graph") for name, role in graphs.items()]
    found += [_variant(name, _role(name), "way", {"name": name}, "eager") for name in waiting(x)]
    return found + ([_variant(names.REPLAYED, "baseline", "replayed", {}, "eager")] if whole else [])


def waiting(x: Case) -> tuple[str, ...]:
    """The ways that a case times with the host at work."""
    if x["model"] == TINY.name or x["parts"] == names.PUBLISHED_PARTS:
        return names.WAYS + names.ALONE
    if x["parts"] or x["start"] != names.START:
        return names.SWEPT if x["model"] == names.H1024 else ()
    return tuple(name for name in names.WAYS if name != names.REBUILT)  # which takes longer than all others together


def hosted(x: Case) -> tuple[str, ...]:
    """The ways whose work on the host is timed: those of the published size all, else one of a kind."""
    if x["parts"] == names.PUBLISHED_PARTS:
        return names.WAYS + names.ALONE
    return (names.REBUILT, *names.SWEPT)


def _role(name: str) -> str:
    return {names.GRAPH: "ours", names.REBUILT: "baseline"}.get(name, "step")


_GRAPH: dict[str, tuple[str, dict[str, Any]]] = {  # variant -> function of `trials`, arguments
    names.OURS: ("in_graph", {"schedule": "round-robin"}),
    names.LONGEST: ("in_graph", {"schedule": "longest-first"}),
    names.UNORDERED: ("unordered", {}),
    **{name: ("ablated", {"name": name}) for name in names.ABLATIONS},
    names.CUBLAS: ("separate", {"projections": "F.linear", "dependent": False}),
    names.GEMV: ("separate", {"projections": "gemv", "dependent": False}),
    names.CUBLAS_DEPENDENT: ("separate", {"projections": "F.linear", "dependent": True}),
    names.GEMV_DEPENDENT: ("separate", {"projections": "gemv", "dependent": True}),
    names.READ: ("read", {}),
}


def _part(name: str, which: str) -> Variant:
    return _variant(names.part(name, which), "step", "host", {"name": name, "part": which}, "eager")


def _variant(name: str, role: str, make: str, options: dict[str, Any], mode: str) -> Variant:
    prepare = getattr(trials, make)

    def ready(x: Case, device: Any, sets: int, seed: int) -> Trial:
        return prepare(x, device, sets, seed, **options)

    return Variant(name, role, f"{HERE}:{make}", ready, options, ("cold",), mode)


def control(x: Case) -> str:
    """The variant that the A/A control repeats: among those that the case is there for."""
    if x.op == "host":
        return names.part(names.GRAPH, "launch")
    return names.IN_LAUNCH if waiting(x) == names.SWEPT or x["parts"] else names.OURS


def kernels(some: Sequence[Case], capability: int) -> list[tuple[str, Mapping[str, Any]]]:
    """The step and the baseline's kernels of every model, which are compiled for each."""
    found = [
        (f"{HERE}:kernel", one)
        for model, dtype in dict.fromkeys((x["model"], x["dtype"]) for x in some)
        for one in trials.launches(model, dtype)
    ]
    models = dict.fromkeys(x["model"] for x in some if x["dtype"] == "bf16")
    found += [source for model in models for source in _baseline(model, capability)]
    return list({str(one): one for one in found}.values())  # models have shapes in common


def _baseline(model: str, capability: int) -> list[tuple[str, Mapping[str, Any]]]:
    import torch

    from labkit.gemv import choose
    from labkit.persistent_tables import baseline
    from labkit.persistent_tables.tables import Lowering

    found, device = [], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dependent in (False, True)[: 1 + (capability >= 90)]:
        compilable = "labkit.persistent_tables.baseline:compilable"
        found += [
            (compilable, {"model": model, "kernel": name, "dependent": dependent, "cache": names.CACHE})
            for name in baseline.KERNELS
        ]
        for N, K in Lowering(decoder(model), 1).projections().values():
            choice = choose.choose(N, K, 2, device).as_dict()
            found.append((f"{HERE}:projection", {"N": N, "K": K, "choice": choice, "dependent": dependent}))
    return found


def _or_none(rule: Rule) -> Rule:
    """Of a list that may also be empty."""
    return lambda value: None if value == [] else rule(value)


STUDY = Study(
    name="persistent_tables",
    title="Persistent device tables: a table-driven decode",
    summary="What does it cost to keep the tables of a persistent kernel right while the position of the token moves?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    parameters={
        "models": list_of(one_of(*names.MODELS)),
        "dtypes": list_of(one_of(*trials.DTYPES)),
        "parts": _or_none(list_of(integer(1, 4096))),
        "starts": _or_none(list_of(integer(1, names.CACHE - trials.CHECKED))),
    },
    tiny=(Case("token", _params(TINY.name, dtype="fp32")),),
    kernels=kernels,
)
