"""What the incumbent accepts, overrides or drops without a word is an error here, or holds."""

from __future__ import annotations

import pytest

from accel_core import Accelerator, ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "bf61"}, "did you mean 'bf16'"),
        ({"rng_types": ["torhc"]}, r"no random stream 'torhc' \(.*did you mean 'torch'"),
        ({"gradient_accumulation_steps": 0}, "must be at least 1, got 0"),
        ({"log_with": "nowhere"}, r"log_with .*: no tracker 'nowhere' is installed"),
        ({"kwargs_handlers": [object()]}, "object"),
        ({"cpu": True, "device": "xpu"}, "contradict each other"),
    ],
)
def test_a_value_that_means_nothing_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Accelerator(**{"cpu": True, **arguments})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("step_scheduler_with_optimizer", "Accelerator(step_scheduler_with_optimizer=...)"),
        ("rng_types", "Accelerator(rng_types=...)"),
        ("even_batches", "Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=...))"),
    ],
)
def test_a_setting_that_is_assigned_later_is_refused(name, remedy):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError) as refusal:
        setattr(accelerator, name, False)
    assert str(refusal.value).splitlines()[-1] == f"give it there: {remedy}"
    accelerator.gradient_accumulation_steps = 2  # is read
    accelerator.notes = "the program's own"
    accelerator.end_training()


def test_a_subclass_has_attributes_of_its_own_by_any_name():
    class Ordered(Accelerator):
        def __init__(self, order):
            self.order = order
            super().__init__(cpu=True)

    accelerator = Ordered("by length")
    assert accelerator.order == "by length"
    accelerator.end_training()


def test_code_that_contradicts_the_environment_names_both(monkeypatch):
    monkeypatch.setenv("ACCEL__GRADIENT_ACCUMULATION_STEPS", "8")
    with pytest.raises(ConfigError, match=r"Accelerator\(.*: 2 here, but 8 by variable ACCEL__GRADIENT"):
        Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_an_environment_value_of_the_wrong_type_names_its_variable(monkeypatch):
    monkeypatch.setenv("ACCEL__GRADIENT_ACCUMULATION_STEPS", "eight")
    with pytest.raises(ConfigError, match="ACCEL__GRADIENT_ACCUMULATION_STEPS.*eight"):
        Accelerator(cpu=True)


def test_a_second_accelerator_leaves_the_first_as_it_was():
    first = Accelerator(cpu=True, gradient_accumulation_steps=4)
    second = Accelerator(cpu=True, mixed_precision="bf16")
    assert (first.gradient_accumulation_steps, first.mixed_precision) == (4, "no")
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (1, "bf16")
    for accelerator in (first, second):
        accelerator.end_training()


@pytest.mark.parametrize(
    ("argument", "variable", "other"),
    [
        ({"gradient_accumulation_steps": 1}, "GRADIENT_ACCUMULATION_STEPS", "2"),
        ({"device_placement": True}, "DEVICE_PLACEMENT", "false"),
        ({"split_batches": False}, "DATA__SPLIT_BATCHES", "true"),
        ({"step_scheduler_with_optimizer": True}, "STEP_SCHEDULER_WITH_OPTIMIZER", "false"),
    ],
)
def test_an_argument_written_out_contradicts_a_variable_though_it_is_the_default(
    monkeypatch, argument, variable, other
):
    monkeypatch.setenv(f"ACCEL__{variable}", other)
    with pytest.raises(ConfigError, match=f"by variable ACCEL__{variable}; give it once"):
        Accelerator(cpu=True, **argument)


def test_an_argument_that_is_not_given_contradicts_nothing(monkeypatch):
    monkeypatch.setenv("ACCEL__GRADIENT_ACCUMULATION_STEPS", "2")
    accelerator = Accelerator(cpu=True)
    assert accelerator.gradient_accumulation_steps == 2
    accelerator.end_training()
