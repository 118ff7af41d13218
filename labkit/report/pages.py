"""The report: one HTML page a notebook. One script, in the page; nothing is requested from anywhere."""

import base64
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from labkit import isolated
from labkit.bench.records import write_atomic
from labkit.report import glossary, origins

TEMPLATES = Path(__file__).parent / "template"
SCRIPT = (TEMPLATES / "lab.js").read_text("utf-8")
# The browser enforces what we promise: no script but ours.
_OURS = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; img-src 'self' data: file:; style-src 'unsafe-inline'; script-src 'sha256-{_OURS}'"
SHORT = 28  # characters of code in a sentence that are kept on one line, on a phone too
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

    Cells tagged `lab-only` are left out, links to other notebooks become links to their pages. Those tagged `setup`
    stand behind the one tagged `answer`, so that the answer comes first; they, and neighbours tagged `fold`, are folded
    under the heading that they begin with. status: a line under the title that says where the numbers are from.
    ValueError if the page would request something from outside.
    """
    isolated.spare_imports()
    import nbformat  # here, as what converts a notebook: the index and most commands read none
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    notebook = nbformat.read(executed, as_version=4)
    failures = _prepare(notebook)
    lab = {"title": _title(notebook) or executed.stem, "css": css(), "policy": POLICY, "failures": failures}
    lab |= {"script": SCRIPT, "index": index, "previous": previous, "following": following}
    config = Config(
        TagRemovePreprocessor={"enabled": True, "remove_cell_tags": {"lab-only", "papermill-error-cell-tag"}},
        NbConvertBase={"display_data_priority": [*SHOWN, *EMPTY]},
    )
    template = {"template_name": TEMPLATES.name, "template_file": "page.html.j2"}
    exporter = HTMLExporter(config=config, extra_template_basedirs=[str(TEMPLATES.parent)], **template)
    html, _ = exporter.from_notebook_node(notebook, {"lab": lab})
    status, contents = _lead(html, status)
    html = html.replace("</h1>", f"</h1>{status}", 1)
    place = "<!-- after the answer -->" if "<!-- after the answer -->" in html else "</h1>" + status
    write(out, _anchored(html.replace(place, place + contents, 1)))
    return failures


def write(out: Path, html: str) -> None:
    """Write a page, and beside it NAME.numbers.json: where each number in its sentences is from (`origins`).

    ValueError if the page would request something from outside.
    """
    if found := outside_requests(html):
        raise ValueError(f"{out.name}: would be requested from outside: {', '.join(found)}; a report stands alone")
    html = re.sub(rf"(?<!<pre>)<code>(?=[^<]{{1,{SHORT}}}</code>)", '<code class="short">', html)
    html = re.sub(r'<pre(?=[ >])|<div class="lab-image"', r'\g<0> tabindex="0"', html)  # they scroll, by keyboard too
    write_atomic(out, glossary.explain(_unique_labels(_unique_ids(html))).encode())
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


def _unique_ids(html: str) -> str:
    """The page with each figure's id once: the second "x" is "x-2"."""
    taken = set(re.findall(r' id="([^"]*)"', re.sub("<figure [^>]*>", "", html)))

    def renamed(found: re.Match[str]) -> str:
        name, count = found[2], 1
        while name in taken:
            count += 1
            name = f"{found[2]}-{count}"
        taken.add(name)
        return f'{found[1]}{name}"'

    return re.sub(r'(<figure [^>]*\bid=")([^"]*)"', renamed, html)


def _unique_labels(html: str) -> str:
    """The page with the name of each region once: the second "Table" is "Table (2)"."""
    counts: Counter[str] = Counter()

    def numbered(found: re.Match[str]) -> str:
        counts[found[1]] += 1
        return f'aria-label="{found[1]} ({counts[found[1]]})"' if counts[found[1]] > 1 else found[0]

    named = functools.partial(re.sub, r'aria-label="([^"]*)"', numbered)
    return re.sub(r'<div [^>]*\brole="region"[^>]*>', lambda tag: named(tag[0]), html)


