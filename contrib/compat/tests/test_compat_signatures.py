"""Names, arguments, defaults and constants are Accelerate 1.15's own, read from the installed one."""

from __future__ import annotations

import pytest
from peers import needs_accelerate, said

from accel_compat.unsupported import inventory

PEER = """
import enum, inspect, json, warnings
from importlib import import_module
warnings.simplefilter("ignore")
NAMES = %r

def arguments(thing):
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    default = lambda p: None if p.default is p.empty else repr(p.default)[:40].split(" at 0x")[0]
    return [[p.name, p.kind.name, default(p)] for p in found]

def is_refused(thing):
    code = getattr(thing, "__code__", None)
    return type(thing).__name__ == "_Refusing" or getattr(code, "co_name", "") == "refuse"

shown = {}
for module, names in NAMES.items():
    for name, kind in names.items():
        try:
            thing = getattr(import_module(module), name)
        except (ImportError, AttributeError):  # it needs a library that is not here
            continue
        whole = f"{module}.{name}"
        if kind == "value":
            shown[whole] = repr(thing) if isinstance(thing, (str, int, float, list)) else None
        elif is_refused(thing):
            shown[whole] = "refused"
        elif inspect.isclass(thing) and issubclass(thing, enum.Enum):
            shown[whole] = [[member.name, str(member.value), str(member)] for member in thing]
        else:
            shown[whole] = arguments(thing)
            for method in dir(thing) if inspect.isclass(thing) else ():
                if not method.startswith("_") and callable(getattr(thing, method, None)):
                    shown[f"{whole}.{method}"] = arguments(getattr(thing, method))
print(json.dumps(shown))
"""
EXPORTING = ("accelerate", "accelerate.utils")
"""Modules whose names are all compared where they are defined."""
MORE = {
    "accelerator.Accelerator": "fp16, which the oldest releases had",
    "accelerator.Accelerator.accumulate": "items of accel-core",
    "accelerator.Accelerator.prepare": "strategy and name of accel-core",
    "tracking.GeneralTracker.start": "options of accel-core",
    "utils.dataclasses.ProjectConfiguration": "keep_best of accel-core",
}
"""Name that has more arguments here -> which."""
LESS = {
    "data_loader.DataLoaderAdapter.adjust_state_dict_for_prefetch": "states are noted batch by batch here",
    "data_loader.DataLoaderDispatcher.adjust_state_dict_for_prefetch": "as above",
    "data_loader.DataLoaderShard.adjust_state_dict_for_prefetch": "as above",
    "data_loader.SkipDataLoader.adjust_state_dict_for_prefetch": "as above",
    "scheduler.AcceleratedScheduler.print_lr": "torch's schedulers no longer have it",
    "utils.megatron_lm.MegatronLMDummyDataLoader": "helpers of Megatron-LM's own datasets",
    "utils.dataclasses.DeepSpeedPlugin.set_moe_leaf_modules": "accel-deepspeed does it in prepare",
    "utils.dataclasses.MegatronLMPlugin.set_": "helpers that fill Megatron-LM's own arguments",
}
"""Start of methods that are not there -> why."""
OTHER = {
    "Accelerator.get_state_dict": "rank0_only=False gives sharded weights to every rank",
    "Accelerator.init_trackers": "it is decorated there, so that its arguments do not show",
    "Accelerator.log": "as above",
    "Accelerator.print": "other names of * and **",
    "MultiProcessAdapter.warning_once": "as above",
    "on_main_process": "a decorator there takes None too",
    "on_local_main_process": "as above",
    "data_loader.SeedableRandomSampler": "data_seed is named",
    "dataclasses.KwargsHandler": "the base that nobody calls",
    "GPTTrainStep": "documented programs pass arguments without an accelerator",
    "MegatronLMDummyScheduler": "accel-megatron's",
    "operations.DistributedOperationException": "accel-core's CollectiveError",
    "config.update.update_command_parser": "as the parsers of all commands: subparsers, or none",
    "other.TORCH_SAFE_GLOBALS": "no pickle is read",
}
"""Part of a name whose arguments differ -> why."""


@pytest.fixture(scope="module")
def shown(run_processes):
    code = PEER % {module: names for module, names in inventory().items() if module not in EXPORTING}
    theirs, ours = (said(run_processes, code, ours=own) for own in (False, True))
    refused = tuple(f"{name}." for name, found in ours.items() if found == "refused")
    served = {
        name.removeprefix("accelerate."): found
        for name, found in theirs.items()
        if ours.get(name) != "refused" and not name.startswith(refused)
    }
    return served, {name.removeprefix("accelerate."): found for name, found in ours.items()}


def is_known(name: str) -> bool:
    parts = (name, name.rpartition(".")[0])
    return name in MORE or name.startswith(tuple(LESS)) or any(part.endswith(tuple(OTHER)) for part in parts)


@needs_accelerate
def test_arguments_defaults_and_constants_are_the_same(shown):
    theirs, ours = shown
    different = {
        name: (found, ours.get(name))
        for name, found in theirs.items()
        if not is_known(name) and ours.get(name) != found
    }
    assert different == {}
    assert len(theirs) > 600


@needs_accelerate
def test_what_has_more_arguments_has_the_same_ones_first(shown):
    theirs, ours = shown
    for name in MORE.keys() & theirs.keys():
        named = [argument[0] for argument in ours[name]]
        assert named[: len(theirs[name])] == [argument[0] for argument in theirs[name]]
