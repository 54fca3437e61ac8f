"""What DeepSpeed's ranks save, in parts of flat vectors, is shown and compared as whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import diff_jobs as jobs
import pytest
from click.testing import CliRunner

from accel_core.cli.group import accel

pytest.importorskip("deepspeed")
PARAMETERS = {"embedding.weight": [12, 6]} | {
    f"layers.{number}.{name}": shape
    for number in (0, 1)
    for name, shape in (("weight", [6, 6]), ("bias", [6]))
}


def train(run_processes, project, stage, *resume):
    from accel_deepspeed import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=stage)
    run_processes(jobs.train, str(project), "deepspeed", *(resume or (None, 0)), [plugin], world=2)


def command(*words):
    return CliRunner().invoke(accel, ["checkpoint", *map(str, words)])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_against_itself_resumed_is_empty_and_all_tensors_are_whole(
    tmp_path: Path, stage: int, run_processes
) -> None:
    last, before = tmp_path / "step3", tmp_path / "before"
    train(run_processes, tmp_path, stage)
    last.rename(before)
    train(run_processes, tmp_path, stage, str(tmp_path / "step2"), 2)

    ended = command("diff", before, last)
    assert (ended.exit_code, ended.stdout) == (0, "no difference\n")
    assert command("diff", tmp_path / "step2", last, "--only", "optimizer").exit_code == 1
    tensors = json.loads(command("show", last, "--json").stdout)["tensors"]
    assert {each["key"]: each["shape"] for each in tensors} == {
        **{f"model/{name}": shape for name, shape in PARAMETERS.items()},
        **{
            f"optimizer/{name}/{part}": [] if part == "step" else shape
            for name, shape in PARAMETERS.items()
            for part in ("exp_avg", "exp_avg_sq", "step")
        },
    }
