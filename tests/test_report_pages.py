"""The pages, as HTML."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import sample_report
from nbformat import v4

from labkit.report import pages


def page(folder: Path, book: v4.nbbase.NotebookNode, **options: object) -> str:
    nbformat.write(book, folder / "book.ipynb")
    pages.page(folder / "book.ipynb", folder / "book.html", **options)
    return (folder / "book.html").read_text("utf-8")


@pytest.fixture
def text(reports: Path) -> str:
    before = pages.StudyEntry("The <machine>", "", "00_machine.html", "")
    return page(reports, sample_report.notebook(), previous=before, status="recorded 2025-11-21")


def test_page_is_a_whole_document(text: str) -> None:
    assert text.startswith("<!DOCTYPE html>")
    assert '<html lang="en">' in text
    assert "<title>State layout of decode</title>" in text
    assert text.count("<main") == text.count("</main>") == text.count("<h1") == 1
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<script>") == 1


def test_an_id_is_there_once(reports: Path) -> None:
    html = '<figure class="lab" id="{}"><p>x</p></figure>'
    cells = [
        sample_report.code("x", sample_report.output(html.format(name))) for name in ("one", "one", "Top", "one-2")
    ]
    text = page(reports, v4.new_notebook(cells=[v4.new_markdown_cell("# Title\n\n## Top"), *cells]))
    assert re.findall(r'<figure [^>]*id="([^"]*)"', text) == ["one", "one-2", "Top-2", "one-2-2"]
    assert '<h2 id="Top">' in text


def test_regions_have_names_of_their_own(reports: Path) -> None:
    region = '<div role="region" tabindex="0" aria-label="{}">x</div>'
    cells = [sample_report.code("x", sample_report.output(region.format(name))) for name in ("Table", "Times", "Table")]
    text = page(reports, v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), *cells]))
    assert re.findall(r'aria-label="(T[^"]*)"', text) == ["Table", "Times", "Table (2)"]


def test_terms_are_explained(text: str) -> None:
    assert '<dfn class="term"' not in text.split("<main")[0]
    assert "<summary>Glossary</summary>" in text
    assert text.index("</section>\n</main>") > text.index("<summary>Glossary</summary>")


def test_what_scrolls_is_reached_by_the_keyboard(text: str) -> None:
    assert "<pre" in text
    assert not re.search(r'<pre(?! tabindex="0")|<div class="lab-image"(?! tabindex="0")', text)


def test_page_requests_nothing_from_outside(text: str) -> None:
    assert pages.outside_requests(text) == []
    assert "https://example.org/x" in text  # a plain link stays


def test_page_shows_outputs_and_folds_code(text: str) -> None:
    assert text.count('<figure class="lab"') == 2
    assert re.search(r'<img alt="Alt of lines" src="data:image/svg\+xml;base64,', text)
    assert "Caption of bars." in text
    assert text.count("<summary>Table</summary>") == 2
    assert text.count("<summary>Parameters</summary>") == 1
    assert '<details class="code"><summary>Code</summary>' in text
    assert "<details open" not in text
    assert "A &lt;note&gt; &amp; more." in text


def test_cells_for_the_lab_alone_are_left_out(text: str) -> None:
    assert "SLIDER" not in text
    assert "widgets()" not in text


def test_page_has_anchors_contents_and_ways_out(text: str) -> None:
    assert '<h2 id="Measurement">' in text
    for name in re.findall(r'href="#([^"]*)"', text):
        assert f'id="{name}"' in text
    assert '<nav class="contents" aria-label="On this page">' in text
    assert text.count('href="index.html"') == 2
    assert text.count("← The &lt;machine&gt;") == 2
    assert 'href="00_machine.html#launch"' in text  # was a link to the notebook
    assert '<p class="status">recorded 2025-11-21</p>' in text


def test_links_to_headings_have_a_name_and_stand_in_no_control(reports: Path) -> None:
    fold = v4.new_markdown_cell("### Folded\n\nText.", metadata={"tags": ["fold"]})
    text = page(reports, v4.new_notebook(cells=[v4.new_markdown_cell("# Title\n\n## Top"), fold]))
    link = '<a class="anchor-link" aria-label="Link to this section" href="#{0}">¶</a>'.format
    assert f'<h2 id="Top">Top{link("Top")}</h2>' in text
    assert f'<h3 id="Folded">Folded</h3></summary>{link("Folded")}' in "".join(text.split("\n"))


def test_short_code_in_a_sentence_is_not_broken(reports: Path) -> None:
    source = f"# Title\n\nThe layout `[V, K]`, and `{'long ' * 9}`.\n\n```\nblock\n```"
    text = page(reports, v4.new_notebook(cells=[v4.new_markdown_cell(source)]))
    assert '<code class="short">[V, K]</code>' in text
    assert text.count('<code class="short">') == 1


def test_the_setup_is_a_section_that_the_contents_leave_out(reports: Path) -> None:
    parts = [v4.new_markdown_cell(f"## {name}") for name in ("One", "Two", "Three")]
    setup = v4.new_code_cell("x = 1", metadata={"tags": ["setup"]})
    text = page(reports, v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), setup, *parts]))
    assert '<h2 id="Where-the-figures-are-from">' in text
    assert re.findall(r'<li><a href="#(.*?)">', text) == ["One", "Two", "Three"]


def test_page_that_ran_has_no_banner(text: str) -> None:
    assert "stopped at an error" not in text


def test_failed_notebook_has_a_banner_and_its_error(reports: Path) -> None:
    nbformat.write(sample_report.notebook(error=True), reports / "book.ipynb")
    assert pages.page(reports / "book.ipynb", reports / "book.html") == ["ValueError: batch is <0>"]
    text = (reports / "book.html").read_text("utf-8")
    assert text.index("stopped at an error") < text.index("<h1")
    assert text.count("batch is &lt;0&gt;") == 2
    assert 'id="failed"' in text
    assert '<details class="code" open="">' in text
    assert "\x1b" not in text


def test_page_is_small(reports: Path, text: str) -> None:
    figures = sum(map(len, re.findall(r'src="data:[^"]*"', text)))
    assert len(text) - figures < 100_000


@pytest.mark.parametrize(
    "html",
    [
        '<img alt="x" src="https://example.org/x.png">',
        '<script src="//example.org/x.js"></script>',
        '<link rel="stylesheet" href="http://example.org/x.css">',
        "<style>@import 'https://example.org/x.css';</style>",
        '<p style="background:url(https://example.org/x.png)">x</p>',
    ],
)
def test_page_with_an_outside_request_is_refused(reports: Path, html: str) -> None:
    book = v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), sample_report.code("x", sample_report.output(html))])
    with pytest.raises(ValueError, match=r"book\.html.*example\.org"):
        page(reports, book)
    assert not (reports / "book.html").exists()


def test_page_of_an_empty_notebook_has_the_file_name_as_title(reports: Path) -> None:
    assert "<title>book</title>" in page(reports, v4.new_notebook())


def test_progress_widgets_and_scripts_are_not_shown(reports: Path) -> None:
    widget = v4.new_output(
        "display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "bar"}
    )
    script = v4.new_output("display_data", {"application/javascript": "alert(1)"})
    text = page(reports, v4.new_notebook(cells=[sample_report.code("x", widget, script)]))
    assert "model_id" not in text
    assert "alert" not in text


WRITES = """
import sys
from pathlib import Path
from labkit.report import pages
from labkit.workflow import reports
early = sorted({"nbconvert", "nbformat", "torch"} & sys.modules.keys())
try:
    pages.page(Path("none.ipynb"), Path("none.html"))
except FileNotFoundError:
    print(early, "nbconvert" in sys.modules, sys.modules["rfc3987_syntax"])
"""


def test_what_writes_the_report_loads_what_takes_long_only_for_a_page(tmp_path):
    """And never the grammar of addresses that takes longest of all."""
    done = subprocess.run([sys.executable, "-c", WRITES], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True None"
