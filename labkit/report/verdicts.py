"""A study's claims as HTML: the answer on the first screen, and all claims with what each GPU says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from labkit.bench import ledger
from labkit.bench.claim import Claim, Judgement
from labkit.report import origins
from labkit.report.figures import Html, badge

DIRECTIONS = {"holds": "as claimed", "fails": "not as claimed"}  # in words; of what is unclear the verdict says so
SIZES = {"as published": "as much as published", "more": "more than published", "less": "less than published"}
CHANGED, QUICK = "rule changed after the data", "a quick look"
JUDGED = Markup(
    '<p class="small"><b>Reproduced</b> or <b>not reproduced</b>: the code of the source, under its conditions. '
    "<b>Consistent</b> or <b>disagrees</b>, in direction: our version of the code, an estimate, or other conditions. "
    '<a href="index.html#judged">How a claim is judged</a></p>'
)


@dataclass(frozen=True)
class Said:
    """What one GPU says of a claim. figure: what was measured, without the claim's quantity; why: the judgement's;
    both with the origins of their numbers.

    judgement: None of a GPU that was not measured. changed: the rule is younger than the rows that it rests on.
    """

    gpu: str
    judgement: Judgement | None
    figure: Html | str = ""
    why: Html | str = ""
    changed: bool = False
    verdict: str = ""

    @property
    def words(self) -> str:
        """Direction and size, in words: "as claimed, more than published"."""
        return in_words(self.judgement)


def in_words(judged: Judgement | None) -> str:
    """Direction and size; of what is unclear, or not as claimed at all, no size. Empty where nothing was observed."""
    if judged is None or judged.direction not in DIRECTIONS:
        return ""
    size = SIZES.get(judged.size) if judged.direction == "holds" else None
    return ", ".join(filter(None, [DIRECTIONS[judged.direction], size]))


def marked(claim: Claim, judged: Judgement, pool: origins.Pool) -> tuple[Html, Html]:
    """What a judgement says was measured, without the claim's quantity, and why; with the origins of their numbers."""
    length = len(judged.measured.removesuffix(f": {claim.quantity}"))  # which is said once for all GPUs
    return origins.marked(judged.measured, pool, length), origins.marked(judged.why, pool)


def link(text: str, url: str) -> Html:
    """A link; the text alone where there is no address."""
    if not url:
        return Html(escape(text), text)
    return Html(f'<a href="{escape(url)}">{escape(text)}</a>', text)


def cards(claims: Sequence[Claim], said: Mapping[str, Sequence[Said]], caption: str) -> Html:
    """Every claim with what was published, and a line a GPU: verdict, what was measured, why. said: by id of a claim.

    Each has the id `claim-ID`, and its text for a pull request in `data-markdown`.
    """
    parts = [_card(claim, said[claim.id]) for claim in claims]
    html = Markup('<p class="small">{}</p><div class="lab-claims">{}</div>').format(caption, Markup("\n").join(parts))
    plain = "\n\n".join([caption, *(markdown(claim, said[claim.id]) for claim in claims)])
    return Html(str(html), plain)


def _card(claim: Claim, said: Sequence[Said]) -> Markup:
    judged = any(one.judgement and one.judgement.code for one in said)
    head = Markup('<h3>{}</h3><p class="small">{}. Published: {}. {}</p>').format(
        claim.statement, link(claim.source, claim.url), claim.published, _figures(claim) if judged else ""
    )
    lines = [
        Markup('<tr><th scope="row">{}</th><td>{}<span class="small">{}</span></td><td>{}</td></tr>').format(
            one.gpu, _badge(one), one.words, _measured(one)
        )
        for one in said
    ]
    why = Markup("").join(Markup("<li><b>{}</b> {}</li>").format(one.gpu, one.why) for one in said if one.why)
    folded = Markup(
        '<details><summary>Why, and what was run</summary><p class="small">{}</p><ul class="by-gpu">{}</ul></details>'
    )
    form = Markup('<article class="lab-claim" id="claim-{}" data-markdown="{}">{}<table>{}</table>{}</article>')
    text = markdown(claim, said)
    details = folded.format(_sentence(claim.condition and f"the source's conditions: {claim.condition}"), why)
    return form.format(claim.id, text, head, Markup("").join(lines), details)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _figures(claim: Claim) -> str:
    """What the figures of a claim are."""
    return f"Measured: {claim.quantity}."


