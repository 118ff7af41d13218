"""A kernel that is only written otherwise keeps its rows; one that launches something else does not."""

from dataclasses import replace
from types import SimpleNamespace

import kernels_for_tests
import pytest
import rows as made
import torch
import triton
import triton.language as tl

from labkit import paths, registry
from labkit.bench import records
from labkit.kernels.experts import choose as experts_choose
from labkit.kernels.gemv import choose as gemv_choose
from labkit.kernels.offline import offline
from labkit.workflow import archive, digests, recorded, same

GPU = SimpleNamespace(capability=90, name="NVIDIA made up 9")
THEN, NOW = "then", "now"  # what a variant launches, as a digest


@triton.jit
def _written_otherwise_kernel(x, y, n, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    places = first + tl.arange(0, BLOCK)
    what_is_copied = tl.load(x + places * STRIDE, mask=places < n)
    tl.store(y + places, what_is_copied, mask=places < n)


@triton.jit
def _twice_kernel(x, y, n, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i * STRIDE, mask=i < n), mask=i < n)


def digest(launch):
    with offline(90):
        return digests.digest_of(launch)


def test_names_and_lines_do_not_count():
    one = kernels_for_tests.copy()
    assert digest(one) == digest(replace(one, kernel=_written_otherwise_kernel))


@pytest.mark.parametrize(
    "other",
    [
        replace(kernels_for_tests.copy(), kernel=_twice_kernel),
        replace(kernels_for_tests.copy(), grid=(31,)),
        kernels_for_tests.copy(n=4095),
        kernels_for_tests.copy(stride=2),
        kernels_for_tests.copy(num_warps=2),
        kernels_for_tests.copy(dtype="float16"),
    ],
    ids=["code", "grid", "size", "stride", "warps", "dtype"],
)
def test_what_is_launched_counts(other):
    assert digest(kernels_for_tests.copy()) != digest(other)


@pytest.mark.parametrize("chooser", [experts_choose, gemv_choose], ids=["experts", "gemv"])
def test_tables_are_those_of_the_gpu_that_measured(chooser):
    name, device = "NVIDIA H200", torch.device("cpu")
    with digests.chosen_as_on(name):
        assert chooser._table(device) == chooser.choices_of(name)
    assert chooser._table(device) != chooser.choices_of(name)


@pytest.fixture
def old(monkeypatch, tmp_path):
    """A file in data/ whose rows are of an older tree, which launches what its variant's name says."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setattr(same, "_check_out", lambda revision, folder: None)
    monkeypatch.setattr(same, "version", lambda package: "3.6.0")
    monkeypatch.setattr(archive, "check_machine", lambda folder: GPU)
    path = tmp_path / "nvidia-made-up-9" / "state_layout.parquet"
    few = made.LAYOUT | {"batches": [1], "states": ["fp32"]}
    frame = made.make("state_layout", few, made.layout_us())
    records.write(path, frame.assign(kernel_sha=frame["variant"].str[::-1], triton="3.6.0"))
    return path


def answers(frame, now):
    """Both trees' answers: the older one's hash is the variant's name reversed; now: variant -> present digest."""
    present = dict(zip(frame["variant"], made_hashes(frame), strict=True))

    def found(tree, wanted, gpu):
        assert gpu is GPU
        if tree != paths.ROOT:
            return [(key[3][::-1], THEN if key[4] == key[3][::-1] else "") for key in wanted]
        return [(present[key[3]], now.get(key[3], THEN)) for key in wanted]

    return found


def a_gemv():
    """What names rows of one of ours: study, operation, case and variant."""
    study = registry.load("gemv_coalescing")
    case = next(one for one in study.cases(made.GEMV) if one.op == "gemv")
    return study.name, case.op, case.key, next(one.name for one in study.variants(case) if one.role == "ours")


def made_hashes(frame):
    keys = frame[["study", "op", "case", "variant"]].itertuples(index=False, name=None)
    return [recorded.present(*key) for key in keys]


def test_rows_that_launch_the_same_get_the_present_hash(old, monkeypatch):
    before = records.read(old)
    monkeypatch.setattr(same, "_answers", answers(before, {}))
    assert recorded.stale(before).all()
    assert same.restamp("1a2b3c4") == {old: (len(before), 0)}
    after = records.read(old)
    assert not recorded.stale(after).any()
    assert after.drop(columns="kernel_sha").equals(before.drop(columns="kernel_sha"))
    assert same.restamp("1a2b3c4") == {old: (0, 0)}  # nothing is left to do


def test_rows_that_launch_another_kernel_stay_stale(old, monkeypatch):
    before = records.read(old)
    changed = before["variant"].iloc[0]
    monkeypatch.setattr(same, "_answers", answers(before, {changed: NOW}))
    left = int((before["variant"] == changed).sum())
    assert same.restamp("1a2b3c4") == {old: (len(before) - left, left)}
    assert recorded.stale(records.read(old)).tolist() == (before["variant"] == changed).tolist()


def test_rows_of_another_triton_stay_stale(old, monkeypatch):
    before = records.read(old)
    records.write(old, before.assign(triton=before["triton"].where(before.index != 2, "3.7.1")))
    monkeypatch.setattr(same, "_answers", answers(before, {}))
    assert same.restamp("1a2b3c4") == {old: (len(before) - 1, 1)}
    monkeypatch.setattr(same, "version", lambda package: "3.5.0")
    with pytest.raises(ValueError, match=r"Triton is 3\.5\.0; allowed: that of rows of an earlier kernel, 3\.7\.1"):
        same.restamp("1a2b3c4")


def test_rows_of_a_third_tree_stay_stale(old, monkeypatch):
    before = records.read(old)
    records.write(old, before.assign(kernel_sha=before["kernel_sha"].where(before.index != 2, "0" * 12)))
    monkeypatch.setattr(same, "_answers", answers(before, {}))
    assert same.restamp("1a2b3c4") == {old: (len(before) - 1, 1)}
    assert records.read(old).loc[2, "kernel_sha"] == "0" * 12


def test_both_trees_are_asked_by_scripts_of_their_own(tmp_path):
    """This tree twice: a variant's answers are the same, and of another hash there is none."""
    key = a_gemv()
    sha = recorded.present(*key)
    first, second, third = same._answers(paths.ROOT, [(*key, ""), (*key, sha), (*key, "0" * 12)], GPU)
    assert first == second == (sha, first[1])
    assert first[1]
    assert third == (sha, "")


def test_a_launch_is_taken_apart_once(monkeypatch):
    taken, known = [], {}
    monkeypatch.setattr(digests, "digest_of", lambda launch: taken.append(launch) or "0")
    with offline(90):
        first, again = (digests.answer(*a_gemv(), "", known) for _ in range(2))
    assert first == again
    assert len(taken) == len(known) == 1


def test_a_tree_that_cannot_answer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot say what it launches: its process ended with 1"):
        same._answers(tmp_path, [("no", "study", "{}", "at all", "")], SimpleNamespace(capability=1, name=GPU.name))


def test_an_unknown_revision_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"revision is 'no-such'; allowed: a commit that git has"):
        same._check_out("no-such", tmp_path)


def test_a_revision_is_checked_out(tmp_path):
    same._check_out("HEAD", tmp_path)
    assert (tmp_path / "labkit" / "registry.py").read_bytes()
