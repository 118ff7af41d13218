"""What a notebook shows, tried on rows with made-up times: nothing raises, and nothing is said to be what it is not."""

import ast
import json
import math
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from html import escape, unescape
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import rows as made
from IPython.display import Code
from running import RECORDED
from toy_lab import MACHINE

from labkit import isolated, lab, paths, registry
from labkit.bench import machine, records, spec, verdict
from labkit.bench.claim import Claim
from labkit.evidence import compiled
from labkit.report import plots
from labkit.report.figures import drawing
from labkit.studies.persistent_tables import views as table_views
from labkit.studies.state_layout import explore, production_views, tables, views
from labkit.studies.state_layout.claims import CLAIMS
from labkit.sweep import correctness, run
from labkit.workflow import lease, notebooks, recorded
from labkit.workflow import quick as quick_look

GPU, OTHER = "nvidia-made-up-9", "nvidia-other-1"
NO_GPU = "torch sees no NVIDIA GPU here"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Empty folders for data, runs and reports, on a machine without a GPU; few resamples, for speed."""
    for name in ("DATA", "RUNS", "REPORTS"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setattr(lease, "visible", list)
    monkeypatch.setattr(lease, "why_none", lambda: NO_GPU)
    monkeypatch.setattr(machine, "why_no_gpu", lambda: NO_GPU)
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    return tmp_path


@pytest.fixture
def without_triton(monkeypatch):
    """The notebooks' code then takes what the rows hold, and compiles and checks nothing."""
    for module in (lab, table_views, production_views):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "triton" else find_spec(name))


@pytest.fixture(scope="session")
def layout():
    return made.make("state_layout", made.LAYOUT, made.layout_us(lambda batch, tile: 1.2 if tile == 8 else 1.0))


@pytest.fixture(scope="session")
def ceilings():
    return made.make("machine", made.MACHINE_PAGE, made.machine_us)


def replayed(study, parameters, *frames, gpu=GPU, **changes):
    """A study opened on recorded rows."""
    made.store(paths.DATA / gpu, *frames, **changes)
    return lab.open(study, source="recorded", **parameters)


def html(shown):
    """What a cell shows, without the drawings."""
    return re.sub(r'src="data:[^"]*"', "", shown._repr_html_())


def code_cells(study):
    book = json.loads(notebooks.source_path(study).read_text())
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def quick(study):
    """The parameters with which a notebook is run in a moment: a part of what is recorded."""
    return code_cells(study)[0]["metadata"]["nbmake"]["mock"]


def cells(study, **parameters):
    """Run the code cells of a study's notebook here, on what is recorded; the HTML of each cell that shows any."""
    code = ["".join(cell["source"]) for cell in code_cells(study)]
    defaults = {name: one.value for name, one in notebooks.parameters(notebooks.source_path(study)).items()}
    space = defaults | {"source": "recorded"} | parameters
    found = []
    for text in code[1:]:
        tree = ast.parse(text)
        last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, text, "exec"), space)
        shown = eval(compile(last, text, "eval"), space)
        if hasattr(shown, "_repr_html_") and not isinstance(shown, Code):
            found.append(html(shown))
    return found


# open


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("layout", {}, KeyError, "unknown study 'layout'; known: machine, state_layout"),
        ("state_layout", {"tiles": [8]}, ValueError, "unknown parameter 'tiles'; allowed: models, batches, states"),
        (
            "state_layout",
            {"batches": [0]},
            ValueError,
            "batches is [0]; allowed: a list, each item an integer from 1 to",
        ),
        ("state_layout", {"batches": 1}, ValueError, "batches is 1; allowed: a list with at least one item"),
        ("state_layout", {"states": []}, ValueError, "states is []; allowed: a list with at least one item"),
        (
            "state_layout",
            {"states": ["fp8"]},
            ValueError,
            "states is ['fp8']; allowed: a list, each item one of fp32, bf16",
        ),
        (
            "state_layout",
            {"models": ["x"]},
            ValueError,
            "allowed: a list, each item one of Qwen3-Next-80B-A3B, Qwen3.5",
        ),
        ("state_layout", {"batches": [1, 8, 1]}, ValueError, "batches is [1, 8, 1]; allowed: a list with at least one"),
        ("state_layout", {"states": ["fp32", "fp32"]}, ValueError, "item and none twice"),
        ("state_layout", {"source": "web"}, ValueError, "source is 'web'; allowed: auto, measure, recorded"),
        ("state_layout", {"gpu": "nvidia-none"}, ValueError, f"gpu is 'nvidia-none'; recorded: {GPU}"),
        ("state_layout", {"processes": 0}, ValueError, "processes is 0; allowed: an integer from 1"),
        ("state_layout", {"processes": True}, ValueError, "processes is True; allowed: an integer from 1"),
        ("state_layout", {"source": "measure"}, RuntimeError, f"cannot measure here: {NO_GPU}"),
        ("state_layout", {"batches": [7]}, RuntimeError, "state_layout: nothing to show: not measured here"),
    ],
)
def test_open_says_what_is_allowed(folders, layout, name, changes, error, message):
    made.store(paths.DATA / GPU, layout)
    with pytest.raises(error) as raised:
        lab.open(name, **made.LAYOUT | changes)
    assert message in str(raised.value)


