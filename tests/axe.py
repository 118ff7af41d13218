"""axe-core on a page: what would hinder a reader who does not see it, or sees it badly, or has no mouse?"""

import json
from importlib.resources import files

from browser import Browser, fold, shorten_tables

AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
GRAVE = ("moderate", "serious", "critical")

# To judge a colour takes milliseconds. Of elements that look alike, and stand in what looks alike, two are asked: the
# first, and the one that says most. Axe does not judge a single letter.
MARK = """(() => {
  const LOOK = ['color', 'webkitTextFillColor', 'backgroundColor', 'backgroundImage', 'opacity', 'fontSize',
    'fontWeight', 'textShadow'];
  const kinds = new Map(), groups = {};
  const kind = one => {
    if (!one) return '';
    if (!kinds.has(one)) {
      const style = getComputedStyle(one);
      kinds.set(one, [kind(one.parentElement), ...LOOK.map(name => style[name])].join('|'));
    }
    return kinds.get(one);
  };
  const isText = node => node.nodeType === Node.TEXT_NODE;
  const own = one => [...one.childNodes].filter(isText).map(node => node.data).join('').trim();
  for (const one of document.querySelectorAll('body *')) {
    const says = one.matches('input, select, textarea') ? 'what is written there' : own(one);
    if (says.length < 2 || !one.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    (groups[kind(one)] ??= []).push([says.length, one]);
  }
  for (const alike of Object.values(groups)) {
    const most = alike.reduce((one, other) => other[0] > one[0] ? other : one);
    for (const [, one] of [alike[0], most]) one.setAttribute('data-asked', '');
  }
})()"""
COLOURS = ["color-contrast"]
RUN = """axe.run(%s, {resultTypes: ['violations'], %s}).then(found => JSON.stringify(
  found.violations.flatMap(({ id, nodes }) => nodes.map(({ impact, target, failureSummary }) =>
    [impact, id, target.flat().join(' '), failureSummary]))))"""


def findings(browser: Browser, folds_open: bool, colours_alone: bool = False) -> list[str]:
    """What axe-core has against the page that is open, of impact moderate or graver: "impact rule: element: why".

    colours_alone: nothing else is asked. Further rows of long tables are taken out.
    It is evaluated through the debugging protocol, which the page's Content-Security-Policy says nothing of.
    """
    fold(browser, folds_open)
    shorten_tables(browser)
    browser.evaluate(f"typeof axe === 'object' || (() => {{{AXE}}})()")
    browser.evaluate(MARK)
    runs = [("{include: [['[data-asked]']]}", f"runOnly: {json.dumps(COLOURS)}")]
    if not colours_alone:
        runs.append(("document", f"rules: {json.dumps({name: {'enabled': False} for name in COLOURS})}"))
    found = [one for run in runs for one in json.loads(browser.evaluate(RUN % run))]
    return [f"{impact} {rule}: {at}: {' '.join(why.split())}" for impact, rule, at, why in found if impact in GRAVE]
