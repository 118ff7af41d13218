"""The hash of what runs: it follows helpers, and nothing that does not run counts."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import labkit
from labkit import studies
from labkit.bench import sha, sweep

KERNELS = '''
"""A module."""
from labkit.launch import Launch
from labkit.toy_helpers import BLOCK as SIZE, scale
from os import path

WARPS = {"few": 1, "many": 4}
UNUSED = 1


@staticmethod
def _kernel(x, n: int, *, BLOCK: "tl.constexpr" = SIZE, even=None):
    """Multiply."""
    for i in range(0, n, BLOCK):
        x[i : i + BLOCK] = [scale(y) if y else -1.5 for y in x[i:]]
    return x


def launch(x, warps="few"):
    check_size(x)
    return Launch(_kernel, (path.getsize(x),), {"x": x}, {"num_warps": WARPS[warps]})


def check_size(x):
    if len(x) % 2:
        raise ValueError("odd")


def other(x):
    return x + UNUSED
'''
HELPERS = '''
BLOCK = 128
FACTOR: float = 2.0


def scale(y):
    return clamp(FACTOR * y)


def clamp(y, low=0, high=255):
    """Between."""
    return max(low, min(high, y)) if y is not None else again(y)


def again(y):
    return scale(0)
'''
# What the syntax trees of different Python versions could disagree on.
SYNTAX = '''
from __future__ import annotations
def launch(a, /, b: int = 1, *args, c=None, **more) -> "dict[str, int]":
    """Docstring."""
    global STATE
    name = f"{a!r:>8} {{x}} {b=} {more['k']}" "joined" f"{c}"
    pair = a[1:2, ::3], a[..., None], b"\\x00\\xff", 1e-7, 1_000, 0x10, 3j, -1, True, (), [], {}, {1, 2}, "µ\\n"
    if (found := [i for i in args if i not in (None, 1) and i is not b]) or not found: pass
    with open(a) as one, open(b): yield from one
    try:
        assert a @ b // 2 ** 3, "never"
    except (ValueError, OSError) as problem:
        raise RuntimeError from problem
    else:
        del a
    finally:
        pair += (lambda x, *y, z=1: x if y else z)(*args, **more),
    match b:
        case [1, *rest] | {"k": rest}: ...
        case Point(x=0) as p if p: return
        case None: return
    while True:
        async def inner(): return [await j async for j in a]
        break
    @decorated(1)
    class Local(Base, metaclass=Meta):
        """Another."""
        x: int
        y: list[int] = field(default_factory=list)
    return helper(Local)
def helper(x): return not x
STATE = [STATE_SIZE := 3]
'''
SYNTAX_SHA = "de07fb0832c8"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Hash of labkit.toy_kernels:launch, as it is with the given sources; they are written as modules of the lab."""
    monkeypatch.setattr(labkit, "__path__", [*labkit.__path__, str(tmp_path)])

    definitions, hashes = sha._definitions, sha._lab_sha

    def forget() -> None:
        definitions.cache_clear()
        hashes.cache_clear()

    def kernel_sha(kernels: str = KERNELS, helpers: str = HELPERS, name: str = "launch") -> str:
        (tmp_path / "toy_kernels.py").write_text(kernels)
        (tmp_path / "toy_helpers.py").write_text(helpers)
        importlib.invalidate_caches()
        forget()
        return sha.kernel_sha(f"labkit.toy_kernels:{name}")

    yield kernel_sha
    forget()


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def test_it_is_twelve_hexadecimal_digits_and_the_same_again(toy: Callable[..., str]):
    found = toy()
    assert len(found) == 12
    assert int(found, 16) >= 0
    assert toy() == found
    assert toy(name="other") != found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    for i in", "    # a comment\n\n    for i in"),
        ("range(0, n, BLOCK)", "range(\n        0,\n        n,\n        BLOCK,\n    )"),
        ('"""Multiply."""', '"""Multiply, in blocks."""'),
        ('    """Multiply."""\n', ""),
        ('"""A module."""', ""),
        ('"few"', "'few'"),
        ("UNUSED = 1", "UNUSED = 2"),
        ("return x + UNUSED", "return x - UNUSED"),
        ("from os import path", "from posix import path"),  # no code of the lab
        ('raise ValueError("odd")', 'raise ValueError("an odd size")'),
        ("if len(x) % 2", "if len(x) % 4"),
        ("def other", "def added(): ...\n\n\ndef other"),
    ],
)
def test_what_does_not_count(toy: Callable[..., str], old: str, new: str):
    assert toy(changed(KERNELS, old, new)) == toy()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-1.5", "-1.25"),
        ("-1.5", "1.5"),
        ("range(0, n, BLOCK)", "range(n, BLOCK)"),
        ('"few": 1', '"few": 2'),  # a constant that a kernel's launcher names
        ("even=None", "even=False"),
        ("@staticmethod\n", ""),
        ("check_size(x)\n    return", "return"),  # the call itself is in the launcher
        ("BLOCK as SIZE", "FACTOR as SIZE"),
        ("if y else", "if not y else"),
    ],
)
def test_what_counts(toy: Callable[..., str], old: str, new: str):
    assert toy(changed(KERNELS, old, new)) != toy()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("BLOCK = 128", "BLOCK = 64"),
        ("FACTOR: float = 2.0", "FACTOR: float = 2.5"),
        ("high=255", "high=127"),  # of a helper of a helper
        ("scale(0)", "scale(1)"),  # in the cycle scale -> clamp -> again -> scale
    ],
)
def test_a_change_in_a_helper_in_another_module_counts(toy: Callable[..., str], old: str, new: str):
    assert toy(helpers=changed(HELPERS, old, new)) != toy()
    assert toy(helpers=changed(HELPERS, '"""Between."""', '"""From low to high."""')) == toy()


