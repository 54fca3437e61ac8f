"""The code examples of Accelerate's documentation pages, numbered by page, and what cannot run of them.

The pages: `kwargs` (the handlers, of 1.0), `utilities` (of 1.8), `profiling` (the handlers, of 1.1),
`configuration` (a package registry's summary). `accelerator` (of 0.5) has no code; its constructor stands in.
"""

from __future__ import annotations

AUTOCAST = """
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs

kwargs = AutocastKwargs(cache_enabled=True)
accelerator = Accelerator(kwargs_handlers=[kwargs])
"""
DDP = """
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(kwargs_handlers=[kwargs])
"""
PROCESS_GROUP = """
from datetime import timedelta
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

kwargs = InitProcessGroupKwargs(timeout=timedelta(seconds=800))
accelerator = Accelerator(kwargs_handlers=[kwargs])
"""
RUN = {
    "kwargs 1": AUTOCAST,
    "kwargs 2": DDP,
    "kwargs 6": PROCESS_GROUP,
    "utilities 1": AUTOCAST,
    "utilities 2": DDP,
    "utilities 3": """
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

kwargs = GradScalerKwargs(backoff_factor=0.25)
accelerator = Accelerator(kwargs_handlers=[kwargs])
""",
    "utilities 4": PROCESS_GROUP,
    "utilities 5": """
from accelerate.utils import GradientAccumulationPlugin

gradient_accumulation_plugin = GradientAccumulationPlugin(num_steps=2)
accelerator = Accelerator(gradient_accumulation_plugin=gradient_accumulation_plugin)
""",
    "utilities 7": """
import os
from accelerate.utils import clear_environment

os.environ["FOO"] = "bar"
with clear_environment():
    print(os.environ)
    os.environ["FOO"] = "new_bar"
    print(os.environ["FOO"])
print(os.environ["FOO"])
""",
    "utilities 9": """
from accelerate.utils import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=128)
def train(batch_size, model, optimizer):
    ...

train(model, optimizer)
""",
    "profiling 1": """
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

kwargs = ProfileKwargs(activities=["cpu", "cuda"])
accelerator = Accelerator(kwargs_handlers=[kwargs])
""",
    "configuration 1": """
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    ProjectConfiguration,
    GradientAccumulationPlugin
)
dataloader_config = DataLoaderConfiguration(
    split_batches=True,
    even_batches=True,
    use_seedable_sampler=True
)
project_config = ProjectConfiguration(
    project_dir="./experiments",
    logging_dir="logs",
    automatic_checkpoint_naming=True,
    total_limit=5
)
grad_accumulation = GradientAccumulationPlugin(
    num_steps=4,
    adjust_scheduler=True
)
accelerator = Accelerator(
    mixed_precision="fp16",
    dataloader_config=dataloader_config,
    project_config=project_config,
    gradient_accumulation_plugin=grad_accumulation
)
""",
    "accelerator 1": """
from accelerate import Accelerator

accelerator = Accelerator(
    device_placement=True, split_batches=False, fp16=None, cpu=False, rng_types=None, kwargs_handlers=None
)
""",
}
"""Number -> code that runs as it stands, where there are a model, an optimizer and `Accelerator`."""

NEED_A_PACKAGE = {
    "configuration 2": (
        "accel_deepspeed",
        """
from accelerate import Accelerator, DeepSpeedPlugin
deepspeed_config = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-4}
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": True,
        "contiguous_gradients": True
    },
    "fp16": {"enabled": True}
}
deepspeed_plugin = DeepSpeedPlugin(
    hf_ds_config=deepspeed_config,
    zero_stage=2,
    gradient_accumulation_steps=4,
    gradient_clipping=1.0
)
accelerator = Accelerator(deepspeed_plugin=deepspeed_plugin)
""",
    ),
    "configuration 3": (
        "accel_fsdp",
        """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import ShardingStrategy, BackwardPrefetch
fsdp_plugin = FullyShardedDataParallelPlugin(
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    cpu_offload=None, # Keep on GPU
    mixed_precision_policy=None, # Use default
    auto_wrap_policy=None, # Auto-detect
    limit_all_gathers=True,
    use_orig_params=True,
    sync_module_states=True
)
accelerator = Accelerator(fsdp_plugin=fsdp_plugin)
""",
    ),
    "kwargs 3": (
        "accel_transformer_engine",
        """
from accelerate import Accelerator
from accelerate.utils import FP8RecipeKwargs

kwargs = FP8RecipeKwargs(backend="te", fp8_format="HYBRID")
accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[kwargs])
""",
    ),
}
"""Number -> the package that it needs, and the code."""

