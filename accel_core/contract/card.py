"""The card: a plugin's description, imported before anything else of the plugin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

from accel_core.contract.arguments import did_you_mean
from accel_core.errors import PluginError

API_VERSION: Final = "1.0"
"""Version major.minor of this contract, not of any package. Majors N and N-1 are served."""


Slot = Literal["device", "precision", "launcher", "strategy", "tracker", "extension", "store", "command"]

PreparedKind = Literal["model", "optimizer", "scheduler", "dataloader"]

SLOTS: Final[tuple[Slot, ...]] = get_args(Slot)

# A list, since every listing of plugins needs these words, and the config classes cost 9 ms to import.
_RESERVED: Final = (
    "accumulation all auto autocast compile config data device device-placement env extensions grad-scaler"
    " gradient-accumulation-steps launch log-with mixed-precision no parallelism plugins process-group"
    " profile project rng-types schema step-scheduler-with-optimizer strategies strategy"
)
RESERVED_NAMES: Final = frozenset(_RESERVED.split())
"""Names that plugins may not take: words of core's config and command line."""

CAPABILITIES: Final[Mapping[str, str]] = {
    "bf16": "trains under autocast to bfloat16",
    "fp16": "trains under autocast to float16 with a loss scaler",
    "fp8": "multiplies matrices of float8 elements",
    "float64": "holds and computes float64 tensors; without it models of float64 are refused",
    "memory_stats": "reports the bytes it has allocated",
    "rng": "saves and restores its random generators",
    "process_per_device": "several processes, each with a device of its own, form a world",
    "collectives.torch": "torch.distributed process groups carry its tensors",
    "collectives.own": "collectives of its own library carry its tensors between processes",
    "no_sync": "leaves out gradient communication inside an accumulation window",
    "local_sgd": "ranks may step by themselves, and average their weights now and then",
    "join": "ranks may run out of batches at different times",
    "dtensors": "trains, clips and saves parameters that other plugins have made DTensors",
    "several_optimizers": "a model may have several optimizers",
    "closures": "`optimizer.step` takes a closure",
    "partial_clips": "clips a part of a unit's parameters, by any norm",
    "whole_weights": "each rank holds whole parameters",
    "streamed_weights": "prepares models whose weights come and go, or are loaded later",
    "freezing": "parameters may be frozen after `prepare`",
    "unfreezing": "parameters that are frozen in `prepare` may train later",
    "replacing": "parts and parameters of a model may be replaced or added after `prepare`",
    "regrouping": "optimizers may group parameters otherwise after `prepare`",
    "local_gradients": "tensor hooks of parameters see each gradient before ranks reduce it",
    "worker_output": "writes the output of workers to `log_dir`, and prints lines after their rank (`tee`)",
    "named_rendezvous": "starts several nodes only if the user names the place where they meet",
}
"""The closed vocabulary of `offers` and `needs`: word -> promise of the plugin."""


