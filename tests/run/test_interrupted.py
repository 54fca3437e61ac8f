"""Whatever is left by return, break, close, an exception or Ctrl-C leaves a process as it was before."""

from __future__ import annotations

import ast
import contextlib
import dis
import gc
import inspect
import random
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp import autocast_mode
from torch.utils.data import DataLoader, TensorDataset

import accel_core
from accel_core import Accelerator, CheckpointError, LocalSGD, skip_first_batches
from accel_core.contract.world import current_operation
from accel_core.distributed.together import gather_from_all_ranks
from accel_core.storage.saver import Saver

pytestmark = pytest.mark.full

CORE = str(Path(accel_core.__file__).parent)
SAMPLE = 12
"""Places of a scenario at which it is interrupted."""


class Script:
    """A run with all that holds state; `rest` is what a script does after it caught an interruption."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16", project_dir=folder / "project"
        )
        module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        self.model, self.optimizer, self.scheduler, self.loader, self.stream = self.accelerator.prepare(
            module,
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            DataLoader(TensorDataset(torch.randn(6, 3)), batch_size=2, shuffle=True),
            DataLoader(Stream(), batch_size=2),
        )
        self.save("base")

    def save(self, name: str, **options) -> None:
        self.accelerator.save_state(self.folder / name, **options)

    def step(self, batch) -> float:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).float().square().mean()
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.item()

    def train(self) -> list[float]:
        losses = [self.step(batch) for (batch,) in self.loader]
        return losses + [self.step(batch) for batch in self.stream]

    def rest(self) -> list[float]:
        self.accelerator.load_state(self.folder / "base")
        losses = self.train()
        self.save("later")
        self.accelerator.load_state(self.folder / "later")
        return losses + self.train()

    def left(self) -> dict[str, object]:
        """What a context or an iteration must put back."""
        run = self.accelerator.run
        return {
            "gradients": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "garbage collection": gc.isenabled(),
            "operation": current_operation.get(),
            "active loaders": list(run.active_loaders),
            "units": [(unit.step_state.no_sync_depth, unit.step_state.uneven) for unit in run.units],
            "shardings": [loader._plan.sharding for loader in run.prepared.loaders],
            "training": [module.training for module in self.model.modules()],
            "hooks": [list(module._forward_pre_hooks) for module in self.model.modules()],
        }

    def files(self) -> list[str]:
        """Leftovers of saves that the latest one in that folder has not removed."""
        places = [path for path in self.folder.iterdir() if any(path.glob("save-*"))]
        return [path.name for path in places if len([*path.iterdir()]) != 2]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.linspace(0, 1, 9).view(3, 3))


def nothing():
    pass


def accumulate(script, leave):
    for (batch,) in script.loader:
        with script.accelerator.accumulate(script.model):
            script.accelerator.backward(script.model(batch).sum())
            leave()
            script.optimizer.step()
            script.optimizer.zero_grad()


def windows(script, leave):
    for window in script.accelerator.windows(script.loader, script.model, items=lambda batch: len(batch[0])):
        for (batch,) in window:
            leave()
            script.accelerator.backward(script.model(batch).sum())
            script.optimizer.step()
            script.optimizer.zero_grad()


def autocast(script, leave):
    with script.accelerator.autocast():
        leave()


def no_sync(script, leave):
    with script.accelerator.no_sync(script.model):
        leave()


def join(script, leave):
    with script.accelerator.join_uneven_inputs([script.model], even_batches=False):
        leave()


def profile(script, leave):
    with script.accelerator.profile():
        leave()


def full_parameters(script, leave):
    with script.accelerator.full_parameters(script.model, writeback=True):
        leave()


def local_sgd(script, leave):
    with LocalSGD(script.accelerator, script.model, 2) as local:
        leave()
        local.step()


def ranks(script, leave):
    with script.accelerator.main_process_first(), script.accelerator.local_main_process_first():
        script.accelerator.on_main_process(leave)()
    with script.accelerator.split_between_processes([1, 2]):
        script.accelerator.on_local_main_process(leave)()


def collectives(script, leave):
    script.accelerator.gather_for_metrics(torch.ones(2))
    script.accelerator.reduce(torch.ones(2))
    script.accelerator.wait_for_everyone()
    leave()


def sequences(script, leave):
    with script.accelerator.maybe_context_parallel([torch.ones(2, 2)], [1]):
        leave()


def loader(script, leave):
    for _ in script.loader:
        for _ in script.stream:
            leave()


def by_hand(script, leave):
    batches, others = iter(script.loader), iter(script.stream)
    next(batches), next(others), next(batches)
    leave()


def skipped(script, leave):
    for (batch,) in skip_first_batches(script.loader, 2):
        script.model(batch)
        leave()


def whole_window(script, leave):
    def forward_loss(model, batch):
        leave()
        return model(batch[0]).sum(), None

    script.accelerator.forward_backward(script.model, iter(script.loader), forward_loss)


def weights(script, leave):
    for _ in script.accelerator.iter_weights(script.model):
        leave()
    script.accelerator.get_state_dict(script.model)


def save(script, leave):
    script.save("other")
    leave()


def save_behind(script, leave):
    script.save("other", wait=False)
    leave()
    script.accelerator.wait_for_checkpoint()


def load(script, leave):
    script.accelerator.load_state(script.folder / "base")
    leave()


def save_model(script, leave):
    script.accelerator.save_model(script.model, script.folder / "model")
    leave()


def train(script, leave):
    script.train()
    leave()


SCENARIOS = [
    accumulate, windows, autocast, no_sync, join, profile, full_parameters, local_sgd, ranks, collectives,
    sequences, loader, by_hand, skipped, whole_window, weights, save, save_behind, load, save_model, train,
]  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    made = Script(tmp_path_factory.mktemp("interrupted"))
    made.expected, made.before = made.rest(), made.left()
    yield made
    made.accelerator.end_training()


def check(script, what) -> list[str]:
    """What is not as it would be if nothing had been left."""
    found = script.left()
    problems = [f"{what}: {name}: {found[name]}" for name in found if found[name] != script.before[name]]
    torch.set_grad_enabled(True), gc.enable(), current_operation.set("")  # so that one fault is told once
    script.accelerator.run.active_loaders.clear()
    if script.rest() != script.expected:
        problems.append(f"{what}: other losses")
    if script.accelerator.run.accumulation is not None:
        problems.append(f"{what}: it accumulates for ever")
    return problems + [f"{what}: {name}" for name in script.files()]


class Left(BaseException):
    """As SystemExit in a handler of the user's own."""


