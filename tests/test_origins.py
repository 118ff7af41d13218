"""Origins of numbers: how they are read, to which line of which table they are matched, and what a changed one does."""

import json
import re
import sys

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from running import RECORDED

from labkit import paths, registry
from labkit.bench import ledger
from labkit.bench.claim import Claim
from labkit.report import figures, origins

ROWS = pd.DataFrame(
    {
        "case": [json.dumps({"batch": batch, "state": state}) for batch in (1, 64) for state in ("fp32", "bf16")],
        "options": ["{}"] * 4,
        "variant": "VK BV=8",
    }
)
TABLE = pd.DataFrame(
    {
        "batch": [1, 1, 64, 64],
        "state": ["fp32", "bf16", "fp32", "bf16"],
        "ratio": [1.012, 0.934, 1.287, 1.094],
        "us": [3.51, 2.49, 1234.4, 631.2],
        "verdict": ["same", "slower", "faster", "faster"],
    }
)
CLAIM = Claim("one", "Somebody", "", "It is 8 % faster", "", "2.36×", ruled="2026-01-01", gpus=("RTX 5090",))
PLACE = origins.Place("01_toy", "h100", "H100", [CLAIM])
OTHER_PLACE = origins.Place("01_toy", "h200", "H200", [CLAIM])


def pool(*tables):
    return origins.Pool(ROWS, [ledger.Noted("tables.ratios", "", table) for table in tables or (TABLE,)], PLACE)


def one(text, *tables):
    """The origin of the number between braces."""
    start = text.index("{")
    found = {number.start: origin for number, origin in pool(*tables).origins(re.sub(r"[{}]", "", text))}
    return found[start]


@pytest.mark.parametrize(
    ("text", "value", "decimals", "unit"),
    [
        ("1.29", 1.29, 2, ""),
        ("3.51 µs", 3.51, 2, "unit"),
        ("12 %", 12, 0, "%"),
        ("−1.2 %", -1.2, 1, "%"),
        ("(-3)", -3, 0, ""),
        ("+4.8 %", 4.8, 1, "%"),
        ("1,234 µs", 1234, 0, "unit"),
        ("1,234,567.5 µs", 1234567.5, 1, "unit"),
        ("×2.36", 2.36, 2, "×"),
        ("2.36×", 2.36, 2, "×"),
        ("1.2e-07", 1.2e-07, 8, ""),
        ("[0.99, ", 0.99, 2, ""),
    ],
)
def test_numbers_are_read(text, value, decimals, unit):
    (number,) = origins.found_in(text)
    assert (number.value, number.decimals, number.unit) == (pytest.approx(value), decimals, unit)


def test_units_of_ranges_and_intervals_are_read():
    text = "12 to 15 %; 1608 µs [1328, 2695], 3 cases; 81 % [80, 84]; Best TFLOP/s: bf16 767, fp8 1396."
    assert [number.unit for number in origins.found_in(text)] == ["%"] * 2 + ["unit"] * 3 + [""] + ["%"] * 3 + [
        "unit"
    ] * 2


@pytest.mark.parametrize("name", ["fp32", "Q4_K", "Qwen3.5-27B", "Llama-3.2-1B", "sglang 0.5.9", "4-bit", "2026-11-24"])
def test_digits_of_names_are_no_numbers(name):
    assert not [number for number in origins.found_in(f"of {name}.") if number.text != "2026"]


def test_the_line_that_the_clause_names_is_taken():
    twice = TABLE.assign(ratio=1.29)
    for batch, state in ((64, "bf16"), (1, "fp32"), (64, "fp32")):
        found = one(f"at batch {batch}, {state}: {{1.29}}; at batch 2, fp64: 3", twice)
        assert (found.kind, found.keys["batch"], found.keys["state"]) == ("measured", batch, state)
    assert one("with fp32 at batch 64 {1.29}, and else 3").table == "tables.ratios"


