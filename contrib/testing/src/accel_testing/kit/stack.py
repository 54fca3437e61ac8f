"""The stack under test: its installed plugins, and the capabilities they offer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from attrs import field, frozen

from accel_core import Discovery, PluginError, Record, discover
from accel_testing.simulated import DISTRIBUTION

__all__ = ["NETWORK", "OUTSIDE_OF_RUNS", "REFERENCE", "SLOTS", "TestedStack", "variables"]

NETWORK = "ACCEL_KIT_NETWORK"
"""The variable that names a module with a network for the checks."""
REFERENCE = "ACCEL_KIT_REFERENCE"
"""The variable that names a module with a precision's reference."""

_DEFAULTS = {"device": "native", "strategy": "single"}
_CORE = "accel-core"
SLOTS: Final = ("device", "strategy", "precision", "extension", "tracker", "launcher", "store", "command")
OUTSIDE_OF_RUNS: Final = frozenset({"launcher", "store", "command"})
"""Slots whose plugins do not belong to a run."""


@frozen(kw_only=True)
class TestedStack:
    """Installed plugins. Core chooses for slots without one; the default device is the CPU."""

    __test__ = False  # pytest would take the name for a class of tests

    records: Sequence[Record]
    """One plugin of a slot, or several extensions, in the order of the text."""
    simulate: str | None = None
    """The communication backend of a simulated device."""
    folder: str | None = None
    """The folder of a tracker."""
    settings: Mapping[str, str] = field(factory=dict)
    """Dotted option -> text, as a user would set it by a variable."""
    network: str | None = None
    """The module whose network is trained; None: the kit's own."""
    reference: str | None = None
    """The module of a precision's reference; None for torch's autocast."""

    @classmethod
    def parse(
        cls,
        text: str,
        discovery: Discovery,
        simulate: str | None = None,
        folder: str | None = None,
        settings: Mapping[str, str] | None = None,
        network: str | None = None,
        reference: str | None = None,
    ) -> TestedStack:
        """Return the stack that `text` names, such as sim+acme+bf16.

        Raises:
            PluginError: a name is unknown, cannot be used here, or two are of one slot that takes one.
        """
        records: list[Record] = []
        for name in text.split("+"):
            record = discovery.get("native" if name == "cpu" else name)
            if record is None or record.slot not in SLOTS:
                known = [known.name for known in discovery.records if known.slot in SLOTS]
                raise PluginError(
                    f"--accel-stack {text}: no plugin {name!r} of a slot that is checked"
                    f" ({', '.join(SLOTS)})\ninstalled: {', '.join(known)}",
                    plugin=name,
                )
            if record.status != "available" and not (simulate and record.slot == "device"):
                raise PluginError(
                    f"--accel-stack {text}: {name} is {record.status}: {record.reason}\n"
                    f"check it where it can be used, or with --accel-simulate",
                    plugin=name,
                )
            rivals = [other for other in records if other.slot == record.slot]
            if rivals and (record.slot != "extension" or record in rivals):
                raise PluginError(
                    f"--accel-stack {text}: {rivals[0].name} and {name} are both {record.slot}s\n"
                    "name one of them"
                )
            records.append(record)
        return cls(
            records=records,
            simulate=simulate,
            folder=folder,
            settings=settings or {},
            network=network,
            reference=reference,
        )

    @property
    def plugins(self) -> Mapping[str, Record]:
        """Slot -> its plugin; of extensions the first."""
        return {record.slot: record for record in reversed(self.records)}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for `Accelerator`."""
        names = {slot: record.name for slot, record in self.plugins.items()}
        extensions = [_config(record) for record in self.records if record.slot == "extension"]
        precision = names.get("precision", "fp32")
        given = {
            "device": names.get("device", "cpu"),
            "strategy": names.get("strategy"),
            "mixed_precision": None if precision == "fp32" else precision,
            "log_with": names.get("tracker"),
            "project_dir": self.folder if "tracker" in names else None,
            "plugins": extensions or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def torch_device(self) -> str | None:
        """The torch type that the device's card promises, or under which it is simulated."""
        from accel_testing.simulated.simulate import simulated_type

        device = self.plugins.get("device")
        promised = device.card.torch_device if device and device.card else None
        return simulated_type(promised) if promised and self.simulate else promised

    @property
    def offers(self) -> frozenset[str]:
        """Capability words the cards claim; native's, where a slot was not named."""
        installed, named = discover(), self.plugins
        defaults = [installed.get(name) for slot, name in _DEFAULTS.items() if slot not in named]
        records = [*defaults, *self.records]
        return frozenset().union(*(record.card.offers for record in records if record and record.card))

    @property
    def described(self) -> list[Record]:
        """Plugins whose packaging is checked: core's own only in a stack of them."""
        return [each for each in self.records if each.distribution != _CORE] or [*self.records]

    def api_version(self, slots: Collection[str]) -> str:
        """Return the oldest version of the contract for which plugins of these slots were written."""
        cards = [record.card for record in self.records if record.slot in slots]
        versions = [card.api_version for card in cards if card is not None]
        return min(versions, key=lambda version: tuple(map(int, version.split("."))))

    @property
    def packages(self) -> frozenset[str]:
        """Top-level packages of the plugins' code."""
        cards = [record.card for record in self.records if record.card is not None]
        return frozenset(
            card.implementation.partition(".")[0].partition(":")[0] for card in cards if card.implementation
        )

    @property
    def simulated(self) -> bool:
        """True if the results come from a simulated device."""
        device = self.plugins.get("device")
        return self.simulate is not None or (device is not None and device.distribution == DISTRIBUTION)

    @property
    def name(self) -> str:
        """The stack as --accel-stack names it."""
        ordered = sorted(self.records, key=lambda record: SLOTS.index(record.slot))
        return "+".join(record.name for record in ordered)

    @property
    def environment(self) -> dict[str, str]:
        """The settings, as variables."""
        named = {NETWORK: self.network, REFERENCE: self.reference}
        return variables(self.settings) | {name: text for name, text in named.items() if text is not None}

    def settings_without(self, *slots: str) -> dict[str, str]:
        """Return the settings of a stack that has other plugins in these slots."""
        others = {record.name.replace("-", "_") for record in self.records if record.slot in slots}
        if "strategy" in slots:
            others.add("parallelism")
        return {path: text for path, text in self.settings.items() if path.partition(".")[0] not in others}

    def __str__(self) -> str:
        names = self.name.replace("+", " + ")
        names += "".join(f", {path}={text}" for path, text in self.settings.items())
        names += f", network of {self.network}" if self.network else ""
        return f"{names} (simulated)" if self.simulated else names


def variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Dotted options as a user would set them in the environment."""
    return {f"ACCEL__{path.replace('.', '__').upper()}": text for path, text in settings.items()}


def _config(extension: Record) -> object:
    """Its options, as they are by default: an extension is asked for by their object."""
    assert extension.card is not None
    assert extension.card.config is not None, "an extension without options has no object to ask for it by"
    module, _, name = extension.card.config.partition(":")
    return getattr(import_module(module), name)()
