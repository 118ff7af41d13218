"""scripts/setup.sh and .ci/run, run for real in an empty folder whose name has a space.

A stub stands in for Python where pip would otherwise install gigabytes; one test uses the real one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# It answers `-m venv` and `-m pip` itself, and hands all else to the real interpreter.
STUB = f"""#!/bin/sh
case "$*" in
*_base_executable*) echo "$0" ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip "*)
    echo "$*" >>pip.calls
    touch .venv/half-installed
    case "$STUB_PIP" in
    block) until [ -e go ]; do sleep 0.02; done ;;
    fail) echo "no space left on device"; exit 1 ;;
    esac ;;
*) exec "{sys.executable}" "$@" ;;
esac
"""

# A build backend that needs no download; with it the real pip can install the project offline.
BACKEND = """
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "labkit-0-py3-none-any.whl"
    with zipfile.ZipFile(directory + "/" + name, "w") as wheel:
        wheel.writestr("labkit_installed.py", "")
        wheel.writestr("labkit-0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: labkit\\nVersion: 0\\n")
        wheel.writestr("labkit-0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("labkit-0.dist-info/RECORD", "")
    return name
"""

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


class Project:
    """A copy of the set-up in an otherwise empty folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "requirements.lock").write_text("# nothing\n")
        self.python = folder / "stub python"
        self.python.write_text(STUB)
        self.python.chmod(0o755)

    def start(self, pip: str = "") -> subprocess.Popen:
        env = os.environ | {"PYTHON": str(self.python), "STUB_PIP": pip}
        command = ["sh", str(self.folder / "scripts/setup.sh")]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, text=True, stdout=pipe, stderr=pipe, start_new_session=True, cwd="/")

    def setup(self, pip: str = "") -> subprocess.CompletedProcess:
        with self.start(pip) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def stop_in_pip(self, whole_group: bool) -> None:
        """Start a set-up and kill it while pip works; `whole_group`: pip too."""
        with self.start("block") as process:
            self.wait_for(".venv/half-installed")
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
            process.wait(timeout=60)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} was never made"
            time.sleep(0.01)

    @property
    def pip_calls(self) -> list[str]:
        path = self.folder / "pip.calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def stamped(self) -> bool:
        return (self.folder / ".venv/labkit.stamp").exists()

    def leave_mark(self) -> Path:
        """A file in .venv that is lost if .venv is made anew."""
        mark = self.folder / ".venv/mark"
        mark.touch()
        return mark


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "a project")


def test_second_call_installs_nothing_and_says_nothing(project):
    first = project.setup()
    assert first.returncode == 0, first.stderr
    assert project.stamped
    assert len(project.pip_calls) == 1
    assert project.pip_calls[0].endswith("-c requirements.lock -e .[test]")
    second = project.setup()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(project.pip_calls) == 1


def test_killed_set_up_is_made_anew(project):
    project.stop_in_pip(whole_group=True)
    assert not project.stamped
    mark = project.leave_mark()
    assert project.setup().returncode == 0
    assert project.stamped
    assert not mark.exists()
    assert len(project.pip_calls) == 2


def test_killed_update_is_made_anew(project):
    project.setup()
    (project.folder / ".venv/half-installed").unlink()
    (project.folder / "requirements.lock").write_text("# another version\n")
    project.stop_in_pip(whole_group=True)
    assert not project.stamped
    mark = project.leave_mark()
    assert project.setup().returncode == 0
    assert project.stamped
    assert not mark.exists()


def test_pip_that_outlives_its_set_up_is_waited_for(project):
    project.stop_in_pip(whole_group=False)
    with project.start() as second:
        assert second.stdout.readline() == "labkit: waiting for another set-up to end\n"
        assert len(project.pip_calls) == 1
        (project.folder / "go").touch()
        second.communicate(timeout=60)
    assert second.returncode == 0
    assert project.stamped
    assert len(project.pip_calls) == 2


