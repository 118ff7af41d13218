"""Functions of the reader's own: refused before anything runs, or rows with a reason; timed, shown, not recorded."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest
import rows as made
import test_lab
import test_sweep
import torch
from click.testing import CliRunner
from test_lab import folders, html, layout, replayed, table_of  # noqa: F401 (fixtures)
from toy_lab import CODE, SLUG, Toy

from labkit import cli, isolated, lab, paths, registry
from labkit.bench import machine, records, spec
from labkit.bench.sha import kernel_sha
from labkit.sweep import added, guard
from labkit.sweep import run as sweep
from labkit.sweep import trial as trials
from labkit.workflow import archive, filters, notebooks, recorded
from labkit.workflow import reports as reports_module

INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
NAMES = "state, indices, q, k, v, a, b, A_log, dt_bias, out, scale"
GOOD = """
from torch.nn.functional import normalize, softplus


def my_decode(state, indices, q, k, v, a, b, A_log, dt_bias, out, scale):
    q, k = (normalize(x.float(), dim=-1).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    alpha = (-A_log.exp() * softplus(a + dt_bias)).exp()[..., None, None]
    S = state[indices.long()].float() * alpha  # [N, HV, V, K]
    u = b.float().sigmoid()[..., None] * (v - (S @ k[..., None])[..., 0])
    S += u[..., None] * k[..., None, :]
    out.copy_((S @ (q * scale)[..., None])[..., 0])
    state[indices.long()] = S.to(state.dtype)
"""


@pytest.fixture(autouse=True)
def forgotten():
    """The names that are watched are those of this process before the first function; here, of each test."""
    guard.names.cache_clear()


@pytest.fixture
def write(tmp_path):
    """Writes my.py, or another file; returns FILE:FUNCTION."""

    def write(text, function="mine", name="my.py"):
        path = tmp_path / "own" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return f"{path}:{function}"

    return write


def readme():
    """The code and the function's name of the README's example."""
    text = (CODE / "README.md").read_text()
    section = text[text.index("## Settling a claim of your own") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    return code, re.search(r"labkit run gemv_coalescing --add my_kernels\.py:(\w+)", section)[1]


def tiny(*texts, study="state_layout"):
    """What functions give on the tiny cases of a study, in the interpreter."""
    return added.check_tiny(added.with_added(registry.load(study), texts), "cpu", INTERPRETED)


# what is wrong before anything runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my.py", "'my.py' is not FILE.py:FUNCTION"),
        ("my.py:", "'my.py:' is not FILE.py:FUNCTION"),
        (":mine", "':mine' is not FILE.py:FUNCTION"),
        ("my.txt:mine", "'my.txt:mine' is not FILE.py:FUNCTION"),
        ("my.py:a-b", "'my.py:a-b' is not FILE.py:FUNCTION"),
        ("none.py:mine", r"/none\.py: no such file"),
        (".py:mine", r"'\.py:mine' is not FILE.py:FUNCTION"),
        ("folder.py:mine", r"folder\.py: cannot be read"),
        ("bad.py:mine", r"bad\.py, line 2: "),
        ("binary.py:mine", r"binary\.py: cannot be read"),
        ("my.py:inner", r"my\.py defines no 'inner' at its top level; it defines: mine, other"),
        ("empty.py:mine", r"empty\.py defines no 'mine' at its top level; it defines: nothing"),
    ],
)
def test_a_function_that_is_not_there_is_an_error_before_anything_runs(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("1 / 0\ndef mine():\n    def inner(): ...\nother = mine\n")
    (tmp_path / "bad.py").write_text("\ndef mine(:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ValueError, match=message):
        added.functions(registry.load("state_layout"), [text])
    with pytest.raises(notebooks.UsageError, match=message):
        notebooks.coerce(registry.load("state_layout"), [f"add={text}"])
    done = CliRunner().invoke(cli.main, ["run", "state_layout", "--add", text])
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))


def test_other_mistakes_are_named_too(write):
    study = registry.load("state_layout")
    mine = write("def mine(): ...")
    with pytest.raises(ValueError, match=r"my\.py:mine is given twice"):
        added.functions(study, [mine, mine])
    for value in (mine, [1]):
        with pytest.raises(ValueError, match=r"allowed: a list of texts FILE\.py:FUNCTION"):
            added.functions(study, value)
    with pytest.raises(ValueError, match=r"machine takes no functions of your own; these studies do: .*state_layout"):
        lab.open("machine", add=[mine], **made.MACHINE_PAGE)
    assert added.functions(study, []) == []


def test_two_functions_of_one_name_are_told_apart_by_their_files(write):
    study = registry.load("state_layout")
    both = [write("def mine(): ...", name=name) for name in ("a.py", "b.py")]
    third = write("def other(): ...", "other", "a.py")
    Path(both[0].rpartition(":")[0]).write_text("def mine(): ...\ndef other(): ...\n")
    names = [one.variant for one in added.functions(study, [*both, third])]
    assert names == ["added: mine (a.py)", "added: mine (b.py)", "added: other"]
    again = Path(both[0].rpartition(":")[0]).parent / "deeper" / "a.py"
    again.parent.mkdir()
    again.write_text("def mine(): ...")
    with pytest.raises(ValueError, match=r"two functions would be called 'added: mine \(a\.py\)'"):
        added.functions(study, [both[0], f"{again}:mine"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--add", "my.py:mine"], "--add is for one study; name it: state_layout"),
        (["machine", "state_layout", "--add", "my.py:mine"], "--add is for one study; name it: state_layout"),
        (["machine", "--add", "my.py:mine"], "machine takes no functions of your own; these studies do: state_layout"),
        (["state_layout", "--add", "my.py:mine", "-p", "add=my.py:mine"], "both --add and -p add="),
        (["state_layout", "--add", "my.py:mine", "-p", "state_layout.add=[]"], "both --add and -p add="),
        (["state_layout", "-p", "add=my.py:mine,my.py:mine"], "is given twice"),
    ],
)
def test_wrong_usage_of_the_command_is_exit_2(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "NOTEBOOKS", {n: registry.NOTEBOOKS[n] for n in ("machine", "state_layout")})
    (tmp_path / "my.py").write_text("def mine(): ...")
    monkeypatch.setattr(notebooks, "run", lambda *_, **__: pytest.fail("something runs"))
    done = CliRunner().invoke(cli.main, ["run", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_paths_are_of_the_folder_in_which_the_command_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def mine(): ...\ndef other(): ...")
    seen = {}
    monkeypatch.setattr(notebooks, "run", lambda names, values, *_, **__: seen.update(values) or [])
    for words in (["--add", "my.py:mine", "--add", "./my.py:other"], ["-p", "add=my.py:mine,my.py:other"]):
        seen.clear()
        monkeypatch.setattr(reports_module, "write", lambda *_: [])
        assert CliRunner().invoke(cli.main, ["run", "state_layout", "--source", "recorded", *words]).exit_code == 0
        assert seen["state_layout"]["add"] == [f"{tmp_path}/my.py:mine", f"{tmp_path}/my.py:other"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert added.absolute("~/my.py:mine") == f"{tmp_path}/my.py:mine"


# checked without a GPU


def right(found, name):
    """Whether a function's result was checked in every case that takes one, and no error found."""
    study = registry.load(name)
    assert found["ok"].all(), found["reason"].tolist()
    assert found["case"].tolist() == [case.key for case in added.tiny(study)]
    assert found["error"].between(0, 4e-3).all()
    return True


def test_the_example_of_the_readme_is_right(write):
    code, name = readme()
    assert right(tiny(write(code, name, "my_kernels.py"), study="gemv_coalescing"), "gemv_coalescing")


ENDS = {
    "exits": ("    import sys; sys.exit(3)", "the process died: SystemExit: 3"),
    "killed": ("    import os; os.kill(os.getpid(), 11)", "the process ended without an answer: killed by signal 11"),
}


def test_what_ends_its_process_is_said_and_the_others_go_on(write):
    text = "".join(f"def {name}({NAMES}):\n{body}\n" for name, (body, _) in ENDS.items())
    path = write(text, name="bad.py").rpartition(":")[0]
    code, good = GOOD, "my_decode"
    found = tiny(*(f"{path}:{name}" for name in ENDS), write(code, good))
    assert list(dict.fromkeys(found["function"])) == [*ENDS, good]
    for name, (_, reason) in ENDS.items():
        rows = found[found["function"] == name]
        assert len(rows) == 8  # in two dtypes the tiny cases of the grid; the others take none
        assert not rows["ok"].any()
        assert rows["reason"].iloc[0].startswith(reason)
    assert right(found[found["function"] == good], "state_layout")
    later = found[found["function"] == "killed"]["reason"].iloc[1:]
    assert later.str.startswith("not called: in another case, the process ended").all()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def mine(W, x, y): ...", f"TypeError: another signature: it takes (W, x, y), the study gives ({NAMES})"),
        (f"def mine({NAMES}, more): ...", "TypeError: another signature"),
        (f"def mine({NAMES}, *, more): ...", "TypeError: another signature"),
        (f"def mine({NAMES.replace('q, k', 'k, q')}): ...", "TypeError: another signature"),
        ("def mine(x, *rest): ...", "TypeError: another signature"),
        (f"def mine({NAMES}): raise KeyError('seven')", "KeyError: 'seven'"),
        (f"def mine({NAMES}): out.fill_(1); state.mul_(1)", "wrong: error of out "),
        (f"def mine({NAMES}): pass", "wrong: error of out nan"),
        ("mine = 3", "TypeError: it is no function: int"),
        ("def mine(): ...\ndel mine", "AttributeError: "),
        ("import no_such_module\ndef mine(): ...", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0\ndef mine(): ...", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('usage')\ndef mine(): ...", "ImportError: my.py ends Python when it is imported"),
        (f"def mine({NAMES}, more=1, *, flag=None): 1 / 0", "ZeroDivisionError"),  # it fits, and is called
        ("def mine(*args): 1 / 0", "ZeroDivisionError"),
        (f"import functools\ndef f({NAMES}): 1 / 0\nmine = functools.wraps(f)(lambda *a: f(*a))", "ZeroDivisionError"),
        (f"import triton\n@triton.jit\ndef mine({NAMES}): ...", ""),
    ],
)
def test_what_is_wrong_with_a_function_is_said(write, tmp_path, text, reason):
    """In this process, which they do not end; the interpreter's path is the same."""
    study, mine = registry.load("state_layout"), write(text)
    journal = records.Journal(tmp_path / "journal")
    keys = [[case.op, case.key] for case in study.tiny[:1]]
    added.try_here(study.name, [mine], "added: mine", keys, "cpu", False, str(journal.path))
    (row,) = journal.entries()
    assert not row["ok"]
    assert not row["crashed"]
    assert row["reason"].startswith(reason)
    assert row["reason"]


