"""The plans of the installed release of transformers: all are served but a list with the reasons."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata, util
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from accel_core import ConfigError
from accel_fsdp.sharding.own_plan import WORDS as FSDP_WORDS
from accel_fsdp.tensor.plans import WORDS, plan_of

pytestmark = pytest.mark.needs("transformers")

SEEN_AS = "the first step names the parameters"  # gradients of whole parameters are compared
SHAPES = "torch raises in the first forward"
UNSERVED = {
    "ApertusConfig": f"forgets mlp.act_fn, which works on a part: {SEEN_AS}",
    "Apertus1p5TextConfig": f"forgets mlp.act_fn, which works on a part: {SEEN_AS}",
    "Qwen3OmniMoeTextConfig": f"forgets norms of queries and keys: {SEEN_AS}",
    "Qwen3VLMoeTextConfig": f"forgets norms of queries and keys: {SEEN_AS}",
    "InklingTextConfig": "splits packed experts colwise, gates from values: refused by name",
    "Inkling2TextConfig": "splits packed experts colwise, gates from values: refused by name",
    "Inkling2LoopTextConfig": "splits packed experts colwise, gates from values: refused by name",
    "Qwen3OmniMoeTalkerCodePredictorConfig": "lm_head is a list: refused by name",
    "DogeConfig": f"dt_proj gives all heads, and the others a part: {SHAPES}",
    "EsmcConfig": f"norms of queries and keys are over all heads: {SHAPES}",
    "Glm5NextTextConfig": f"o_proj of linear attention takes whole input: {SHAPES}",
    "NeoMMEConfig": f"forgets the numbers that its heads have, alpha: {SHAPES}",
}
REFUSED = {name for name, reason in UNSERVED.items() if "refused" in reason}


def models() -> Path:
    if Version(metadata.version("transformers")) < Version("5.24"):
        pytest.skip("these are the plans of transformers 5.24")
    origin = util.find_spec("transformers")
    assert origin is not None
    return Path(str(origin.origin)).parent / "models"


def plans(option: str) -> dict[str, dict[str, str]]:
    """Class of a config -> its plan, as the sources have it: importing all takes half a minute."""
    found = {}
    for file in models().glob("*/configuration_*.py"):
        text = file.read_text(encoding="utf-8")
        classes = ast.walk(ast.parse(text)) if option in text else ()
        for node in classes:
            for line in node.body if isinstance(node, ast.ClassDef) else ():
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                if option in [getattr(target, "id", None) for target in targets]:
                    plan = eval(ast.unparse(line.value), {})  # type: ignore[attr-defined]
                    found.update({node.name: plan} if plan else {})  # type: ignore[attr-defined]
    return found


def test_all_plans_of_the_release_are_served_but_the_listed() -> None:
    found = plans("base_model_tp_plan")
    assert {word for plan in found.values() for word in plan.values()} <= {*WORDS}
    assert UNSERVED.keys() <= found.keys()
    assert len(found) - len(UNSERVED) >= 150


def test_all_words_of_its_plans_of_sharding_are_known() -> None:
    found = plans("base_model_fsdp_plan")
    assert {word for plan in found.values() for word in plan.values()} <= {*FSDP_WORDS}


def test_its_plans_of_experts_name_stacks_of_experts() -> None:
    found = plans("base_model_ep_plan")
    assert len(found) >= 60
    assert all("ep_dispatch_experts" in plan.values() for plan in found.values())


def built() -> Iterator[tuple[str, Any]]:
    """Yield name of a config that has a plan, and a model of it on the meta device, if defaults make one."""
    from transformers import PreTrainedModel

    endings = ("ForCausalLM", "ForConditionalGeneration", "Model")
    for folder in sorted({file.parent for file in models().glob("*/configuration_*.py") if has_plan(file)}):
        kinds: dict[str, list[tuple[Any, Any]]] = {ending: [] for ending in endings}
        for file in folder.glob("modeling_*.py"):
            module = importlib.import_module(f"transformers.models.{folder.name}.{file.stem}")
            for name, kind in vars(module).items():
                ending = next((ending for ending in endings if name.endswith(ending)), None)
                if ending and issubclass(kind, PreTrainedModel) and not name.endswith("PreTrainedModel"):
                    kinds[ending].append((kind.config_class, kind))
        for config, kind in dict(chain.from_iterable(reversed(kinds.values()))).items():
            if getattr(config, "base_model_tp_plan", None):
                with suppress(TypeError, KeyError, AttributeError), torch.device("meta"):
                    yield config.__name__, kind(config())


def has_plan(file: Path) -> bool:
    return "base_model_tp_plan" in file.read_text(encoding="utf-8")


@pytest.mark.full
def test_a_model_of_each_plan_is_planned_without_complaint() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what they import
        found: dict[str, str] = {}
        for name, model in built():
            try:
                found[name] = str(len(plan_of(model, None, 1, loss_parallel=False)))
            except ConfigError as error:
                found[name] = str(error)
    assert {name for name, said in found.items() if not said.isdigit()} == REFUSED
    assert len(found) >= 135


# -- what is refused -------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 12, 4))
        self.down_proj = nn.Parameter(torch.ones(2, 4, 6))
        self.bias = nn.Parameter(torch.ones(2, 4))


class Model(nn.Module):
    """Heads, experts, and a plan."""

    num_attention_heads = 3

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4)
        self.words.norm = nn.LayerNorm(4)
        self.q_proj = nn.Linear(4, 12)
        self.kv_a_proj = nn.Linear(4, 4)
        self.experts = Experts()
        self._tp_plan = plan


SPLIT = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("plan", "size", "said"),
    [
        ({"q_proj": "colwise"}, 2, "the model has num_attention_heads 3"),
        ({"q_proj": "diagonal"}, 2, "'diagonal' for q_proj is not a known style"),
        ({"experts.down_proj": "sequence"}, 2, "experts.down_proj is a parameter, which cannot be sequence"),
        ({"experts": "colwise"}, 2, "experts is a Experts, and only Linear and Embedding"),
        ({"words": "embedding_rowwise"}, 2, "words is a Embedding with weights inside"),
        (
            {"experts.gate_up_proj": "packed_colwise"},
            4,
            "12 is not a multiple of 2 packed weights x parallelism.tp 4",
        ),
        ({**SPLIT, "experts": "moe_tp_experts"}, 2, "its bias is whole on each\nsplit it: "),
        ({"kv_a_proj": "mla_kv_a_proj"}, 2, "needs qk_rope_head_dim, and no config of this Model has it"),
        ({"experts.gate_up_proj": "colwise"}, 2, "say how they lie: "),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(plan: dict[str, str], size: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(Model(plan), None, size, loss_parallel=False)
    assert said in str(caught.value)


def test_a_pattern_of_the_options_names_parameters_if_it_names_no_module() -> None:
    found = plan_of(Model({}), {"*.down_proj": "rowwise", "q_p*": "rowwise"}, 2, loss_parallel=False)
    assert [planned.name for planned in found] == ["q_proj", "experts.down_proj"]