def test_open_names_a_parameter_that_was_left_out(folders, layout):
    made.store(paths.DATA / GPU, layout)
    with pytest.raises(ValueError, match="parameter 'states' is missing; needed: models, batches, states"):
        lab.open("state_layout", models=made.LAYOUT["models"], batches=[1])


def test_a_study_that_was_never_recorded_says_so_everywhere(folders):
    """Its page can be worked on without a GPU: predictions and checks are there, and no figure is made up."""
    x = lab.open("state_layout", **made.LAYOUT)
    assert NO_GPU in html(x.provenance())
    views = [x.say(str), x.figure("name", len), x.table(len, "caption"), x.counters(), x.claims()]
    assert all(lab.UNMEASURED in html(shown) for shown in [x.provenance(), *views])
    assert "MB moved" in html(x.floors(x.cases))
    with pytest.raises(ValueError, match="recorded: none"):
        lab.open("state_layout", gpu="x", **made.LAYOUT)


def test_open_refuses_rows_of_an_unknown_machine(folders, layout):
    made.store(paths.DATA / GPU, layout)
    (paths.DATA / GPU / "machine.json").write_text("{")
    with pytest.raises(records.RecordError, match=r"machine\.json: missing or not readable"):
        lab.open("state_layout", **made.LAYOUT)


# where figures are from


def test_recorded_rows_are_never_said_to_be_measured_here(folders, without_triton, layout, ceilings):
    made.store(paths.DATA / GPU, layout, ceilings)
    for study, parameters in (("machine", made.MACHINE_PAGE), ("state_layout", made.LAYOUT)):
        shown = cells(study, **parameters)
        _shows(shown, study)
        page = "\n".join(shown)
        assert "measured here" not in page
        assert "Measured on this machine" not in page
        assert f"Nothing was measured on this machine: source is {chr(39)}recorded{chr(39)}" in page.replace(
            "&#39;", "'"
        )
        assert "Made-Up 9</t" in page
        figures = [text for text in shown if "<img" in text]
        assert figures
        for text in figures:
            assert "Recorded measurements: Made-Up 9, 2025-11-21." in text
            assert f'alt="{MACHINE["name"]}: ' in text


def test_auto_replays_and_says_why_nothing_was_measured(folders, layout):
    made.store(paths.DATA / GPU, layout)
    page = html(lab.open("state_layout", **made.LAYOUT).provenance())
    assert f"Nothing was measured on this machine: {NO_GPU}." in page
    assert "measured here" not in page


