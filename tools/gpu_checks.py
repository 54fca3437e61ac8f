"""The checks that `gpu_proof.py` makes on a device, each in processes of its own."""
# ruff: noqa: INP001  # a script, whose checks are asserts

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.processes import ProcessError, run_processes

SGD: dict[str, Any] = {"lr": 0.1}


class NotHereError(Exception):
    """Say that this machine cannot make a check, and why."""


def accelerator(device: str, **options: Any) -> Any:
    """Make an Accelerator on the device; `sim` is simulated first."""
    if device == "sim":
        from accel_testing.simulated.device import simulate

        simulate("sim")
    from accel_core import Accelerator

    return Accelerator(device=device, **options)


def module_of(device: str) -> Any:
    """`torch.NAME` of the device, if it can make waits of the host errors."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        raise NotHereError(f"torch.{device} has no set_sync_debug_mode")
    return module


@contextmanager
def without_waits(device: str) -> Any:
    """Make each wait of the host for the device an error."""
    module = module_of(device)
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def network() -> nn.Sequential:
    """Make a small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def data() -> TensorDataset:
    """Make 24 rows, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(24, width, generator=generator) for width in (16, 1)))


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters of a model in one tensor on the CPU."""
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def plain(device: str) -> torch.Tensor:
    """Return the weights after an epoch of an ordinary loop without accel-core."""
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for x, y in DataLoader(data(), 4):
        F.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def ours(run: Any) -> torch.Tensor:
    """Return the weights after the same epoch with an Accelerator."""
    inner = network()
    model, optimizer, loader = run.prepare(
        inner, torch.optim.SGD(inner.parameters(), **SGD), DataLoader(data(), 4)
    )
    for x, y in loader:
        run.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found = torch.cat([tensor.cpu().flatten() for _, tensor in run.iter_weights(model)])
    run.end_training()
    return found


def equals_plain(device: str, **options: Any) -> str:
    """Raise AssertionError if an epoch gives other weights than the ordinary loop."""
    found = ours(accelerator(device, **options))
    distance = float((found - plain(device)).abs().max())
    assert distance < 1e-5, f"weights differ by {distance:.1e}"
    return f"weights differ by {distance:.0e}"


def step_without_waits(device: str, precision: str) -> str:
    """Train with accumulation, clipping and a scheduler; fp16's loss scaler may wait in its step."""
    run = accelerator(device, mixed_precision=precision, gradient_accumulation_steps=2)
    inner = network()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = run.prepare(inner, optimizer, scheduler)
    batches = [(x.to(run.device), y.to(run.device)) for x, y in DataLoader(data(), 2)]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with run.accumulate(model):
            run.backward(F.mse_loss(model(x), y))
            if run.sync_gradients:
                run.clip_grad_norm_(model.parameters(), 1.0)
            if precision == "fp16":
                module_of(device).set_sync_debug_mode("default")
            optimizer.step()
            if precision == "fp16":
                module_of(device).set_sync_debug_mode("error")
            scheduler.step()
            optimizer.zero_grad()

    for x, y in batches[:4]:  # lazily made state and libraries' handles may wait once
        step(x, y)
    with without_waits(device):
        for x, y in batches[4:]:
            step(x, y)
    return f"{len(batches) - 4} batches"


def batches_without_waits(device: str) -> str:
    """Check that batches of workers are pinned, and that nothing waits for their copies."""
    from accel_core.storage.tensor_bytes import can_pin

    run = accelerator(device)
    if not can_pin(run.device):
        raise NotHereError(f"torch pins no memory for {device}")
    loader = run.prepare(DataLoader(data(), 4, num_workers=2))
    with without_waits(device):
        count = sum(1 for _ in loader)
    return f"{count} batches"


def keep_busy(device: str) -> None:
    """Queue products that take a GPU some 50 ms, so that the host runs far ahead of it."""
    x = torch.ones(*(4096, 4096) if device == "cuda" else (64, 64), device=device)
    for _ in range(20):
        x @ x


def batches_behind_kernels(device: str) -> str:
    """Check that batches hold their rows when the device reads them, long after the loop has gone on."""
    run = accelerator(device)
    rows = torch.randn(96, 4096, generator=torch.Generator().manual_seed(1))
    loader, found = run.prepare(DataLoader(TensorDataset(rows), 4, num_workers=2)), []
    for (x,) in loader:
        keep_busy(device)
        torch.zeros(x.shape, device=run.device)  # takes the memory of a batch that was dropped
        found.append(x.clone())
    assert torch.equal(torch.cat(found).cpu(), rows), "other rows were read"
    run.end_training()
    return f"{len(found)} batches"


