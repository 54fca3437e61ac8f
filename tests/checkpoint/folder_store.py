"""A store in a folder, and runs that use it, as functions for processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_core import Accelerator, CheckpointError, ProjectConfiguration, hooks, implements
from accel_core.checkpoint import stored
from accel_core.plugins.binding import Binder


class FolderStore:
    """Slot store: `folder://some/place` is the folder /some/place, which is there while a file is in it.

    asked: hook and name of all calls. fails: return True if a call is to fail; of "created", its answer.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fails: Callable[[str, str], bool] = lambda hook, name: False

    def path(self, hook: str, url: str) -> Path:
        """Return the path of a URL, and note the call."""
        path = Path(url.replace("folder://", "/"))
        self.asked.append((hook, path.name))
        if self.fails(hook, path.name):
            raise ConnectionError("the store is away")
        return path

    @implements(hooks.list_stored)
    def list_stored(self, url: str) -> Mapping[str, int | None]:
        path = self.path("list", url)
        found = [each for each in path.iterdir() if is_there(each)] if path.is_dir() else []
        return {each.name: None if each.is_dir() else each.stat().st_size for each in found}

    @implements(hooks.read_stored)
    def read_stored(self, url: str, start: int, size: int) -> bytes:
        return self.path("read", url).read_bytes()[start : start + size]

    @implements(hooks.create_stored)
    def create_stored(self, url: str, content: bytes) -> None:
        path = self.path("create", url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
        self.path("created", url)

    @implements(hooks.send_stored)
    def send_stored(self, path: Path, url: str) -> None:
        target = self.path("send", url)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())

    @implements(hooks.remove_stored)
    def remove_stored(self, urls: Sequence[str]) -> None:
        for url in urls:
            self.path("remove", url).unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    return path.is_file() or any(map(is_there, path.iterdir()))


def installed() -> FolderStore:
    """Serve `folder:` URLs in this process by a new store."""
    store, binder = FolderStore(), Binder()
    bound = binder.hooks([binder.register(store, name="folder", slot="store", origin="tests 1.0")])
    stored.store_for = lambda scheme: bound
    return store


def made(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(8, 40)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> float:
    accelerator.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return weight_sum(accelerator, model)


def weight_sum(accelerator: Accelerator, model: nn.Module) -> float:
    found: float = accelerator.unwrap_model(model).weight.sum().item()
    return found


def saved(url: str, steps: int) -> float:
    """Train, save, and return the sum of the weight."""
    installed()
    run = made()
    for _ in range(steps):
        found = step(*run)
    run[0].save_state(url, step=steps)
    run[0].end_training()
    return found


def loaded(url: str) -> tuple[str, float, list[tuple[str, str]]]:
    """Load if it is there; return the folder, the sum of the weight, and what was asked of the store."""
    store, (accelerator, model, _) = installed(), made()
    folder = accelerator.load_state(url, missing_ok=True)
    found = weight_sum(accelerator, model)
    accelerator.end_training()
    return str(folder), found, store.asked


def tiered(folder: str, url: str, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    named = {"automatic_checkpoint_naming": True, "record_every": 0, **options}
    return made(project_config=ProjectConfiguration(project_dir=folder, store=url, **named))


def trained(folder: str, url: str, saves: int, **options: Any) -> list[float]:
    """Go on from the newest checkpoint, save after each step, and return the sums of the weights."""
    installed()
    run = tiered(folder, url, **options)
    run[0].load_state(missing_ok=True)
    sums = []
    for _ in range(saves):
        sums.append(step(*run))
        run[0].save_state()
        run[0].wait_for_checkpoint()
    run[0].end_training()
    return sums


def trained_while_it_is_away(
    folder: str, url: str, saves: int, away: Sequence[int], every: int
) -> tuple[list[list[str]], list[str]]:
    """Save so often, in some of these times without the store; return what is copied after each, and errors.

    On the last rank alone the store is away.
    """
    store, run = installed(), tiered(folder, url, store_every=every)
    is_last = run[0].process_index == run[0].num_processes - 1
    copied, said = [], []
    for number in range(saves):
        store.fails = lambda hook, name, number=number: hook == "send" and is_last and number in away
        step(*run)
        run[0].save_state()
        try:
            run[0].wait_for_checkpoint()
        except CheckpointError as error:
            said.append(str(error))
        run[0].wait_for_everyone()
        copied.append(whole_ones(url))
        run[0].wait_for_everyone()
    run[0].end_training()
    return copied, said


def resumed(folder: str, url: str, **options: Any) -> tuple[str, float]:
    """Return the checkpoint that is loaded, and the sum of its weight."""
    installed()
    accelerator, model, _ = tiered(folder, url, **options)
    where = accelerator.load_state(missing_ok=True)
    found = weight_sum(accelerator, model)
    accelerator.end_training()
    return str(where), found


def whole_ones(url: str) -> list[str]:
    """Return the names of the checkpoints in a project's store that are committed."""
    place = Path(url.replace("folder://", "/"), "checkpoints")
    if not place.is_dir():
        return []
    return sorted(each.name for each in place.iterdir() if any(each.glob("manifest-*.json")))


def url_of(path: str | os.PathLike[str]) -> str:
    return f"folder:/{os.fspath(path)}"