def test_a_function_that_does_not_come_back_is_ended(write, tmp_path):
    mine = write(f"import time\ndef mine({NAMES}):\n    time.sleep(60)\n")
    case = registry.load("state_layout").tiny[0]
    arguments = ("state_layout", [mine], "added: mine", [[case.op, case.key]], "cpu", False, f"{tmp_path}/journal")
    # Long enough that it sleeps by then: a trace that is taken while Python imports can end in a crash.
    code = f"from labkit.sweep import added; added.PATIENCE_S = 8; added.try_here(*{arguments!r})"
    env = {**os.environ, **INTERPRETED, "PYTHONPATH": str(CODE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert not (tmp_path / "journal").exists()
    failure = isolated.IsolatedError("t", "crash", "exit status 1", done.stderr)
    assert added._how(failure) == f"no end within {added.PATIENCE_S} s"


def test_a_triton_kernel_runs_interpreted_and_files_beside_it_are_found(write):
    write("from labkit.studies.state_layout.layouts import DecodeInputs, decode_v_first\n", name="beside.py")
    text = f"from beside import *\ndef mine({NAMES}):\n    decode_v_first(DecodeInputs({NAMES}), 8, 1)()\n"
    found = tiny(write(text))
    assert found["ok"].all(), found["reason"].tolist()


def test_the_page_shows_that_it_was_checked_and_not_timed(folders, layout, write, monkeypatch):  # noqa: F811
    code, name = GOOD, "my_decode"
    own = pd.DataFrame({"case": ["x"], "variant": ["KV BV=8"], "error": [1e-4], "ok": [True]})
    monkeypatch.setattr(lab, "check_here", lambda *_: own)
    made.store(paths.DATA / test_lab.GPU, layout)
    bad = write("def mine(W, x, y): ...")
    x = lab.open("state_layout", add=[write(code, name, "my_kernels.py"), bad], **made.LAYOUT)
    assert x.study.add == ()  # the views see the lab's own variants
    page = html(x.added())
    assert "tiny inputs, Triton&#39;s interpreter. None was timed: " in page
    assert test_lab.NO_GPU in page
    rows = table_of(x.added().parts[0])
    assert [row["ok"] for row in rows] == ["yes"] * 8 + ["no"] * 8
    assert {row["reason"] for row in rows if row["function"] == "mine"} == {
        f"TypeError: another signature: it takes (W, x, y), the study gives ({NAMES})"
    }
    by_name = {row["where"]: row for row in table_of(x.correctness())}
    where = f"{name} (added), tiny inputs, Triton's interpreter"
    assert (by_name[where]["cases"], by_name[where]["wrong"]) == ("8", "0")
    assert by_name[where.replace(name, "mine")]["wrong"] == "8"
    assert by_name[where.replace(name, "mine")]["largest error"] == "—"
    assert by_name["tiny inputs, Triton's interpreter"]["wrong"] == "0"


def test_without_any_the_page_says_how(folders, layout):  # noqa: F811
    x = replayed("state_layout", made.LAYOUT, layout)
    page = html(x.added())
    assert "labkit run state_layout --add my_kernels.py:my_function" in page
    assert f"my_function({NAMES})" in page
    assert "[slots, HV, V, K]" in page


# timed, on a device that is simulated


@dataclasses.dataclass
class Own:
    """The function of a file as the toy's device times it. ns: what is reported for it."""

    function: object
    x: object
    y: object
    ns: int = 12_000

    def __call__(self):
        self.function(self.x, self.y)


class Lab(test_sweep.Lab):
    """The toy study of test_sweep, which takes functions f(x, y); the processes that try them are plain calls too."""

    def __init__(self, folder, monkeypatch):
        super().__init__(folder, monkeypatch)
        self.add, self.tried = [], []
        self.path.parent.mkdir(parents=True)
        monkeypatch.setattr(registry, "load", lambda name: self.plain())
        monkeypatch.setattr(added, "_module", added._module.__wrapped__)

    def plain(self):
        takes = spec.Added(("x", "y"), "y = 2x", self.prepare)
        return dataclasses.replace(self.toy.study(), added=takes)

    def prepare(self, function, case, device, sets, seed):
        made = torch.Generator(device).manual_seed(seed)
        x = torch.randn((sets, case["n"], 4), generator=made)
        calls = [Own(function, *both) for both in zip(x, torch.empty_like(x), strict=True)]

        def other(i, random):
            for one in calls:
                random.fill(one.x)

        def other_value(i, random):
            for one in calls:
                random.fill(one.x.view(-1)[-1:])

        arguments = spec.Arguments(
            [{"x": one.x} for one in calls],
            [{"y": one.y} for one in calls],
            (other, other_value),
            lambda i, count: 2 * calls[i].x.double(),
            lambda exact, found: {"y": trials.relative_rmse(found["y"], exact)},
        )
        return trials.given(calls, arguments, {"y": 1e-6})

    def call(self, target, *args, **options):
        if target == "labkit.sweep.added:try_here":
            self.tried.append(args[2])
            return added.try_here(*json.loads(json.dumps(args)))
        return super().call(target, *args, **options)

    def run(self, sizes=test_sweep.SIZES, processes=2):
        self.measured.clear()
        self.tried.clear()
        study = added.with_added(self.plain(), self.add)
        return sweep.run(study, {"sizes": sizes}, processes, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, self.lines.append)

    def of(self, rows, name):
        return rows[rows["variant"] == f"added: {name}"]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    return Lab(tmp_path, monkeypatch)


DOUBLE = "import torch\ndef mine(x, y):\n    torch.add(x, x, out=y)\n"


def test_a_function_is_timed_with_the_others(toy, write):
    toy.add = [write(DOUBLE)]
    rows = toy.run()
    mine = toy.of(rows, "mine")
    assert mine["ok"].all(), mine["reason"].tolist()
    assert sorted(zip(mine["case"], mine["cache"], strict=True)) == [
        (json.dumps({"n": n}), cache) for n in (1, 2) for cache in ("cold", "hot")
    ]
    assert set(mine["role"]) == {"peer"}
    assert set(mine["options"]) == {'{"file": "my.py", "function": "mine"}'}
    for row in mine.to_dict("records"):
        twin = rows[(rows["case"] == row["case"]) & (rows["cache"] == row["cache"]) & (rows["variant"] == "double")]
        assert list(row["block"]) == list(twin["block"].iloc[0])  # of the same blocks
    test_sweep.complete(rows[~added.is_added(rows)], processes=2)
    assert toy.tried == ["added: mine"]
    assert any("trying mine alone" in line for line in toy.lines)


def test_what_is_measured_again(toy, write):
    toy.run()
    assert toy.measured == test_sweep.every(processes=2)
    assert toy.tried == []
    toy.add = [write(DOUBLE)]
    toy.run()
    assert toy.measured == test_sweep.every(processes=2)  # in one run with all the others
    toy.run()
    assert toy.measured == toy.tried == []
    toy.add = []
    assert not toy.of(toy.run(), "mine").empty
    assert toy.measured == []  # what is there beside them does no harm
    toy.add = [write("# another comment\n" + DOUBLE)]
    toy.run()
    assert toy.measured == []
    toy.add = [write(DOUBLE.replace("x, x", "2 * x, 0 * x"))]
    rows = toy.run()
    assert toy.measured == test_sweep.every(processes=2)
    assert len(toy.of(rows, "mine")) == 4
    toy.add = [*toy.add, write("from my import mine as other\n", "other", "other.py")]
    toy.add[1] = write("import my\nother = my.mine\n", "other", "other.py")
    rows = toy.run()
    assert toy.measured == test_sweep.every(processes=2)
    assert len(toy.of(rows, "other")) == len(toy.of(rows, "mine")) == 4


def test_a_run_that_was_stopped_is_not_continued_with_other_functions(toy, write):
    def stop(line):
        if ", case 1" in line:
            raise KeyboardInterrupt

    toy.add = [write(DOUBLE)]
    study = added.with_added(toy.plain(), toy.add)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(study, {"sizes": [1]}, 2, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, stop)
    toy.add = []
    rows = toy.run([1])
    assert toy.measured == test_sweep.every([1], 2)  # else its row would hold one process
    assert toy.of(rows, "mine").empty


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def mine(W, x, y): ...", "TypeError: another signature: it takes (W, x, y), the study gives (x, y)"),
        ("1 / 0\ndef mine(x, y): ...", "ZeroDivisionError: division by zero"),
        ("def mine(x, y): raise OSError('no')", "OSError: no"),
        ("def mine(x, y): y.copy_(x)", "wrong: error of y 5.0e-01 (allowed 1e-06)"),
        ("def mine(x, y): ...", "an output was not written while it was timed"),
    ],
)
def test_a_bad_function_is_rows_with_a_reason_and_the_rest_goes_on(toy, write, text, reason):
    toy.add = [write(text), write(DOUBLE.replace("mine", "good"), "good", "good.py")]
    rows = toy.run()
    bad, good = toy.of(rows, "mine"), toy.of(rows, "good")
    assert sorted(bad["cache"]) == ["cold", "cold", "hot", "hot"]
    assert not bad["ok"].any()
    assert bad["reason"].str.contains(reason, regex=False).all(), bad["reason"].tolist()
    assert good["ok"].all()
    test_sweep.complete(rows[~added.is_added(rows)], processes=2)
    toy.run()
    assert toy.measured == []