def saved_among_kernels(device: str) -> str:
    """Check that saves hold the weights of their moment, amid kernels that change them before and after."""
    run = accelerator(device)
    model = run.prepare(nn.Linear(2048, 2048))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for number in range(3):
            keep_busy(device)
            model.weight.fill_(number)
            run.save_state(f"{folder}/{number}", wait=False)
            model.weight.fill_(-1)
        for number in range(3):
            run.load_state(f"{folder}/{number}")
            found = model.weight.unique().tolist()
            assert found == [number], f"save {number} holds {found}"
    run.end_training()
    return "3 saves"


def device_checksums(device: str) -> str:
    """Check that accel-monitor's checksums of replicas equal those of the CPU."""
    from accel_monitor.replicas import sums

    run = accelerator(device)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.randn(4097).mul(7).to(dtype)
        here, there = sums([tensor]), sums([tensor.to(run.device)])
        assert [int(each) for each in here] == [int(each) for each in there], dtype
    return "4 dtypes"


def saved_and_loaded(device: str, wait: bool) -> str:
    """Weights, moments and the device's random stream come back from a checkpoint, through pinned memory."""
    run = accelerator(device)
    model = network()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    run.backward(model(torch.ones(2, 16, device=run.device)).square().mean())
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        run.save_state(f"{folder}/here", wait=wait)
        before, drawn = weights(model), torch.randn(8, device=run.device).cpu()
        for parameter in model.parameters():
            parameter.data.zero_()
        run.wait_for_checkpoint()
        run.load_state(f"{folder}/here")
    assert torch.equal(weights(model), before), "other weights came back"
    assert torch.equal(torch.randn(8, device=run.device).cpu(), drawn), "the random stream did not come back"
    run.end_training()
    return "bit for bit"


def compiled(device: str, mode: str | None) -> str:
    """Compare a compiled model with the ordinary loop; `reduce-overhead` records graphs."""
    from accel_core import TorchDynamoPlugin

    if device == "sim":
        raise NotHereError("inductor does not know the simulated device")
    return equals_plain(device, dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode=mode))


def graphs_in_windows(device: str) -> str:
    """Accumulate over batches of two sizes, evaluate in between: with graphs as without."""
    from accel_core import TorchDynamoPlugin

    if device == "sim":
        raise NotHereError("inductor does not know the simulated device")

    def train(**options: Any) -> torch.Tensor:
        run = accelerator(device, gradient_accumulation_steps=2, **options)
        inner = network()
        model, optimizer, loader = run.prepare(
            inner, torch.optim.SGD(inner.parameters(), **SGD), DataLoader(data(), 5)
        )
        outputs = []
        for _ in range(2):
            for x, y in loader:
                with run.accumulate(model):
                    run.backward(F.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                outputs.append(model(x).clone())
            model.train()
        found = torch.cat([weights(inner), *(output.cpu().flatten() for output in outputs)])
        run.end_training()
        return found

    graphs = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    distance = float((train(dynamo_plugin=graphs) - train()).abs().max())
    assert distance < 1e-5, f"weights and outputs differ by {distance:.1e}"
    return f"weights and outputs differ by {distance:.0e}"


def sharded(device: str, offload: bool) -> str:
    """FSDP 2 on one device, its parameters on the host if asked."""
    from accel_fsdp import FullyShardedDataParallelPlugin

    if offload and device == "sim":
        raise NotHereError("torch pins no memory for the simulated device")
    options = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
    return equals_plain(device, strategy="fsdp", plugins=[options])


def by_transformer_engine(device: str, recipe: str) -> str:
    """Train in float8, and go on from a checkpoint of the middle with the same losses."""
    if find_spec("transformer_engine") is None or find_spec("accel_transformer_engine") is None:
        raise NotHereError("transformer-engine or accel-transformer-engine is not installed")
    from accel_transformer_engine import TransformerEngineConfig

    def train(folder: str, loads: bool) -> list[float]:
        config = TransformerEngineConfig(recipe=recipe)
        run = accelerator(device, mixed_precision="fp8-te", plugins=[config])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 256))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), **SGD))
        x, losses = torch.linspace(-1, 1, 32 * 256, device=run.device).view(32, 256), []
        if loads:
            run.load_state(folder)
        for step in range(10 if loads else 20):
            if step == 10:
                run.save_state(folder)
            loss = F.mse_loss(model(x).float(), x)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        run.end_training()
        return losses

    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = train(folder, loads=False), train(folder, loads=True)
    assert whole[-1] < whole[0], whole
    assert whole[10:] == resumed, (whole[10:], resumed)
    return f"loss {whole[0]:.3f} to {whole[-1]:.3f}, resumed alike"


