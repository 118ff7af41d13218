"""The numbers of the pages as the report writes them: none is changed by hand, and most are recomputed from samples."""

import functools
import importlib
import json
import re
from html import escape

import over_time
import pytest
from common import DATA, GPUS, read
from noted import NOTED
from running import PAGES, RECORDED
from shown import Audit, described, is_end, looked_up, marks, misread, number, parted, recorded
from test_audit_moe_persistent_grid import recorded as with_what_was_drawn

from labkit import registry

pytestmark = pytest.mark.timeout(1500)  # a whole report, if this is the first test that asks for it
ALL = ["index.html", *PAGES]
SHARE = 0.7  # of the measured numbers of all pages that are recomputed, at least
# What the audits have under the same column and keys is another thing: page, beginning of the table, column, transform.
OTHERS = {
    ("01_state_layout", "tables._pairs(", "ratio", ""): "of kernels that spill, which are in no table of the audit",
    ("01_state_layout", "geometric mean of ratio", "ratio", "geometric mean"): "of lines that the view chose",
    ("02_gemv_coalescing", "views._ends", "ratio", ""): "of a pair of forms that is in no table of the audit",
    ("02_gemv_coalescing", "geometric mean of ratio", "ratio", ""): "of the same",
    ("03_persistent_tables", "figure", "low", ""): "the bar of 20 µs, which an interval's end reads alike",
    ("04_moe_persistent_grid", "grid_views._change(", "dead %", ""): "rounded by the view",
    ("04_moe_persistent_grid", "views._int4, span", "ratio", ""): "of another column of the view's",
    ("04_moe_persistent_grid", "interval", "ratio", "geometric mean"): "no mean, but a ratio that reads alike",
    ("05_batched_ffn", "below", "cases", ""): "a count of the view's",
    **dict.fromkeys(
        [
            ("01_state_layout", "mean", "ratio", ""),
            ("02_gemv_coalescing", "span", "ratio", ""),
            ("02_gemv_coalescing", "views._speeds", "percent", ""),
            *(("02_gemv_coalescing", "views.steps", end, "") for end in ("least", "most")),
            *(("04_moe_persistent_grid", "views.uniform, gains", "ratio", how) for how in ("", "median", "1/x")),
            *(("04_moe_persistent_grid", "geometric mean of ratio", "ratio", how) for how in ("", "1/x")),
            ("04_moe_persistent_grid", "views.named", "TFLOP/s", ""),
            *(("05_batched_ffn", table, "cases", "") for table in ("slower", "none")),
            *(("05_batched_ffn", "answer._beside", "ratio", how) for how in ("", "1/x", "geometric mean")),
            ("05_batched_ffn", "geometric mean of ratio", "ratio", ""),
            ("05_batched_ffn", "views._mean", "ratio", "1/x"),
        ],
        "of a view's own table: recomputed with the whole sentence, in the audit of the study",
    ),
}


@functools.cache
def audit_of(notebook, gpu):
    """The tables of a study's audit, and what its views note of them; claims under the names that pages give them."""
    study = next(name for name, one in registry.NOTEBOOKS.items() if one == notebook)
    rows = with_what_was_drawn(gpu) if study == "moe_persistent_grid" else read(gpu, study)
    tables = {name: table(rows) for name, table in importlib.import_module(study).TABLES.items()}
    tables |= {name: table(tables) for name, table in NOTED.get(study, {}).items()} | {"rows": recorded(rows)}
    tables |= over_time.tables(gpu, study)
    functions = {name: found for name in tables if (found := function_of(study, name))}
    for claim in registry.load(study).claims:
        if claim.observe:
            tables[f"claims.{claim.id}"] = tables[f"claims.{claim.observe.__name__}"]
    return Audit(tables, functions)


def function_of(study, name):
    """The lab's function that an origin calls "tables.ratios"; None of a claim's, a report's, and what views note."""
    module, _, function = name.partition(".")
    if not function or module in ("claims", "programs"):
        return None
    return getattr(importlib.import_module(f"labkit.studies.{study}.{module}"), function)


@pytest.fixture(scope="module")
def audits():
    return {
        (registry.NOTEBOOKS[study], gpu): audit_of(registry.NOTEBOOKS[study], gpu)
        for study in RECORDED
        for gpu in GPUS
        if (DATA / gpu / f"{study}.parquet").exists()
    }


@pytest.fixture(scope="module")
def pages(report):
    """Page -> its HTML, and the numbers that are listed beside it."""
    done, folder = report
    assert done.returncode == 0, done.stderr
    lists = {page: json.loads((folder / page).with_suffix(".numbers.json").read_text()) for page in ALL}
    return {page: ((folder / page).read_text(), listed) for page, listed in lists.items()}


def of_others(entry):
    """Whether `OTHERS` names a number's kind."""
    return any(is_kind(kind, entry) for kind in OTHERS)


def is_kind(kind, entry):
    page, table, *rest = kind
    same = [page, *rest] == [entry[name] for name in ("study", "column", "transform")]
    return same and entry["table"].startswith(table)


def not_recomputed(entries, audits):
    """Measured numbers that are not what the audits have for them."""
    return [
        f"not as recomputed, {entry['value']}: {described(entry)}"
        for entry, found in looked_up(entries, audits)
        if found.found is False and not of_others(entry) and not is_turned(entry, audits)
    ]


