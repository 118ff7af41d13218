"""A page by keyboard alone: what Tab reaches, in which order, and whether one sees where one is."""

import json
from collections.abc import Iterator
from itertools import pairwise

from browser import Browser

# Of radio buttons with one name only the chosen one is a stop; the arrows reach the others. Those of the index are
# drawn by what stands behind them.
WATCH = """(() => {
  window.controls = [...document.querySelectorAll(
    'a[href], button, input, select, textarea, summary, [tabindex], [onclick], [role=button]'
  )].filter(one => one.checkVisibility() && !(one.type === 'radio' && !one.checked));
  window.stop = () => {
    const one = document.activeElement, place = controls.indexOf(one);
    if (place < 0) return '[-1, true]';
    const drawn = Number(getComputedStyle(one).opacity) ? one : one.nextElementSibling ?? one;
    const style = getComputedStyle(drawn), box = one.getBoundingClientRect();
    const inside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
    const marked = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 && Number(style.opacity);
    return JSON.stringify([place, Boolean(inside && marked)]);
  };
  return JSON.stringify(controls.map(one => `${one.tagName.toLowerCase()} ${
    (one.getAttribute('aria-label') || one.textContent || one.id).trim().replace(/\\s+/g, ' ').slice(0, 60)}`));
})()"""


def faults(browser: Browser) -> list[str]:
    """What hinders somebody who tabs through the page that was just opened; empty if nothing does.

    A control that Tab does not reach; one that it reaches without an outline, or outside the window; one that it
    reaches before one that stands in front of it; and one that it does not leave.
    """
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    names = json.loads(browser.evaluate(WATCH))
    return list(_told(names, [_tab(browser) for _ in range(len(names) + 2)]))


def _tab(browser: Browser) -> tuple[int, bool]:
    """Press Tab: the place of the control that then has the focus, -1 if none has, and whether one sees that."""
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    place, seen = json.loads(browser.evaluate("stop()"))
    return place, seen


def _told(names: list[str], stops: list[tuple[int, bool]]) -> Iterator[str]:
    """Of the stops that were made, two more than there are controls."""
    seen = {place: marked for place, marked in reversed(stops) if place >= 0}  # the first time counts
    yield from (f"not reached: {name}" for place, name in enumerate(names) if place not in seen)
    yield from (f"focus is not seen: {names[place]}" for place, marked in seen.items() if not marked)
    order = [place for place in dict.fromkeys(place for place, _ in stops) if place >= 0]
    for one, two in pairwise(order):
        if two < one:
            yield f"{names[one]} comes before {names[two]}"
    if stops[-1][0] == stops[-2][0] >= 0:
        yield f"not left: {names[stops[-1][0]]}"
