"""Show on a real accelerator what no other machine can, in one command that ends in time.

`python tools/gpu_proof.py --out FOLDER` runs the checks of `gpu_checks.py`, the tests that are marked `gpu`,
the conformance kit on the stacks of the device, and the benchmarks: a Llama-shaped model by hand, by
Accelerate, by Fabric and by us, float8 beside bfloat16, steps, batches, checkpoints.
FOLDER gets `proof.json`, `proof.md` and what each part printed; both are written anew after each part, so
that a run that is stopped leaves what it has. What begins after `--limit` seconds is "out of time".
What measures nothing runs `--jobs` at a time, then the benchmarks one after the other.

`--wheels FOLDER` installs what `gpu_wheels.sh` collected, where no network is. `--device cpu` or `sim`
rehearses: parts that need a GPU are "not here". Without an accelerator, or a part that `-k` means, it says so
and exits with 2; it exits with 1 if a part failed.
"""
# ruff: noqa: INP001, S603, T201  # a script, which starts what it lists

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

NOTHING_TO_DO = 2
ROOT = Path(__file__).resolve().parent.parent
KIT = (sys.executable, "-m", "pytest", "--pyargs", "accel_testing", "-q", "-p", "no:cacheprovider")
TESTS = "backends/cuda/tests/test_cuda_gpu.py"
RUNNING: set[subprocess.Popen[bytes]] = set()
STACKS = ("cuda", "cuda+bf16", "cuda+fp16", "cuda+fsdp")


class Part(NamedTuple):
    """A command: its seconds at most, what it needs, and whether it measures, and so runs alone."""

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    cuda: bool = True
    alone: bool = False


def parts(device: str) -> list[Part]:
    """List what is run after the checks, what matters most first."""
    python, peers = sys.executable, ("--peers", sys.executable) if find_spec("accelerate") else ()
    size = () if device == "cuda" else ("--small",)
    bench = (python, "-W", "ignore")
    gpu_tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", TESTS)
    found = [Part("tests marked gpu", gpu_tests, 120)]
    for stack in STACKS:
        needs = ("accel_fsdp",) if "fsdp" in stack else ()
        found.append(Part(f"kit: {stack}", (*KIT, "--accel-stack", stack, "--accel-world", "1"), 300, needs))
    saves = ("benchmarks/checkpoint.py", "--device", "cuda", "--case", "large", "--without", "DCP")
    benchmarks = (
        ("Llama", ("benchmarks/llama.py", *size, *peers), 150, (), False),
        ("FSDP 2", ("benchmarks/fsdp.py", *peers), 120, ("accel_fsdp",), True),
        ("batches", ("benchmarks/feeding.py", *peers), 120, (), False),
        ("checkpoints on the device", (*saves, *peers), 90, (), True),
        ("float8", ("benchmarks/llama.py", *size, "--float8"), 90, ("torchao",), True),
        *((name, ("benchmarks/run.py", *peers, name), 90, (), False) for name in ("step", "loader")),
    )
    for name, command, seconds, needs, cuda in benchmarks:
        words = (*bench, *command, "--rounds", "3")
        found.append(Part(f"benchmark: {name}", words, seconds, needs, cuda, alone=True))
    return found


