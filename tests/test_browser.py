"""Pages in a real browser: nothing missing, nothing from outside, readable wide and narrow, in light and in dark."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import browser as driver
import pytest
from missing import NO_BROWSER

pytestmark = pytest.mark.browser

GOOD = """<!DOCTYPE html><html lang="en"><head><meta name="viewport" content="width=device-width"><title>t</title>
<style>body { background: white } @media (prefers-color-scheme: dark) { body { background: black } }</style></head>
<body><h1 id="top">Page</h1><a href="#top">up</a> <a href="https://example.org">a plain link</a>
<img alt="A square" width="200"
src="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/%3E">
</body></html>"""
SQUARE = '<img alt="A square"'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[driver.Browser]:
    program = driver.find()
    if program is None:
        if os.environ.get("CI") or os.environ.get("LABKIT_REQUIRE_BROWSER") == "1":
            pytest.fail(NO_BROWSER)
        pytest.skip(NO_BROWSER)
    with driver.Browser(program, tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


def test_report_has_no_fault(browser: driver.Browser, reports: Path) -> None:
    import sample_report

    folder = sample_report.write(reports)
    pages = sorted(folder.glob("*.html"))
    assert folder / "index.html" in pages
    assert len(pages) > 1
    assert [problem for page in pages for problem in driver.check(browser, page)] == []


def test_figures_are_seen_on_a_page(browser: driver.Browser, reports: Path) -> None:
    import sample_report

    assert browser.open(sample_report.write(reports) / "01_layout.html", 1280, "light")["images"] == 2


VISIBLE = """
JSON.stringify([...document.querySelectorAll('.outcome, .group')].filter(one => one.checkVisibility()).map(one =>
  one.matches('.group') ? one.querySelector('h3').textContent
    : `${one.closest('.claim').id} ${one.dataset.verdict} ${one.dataset.gpu.split(' ').length}`))
"""


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        (["verdict-not-reproduced"], ["layout", "run-length not-reproduced 1"]),
        (["verdict-could-not-be-judged"], ["layout", "table could-not-be-judged 1"]),
        (["verdict-consistent"], ["layout", "speed consistent 1", "grid", "speed consistent 2"]),
        # of the layout's claim it is H100 that is consistent
        (["verdict-consistent", "gpu-nvidia-h200-here"], ["grid", "speed consistent 2"]),
        (["gpu-nvidia-h200-here", "run-the-source-s-own-code"], ["layout", "run-length not-reproduced 1"]),
        (["verdict-reproduced", "gpu-nvidia-h200-here"], []),
        (["verdict-reproduced", "gpu-nvidia-h100-80gb-hbm3", "run-nothing"], []),
    ],
)
def test_index_is_filtered_without_a_script(browser: driver.Browser, reports: Path, chosen: list, shown: list) -> None:
    import sample_report

    page = sample_report.write(reports) / "index.html"
    browser.open(page, 1280, "light")
    everything = browser.evaluate(VISIBLE)
    assert len(json.loads(everything)) == 9  # two studies; two GPUs of three claims, one that they share
    for name in chosen:
        browser.evaluate(f"document.getElementById('filter-{name}').click()")
    titles = {"State layout of decode": "layout", "The grid": "grid"}
    found = [titles.get(text, re.sub(r"^claim-\w+\.", "", text)) for text in json.loads(browser.evaluate(VISIBLE))]
    assert found == shown
    for name in ("verdict", "gpu", "run"):
        browser.evaluate(f"document.getElementById('filter-{name}').click()")
    assert browser.evaluate(VISIBLE) == everything


def closed_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_checker_passes_a_good_page(browser: driver.Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(GOOD)
    assert driver.check(browser, tmp_path / "page.html") == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("</body>", "<script>console.error('oh')</script>", "console error: oh"),
        ("</body>", "<script>nothing()</script>", "exception"),
        ("</body>", "<img alt='x' width='200' src='missing.png'>", "broken image: x"),
        ("</body>", "<img alt='x' width='200' src='http://127.0.0.1:PORT/x.png'>", "outside request: http://127.0.0.1"),
        ("<style>", "<style>@import 'http://127.0.0.1:PORT/x.css';", "outside request: http://127.0.0.1"),
        ("</body>", "<script>fetch('http://127.0.0.1:PORT/').catch(() => 0)</script>", "outside request"),
        (SQUARE, "<img alt=' '", "unnamed image"),
        (SQUARE, "<img style='display:none' alt='A square'", "invisible image"),
        ("#top", "#bottom", "anchor that is not there"),
        ("#top", "gone.html", "dead link"),
        ("</body>", "<pre style='width:600px'>wide</pre>", "at 390 px, light: 608"),
        ('<meta name="viewport" content="width=device-width">', "", "at 390 px, light: 980"),
        ("black", "white", "in light and in dark"),
    ],
)
def test_checker_finds_the_fault(browser: driver.Browser, tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    (tmp_path / "page.html").write_text(GOOD.replace(old, new.replace("PORT", str(closed_port()))))
    assert complaint in "\n".join(driver.check(browser, tmp_path / "page.html"))