REFUSED = {
    "kwargs 4": (
        "1.15 refuses it",
        """
from accelerate.utils import FP8RecipeKwargs

kwargs = FP8RecipeKwargs(backend="msamp", optimization_level="02")
""",
        "TypeError: .*did you mean 'opt_level'",
    ),
    "kwargs 5": (
        "1.15 refuses it",
        """
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

kwargs = GradScalerKwargs(backoff_filter=0.25)
accelerator = Accelerator(kwargs_handlers=[kwargs])
""",
        "TypeError: .*did you mean 'backoff_factor'",
    ),
    "utilities 6": (
        "it shows an error",
        """
import os
from accelerate.utils import patch_environment

with patch_environment(FOO="bar"):
    print(os.environ["FOO"])  # prints "bar"
print(os.environ["FOO"])  # raises KeyError
""",
        "KeyError: 'FOO'",
    ),
    "utilities 8": (
        "it names a class of transformers",
        "TrainingArguments(fp16=True)",
        "NameError: .*'TrainingArguments'",
    ),
    "utilities 10": (
        "programs install nothing",
        """
from accelerate.utils import install_xla

install_xla(upgrade=True)
""",
        "NotServedError: .*pip install './backends/xla",
    ),
    "configuration 4": (
        "1.15 refuses it",
        """
from accelerate import (
    Accelerator,
    AutocastKwargs,
    GradScalerKwargs,
    FP8RecipeKwargs
)
autocast_kwargs = AutocastKwargs(
    enabled=True,
    cache_enabled=False
)
scaler_kwargs = GradScalerKwargs(
    init_scale=2**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000
)
fp8_kwargs = FP8RecipeKwargs(
    backend="TE",
    use_autocast=True,
    fp8_format="HYBRID"
)
accelerator = Accelerator(
    mixed_precision="fp16",
    kwargs_handlers=[autocast_kwargs, scaler_kwargs]
)
""",
        "TypeError: .*did you mean 'use_autocast_during_eval'",
    ),
    "configuration 5": (
        "it needs a hub; up to there it runs",
        """
from accelerate import Accelerator, BnbQuantizationConfig
import torch
bnb_config = BnbQuantizationConfig(
    load_in_4bit=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True
)
model = AutoModelForCausalLM.from_pretrained(
    "model_name",
    quantization_config=bnb_config,
    device_map="auto"
)
""",
        "NameError: .*'AutoModelForCausalLM'",
    ),
}
"""Number -> why it cannot run, the code, and the error."""

MISNAMED = {
    "DataLoaderConfiguration": {
        "use_configured_sampler": "use_seedable_sampler",
        "gradient_accumulation_kwargs": "it takes split_batches",
    },
    "ProjectConfiguration": {"iteration_checkpoints": "automatic_checkpoint_naming"},
    "DeepSpeedPlugin": {"auto_wrap_policy": "it takes hf_ds_config"},
    "TorchTensorParallelPlugin": {
        "tensor_parallel_degree": "it takes tp_size",
        "parallelize_plan": "it takes tp_size",
    },
    "BnbQuantizationConfig": {
        "llm_int8_skip_modules": "skip_modules",
        "llm_int8_enable_fp32_cpu_offload": "it takes|did you mean",
        "llm_int8_has_fp16_weight": "it takes|did you mean",
        "bnb_4bit_quant_storage": "bnb_4bit_quant_type",
    },
}
"""Class -> arguments that `configuration` gives it and 1.15 does not have -> what the error names."""
