"""Random numbers of models that are split: alike where activations are, different everywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator, MeshDim, ParallelismConfig, set_seed
from accel_core.contract.mesh import Mesh, arrange

pytestmark = pytest.mark.needs("accel-ddp", "accel-fsdp", "accel-context-parallel")


class Drawing(nn.Module):
    """A layer that draws as dropout does, and keeps what it drew."""

    def __init__(self):
        super().__init__()
        self.split, self.whole, self.drawn = nn.Linear(8, 8), nn.Linear(8, 8), []

    def forward(self, x):
        x = self.whole(torch.relu(self.split(x)))
        mask = torch.rand(x.shape[-1])
        self.drawn.append([round(number, 6) for number in mask.tolist()])
        return x * mask


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Drawing(), Drawing()

    def forward(self, x):
        return self.two(self.one(x))


def loss_of(model, batch):
    return model(batch).square().mean(), None


def train(options, *, folder=None, resume=False, device_specific=True, extra=True):
    """What each layer drew in each step; and the weights that all ranks hold alike."""
    set_seed(3, device_specific=device_specific)
    accelerator = Accelerator(cpu=True, **options["python"])
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 8), 2))
    if accelerator.is_main_process and extra:
        torch.rand(5)  # one rank draws more than the others
    if resume:
        accelerator.load_state(folder)
    for number, batch in enumerate(loader):
        accelerator.forward_backward(prepared, [batch], loss_of, microbatches=1)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and not resume and folder is not None:
            accelerator.save_state(folder)
    drawn = [layer.drawn for layer in (model.one, model.two)]
    weight = accelerator.get_state_dict(prepared, rank0_only=False)["two.whole.bias"].tolist()
    accelerator.end_training()
    return [each[-4:] for each in drawn if each], weight


def cp():
    from accel_context_parallel import ContextParallelPlugin

    plugins = [ContextParallelPlugin(buffers={}), ParallelismConfig(cp=2)]
    return {"python": {"strategy": "ddp", "plugins": plugins}}


def tp():
    from accel_fsdp import TorchTensorParallelPlugin

    plan = {"one.split": "colwise", "one.whole": "rowwise", "two.split": "colwise", "two.whole": "rowwise"}
    plugin = TorchTensorParallelPlugin(tp_size=2, parallelize_plan=plan)
    return {"python": {"strategy": "fsdp", "plugins": [plugin]}}


def pp():
    from accel_fsdp import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(pp_split_points=("two",))
    return {"python": {"strategy": "fsdp", "plugins": [plugin, ParallelismConfig(pp=2)]}}


def ranks_of(kind, *args, **options):
    return train(globals()[kind](), *args, **options)


def resumed(kind, folder):
    return train(globals()[kind](), folder=folder, resume=True)


def saved(kind, folder):
    return train(globals()[kind](), folder=folder)


def unspecific(kind):
    return train(globals()[kind](), device_specific=False, extra=False)


@pytest.mark.parametrize("seeded", [ranks_of, unspecific])
def test_ranks_that_share_a_sequence_draw_different_numbers(seeded, run_processes):
    (one, weight), (other, same) = run_processes(seeded, "cp", world=2)
    assert weight == same
    for mine, theirs in zip(one, other, strict=True):
        assert all(drawn not in theirs for drawn in mine)


@pytest.mark.parametrize("seeded", [ranks_of, unspecific])
def test_ranks_that_split_layers_draw_the_same_numbers_whatever_else_is_drawn(seeded, run_processes):
    one, other = run_processes(seeded, "tp", world=2)
    assert one == other


def test_the_numbers_that_split_layers_draw_are_of_the_first_ranks_seed(run_processes):
    (of_each_its_own, _), _ = run_processes(ranks_of, "tp", world=2)
    (of_all_the_same, _), _ = run_processes(unspecific, "tp", world=2)
    assert of_each_its_own == of_all_the_same


@pytest.mark.parametrize("seeded", [ranks_of, unspecific])
def test_the_layers_of_pipeline_stages_draw_different_numbers(seeded, run_processes):
    (first, _), (second, _) = run_processes(seeded, "pp", world=2)
    assert first[0] != second[-1]


@pytest.mark.parametrize("kind", ["cp", "tp", "pp"])
def test_a_resumed_run_draws_what_the_other_would_have_drawn(tmp_path, kind, run_processes):
    whole = run_processes(saved, kind, str(tmp_path / "saved"), world=2)
    rest = run_processes(resumed, kind, str(tmp_path / "saved"), world=2)
    for (drawn, weight), (again, same) in zip(whole, rest, strict=True):
        assert [each[-3:] for each in drawn] == [each[-3:] for each in again]
        assert weight == same


def test_only_a_mesh_that_splits_more_than_samples_has_streams():
    def numbers(*dims):
        made = arrange([MeshDim(name, 2) for name in dims], 2 ** len(dims))
        return [Mesh(made, rank, None).stream() for rank in range(2 ** len(dims))]

    assert numbers("dp_replicate", "dp_shard") == [None] * 4
    assert numbers("dp_shard", "tp") == [0, 0, 1, 1]
    assert numbers("pp", "dp_shard", "cp", "tp") == [number // 2 for number in range(16)]


def test_the_users_own_stream_is_as_it_was_after_a_forward(run_processes):
    assert run_processes(beside, world=2) == [True, True]


def beside():
    accelerator = Accelerator(cpu=True, **cp()["python"])
    model = accelerator.prepare(Two())
    before = torch.get_rng_state()
    model(torch.ones(1, 8))
    unmoved = torch.equal(torch.get_rng_state(), before)
    accelerator.end_training()
    return unmoved
