"""Other people's code: fetched from their packages, checked, and loaded in namespaces of its own."""

import ast
import dataclasses
import errno
import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit import sources
from labkit.bench import sha
from labkit.cli import main
from labkit.sources import catalogue, fetching, loading, stubs

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "toy/__init__.py": "raise RuntimeError('not named by the manifest')\n",
    "toy/ops.py": "from toy.sizes import SIZE\nfrom .sizes import SIZE as AGAIN\nimport toy.sizes\nimport math\n"
    "def late():\n    from toy import sizes\n    from toy.util import flag\n    return sizes.SIZE, flag\n"
    "def twice(x):\n    return x + x\nSEEN = SIZE, AGAIN, toy.sizes.SIZE, math.pi\n",
    "toy/sizes.py": "SIZE = {size}\n",
    "toy/big.py": "raise RuntimeError('not named by the manifest')\n",
}
NAMED = ("toy/ops.py", "toy/sizes.py")


def only_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks into instead of an index; what is fetched goes beside it."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path / "kept"))
    return packages


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Two releases of a package, in a folder that pip looks into instead of an index; toy(…) spoils one of them."""
    packages = only_index(tmp_path, monkeypatch)
    lines = ["[toy]", 'licence = "MIT"', 'home = "https://example.org/toy"']
    for version, size in (("1.0", 1), ("2.0", 2)):
        texts = {path: text.format(size=size) if "SIZE = {" in text else text for path, text in FILES.items()}
        with zipfile.ZipFile(packages / f"toy-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in texts.items():
                wheel.writestr(path, text)
            wheel.writestr(
                f"toy-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n"
            )
            wheel.writestr(f"toy-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        lines += [f'[toy.versions."{version}"]']
        lines += [f'"{path}" = "{hashlib.sha256(texts[path].encode()).hexdigest()}"' for path in NAMED]
    (tmp_path / "sources.toml").write_text("\n".join(lines))
    monkeypatch.setattr(catalogue, "MANIFEST", tmp_path / "sources.toml")
    monkeypatch.setattr(stubs, "STUBS", {"toy": {"toy.util": {"flag": "stub"}}})
    catalogue.manifest.cache_clear()
    yield packages
    catalogue.manifest.cache_clear()
    for name in [name for name in sys.modules if name.startswith(f"{loading.ROOM}.toy")]:
        del sys.modules[name]


def kept(tmp_path: Path) -> list[str]:
    """Every file and folder that fetching left."""
    return sorted(str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*"))


def test_two_versions_live_side_by_side_with_just_their_named_files(toy, tmp_path):
    for made in sources.manifest().values():
        assert sources.fetch(made) == tmp_path / "kept" / made.name
    assert [path for path in kept(tmp_path) if path.endswith(".py")] == [
        f"toy-{version}/{path}" for version in ("1.0", "2.0") for path in NAMED
    ]
    one, two = (sources.load(f"toy-{version}", "toy.ops") for version in ("1.0", "2.0"))
    assert (one.SEEN[:3], two.SEEN[:3]) == ((1, 1, 1), (2, 2, 2))
    assert (one.late(), two.late()) == ((1, "stub"), (2, "stub"))  # imports inside functions too
    assert sources.load("toy-1.0", "toy.ops") is one
    assert "toy" not in sys.modules  # and nobody else sees them, or the stubs
    assert not [path for path in kept(tmp_path) if "pycache" in path]


def test_what_is_right_is_not_fetched_again_and_what_is_not_is(toy, tmp_path):
    made = sources.source("toy-1.0")
    sources.fetch(made)
    for wheel in toy.glob("*"):
        wheel.rename(wheel.with_suffix(".away"))
    assert sources.fetch(made) == tmp_path / "kept" / "toy-1.0"
    (tmp_path / "kept" / "toy-1.0" / "toy" / "sizes.py").write_text("SIZE = 3\n")
    with pytest.raises(sources.SourceError, match=r"toy-1\.0: pip: "):
        sources.fetch(made)
    for wheel in toy.glob("*"):
        wheel.rename(wheel.with_suffix(".whl"))
    sources.fetch(made)
    assert sources.load("toy-1.0", "toy.sizes").SIZE == 1


def test_a_file_that_was_changed_is_not_run(toy, tmp_path):
    sources.fetch(sources.source("toy-1.0"))
    (tmp_path / "kept" / "toy-1.0" / "toy" / "sizes.py").write_text("SIZE = 3\n")
    with pytest.raises(ImportError, match=r"sizes.py has SHA-256 \w+; allowed: \w+"):
        sources.load("toy-1.0", "toy.ops")


def test_a_package_that_is_named_is_no_way_around_the_manifest(tmp_path, monkeypatch):
    """A file beside those that are named is not found by way of their folder."""
    texts = {
        "pack/__init__.py": "HERE = 1\n",
        "pack/one.py": "from pack import HERE\ndef more():\n    import pack.two\n",
    }
    lines = ["[pack]", 'licence = "MIT"', 'home = "https://example.org"', '[pack.versions."1.0"]']
    lines += [f'"{path}" = "{hashlib.sha256(text.encode()).hexdigest()}"' for path, text in texts.items()]
    (tmp_path / "sources.toml").write_text("\n".join(lines))
    monkeypatch.setattr(catalogue, "MANIFEST", tmp_path / "sources.toml")
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path))
    catalogue.manifest.cache_clear()
    (tmp_path / "pack-1.0" / "pack").mkdir(parents=True)
    for path, text in (texts | {"pack/two.py": ""}).items():
        (tmp_path / "pack-1.0" / path).write_text(text)
    try:
        found = sources.load("pack-1.0", "pack.one")
        assert found.HERE == 1
        with pytest.raises(ModuleNotFoundError, match=r"pack\.two"):
            found.more()
    finally:
        catalogue.manifest.cache_clear()


def test_missing_files_say_how_to_get_them(toy):
    with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch toy$"):
        sources.load("toy-1.0", "toy.ops")
    with pytest.raises(KeyError, match=r"unknown source 'toy-3.0'; known: toy-1.0, toy-2.0"):
        sources.load("toy-3.0", "toy.ops")
    sources.fetch(sources.source("toy-1.0"))
    with pytest.raises(ImportError, match=r"toy\.big"):
        sources.load("toy-1.0", "toy.big")


def spoiled(toy: Path, how: str) -> None:
    wheel = toy / "toy-1.0-py3-none-any.whl"
    if how == "no such version":
        wheel.unlink()
    elif how == "damaged":
        wheel.write_bytes(wheel.read_bytes()[: len(wheel.read_bytes()) // 2])
    else:
        with zipfile.ZipFile(wheel) as old:
            texts = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(wheel, "w") as new:
            for name, text in texts.items():
                if name != "toy/sizes.py":
                    new.writestr(name, text)
                elif how == "another file":
                    new.writestr(name, text + b"\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no such version", r"toy-1\.0: pip: .*No matching distribution found for toy==1\.0"),
        ("damaged", r"toy-1\.0: .*(invalid|damaged)"),
        ("another file", r"toy-1\.0: toy/sizes\.py has SHA-256 \w{64}; allowed: \w{64}"),
        ("no file", r"toy-1\.0: toy/sizes\.py is not there"),
    ],
)
def test_what_cannot_be_fetched_is_named_and_leaves_nothing(toy, tmp_path, how, message):
    spoiled(toy, how)
    with pytest.raises(sources.SourceError, match=message):
        sources.fetch(sources.source("toy-1.0"))
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("problem", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), sources.SourceError, "toy-1.0: .*No space left on device"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_fetch_that_is_cut_off_leaves_nothing(toy, tmp_path, monkeypatch, problem, raised, message):
    written = []

    def write(self: Path, data: bytes) -> None:
        written.append(self)
        if len(written) == 2:
            raise problem

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(raised, match=message):
        sources.fetch(sources.source("toy-1.0"))
    assert len(written) == 2
    assert kept(tmp_path) == []


def test_other_files_of_a_release_may_go_by_a_name_of_their_own(toy, tmp_path):
    """So that what one study adds does not make rows of another stale."""
    sha_of_all, text = sources.source("toy-1.0").sha, catalogue.MANIFEST.read_text()
    big = hashlib.sha256(FILES["toy/ops.py"].encode()).hexdigest()
    text += '\n[toy-part]\npackage = "toy"\nlicence = "MIT"\nhome = "https://example.org/toy"\n'
    catalogue.MANIFEST.write_text(f'{text}[toy-part.versions."1.0"]\n"toy/ops.py" = "{big}"\n')
    catalogue.manifest.cache_clear()
    part = sources.source("toy-part-1.0")
    assert part in sources.named(["toy"])
    assert sources.source("toy-1.0").sha == sha_of_all != part.sha
    with pytest.raises(sources.NotFetched, match=r"^not fetched: labkit fetch toy$"):
        sources.load("toy-part-1.0", "toy.ops")
    sources.fetch(part)
    assert kept(tmp_path) == ["toy-part-1.0", "toy-part-1.0/toy", "toy-part-1.0/toy/ops.py"]
    with pytest.raises(ImportError, match=r"toy\.sizes"):  # its files are its own, and so are its stubs
        sources.load("toy-part-1.0", "toy.ops")


# Source distributions

BACKEND = """
from pathlib import Path
def prepare_metadata_for_build_wheel(folder, settings=None):
    Path({ran!r}).touch()
    made = Path(folder) / "tarred-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\\nName: tarred\\nVersion: 1.0\\n")
    return made.name