def raising(kind):
    def leave():
        raise kind("left here")

    return leave


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Left])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_what_the_users_code_leaves_by_an_exception_is_as_if_it_had_not_been(script, scenario, kind):
    with contextlib.suppress(kind):
        scenario(script, raising(kind))
    assert not check(script, scenario.__name__)


# -- return, break and close where a scenario calls `leave` itself --------------------------------


class Replaced(ast.NodeTransformer):
    """A scenario in which the statement `leave()` is another one."""

    def __init__(self, statement: str) -> None:
        self.statement, self.found = statement, False

    def visit_Expr(self, node):
        if ast.unparse(node) != "leave()":
            return node
        self.found = True
        return ast.copy_location(ast.parse(self.statement).body[0], node)

    def of(self, scenario):
        """The function; None where it has no such statement of its own, or the other cannot stand there."""
        tree = ast.parse(inspect.getsource(scenario))
        tree.body[0].body = [
            each if isinstance(each, ast.FunctionDef) else self.visit(each) for each in tree.body[0].body
        ]
        names = dict(globals())
        try:
            exec(compile(ast.fix_missing_locations(tree), __file__, "exec"), names)
        except SyntaxError:  # no loop to break
            return None
        return names[scenario.__name__] if self.found else None


def cases():
    for scenario in SCENARIOS:
        for statement in ("return", "break", "yield"):
            function = Replaced(statement).of(scenario)
            if function is not None:
                yield pytest.param(function, id=f"{scenario.__name__}-{statement}")


@pytest.mark.parametrize("function", list(cases()))
def test_what_is_left_by_return_break_or_close_is_as_if_it_had_not_been(script, function):
    begun = function(script, nothing)
    if inspect.isgenerator(begun):
        next(begun)
        begun.close()
    assert not check(script, function.__name__)


# -- Ctrl-C in core's own code -------------------------------------------------------------------