@pytest.mark.parametrize("in_run", [True, False])
def test_rows_of_this_machine_are_said_to_be_measured_here_and_not_measured_again(folders, monkeypatch, layout, in_run):
    made.store(paths.RUNS / GPU, layout.assign(utc="2025-12-01T00:00:00+00:00"))
    made.store(paths.DATA / GPU, layout)
    row = layout.iloc[0]
    here = {name: row[name] for name in ("gpu", "driver", "torch", "triton")}
    monkeypatch.setattr(lease, "visible", lambda: ["a GPU"])
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "")
    monkeypatch.setattr(machine, "this_machine", lambda: machine.Machine(**MACHINE))
    monkeypatch.setattr(machine, "provenance", lambda seed: here)
    monkeypatch.setattr(run.isolated, "call", lambda *a, **k: pytest.fail("measured again"))
    tiny, checked, leases = pd.DataFrame([("a", "a", 0.25, False)], columns=["case", "variant", "error", "ok"]), [], []
    monkeypatch.setattr(lab, "_leased", lambda: nullcontext({}))
    monkeypatch.setattr(lease, "gpu_lease", lambda stop, say: nullcontext(leases.append("one")))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(lab, "check_here", lambda *words: checked.append(words) or tiny)
    monkeypatch.setenv(lab.prepared.FOLDER, str(paths.RUNS) if in_run else "")
    x = lab.open("state_layout", source="measure", **made.LAYOUT)
    assert checked == [("state_layout", False)] * in_run
    assert [entry.here for entry in x.shown] == [True, False]
    page = html(x.provenance())
    assert page.index("measured here") < page.index("recorded")
    assert "Nothing was measured" not in page
    here, *_ = table_of(x.correctness())
    assert (here["where"], here["largest error"]) == ("tiny inputs, this machine", "2.5e-01")
    assert checked == [("state_layout", False)]
    assert len(leases) == 1 - in_run  # of its own where it is asked for later
    shown = html(x.table(tables.best, "Best."))
    assert "Measured on this machine: Made-Up 9, 2025-12-01." in shown
    assert "Recorded measurements: Made-Up 9, 2025-11-21." in shown
    x.figure("times", lambda rows: _drawing())
    monkeypatch.setattr(x, "shown", x.shown[1:])
    del x._origin
    x.figure("times", lambda rows: _drawing())
    written = {path.parent.name for path in paths.REPORTS.rglob("*.svg")}
    assert written == {"here", GPU}  # neither overwrites the other


def _drawing(alt="Two points.", caption="Points."):
    table = pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "s": "a"})
    texts = {"alt": alt, "caption": caption, "xlabel": "x", "ylabel": "y", "title": "t"}
    return drawing(plots.lines, table, "x", "y", "s", **texts)


def test_rows_of_an_earlier_kernel_are_counted_and_said_to_be(folders, layout):
    old = [
        sha if variant != "KV BV=8, 1 warp" else "0" * 12 for sha, variant in layout[["kernel_sha", "variant"]].values
    ]
    count = old.count("0" * 12)
    x = replayed("state_layout", made.LAYOUT, layout.assign(kernel_sha=old))
    assert x.provenance().plain.split()[-1] == str(count) != "0"
    said = r"Some rows are of an earlier version of the kernels \([^()]+, decode\)\."
    assert re.search(said, html(x.table(tables.best, "Best.")))
    x = replayed("state_layout", made.LAYOUT, layout)
    assert x.provenance().plain.split()[-1] == "0"
    assert "earlier version" not in html(x.table(tables.best, "Best."))


def test_provenance_counts_what_is_missing_and_what_failed(folders, layout):
    failed = layout["variant"] == "KV BV=8, 1 warp"
    x = replayed("state_layout", made.LAYOUT | {"batches": [1, 64, 256]}, made.unusable(layout, failed))
    (row,) = (x._provenance(entry) for entry in x.shown)
    assert row["missing"] == 2  # batch 256, with either state
    assert row["unusable"] == failed.sum()
    assert row["processes"] == 3


def test_every_date_and_version_of_a_gpu_is_named(folders, layout):
    late = layout["case"].str.contains('"batch": 64')
    mixed = layout.assign(
        utc=np.where(late, "2025-12-24T00:00:00+00:00", layout["utc"]), driver=np.where(late, "1.3", layout["driver"])
    )
    x = replayed("state_layout", made.LAYOUT, mixed)
    (row,) = table_of(x.provenance())
    assert (row["driver"], row["torch"], row["Triton"]) == ("1.2, 1.3", "2.13.0", "3.7.1")
    assert "Made-Up 9, 2025-11-21 to 2025-12-24." in html(x.table(tables.best, "Best."))


def test_each_gpu_is_shown_or_the_one_asked_for(folders, layout):
    made.store(paths.DATA / GPU, layout)
    made.store(paths.DATA / OTHER, layout.assign(gpu="NVIDIA Other 1"), name="NVIDIA Other 1")
    both = lab.open("state_layout", **made.LAYOUT)
    assert [entry.label for entry in both.shown] == ["NVIDIA Made-Up 9 (recorded)", "NVIDIA Other 1 (recorded)"]
    best = html(both.table(tables.best, "Best."))
    assert "ratio · Made-Up 9" in best or best.count("Other 1") > 1
    assert html(both.claims()).count('<th scope="row">Other 1</th>') == len(CLAIMS)
    one = lab.open("state_layout", gpu=OTHER, **made.LAYOUT)
    assert [entry.label for entry in one.shown] == ["NVIDIA Other 1 (recorded)"]


