"""The index, as HTML."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sample_report

from labkit.report import index, pages
from labkit.report.index import Filter, Machine, Result


def write_index(folder: Path, **parts: object) -> str:
    arguments = {
        "studies": [pages.StudyEntry("Layout <1>", "Which?", "01.html", "measured here", failed=True)],
        "findings": sample_report.findings(),
        "claims": sample_report.claims(),
        "machines": sample_report.machines(),
        "built": {"labkit": "0.1.0"},
    }
    index.write(**(arguments | parts), out=folder / "index.html")
    return re.sub("</?dfn[^>]*>", "", (folder / "index.html").read_text("utf-8"))  # terms are explained elsewhere


def claim_rows(text: str) -> list[str]:
    return re.findall(r'<li class="claim".*?</li>', text, re.DOTALL)


def test_index_opens_with_the_tally_and_the_findings(tmp_path: Path) -> None:
    text = write_index(tmp_path)
    heads = [f'<h2 id="{name}"' for name in ("findings", "studies", "claims", "machines", "made")]
    places = [text.index(part) for part in ("<h1", '<ul class="tally"', *heads)]
    assert places == sorted(places)


def test_tally_counts_each_claim_once_on_every_gpu(tmp_path: Path) -> None:
    claims, machines = sample_report.claims(), sample_report.machines()
    found = index.tally(claims, machines)
    assert found == {"reproduced": 1, "not reproduced": 1, "consistent": 3, "could not be judged": 1, "not measured": 2}
    assert sum(found.values()) == len(claims) * len(machines)
    text = write_index(tmp_path)
    shown = re.search(r'<ul class="tally".*?</ul>', text, re.DOTALL)[0]
    assert re.findall(r"</span> (\d+)</li>", shown) == ["1", "1", "3", "1", "2"]
    assert "NVIDIA H100 80GB HBM3 (recorded 2025-11-21) and NVIDIA H200 (measured here)" in text


def test_finding_links_to_its_page_and_says_what_to_do(tmp_path: Path) -> None:
    text = write_index(tmp_path)
    shown = re.search(r'<ul class="findings".*?</ul>', text, re.DOTALL)[0]
    assert '<a href="01_layout.html">State layout of decode</a>' in shown
    assert '<data class="origin" value="1.09" title="x">1.09</data>× faster' in shown
    assert "What to do: keep &lt;V&gt; first" in shown
    assert 'id="findings"' not in write_index(tmp_path, findings=[])


def test_row_has_source_figures_verdict_words_and_what_was_run(tmp_path: Path) -> None:
    first, second, third, fourth = claim_rows(write_index(tmp_path))
    assert 'href="https://github.com/sgl-project/sglang/pull/20283"' in first
    assert "&lt;makes&gt;" in first
    for part in (
        "7 to 8 % of the whole step",
        "H100: <span>1.09 [1.08, 1.10]</span>",
        "✓ reproduced",
        "✗ not reproduced",
        "as claimed, as much as published",
        "not as claimed",
        "run: the source&#39;s own code",
    ):
        assert part in first
    for remark in ("recorded with an earlier kernel", "rule changed after the data"):
        assert first.count(remark) == 1
        assert remark not in second
    assert "≈ consistent" in second
    assert "run: an estimate" in second
    assert "not measured" in second
    assert "could not be judged" in third
    assert "no rows for batch 64" in third
    assert fourth.count("≈ consistent") == 1
    assert "on both" in fourth


def test_conditions_quantity_and_reason_are_folded(tmp_path: Path) -> None:
    first = claim_rows(write_index(tmp_path))[0]
    fold = re.search(r"<details>.*?</details>", first, re.DOTALL)[0]
    for part in ("H100, Qwen3-Next, fp32 state", "time of [K, V] over that of [V, K]", "contiguous runs", "reach 97 %"):
        assert part in fold
        assert first.count(part) == 1


def test_a_reason_that_is_the_same_on_several_gpus_is_said_once(tmp_path: Path) -> None:
    row = sample_report.claims()[3]
    (both,) = index.outcomes(row, sample_report.machines())
    assert [slugs for slugs, _ in both.reasons] == [["nvidia-h100-80gb-hbm3", "nvidia-h200-here"]]
    assert "H100, H200 here: decode is" in claim_rows(write_index(tmp_path))[3]


def test_row_has_a_permalink_and_links_to_the_place_of_the_verdict(tmp_path: Path) -> None:
    text = write_index(tmp_path)
    ids = re.findall(r'<li class="claim" id="([^"]*)"', text)
    assert ids == ["claim-layout.run-length", "claim-layout.speed", "claim-layout.table", "claim-grid.speed"]
    for name, row in zip(ids, claim_rows(text), strict=True):
        assert re.search(rf'<a class="permalink" href="#{re.escape(name)}"[^>]*>#</a>', row)
    assert '<a href="01_layout.html#claim-run-length">State' in text
    assert "#claim-table" not in text  # its study has no page


def test_claims_are_grouped_by_study(tmp_path: Path) -> None:
    text = write_index(tmp_path)
    assert [claim_rows(group) != [] for group in text.split('<section class="group"')[1:]] == [True, True]
    assert text.index('id="claims-layout"') < text.index("claim-layout.table") < text.index('id="claims-grid"')


def test_no_link_is_empty_and_a_source_without_an_address_says_so(tmp_path: Path) -> None:
    first, *others = sample_report.claims()
    claims = [replace(first, claim=replace(first.claim, url="")), *others]
    text = write_index(tmp_path, claims=claims, studies=[pages.StudyEntry("No page", "Which?", "", "not run yet")])
    links = Links()
    links.feed(text)
    assert len(links.found) > 8
    assert [link for link in links.found if not link[0] or not link[1].strip()] == []
    assert "SGLang 20283 (no public link)" in claim_rows(text)[0]


class Links(HTMLParser):
    """Address and text of every link."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.inside = True
            self.found.append([dict(attrs).get("href") or "", ""])

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1][1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "a"


def test_gpus_of_one_verdict_by_the_same_code_are_shown_together() -> None:
    row, machines = sample_report.claims()[3], sample_report.machines()
    weak = row.results["nvidia-h100-80gb-hbm3"]
    (both,) = index.outcomes(row, machines)
    assert (both.verdict, both.run, both.words, list(both.results)) == (
        "consistent", "an estimate", "as claimed, more than published", [machine.slug for machine in machines]
    )  # fmt: skip
    less = replace(weak, judgement=replace(weak.judgement, size="less"), rule_changed=True)
    (both,) = index.outcomes(replace(row, results=row.results | {"nvidia-h200-here": less}), machines)
    assert both.words == ""  # each says its own
    assert both.remarks == []
    ours = replace(weak, judgement=replace(weak.judgement, code="our version of the code"))
    found = index.outcomes(replace(row, results=row.results | {"nvidia-h200-here": ours}), machines)
    assert [outcome.run for outcome in found] == ["an estimate", "our version of it"]
    assert [outcome.verdict for outcome in index.outcomes(replace(row, results={}), machines)] == ["not measured"]


def test_words_and_remarks_that_differ_stand_beside_their_gpu(tmp_path: Path) -> None:
    *others, row = sample_report.claims()
    weak = row.results["nvidia-h100-80gb-hbm3"]
    less = replace(weak, judgement=replace(weak.judgement, size="less"), rule_changed=True)
    claims = [*others, replace(row, results=row.results | {"nvidia-h200-here": less})]
    shown = claim_rows(write_index(tmp_path, claims=claims))[-1]
    h100, h200 = re.findall(r'<p class="gpu".*?</p>', shown, re.DOTALL)
    assert "as claimed, more than published" in h100
    assert "rule changed" not in h100
    assert "as claimed, less than published" in h200
    assert "rule changed" in h200


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["NVIDIA H100 80GB HBM3", "NVIDIA H200"], ["H100", "H200"]),
        (["NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe"], ["RTX 4090", "H100 PCIe"]),
        (["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"], ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"]),
    ],
)
def test_short_names_are_never_the_same(names: list[str], short: list[str]) -> None:
    machines = [Machine(name.lower(), name, "") for name in names]
    assert list(index.short_names(machines).values()) == short


