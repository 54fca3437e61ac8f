"""From the first weight to the last process: what is held meanwhile, and what is left at the end."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator, network, sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_core import ConfigError
from accel_deepspeed import DeepSpeedPlugin

pytestmark = pytest.mark.timeout(300)
WIDTH, LAYERS = 128, 12
LAYER = (WIDTH + 1) * WIDTH * 4
"""Bytes."""


class Held(TorchDispatchMode):
    """Counts the bytes of tensors made inside, as long as their storage lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def built() -> dict[str, float]:
    """Bytes held, in layers: at the most and after, while a model is built, then while an engine is."""
    sizes = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size"), WIDTH * WIDTH
    )
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **sizes}
    ours = accelerator(DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    with Held() as held, ours.model_init_context():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    found = {"peak": held.peak / LAYER, "model": held.now / LAYER}
    with held:
        ours.prepare(model, sgd(model.parameters()))
    found |= {"engine's peak": held.peak / LAYER, "engine": held.now / LAYER}
    ours.end_training()
    return found


def test_no_rank_ever_holds_the_model_that_it_builds(run_processes) -> None:
    share = LAYERS / 2
    late = 2  # layers that a thread of the process group has sent, and lets go of when it has the time
    for found in run_processes(built, timeout=120):
        assert 0.999 * share < found["model"] < 1.001 * share + late
        assert found["peak"] < share + 1.01 + late, "its share, and the layer that is being made"
        assert found["engine"] < 3 * share + 1.01 + late, "weights, masters, gradients, and a bucket"
        assert found["engine's peak"] < 3 * share + 2.01 + late, f"the whole model would be {share:g} more"


# -- the end -------------------------------------------------------------------------------------

TRAINS = """
import torch
from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin
accelerator = Accelerator(device="cpu", plugins=[DeepSpeedPlugin(zero_stage={stage})])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
{end}
"""


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.full)])  # raw: 1 in 2 aborts
@pytest.mark.parametrize(
    ("stage", "end"),
    [pytest.param(2, "", marks=pytest.mark.full), (3, "accelerator.end_training()")],
    ids=["without end_training", "with it"],
)
def test_a_script_ends_with_zero_says_nothing_and_leaves_no_file(
    stage: int, end: str, times: int, tmp_path: Path, run_command
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "here"
    script.write_text(TRAINS.format(stage=stage, end=end))
    folder.mkdir()
    accel = Path(sys.executable).with_name("accel")
    command = [str(accel), "launch", *("-n", "2", "--device", "cpu", "--strategy", "deepspeed"), str(script)]
    for _ in range(times):
        ended = run_command(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        said = ended.stderr.splitlines()
        assert [line for line in said if not line.startswith("accel ")] == [], "but for the launcher's own"
        assert list(folder.iterdir()) == [], "DeepSpeed's launcher would write the environment to a file here"


def released(stage: int) -> dict[str, bool]:
    """Whether anything is left of an engine whose unit was released; and whether another can be made."""
    import gc

    from deepspeed.comm import comm

    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    module = network()
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    engine: Any = ours.prepare(module, sgd(module.parameters()))[0]
    here = [weakref.ref(engine), weakref.ref(engine.optimizer)]
    x = torch.ones(2, 6)
    with torch.no_grad():
        before = engine(x)
        (engine,) = ours.free_memory(engine)
        gc.collect()
        found = {
            "collected": [each() for each in here] == [None, None],
            "no hooks": (len(module._forward_hooks), len(module._forward_pre_hooks)) == hooks,
            "no groups": comm.cdb is None,
            "the module works": stage == 3 or torch.equal(module(x), before),
        }
    again = network()
    again, optimizer = ours.prepare(again, sgd(again.parameters()))
    ours.backward(again(x).sum())
    optimizer.step()
    ours.end_training()
    ours.free_memory()  # the end has released the unit, and its process group is gone
    return found


def refused() -> bool:
    """Whether DeepSpeed is still in use after a model that it could not take."""
    from accel_deepspeed.compat import _users

    ours = accelerator(
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}})
    )
    module = network()
    with pytest.raises(ConfigError, match="stage 0"):
        ours.prepare(module, sgd(module.parameters()))
    return bool(_users)


@pytest.mark.full
def test_a_refused_model_leaves_nothing_of_deepspeed(run_processes) -> None:
    assert run_processes(refused, world=1, timeout=120) == [False]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_released_engine_is_gone_and_another_can_be_made(stage: int, run_processes) -> None:
    for found in run_processes(released, stage, timeout=120):
        assert found == dict.fromkeys(found, True)