def is_turned(entry, audits):
    """Whether it is an audit's ratio the other way round: "1.10× slower" of 0.91, which is noted as at least 1."""
    other = entry | {"value": 1 / entry["value"]} if entry["table"] == "gain" else entry
    return other is not entry and any(one.found for _, one in looked_up([other], audits))


def wrong_in(html, listed, audits):
    """All that is wrong with a page and the list beside it."""
    return parted(html, listed) + misread(marks(html)) + misread(listed) + not_recomputed(listed, audits)


@pytest.mark.parametrize("page", ALL)
def test_no_number_is_another_than_its_origin_and_its_recomputation(page, pages, audits):
    wrong = wrong_in(*pages[page], audits)
    assert not wrong, "\n".join(wrong[:20])


@pytest.fixture(scope="module")
def recomputed(pages, audits):
    """Page -> its measured numbers, and whether each is recomputed."""
    return {
        page: [(entry, bool(one.found) and not of_others(entry)) for entry, one in looked_up(listed, audits)]
        for page, (_, listed) in pages.items()
    }


def test_most_measured_numbers_are_recomputed(recomputed, record_property):
    all_of = [good for page in recomputed.values() for _, good in page]
    record_property("numbers", sum(all_of))
    assert sum(all_of) >= SHARE * len(all_of), f"{sum(all_of)} of {len(all_of)} measured numbers are recomputed"


# A number that is changed by hand


def with_text(html, place, text, value=None):
    """A page in which the number at this place has another text, and another value if one is given."""
    mark = list(re.finditer(r'(<data class="origin"[^>]*? value=")([^"]*)("[^>]*>)([^<]*)(?=</data>)', html))[place]
    new = mark[1] + (mark[2] if value is None else repr(value)) + mark[3] + escape(text)
    return html[: mark.start()] + new + html[mark.end() :]


def last_digit_changed(entry):
    """A number with another last digit, and the value that this shows."""
    at = max(place for place, one in enumerate(entry["text"]) if one.isdigit())
    text = f"{entry['text'][:at]}{(int(entry['text'][at]) + 1) % 10}{entry['text'][at + 1 :]}"
    return entry | {"text": text, "value": number(text)}


def far_off(entry):
    """A number a fifth larger, and the value that this shows: beyond what an end of an interval may be off."""
    text = f"{1.2 * entry['value']:.{max(entry['decimals'], 0)}f}"
    return entry | {"text": text, "value": number(text)}


KINDS = {  # kind of number -> whether one is of it, and how it is changed
    "ratio": (lambda entry: entry["column"] == "ratio" and not entry["transform"], last_digit_changed),
    "percent": (lambda entry: "%" in entry["column"], last_digit_changed),
    "time": (lambda entry: re.search(r"\bus\b|µs", entry["column"]), last_digit_changed),
    "end of an interval": (lambda entry: is_end(entry["column"]), far_off),
    "mean": (lambda entry: entry["transform"].startswith("geometric mean"), last_digit_changed),
    "count": (lambda entry: entry["transform"] == "count", last_digit_changed),
}


@pytest.fixture(scope="module")
def examples(pages, recomputed):
    """Kind -> page, place on it and number, of the first one that is recomputed."""
    found = {}
    for page, (_, listed) in pages.items():
        good = {id(entry) for entry, good in recomputed[page] if good}
        for place, entry in enumerate(listed):
            for kind in [kind for kind, (of_kind, _) in KINDS.items() if id(entry) in good and of_kind(entry)]:
                found.setdefault(kind, (page, place, entry))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_changed_by_hand_is_found_and_named(kind, examples, pages, audits):
    page, place, entry = examples[kind]
    html, listed = pages[page]
    other = KINDS[kind][1](entry)
    reading = entry | {"text": other["text"]}  # and the value as it was
    relisted, with_value = ([*listed[:place], one, *listed[place + 1 :]] for one in (reading, other))
    changed, changed_with_value = (with_text(html, place, other["text"], value) for value in (None, other["value"]))
    by_hand = {
        "on the page": (changed, listed),
        "on the page, with its value": (changed_with_value, listed),
        "in the list": (html, relisted),
        "in the list, with its value": (html, with_value),
        "in both": (changed, relisted),
        "in both, with its value": (changed_with_value, with_value),
    }
    for where, (some_html, some_listed) in by_hand.items():
        wrong = wrong_in(some_html, some_listed, audits)
        assert any(repr(other["text"]) in one and entry["table"] in one for one in wrong), (where, wrong)


def test_a_sentence_that_is_changed_by_hand_is_found(pages):
    html, listed = next(iter(pages.values()))
    entry = next(entry for entry in listed if entry["sentence"])
    word = max(entry["sentence"].split(), key=len)
    assert parted(html.replace(escape(word), "3.14"), listed)


@pytest.mark.parametrize(("ends", "least"), [(False, 0.99), (True, 0.95)])
def test_nearly_all_other_last_digits_are_found(ends, least, recomputed, audits):
    """Of all numbers that are recomputed, with their values; ends of intervals apart, whose middles they need."""
    missed, count = [], 0
    for page in recomputed.values():
        hoped = [good and is_end(entry["column"]) == ends for entry, good in page]
        entries = [last_digit_changed(entry) if one else entry for (entry, _), one in zip(page, hoped, strict=True)]
        again = [bool(found.found) for _, found in looked_up(entries, audits)]
        count += sum(hoped)
        missed += [described(entry) for entry, *both in zip(entries, hoped, again, strict=True) if all(both)]
    assert len(missed) <= (1 - least) * count, f"{len(missed)} of {count}: {missed[:20]}"
