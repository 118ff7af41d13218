"""Jobs on a cluster: Snakemake and a real SLURM on this machine, of which only the GPUs are pretended."""

import contextlib
import json
import os
import random
import shlex
import signal
import sys
import time
from importlib import import_module
from importlib.util import find_spec

import light
import pytest
import slurm
import yaml
from missing import NO_CLUSTER
from pandas.testing import assert_frame_equal
from test_batch import batches, fleet, measured, options, sweep_of

from labkit.workflow import engine
from labkit.workflow.notebooks import UsageError

FAST = {"slurm-init-seconds-before-status-checks": 1, "seconds-between-status-checks": 1, "latency-wait": 10}


@pytest.fixture(scope="module")
def cluster():
    if find_spec("snakemake") is None or slurm.missing():
        if os.environ.get("CI"):
            pytest.fail(NO_CLUSTER)
        pytest.skip(NO_CLUSTER)
    running = slurm.Slurm()
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def snakemake():
    if find_spec("snakemake") is None:
        pytest.fail(NO_CLUSTER) if os.environ.get("CI") else pytest.skip(NO_CLUSTER)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = fleet(tmp_path)
    found.enter(monkeypatch)
    return found


def site(toy, **changes):
    """The shipped profile for SLURM, as a site with little patience and without accounting would change it."""
    settings = yaml.safe_load((engine.PROFILES / "slurm/config.yaml").read_text())
    settings |= {"slurm-status-command": "squeue", "config": [f"labkit={command(toy)}"], **FAST, **changes}
    settings["default-resources"] |= {"cpus_per_task": 1, "mem_mb": 100} | changes.get("default-resources", {})
    return toy.write("site/config.yaml", yaml.safe_dump(settings)).parent


def command(toy):
    return shlex.join([sys.executable, str(toy.root / "driver.py")])


class Run:
    """`labkit run --sweep … --on …` in a toy lab, on a cluster."""

    def __init__(self, toy, cluster, sets, profile):
        self.toy, self.words = toy, ("run", "--sweep", str(sweep_of(toy, *sets)), "--on", str(profile))
        self.env = options(toy) | (cluster.env if cluster else {})

    def start(self):
        return self.toy.start(*self.words, **self.env)

    def end(self):
        return self.toy.labkit(*self.words, **self.env)


def until(met, seconds=240):
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "it did not come so far in time"
        time.sleep(0.2)


def cases_measured(toy):
    log = toy.root / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


# Profiles


def test_a_profile_is_one_of_the_labs_or_a_folder(toy, snakemake):
    assert engine.profile("slurm") == engine.PROFILES / "slurm"
    assert engine.profile(str(site(toy))) == toy.root / "site"
    with pytest.raises(
        UsageError, match=r"'slrum': no such profile; allowed: kubernetes, slurm, .*did you mean slurm\?"
    ):
        engine.profile("slrum")
    toy.write("site/config.yaml", "executor: [")
    with pytest.raises(UsageError, match=r"config\.yaml: not YAML"):
        engine.profile(str(toy.root / "site"))