def _prepare(notebook: Any) -> list[str]:
    """Order, fold and mark the cells, turn links to notebooks into links to pages; the errors found."""
    from nbconvert.filters import strip_ansi

    failures = []
    notebook.cells = _folded(_answer_first(notebook.cells))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w[\w.-]*)\.ipynb(#[^)]*)?\)", r"](\1.html\2)", cell.source)
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if errors and not failures:
            cell.metadata["lab_failed"] = True
        failures += [f"{error.ename}: {strip_ansi(error.evalue)}" for error in errors]
    return failures


def _tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def _answer_first(cells: Sequence[Any]) -> list[Any]:
    """The cells with those tagged `setup` behind the one tagged `answer`; as they are if none is, or if one failed."""
    answer = next((place for place, cell in enumerate(cells) if "answer" in _tags(cell)), None)
    if answer is None or any(output.output_type == "error" for cell in cells for output in cell.get("outputs", [])):
        return list(cells)
    first, rest = cells[: answer + 1], cells[answer + 1 :]
    setup = [cell for cell in first if _sets_up(cell)]
    return [*(cell for cell in first if cell not in setup), *setup, *rest]


def _sets_up(cell: Any) -> bool:
    return bool({"setup", "parameters", "injected-parameters"} & set(_tags(cell)))


SETUP = "## Where the figures are from"  # it stands right after the title


def _folded(cells: Sequence[Any]) -> list[Any]:
    """The cells, of which neighbours that fold are between two that open and close it. A cell that failed is open.

    Folds that follow each other are between two cells more, so that they can stand side by side.
    """
    found: list[Any] = []
    for kind, group in groupby(cells, _fold):
        inside = [cell for cell in group if "lab-only" not in _tags(cell)]
        if not kind:
            found += inside
            continue
        found.append(_marker("lab_folds", ""))
        for part in _by_heading(inside):
            head, rest = _heading(part, kind)
            found += [_marker("lab_opens", head), *rest, _marker("lab_closes", "")]
        found.append(_marker("lab_folds_end", ""))
    return found


def _fold(cell: Any) -> str:
    """How a cell is folded: "setup", "fold", or not."""
    failed = any(output.output_type == "error" for output in cell.get("outputs", []))
    return "" if failed else "setup" if _sets_up(cell) else "fold" if "fold" in _tags(cell) else ""


def _by_heading(cells: Sequence[Any]) -> list[list[Any]]:
    """Neighbours that fold, apart where one begins with a heading."""
    found: list[list[Any]] = []
    for cell in cells:
        if not found or (cell.cell_type == "markdown" and cell.source.startswith("#")):
            found.append([])
        found[-1].append(cell)
    return found


def _heading(cells: list[Any], kind: str) -> tuple[str, list[Any]]:
    """What folded cells are called, and the cells without it."""
    head, _, text = cells[0].source.partition("\n")
    if kind == "setup" or not head.startswith("#"):
        return SETUP if kind == "setup" else "### Details", cells
    rest = _markdown(text.strip())
    return head, [rest, *cells[1:]] if text.strip() else cells[1:]


def _marker(name: str, text: str) -> Any:
    return _markdown(text, metadata={name: True})


def _markdown(text: str, **more: Any) -> Any:
    from nbformat.v4 import new_markdown_cell

    return new_markdown_cell(text, **more)


def _title(notebook: Any) -> str:
    """The first heading, as plain text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#{1,6}\s+(.+?)\s*#*$", cell.source, re.MULTILINE)):
            return re.sub(r"[*_`]|\[([^]]*)\]\([^)]*\)", r"\1", found[1])
    return ""


def _anchored(html: str) -> str:
    """The links to headings with a name; those in a summary stand behind it, since that is a control of its own."""

    def placed(found: re.Match[str]) -> str:
        link = f'<a class="anchor-link" aria-label="Link to this section"{found[1]}>¶</a>'
        return found[2] + link if "summary" in found[2] else link + found[2]

    return re.sub(r'<a class="anchor-link"( href="[^"]*")>¶</a>(</h\d>(?:\s*</summary>)?)', placed, html)


def _lead(html: str, status: str) -> tuple[str, str]:
    """What stands beneath the title, and links to the sections if there are several."""
    heads = re.findall(r'(?<!<summary>)<h2 id="([^"]*)">(.*?)<a class="anchor-link"', html, re.DOTALL)
    item = Markup('<li><a href="#{}">{}</a></li>')
    items = [item.format(Markup(name), Markup(text).striptags()) for name, text in heads]
    lead = Markup('<p class="status">{}</p>').format(status) if status else Markup()
    form = Markup('<nav class="contents" aria-label="On this page"><ol>{}</ol></nav>')
    return str(lead), str(form.format(Markup().join(items))) if len(items) > 2 else ""
