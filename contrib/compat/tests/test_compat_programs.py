"""Programs of the shapes that Accelerate's users write, in one process and in two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import notebook_launcher
from peers import run_program

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

def parts(seed=7):
    set_seed(seed)
    data = torch.randn(52, 4)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    return model, optimizer, loader, schedule

def loss_of(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)

def weights(accelerator, model):
    return torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
"""
PROGRAMS = {
    "plain": """
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(*parts())
means = []
for epoch in range(4):
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(accelerator.gather(loss.detach()).mean())
    means.append(torch.stack(losses).mean().item())
assert means[-1] < means[0], means
""",
    "accumulation": """
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model, optimizer, loader, schedule = accelerator.prepare(*parts())
steps = 0
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            steps += 1
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
assert steps == -(-len(loader) // 3), steps
""",
    "checkpoint": """
import sys
def train(accelerator, objects, upto, skip=0):
    model, optimizer, loader, schedule = objects
    batches = accelerator.skip_first_batches(loader, skip) if skip else loader
    for number, batch in enumerate(batches, skip + 1):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        schedule.step()
        if number == upto:
            break
accelerator = Accelerator(cpu=True)
objects = accelerator.prepare(*parts())
train(accelerator, objects, 3)
accelerator.save_state(sys.argv[1])
train(accelerator, objects, 5)
accelerator.load_state(sys.argv[1])
again = weights(accelerator, objects[0])
assert torch.isfinite(again).all()
""",
    "tracking": """
import sys, json
from accelerate.tracking import GeneralTracker, on_main_process
class Memory(GeneralTracker):
    name, requires_logging_directory = "memory", False
    def __init__(self):
        super().__init__()
        self.rows = []
    @property
    def tracker(self):
        return self.rows
    @on_main_process
    def store_init_configuration(self, values):
        self.rows.append(values)
    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.rows.append((step, values))
mine = Memory()
accelerator = Accelerator(cpu=True, log_with=mine)
accelerator.init_trackers("project", config={"lr": 1})
accelerator.log({"loss": 2.0}, step=1)
accelerator.end_training()
if accelerator.is_main_process:
    assert mine.rows == [{"lr": 1}, (1, {"loss": 2.0})], mine.rows
""",
    "local sgd": """
from accelerate.local_sgd import LocalSGD
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(*parts())
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
mine = weights(accelerator, model)
everyones = accelerator.gather(mine[None])
assert torch.allclose(everyones, mine.expand_as(everyones), atol=1e-6)
""",
    "early stopping": """
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(*parts())
for number, batch in enumerate(loader):
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()
    if number == 2 and accelerator.is_last_process:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
assert number == 2
accelerator.wait_for_everyone()
""",
    "memory": """
from accelerate.utils import find_executable_batch_size
accelerator = Accelerator(cpu=True)
tried = []
@find_executable_batch_size(starting_batch_size=64)
def train(batch_size):
    accelerator.free_memory()
    tried.append(batch_size)
    if batch_size > 16:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    model, optimizer, loader, schedule = accelerator.prepare(*parts())
    return batch_size
assert train() == 15 and tried[:4] == [64, 57, 51, 45]
halves = iter((32, 16))
@find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(halves))
def halved(batch_size):
    return train.__wrapped__(batch_size)
assert halved() == 16
""",
    "third-party device": """
from accel_testing.simulated.device import simulate
from accelerate.utils import clear_device_cache
simulate()
clear_device_cache(garbage_collection=True)
""",
    "profiler": """
from accelerate.utils import ProfileKwargs
accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], record_shapes=True)])
model = accelerator.prepare(parts()[0])
with accelerator.profile() as profiler:
    model(torch.ones(2, 4))
assert "addmm" in profiler.key_averages().table()
""",
    "metrics": """
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(DataLoader(torch.arange(13.0)[:, None], batch_size=4))
seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
assert sorted(seen.flatten().tolist()) == list(range(13)), seen
""",
    "splitting": """
accelerator = Accelerator(cpu=True)
from accelerate.utils import gather_object
with accelerator.split_between_processes(list(range(5))) as mine:
    share = [number * 2 for number in mine]
assert sorted(gather_object(share)) == [0, 2, 4, 6, 8]
""",
}


