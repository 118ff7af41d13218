"""A lab of two toy studies in a folder of its own, for the tests of the command and of what it does."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import labkit
import labkit.studies
from labkit import cli, paths, registry
from labkit.workflow import lease, recorded

CODE = Path(labkit.__file__).resolve().parents[1]
NOTEBOOKS = {"ground": "00_ground", "layers": "01_layers"}
GPU, SLUG = "NVIDIA Made-Up 9", "nvidia-made-up-9"
FACT = {  # of a launch, as evidence/predict.py takes them
    "kernel": "k", "code": "00", "limit": "read", "programs": 1000.0, "warps": 4.0, "per_sm": 4.0, "bytes": 1e8,
    "l2_bytes": 1e8, "instructions": 1e7, "lines": 1e6, "mma_flops": 0.0, "wgmma_flops": 0.0, "rounds": 3.0,
    "dependent": False,
}  # fmt: skip
KINDS = ("read", "in_place", "copy", "bf16")  # of ceilings

PARAMETERS = """\
source: str = "auto"  # auto, measure or recorded
gpu: str = ""  # recorded GPU to show
processes: int = 3  # independent processes
"""
MORE = """\
batches: list[int] = [1, 8]  # sequences in the batch
states: list[str] = ["fp32"]  # dtype of the state
scale: float = 1.0  # a number
deep: bool = False  # a switch
label: str = "x"  # a text
"""
ONLY_GROUND = """\
sizes: list[int] = [1, 2]  # MiB
"""

STUDY = """
from labkit.bench.claim import OWN, Claim, Observation, Observed
from labkit.bench.spec import Case, Floor, Study, Variant, integer, list_of, one_of

def launch():
    return 1

def cases(parameters):
    return [Case("op", {"n": n}) for n in (1, 2)]

def variants(case):
    return [Variant(name, "ours", "labkit.studies.NAME.study:launch", None) for name in ("a", "b")]

def mean(rows):
    us = sum(map(sum, rows["samples_ns"])) / 1e3
    return Observed(OWN, [Observation("all", us, us, us, 0.0, 3)], "rows")

def broken(rows):
    raise RuntimeError("this claim cannot be judged")

STUDY = Study(
    name="NAME", title="Title of NAME", summary="Summary of NAME.", cases=cases, variants=variants,
    control=lambda case: "a", floor=lambda case: Floor(1),
    claims=CLAIMS,
    parameters=RULES,
)
"""
CLAIMS = """(
    Claim("fine", "Source 1", "https://example.org/1", "It is fast", "any GPU", "7 %", "2025-11-20", "µs of all",
          observe=mean, neutral=0.5),
    Claim("odd", "Source 2", "https://example.org/2", "It is odd", "any GPU", "8 %", "2025-11-20", observe=broken),
)"""
RULES = """{
    "batches": list_of(integer(1, 64)), "states": list_of(one_of("fp32", "bf16")), "scale": lambda value: None,
    "deep": one_of(True, False), "label": lambda value: None,
}"""
ONLY_GROUND_RULES = '{"sizes": list_of(integer(1, 64))}'

DRIVER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell has it ignored
import labkit.studies
labkit.studies.__path__.append(os.path.join(os.environ["LABKIT_ROOT"], "toys"))
from labkit import registry
registry.NOTEBOOKS.clear()
registry.NOTEBOOKS.update(NOTEBOOKS)
if os.environ.get("TOY_MEASURES"):
    from labkit.workflow import notebooks
    notebooks.why_not_measure, notebooks.FIRST = lambda: "", "ground"
if os.environ.get("TOY_LIGHT"):
    import light
    light.enter()
from labkit.cli import main
main(prog_name="labkit")
"""

NVML = """
import os
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return int(os.environ.get("TOY_GPUS", "1"))
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetUUID(handle): return f"GPU-toy-{handle}"
def nvmlDeviceGetName(handle): return "NVIDIA Made-Up 9"
def nvmlSystemGetDriverVersion(): return "1.2"
"""


