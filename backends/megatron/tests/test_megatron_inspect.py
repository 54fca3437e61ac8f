"""What tensor-parallel ranks and pipeline stages save is shown and compared as the model's whole tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from megatron_jobs import go_on

from accel_core.cli.group import accel

pytest.importorskip("accel_checkpoint_tools")

pytestmark = pytest.mark.needs("accel-checkpoint-tools", "transformers")
NATIVE: dict[str, Any] = {"strategy": "single"}
LAYOUTS = {
    "rows and columns": (2, {"tp_degree": 2}),
    "stages": (2, {"pp_degree": 2}),
    "both, parts of flat vectors": (4, {"tp_degree": 2, "pp_degree": 2, "use_distributed_optimizer": True}),
}


def command(*words: object) -> Any:
    return CliRunner().invoke(accel, ["checkpoint", *map(str, words)])


def shown(folder: Path) -> dict[str, tuple[list[int], str]]:
    tensors = json.loads(command("show", folder, "--json").stdout)["tensors"]
    return {each["key"]: (each["shape"], each["dtype"]) for each in tensors}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, run_processes) -> Path:
    """Two steps of one process without megatron-core."""
    folder = tmp_path_factory.mktemp("alone")
    run_processes(go_on, "gpt2", NATIVE, str(folder), 0, 2, world=1)
    return folder / "2"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_run_itself_and_one_process_has_the_same_tensors(
    tmp_path: Path, alone: Path, layout: str, run_processes
) -> None:
    world, options = LAYOUTS[layout]
    run_processes(go_on, "gpt2", options, str(tmp_path), 0, 1, world=world)
    run_processes(go_on, "gpt2", options, str(tmp_path), 1, 2, world=world)
    before = (tmp_path / "2").rename(tmp_path / "before")
    run_processes(go_on, "gpt2", options, str(tmp_path), 1, 2, world=world)
    again = tmp_path / "2"

    ended = command("diff", before, again)
    assert (ended.exit_code, ended.stdout) == (0, "no difference\n")
    assert shown(again) == shown(alone)
    parts = "--only", "model", "--only", "optimizer"
    near = command("diff", alone, again, *parts, "--rtol", "1e-3", "--atol", "1e-6")
    assert (near.exit_code, near.stdout) == (0, "no difference\n")

    run_processes(go_on, "gpt2", NATIVE, str(tmp_path), 2, 2, world=1)  # loads and saves at once
    ended = command("diff", before, again, *parts)
    assert (ended.exit_code, ended.stdout) == (0, "no difference\n")


def test_tensors_that_a_step_has_changed_are_named_whole(tmp_path: Path, alone: Path, run_processes) -> None:
    run_processes(go_on, "gpt2", {"tp_degree": 2}, str(tmp_path), 0, 1, world=2)

    ended = command("diff", tmp_path / "1", alone, "--only", "model", "--json")

    assert ended.exit_code == 1
    told = {each["name"]: each["difference"] for each in json.loads(ended.stdout)["tensors"]}
    assert told["transformer.h.3.attn.c_attn.weight"]["elements"] == 16 * 48
    assert told["transformer.wte.weight"]["elements"] == 66 * 16