def test_without_snakemake_it_says_what_to_install_before_anything_runs(toy, monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    done = toy.command("run", "layers", "--on", "slurm")
    assert done.returncode == 2
    assert "snakemake is not installed: pip install 'labkit[cluster]'" in done.stderr
    monkeypatch.setattr(engine, "find_spec", lambda name: name == "snakemake" or None)
    done = toy.command("run", "layers", "--on", "slurm")
    assert (
        "executor 'slurm', and is not installed" in done.stderr.replace("\n", " ") or "labkit[cluster]" in done.stderr
    )
    assert not (toy.root / "runs").exists()


def test_it_says_how_long_it_takes_before_it_is_sent(toy):
    done = toy.command("run", "layers", "--on", "slurm", "--dry-run")
    assert "one after the other, each with 16 cores, measuring takes about" in done.stdout


def test_what_measures_nothing_is_not_sent_to_a_cluster(toy):
    done = toy.command("run", "layers", "--source", "recorded", "--on", "slurm")
    assert done.returncode == 2
    assert "01_layers: source is 'recorded'; allowed on a cluster: auto, measure" in done.stderr


def test_a_job_measures_or_fails_on_its_node(toy, monkeypatch):
    from labkit.workflow import jobs

    job = jobs.Job("layers", {"batches": [1]})
    jobs.prepare(job)
    monkeypatch.setattr(jobs.notebooks, "why_not_measure", lambda: "the driver lists none")
    done = toy.command("run", "--job", str(job.definition))
    assert done.returncode == 1
    assert "01_layers--batches-1: nothing can be measured here: the driver lists none" in done.stderr
    done = toy.command("run", "--job", str(toy.write("job.json", job.definition.read_text())))
    assert done.returncode == 2
    assert "is of the job 01_layers--batches-1; allowed: " in done.stderr
    assert toy.command("run", "--job", str(toy.write("job.json", "{}"))).returncode == 2
    toy.notebook("layers", "print('another')")
    done = toy.command("run", "--job", str(job.definition))
    assert done.returncode == 2
    assert "of another version of layers's notebook than this lab has" in done.stderr


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_shipped_profiles_hold_options_that_snakemake_knows(name, snakemake):
    from snakemake.cli import get_argument_parser

    known = {option for action in get_argument_parser()._actions for option in action.option_strings}
    fields = import_module(f"snakemake_executor_plugin_{name}").ExecutorSettings.__dataclass_fields__
    known |= {f"--{name}-{field.replace('_', '-')}" for field in fields}
    settings = yaml.safe_load((engine.PROFILES / name / "config.yaml").read_text())
    assert settings["executor"] == name
    assert not {f"--{option}" for option in settings} - known


def test_rows_come_back_through_a_storage_where_no_files_are_shared(toy, snakemake):
    """As on Kubernetes, with a folder for the bucket."""
    settings = {"executor": "local", "cores": 2, "config": [f"labkit={command(toy)}"], "shared-fs-usage": "none"}
    settings |= {
        "default-storage-provider": "fs",
        "default-storage-prefix": str(toy.root / "bucket"),
        "latency-wait": 5,
    }
    profile = toy.write("site/config.yaml", yaml.safe_dump(settings)).parent
    done = Run(toy, None, batches([1], [2, 3]), profile).end()
    assert done.returncode == 0, done.stderr
    assert len(measured(toy)["case"].unique()) == 3
    assert {path.name for path in (toy.root / "bucket").iterdir()} == {"01_layers--batches-1", "01_layers--batches-2+3"}


# SLURM


def test_slurm_runs_jobs_a_gpu_each_and_names_what_failed(toy, cluster):
    toy.notebook("layers", "import light", 'light.measure("layers", {"batches": batches})', "assert batches != [4]")
    run = Run(toy, cluster, batches(range(10, 40), range(40, 64), [4]), site(toy))
    done = run.end()
    assert done.returncode == 1
    where = toy.root / "runs/jobs/01_layers--batches-4/notebook.ipynb"
    assert f"failed: 01_layers--batches-4: In [5]: AssertionError: ; {where}" in done.stderr.splitlines()
    assert "AssertionError" in where.read_text()
    spans = light.spans(toy.root / "log")
    assert len(spans) == 2
    assert not any(light.overlaps(times) for times in spans.values())
    assert len(measured(toy)["case"].unique()) == 54
    toy.notebook("layers", "import light", 'light.measure("layers", {"batches": batches})')
    before = cases_measured(toy)
    again = run.end()
    assert again.returncode == 0, again.stderr
    assert cases_measured(toy) == before  # what was measured is not measured again
    assert len(measured(toy)["case"].unique()) == 55
    local = toy.labkit("run", "layers", "-p", f"batches={','.join(map(str, [*range(10, 64), 4]))}", **options(toy))
    assert local.returncode == 0, local.stderr
    assert cases_measured(toy) == before


def test_gpus_may_be_asked_for_with_gpus_instead_of_gres(toy, cluster):
    profile = site(toy)
    settings = yaml.safe_load((profile / "config.yaml").read_text())
    settings["default-resources"]["gpu"] = 1
    del settings["default-resources"]["gres"]
    toy.write("site/config.yaml", yaml.safe_dump(settings))
    done = Run(toy, cluster, batches([1]), profile).end()
    assert done.returncode == 0, done.stderr
    assert cases_measured(toy) == 2


LONG = range(1, 61)  # cases of a job that lasts some seconds


@pytest.mark.parametrize("what", ["requeue", "node lost"])
def test_a_job_that_slurm_starts_again_goes_on_where_it_was(toy, cluster, what):
    process = Run(toy, cluster, batches(LONG), site(toy)).start()
    until(lambda: cases_measured(toy) > 3)
    if what == "requeue":
        cluster("scontrol", "requeue", *cluster.ids())
    else:
        cluster.lose_node()
        until(lambda: "down" in cluster("sinfo", "--noheader", "--format=%T"))
        cluster.start_node()
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert len(measured(toy)["case"].unique()) == len(LONG)
    assert 2 * len(LONG) <= cases_measured(toy) <= 2 * len(LONG) + 1  # the one at which it was stopped
    assert not any(light.overlaps(times) for times in light.spans(toy.root / "log").values())


def test_a_cancelled_job_is_named_and_goes_on_the_next_time(toy, cluster):
    run = Run(toy, cluster, batches(LONG), site(toy))
    process = run.start()
    until(lambda: cases_measured(toy) > 3)
    cluster("scancel", *cluster.ids())
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "did not end by itself (killed, cancelled, or never started)" in err
    again = run.end()
    assert again.returncode == 0, again.stderr
    assert cases_measured(toy) <= 2 * len(LONG) + 1
    assert len(measured(toy)["case"].unique()) == len(LONG)


def test_a_killed_engine_leaves_its_jobs_which_the_next_one_waits_for(toy, cluster, tmp_path_factory):
    chance = random.Random(11)
    run = Run(toy, cluster, batches(LONG, [61], [62]), site(toy))
    for _ in range(10):
        process = run.start()
        time.sleep(chance.uniform(1, 6))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    done = run.end()
    assert done.returncode == 0, done.stderr
    until(lambda: not cluster.ids("RUNNING,PENDING"))
    rows = measured(toy)
    assert sorted(json.loads(case)["n"] for case in rows["case"].unique()) == list(range(1, 63))
    assert cases_measured(toy) == 2 * 62
    plain = fleet(tmp_path_factory.mktemp("plain"))
    local = plain.labkit("run", "layers", "-p", f"batches={','.join(map(str, range(1, 63)))}", **options(plain))
    assert local.returncode == 0, local.stderr
    assert_frame_equal(rows, measured(plain))