def streamed(device: str, to: str) -> str:
    """Compute with a model that does not stay on the device: as with one that does, in less memory."""
    if find_spec("accel_big_models") is None or device == "cpu":
        raise NotHereError("accel-big-models is not installed, or no device beside the host")
    from accel_big_models import offload

    run = accelerator(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16)]))
    x = torch.randn(8, 512, device=run.device)
    with torch.no_grad():
        want = model.to(run.device)(x)
        model = offload(model.cpu(), to, device=run.device)
        assert torch.equal(model(x), model(x))  # the second time in the order of the first
        distance = float((model(x) - want).abs().max())
    assert distance == 0, f"outputs differ by {distance:.1e}"
    left = sum(parameter.numel() for parameter in model.parameters() if parameter.device.type == device)
    assert left == 0, f"{left} weights stayed on the device"
    run.end_training()
    return "outputs are equal, no weight stays"


def one_device_for_two(device: str) -> str:
    """Train on two ranks that share the first device; gloo carries their gradients."""
    from accel_core import InitProcessGroupKwargs

    os.environ["SLURM_LOCALID"] = os.environ["LOCAL_RANK"]  # as a task that is shown one device
    gloo = InitProcessGroupKwargs(backend="gloo")
    return equals_plain(device, split_batches=True, kwargs_handlers=[gloo])


def bound_to_the_device(device: str) -> str:
    """Run on the user's own group, made with `device_id`, with one rank per device."""
    import torch.distributed as dist

    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    dist.init_process_group(device_id=torch.device(device, index))
    run = accelerator(device)
    total = run.reduce(torch.ones(1, device=run.device), "sum").item()
    assert total == dist.get_world_size(), total
    run.end_training()
    dist.destroy_process_group()
    return f"{int(total)} ranks"


Check = tuple[str, Callable[..., str], tuple[Any, ...], int]
CHECKS: tuple[Check, ...] = (
    *(("a step waits for nothing", step_without_waits, (each,), 1) for each in ("no", "bf16", "fp16")),
    ("batches are pinned and not waited for", batches_without_waits, (), 1),
    ("an epoch equals the plain loop", equals_plain, (), 1),
    ("batches are whole though the device is behind", batches_behind_kernels, (), 1),
    ("saves in the background are of their moment", saved_among_kernels, (), 1),
    ("checksums on the device", device_checksums, (), 1),
    *(("a checkpoint comes back", saved_and_loaded, (wait,), 1) for wait in (True, False)),
    *(("compiled, with graphs in the second", compiled, (mode,), 1) for mode in (None, "reduce-overhead")),
    ("graphs, with accumulation, a short batch and an evaluation", graphs_in_windows, (), 1),
    *(("fsdp 2 on one device, offloaded in the second", sharded, (offload,), 1) for offload in (False, True)),
    *(("float8 by Transformer Engine", by_transformer_engine, (each,), 1) for each in ("delayed", "current")),
    *(("a model streams from", streamed, (to,), 1) for to in ("cpu", "disk")),
    ("two processes on one device over gloo", one_device_for_two, (), 2),
    ("ddp on two devices", lambda device: equals_plain(device, split_batches=True), (), 2),
    ("a group that is bound to the device", bound_to_the_device, (), 2),
)
"""(what is proved, the function, its arguments after the device, ranks with a device each)."""


def prove(check: Check, device: str, seconds: float = 300) -> tuple[str, str]:
    """("ok", "FAILED", "not here" or "out of time"; in which words)."""
    _, function, arguments, ranks = check
    if ranks > 1 and "gloo" not in check[0] and torch.accelerator.device_count() < ranks:
        return "not here", f"needs {ranks} devices"
    try:
        return "ok", run_processes(_guarded, function, device, *arguments, world=ranks, timeout=seconds)[0]
    except ProcessError as error:
        if error.kind == "timeout":
            return "out of time", f"{seconds:.0f} s"
        last = error.text.rstrip().splitlines()[-1]
        return ("not here" if "NotHereError" in last else "FAILED"), last.partition("Error: ")[2] or last


def _guarded(function: Callable[..., str], device: str, *arguments: Any) -> str:
    return function(device, *arguments)
