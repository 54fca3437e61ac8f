"""Run public programs on Accelerate and on accel-compat, and compare every number.

`python tools/programs.py --incumbent FOLDER` runs the programs of `public_programs/catalog.toml` in this
environment, which holds our packages and the programs' libraries. FOLDER holds Accelerate alone
(`uv pip install --target FOLDER --no-deps accelerate==1.15.0`). A program runs on one process and on two.
Each loss, each learning rate, the weights after each optimizer step and each metric must be the same text on
each rank, and the weights that the program saves the same tensors. Exits with 1 if another result came
than the catalog says.

Programs that no package ships are read from `--sources`: a folder with checkouts of the repositories that the
catalog names. Without them they are left out, and listed so.
"""
# ruff: noqa: INP001, T201, S603  # a script that runs programs

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import tomllib
from attrs import field, frozen

HERE: Final = Path(__file__).resolve().parent / "public_programs"
SIDES: Final = ("incumbent", "ours")
EQUAL: Final = "equal"
OFFLINE: Final = {
    "ACCELERATE_USE_CPU": "true",
    "ACCEL_COMPAT_ORDER": "accelerate",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
"""What both sides get. Our side shuffles as Accelerate does, so that several processes can be compared."""


@frozen
class Program:
    """A public program, and what it needs: see the head of the catalog."""

    name: str
    script: str
    arguments: str = ""
    processes: tuple[int, ...] = field(default=(1, 2), converter=tuple)
    replace: dict[str, str] = field(factory=dict)
    variables: dict[str, str] = field(factory=dict)
    expect: str = ""
    because: str = ""
    seconds: int = 100

    def path(self, sources: Path | None) -> Path | None:
        """Its script, or None where that is not on this machine."""
        origin, _, rest = self.script.partition(":")
        places = {"package": Path(sysconfig.get_path("purelib")), "own": HERE / "own"}
        place = places.get(origin) or (sources and sources / origin)
        found = place and place / rest
        return found if found and found.exists() else None


@frozen
class Result:
    """One program on one number of processes."""

    program: Program
    processes: int
    found: str
    detail: str
    steps: int
    seconds: tuple[float, float]

    @property
    def expected(self) -> bool:
        return self.found in (EQUAL, self.program.expect)


def main() -> int:
    """Run what was asked for, print the table; 1 if a result was not expected."""
    arguments = parse()
    work, sources = arguments.work.resolve(), arguments.sources and arguments.sources.resolve()
    programs = [Program(**row) for row in tomllib.loads((HERE / "catalog.toml").read_text())["program"]]
    chosen = [p for p in programs if not arguments.only or any(w in p.name for w in arguments.only)]
    found = [p for p in chosen if p.path(sources)]
    missing = [p.name for p in chosen if p not in found]
    prepare(work, arguments.incumbent.resolve())
    pairs = [(p, n) for p in found for n in p.processes if n in arguments.processes]
    if not arguments.compare:
        run(work, pairs, sources)
    results = [result_of(work, program, count) for program, count in pairs]
    print("\n".join(table(results)))
    if missing:
        print(f"\nLeft out, as their sources are not here: {', '.join(missing)}")
    counts = Counter(result.found for result in results)
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return int(not all(result.expected for result in results))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", help="run the programs whose names contain one of these words")
    parser.add_argument("--incumbent", type=Path, required=True, help="a folder that holds Accelerate alone")
    parser.add_argument("--sources", type=Path, help="a folder with checkouts of public repositories")
    parser.add_argument("--work", type=Path, default=Path(".programs"), help="where the programs run")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--compare", action="store_true", help="compare what an earlier call ran")
    return parser.parse_args()


def prepare(work: Path, incumbent: Path) -> None:
    """Make the data, and each side's folder with its search path."""
    paths = {"incumbent": [incumbent], "ours": []}
    for side, path in paths.items():
        folder = work / side
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("path").write_text(os.pathsep.join(map(str, [*path, HERE / "stand_ins"])))
    if not (work / "assets").exists():
        environment = os.environ | OFFLINE | {"PYTHONPATH": (work / "incumbent/path").read_text()}
        subprocess.run([sys.executable, HERE / "assets.py", work / "assets"], check=True, env=environment)


def run(work: Path, pairs: list[tuple[Program, int]], sources: Path | None) -> None:
    """Run all programs on both sides, which run beside each other."""
    servers = []
    for side in SIDES:
        jobs = [job(work, side, program, count, sources) for program, count in pairs]
        listed = work / side / "jobs.json"
        listed.write_text(json.dumps(jobs))
        path = (work / side / "path").read_text()
        environment = os.environ | OFFLINE | {"PYTHONPATH": path, "ACCEL_COMPAT": str(int(side == "ours"))}
        servers.append(subprocess.Popen([sys.executable, HERE / "server.py", listed], env=environment))
    for server in servers:
        server.wait()


def job(work: Path, side: str, program: Program, count: int, sources: Path | None) -> dict[str, Any]:
    """What the server is to run, in a new folder with links to the data."""
    folder = work / side / f"{program.name}-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for asset in (work / "assets").iterdir():
        folder.joinpath(asset.name).symlink_to(asset)
    script = program.path(sources)
    assert script is not None, program.name  # the caller looked
    if program.replace:
        text = script.read_text()
        for old, new in program.replace.items():
            if old not in text:
                raise SystemExit(f"{program.name}: its catalog entry replaces what it lacks: {old}")
            text = text.replace(old, new)
        folder.joinpath(script.name).write_text(text)
    return {
        "folder": str(folder),
        "script": str(folder / script.name if program.replace else script),
        "beside": str(script.parent),
        "arguments": program.arguments.split(),
        "processes": count,
        "variables": program.variables,
        "seconds": program.seconds,
    }


def result_of(work: Path, program: Program, count: int) -> Result:
    """The program's runs on both sides, compared."""
    folders = [work / side / f"{program.name}-{count}" for side in SIDES]
    ends = [json.loads((folder / "status.json").read_text()) for folder in folders]
    texts = [folder / "record-0.txt" for folder in folders]
    steps = sum(line.startswith("step") for line in lines_of(texts[0]))
    found, detail = compare(folders, [end["statuses"] for end in ends], count)
    seconds = (ends[0]["seconds"], ends[1]["seconds"])
    return Result(program, count, found, detail, steps, seconds)


def compare(folders: list[Path], statuses: list[list[int]], count: int) -> tuple[str, str]:
    """A word for the result, and the first difference."""
    failed = [any(status) for status in statuses]
    if any(failed):
        word = {(True, True): "fail", (True, False): "incumbent fails", (False, True): "ours fails"}
        found = word[failed[0], failed[1]]
        return found, "; ".join(last_words(f, s) for f, s in zip(folders, statuses, strict=True) if any(s))
    for rank in range(count):
        theirs, mine = (lines_of(folder / f"record-{rank}.txt") for folder in folders)
        for number, (their, our) in enumerate(zip_longest(theirs, mine, fillvalue="nothing")):
            if their != our:
                return "differ", f"rank {rank}, line {number}: {their} | {our}"
    if difference := next(differing_files(*folders), None):
        return "differ", difference
    return (EQUAL, "") if lines_of(folders[0] / "record-0.txt") else ("nothing recorded", "")


def differing_files(incumbent: Path, ours: Path) -> Iterator[str]:
    """Weights that a program saved itself and that differ; folders of save_state hold other files."""
    for file in sorted([*incumbent.rglob("*.safetensors"), *incumbent.rglob("pytorch_model.bin")]):
        name = file.relative_to(incumbent)
        if next(file.parent.glob("random_states_*.pkl"), None):
            continue
        other = ours / name
        if not other.exists():
            yield f"{name} was not saved"
        elif file.suffix == ".safetensors" and not have_same_tensors(file, other):
            yield f"{name} differs"


def have_same_tensors(one: Path, other: Path) -> bool:
    """Compare two files of weights, without their metadata: some programs write the time into it."""
    if one.read_bytes() == other.read_bytes():
        return True
    import torch
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name])
        for name, tensor in first.items()
    )