def build_wheel(*arguments):
    raise RuntimeError("nothing is built")
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
KERNEL = "vendor/lib/kernel.cu"


@pytest.fixture
def tarred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """tarred(): one release of a package, a source distribution; tarred(members): with these as well."""
    packages = only_index(tmp_path, monkeypatch)
    backend = BACKEND.format(ran=str(tmp_path / "ran"))
    texts = {"pyproject.toml": PROJECT, "backend.py": backend, "PKG-INFO": "", KERNEL: "code", "other.cu": "other"}

    def make(more: dict[str, str] | None = None, sha: str | None = None, keep: str = KERNEL) -> Path:
        path = packages / "tarred-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            named = {f"tarred-1.0/{name}": text for name, text in texts.items()} | (more or {})
            for name, text in named.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        sha = sha or hashlib.sha256(path.read_bytes()).hexdigest()
        lines = ["[tarred]", 'licence = "MIT"', 'home = "https://example.org"', f'archives = {{ "1.0" = "{sha}" }}']
        lines += ['[tarred.versions."1.0"]', f'"{keep}" = "{hashlib.sha256(b"code").hexdigest()}"']
        (tmp_path / "sources.toml").write_text("\n".join(lines))
        catalogue.manifest.cache_clear()
        return path

    monkeypatch.setattr(catalogue, "MANIFEST", tmp_path / "sources.toml")
    yield make
    catalogue.manifest.cache_clear()


