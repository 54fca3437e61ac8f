"""Record the signatures of a vendor's functions, as its public source has them at one commit.

A package for a chip keeps such a record in its tests, as JSON: `repository`, `commit`, and for each file of
the vendor the functions that the package and accel-core call, with their parameters; `texts` are words that
a file must contain. `python tools/vendor_signatures.py RECORD.json CLONE` fills the parameters in from a
clone of the repository, bare or not; `--check` compares them. A function or text that is not there is an
error. Imports no torch.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def signatures(source: str) -> dict[str, str]:
    """Read the parameters of the functions that a module defines, without annotations."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            for parameter in ast.walk(node.args):
                if isinstance(parameter, ast.arg):
                    parameter.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def filled(record: dict[str, Any], clone: Path) -> dict[str, Any]:
    """Return the record with the signatures that the clone has at the record's commit.

    Raises:
        SystemExit: the clone lacks the commit, a file, a function or a text.
    """
    functions = {}
    for file, named in record["functions"].items():
        there = signatures(_read(clone, record["commit"], file))
        if missing := sorted(named.keys() - there.keys()):
            raise SystemExit(f"{file} defines no {', '.join(missing)} at {record['commit']}")
        functions[file] = {name: there[name] for name in named}
    for file, texts in record["texts"].items():
        source = _read(clone, record["commit"], file)
        if missing := [text for text in texts if text not in source]:
            raise SystemExit(f"{file} does not contain {', '.join(missing)} at {record['commit']}")
    return {**record, "functions": functions}


def _read(clone: Path, commit: str, file: str) -> str:
    command = ["git", "-C", str(clone), "show", f"{commit}:{file}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - git, by name
    if shown.returncode != 0:
        raise SystemExit(f"{clone}: {shown.stderr.strip()}")
    return shown.stdout


def main(arguments: list[str] | None = None) -> int:
    """Fill the record in, or with --check compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="JSON in a package's tests")
    parser.add_argument("clone", type=Path, help="a clone of the vendor's repository")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the record is stale")
    given = parser.parse_args(arguments)
    text = given.record.read_text(encoding="utf-8")
    fresh = json.dumps(filled(json.loads(text), given.clone), indent=2) + "\n"
    if given.check:
        print(f"{given.record} is {'fresh' if fresh == text else 'stale'}")
        return int(fresh != text)
    given.record.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
