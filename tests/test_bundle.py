"""The lab as one archive: what it holds, how it measures without a network, and archives in parts."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from toy_lab import GPU, SLUG, Toy

from labkit import paths, sources
from labkit.bench import machine, records
from labkit.workflow import archive, bundle, parts

PYTHON = "{}.{}".format(*sys.version_info[:2])
# Stands in for the lab on the machine without network: it notes what it was called with, and measures or packs.
MAIN = """
import os, shutil, sys
import needed
with open("calls", "a") as file:
    print(*sys.argv[1:], os.environ["LABKIT_SOURCES"], os.environ["LABKIT_REVISION"], file=file)
if sys.argv[1] == "record":
    shutil.copy(os.path.join(os.environ["PYTHONPATH"], "data", "made.tar.gz"), sys.argv[3])
sys.exit(int(os.environ.get("STATUS", 0)) if sys.argv[1] == "run" else 0)
"""


def wheel_in(folder, name, version):
    """A wheel of one empty module."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = Toy(tmp_path / "lab")
    found.enter(monkeypatch)
    found.write("labkit/__init__.py", "")
    found.write("labkit/__main__.py", MAIN)
    found.write(
        "pyproject.toml", '[project]\ndependencies = ["needed>=1"]\n[project.optional-dependencies]\npeers = []\n'
    )
    found.write("requirements.lock", "needed==1.0\n")
    found.write("left/over.py", "")
    wheel_in(found.root, "needed", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found.root))
    monkeypatch.setattr(machine, "revision", lambda: "0123456789ab")
    made = sources.Source("other", "1.0", "MIT", "https://example.org", {"a/b.py": "0" * 64})
    monkeypatch.setattr(sources, "manifest", lambda: {made.name: made})
    monkeypatch.setenv("LABKIT_SOURCES", str(found.root / "fetched"))
    found.write(f"fetched/{made.name}/a/b.py", "fetched")
    return found


def without_network(command, **options):
    """Run a command where no network is, if this system lets us."""
    cut = ["unshare", "--net"] if shutil.which("unshare") and os.geteuid() == 0 else []
    return subprocess.run([*cut, *command], capture_output=True, text=True, **options)


@pytest.mark.parametrize(("version", "warned"), [("2.0+cpu", True), ("2.0", False)])
def test_a_torch_without_cuda_is_said(toy, tmp_path, version, warned):
    toy.write("pyproject.toml", '[project]\ndependencies = ["torch"]\n[project.optional-dependencies]\npeers = []\n')
    toy.write("requirements.lock", "")
    wheel_in(toy.root, "torch", version)
    done = toy.command("bundle", str(tmp_path / "lab.tar"), "--python", PYTHON)
    assert done.returncode == 0, done.stderr
    said = f"warning: torch-{version}-py3-none-any.whl, which pip's index gave, cannot use a GPU"
    assert (said in done.stderr + done.stdout) == warned


def test_a_bundle_measures_without_network_and_its_archive_is_recorded(toy, tmp_path):
    toy.measured(toy.rows())
    (toy.root / "data").mkdir()
    archive.pack(toy.root / "data/made.tar.gz")
    toy.write("sweep.yaml", "jobs: [{notebooks: [layers]}]")
    out = tmp_path / "there" / "lab.tar"
    words = ("bundle", str(out), "--python", PYTHON, "--sweep", "sweep.yaml")
    done = toy.command(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: ")
    with tarfile.open(out) as file:
        names = file.getnames()
        file.extractall(out.parent, filter="data")
    assert "labkit-bundle/sources/other-1.0/a/b.py" in names
    assert "labkit-bundle/wheels/needed-1.0-py3-none-any.whl" in names
    assert not [name for name in names if "left" in name or "runs" in name]
    folder = out.parent / "labkit-bundle"
    env = {name: os.environ[name] for name in ("PATH",)} | {"PYTHON": sys.executable, "STATUS": "1"}
    ran = without_network([folder / "run"], env=env, cwd="/")
    assert ran.returncode == 1, ran.stderr  # a notebook failed; what was measured is packed all the same
    ran = without_network([folder / "run", "layers", "-p", "batches=7"], env=env | {"STATUS": "0"}, cwd="/")
    assert ran.returncode == 0, ran.stderr
    where = f"{folder}/sources 0123456789ab"
    assert (folder / "calls").read_text().splitlines() == [
        f"run --sweep sweep.yaml {where}",
        f"record --pack results.tar.gz {where}",
        f"run layers -p batches=7 {where}",
        f"record --pack results.tar.gz {where}",
    ]
    assert archive.promote(folder / "results.tar.gz").promoted == {(SLUG, "layers"): (2, 6)}
    wrong = without_network([folder / "run"], env=env | {"STATUS": "2"}, cwd="/")
    assert wrong.returncode == 2


def test_a_python_of_another_version_is_named(toy, tmp_path):
    script = tmp_path / "run"
    script.write_text(bundle._SCRIPT.replace("@PYTHON@", "3.99"))
    done = subprocess.run(
        ["sh", script], env={"PYTHON": sys.executable, "PATH": os.environ["PATH"]}, capture_output=True
    )
    assert done.returncode == 2
    assert b"Python 3.99 is needed" in done.stderr


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["lab.zip"], "must end in .tar", 2),
        (["lab.tar", "--extra", "peer"], "no extra 'peer'; allowed: peers; did you mean peers?", 2),
        (["lab.tar", "--python", "2.7"], "'2.7' is not one of", 2),
        (["lab.tar", "--limit", "2X"], "'2X' is no size; allowed: a number with K, M or G", 2),
        (["lab.tar", "--sweep", "none.yaml"], "none.yaml: No such file", 2),
        (["lab.tar"], "wheels for Python 3.12 on linux_x86_64: pip: ERROR: ", 1),
        (["lab.tar", "--python", PYTHON], "other-1.0: ", 1),
    ],
)
def test_what_cannot_be_bundled_is_named_and_nothing_is_left(toy, words, message, code):
    if code == 1:
        shutil.rmtree(toy.root / "fetched")
    if words == ["lab.tar"]:
        (toy.root / "needed-1.0-py3-none-any.whl").unlink()
    done = toy.command("bundle", *words)
    assert done.returncode == code
    assert message in done.stderr
    assert not [path for path in toy.root.iterdir() if path.name.startswith((".lab", "lab."))]


