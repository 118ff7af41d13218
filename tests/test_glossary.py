"""Terms: one plain definition each, marked where a section first uses them and nowhere else."""

import re

import pytest

from labkit.report import glossary

MARK = re.compile(r'<dfn class="term" tabindex="0" title="[^"]+">(.*?)</dfn>')


def marked(html: str) -> list[str]:
    """The terms that are marked in the main of a page."""
    return MARK.findall(glossary.explain(f"<main>{html}</main>"))


def listed(html: str) -> list[str]:
    """The terms of the list at the end."""
    return re.findall(r"<dt [^>]*>(.*?)</dt>", glossary.explain(f"<main>{html}</main>"))


@pytest.mark.parametrize("name", glossary.TERMS)
def test_a_term_is_defined_in_25_words_and_found_by_its_name(name: str) -> None:
    term = glossary.TERMS[name]
    assert set(term) <= {"means", "words"}
    assert 3 <= len(term["means"].split()) <= 25
    assert term["means"].endswith(".")
    assert not re.search(rf"\b{re.escape(name)}\b(?! works)", term["means"].split(":")[0][:20])  # not by itself
    for words in term.get("words", ()):
        assert "(" not in re.sub(r"\(\?", "", words)  # a group of its own would hide the term's
    if "words" not in term:
        assert glossary.found_in(f"many {name}s of a {name}.") == [name, name]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Warps of a CTA, an SM", ["warp", "CTA", "multiprocessor"]),
        ("the read ceiling, a ceiling", ["read ceiling", "ceiling"]),
        ("a KV cache, KV / VK", ["KV cache", "KV and VK"]),
        ("[V, K] in [K, V]", ["KV and VK", "KV and VK"]),
        ("its A/A noise; 95 % intervals", ["A/A noise", "95 % interval"]),
        ("requests and sectors, lines of 128 bytes", ["request", "sector", "line"]),
        ("weights in Q4_K, W4A16", ["Q4_K", "W4A16"]),
        ("the first line of a pull request, in line with the states", []),
        ("tensor_core, tile.py, warp-size, max_tile, programming, L2s", []),
    ],
)
def test_terms_of_a_text(text: str, names: list[str]) -> None:
    assert glossary.found_in(text) == names


def test_the_first_use_in_a_section_is_marked() -> None:
    html = "<p>A warp. Each warp.</p><ul><li>A tile, a warp</li></ul><h2>Next</h2><figcaption>Tiles, warps</figcaption>"
    assert marked(html) == ["warp", "tile", "Tiles", "warps"]


@pytest.mark.parametrize(
    "html",
    [
        "<p><code>warp</code></p>",
        "<p><a href='#x'>a warp</a></p>",
        "<h2>Warps</h2>",
        "<table><tr><td><p>warp</p></td></tr></table>",
        "<details><summary>A warp</summary></details>",
        "<pre>warp</pre>",
        "<div>a warp</div>",
        "<p title='a warp'>x</p>",
    ],
)
def test_only_prose_is_marked(html: str) -> None:
    assert marked(html) == []


def test_a_use_in_a_folded_part_does_not_hide_the_first_that_is_seen() -> None:
    assert (
        marked("<details><p>A warp, the warp</p></details><p>A warp</p><details><p>warp</p></details>") == ["warp"] * 2
    )


def test_the_rest_of_the_page_stays_as_it_is() -> None:
    html = (
        "<!DOCTYPE html>\n<html><head><style>p > a { }</style></head><body class=x><!-- a warp --><main>"
        "<p>1 &lt; 2 &amp; a warp&#39;s <br/><img alt='a warp' src=\"x\"> <b>tile</b></p></main>"
        "<script>if (1 < 2 && '<p>warp</p>') { }</script></body></html>\n"
    )
    made = glossary.explain(html)
    assert re.sub(r"<section.*?</section>\n", "", MARK.sub(r"\1", made), flags=re.DOTALL) == html
    assert MARK.findall(made) == ["warp", "tile"]


def test_the_page_ends_in_the_terms_that_it_uses() -> None:
    html = "<h2>Waves</h2><p>A warp</p><table><tr><td>W4A8</td></tr></table><pre>a tile</pre>"
    assert listed(html) == ["W4A8", "warp", "wave"]
    made = glossary.explain(f"<main>{html}</main>")
    assert 'id="term-w4a8"' in made
    assert made.endswith("</section>\n</main>")
    assert "<details><summary>Glossary</summary>" in made


@pytest.mark.parametrize("html", ["<main><p>Nothing.</p></main>", "<p>No main</p>"])
def test_a_page_without_terms_stays_as_it_is(html: str) -> None:
    assert glossary.explain(html) == html
