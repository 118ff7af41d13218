"""The two checkers of how a page is used without a mouse or without seeing it: each finds the fault, and no other."""

import axe
import browser as driver
import keyboard
import pytest
from test_browser import GOOD, browser  # noqa: F401 (a fixture)

pytestmark = pytest.mark.browser

END = "</body>"
COLOURS = 'style="color: #aaa; background: #fff"'
PALE = f"<p {COLOURS}>pale</p>"


@pytest.fixture
def opened(browser, tmp_path):  # noqa: F811
    """Opens the good page with something before its end, all folds open."""

    def with_(more: str, scheme: str = "light") -> driver.Browser:
        good = GOOD.replace("<body>", "<body><main>").replace(END, f"{more}</main>{END}")
        (tmp_path / "page.html").write_text(good)
        browser.open(tmp_path / "page.html", 1280, scheme)
        return browser

    return with_


def test_axe_passes_a_good_page(opened):
    assert axe.findings(opened(""), folds_open=True) == []


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (PALE, "serious color-contrast"),
        ('<img src="data:,">', "critical image-alt"),
        ("<select><option>one</select>", "critical select-name"),
        ("<details><summary>more <a href='#top'>up</a></summary>x</details>", "serious nested-interactive"),
        (
            "<div style='height: 20px; width: 90px; overflow: auto'><p>" + "long " * 99 + "</p></div>",
            "scrollable-region",
        ),
        ("<h4>out of order</h4>", "moderate heading-order"),
        (f"<table><tbody>{'<tr><td>1' * 9}<tr><td>{PALE}</table>", "serious color-contrast"),
        ("<p>dark</p>" * 9 + PALE, "serious color-contrast"),
        (f"<div hidden>{PALE * 9}</div>{PALE}", "serious color-contrast"),  # those that are not seen look alike
        (PALE.replace("pale", "1") * 9 + PALE, "serious color-contrast"),
        (PALE.replace("color", "visibility: hidden; color", 1) * 9 + PALE, "serious color-contrast"),
        (f'<input aria-label="a" value="pale" {COLOURS}>', "serious color-contrast"),
    ],
)
def test_axe_finds_the_fault(opened, more, rule):
    assert rule in "\n".join(axe.findings(opened(more), folds_open=True))


def test_axe_passes_what_is_of_less_impact(opened):
    assert axe.findings(opened("<h2></h2>"), folds_open=True) == []  # an empty heading


def test_axe_looks_into_folds_when_they_are_open(opened):
    tab = opened(f"<details><summary>more</summary>{PALE}</details>")
    assert axe.findings(tab, folds_open=False) == []
    assert len(axe.findings(tab, folds_open=True)) == 1


def test_axe_sees_the_colours_of_the_scheme(opened):
    text = '<p style="color: #bbb">pale on white, not on black</p>'
    style = "<style>@media (prefers-color-scheme: dark) { body { color: white } a { color: #8cf } }</style>"
    assert len(axe.findings(opened(style + text), folds_open=True)) == 1
    assert axe.findings(opened(style + text, "dark"), folds_open=True) == []


def test_axe_runs_where_the_page_forbids_scripts(opened):
    policy = '<meta http-equiv="Content-Security-Policy" content="script-src \'none\'">'
    assert len(axe.findings(opened(policy + PALE), folds_open=True)) == 1


STYLE = "<style>:focus-visible { outline: 2px solid }</style>"
RADIOS = '<label>{0}<input type="radio" name="r" {1}></label>'


def test_keyboard_passes_a_good_page(opened):
    radios = RADIOS.format("one", "checked") + RADIOS.format("two", "")
    folds = "<details><summary>more</summary><button>in it</button></details>"
    far = '<p style="height: 5000px">long</p><button>far down</button>'
    assert keyboard.faults(opened(STYLE + radios + folds + far)) == []


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ('<button tabindex="-1">sort</button>', "not reached: button sort"),
        ('<div onclick="alert()">fold</div>', "not reached: div fold"),
        ('<button style="outline: none">copy</button>', "focus is not seen: button copy"),
        ('<button style="opacity: 0">copy</button>', "focus is not seen: button copy"),
        ('<button style="position: fixed; left: -900px">CSV</button>', "focus is not seen: button CSV"),
        ('<button>one</button><button tabindex="2">two</button>', "button two comes before a up"),
        (
            '<input aria-label="filter"><script>document.querySelector("input").onkeydown = e => e.preventDefault()'
            "</script><button>after</button>",
            "not reached: button after\nnot left: input filter",
        ),
        (
            '<input aria-label="last"><script>document.querySelector("input").onkeydown = e => e.preventDefault()'
            "</script>",
            "not left: input last",
        ),
    ],
)
def test_keyboard_finds_the_fault(opened, more, fault):
    assert "\n".join(keyboard.faults(opened(STYLE + more))) == fault
