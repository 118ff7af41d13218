"""Choices of autotuners: kept by the first measuring process, taken by the next, never by another kind of process."""

import json
from types import SimpleNamespace

import pytest

from labkit import paths
from labkit.bench import records
from labkit.sweep import tuning


class Tuner:
    """As Triton's, as far as this goes: it tries what is on offer, and remembers by key."""

    def __init__(self, name="kernel", configs=("a", "b", "c"), best="b"):
        self.base_fn = SimpleNamespace(__module__="library", __qualname__=name)
        self.configs, self.best, self.cache, self.tried = list(configs), best, {}, []

    def prune_configs(self, kwargs):
        return self.configs

    def run(self, key="k"):
        if key not in self.cache:
            self.tried = self.prune_configs({})
            self.cache[key] = self.best if self.best in self.tried else self.tried[0]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    path = tmp_path / "runs" / "gpu" / "study.tuning.json"
    tuning.keep_in(path)
    yield path
    tuning.keep_in(None)


def chosen(case="case", **options):
    tuner = Tuner(**options)
    tuning.choose([tuner], case, tuner.run)
    return tuner


def test_the_next_process_tries_only_what_the_first_has_chosen(file):
    assert chosen().tried == ["a", "b", "c"]
    other = chosen(best="c")  # noise would have it choose another
    assert (other.tried, other.cache) == (["b"], {"k": "b"})
    assert other.prune_configs({}) == ["a", "b", "c"]  # of the next case all are tried again


def test_each_case_and_each_kernel_has_its_own(file):
    chosen()
    assert chosen(case="other", best="c").cache == {"k": "c"}
    assert chosen(name="another", best="a").cache == {"k": "a"}
    assert len(json.loads(file.read_text())) == 2


def test_another_kernel_of_the_same_case_takes_no_choice_away(file):
    """A library's layer calls one kernel or another, of the same module, by what is asked of it."""
    chosen()
    chosen(name="another", best="a")
    assert chosen(best="c").cache == {"k": "b"}


def test_what_is_no_longer_on_offer_is_chosen_anew(file):
    chosen()
    assert chosen(configs=("a", "c"), best="c").cache == {"k": "c"}


def test_another_version_of_triton_chooses_anew(file, monkeypatch):
    chosen()
    monkeypatch.setitem(__import__("sys").modules, "triton", SimpleNamespace(__version__="99"))
    assert chosen(best="c").cache == {"k": "c"}


def test_a_kernel_that_chose_for_several_keys_is_not_kept(file):
    tuner = Tuner()
    tuning.choose([tuner], "case", lambda: [tuner.run(key) for key in ("k", "l")])
    assert list(json.loads(file.read_text()).values()) == [{}]


def test_another_run_takes_what_is_recorded_of_this_gpu_and_its_own_choices_before_that(file, tmp_path):
    chosen()
    recorded = paths.recorded(file)
    recorded.parent.mkdir(parents=True)
    file.rename(recorded)
    before = recorded.read_bytes()
    assert chosen(best="c").tried == ["b"]
    assert chosen(case="other", best="c").cache == {"k": "c"}
    assert recorded.read_bytes() == before
    assert json.loads(file.read_text()).keys() != json.loads(before).keys()  # with what is new
    file.write_text(file.read_text().replace('"b"', '"a"'))
    assert chosen(best="c").cache == {"k": "a"}
    tuning.keep_in(tmp_path / "runs" / "another" / file.name)
    assert chosen(best="c").cache == {"k": "c"}


def test_a_process_that_only_compiles_takes_choices_and_keeps_none(file):
    chosen()
    before = file.read_bytes()
    tuning.take_from(file)
    assert chosen(best="c").cache == {"k": "b"}
    assert chosen(case="other", best="c").cache == {"k": "c"}
    assert file.read_bytes() == before


def test_another_version_of_a_library_chooses_anew(file, monkeypatch):
    monkeypatch.setattr(tuning.metadata, "packages_distributions", lambda: {"library": ["the-library", "the-library"]})
    for version, best in (("1", "b"), ("2", "c"), ("1", "b")):
        monkeypatch.setattr(tuning.metadata, "version", lambda name, version=version: version)
        tuning._version.cache_clear()
        assert chosen(best="c" if version == "2" else "b").cache == {"k": best}
    tuning._version.cache_clear()
    assert {name for case in json.loads(file.read_text()).values() for name in case} == {
        "library.kernel 1", "library.kernel 2",
    }  # fmt: skip


def test_outside_a_measuring_process_nothing_is_kept_or_taken(file):
    chosen()
    before = file.read_bytes()
    tuning.keep_in(None)
    assert chosen(best="c").cache == {"k": "c"}
    assert file.read_bytes() == before


def test_a_damaged_file_is_as_none(file):
    records.write_atomic(file, b"[")
    assert chosen(best="c").cache == {"k": "c"}
    assert json.loads(file.read_text())


def test_a_call_that_fails_keeps_nothing_and_leaves_the_tuner_as_it_was(file):
    chosen()
    before, tuner = file.read_bytes(), Tuner()
    with pytest.raises(ZeroDivisionError):
        tuning.choose([tuner], "case", lambda: 1 / 0)
    assert file.read_bytes() == before
    assert tuner.prune_configs({}) == ["a", "b", "c"]
