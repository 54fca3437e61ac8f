"""Measure how many small faults in the sources the tests notice.

`python tools/mutation.py --sample 200` puts one fault at a time into a copy of a package, by cosmic-ray's
operators. It runs the test files that execute the changed line, the quickest first. A first pass of coverage
finds these files and is kept in `.mutation/`. The sample follows from the seed. Exits with 1 below the bar.
"""
# ruff: noqa: INP001, T201, S603  # a script that runs tests

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from difflib import unified_diff
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from attrs import asdict, frozen

ROOT: Final = Path(__file__).resolve().parent.parent
KEPT: Final = ROOT / ".mutation"
BAR: Final = 0.85
QUICK: Final = ("-m", "not slow and not together")
COMPAT: Final = "contrib/compat/src/accel_compat/**/"
ROOMS: Final = {
    "training": (("accel_core/training/*.py",), ("tests/train",)),
    "checkpoint": (("accel_core/checkpoint/*.py",), ("tests/checkpoint", "tests/weights")),
    "data": (("accel_core/data/*.py",), ("tests/data",)),
    "distributed": (("accel_core/distributed/*.py",), ("tests/ops", "tests/run", "tests/data")),
    "compat": (
        (f"{COMPAT}*loader*.py", f"{COMPAT}*sampler*.py", f"{COMPAT}*step*.py"),
        ("contrib/compat/tests",),
    ),
}
"""Room -> its sources, and the folders of its tests."""
COVERAGE: Final = """[run]
branch = false
parallel = true
concurrency = multiprocessing,thread
patch = subprocess,fork,_exit
data_file = {data}
include = {include}
"""


@frozen
class Mutant:
    """A fault: an operator of cosmic-ray, and which of its places in the module."""

    module: str
    line: int
    operator: str
    occurrence: int


@frozen
class Result:
    """What became of a mutant: killed, survived, or unreached (no test executes the line)."""

    room: str
    mutant: Mutant
    outcome: str
    by: str
    seconds: float
    diff: str


def test_files(room: str) -> list[str]:
    """List the test files of a room."""
    return sorted(
        str(file.relative_to(ROOT)) for folder in ROOMS[room][1] for file in (ROOT / folder).glob("test_*.py")
    )


def reach(files: Sequence[str], limit: float) -> dict[str, dict[str, object]]:
    """Test file -> its seconds, and the lines that it executes by module. Measured once for each text."""
    KEPT.mkdir(exist_ok=True)
    found = {}
    for file in files:
        name = KEPT / f"{file.replace('/', '-')}.json"
        if not name.exists():
            name.write_text(json.dumps(measured(file, limit)), encoding="utf-8")
        found[file] = json.loads(name.read_text("utf-8"))
    return found


def measured(file: str, limit: float) -> dict[str, object]:
    """Run a test file under coverage, its worker processes included."""
    from coverage import CoverageData

    with TemporaryDirectory() as folder:
        settings, data = Path(folder, "coveragerc"), Path(folder, "data")
        sources = ",".join(f"*/{name}" for name in ("accel_core/*", "accel_compat/*"))
        settings.write_text(COVERAGE.format(data=data, include=sources), encoding="utf-8")
        started = time.monotonic()
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
        passed = run_pytest(command, [file], {}, limit) == "passed"
        lines: dict[str, set[int]] = defaultdict(set)
        for part in Path(folder).glob("data.*"):
            held = CoverageData(str(part))
            held.read()
            for path in held.measured_files():
                module = path[max(path.rfind("accel_core/"), path.rfind("accel_compat/")) :]
                lines[module].update(held.lines(path) or ())
        seconds = time.monotonic() - started
    return {"passed": passed, "seconds": seconds, "lines": {name: sorted(at) for name, at in lines.items()}}


