"""A store in a folder, and runs that use it, as functions for processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_core import Accelerator, Disk, Storage
from accel_core.checkpoint import places


class Folder(Disk):
    """The folder /some/place of the URL `folder://some/place`.

    store: is told of each call.
    """

    def __init__(self, store: FolderStore, url: str) -> None:
        super().__init__(Path(url.replace("folder://", "/")))
        self.store, self.url = store, url

    def __str__(self) -> str:
        return self.url

    def at(self, name: str) -> Folder:
        return Folder(self.store, f"{self.url}/{name}")

    def list(self) -> Mapping[str, int | None]:
        self.store.note("list", self.name)
        return super().list()

    def read(self, name: str, start: int, into: memoryview) -> None:
        self.store.note("read", name)
        super().read(name, start, into)

    @contextmanager
    def writer(self, name: str) -> Iterator[Any]:
        with super().writer(name) as file:
            yield file
            self.store.note("write", name)


class FolderStore:
    """Slot store.

    asked: method and name of all calls. fails: return True if a call is to fail.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fails: Callable[[str, str], bool] = lambda method, name: False

    def note(self, method: str, name: str) -> None:
        self.asked.append((method, name))
        if self.fails(method, name):
            raise ConnectionError("the store is away")

    def open_storage(self, url: str) -> Storage:
        return Folder(self, url)


def installed() -> FolderStore:
    """Serve `folder:` URLs in this process by a new store."""
    store = FolderStore()
    places.store_for = lambda scheme: store.open_storage  # type: ignore[assignment]
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


def url_of(path: str | os.PathLike[str]) -> str:
    return f"folder:/{os.fspath(path)}"
