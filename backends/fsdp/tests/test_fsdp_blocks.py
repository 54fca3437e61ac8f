"""Groups of a model without a wrap policy: which modules they are, what is said of them, how they train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_problem import GPT, Block, accelerator, net
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from accel_core import AccelError, ConfigError
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_fsdp.sharding.wrapping import groups

VERSIONS = (1, 2)
PLAN = {"tokens": "free_full_weight", "blocks.*": "free_full_weight", "norm": "keep_full_weight"}
HEAD = {"head": "free_full_weight"}


def names(model: nn.Module, **options: Any) -> list[str]:
    return [group.name for group in groups(model, FullyShardedDataParallelPlugin(**options))]


# -- which modules are groups --------------------------------------------------------------------


class Planned(GPT):
    """A model that has merged its plan, as transformers' models do."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self._fsdp_plan = {**PLAN, **HEAD}
        if not tied:
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def test_a_plan_of_transformers_names_the_groups_and_keeps_what_it_keeps_with_the_model() -> None:
    assert names(Planned(tied=False)) == ["blocks.0", "blocks.1", "blocks.2", "tokens", "head", ""]


def gathered() -> dict[str, bool]:
    """Parameters of a model by a plan -> whether they are whole after a forward."""
    run = accelerator()
    model = run.prepare(Planned(tied=False))
    model(torch.zeros(1, 4, dtype=torch.int64))
    found = {name: not isinstance(each, DTensor) for name, each in model.named_parameters()}
    run.end_training()
    return found


def test_what_a_plan_keeps_is_not_sharded_again_after_a_forward(run_processes: Any) -> None:
    for found in run_processes(gathered, world=2):
        assert found["norm.weight"]
        assert not found["tokens.weight"]
        assert not any(whole for name, whole in found.items() if name.startswith("blocks"))


def test_a_word_that_no_release_has_in_its_plan_is_refused() -> None:
    model = Planned()
    model._fsdp_plan["norm"] = "keep_half_weight"
    with pytest.raises(ConfigError, match=r"says .keep_half_weight. for norm.*\nchoose among free_full"):
        names(model)


def test_a_tied_embedding_and_head_are_one_group() -> None:
    assert names(Planned()) == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_a_plan_goes_on_inside_a_wrapper_that_passes_its_attributes_on() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Planned()

        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__ if name in ("inner", "_modules") else self.inner.__getattribute__
            return found(name)

    assert names(Wrapper()) == ["inner.blocks.0", "inner.blocks.1", "inner.blocks.2", ""]


def test_the_classes_that_a_model_does_not_split_come_before_its_plan() -> None:
    model = Planned(tied=False)
    model._no_split_modules = {"Attending"}
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_a_name_of_the_models_own_that_matches_nothing_is_passed_over() -> None:
    model = Planned()
    model._no_split_modules = ["OfAnotherSize"]
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_a_model_whose_config_drops_layers_has_no_groups() -> None:
    model = Planned()
    model.config = type("Config", (), {})()
    model.config.encoder_layerdrop = 0.1
    assert names(model) == [""]
    model.config.encoder_layerdrop = 0.0
    assert len(names(model)) == 4


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False, **options))


LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.mark.needs("transformers")
def test_a_decoder_of_transformers_has_a_group_for_each_layer() -> None:
    assert names(llama()) == [*LAYERS, ""]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("tied", [False, True])
def test_its_plan_says_so_where_no_class_does(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    model._no_split_modules = None
    assert sorted(names(model)) == sorted(["", *LAYERS, *([] if tied else ["model.embed_tokens"])])


def test_alike_members_of_a_sequential_are_groups_and_nothing_inside_them() -> None:
    inner = nn.Sequential(Block(4), Block(4))
    model = nn.Sequential(nn.Linear(4, 4), Block(4), inner, nn.ReLU(), Block(4), nn.Linear(4, 4))
    assert names(model) == ["1", "4", ""]


def test_members_that_share_a_weight_are_one_group() -> None:
    model = nn.Sequential(Block(4), Block(4), Block(4))
    model[2].up.weight = model[0].up.weight
    assert names(model) == ["1", ""]


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def test_a_sequential_with_a_forward_of_its_own_has_no_groups() -> None:
    assert names(Skipping(Block(4), Block(4))) == [""]


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_lists_inside_a_model_are_no_groups(kind: Callable[[list[nn.Module]], nn.Module]) -> None:
    model = GPT()
    model.blocks = kind(list(model.blocks))
    assert names(model) == [""]


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy([Block]),
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    ],
    ids=["classes", "function"],
)
def test_policies_of_torch_are_followed(policy: Any) -> None:
    assert names(net("mlp"), auto_wrap_policy=policy) == ["1", "2", ""]