def test_two_at_once_install_once(project):
    with project.start("block") as first:
        project.wait_for(".venv/half-installed")
        with project.start() as second:
            assert "waiting" in second.stdout.readline()
            (project.folder / "go").touch()
            second.communicate(timeout=60)
        first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(project.pip_calls) == 1


def test_failed_install_is_an_error_with_its_reason(project):
    failed = project.setup("fail")
    assert failed.returncode != 0
    assert "no space left on device" in failed.stderr
    assert ".cache/setup.log" in failed.stderr
    assert not project.stamped
    assert project.setup().returncode == 0


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml", "scripts/setup.sh"])
def test_changed_input_updates_in_place(project, name):
    project.setup()
    mark = project.leave_mark()
    with (project.folder / name).open("a") as file:
        file.write("# changed\n")
    assert project.setup().returncode == 0
    assert mark.exists()
    assert len(project.pip_calls) == 2


def test_moved_folder_is_made_anew(project):
    project.setup()
    mark = project.leave_mark().relative_to(project.folder)
    moved = project.folder.with_name("moved project")
    project.folder.rename(moved)
    project.folder, project.python = moved, moved / "stub python"
    assert project.setup().returncode == 0
    assert not (moved / mark).exists()
    assert len(project.pip_calls) == 2


def test_lost_interpreter_is_made_anew(project):
    project.setup()
    interpreter = project.folder / ".venv/bin/python"
    interpreter.unlink()
    interpreter.symlink_to("/nonexistent/python3")
    assert project.setup().returncode == 0
    assert interpreter.is_file()
    assert len(project.pip_calls) == 2


def test_old_python_is_named(project):
    project.python.write_text('#!/bin/sh\n[ "$1" != -V ] || echo Python 3.9.1\nexit 1\n')
    result = project.setup()
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stderr
    assert "Python 3.9.1" in result.stderr
    assert not (project.folder / ".venv").exists()


def test_real_pip_and_venv(project, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (project.folder / "backend.py").write_text(BACKEND)
    (project.folder / ".venv/bin").mkdir(parents=True)  # what a set-up killed in its first moment leaves
    project.python = Path(sys.executable)
    result = project.setup()
    assert result.returncode == 0, result.stderr
    python = project.folder / ".venv/bin/python"
    subprocess.run([python, "-c", "import labkit_installed"], check=True)
    assert project.setup().stdout == ""


def system_with(folder: Path, apt_get: str) -> dict[str, str]:
    """The environment of a system that has what .ci/run itself needs, and neither make nor Chromium."""
    folder.mkdir()
    for name in ("bash", "sh", "dirname", "id", "env", "touch", "chmod", "cat"):
        (folder / name).symlink_to(shutil.which(name))
    (folder / "python3").symlink_to(sys.executable)
    for name, body in {
        "apt-get": apt_get,
        "ln": "",
        "sudo": 'exec "$@"',
        "apt-installed": 'echo "$0 $* CI=$CI"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def ci(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci")
    return subprocess.run([folder / ".ci/run"], env=env, text=True, capture_output=True, check=False)


def test_ci_installs_what_is_missing_and_calls_make_test(tmp_path):
    apt_get = f"""echo "$*" >>"{tmp_path}/apt.calls"
case "$*" in *install*) for name in make chromium; do cat "{tmp_path}/bin/apt-installed" >"{tmp_path}/bin/$name"
chmod +x "{tmp_path}/bin/$name"; done ;; esac"""
    result = ci(tmp_path, system_with(tmp_path / "bin", apt_get))
    assert result.returncode == 0, result.stderr
    update, install = (tmp_path / "apt.calls").read_text().splitlines()
    assert update == "update"
    assert install.startswith("install --yes")
    assert install.endswith(" make chromium slurm-wlm munge rsync")
    assert result.stdout.endswith("make test CI=true\n")


def test_ci_fails_without_chromium(tmp_path):
    env = system_with(tmp_path / "bin", "")
    shutil.copy(tmp_path / "bin/apt-installed", tmp_path / "bin/make")
    result = ci(tmp_path, env)
    assert result.returncode != 0
    assert "Chromium is needed" in result.stderr
    assert "make test" not in result.stdout
