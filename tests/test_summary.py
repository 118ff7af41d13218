"""What `labkit list` keeps of the data files: it is right, and made anew when a file or a source changes."""

import os
import subprocess
import sys

import pytest
import toy_lab

from labkit import paths
from labkit.workflow import recorded, store, summary


@pytest.fixture
def toy(tmp_path, monkeypatch):
    lab = toy_lab.Toy(tmp_path)
    lab.enter(monkeypatch)
    store._sources.cache_clear()
    yield lab
    store._sources.cache_clear()


def test_it_is_what_the_rows_say(toy):
    toy.measured(toy.rows())
    [found] = summary.summaries("layers")
    assert (found.gpu, found.here, found.rows, found.stale) == (toy_lab.SLUG, True, 6, 0)
    assert found.days == tuple(sorted({row["utc"][:10] for row in toy.rows()}))


def test_it_is_kept_and_read_anew_when_the_file_changes(toy, monkeypatch):
    toy.measured(toy.rows())
    first = summary.summaries("layers")
    read = []
    real = recorded.read
    monkeypatch.setattr(recorded, "read", lambda path: (read.append(path), real(path))[1])
    assert summary.summaries("layers") == first
    assert not read
    toy.measured(toy.rows(kernel_sha="0" * 12))
    [now] = summary.summaries("layers")
    assert (now.stale, len(read)) == (6, 1)


def test_an_edit_of_a_source_asks_anew(toy):
    toy.measured(toy.rows())
    assert summary.summaries("layers")[0].stale == 0
    study = next(path for path in toy.root.rglob("layers/study.py"))
    text = study.read_text()
    study.write_text(text.replace("return 1", "return 2"))
    recorded.forget()
    assert summary.summaries("layers")[0].stale == 6


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["list", "gemv_coalescing.step"],
        ["run", "state_layuot"],
        ["doctor", "--completion", "bash"],
    ],
)
def test_commands_that_only_say_something_load_neither_torch_nor_pandas(words):
    """They answer at once; what `list` says of the rows is kept."""
    script = (
        "import sys; sys.argv = ['labkit', *sys.argv[1:]]\n"
        "from labkit.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'pandas', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, *words]
    env = os.environ | {"LABKIT_ROOT": str(paths.ROOT)}
    subprocess.run(command, env=env, capture_output=True, check=True)  # so that it is kept
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
