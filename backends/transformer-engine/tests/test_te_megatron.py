"""With strategy megatron, megatron-core's own layers of Transformer Engine compute in float8."""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

import pytest
import torch
from te_megatron_jobs import forward, refusals, resumed, trained

from accel_testing import run_processes

pytestmark = pytest.mark.timeout(300)


def test_the_forward_is_that_of_megatrons_own_config_and_spec() -> None:
    ((found, hand, told),) = run_processes(forward, "fp8-te", world=1, timeout=200)
    ((wide, _, _),) = run_processes(forward, "bf16", world=1, timeout=200)
    assert torch.equal(found, hand)
    assert (found - wide).abs().max() > 1e-3
    assert "float8 (Float8CurrentScaling): the layers of strategy megatron" in told


def test_every_weight_trains() -> None:
    ((losses, untouched),) = run_processes(trained, world=1, timeout=200)
    assert untouched == []
    assert len(set(losses)) == 4


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ((expected, found),) = run_processes(resumed, str(tmp_path / "state"), world=1, timeout=200)
    assert found == expected


REFUSED = {
    "delayed": ("checkpoints here do not hold them", "set fp8_te.recipe: current (block, mxfp8)"),
    "auto": ("delayed scaling keeps scales", "set fp8_te.recipe: current (block, mxfp8)"),
    "nvfp4": ("recipe nvfp4 of section fp8_te is not served", "set fp8_te.recipe: current, block or mxfp8"),
    "padding": (
        "megatron-core's layers have no fp8_te.pad_tokens",
        "leave it out, or use strategy fsdp or ddp",
    ),
    "twice": ("other_megatron_args.fp8: this is said by mixed_precision: fp8-te", "leave it out"),
    "own": ("Own runs its own forward", "or a model of accel_megatron.build_model"),
    "bert": ("no layer of this model is transformer-engine's", "of its spec: accel_megatron.build_model"),
    "of megatron": ("checkpoints here do not hold them", "set fp8_recipe: tensorwise (blockwise, mxfp8)"),
    "weights": ("fp8_param keeps weights in float8", "leave it out"),
}


def test_what_would_not_compute_or_resume_in_float8_is_refused() -> None:
    (said,) = run_processes(refusals, world=1, timeout=200)
    assert said.keys() == REFUSED.keys()
    for name, (reason, remedy) in REFUSED.items():
        assert reason in said[name]
        assert said[name].endswith(remedy)


def test_the_stand_ins_attention_takes_arguments_by_the_wheels_names() -> None:
    from transformer_engine.pytorch import DotProductAttention

    folder = Path(
        os.environ["ACCEL_TEST_VENDOR"], "transformer_engine/pytorch/attention/dot_product_attention"
    )
    tree = ast.parse((folder / "dot_product_attention.py").read_text())
    (theirs,) = [it for it in tree.body if isinstance(it, ast.ClassDef) and it.name == "DotProductAttention"]
    for function in theirs.body:
        if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "forward"):
            names = {each.arg for each in function.args.args}
            mine = set(inspect.signature(getattr(DotProductAttention, function.name)).parameters)
            assert mine - {"others"} <= names
