"""What the lab does where Triton cannot be imported, as JSON; called in a process of its own by test_end_to_end."""

import importlib
import json
import pkgutil
from importlib.util import find_spec
from typing import Any

from click.testing import CliRunner
from test_lab import cells

import labkit
from labkit import cli, registry

COMMANDS = (("list",), ("doctor",), ("run", "--source", "measure"))


def not_imported() -> dict[str, str]:
    """The lab's modules that cannot be imported -> the module that each of them misses."""
    found = {}
    for module in pkgutil.walk_packages(labkit.__path__, "labkit."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ImportError as problem:
            found[module.name] = problem.name
    return found


def command(*words: str) -> dict[str, Any]:
    """`labkit WORDS` in this process."""
    done = CliRunner().invoke(cli.main, words, prog_name="labkit", catch_exceptions=False)
    return {"status": done.exit_code, "stdout": done.stdout, "stderr": done.stderr}


if __name__ == "__main__":
    spec, missing = find_spec("triton"), not_imported()
    shown = {study: cells(study) for study in registry.NOTEBOOKS}
    commands = {" ".join(words): command(*words) for words in COMMANDS}
    print(json.dumps({"triton": spec, "not imported": missing, "shown": shown, "commands": commands}))
