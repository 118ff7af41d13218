"""The command, as a script calls it: output, exit codes, completion."""

import os
import re
import shutil
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from toy_lab import CODE, SLUG, Toy

from labkit import cli
from labkit.workflow import launches, lease, nearest


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The toy lab, used by this process too."""
    found = Toy(tmp_path)
    found.enter(monkeypatch)
    return found


def labkit(*words, **env):
    """The real lab's command, as `python -m labkit`."""
    env = {**os.environ, "PYTHONPATH": str(CODE), **env}
    return subprocess.run(
        [sys.executable, "-m", "labkit", *words], env=env, capture_output=True, text=True, timeout=120
    )


# run


def test_run_from_any_folder_writes_all_pages_and_shows_what_failed(toy, tmp_path_factory):
    """In a process of its own; that a run without a failure is exit 0 is in test_workflow."""
    toy.notebook("ground", "raise ValueError('seven is not allowed')")
    done = toy.labkit("run", cwd=tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == str(toy.root / "reports" / "index.html")
    index = (toy.root / "reports" / "index.html").read_text()
    for name in ("00_ground", "01_layers"):
        assert f'href="{name}.html"' in index
        assert (toy.root / "reports" / f"{name}.html").exists()
    assert "[1/2] 00_ground: cell 1/3" in done.stderr
    assert re.search(r"\[2/2\] 01_layers: done \(\d+ s\)", done.stderr)
    assert "FAILED: In [2]: ValueError: seven is not allowed" in done.stderr
    assert "failed: 00_ground; " in done.stderr
    assert "Traceback" not in done.stderr
    assert "seven is not allowed" in (toy.root / "reports" / "00_ground.html").read_text()
    assert "failed" in index


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "unknown study 'nothing'; the studies: ground (00_ground), layers (01_layers)"),
        (["7"], "unknown study '7'"),
        (["layres"], "ground (00_ground), layers (01_layers); did you mean layers?"),
        (["-p", "batch=1"], "deep, label; did you mean batches?"),
        (["-p", "nothing=1"], "no parameter 'nothing' in ground, layers; allowed: source, gpu"),
        (["ground", "-p", "batches=1"], "no parameter 'batches' in ground; allowed: source, gpu, processes, sizes"),
        (["-p", "batches"], "'batches' is not NAME=VALUE"),
        (["-p", "batches=x"], "batches is 'x'; allowed: list[int], for example 1,8,64"),
        (["-p", "batches=99"], "parameter batches is [99]; allowed: a list, each item an integer from 1 to 64"),
        (
            ["-p", "gpu=other"],
            "parameter gpu is 'other'; allowed: empty for all, or a recorded GPU: (none is recorded)",
        ),
        (["--gpu", "other"], "no recorded GPU 'other'; recorded: none; with --source predicted: a100-80gb, l40s"),
        (["--gpu", "l40s"], "gpu is 'l40s'; allowed: empty for all, or a recorded GPU: (none is recorded)"),
        (["--source", "predicted"], "gpu is ''; allowed: one of a100-80gb, l40s, rtx-4090, rtx-5090, b200"),
        (["--source", "predicted", "-p", "gpu=rtx-1"], "gpu is 'rtx-1'; allowed: one of a100-80gb, l40s, rtx-4090"),
        (["--source", "web"], "'web' is not one of 'auto', 'measure', 'recorded', 'predicted'"),
        (["--source", "recorded", "-p", "source=auto"], "both --source and -p source="),
        (["--jobs", "0"], "0 is not in the range x>=1"),
        (["--jobs", "many"], "'many' is not a valid integer"),
        (["--nothing"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_2_before_anything_runs(toy, words, message):
    done = toy.command("run", *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not (toy.root / "reports").exists()


def test_wrong_usage_is_exit_2_of_the_process_too(toy):
    done = toy.labkit("run", "nothing")
    assert done.returncode == 2
    assert "unknown study 'nothing'" in done.stderr


def test_measuring_without_a_gpu_says_why(toy, monkeypatch):
    monkeypatch.setattr(lease, "installed", list)
    done = toy.command("run", "--source", "measure")
    assert done.returncode == 2
    assert "source=measure, but nothing can be measured here: the driver lists no NVIDIA GPU" in done.stderr
    assert not (toy.root / "reports").exists()


@pytest.mark.parametrize("name", ["layers", "01_layers", "01_layers.ipynb", "01", "1"])
def test_a_study_by_name_notebook_or_number(toy, name):
    assert nearest.study(name) == nearest.study("lay") == "layers"
    assert nearest.study("00" if name == "01" else "no " + name) in ("ground", None)


@pytest.mark.parametrize("text", [SLUG, "nvidia-made", "made-up", "MADE-UP-9"])
def test_a_gpu_by_the_beginning_of_its_name(toy, text):
    toy.measured(toy.rows(), base="data")
    assert cli.GpuName().convert(text, None, None) == SLUG


def test_a_beginning_of_two_names_is_none_of_them(toy):
    toy.measured(toy.rows(), base="data")
    with pytest.raises(click.UsageError, match="no recorded GPU 'rtx'"):
        cli.GpuName().convert("rtx", None, None)


# report and the claims


def test_report_shows_the_claims_of_what_was_recorded_and_measured(toy):
    toy.measured(toy.rows(), base="data")
    toy.measured(toy.rows(ns=[2000, 2200], kernel_sha="0" * 12))
    shutil.copytree(toy.root / "notebooks", toy.root / "reports" / "notebooks")
    done = toy.command("report")
    assert done.returncode == 0, done.stderr
    index = re.sub("</?data[^>]*>", "", (toy.root / "reports" / "index.html").read_text())
    assert "It is fast" in index
    assert index.count("Measured: µs of all") == 1
    text = re.sub("<[^>]*>", "", index)
    assert "Made-Up 9: 12.6" in text  # 6 rows of two samples each, recorded
    assert "Made-Up 9 here: 25.2" in text  # and measured here
    assert "this claim cannot be judged" in index
    assert "earlier kernel" in index
    assert index.index("measured here, 2025-11-21") < index.index("recorded 2025-11-21")
    assert (toy.root / "reports" / "01_layers.html").exists()


ANSWER = """
HEADLINE = ("fine",)

def facts(rows):
    return {"rows": len(rows)}

def conclusion(facts):
    return "Fast: " + ", ".join(f"{one['rows']} rows on {gpu}" for gpu, one in facts.items())

def advice(facts):
    return "use it"
"""


def test_index_says_what_a_study_comes_to_from_all_recorded_rows(toy):
    toy.write("toys/layers/answer.py", ANSWER)
    toy.measured(toy.rows(), base="data")
    toy.measured(toy.rows()[:1])  # a run here of few cases
    done = toy.command("report")
    assert done.returncode == 0, done.stderr
    text = re.sub("<[^>]*>", "", (toy.root / "reports" / "index.html").read_text())
    assert "Title of layers\nFast: 6 rows on Made-Up 9" in text  # not the one row of the run here
    assert "What to do: use it" in text


def test_a_study_that_cannot_say_what_it_comes_to_is_named_and_the_index_still_written(toy):
    toy.write("toys/layers/answer.py", ANSWER.replace('return "use it"', "return facts['H100']"))
    toy.measured(toy.rows(), base="data")
    done = toy.command("report")
    assert done.returncode == 1
    assert "layers: no finding in the index: KeyError: 'H100'" in done.stderr
    assert "It is fast" in (toy.root / "reports" / "index.html").read_text()


def test_report_without_a_run_says_what_to_do(toy):
    done = toy.labkit("report")
    assert done.returncode == 0, done.stderr
    assert "not run yet" in (toy.root / "reports" / "index.html").read_text()


def test_a_data_file_that_cannot_be_used_is_named_and_the_index_still_written(toy):
    folder = toy.measured(toy.rows(), base="data")
    (folder / "layers.parquet").write_bytes(b"cut off")
    done = toy.command("report")
    assert done.returncode == 1
    assert "layers.parquet: not a readable Parquet file" in done.stderr
    assert "Traceback" not in done.stderr
    assert "It is fast" in (toy.root / "reports" / "index.html").read_text()
    listed = toy.command("list")
    assert listed.returncode == 1
    assert "layers.parquet: not a readable Parquet file" in listed.stderr
    assert "Traceback" not in listed.stderr


def test_a_run_of_a_part_leaves_the_full_page_and_says_what_it_wrote(toy):
    toy.measured(toy.rows(), base="data")
    assert toy.command("run", "layers").returncode == 0
    reports = toy.root / "reports"
    before = {path: path.read_bytes() for path in reports.rglob("01_layers*") if path.is_file()}
    assert {path.name for path in before} >= {"01_layers.html", "01_layers.ipynb"}
    done = toy.command("run", "layers", "-p", "batches=8")
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in before} == before
    page = re.sub("</?dfn[^>]*>", "", (reports / "01_layers--batches-8.html").read_text())
    assert "Only a part: batches=8." in page
    assert 'href="01_layers.html"' in page
    said = "01_layers: 1 reproduced, 1 not judged on NVIDIA Made-Up 9 (recorded); only batches=8"
    assert done.stdout.splitlines()[0] == f"{said}; reports/01_layers--batches-8.html"
    assert "--batches-8" not in (reports / "index.html").read_text()


def test_a_run_ends_with_the_verdicts_of_each_study_and_its_page(toy):
    toy.measured(toy.rows(), base="data")
    toy.notebook("ground", "1 / 0")
    assert toy.command("run").stdout.splitlines() == [
        "00_ground: failed; reports/00_ground.html",
        "01_layers: 1 reproduced, 1 not judged on NVIDIA Made-Up 9 (recorded); reports/01_layers.html",
        "reports/index.html",
    ]


def test_only_pages_that_changed_are_written_and_each_is_named(toy):
    toy.measured(toy.rows(), base="data")
    shutil.copytree(toy.root / "notebooks", toy.root / "reports" / "notebooks")
    first = toy.command("report").stderr.splitlines()
    assert first[:2] == ["[1/2] 00_ground.html", "[2/2] 01_layers.html"]
    pages = [toy.root / "reports" / name for name in ("00_ground.html", "01_layers.html")]
    times = [path.stat().st_mtime_ns for path in pages]
    assert toy.command("report").stderr.splitlines() == ["2 pages unchanged"]
    assert [path.stat().st_mtime_ns for path in pages] == times
    executed = toy.root / "reports" / "notebooks" / "00_ground.ipynb"
    executed.write_text(executed.read_text().replace("Title of ground", "Another"))
    assert toy.command("report").stderr.splitlines() == ["[1/1] 00_ground.html", "1 page unchanged"]
    assert "Another" in pages[0].read_text()


@pytest.mark.parametrize("change", ["rows", "neighbour", "page", "numbers"])
def test_a_page_is_written_when_anything_that_it_is_made_of_changes(toy, change):
    toy.measured(toy.rows(), base="data")
    shutil.copytree(toy.root / "notebooks", toy.root / "reports" / "notebooks")
    toy.command("report")
    page = toy.root / "reports" / "01_layers.html"
    if change == "rows":
        toy.measured(toy.rows(utc="2025-12-24T08:00:00+00:00"), base="data")
    elif change == "neighbour":
        (toy.root / "reports" / "notebooks" / "00_ground.ipynb").unlink()
    elif change == "page":
        page.write_text("cut off")
    else:
        page.with_suffix(".numbers.json").unlink()
    assert "[1/1] 01_layers.html" in toy.command("report").stderr
    assert page.with_suffix(".numbers.json").exists()
    assert "Title of layers" in page.read_text()


def test_report_as_markdown(toy):
    toy.measured(toy.rows(), base="data")
    shutil.copytree(toy.root / "notebooks", toy.root / "reports" / "notebooks")
    done = toy.command("report", "--markdown")
    assert done.returncode == 0, done.stderr
    assert "reports/markdown/index.md" in done.stdout
    assert "# Title of layers" in (toy.root / "reports" / "markdown" / "01_layers.md").read_text()
    assert "(01_layers.md" in (toy.root / "reports" / "markdown" / "index.md").read_text()


# list


def test_list_of_a_claim_says_what_was_published_and_what_each_gpu_says(toy):
    toy.measured(toy.rows(), base="data")
    toy.measured(toy.rows(ns=[2000, 2200], kernel_sha="0" * 12))
    done = toy.command("list", "fine")
    assert done.returncode == 0, done.stderr
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "layers.fine", "claim: It is fast", "source: Source 1", "address: https://example.org/1",
        "condition: any GPU", "published: 7 %", "rule: of 2025-11-20", "",
        "NVIDIA Made-Up 9, recorded: reproduced", "direction: holds", "size: not comparable",
        "measured: 12.6: µs of all", "why: as claimed; the source's own code", "ran: the source's own code",
        "note: rule changed after the data", "",
        "NVIDIA Made-Up 9, measured here: reproduced", "direction: holds", "size: not comparable",
        "measured: 25.2: µs of all", "why: as claimed; the source's own code", "ran: the source's own code",
        "note: some rows are of an earlier kernel; rule changed after the data",
    ]  # fmt: skip
    for text in ("layers.fine", "fi", "layers.f"):
        assert toy.command("list", text).stdout == done.stdout
    assert "could not be judged\n  why:       RuntimeError: this claim cannot" in toy.command("list", "odd").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fone"], "no claim 'fone'; did you mean fine?"),
        (["xyz"], "no claim 'xyz'; there are: layers.fine, layers.odd"),
        (["layers."], "'layers.' names 2 claims: layers.fine, layers.odd"),
        (["fine", "--gpus"], "CLAIM, --stale and --gpus exclude each other"),
    ],
)
def test_a_claim_that_is_not_there_is_named_with_those_that_are(toy, words, message):
    done = toy.command("list", *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_claim_without_rows_says_so(toy):
    assert toy.command("list", "fine").stdout.endswith("\nnot measured on any GPU\n")


def test_lines_of_a_claim_fit_into_100_columns(capsys):
    address = "https://example.org/" + "x-" * 60
    cli._fields(why="word " * 60, address=address, empty="")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-2])) in range(95, 101)
    assert lines[-2:] == ["  address:", " " * 13 + address] or lines[-1] == f"  address:   {address}"
    assert "empty" not in "".join(lines)


