"""Numbered checkpoints at a URL, and copies, in S3 and in a repository of the hub: newest, best, limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mirror_job
import pytest
import s3fs
import stored_job as job
import torch
from hub_server import REPOSITORY, HubServer
from s3_server import BUCKET, S3Server

from accel_core import CheckpointError, storage_at

HUB, S3 = f"hf://{REPOSITORY}/run", f"s3://{BUCKET}/run"
ranks = pytest.mark.parametrize("world", [1, 2])


def run(run_processes, function: Callable[..., Any], *arguments: Any, world: int) -> list[Any]:
    """Call a function here, or in several processes."""
    return [function(*arguments)] if world == 1 else run_processes(function, *arguments, world=world)


def numbers(names: list[str]) -> list[int]:
    """Return the numbers of all folders; each of them is a whole checkpoint."""
    folders = {name.split("/")[2] for name in names if name.startswith("run/checkpoints/")}
    for folder in folders:
        assert f"run/checkpoints/{folder}/manifest-00000001.json" in names
    return sorted(int(folder.partition("_")[2]) for folder in folders)


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("1")
def test_the_best_of_a_series_in_a_bucket_stays_and_is_loaded(
    s3: S3Server, world: int, run_processes
) -> None:
    run(run_processes, job.series, S3, [0.75, 0.25, 0.5], world=world)
    assert numbers(s3.names()) == [1, 2]
    assert (
        run(run_processes, job.loaded_of_series, S3, True, world=world)
        == [(f"{S3}/checkpoints/checkpoint_1", 0.25)] * world
    )
    run(run_processes, job.series, S3, [0.625, 0.125, 0.875], world=world)
    assert numbers(s3.names()) == [4, 5]
    assert (
        run(run_processes, job.loaded_of_series, S3, True, world=world)
        == [(f"{S3}/checkpoints/checkpoint_4", 0.125)] * world
    )
    assert run(run_processes, job.loaded_of_series, S3, False, world=world)[0] == (
        f"{S3}/checkpoints/checkpoint_5",
        0.875,
    )


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
@ranks
def test_a_series_in_a_repository_keeps_its_limit_and_its_best(
    hub: HubServer, world: int, run_processes
) -> None:
    run(run_processes, job.series, HUB, [0.75, 0.25, 0.5], world=world)
    assert numbers(hub.names) == [1, 2]
    run(run_processes, job.series, HUB, [0.625], world=world)
    assert numbers(hub.names) == [1, 3]
    assert (
        run(run_processes, job.loaded_of_series, HUB, True, world=world)
        == [(f"{HUB}/checkpoints/checkpoint_1", 0.25)] * world
    )
    assert run(run_processes, job.loaded_of_series, HUB, False, world=world)[0] == (
        f"{HUB}/checkpoints/checkpoint_3",
        0.625,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", "manifest-00000001.json"])
def test_a_file_that_is_listed_and_not_found_stops_a_load(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An older checkpoint would be taken in silence, for one that may be whole."""
    job.series(S3, [0.5, 0.25])
    read = s3fs.S3FileSystem._cat_file

    async def not_found(fs: s3fs.S3FileSystem, path: str, **options: Any) -> Any:
        if path.endswith(name):
            raise FileNotFoundError(path)
        return await read(fs, path, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", not_found)
    s3fs.S3FileSystem.clear_instance_cache()
    accelerator, model, _ = job.numbered(S3)
    before = job.weight(accelerator, model)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .*listed, and was not found"):
        accelerator.load_state()
    assert torch.equal(job.weight(accelerator, model), before)
    accelerator.end_training()


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
@ranks
def test_copies_in_a_repository_bring_a_fresh_machine_on(
    hub: HubServer, tmp_path: Path, world: int, run_processes
) -> None:
    options = {"every": 2, "total_limit": 2}
    weights = run(run_processes, mirror_job.trained, str(tmp_path), HUB, 5, options, world=world)[0]
    assert numbers(hub.names) == [2, 4]
    for place, weight in run(run_processes, mirror_job.resumed, HUB, world=world):
        assert place == f"{HUB}/checkpoints/checkpoint_4"
        assert torch.equal(weight, weights[4])


@pytest.mark.full
def test_a_copy_that_a_repository_refuses_is_an_error_of_the_end(hub: HubServer, tmp_path: Path) -> None:
    hub.refuses = lambda method, path: 403 if "/commit/" in path else None
    said = mirror_job.tried(str(tmp_path), HUB, 1)
    assert f"the copy to {HUB}/checkpoints/checkpoint_0 failed" in said
    assert "PermissionError" in said


def test_a_repository_that_is_not_there_is_told_before_training(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hf://owner/none/run/checkpoints cannot be reached: FileNot"):
        mirror_job.mirrored(str(tmp_path), "hf://owner/none/run")


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["lr*", "lr?", "lr[12]"])
def test_a_folder_named_like_a_pattern_costs_no_other_folder_its_files(s3: S3Server, pattern: str) -> None:
    for folder in ("lr1", "lr2", pattern):
        storage_at(f"s3://{BUCKET}/{folder}").create("file", b"1")
    storage_at(f"s3://{BUCKET}/{pattern}").remove(["file", "gone"])
    assert s3.names() == ["lr1/file", "lr2/file"]