def test_a_function_that_ends_its_process_when_tried_is_not_called_in_the_measurement(toy, write):
    toy.add = [write("def mine(x, y): y.killed()"), write(DOUBLE.replace("mine", "good"), "good", "good.py")]
    real = toy.call

    def call(target, *args, **options):
        if "added: mine" in args:
            raise isolated.IsolatedError(target, "AcceleratorError", "CUDA error: illegal access\nmore")
        return real(target, *args, **options)

    toy.patch.setattr(isolated, "call", call)
    rows = toy.run()
    bad = toy.of(rows, "mine")
    first = "Crashed: the process died: AcceleratorError: CUDA error: illegal access"
    assert set(bad[bad["case"] == '{"n": 1}']["reason"]) == {first}
    assert set(bad[bad["case"] == '{"n": 2}']["reason"]) == {
        "Crashed: not called: in another case, the process died: AcceleratorError: CUDA error: illegal access"
    }
    assert toy.of(rows, "good")["ok"].all()
    test_sweep.complete(rows[~added.is_added(rows)], processes=2)


def test_a_case_whose_process_dies_is_measured_again_without_them(toy, write):
    toy.add = [write(DOUBLE)]
    real, deaths = toy.real_measure, []

    def measure(study, case, index, *rest):
        mine = next((one for one in study.variants(case) if one.name.startswith(spec.ADDED)), None)
        if (case["n"], index) == (2, 1):
            with contextlib.suppress(added.Crashed):
                mine.prepare(case, "cpu", 1, 0)
                deaths.append(case["n"])
                raise isolated.IsolatedError("t", "crash", "killed by signal 9")
        return real(study, case, index, *rest)

    toy.real_measure = measure
    rows = toy.run()
    assert deaths == [2]
    mine = toy.of(rows, "mine")
    assert mine[mine["case"] == '{"n": 1}']["ok"].all()
    bad = mine[mine["case"] == '{"n": 2}']
    assert set(bad["reason"]) == {"Crashed: the process died: crash: killed by signal 9"}
    assert not bad["ok"].any()
    test_sweep.complete(rows[~added.is_added(rows)], processes=2)


