"""Core's own options: one frozen attrs class per section, and `RunConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from attrs import Factory, field, frozen
from attrs.converters import optional

from accel_core.contract.arguments import quoted
from accel_core.contract.options import changed, option

if TYPE_CHECKING:
    from accel_core.contract.card import Slot


@frozen(kw_only=True)
class KwargsHandler:
    """Base of config classes; an argument that differs from its default wins over a file."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the class's defaults.

        Fields equal to their defaults are left to torch, whose own defaults then apply.
        """
        return changed(self)


@frozen(kw_only=True)
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`. Section `autocast`."""

    enabled: bool = option(True, help="Whether autocast regions are active.")
    cache_enabled: bool | None = option(None, help="Cache cast weights; unset: torch decides.")
    outputs_to_fp32: bool = option(
        True, help="Convert the 16-bit outputs of prepared models to float32, for losses and metrics."
    )


@frozen(kw_only=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler of fp16. Section `grad_scaler`."""

    init_scale: float = option(65536.0, help="The first scale of the loss.")
    growth_factor: float = option(2.0, help="Multiplies the scale after growth_interval good steps.")
    backoff_factor: float = option(0.5, help="Multiplies the scale after a step with infinite gradients.")
    growth_interval: int = option(2000, minimum=1, help="Good steps before the scale grows.")
    enabled: bool = option(True, help="Whether the loss is scaled at all.")


@frozen(kw_only=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group. Section `process_group`."""

    backend: str | None = option(None, help="Backend of torch.distributed; unset: the device plugin's.")
    init_method: str | None = option(None, help="URL that says how ranks find each other; unset: env://.")
    timeout: timedelta | None = option(None, unit="s", minimum=0.001, help="How long a collective may wait.")


def _home(path: Any) -> Any:
    if not isinstance(path, (str, os.PathLike)):
        return path  # the type check reports it
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111  # as text: a folder of logs may be a URL


def _names(given: Any) -> Any:
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    return tuple(given) if hasattr(given, "__iter__") else given  # the type check reports it


@frozen(kw_only=True)
class ProfileKwargs(KwargsHandler):
    """Options of `accelerator.profile()`. Section `profile`."""

    activities: tuple[str, ...] | None = option(
        None, converter=optional(_names), help="What to record: cpu, or a device type; unset: all there is."
    )
    schedule_option: Mapping[str, int] | None = option(None, help="Arguments of torch.profiler.schedule.")
    on_trace_ready: Callable[..., Any] | None = option(None, python_only=True, help="Called each cycle.")
    record_shapes: bool = option(False, help="Record the shapes of operator inputs.")
    profile_memory: bool = option(False, help="Record allocations.")
    with_stack: bool = option(False, help="Record source file and line of operators.")
    with_flops: bool = option(False, help="Estimate floating point operations.")
    with_modules: bool = option(False, help="Record the modules that call operators.")
    output_trace_dir: str | None = option(
        None, converter=optional(_home), help="Folder that receives one trace file per rank."
    )


@frozen(kw_only=True)
class TorchDynamoPlugin(KwargsHandler):
    """Compilation of models, if `backend` is set. Section `compile`."""

    backend: str | None = option(
        None, help="Backend of torch.compile; auto: the device's own. Unset or no: nothing is compiled."
    )
    mode: str | None = option(
        None, only_with="backend", help="Mode of torch.compile, such as default or max-autotune."
    )
    fullgraph: bool | None = option(
        None, only_with="backend", help="Refuse to split a model into several graphs."
    )
    dynamic: bool | None = option(
        None, only_with="backend", help="Compile for dynamic shapes; unset: torch finds out."
    )
    options: Mapping[str, Any] | None = option(None, only_with="backend", help="Options for the backend.")
    disable: bool = option(False, only_with="backend", help="Make compiling do nothing, for testing.")
    use_regional_compilation: bool | None = option(
        None, only_with="backend", help="Compile a repeated block once, not the model."
    )


@frozen(kw_only=True)
class DataLoaderConfiguration:
    """Sharing of data between processes. Section `data`."""

    split_batches: bool = option(False, help="Share each batch out, instead of a batch for each process.")
    dispatch_batches: bool | None = option(
        None, help="Rank 0 reads for all; false: each process reads. Unset: true for iterable datasets."
    )
    even_batches: bool = option(True, help="Repeat samples so that all processes get equally many batches.")
    use_seedable_sampler: bool = option(False, help="Shuffle by an explicit seed and the epoch.")
    data_seed: int | None = option(
        None, only_with="use_seedable_sampler", help="Seed of the seedable sampler (only); unset: torch's."
    )
    already_sharded: bool | None = option(
        None, help="Each process's dataset has its own part of the data. Unset: where a library says so."
    )
    non_blocking: bool = option(False, help="Copy batches without waiting, pinned or not; pinned: always.")
    use_stateful_dataloader: bool = option(
        False, help="Use torchdata's loader, whose datasets may know their own position."
    )


@frozen(kw_only=True)
class GradientAccumulationPlugin(KwargsHandler):
    """Gradient accumulation. Section `accumulation`."""

    num_steps: int | None = option(None, minimum=1, help="Micro-batches per optimizer step.")
    adjust_scheduler: bool = option(True, help="Step schedulers once per window; false: in each micro-batch.")
    sync_with_dataloader: bool = option(True, help="End the window with the loader's last batch.")
    sync_each_batch: bool = option(False, help="Reduce each micro-batch: less memory, more traffic.")


@frozen(kw_only=True)
class ProjectConfiguration:
    """Folders of a run, and its saved states. Section `project`."""

    project_dir: str | None = option(None, converter=optional(_home), help="Folder of the project.")
    logging_dir: str | None = option(
        Factory(lambda self: self.project_dir, takes_self=True),
        converter=optional(_home),
        help="Folder of logs; unset: the project's.",
    )
    automatic_checkpoint_naming: bool = option(False, help="Number saved states instead of naming each.")
    total_limit: int | None = option(
        None,
        minimum=1,
        only_with="automatic_checkpoint_naming",
        help="How many saved states are kept; unset: all.",
    )
    iteration: int = option(0, minimum=0, help="Number of the next saved state.")
    save_on_each_node: bool = option(False, help="Write checkpoints on each node: disks are not shared.")
    keep_best: str | None = option(
        None,
        only_with="automatic_checkpoint_naming",
        help="Metric whose best saved state stays beyond total_limit: a loss, min:NAME or max:NAME.",
    )

    def __attrs_post_init__(self) -> None:
        if self.keep_best is not None:
            metric_and_mode(self.keep_best)


def metric_and_mode(keep_best: str) -> tuple[str, bool]:
    """Return the metric's name, and True if the largest value is the best.

    Raises:
        ValueError: the metric is not a loss, and has no mode min or max.
    """
    mode, _, name = f"{keep_best}".partition(":")
    if mode not in ("min", "max"):
        mode, name = "", f"{keep_best}"
    if not name or not (mode or name.endswith("loss")):
        raise ValueError(
            f"keep_best {quoted(keep_best)} does not say which value is the best;"
            f" write 'max:{name or 'NAME'}' or 'min:{name or 'NAME'}'"
        )
    return name, mode == "max"


def host_and_port(place: str, nodes: int) -> tuple[str, int]:
    """Split a `rendezvous` into host and port.

    Raises:
        ValueError: the text is not a HOST:PORT at which nodes can meet.
    """
    found = re.fullmatch(r"(\[[\da-fA-F:.]+\]|[\w.-]+):(\d+)", place)
    host, port = (found[1].strip("[]"), int(found[2])) if found else ("", -1)
    if not (0 if nodes == 1 else 1) <= port < 65536:
        raise ValueError(
            f"rendezvous {quoted(place)} is not HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500, with a"
            " port up to 65535"
        )
    return host, port


@frozen(kw_only=True)
class LaunchConfig:
    """Number and place of the workers. Section `launch`."""

    processes_per_node: int | Literal["auto"] = option(
        "auto", minimum=1, help="Worker processes per node. auto: one per visible device, or one on CPU."
    )
    nodes: int = option(1, minimum=1, help="Number of nodes.")
    min_nodes: int | None = option(
        None, minimum=1, help="Minimum number of nodes (elastic); needs max_restarts. Default: all."
    )
    node_rank: int = option(0, minimum=0, help="Rank of this node, 0 for the first.")
    rendezvous: str | None = option(None, help="HOST:PORT of node 0. Default: 127.0.0.1 and a free port.")
    max_restarts: int = option(0, minimum=0, help="How often failed workers are restarted.")
    launcher: str = option(
        "auto",
        help="Launcher plugin. auto: that of the scheduler's job around this process, else torchrun.",
    )
    log_dir: str | None = option(
        None,
        converter=optional(_home),
        help="Folder for the output of workers, one file per rank and attempt.",
    )
    tee: str = option(
        "none",
        choices=("none", "main", "all"),
        help="Which ranks' output to print, prefixed with it. none: without prefix; none with log_dir.",
    )

    def __attrs_post_init__(self) -> None:
        if self.node_rank >= self.nodes:
            ranks = f"0 to {self.nodes - 1}" if self.nodes > 1 else "0 only"
            raise ValueError(
                f"node_rank is {self.node_rank}, but the ranks of {self.nodes} node(s) are {ranks}"
            )
        if self.min_nodes and (self.min_nodes > self.nodes or not self.max_restarts):
            raise ValueError(
                f"min_nodes is {self.min_nodes}, nodes {self.nodes}, max_restarts {self.max_restarts}: a job"
                " goes on with fewer nodes by restarting; set max_restarts, and nodes to min_nodes or more"
            )
        if self.rendezvous is not None:
            host_and_port(self.rendezvous, self.nodes)


@frozen(kw_only=True)
class RunConfig:
    """All settings of a run. Frozen; pickles."""

    device: str = option("auto", help="Device plugin, or torch device type. auto: the best here.")
    strategy: str = option("auto", help="Strategy plugin, or a name from strategies. auto: the best here.")
    strategies: Mapping[str, Mapping[str, Any]] = option(factory=dict, help="NAME: {plugin: NAME, options}.")
    extensions: tuple[str, ...] = option((), converter=_names, help="Extension plugins to add.")
    parallelism: Mapping[str, int] = option(
        factory=dict, help="Dimension: number of ranks along it. -1: the ranks that the others leave."
    )
    mixed_precision: str = option("no", help="no, fp16, bf16, fp8, or a precision plugin.")
    gradient_accumulation_steps: int = option(1, minimum=1, help="Micro-batches per optimizer step.")
    device_placement: bool = option(True, help="Move prepared models and batches to the device.")
    step_scheduler_with_optimizer: bool = option(
        True, help="Step schedulers once per applied optimizer step."
    )
    rng_types: tuple[str, ...] = option(
        (),
        converter=_names,
        help="RNG states to synchronize across ranks at the start of each epoch.",
    )
    log_with: tuple[str, ...] = option(
        (), converter=_names, help="Tracker plugins. all: every installed one."
    )

    launch: LaunchConfig = field(factory=LaunchConfig)
    data: DataLoaderConfiguration = field(factory=DataLoaderConfiguration)
    accumulation: GradientAccumulationPlugin = field(factory=GradientAccumulationPlugin)
    project: ProjectConfiguration = field(factory=ProjectConfiguration)
    autocast: AutocastKwargs = field(factory=AutocastKwargs)
    grad_scaler: GradScalerKwargs = field(factory=GradScalerKwargs)
    process_group: InitProcessGroupKwargs = field(factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(factory=ProfileKwargs)
    compile: TorchDynamoPlugin = field(factory=TorchDynamoPlugin)

    plugins: Mapping[str, object] = field(factory=dict)
    """Plugin name -> config object, for plugins with a section, a config object or a proposal."""

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step, whichever of the option's two names was set."""
        return self.gradient_accumulation_steps

    def plugin_names(self) -> Iterator[tuple[tuple[str, ...], Slot, str]]:
        """Yield (path, slot, name) of each plugin that is asked for by name.

        `device` is left out: it may also be a device type that only torch knows.
        """
        if self.strategy != "auto" and self.strategy not in self.strategies:
            yield ("strategy",), "strategy", self.strategy
        for alias, options in self.strategies.items():
            yield ("strategies", alias, "plugin"), "strategy", options["plugin"]
        if self.mixed_precision != "no":
            yield ("mixed_precision",), "precision", self.mixed_precision
        if self.launch.launcher != "auto":
            yield ("launch", "launcher"), "launcher", self.launch.launcher
        yield from ((("extensions",), "extension", name) for name in self.extensions)
        yield from ((("log_with",), "tracker", name) for name in self.log_with if name != "all")


@frozen
class Proposal:
    """A value that a config class wants for an option of the run.

    A config class may have `propose(self, run_config) -> Sequence[Proposal]`. The reason becomes the value's
    origin. If the user set the option to another value, the proposal is an error.
    """

    path: str
    value: Any
    reason: str