class Toy:
    """The toy lab in `root`. Its studies are called `ground` and `layers`."""

    def __init__(self, root: Path):
        self.root = root
        for name, rules, claims in (("ground", ONLY_GROUND_RULES, "()"), ("layers", RULES, CLAIMS)):
            text = STUDY.replace("NAME", name).replace("RULES", rules).replace("CLAIMS", claims)
            self.write(f"toys/{name}/study.py", text)
            self.write(f"toys/{name}/__init__.py", "")
        self.write("driver.py", DRIVER.replace("NOTEBOOKS)", f"{NOTEBOOKS!r})"))
        self.write("nvml/pynvml.py", NVML)
        self.notebook("ground", "print(sizes)", parameters=PARAMETERS + ONLY_GROUND)
        self.notebook("layers", "print(batches)", parameters=PARAMETERS + MORE)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def notebook(self, study: str, *code: str, parameters: str | None = None) -> None:
        """(Re)write a notebook; its parameters stay if none are given."""
        from nbformat import v4  # here: all tests import this module, and few of them write notebooks

        path = self.root / "notebooks" / f"{NOTEBOOKS[study]}.ipynb"
        if parameters is None:
            parameters = "".join(json.loads(path.read_text())["cells"][1]["source"])
        cells = [
            v4.new_markdown_cell(f"# Title of {study}"),
            v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
            *(v4.new_code_cell(textwrap.dedent(source)) for source in code),
        ]
        kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
        book = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
        self.write(f"notebooks/{NOTEBOOKS[study]}.ipynb", json.dumps(book))

    def executed(self, study: str, part: str = "") -> str:
        """Text of an executed notebook. part: what its name ends with, of a run that shows a part."""
        return (self.root / "reports" / "notebooks" / f"{NOTEBOOKS[study]}{part}.ipynb").read_text()

    def printed(self, study: str, part: str = "") -> list[str]:
        """What the cells of an executed notebook printed to standard output, line by line."""
        outputs = [o for cell in json.loads(self.executed(study, part))["cells"] for o in cell.get("outputs", [])]
        text = "".join("".join(o["text"]) for o in outputs if o.get("name") == "stdout")
        return text.splitlines()

    def start(self, *words: str, gpu: bool = False, cwd: Path | None = None, **env: str) -> subprocess.Popen:
        """Start `labkit WORDS` in this lab, as its own process group."""
        return self.started([sys.executable, str(self.root / "driver.py"), *words], gpu=gpu, cwd=cwd, **env)

    def started(
        self, command: Sequence[str], gpu: bool = False, cwd: Path | None = None, **env: str
    ) -> subprocess.Popen:
        """Start a command with the environment of this lab, as its own process group."""
        folders = [str(CODE), *([str(self.root / "nvml")] if gpu else [])]
        folders += [str(CODE / "tests")] if "TOY_LIGHT" in env else []
        env |= {"LABKIT_ROOT": str(self.root), "PYTHONPATH": os.pathsep.join(folders), "TMPDIR": str(self.tmp())}
        env |= {lease.LOCKS: str(self.tmp() / "gpus")}
        env |= {"TOY_MEASURES": "1"} if gpu else {}
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=cwd or self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def labkit(self, *words: str, **options: Any) -> subprocess.CompletedProcess:
        """Run `labkit WORDS` to its end."""
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=180)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def command(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
        """`labkit WORDS` in this process, which has entered the lab: no less of the command, without its start."""
        with contextlib.chdir(cwd or self.root):
            done = CliRunner().invoke(cli.main, words, env=env, prog_name="labkit", catch_exceptions=False)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    def tmp(self) -> Path:
        (self.root / "tmp").mkdir(exist_ok=True)
        return self.root / "tmp"

    def rows(self, study: str = "layers", ns: Sequence[int] = (1000, 1100), **changes: Any) -> list[dict[str, Any]]:
        """Rows as a sweep makes them, of every case and variant, with the present kernel."""
        from labkit.bench.sha import kernel_sha
        from labkit.sweep import run

        declared = registry.load(study)
        return [
            row(study, case.op, case.key, variant.name, variant.role, kernel_sha(variant.source), ns) | changes
            for case in declared.cases({})
            for variant in run.with_control(declared, case)
        ]

    def measured(self, rows: Sequence[Mapping[str, Any]], base: str = "runs", gpu: str = SLUG) -> Path:
        """Write rows, and the machine, as a sweep leaves them. Returns the GPU's folder."""
        from labkit.bench import records

        folder = self.root / base / gpu
        records.write(folder / f"{rows[0]['study']}.parquet", list(rows))
        self.write(f"{base}/{gpu}/machine.json", json.dumps(MACHINE))
        return folder

    def ceilings(self, base: str = "data", gpu: str = SLUG, us: float = 1.0, kinds: Sequence[str] = KINDS) -> Path:
        """Write what `00_machine` finds on a GPU. us: of a launch, and of each 10 MB. Returns the file."""
        from labkit.bench import records

        rows = []
        for what, cache in [(kind, cache) for kind in kinds for cache in ("cold", "hot")]:
            for size in (10_000_000, 1_000_000_000):
                ns = [round(1e3 * us * (1 + size / 1e7))]
                one = row("machine", "ceiling", json.dumps({"what": what, "mib": size}), "a", "ceiling", "0" * 12, ns)
                rows.append(one | {"cache": cache, "floor_bytes": size, "floor_flops": 1000 * size})
        rows.append(
            row("machine", "launch", json.dumps({"what": "empty"}), "a", "ceiling", "0" * 12, [round(1e3 * us)])
        )
        path = self.root / base / gpu / "machine.parquet"
        records.write(path, rows)
        self.write(f"{base}/{gpu}/machine.json", json.dumps(MACHINE))
        return path

    def facts(self, path: Path, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Write facts of launches of some rows (default: of all of `rows`), one launch each, all the same."""
        import pandas as pd

        from labkit.evidence import predict

        keys = pd.DataFrame(self.rows() if rows is None else rows)[list(predict.KEY)]
        keys.assign(gpu=SLUG, place=0, **FACT).to_parquet(path)

    def enter(self, monkeypatch: Any) -> None:
        """Make this process use the lab, as it is now: another test may have had a toy whose kernels were changed."""
        recorded.forget()
        monkeypatch.setattr(labkit.studies, "__path__", [*labkit.studies.__path__, str(self.root / "toys")])
        for module in (f"labkit.studies.{name}{rest}" for name in NOTEBOOKS for rest in ("", ".study", ".answer")):
            monkeypatch.delitem(sys.modules, module, raising=False)  # of another toy lab
        monkeypatch.setattr(registry, "NOTEBOOKS", dict(NOTEBOOKS))
        for name in ("NOTEBOOKS", "DATA", "FIGURES", "RUNS", "REPORTS", "TABLES", "CACHE"):
            folder = getattr(paths, name).relative_to(paths.ROOT)
            monkeypatch.setattr(paths, name, self.root / folder)
        monkeypatch.setattr(paths, "ROOT", self.root)
        monkeypatch.setenv("LABKIT_ROOT", str(self.root))  # for the processes that this one starts


MACHINE = {
    "slug": SLUG,
    "name": GPU,
    "driver": "1.2",
    "capability": 90,
    "sms": 132,
    "l2_bytes": 50 << 20,
    "memory_bytes": 80 << 30,
    "datasheet_tbs": 3.3,
    "sm_mhz": 1980,
    "power_w": 700,
}


def row(study: str, op: str, case: str, variant: str, role: str, sha: str, ns: Sequence[int]) -> dict[str, Any]:
    """One row with everything that the schema wants."""
    count = len(ns)
    return {
        "study": study,
        "op": op,
        "case": case,
        "variant": variant,
        "options": "{}",
        "role": role,
        "cache": "cold",
        "mode": "graph",
        "run": [*range(count - 1), 2],  # the last sample is of the third process
        "block": list(range(count)),
        "samples_ns": list(ns),
        "calls_per_sample": 1,
        "throttled": [""] * count,
        "sm_mhz": [1980] * count,
        "floor_bytes": 1,
        "floor_flops": 0,
        "ceiling": 3.0,
        "predicted_us": 1.0,
        "error": 0.0,
        "ok": True,
        "reason": "",
        "evidence": "{}",
        "counters": "{}",
        "rules": "{}",
        "kernel_sha": sha,
        "gpu": GPU,
        "driver": "1.2",
        "cuda": "13.0",
        "torch": "2.13.0",
        "triton": "3.7.1",
        "labkit": "0.1.0",
        "revision": "abc",
        "utc": "2025-11-21T10:00:00+00:00",
        "seed": 1000,
    }
