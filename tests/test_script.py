"""The script of the pages, in a real browser: tables, card, addresses, copies; and that no other script runs."""

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import browser as driver
import nbformat
import pandas as pd
import pytest
import sample_report
from nbformat import v4
from test_browser import browser  # noqa: F401 (a fixture)

from labkit.report import figures, pages

SCRIPT = pages.SCRIPT


def test_script_is_small_and_asks_for_nothing() -> None:
    assert len(SCRIPT.encode()) <= 12_000
    assert not re.findall(r"https?:|fetch|XMLHttp|import|eval|innerHTML|localStorage|</script", SCRIPT)


def rows() -> pd.DataFrame:
    """Eight lines that one can sort, filter and tell; the last has no ratio."""
    ratio = [1.2918, 0.5, 1.004, 10.5, 9.5, 1.1, 0.9, float("nan")]
    table = pd.DataFrame({"GPU": ["H100", "H200"] * 4, "batch": [1, 1, 4, 4, 16, 16, 64, 64], "ratio": ratio})
    table["low"], table["high"], table["noise"], table["runs"] = table.ratio - 0.01, table.ratio + 0.02, 0.0043, 3
    table["variant"] = ["a", "b, c", 'say "d"', "e", "f", "g", "h", "i"]
    table.attrs["hidden"] = ["noise", "runs"]
    return table


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.paths.REPORTS", folder)
        lines = sample_report.plots.lines(
            sample_report.frame(), "batch", "us", "layout", xlabel="batch", ylabel="µs", title="Times"
        )
        formats = {"ratio": "{:.1f}"}
        plain = figures.table(rows(), "Ratios of all cases", formats)
        shown = figures.show(lines, name="times", alt="Times", caption="Times.", table=rows())
        verdict = '<p id="claim-speed" data-markdown="**reproduced**: 1.29× &lt;faster&gt;">Verdict</p>'
        deep = '<details><summary>Deep</summary><p id="deep">Deep</p></details>'
        fold = f"<details><summary>More</summary>{deep}</details>"
        book = v4.new_notebook(cells=[v4.new_markdown_cell("# Page\n\n## Results\n\nA warp reads a tile.")])
        book.cells += [
            sample_report.code("x", sample_report.output(html)) for html in (plain.html, shown.html, verdict, fold)
        ]
        nbformat.write(book, folder / "book.ipynb")
        pages.page(folder / "book.ipynb", folder / "book.html")
    return folder / "book.html"


class Page:
    """A page in the browser."""

    def __init__(self, tab: driver.Browser, path: Path) -> None:
        self.tab, self.path = tab, path

    def visit(self, fragment: str = "") -> "Page":
        self.tab.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else the focus of a hidden tab tells nobody
        for url in ("about:blank", self.path.as_uri() + fragment):
            self.tab.events.clear()
            self.tab.call("Page.navigate", url=url)
            self.tab._until_loaded()
        return self

    def js(self, expression: str) -> Any:
        """What an expression is, a promise's value too."""
        found = self.tab.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def column(self, number: int, table: str = "#ratios-of-all-cases table") -> list[str]:
        """The texts of a table's column that are seen, from the top."""
        script = f"[...document.querySelectorAll({json.dumps(table + ' tbody tr')})].filter(row => !row.hidden)"
        return self.js(f"{script}.map(row => row.cells[{number}].textContent)")

    def click(self, text: str, within: str = "#ratios-of-all-cases") -> None:
        buttons = f"[...document.querySelectorAll({json.dumps(within + ' button')})]"
        self.js(f"{buttons}.find(one => one.textContent === {json.dumps(text)}).click()")

    def key(self, name: str) -> None:
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Escape": 27, "ArrowDown": 40}[name]
            self.tab.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **text)

    def card(self) -> list[str]:
        """The lines of the card; none while it is hidden."""
        card = "document.getElementById('lab-card')"
        return self.js(f"{card}.hidden ? [] : [...{card}.children].map(line => line.textContent)")


@pytest.fixture
def page(browser: driver.Browser, made: Path) -> Page:  # noqa: F811
    shown = Page(browser, made).visit()
    yield shown
    assert browser.complaints() == []


