"""From runs/ into data/: what is refused, what is merged, and archives from elsewhere."""

import dataclasses
import io
import json
import os
import re
import shutil
import tarfile
import zipfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_lab import GPU, MACHINE, SLUG, Toy

from labkit import paths, registry
from labkit.bench import records, spec
from labkit.bench.records import RecordError
from labkit.sweep import tuning
from labkit.workflow import archive, quick, recorded


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = Toy(tmp_path)
    found.enter(monkeypatch)
    return found


def data(toy):
    return records.read(toy.root / "data" / SLUG / "layers.parquet")


def test_what_was_measured_here_is_promoted_whole(toy):
    rows = toy.rows()
    toy.measured(rows)
    report = archive.promote()
    assert report.promoted == {(SLUG, "layers"): (2, 6)}
    assert report.left == []
    assert len(data(toy)) == len(rows) == 6
    assert json.loads((toy.root / "data" / SLUG / "machine.json").read_text()) == MACHINE
    assert (toy.root / "data" / "README.md").read_text() == archive.readme()


def test_what_follows_from_early_cases_is_made_anew_from_what_is_recorded(toy, monkeypatch):
    toy.measured(toy.rows())
    settled = []

    def note(rows, folder):
        assert rows.exists()
        settled.append((rows, folder))

    load = registry.load
    monkeypatch.setattr(registry, "load", lambda name: dataclasses.replace(load(name), settle=note))
    archive.promote()
    assert settled == [(paths.DATA / SLUG / "layers.parquet", paths.TABLES / SLUG)]


def test_promoting_twice_changes_nothing(toy):
    toy.measured(toy.rows())
    archive.promote()
    before = data(toy)
    archive.promote()
    pd.testing.assert_frame_equal(data(toy), before)


def test_a_case_is_replaced_whole_and_others_stay(toy):
    toy.measured(toy.rows())
    archive.promote()
    second = [row | {"driver": "2.0", "samples_ns": [5, 6]} for row in toy.rows() if '"n": 2' in row["case"]]
    toy.measured(second)
    assert archive.promote().promoted == {(SLUG, "layers"): (1, 3)}
    drivers = data(toy).groupby("case")["driver"].unique().map(list).to_dict()
    assert drivers == {'{"n": 1}': ["1.2"], '{"n": 2}': ["2.0"]}


def test_what_a_quick_look_leaves_out_keeps_its_cases_from_data(toy, monkeypatch):
    """Whether data/ has them or not; a case that lacks anything else is an error."""
    monkeypatch.setattr(quick, "of", lambda study: spec.leaving_out(study, ["b"]))
    looked = [row for row in toy.rows() if row["variant"] != "b" or row["case"] != '{"n": 1}']
    toy.measured(looked)
    report = archive.promote()
    assert report.left == [f"{SLUG}/layers.parquet: 1 cases that a quick look measured in part"]
    assert report.promoted == {(SLUG, "layers"): (1, 3)}
    toy.measured([row for row in looked if row["case"] == '{"n": 1}'])
    assert archive.promote().promoted == {}
    toy.measured([row for row in toy.rows() if row["variant"] != "a"])
    with pytest.raises(RecordError, match="not complete, 'a' is missing"):
        archive.promote()


def test_a_quick_look_replaces_no_full_run(toy):
    toy.measured(toy.rows())
    archive.promote()
    before = data(toy)
    once = [row | {"run": [0] * len(row["run"])} for row in toy.rows()]
    toy.measured(once)
    report = archive.promote()
    assert report.left == [f"{SLUG}/layers.parquet: 2 cases that data/ has of more processes"]
    pd.testing.assert_frame_equal(data(toy), before)
    other = pd.DataFrame([row | {"kernel_sha": "of others"} for row in once])
    assert archive._of_fewer_processes(before, other) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel_sha": "0" * 12}, "column kernel_sha, row 1 .*'000000000000' is not that of the present kernel"),
        ({"variant": "c"}, "column kernel_sha, row 1 "),
        ({"study": "ground"}, "column study, row 1 .*'ground' is not 'layers'"),
        ({"gpu": "NVIDIA Other"}, "column gpu, row 1 .*'NVIDIA Other' is not 'NVIDIA Made-Up 9'"),
        ({"role": "best"}, "column role, row 1 .*is not one of ours"),
        ({"cache": "warm"}, "column cache, row 1 .*is not one of cold, hot"),
        ({"mode": "fast"}, "column mode, row 1 .*is not one of graph, eager"),
        ({"driver": ""}, "column driver, row 1 .*the interpreter is never timed"),
        ({"cuda": ""}, "column cuda, row 1 .*the interpreter is never timed"),
        ({"cuda": None}, "column cuda has no value in some rows"),
        ({"samples_ns": [0, 5]}, r"column samples_ns, row 1 .*\[0, 5\] has no time"),
        ({"driver": "9.9"}, r"column driver, op \{\"n\": 1\}: rows of several runs \(1.2, 9.9\)"),
        ({"variant": "a"}, "column variant, row 1 .*'a' is there twice"),
    ],
)
def test_a_row_that_must_not_be_recorded_is_named(toy, changes, message):
    rows = toy.rows()
    rows[1] |= changes
    toy.measured(rows)
    with pytest.raises(RecordError, match=rf"runs: {SLUG}/layers\.parquet: {message}"):
        archive.promote()
    assert not paths.DATA.exists()


