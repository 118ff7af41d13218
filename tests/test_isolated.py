"""Calls in a fresh process; the functions called are the ones at the end of this file."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit import host, isolated
from labkit.isolated import Call, IsolatedError, call, call_many

HERE = "test_isolated"


def test_arguments_and_result_pass_through():
    assert call(f"{HERE}:echo", 1, ["a", None], key={"b": 2.5}) == [[1, ["a", None]], {"key": {"b": 2.5}}]


def test_the_environment_is_changed_there_and_not_here(monkeypatch):
    monkeypatch.setenv("LABKIT_GONE", "1")
    assert call(f"{HERE}:variables", ["LABKIT_NEW", "LABKIT_GONE"], env={"LABKIT_NEW": "x", "LABKIT_GONE": None}) == [
        "x",
        None,
    ]
    assert "LABKIT_NEW" not in os.environ
    assert os.environ["LABKIT_GONE"] == "1"


def test_prints_are_progress_and_not_part_of_the_answer(capsys):
    assert call(f"{HERE}:noisy") == "answer"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["by print", "by the C library", "to stderr"]


def test_lines_come_while_the_function_runs():
    when = []
    call(f"{HERE}:two_lines", 1.0, on_line=lambda line: when.append(time.monotonic()))
    assert len(when) == 2
    assert when[1] - when[0] > 0.5


def test_an_exception_comes_back_with_type_message_and_trace():
    with pytest.raises(IsolatedError) as caught:
        call(f"{HERE}:divide", 1, 0)
    assert (caught.value.kind, caught.value.message) == ("ZeroDivisionError", "division by zero")
    assert "return a / b" in caught.value.trace
    assert "division by zero" in str(caught.value)


@pytest.mark.parametrize("target", ["no_such_module:f", f"{HERE}:no_such_function", "nonsense"])
def test_a_missing_target_is_an_error(target):
    with pytest.raises(IsolatedError) as caught:
        call(target)
    assert caught.value.kind in ("ModuleNotFoundError", "AttributeError")


def test_a_result_that_is_not_json_is_an_error():
    with pytest.raises(IsolatedError, match="TypeError"):
        call(f"{HERE}:a_set")


def test_a_crash_names_the_signal_and_keeps_the_last_lines():
    with pytest.raises(IsolatedError) as caught:
        call(f"{HERE}:crash", on_line=lambda line: None)
    assert caught.value.kind == "crash"
    assert f"signal {signal.SIGSEGV:d}" in caught.value.message
    assert "before the crash" in caught.value.trace


def test_an_exit_is_not_taken_for_an_answer():
    with pytest.raises(IsolatedError, match="exit status 3"):
        call(f"{HERE}:leave", 3)


def test_time_out_ends_the_process(tmp_path):
    start = time.monotonic()
    with pytest.raises(IsolatedError) as caught:
        call(f"{HERE}:sleep", 60, str(tmp_path / "pid"), timeout=2)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - start < 20
    assert ended(int((tmp_path / "pid").read_text()))


def test_stop_ends_the_process_even_one_that_ignores_the_request(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "GRACE_S", 0.3)
    stop = threading.Event()
    threading.Timer(2, stop.set).start()
    with pytest.raises(IsolatedError) as caught:
        call(f"{HERE}:sleep", 60, str(tmp_path / "pid"), deaf=True, stop=stop)
    assert caught.value.kind == "stopped"
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_process_left_behind_does_not_hold_up_the_answer():
    start = time.monotonic()
    assert call(f"{HERE}:leave_a_process_behind", 5) == "answer"
    assert time.monotonic() - start < 4


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_process_dies_with_its_parent(tmp_path):
    code = f"from labkit.isolated import call; call('{HERE}:sleep', 60, {str(tmp_path / 'pid')!r})"
    folders = [str(Path(__file__).parent), str(Path(isolated.__file__).parents[1])]
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)})
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    pid = int((tmp_path / "pid").read_text())
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(pid)


def test_many_calls_keep_their_order():
    calls = [Call(f"{HERE}:echo", (i,), {"k": i}, {"X": str(i)}) for i in range(5)]
    assert call_many(calls, workers=2) == [[[i], {"k": i}] for i in range(5)]


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (9, 3)])
def test_many_calls_take_the_cores_that_there_are_and_no_more(monkeypatch, cores, workers):
    taken = []

    def pool(count):
        taken.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(isolated, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(isolated, "call", lambda target, *args, **options: args[0])
    monkeypatch.setattr(host, "cores", lambda: cores)
    assert call_many([Call(f"{HERE}:echo", (i,)) for i in range(3)]) == [0, 1, 2]
    assert call_many([]) == []
    assert taken == [workers, 1]


def test_the_first_failure_of_many_stops_the_others():
    calls = [Call(f"{HERE}:sleep", (60,)), Call(f"{HERE}:divide", (1, 0)), Call(f"{HERE}:sleep", (60,))]
    start = time.monotonic()
    with pytest.raises(IsolatedError, match="ZeroDivisionError"):
        call_many(calls, workers=2)
    assert time.monotonic() - start < 30


def test_a_process_that_was_started_before_has_done_what_comes_first():
    started = isolated.Started(f"{HERE}:remember", 5, env={"LABKIT_NEW": "x"})
    try:
        assert call(f"{HERE}:remembered", ["LABKIT_NEW"], started=started) == [5, ["x"]]
    finally:
        started.close()


def test_what_it_is_told_of_later_is_done_in_order_before_it_is_ready():
    started = isolated.Started(f"{HERE}:remember", 5)
    try:
        assert started.ready()
        started.also(f"{HERE}:divide", 1, 0)
        started.also(f"{HERE}:remember", 7)
        assert started.ready()
        assert started.ready()  # nothing is left to wait for
        assert call(f"{HERE}:remembered", [], started=started) == [7, []]
    finally:
        started.close()


def test_one_that_dies_of_what_it_is_told_later_is_not_ready():
    started = isolated.Started(f"{HERE}:remember", 5)
    try:
        started.also("os:_exit", 3)
        assert not started.ready()
    finally:
        started.close()


@pytest.mark.parametrize("first", [f"{HERE}:divide", "no_such_module:f"])
def test_what_fails_first_is_of_no_account(first):
    started = isolated.Started(first, 1, 0)
    try:
        assert call(f"{HERE}:echo", 1, started=started) == [[1], {}]
    finally:
        started.close()


def test_one_that_is_not_called_is_ended():
    started = isolated.Started(f"{HERE}:remember", 5)
    started.close()
    assert started._child.poll() is not None


def test_one_that_has_died_is_a_crash():
    started = isolated.Started("os:_exit", 3)
    try:
        started._child.wait(60)
        with pytest.raises(IsolatedError, match="ended without an answer: exit status 3"):
            call(f"{HERE}:echo", started=started)
    finally:
        started.close()


def test_a_process_that_reads_notebooks_is_not_held_up_by_a_grammar():
    """`rfc3987_syntax`, which takes longer than everything else together; this process need not have been spared it."""
    assert call(f"{HERE}:reads_notebooks") == {"nbformat": True, "rfc3987_syntax": False}


def ended(pid):
    """Whether a process is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# What is called


def echo(*args, **kwargs):
    return [args, kwargs]


def variables(names):
    return [os.environ.get(name) for name in names]


def noisy():
    print("by print")
    libc = ctypes.CDLL(None)
    libc.puts(b"by the C library")
    libc.fflush(None)
    print("to stderr", file=sys.stderr)
    return "answer"


def two_lines(seconds):
    print("one")
    time.sleep(seconds)
    print("two")


def remember(value):
    global kept
    kept = value


def remembered(names):
    return [kept, variables(names)]


def divide(a, b):
    return a / b


def a_set():
    return {1, 2}


def crash():
    print("before the crash")
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(status):
    os._exit(status)


def sleep(seconds, pid_file=None, deaf=False):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if pid_file:
        Path(f"{pid_file}.new").write_text(str(os.getpid()))
        os.replace(f"{pid_file}.new", pid_file)
    time.sleep(seconds)


def leave_a_process_behind(seconds):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"], stdout=2)
    return "answer"


def reads_notebooks():
    import nbformat  # noqa: F401

    return {name: sys.modules.get(name) is not None for name in ("nbformat", "rfc3987_syntax")}
