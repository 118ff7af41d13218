"""Jobs on this machine: one GPU a job, each GPU with one job at a time, whoever else runs jobs here."""

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from labkit import host
from labkit.workflow import jobs, lease, notebooks
from labkit.workflow.progress import Progress

_POLL_S = 0.5


def run(
    wanted: Sequence[jobs.Job],
    at_once: int | None = None,
    *,
    can_measure: bool = False,
    progress: Progress | None = None,
) -> list[notebooks.Result]:
    """Run jobs and return how each ended, in their order; one failure stops no other.

    at_once: how many, at most (default: one a GPU if anything is measured, else one a core). A job that is done is not
    run again; one that another process runs is waited for. On an exception (Ctrl-C) every process is ended first.
    """
    progress = progress or Progress()
    progress.start([(job.name, job.name) for job in wanted])
    leased = lease.visible() if can_measure else []
    limit = max(1, len(leased)) if leased else host.cores()
    limit = max(1, min(limit, at_once or limit, len(wanted)))
    stop = threading.Event()
    results: dict[str, notebooks.Result] = {}

    def one(job: jobs.Job) -> None:
        held: AbstractContextManager[lease.Gpu | None] = nullcontext()
        env = {} if leased else notebooks.share(limit)
        if leased and jobs.measures(job):
            held = lease.gpu_lease(leased, stop=stop, say=functools.partial(progress.note, job.name))
        result = jobs.perform(job, held, env, stop, progress)
        if not stop.is_set():
            problem = jobs.collect(job)
            result = replace(result, error=result.error or problem)
        results[job.name] = result
        progress.end(job.name, result.error, result.seconds)

    def work(queue: deque[jobs.Job]) -> None:
        told = set()
        while not stop.is_set():
            try:
                job = queue.popleft()
            except IndexError:
                return
            try:
                one(job)
            except jobs.Taken as elsewhere:
                if job.name not in told:
                    progress.note(job.name, f"{elsewhere}; waiting for it")
                told.add(job.name)
                queue.append(job)
                time.sleep(_POLL_S)

    for job in wanted:
        jobs.prepare(job)
    try:
        for group in _in_order(wanted):
            queue = deque(group)
            with ThreadPoolExecutor(limit) as pool:
                futures = [pool.submit(work, queue) for _ in range(limit)]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    stop.set()
                    raise
    finally:
        progress.close()
    return [results[job.name] for job in wanted]


def _in_order(wanted: Sequence[jobs.Job]) -> list[list[jobs.Job]]:
    """What the GPUs can reach comes first: predictions of the others are made of it."""
    first = [job for job in wanted if job.study == notebooks.FIRST]
    return [group for group in (first, [job for job in wanted if job not in first]) if group]
