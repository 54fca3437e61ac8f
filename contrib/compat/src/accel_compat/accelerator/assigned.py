"""Settings that programs assign to an Accelerator after it was made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from attrs import evolve

from accel_compat.accelerator.arguments import Asked
from accel_compat.accelerator.checkpoints import States, field_of
from accel_compat.accelerator.tracking import Listed
from accel_compat.configs.handlers import AutocastKwargs, DataLoaderConfiguration, ProjectConfiguration
from accel_compat.configs.translation import field_names
from accel_compat.state.gradient_state import GradientState
from accel_compat.unsupported import NotServedError


def _listed(items: Callable[[Any], Iterable[Any]], put: Callable[[Any, Iterable[Any]], None]) -> Any:
    """Make a property of a list that a program may assign, and change in place."""
    return property(lambda self: Listed(items(self), partial(put, self)), put)


class Assignable(States):
    """The settings of an Accelerator that a program may change."""

    dataloader_config: DataLoaderConfiguration
    ddp_handler: Any
    autocast_handler: AutocastKwargs | None
    rng_types: Any
    device_placement: bool
    _applied: dict[str, Any]
    """Setting -> its value when the run was last told."""

    def _keep(self, asked: Asked, given: dict[str, Any]) -> None:
        """Keep the program's settings, completed by those that the run found elsewhere."""
        for name, value in asked.kept.items():
            if name != "step_scheduler_with_optimizer":
                setattr(self, name, value)
        config = self.run.config
        if self.rng_types is None:
            self.rng_types = list(config.rng_types) or ["generator"]
        data = {name: getattr(config.data, name) for name in field_names(DataLoaderConfiguration)}
        if given["dataloader_config"] is None:
            self.dataloader_config = DataLoaderConfiguration(**data)
        for name, value in data.items():
            setattr(self.dataloader_config, name, value)
        self.project_configuration = given["project_config"] or ProjectConfiguration()
        for name in field_names(ProjectConfiguration):
            setattr(self.project_configuration, name, getattr(config.project, name))
        self.log_with = list(asked.core["log_with"] or ())
        self._asked_trackers = list(self.log_with)
        self._apart, self._applied = [], {}
        self._apply_settings()

    def _apply_settings(self) -> None:
        """Hand on what was changed since the last time."""
        now = {
            "data": vars(self.dataloader_config),
            "ddp": None if self.ddp_handler is None else vars(self.ddp_handler),
            "autocast": None if self.autocast_handler is None else vars(self.autocast_handler),
            "rng_types": self.rng_types,
            "device_placement": self.device_placement,
        }
        before, self._applied = self._applied, copy.deepcopy(now)
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

    split_batches = field_of("dataloader_config", "split_batches")
    dispatch_batches = field_of("dataloader_config", "dispatch_batches")
    even_batches = field_of("dataloader_config", "even_batches", is_settable=True)  # alone, as there
    use_seedable_sampler = field_of("dataloader_config", "use_seedable_sampler")
    non_blocking = field_of("dataloader_config", "non_blocking")
    use_stateful_dataloader = field_of("dataloader_config", "use_stateful_dataloader")

    # -- the step ----------------------------------------------------------------------------------

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Schedulers step with their optimizers. Settable for schedulers prepared later."""
        return self.run.config.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self.run.reconfigure(step_scheduler_with_optimizer=value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per window.

        A new value counts at once: windows end where `step` is a multiple of it.
        """
        return self.run.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.run.set_accumulation_steps(steps, inside=True)
        if self.run.accumulation is None:
            self.step = self.step
        GradientState.of(self.run).plugin_kwargs["num_steps"] = steps

    @property
    def native_amp(self) -> bool:
        """True if autocast lowers the precision. Settable for models prepared later."""
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
                "accelerator.scaler: losses of this run are not scaled, so an enabled scaler cannot be used\n"
                'make it Accelerator(mixed_precision="fp16"), and assign the scaler after `prepare`'
            )
        for unit in scaled if value is not None else ():
            unit.use_scaler(value)
        self.__dict__["_scaler"] = value

    # -- what there is -----------------------------------------------------------------------------

    def _all_models(self) -> list[Any]:
        """Return the program's own models; FSDP's and engines' are what these made."""
        divided = self.distributed_type in self._divided
        return [model for unit in self.run.units for model in (unit.wrapped if divided else unit.given)]

    def _set_models(self, models: Iterable[Any]) -> None:
        models = list(models)
        _refuse_strangers("_models", models, self._all_models())
        self._apart = [model for model in self._all_models() if not _among(model, models)]
        self.run.keep_apart(self._apart)

    def _set_dataloaders(self, loaders: Iterable[Any]) -> None:
        self.run.prepared.loaders[:] = loaders

    def _set_custom_objects(self, objects: Iterable[Any]) -> None:
        known = [each for each in self.run.registered if _among(each, [*self._loose, *self._stepping])]
        self.run.registered[:] = [*known, *objects]

    def _set_optimizers(self, optimizers: Iterable[Any]) -> None:
        _refuse_other("_optimizers", list(optimizers), self._all_optimizers())

    def _set_schedulers(self, schedulers: Iterable[Any]) -> None:
        _refuse_other("_schedulers", list(schedulers), self._stepping)

    _models: Any = _listed(lambda self: _without(self._all_models(), self._apart), _set_models)
    _dataloaders: Any = property(lambda self: self.run.prepared.loaders, _set_dataloaders)
    _custom_objects: Any = _listed(
        lambda self: _without(self.run.registered, [*self._loose, *self._stepping]), _set_custom_objects
    )
    _optimizers: Any = _listed(States._all_optimizers, _set_optimizers)
    _schedulers: Any = _listed(lambda self: self._stepping, _set_schedulers)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give device memory back.

        Returns as many None as there are arguments.
        """
        self._apart = []
        self.run.keep_apart([])
        return super().free_memory(*objects)

    clear = free_memory


def _without(things: Iterable[Any], others: list[Any]) -> list[Any]:
    return [thing for thing in things if not _among(thing, others)]


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