def test_a_source_distribution_gives_its_named_files_unbuilt(tarred, tmp_path):
    tarred()
    made = sources.source("tarred-1.0")
    assert sources.fetch(made) == tmp_path / "kept" / "tarred-1.0"
    assert [one for one in kept(tmp_path) if one.endswith((".cu", ".py", ".toml"))] == [f"tarred-1.0/{KERNEL}"]
    assert (sources.folder(made) / KERNEL).read_text() == "code"
    assert made.sha == dataclasses.replace(made, archive="").sha  # of the files, whatever is around them


@pytest.mark.parametrize("how", ["another archive", "cut off"])
def test_no_code_of_another_archive_is_run(tarred, tmp_path, how):
    path = tarred(sha="0" * 64 if how == "another archive" else None)
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:200])
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(
        sources.SourceError, match=rf"^tarred-1\.0: its archive has SHA-256 {found}; allowed: \w{{64}}$"
    ):
        sources.fetch(sources.source("tarred-1.0"))
    assert kept(tmp_path) == []
    assert not (tmp_path / "ran").exists()


def test_a_source_distribution_lacks_a_file(tarred, tmp_path):
    tarred(keep="vendor/lib/gone.cu")
    with pytest.raises(sources.SourceError, match=r"^tarred-1\.0: vendor/lib/gone\.cu is not there$"):
        sources.fetch(sources.source("tarred-1.0"))
    assert kept(tmp_path) == []


def test_a_source_distribution_s_path_that_leads_out_is_refused(tarred, tmp_path, monkeypatch):
    path = tarred({f"tarred-1.0/../../{KERNEL}": "worse"})
    monkeypatch.setattr(fetching, "_download", lambda made, scratch: path)  # pip's own refusal does not count here
    with pytest.raises(sources.SourceError, match=r"^tarred-1\.0: .*outside the destination"):
        sources.fetch(sources.source("tarred-1.0"))
    assert kept(tmp_path) == []


