"""Construction of Transformer Engine's recipe from the options, with checks of the chip."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from accel_core import ConfigError

if TYPE_CHECKING:
    from accel_transformer_engine.config import TransformerEngineConfig

__all__ = ["build_recipe", "library", "token_multiple"]

CLASSES: Final = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}
"""Option `recipe` -> Transformer Engine's class, and its function that checks the chip."""


def library() -> Any:
    """Import and return `transformer_engine.pytorch`.

    Raises:
        ConfigError: the import fails, or the version is too old.
    """
    try:
        te = import_module("transformer_engine.pytorch")
    except Exception as error:  # without CUDA its libraries raise errors of any class
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"fp8-te: transformer_engine.pytorch cannot be imported: {type(error).__name__}: {reason}\n"
            "install transformer-engine[pytorch] for the CUDA of this machine, or choose another precision"
        ) from error
    if not hasattr(te, "autocast"):
        raise ConfigError(
            "fp8-te: this transformer-engine has no `autocast`, so it is older than 2.9\n"
            "install transformer-engine[pytorch]>=2.9"
        )
    return te


def build_recipe(config: TransformerEngineConfig, te: Any) -> Any:
    """Return Transformer Engine's recipe for the options.

    Raises:
        ConfigError: the chip cannot compute the recipe, or this version does not have an option.
    """
    if config.te_recipe is not None:
        _require_chip(_word(config.te_recipe), te)
        return config.te_recipe
    word: str | None = config.recipe
    if word == "auto":
        word = "delayed" if config.asks_for_delayed else _word(te.get_default_recipe())
    assert word is not None, "the library's own recipes have words"
    _require_chip(word, te)
    classes: Any = import_module("transformer_engine.common.recipe")
    options: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax")
        if getattr(config, name) is not None
    }
    if config.format is not None:
        options["fp8_format"] = classes.Format[config.format]
    if config.high_precision_backward:
        options["backward_override"] = "high_precision"
    return _build(word, getattr(classes, CLASSES[word][0]), options)


def token_multiple(recipe: Any) -> tuple[int, int]:
    """Return the multiple of tokens that the recipe needs, and the multiple to which tokens are padded."""
    if recipe.mxfp8():
        return 32, 32
    if recipe.nvfp4():
        return 16, 128
    return 8, 16


def _word(recipe: Any) -> str | None:
    """Return the value of option `recipe` for a recipe; None for a class of the user."""
    kinds = {
        "delayed": recipe.delayed,
        "current": recipe.float8_current_scaling,
        "mxfp8": recipe.mxfp8,
        "block": recipe.float8_block_scaling,
        "nvfp4": recipe.nvfp4,
    }
    return next((word for word, is_it in kinds.items() if is_it()), None)


def _require_chip(word: str | None, te: Any) -> None:
    if word is None:
        return
    can, reason = getattr(te, CLASSES[word][1])(return_reason=True)
    if not can:
        others = [each for each, (_, check) in CLASSES.items() if getattr(te, check)()]
        raise ConfigError(
            f"fp8_te.recipe {word}: this chip cannot compute the recipe ({reason})\n"
            + (f"choose among {', '.join(others)}" if others else "train with mixed_precision: bf16")
        )


def _build(word: str, kind: Any, options: dict[str, Any]) -> Any:
    try:
        recipe = kind(**options)
    except Exception as error:  # pydantic and Transformer Engine raise errors of several classes
        reason = str(error).strip().replace("\n", "; ")
        raise ConfigError(
            f"fp8_te: recipe {word} refuses {options}: {reason}\nchange section fp8_te"
        ) from error
    # pydantic silently ignores keywords that the class does not have.
    if lost := [name for name, value in options.items() if getattr(recipe, name, None) != value]:
        raise ConfigError(
            f"fp8_te: {kind.__name__} of this transformer-engine has no {lost[0]}\n"
            "leave the option out, choose another recipe, or install a newer transformer-engine"
        )
    return recipe
