"""Worlds of several processes: agreement, process groups that follow each other, clean exits."""

from __future__ import annotations

import os
import pickle
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_core import (
    Accelerator,
    AccelError,
    Card,
    CollectiveError,
    ConfigError,
    InitProcessGroupKwargs,
    LaunchError,
    Task,
    Topology,
    World,
    ops,
)
from accel_core.contract.run import current
from accel_core.defaults.device import local_device
from accel_core.runtime.join import backends_of
from accel_testing.patience import patience
from accel_testing.processes import ProcessError, reserved_port


def ranks():
    accelerator = Accelerator(cpu=True)
    seen = (accelerator.process_index, accelerator.num_processes, str(accelerator.run.stack))
    accelerator.end_training()
    return seen


@pytest.mark.needs("accel-ddp")
def test_two_processes_asked_for_are_two(run_processes):
    assert run_processes(ranks) == [(0, 2, "native + ddp + fp32"), (1, 2, "native + ddp + fp32")]


def three_in_turn():
    sums = []
    for _ in range(3):
        accelerator = Accelerator(cpu=True)
        sums.append(accelerator.reduce(torch.ones(1), "sum").item())
        accelerator.end_training()
    return sums


@pytest.mark.needs("accel-ddp")
def test_one_accelerator_after_another_each_with_a_group_of_its_own(run_processes):
    assert run_processes(three_in_turn) == [[2.0, 2.0, 2.0]] * 2


def two_at_once():
    first = Accelerator(cpu=True)
    second = Accelerator(cpu=True, mixed_precision="bf16")
    first.end_training()
    total = second.reduce(torch.ones(1), "sum").item()
    second.end_training()
    return total, dist.is_initialized()


@pytest.mark.needs("accel-ddp")
def test_two_runs_share_a_group_and_the_last_one_destroys_it(run_processes):
    assert run_processes(two_at_once) == [(2.0, False)] * 2


def over_a_users_group():
    dist.init_process_group("cpu:gloo")
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.ones(1), "sum").item()
    accelerator.end_training()
    return total, dist.is_initialized()


@pytest.mark.needs("accel-ddp")
def test_a_group_that_the_user_made_is_adopted_and_left(run_processes):
    assert run_processes(over_a_users_group) == [(2.0, True)] * 2


def different_stacks():
    rank = int(os.environ["RANK"])
    Accelerator(cpu=True, mixed_precision="bf16" if rank else "no")


@pytest.mark.needs("accel-ddp")
def test_ranks_with_different_stacks_are_named(run_processes):
    with pytest.raises(
        ProcessError, match=r"do not agree on stack: rank 0: 'native \+ ddp \+ fp32'; rank 1: .*bf16"
    ):
        run_processes(different_stacks)


def different_settings():
    Accelerator(cpu=True, gradient_accumulation_steps=1 + int(os.environ["RANK"]))


@pytest.mark.needs("accel-ddp")
def test_ranks_with_different_settings_name_the_first_that_differs(run_processes):
    with pytest.raises(ProcessError, match=r"agree on gradient_accumulation_steps: rank 0: 1; rank 1: 2"):
        run_processes(different_settings)


def folders_named_by_the_time(folder):
    accelerator = Accelerator(cpu=True, project_dir=f"{folder}/run-{os.environ['RANK']}")
    return accelerator.project_dir, accelerator.logging_dir


@pytest.mark.needs("accel-ddp")
def test_the_first_ranks_folders_hold_for_all(tmp_path, run_processes):
    first = str(tmp_path / "run-0")

    assert run_processes(folders_named_by_the_time, str(tmp_path)) == [(first, first)] * 2


def trigger():
    accelerator = Accelerator(cpu=True)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    seen = [accelerator.check_trigger(), accelerator.check_trigger()]
    accelerator.end_training()
    return seen


@pytest.mark.needs("accel-ddp")
def test_a_trigger_on_one_rank_reaches_all_once(run_processes):
    assert run_processes(trigger) == [[True, False]] * 2


def in_turn(folder):
    accelerator = Accelerator(cpu=True)
    mark = folder / "made"
    with accelerator.main_process_first():
        found = mark.exists()
        mark.touch()
    accelerator.end_training()
    return found


@pytest.mark.needs("accel-ddp")
def test_the_main_process_goes_first(tmp_path, run_processes):
    assert run_processes(in_turn, tmp_path, world=3) == [False, True, True]


