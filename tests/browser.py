"""Headless Chromium through its DevTools protocol, and a checker: what would a reader's browser complain of?"""

import functools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
INSIDE = ("file", "data", "about", "blob")

SCRIPT = """
(async () => {
  for (const fold of document.querySelectorAll('details')) fold.open = true;
  const images = [...document.images];
  await Promise.all(images.map(image => image.decode().catch(() => null)));
  const name = image => (image.getAttribute('alt') || image.src).slice(0, 60);
  return JSON.stringify({
    images: images.length,
    broken: images.filter(image => !(image.naturalWidth > 0)).map(name),
    unnamed: images.filter(image => !(image.getAttribute('alt') || '').trim()).map(name),
    invisible: images.filter(image => image.getBoundingClientRect().width < 100).map(name),
    width: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    links: [...document.querySelectorAll('a[href]')].map(link => link.href),
  });
})()
"""


def find() -> str | None:
    """The path of Chromium or Chrome, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A headless browser with one tab. Use as a context manager."""

    def __init__(self, program: str, profile: Path):
        self.errors = open(profile.with_suffix(".log"), "wb")  # noqa: SIM115 (closed in __exit__)
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=self.errors, stderr=self.errors)
        port = _wait(lambda: (profile / "DevToolsActivePort").read_text().split()[0], self.process)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=20) as answer:
            self.socket = websocket.create_connection(json.load(answer)["webSocketDebuggerUrl"], timeout=300)
        self.count = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(20)
        self.errors.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that come in between are kept."""
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def open(self, page: Path, width: int, scheme: str) -> dict[str, Any]:
        """Load a page; what `SCRIPT` finds on it."""
        self.call("Page.navigate", url="about:blank")
        self._until_loaded()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until_loaded()
        return json.loads(self.evaluate(SCRIPT))

    def evaluate(self, expression: str) -> Any:
        """What an expression is on the page, or what its promise comes to; RuntimeError for an exception of it."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"on the page: {found['exceptionDetails']}")
        return found["result"].get("value")

    def _until_loaded(self) -> None:
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self.socket.recv()))

    def complaints(self) -> list[str]:
        """Console errors, exceptions and requests to outside since the last `open`."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                found += [f"outside request: {url}"] if urlsplit(url).scheme not in INSIDE else []
            elif method == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails']['text']}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(f"console error: {params['args'][0].get('value')}")
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"console error: {params['entry']['text']} {params['entry'].get('url', '')}")
        return found


def fold(browser: Browser, folds_open: bool) -> None:
    """Open, or close, every fold of the page that is open."""
    state = json.dumps(folds_open)
    browser.evaluate(f"for (const fold of document.querySelectorAll('details')) fold.open = {state}")


def shorten_tables(browser: Browser) -> None:
    """Take the further rows of plain cells out of long tables: they look like the first ones, and take minutes."""
    rows = "tbody tr:nth-child(n+4):not(:has(:not(td, th, data)))"
    browser.evaluate(f"for (const row of document.querySelectorAll('{rows}')) row.remove()")


def check(browser: Browser, page: Path) -> list[str]:
    """Everything wrong with a page, at two widths, in light and dark; empty if nothing is."""
    problems: list[str] = []
    backgrounds = {}
    for width in WIDTHS:
        for scheme in SCHEMES:
            seen = browser.open(page, width, scheme)
            where = f"{page.name} at {width} px, {scheme}"
            problems += [f"{where}: {complaint}" for complaint in browser.complaints()]
            for kind in ("broken", "unnamed", "invisible"):
                problems += [f"{where}: {kind} image: {name}" for name in seen[kind]]
            if seen["width"] > width:
                problems.append(f"{where}: {seen['width']} px wide, scrolls sideways")
            backgrounds[scheme] = seen["background"]
    if backgrounds["light"] == backgrounds["dark"]:
        problems.append(f"{page.name}: the background is {backgrounds['light']} in light and in dark")
    return problems + [f"{page.name}: {problem}" for link in dict.fromkeys(seen["links"]) for problem in _dead(link)]


def _dead(link: str) -> list[str]:
    url = urlsplit(link)
    if url.scheme != "file":
        return []
    path = Path(unquote(url.path))
    if not path.exists():
        return [f"dead link: {link}"]
    if url.fragment and not {url.fragment, unquote(url.fragment)} & _ids(path):
        return [f"link to an anchor that is not there: {link}"]
    return []


@functools.cache  # a page has hundreds of links to places on it
def _ids(page: Path) -> set[str]:
    finder = HTMLParser()
    found: set[str] = set()
    finder.handle_starttag = lambda tag, attrs: found.update(value for name, value in attrs if name == "id" and value)
    finder.feed(page.read_text("utf-8"))
    return found


def _wait(read: Any, process: subprocess.Popen, seconds: float = 60) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            return read()
        except (OSError, IndexError):
            time.sleep(0.05)
    process.kill()
    raise RuntimeError(
        f"the browser did not start (exit code {process.poll()}, pid {process.pid}, {os.uname().sysname})"
    )
