"""The conformance kit on XLA's CPU device, for real: with one device, and with four under SPMD."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla: tox -e xla-real")


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("stack", "options"),
    [("xla+bf16", ()), ("xla+xla-spmd", ("--accel-set", "xla_spmd.cpu_devices=4"))],
)
def test_it_conforms_on_xlas_cpu_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: str, options: tuple[str, ...], conform
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    options += ("--accel-world", "1", "--accel-level", "0,1,2,4")

    assert not conform(tmp_path, stack, *options).failed