def test_an_archive_in_parts_is_taken_by_any_of_them(toy):
    toy.measured(toy.rows(ns=list(range(1, 200))))
    done = toy.command("record", "--pack", "out.tar", "--limit", "3K")
    assert done.returncode == 0, done.stderr
    made = sorted(path.name for path in toy.root.glob("out.tar*"))
    count = len(made) - 1
    assert count > 2
    assert made == ["out.tar.part1of" + f"{count}", *made[1:-1], "out.tar.sha256"]
    assert all(path.stat().st_size <= 3000 for path in toy.root.glob("out.tar*"))
    with parts.whole(toy.root / made[1]) as path:
        assert archive.promote(path).promoted == {(SLUG, "layers"): (2, 6)}
    assert (
        subprocess.run(
            "cat out.tar.part* > out.tar && sha256sum -c out.tar.sha256", shell=True, cwd=toy.root
        ).returncode
        == 0
    )
    assert toy.command("record", "--limit", "1M").returncode == 2


def test_a_part_that_is_missing_or_damaged_is_named(toy):
    toy.measured(toy.rows(ns=list(range(1, 200))))
    toy.command("record", "--pack", "out.tar", "--limit", "5K")
    first, *_, last = sorted(toy.root.glob("out.tar.part*"))
    content = last.read_bytes()
    last.unlink()
    done = toy.command("record", first.name)
    assert done.returncode == 2
    assert f"{last.name}: missing; the archive came in" in done.stderr
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = toy.command("record", first.name)
    assert done.returncode == 2
    assert "out.tar: the parts are not the whole that out.tar.sha256 is of" in done.stderr
    assert not paths.DATA.exists()


def test_what_fits_is_not_split(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"123")
    assert parts.split(tmp_path / "a.tar", 3) == [tmp_path / "a.tar"]


# Several hosts


def test_measurements_of_several_hosts_merge_and_only_what_was_measured_again_is_replaced(toy):
    """Two hosts with one model of GPU and one with another; then one of them again, of one case."""

    def host(name, gpu, case, **changes):
        rows = [row for row in toy.rows(gpu=gpu, driver=name, **changes) if row["case"] == case]
        slug = gpu.lower().replace(" ", "-")
        folder = toy.measured(rows, base=f"{name}/runs", gpu=slug)
        text = (folder / "machine.json").read_text().replace(GPU, gpu).replace(SLUG, slug)
        (folder / "machine.json").write_text(text.replace('"1.2"', f'"{name}"'))
        archive.pack(toy.root / f"{name}.tar", toy.root / name / "runs")

    one, two = '{"n": 1}', '{"n": 2}'
    host("a", GPU, one)
    host("b", GPU, two)
    host("c", "NVIDIA Made-Up 10", one)
    for order in ("abc", "cba"):
        shutil.rmtree(paths.DATA, ignore_errors=True)
        for name in order:
            archive.promote(toy.root / f"{name}.tar")
        rows = records.read(paths.DATA / SLUG / "layers.parquet")
        assert dict(zip(rows["case"], rows["driver"], strict=True)) == {one: "a", two: "b"}
        assert set(records.read(paths.DATA / "nvidia-made-up-10" / "layers.parquet")["driver"]) == {"c"}
    before = records.read(paths.DATA / SLUG / "layers.parquet")
    host("b", GPU, two, ns=[5000, 5100], revision="later")
    archive.promote(toy.root / "b.tar")
    after = records.read(paths.DATA / SLUG / "layers.parquet")
    kept = after["case"] == one
    assert (
        after[kept].reset_index(drop=True).to_json() == before[before["case"] == one].reset_index(drop=True).to_json()
    )
    assert set(after[~kept]["revision"]) == {"later"}
