"""What programs assign to an Accelerator after it was made, and its effect from then on."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from attrs import evolve

from accel_compat.refusing import NotServedError

from ._arguments import Asked
from ._gradient_state import GradientState
from ._listed import Listed
from ._states import States
from .utils._handlers import AutocastKwargs, DataLoaderConfiguration, ProjectConfiguration

__all__ = ["Assignable"]

_PROJECT = (
    "project_dir",
    "logging_dir",
    "automatic_checkpoint_naming",
    "total_limit",
    "iteration",
    "save_on_each_node",
)


class Assignable(States):
    """The settings of an Accelerator that a program may change."""

    dataloader_config: DataLoaderConfiguration
    ddp_handler: Any
    autocast_handler: AutocastKwargs | None
    rng_types: Any
    device_placement: bool
    _heeded: dict[str, Any]
    """Setting -> what it was when it was last handed on."""

    def _keep(self, asked: Asked, given: dict[str, Any]) -> None:
        """Remember the settings as the program gave them, completed by what the run found elsewhere."""
        for name, value in asked.kept.items():
            if name != "step_scheduler_with_optimizer":
                setattr(self, name, value)
        config = self.run.config
        known = DataLoaderConfiguration.__dataclass_fields__  # core's has more
        data = {name: getattr(config.data, name) for name in _fields(config.data) if name in known}
        if given["dataloader_config"] is None:
            self.dataloader_config = DataLoaderConfiguration(**data)
        for name, value in data.items():
            setattr(self.dataloader_config, name, value)
        self.project_configuration = given["project_config"] or ProjectConfiguration()
        for name in _PROJECT:
            setattr(self.project_configuration, name, getattr(config.project, name))
        self.log_with = list(asked.core["log_with"] or ())
        self._asked_trackers = list(self.log_with)
        self._apart, self._heeded = [], {}
        self._heed()

    def _heed(self) -> None:
        """Hand on what was changed since the last time."""
        now = {
            "data": vars(self.dataloader_config),
            "ddp": None if self.ddp_handler is None else vars(self.ddp_handler),
            "autocast": None if self.autocast_handler is None else vars(self.autocast_handler),
            "rng_types": self.rng_types,
            "device_placement": self.device_placement,
        }
        before, self._heeded = self._heeded, copy.deepcopy(now)
        changed = {name for name, value in now.items() if name in before and before[name] != value}
        config, changes = self.run.config, dict[str, Any]()
        if "data" in changed:
            changes["data"] = evolve(config.data, **vars(self.dataloader_config))
        if "ddp" in changed and self.ddp_handler is not None and "ddp" in self.run.plugins:
            plugin: Any = self.run.plugins["ddp"]
            plugin.config = self.ddp_handler.to_ours()
        if "autocast" in changed and self.autocast_handler is not None:
            given = {name: getattr(self.autocast_handler, name) for name in ("enabled", "cache_enabled")}
            changes["autocast"] = evolve(config.autocast, **given)
        if "rng_types" in changed:
            changes["rng_types"] = tuple(str(kind) for kind in self.rng_types or ())
        if "device_placement" in changed:
            changes["device_placement"] = self.device_placement
        self.run.reconfigure(**changes)

    # -- data --------------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """As configured."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """As configured."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As configured. Settable: for loaders prepared from now on."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """As configured."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As configured."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As configured."""
        return self.dataloader_config.use_stateful_dataloader

    # -- the step ----------------------------------------------------------------------------------

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step with their optimizers. Settable: for schedulers prepared from now on."""
        return self.run.config.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self.run.reconfigure(step_scheduler_with_optimizer=value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a window. Settable: at once, and windows end where `step` is a multiple of it."""
        return self.run.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.run.set_accumulation_steps(steps, inside=True)
        if self.run.accumulation is None:
            self.step = self.step
        GradientState.of(self.run).plugin_kwargs["num_steps"] = steps

    @property
    def native_amp(self) -> bool:
        """Whether torch.autocast computes in a lower precision. Settable: for models prepared from now on."""
        return self.mixed_precision != "no" and self.run.config.autocast.enabled

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if value and self.mixed_precision == "no":
            raise NotServedError(
                'native_amp = True with mixed_precision "no": there is no dtype to compute in\n'
                'make it Accelerator(mixed_precision="bf16")'
            )
        self.run.reconfigure(autocast=evolve(self.run.config.autocast, enabled=value))

    @property
    def scaler(self) -> Any:
        """The scaler of the loss, once a model is prepared under fp16. Settable."""
        known = next((unit.scaler for unit in self.run.units if unit.scaler is not None), None)
        return self.__dict__.get("_scaler") if known is None else known

    @scaler.setter
    def scaler(self, value: Any) -> None:
        scaled = [unit for unit in self.run.units if unit.scaler is not None]
        if value is not None and value.is_enabled() and not scaled:
            raise NotServedError(
                "accelerator.scaler: losses of this run are not scaled, and an enabled scaler would have to\n"
                'make it Accelerator(mixed_precision="fp16"), and assign the scaler after `prepare`'
            )
        for unit in scaled if value is not None else ():
            unit.use_scaler(value)
        self.__dict__["_scaler"] = value

    # -- what there is -----------------------------------------------------------------------------

    @property
    def _models(self) -> list[Any]:
        there = [model for unit in self.run.units for model in unit.wrapped]
        return Listed((model for model in there if not _among(model, self._apart)), self._set_models)

    @_models.setter
    def _models(self, models: Iterable[Any]) -> None:
        self._set_models(models)

    def _set_models(self, models: Iterable[Any]) -> None:
        models = list(models)
        there = [model for unit in self.run.units for model in unit.wrapped]
        _refuse_strangers("_models", models, there)
        self._apart = [model for model in there if not _among(model, models)]
        self.run.keep_apart(self._apart)

    @property
    def _dataloaders(self) -> list[Any]:
        return self.run.loaders

    @_dataloaders.setter
    def _dataloaders(self, loaders: Iterable[Any]) -> None:
        self.run.loaders[:] = loaders

    @property
    def _custom_objects(self) -> list[Any]:
        mine = (each for each in self.run.registered if not _among(each, self._loose))
        return Listed(mine, self._set_custom_objects)

    @_custom_objects.setter
    def _custom_objects(self, objects: Iterable[Any]) -> None:
        self._set_custom_objects(objects)

    def _set_custom_objects(self, objects: Iterable[Any]) -> None:
        self.run.registered[:] = [
            *(each for each in self.run.registered if _among(each, self._loose)),
            *objects,
        ]

    @property
    def _optimizers(self) -> list[Any]:
        return Listed(self._all_optimizers(), self._set_optimizers)

    @_optimizers.setter
    def _optimizers(self, optimizers: Iterable[Any]) -> None:
        self._set_optimizers(optimizers)

    def _all_optimizers(self) -> list[Any]:
        return [*(proxy for _, proxy in self.run.optimizers), *self._loose]

    def _set_optimizers(self, optimizers: Iterable[Any]) -> None:
        _refuse_other("_optimizers", list(optimizers), self._all_optimizers())

    @property
    def _schedulers(self) -> list[Any]:
        return Listed(self._stepping, self._set_schedulers)

    @_schedulers.setter
    def _schedulers(self, schedulers: Iterable[Any]) -> None:
        self._set_schedulers(schedulers)

    def _set_schedulers(self, schedulers: Iterable[Any]) -> None:
        _refuse_other("_schedulers", list(schedulers), self._stepping)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give device memory back; as many None as arguments."""
        self._apart = []
        self.run.keep_apart([])
        return super().free_memory(*objects)

    clear = free_memory


def _fields(config: Any) -> Iterable[str]:
    return [each.name for each in type(config).__attrs_attrs__]


def _among(thing: Any, several: Iterable[Any]) -> bool:
    return any(thing is each for each in several)


def _refuse_strangers(name: str, given: list[Any], there: list[Any]) -> None:
    for thing in given:
        if not _among(thing, there):
            raise NotServedError(
                f"accelerator.{name}: the {type(thing).__name__} is not prepared\n"
                "prepare it, or register_for_checkpointing what is only to be saved"
            )


def _refuse_other(name: str, given: list[Any], there: list[Any]) -> None:
    _refuse_strangers(name, given, there)
    if len(given) != len(there):
        raise NotServedError(
            f"accelerator.{name}: what is prepared is saved with its model, and cannot be taken out\n"
            "take the model out of accelerator._models, or free_memory() and prepare what is to stay"
        )
