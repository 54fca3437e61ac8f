"""Blocks come and go: outputs are the resident model's, whatever happens."""

from __future__ import annotations

import copy
import io
import sys
import threading
from pathlib import Path

import pytest
import torch
from big_model_problems import Model, ids, model, shards
from torch import nn

from accel_big_models import dispatch, empty_weights, load, offload, undo, weights_of
from accel_big_models.hooks import enters_of
from accel_big_models.planning import plan_from_map
from accel_core import AccelError, ConfigError


def empty() -> Model:
    with empty_weights():
        return Model()


def streamed(folder: Path, **options) -> Model:
    """A model whose weights are read into two buffers: the engine on the CPU."""
    return load(empty(), folder, plan_from_map(empty(), {"": "disk"}, **options), mapped=False)


def engine_of(target):
    return next(enter.engine for enter in enters_of(target) if enter.engine is not None)


@pytest.fixture
def folder(tmp_path):
    return shards(tmp_path / "c", model())


@pytest.fixture
def want():
    return model()(ids())


def idle(target) -> bool:
    engine = engine_of(target)
    away = all(weight.tensor.numel() == 0 for weight in engine.weights)
    return away and not any(group.users for group in engine.groups)


def test_mapped_weights_on_disk_need_no_hooks(folder, want):
    loaded = load(empty(), folder, plan_from_map(empty(), {"": "disk"}))

    assert torch.equal(loaded(ids()), want)
    assert not enters_of(loaded)


def test_blocks_come_and_go_in_two_buffers(folder, want):
    target = streamed(folder)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(target(ids()), want)
    engine = engine_of(target)

    assert idle(target)
    assert len(engine.slots) == 2
    assert {type(it.data).__name__ for it in target.parameters()} == {"Tensor"}
    assert not any(it.is_meta for it in target.parameters())
    assert len({group.name for group in engine.groups if not group.outer}) == 5  # 4 blocks and the norm


def test_identity_ties_and_names_stay(folder):
    target = empty()
    before = dict(target.named_parameters(remove_duplicate=False))
    load(target, folder, plan_from_map(target, {"": "disk"}), mapped=False)
    target(ids())

    assert all(before[name] is it for name, it in target.named_parameters(remove_duplicate=False))
    assert target.head.weight is target.embedding.weight


def test_a_tied_weight_is_read_once_a_forward(folder, monkeypatch):
    from accel_big_models import files

    target = streamed(folder)
    target(ids())
    sizes, fine = [], files.OpenFile.read
    monkeypatch.setattr(
        files.OpenFile,
        "read",
        lambda self, start, wanted: (sizes.append(len(wanted)), fine(self, start, wanted)),
    )
    target(ids())

    assert sizes.count(50 * 32 * 4) == 1


class Held(nn.Module):
    """Weights in modules that are never called themselves, one of them in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))
        self.blocks[1][1].weight = self.blocks[0][0].weight
        self.gains = nn.ParameterList([torch.full((8,), 0.5), torch.full((8,), 2.0)])
        self.last = nn.Module()
        self.last.linear, self.last.shift = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        for pair, gain in zip(self.blocks, self.gains, strict=True):
            x = torch.tanh(pair[1](pair[0](x))) * gain
        return self.last.linear(x) + self.last.shift


@pytest.mark.parametrize(
    "places", [{"": "disk"}, {"": "cpu", "last": "disk"}, {"blocks.0": "disk", "": "cpu"}]
)
def test_weights_of_modules_that_are_never_called_come_too(tmp_path, places):
    torch.manual_seed(0)
    target = Held()
    expected, x = copy.deepcopy(target), torch.randn(3, 8)
    dispatch(target, plan_from_map(target, places), folder=tmp_path, mapped=False)

    for _ in range(2):
        assert torch.equal(target(x), expected(x))


def test_the_dtype_changes_while_blocks_stream(folder):
    target = load(empty(), folder, plan_from_map(empty(), {"": "disk"}, dtype=torch.bfloat16))

    assert enters_of(target)
    assert torch.equal(target(ids()), model().bfloat16()(ids()))
    assert {value.dtype for _, value in weights_of(target)} == {torch.bfloat16}


def test_an_error_releases_and_the_next_forward_is_right(folder, want):
    target = streamed(folder)
    with pytest.raises(ValueError, match="asked to fail"):
        target(ids(), fail_at=2)

    assert idle(target)
    assert torch.equal(target(ids()), want)


class Interrupt(BaseException):
    pass


def test_an_interrupt_leaves_nothing_once_the_model_runs_again(folder, want):
    target = streamed(folder)
    handle = target.blocks[1].first.register_forward_hook(lambda *_: (_ for _ in ()).throw(Interrupt()))
    with pytest.raises(Interrupt):
        target(ids())
    handle.remove()

    assert torch.equal(target(ids()), want)
    assert idle(target)


class Places(torch.nn.Module):
    """A table whose output is its weight, or views of it, as learnt positions are."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(9, 8))

    def forward(self, count):
        return {"first": self.weight[:count], "turned": [self.weight[:count].t()], "all": self.weight}


