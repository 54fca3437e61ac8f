"""transformers' Trainer, under peft and trl too, has the losses it has on Accelerate."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from peers import needs_accelerate

SCRIPT = str(Path(__file__).with_name("trainer_script.py"))
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
BLOCK = {"gpt2": "GPT2Block", "bert": "BertLayer", "llama": "LlamaDecoderLayer"}
AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

pytestmark = [needs_accelerate, pytest.mark.timeout(400)]


def run(
    run_command, model: str, folder: Path, processes: int, *words: str, ours: bool, **arguments: Any
) -> dict[str, Any]:
    """What rank 0 of the script printed."""
    words = (*words, "--arguments", json.dumps(arguments), *(["--ours"] if ours else []))
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = run_command(
        [*start, SCRIPT, model, str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


needs_trl = pytest.mark.skipif(
    not (find_spec("trl") and find_spec("peft")), reason="trl and peft are not here"
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, run_command):
    """(model, processes, *words) -> what Accelerate's plain run printed."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(model: str, processes: int, *words: str) -> dict[str, Any]:
        key = (model, processes, *words)
        if key not in known:
            known[key] = run(
                run_command, model, tmp_path_factory.mktemp("theirs"), processes, *words, ours=False
            )
        return known[key]

    return of


def assert_equal(
    found: dict[str, Any], expected: dict[str, Any], start: int = 0, tolerance: float = 0
) -> None:
    assert found["predicted"] == pytest.approx(expected["predicted"], rel=tolerance, abs=0)
    ours, wanted = (
        [entry for entry in each["logged"] if entry["step"] > start] for each in (found, expected)
    )
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in wanted]
    for one, other in zip(ours, wanted, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=0)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_losses_gradients_and_metrics_are_the_same_numbers(theirs, tmp_path, processes, run_command):
    found = run(run_command, "gpt2", tmp_path, processes, ours=True)

    assert found["kind"] == ("NO" if processes == 1 else "MULTI_CPU")
    assert_equal(found, theirs("gpt2", processes))


@pytest.mark.full
def test_in_bf16_they_are_the_same_numbers_too(tmp_path, run_command):
    expected = run(run_command, "gpt2", tmp_path / "theirs", 1, ours=False, bf16=True)

    assert_equal(run(run_command, "gpt2", tmp_path / "ours", 1, ours=True, bf16=True), expected)


@needs_trl
@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (1, ("--lora", "--sft")),
        pytest.param(2, ("--lora", "--sft"), marks=pytest.mark.full),
        pytest.param(2, ("--lora",), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.full
def test_peft_adapters_and_fine_tuning_by_trl_have_the_same_numbers_too(
    theirs, tmp_path, processes, words, run_command
):
    assert_equal(
        run(run_command, "gpt2", tmp_path, processes, *words, ours=True), theirs("gpt2", processes, *words)
    )


@pytest.mark.full
@pytest.mark.parametrize("model", ["bert", "llama"])
@pytest.mark.parametrize("processes", [1, 2])
def test_other_models_have_the_same_numbers_too(theirs, tmp_path, model, processes, run_command):
    assert_equal(run(run_command, model, tmp_path, processes, ours=True), theirs(model, processes))


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_where_its_checkpoint_was_written(theirs, tmp_path, processes, run_command):
    run(run_command, "gpt2", tmp_path, processes, ours=True)

    assert_equal(
        run(run_command, "gpt2", tmp_path, processes, "--resume", ours=True),
        theirs("gpt2", processes),
        start=4,
    )


EACH = pytest.mark.parametrize(
    ("model", "processes"), [("gpt2", 1), ("gpt2", 2), ("bert", 2), ("llama", 2)], ids=str
)


@pytest.mark.full
@EACH
def test_sharded_by_fsdp_the_losses_are_those_of_ddp(theirs, tmp_path, model, processes, run_command):
    arguments = {**FSDP, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [BLOCK[model]]}}
    found = run(run_command, model, tmp_path, processes, ours=True, **arguments)
    again = run(run_command, model, tmp_path, processes, "--resume", ours=True, **arguments)

    assert found["kind"] == "FSDP"
    assert_equal(found, theirs(model, processes), tolerance=1e-5)
    assert_equal(again, theirs(model, processes), start=4, tolerance=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@EACH
def test_sharded_by_deepspeed_the_losses_are_those_of_ddp(
    theirs, tmp_path, model, processes, stage, run_command
):
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config |= dict.fromkeys(AUTO, "auto")
    found = run(run_command, model, tmp_path, processes, ours=True, deepspeed=config)
    again = run(run_command, model, tmp_path, processes, "--resume", ours=True, deepspeed=config)

    assert found["kind"] == "DEEPSPEED"
    assert_equal(found, theirs(model, processes), tolerance=1e-5)
    assert_equal(again, theirs(model, processes), start=4, tolerance=1e-5)
