"""Models made on the meta device, helpers of libraries that load them, and what refuses to be called."""

from __future__ import annotations

import threading
from importlib.metadata import version

import pytest
import torch
from accelerate import Accelerator, init_empty_weights, init_on_device
from accelerate.utils import (
    ProfileKwargs,
    convert_file_size_to_int,
    get_grad_scaler,
    get_max_memory,
    is_compiled_module,
    is_torch_version,
    set_module_tensor_to_device,
)
from peers import needs_accelerate, said

from accel_compat import notices
from accel_compat.unsupported import NotServedError

EMPTY = """
import json, torch
from accelerate import init_empty_weights, init_on_device
from accelerate.utils import set_module_tensor_to_device
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_parameter("none", None)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.plain = torch.ones(2)
def shown(net):
    state = net.state_dict(keep_vars=True)
    return {name: [each.device.type, each.requires_grad] for name, each in state.items()}
found = []
for context in (init_empty_weights(), init_empty_weights(include_buffers=True), init_on_device("meta")):
    with context:
        net = Net()
    found.append([shown(net), net.plain.device.type, type(net.one.weight).__name__])
with init_empty_weights():
    net = Net()
for name, value in Net().state_dict().items():
    set_module_tensor_to_device(net, name, "cpu", value=value)
found += [shown(net), shown(Net())]
print(json.dumps(found))
"""

HALF = """
import json, os, torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, set_seed
found = []
set_seed(0)
a = Accelerator(cpu=True, mixed_precision=os.environ["KIND"])
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
m, o = a.prepare(net, torch.optim.SGD(net.parameters(), lr=.1))
x, y = torch.randn(8, 8), torch.randint(5, (8,))
for _ in range(3):
    out = m(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    a.backward(loss); o.step(); o.zero_grad()
    found.append([str(out.dtype), loss.item(), a.gather_for_metrics(out).detach().cpu().numpy().sum().item()])
for keep in (True, False):
    out = extract_model_from_parallel(m, keep_fp32_wrapper=keep)(x)
    found.append([str(out.dtype), out.sum().item()])
print(json.dumps(found))
"""


@needs_accelerate
@pytest.mark.parametrize("kind", ["bf16", "no"])
def test_losses_outside_the_forward_and_metrics_are_the_same_digits(kind, run_processes):
    assert said(run_processes, HALF, ours=True, environment={"KIND": kind}) == said(
        run_processes, HALF, ours=False, environment={"KIND": kind}
    )


PARTS = """
import json, torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
found = []
for deep in (False, True):
    inner = nn.Linear(2, 2)
    model = Wrapper(nn.ModuleDict({"one": Wrapper(Wrapper(inner)), "two": nn.Sequential(Wrapper(inner))}))
    out = extract_model_from_parallel(model, recursive=deep)
    found += [type(out).__name__, sorted(out.state_dict()), any(m is inner for m in out.children())]
    found.append([type(m).__name__ for m in model.modules()])
print(json.dumps(found))
"""


@needs_accelerate
def test_all_parts_of_a_model_are_unwrapped_if_that_is_asked_for(run_processes):
    assert said(run_processes, PARTS, ours=True) == said(run_processes, PARTS, ours=False)


@needs_accelerate
def test_empty_weights_are_empty_as_there(run_processes):
    assert said(run_processes, EMPTY, ours=True) == said(run_processes, EMPTY, ours=False)


def test_ties_and_attributes_stay_and_other_threads_are_left_alone():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.two.weight = self.one.weight

    made = []
    with init_empty_weights():
        tied = Tied()
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()
        with init_on_device("cpu"):
            inner = torch.nn.Linear(1, 1)
        outer = torch.nn.Linear(1, 1)
    assert tied.two.weight is tied.one.weight
    assert tied.one.weight.is_meta
    assert made[0].weight.device.type == inner.weight.device.type == "cpu"
    assert outer.weight.is_meta
    assert not torch.nn.Linear(1, 1).weight.is_meta


