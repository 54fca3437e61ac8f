"""On a real GPU. Skipped where there is none; README.md says where these last ran."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accel_core import Accelerator, ConfigError, PluginError, TorchDynamoPlugin
from accel_cuda import CudaConfig, health, set_numa_affinity
from accel_cuda.device import verify
from accel_cuda.machine import gpu_count, probe
from accel_testing import run_processes

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def asks_for_cuda() -> str:
    try:
        Accelerator(device="cuda")
    except (ConfigError, PluginError) as error:
        return str(error)
    return "it ran"


@without_gpu
def test_without_a_gpu_asking_for_one_fails_with_the_reason(run_processes) -> None:
    (message,) = run_processes(asks_for_cuda, world=1)

    assert probe() is not None
    assert str(probe()) in message
    assert "accel plugins" in message.splitlines()[-1]


class TestOnGpu:
    pytestmark = gpu

    def test_probe_and_count_agree_with_torch(self) -> None:
        assert probe() is None
        assert verify() is None
        assert gpu_count() == torch.cuda.device_count()

    def test_auto_takes_the_gpu_and_its_own_plugin(self) -> None:
        ((device, stack),) = run_processes(chosen, world=1)

        assert device == "cuda:0"
        assert stack.startswith("cuda + ")

    @pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
    def test_steps_replayed_as_graphs_train_as_a_plain_loop(self, precision: str) -> None:
        ((ours, plain, replayed),) = run_processes(graphed, precision, world=1)

        assert ours == pytest.approx(plain, rel=2e-2 if precision != "no" else 1e-4)
        assert replayed, "nothing was recorded as a graph"

    @pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
    def test_it_trains_as_a_plain_loop(self, precision: str) -> None:
        ((ours, plain),) = run_processes(losses, precision, world=1)

        assert ours == plain

    def test_memory_is_reported_in_bytes(self) -> None:
        (stats,) = run_processes(memory, world=1)

        assert stats["total"] > stats["allocated"] >= 4 * 2**20
        assert stats["peak"] >= stats["allocated"]

    def test_sensors_tell_what_nvidia_smi_tells(self) -> None:
        pytest.importorskip("pynvml")
        (found,) = run_processes(sensors, world=1)

        assert 10 < found["temperature"] < 120
        assert 5 < found["power"] < 2000
        assert 100 < found["clock"] < 4000
        assert 0 <= found.get("busy", 0) <= 1

    def test_affinity_names_cpus_of_this_machine(self) -> None:
        (cpus,) = run_processes(pinned, world=1)

        assert cpus
        assert cpus <= os.sched_getaffinity(0)


def chosen() -> tuple[str, str]:
    run = Accelerator()
    return str(run.device), str(run.run.stack)


def losses(precision: str) -> tuple[list[float], list[float]]:
    return _train(Accelerator(mixed_precision=precision, plugins=[CudaConfig(deterministic=True)])), _plain(
        precision
    )


def graphed(precision: str) -> tuple[list[float], list[float], int]:
    replays, replay = [], torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    ours = _train(Accelerator(mixed_precision=precision, dynamo_plugin=plugin))
    return ours, _plain(precision), len(replays)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(x, x.sum(1, keepdim=True).sin()) for x in torch.randn(10, 32, 64, generator=generator)]


def _train(run: Accelerator) -> list[float]:
    model = _net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for x, y in _batches():
        loss = F.mse_loss(model(x.to(run.device)).float(), y.to(run.device))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _plain(precision: str) -> list[float]:
    model = _net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    found = []
    for x, y in _batches():
        with torch.autocast("cuda", dtype=dtype, enabled=precision != "no"):
            prediction = model(x.cuda())
        loss = F.mse_loss(prediction.float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def memory() -> dict[str, int]:
    run = Accelerator()
    held = torch.ones(2**20, device=run.device)
    stats = dict(run.run.hooks.memory_stats(run.device))
    return stats if held.numel() else {}


def sensors() -> dict[str, Any]:
    run = Accelerator()
    health.WAIT = 20
    return dict(run.run.hooks["monitor.device_health"](run.device))


def pinned() -> set[int]:
    set_numa_affinity(0)
    return os.sched_getaffinity(0)
