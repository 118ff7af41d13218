"""Which answers of worker processes are asked for anew: those that an edit can change, and no others."""

import ast
import re

import pandas as pd
import pytest

from labkit import host, paths, registry
from labkit.evidence import workers
from labkit.sweep import correctness

COMPILED = "labkit.evidence.compiled:evidence_of"


def variant(study):
    arguments = {"study": study, "op": "op", "params": {"batch": 1}, "variant": "one"}
    return {"source": ["labkit.sweep.variants:variant_launch", arguments], "capability": 90}


REQUESTS = {
    "state_layout": (COMPILED, variant("state_layout")),
    "batched_ffn": (COMPILED, variant("batched_ffn")),
    "extend": (COMPILED, {"source": ["labkit.kernels.gated_delta.chunked:extend", {}], "capability": 90}),
    "checks of state_layout": ("labkit.sweep.correctness:check_tiny", {"name": "state_layout", "device": "cpu"}),
}
LAYOUT = {"state_layout", "checks of state_layout"}


def files():
    """Request -> where its answer is kept."""
    return {name: workers.files_of(function, [request])[0] for name, (function, request) in REQUESTS.items()}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Puts a line at the end of a module's source, as the lab reads it."""
    real = workers._source

    def edit(module):
        copy = tmp_path / f"{module}.py"
        copy.write_text(real(module).read_text() + "\nMORE = 1\n")
        monkeypatch.setattr(workers, "_source", lambda name: copy if name == module else real(name))

    return edit


@pytest.mark.parametrize(
    ("module", "asked_anew"),
    [
        ("labkit.studies.state_layout.views", set()),
        ("labkit.studies.state_layout.production_views", set()),
        ("labkit.studies.state_layout.claims", set()),
        ("labkit.studies.state_layout.explore", set()),
        ("labkit.report.figures", set()),
        ("labkit.workflow.recorded", set()),
        ("labkit.cli", set()),
        ("labkit.lab", set()),
        ("labkit.sweep.correctness", {"checks of state_layout"}),  # which its own function does
        ("labkit.kernels.gated_delta.chunked", LAYOUT | {"extend"}),
        ("labkit.studies.state_layout.layouts", LAYOUT),
        ("labkit.kernels.gguf.integers", {"batched_ffn"}),
        ("labkit.kernels.launch", set(REQUESTS)),
    ],
)
def test_an_edit_asks_anew_for_what_reaches_it_alone(edited, module, asked_anew):
    before = files()
    edited(module)
    after = files()
    assert {name for name in REQUESTS if before[name] != after[name]} == asked_anew


def test_a_module_of_the_caller_counts_with_what_it_imports_of_the_lab(edited):
    reached = {"kernels_for_tests", "labkit.kernels.launch", "labkit.kernels.keys"}
    assert set(workers.reached(["kernels_for_tests"])) == reached
    request = [{"source": ["kernels_for_tests:copy", {}]}]
    before = workers.files_of(COMPILED, request), workers.files_of("json:dumps", [{}], ["kernels_for_tests"])
    edited("kernels_for_tests")
    assert workers.files_of(COMPILED, request) != before[0]
    assert workers.files_of("json:dumps", [{}], ["kernels_for_tests"]) != before[1]
    with pytest.raises(ModuleNotFoundError, match="no module 'no_such_module' with a source file"):
        workers.files_of(COMPILED, request, ["no_such_module"])


def test_versions_and_shipped_tables_count(tmp_path, monkeypatch):
    before = workers.stamp([])
    monkeypatch.setattr(workers, "_version", lambda name: "another")
    assert workers.stamp([]) != before
    monkeypatch.undo()
    assert workers.stamp([]) == before
    (tmp_path / "tuned.json").write_text("{}")
    monkeypatch.setattr(workers, "PACKAGE", tmp_path)
    assert workers.stamp([]) != before


# what is recorded of them

CHECKS = {"name": "persistent_tables", "device": "cpu"}


@pytest.fixture
def locked(monkeypatch):
    """Answers are looked for by the versions that are locked, which recorded ones are of, whatever is installed."""
    lock = (paths.ROOT / "requirements.lock").read_text()
    versions = {name: re.search(rf"^{name}==([\d.]+)", lock, re.M)[1] for name in ("torch", "triton")}
    monkeypatch.setattr(workers, "_version", versions.get)


def fresh(monkeypatch, tmp_path, known):
    """No answer is there but those that are recorded, which are `known`."""
    monkeypatch.setenv("LABKIT_ANSWERS", str(tmp_path / "answers"))
    monkeypatch.setattr(workers, "recorded", lambda: known)


def test_what_is_recorded_is_what_is_made_anew(locked, monkeypatch, tmp_path):
    function = "labkit.sweep.correctness:check_tiny"
    [file] = workers.files_of(function, [CHECKS])
    assert file.stem in workers.recorded(), "sources or versions have changed: labkit record --figures"
    known = workers.recorded()[file.stem]
    fresh(monkeypatch, tmp_path, {})
    [made] = workers.ask(function, [CHECKS], env=workers.COMPILING | correctness.INTERPRETER)
    rows, recorded = pd.DataFrame(made), pd.DataFrame(known)
    # Another processor adds in another order.
    pd.testing.assert_frame_equal(rows, recorded, rtol=0.1)