def test_a_case_with_a_variant_missing_is_refused(toy):
    toy.measured(toy.rows()[1:])
    with pytest.raises(RecordError, match=r'column variant, op \{"n": 1\}: not complete, \'a\' is missing'):
        archive.promote()


def test_a_row_that_failed_needs_no_samples(toy):
    rows = toy.rows()
    empty = {"run": [], "block": [], "samples_ns": [], "throttled": [], "sm_mhz": []}
    rows[0] |= {"ok": False, "reason": "out of memory", **empty}
    toy.measured(rows)
    archive.promote()
    assert data(toy)["ok"].sum() == 5


def test_one_bad_file_keeps_the_good_ones_out_too(toy):
    toy.measured(toy.rows())
    (toy.root / "runs" / SLUG / "zzz.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(RecordError, match=r"zzz\.parquet: not a readable Parquet file"):
        archive.promote()
    assert not paths.DATA.exists()


def test_a_file_of_an_unknown_study_is_refused(toy):
    folder = toy.measured(toy.rows())
    os.rename(folder / "layers.parquet", folder / "others.parquet")
    with pytest.raises(RecordError, match="no study 'others' in this tree; it has: ground, layers"):
        archive.promote()


def test_an_older_schema_is_refused(toy):
    folder = toy.measured(toy.rows())
    frame = pd.read_parquet(folder / "layers.parquet").drop(columns="sm_mhz")
    frame.to_parquet(folder / "layers.parquet")
    with pytest.raises(RecordError, match=r"layers\.parquet"):
        archive.promote()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"machine\.json: missing"),
        ("[]", r"machine\.json: missing, or not the description"),
        ('{"slug": "x", "name": "y"}', r"machine\.json: missing, or not the description"),
        (json.dumps(MACHINE | {"name": "NVIDIA Other"}), "describes 'NVIDIA Other'"),
        (json.dumps(MACHINE | {"name": "NVIDIA Other", "slug": "nvidia-other"}), f"but the folder is '{SLUG}'"),
        (json.dumps(MACHINE | {"name": 3}), "describes 3"),
    ],
)
def test_the_machine_must_be_the_one_of_the_folder(toy, content, message):
    folder = toy.measured(toy.rows())
    (folder / "machine.json").unlink()
    if content is not None:
        (folder / "machine.json").write_text(content)
    with pytest.raises(RecordError, match=message):
        archive.promote()


def test_an_unfinished_sweep_is_named_and_its_finished_cases_are_promoted(toy):
    folder = toy.measured(toy.rows())
    journal = records.Journal(folder / "layers.journal.jsonl")
    journal.append({"case": ["op", '{"n": 7}'], "run": 0, "rows": []})
    journal.append({"case": ["op", '{"n": 8}'], "run": 0})
    report = archive.promote()
    assert report.promoted == {(SLUG, "layers"): (2, 6)}
    (left,) = report.left
    assert left.startswith(f"{SLUG}/layers: 2 cases of a sweep that has not finished")
    assert journal.path.exists()


def test_nothing_measured_is_an_error(toy):
    with pytest.raises(RecordError, match="holds no measurements"):
        archive.promote()
    with pytest.raises(RecordError, match="nothing has been measured"):
        archive.pack(toy.root / "out.tar.gz")


# Archives


