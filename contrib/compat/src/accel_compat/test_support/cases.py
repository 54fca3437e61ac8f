"""Base classes of tests, and the smallest model that can be trained."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from accel_compat.state.gradient_state import GradientState
from accel_compat.state.operations import gather
from accel_compat.state.states import AcceleratorState


class TempDirTestCase(unittest.TestCase):
    """Tests with a folder, `tmpdir`, that is emptied before each of them."""

    tmpdir: ClassVar[Path]
    clear_on_setup = True

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        for path in self.tmpdir.iterdir() if self.clear_on_setup else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Tests after each of which the shared states are forgotten."""

    def tearDown(self) -> None:
        """Forget the shared states."""
        super().tearDown()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Tests that run under mocks; `setUp` gives them to `add_mocks`."""

    mocks: Any

    def add_mocks(self, mocks: Any) -> None:
        """Start mocks, which stop after the test."""
        self.mocks = mocks if isinstance(mocks, tuple | list) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Return whether all ranks pass the same tensor. All ranks."""
    gathered = gather(tensor[None].clone().to(AcceleratorState().device))
    return all(torch.equal(other, tensor.cpu()) for other in gathered.cpu())


class RegressionDataset:
    """Points of a noisy line, y = a x + b."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + random.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """A line, a x + b; prints its dtypes at the first batch."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Any = None) -> Any:
        """Return a x + b."""
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")  # noqa: T201
            self.first_batch = False
        return x * self.a + self.b
