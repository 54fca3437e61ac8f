"""Show on a real accelerator what no other machine can, in one command that ends in time.

`python tools/gpu_proof.py --out FOLDER` runs the checks of `gpu_checks.py`, the tests that are marked `gpu`,
the conformance kit on the stacks of the device, and the benchmarks: a Llama-shaped model by hand, by
Accelerate, by Fabric and by us, float8 beside bfloat16, steps, batches, checkpoints.
FOLDER gets `proof.json`, `proof.md` and what each part printed; both are written anew after each part, so
that a run that is stopped leaves what it has. What begins after `--limit` seconds is "out of time".

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
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

NOTHING_TO_DO = 2
ROOT = Path(__file__).resolve().parent.parent
KIT = (sys.executable, "-m", "pytest", "--pyargs", "accel_testing", "-q", "-p", "no:cacheprovider")
TESTS = ("backends/cuda/tests", "backends/fsdp/tests", "contrib/big-models/tests", "contrib/inspect/tests")
STACKS = ("cuda", "cuda+bf16", "cuda+fp16", "cuda+fsdp")


class Part(NamedTuple):
    """A command: its seconds at most, the libraries that it needs, and whether it needs CUDA."""

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    cuda: bool = True


def parts(device: str) -> list[Part]:
    """List what is run after the checks, what matters most first."""
    python, peers = sys.executable, ("--peers", sys.executable) if find_spec("accelerate") else ()
    size = () if device == "cuda" else ("--small",)
    bench = (python, "-W", "ignore")
    llama = Part(
        "Llama", (*bench, "benchmarks/llama.py", *size, *peers, "--rounds", "3"), 150, (), cuda=False
    )
    eight = Part(
        "float8", (*bench, "benchmarks/llama.py", *size, "--float8", "--rounds", "3"), 90, ("torchao",)
    )
    found = [Part("tests marked gpu", (python, "-m", "pytest", "-q", "-m", "gpu", *TESTS), 120)]
    for stack in STACKS:
        needs = ("accel_fsdp",) if "fsdp" in stack else ()
        found.append(Part(f"kit: {stack}", (*KIT, "--accel-stack", stack, "--accel-world", "1"), 120, needs))
    found += [llama, eight]
    run = (*bench, "benchmarks/run.py", "--rounds", "3", *peers)
    for name in ("step", "loader", "checkpoint"):
        found.append(Part(f"benchmark: {name}", (*run, name), 90, cuda=False))
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
        try:
            status = child.wait(min(part.seconds, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with_children(child)
    text = log.read_text(encoding="utf-8", errors="replace")
    return {0: "ok", None: "out of time"}.get(status, "FAILED"), text


def with_children(child: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, even if it has ended itself."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Proof:
    """What was found so far, in two files."""

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        self.folder, self.about = folder, about
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, result: str, seconds: float, text: str) -> None:
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
        self.rows.append(row)
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
    from gpu_checks import CHECKS, prove

    for check in CHECKS:
        words = check[0] + "".join(f", {each}" for each in check[2])
        if arguments.k in words:
            started, left = time.monotonic(), arguments.limit - (time.monotonic() - began)
            result = prove(check, device, min(120, left)) if left > 0 else ("out of time", "")
            proof.add(words, result[0], time.monotonic() - started, result[1])
    for part in parts(device):
        if arguments.k in part.name:
            started, left = time.monotonic(), arguments.limit - (time.monotonic() - began)
            result = done(part, device, folder, left) if left > 0 else ("out of time", "")
            proof.add(part.name, result[0], time.monotonic() - started, result[1])
    if not proof.rows:
        print(f"nothing has {arguments.k!r} in its name\nleave -k out to see the names of all")
        return NOTHING_TO_DO
    print(f"\n{folder / 'proof.md'}")
    return int(any(row["result"] == "FAILED" for row in proof.rows))


if __name__ == "__main__":
    sys.exit(main())