def done(part: Part, device: str, folder: Path, seconds: float) -> tuple[str, str]:
    """Run a part in `folder` for its seconds, or those that are left, at most: (result, what it printed)."""
    missing = [name for name in part.needs if find_spec(name) is None]
    if missing or (part.cuda and device != "cuda"):
        return "not here", f"needs {', '.join(missing) or 'a CUDA device'}"
    log = folder / f"{part.name.replace(' ', '-').replace(':', '')}.log"
    with log.open("w+", encoding="utf-8") as output:
        # A session of its own: its workers end with it.
        child = subprocess.Popen(
            part.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        RUNNING.add(child)
        try:
            status = child.wait(min(part.seconds, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with_children(child)
            RUNNING.discard(child)
    text = log.read_text(encoding="utf-8", errors="replace")
    return {0: "ok", None: "out of time"}.get(status, "FAILED"), text


def with_children(child: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, even if it has ended itself."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Task(NamedTuple):
    """What gives (result, what it printed) in the seconds that it is given."""

    number: int
    name: str
    call: Callable[[float], tuple[str, str]]


def tasks(device: str, folder: Path) -> tuple[list[Task], list[Task]]:
    """List what may run beside others, and what is measured."""
    from gpu_checks import CHECKS, prove

    together, alone = [], []
    for check in CHECKS:
        words = check[0] + "".join(f", {each}" for each in check[2])
        together.append(Task(len(together), words, lambda left, it=check: prove(it, device, min(120, left))))
    for part in parts(device):
        chosen = alone if part.alone else together
        number = len(together) + len(alone)
        chosen.append(Task(number, part.name, lambda left, it=part: done(it, device, folder, left)))
    return together, alone


def run(proof: Proof, chosen: Sequence[Task], jobs: int, ends: float) -> None:
    """Run these, so many at a time, as long as there is time."""

    def one(task: Task) -> None:
        started = time.monotonic()
        result, text = task.call(ends - started) if started < ends else ("out of time", "")
        proof.add(task.number, task.name, result, time.monotonic() - started, text)

    if jobs <= 1:
        for task in chosen:
            one(task)
        return
    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(one, chosen))
    finally:  # terminated, it ends what it started but checks, which end by themselves
        pool.shutdown(wait=False, cancel_futures=True)
        for child in [*RUNNING]:
            with_children(child)


class Proof:
    """What was found so far, in two files."""

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        self.folder, self.about = folder, about
        self.found: dict[int, dict[str, Any]] = {}
        self.lock = threading.Lock()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.found[number] for number in sorted(self.found)]

    def add(self, number: int, name: str, result: str, seconds: float, text: str) -> None:
        """Note a part, print its row, and write the files."""
        tables = [line for line in text.splitlines() if line.startswith("|")] if "\n" in text else []
        detail = "" if tables else next(iter(text.strip().splitlines()[-1:]), "")
        row = {
            "name": name,
            "result": result,
            "seconds": round(seconds, 1),
            "detail": detail,
            "tables": tables,
        }
        with self.lock:
            self.found[number] = row
            print(f"| {name} | {result} | {detail.replace('|', '/')} |", flush=True)
            for line in tables:
                print(f"  {line}", flush=True)
            self.write()

    def write(self) -> None:
        """Write `proof.json` and `proof.md`."""
        whole = {**self.about, "parts": self.rows}
        self._replace("proof.json", json.dumps(whole, indent=2))
        lines = [", ".join(f"{key} {value}" for key, value in self.about.items()), ""]
        lines += ["| what | result | seconds | detail |", "|---|---|---|---|"]
        for row in self.rows:
            detail = row["detail"].replace("|", "/")
            lines.append(f"| {row['name']} | {row['result']} | {row['seconds']} | {detail} |")
        for row in self.rows:
            if row["tables"]:
                lines += ["", f"## {row['name']}", "", *row["tables"]]
        self._replace("proof.md", "\n".join(lines))

    def _replace(self, name: str, text: str) -> None:
        """Write a file beside the last one first, which a run that is killed then leaves."""
        new = self.folder / f"{name}.new"
        new.write_text(f"{text}\n", encoding="utf-8")
        new.replace(self.folder / name)


def install(wheels: Path, folder: Path) -> None:
    """Install wheels into `folder`, for this process and those that it starts."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), *map(str, sorted(wheels.glob("*.whl")))], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(folder))


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--device", default="auto", help="auto (torch's accelerator); cpu or sim, to rehearse"
    )
    parser.add_argument("--limit", type=float, default=480, help="seconds after which nothing begins (480)")
    parser.add_argument(
        "--out", type=Path, help="folder for proof.json and proof.md; default: a temporary one"
    )
    parser.add_argument("--wheels", type=Path, help="folder with wheels to install first, without a network")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="at a time")
    parser.add_argument("-k", default="", help="only what has these words in its name")
    given = parser.parse_args()
    if given.out is not None and given.out.exists() and not given.out.is_dir():
        parser.error(f"--out {given.out} is a file: name a folder")
    return given


def main() -> int:
    """Return the exit status."""
    began, arguments = time.monotonic(), read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it started too
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="gpu-proof-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.wheels:
        install(arguments.wheels, folder / "site")
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    here = found.type if found is not None else ""
    device = here if arguments.device == "auto" else arguments.device
    if device not in filter(None, ("cpu", "sim", here)):
        print(
            f"no {device or 'accelerator'}: torch {torch.__version__} sees {here or 'none'} on this machine\n"
            "run this where there is one, or rehearse with --device cpu"
        )
        return NOTHING_TO_DO
    name = torch.cuda.get_device_name() if device == "cuda" else device
    about = {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}
    proof = Proof(folder, {**about, "date": time.strftime("%Y-%m-%d", time.gmtime())})
    print(f"torch {torch.__version__}, {name}\n\n| check | result | detail |\n|---|---|---|")
    together, alone = tasks(device, folder)
    for each, jobs in ((together, arguments.jobs), (alone, 1)):
        run(proof, [task for task in each if arguments.k in task.name], jobs, began + arguments.limit)
    if not proof.rows:
        print(f"nothing has {arguments.k!r} in its name\nleave -k out to see the names of all")
        return NOTHING_TO_DO
    print(f"\n{folder / 'proof.md'}")
    return int(any(row["result"] == "FAILED" for row in proof.rows))


if __name__ == "__main__":
    sys.exit(main())
