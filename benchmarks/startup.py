"""What starts before training: the command line, the import, a launch.

The command line starts among twelve generated backends, and then among 250 more distributions; raw is an
empty start of Python there.

`python startup.py [--peers PYTHON]` prints the rows. Each figure is a new process's, taken in turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from arena import ENVIRONMENT, HERE, Row, table, timed

GENERATE = HERE.parent / "tests" / "generated_backends.py"
# A full collection over torch's objects takes 80 ms, and comes after so many allocations, whoever makes
# them: without one beforehand it would be charged to whichever contender it happens to hit.
CLOCK = """
import gc, time, torch
gc.collect()
started = time.perf_counter()
{imports}
imported = time.perf_counter()
made = {make}
print("> ", imported - started, time.perf_counter() - imported)
"""
AFTER_TORCH = {
    "ours": ("from accel_core import Accelerator", "Accelerator(cpu=True)"),
    "accelerate": ("from accelerate import Accelerator", "Accelerator(cpu=True)"),
    "fabric": ("from lightning_fabric import Fabric", "Fabric(accelerator='cpu', devices=1)"),
}
OTHERS = 250
Commands = Mapping[str, Sequence[str]]


def measure(peers: str | None, count: int = 5) -> list[Row]:
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, GENERATE, folder], check=True, stdout=subprocess.DEVNULL)
        lean = ENVIRONMENT | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        crowd = Path(folder, "crowd")
        _add_distributions(crowd, OTHERS)
        crowded = lean | {"PYTHONPATH": f"{folder}{os.pathsep}{crowd}"}
        rows = [
            _row(f"{what}, {where}", _turns(commands, environment, count, folder), bar)
            for where, environment in (("12 backends", lean), (f"12 and {OTHERS} others", crowded))
            for what, (commands, bar) in _listings(peers).items()
        ]
        rows += _after_torch(peers, count)
        script = Path(folder, "empty.py")
        script.write_text("")
        figures = _turns(_launches(str(script), peers), ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, count, folder)
    over = {name: value - figures["raw"] for name, value in figures.items() if name != "raw"}
    rows.append(_row("launching an empty script, over torchrun", figures | over, "≤ 150 ms"))
    return rows


def _program(python: str, name: str) -> str:
    return str(Path(python).with_name(name))


def _add_distributions(folder: Path, count: int) -> None:
    """Leave the metadata of distributions that are no plugins, some with entry points of others."""
    for number in range(count):
        info = folder / f"other_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: other-{number}\nVersion: 1.0\n")
        if number % 3 == 0:
            (info / "entry_points.txt").write_text(f"[console_scripts]\nother-{number} = other:main\n")


def _listings(peers: str | None) -> dict[str, tuple[Commands, str]]:
    accel = _program(sys.executable, "accel")
    theirs = [_program(peers, "accelerate")] if peers else None
    return {
        "`accel --help`": (_commands([accel, "--help"], theirs, ["--help"]), "≤ 3 × raw"),
        "`accel plugins`": (_commands([accel, "plugins"], None, []), "≤ 150 ms"),
        "`accel launch --help`": (
            _commands([accel, "launch", "--help"], theirs, ["launch", "--help"]),
            "≤ 5 × raw",
        ),
    }


def _commands(ours: Sequence[str], theirs: Sequence[str] | None, arguments: Sequence[str]) -> Commands:
    return {"raw": [sys.executable, "-c", "pass"], "ours": ours} | (
        {"accelerate": [*theirs, *arguments]} if theirs else {}
    )


def _launches(script: str, peers: str | None) -> Commands:
    found = {
        "raw": [_program(sys.executable, "torchrun"), "--nproc-per-node", "1", script],
        "ours": [_program(sys.executable, "accel"), "launch", "--device", "cpu", "-n", "1", script],
    }
    if peers:
        options = ["--cpu", "--num_processes", "1", "--num_machines", "1"]
        options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
        found["accelerate"] = [_program(peers, "accelerate"), "launch", *options, script]
        found["fabric"] = [_program(peers, "fabric"), "run", "--accelerator", "cpu", script]
    return found


def _turns(commands: Commands, environment: Mapping[str, str], count: int, folder: str) -> dict[str, float]:
    """Milliseconds of each command: the median of `count` processes, after one that is not counted."""
    figures: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(count + 1):
        for name, command in commands.items():
            run = lambda command=command: subprocess.run(  # noqa: E731
                command, env=environment, cwd=folder, check=True, capture_output=True
            )
            figures[name].append(timed(run) / 1e3)
    return {name: median(found[1:]) for name, found in figures.items()}


def _after_torch(peers: str | None, count: int) -> list[Row]:
    pythons = {"ours": sys.executable} | ({"accelerate": peers, "fabric": peers} if peers else {})
    figures: dict[str, list[list[float]]] = {name: [] for name in pythons}
    for _ in range(count + 1):
        for name, python in pythons.items():
            imports, make = AFTER_TORCH[name]
            code = CLOCK.format(imports=imports, make=make)
            command = [python, "-c", code]
            output = subprocess.run(
                command, env=ENVIRONMENT, check=True, capture_output=True, text=True
            ).stdout
            line = next(line for line in output.splitlines() if line.startswith("> "))
            figures[name].append([1e3 * float(word) for word in line[2:].split()])
    imported, made = (
        {name: median(pair[part] for pair in found[1:]) for name, found in figures.items()} for part in (0, 1)
    )
    return [
        _row("`from accel_core import Accelerator`, after torch", imported, "≤ 30 ms"),
        _row("`Accelerator()`, after that", made, "≤ 4 ms"),
    ]


def _row(what: str, figures: Mapping[str, float], bar: str) -> Row:
    return Row(what, *(figures.get(name) for name in ("raw", "accelerate", "fabric", "ours")), bar, "ms")


if __name__ == "__main__":
    print(table(measure(sys.argv[2] if "--peers" in sys.argv else None)))
