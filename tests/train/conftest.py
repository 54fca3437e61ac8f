"""An Accelerator on the CPU that is ended after the test."""

from __future__ import annotations

import pytest

from accel_core import Accelerator


@pytest.fixture
def accelerator_of():
    made = []

    def make(**options):
        made.append(Accelerator(cpu=True, **options))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


@pytest.fixture
def accelerator(accelerator_of):
    return accelerator_of()
