"""`torch.compile` by config: in place, in its phase, under autocast, without a trace in names and files."""

from __future__ import annotations

import copy
import io
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training_problems import FEATURES, net, our_losses, plain_losses

from accel_core import TorchDynamoPlugin
from accel_core.contract.step_hook import before_forward
from accel_core.training.compile import compile_model

# Dynamo looks at `.grad` of what flows between blocks; torch's warning of that must not be an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
X = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graphs():
    """A backend that keeps the graphs it is given, and what it was told."""
    torch._dynamo.reset()
    found = []

    def keep(graph, inputs):
        found.append(torch.is_autocast_enabled("cpu"))
        return graph.forward

    torch._dynamo.register_backend(keep, name="keep_graphs")
    yield found
    torch._dynamo.backends.registry._COMPILER_FNS.pop("keep_graphs")
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self, depth=12):
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(accelerator_of, backend="keep_graphs", precision=None, **options):
    plugin = TorchDynamoPlugin(backend=backend, **options)
    return accelerator_of(dynamo_plugin=plugin, mixed_precision=precision)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_training_is_that_of_the_plain_loop(accelerator_of, graphs, precision):
    ours = our_losses(compiled(accelerator_of, precision=precision), 6)
    assert ours == pytest.approx(plain_losses(6, dtype=torch.bfloat16 if precision else None), rel=1e-5)
    assert graphs == [precision == "bf16"]


def test_aot_autograd_trains_too(accelerator_of, graphs):
    assert our_losses(compiled(accelerator_of, "aot_eager"), 4) == pytest.approx(plain_losses(4), rel=1e-5)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_forward_is_one_graph(accelerator_of, graphs, precision):
    accelerator = compiled(accelerator_of, precision=precision, fullgraph=True)
    output = accelerator.prepare(Block())(X)
    assert output.dtype == torch.float32
    assert graphs == [precision == "bf16"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.usefixtures("run_command")  # inductor starts a Python, to ask what the processor can do
def test_inductor_trains_too(accelerator_of, graphs):
    assert our_losses(compiled(accelerator_of, "INDUCTOR"), 4) == pytest.approx(plain_losses(4), rel=1e-4)


def test_the_mode_that_replays_graphs_reaches_torch(accelerator_of, monkeypatch):
    told = {}
    monkeypatch.setattr(torch, "compile", lambda call, **options: told.update(options) or call)
    compiled(accelerator_of, "inductor", mode="reduce-overhead").prepare(net())(X)
    assert (told["backend"], told["mode"]) == ("inductor", "reduce-overhead")


def kept_from_replays(accelerator, model, forward):
    """Return whether each micro-batch of a window of two leaves its gradients outside of a graph's memory."""
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    memory = []  # of what a backward leaves, which a graph's next replay would write into
    next(model.parameters()).register_hook(lambda gradient: memory.append(gradient.data_ptr()))
    kept = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(forward(model)(X).sum())
            kept.append(next(model.parameters()).grad.data_ptr() not in memory)
            optimizer.step()
            optimizer.zero_grad()
    return kept


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_gradients_that_wait_for_their_window_are_kept_from_the_replay_of_a_graph(
    accelerator_of, monkeypatch, options
):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    plugin = TorchDynamoPlugin(backend="inductor", **options)
    accelerator = accelerator_of(dynamo_plugin=plugin, gradient_accumulation_steps=2)
    kept = kept_from_replays(accelerator, net(), lambda model: model)
    assert kept[0], "the gradient of the first micro-batch is in the graph's memory"


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_so_are_those_of_a_model_that_the_user_compiled_with_graphs(accelerator_of, mode, part):
    model = net()
    eager = nn.Sequential(*map(copy.copy, model))  # of the same parameters
    if part:
        model[0].compile(mode=mode)
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    kept = kept_from_replays(accelerator, model if part else torch.compile(model, mode=mode), lambda _: eager)
    assert kept[0] == (mode == "reduce-overhead")


def test_a_window_that_is_run_as_a_whole_keeps_all_of_it_from_the_replay_of_a_graph(
    accelerator_of, monkeypatch
):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    accelerator = accelerator_of(dynamo_plugin=plugin, gradient_accumulation_steps=2)
    model = net()
    model, _ = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    left, gradients = [], []  # in a graph's memory
    next(model.parameters()).register_hook(gradients.append)

    def forward_loss(model, x):
        if gradients:
            (gradient,) = gradients
            assert next(model.parameters()).grad.data_ptr() != gradient.data_ptr()
            for tensor in (*left, gradient):
                tensor.detach().fill_(float("nan"))  # this replay takes their memory
        output = model(x)
        left.extend((output, output.sum()))
        return left[-1], {"output": output}

    found = accelerator.forward_backward(model, [X, X], forward_loss)
    want = net()
    loss = want(X).sum()
    loss.backward()
    assert torch.allclose(found.loss, loss)
    assert torch.allclose(found.outputs[0]["output"], want(X))
    for parameter, expected in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad)


