"""SVGs in fewer bytes: what is drawn, and what it refers to, stays."""

import io
import re
from xml.etree import ElementTree as ET

import pytest
from matplotlib.figure import Figure

from labkit.report import plots
from labkit.report.compact import compact

DRAWN = ("path", "use", "text", "image", "rect")


def drawing() -> str:
    """A figure with marks, a hatch, a colour bar, a clip path and texts, as matplotlib writes it."""
    with plots.style():
        fig = Figure(layout="constrained")
        left, right = fig.subplots(1, 2)
        left.plot([1, 2, 3], [0.5, 12.345678, 1e5], "o-", label="a < b")
        left.bar([1, 2], [3, 4], hatch="////")
        left.set_ylabel("µs")
        fig.colorbar(right.pcolormesh([[1, 2], [3, 4]]))
        fig.legend()
        buffer = io.StringIO()
        fig.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


@pytest.fixture(scope="module")
def before() -> str:
    return drawing()


def kinds(text: str) -> list[tuple[str, str]]:
    tags = [(item.tag.rpartition("}")[2], (item.text or "").strip()) for item in ET.fromstring(text).iter()]
    return [(tag, words) for tag, words in tags if tag in DRAWN]


def test_everything_drawn_stays_in_its_order(before: str) -> None:
    after, _ = compact(before)
    assert kinds(after) == kinds(before)
    assert len(after) < 0.6 * len(before)


def test_every_reference_finds_its_name(before: str) -> None:
    after, styles = compact(before)
    names = re.findall(r' id="([^"]*)"', after)
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', after + "".join(styles.values())))
    assert set(names) == used
    assert len(names) == len(used) > 3
    assert any("url(#" in style for style in styles.values())  # the hatch


def test_every_style_is_a_class(before: str) -> None:
    after, styles = compact(before)
    assert " style=" not in after
    assert set(re.findall(r' class="([^"]*)"', after)) == set(styles)
    assert any("fill: #1f77b4" in style for style in styles.values())  # the first colour of matplotlib


def test_coordinates_have_the_decimals_that_are_seen() -> None:
    given = (
        '<svg xmlns="http://www.w3.org/2000/svg"><g id="a"><path d="M 12.3456 0.4567 \nL -0.0012 100.04 \nz"/>'
        '<text x="3.14159" transform="rotate(-0 3 4)">1.23456</text></g><g id="b"/></svg>'
    )
    after, _ = compact(given)
    assert after == (
        '<svg xmlns="http://www.w3.org/2000/svg"><path d="M12.3 0.46L0 100z" /><text x="3.14">1.23456</text></svg>'
    )