class Card(NamedTuple):
    """A plugin's description; imports neither torch nor the vendor's library.

    A named tuple: each listing creates all cards, and importing attrs alone would take longer. Paths are
    dotted: "package.module:Name". An entry point of group `accel_core.<slot>`, named like the card, points at
    it.
    """

    name: str
    slot: Slot
    summary: str
    """One sentence; the help line of a command."""
    api_version: str
    """The contract version that the plugin was written for, as in `API_VERSION`."""
    priority: int | None = None
    """Priority for `auto`: native 0, first-party 100. None: the plugin is used only if it is named.

    An extension with a priority joins each run if it is installed.
    """
    shadows: tuple[str, ...] = ()
    """Plugins of the same slot that `auto` must not take when this one is usable."""
    also: tuple[str, ...] = ()
    """Words that several plugins of a slot answer to, such as `fp8` for precisions.

    Like `auto`, such a word takes the usable plugin of highest priority; a tie is an error that names both.
    Store slot: the URL schemes that the plugin serves; each scheme belongs to one plugin.
    """
    distributed_type: str | None = None
    """The value of `accelerator.distributed_type`.

    The strategy's value wins over the device's, except MULTI_DEVICE, which the device's value completes.
    """
    offers: AbstractSet[str] = frozenset()
    """Words of CAPABILITIES that this plugin offers."""
    needs: AbstractSet[str] = frozenset()
    """Words of CAPABILITIES that plugins below it must offer."""
    torch_device: str | None = None
    """Device slot: torch's name of the device type."""
    communication_backend: str | None = None
    """Device slot: the torch.distributed backend for its tensors; None: torch's default for its type."""
    compile_backend: str | None = None
    """Device slot: the backend of `torch.compile` if section `compile` names none; None: torch's default."""
    probe: Callable[[], str | None] | None = None
    """Returns None, or the reason why the plugin cannot be used here.

    A probe takes at most 5 ms and imports no third party.
    """
    verify: str | None = None
    """Path of a function like `probe` that may import the vendor's library."""
    task: str | None = None
    """Launcher slot: path of a function (environment) -> the `Task` that this process is, or None.

    The function must be cheap to import and to call.
    """
    launch_environment: str | None = None
    """Path of a function (config, world) -> variables that vendor libraries read when they are imported.

    Called in the launcher, in which the world is a guess, and by the run before vendor imports, under any
    launcher. Must not import torch. Core sets unset variables; a user's own value stays, and core says so.
    """
    visible_devices: str | None = None
    """Path of a function (config) -> number of this machine's devices, or None if no file shows the number.

    Must not import torch; after None, core asks torch.
    """
    prepares: Mapping[str, PreparedKind] = MappingProxyType({})
    """Path of a class of the package -> kind of object in `prepare`, beside torch's own classes."""
    dimensions: Mapping[str, str] = MappingProxyType({})
    """Strategy and extension slot: dimension of section `parallelism` -> one sentence about it.

    The sentence begins with the field's words ("Tensor parallelism: ..."), with which unknown keys are
    compared. The plugin reads the size as `config.parallelism.get(NAME, 1)` in its hook `mesh_dims`.
    """
    environment_report: str | None = None
    """Device slot: path of a function () -> lines for `accel env`: label -> value. Must not raise."""
    hookspecs: str | None = None
    """Path of a module whose hooks other packages may implement, by the names `CARD.HOOK`."""
    config: str | None = None
    """Path of the attrs class of the plugin's options."""
    implementation: str | None = None
    """Path of the class that is created as `Plugin(config, run)`.

    Command slot: path of a click command. Store slot: path of a function (URL) -> its folder, an
    `accel_core.Storage`, which need not exist; it raises CheckpointError for an invalid URL.
    """


def incompatibility(card: Card) -> str:
    """Return the reason why a plugin for another API version cannot be used here, else "".

    Raises:
        PluginError: its `api_version` is not "major.minor".
    """
    api_version: object = card.api_version
    if not isinstance(api_version, str) or not re.fullmatch(r"\d+\.\d+", api_version):
        about = f"{card.name}: api_version {api_version!r} is not 'major.minor'"
        raise PluginError(f"{about}\nwrite it so: '1.0'", plugin=card.name)
    theirs, ours = (tuple(map(int, version.split("."))) for version in (api_version, API_VERSION))
    if max(1, ours[0] - 1) <= theirs[0] and theirs <= ours:  # version 0 never existed
        return ""
    remedy = "upgrade accel-core" if theirs > ours else "upgrade the plugin"
    return f"written for API {api_version}, this accel-core serves {API_VERSION}: {remedy}"


def check_name(name: str) -> None:
    """Refuse a name, or a word in `also`, that no plugin may have.

    Raises:
        PluginError: the name is not lower-case words joined by hyphens, or is a word of core's config.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise PluginError(
            f"plugin name {name!r} is not lower-case words joined by single hyphens\ngive it such a name",
            plugin=name,
        )
    if name in RESERVED_NAMES:
        raise PluginError(f"{name!r} is a word of core's own config\ntake another name", plugin=name)


def check_words(card: Card) -> None:
    """Refuse a card of this API with invalid words.

    Raises:
        PluginError: a wrong name, an unknown slot or an unknown capability.
    """
    for name in (card.name, *card.also):
        check_name(name)
    if card.slot not in SLOTS:
        about = f"{card.name}: unknown slot {card.slot!r}{did_you_mean(card.slot, SLOTS)}"
        raise PluginError(f"{about}\ntake one of {', '.join(SLOTS)}", plugin=card.name)
    for field, words in (("offers", card.offers), ("needs", card.needs)):
        for word in sorted(words - CAPABILITIES.keys()):
            hint = did_you_mean(word, CAPABILITIES)
            raise PluginError(
                f"{card.name}: unknown capability {word!r} in {field}{hint}\n"
                f"take words of {', '.join(CAPABILITIES)}",
                plugin=card.name,
            )
