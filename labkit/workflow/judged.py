"""What a study comes to on the rows of a GPU: its claims and its findings, made once for the page and the index.

Both are kept on disk until the rows or a source of the lab change (`store.kept`): to make them takes a minute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.bench import ledger
from labkit.bench.claim import Claim, Judgement
from labkit.report import origins, verdicts
from labkit.report.figures import Html
from labkit.workflow import recorded, store


@dataclass(frozen=True)
class Judged:
    """A claim on the rows of one GPU.

    judgement: None where the rule raised `error`. changed: it rests on rows that were measured before its present rule.
    figure: what was measured, without the claim's quantity; why: the judgement's; both with their numbers' origins.
    """

    judgement: Judgement | None
    changed: bool = False
    error: str = ""
    figure: Html | str = ""
    why: Html | str = ""


def claim(claim: Claim, kept: ledger.Kept, place: origins.Place, file: Path | None = None) -> Judged:
    """A claim's judgement. file: the data file whose rows these all are, by which it is kept; None: it is not."""
    if file is None:
        return _judge(claim, kept, place)
    fields = store.kept(f"claim {claim.id}", [file], lambda: asdict(_judge(claim, kept, place)))
    judgement = fields["judgement"] and Judgement(**fields["judgement"])
    texts = {name: Html(**fields[name]) for name in ("figure", "why") if isinstance(fields[name], dict)}
    return Judged(**{**fields, **texts, "judgement": judgement})


def _judge(claim: Claim, kept: ledger.Kept, place: origins.Place) -> Judged:
    with ledger.recording(kept) as book:
        judgement, error = recorded.judge(claim, kept.rows)
    if judgement is None:
        return Judged(None, error=error)
    changed = recorded.rule_changed(claim, kept.rows, judgement)
    figure, why = verdicts.marked(claim, judgement, origins.Pool(kept.rows, book, place))
    return Judged(judgement, changed, "", figure, why)


def told(
    how: Any, entries: Mapping[str, tuple[ledger.Kept, origins.Place]], files: Sequence[Path | None]
) -> dict[str, Html]:
    """`verdicts.told`, kept if each entry has all rows of its data file. files: in the order of the entries."""
    known = [file for file in files if file is not None]
    if len(known) < len(entries):
        return verdicts.told(how, entries)

    def make() -> dict[str, Any]:
        return {name: asdict(text) for name, text in verdicts.told(how, entries).items()}

    found = store.kept(f"told {how.__name__} {list(entries)}", known, make)
    return {name: Html(**fields) for name, fields in found.items()}
