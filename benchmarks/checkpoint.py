"""Saving and loading a model with AdamW: who stands still how long, and what else it takes.

`python checkpoint.py [--peers PYTHON] [--rounds N] [--case CASE] [--without WORD]` prints the tables, all
contenders taking turns on one disk; DCP with small tensors takes a minute a round. `--device cuda` has the
state on a GPU. `python checkpoint.py NAME:CASE` is one contender, which saves when told to on stdin.

* copy: of the state into memory that is there, pinned memory of the host for a GPU's.
* blocked: until training may go on. total: until it is on the disk.
* memory: anonymous memory that saving has added when training goes on. kept: what is left of it in the end,
  once `free_memory` has given it back.
* read: reading the bytes of the saved data once, raw; loading verifies and then reads them.
* replicas: checksums of all tensors, as accel-monitor's extension `replicas` compares them every few steps.
* speed: of a loop in the main thread, while the rest is written, over its speed alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arena import ENVIRONMENT, Contender, Row, serve

SHAPES = {"large": (128, (630, 630)), "small": (20_000, (64,))}
WHAT = {"large": "203 MB in 128 tensors, with AdamW: 610 MB", "small": "20,000 tensors of 64, with AdamW"}
HERE = (
    *("torch.save + fsync", "DCP", "DCP thread", "DCP process"),
    *("storage.save", "storage.async_save", "accel-core", "accel-core, not waiting"),
)
WRITE_ON = ("DCP thread", "DCP process", "storage.async_save", "accel-core, not waiting")
"""Contenders that still write when training goes on."""
FIGURES = ("blocked", "total", "load", "memory", "speed")
DEVICE = "ACCEL_BENCHMARK_DEVICE"
"""Variable by which the contenders learn of `--device`."""


def measure(peers: str | None, count: int = 5) -> list[Row]:
    rows = []
    for case, what in WHAT.items():
        found = contest(case, peers, count, (HERE[0], HERE[-1]))
        raw, ours = (statistics.median(found[name]["blocked"]) for name in (HERE[0], HERE[-1]))
        theirs = statistics.median(found["accelerate"]["blocked"]) if peers else None
        rows.append(
            Row(f"training blocked by a save, {what}", raw, theirs, None, ours, bar(found, case), "ms")
        )
        raw, ours = (statistics.median(found[name]["load"]) for name in (HERE[0], HERE[-1]))
        theirs = statistics.median(found["accelerate"]["load"]) if peers else None
        copy, checksums, read, memory, kept, staged = (
            statistics.median(found[HERE[-1]][figure])
            for figure in ("copy", "replicas", "read", "memory", "kept", "staged")
        )
        limit = "≤ 800 ms" if case == "small" else f"≤ {2 * read:.0f} ms (the bytes read twice, raw)"
        rows.append(Row(f"loading, {what}", raw, theirs, None, ours, limit, "ms"))
        rows.append(
            Row(f"accel-monitor's checksums of replicas, {what}", copy, None, None, checksums, "", "ms")
        )
        limit = f"≤ {staged:.0f} MB (one staged copy); {kept:.0f} after `free_memory`"
        rows.append(Row(f"memory that saving adds, {what}", None, None, None, memory, limit, "MB"))
    return rows


def bar(found: Mapping[str, Mapping[str, list[float]]], case: str) -> str:
    copy = statistics.median(found[HERE[-1]]["copy"])
    return f"≤ {1.2 * copy + 4 * SHAPES[case][0] * 0.005:.0f} ms (1.2 copies + 5 µs a tensor)"


def contest(
    case: str, peers: str | None, count: int, names: tuple[str, ...] = HERE
) -> dict[str, dict[str, list[float]]]:
    """Contender -> figure -> what it was in each round but the first, whose blocking is `first`."""
    pythons = {**dict.fromkeys(names, sys.executable), **({"accelerate": peers} if peers else {})}
    figures: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as ends:
        contenders = {}
        for name, python in pythons.items():
            contenders[name] = Contender(f"{name}:{case}", python, "checkpoint.py")
            ends.callback(contenders[name].end)
        for contender in contenders.values():
            contender.answers()
        for number in range(count + 1):
            for name, contender in contenders.items():
                kept = figures.setdefault(name, {})
                for figure in ("copy", "replicas", *FIGURES, "read"):
                    value = contender.turn(figure)
                    kept.setdefault(figure if number else f"first {figure}", []).append(value)
        for name, contender in contenders.items():
            figures[name] |= {figure: [contender.turn(figure)] for figure in ("staged", "kept")}
    return figures


def report(case: str, peers: str | None, count: int, without: str | None) -> str:
    names = tuple(name for name in HERE if without is None or without not in name)
    found = contest(case, peers, count, names)
    columns = ("", "first blocked", *FIGURES, "copy", "replicas")
    lines = [
        f"{WHAT[case]}; {bar(found, case)}",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for name, kept in found.items():
        values = [statistics.median(kept[figure]) for figure in columns[1:]]
        units = ("ms", "ms", "ms", "ms", "MB", "", "ms", "ms")
        cells = [
            f"{value:.{0 if value > 9 else 2}f} {unit}".strip()
            for value, unit in zip(values, units, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cell.replace('nan', '') for cell in cells)} |")
    return "\n".join(lines)


# -- the contenders --------------------------------------------------------------------------------


class Saver:
    """torch.save + fsync; the others do what differs."""

    def __init__(self, case: str, folder: Path) -> None:
        import torch

        count, shape = SHAPES[case]
        self.folder, self.torch = folder, torch
        self.device = torch.device(os.environ.get(DEVICE, "cpu"))
        self.model = torch.nn.ParameterList([torch.randn(shape, device=self.device) for _ in range(count)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model:
            moments = {key: torch.randn(shape, device=self.device) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
        self.start()

    def start(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self) -> None:
        with (self.folder / "state").open("wb") as file:
            self.torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None: ...

    def free(self) -> None: ...

    def load(self) -> None:
        state = self.torch.load(self.folder / "state", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Dcp(Saver):
    def start(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.dcp = dcp
        self.torch.distributed.init_process_group(
            "cpu:gloo", store=self.torch.distributed.HashStore(), rank=0, world_size=1
        )

    def state(self) -> dict[str, Any]:
        tensors = {f"model.{number}": each.detach() for number, each in enumerate(self.model)}
        for number, parameter in enumerate(self.model):
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{number}.{key}"] = value
        return tensors

    def save(self) -> None:
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        self.dcp.save(self.state(), checkpoint_id=self.folder / "dcp")

    def load(self) -> None:
        self.dcp.load(self.state(), checkpoint_id=self.folder / "dcp")


class DcpThread(Dcp):
    how = "THREAD"

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        how = AsyncCheckpointerType[self.how]
        self.writing = self.dcp.async_save(
            self.state(), checkpoint_id=self.folder / "dcp", async_checkpointer_type=how
        )

    def finish(self) -> None:
        self.writing.result()


class DcpProcess(DcpThread):
    how = "PROCESS"

    def start(self) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
        super().start()


class Storage(Dcp):
    def start(self) -> None:
        super().start()
        from accel_core import storage

        self.dcp = storage


class StorageThread(Storage):
    def save(self) -> None:
        self.writing = self.dcp.async_save(self.state(), checkpoint_id=self.folder / "storage")

    def finish(self) -> None:
        self.writing.result()

    def load(self) -> None:
        self.dcp.load(self.state(), checkpoint_id=self.folder / "storage")


class Accelerate(Saver):
    def start(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=self.device.type == "cpu")
        self.prepared = self.accelerator.prepare(self.model, self.optimizer)

    def save(self) -> None:
        self.accelerator.save_state(str(self.folder / "state"))

    def load(self) -> None:
        self.accelerator.load_state(str(self.folder / "state"))


class Ours(Saver):
    wait = True

    def start(self) -> None:
        from accel_core import Accelerator

        self.accelerator = Accelerator(cpu=self.device.type == "cpu")
        self.prepared = self.accelerator.prepare(self.model, self.optimizer)

    def save(self) -> None:
        self.accelerator.save_state(self.folder / "state", wait=self.wait)

    def finish(self) -> None:
        self.accelerator.wait_for_checkpoint()

    def free(self) -> None:
        self.accelerator.free_memory()

    def load(self) -> None:
        self.accelerator.load_state(self.folder / "state")


class OursAsync(Ours):
    wait = False


_KINDS = (Saver, Dcp, DcpThread, DcpProcess, Storage, StorageThread, Ours, OursAsync, Accelerate)
KINDS = dict(zip((*HERE, "accelerate"), _KINDS, strict=True))


def contend(name: str, case: str, folder: Path) -> None:
    saver = KINDS[name](case, folder)
    torch = saver.torch
    sources = [each.detach() for each in saver.model]
    sources += [value for state in saver.optimizer.state.values() for value in state.values()]
    copy_all = copying(torch, sources)
    copy_all()  # which gives its targets their memory
    before, last = anonymous(), {}

    def copy() -> float:
        copy_all()
        return timed(copy_all) * 1e3

    def replicas() -> float:
        from accel_monitor.replicas import checksum

        checksum(sources)
        return timed(lambda: checksum(sources)) * 1e3

    def blocked() -> float:
        begin = time.perf_counter()
        last["blocked"] = timed(saver.save)
        last["memory"] = max(0, anonymous() - before) / 1e6
        begin_waiting = time.perf_counter()
        last["turns"] = 0
        if name in WRITE_ON:
            waiting = finishing(saver.finish)
            while waiting():
                turn()
                last["turns"] += 1
        last["seconds"] = time.perf_counter() - begin_waiting
        last["total"] = time.perf_counter() - begin
        return last["blocked"] * 1e3

    def speed() -> float:
        if last["turns"] < 10:
            return float("nan")
        alone = timed(lambda: [turn() for _ in range(last["turns"])])
        return alone / last["seconds"]

    def kept() -> float:
        saver.free()
        return max(0, anonymous() - before) / 1e6

    values = torch.ones(16, 16)

    def turn() -> None:
        for _ in range(20):
            torch.add(values, values)
        sum(range(2000))

    cases: dict[str, Callable[[], float]] = {
        "copy": copy,
        "replicas": replicas if isinstance(saver, Ours) else lambda: float("nan"),
        "blocked": blocked,
        "total": lambda: last["total"] * 1e3,
        "load": lambda: timed(saver.load) * 1e3,
        "memory": lambda: last["memory"],
        "speed": speed,
        "read": lambda: read_raw(folder) * 1e3,
        "staged": lambda: sum(each.nbytes for each in sources) / 1e6,
        "kept": kept,
    }
    serve(cases)


def read_raw(folder: Path) -> float:
    """Seconds to read all files below the folder once, into memory that is there."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    buffers = [bytearray(path.stat().st_size) for path in paths]

    def read() -> None:
        for path, buffer in zip(paths, buffers, strict=True):
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)

    read()  # which gives the buffers their memory
    return timed(read)


def finishing(finish: Callable[[], None]) -> Callable[[], bool]:
    """Whether it is still going on; another thread waits for it."""
    import threading

    thread = threading.Thread(target=finish)
    thread.start()
    return thread.is_alive


def copying(torch: Any, sources: list[Any]) -> Callable[[], object]:
    """What copies all of them into memory of the host that is there, pinned for those of a device."""
    on_device = sources[0].device.type != "cpu"
    targets = [torch.empty_like(each, device="cpu", pin_memory=on_device) for each in sources]
    if not on_device:
        return lambda: torch._foreach_copy_(targets, sources)

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    return copy


def timed(action: Callable[[], object]) -> float:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    if len(sys.argv) == 2 and ":" in sys.argv[1]:
        name, _, case = sys.argv[1].rpartition(":")
        with tempfile.TemporaryDirectory() as folder:
            contend(name, case, Path(folder))
    else:
        options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        peers, count = options.get("--peers"), int(options.get("--rounds", 5))
        ENVIRONMENT[DEVICE] = options.get("--device", "cpu")
        for case in [options["--case"]] if "--case" in options else SHAPES:
            print(report(case, peers, count, options.get("--without")), end="\n\n")
