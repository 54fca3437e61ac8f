"""Names, arguments and defaults are Accelerate 1.15's own, read from the installed one in another process."""

from __future__ import annotations

import pytest
from peers import needs_accelerate, said

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

shown = {}
for module, names in NAMES.items():
    for name in names:
        thing = getattr(import_module(module), name)
        if inspect.isclass(thing) and issubclass(thing, enum.Enum):
            shown[module + "." + name] = [[member.name, str(member.value), str(member)] for member in thing]
            continue
        shown[module + "." + name] = arguments(thing)
        if inspect.isclass(thing):
            for method in dir(thing):
                if not method.startswith("_") and callable(getattr(thing, method)):
                    shown[module + "." + name + "." + method] = arguments(getattr(thing, method))
print(json.dumps(shown))
"""
NAMES = {
    "accelerate": ["Accelerator", "PartialState", "ParallelismConfig", "debug_launcher", "notebook_launcher"],
    "accelerate.commands.config.config_args": [
        "BaseConfig",
        "ClusterConfig",
        "SageMakerConfig",
        "load_config_from_file",
    ],
    "accelerate.commands.launch": ["launch_command", "launch_command_parser"],
    "accelerate.commands.to_fsdp2": [
        "convert_config_to_fsdp2",
        "to_fsdp2_command",
        "to_fsdp2_command_parser",
    ],
    "accelerate.commands.tpu": ["tpu_command_launcher", "tpu_command_parser"],
    "accelerate.local_sgd": ["LocalSGD"],
    "accelerate.logging": ["get_logger"],
    "accelerate.optimizer": ["AcceleratedOptimizer"],
    "accelerate.state": ["AcceleratorState", "GradientState"],
    "accelerate.tracking": [
        "AimTracker",
        "ClearMLTracker",
        "CometMLTracker",
        "DVCLiveTracker",
        "MLflowTracker",
        "SwanLabTracker",
        "TensorBoardTracker",
        "TrackioTracker",
        "WandBTracker",
        "filter_trackers",
        "get_available_trackers",
        "register_tracker_class",
    ],
    "accelerate.data_loader": [
        "BatchSamplerShard",
        "IterableDatasetShard",
        "prepare_data_loader",
        "skip_first_batches",
    ],
    "accelerate.utils.dataclasses": [
        "AutocastKwargs",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
        "TorchTensorParallelPlugin",
        "BnbQuantizationConfig",
        "MegatronLMPlugin",
        "AORecipeKwargs",
        "TERecipeKwargs",
        "MSAMPRecipeKwargs",
        "ComputeEnvironment",
        "CustomDtype",
        "DDPCommunicationHookType",
        "DistributedType",
        "DynamoBackend",
        "FP8BackendType",
        "LoggerType",
        "PrecisionType",
        "RNGType",
        "SageMakerDistributedType",
    ],
    "accelerate.utils.environment": [
        "patch_environment",
        "str_to_bool",
        "parse_flag_from_env",
        "get_int_from_env",
    ],
    "accelerate.utils.launch": [
        "env_var_path_add",
        "prepare_extend_env_parallelism_config",
        "prepare_multi_gpu_env",
        "prepare_simple_launcher_cmd_env",
    ],
    "accelerate.utils.memory": ["find_executable_batch_size", "release_memory", "clear_device_cache"],
    "accelerate.utils.modeling": [
        "compute_module_sizes",
        "get_max_layer_size",
        "named_module_tensors",
        "retie_parameters",
    ],
    "accelerate.utils.operations": [
        "gather",
        "reduce",
        "broadcast",
        "broadcast_object_list",
        "gather_object",
        "is_torch_tensor",
        "listify",
        "honor_type",
        "recursively_apply",
        "pad_across_processes",
        "send_to_device",
        "slice_tensors",
    ],
    "accelerate.utils.other": [
        "extract_model_from_parallel",
        "save",
        "load",
        "get_module_children_bottom_up",
    ],
    "accelerate.utils.random": ["set_seed", "synchronize_rng_state", "synchronize_rng_states"],
}
MORE = {
    "accelerate.Accelerator": "fp16, which the oldest releases had",
    "accelerate.Accelerator.accumulate": "items of accel-core",
    "accelerate.Accelerator.prepare": "strategy and name of accel-core",
    "accelerate.Accelerator.explain": "accel-core's own",
}
"""What has more arguments here than there."""
MEGATRON = ("mixed_precision", "network_size_args", "optimizer_type", "scheduler_args")
MEGATRON += ("tensorboard_logging_options", "training_args")
NOT_COMPARED = {"init_trackers", "log", "print", "on_main_process", "on_local_main_process"}
NOT_COMPARED |= {"validate_cpu_offload", "build_device_mesh", "get_device_mesh"}
NOT_COMPARED |= {f"MegatronLMPlugin.set_{what}" for what in MEGATRON}
"""Decorated there, so that their arguments do not show; or helpers of another one's own methods."""


@pytest.fixture(scope="module")
def shown():
    code = PEER % NAMES
    return said(code, ours=False), said(code, ours=True)


@needs_accelerate
def test_arguments_and_their_defaults_are_the_same(shown):
    theirs, ours = shown
    different = {
        name: (found, ours.get(name))
        for name, found in theirs.items()
        if not name.endswith(tuple(f".{each}" for each in NOT_COMPARED))
        and name not in MORE
        and ours.get(name) != found
    }
    assert different == {}


@needs_accelerate
def test_what_has_more_arguments_has_the_same_ones_first(shown):
    theirs, ours = shown
    for name in MORE.keys() & theirs.keys():
        named = [argument[0] for argument in ours[name]]
        assert named[: len(theirs[name])] == [argument[0] for argument in theirs[name]]