def test_rows_can_be_queried_and_plotted(folders, layout):
    made.store(paths.DATA / GPU, layout)
    made.store(paths.DATA / OTHER, layout.assign(gpu="NVIDIA Other 1"), name="NVIDIA Other 1")
    found = lab.open("state_layout", **made.LAYOUT).rows()
    assert len(found) == 2 * len(layout)
    assert list(found)[:2] == ["GPU", "op"]
    one = found.query("GPU == 'Other 1' and batch == 64 and state == 'fp32' and variant == 'KV BV=8, 1 warp'")
    raw = layout[(layout["variant"] == "KV BV=8, 1 warp") & layout["case"].str.contains('"batch": 64')]
    raw = raw[raw["case"].str.contains('"fp32"')]
    assert one["µs"].tolist() == pytest.approx([np.median(samples) / 1e3 for samples in raw["samples_ns"]])
    assert set(one["model"]) <= set(made.LAYOUT["models"])
    assert (found["µs"] > 0).all()


# every cell of the notebooks, for parameters that are allowed and rows that are poor

STATE_LAYOUT = {
    "a large batch": {"batches": [4096]},
    "one state": {"states": ["bf16"]},
    "one point": {"states": ["fp32"], "batches": [1]},
    "another model": {"models": ["Qwen3.5-0.8B"]},
    "two other models": {"models": ["K-256 example", "Qwen3.5-27B"]},
}


def _no_evidence(frame, *starts):
    keep = ["{}" if v.startswith(starts) else e for v, e in zip(frame["variant"], frame["evidence"], strict=True)]
    return frame.assign(evidence=keep)


def _some_lost(frame):
    """One variant failed, another was not measured, and nothing was predicted."""
    frame = made.without(frame, variant="VK BV=32, 1 warp")
    return made.unusable(frame, frame["variant"] == "KV BV=8, 1 warp").assign(predicted_us=math.nan, ceiling=math.nan)


def _noise(frame):
    samples = [np.random.default_rng(0).permutation(range(900, 930)) * (i + 1) for i in range(len(frame))]
    return frame.assign(samples_ns=list(map(list, samples)))


# Where two faults are together, they are of different columns or rows, which different cells look at.
POOR = {
    "nothing usable": made.unusable,
    "only the ceiling": lambda frame: frame[frame["variant"] == tables.CEILING],
    "variants and predictions are lost": _some_lost,
    "no ceiling and no evidence": lambda frame: _no_evidence(
        made.unusable(frame, frame["variant"] == tables.CEILING), ""
    ),
    "no control and one process": lambda frame: made.processes(made.without(frame, role="control"), 1),
    "noise and evidence of one layout": lambda frame: _no_evidence(_noise(frame), "KV"),
    "narrow and wide tiles spill": lambda frame: made.spilling(frame, "KV BV=8, 1 warp", "VK BV=32, 1 warp"),
    "all spill": lambda frame: made.spilling(frame, *set(frame["variant"])),
}


def _shows(shown, study, never=r"\bnan\b|\bNone\b|\bNaN\b|<NA>|Timestamp|dtype"):
    """Every cell shows something that a reader can read."""
    assert len(shown) > 8
    for text in shown:
        words = re.sub(r"<[^>]*>", " ", text)
        assert words.strip()
        assert not re.search(never, words), f"{study}: {words[:2000]}"


@pytest.mark.parametrize("changes", STATE_LAYOUT.values(), ids=STATE_LAYOUT)
def test_cells_of_state_layout_for_other_parameters(folders, without_triton, changes):
    parameters = made.LAYOUT | changes
    made.store(paths.DATA / GPU, made.make("state_layout", parameters, made.layout_us(1.1)))
    _shows(cells("state_layout", **parameters), "state_layout")


@pytest.mark.parametrize("poor", POOR.values(), ids=POOR)
def test_cells_of_state_layout_on_poor_rows(folders, without_triton, layout, poor):
    made.store(paths.DATA / GPU, poor(layout).reset_index(drop=True))
    _shows(cells("state_layout", **made.LAYOUT), "state_layout")


@pytest.mark.parametrize("kind", ["launch", "h2d", "read", "in_place", "copy", "bf16", "fp16", "fp8", "int8"])
def test_cells_of_machine_for_one_kind(folders, without_triton, kind):
    parameters = made.MACHINE_PAGE | {"kinds": [kind]}
    made.store(paths.DATA / GPU, made.make("machine", parameters, made.machine_us))
    _shows(cells("machine", **parameters), "machine")