def test_helpers_named_through_their_module_count(toy: Callable[..., str]):
    for kernels in (
        "from labkit import toy_helpers\n\n\ndef launch(x):\n    return toy_helpers.clamp(x)\n",
        "def launch(x):\n    from labkit import toy_helpers as h\n\n    return h.clamp(x)\n",
        "def launch(x):\n    from labkit.toy_helpers import clamp as c\n\n    return c(x)\n",
    ):
        assert toy(kernels, changed(HELPERS, "high=255", "high=127")) != toy(kernels)
        assert toy(kernels, changed(HELPERS, "BLOCK = 128", "BLOCK = 64")) == toy(kernels)  # not named


def test_a_kernel_of_the_machine_study_counts():
    """Its launchers import their kernels where they need them."""
    parts: dict[tuple[str, str], str] = {}
    sha._collect("labkit.machine.study", "_prepare_read", parts)
    assert ("labkit.machine.kernels", "_read_kernel") in parts


def test_two_functions_that_name_each_other(toy: Callable[..., str]):
    cycle = "def launch(x):\n    return back(x)\n\n\ndef back(x):\n    return launch(x - 1)\n"
    found = toy(cycle)
    assert found != toy(changed(cycle, "x - 1", "x - 2"))


def test_machinery_of_the_lab_is_not_followed(toy: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    """How a launch is made a value, or timed, is not what runs."""
    found = toy()
    real = sha._definitions
    asked = []
    sha._lab_sha.cache_clear()
    monkeypatch.setattr(sha, "_definitions", lambda module: (asked.append(module), real(module))[1])
    assert sha.kernel_sha("labkit.toy_kernels:launch") == found
    assert "labkit.toy_helpers" in asked
    assert "labkit.launch" not in asked


@pytest.mark.parametrize(
    "source",
    [
        "labkit.toy_kernels:nothing",
        "labkit.toy_kernels:",
        "labkit.toy_kernels",
        "labkit.no_such_module:launch",
        "no_such_package.kernels:launch",
        "",
    ],
)
def test_an_unknown_name_is_an_error_that_shows_it(toy: Callable[..., str], source: str):
    toy()
    with pytest.raises(ValueError, match=r"to hash") as caught:
        sha.kernel_sha(source)
    assert repr(source.partition(":")[0]) in str(caught.value)


def test_the_hash_does_not_depend_on_the_version_of_python(toy: Callable[..., str], tmp_path: Path):
    """A change here makes every recorded row stale: only on purpose."""
    assert toy(SYNTAX) == SYNTAX_SHA
    script = (
        f"import labkit; labkit.__path__.append({str(tmp_path)!r}); from labkit.bench.sha import kernel_sha; "
        "print(kernel_sha('labkit.toy_kernels:launch'))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(labkit.__file__).parents[1])}
    found = {sys.version: SYNTAX_SHA}
    for name in (f"python3.{minor}" for minor in range(11, 16)):
        # A name that is there may still not run (pyenv's shims); those that do must agree.
        if shutil.which(name) and subprocess.run([name, "-c", ""], capture_output=True).returncode == 0:
            found[name] = subprocess.run(
                [name, "-c", script], env=env, capture_output=True, text=True, check=True
            ).stdout.strip()
    assert set(found.values()) == {SYNTAX_SHA}, found


@pytest.mark.parametrize("name", studies.NOTEBOOKS)
def test_every_variant_of_the_lab_has_a_hash(name: str):
    study = studies.load(name)
    sources = {variant.source for case in study.tiny for variant in sweep.with_control(study, case)}
    assert sources
    for source in sources:
        assert len(sha.kernel_sha(source)) == 12