def test_a_gpu_recorded_and_measured_here_has_two_names() -> None:
    machines = [Machine("h200-here", "NVIDIA H200", ""), Machine("h200", "NVIDIA H200", "")]
    assert index.short_names(machines) == {"h200-here": "H200 here", "h200": "H200"}


def test_filters_offer_what_there_is(tmp_path: Path) -> None:
    ids = re.findall(r'<input type="radio" name="[^"]*" id="filter-([^"]*)"', write_index(tmp_path))
    verdicts = ("reproduced", "not-reproduced", "consistent", "could-not-be-judged", "not-measured")
    assert ids[:6] == ["verdict", *(f"verdict-{name}" for name in verdicts)]
    assert ids[6:9] == ["gpu", "gpu-nvidia-h100-80gb-hbm3", "gpu-nvidia-h200-here"]
    assert ids[9:] == ["run", "run-the-source-s-own-code", "run-an-estimate", "run-nothing"]
    alone = write_index(tmp_path, claims=sample_report.claims()[3:], machines=sample_report.machines()[:1])
    assert 'type="radio"' not in alone


def test_every_pair_of_buttons_of_two_filters_has_a_rule() -> None:
    filters = [Filter("verdict", "", {"a": "", "b": ""}), Filter("gpu", "", {"x": ""})]
    text = index.rules(filters)
    assert "main:has(#filter-verdict-a:checked):has(#filter-gpu-x:checked)" in text
    assert "#filter-verdict-a:checked):has(#filter-verdict-b" not in text


def test_index_lists_studies_and_machines(tmp_path: Path) -> None:
    text = write_index(tmp_path)
    assert '<a href="01.html">Layout &lt;1&gt;</a>' in text
    assert "✗ failed" in text
    assert "3.00 TB/s" in text
    assert pages.outside_requests(text) == []


def test_index_of_nothing_says_so(tmp_path: Path) -> None:
    text = write_index(tmp_path, studies=[], findings=[], claims=[], machines=[], built={})
    for part in ("No study states a claim yet", "No study has been run yet", "Nothing is recorded"):
        assert part in text


def test_index_escapes_what_it_is_given(tmp_path: Path) -> None:
    machine = replace(sample_report.machines()[0], name="<b>GPU</b>", facts={"<i>": "<u>"})
    text = write_index(tmp_path, machines=[machine], built={"<s>": "<q>"})
    assert not re.search(r"<[biusq]>", text)


def test_a_result_without_judgement_says_why() -> None:
    assert [Result(None).verdict, Result(None, error="x").verdict] == ["not measured", "could not be judged"]