def test_the_table_sets_each_against_the_choice_of_the_study(toy, write):
    toy.add = [write(DOUBLE), write("def bad(x, y): ...", "bad", "bad.py"), write("def odd(): ...", "odd", "odd.py")]
    rows = toy.run()
    table = added.compared(toy.plain(), rows)
    mine = table[table["function"] == "mine"]
    assert len(mine) == 4
    assert set(mine["against"]) == {"double"}
    assert set(mine["verdict"]) == {"slower"}
    assert mine["ratio"].tolist() == pytest.approx([10 / 12] * 4, rel=0.01)
    assert (mine["low"] <= mine["ratio"]).all()
    assert (mine["ratio"] <= mine["high"]).all()
    assert mine["µs"].tolist() == pytest.approx([12] * 4, rel=0.01)
    assert mine["its µs"].tolist() == pytest.approx([10] * 4, rel=0.01)
    for name, reason in (("bad", "not written"), ("odd", "another signature")):
        failed = table[table["function"] == name]
        assert len(failed) == 4
        assert set(failed["verdict"]) == {"failed"}
        assert failed[["µs", "ratio", "low", "high"]].isna().all(axis=None)
        assert failed["remark"].str.contains(reason).all()
    no_ours = rows.assign(role=rows["role"].replace("ours", "step"))
    assert set(added.compared(toy.plain(), no_ours)["against"]) == {"double"}  # the A/A control's
    other = rows.assign(role=rows["role"].where(rows["variant"] != "copy", "ours").where(rows["variant"] != "double"))
    assert set(added.compared(toy.plain(), other)["against"]) == {"copy"}
    assert added.compared(toy.plain(), rows[~added.is_added(rows)]).empty