def test_an_empty_model_is_filled_tensor_by_tensor():
    with init_empty_weights():
        model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="meta device"):
        set_module_tensor_to_device(model, "weight", "cpu")
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(2, 2), dtype=torch.float16)
    assert model.weight.dtype == torch.float16


def test_a_refusal_names_who_called_and_the_way_around():
    from accelerate.utils.bnb import quantize_and_offload_8bit

    with pytest.raises(NotServedError, match=r"called by .*test_compat_meta\.py:\d+\n.*leave the call out"):
        quantize_and_offload_8bit(torch.nn.Linear(1, 1))


def test_sizes_may_be_fractions():
    assert convert_file_size_to_int(2.5e9) == 2_500_000_000
    assert get_max_memory({"cpu": 1e9, 0: "1GB"}) == {0: 10**9, "cpu": 1e9}


def test_a_profiler_is_built_and_what_cannot_be_recorded_left_out(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_warned", set())
    assert isinstance(ProfileKwargs(activities=["cpu"]).build(), torch.profiler.profile)
    with pytest.raises(ValueError, match="Invalid profiler activity: gpu"):
        ProfileKwargs(activities=["gpu"]).build()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu", "cuda"])])
    with accelerator.profile() as recorded:
        torch.ones(2) + 1
    assert recorded.key_averages()
    if not torch.cuda.is_available():
        assert "cuda cannot be recorded" in capsys.readouterr().err


@pytest.mark.parametrize("given", [None, ProfileKwargs(with_stack=True)])
def test_a_profiler_has_the_settings_of_the_call_or_of_the_accelerator(given):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(record_shapes=True)])
    with accelerator.profile(given) as recorded:
        torch.ones(2) + 1
    assert (recorded.record_shapes, recorded.with_stack) == (given is None, given is not None)


def test_a_scaler_is_made_for_any_number_of_runs():
    assert get_grad_scaler(init_scale=2.0).get_scale() in (1.0, 2.0)
    Accelerator(cpu=True), Accelerator(cpu=True)
    assert isinstance(get_grad_scaler(), torch.amp.GradScaler)


def test_a_model_compiled_in_place_counts_as_compiled():
    model = torch.nn.Linear(1, 1)
    assert not is_compiled_module(model)
    model.compile(backend="eager")
    assert is_compiled_module(model)


def test_everything_of_utils_can_be_imported_at_once():
    names: dict[str, object] = {}
    exec("from accelerate.utils import *", names)
    assert {"set_seed", "ProjectConfiguration", "gather", "infer_auto_device_map"} <= names.keys()


def test_torch_is_of_the_version_of_its_distribution_whatever_it_calls_its_build(monkeypatch):
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.split('+')[0]}+of.this.build")
    assert is_torch_version("==", version("torch"))


SKIPS = """
import json, torch, accelerate, accelerate.utils
from torch.utils.data import DataLoader
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import find_executable_batch_size, is_torch_version, set_seed
a = Accelerator(cpu=True)
loader = a.prepare(DataLoader(torch.arange(5.), batch_size=1))
once = skip_first_batches(loader, 1)
twice = a.skip_first_batches(once, 1)
found = [[each.item() for each in which] for which in (twice, twice, once, loader)]
sizes = []
@find_executable_batch_size(starting_batch_size=8)
def run(size):
    sizes.append(size)
    if size > 5:
        raise RuntimeError("CUDA out of memory.")
run(); run()
def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
modules = [accelerate.commands, accelerate.checkpointing, accelerate.utils.offload, accelerate.utils.launch]
found += [sizes, raised(lambda: set_seed(-1)), [each.__name__ for each in modules]]
found += [[is_torch_version(how, torch.__version__.split("+")[0]) for how in ("==", ">=", "<")]]
print(json.dumps(found))
"""


@needs_accelerate
def test_helpers_around_a_loop_are_as_there(run_processes):
    assert said(run_processes, SKIPS, ours=True) == said(run_processes, SKIPS, ours=False)
