"""The report: one HTML page a notebook. No scripts, and nothing is requested from anywhere."""

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters import strip_ansi
from traitlets.config import Config

from labkit.bench.records import write_atomic
from labkit.report import origins

TEMPLATES = Path(__file__).parent / "template"
# The browser enforces what we promise.
POLICY = "default-src 'none'; img-src 'self' data: file:; style-src 'unsafe-inline'"
SHOWN = ("text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain")  # best first
EMPTY = ("application/vnd.jupyter.widget-view+json", "application/javascript")  # known, but nothing on a page


@dataclass(frozen=True)
class StudyEntry:
    """A study in the index. page: its HTML file relative to the index, or empty; status: one line, such as
    "measured here on NVIDIA H100" or "recorded on NVIDIA H100, 2025-11-21"."""

    title: str
    summary: str
    page: str
    status: str
    failed: bool = False


def page(
    executed: Path,
    out: Path,
    *,
    previous: StudyEntry | None = None,
    following: StudyEntry | None = None,
    status: str = "",
    index: str = "index.html",
) -> list[str]:
    """Write the page of an executed notebook; returns its errors ("ValueError: …"), none if it ran to the end.

    Cells tagged `lab-only` are left out, links to other notebooks become links to their pages. status: a line under
    the title that says where the numbers are from. ValueError if the page would request something from outside.
    """
    notebook = nbformat.read(executed, as_version=4)
    failures = _prepare(notebook)
    lab = {"title": _title(notebook) or executed.stem, "css": css(), "policy": POLICY, "failures": failures}
    lab |= {"index": index, "previous": previous, "following": following}
    config = Config(
        TagRemovePreprocessor={"enabled": True, "remove_cell_tags": {"lab-only", "papermill-error-cell-tag"}},
        NbConvertBase={"display_data_priority": [*SHOWN, *EMPTY]},
    )
    template = {"template_name": TEMPLATES.name, "template_file": "page.html.j2"}
    exporter = HTMLExporter(config=config, extra_template_basedirs=[str(TEMPLATES.parent)], **template)
    html, _ = exporter.from_notebook_node(notebook, {"lab": lab})
    write(out, html.replace("</h1>", "</h1>" + _lead(html, status), 1))
    return failures


def write(out: Path, html: str) -> None:
    """Write a page, and beside it NAME.numbers.json: where each number in its sentences is from (`origins`).

    ValueError if the page would request something from outside.
    """
    if found := outside_requests(html):
        raise ValueError(f"{out.name}: would be requested from outside: {', '.join(found)}; a report stands alone")
    write_atomic(out, html.encode())
    numbers = json.dumps(origins.numbers(html), ensure_ascii=False, indent=1)
    write_atomic(out.with_suffix(".numbers.json"), numbers.encode())


def css(name: str = "lab.css") -> str:
    """A style sheet of the template's."""
    return (TEMPLATES / name).read_text("utf-8")


def outside_requests(html: str) -> list[str]:
    """What a browser would fetch from another host to show this HTML; plain links (`<a href>`) do not count."""
    finder = _Finder()
    finder.feed(html)
    return finder.found


class _Finder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.style = tag == "style"
        for name, value in attrs:
            if name in ("src", "srcset", "poster", "data", "action") or (name == "href" and tag != "a"):
                self.found += re.findall(r"^\s*((?:https?:)?//\S*)", value or "", re.IGNORECASE)
            elif name == "style":
                self._search_css(value or "")

    def handle_data(self, data: str) -> None:
        if self.style:
            self._search_css(data)

    def handle_endtag(self, tag: str) -> None:
        self.style = False

    def _search_css(self, text: str) -> None:
        self.found += re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]*)", text, re.IGNORECASE)


def _prepare(notebook: Any) -> list[str]:
    """Mark the cells that failed, turn links to notebooks into links to pages; the errors found."""
    failures = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w[\w.-]*)\.ipynb(#[^)]*)?\)", r"](\1.html\2)", cell.source)
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if errors and not failures:
            cell.metadata["lab_failed"] = True
        failures += [f"{error.ename}: {strip_ansi(error.evalue)}" for error in errors]
    return failures


def _title(notebook: Any) -> str:
    """The first heading, as plain text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#{1,6}\s+(.+?)\s*#*$", cell.source, re.MULTILINE)):
            return re.sub(r"[*_`]|\[([^]]*)\]\([^)]*\)", r"\1", found[1])
    return ""


def _lead(html: str, status: str) -> str:
    """What stands beneath the title: the status, and links to the sections if there are several."""
    heads = re.findall(r'<h2 id="([^"]*)">(.*?)<a class="anchor-link"', html, re.DOTALL)
    item = Markup('<li><a href="#{}">{}</a></li>')
    items = [item.format(Markup(name), Markup(text).striptags()) for name, text in heads]
    lead = Markup('<p class="status">{}</p>').format(status) if status else Markup()
    if len(items) > 2:
        lead += Markup('<nav class="contents" aria-label="On this page"><ol>{}</ol></nav>').format(Markup().join(items))
    return str(lead)
