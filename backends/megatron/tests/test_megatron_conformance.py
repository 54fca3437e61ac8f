"""The conformance kit: any network where each rank has all of it, and a GPT-2 where ranks share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing import Conformance

PRELOAD = (
    "cuda_on_cpu_now,megatron.core.distributed,megatron.core.optimizer,megatron.core.pipeline_parallel,"
    "megatron.core.models.gpt,transformers.models.gpt2.modeling_gpt2"
)
KNOWN = """
test_2_training.py::test_forward_runs_in_the_precision[bf16]  # weights are in 16 bits, masters in float32
test_2_training.py::test_forward_runs_in_the_precision[fp16]  # weights are in 16 bits, masters in float32
"""
SHARDED = "megatron.use_distributed_optimizer=true"
OVERLAPPED = "megatron.other_megatron_args={overlap_grad_reduce: true}"
OTHERS = f"ddp,fsdp,megatron@1,megatron@2:parallelism.pp=2,megatron@2:{SHARDED}"
GRID = ("parallelism.tp=2", "parallelism.pp=2", SHARDED)
INTERLEAVED = ("parallelism.pp=2", "megatron.num_layers_per_virtual_pipeline_stage=1")


def kit(
    conform, folder: Path, *options: str, settings: tuple[str, ...] = (), partners: str = ""
) -> Conformance:
    sets = [word for each in settings for word in ("--accel-set", each)]
    options = (*options, *sets, "--accel-exchange-with", partners)
    return conform(folder, "megatron", *options, path=[Path(__file__).parent])


@pytest.fixture(autouse=True)
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_PRELOAD", PRELOAD)


@pytest.mark.parametrize(
    ("levels", "settings"),
    [
        ("0,1,2", ()),
        pytest.param("3,4", (), marks=pytest.mark.full),
        pytest.param("2,3,4", (OVERLAPPED,), marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(900)
def test_it_conforms(tmp_path: Path, levels: str, settings: tuple[str, ...], conform) -> None:
    (tmp_path / "xfails").write_text(KNOWN)

    options = ("--accel-level", levels, "--accel-xfails", str(tmp_path / "xfails"))
    found = kit(conform, tmp_path, *options, settings=settings)

    # Skipped: loops that split a model's forward and backward apart, and what only several optimizers show.
    known = {line.partition(" ")[0] for line in KNOWN.split("\n") if line}
    assert found.xfailed == (known if "2" in levels else set())


@pytest.mark.parametrize(
    ("levels", "worlds", "settings", "partners"),
    [
        *(
            (*each, "")
            for each in [
                ("2", "2", ("parallelism.tp=2",)),
                ("2", "2", ("parallelism.pp=2",)),
                ("3", "4", GRID),
                ("2,3,4", "2", INTERLEAVED),
                ("2,3,4", "1,2", (SHARDED,)),
                ("3,4", "4", (*INTERLEAVED, SHARDED)),
                ("3,4", "4", ("parallelism.tp=2", SHARDED)),
            ]
        ),
        pytest.param("2,4", "4", GRID, OTHERS, marks=pytest.mark.needs("accel-ddp", "accel-fsdp")),
    ],
)
@pytest.mark.full
@pytest.mark.timeout(600)
def test_it_conforms_where_ranks_share_a_model(
    tmp_path: Path, levels: str, worlds: str, settings: tuple[str, ...], partners: str, conform
) -> None:
    options = ("--accel-level", levels, "--accel-world", worlds, "--accel-network", "megatron_network")
    assert not kit(conform, tmp_path, *options, settings=settings, partners=partners).failed
