"""The report as Markdown: it says what the pages say, links to what there is, and holds no other HTML than details."""

import re

import mistune
import pytest
import sample_report
from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st

from labkit import paths
from labkit.report import figures, markdown, plots

NUMBER = re.compile(r"\d[\d.]*")
LINK = re.compile(r"(?<!\\)(!?)\[(?:\\.|[^\]\\\n])*\]\(([^)]*)\)")


def rendered(text):
    """The HTML that a renderer of GitHub's tables makes."""
    return BeautifulSoup(mistune.create_markdown(escape=False, plugins=["table"])(text), "html.parser")


def words(tag):
    return " ".join(tag.get_text(" ").split())


@pytest.fixture
def report(reports):
    """The sample report, and the folder of its Markdown."""
    sample_report.write(reports)
    out = reports / "markdown"
    lacking = markdown.write(sorted(reports.glob("*.html")), out, reports / "figures")
    assert not lacking
    return reports, out


def test_every_cell_of_every_table_is_there(report):
    folder, out = report
    count = 0
    for path in folder.glob("*.html"):
        made = rendered((out / f"{path.stem}.md").read_text())
        tables = BeautifulSoup(path.read_text(), "html.parser").find_all("table")
        assert len(made.find_all("table")) == len(tables)
        for table, copy in zip(tables, made.find_all("table"), strict=True):
            for row, line in zip(table.find_all("tr"), copy.find_all("tr"), strict=True):
                cells, copies = (one.find_all(("th", "td")) for one in (row, line))
                numbers = [NUMBER.findall(words(cell)) for cell in cells]
                assert [NUMBER.findall(words(cell)) for cell in copies] == numbers
                count += sum(map(len, numbers))
    assert count > 500


def test_every_image_is_a_png_and_every_link_leads_to_a_heading(report):
    _, out = report
    texts = {path.name: path.read_text() for path in out.glob("*.md")}
    images = links = 0
    for name, text in texts.items():
        for image, target in LINK.findall(re.sub(r"(?s)```.*?```", "", text)):
            path, _, anchor = target.partition("#")
            if image:
                images += 1
                assert (out / path).read_bytes().startswith(b"\x89PNG\r\n")
            elif not target.startswith("https://"):
                links += 1
                assert (path or name) in texts
                heads = re.findall(r"^#+ (.*)$", texts[path or name], re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
                assert not anchor or anchor in slugs
    assert (images, links > 8) == (2, True)


def test_a_link_to_a_place_without_a_heading_leads_to_the_one_above(reports):
    one = (
        '<main><h1>A</h1><a href="b.html#deep">x</a><a href="b.html#own">y</a><a href="#t">z</a><p id="t">t</p></main>'
    )
    same = "<h1>B</h1><h2>The [same]</h2><h2>The [same]</h2>"
    two = f'<main>{same}<p id="deep">q</p><section id="own"><h2>C</h2></section></main>'
    for name, text in (("a", one), ("b", two)):
        (reports / f"{name}.html").write_text(text)
    markdown.write([reports / "a.html", reports / "b.html"], reports / "markdown", reports)
    assert "[x](b.md#the-same-1)[y](b.md#c)[z](#a)" in (reports / "markdown" / "a.md").read_text()


def test_there_is_no_html_but_details(report):
    _, out = report
    for path in out.glob("*.md"):
        text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", path.read_text())
        assert set(re.findall(r"(?<!\\)<\s*/?\s*(\w+)", text)) <= {"details", "summary"}
        assert text.count("<details") == text.count("</details>")
    page = (out / "01_layout.md").read_text()
    assert "<details>\n<summary>Table</summary>\n\n| " in page
    assert "<details open>" in page  # the code of the cell that failed


def test_badges_notes_code_and_headings(report):
    _, out = report
    page = (out / "01_layout.md").read_text()
    assert page.startswith("**This notebook stopped at an error;**")
    assert "# State layout of *decode*" in page
    assert "**✓ reproduced**" in page
    assert "A \\<note\\> & more." in page
    assert '```python\nsource: str = "auto"' in page
    assert "¶" not in page
    assert "| `[V, K]` | 8 |" in page
    assert "[the machine](00_machine.md#launch)" in page
    assert "- one\n- two" in page


def test_a_figure_without_a_png_is_svg_and_named(report):
    folder, out = report
    for path in (folder / "figures").rglob("lines.png"):
        path.unlink()
    (out / "old.md").write_text("of an earlier report")
    lacking = markdown.write(sorted(folder.glob("*.html")), out, folder / "figures")
    assert lacking == ["01_layout.md: 1 figure is SVG: run the notebook again to draw PNG"]
    assert [path.suffix for path in sorted((out / "figures").rglob("*.*"))].count(".svg") == 1
    assert not (out / "old.md").exists()


def test_a_figure_of_a_part_is_drawn_beside_the_full_one(reports, monkeypatch):
    for suffix in ("", "--batches-7"):
        monkeypatch.setattr(paths, "SUFFIX", suffix)
        fig = plots.bars(
            sample_report.frame(), "batch", "us", "layout", panel="gpu", xlabel="x", ylabel="µs", title="t"
        )
        figures.show(fig, name="one", alt="a", caption="c")
    names = sorted(path.name for path in (reports / "figures" / "all").iterdir())
    assert names == ["one--batches-7.png", "one--batches-7.svg", "one.png", "one.svg"]


def test_a_table_keeps_its_columns_whatever_its_cells_hold(reports):
    cells = "<td>a | b</td><td><code>x|y</code></td><td><p>one</p><p>two</p></td><td colspan=2>wide</td>"
    html = f"<main><table><tr><th>A</th><th class=n>B</th></tr><tr>{cells}</tr></table></main>"
    (reports / "a.html").write_text(html)
    markdown.write([reports / "a.html"], reports / "markdown", reports)
    text = (reports / "markdown" / "a.md").read_text()
    assert text == ("| A | B |  |  |  |\n| --- | ---: | --- | --- | --- |\n| a \\| b | `x\\|y` | one two | wide |  |\n")


def test_controls_and_permalinks_are_left_out(reports):
    html = (
        "<main><p>Text <a href='#x'>#</a></p><button>CSV</button><label>All</label><script>1</script><!-- c --></main>"
    )
    (reports / "a.html").write_text(html)
    markdown.write([reports / "a.html"], reports / "markdown", reports)
    assert (reports / "markdown" / "a.md").read_text() == "Text\n"


@given(st.text(alphabet="ab1 *_`[]()<>#+-=.~|$\\&;!", max_size=30))
def test_plain_text_stays_plain(text):
    """Whatever a sentence holds, a renderer shows it as it is."""
    tidy = " ".join(text.split())
    made = markdown._guarded(markdown._tidy(markdown._escaped(tidy)))
    assert " ".join(rendered(made).get_text().split()) == tidy
    assert {tag.name for tag in rendered(made).find_all(True)} <= {"p"}