def test_of_every_study_the_checks_are_recorded(locked):
    requests = [{"name": name, "device": "cpu"} for name in registry.NOTEBOOKS if registry.load(name).claims]
    files = workers.files_of("labkit.sweep.correctness:check_tiny", requests)
    assert len(files) == len(requests) > 0
    missing = [one["name"] for one, file in zip(requests, files, strict=True) if file.stem not in workers.recorded()]
    assert not missing, "sources or versions have changed: labkit record --figures"


def test_what_is_recorded_is_taken_and_the_rest_made(monkeypatch, tmp_path):
    [file, other] = workers.files_of("json:dumps", [{"obj": 1}, {"obj": 2}], ["kernels_for_tests"])
    fresh(monkeypatch, tmp_path, {file.stem: "recorded"})
    asked = workers.ask("json:dumps", [{"obj": 1}, {"obj": 2}], ["kernels_for_tests"])
    assert asked == ["recorded", "2"]
    assert {path.stem for path in (tmp_path / "answers").iterdir()} == {file.stem, other.stem}


@pytest.mark.parametrize(("more", "kept"), [(True, {"a": 1, "b": 2}), (False, {"b": 2})])
def test_a_run_of_all_notebooks_drops_what_none_asks_for(monkeypatch, tmp_path, more, kept):
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    workers.recorded.cache_clear()
    (tmp_path / "a.json").write_text("1")
    workers.record(tmp_path, more=False)
    (tmp_path / "a.json").rename(tmp_path / "b.json")
    (tmp_path / "b.json").write_text("2")
    workers.record(tmp_path, more)
    assert workers.recorded() == kept
    (tmp_path / "data" / workers.RECORDED).write_text("{")
    workers.recorded.cache_clear()
    assert workers.recorded() == {}  # what cannot be read is made anew
    monkeypatch.undo()
    workers.recorded.cache_clear()


# what that rests on


def modules():
    """Every module of the lab: name -> source."""
    folder = workers.PACKAGE
    names = {path: ".".join(path.relative_to(folder.parent).with_suffix("").parts) for path in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def test_no_module_is_imported_in_a_way_that_is_not_seen():
    def unseen(node):
        called = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))
        return called or (isinstance(node, ast.ImportFrom) and node.level)

    found = {name for name, text in modules().items() if any(map(unseen, ast.walk(ast.parse(text))))}
    # Those of functions and studies that a request names; of what a study's table names, in its own folder; of the
    # library's public names, which nothing in the lab asks its packages for; of releases, whose files have hashes; of a
    # package that only stubs of releases need; and of libraries that a measuring process imports before it measures.
    asked = {"labkit.isolated", "labkit.evidence.workers", "labkit.registry"}
    releases = {"labkit.sources.loading", "labkit.sources.stubs"}
    assert found == asked | releases | {"labkit.kernels.lazy", "labkit.sweep.run"}


def test_nothing_in_the_lab_takes_a_name_from_a_package_of_the_library():
    """Such names are imported when they are asked for, by a module that a stamp would not see."""
    sources = modules()
    public = {f"labkit.kernels.{name}" for name in ("decoder", "experts", "gated_delta", "gemv", "gguf")}
    named = set().union(*map(workers._imports, sources.values()))
    taken = {one for one in named if one.rpartition(".")[0] in public and not one.endswith(".")}  # begins a longer name
    assert len(taken) > 20
    assert taken <= sources.keys()


def test_what_only_shows_is_used_by_nothing_that_runs_but_for_a_studys_claims():
    sources = modules()
    showing = {name for name in sources if workers.SHOWS.fullmatch(name)}
    assert len(showing) > 20
    uses = {name: workers._imports(text) & showing for name, text in sources.items() if name not in showing}
    users = {name: used for name, used in uses.items() if used}
    assert users.pop("labkit.__main__") == {"labkit.cli"}
    assert len(users) >= 5
    for name, used in users.items():
        assert used == {name.removesuffix(".study") + ".claims"}
        assert re.findall(r"\bclaims\.\w+", sources[name]) == ["claims.CLAIMS", "claims.pairs"]


@pytest.mark.parametrize(("share", "count"), [("1", 1), ("2", 2), ("", 4), ("0", 4), ("2,1", 4)])
def test_there_are_at_most_as_many_workers_as_this_process_has_cores(monkeypatch, tmp_path, share, count):
    started = []
    monkeypatch.setattr(workers.paths, "CACHE", tmp_path)
    monkeypatch.setattr(host, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", share)

    def call_many(calls, most):
        started.append((len(calls), most))
        workers.answer(*calls[0].args)

    monkeypatch.setattr(workers.isolated, "call_many", call_many)
    requests = [{"text": str(number)} for number in range(30)]
    assert workers.ask("labkit.report.figures:slug", requests) == list(map(str, range(30)))
    assert started == [(count, count)]
