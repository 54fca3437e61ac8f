"""Recipes: chosen by the chip or asked for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformer_engine.common.recipe as te_recipes
import transformer_engine.pytorch as te
import transformer_engine_torch as extension
from te_problem import accelerator, model
from transformer_engine.pytorch import quantization

from accel_core import ConfigError
from accel_transformer_engine import TransformerEngineConfig
from accel_transformer_engine.recipes import build_recipe, token_multiple

HOPPER, BLACKWELL, LATER, AMPERE = (9, 0), (10, 0), (12, 0), (8, 0)


@pytest.fixture
def on_chip(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the stand-in a chip of that compute capability."""

    def become(capability: tuple[int, int]) -> None:
        from transformer_engine.pytorch import utils

        monkeypatch.setattr(extension, "CAPABILITY", capability)
        for name in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
            monkeypatch.setattr(quantization, f"_{name}_SUPPORT", None)
        utils._get_device_compute_capability.cache_clear()

    yield become
    monkeypatch.undo()
    become(HOPPER)


def built(**options: Any) -> Any:
    return build_recipe(TransformerEngineConfig(**options), te)


@pytest.mark.parametrize(
    ("chip", "recipe"),
    [(HOPPER, "DelayedScaling"), (BLACKWELL, "MXFP8BlockScaling"), (LATER, "Float8CurrentScaling")],
)
def test_the_chip_chooses_the_recipe(on_chip: Any, chip: tuple[int, int], recipe: str) -> None:
    on_chip(chip)
    assert type(built()).__name__ == recipe


def test_each_word_is_a_recipe_with_its_multiple_of_tokens(on_chip: Any) -> None:
    on_chip(BLACKWELL)
    found = {word: built(recipe=word) for word in ("delayed", "current", "mxfp8", "block", "nvfp4")}
    assert {word: type(recipe).__name__ for word, recipe in found.items()} == {
        "delayed": "DelayedScaling",
        "current": "Float8CurrentScaling",
        "mxfp8": "MXFP8BlockScaling",
        "block": "Float8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    assert {word: token_multiple(recipe) for word, recipe in found.items()} == {
        "delayed": (8, 16),
        "current": (8, 16),
        "mxfp8": (32, 32),
        "block": (8, 16),
        "nvfp4": (16, 128),
    }


def test_a_recipe_that_the_chip_lacks_is_refused_with_its_reason(on_chip: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"mxfp8: this chip cannot compute the recipe.*10.0 .*\n.*current, block"
    ):
        built(recipe="mxfp8")
    on_chip(AMPERE)
    with pytest.raises(
        ConfigError,
        match=r"delayed: this chip cannot compute the recipe.*8.9 or higher.*\ntrain with mixed_pre",
    ):
        built(recipe="delayed")
    with pytest.raises(ConfigError, match="this chip cannot compute the recipe"):
        accelerator(te_recipe=te_recipes.NVFP4BlockScaling()).prepare(model())


def test_every_option_of_delayed_scaling_reaches_it() -> None:
    recipe = built(
        margin=2, amax_history_len=8, amax_compute_algo="most_recent", reduce_amax=False, format="E4M3"
    )
    assert type(recipe) is te_recipes.DelayedScaling
    assert (recipe.margin, recipe.amax_history_len, recipe.reduce_amax) == (2, 8, False)
    assert recipe.amax_compute_algo == "most_recent"
    assert recipe.fp8_format is te_recipes.Format.E4M3


def test_gradients_are_computed_in_high_precision_if_asked() -> None:
    assert built(recipe="current", high_precision_backward=True).backward_override == "high_precision"
    with pytest.raises(ConfigError, match="recipe delayed refuses.*only supports backward_override=None"):
        built(recipe="delayed", high_precision_backward=True)


def test_an_option_that_the_library_would_ignore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def __init__(self, **options: Any) -> None: ...

    monkeypatch.setattr(te_recipes, "Float8CurrentScaling", Older)
    with pytest.raises(ConfigError, match=r"Older of this transformer-engine has no backward_override"):
        built(recipe="current", high_precision_backward=True)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"margin is set, but recipe current has no history.*\nset fp8_te"):
        TransformerEngineConfig(recipe="current", margin=1)
    with pytest.raises(ValueError, match=r"te_recipe is set together with margin"):
        TransformerEngineConfig(te_recipe=te_recipes.DelayedScaling(), margin=1)
    with pytest.raises(ValueError, match=r"fp8_te.skip: '\(' is not a regular expression"):
        TransformerEngineConfig(skip="(")


def test_a_recipe_of_the_library_is_taken_as_it_is() -> None:
    recipe = te_recipes.Float8CurrentScaling()
    assert built(te_recipe=recipe) is recipe