def test_the_page_of_a_measuring_machine(toy, write, monkeypatch):
    toy.add = [write(DOUBLE), write("def odd(): ...", "odd", "odd.py")]
    rows = toy.run()
    monkeypatch.setattr(lab.lease, "visible", lambda: ["a GPU"])
    monkeypatch.setattr(lab, "_leased", lambda: contextlib.nullcontext({}))
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "")
    monkeypatch.setattr(sweep, "run", lambda *_: rows)
    shown, problem = lab._measure(added.with_added(toy.plain(), toy.add[:1]), {"sizes": [1, 2]}, 2)
    assert problem == ""
    assert set(shown.rows["variant"]) == {*test_sweep.NAMES, "eager"}  # what views and claims see
    assert set(shown.own["variant"]) == {"added: mine"}  # what was asked for now
    shown = dataclasses.replace(shown, own=rows[added.is_added(rows)])
    page = lab.Lab(toy.plain(), {"sizes": [1, 2]}, [shown], "", toy.add).added()
    for row in table_of(page.parts[0]):
        assert row["against"] == "double"
        assert row["verdict"] == ("✗ slower" if row["function"] == "mine" else "? failed")
        assert (row["µs"] == "—") == (row["function"] == "odd")
    assert "Measured on this machine" in html(page)
    assert "nan" not in html(page)


