"""Measure how many small faults in the sources the tests notice.

`python tools/mutation.py --sample 200` puts one fault at a time into a copy of a package, by cosmic-ray's
operators. It runs the tests that execute the changed line, the quickest first; of a changed head of a
function, those that execute its body. A first pass of coverage finds these tests and is kept in
`.mutation/` until a source, a helper or its test file changes. The sample follows from the seed. Two kinds
of place are left out, since no program shows a fault there: the text that a `raise` composes, and
`strict=True` of a `zip` over sequences that have one length.
`--source FILE --tests FILE` judges one module by some tests. Exits with 1 below the bar.
"""
# ruff: noqa: INP001, T201, S603  # a script that runs tests

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import unified_diff
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from attrs import asdict, field, frozen

ROOT: Final = Path(__file__).resolve().parent.parent
KEPT: Final = ROOT / ".mutation"
BAR: Final = 0.85
PACKAGES: Final = {"accel_core": ROOT, "accel_compat": ROOT / "contrib/compat/src"}
COMPAT: Final = "contrib/compat/src/accel_compat/"
ROOMS: Final = {
    "contract": (("accel_core/contract/*.py",), ("tests/host", "tests/train", "tests/run")),
    "plugins": (("accel_core/plugins/*.py",), ("tests/host", "tests/cli")),
    "config": (("accel_core/config/*.py",), ("tests/config",)),
    "distributed": (
        ("accel_core/distributed/*.py",),
        (
            "tests/ops",
            "tests/run",
            "tests/data",
            *(f"tests/utilities/test_{what}.py" for what in ("rank_logging", "local_sgd")),
        ),
    ),
    "storage": (("accel_core/storage/*.py",), ("tests/storage", "tests/checkpoint", "tests/weights")),
    "checkpoint": (
        ("accel_core/checkpoint/*.py",),
        (
            *("tests/checkpoint", "tests/weights"),
            *(f"contrib/stores/tests/test_stores_{what}.py" for what in ("tiers", "faults", "bytes")),
        ),
    ),
    "data": (("accel_core/data/*.py",), ("tests/data", "backends/ddp/tests/test_ddp_uneven.py")),
    "launch": (("accel_core/launch/*.py",), ("tests/launch",)),
    "training": (
        ("accel_core/training/*.py",),
        ("tests/train", "tests/run/test_ranks_that_part.py", "backends/ddp/tests/test_ddp_uneven.py"),
    ),
    "defaults": (("accel_core/defaults/*.py",), ("tests/train", "tests/run", "tests/tracking")),
    "runtime": (("accel_core/runtime/*.py",), ("tests/run", "tests/tracking", "tests/utilities")),
    "accelerator": (
        ("accel_core/accelerator/*.py",),
        ("tests/train", "tests/run", "tests/ops", "tests/utilities", "tests/weights"),
    ),
    "cli": (
        ("accel_core/cli/*.py",),
        (
            "tests/cli",
            "tests/config/test_config_commands.py",
            "tests/checkpoint/test_checkpoint_command.py",
        ),
    ),
    "compat": (
        tuple(f"{COMPAT}{folder}/*.py" for folder in ("accelerator", "loaders", "state")),
        ("contrib/compat/tests", "backends/megatron/tests/test_megatron_compat.py"),
    ),
}
"""Room -> its sources, and its tests: folders and files."""
OPTIONS: Final = ("-q", "-p", "no:cacheprovider", "-m", "not full")
SETTINGS: Final = ("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"))
COVERAGE: Final = """[run]
branch = false
parallel = true
core = ctrace
concurrency = multiprocessing,thread
patch = subprocess,_exit
disable_warnings = no-data-collected,module-not-measured,module-not-imported
data_file = {data}
include = {include}
"""
ELSEWHERE: Final = 99
PROGRAM: Final = f"""
import sys
from importlib.util import find_spec
if not find_spec(sys.argv[2]).origin.startswith(sys.argv[1]):
    sys.exit({ELSEWHERE})
import pytest
sys.exit(pytest.main(sys.argv[3:]))
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
    """What became of a mutant: killed, survived, unreached by any test, or undecided for want of time."""

    room: str
    mutant: Mutant
    outcome: str
    by: str
    seconds: float
    diff: str


@frozen
class Reach:
    """What the tests execute: seconds of each, and by module and line those that execute it."""

    seconds: dict[str, float] = field(factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(factory=lambda: defaultdict(lambda: defaultdict(set)))

    def of(self, module: str, lines: Iterable[int]) -> list[str]:
        """List the tests that execute one of these lines, the quickest first.

        A line that runs as its file is imported belongs to all tests of the file.
        """
        found = set[str]().union(*(self.lines[module][line] for line in lines))
        files = {name for name in found if "::" not in name}
        of_files = (test for test in self.seconds if test.partition("::")[0] in files)
        return sorted({*(found & self.seconds.keys()), *of_files}, key=lambda test: self.seconds[test])


class ByTest:
    """A plugin of pytest: tell coverage which test runs, and which files of worker processes are its own."""

    def __init__(self, measuring: Any, folder: Path) -> None:
        self.measuring, self.folder = measuring, folder
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.owners: dict[str, str] = {}

    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Run a test in a context of its own."""
        started = time.monotonic()
        self.measuring.switch_context(item.nodeid)
        try:
            return (yield)  # type: ignore[return-value]  # pluggy's form of a wrapper
        finally:
            self.measuring.switch_context("")
            self.seconds[item.nodeid] = time.monotonic() - started
            for part in self.folder.glob("data.*"):
                self.owners.setdefault(part.name, item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a test that fails."""
        if report.failed:
            self.failed.add(report.nodeid)


def test_files(room: str) -> list[str]:
    """List the test files of a room."""
    places = [ROOT / place for place in ROOMS[room][1]]
    files = {file for place in places for file in (place.glob("test_*.py") if place.is_dir() else [place])}
    return sorted(str(file.relative_to(ROOT)) for file in files)


def reach(files: Sequence[str], limit: float) -> Reach:
    """Return what the tests of these files execute, measured once for each text of the sources."""
    KEPT.mkdir(exist_ok=True)
    found = Reach()
    for file in files:
        text = digest(file)
        kept = KEPT / f"{file.replace('/', '-')}.json"
        facts = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
        if facts.get("digest") != text:
            facts = {"digest": text, **measured(file, limit)}
            kept.write_text(json.dumps(facts), encoding="utf-8")
        found.seconds.update(facts["seconds"])
        for module, lines in facts["lines"].items():
            for line, numbers in lines.items():
                found.lines[module][int(line)].update(facts["names"][number] for number in numbers)
    return found


def digest(file: str) -> str:
    """Return a digest of this test file, of the sources and of the tests' helpers."""
    made = hashlib.sha256(common() + (ROOT / file).read_bytes())
    return made.hexdigest()


@cache
def common() -> bytes:
    """Return a digest of all files that are not test files."""
    made = hashlib.sha256()
    for top in ("accel_core", "backends", "contrib", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not path.name.startswith("test_"):
                made.update(path.read_bytes())
    return made.digest()


def measured(file: str, limit: float) -> dict[str, Any]:
    """Run a test file under coverage, its worker processes included."""
    from coverage import CoverageData

    with TemporaryDirectory() as folder:
        settings, told = Path(folder, "coveragerc"), Path(folder, "tests.json")
        include = ",".join(f"{top}/{package}/*" for package, top in PACKAGES.items())
        settings.write_text(COVERAGE.format(data=Path(folder, "data"), include=include), encoding="utf-8")
        path = before_others(*map(str, PACKAGES.values()))  # where the packages are installed too
        command = [sys.executable, __file__, "--measure", folder, *OPTIONS, file]
        output, _ = run(command, {"PYTHONPATH": path}, limit)
        if not told.exists():
            print(f"not measured, so that it kills nothing: {file}\n{output[-2000:]}", flush=True)
            return {"seconds": {}, "names": [], "lines": {}}
        facts = json.loads(told.read_text("utf-8"))
        names = {name: number for number, name in enumerate([file, *facts["seconds"]])}
        lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for part in Path(folder).glob("data.*"):
            held = CoverageData(str(part))
            held.read()
            owner = facts["owners"].get(part.name, file)
            for path in held.measured_files():
                for line, contexts in held.contexts_by_lineno(path).items():
                    numbers = {names[each or owner] for each in contexts}
                    lines[str(Path(path).relative_to(ROOT))][line] |= numbers
    for test in facts["failed"]:
        print(f"fails without a fault, so that it kills nothing: {test}", flush=True)
        del facts["seconds"][test]
    as_lists = {module: {line: sorted(at[line]) for line in at} for module, at in lines.items()}
    return {"seconds": facts["seconds"], "names": [*names], "lines": as_lists}


def measure(folder: str, *arguments: str) -> int:
    """Run pytest under coverage; the process that `measured` starts."""
    sys.path.pop(0)  # of this tool
    import coverage
    import pytest

    measuring = coverage.Coverage(config_file=str(Path(folder, "coveragerc")))
    measuring.start()
    plugin = ByTest(measuring, Path(folder))
    pytest.hookimpl(wrapper=True)(ByTest.pytest_runtest_protocol)
    code = pytest.main([*arguments], plugins=[plugin])
    measuring.stop()
    measuring.save()
    facts = {"seconds": plugin.seconds, "failed": sorted(plugin.failed), "owners": plugin.owners}
    Path(folder, "tests.json").write_text(json.dumps(facts), encoding="utf-8")
    return int(code)


def run(
    command: Sequence[str], variables: dict[str, str], limit: float, place: Path = ROOT
) -> tuple[str, int | None]:
    """Return a program's output and its exit code; None if it ran out of time."""
    with TemporaryDirectory() as folder, Path(folder, "output").open("w+", encoding="utf-8") as output:
        with subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            code = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        return Path(output.name).read_text("utf-8", "replace"), code


def before_others(*folders: str) -> str:
    """Return PYTHONPATH with these folders before what it has."""
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


@cache
def places_of(path: Path) -> list[list[Mutant]]:
    """List the faults of each place: of each line, and kind of operator."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = [(node, is_left_out(node)) for node in ast_nodes(get_ast(path.read_text("utf-8")))]
    places: dict[tuple[int, str], list[Mutant]] = defaultdict(list)
    for name, operator in operators().items():
        lines = [(at[0][0], left) for node, left in nodes for at in operator.mutation_positions(node)]
        for occurrence, (line, left_out) in enumerate(lines):
            if not left_out:
                mutant = Mutant(str(path.relative_to(ROOT)), line, name, occurrence)
                places[line, name.partition("_")[0]].append(mutant)
    return [places[place] for place in sorted(places)]


def is_left_out(node: Any) -> bool:
    """Tell if a node is in the text that a `raise` composes, or is `True` of `strict=True`."""
    before = node.get_previous_sibling() if node.type == "keyword" else None
    if before is not None and before.type == "operator":
        name = before.get_previous_sibling()
        return bool(
            node.value == "True" and before.value == "=" and name and name.get_code().strip() == "strict"
        )
    text = node if node.type == "fstring" else node.search_ancestor("fstring")
    return text is not None and text.search_ancestor("raise_stmt") is not None


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


def sample(room: str, patterns: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """Choose lines at random, and at each of them one of its faults."""
    draw = random.Random(f"{seed} {room}")  # noqa: S311  # nothing secret
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    sizes = [path.stat().st_size for path in paths]
    chosen: list[Mutant] = []
    for path in draw.choices(paths, sizes, k=20 * size):
        mutant = draw.choice(draw.choice(places_of(path) or [[]]) or [None])
        if mutant is not None and mutant not in chosen and len(chosen) < size and mutated(mutant) is not None:
            chosen.append(mutant)
    return chosen


def lines_that_show(source: str, line: int) -> Iterable[int]:
    """Return the lines that run where a fault in this one shows: a head of a function shows in its body."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first, last = min(each.lineno for each in (node, *node.decorator_list)), node.body[0].lineno
            if first <= line < last:
                return range(last, (node.end_lineno or last) + 1)
    return [line]


def judged(room: str, mutant: Mutant, found: Reach, budget: float) -> Result:
    """Run the tests that execute the line until one fails."""
    source, text = (ROOT / mutant.module).read_text("utf-8"), mutated(mutant)
    assert text is not None
    diff = "\n".join(
        line
        for line in unified_diff(source.splitlines(), text.splitlines(), n=0)
        if line[:2] not in ("--", "++", "@@")
    )
    tests, started = found.of(mutant.module, lines_that_show(source, mutant.line)), time.monotonic()
    outcome, by = "unreached", ""
    if tests:
        package, top = next(
            each for each in PACKAGES.items() if (ROOT / mutant.module).is_relative_to(each[1] / each[0])
        )
        with TemporaryDirectory() as folder:
            shutil.copytree(
                top / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__")
            )
            Path(folder, (ROOT / mutant.module).relative_to(top)).write_text(text, encoding="utf-8")
            path = before_others(folder)
            command = [sys.executable, "-c", PROGRAM, folder, package, "-x", *OPTIONS, *SETTINGS]
            # In the copy: Python's own `-c` and `-m` look into the current folder first, in workers too.
            command += [str(ROOT / test) for test in tests]
            output, code = run(command, {"PYTHONPATH": path}, budget, Path(folder))
        if code == ELSEWHERE:
            raise SystemExit(f"{package} comes from elsewhere than its copy, so that no mutant can be judged")
        outcome = {None: "undecided", 0: "survived"}.get(code, "killed")
        by = f"{len(tests)} tests"
        if outcome == "killed":
            told = (line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
            by = next(told, "").rpartition("/")[2]
    return Result(room, mutant, outcome, by, time.monotonic() - started, diff)


def main() -> int:
    """Judge a sample of each room, and print what survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="mutants of all rooms together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="joined by commas")
    parser.add_argument("--source", help="a module, in place of rooms")
    parser.add_argument("--tests", nargs="+", help="files that judge the source")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="for a mutant at most; six times as many for the coverage of a test file",
    )
    given = parser.parse_args()
    if (given.source is None) != (given.tests is None):
        parser.error("--source and --tests go together")
    rooms = {room: (ROOMS[room][0], test_files(room)) for room in given.rooms.split(",")}
    if given.source is not None:
        rooms = {given.source: ((given.source,), given.tests)}
    results: list[Result] = []
    for room, (patterns, files) in rooms.items():
        found = reach(files, 6 * given.seconds)
        for mutant in sample(room, patterns, given.sample // len(rooms), given.seed):
            result = judged(room, mutant, found, given.seconds)
            results.append(result)
            (KEPT / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
            where = f"{mutant.module}:{mutant.line}"
            print(f"{result.outcome}: {where} {result.by} {result.seconds:.0f} s", flush=True)
            if result.outcome != "killed":
                print(result.diff, flush=True)
    for room in rooms:
        counts = Counter(result.outcome for result in results if result.room == room)
        print(room, ", ".join(f"{outcome} {count}" for outcome, count in counts.items()), sep=": ")
    decided = [result for result in results if result.outcome != "undecided"]
    killed = sum(result.outcome == "killed" for result in decided) / max(1, len(decided))
    print(f"{killed:.0%} of {len(decided)} mutants are killed; the bar is {BAR:.0%}")
    return 0 if killed >= BAR else 1


if __name__ == "__main__":
    sys.exit(measure(*sys.argv[2:]) if sys.argv[1:2] == ["--measure"] else main())