def test_list_names_studies_claims_and_recorded_gpus(toy):
    toy.measured(toy.rows(), base="data")
    toy.measured(toy.rows(utc="2025-12-01T08:00:00+00:00"))
    done = toy.command("list")
    assert done.returncode == 0, done.stderr
    assert "01_layers  Title of layers" in done.stdout
    assert "claim fine: It is fast (Source 1; published: 7 %)" in done.stdout
    assert f"recorded: {SLUG}, 2025-11-21, 6 rows" in done.stdout
    assert f"measured here: {SLUG}, 2025-12-01, 6 rows" in done.stdout


def test_list_stale_is_exit_1_if_a_kernel_has_changed_and_not_if_only_a_comment_has(toy):
    toy.measured(toy.rows(), base="data")
    assert toy.command("list", "--stale").returncode == 0
    study = toy.root / "toys" / "layers" / "study.py"
    text = study.read_text()
    study.write_text(text.replace("return 1", "return 1  # a comment"))
    assert toy.labkit("list", "--stale").returncode == 0  # a process keeps the hashes that it has made
    study.write_text(text.replace("return 1", "return 2"))
    done = toy.labkit("list", "--stale")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 3  # a line a variant
    assert re.search(rf"^{SLUG}/layers: op, a; rows: 2, cases: 2 \(kernel \w+, [\d-]+\)$", done.stdout, re.M)
    assert "6 rows recorded with an earlier kernel" in done.stderr
    assert "6 with an earlier kernel" in toy.labkit("list").stdout


