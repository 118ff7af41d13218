"""The report as Markdown, for a README, a wiki or an issue: GitHub's, with no HTML but `<details>`.

Made from the written pages, so that both say the same. Figures are PNG files: those that `figures.show` writes beside
its SVG files, found by the SVG that the page holds, so that none is of another run.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as html_escape
from pathlib import Path
from textwrap import indent
from urllib.parse import quote, unquote, unquote_to_bytes

from bs4 import BeautifulSoup, NavigableString, Tag  # nbconvert depends on it
from bs4.element import PreformattedString

from labkit.bench.records import write_atomic

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
BLOCKS = (
    *HEADINGS, "p", "div", "section", "article", "main", "nav", "header", "footer", "aside", "ul", "ol", "dl", "table",
    "pre", "details", "figure", "figcaption", "img", "blockquote", "hr",
)  # fmt: skip
SKIPPED = (
    "script", "style", "template", "svg", "button", "input", "select", "label", "form", "fieldset", "noscript",
)  # fmt: skip


def write(pages: Sequence[Path], out: Path, figures: Path, say: Callable[[str], None] = lambda text: None) -> list[str]:
    """Write pages (HTML files) as out/NAME.md, their figures below out/figures/; returns which of them want a PNG.

    figures: the folder below which the SVG files lie that the pages hold, with PNG files beside them. A figure without
    one is written as SVG, and named. Files of an earlier call that are no longer made are deleted.
    """
    mains = {path.stem: _main(path) for path in pages}
    places = {name: _places(main) for name, main in mains.items()}
    drawn = {_digest(path.with_suffix(".svg").read_bytes()): path for path in _with_svg(figures)}
    written, lacking = set(), []
    for name, main in mains.items():
        say(f"{name}.md")
        page = _Page(name, places, drawn, figures)
        text = "\n\n".join(page.blocks(main)) + "\n"
        for file, data in {f"{name}.md": text.encode(), **page.files}.items():
            write_atomic(out / file, data)
            written.add(out / file)
        if page.without_png:
            count = "1 figure is" if page.without_png == 1 else f"{page.without_png} figures are"
            lacking.append(f"{name}.md: {count} SVG: run the notebook again to draw PNG")
    for path in set(out.rglob("*.*")) - written:
        if path.is_file():
            path.unlink()
    return lacking


def _with_svg(figures: Path) -> list[Path]:
    return [path for path in sorted(figures.rglob("*.png")) if path.with_suffix(".svg").exists()]


def _main(path: Path) -> Tag:
    soup = BeautifulSoup(path.read_bytes(), "html.parser")
    main = soup.find("main") or soup.find("body") or soup
    for tag in main.find_all(SKIPPED):
        tag.decompose()
    for link in main.find_all("a"):
        if link.get_text(strip=True) in ("", "#", "¶") and not link.find("img"):  # a permalink
            link.decompose()
    return main


def _places(main: Tag) -> dict[str, str]:
    """Id -> the anchor that GitHub gives to the heading under which the element with this id stands."""
    found: dict[str, str] = {}
    taken: dict[str, int] = {}
    anchors: dict[int, str] = {}
    for heading in main.find_all(HEADINGS):
        base = re.sub(r"[^\w\- ]", "", " ".join(heading.get_text().split()).lower()).replace(" ", "-")
        count = taken[base] = taken.get(base, -1) + 1
        anchors[id(heading)] = f"{base}-{count}" if count else base
    here = ""
    for tag in main.find_all(True):
        here = anchors.get(id(tag), here)
        if name := tag.get("id"):
            own = tag.find(HEADINGS)  # a section begins with its heading
            found[str(name)] = anchors[id(own)] if own else here
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class _Page:
    """One page on its way to Markdown.

    drawn: hash of an SVG file -> the PNG file beside it. files: what else is to be written, path below the folder ->
    content.
    """

    name: str
    places: Mapping[str, Mapping[str, str]]
    drawn: Mapping[str, Path]
    figures: Path
    files: dict[str, bytes] = field(default_factory=dict)
    without_png: int = 0

    def blocks(self, parent: Tag) -> list[str]:
        """The blocks of Markdown that an element's children make."""
        found: list[str] = []
        run: list[str] = []

        def flush() -> None:
            if text := _tidy("".join(run)):
                found.append(_guarded(text))
            run.clear()

        for child in parent.children:
            if isinstance(child, Tag) and (child.name in BLOCKS or child.find(BLOCKS)):
                flush()
                found += self.block(child)
            else:
                run.append(self.inline(child))
        flush()
        return found

    def block(self, tag: Tag) -> list[str]:
        if tag.name in HEADINGS:
            return [f"{'#' * int(tag.name[1])} {self.line(tag)}"]
        makers = {"ul": self.items, "ol": self.items, "dl": self.terms, "table": self.table, "pre": _code}
        makers |= {"details": self.details, "img": self.image, "hr": lambda tag: "---", "blockquote": self.quoted}
        if tag.name in makers:
            return list(filter(None, [makers[tag.name](tag)]))
        return self.blocks(tag)

    def inline(self, node: object) -> str:
        """A node within a paragraph."""
        if isinstance(node, NavigableString):
            return "" if isinstance(node, PreformattedString) else _escaped(str(node))
        assert isinstance(node, Tag)
        if node.name == "code":
            return _ticked(node.get_text())
        if node.name == "img":
            return self.image(node)
        if node.name == "br":
            return " "
        text = "".join(map(self.inline, node.children))
        if node.name in ("em", "i"):
            return _marked(text, "*")
        if node.name in ("strong", "b") or "lab-badge" in (node.get("class") or ()):
            return f" {_marked(text, '**')} " if node.name == "span" else _marked(text, "**")
        if node.name == "a" and node.get("href") and text.strip():
            return f"[{_tidy(text)}]({self.address(str(node['href']))})"
        # Blocks within a cell, and spans that a style sheet sets apart, stand beside each other.
        apart = node.name in (*BLOCKS, "li", "dt", "dd", "tr", "td", "th", "summary")
        apart = apart or (node.name == "span" and bool(node.get("class")))
        return f" {text} " if apart else text

    def line(self, tag: Tag) -> str:
        return _tidy("".join(map(self.inline, tag.children)))

    def items(self, tag: Tag) -> str:
        found = []
        for number, item in enumerate(tag.find_all("li", recursive=False), 1):
            sign = f"{number}. " if tag.name == "ol" else "- "
            found.append(sign + indent("\n\n".join(self.blocks(item)), " " * len(sign)).lstrip())
        return "\n".join(found)

    def terms(self, tag: Tag) -> str:
        found = []
        for one in tag.find_all(("dt", "dd")):
            found.append(
                f"- {_marked(self.line(one).strip('*'), '**')}:" if one.name == "dt" else f" {self.line(one)}\n"
            )
        return "".join(found).strip()

    def table(self, tag: Tag) -> str:
        rows = [row.find_all(("th", "td"), recursive=False) for row in tag.find_all("tr")]
        if not any(rows):
            return ""
        lines = [[cell for one in row for cell in self.cells(one)] for row in rows]
        width = max(map(len, lines))
        head = [cell for one in rows[0] for cell in [one] + [None] * (_span(one) - 1)]
        right = ["n" in (one.get("class") or ()) if one else False for one in head] + [False] * (width - len(head))
        full = [line + [""] * (width - len(line)) for line in lines]
        full.insert(1, ["---:" if number else "---" for number in right])
        return "\n".join(f"| {' | '.join(line)} |" for line in full)

    def cells(self, cell: Tag) -> list[str]:
        return [self.line(cell).replace("|", "\\|"), *[""] * (_span(cell) - 1)]

    def details(self, tag: Tag) -> str:
        summary = tag.find("summary", recursive=False)
        head = "Details"
        if summary:
            head = html_escape(" ".join(summary.get_text().split()), quote=False)
            summary.extract()
        opening = "<details open>" if tag.has_attr("open") else "<details>"
        return "\n\n".join([f"{opening}\n<summary>{head}</summary>", *self.blocks(tag), "</details>"])

    def quoted(self, tag: Tag) -> str:
        return "\n".join(f"> {line}".rstrip() for line in "\n\n".join(self.blocks(tag)).splitlines())

    def image(self, tag: Tag) -> str:
        alt = _tidy(_escaped(str(tag.get("alt") or "")))
        return f"![{alt}]({quote(self.file_of(str(tag.get('src') or '')), safe='/,')})"

    def file_of(self, source: str) -> str:
        """The file that shows an image, which is one to be written if the page holds it."""
        if not source.startswith("data:"):
            return f"../{source}"
        head, _, body = source.partition(",")
        data = base64.b64decode(body) if head.endswith(";base64") else unquote_to_bytes(body)
        kind = re.split(r"[/+;]", head)[1]
        if png := self.drawn.get(_digest(data)):
            name, data = f"figures/{png.relative_to(self.figures)}", png.read_bytes()
        else:
            self.without_png += kind == "svg"
            name = f"figures/{_digest(data)[:16]}.{kind}"
        self.files[name] = data
        return name

    def address(self, href: str) -> str:
        """A link's target: of a page its Markdown, of a place in one the heading above it."""
        if re.match(r"[a-z][a-z0-9+.-]*:", href, re.IGNORECASE):
            return href.replace("(", "%28").replace(")", "%29").replace(" ", "%20")
        path, _, fragment = href.partition("#")
        stem = path.removesuffix(".html") if path else self.name
        if stem not in self.places:
            return quote(f"../{href}", safe="/#,%")
        anchor = self.places[stem].get(unquote(fragment), "")
        page = f"{stem}.md" if path else ("" if anchor else f"{stem}.md")
        return quote(page, safe="/,") + (f"#{quote(anchor)}" if anchor else "")


