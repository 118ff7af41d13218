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
from labkit import registry
from labkit.bench import sha
from labkit.sweep import run

KERNELS = '''
"""A module."""
from labkit.kernels.launch import Launch
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
SYNTAX_SHA = "1e54eb161c82"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Hash of labkit.toy_kernels:launch, as it is with the given sources; they are written as modules of the lab."""
    monkeypatch.setattr(labkit, "__path__", [*labkit.__path__, str(tmp_path)])

    def kernel_sha(kernels: str = KERNELS, helpers: str = HELPERS, name: str = "launch", **more: str) -> str:
        """more: further modules of the lab, by name."""
        for module, text in ({"toy_kernels": kernels, "toy_helpers": helpers} | more).items():
            (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        sha.forget()
        return sha.kernel_sha(f"labkit.toy_kernels:{name}")

    yield kernel_sha
    sha.forget()


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def test_it_is_twelve_hexadecimal_digits_and_the_same_again(toy: Callable[..., str]):
    found = toy()
    assert len(found) == 12
    assert int(found, 16) >= 0
    assert toy() == found
    assert toy(name="other") != found


def test_within_a_module_others_count_by_name(toy: Callable[..., str]):
    def within(**texts: str) -> str:
        toy(**texts)
        return sha.sha_within("labkit.toy_kernels", "launch")

    found = within()
    assert within(helpers=changed(HELPERS, "FACTOR * y", "FACTOR + y")) == found
    assert within(kernels=changed(KERNELS, '"few": 1', '"few": 2')) != found
    assert within(kernels=changed(KERNELS, "scale(y) if", "SIZE * y if")) != found


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
        ("    check_size(x)\n    return", "    return"),
        ("    check_size(x)\n", "    check_size(x)\n    if UNUSED > 2:\n        raise ValueError(x)\n"),
        ("n: int", "n: float"),
        ("def launch(x, warps", "def launch(x: int, warps: str"),
        ("BLOCK as SIZE", "BLOCK"),  # with what names it:
    ],
)
def test_what_does_not_count(toy: Callable[..., str], old: str, new: str):
    text = changed(KERNELS, old, new)
    assert toy(text.replace("= SIZE", "= BLOCK") if new == "BLOCK" else text) == toy()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-1.5", "-1.25"),
        ("-1.5", "1.5"),
        ("range(0, n, BLOCK)", "range(n, BLOCK)"),
        ('"few": 1', '"few": 2'),  # a constant that a kernel's launcher names
        ("even=None", "even=False"),
        ("@staticmethod\n", ""),
        ("BLOCK as SIZE", "FACTOR as SIZE"),
        ('"tl.constexpr"', "int"),
        ("    check_size(x)\n", "    if x == 0:\n        x = 1\n"),
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


def test_neither_a_move_nor_a_rename_nor_a_split_counts(toy: Callable[..., str]):
    found = toy()
    moved = changed(KERNELS, "from labkit.toy_helpers import", "from labkit.toy_moved import")
    assert toy(moved, "", toy_moved=HELPERS) == found
    renamed = HELPERS.replace("clamp", "limited").replace("FACTOR", "TIMES").replace("scale", "scaled")
    assert toy(changed(KERNELS, "scale", "scaled"), renamed) == found
    assert toy(KERNELS.replace("_kernel", "_multiply").replace("WARPS", "COUNTS").replace("launch(", "begin("),
               name="begin") == found  # fmt: skip
    first, second = HELPERS.split("def clamp")
    first = "from labkit.toy_rest import clamp\n" + first
    assert toy(helpers=first, toy_rest="from labkit.toy_helpers import scale\n\n\ndef clamp" + second) == found


def test_one_constant_of_a_helper_changes_what_names_it_alone(toy: Callable[..., str]):
    both = KERNELS + "\n\ndef narrow(x):\n    return x + SIZE\n"
    names = ("launch", "other", "narrow")
    found = {name: toy(both, name=name) for name in names}
    now = {name: toy(both, changed(HELPERS, "high=255", "high=127"), name=name) for name in names}
    assert [name for name in names if now[name] != found[name]] == ["launch"]


def test_an_attribute_asked_for_by_a_text_is_followed(toy: Callable[..., str]):
    by_name = "from labkit import toy_helpers\n\n\ndef launch(x):\n    return getattr(toy_helpers, 'clamp')(x)\n"
    assert toy(by_name) == toy(changed(by_name, "getattr(toy_helpers, 'clamp')", "toy_helpers.clamp"))
    assert toy(by_name, changed(HELPERS, "high=255", "high=127")) != toy(by_name)


@pytest.mark.parametrize("use", ["getattr(toy_helpers, x)", "other(toy_helpers)", "[toy_helpers]"])
def test_a_module_that_is_handed_on_is_refused(toy: Callable[..., str], use: str):
    """What runs could not be followed, and the hash would promise what it does not hold."""
    with pytest.raises(ValueError, match=r"hands the module labkit\.toy_helpers on as 'toy_helpers'"):
        toy(f"from labkit import toy_helpers\n\n\ndef launch(x):\n    return {use}\n")


def test_a_name_that_cannot_be_followed_is_refused(toy: Callable[..., str]):
    """As what a package gives out only when it is asked."""
    with pytest.raises(ValueError, match=r"'clamps' of labkit\.toy_helpers cannot be followed"):
        toy("from labkit.toy_helpers import clamps\n\n\ndef launch(x):\n    return clamps(x)\n")


def test_a_parameter_hides_what_the_module_calls_the_same(toy: Callable[..., str]):
    hidden = "def launch(scale):\n    return scale + 1\n\n\ndef scale(x):\n    return 2 * x\n"
    assert toy(hidden) == toy(changed(hidden, "2 * x", "3 * x"))
    used = hidden.replace("def launch(scale)", "def launch(x)")
    assert toy(used) != toy(changed(used, "2 * x", "3 * x"))


def test_a_class_s_field_hides_nothing_and_stands_for_nothing(toy: Callable[..., str]):
    text = (
        "def launch(x):\n    return Made(x).product()\n\n\ndef scale(x):\n    return 2 * x\n\n\n"
        "class Made:\n    scale: int = 1\n    both = 3\n\n    def product(self):\n        return self.scale\n"
    )
    assert toy(text) == toy(changed(text, "2 * x", "3 * x"))
    used = changed(text, "return self.scale", "return scale(self)")
    assert toy(used) != toy(changed(used, "2 * x", "3 * x"))


def test_several_launchers_have_one_hash_in_their_order(toy: Callable[..., str]):
    one, other = toy(), toy(name="other")
    both = sha.kernel_sha(("labkit.toy_kernels:launch", "labkit.toy_kernels:other"))
    assert len({one, other, both, sha.kernel_sha(("labkit.toy_kernels:other", "labkit.toy_kernels:launch"))}) == 4
    assert sha.kernel_sha(("labkit.toy_kernels:launch",)) == one


def test_two_functions_that_name_each_other(toy: Callable[..., str]):
    cycle = "def launch(x):\n    return back(x)\n\n\ndef back(x):\n    return launch(x - 1)\n"
    found = toy(cycle)
    assert found != toy(changed(cycle, "x - 1", "x - 2"))


def test_machinery_of_the_lab_is_not_followed(toy: Callable[..., str]):
    """How a launch is made a value, or timed, is not what runs."""
    toy()
    modules = {name.partition(":")[0] for name in sha.covered("labkit.toy_kernels:launch")}
    assert modules == {"labkit.toy_kernels", "labkit.toy_helpers"}


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


@pytest.mark.parametrize("name", registry.NOTEBOOKS)
def test_every_variant_of_the_lab_has_a_hash(name: str):
    study = registry.load(name)
    sources = {variant.source for case in study.tiny for variant in run.with_control(study, case)}
    assert sources
    for source in sources:
        assert len(sha.kernel_sha(source)) == 12