def one_stays_away(seconds):
    options = InitProcessGroupKwargs(timeout=timedelta(seconds=3))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    if accelerator.process_index == 1:
        time.sleep(seconds)
        return "away"
    with pytest.raises(CollectiveError) as raised:
        accelerator.wait_for_everyone()
    return str(raised.value).splitlines()[0]


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("seconds", [0, pytest.param(9, marks=pytest.mark.full)])
def test_a_rank_that_is_gone_or_hangs_is_named_by_the_others(seconds, run_processes):
    message = "wait_for_everyone: rank {} waited for rank(s) 1 of 3, which did not come"
    assert run_processes(one_stays_away, seconds, world=3) == [message.format(0), "away", message.format(2)]


def who():
    accelerator = Accelerator(cpu=True)
    marks = [
        accelerator.on_main_process(lambda: "main")(),
        accelerator.on_local_main_process(lambda: "local")(),
        accelerator.on_last_process(lambda: "last")(),
        accelerator.on_process(process_index=1)(lambda: "one")(),
    ]
    with accelerator.split_between_processes([1, 2, 3]) as share:
        marks.append(share)
    accelerator.end_training()
    return marks


@pytest.mark.needs("accel-ddp")
def test_functions_and_shares_by_rank(run_processes):
    assert run_processes(who) == [["main", "local", None, None, [1, 2]], [None, None, "last", "one", [3]]]


@pytest.mark.needs("accel-ddp")
def test_a_teacher_of_strategy_single_lives_beside_a_joined_student(run_processes):
    assert run_processes(teacher_and_student) == [("single", "ddp", False, True)] * 2


def teacher_and_student():
    accelerator = Accelerator(cpu=True)
    teacher = accelerator.prepare(torch.nn.Linear(2, 2), strategy="single")
    student = torch.nn.Linear(2, 2)
    student, _ = accelerator.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
    strategies = [unit.strategy for unit in accelerator.run.units]
    wrapped = [accelerator.unwrap_model(model) is not model for model in (teacher, student)]
    accelerator.end_training()
    return (*strategies, *wrapped)


def lone_training():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="single")


@pytest.mark.needs("accel-ddp")
def test_training_a_copy_on_each_rank_is_refused(run_processes):
    with pytest.raises(ProcessError, match="would train a different copy on each of 2 ranks"):
        run_processes(lone_training)


LEFT_OPEN = """
import torch
from accel_core import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.backward(model(torch.ones(1, 2)).sum())
"""


@pytest.mark.parametrize("call", ["gather", "reduce", "gather_for_metrics"])
def test_a_run_of_one_process_that_has_ended_brings_no_values_together_either(call):
    accelerator = Accelerator(cpu=True)
    collective = getattr(accelerator, call)
    collective(torch.ones(1))
    accelerator.end_training()
    with pytest.raises(AccelError, match="this run has ended"):
        collective(torch.ones(1))


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
def test_a_script_that_never_ends_its_run_exits_cleanly(start_command):
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with reserved_port() as port:
        workers = [
            start_command(
                [sys.executable, "-c", LEFT_OPEN],
                env={**os.environ, **world, "MASTER_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in "01"
        ]
        assert [worker.wait(timeout=patience(100)) for worker in workers] == [0, 0]


def test_a_world_pickles_without_its_store():
    world = World(rank=1, size=2, store=object())
    assert pickle.loads(pickle.dumps(world)) == World(rank=1, size=2)


def test_a_run_does_not_pickle_and_says_what_to_do():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AccelError, match=r"cannot be pickled.*\n.*pass accelerator.process_index"):
        pickle.dumps(accelerator)
    pickle.dumps(accelerator.run.config)
    accelerator.end_training()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, r"RANK is not set\n.* or unset WORLD_SIZE$"),
        ({"RANK": "0"}, r"WORLD_SIZE is not set\n.* or unset RANK$"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two', not a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not exist in a world of WORLD_SIZE=2"),
    ],
)
def test_malformed_launch_variables_are_named(environment, message):
    with pytest.raises(LaunchError, match=message):
        World.from_environment(environment)


def test_torchruns_placeholder_is_no_id_of_a_run():
    world = {"WORLD_SIZE": "1", "RANK": "0"}
    assert World.from_environment({**world, "TORCHELASTIC_RUN_ID": "none"}).run_id is None
    assert World.from_environment({**world, "TORCHELASTIC_RUN_ID": "x"}).run_id == "x"


