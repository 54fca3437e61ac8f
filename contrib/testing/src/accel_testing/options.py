"""The conformance kit's command-line options; all else loads on demand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pytest

__all__ = ["MARKS", "OPTIONS"]


OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stack": {"metavar": "NAMES", "help": "plugins to check, joined by +: a device, a strategy, ..."},
    "world": {"metavar": "SIZES", "help": "numbers of processes, such as 1,2 (levels 3, 4)"},
    "set": {"metavar": "OPTION=VALUE", "action": "append", "default": [], "help": "an option of the stack's"},
    "network": {
        "metavar": "MODULE",
        "help": "train its network, for a strategy that cannot serve the kit's own (levels 2-4)",
    },
    "reference": {
        "metavar": "MODULE",
        "help": "its convert(model) and context(device) train by hand in the stack's precision (level 2)",
    },
    "store": {"metavar": "URL", "help": "where a store is checked; it must be writable (level 1)"},
    "level": {"metavar": "LEVELS", "help": "only these levels, such as 0,1"},
    "quick": {"action": "store_true", "help": "levels 0 and 1, and a few checks of the others"},
    "only": {
        "metavar": "CHECK",
        "action": "append",
        "default": [],
        "help": "only this check; may be repeated",
    },
    "deadline": {
        "metavar": "SECONDS",
        "type": float,
        "help": "for each world of processes, launch and command (60; times ACCEL_TEST_PATIENCE)",
    },
    "simulate": {"metavar": "NAME", "help": "simulate the device; NAME is its communication backend"},
    "stand-in": {
        "metavar": "MODULE",
        "help": "imported on the simulated device, for what else of the vendor's library is missing",
    },
    "exchange-with": {
        "metavar": "NAMES",
        "help": "strategies to exchange checkpoints with, besides native:"
        " '' or a,b@2:plugin.option=1 (level 4)",
    },
    "xfails": {"metavar": "FILE", "help": "known failures, a line each: CHECK  # reason"},
    "report": {"metavar": "FILE", "help": "write what was checked: FILE.md or FILE.json"},
}
"""Option without the prefix that it has among those of pytest -> the rest of its declaration."""
MARKS: Final = (
    "accel_concerns(slots): a check of the conformance kit, which plugins of these slots influence",
    "accel_quick: a check that --accel-quick keeps",
    "accel_requires(words): a check that is gated by capabilities",
    "accel_since(version): a check of a promise that came with this version of the contract",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("accel", "conformance kit of accel-core (pytest --pyargs accel_testing)")
    for name, declared in OPTIONS.items():
        group.addoption(f"--accel-{name}", **declared)


def pytest_configure(config: pytest.Config) -> None:
    """Load the kit, if a stack was named."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    if config.getoption("accel_stack"):
        from accel_testing.kit.plugin import Kit
        from accel_testing.kit.progress import Progress

        kit = Kit.from_config(config)
        config.pluginmanager.register(kit, "accel-kit")
        config.pluginmanager.register(Progress(kit.report), "accel-kit-progress")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the checks unimported while it is not known what to check."""
    if config.getoption("accel_stack") or collection_path != Path(__file__).parent / "kit":
        return None
    config.pluginmanager.register(_NothingToCheck())
    return True


class _NothingToCheck:
    def pytest_collection_modifyitems(self) -> None:
        import pytest

        raise pytest.UsageError(
            "the conformance kit needs to know what to check\n"
            "say which plugins, as in: pytest --pyargs accel_testing --accel-stack native"
        )