def _word(one: Said) -> str:
    return one.judgement.verdict if one.judgement else one.verdict


def _measured(one: Said) -> Markup:
    return Markup("{}{}").format(one.figure, _mark(CHANGED) if one.changed else "")


def _mark(text: str) -> Markup:
    return Markup(' <span class="lab-badge lab-earlier">{}</span>').format(text)


def _badge(one: Said) -> Markup:
    """The verdict, and that it is a quick look's."""
    return Markup("{}{}").format(badge(_word(one)), _mark(QUICK) if _is_quick(one) else "")


def _is_quick(one: Said) -> bool:
    return one.judgement is not None and one.judgement.quick


def markdown(claim: Claim, said: Sequence[Said]) -> str:
    """A claim and its verdicts as text for a pull request."""
    source = f"[{claim.source}]({claim.url})" if claim.url else claim.source
    lines = [f"**{claim.statement}** ({source}; published: {claim.published})"]
    for one in said:
        code = f" ({one.judgement.code})" if one.judgement and one.judgement.code else ""
        quick = f", {QUICK}" if _is_quick(one) else ""
        lines.append(
            f"- {one.gpu}: **{_word(one)}**{quick}{code}, {one.judgement.measured if one.judgement else one.why}"
        )
    return "\n".join(lines)


def headline(claims: Sequence[Claim], said: Mapping[str, Sequence[Said]]) -> Html:
    """The claims of the first screen: what is claimed and published, and what each GPU says, a column each."""
    gpus = [one.gpu for one in said[claims[0].id]]
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(name) for name in ("Claim", *gpus))
    lines = [_headline(claim, said[claim.id]) for claim in claims]
    form = Markup('<table class="lab-headline"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>')
    plain = "\n\n".join(markdown(claim, said[claim.id]) for claim in claims)
    return Html(str(form.format(head, Markup("").join(lines))), plain)


def _headline(claim: Claim, said: Sequence[Said]) -> Markup:
    ran = dict.fromkeys(one.judgement.code for one in said if one.judgement and one.judgement.code)
    about = Markup('<span class="small">{}: {}</span><span class="small">{}</span>').format(
        link(claim.source, claim.url), claim.published, f"{_figures(claim)} Run: {', '.join(ran)}." if ran else ""
    )
    first = Markup('<th scope="row"><a href="#claim-{}">{}</a>{}</th>').format(claim.id, claim.statement, about)
    cell = Markup('<td data-label="{}">{} <span class="small">{}</span> <span class="small">{}</span></td>')
    cells = [cell.format(one.gpu, _badge(one), one.figure, one.words) for one in said]
    return Markup("<tr>{}{}</tr>").format(first, Markup("").join(cells))


def answer(said: Html, table: Html, hero: Html, advice: Html) -> Html:
    """The first screen: the conclusion, what to do, the claims, and one figure."""
    to_do = Markup('<p class="lab-advice"><b>What to do.</b> {}</p>').format(advice) if advice.plain else ""
    text = Markup('<div><p class="lab-conclusion">{}</p>{}{}{}</div>').format(said, to_do, table, JUDGED)
    html = Markup('<section class="lab-answer" aria-label="The answer">{}{}</section>').format(text, hero)
    return Html(str(html), "\n\n".join(one.plain for one in (said, advice, table, hero)))


def told(how: Any, entries: Mapping[str, tuple[ledger.Kept, origins.Place]]) -> dict[str, Html]:
    """Conclusion and advice of a study's module `answer`, with the origins of their numbers.

    entries: GPU, by the name that the sentences give it -> its rows and where they stand.
    """
    facts, pools = {}, {}
    for gpu, (kept, place) in entries.items():
        with ledger.recording(kept) as book:
            facts[gpu] = how.facts(kept.rows)
            ledger.note("answer.facts", facts[gpu])
        pools[gpu] = origins.Pool(kept.rows, book, place)
    known = {gpu: one for gpu, one in facts.items() if one}
    texts = {name: getattr(how, name)(known) if known else "" for name in ("conclusion", "advice")}
    return {name: origins.marked_among(text, pools) for name, text in texts.items()}