@pytest.mark.parametrize(
    ("text", "column", "transform", "value"),
    [
        ("×{1.29} at batch 64", "ratio", "", 1.287),
        ("{29} % faster at batch 64, fp32", "ratio", "100·(x−1)", 28.7),
        ("{1,234} µs", "us", "", 1234.4),
        ("in the median {1.05} of what it was", "ratio", "median", 1.053),
        ("{2} of 4 cases are faster", "", "count", 2),
        ("faster in 2 of {4} cases", "", "count", 4),
    ],
)
def test_transforms(text, column, transform, value):
    found = one(text)
    assert (found.kind, found.column, found.transform) == ("measured", column, transform)
    assert found.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("at batch {64} it is faster", "case"),
        ("VK BV={8} is faster", "case"),
        ("published are {2.36}", "published"),
        ("another GPU than its RTX {5090}", "published"),
        ("with {95} % intervals", "rule"),
    ],
)
def test_kinds(text, kind):
    assert one(text).kind == kind


def test_a_limit_of_a_claim_is_no_measured_value_that_reads_alike():
    """Unless it was said that it is one."""
    claim = Claim("one", "Somebody", "", "No change", "", "", ruled="2026-01-01", note="from 0.952 to 1.051")
    place, table = origins.Place("01_toy", "h200", "H200", [claim]), TABLE.assign(ratio=0.95237)
    noted = ledger.Noted("tables.ratios", "", table)
    for said, kind in (([], "published"), ([ledger.Said(0.95237)], "measured")):
        ((_, limit),) = origins.Pool(ROWS, [noted, *said], place).origins("from 0.952 on")
        assert limit.kind == kind
    ((_, rough),) = origins.Pool(ROWS, [noted], place).origins("×0.95 at batch 64")[:1]
    assert rough.kind == "measured"


def test_a_number_that_was_made_up_has_no_origin():
    html = origins.marked("batch 64, fp32: ×1.29, and ×7.77 at that", pool()).html
    assert [entry["text"] for entry in origins.check(html)] == ["7.77"]
    assert [entry["kind"] for entry in origins.numbers(html)] == ["case", "measured", "none"]


def test_a_part_of_a_text_is_marked_as_in_the_whole():
    whole, part = (origins.marked("batch 64, fp32: ×1.29 of 7.77", pool(), shown) for shown in (None, 21))
    assert part.html.endswith("1.29</data>")
    assert whole.html.startswith(part.html)
    assert part.plain.startswith("batch 64, fp32: ×1.29 [")


def test_an_answer_is_of_the_line_that_a_name_in_its_question_names():
    """Its words and numbers name nothing, and nothing of it is shown."""
    twice = pool(TABLE.assign(ratio=1.29))
    asked = ("bf16, all", "fp32, batch 1", "batch 64, faster")
    found = {one: origins.marked_answer(one, "1.29× faster", twice).html for one in asked}
    keys = {one: origins.numbers(html)[0]["keys"] for one, html in found.items()}
    alone = origins.numbers(origins.marked("1.29× faster", twice).html)[0]["keys"]
    assert [keys[one]["state"] for one in asked[:2]] == ["bf16", "fp32"]
    assert keys[asked[2]] == alone
    assert all(re.sub("<[^>]+>", "", html) == "1.29× faster" for html in found.values())


def test_a_number_that_was_changed_by_hand_is_found():
    html = f"<p>{origins.marked('batch 64, fp32: ×1.29', pool()).html}</p>"
    assert not origins.check(html)
    (found,) = origins.check(html.replace(">1.29<", ">1.39<"))
    assert (found["text"], found["value"], found["sentence"]) == ("1.39", 1.287, "batch 64, fp32: ×1.39")
    assert found["keys"] == {"batch": 64, "state": "fp32"}
    assert origins.check(html.replace(">1.29<", ">about<"))


def test_the_text_names_the_file():
    said = origins.marked("×1.29 <b>", pool())
    assert said.plain == "×1.29 <b> [numbers: 01_toy.numbers.json]"
    assert said.html.endswith("&lt;b&gt;")
    assert 'title="01_toy · H100 · tables.ratios · batch 64, state fp32 · ratio"' in said.html
    assert origins.marked("nothing was measured", pool()).plain == "nothing was measured"


def test_tables_are_noted_inside_alone():
    ledger.note("outside", TABLE)
    with ledger.recording() as book:
        ledger.note("a table", TABLE, "cache='hot'")
        ledger.note("one line", {"ratio": 1.5, "who": "it"})
        ledger.note("nothing", "text")
        ledger.note("empty", TABLE[:0])
        with ledger.recording() as inner:
            ledger.note("inner", 3)
    assert [(one.name, one.arguments, len(one.table)) for one in book] == [
        ("a table", "cache='hot'", 4),
        ("one line", "", 1),
    ]
    assert [one.name for one in inner] == ["inner"]


