"""Random training programs give what plain PyTorch gives, bit by bit."""

from __future__ import annotations

import pytest
import torch

from accel_core import GradScalerKwargs
from accel_testing.random_programs import SCALE, make_program, require_equal, train


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("tens", range(4))
def test_a_program_trains_as_plain_pytorch_does(accelerator_of, tmp_path, precision, tens):
    for seed in range(tens * 10, tens * 10 + 10):
        program = make_program(seed, dtype=torch.float64 if precision == "no" else torch.float32)
        scaler = GradScalerKwargs(init_scale=SCALE, growth_interval=10**6)
        accelerator = accelerator_of(mixed_precision=precision, kwargs_handlers=[scaler])
        found = train(program, accelerator, str(tmp_path / str(seed)))
        accelerator.end_training()
        require_equal(found, program, 1, precision)