def run_pytest(command: Sequence[str], files: Sequence[str], variables: dict[str, str], limit: float) -> str:
    """Give passed, failed, or timeout."""
    options = ("-x", "-q", "-p", "no:cacheprovider", *QUICK)
    with subprocess.Popen(
        [*command, *options, *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return "passed" if process.wait(limit) in (0, 5) else "failed"  # 5: all tests are deselected
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "timeout"


@cache
def places_of(path: Path) -> list[list[Mutant]]:
    """List the faults of each place: of each line, and kind of operator."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(path.read_text("utf-8"))))
    places: dict[tuple[int, str], list[Mutant]] = defaultdict(list)
    for name, operator in operators().items():
        lines = [at[0][0] for node in nodes for at in operator.mutation_positions(node)]
        for occurrence, line in enumerate(lines):
            mutant = Mutant(str(path.relative_to(ROOT)), line, name, occurrence)
            places[line, name.partition("_")[0]].append(mutant)
    return [places[place] for place in sorted(places)]


@cache
def operators() -> dict[str, Any]:
    """Make each operator of cosmic-ray that takes no arguments."""
    from cosmic_ray.plugins import get_operator, operator_names

    made = {}
    for name in sorted(operator_names()):
        with suppress(TypeError):
            made[name] = get_operator(name)()
    return made


def mutated(mutant: Mutant) -> str | None:
    """Write the module with the fault; None if the program stays the same."""
    from cosmic_ray.mutating import mutate_code

    source = (ROOT / mutant.module).read_text("utf-8")
    text: str | None = mutate_code(source, operators()[mutant.operator], mutant.occurrence)
    try:
        return None if text is None or bare(text) == bare(source) else text
    except SyntaxError:
        return None


def bare(source: str) -> str:
    """Return the program without annotations, which are never evaluated."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def sample(room: str, size: int, seed: int) -> list[Mutant]:
    """Choose lines at random, and at each of them one of its faults."""
    draw = random.Random(f"{seed} {room}")  # noqa: S311  # nothing secret
    paths = sorted({path for pattern in ROOMS[room][0] for path in ROOT.glob(pattern)})
    sizes = [path.stat().st_size for path in paths]
    chosen: list[Mutant] = []
    for path in draw.choices(paths, sizes, k=20 * size):
        mutant = draw.choice(draw.choice(places_of(path) or [[]]) or [None])
        if mutant is not None and mutant not in chosen and len(chosen) < size and mutated(mutant) is not None:
            chosen.append(mutant)
    return chosen


def judged(room: str, mutant: Mutant, tests: dict[str, dict[str, object]], budget: float) -> Result:
    """Run what executes the line until a test fails."""
    source, text = (ROOT / mutant.module).read_text("utf-8"), mutated(mutant)
    assert text is not None
    diff = "\n".join(
        line
        for line in unified_diff(source.splitlines(), text.splitlines(), n=0)
        if line[:2] not in ("--", "++", "@@")
    )
    inside = mutant.module[max(mutant.module.rfind("accel_core/"), mutant.module.rfind("accel_compat/")) :]
    reaching = [file for file, facts in tests.items() if mutant.line in facts["lines"].get(inside, ())]
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        package = inside.partition("/")[0]
        origin = ROOT / mutant.module.removesuffix(inside) / package
        shutil.copytree(origin, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, inside).write_text(text, encoding="utf-8")
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        for file in sorted(reaching, key=lambda file: tests[file]["seconds"]):
            left = budget - (time.monotonic() - started)
            limit = min(left, 60 + 5 * tests[file]["seconds"])
            if left <= 0:
                break
            if run_pytest([sys.executable, "-m", "pytest"], [file], {"PYTHONPATH": path}, limit) != "passed":
                return Result(room, mutant, "killed", file, time.monotonic() - started, diff)
    return Result(room, mutant, "survived" if reaching else "unreached", "", time.monotonic() - started, diff)


def main() -> int:
    """Judge a sample of each room, and print what survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="mutants of all rooms together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="joined by commas")
    parser.add_argument("--seconds", type=float, default=600, help="for a mutant, at most")
    given = parser.parse_args()
    rooms = given.rooms.split(",")
    results: list[Result] = []
    for room in rooms:
        tests = {
            name: facts for name, facts in reach(test_files(room), given.seconds).items() if facts["passed"]
        }
        for mutant in sample(room, given.sample // len(rooms), given.seed):
            result = judged(room, mutant, tests, given.seconds)
            results.append(result)
            print(
                f"{result.outcome}: {mutant.module}:{mutant.line} {result.by} {result.seconds:.0f} s",
                flush=True,
            )
            if result.outcome != "killed":
                print(result.diff, flush=True)
    (KEPT / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    for room in rooms:
        counts = Counter(result.outcome for result in results if result.room == room)
        print(f"{room}: {counts['killed']} of {counts.total()} killed, {counts['unreached']} not reached")
    killed = sum(result.outcome == "killed" for result in results) / max(1, len(results))
    print(f"{killed:.0%} of {len(results)} mutants are killed; the bar is {BAR:.0%}")
    return 0 if killed >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