def test_the_model_stays_the_users_object_with_its_names(accelerator_of, graphs):
    accelerator = compiled(accelerator_of)
    model = net()
    names = list(model.state_dict())
    assert accelerator.prepare(model) is model
    model(X)
    assert len(graphs) == 1
    assert list(model.state_dict()) == list(accelerator.run.units[0].named_parameters()) == names


def test_the_backend_auto_is_the_one_that_a_plugin_offers(graphs):
    model = net()
    compile_model(model, TorchDynamoPlugin(backend="auto"), "keep_graphs")
    model(X)
    assert len(graphs) == 1


def test_what_the_config_says_wins_over_what_a_plugin_offers(graphs):
    model = net()
    compile_model(model, TorchDynamoPlugin(backend="keep_graphs"), "no_such_backend")
    model(X)
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", [None, "no", "NO"])
def test_nothing_is_compiled_unless_asked_for(accelerator_of, graphs, backend):
    model = compiled(accelerator_of, backend).prepare(net())
    model(X)
    assert model._compiled_call_impl is None


def test_compiling_can_be_disabled_for_a_test(accelerator_of, graphs):
    compiled(accelerator_of, disable=True).prepare(net())(X)
    assert graphs == []


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_repeated_blocks_are_compiled_once(accelerator_of, graphs, precision):
    accelerator = compiled(accelerator_of, precision=precision, use_regional_compilation=True, fullgraph=True)
    model = accelerator.prepare(Stack())
    model(X).float().sum().backward()
    assert graphs == [precision == "bf16"]
    assert model._compiled_call_impl is None
    assert [block._compiled_call_impl is not None for block in model.blocks] == [True] * 12


@pytest.mark.parametrize(("depth", "whole"), [(1, True), (2, False)])
def test_two_blocks_are_repeated_and_one_is_not(accelerator_of, graphs, depth, whole):
    model = compiled(accelerator_of, use_regional_compilation=True).prepare(Stack(depth))
    assert (model._compiled_call_impl is not None) == whole
    assert [block._compiled_call_impl is None for block in model.blocks] == [whole] * depth


def test_a_model_without_repeated_blocks_is_compiled_whole_and_said_to_be(accelerator_of, graphs, caplog):
    model = compiled(accelerator_of, use_regional_compilation=True).prepare(net())
    model(X)
    assert len(graphs) == 1
    assert "Sequential has no list of blocks of one class; the whole model is compiled" in caplog.text


