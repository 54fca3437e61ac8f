"""What the host puts off until it is needed, so that many installed backends cost nothing."""

from __future__ import annotations

import sys

import attrs
import pytest
import toy_specs
from generated_backends import generate_backends
from toy_stacks import stack

from accel_core.contract.hooks import implements
from accel_core.plugins.discovery import discover, load


def test_a_look_at_a_slot_imports_its_cards_and_nothing_else(tmp_path, monkeypatch):
    for name in generate_backends(tmp_path / "fresh", count=2):
        package = f"accel_{name.replace('-', '_')}"
        for module in [loaded for loaded in sys.modules if loaded.startswith(package)]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path / "fresh")
    discovery = discover({})

    assert discovery.get("single").status == "available"
    assert {"generated-0", "generated-1"} <= {*discovery.names}
    assert not [name for name in sys.modules if name.startswith("accel_generated_")]
    assert "generated-0" in {record.name for record in discovery.of("device")}
    assert "accel_generated_0.card" in sys.modules
    assert "accel_generated_1.card" not in sys.modules
    assert not {"accel_generated_0.config", "accel_generated_0.plugin"} & set(sys.modules)


class Both:
    @implements(toy_specs.backward)
    def backward(self, unit, loss, boundary): ...

    @implements(toy_specs.decide)
    def decide(self, unit, options): ...


@pytest.mark.parametrize("hook", ["backward", "decide"])
def test_a_resolved_hook_is_looked_up_once(hook):
    both = stack(strategy=Both())

    assert getattr(both, hook) is vars(both)[hook]


def test_a_generated_backends_config_is_a_real_one(tmp_path, monkeypatch):
    (name,) = generate_backends(tmp_path, count=1, options=7)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [loaded for loaded in sys.modules if loaded.startswith("accel_generated_0")]:
        monkeypatch.delitem(sys.modules, module)
    record = discover({}).get(name)

    assert len(attrs.fields(load(record, record.card.config))) == 7
    assert load(record, record.card.config)().option_0 == "none"


STARTED = """
import subprocess
import sys
from accel_core import Accelerator
Accelerator(cpu=True)
print(*(name for name in sys.modules if name.startswith("accel_core.")), "decimal" in sys.modules)
"""


def test_a_start_imports_no_more_than_it_needs(run_command):
    pytest.importorskip("torch")
    child = run_command([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True)
    *started, has_decimal = child.stdout.split()
    later = ("accel_core.data.", "accel_core.storage.codec")

    assert [name for name in started if name.startswith(later)] == ["accel_core.data.uneven"]
    assert "accel_core.training.prepare" not in started
    assert (has_decimal, len(started) <= 80) == ("False", True), started