@pytest.mark.parametrize("poor", [made.unusable, lambda frame: made.without(frame, role="control")])
def test_cells_of_machine_on_poor_rows(folders, without_triton, ceilings, poor):
    made.store(paths.DATA / GPU, poor(ceilings))
    _shows(cells("machine", **made.MACHINE_PAGE), "machine")


@pytest.mark.parametrize("rows", [True, False], ids=["made-up rows", "none"])
def test_cells_of_gated_delta_today(folders, without_triton, rows):
    """Also where nothing was ever recorded of a study: then it says so, and what it predicts."""
    if rows:
        made.store(paths.DATA / GPU, made.today())
    shown = cells("gated_delta_today", **made.TODAY)
    _shows(shown, "gated_delta_today")
    assert any("Predicted by bytes alone" in text for text in shown)
    silent = sum("No measurement of this study is recorded yet" in text for text in shown)
    assert silent == 0 if rows else silent > 10


@pytest.mark.parametrize("study", RECORDED)
def test_cells_of_every_notebook_in_a_quick_look(tmp_path, monkeypatch, without_triton, study):
    """On what is recorded in this tree; on a GPU this is measured, in test_end_to_end. nbmake runs few parameters."""
    monkeypatch.setattr(paths, "REPORTS", tmp_path)
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    _shows(cells(study, quick=True), study, never=r"\bnan\b|\bNaN\b|<NA>|Timestamp")


