"""How many small mistakes in the kernels the tests find: one constant, one mask or one index is changed at a time.

usage: python scripts/mutations.py [--list] [--each N] [FILE ...]        FILE: kernel files; default: all of them

Of each file N mutations are made (default 3), spread over its kernels, always the same ones. Each is tried in a copy of
the tree, with the tests that import the file's package, those in Triton's interpreter first; the first failure ends it.
A test file that fails without any mutation finds none: it is named and left out.
The last line counts what was caught. Takes about an hour with two cores; the tree itself is not touched.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWAPS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Add: "-", ast.Sub: "+"}


@dataclass(frozen=True)
class Mutation:
    """A change of one place of a file. start, end: its bytes; what: for people."""

    file: Path
    start: int
    end: int
    text: str
    what: str


def mutations(file: Path) -> list[Mutation]:
    """Every mutation of the kernels of a file, in the order of its lines."""
    source = file.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    tree = ast.parse(source)
    kernels = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_kernel(node)]
    return [made for kernel in kernels for made in _of_kernel(file, source, lines, kernel)]


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _of_kernel(file: Path, source: bytes, lines: list[int], kernel: ast.FunctionDef) -> Iterator[Mutation]:
    def span(node: ast.expr) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    for node in (found for statement in kernel.body for found in ast.walk(statement)):
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {kernel.name}"
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield Mutation(
                file, *span(node), str(node.value + 1), f"{where}: constant {node.value} is {node.value + 1}"
            )
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield _swapped(file, source, where, span(node.left)[1], span(node.comparators[0])[0], node.ops[0], "mask")
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield _swapped(file, source, where, span(node.left)[1], span(node.right)[0], node.op, "index")


def _swapped(file: Path, source: bytes, where: str, start: int, end: int, operator: ast.AST, kind: str) -> Mutation:
    between = source[start:end].decode()
    new = re.sub(r"[<>]=?|[+-]", SWAPS[type(operator)], between, count=1)
    return Mutation(file, start, end, new, f"{where}: {kind} {between.strip(' ()')} is {new.strip(' ()')}")


def chosen(file: Path, count: int) -> list[Mutation]:
    """So many of a file's mutations, spread evenly, of every kind that it has."""
    found = mutations(file)
    kinds = [[one for one in found if f": {kind} " in one.what] for kind in ("constant", "mask", "index")]
    kinds = [kind for kind in kinds if kind]
    picked = [kind[(2 * (i // len(kinds)) + 1) * len(kind) // (2 * -(-count // len(kinds)))]
              for i in range(count) if (kind := kinds[i % len(kinds)])]  # fmt: skip
    return list(dict.fromkeys(picked))


def tests_of(file: Path) -> list[Path]:
    """The tests that import a kernel file's package, those of kernels first, the small ones before the large."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    package = module.rpartition(".")[0]
    named = re.compile(rf"(?:from|import) {re.escape(package)}\b")
    found = [path for path in ROOT.glob("tests/**/test_*.py") if named.search(path.read_text())]
    return sorted(found, key=lambda path: (path.parent.name != "kernels", path.stat().st_size))


def is_caught(one: Mutation, folder: Path, tests: list[Path], limit: float) -> str:
    """The test file that finds a mutation in a copy of the tree; empty if none does."""
    target = folder / one.file.relative_to(ROOT)
    source = one.file.read_bytes()
    target.write_bytes(source[: one.start] + one.text.encode() + source[one.end :])
    try:
        return next((str(test.relative_to(ROOT)) for test in tests if not passes(test, folder, limit)), "")
    finally:
        target.write_bytes(source)


def passes(test: Path, folder: Path, limit: float) -> bool:
    """Whether a test file passes in a copy of the tree, in time."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    env |= {"TRITON_INTERPRET": "1"} if test.parent.name == "kernels" else {}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(test.relative_to(ROOT))]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: nothing to run here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="only name the mutations")
    parser.add_argument("--each", type=int, default=3, help="mutations of a file")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one test file")
    given = parser.parse_args()
    files = [path.resolve() for path in given.files] or sorted(ROOT.glob("labkit/**/*.py"))
    files = [file for file in files if mutations(file)]
    wanted = [one for file in files for one in chosen(file, given.each)]
    if given.list:
        print("\n".join(one.what for one in wanted))
        return 0
    caught = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("labkit", "tests", "data", "notebooks", "scripts", "pyproject.toml", "README.md", "Makefile"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        tests = {path for file in files for path in tests_of(file)}
        broken = {path for path in sorted(tests) if not passes(path, folder, given.limit)}
        print(f"fail without a mutation: {', '.join(sorted(path.name for path in broken)) or 'none'}", flush=True)
        for one in wanted:
            by = is_caught(one, folder, [path for path in tests_of(one.file) if path not in broken], given.limit)
            caught += bool(by)
            print(f"{'caught' if by else 'MISSED'}  {one.what}{f'  by {by}' if by else ''}", flush=True)
    print(f"{caught} of {len(wanted)} caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