# record


def test_record_promotes_and_an_archive_travels(toy):
    toy.measured(toy.rows())
    packed = toy.command("record", "--pack", "out.tar.gz")
    assert packed.returncode == 0, packed.stderr
    shutil.rmtree(toy.root / "runs")
    done = toy.command("record", "out.tar.gz")
    assert done.returncode == 0, done.stderr
    assert f"data/{SLUG}/layers.parquet: 2 cases, 6 rows promoted" in done.stdout
    assert (toy.root / "data" / SLUG / "machine.json").exists()


def test_record_refuses_with_exit_1_and_usage_with_2(toy):
    assert toy.command("record").returncode == 1
    toy.measured(toy.rows(kernel_sha="0" * 12))
    done = toy.command("record")
    assert done.returncode == 1
    assert "column kernel_sha, row 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert toy.command("record", "no-such-file").returncode == 2
    assert toy.command("record", "--pack", "out.rar").returncode == 2
    assert toy.command("record", "driver.py", "--pack", "x.tar").returncode == 2
    assert toy.command("record", "--figures", "--pack", "x.tar").returncode == 2
    assert toy.command("record", "driver.py").returncode == 1


# doctor


def test_doctor_says_what_is_measured_and_what_replayed_and_why(toy):
    toy.measured(toy.rows(), base="data")
    done = toy.command("doctor", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert {"labkit", "GPU", "torch", "Triton", "ncu", "ceilings", "00_ground", "01_layers"} <= set(lines)
    assert "will be replayed (torch sees no NVIDIA GPU here)" in lines["01_layers"]
    assert f"recorded: {SLUG}" in lines["01_layers"]
    assert "nothing is recorded" in lines["00_ground"]


def test_doctor_names_a_broken_installation_with_exit_1(toy):
    (toy.root / "notebooks" / "00_ground.ipynb").unlink()
    toy.write("broken/torch.py", "raise ImportError('libcudart is missing')")
    folders = os.pathsep.join([str(CODE), str(toy.root / "broken")])
    code = f"import sys; sys.argv[1:] = ['doctor']; exec(open({str(toy.root / 'driver.py')!r}).read())"
    env = {**os.environ, "LABKIT_ROOT": str(toy.root), "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "00_ground.ipynb is missing" in done.stdout
    assert "libcudart is missing" in done.stdout


# Help and completion


def test_help_is_quick_and_names_commands_and_exit_codes():
    done = labkit("--help")
    assert done.returncode == 0
    for word in (*COMMANDS, "Exit codes", "143"):
        assert word in done.stdout
    heavy = "import sys, labkit.cli; print([m for m in ('torch', 'triton', 'pandas', 'papermill') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(CODE)}
    assert subprocess.check_output([sys.executable, "-c", heavy], env=env, text=True).strip() == "[]"


COMMANDS = ["run", "check", "compare", "fetch", "record", "list", "report", "doctor", "new"]


def test_there_are_few_commands():
    """`bundle` may be one more; whatever else is wanted is an option of one of them."""
    assert set(COMMANDS) <= set(cli.main.commands) <= {*COMMANDS, "bundle"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = CliRunner().invoke(cli.main, [command, "--help"], prog_name="labkit")
    assert done.exit_code == 0
    assert f"Usage: labkit {command}" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    if shell == "bash":
        assert shutil.which("bash"), "needs bash"
    done = labkit("doctor", "--completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_LABKIT_COMPLETE" in done.stdout
    assert labkit("doctor", "--completion", "tcsh").returncode == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("labkit r", {"run", "report", "record"}),
        ("labkit run la", {"layers"}),
        ("labkit run --gpu n", {SLUG}),
        ("labkit run --gpu rtx", {"rtx-4090", "rtx-5090"}),
        ("labkit run -p ba", {"batches="}),
        ("labkit run ground -p s", {"source=", "sizes="}),
        ("labkit run --source ", {"auto", "measure", "recorded", "predicted"}),
    ],
)
def test_completion_knows_studies_gpus_and_parameters(toy, words, expected):
    toy.measured(toy.rows(), base="data")
    parts = words.split(" ")
    done = toy.command(COMP_WORDS=words, COMP_CWORD=str(len(parts) - 1), _LABKIT_COMPLETE="bash_complete")
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected


def test_the_bash_script_completes_in_bash(toy):
    script = labkit("doctor", "--completion", "bash").stdout
    bin_folder = toy.root / "bin"
    toy.write("bin/labkit", f'#!/bin/sh\nexec {sys.executable} {toy.root / "driver.py"} "$@"\n').chmod(0o755)
    code = f"""{script}
        COMP_WORDS=(labkit run gr); COMP_CWORD=2; _labkit_completion labkit gr run; echo "${{COMPREPLY[@]}}"
    """
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "LABKIT_ROOT": str(toy.root)}
    env["PYTHONPATH"] = str(CODE)
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "ground", done.stderr


# predictions


def test_gpus_that_can_be_asked_for_are_listed(toy):
    toy.measured(toy.rows(), base="data")
    toy.ceilings(base="runs", gpu="nvidia-other-1")
    lines = toy.command("list", "--gpus").stdout.splitlines()
    assert lines[0] == f"{SLUG}: recorded"
    assert "rtx-4090: RTX 4090, by its data sheet; labkit run --source predicted --gpu rtx-4090" in lines
    assert any(line.startswith("nvidia-other-1: by its run of 00_machine (runs/)") for line in lines)
    assert toy.command("list", "--gpus", "--stale").returncode == 2


@pytest.mark.parametrize("words", [["--source", "predicted", "--gpu", "l40s"], ["-p", "layers.gpu=l40s"]])
def test_a_gpu_to_predict_reaches_the_notebook(toy, words):
    source = [] if "--source" in words else ["--source", "predicted", "-p", "gpu=b200"]
    toy.notebook("layers", "print(source, gpu)")
    assert toy.command("run", "layers", *source, *words).returncode == 0
    assert toy.printed("layers", "--predicted--gpu-l40s") == ["predicted l40s"]
    assert "predicted for L40S" in (toy.root / "reports" / "01_layers--predicted--gpu-l40s.html").read_text()


def test_what_is_recorded_is_predicted_once(toy, monkeypatch):
    facts = toy.measured(toy.rows(), base="data").parent / "launches.parquet"
    monkeypatch.setattr(launches, "update", lambda: None)
    toy.ceilings()
    toy.facts(facts)
    done = toy.command("record", "--predict")
    assert (done.returncode, done.stdout) == (0, f"data/predictions.parquet: {SLUG}, 6 rows predicted\n")
    assert "0 rows predicted" in toy.command("record", "--predict").stdout


def test_promoted_rows_are_predicted_and_the_others_named(toy, monkeypatch):
    facts = toy.ceilings().parent.parent / "launches.parquet"
    toy.measured(toy.rows())
    toy.facts(facts, toy.rows()[:3])
    done = toy.command("record")
    assert f"{SLUG}, 3 rows predicted, 2 of ours without: their launches are not known" in done.stdout


def test_what_record_does_excludes_predicting(toy):
    done = toy.command("record", "--predict", "--figures")
    assert done.returncode == 2
    assert "--rehash, --same-as and --predict exclude each other" in " ".join(done.stderr.split())
