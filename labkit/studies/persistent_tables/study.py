"""Study 03: a decoder step from tables on the device; what each way to keep the tables right costs a token."""

from collections.abc import Mapping
from typing import Any

from labkit.bench.spec import Case, Floor, Study, Timelines, Variant, integer, lazy, list_of, one_of
from labkit.studies.persistent_tables import claims
from labkit.studies.persistent_tables import variants as names

ONE_SET = 2**40  # bytes: one buffer set, since a decode reads the same weights for every token
SHORT, LONG = 8, 32  # tokens of a timed sequence


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """Whole tokens of every model; further records, contexts and types of some; several sequences; the host's work."""
    wanted = [_params(model) for model in parameters["models"]]
    if names.H1024 in parameters["models"]:
        wanted += [_params(names.H1024, parts=n) for n in parameters["parts"]]
        wanted += [_params(names.H1024, dtype=name) for name in parameters["dtypes"] if name != "bf16"]
    longer = [name for name in (names.H1024, names.LLAMA) if name in parameters["models"]]
    wanted += [_params(name, start=n) for name in longer for n in parameters["starts"]]
    shared = [
        {"model": names.LLAMA, "dtype": "bf16", "start": n, "batch": names.BATCH}
        for n in (names.START, *parameters["starts"][-1:])  # the trend is seen from two
        if names.LLAMA in parameters["models"]
    ]
    idle = [one | {"queued_us": 0} for one in wanted if one["start"] == names.START and one["dtype"] == "bf16"]
    busy = [one | {"queued_us": names.QUEUED_US} for one in idle if one["parts"] == names.PUBLISHED_PARTS]
    found = [Case("token", one) for one in wanted] + [Case("batch", one) for one in shared]
    found += [Case("host", one) for one in idle + busy]
    return sorted(found, key=lambda x: parameters["models"].index(x["model"]))  # cases that share weights together


def _params(model: str, start: int = names.START, parts: int = 0, dtype: str = "bf16") -> dict[str, Any]:
    """parts: records of a projection at most; 0: as many as programs."""
    return {"model": model, "dtype": dtype, "start": start, "parts": parts}


def sequence(x: Case, way: str = "") -> int:
    """Tokens of a timed sequence: fewer where one takes long."""
    if x["model"] == names.TINY:
        return 1
    if way in names.BUILT:
        return SHORT // 2
    small = x.op != "batch" and x["model"] == names.H1024 and not x["parts"] and x["start"] == names.START
    return LONG if small else SHORT


def batch_of(x: Case) -> int:
    """Sequences that share a step."""
    return x.params.get("batch", 1)


def floor(x: Case) -> Floor:
    """All weights once; the keys and values of the context read, those of the token written. None of the host's work.

    The context is the mean one of a timed sequence. What a sequence of a batch has of its own counts for each.
    """
    if x.op == "host":
        return Floor(0, limit="", set_bytes=ONE_SET)
    from labkit.kernels.decoder.model import decoder

    model, size = decoder(x["model"]), names.BYTES[x["dtype"]]
    context = x["start"] + (sequence(x) + 1) / 2
    cache = round(2 * model.layers * model.kv_width * (context + 1))
    weights, batch = model.streamed_weights(), batch_of(x)
    attention = round(4 * model.layers * model.q_width * context)
    read = weights + batch * cache + (batch - 1) * model.hidden  # of the embedding a row each
    return Floor(read * size, batch * (2 * weights + attention), "read", set_bytes=ONE_SET)


def variants(x: Case) -> list[Variant]:
    """The tables and the separate kernels without the host; the ways with it; the host's parts of each way.

    Of several sequences the tables and the chain whose projections take them: the lab's GEMV takes one.
    """
    if x.op == "host":
        return [names.HOST[names.part(name, which)] for name in hosted(x) for which in names.PARTS]
    if x.op == "batch":
        found = [names.CAPTURED[name] for name in (names.OURS, names.CUBLAS, names.CUBLAS_DEPENDENT)]
        return found + [names.IN_STREAM] if x["model"] == names.LLAMA else found
    whole = names.MAIN.items() <= x.params.items()
    some = (names.OURS, names.GEMV, names.GEMV_DEPENDENT) if x["start"] != names.START else (names.OURS,)
    captured = [one for name, one in names.CAPTURED.items() if whole or name in some]
    if x["start"] != names.START and x["model"] == names.H1024:
        captured.append(names.IN_SPANS)
    if x["model"] == names.LLAMA:
        captured.append(names.IN_STREAM)
    eager = (*waiting(x), names.REPLAYED) if whole else waiting(x)
    return captured + [names.EAGER[name] for name in eager]


def waiting(x: Case) -> tuple[str, ...]:
    """The ways that a case times with the host at work."""
    if x["model"] == names.TINY or x["parts"] == names.PUBLISHED_PARTS:
        return names.WAYS + names.ALONE
    if x["parts"] or x["start"] != names.START:
        return names.SWEPT if x["model"] == names.H1024 else ()
    return tuple(name for name in names.WAYS if name != names.REBUILT)  # which takes longer than all others together


def hosted(x: Case) -> tuple[str, ...]:
    """The ways whose work on the host is timed: those of the published size all, else one of a kind."""
    if x["parts"] == names.PUBLISHED_PARTS:
        return names.WAYS + names.ALONE
    return (names.REBUILT, *names.SWEPT)


def control(x: Case) -> str:
    """The variant that the A/A control repeats: among those that the case is there for."""
    if x.op == "host":
        return names.part(names.GRAPH, "launch")
    if x.op == "batch":
        return names.OURS
    return names.IN_LAUNCH if waiting(x) == names.SWEPT or x["parts"] else names.OURS


STUDY = Study(
    name="persistent_tables",
    title="Persistent device tables: a table-driven decode",
    summary="What does it cost to keep the tables of a persistent kernel right while the position of the token moves?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    pairs=claims.pairs,
    parameters={
        "models": list_of(one_of(*names.MODELS)),
        "dtypes": list_of(one_of(*names.BYTES)),
        "parts": list_of(integer(1, 4096), empty=True),
        "starts": list_of(integer(1, names.CACHE - names.CHECKED), empty=True),
    },
    tiny=(
        Case("token", _params(names.TINY, dtype="fp32")),
        Case("batch", {"model": names.TINY, "dtype": "fp32", "start": names.START, "batch": 2}),
    ),
    kernels=lazy(f"{names.TRIALS}:compiled_ahead"),
    timelines=Timelines(
        Case("token", _params(names.H1024)),
        lazy(f"{names.PACKAGE}.timelines:take"),
        names.CAPTURED[names.MARKED].source,
    ),
)