pytestmark = pytest.mark.browser


def test_everything_is_there_without_the_script(made: Path) -> None:
    text = made.read_text("utf-8").split("<script>")[0]
    assert text.count("<tr") == 2 * 9
    assert "<button" not in text
    assert 'title="' in text


def test_only_this_script_runs(browser: driver.Browser, made: Path, tmp_path: Path) -> None:  # noqa: F811
    text = made.read_text("utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    sha = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{sha}'\"" in text
    assert script == SCRIPT
    other = tmp_path / "other.html"
    foreign = "<script>window.bad = 1</script><img src='data:,' alt='x' onerror='window.bad = 2'>"
    other.write_text(text.replace("<script>", f"{foreign}<script>"))
    opened = Page(browser, other).visit()
    assert opened.js("typeof bad") == "undefined"
    assert opened.js("document.querySelectorAll('button').length") > 5
    other.write_text(text.replace('"use strict";', '"use strict"; '))
    assert Page(browser, other).visit().js("document.querySelectorAll('button').length") == 0


def test_numbers_are_sorted_as_numbers_and_what_is_missing_comes_last(page: Page) -> None:
    own = page.column(2)
    page.click("ratio")
    assert page.column(2) == ["0.5", "0.9", "1.0", "1.1", "1.3", "9.5", "10.5", "—"]
    assert page.js("document.querySelector('[aria-sort]').ariaSort") == "ascending"
    page.click("ratio")
    assert page.column(2) == ["10.5", "9.5", "1.3", "1.1", "1.0", "0.9", "0.5", "—"]
    page.click("ratio")
    assert page.column(2) == own
    assert page.js("document.querySelector('[aria-sort]')") is None


def test_a_heading_is_reached_by_the_keyboard(page: Page) -> None:
    page.js("document.querySelector('#ratios-of-all-cases th:nth-child(3) button').focus()")
    page.key("Enter")
    assert page.column(2)[0] == "0.5"


def choose(page: Page, label: str, value: str) -> None:
    page.js(
        f"""for (const one of document.querySelectorAll('#ratios-of-all-cases label')) {{
          const select = one.querySelector('select');
          if (!one.textContent.startsWith('{label} ')) continue;
          select.value = '{value}';
          select.dispatchEvent(new Event('input', {{bubbles: true}}));
        }}"""
    )


def search(page: Page, words: str) -> None:
    page.js(
        f"""const field = document.querySelector('#ratios-of-all-cases input');
        field.value = '{words}';
        field.dispatchEvent(new Event('input', {{bubbles: true}}))"""
    )


def test_columns_that_name_a_case_can_be_chosen(page: Page) -> None:
    labels = page.js("[...document.querySelectorAll('#ratios-of-all-cases label')].map(one => one.firstChild.data)")
    assert labels == ["GPU ", "batch "]  # a variant names one row
    choose(page, "GPU", "H200")
    choose(page, "batch", "16")
    assert page.column(5) == ["g"]
    assert page.js("document.querySelector('#ratios-of-all-cases output').textContent") == "1 of 8 rows"


def test_words_filter_rows(page: Page) -> None:
    search(page, "SAY h100")
    assert page.column(5) == ['say "d"']


def test_a_filtered_table_has_an_address(page: Page) -> None:
    choose(page, "GPU", "H100")
    search(page, "0")
    page.click("ratio")
    page.click("ratio")
    seen = page.column(2)
    page.click("Copy link")
    fragment = page.js("location.hash")
    assert fragment == "#ratios-of-all-cases?GPU=H100&search=0&sort=ratio&down=1"
    assert page.visit(fragment).column(2) == seen == ["9.5", "1.3", "1.0", "0.9"]
    assert page.js("document.querySelector('#ratios-of-all-cases select').value") == "H100"


def test_the_address_of_a_figures_table_opens_it(page: Page) -> None:
    assert page.visit("#times?batch=64").column(1, "#times table") == ["64", "64"]
    assert page.js("document.querySelector('#times details').open") is True


@pytest.mark.parametrize("fragment", ["#%E0%A4%A", "#ratios-of-all-cases?GPU=none&sort=none", "#nothing", "#?"])
def test_an_address_of_nothing_changes_nothing(page: Page, fragment: str) -> None:
    assert len(page.visit(fragment).column(2)) == 8


def test_a_table_is_saved_as_it_is_seen(page: Page, tmp_path: Path) -> None:
    page.tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    search(page, "1")
    choose(page, "GPU", "H100")
    page.click("ratio")
    page.click("CSV")
    path, end = tmp_path / "ratios-of-all-cases.csv", time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.read_bytes().decode().split("\r\n") == [
        "GPU,batch,ratio,low,high,variant",
        "H100,64,0.9,0.8900,0.9200,h".replace("0.8900,0.9200", "0.89,0.92"),
        'H100,4,1.004,0.994,1.024,"say ""d"""',
        "H100,1,1.2918,1.282,1.312,a",
        "H100,16,9.5,9.49,9.52,f",
        "",
    ]


def test_a_row_is_told_at_the_focus_and_under_the_pointer(page: Page) -> None:
    row = "document.querySelector('#ratios-of-all-cases tbody tr')"
    page.js(f"{row}.focus()")
    told = ["1.29× faster", "ratio 1.292, 95 % interval 1.282 to 1.312", "3 processes · A/A noise ±0.43 %"]
    assert page.card() == told
    assert page.js(f"{row}.getAttribute('aria-describedby')") == "lab-card"
    page.key("ArrowDown")
    assert page.card()[0] == "2.00× slower"
    page.key("Escape")
    assert page.card() == []
    x, y = page.js(f"(box => [box.x + 20, box.y + 5])(({row}.scrollIntoView(), {row}.getBoundingClientRect()))")
    page.tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert page.card() == told
    page.tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert page.card() == []


def test_a_row_without_a_ratio_tells_nothing(page: Page) -> None:
    page.js("const last = document.querySelector('tbody tr:last-child'); last.tabIndex = 0; last.focus()")
    assert page.card() == []


def test_a_term_is_explained_at_the_focus(page: Page) -> None:
    assert page.js("document.querySelector('dfn.term').textContent") == "warp"
    assert page.js("document.querySelector('dfn.term').title") == ""  # the card says it
    page.js("document.querySelector('dfn.term').focus()")
    assert page.card() == ["32 threads, or lanes, that execute each instruction together."]
    page.key("Escape")
    assert page.card() == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_verdict_is_copied_as_markdown(page: Page, refused: bool) -> None:
    page.js(
        f"""window.copied = [];
        Object.defineProperty(navigator, 'clipboard', {{value: {{writeText: text =>
          {"Promise.reject()" if refused else "Promise.resolve(copied.push(text))"}}}}});
        document.execCommand = () => Boolean(copied.push(document.activeElement.value))"""
    )
    page.click("Copy as Markdown", "#claim-speed")
    assert page.js("new Promise(done => setTimeout(() => done(copied), 100))") == ["**reproduced**: 1.29× <faster>"]
    assert page.js("document.querySelector('#claim-speed button').textContent") == "Copied"
    assert page.js("document.querySelector('textarea')") is None


def test_figures_and_claims_have_permalinks(page: Page) -> None:
    links = page.js("[...document.querySelectorAll('a.permalink')].map(one => one.getAttribute('href'))")
    assert links == ["#ratios-of-all-cases", "#times", "#claim-speed"]
    assert page.js("document.querySelector('#times figcaption a.permalink') !== null")


def test_an_address_opens_what_it_is_folded_in(page: Page) -> None:
    assert page.js("document.querySelectorAll('details[open]').length") == 0
    page.visit("#deep")
    assert page.js("[...document.querySelectorAll('details[open] > summary')].map(one => one.textContent)") == [
        "More",
        "Deep",
    ]


def test_all_is_unfolded_and_folded(page: Page) -> None:
    count = page.js("document.querySelectorAll('main details').length")
    for label, least in (("Expand all", count), ("Fold all", 0)):
        page.click(label, "main > .lab-controls")
        assert page.js("document.querySelectorAll('main details[open]').length") == least