def test_a_policy_of_torch_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="or a callable, got <"):
        FullyShardedDataParallelPlugin(auto_wrap_policy=CustomPolicy(lambda module: True))


def test_modules_of_a_size_are_groups_and_what_is_left_of_others_with_the_model() -> None:
    sizes = {name: sum(p.numel() for p in each.parameters()) for name, each in net("mlp").named_children()}
    assert names(net("mlp"), min_num_params=sizes["1"]) == ["1", "2", ""]
    assert names(net("mlp"), min_num_params=sizes["1"] // 2) == ["1.up", "2.up", ""]


# -- what is said --------------------------------------------------------------------------------


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def told(kind: str, options: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """What is logged, what `explain` has of groups, and how many modules torch shards."""
    heard = Heard()
    logging.getLogger("accel_fsdp").addHandler(heard)
    run = accelerator(FullyShardedDataParallelPlugin(**options))
    model = run.prepare(nn.Linear(4, 4) if kind == "one" else net(kind))
    lines = [line.strip() for line in run.explain().splitlines() if "fsdp group" in line]
    sharded = sum(isinstance(module, (FSDP, FSDPModule)) for module in model.modules())
    run.end_training()
    return heard.said, lines, sharded


BYTES = {name: 4 * sum(p.numel() for p in net(name).parameters()) for name in ("gpt", "conv", "mlp")}
BLOCK = 4 * sum(p.numel() for p in Block(16).parameters())


@pytest.mark.parametrize("version", VERSIONS)
def test_one_group_that_nobody_asked_for_is_one_warning_with_the_classes_to_write(
    version: int, run_processes
) -> None:
    (said, lines, sharded), (of_others, _, _) = run_processes(told, "gpt", {"fsdp_version": version})
    (warning,) = said
    assert f"this GPT is one group, and all {BYTES['gpt']:,} bytes" in warning
    assert "set fsdp.transformer_cls_names_to_wrap: [Attending]; fsdp.auto_wrap_policy: NO_WRAP" in warning
    assert of_others == []
    assert lines == [f"fsdp group of the whole of GPT: {BYTES['gpt']:,} bytes"]
    assert sharded == 1


@pytest.mark.parametrize(
    ("kind", "options"), [("gpt", {"auto_wrap_policy": "no_wrap"}), ("one", {}), ("mlp", {})]
)
def test_one_group_that_somebody_wrote_is_silent_and_so_are_groups_and_a_single_layer(
    kind: str, options: dict[str, Any], run_processes
) -> None:
    assert run_processes(told, kind, options, world=1)[0][0] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_groups_are_explained_with_their_bytes(version: int, run_processes) -> None:
    for _, lines, sharded in run_processes(told, "mlp", {"fsdp_version": version}):
        assert lines == [
            f"fsdp group 1 to 2, 2 groups: {BLOCK:,} bytes each",
            f"fsdp group of the rest of MLP: {BYTES['mlp'] - 2 * BLOCK:,} bytes",
        ]
        assert sharded == 3


# -- training ------------------------------------------------------------------------------------

Choice = Sequence[int]
"""Which blocks a rank runs."""


class Stepping(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Chosen(nn.Module):
    """Parts of which each rank runs its own; `body` has all of them run."""

    blocks: Any

    def __init__(self, kind: Callable[[list[nn.Module]], nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.blocks = kind([Stepping(6) for _ in range(4)])

    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        raise NotImplementedError


class Heads(Chosen):
    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return sum((self.blocks[each](hidden).square().mean() for each in chosen), torch.zeros(()))


class Experts(Chosen):
    """Tokens choose their expert, and each rank's choose others."""

    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        hidden = torch.tanh(self.body(x))
        rows = torch.arange(len(x)) % len(chosen)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(chosen):
            mine = (rows == number).nonzero()[:, 0]
            out = out.index_add(0, mine, self.blocks[expert](hidden[mine]))
        return out.square().mean()


class LayerDrop(Chosen):
    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        x = self.body(x)
        for number, block in enumerate(self.blocks):
            if number in chosen:
                x = block(x)
        return x.square().mean()


class Sliced(Chosen):
    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        return self.blocks[: len(chosen)](self.body(x)).square().mean()


class ByAnotherName(Chosen):
    """Blocks are called by a method that no hook of theirs sees."""

    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block.step(x)
        return x.square().mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Planned()

    @property
    def _fsdp_plan(self) -> dict[str, str]:
        return {f"model.{name}": style for name, style in self.model._fsdp_plan.items()}

    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        ids = x.abs().mul(7).long() % 17
        return nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())


def in_sequence(blocks: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*blocks)


CASES: dict[str, tuple[Callable[[], nn.Module], list[Choice]]] = {
    "other heads": (Heads, [[0], [1]]),
    "another number of heads": (Heads, [[0], [0, 1, 3]]),
    "a list of experts": (Experts, [[0, 1], [1, 2, 3]]),
    "LayerDrop over a ModuleList": (LayerDrop, [[0, 3], [1, 2, 3]]),
    "LayerDrop over a Sequential": (lambda: LayerDrop(in_sequence), [[0, 3], [1, 2, 3]]),
    "a Sequential in slices": (lambda: Sliced(in_sequence), [[0], [0, 1, 2]]),
    "blocks by another method": (ByAnotherName, [[0], [0]]),
    "tied embedding and head": (Tied, [[], []]),
}


def trained(case: str, options: dict[str, Any] | None) -> dict[str, Tensor]:
    """Weights after three steps. options: of fsdp; None: one process computes for both ranks."""
    kind, chosen = CASES[case]
    arguments = {"strategy": "single", "plugins": []} if options is None else {}
    run = accelerator(*([] if options is None else [FullyShardedDataParallelPlugin(**options)]), **arguments)
    model = kind()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(step))
        mine = [0, 1] if options is None else [run.process_index]
        turns = chosen if step % 2 else chosen[::-1]  # each rank runs others in the next step
        run.backward(torch.stack([model(x[rank], turns[rank]) for rank in mine]).mean())
        optimizer.step()
        optimizer.zero_grad()
    found = {name: tensor.clone() for name, tensor in run.iter_weights(model)}
    run.end_training()
    return found


OPTIONS: dict[int, dict[str, Any]] = {1: {"fsdp_version": 1}, 2: {"find_unused_parameters": True}}
found_by_version: dict[int, list[dict[str, dict[str, Tensor]]]] = {}
"""Weights of each rank and case: all cases of a version are trained in one start of processes."""


def all_trained(version: int) -> dict[str, dict[str, Tensor]]:
    return {case: trained(case, OPTIONS[version]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_run_different_parts_train_as_one_process_does(
    version: int, case: str, run_processes
) -> None:
    if version not in found_by_version:
        found_by_version[version] = run_processes(all_trained, version, timeout=100)
    expected = trained(case, None)
    for found in found_by_version[version]:
        torch.testing.assert_close(found[case], expected, rtol=1e-5, atol=1e-6)


def alone(version: int) -> str:
    run = accelerator(FullyShardedDataParallelPlugin(fsdp_version=version))
    model = run.prepare(nn.Sequential(*[Block(6) for _ in range(4)]))
    x = torch.ones(2, 6)
    model(x).sum().backward()
    with pytest.raises(AccelError) as caught:  # LayerDrop, in a loop over what was prepared
        reduce(lambda x, number: model[number](x), range(run.process_index, 4, 2), x)
    model(torch.ones(2, 6)).sum().backward()
    run.end_training()
    return str(caught.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_member_of_a_prepared_sequential_that_is_called_by_itself_is_refused(
    version: int, run_processes
) -> None:
    for said in run_processes(alone, version):
        assert "a member of a prepared Sequential was called" in said


# -- checkpoints ---------------------------------------------------------------------------------


def went_on(options: dict[str, Any] | None, directory: Path, steps: range) -> dict[str, Tensor]:
    arguments = {"strategy": "single", "plugins": []} if options is None else {}
    run = accelerator(*([] if options is None else [FullyShardedDataParallelPlugin(**options)]), **arguments)
    model = net("mlp")
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    if steps.start:
        run.load_state(directory)
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if not steps.start:
        run.save_state(directory)
    found = {name: tensor.clone() for name, tensor in run.iter_weights(model)}
    run.end_training()
    return found


def resumed(saver: dict[str, Any], loader: dict[str, Any], directory: Path) -> dict[str, Tensor]:
    went_on(saver, directory, range(2))
    return went_on(loader, directory, range(2, 4))


PLAN_2, ONE_2 = {"fsdp_version": 2}, {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP"}
PLAN_1, ONE_1 = {"fsdp_version": 1}, {"fsdp_version": 1, "auto_wrap_policy": "NO_WRAP"}


@pytest.mark.parametrize(
    ("saver", "loader"), [(PLAN_2, ONE_2), (ONE_2, PLAN_1), (PLAN_1, ONE_1), (ONE_1, PLAN_2)]
)
def test_a_checkpoint_goes_on_in_other_groups(
    saver: dict[str, Any], loader: dict[str, Any], tmp_path: Path, run_processes
) -> None:
    expected = went_on(None, tmp_path / "whole", range(4))
    for found in run_processes(resumed, saver, loader, tmp_path / "saved"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