@pytest.mark.parametrize("name", ["out.tar", "out.tar.gz", "out.tgz", "out.zip"])
def test_packed_there_and_promoted_here(toy, name):
    folder = toy.measured(toy.rows())
    out = toy.root / name
    assert archive.pack(out) == 2
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert archive.promote(out).promoted == {(SLUG, "layers"): (2, 6)}
    assert len(data(toy)) == 6


def test_choices_of_others_come_along_and_are_merged_case_by_case(toy):
    name = f"layers{tuning.ENDING}"
    folder, data_folder, out = toy.measured(toy.rows()), paths.DATA / SLUG, toy.root / "out.tar"
    (folder / name).write_text(json.dumps({"new": {"a": 1}, "both": {"b": "new"}}))
    (folder / "a-1.0-b-2.tuning.json").write_text("{}")
    data_folder.mkdir(parents=True, exist_ok=True)
    (data_folder / name).write_text(json.dumps({"old": {"c": 1}, "both": {"b": "old", "d": 2}}))
    merged = {"new": {"a": 1}, "old": {"c": 1}, "both": {"b": "new", "d": 2}}
    assert archive.pack(out) == 4
    archive.promote(out)
    assert json.loads((data_folder / name).read_text()) == merged
    assert json.loads((data_folder / "a-1.0-b-2.tuning.json").read_text()) == {}
    (folder / name).write_text(json.dumps({"old": {"c": 2}}))
    archive.gather(out)
    assert json.loads((folder / name).read_text()) == {"new": {"a": 1}, "both": {"b": "new"}, "old": {"c": 2}}


@pytest.mark.parametrize("text", ["[", "[]", '{"case": "choice"}'])
def test_what_are_no_choices_of_others_is_refused(toy, text):
    folder = toy.measured(toy.rows())
    (folder / f"layers{tuning.ENDING}").write_text(text)
    with pytest.raises(
        RecordError, match=r"layers\.tuning\.json: not (JSON|choices of autotuners; allowed: an object)"
    ):
        archive.promote()
    assert not (toy.root / "data" / SLUG / "layers.parquet").exists()


def test_a_folder_from_elsewhere_in_each_of_its_forms(toy):
    folder = toy.measured(toy.rows(), base="elsewhere/runs")
    for source in (folder, folder.parent, folder.parents[1]):
        assert archive.promote(source).promoted == {(SLUG, "layers"): (2, 6)}


def test_another_ending_is_refused_when_packing(toy):
    toy.measured(toy.rows())
    with pytest.raises(ValueError, match=r"must end in \.tar, \.tar\.gz, \.tgz, \.zip"):
        archive.pack(toy.root / "out.7z")


def test_the_archive_may_hold_other_things_and_other_prefixes(toy):
    folder = toy.measured(toy.rows())
    for prefix in ("", "./", "runs/", "./runs/", "some/where/runs/"):
        out = toy.root / "other.tar"
        with tarfile.open(out, "w") as file:
            for path in folder.iterdir():
                file.add(path, f"{prefix}{SLUG}/{path.name}")
            file.add(toy.root / "driver.py", "labkit/cli.py")
            file.add(toy.root / "driver.py", f"data/{SLUG}/layers.parquet")  # what was recorded there is not measured
        assert archive.promote(out).promoted == {(SLUG, "layers"): (2, 6)}


def evil(kind):
    """A tar member that leads out of the folder it is unpacked to."""
    names = {"up": f"../../{SLUG}/layers.parquet", "absolute": f"/tmp/runs/{SLUG}/x.parquet"}
    member = tarfile.TarInfo(names.get(kind, f"runs/{SLUG}/layers.parquet"))
    if kind in ("symlink", "hardlink"):
        member.type = tarfile.SYMTYPE if kind == "symlink" else tarfile.LNKTYPE
        member.linkname = "/etc/passwd"
    if kind == "fifo":
        member.type = tarfile.FIFOTYPE
    return member


@pytest.mark.parametrize("kind", ["up", "absolute", "symlink", "hardlink", "fifo"])
def test_members_that_lead_elsewhere_are_refused_by_name(toy, kind):
    out, member, folder = toy.root / "evil.tar", evil(kind), toy.measured(toy.rows())
    with tarfile.open(out, "w") as file:
        file.add(folder / "machine.json", f"runs/{SLUG}/machine.json")  # beside what may be taken
        file.addfile(member, io.BytesIO())
    why = "leads out of the archive" if kind in ("up", "absolute") else "is no file and no folder"
    with pytest.raises(RecordError, match=f"{re.escape(member.name)} {why}; not unpacked"):
        archive.promote(out)
    assert not paths.DATA.exists()


