"""The command `labkit`. Heavy modules are imported by the commands that need them: help and completion are fast."""

import json
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from labkit import __version__, paths, registry
from labkit.bench import spec
from labkit.workflow import nearest

if TYPE_CHECKING:
    from labkit.workflow.estimate import Estimate
    from labkit.workflow.jobs import Job

OK, FAILED = 0, 1  # click itself exits with 2 on a UsageError
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM

EXIT_CODES = """\b
Exit codes:
  0    all went well
  1    a notebook or a measurement failed, data cannot be used, or rows are stale
  2    wrong usage: nothing was run
  130  interrupted (Ctrl-C); 143 terminated. What was measured is kept."""


class StudyName(click.ParamType):
    """A study, by name, notebook or number."""

    name = "study"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if (found := nearest.study(value)) is None:
            known = ", ".join(f"{name} ({notebook})" for name, notebook in registry.NOTEBOOKS.items())
            self.fail(
                f"unknown study {value!r}; the studies: {known}{nearest.meant(value, registry.NOTEBOOKS)}", param, ctx
            )
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in registry.NOTEBOOKS if name.startswith(incomplete)]


class GpuName(click.ParamType):
    """A recorded GPU, by its folder's name in data/, or one that can be predicted; a beginning of it does ("h100")."""

    name = "gpu"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from labkit.workflow import gpus

        known, others = paths.recorded_gpus(), gpus.predictable()
        names = dict.fromkeys((*known, *others))
        if found := nearest.begun(value, names) or nearest.begun(f"nvidia-{value.lower()}", names):
            return found
        said = f"recorded: {', '.join(known) or 'none'}; with --source predicted: {', '.join(others)}"
        self.fail(f"no recorded GPU {value!r}; {said}{nearest.meant(value, names)}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from labkit.workflow import gpus

        known = dict.fromkeys((*paths.recorded_gpus(), *gpus.predictable()))
        return [CompletionItem(name) for name in known if name.startswith(incomplete)]


def _complete_parameter(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of the chosen studies' parameters."""
    from labkit.workflow import notebooks

    # After an unfinished `-p`, click has not parsed the studies yet; every shell passes the words in COMP_WORDS.
    words = os.environ.get("COMP_WORDS", "").split()
    chosen = [study for word in words if (study := nearest.study(word))] or registry.NOTEBOOKS
    found = {}
    for path in map(notebooks.source_path, chosen):
        known = notebooks.parameters(path).values() if path.exists() else ()
        found.update({p.name: f"{p.type}: {p.help}" for p in known})
    return [CompletionItem(f"{n}=", help=text) for n, text in found.items() if n.startswith(incomplete)]


def _complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="labkit")
def main() -> None:
    """Settle claims about GPU inference kernels: run the notebooks, on this GPU or from recorded measurements.

    \b
    labkit run                          every notebook, then reports/index.html
    labkit run --quick                  the headline cases alone, in minutes
    labkit run state_layout             one study
    labkit check FILE.py:FUNCTION       a function of your own, in seconds
    labkit compare FIRST SECOND         two sets of measurements
    labkit list CLAIM                   one claim with its verdicts
    labkit doctor                       what this machine can measure
    labkit COMMAND --help               more about a command
    """
    os.umask(os.umask(0o077) | 0o022)  # no other account can write what is written here


# run


@main.command(epilog=EXIT_CODES)
@click.argument("chosen", metavar="[STUDY]...", nargs=-1, type=StudyName())
@click.option(
    "-p",
    "given",
    metavar="NAME=VALUE",
    multiple=True,
    shell_complete=_complete_parameter,
    help="Set a notebook's parameter.",
)
@click.option(
    "--source", type=click.Choice(spec.SOURCES), help="Measure here, replay data/, or predict another GPU from it."
)
@click.option("--gpu", type=GpuName(), help="Recorded GPU to show; default: all. Or the one to predict.")
@click.option("--quick", is_flag=True, help="Only the headline cases of the claims, in one process: a quick look.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Notebooks at once; default: one per core, or two per GPU (three of a quick look), of which one measures.",
)
@click.option(
    "--add",
    metavar="FILE.py:FUNCTION",
    multiple=True,
    shell_complete=_complete_file,
    help="Check and time a function of your own beside those of the one STUDY.",
)
@click.option(
    "--sweep", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Run the jobs of a file."
)
@click.option("--dry-run", is_flag=True, help="With --sweep or --on: only check, and say what would be run.")
@click.option("--on", metavar="PROFILE", help="On a cluster, by Snakemake: slurm, kubernetes, or a profile's folder.")
@click.option(
    "--job", hidden=True, type=click.Path(dir_okay=False, path_type=Path)
)  # one job, as Snakemake's rule calls it
def run(
    chosen: Sequence[str],
    given: Sequence[str],
    source: str | None,
    gpu: str | None,
    quick: bool,
    jobs: int | None,
    add: Sequence[str],
    sweep: Path | None,
    dry_run: bool,
    on: str | None,
    job: Path | None,
) -> None:
    """Run notebooks and write their pages and reports/index.html.

    STUDY is a study's name, notebook or number (state_layout, 01_state_layout, 01); all of them by default.
    -p sets a parameter in every chosen study that has it, or in one: -p STUDY.NAME=VALUE. Lists are written 1,8,64 or
    as JSON. Everything is checked before anything runs. A measuring run says first how long it will take; one that was
    stopped goes on where it was. Verdicts of --quick are marked, and its pages stand beside the full ones.

    \b
    labkit run
    labkit run --quick
    labkit run state_layout -p batches=1,64 -p processes=1
    labkit run 01 --source recorded --gpu nvidia-h100-80gb-hbm3
    labkit run 01 --source predicted --gpu rtx-4090
    labkit run --source measure --jobs 1
    labkit run state_layout --add my_kernels.py:decode
    labkit run --sweep sweep.yaml
    labkit run --sweep sweep.yaml --on slurm
    """
    from labkit.workflow import notebooks

    if missing := notebooks.not_installed():
        raise click.ClickException(f"not installed: {', '.join(missing)}; no notebook runs without: `make setup`")
    if job:
        _run_job(job)
        return
    if sweep or on:
        _run_jobs(sweep, on, dry_run, jobs, chosen, [*given, *_shorthands(given, source, gpu, quick)], add)
        return
    if dry_run:
        raise click.UsageError("--dry-run goes with --sweep or --on")
    names = _named(chosen)
    try:
        short = [*_shorthands(given, source, gpu, quick), *_added(given, names, add)]
        values = notebooks.assign([registry.load(name) for name in names], [*given, *short])
        can_measure = notebooks.can_measure([(name, values[name]) for name in names])
    except notebooks.UsageError as wrong:
        raise click.UsageError(str(wrong)) from None
    from labkit.workflow import ahead, reports  # take a second to load: after what can be wrong

    if measured := {name: values[name] for name in names if can_measure and notebooks.measures(name, values[name])}:
        told = _how_long(measured, jobs)
        _say(str(told))
    how = {"can_measure": can_measure, "beside": ahead.Ahead, "seconds": told.seconds if measured else {}}
    how["last"] = {name for name, given in measured.items() if ahead.times_host(name, given)}
    results = _until_stopped(lambda: notebooks.run(names, values, jobs, **how))
    failed = {result.study: result.error for result in results if not result.ok}
    problems = reports.write(failed, _say)
    for line in reports.outcomes(results):
        click.echo(line)
    if failed:
        names = ", ".join(registry.NOTEBOOKS[name] for name in failed)
        click.echo(f"failed: {names}; their pages show where", err=True)
    _finish(problems, bool(failed))


def _named(chosen: Sequence[str]) -> list[str]:
    """The chosen studies in the lab's order; all of them if none is."""
    return [name for name in registry.NOTEBOOKS if name in chosen] or list(registry.NOTEBOOKS)


def _how_long(values: dict[str, dict[str, Any]], at_once: int | None) -> "Estimate":
    """What these studies will take to measure here."""
    from labkit.workflow import estimate, lease

    return estimate.of_run(values, [one.name for one in lease.visible()], at_once=at_once)


def _how_long_jobs(wanted: Sequence["Job"], at_once: int | None, on: str | None) -> list[str]:
    """A line that says what these jobs will take to measure here, or by a cluster; none if none of them is left to."""
    from labkit.workflow import estimate, lease

    if not on:
        told = estimate.of_jobs(wanted, [one.name for one in lease.visible()], at_once)
        return [str(told)] if told.seconds else []
    told = estimate.of_jobs(wanted, [], None, estimate.CLUSTER_CORES)
    return [f"one after the other, each with {estimate.CLUSTER_CORES} cores, {told}"] if told.seconds else []


def _run_jobs(
    sweep: Path | None,
    on: str | None,
    dry_run: bool,
    at_once: int | None,
    chosen: Sequence[str],
    given: Sequence[str],
    add: Sequence[str],
) -> None:
    """Run the jobs of a sweep file, or the chosen studies as jobs: on this machine's GPUs, or by a cluster's engine."""
    from labkit.workflow import batch, engine, jobs, notebooks, sweeps

    if sweep and (chosen or given or add):
        raise click.UsageError(
            "--sweep names notebooks and parameters itself; STUDY, -p, --source, --gpu, --add exclude it"
        )
    try:
        if sweep:
            wanted = sweeps.read(sweep)
        else:
            names = _named(chosen)
            values = notebooks.assign([registry.load(name) for name in names], [*given, *_added(given, names, add)])
            wanted = [jobs.Job(name, values[name]) for name in names]
        if on:
            engine.check(wanted)
        profile = engine.profile(on) if on else None
        can_measure = False if on else notebooks.can_measure([(one.study, one.values) for one in wanted])
    except notebooks.UsageError as wrong:
        raise click.UsageError(str(wrong)) from None
    told = _how_long_jobs(wanted, at_once, on) if can_measure or on else []
    if dry_run:
        for line in [*jobs.plan(wanted, can_measure or bool(on)), *told]:
            click.echo(line)
        return
    for line in told:
        _say(line)
    try:
        if profile:
            results = _until_stopped(lambda: engine.run(wanted, profile, at_once))
        else:
            results = _until_stopped(lambda: batch.run(wanted, at_once, can_measure=can_measure))
    except OSError as problem:
        raise click.ClickException(str(problem)) from None
    from labkit.workflow import reports

    full = {result.study: result.error for result in results if result.notebook == registry.NOTEBOOKS[result.study]}
    problems = reports.write({study: error for study, error in full.items() if error}, _say)
    for line in reports.outcomes(results):
        click.echo(line)
    _finish([*problems, *jobs.failures(results)])


def _run_job(definition: Path) -> None:
    """One job, and nothing else: no page is written. Exit code 1 if it fails, or measures nothing."""
    from labkit.workflow import jobs, lease, notebooks

    try:
        job = jobs.load(definition)
        if problem := notebooks.why_not_measure() if jobs.measures(job) else "":
            raise click.ClickException(f"{job.name}: nothing can be measured here: {problem}")
        held = lease.gpu_lease(say=_say) if jobs.measures(job) else None
        result = _until_stopped(lambda: jobs.perform_when_free(job, held, _say))
    except notebooks.UsageError as wrong:
        raise click.UsageError(str(wrong)) from None
    except OSError as problem:
        raise click.ClickException(str(problem)) from None
    for line in jobs.failures([result]):
        click.echo(line, err=True)
    sys.exit(OK if result.ok else FAILED)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _finish(problems: Sequence[str], failed: bool = False) -> None:
    from labkit.workflow import reports

    for problem in problems:
        click.echo(problem, err=True)
    click.echo(reports.shown_path(paths.REPORTS / "index.html"))
    sys.exit(FAILED if problems or failed else OK)


def _shorthands(given: Sequence[str], source: str | None, gpu: str | None, quick: bool) -> list[str]:
    """--source, --gpu and --quick as parameters. UsageError if -p gives the same again."""
    options = {"source": source, "gpu": gpu, "quick": "true" if quick else None}
    short = {name: value for name, value in options.items() if value is not None}
    for text in given:
        if (name := text.partition("=")[0].strip()) in short:
            raise click.UsageError(f"both --{name} and -p {name}=… are given")
    return [f"{name}={value}" for name, value in short.items()]


def _added(given: Sequence[str], names: Sequence[str], add: Sequence[str]) -> list[str]:
    """--add as the parameter of the one study chosen. UsageError if it takes none, or -p gives the same again."""
    from labkit.sweep import added

    if not add:
        return []
    if len(names) > 1:
        raise click.UsageError(f"--add is for one study; name it: {', '.join(added.takers())}")
    target = f"{names[0]}.{added.PARAMETER}"
    if any(text.partition("=")[0].strip() in (added.PARAMETER, target) for text in given):
        raise click.UsageError(f"both --add and -p {added.PARAMETER}=… are given")
    if problem := added.why_none(registry.load(names[0])):
        raise click.UsageError(problem)
    return [f"{target}={json.dumps(list(add))}"]


def _until_stopped(action: Callable[[], Any]) -> Any:
    """Run something that ends its processes on an exception; exit as shells expect after Ctrl-C or SIGTERM."""

    def terminate(number: int, frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return action()
    except KeyboardInterrupt:
        click.echo("interrupted; what was measured is kept, and the same command goes on from there", err=True)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


@main.command(epilog=EXIT_CODES)
@click.option("--markdown", is_flag=True, help="Write reports/markdown/NAME.md too, with figures as PNG.")
def report(markdown: bool) -> None:
    """Write the pages and reports/index.html again from the notebooks that were run, without running any.

    A page stays as it is where nothing has changed that it is made of.
    """
    from labkit.workflow import reports

    problems = reports.write(say=_say)
    if markdown:
        for note in reports.write_markdown(_say):
            _say(note)
        click.echo(reports.shown_path(paths.REPORTS / "markdown" / "index.md"))
    _finish(problems)


# list and doctor


def _claim_names() -> dict[str, tuple[str, Any]]:
    """STUDY.CLAIM -> its study and the claim."""
    return {f"{name}.{claim.id}": (name, claim) for name in registry.NOTEBOOKS for claim in registry.load(name).claims}


def _complete_claim(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = _claim_names()
    ids = [claim.id for _, claim in found.values()]
    return [CompletionItem(name) for name in (*ids, *found) if name.startswith(incomplete)]


@main.command("list", epilog=EXIT_CODES)
@click.argument("claim", required=False, shell_complete=_complete_claim)
@click.option("--stale", is_flag=True, help="Name the rows recorded with an earlier kernel; exit 1 if there are any.")
@click.option("--gpus", is_flag=True, help="Name the GPUs that can be shown, and those that can be predicted.")
def list_(claim: str | None, stale: bool, gpus: bool) -> None:
    """List the studies, the claims that each tests, and the GPUs recorded for it; or one claim with its verdicts.

    CLAIM is a claim's id or a beginning of it, or STUDY.CLAIM.

    \b
    labkit list
    labkit list sglang-20283-tile
    labkit list gemv_coalescing.step
    """
    if sum(map(bool, (claim, stale, gpus))) > 1:
        raise click.UsageError("CLAIM, --stale and --gpus exclude each other")
    if gpus:
        _list_gpus()
        return
    try:
        if claim:
            _list_claim(*_claim(claim))
            return
        old = _list_stale() if stale else _list_all()
    except ValueError as problem:  # a RecordError
        raise click.ClickException(str(problem)) from None
    sys.exit(FAILED if old else OK)


def _list_all() -> bool:
    from labkit.workflow import summary

    for name, notebook in registry.NOTEBOOKS.items():
        study = registry.load(name)
        click.echo(f"{notebook}  {study.title}\n  {study.summary}")
        for claim in study.claims:
            click.echo(f"  claim {claim.id}: {claim.statement} ({claim.source}; published: {claim.published})")
        for found in summary.summaries(name):
            where = "measured here" if found.here else "recorded"
            when = " to ".join(found.days) or "no rows"
            note = f", {found.stale} with an earlier kernel (labkit list --stale)" if found.stale else ""
            click.echo(f"  {where}: {found.gpu}, {when}, {found.rows} rows{note}")
        click.echo()
    return False


def _claim(text: str) -> tuple[str, Any]:
    """The study and the claim that a text names. UsageError if it names none, or more than one."""
    known = _claim_names()
    ids = [claim.id for _, claim in known.values()]
    exact = [name for name, (_, claim) in known.items() if text in (name, claim.id)]
    begun = [name for name, (_, claim) in known.items() if name.startswith(text) or claim.id.startswith(text)]
    found = exact or begun
    if len(found) > 1:
        raise click.UsageError(f"{text!r} names {len(found)} claims: {', '.join(found)}")
    if not found:
        near = nearest.meant(text, [*ids, *known])
        raise click.UsageError(f"no claim {text!r}{near or '; there are: ' + ', '.join(known)}")
    return known[found[0]]


def _list_claim(study: str, claim: Any) -> None:
    """A claim, and what the rows of each GPU say of it: judged once, and kept."""
    from labkit.workflow import store

    click.echo(f"{study}.{claim.id}")
    _fields(claim=claim.statement, source=claim.source, address=claim.url, condition=claim.condition)
    _fields(published=claim.published, rule=f"of {claim.ruled}")
    found = [
        (store.kept("claims", [path], _judging(study, path, here)), here) for path, here in paths.data_files(study)
    ]
    for kept, here in found:
        result = kept["results"].get(claim.id, {"judgement": None, "error": "no rows"})
        judged = result["judgement"]
        where = f"{kept['gpu']}, {'measured here' if here else 'recorded'}"
        click.echo(f"\n{where}: {_verdict(judged)}")
        if not judged:
            _fields(why=result["error"])
            continue
        _fields(direction=judged["direction"], size=judged["size"], measured=judged["measured"], why=judged["why"])
        old = {"earlier_kernel": "some rows are of an earlier kernel", "rule_changed": "rule changed after the data"}
        _fields(ran=judged["code"], note="; ".join(text for name, text in old.items() if result[name]))
    if not found:
        click.echo("\nnot measured on any GPU")


def _verdict(judged: dict[str, Any] | None) -> str:
    return judged["verdict"] + (" (a quick look)" if judged["quick"] else "") if judged else "could not be judged"


def _judging(study: str, path: Path, here: bool) -> Callable[[], dict[str, Any]]:
    def judge() -> dict[str, Any]:
        from labkit.workflow import reports

        return reports.claims_of(reports.rows_of(study, path, here))

    return judge


def _fields(**texts: str) -> None:
    """Named texts, of which none is wider than 100 columns but for a word that is; empty ones are left out."""
    for name, text in texts.items():
        if text:
            label = f"  {name}: ".ljust(13)
            options = {"break_long_words": False, "break_on_hyphens": False}
            click.echo(textwrap.fill(text, 100, initial_indent=label, subsequent_indent=" " * 13, **options))


def _list_gpus() -> None:
    from labkit.workflow import gpus

    for name in paths.recorded_gpus():
        click.echo(f"{name}: recorded")
    for name, how in gpus.predictable().items():
        click.echo(f"{name}: {how}; labkit run --source predicted --gpu {name}")


def _list_stale() -> bool:
    from labkit.workflow import recorded

    total = 0
    for name in registry.NOTEBOOKS:
        for found in recorded.all_rows(name, runs=False):
            old = found.rows[recorded.stale(found.rows)]
            total += len(old)
            for (op, variant, sha), some in old.groupby(["op", "variant", "kernel_sha"], sort=False):
                days = sorted(set(some["utc"].str[:10]))
                when = " to ".join(dict.fromkeys((days[0], days[-1])))
                counts = f"rows: {len(some)}, cases: {some['case'].nunique()}"
                click.echo(f"{found.gpu}/{name}: {op}, {variant}; {counts} (kernel {sha}, {when})")
    click.echo(f"{total} rows recorded with an earlier kernel", err=True)
    return total > 0


@main.command(epilog=EXIT_CODES)
@click.option(
    "--completion", type=click.Choice(("bash", "zsh", "fish")), help="Print the completion script of a shell."
)
def doctor(completion: str | None) -> None:
    """Say what this machine has, what will be measured here and what replayed, and why.

    \b
    bash: eval "$(labkit doctor --completion bash)"      in ~/.bashrc
    zsh:  eval "$(labkit doctor --completion zsh)"       in ~/.zshrc
    fish: labkit doctor --completion fish | source       in ~/.config/fish/config.fish
    """
    if completion:
        found = get_completion_class(completion)
        assert found is not None
        click.echo(found(main, {}, "labkit", "_LABKIT_COMPLETE").source())
        return
    from labkit.workflow import doctor as examination

    findings = examination.examine()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.what:<{width}}  {finding.text}")
    sys.exit(FAILED if any(finding.broken for finding in findings) else OK)


# check and compare


@main.command(epilog=EXIT_CODES)
@click.argument("function", metavar="FILE.py:FUNCTION", shell_complete=_complete_file)
@click.option("--study", type=StudyName(), help="Whose arguments it takes; default: the study that gives such ones.")
@click.option("--case", "wanted", metavar="NAME=VALUE,…", help="Which case is timed; default: the study's first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(function: str, study: str | None, wanted: str | None, as_json: bool) -> None:
    """Check a function of your own in seconds: its errors, and on a GPU its speed.

    Errors are relative, against float64, on tiny inputs of every dtype that the study gives. On a GPU the function is
    also timed in one case and one process beside the lab's own kernel and every release that was fetched; the ratio is
    the other's time over the function's, with its 95 % interval. Exit code 1 if it is wrong. `labkit run STUDY --add`
    does the same with all of a study's cases, and writes its page.

    \b
    labkit check my_kernels.py:my_gemv
    labkit check my_kernels.py:my_gemv --case N=4096,K=2560,dtype=bf16 --json
    """
    from labkit.sweep import added
    from labkit.workflow import checking

    try:
        found = checking.check(function, study, wanted or "", _say)
    except ValueError as problem:  # which begins with the notebooks' parameter, that this command does not have
        raise click.UsageError(str(problem).removeprefix(f"{added.PARAMETER}: ")) from None
    click.echo(json.dumps(found, indent=1) if as_json else checking.text(found))
    sys.exit(OK if checking.fine(found) else FAILED)


def _complete_side(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from labkit import sources

    releases = [f"{made.package}=={made.version}" for made in sources.manifest().values()]
    names = dict.fromkeys(("data/", "runs/", *paths.recorded_gpus(), *releases))
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@main.command(epilog=EXIT_CODES)
@click.argument("first", shell_complete=_complete_side)
@click.argument("second", shell_complete=_complete_side)
@click.option(
    "--fail-on",
    metavar="slower[=N%]",
    default="slower",
    help="How much slower is a failure; default: any, beyond noise.",
)
@click.option("--format", "form", type=click.Choice(("text", "markdown", "html", "json")), default="text")
@click.option("--all", "every", is_flag=True, help="Show also what is the same or unclear; JSON has it always.")
def compare(first: str, second: str, fail_on: str, form: str, every: bool) -> None:
    """Compare two sets of measurements: what is faster in the SECOND than in the FIRST, what slower, beyond its noise.

    Each is data/, runs/, another folder or an archive of `labkit record --pack`; a recorded GPU; a commit, of which
    data/ is taken; or NAME==VERSION of triton, torch, cuda, driver or of a release of somebody's package. Exit code 1
    if something is slower, or wrong in the second alone; not if its code, driver, torch and Triton are the same in
    both: then it is the machine that differs.

    \b
    labkit compare data/ runs/
    labkit compare h100 h200 --all --format markdown
    labkit compare main runs/ --fail-on slower=3%
    labkit compare sglang==0.5.9 sglang==0.5.23

    \b
    A job of a CI, on a runner with a GPU, that fails where a change made a kernel slower (data/ has main's rows):
      kernels:
        runs-on: [self-hosted, gpu]
        steps:
          - uses: actions/checkout@v4
          - run: make setup
          - run: .venv/bin/labkit run --quick --source measure
          - run: .venv/bin/labkit compare data/ runs/ --fail-on slower=3% --format markdown >> "$GITHUB_STEP_SUMMARY"
    """
    from labkit.bench.records import RecordError
    from labkit.workflow import compare as comparing

    try:
        limit = comparing.limit_of(fail_on)
        found = comparing.compare(comparing.side(first), comparing.side(second))
    except RecordError as problem:
        raise click.ClickException(str(problem)) from None
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    click.echo(comparing.shown(found, form, every))
    sys.exit(FAILED if found.failing(limit) else OK)


# fetch


def _complete_source(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Releases in sources.toml, and packages, which stand for all of their releases."""
    from labkit import sources

    names = {name: None for made in sources.manifest().values() for name in (made.package, made.name)}
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@main.command(epilog=EXIT_CODES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete_source)
@click.option(
    "--into", metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="Keep them there instead."
)
def fetch(names: Sequence[str], into: Path | None) -> None:
    """Take other people's kernels from the packages that they released, to be measured beside the lab's.

    NAME is a release (sglang-0.5.9) or a package (sglang); by default all but those of which fetching takes long. Of
    each package a few named files are kept, in the user's cache or in LABKIT_SOURCES, and only if their hashes are
    those of sources.toml. Nothing is installed. For a machine without network: --into elsewhere, copy the folder, and
    name it in LABKIT_SOURCES.

    \b
    labkit fetch
    labkit fetch sglang
    labkit fetch --into /media/stick/sources
    """
    from labkit import sources

    try:
        wanted = sources.named(names)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    failed = False
    for made in wanted:
        try:
            where = sources.fetch(made, into)
        except sources.SourceError as problem:
            failed = True
            click.echo(problem, err=True)
        else:
            size = sum((where / path).stat().st_size for path in made.files)
            click.echo(
                f"{made.name}: {len(made.files)} files, {size / 1e3:.0f} kB, {made.licence}, {made.home}: {where}"
            )
    for package, why in {made.package: made.on_request for made in sources.manifest().values()}.items():
        if why and not names:
            click.echo(f"{package}: not fetched, {why}: labkit fetch {package}")
    sys.exit(FAILED if failed else OK)


# bundle and record


class Size(click.ParamType):
    """A number of bytes: 700M, 2G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
        number, unit = (value[:-1], value[-1].upper()) if value[-1:].isalpha() else (value, "")
        if unit not in units or not number.isdecimal() or not int(number):
            self.fail(f"{value!r} is no size; allowed: a number with K, M or G, for example 700M", param, ctx)
        return int(number) * units[unit]


LIMIT = click.option("--limit", metavar="SIZE", type=Size(), help="Split the archive into parts of at most 700M, 2G …")


@main.command(epilog=EXIT_CODES)
@click.argument("out", metavar="OUT.tar", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--python", default="3.12", type=click.Choice(("3.11", "3.12", "3.13")), help="Of the machine to run on.")
@click.option(
    "--platform", default="linux_x86_64", type=click.Choice(("linux_x86_64", "linux_aarch64")), help="Its kind."
)
@click.option(
    "--extra", "extras", multiple=True, metavar="NAME", help="Install this extra too, such as peers or cutlass."
)
@click.option(
    "--sweep", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="What is to be run there."
)
@LIMIT
def bundle(out: Path, python: str, platform: str, extras: Sequence[str], sweep: Path | None, limit: int | None) -> None:
    """Write the lab with all that it needs into one archive, for a machine without network.

    It holds the lab as it is here, wheels for that machine's Python, the fetched sources, and a script. There:

    \b
    tar xf OUT.tar && labkit-bundle/run       measures, and writes labkit-bundle/results.tar.gz
    cat OUT.tar.part* > OUT.tar               first, if it came in parts; sha256sum -c OUT.tar.sha256 checks it

    \b
    labkit bundle lab.tar --python 3.11 --limit 2G
    labkit record results.tar.gz              back here
    """
    from labkit.workflow import bundle as bundles
    from labkit.workflow import parts

    try:
        bundles.write(out, python, platform, extras, sweep, _say)
        made = parts.split(out, limit) if limit else [out]
    except (bundles.BundleError, OSError) as problem:
        raise click.ClickException(str(problem)) from None
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    for path in made:
        click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


@main.command(epilog=EXIT_CODES)
@click.argument("archive", required=False, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--pack", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path), help="Only pack runs/ into OUT."
)
@click.option("--figures", is_flag=True, help="Only draw the figures of what is recorded anew.")
@click.option("--rehash", is_flag=True, help="Only restamp rows of an earlier schema that are of the present sources.")
@click.option(
    "--same-as", metavar="REVISION", help="Only restamp rows of a git revision's sources that launch the same today."
)
@click.option(
    "--predict", is_flag=True, help="Only predict recorded rows of which the model's last version has nothing."
)
@LIMIT
def record(
    archive: Path | None,
    pack: Path | None,
    figures: bool,
    rehash: bool,
    same_as: str | None,
    predict: bool,
    limit: int | None,
) -> None:
    """Check measurements and promote them into data/<gpu>/.

    Takes what was measured here (runs/), or an archive or folder that came from another machine, which holds
    runs/<gpu>/… or <gpu>/…; of an archive in parts, any part. A case is replaced whole. If anything is wrong,
    nothing is promoted.
    Then the notebooks are run on what is recorded, and their figures are kept in figures/.

    \b
    labkit record                       what was measured here
    labkit record --pack runs.tar.gz    on another machine; then, here:
    labkit record runs.tar.gz
    labkit record --figures             after a change of how they are drawn
    labkit record --rehash              after a change of how sources are hashed
    labkit record --same-as 1a2b3c4     after a change of a kernel's source that leaves its code as it was there
    labkit record --predict             after a new version of the model, or rows whose launches are not known yet
    """
    from labkit.bench.records import RecordError
    from labkit.workflow import archive as archives
    from labkit.workflow import parts, same

    if limit and not pack:
        raise click.UsageError("--limit goes with --pack")
    if sum(map(bool, (archive, pack, figures, rehash, same_as, predict))) > 1:
        raise click.UsageError("ARCHIVE, --pack, --figures, --rehash, --same-as and --predict exclude each other")
    if predict:
        _predict(compiling=True)
        return
    if figures:
        _draw(list(registry.NOTEBOOKS))
        return
    try:
        if rehash or same_as:
            for path, (restamped, left) in (same.restamp(same_as) if same_as else archives.rehash()).items():
                note = f", {left} left: not of the present sources" if left else ""
                click.echo(f"data/{path.parent.name}/{path.name}: {restamped} rows restamped{note}")
            return
        if pack:
            click.echo(f"{pack}: {archives.pack(pack)} files")
            for path in parts.split(pack, limit) if limit else ():
                click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
            return
        with parts.whole(archive) if archive else nullcontext() as source:
            done = archives.promote(source)
    except (RecordError, OSError) as problem:
        raise click.ClickException(str(problem)) from None
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    for (gpu, study), (cases, rows) in done.promoted.items():
        click.echo(f"data/{gpu}/{study}.parquet: {cases} cases, {rows} rows promoted")
    for name in done.timelines:
        click.echo(f"data/{name}.parquet promoted")
    for text in done.left:
        click.echo(f"left: {text}", err=True)
    studies = {study for _, study in done.promoted} | {name.rpartition("/")[2] for name in done.timelines}
    if not studies:
        sys.exit(FAILED)
    _predict()
    _draw(sorted(studies))


def _predict(compiling: bool = False) -> None:
    """Predict recorded rows that have no prediction yet. compiling: find out first what launches are not known of."""
    from labkit.workflow import launches, predictions

    if compiling:
        try:
            launches.update()
        except ModuleNotFoundError as problem:
            raise click.ClickException(
                f"launches are compiled to know what they do: {problem.name} is missing"
            ) from None
    for gpu, (added, without) in predictions.append().items():
        note = f", {without} of ours without: their launches are not known" if without else ""
        click.echo(f"data/predictions.parquet: {gpu}, {added} rows predicted{note}")


def _draw(chosen: list[str]) -> None:
    """Run the notebooks on the recorded measurements; keep their figures and what they compiled beside the data."""
    from labkit.evidence import workers
    from labkit.workflow import notebooks, quick, reports

    values = {name: {"source": "recorded"} for name in chosen}
    reports.forget_figures(chosen)
    quick.keep(chosen)
    with tempfile.TemporaryDirectory() as asked:
        os.environ["LABKIT_ANSWERS"] = asked  # to the notebooks' processes: all that they ask for, and nothing else
        try:
            results = notebooks.run(chosen, values, can_measure=False)
        finally:
            del os.environ["LABKIT_ANSWERS"]
        workers.record(Path(asked), more=len(chosen) < len(registry.NOTEBOOKS) or not all(one.ok for one in results))
    reports.write({result.study: result.error for result in results if not result.ok})
    for path in reports.keep_figures(chosen):
        click.echo(path)
    reports.keep_findings()
    if failed := [result.study for result in results if not result.ok]:
        raise click.ClickException(f"recorded, but these notebooks fail on it: {', '.join(failed)}")


# new


@main.command(epilog=EXIT_CODES)
@click.argument("name")
def new(name: str) -> None:
    """Make a study that runs and passes from the start: its folder, notebook, claim, test and line in the registry.

    NAME is what the folder is called, such as gemv_rows. The study times a small kernel; CONTRIBUTING.md says, file by
    file, what to put in its place.

    \b
    labkit new gemv_rows
    labkit run gemv_rows
    """
    from labkit.workflow import creating

    try:
        files = creating.create(name)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    for path in files:
        click.echo(path.relative_to(paths.ROOT))