@pytest.mark.parametrize("named", ["gloo", None])
def test_a_backend_that_was_named_is_used_where_the_device_has_none(named):
    run = SimpleNamespace(
        stack=SimpleNamespace(
            device=SimpleNamespace(card=Card(name="new", slot="device", summary="a chip", api_version="1.0"))
        ),
        device=torch.device("meta"),
        world=SimpleNamespace(size=2),
        config=SimpleNamespace(process_group=InitProcessGroupKwargs(backend=named)),
    )
    if named:
        assert backends_of(run) == {"cpu": "gloo", "meta": "gloo"}
    else:
        with pytest.raises(ConfigError, match="no backend for meta tensors, but this run has 2 processes"):
            backends_of(run)


def test_functions_find_the_only_live_run_or_say_what_there_is():
    with pytest.raises(AccelError, match="no Accelerator yet"):
        current()
    first = Accelerator(cpu=True)
    assert ops.gather(torch.ones(2)).tolist() == [1.0, 1.0]
    second = Accelerator(cpu=True)
    with pytest.raises(AccelError, match="2 live runs"):
        ops.gather(torch.ones(2))
    first.end_training()
    second.end_training()
    assert second.run.topology == Topology()


def test_explain_says_why_each_plugin_is_there_and_who_set_what():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    text = accelerator.explain()
    assert "strategy single (accel-core 0.1.0): auto: one process" in text
    assert "gradient_accumulation_steps: set by" in text
    accelerator.end_training()


def test_a_rank_has_the_local_rank_of_its_task_unless_a_variable_says_otherwise():
    ranks, task = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Task(local_rank=1)

    assert World.from_environment(ranks, task).local_rank == 1
    assert World.from_environment({**ranks, "LOCAL_RANK": "3"}, task).local_rank == 3


@pytest.mark.parametrize(("told", "local_size"), [({}, 4), ({"LOCAL_WORLD_SIZE": "2"}, 2)])
def test_a_rank_has_as_many_beside_it_as_its_task_unless_a_variable_says_otherwise(told, local_size):
    ranks = {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "1", **told}
    world = World.from_environment(ranks, Task(local_size=4))

    assert (world.local_rank, world.local_size, world.nodes) == (1, local_size, 16 // local_size)


def test_a_rank_of_several_nodes_that_nobody_told_how_many_are_beside_it_is_refused():
    with pytest.raises(LaunchError, match="set LOCAL_WORLD_SIZE to the number of ranks on this node"):
        World.from_environment({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"})
    alone = {"RANK": "0", "WORLD_SIZE": "1"}  # as each of several that train alone
    assert World.from_environment(alone, Task(local_rank=3)).local_rank == 3


def test_a_node_of_no_ranks_is_refused():
    told = r"rank 0 of 1 has the local rank 0, and there is LOCAL_WORLD_SIZE=0\n.*unset LOCAL_WORLD_SIZE"
    with pytest.raises(LaunchError, match=told):
        World.from_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"})


@pytest.mark.parametrize(("agent", "index"), [(None, 0), ("job", None)])
def test_a_task_that_sees_one_device_takes_it_and_an_agents_worker_does_not(monkeypatch, agent, index):
    one = SimpleNamespace(device_count=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: one)
    world = World(rank=3, size=4, local_rank=3, local_size=4, is_task=True)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", agent)
        with pytest.raises(LaunchError, match="local rank 3"):
            local_device("meta", world)
    else:
        assert local_device("meta", world).index == index


@pytest.mark.parametrize(
    ("is_used", "size", "index"),
    [(True, 1, 2), (False, 1, 0), (True, 4, 1)],
    ids=["alone", "untouched", "one of several"],
)
def test_a_process_alone_trains_on_the_device_that_the_program_made_current(
    monkeypatch, is_used, size, index
):
    """`torch.cuda.set_device(2)` before the Accelerator was undone, and cuda:0 trained."""
    made_current = []
    module = SimpleNamespace(
        device_count=lambda: 4,
        is_initialized=lambda: is_used,
        current_device=lambda: made_current[-1] if made_current else 2,
        set_device=made_current.append,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    rank = 0 if size == 1 else 1
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    assert local_device("meta", world).index == index
    assert made_current == [index]