@pytest.mark.parametrize("checks", [True, False])
def test_tiny_cases_that_were_not_checked_before_are_once_nothing_is_timed_any_more(toy, monkeypatch, checks):
    """As where nothing was left to measure; they have ended when the GPU is freed. The page gets what they gave."""
    rows, steps, begun = toy.run(), [], threading.Event()

    def measured(*words):
        steps.append("timed")
        *_, idle, _ = words
        idle()
        assert begun.is_set() == checks
        idle()  # the end of all
        steps.append("predicted")
        return rows

    def checked(study, interpreted):
        steps.append("checked")
        begun.set()
        return pd.DataFrame({"study": [study], "interpreted": [interpreted]})

    monkeypatch.setattr(lab.lease, "visible", lambda: ["a GPU"])
    monkeypatch.setattr(lab, "_leased", lambda: contextlib.nullcontext({}))
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "")
    monkeypatch.setattr(sweep, "run", measured)
    monkeypatch.setattr(lab, "check_here", checked)
    shown, _ = lab._measure(toy.plain(), {"sizes": [1, 2]}, 2, checks)
    assert steps == ["timed", *["checked"] * checks, "predicted"]
    assert (None if shown.tiny is None else shown.tiny.to_dict("records")) == (
        [{"study": toy.plain().name, "interpreted": False}] if checks else None
    )