class Interruption:
    """Ctrl-C at the n-th place in core's (or other) code where the interpreter looks for signals."""

    def __init__(self, at: int | None = None, code: str = CORE) -> None:
        self.at, self.count, self.where, self.code = at, 0, "", code

    def __enter__(self):
        self.outer = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.outer)

    def call(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looked = [looks(frame)]  # not so where a generator is resumed by an exception

        def opcode(frame, event, argument):
            if event == "opcode":
                if looked[0]:
                    self.place(frame)
                looked[0] = looks(frame)
            return opcode

        return opcode

    def place(self, frame) -> None:
        self.count += 1
        if self.count == self.at:
            name = Path(frame.f_code.co_filename).name
            self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
            sys.settrace(None)
            raise KeyboardInterrupt


def looks(frame) -> bool:
    """Whether the interpreter looks for signals once it has done the frame's current instruction."""
    return frame.f_lasti < 0 or frame.f_code.co_code[frame.f_lasti] in LOOKING


COLLECTED = "ignore::pytest.PytestUnraisableExceptionWarning"
"""Ctrl-C in an iterator that is being collected: the interpreter tells it, and goes on."""
LOOKS = "CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"
LOOKING = {number for name, number in dis.opmap.items() if name.startswith(LOOKS)}


def interrupted(script, scenario, at) -> list[str]:
    interruption = Interruption(at)
    try:
        with interruption:
            scenario(script, nothing)
    except KeyboardInterrupt:
        with contextlib.suppress(CheckpointError):  # one that has not begun says so
            script.accelerator.wait_for_checkpoint()
    on = gc.isenabled() and torch.is_grad_enabled()
    left = [] if on else [f"{interruption.where}: the garbage collector or gradients are left off"]
    gc.enable()
    torch.set_grad_enabled(True)
    return left + check(script, f"interrupted in {interruption.where} (place {at})")


def places_of(script, micro_batch, batch) -> int:
    for _ in range(2):
        script.accelerator.run.units[0].begin_anew()
        with Interruption() as counted:
            micro_batch(batch, nothing)
    return counted.count


def places(script, scenario) -> int:
    for _ in range(2):  # the first time, caches are filled
        with Interruption() as counted:
            scenario(script, nothing)
        script.rest()
    return counted.count


@pytest.mark.filterwarnings(COLLECTED)
@pytest.mark.parametrize("scenario", [accumulate, windows, autocast], ids=lambda each: each.__name__)
def test_ctrl_c_within_our_own_code_leaves_nothing(script, scenario):
    count = places(script, scenario)
    chosen = sorted(random.Random(0).sample(range(1, count + 1), min(SAMPLE, count)))
    assert not [problem for at in chosen for problem in interrupted(script, scenario, at)]


def test_after_ctrl_c_at_any_place_of_accumulate_its_loop_can_go_on_without_a_load(script):
    def micro_batch(script, leave):
        with script.accelerator.accumulate(script.model):
            leave()

    accelerator, problems = script.accelerator, []
    for at in range(1, places(script, micro_batch) + 1):
        with contextlib.suppress(KeyboardInterrupt), Interruption(at) as interruption:
            micro_batch(script, nothing)
        with accelerator.accumulate():  # of all models, so another one
            inside = accelerator.run.accumulation
        problems += [interruption.where] * (inside is None or accelerator.run.accumulation is not None)
        accelerator.run.units[0].begin_anew()
    assert not problems


def test_after_ctrl_c_at_any_place_of_accumulate_the_next_window_reduces_its_gradients(script, monkeypatch):
    quiet = []

    @contextlib.contextmanager
    def no_sync(unit, models):
        quiet.append(unit)
        try:
            yield
        finally:
            quiet.pop()

    (unit,) = script.accelerator.run.units
    monkeypatch.setattr(unit.steps, "no_sync", no_sync)

    def micro_batch(batch, leave):
        with script.accelerator.accumulate(batch=batch):
            leave()

    problems, raised = [], []  # a notebook keeps what was raised too, and all frames below it
    for batch in (1, None):
        script.accelerator._accumulations.clear()
        for at in range(1, places_of(script, micro_batch, batch) + 1):
            unit.begin_anew()
            try:
                with Interruption(at) as interruption:
                    micro_batch(batch, nothing)
            except KeyboardInterrupt as error:
                raised.append(error)
            with script.accelerator.accumulate(batch=batch):
                script.accelerator.sync_gradients = True
                problems += [f"{batch}: {interruption.where}"] * bool(quiet)
            problems += [f"{batch}: after {interruption.where}"] * bool(quiet)
            quiet.clear()
    script.accelerator._accumulations.clear()
    unit.begin_anew()
    assert raised
    assert not problems


@pytest.mark.parametrize("code", [CORE, autocast_mode.__file__], ids=["ours", "torch's"])
def test_ctrl_c_at_any_place_of_a_forward_leaves_autocast_off(script, code):
    batch = torch.ones(2, 3)
    for at in count(1):
        interruption = Interruption(at, code)
        with contextlib.suppress(KeyboardInterrupt), interruption:
            script.model(batch)
        if not interruption.where:
            break
        assert not torch.is_autocast_enabled("cpu"), interruption.where
        assert torch.autocast_increment_nesting() == 1, interruption.where
        torch.autocast_decrement_nesting()
    assert at > 10


def test_after_ctrl_c_at_any_place_of_a_step_of_all_ranks_no_operation_is_under_way(script):
    control, left = script.accelerator.run.collectives("control"), []
    for at in count(1):
        interruption = Interruption(at)
        with contextlib.suppress(KeyboardInterrupt), interruption:
            gather_from_all_ranks(control, "save_state: copy", nothing)
        left += [interruption.where] * bool(current_operation.get())
        current_operation.set("")
        if not interruption.where:
            break
    assert at > 5
    assert not left


def test_a_save_that_ctrl_c_ends_as_its_folder_is_made_leaves_nothing(script, monkeypatch):
    begin = Saver._begin

    def interrupted(*arguments, **options):
        begin(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Saver, "_begin", interrupted)
        script.save("other")
    script.save("later")
    assert not script.files()


TYPED = """
from accel_core import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.run.end = lambda failed: print(f"ended, {failed=}")
a_typo
"""


@pytest.mark.parametrize("words", [["-i"], ["-c", f"exec({TYPED!r})"]], ids=["prompt", "script"])
def test_an_error_at_a_prompt_ends_no_run(words, run_command):
    result = run_command(
        [sys.executable, *words], input=TYPED, capture_output=True, text=True, check=False, timeout=250
    )

    assert "NameError: name 'a_typo'" in result.stderr
    assert result.stdout == f"ended, failed={words[0] != '-i'}\n"