class Placed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.places = Places()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        places = self.places(len(x))
        for block in self.blocks:
            x = block(x)
        return x + places["first"] + places["turned"][0].t() + places["all"][-1]


def test_an_output_that_is_a_view_of_a_weight_keeps_its_values():
    target, x = Placed().requires_grad_(False), torch.randn(4, 8)
    want = target(x)
    offload(target, "disk", device="cpu", mapped=False)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(target(x), want)


def test_threads_get_right_answers(folder):
    target, plain = streamed(folder), model()
    wrong = []

    def serve(seed: int) -> None:
        with torch.no_grad():
            for turn in range(4):
                batch = ids(seed * 10 + turn)
                if not torch.equal(target(batch), plain(batch)):
                    wrong.append(seed)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert idle(target)


def test_another_order_is_served_at_once_and_remembered(folder, want):
    target = streamed(folder)
    target(ids())
    target.blocks[2].requires_grad_(False)
    order = list(target.blocks)[::-1]
    plain = model()
    with torch.no_grad():
        for _ in range(2):
            hidden = torch.ones(2, 5, 32)
            expected = torch.ones(2, 5, 32)
            for block, twin in zip(order, list(plain.blocks)[::-1], strict=True):
                hidden, expected = block(hidden), twin(expected)
            assert torch.equal(hidden, expected)
        assert engine_of(target).groups
        assert torch.equal(target(ids()), want)


def test_a_frozen_base_streams_while_an_adapter_trains(folder):
    target, plain = streamed(folder), model()
    plain.requires_grad_(False)
    target.requires_grad_(False)
    got = []
    for each in (target, plain):
        torch.manual_seed(3)
        adapter = torch.nn.Linear(32, 32)
        each.blocks[0].register_forward_hook(
            lambda module, args, output, adapter=adapter: output + adapter(output)
        )
        each(ids()).square().mean().backward()
        got.append(adapter.weight.grad)

    assert got[0].abs().sum() > 0
    assert torch.equal(*got)


def test_training_a_weight_that_comes_and_goes_is_an_error_with_its_name(folder):
    target = streamed(folder)
    with pytest.raises(AccelError, match="requires a gradient, and is not on the device"):
        target(ids()).sum().backward()


def test_a_weight_that_a_forward_changes_is_an_error_with_its_name(folder):
    target = streamed(folder)

    def change(module, args):
        with torch.no_grad():
            module.gain.mul_(2)

    target.blocks[1].register_forward_pre_hook(change)
    with pytest.raises(AccelError, match=r"blocks\.1\.gain was changed"):
        target(ids())


@pytest.mark.parametrize("mapped", [True, False])
def test_undo_leaves_an_ordinary_model(folder, want, mapped):
    target = load(empty(), folder, plan_from_map(empty(), {"": "disk", "blocks.1": "cpu"}), mapped=mapped)
    target(ids())
    undo(target)

    assert not any(module._forward_pre_hooks or module._forward_hooks for module in target.modules())
    assert {it.device.type for it in target.parameters()} == {"cpu"}
    assert torch.equal(target(ids()), want)
    target.requires_grad_(True)
    target(ids()).sum().backward()
    assert target.scale.grad is not None


def test_weights_are_never_on_meta_and_root_weights_are_there(folder):
    got = dict(weights_of(streamed(folder)))
    state = model().state_dict()

    assert got.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in got.items())
    with pytest.raises(AccelError, match="is on the meta device"):
        list(weights_of(empty()))


def test_two_models_in_one_folder_keep_their_own_weights(tmp_path):
    first = offload(model(0), "disk", device="cpu", folder=tmp_path, mapped=False)
    second = offload(model(1), "disk", device="cpu", folder=tmp_path, mapped=False)

    assert torch.equal(first(ids()), model(0)(ids()))
    assert torch.equal(second(ids()), model(1)(ids()))
    undo(first)
    undo(second)
    del first, second
    import gc

    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_dispatched_or_on_meta_is_refused(folder):
    target = streamed(folder)
    with pytest.raises(ConfigError, match="dispatched already"):
        dispatch(target, plan_from_map(target, {"": "cpu"}))
    with pytest.raises(ConfigError, match="on the meta device"):
        dispatch(empty(), plan_from_map(empty(), {"": "cpu"}))