def test_an_archive_that_is_too_large_is_not_unpacked(toy, monkeypatch):
    toy.measured(toy.rows())
    archive.pack(toy.root / "out.tar.gz")
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with pytest.raises(RecordError, match="not unpacked"):
        archive.promote(toy.root / "out.tar.gz")
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 30)
    monkeypatch.setattr(archive, "MAX_MEMBERS", 1)
    with pytest.raises(RecordError, match="more than 1 members"):
        archive.promote(toy.root / "out.tar.gz")


def test_a_file_of_rows_that_would_fill_the_memory_is_not_read(toy):
    """A few bytes a group of equal rows, as many as memory has room for."""
    folder = toy.measured(toy.rows())
    file = folder / "layers.parquet"
    table = pq.read_table(file)
    many = pa.concat_tables([table] * (records.MAX_ROWS // len(table) + 1))
    pq.write_table(many.replace_schema_metadata(table.schema.metadata), file)
    assert file.stat().st_size < 5 << 20
    with tarfile.open(toy.root / "bomb.tar.gz", "w:gz") as out:
        out.add(folder, f"runs/{SLUG}")
    with pytest.raises(RecordError, match=rf"layers.parquet: {len(many)} rows; at most {records.MAX_ROWS}"):
        archive.promote(toy.root / "bomb.tar.gz")
    assert not paths.DATA.exists()


def test_a_member_that_is_there_twice_is_refused(toy):
    folder = toy.measured(toy.rows())
    with zipfile.ZipFile(toy.root / "out.zip", "w") as file:
        for name in (f"runs/{SLUG}/layers.parquet", f"{SLUG}/layers.parquet"):
            file.write(folder / "layers.parquet", name)
    with pytest.raises(RecordError, match="twice"):
        archive.promote(toy.root / "out.zip")


@pytest.mark.parametrize("name", ["out.tar.gz", "out.zip", "out.tar"])
def test_an_archive_cut_off_anywhere_promotes_nothing_or_says_so(toy, name):
    folder = toy.measured(toy.rows())
    archive.pack(toy.root / name)
    content = (toy.root / name).read_bytes()
    (folder / "layers.parquet").unlink()
    for end in (0, 1, 100, len(content) // 2, len(content) - 4):
        (toy.root / name).write_bytes(content[:end])
        if name == "out.tar" and end == len(content) - 4:
            continue  # only padding is missing
        with pytest.raises(RecordError, match=name):
            archive.promote(toy.root / name)
        assert not paths.DATA.exists()


@pytest.mark.parametrize("name", ["out.tar.gz", "out.zip"])
def test_a_damaged_archive_promotes_nothing_wrong(toy, name):
    folder = toy.measured(toy.rows())
    expected = records.read(folder / "layers.parquet")
    archive.pack(toy.root / name)
    content = (toy.root / name).read_bytes()
    refused = 0
    for at in range(0, len(content), len(content) // 20):
        (toy.root / name).write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        shutil.rmtree(paths.DATA, ignore_errors=True)
        try:
            archive.promote(toy.root / name)
        except RecordError:
            refused += 1
        else:  # a date, or the like
            pd.testing.assert_frame_equal(data(toy), archive.records.merge(None, expected))
    assert refused >= 15


# Staleness and claims


def test_rows_of_an_earlier_kernel_or_of_an_unknown_case_are_stale(toy):
    frame = pd.DataFrame(toy.rows())
    assert not recorded.stale(frame).any()
    frame.loc[0, "kernel_sha"] = "0" * 12
    frame.loc[2, "variant"] = "gone"
    frame.loc[3, "case"] = "no JSON"
    assert recorded.stale(frame).tolist() == [True, False, True, True, False, False]


def test_the_page_of_the_data_explains_every_column():
    text = archive.readme()
    for name, _, meaning in records.COLUMNS:
        assert f"| `{name}` |" in text
        assert meaning in text


def test_the_committed_page_of_the_data_is_current():
    assert (paths.DATA / "README.md").read_text() == archive.readme(), "run `labkit record`, which writes it"


def test_the_machine_of_the_tests_is_one():
    assert archive.slug(GPU) == SLUG