def test_a_watched_module_notes_what_it_returns():
    from labkit.studies.state_layout import share, tables

    with ledger.recording() as book:
        tables.ordered(TABLE, ["us"])
        assert share.end_to_end(2.0, 0.5) > 1
    assert [one.name for one in book] == ["tables.ordered", "share.end_to_end"]


SAYS = r"^(x\.(say|figure|claims|compare)|import|from|source:|x = )"  # cells that say something, and what they need


@pytest.mark.parametrize("study", RECORDED)
def test_no_number_of_a_page_is_without_an_origin(study, monkeypatch):
    """Every sentence of the notebook, of every recorded GPU: what is listed is not matched to any table."""
    said, real = [], origins.marked
    monkeypatch.setattr(origins, "marked", lambda *given: said.append(real(*given)) or said[-1])
    monkeypatch.setattr(figures, "show", lambda fig, caption, **rest: plt.close(fig) or figures.note(caption))
    cells = nbformat.read(paths.NOTEBOOKS / f"{registry.NOTEBOOKS[study]}.ipynb", as_version=4).cells
    space = {}
    for cell in cells:
        source = cell.source.replace('source: str = "auto"', 'source: str = "recorded"')
        if cell.cell_type == "code" and re.search(SAYS, source, re.M):
            exec(source, space)
    html = "".join(f"<p>{one.html}</p>" for one in said)
    left = [f"{entry['text']} in: {entry['sentence']}" for entry in origins.check(html)]
    assert not left
    assert study == "machine" or len(origins.numbers(html)) > 100


def test_tables_of_kept_rows_are_made_once_and_noted_each_time(monkeypatch):
    """Also those that nest; of other rows, and outside, nothing is kept."""
    calls = []
    module = sys.modules[__name__]

    def inner(rows, factor=1):
        calls.append("inner")
        return rows * factor

    def outer(rows):
        calls.append("outer")
        return module.inner(rows, factor=2)

    monkeypatch.setattr(module, "inner", ledger._watched(inner, "t.inner"), raising=False)
    monkeypatch.setattr(module, "outer", ledger._watched(outer, "t.outer"), raising=False)
    rows = pd.DataFrame({"us": [1.0, 2.0]})
    kept = ledger.Kept(rows)
    books = []
    for _ in range(2):
        with ledger.recording(kept) as book:
            made = module.outer(rows)
            made["us"] = 0.0  # what is handed out is a copy
            books.append([(one.name, one.arguments) for one in book])
    assert calls == ["outer", "inner"]
    assert books[0] == books[1] == [("t.inner", "factor=2"), ("t.outer", "")]
    with ledger.recording(kept):
        assert module.outer(rows)["us"].tolist() == [2.0, 4.0]
        module.outer(rows.copy())
    module.outer(rows)
    assert calls == ["outer", "inner"] * 3


def test_a_number_on_several_gpus_is_of_the_one_that_is_named_with_it():
    pools = {gpu: origins.Pool(ROWS, [ledger.Noted("answer.facts", "", pd.DataFrame({"ratio": [ratio]}))], place)
             for gpu, ratio, place in (("H100", 1.12, PLACE), ("H200", 1.35, OTHER_PLACE))}  # fmt: skip
    for text in ("H100 1.12× faster, H200 1.35×", "1.12× (fp32, H100) and 1.35× faster (H200)"):
        said = origins.numbers(f"<p>{origins.marked_among(text, pools).html}</p>")
        assert [(one["gpu"], one["value"]) for one in said] == [("h100", 1.12), ("h200", 1.35)]
    same = {gpu: origins.Pool(ROWS, [ledger.Noted("answer.facts", "", pd.DataFrame({"ratio": [1.12]}))], place)
            for gpu, place in (("H100", PLACE), ("H200", OTHER_PLACE))}  # fmt: skip
    said = origins.numbers(f"<p>{origins.marked_among('1.12× (H100), then 1.12× (H200)', same).html}</p>")
    assert [one["gpu"] for one in said] == ["h100", "h200"]