def test_a_damaged_source_distribution_is_named(tarred, tmp_path, monkeypatch):
    path = tarred()
    path.write_bytes(path.read_bytes()[:-200])
    monkeypatch.setattr(fetching, "_download", lambda made, scratch: path)  # as if its hash were the one given
    with pytest.raises(sources.SourceError, match=r"^tarred-1\.0: tarred-1\.0\.tar\.gz is damaged: "):
        sources.fetch(sources.source("tarred-1.0"))
    assert kept(tmp_path) == []


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_source_distribution_that_is_cut_off_leaves_nothing(tarred, tmp_path, monkeypatch, problem):
    tarred()

    def write(self: Path, data: bytes) -> None:
        raise problem

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises((sources.SourceError, KeyboardInterrupt), match=r"No space left on device|^$"):
        sources.fetch(sources.source("tarred-1.0"))
    assert kept(tmp_path) == []


def test_a_module_may_be_changed_without_the_release_being_so(toy):
    sources.fetch(sources.source("toy-1.0"))

    def doubled(tree: ast.Module) -> ast.Module:
        [function] = [one for one in tree.body if getattr(one, "name", "") == "twice"]
        function.body = ast.parse("return 2 * (x + x)").body
        return tree

    changed = sources.changed("toy-1.0", "toy.ops", doubled)
    assert (changed.twice(3), sources.load("toy-1.0", "toy.ops").twice(3)) == (12, 6)
    assert changed.late() == (1, "stub")
    assert sources.changed("toy-1.0", "toy.ops", doubled) is changed

    def failing(tree: ast.Module) -> ast.Module:
        raise ValueError("not as expected")

    with pytest.raises(ValueError, match="not as expected"):
        sources.changed("toy-1.0", "toy.ops", failing)


def test_a_release_s_hash_is_of_its_version_and_files_wherever_they_are(toy):
    own = "labkit.studies.state_layout.sglang:decode"
    found = {name: sha.kernel_sha((f"source:{name}", own)) for name in ("toy-1.0", "toy-2.0")}
    assert len({*found.values(), sha.kernel_sha(own)}) == 3
    sources.fetch(sources.source("toy-1.0"))
    assert sha.kernel_sha(("source:toy-1.0", own)) == found["toy-1.0"]
    with pytest.raises(KeyError, match=r"unknown source 'toy-3\.0'"):
        sha.kernel_sha(("source:toy-3.0", own))


def test_the_command_fetches_what_it_is_asked_for(toy, tmp_path):
    done = CliRunner().invoke(main, ["fetch", "toy-2.0", "--into", str(tmp_path / "elsewhere")])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("toy-2.0: 2 files, 0 kB, MIT, https://example.org/toy: ")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["toy-2.0"]
    done = CliRunner().invoke(main, ["fetch", "toy"])
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["toy-1.0", "toy-2.0"]
    done = CliRunner().invoke(main, ["fetch", "toi"])
    assert done.exit_code == 2
    assert "unknown source 'toi'; did you mean 'toy'?" in done.stderr


def test_a_release_that_fails_does_not_keep_the_others(toy, tmp_path):
    spoiled(toy, "no file")
    done = CliRunner().invoke(main, ["fetch"])
    assert done.exit_code == 1
    assert done.stderr == "toy-1.0: toy/sizes.py is not there\n"
    assert done.stdout.startswith("toy-2.0: ")


def test_the_manifest_says_where_each_file_is_from():
    for made in sources.manifest().values():
        assert made.licence
        assert made.home.startswith("https://")
        assert made.files
        assert all(len(value) == 64 for value in made.files.values())
        assert len(made.archive) in (0, 64)
    assert fetching.TARGET  # wheels of another Python and machine may be read here


def test_no_file_of_theirs_is_in_the_tree():
    theirs = {value for made in sources.manifest().values() for value in made.files.values()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    ours = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    assert len(ours) > 100
    assert not [path for path in ours if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() in theirs]


def test_what_takes_long_is_fetched_only_where_it_is_named():
    large = {made.name for made in sources.manifest().values() if made.on_request}
    assert large
    assert large.isdisjoint(made.name for made in sources.named([]))
    assert {made.name for made in sources.named(["vllm"])} == large