def lines_of(record: Path) -> list[str]:
    """A file's lines; none where it is not there."""
    return record.read_text().splitlines() if record.exists() else []


def last_words(folder: Path, statuses: list[int]) -> str:
    """The last line of what the first failed rank wrote, -1 for one that was ended."""
    rank = next(rank for rank, status in sorted(enumerate(statuses), key=lambda pair: -pair[1]) if status)
    lines = [line for line in lines_of(folder / f"log-{rank}.txt") if line.strip()]
    return f"{folder.parent.name} rank {rank} ({statuses[rank]}): {lines[-1][:150] if lines else ''}"


def table(results: list[Result]) -> Iterator[str]:
    """The lines of a Markdown table with one row per result."""
    yield "| program | processes | steps | result | seconds, Accelerate and ours |"
    yield "|---|---|---|---|---|"
    for result in results:
        mark = "" if result.expected else " (unexpected)"
        reason = f": {result.program.because}" if result.found != EQUAL and result.expected else ""
        said = result.found + mark + reason + (f" [{result.detail}]" if mark else "")
        yield (
            f"| {result.program.name} | {result.processes} | {result.steps} | {said} "
            f"| {result.seconds[0]}, {result.seconds[1]} |"
        )


if __name__ == "__main__":
    sys.exit(main())
