"""Terms of the pages, explained where a section first uses them, and in a list at the page's end.

In the page's HTML the first use in each section (from one h2 to the next) becomes `<dfn class="term" title="…">`; the
hover card is the script's, the title is for readers without it.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path

from markupsafe import escape

TERMS: Mapping[str, Mapping] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_PROSE = {"p", "li", "figcaption"}  # where terms are marked
_WHOLE = {"a", "button", "code", "data", "dfn", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "nav", "summary", "table"}
_UNREAD = {"code", "pre", "script", "style", "title"}  # whose words are no uses


def _words(name: str, term: Mapping) -> str:
    """A pattern for a term: its words, or the name and its plural, with a small or a large first letter."""
    plain = name if not name[0].islower() else f"[{name[0].upper()}{name[0]}]{name[1:]}"
    return "|".join(term.get("words", [f"{plain}s?"]))


_GROUPS = {f"t{place}": name for place, name in enumerate(TERMS)}
_LONGEST_FIRST = sorted(_GROUPS.items(), key=lambda item: -len(item[1]))
_TERM = re.compile(
    r"(?<![\w/.\-])(?:" + "|".join(f"(?P<{group}>{_words(name, TERMS[name])})" for group, name in _LONGEST_FIRST)
    + r")(?![\w/]|[.\-]\w)"
)  # fmt: skip


def explain(html: str) -> str:
    """The page with its terms explained, and before the end of main the list of those that it uses."""
    marker = _Marker()
    marker.feed(html)
    marker.close()
    before, end, after = "".join(marker.made).rpartition("</main>")
    return before + _glossary(marker.used) + end + after if end else after


def found_in(text: str) -> list[str]:
    """The names of a text's terms, in their order."""
    return [_GROUPS[match.lastgroup] for match in _TERM.finditer(text)]


class _Marker(HTMLParser):
    """Copies a page as it is, but for the terms. made: its parts; used: names of terms."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.made: list[str] = []
        self.used: set[str] = set()
        self._open: list[str] = []  # elements that say whether terms are marked
        self._seen: set[str] = set()  # in this section, to everyone
        self._seen_folded: set[str] = set()  # only in a part that is folded

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.made.append(self.get_starttag_text())
        if tag == "h2":
            self._seen, self._seen_folded = set(), set()
        if tag in _PROSE | _WHOLE | _UNREAD | {"details"}:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.made.append(self.get_starttag_text())

    def handle_endtag(self, tag: str) -> None:
        self.made.append(f"</{tag}>")
        if tag in self._open:  # with those inside that were never closed
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if _UNREAD.intersection(self._open):
            self.made.append(data)
        elif _PROSE.intersection(self._open) and not _WHOLE.intersection(self._open):
            self.made.append(_TERM.sub(self._marked, data))
        else:
            self.used.update(found_in(data))
            self.made.append(data)

    def _marked(self, found: re.Match[str]) -> str:
        name = _GROUPS[found.lastgroup]
        self.used.add(name)
        seen = self._seen_folded if "details" in self._open else self._seen
        if name in self._seen | seen:
            return found[0]
        seen.add(name)
        return f'<dfn class="term" tabindex="0" title="{escape(TERMS[name]["means"])}">{found[0]}</dfn>'

    def handle_entityref(self, name: str) -> None:
        self.made.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.made.append(f"&#{name};")

    def handle_comment(self, data: str) -> None:
        self.made.append(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self.made.append(f"<!{decl}>")


def _glossary(used: Iterable[str]) -> str:
    """The folded list of terms, in alphabetic order, each with an anchor; empty without terms."""
    names = sorted(used, key=str.lower)
    anchors = [re.sub(r"\W+", "-", f"term {name.lower()}") for name in names]
    parts = [
        f'<dt id="{anchor}">{name}</dt><dd>{escape(TERMS[name]["means"])}</dd>'
        for anchor, name in zip(anchors, names, strict=True)
    ]
    text = f"<details><summary>Glossary</summary><dl>{''.join(parts)}</dl></details>"
    return f'<section class="glossary" aria-label="Glossary">{text}</section>\n' if names else ""