def launched(run_command, words: list[str]) -> None:
    done = run_command(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.by_default("plain-2", "accumulation-2")
def test_a_program_runs(tmp_path: Path, name, processes, run_processes):
    code = f"import sys; sys.argv = ['script.py', {str(tmp_path / 'state')!r}]\n" + HEAD + PROGRAMS[name]
    run_program(run_processes, code, ours=True, processes=processes)


def test_a_program_is_launched(tmp_path: Path, run_command):
    script = tmp_path / "script.py"
    script.write_text(HEAD + PROGRAMS["checkpoint"])
    accel = str(Path(sys.executable).with_name("accel"))

    launched(
        run_command,
        [accel, "compat", "launch", "--cpu", "--num_processes", "2", str(script), str(tmp_path / "state")],
    )

    assert (tmp_path / "state").is_dir()


@pytest.mark.parametrize(("argument", "expected"), [("split_batches=True", 1), ("", 0)])
def test_batches_that_only_we_split_are_said(argument, expected, run_processes):
    code = f"""
import io, sys
sys.stderr = io.StringIO()
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, {argument})
print(sys.stderr.getvalue().count("splits each batch among the processes"))
"""
    assert run_program(run_processes, code, ours=True, processes=2).split() == [str(expected)]


@pytest.mark.parametrize("processes", [1, 2])
def test_hooks_of_states_get_the_programs_own_model(tmp_path: Path, processes, run_processes):
    code = f"""
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
own = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), 0.1))
seen = []
def saved(models, weights, folder):
    seen.append([models[0] is own, list(weights[0])])
    weights.pop()
def loaded(models, folder):
    seen.append(models.pop() is own)
accelerator.register_save_state_pre_hook(saved)
accelerator.register_load_state_pre_hook(loaded)
accelerator.save_state({str(tmp_path / "state")!r})
torch.nn.init.constant_(own.weight, 7.0)
accelerator.load_state({str(tmp_path / "state")!r})
print(seen, own.weight.item())
"""
    printed = run_program(run_processes, code, ours=True, processes=processes)
    assert printed.splitlines()[-1] == "[[True, ['weight', 'bias']], True] 7.0"


LAUNCHERS = {
    "debug": "debug_launcher(work, args=(sys.argv[1],), num_processes=2)",
    "notebook": "notebook_launcher(work, args=(sys.argv[1],), num_processes=2)",
}


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.by_default
def test_functions_are_launched(tmp_path: Path, name, run_command):
    code = f"""
import sys
from pathlib import Path
import accel_compat; accel_compat.install()
import torch
from accelerate import debug_launcher, notebook_launcher

def work(folder):
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
    assert (accelerator.num_processes, total.item()) == (2, 3)
    (Path(folder) / str(accelerator.process_index)).touch()

if __name__ == "__main__":
    {LAUNCHERS[name]}
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    launched(run_command, [sys.executable, str(script), str(tmp_path)])

    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


IN_WORKERS = """
import os
import torch
from accelerate import Accelerator, PartialState, debug_launcher, notebook_launcher

def work(folder):
    state = PartialState()
    with open(f"{folder}/{state.process_index}", "w") as file:
        print(state.num_processes, Accelerator().mixed_precision, file=file)
    return lambda: "what cannot be pickled"
"""


@pytest.mark.parametrize("call", ["notebook_launcher(work, (FOLDER,), 2)", "debug_launcher(work, (FOLDER,))"])
def test_workers_do_not_take_the_run_of_the_notebook_for_theirs(tmp_path, call, run_processes):
    code = f"""{IN_WORKERS}
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
{call.replace("FOLDER", repr(str(tmp_path)))}
print(PartialState().num_processes, accelerator.mixed_precision)
"""
    assert run_program(run_processes, code, ours=True).splitlines()[-1] == "1 bf16"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2 no\n", "1": "2 no\n"}


def test_one_process_is_the_notebooks_own(run_processes):
    code = """
import os
from accelerate import Accelerator, notebook_launcher

made = []
def work(first, second):
    made.append((first, second, os.getpid(), Accelerator(cpu=True).mixed_precision))
    raise KeyError("as it is")

try:
    notebook_launcher(work, (1, 2), num_processes=1, mixed_precision="BF16")
except KeyError as error:
    print(made == [(1, 2, os.getpid(), "bf16")], error, "ACCELERATE_MIXED_PRECISION" in os.environ)
"""
    assert run_program(run_processes, code, ours=True).splitlines()[-1] == "True 'as it is' False"


@pytest.mark.parametrize("processes", [None, 1, 2])
def test_in_colab_with_one_device_the_function_is_called_here(monkeypatch, capsys, processes):
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: "<google.colab._shell.Shell>")
    )
    made = []
    notebook_launcher(made.append, (1,), processes)

    assert made == [1]
    assert ("one process trains, not 2" in capsys.readouterr().err) is (processes == 2)


@pytest.mark.parametrize("variables", [{}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}])
def test_elsewhere_a_notebook_says_how_many_processes(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="You have to specify the number of devices"):
        notebook_launcher(print)


def test_on_a_notebooks_tpu_each_core_gets_a_process(monkeypatch):
    started = []
    monkeypatch.setattr("accel_core.notebook_launcher", lambda *given: started.append(given[2]))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    notebook_launcher(print)

    assert started == [None]


@pytest.mark.parametrize("precision", ["bf16", "BF16"])
def test_workers_of_a_notebook_train_in_the_precision_asked_for(tmp_path, precision, run_processes):
    code = f"{IN_WORKERS}\nnotebook_launcher(work, ({str(tmp_path)!r},), 2, {precision!r})"
    run_program(run_processes, code, ours=True)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"2 bf16\n"}


def test_a_notebooks_rank_is_one_of_its_nodes():
    with pytest.raises(ValueError, match="node_rank must be less than the number of nodes"):
        notebook_launcher(print, num_processes=2, node_rank=1)
