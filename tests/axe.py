"""axe-core on a page: what would hinder a reader who does not see it, or sees it badly, or has no mouse?"""

import json
from collections.abc import Sequence
from importlib.resources import files

from browser import Browser, fold, shorten_tables

AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
GRAVE = ("moderate", "serious", "critical")

RUN = """axe.run(document, {resultTypes: ['violations'], %s}).then(found => JSON.stringify(
  found.violations.flatMap(({ id, nodes }) => nodes.map(({ impact, target, failureSummary }) =>
    [impact, id, target.flat().join(' '), failureSummary]))))"""


def findings(browser: Browser, folds_open: bool, rules: Sequence[str] = ()) -> list[str]:
    """What axe-core has against the page that is open, of impact moderate or graver: "impact rule: element: why".

    rules: those that are asked; none: all of them. Further rows of long tables are taken out.
    It is evaluated through the debugging protocol, which the page's Content-Security-Policy says nothing of.
    """
    fold(browser, folds_open)
    shorten_tables(browser)
    browser.evaluate(f"typeof axe === 'object' || (() => {{{AXE}}})()")
    only = f"runOnly: {json.dumps(rules)}" if rules else ""
    found = json.loads(browser.evaluate(RUN % only))
    return [f"{impact} {rule}: {at}: {' '.join(why.split())}" for impact, rule, at, why in found if impact in GRAVE]
