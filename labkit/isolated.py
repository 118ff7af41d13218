"""Call a function in a fresh Python process: another environment, and a crash that stays there.

Triton reads its variables when a kernel is decorated, CUDA when a device is first used; later changes have no effect.
Whatever needs another environment (the interpreter, a compiler without a GPU, a device of its own) is called here.
"""

import ctypes
import gc
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit import host

GRACE_S = 5.0  # between asking a process to end and killing it
_POLL_S = 0.1
_TRACE_LINES = 12
_LOG_LINES = 20
_NOTHING: Mapping[str, Any] = MappingProxyType({})

# What reads a notebook imports it by way of jsonschema if it is there, to check a kind of address that notebooks do not
# have; it then parses a grammar for longer than all the rest takes to start.
_NOT_IMPORTED = ("rfc3987_syntax",)


class IsolatedError(RuntimeError):
    """The called function raised, or its process ended without an answer.

    kind:    the exception's type name, or "crash" (a signal, or an exit without an answer), "timeout", "stopped".
    message: the exception's message, or how the process ended.
    trace:   tail of the traceback, or of what the process wrote to its standard error.
    """

    def __init__(self, target: str, kind: str, message: str, trace: str = ""):
        super().__init__(target, kind, message, trace)
        self.target, self.kind, self.message, self.trace = target, kind, message, trace

    def __str__(self) -> str:
        text = f"{self.target}: {self.kind}: {self.message}"
        return f"{text}\n{self.trace.rstrip()}" if self.trace.strip() else text


@dataclass(frozen=True)
class Call:
    """One call of `call_many`; the fields are the arguments of `call`."""

    target: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    timeout: float | None = None


def call(
    target: str,
    *args: Any,
    env: Mapping[str, str | None] = _NOTHING,
    timeout: float | None = None,
    stop: threading.Event | None = None,
    on_line: Callable[[str], None] | None = None,
    started: "Started | None" = None,
    **kwargs: Any,
) -> Any:
    """Call "module:function" in a fresh Python process and return its result.

    args, kwargs and the result are JSON values. env: changes to the environment; None removes a variable.
    timeout: seconds. stop: an event that ends the process. on_line: gets each line that the process prints (to either
    stream), as it comes; by default they go to this process's standard error. started: the process, if it was started
    before; then with that one's environment. The process dies with this one.
    IsolatedError if the function raises, or its process dies, takes too long or is stopped.
    """
    request = {"target": target, "args": args, "kwargs": kwargs, "parent": os.getpid(), "path": sys.path}
    with tempfile.NamedTemporaryFile() as question, tempfile.TemporaryFile() as own:
        question.write(json.dumps(request).encode())
        question.seek(0)
        child, answer = started.ask(question.name) if started else (_start(question, own, env), own)
        lines = started.lines if started else _pumped(child)
        log: deque[str] = deque(maxlen=_LOG_LINES)
        try:
            ended = _follow(child, lines, log, on_line or _to_stderr, timeout, stop)
        finally:
            _end(child)
        if ended:
            raise IsolatedError(target, *ended, "".join(log))
        answer.seek(0)
        return _unpack(target, child.returncode, answer.read(), "".join(log))


