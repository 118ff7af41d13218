"""One token of the tables' decode over time: what each program did when, and on which multiprocessor."""

from typing import Any

import pandas as pd
import torch

from labkit.bench.machine import this_machine
from labkit.bench.spec import Case
from labkit.evidence import compiled, timeline
from labkit.kernels.decoder.tables import OP, OPS
from labkit.studies.persistent_tables import decodes, trials, variants
from labkit.studies.persistent_tables.study import SHORT


def take(x: Case, device: Any, seed: int, count: int = SHORT) -> list[timeline.Timeline]:
    """The last of `count` tokens of a case, a bar for each record; they are decoded here. Stage: the record's op.

    RuntimeError if a record gave up waiting.
    """
    _compile_ahead(x, device)
    plain = trials.prepared(x, device, seed, variants.GRAPH)
    before = timeline.replayed(_decode(x, plain, plain.launched, count))
    run = trials.prepared(x, device, seed, variants.GRAPH, changed=variants.ABLATIONS[variants.MARKED])
    launch, clock = timeline.clocked(run.launched)
    after = timeline.replayed(_decode(x, run, launch, count))
    run.memory.check()
    bars = _bars(run.tables, run.memory.marks.cpu().numpy(), clock.cpu().numpy())
    return [timeline.Timeline(variants.OURS, timeline.from_first(bars), before / count, after / count)]


def _compile_ahead(x: Case, device: Any) -> None:
    """The kernels by which programs are counted, on all cores: they are compiled one after the other else."""
    if torch.device(device).type == "cuda":
        found = trials.steps(x["model"], x["dtype"])
        compiled.prebuild([(f"{variants.TRIALS}:compilable", one) for one in found], this_machine().capability)


def _decode(x: Case, run: Any, launch: Any, count: int) -> list[Any]:
    return decodes.on_the_device(run.memory.position, launch, x["start"], count)


def _bars(tables: Any, marks: Any, clock: Any) -> pd.DataFrame:
    """A bar for each record that has worked; one with no position yet has waited for nobody, and has done nothing."""
    lengths = tables.queue[1:] - tables.queue[:-1]
    program = [i for i, length in enumerate(lengths) for _ in range(length)]
    found = {"launch": 0, "program": program, "sm": clock[program, 0]}
    found |= {"stage": [OPS[op - 1] for op in tables.records[:, OP]]}
    found |= dict(zip(("begin_ns", "released_ns", "end_ns"), marks.T, strict=True))
    bars = pd.DataFrame(found)
    return bars[bars["released_ns"] >= bars["begin_ns"]].reset_index(drop=True)
