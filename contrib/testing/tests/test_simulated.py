"""The simulated device: does what an accelerator does, refuses what an accelerator refuses."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_testing.processes import ProcessError


def simulated(name: str = "sim") -> Any:
    from accel_testing.simulated.device import simulate

    return simulate(name)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(device: str, steps: int, precision: torch.dtype | None, foreach: bool | None) -> list[float]:
    if device != "cpu":
        simulated(device)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 4, generator=generator).to(device)
        y = torch.randint(0, 3, (6,), generator=generator).to(device)
        with torch.autocast(device, dtype=precision, enabled=precision is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("foreach", [False, True])
def test_it_trains_bitwise_like_the_cpu(foreach: bool, run_processes) -> None:
    (ours,) = run_processes(train, "sim", 6, None, foreach, world=1)
    assert ours == train("cpu", 6, None, foreach)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_it_autocasts(precision: torch.dtype, run_processes) -> None:
    (ours,) = run_processes(train, "sim", 6, precision, None, world=1)
    assert ours != train("cpu", 6, None, None)
    assert ours == pytest.approx(train("cpu", 6, precision, None), abs=0.05)


def test_it_takes_another_name(run_processes) -> None:
    (ours,) = run_processes(train, "simulate_plugin", 3, None, None, world=1)
    assert ours == train("cpu", 3, None, None)


def freed() -> tuple[int, int, list[float]]:
    tensor = torch.ones(4).to(simulated().device())
    view, storage = tensor[2:], tensor.untyped_storage()
    full = storage.size()
    storage.resize_(0)
    empty = view.untyped_storage().size()
    storage.resize_(full)
    tensor.fill_(3.0)
    return full, empty, view.tolist()


def test_its_memory_can_be_freed_under_its_tensors_and_filled_again(run_processes) -> None:
    assert run_processes(freed, world=1) == [(16, 0, [3.0, 3.0])]


def queued() -> float:
    module = simulated()
    side, ready = module.Stream(), module.Event()
    with module.stream(side):
        tensor = torch.ones(2).to(module.device()) * 2
        ready.record()
        inside = module.current_stream() is side
    module.current_stream().wait_event(ready)
    return tensor.sum().item() if inside and module.current_stream() is not side else 0.0


def test_work_may_be_queued_in_streams(run_processes) -> None:
    assert run_processes(queued, world=1) == [4.0]


def several() -> tuple[list[str], list[int], list[str]]:
    from accel_testing.simulated.device import simulate

    module = simulate(devices=2)
    layer = nn.Linear(2, 2, bias=False).requires_grad_(False).to("sim:1")
    second = layer(torch.ones(1, 2, device="sim:1"))
    first = torch.zeros_like(second, device="sim").copy_(second)
    errors = []
    for wrong in (lambda: first + second, lambda: torch.ones(1, device="sim:2")):
        with pytest.raises(RuntimeError) as raised:
            wrong()
        errors.append(str(raised.value))
    held = [module.memory_allocated(index) for index in range(module.device_count())]
    return [str(each.device) for each in (layer.weight, second, first, second.to("sim:0"))], held, errors


def test_a_process_may_see_several_and_none_takes_operands_of_another(run_processes) -> None:
    ((devices, held, errors),) = run_processes(several, world=1)

    assert devices == ["sim:1", "sim:1", "sim:0", "sim:0"]
    assert held == [8, 24]
    assert "at least two devices, sim:1 and sim:0!" in errors[0]
    assert errors[1] == "invalid device ordinal 2: this process sees 2 sim"


def filled(total: int) -> None:
    module = simulated()
    module.memory.total = total
    torch.ones(100, device=module.device())


def test_its_memory_runs_out(run_processes) -> None:
    run_processes(filled, 400, world=1)
    with pytest.raises(ProcessError, match="tried to allocate 400 bytes: 0 of 399 are in use"):
        run_processes(filled, 399, world=1)


def two_names() -> None:
    simulated("one")
    simulated("one")
    simulated("two")


def test_a_process_simulates_one_name(run_processes) -> None:
    with pytest.raises(
        ProcessError, match="this process simulates 'one' already\nuse 'two' in a process of its own"
    ):
        run_processes(two_names, world=1)


def current() -> tuple[str, int, str]:
    module = simulated()
    return (
        str(torch.accelerator.current_accelerator()),
        module.device_count(),
        str(torch.ones(2, device="sim")),
    )


def test_torch_takes_it_for_its_accelerator(run_processes) -> None:
    assert run_processes(current, world=1) == [("sim", 1, "tensor([1., 1.], device='sim:0')")]


def mix_devices() -> None:
    simulated()
    torch.ones(3, device="sim") + torch.ones(3)


def test_operands_of_two_devices_are_refused(run_processes) -> None:
    with pytest.raises(ProcessError, match="at least two devices, sim:0 and cpu"):
        run_processes(mix_devices, world=1)


def bytes_held() -> list[int]:
    module = simulated()
    found = [module.memory_allocated()]
    tensor = torch.zeros(1000, device="sim")
    view = tensor[:10]
    found.append(module.memory_allocated())
    del tensor
    gc.collect()
    found.append(module.memory_allocated())
    del view
    gc.collect()
    return [*found, module.memory_allocated(), module.max_memory_allocated()]


def test_it_counts_the_bytes_it_holds(run_processes) -> None:
    assert run_processes(bytes_held, world=1) == [[0, 4000, 4000, 0, 4000]]


def host_reads() -> list[int]:
    module = simulated()
    counts = []
    x = torch.ones(3, device="sim")
    x.mul_(2).sum()
    for read in (
        lambda: None,
        x.sum().item,
        x.cpu,
        x.tolist,
        lambda: torch.zeros(3).copy_(x),
        lambda: bool(x[0]),
    ):
        before = module.host_reads
        read()
        counts.append(module.host_reads - before)
    return counts


def test_it_counts_what_the_host_reads(run_processes) -> None:
    assert run_processes(host_reads, world=1) == [[0, 1, 1, 1, 1, 1]]


def waits() -> tuple[list[int], list[int]]:
    """How often the host waits for what waits, and for what does not."""
    module = simulated()
    x, plain, where = torch.ones(3, device="sim"), torch.ones(3), torch.arange(2, device="sim")
    stream, event = module.Stream(), module.Event()

    def count(call: Any) -> int:
        before = module.waits
        call()
        return module.waits - before

    waiting = (
        *(x.sum().item, x.cpu, x.tolist, lambda: bool(x[0]), lambda: x.equal(x), x.nonzero, x.unique),
        *(lambda: plain.to("sim"), lambda: plain.copy_(x), lambda: x.copy_(plain)),
        *(lambda: torch.tensor([1.0], device="sim"), lambda: x[x > 0], lambda: x[[0, 1]]),
        *(lambda: x.repeat_interleave(where.new_ones(3)), module.synchronize),
        *(stream.synchronize, event.synchronize),
    )
    free = (
        *(lambda: plain.to("sim", non_blocking=True), lambda: x.to("cpu", non_blocking=True)),
        *(lambda: x.copy_(plain, non_blocking=True), lambda: plain.copy_(x, non_blocking=True)),
        *(lambda: torch.full((3,), 2.0, device="sim"), lambda: x[where], lambda: x * 2, lambda: x[1:]),
        *(lambda: torch.where(x > 0, x, 0.0), lambda: x.clone().masked_fill_(x > 0, 1.0)),
        *(lambda: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0), module.current_stream),
        lambda: x.repeat_interleave(where.new_ones(3), output_size=3),
    )
    return [count(each) for each in waiting], [count(each) for each in free]


def test_it_counts_how_often_the_host_waits(run_processes) -> None:
    ((waiting, free),) = run_processes(waits, world=1)
    assert 0 not in waiting, waiting
    assert not any(free), free


def waiting_is_an_error() -> str:
    module = simulated()
    x = torch.ones(3, device="sim")
    with pytest.warns(UserWarning, match="prototype"):  # as torch.cuda does
        module.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError) as caught:
        x.sum().item()
    module.set_sync_debug_mode("default")
    assert x.sum().item() == 3
    return str(caught.value)


def test_a_wait_of_the_host_can_be_made_an_error(run_processes) -> None:
    (said,) = run_processes(waiting_is_an_error, world=1)
    assert "the host waits for the sim device" in said


def views_are_live() -> list[list[float]]:
    simulated()
    x = torch.zeros(4, device="sim")
    x[1:3].copy_(torch.tensor([1.0, 2.0]))
    x.narrow(0, 3, 1).fill_(5)
    return [x.tolist(), x.cpu().tolist()]


def test_views_write_through(run_processes) -> None:
    assert run_processes(views_are_live, world=1) == [[[0, 1, 2, 5], [0, 1, 2, 5]]]


def random_streams() -> list[bool]:
    module = simulated()
    torch.manual_seed(3)
    first = torch.randn(4, device="sim").cpu()
    state = module.get_rng_state()
    second = torch.randn(4, device="sim").cpu()
    module.set_rng_state(state)
    again = torch.randn(4, device="sim").cpu()
    found = [torch.equal(again, second)]
    for seed in (torch.manual_seed, module.manual_seed, module.manual_seed_all):
        seed(3)
        found.append(torch.equal(torch.randn(4, device="sim").cpu(), first))
    return found


def test_its_random_stream_is_seeded_saved_and_restored(run_processes) -> None:
    assert run_processes(random_streams, world=1) == [[True] * 4]


def communicate() -> dict[str, Any]:
    simulated()
    from accel_testing.simulated.group import COLLECTIVES

    dist.init_process_group("cpu:gloo,sim:simccl")
    rank = dist.get_rank()
    total = torch.ones(2, device="sim") * (rank + 1)
    dist.all_reduce(total)
    everyone = [torch.zeros(1, device="sim") for _ in range(2)]
    dist.all_gather(everyone, torch.full((1,), float(rank), device="sim"))
    plain = torch.ones(1)
    dist.all_reduce(plain)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    model = network().to("sim")
    parallel = nn.parallel.DistributedDataParallel(model)
    COLLECTIVES.clear()
    with parallel.no_sync():
        parallel(torch.randn(3, 4, device="sim")).sum().backward()
    quiet = COLLECTIVES["allreduce"]
    parallel(torch.randn(3, 4, device="sim")).sum().backward()
    dist.destroy_process_group()
    return {
        "reduced": total.tolist(),
        "gathered": [each.item() for each in everyone],
        "plain": plain.item(),
        "objects": objects,
        "allreduce": (quiet, COLLECTIVES["allreduce"]),
        "gradient": model[0].weight.grad.sum().item(),
    }


def test_ranks_communicate_and_train_on_it(run_processes) -> None:
    first, second = run_processes(communicate)
    assert first["reduced"] == [3.0, 3.0]
    assert first["gathered"] == [0.0, 1.0]
    assert first["plain"] == 2.0
    assert first["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["allreduce"] == (0, 1)
    assert first == second


def exchange() -> float:
    simulated()
    dist.init_process_group("cpu:gloo,sim:simccl")
    rank, received = dist.get_rank(), torch.zeros(1, device="sim")
    sent = dist.isend(torch.full((1,), float(rank), device="sim"), 1 - rank)
    dist.recv(received, 1 - rank)
    sent.wait()
    dist.destroy_process_group()
    return received.item()


def test_ranks_may_send_to_each_other_at_once_as_pipelines_do(run_processes) -> None:
    assert run_processes(exchange, timeout=20) == [1.0, 0.0]


def loaded_by_the_card() -> list[str]:
    before = set(sys.modules)
    import accel_testing.simulated

    assert accel_testing.simulated.CARD.name == "sim"
    return sorted(set(sys.modules) - before)


def test_its_card_declares_it_without_making_it(run_processes) -> None:
    (modules,) = run_processes(loaded_by_the_card, world=1)
    assert "accel_testing.simulated.device" not in modules