def _span(cell: Tag) -> int:
    text = str(cell.get("colspan") or "1")
    return int(text) if text.isdecimal() and int(text) else 1


def _code(tag: Tag) -> str:
    text = tag.get_text().strip("\n")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    highlighted = any("highlight" in (one.get("class") or ()) for one in tag.parents)
    return f"{fence}{'python' if highlighted else ''}\n{text}\n{fence}" if text else ""


def _ticked(text: str) -> str:
    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    edge = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{edge}{text}{edge}{fence}" if text else ""


def _marked(text: str, sign: str) -> str:
    """Text between signs of emphasis, which may not stand beside a space within."""
    inner = text.strip()
    if not inner:
        return text
    begin, end = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{begin}{sign}{inner}{sign}{end}"


def _escaped(text: str) -> str:
    """Plain text with a backslash before what Markdown, or GitHub's mathematics, would read as a sign."""
    text = re.sub(r"([\\`*\[\]<>~$])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # within a word it is no sign
    return re.sub(r"&(?=#?\w+;)", "&amp;", text)


def _tidy(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _guarded(text: str) -> str:
    """A paragraph whose beginning is not read as that of a heading, a list, or a rule."""
    text = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)
    return re.sub(r"^(#{1,6}|[-+=]+)(?=\s|$)", r"\\\1", text)
