"""What `make lab` opens: copies of the notebooks, of which none that was worked in is ever overwritten."""

from pathlib import Path

import pytest

from labkit import paths
from labkit.workflow import notebooks


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    paths.NOTEBOOKS.mkdir()
    (paths.NOTEBOOKS / "00_machine.ipynb").write_text("first")
    return paths.NOTEBOOKS / "00_machine.ipynb"


def names(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.ipynb") if not path.name.startswith(".")}


def test_a_copy_is_made_and_stays(original: Path, tmp_path: Path):
    lab = tmp_path / "lab"
    notebooks.copy_into(lab)
    assert names(lab) == {"00_machine.ipynb": "first"}
    (lab / "00_machine.ipynb").write_text("run here")
    notebooks.copy_into(lab)
    assert names(lab) == {"00_machine.ipynb": "run here"}
    assert original.read_text() == "first"


def test_a_changed_notebook_is_copied_again_and_what_was_run_is_kept(original: Path, tmp_path: Path):
    lab = tmp_path / "lab"
    notebooks.copy_into(lab)
    original.write_text("second")
    notebooks.copy_into(lab)
    assert names(lab) == {"00_machine.ipynb": "second"}  # nothing was done in the first
    for count, text in enumerate(("third", "fourth"), 1):
        (lab / "00_machine.ipynb").write_text(f"run {count}")
        original.write_text(text)
        notebooks.copy_into(lab)
        assert names(lab)["00_machine.ipynb"] == text
        assert names(lab)[f"00_machine.old-{count}.ipynb"] == f"run {count}"


def test_a_copy_of_unknown_origin_is_kept(original: Path, tmp_path: Path):
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "00_machine.ipynb").write_text("somebody's")
    notebooks.copy_into(lab)
    assert names(lab) == {"00_machine.ipynb": "first", "00_machine.old-1.ipynb": "somebody's"}