def test_a_full_disk_is_named_and_the_model_stays_as_it_was(tmp_path, run_command):
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from big_model_problems import ids, model
import torch
from accel_big_models import offload
from accel_core import AccelError
target, want = model(), model()(ids())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
try:
    offload(target, "disk", device="cpu", folder={str(tmp_path)!r}, mapped=False)
except AccelError as error:
    print(str(error).splitlines()[0])
assert torch.equal(target(ids()), want)
"""
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert "cannot be written" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_and_the_model_stays_as_it_was(tmp_path, want):
    (tmp_path / "file").touch()
    target = model()
    with pytest.raises(AccelError, match="file: no folder can be made there for weights"):
        offload(target, "disk", device="cpu", folder=tmp_path / "file")
    with torch.no_grad():
        assert torch.equal(target(ids()), want)


def test_a_conjugated_weight_goes_to_disk_as_what_it_is(tmp_path):
    target = torch.nn.Module()
    target.weight = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]).conj())
    offload(target, "disk", device="cpu", folder=tmp_path, mapped=False)

    assert dict(weights_of(target))["weight"].tolist() == [1 - 2j, 3 + 1j]


def saved_and_loaded(target):
    file = io.BytesIO()
    torch.save(target, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
def test_a_copy_streams_by_itself(folder, want, duplicate):
    target = streamed(folder)
    target(ids())
    twin = duplicate(target)
    undo(target)

    assert engine_of(twin)
    assert torch.equal(twin(ids()), want)
    assert torch.equal(target(ids()), want)


def test_compiled_blocks_are_one_graph_each(folder, want):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    target = empty()
    for block in target.blocks:
        block.compile(backend=backend, fullgraph=True)
    load(target, folder, plan_from_map(target, {"": "disk"}), mapped=False)
    with torch.no_grad():
        torch.testing.assert_close(target(ids()), want)
        torch.testing.assert_close(target(ids()), want)

    assert 1 <= len(graphs) <= 4
    undo(target)
    with torch.no_grad():
        torch.testing.assert_close(target(ids()), want)


WITHOUT_COMPILER = """
import sys
from big_model_problems import ids, model
from accel_big_models import offload
target = offload(model(), "disk", device="cpu", mapped=False)
target(ids())
print("torch._dynamo" in sys.modules)
import torch
assert torch.equal(torch.compile(target, backend="eager")(ids()), model()(ids()))
"""


@pytest.mark.full
def test_streaming_imports_no_compiler_before_something_is_compiled(run_command):
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = run_command(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)

    assert done.stdout == "False\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_streaming_holds_two_blocks_and_what_is_outside_of_them(folder):
    target = streamed(folder)
    target(ids())
    engine = engine_of(target)
    largest = max(group.cargo.size for group in engine.groups if not group.outer)

    assert sum(slot.buffer.nbytes for slot in engine.slots) <= 2.2 * largest


class Scaled(torch.Tensor):
    """Integers and a scale that show as one tensor."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map_only(
            cls, lambda each: each.codes * each.scale, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


def scaled() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    codes = torch.tensor([[3, -7], [100, 1]], dtype=torch.int8)
    net[1].weight = torch.nn.Parameter(Scaled(codes, torch.rand(2, 1)), requires_grad=False)
    return net


@pytest.mark.parametrize("mapped", [True, False])
def test_a_tensor_made_of_others_comes_and_goes_part_by_part(mapped):
    x, want, target = torch.ones(1, 2), scaled(), scaled()
    weight = target[1].weight
    offload(target, "disk", device="cpu", mapped=mapped)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(target(x), want(x))
    state = target.state_dict()["1.weight"]
    whole = undo(target)[1].weight

    assert whole is weight
    assert torch.equal(whole.codes, want[1].weight.codes)
    assert torch.equal(state.scale, want[1].weight.scale)


def test_one_that_takes_no_views_of_a_buffer_is_refused_by_name():
    from torch.testing._internal.two_tensor import TwoTensor

    target = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    target[1].weight = torch.nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(ConfigError, match=r"1\.weight is a TwoTensor, which cannot come and go"):
        offload(target, "disk", device="cpu", mapped=False)
    assert isinstance(target[1].weight, TwoTensor)


def test_a_plan_counts_the_parts_of_a_tensor_made_of_others():
    from torch.testing._internal.two_tensor import TwoTensor

    target = torch.nn.Linear(4, 4, bias=False)
    target.weight = torch.nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))

    assert plan_from_map(target, {"": "cpu"}).used == {"cpu": 2 * 64}