@pytest.mark.parametrize("regional", [False, True])
def test_the_unwrapped_model_can_be_had_eager_with_the_same_weights(accelerator_of, graphs, regional):
    accelerator = compiled(accelerator_of, use_regional_compilation=regional)
    model = accelerator.prepare(Stack(3))
    assert accelerator.unwrap_model(model) is model
    eager = accelerator.unwrap_model(model, keep_torch_compile=False)
    expected = eager(X)
    assert graphs == []
    assert all(a is b for a, b in zip(eager.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(model(X), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_the_unwrapped_model_can_be_had_without_autocast(accelerator_of, graphs, in_place):
    model, accelerator = net(), accelerator_of(mixed_precision="bf16")
    expected = model(X)
    if in_place:
        model.compile(backend="keep_graphs")
    else:
        model = torch.compile(model, backend="keep_graphs")
    model = accelerator.prepare(model)
    assert torch.equal(accelerator.unwrap_model(model, keep_fp32_wrapper=False)(X), expected)
    assert not torch.equal(model(X), expected)


def test_an_eager_view_is_taken_for_its_model(accelerator_of, graphs):
    accelerator = compiled(accelerator_of, use_regional_compilation=True)
    model = accelerator.prepare(Stack(3))
    eager = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert eager is not model
    assert accelerator.prepare(eager) is model
    assert len(accelerator.run.units) == 1


def test_a_model_that_is_not_compiled_unwraps_to_itself(accelerator):
    model = accelerator.prepare(net())
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is model


def test_copies_and_pickles_of_a_compiled_model_run(accelerator_of, graphs):
    model = compiled(accelerator_of, precision="bf16").prepare(Stack(2))
    output = model(X)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), output)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    torch.testing.assert_close(again(X), output.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_the_user_compiles_runs_under_autocast(accelerator_of, graphs, before, in_place):
    accelerator = accelerator_of(mixed_precision="bf16")

    def compile_it(model):
        if in_place:
            model.compile(backend="keep_graphs", fullgraph=True)
            return model
        return torch.compile(model, backend="keep_graphs", fullgraph=True)

    model = Block()
    model = accelerator.prepare(compile_it(model)) if before else compile_it(accelerator.prepare(model))
    assert model(X).dtype == torch.float32
    assert graphs == [True]


def test_a_model_that_the_user_compiled_keeps_its_names_and_is_not_compiled_twice(accelerator_of, graphs):
    accelerator = compiled(accelerator_of)
    inner = net()
    model = torch.compile(inner, backend="keep_graphs")
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(model):
        accelerator.backward(model(X).sum())
        optimizer.step()
    assert len(graphs) == 1
    (unit,) = accelerator.run.units
    assert list(unit.named_parameters()) == [name for name, _ in inner.named_parameters()]
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is inner


def test_a_model_of_which_a_part_comes_compiled_is_compiled_too(accelerator_of, graphs):
    accelerator, model = compiled(accelerator_of), Stack(depth=2)
    expected = model(X)
    model.head.compile(backend="keep_graphs")
    model = accelerator.prepare(model)
    assert torch.equal(model(X), expected)
    assert model._compiled_call_impl is not None
    assert graphs


@pytest.mark.parametrize("regional", [False, True])
def test_a_model_is_the_users_again_after_the_run(accelerator_of, graphs, regional):
    accelerator = compiled(accelerator_of, use_regional_compilation=regional)
    mine, theirs = Stack(2), Stack(2)
    theirs.compile(backend="keep_graphs")
    accelerator.prepare(mine, theirs)
    accelerator.free_memory()
    assert all(module._compiled_call_impl is None for module in mine.modules())
    assert theirs._compiled_call_impl is not None


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_hook_before_forward_runs_outside_of_what_is_compiled(compiled):
    module, seen = Twice(2, 1), []
    if compiled:
        module.compile(backend="eager", fullgraph=True)
    end = before_forward(module, lambda module: seen.append((module, threading.get_ident())))
    module(torch.ones(1, 2))
    module(torch.ones(1, 2))
    end()
    module(torch.ones(1, 2))

    assert seen == [(module, threading.get_ident())] * 2


def test_a_hook_before_forward_may_end_itself_in_its_first_call():
    module, ends = Twice(2, 1), []
    module.compile(backend="eager", fullgraph=True)
    compiled = module._compiled_call_impl
    ends.append(before_forward(module, lambda module: ends.pop()()))
    module(torch.ones(1, 2))

    assert not ends
    assert module._compiled_call_impl is compiled


def test_a_hook_before_forward_that_has_ended_is_not_called_by_a_later_one():
    module, seen = Twice(2, 1), []
    module.compile(backend="eager", fullgraph=True)
    end = before_forward(module, lambda module: seen.append("first"))
    before_forward(module, lambda module: seen.append("second"))
    end()
    module(torch.ones(1, 2))

    assert seen == ["second"]