class Started:
    """A process that is started before it is called, and meanwhile does what takes it long.

    first: "module:function", called there with `args`, JSON values; after it what it is told of later (`also`). What
    these return or raise is of no account. env: as in `call`. lines: what it prints. One that nobody calls ends with
    `close`, or with this process.
    """

    def __init__(self, first: str, *args: Any, env: Mapping[str, str | None] = _NOTHING):
        with ExitStack() as held:
            self._answer = held.enter_context(tempfile.TemporaryFile())
            done, says = os.pipe()
            self._done = held.enter_context(open(done, "rb", buffering=0))
            with open(says, "wb", buffering=0):
                self._child = _start(subprocess.PIPE, self._answer, env, says)
            self._held = held.pop_all()
        self.lines = _pumped(self._child)
        self._left = 1  # calls of which it has not said that they have ended
        self._tell({"first": first, "args": args, "done": says, "parent": os.getpid(), "path": sys.path})

    def also(self, then: str, *args: Any) -> None:
        """Have it call another function after those that it was told of."""
        self._left += 1
        self._tell({"first": then, "args": args})

    def ready(self) -> bool:
        """Wait until what it was to do first has ended; False if the process has."""
        while self._left:
            if not select.select([self._done], [], [], _POLL_S)[0]:
                if self._child.poll() is not None:
                    return False
            elif not self._done.read(1):
                return False
            else:
                self._left -= 1
        return True

    def ask(self, question: str) -> tuple[subprocess.Popen, Any]:
        """Have it answer the question in a file; the process, and where its answer will be."""
        self._tell({"question": question})
        return self._child, self._answer

    def close(self) -> None:
        """End it if it has not ended."""
        _end(self._child)
        with suppress(BrokenPipeError):  # what it did not read
            self._child.stdin.close()
        self._held.close()

    def _tell(self, line: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it has died, which whoever waits for an answer sees
            self._child.stdin.write(json.dumps(line) + "\n")
            self._child.stdin.flush()


def call_many(calls: Sequence[Call], workers: int = 0, stop: threading.Event | None = None) -> list[Any]:
    """Results of several calls, in their order, at most `workers` processes at once; 0: as many as there are cores.

    The first IsolatedError is raised; the calls that have not ended then are stopped, by setting `stop`. Set by others
    it stops them too.
    """
    stop = stop or threading.Event()
    with ThreadPoolExecutor(workers or max(1, min(len(calls), host.cores()))) as pool:
        futures = [
            pool.submit(call, one.target, *one.args, env=one.env, timeout=one.timeout, stop=stop, **one.kwargs)
            for one in calls
        ]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def spare_imports() -> None:
    """Have this process, which is to read notebooks, not import what only holds it up."""
    for name in _NOT_IMPORTED:
        sys.modules.setdefault(name, None)


def collect_seldom() -> None:
    """Have this process, which is to make pages, seldom look for memory that it can free.

    Of its hundred thousands of small objects nearly all are kept, and looking took a sixth of its time. Not for a
    process that measures: what is recorded was timed with Python's own setting.
    """
    gc.set_threshold(50_000, 20, 20)


def environment(env: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with some changes, of which None removes a variable, and with the lab on the path."""
    merged = {**os.environ, **env}
    package = str(Path(__file__).resolve().parents[1])
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [package, merged.get("PYTHONPATH")]))
    return {name: value for name, value in merged.items() if value is not None}


def _start(question: Any, answer: Any, env: Mapping[str, str | None], *inherited: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "labkit.isolated"],
        stdin=question,
        stdout=answer,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(env),
        pass_fds=inherited,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends the child
    )


def _follow(
    child: subprocess.Popen,
    lines: "queue.Queue[str | None]",
    log: deque[str],
    on_line: Callable[[str], None],
    timeout: float | None,
    stop: threading.Event | None,
) -> tuple[str, str] | None:
    """Pass the child's lines on until it has ended; kind and message if it was ended from here."""
    deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
    while (line := _next(child, lines)) is not None:
        if line:
            log.append(line)
            on_line(line)
        if stop is not None and stop.is_set():
            return "stopped", "the call was stopped"
        if time.monotonic() > deadline:
            return "timeout", f"no answer within {timeout:g} s"
    return None


def _next(child: subprocess.Popen, lines: "queue.Queue[str | None]") -> str | None:
    """The child's next line; empty if there is none yet; None when it has ended."""
    try:
        line = lines.get(timeout=_POLL_S)
    except queue.Empty:
        return "" if child.poll() is None else None  # a process that it left behind may hold the pipe open
    if line is not None:
        return line
    lines.put(None)
    try:
        child.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return ""
    return None


def _pumped(child: subprocess.Popen) -> "queue.Queue[str | None]":
    """The lines that a child prints, as they come, and then None: nobody need read them for it to go on."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(child.stderr, lines), daemon=True).start()
    return lines


def _pump(stream: Any, lines: "queue.Queue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _to_stderr(line: str) -> None:
    print(line, end="", file=sys.stderr, flush=True)  # in a Jupyter kernel no file that could be handed to the child


def _end(child: subprocess.Popen) -> None:
    """End the child if it has not, politely first."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _unpack(target: str, returncode: int, answer: bytes, log: str) -> Any:
    try:
        reply = json.loads(answer)
    except ValueError:
        how = f"exit status {returncode}"
        if returncode < 0:
            how = f"killed by signal {-returncode} ({signal.strsignal(-returncode)})"
        raise IsolatedError(target, "crash", f"the process ended without an answer: {how}", log) from None
    if "error" in reply:
        raise IsolatedError(target, *reply["error"])
    return reply["result"]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing). parent: its process id."""
    if sys.platform != "linux":
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def named(target: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the function prints, or a library below Python, is progress and not the answer
    die_with_parent(request["parent"])
    spare_imports()
    sys.path.extend(folder for folder in request["path"] if folder not in sys.path)
    if "first" in request:
        with open(request["done"], "wb", buffering=0) as done:
            os.set_inheritable(request["done"], False)
            while "first" in request:
                with suppress(Exception):
                    named(request["first"])(*request["args"])
                done.write(b"1")
                if not (line := sys.stdin.buffer.readline()):
                    return  # nobody called
                request = json.loads(line)
        request = json.loads(Path(request["question"]).read_text())
    try:
        reply = json.dumps({"result": named(request["target"])(*request["args"], **request["kwargs"])})
    except BaseException as problem:
        trace = "".join(traceback.format_exc().splitlines(keepends=True)[-_TRACE_LINES:])
        reply = json.dumps({"error": [type(problem).__name__, str(problem), trace]})
    with answer:
        answer.write(reply)


if __name__ == "__main__":
    _main()
