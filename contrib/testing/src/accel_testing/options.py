"""The conformance kit's command-line options; all else loads on demand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

__all__ = ["MARKS"]


MARKS: Final = (
    "accel_concerns(slots): a check of the conformance kit, which plugins of these slots influence",
    "accel_quick: a check that --accel-quick keeps",
    "accel_requires(words): a check that is gated by capabilities",
    "accel_since(version): a check of a promise that came with this version of the contract",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("accel", "conformance kit of accel-core (pytest --pyargs accel_testing)")
    _add_stack(group)
    _add_choice(group)
    _add_simulation(group)
    group.addoption("--accel-report", metavar="FILE", help="write what was checked: FILE.md or FILE.json")


def _add_stack(group: pytest.OptionGroup) -> None:
    """Declare the options that say what to check."""
    group.addoption(
        "--accel-stack", metavar="NAMES", help="plugins to check, joined by +: a device, a strategy, ..."
    )
    group.addoption("--accel-world", metavar="SIZES", help="numbers of processes, such as 1,2 (levels 3, 4)")
    group.addoption(
        "--accel-set", metavar="OPTION=VALUE", action="append", default=[], help="an option of the stack's"
    )
    group.addoption(
        "--accel-network",
        metavar="MODULE",
        help="train its network, for a strategy that cannot serve the kit's own (levels 2-4)",
    )
    group.addoption(
        "--accel-reference",
        metavar="MODULE",
        help="its convert(model) and context(device) train by hand in the stack's precision (level 2)",
    )
    group.addoption(
        "--accel-store", metavar="URL", help="where a store is checked; it must be writable (level 1)"
    )
    group.addoption(
        "--accel-exchange-with",
        metavar="NAMES",
        help="strategies to exchange checkpoints with, besides native: '' or a,b@2:plugin.option=1 (level 4)",
    )


def _add_choice(group: pytest.OptionGroup) -> None:
    """Declare the options that choose checks, and say what may fail."""
    group.addoption("--accel-level", metavar="LEVELS", help="only these levels, such as 0,1")
    group.addoption(
        "--accel-quick", action="store_true", help="levels 0 and 1, and a few checks of the others"
    )
    group.addoption(
        "--accel-only", metavar="CHECK", action="append", default=[], help="only this check; may be repeated"
    )
    group.addoption("--accel-xfails", metavar="FILE", help="known failures, a line each: CHECK  # reason")
    group.addoption(
        "--accel-deadline",
        metavar="SECONDS",
        type=float,
        help="for each world of processes, launch and command (60; times ACCEL_TEST_PATIENCE)",
    )


def _add_simulation(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--accel-simulate", metavar="NAME", help="simulate the device; NAME is its communication backend"
    )
    group.addoption(
        "--accel-stand-in",
        metavar="MODULE",
        help="imported on the simulated device, for what else of the vendor's library is missing",
    )


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