def test_cells_are_really_run(folders, without_triton, layout, monkeypatch):
    made.store(paths.DATA / GPU, layout)
    monkeypatch.setattr(views, "hot", lambda rows: pd.DataFrame())
    with_hot = "Ratio: × faster with [V, K], hot L2, one warp. There is no such measurement."
    assert any(with_hot in text for text in cells("state_layout", **made.LAYOUT))
    monkeypatch.setattr(views, "times", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cells("state_layout", **made.LAYOUT)


# what the pieces say


def test_floors_are_bytes_over_the_best_recorded_rate(folders, ceilings, layout):
    x = replayed("state_layout", made.LAYOUT, layout, ceilings)
    best = ceilings[(ceilings["role"] == "ceiling") & ceilings["case"].str.contains('"in_place"')]
    rate = max(b / np.median(ns) for b, ns in zip(best["floor_bytes"], best["samples_ns"], strict=True))  # GB/s
    case = x.cases[0]
    least = registry.load("state_layout").floor(case).bytes / rate / 1e3
    text = x.floors([case]).plain
    assert f"least µs, {MACHINE['name']} (recorded)" in text
    assert float(text.split()[-1]) == pytest.approx(least, rel=1e-4)


def test_floors_without_known_ceilings_show_the_bytes(folders, layout):
    x = replayed("state_layout", made.LAYOUT, layout)
    text = x.floors(x.cases).plain
    assert "MB moved" in text
    assert "least" not in text


def test_published_numbers_come_with_their_source(folders, layout):
    page = html(replayed("state_layout", made.LAYOUT, layout).published())
    for claim in CLAIMS:
        assert f'<a href="{claim.url}">{claim.source}</a>' in page
        assert claim.published.split(",")[0] in page


def test_source_is_read_from_the_file_with_its_decorator():
    code = lab.Lab.source("labkit.studies.state_layout.layouts", "_decode_kernel", "_normalised").data
    assert code.startswith("@triton.jit\ndef _decode_kernel(")
    assert "\n\n\n@triton.jit\ndef _normalised(" in code
    assert "class DecodeInputs" not in code


def test_what_was_compiled_comes_from_the_rows_without_triton(folders, without_triton, layout):
    x = replayed("state_layout", made.LAYOUT, layout)
    wanted = views.wanted(x.study, x.parameters)
    found = x.compiled(wanted, (80, 90))
    assert len(found) == len(wanted) == 12
    assert set(found["arch"]) == {90}
    assert "accesses" not in found
    assert x.accesses(wanted).empty
    assert "Triton is not installed here" in html(x.show_table(x.accesses(wanted), "Requests."))
    assert lab.recorded_evidence(_no_evidence(layout, ""), wanted).empty


def test_text_is_escaped_everywhere(folders, without_triton, layout, monkeypatch):
    bad = "<script>alert('x')</script> & \"quoted\""
    claim = Claim("c", bad, 'https://example.org/?a="b"&c', bad, bad, bad, "2026-11-25", untested=bad)
    x = replayed("state_layout", made.LAYOUT, layout.assign(driver=bad), name=bad)
    monkeypatch.setattr(x, "study", x.study.__class__(**vars(x.study) | {"claims": (claim,)}))
    pieces = [x.provenance(), x.published(), x.claims(), x.say(lambda rows: bad), x.correctness()]
    pieces += [x.table(lambda rows: pd.DataFrame({bad: [bad]}), bad), x.table(lambda rows: pd.DataFrame(), bad)]
    pieces += [x.figure("f", lambda rows: bad), x.figure("f", lambda rows: _drawing(bad, bad))]
    for piece in pieces:
        text = html(piece)
        assert "&lt;script&gt;" in text
        assert "<script" not in text
        assert not re.search(r'(alt|aria-label|href)="[^"]*"[^ >=]', text)  # a quote inside would end the attribute
    assert 'href="https://example.org/?a=&#34;b&#34;&amp;c"' in html(x.published())


# checking


def test_correctness_is_of_what_was_checked_here_and_of_the_rows(folders, layout, monkeypatch):
    """What is really checked here is in test_end_to_end, of every study."""
    checked = [("case 1", "a", 1e-4, True), ("case 1", "b", 3e-4, True), ("case 2", "a", 0.2, False)]
    table = pd.DataFrame(checked, columns=["case", "variant", "error", "ok"])
    monkeypatch.setattr(lab, "check_here", lambda study, interpreted: table if interpreted else None)
    wrong = layout["variant"] == "KV BV=8, 1 warp"
    x = replayed("state_layout", made.LAYOUT, layout.assign(ok=~wrong, error=np.where(wrong, 0.5, 1e-4)))
    here, recorded = table_of(x.correctness())
    assert here == {
        "where": "tiny inputs, Triton's interpreter",
        "variants": "2",
        "cases": "2",
        "largest error": "2.0e-01",
        "wrong": "1",
    }
    assert int(recorded["wrong"]) == wrong.sum()
    assert float(recorded["largest error"]) == 0.5


def test_a_quick_look_checks_and_compiles_nothing_beside_what_is_timed(folders, layout, monkeypatch):
    monkeypatch.setattr(lab, "check_here", lambda *_: pytest.fail("checked"))
    monkeypatch.setattr(quick_look, "of", lambda study: study)
    x = replayed("state_layout", made.LAYOUT | {"quick": True}, layout)
    [recorded] = table_of(x.correctness())
    assert int(recorded["wrong"]) == 0
    assert x.accesses([]).empty


def table_of(piece):
    """The rows of a table that is shown: heading -> text."""
    return rows_of(html(piece))


def rows_of(table):
    """The rows of a table's HTML: heading -> text."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
    texts = [
        [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)]
        for row in rows
    ]
    return [dict(zip(texts[0], row, strict=True)) for row in texts[1:]]


def test_a_gpu_is_checked_with_kernels_that_were_compiled_on_all_cores(monkeypatch):
    study, here, done = registry.load("moe_persistent_grid"), machine.Machine(**MACHINE), []
    monkeypatch.setattr(machine, "this_machine", lambda: here)
    monkeypatch.setattr(
        compiled, "prebuild", lambda sources, capability, marks: done.append((sources, capability)) or []
    )
    monkeypatch.setattr(isolated, "call", lambda target, *arguments, env: done.append((target, *arguments)) or [])
    correctness.check_here(study.name, interpreted=False)
    assert done == [
        (study.kernels(study.tiny, here.capability, here.name), here.capability),
        ("labkit.sweep.correctness:check_tiny", study.name, "cuda"),
    ]
    assert done[0][0]
    done.clear()
    correctness.check_here("machine", interpreted=False)  # which has no list of kernels
    assert done == [("labkit.sweep.correctness:check_tiny", "machine", "cuda")]


def test_a_wrong_or_unwritten_result_is_counted_as_wrong(monkeypatch):
    calls = []

    def trial(error):
        def prepare(case, device, sets, seed):
            check = None if error is None else lambda: calls.append("check") or {"out": error, "other": 0.0}
            return spec.Trial([], lambda: calls.append("poison"), None, check, {"out": 0.1, "other": 0.1})

        return prepare

    errors = {"right": 0.1, "wrong": 0.2, "unwritten": math.nan, "nothing to check": None}
    case = spec.Case("op", {})
    study = type("Study", (), {"tiny": (case,), "variants": staticmethod(
        lambda case: [spec.Variant(name, "ours", "", trial(error)) for name, error in errors.items()]
        + [spec.Variant("a library that is not there", "peer", "", None)])})  # fmt: skip
    monkeypatch.setattr(registry, "load", lambda name: study)
    assert {row["variant"]: row["ok"] for row in correctness.check_tiny("x", "cpu")} == {
        "right": True,
        "wrong": False,
        "unwritten": False,
    }
    assert calls == ["poison", "check"] * 3


def test_correctness_without_triton_and_without_errors_says_so(folders, without_triton, ceilings):
    x = replayed("machine", made.MACHINE_PAGE, ceilings.assign(error=math.nan))
    assert "Nothing was checked" in html(x.correctness())


# claims


def test_claims_show_verdict_and_reason_of_each_gpu(folders, layout):
    made.store(paths.DATA / OTHER, made.unusable(layout), name="NVIDIA Other 1")
    shown = html(replayed("state_layout", made.LAYOUT, layout).claims())
    cards = dict(re.findall(r'<article class="lab-claim" id="claim-(.*?)"(.*?)</article>', shown, re.DOTALL))
    assert list(cards) == [claim.id for claim in CLAIMS]
    tile = re.sub("<[^>]*>", " ", cards["sglang-20283-tile"])
    assert re.search(r"Made-Up 9\s+≈ consistent", tile)
    assert re.search(r"Other 1\s+\? not testable here", tile)
    assert "our version of the code" in tile
    assert all(escape(f"Published: {claim.published}.") in cards[claim.id] for claim in CLAIMS)


def test_a_claim_can_be_copied_as_markdown(folders, layout):
    shown = html(replayed("state_layout", made.LAYOUT, layout).claims())
    text = unescape(re.search(r'id="claim-sglang-20283-tile" data-markdown="(.*?)"', shown, re.DOTALL)[1])
    head, verdict = text.split("\n")
    assert head.startswith(
        "**[V, K] makes the kernel faster: a tile of [8, 256] instead of [256, 8]** ([SGLang pull request"
    )
    assert verdict.startswith("- Made-Up 9: **consistent** (our version of the code), 1.20× faster [1.20, 1.20]")
    assert "numbers" not in text


# trying one's own shape


def test_widget_answers_every_control(folders, without_triton, layout, ceilings):
    box = explore.widget(replayed("state_layout", made.LAYOUT, layout, ceilings))
    *rows, answer = box.children
    controls = {control.description: control for row in rows for control in row.children}
    assert set(controls) == {"HV", "K", "V", "batch", "state", "BV"}
    assert "MB moved" in answer.value
    for name, value in {"HV": 1, "K": 256, "V": 64, "batch": 512, "state": "bf16", "BV": 32}.items():
        answer.value = ""
        controls[name].value = value
        assert "MB moved" in answer.value, name
    state = 2 * 512 * 1 * 256 * 64 * 2
    small = 512 * ((2 * 256 + 2 * 64 + 2) * 2 + 4)
    assert f"{(state + small) / 1e6:.3g}" in answer.value


def test_a_claims_figure_ends_before_its_quantity(folders, layout, monkeypatch):
    """Also where the quantity has numbers, whose origins have colons."""
    x = replayed("state_layout", made.LAYOUT, layout)
    shown = html(x.claims())
    for keys in re.findall(r'data-keys="([^"]*)"', shown):
        assert isinstance(json.loads(unescape(keys)), dict)
    assert shown.count("8 values per tile") == 2  # what the figures are, and what can be copied


def test_what_launches_do_is_told_of_recorded_gpus_alone(folders, layout, monkeypatch):
    caption, x = "Launches.", replayed("state_layout", made.LAYOUT, layout)
    assert "known of recorded rows alone" in html(x.launched(lambda rows, facts: facts, caption))
    facts = pd.DataFrame({"gpu": [GPU, GPU, "another"], "instructions": [1.0, 2.0, 3.0]})
    facts.to_parquet(paths.DATA / recorded.LAUNCHES)
    found = table_of(x.launched(lambda rows, facts: facts[["instructions"]].assign(rows=len(rows)), caption))
    assert [row["instructions"] for row in found] == ["1", "2"]
    assert {int(row["rows"].replace(",", "")) for row in found} == {len(layout)}
    monkeypatch.setattr(x, "shown", [replace(entry, here=True) for entry in x.shown])
    assert "known of recorded rows alone" in html(x.launched(lambda rows, facts: facts, caption))


@pytest.mark.parametrize("measured", [True, False])
def test_the_gpu_is_freed_once_nothing_more_is_timed_and_the_tiny_cases_have_ended(
    folders, layout, monkeypatch, measured
):
    """They are run beside processes that get ready; where nothing is left to measure, before the GPU is freed."""
    steps = []

    @contextmanager
    def leased():
        yield {}
        steps.append("freed")

    def run(study, parameters, processes, env, say, beside, idle, early):
        assert early == ()  # two GPUs: which one they will use is not known
        for _ in range(measured):
            beside().result()
        steps.append("timed")
        for _ in range(2):  # as it may be called
            idle()
        steps.append("figured")
        return layout

    monkeypatch.setattr(lab, "check_here", lambda study, interpreted: steps.append("tiny"))
    monkeypatch.setattr(lease, "visible", lambda: ["a GPU", "another"])
    monkeypatch.setattr(lab, "_leased", leased)
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "")
    monkeypatch.setattr(machine, "this_machine", lambda: machine.Machine(**MACHINE))
    monkeypatch.setattr(lab.run, "run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(lab.prepared.FOLDER, str(paths.RUNS))
    lab.open("state_layout", source="measure", **made.LAYOUT)
    first = ["tiny", "timed"] if measured else ["timed", "tiny"]
    assert steps == [*first, "freed", "figured"]


@pytest.mark.parametrize(
    ("in_run", "gpus", "rows", "imported"),
    [(True, 1, False, True), (False, 1, False, False), (True, 2, False, False), (True, 1, True, False)],
)
def test_processes_import_before_there_is_a_gpu_in_a_run_on_one(
    folders, layout, monkeypatch, in_run, gpus, rows, imported
):
    """Not where all may be measured already; they are ended once the GPU is freed."""
    steps = []

    @contextmanager
    def begun(study, count, env):
        assert (study, env[lease.VISIBLE]) == ("state_layout", "GPU-0")
        steps.append(f"{count} import")
        yield ["a process"]
        steps.append("ended")

    @contextmanager
    def leased():
        steps.append("leased")
        yield {}
        steps.append("freed")

    def run(*words):
        *_, idle, early = words
        assert list(early) == ["a process"] * imported
        idle()
        return layout

    if rows:
        made.store(paths.RUNS / GPU, layout)
    monkeypatch.setattr(lease, "visible", lambda: [lease.Gpu(n, f"GPU-{n}", "one") for n in range(gpus)])
    monkeypatch.setattr(lab.run, "imported", begun)
    monkeypatch.setattr(lab, "_leased", leased)
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "")
    monkeypatch.setattr(machine, "this_machine", lambda: machine.Machine(**MACHINE))
    monkeypatch.setattr(lab.run, "run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(lab.prepared.FOLDER, str(paths.RUNS) if in_run else "")
    study = lab.registry.load("state_layout")
    lab._measure(study, notebooks.defaults("state_layout") | made.LAYOUT, 3)
    around = ["3 import"] * imported, ["ended"] * imported
    assert steps == [*around[0], "leased", "freed", *around[1]]


def test_tiny_cases_that_end_their_process_leave_the_page(folders, layout, monkeypatch):
    """What is wrong is said where they are shown, by the same check."""

    def dies(study, interpreted):
        raise isolated.IsolatedError("check_tiny", "crash", "signal 11")

    monkeypatch.setattr(lab, "check_here", dies)
    monkeypatch.setattr(lease, "visible", lambda: ["a GPU", "another"])
    monkeypatch.setattr(lab, "_leased", lambda: nullcontext({}))
    monkeypatch.setattr(lease, "gpu_lease", lambda stop, say: nullcontext())
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "")
    monkeypatch.setattr(machine, "this_machine", lambda: machine.Machine(**MACHINE))
    monkeypatch.setattr(lab.run, "run", lambda *words: layout)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(lab.prepared.FOLDER, str(paths.RUNS))
    x = lab.open("state_layout", source="measure", **made.LAYOUT)
    assert len(x.shown[0].rows) == len(layout)
    with pytest.raises(isolated.IsolatedError, match="signal 11"):
        x.correctness()