# what is kept


@pytest.fixture
def inside(tmp_path, monkeypatch):
    found = Toy(tmp_path)
    found.enter(monkeypatch)
    return found


def with_own(inside):
    rows = inside.rows()
    own = [row | {"variant": "added: mine", "role": "peer", "kernel_sha": "0" * 12} for row in rows[::3]]
    return rows, own


def test_record_leaves_them_out_and_says_so(inside):
    rows, own = with_own(inside)
    inside.measured([*rows, *own])
    report = archive.promote()
    assert report.promoted == {(SLUG, "layers"): (2, 6)}
    assert report.left == [f"{SLUG}/layers.parquet: 2 rows of functions not of the lab (added: mine)"]
    assert set(records.read(paths.DATA / SLUG / "layers.parquet")["variant"]) == {"a", "b", spec.CONTROL}


def test_lists_and_claims_do_not_see_them(inside):
    rows, own = with_own(inside)
    inside.measured([*rows, *own])
    (found,) = recorded.all_rows("layers")
    assert len(found.rows) == len(rows)
    assert found.rows.index.tolist() == list(range(len(rows)))
    frame = pd.DataFrame([*rows, *own])
    assert not recorded.stale(frame).any()


# the hash


def test_the_hash_is_of_the_whole_file_and_of_what_it_imports_beside_it(write):
    def sha(text, beside="SIZE = 1\n"):
        write(beside, name="beside.py")
        write("NOTHING = 1\n", name="unused.py")
        return kernel_sha(f"file:{write(text)}")

    text = '"""Doc."""\nfrom beside import SIZE\ndef mine(x):\n    return helper(x, SIZE)\ndef helper(x, n): return x\n'
    found = sha(text)
    assert re.fullmatch("[0-9a-f]{12}", found)
    assert sha(text.replace("Doc.", "Another.") + "# a comment\n") == found
    assert sha(text.replace("return x\n", "return -x\n")) != found
    assert sha(text, "SIZE = 2\n") != found
    assert sha(text, "SIZE = (\n") != found
    write("NOTHING = 2\n", name="unused.py")
    assert kernel_sha(f"file:{write(text)}") != sha(text, "SIZE = 3\n")
    with pytest.raises(OSError, match=r"gone\.py"):
        kernel_sha("file:/nowhere/gone.py:mine")


# the whole way


def test_the_command_hands_absolute_paths_to_the_notebook(inside, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "my.py").write_text("def mine(W, x, y): ...")
    study = inside.root / "toys" / "layers" / "study.py"
    text = study.read_text().replace("list_of, one_of", "list_of, one_of, Added")
    study.write_text(text.replace("    claims=", "    added=Added(('W', 'x', 'y'), 'Help.', None),\n    claims="))
    cell = "".join(json.loads((inside.root / "notebooks" / "01_layers.ipynb").read_text())["cells"][1]["source"])
    inside.notebook("layers", "print(add)", parameters=cell + "add: list[str] = []  # functions of your own\n")
    done = inside.labkit("run", "layers", "--add", "my.py:mine", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    part = filters.suffix({"add": [f"{elsewhere / 'my.py'}:mine"]})
    assert inside.printed("layers", part) == [f"['{elsewhere / 'my.py'}:mine']"]
    done = inside.command("run", "ground", "--add", "my.py:mine", cwd=elsewhere)
    assert done.returncode == 2
    assert "ground takes no functions of your own; these studies do: layers" in " ".join(done.stderr.split())
