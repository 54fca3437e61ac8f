"""Accelerate's own tests, run on Accelerate and on accel-compat: what passes there passes here.

ACCEL_TEST_VENDOR names a folder with the source distribution of the release that is installed, and perhaps
the folder `test_configs` of its repository.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from peers import needs_accelerate

from accel_compat.activation import VERSION

ARCHIVE = Path(os.environ.get("ACCEL_TEST_VENDOR", "."), f"accelerate-{VERSION}.tar.gz")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    needs_accelerate,
    pytest.mark.skipif(
        not ARCHIVE.is_file(), reason="Accelerate's source is not at hand (ACCEL_TEST_VENDOR)"
    ),
]
SP_IS_REFUSED = "sequence parallelism is refused with any model, so nothing looks at its layers"
SCRIPTS_ARE_NOT_OURS = "starts a script below the folder of the package `accelerate`, which has none here"
NAMES_INSIDE = "replaces a name inside a module of Accelerate's that only names ours here"
STAYS_ON_HOST = "asks for offloaded weights on the meta device; between forwards they are in host memory here"
DIFFERENT = {
    "test_big_modeling.py": {
        "test_allows_full_attention": SP_IS_REFUSED,
        "test_allows_models_without_layer_types": SP_IS_REFUSED,
        "test_refuses_linear_attention": SP_IS_REFUSED,
    },
    "test_cli.py": {
        "test_executable_not_found": NAMES_INSIDE,
        "test_mpi_multicpu_config_cmd": NAMES_INSIDE,
        "test_config_already_fsdp2": NAMES_INSIDE,
        "test_config_compatibility": SCRIPTS_ARE_NOT_OURS,
        "test_no_config": SCRIPTS_ARE_NOT_OURS,
    },
    "test_modeling_utils.py": {"test_align_module_device_offloaded": STAYS_ON_HOST},
}
"""File -> test that passes there and not here -> why."""
CONFIGS = "test_configs"
READ_CONFIGS = {"test_config_already_fsdp2", "test_config_compatibility", "test_mpi_multicpu_config_cmd"}
"""Those of them that fail on Accelerate too without the folder, which the source distribution lacks."""
MEASURES_THE_MACHINE = (
    "tests/test_accelerator.py::AcceleratorTester::test_free_memory_dereferences_prepared_components"
)
"""A test that compares the free memory of the whole machine, which other processes change meanwhile."""
FILES = """
accelerator activation_checkpointing_offload big_modeling cli compile cpu data_loader dataclasses fp8
grad_sync hooks imports kwargs_handlers launch load_checkpoint_and_dispatch_with_broadcast logging
memory_utils metrics modeling_utils multidevice offload optimizer quantization sagemaker scheduler
state_checkpointing tpu tracking utils
""".split()  # noqa: SIM905
"""All but test_examples, whose scripts download their data."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The folder of the unpacked distribution."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"accelerate-{VERSION}"
    if (configs := ARCHIVE.parent / CONFIGS).is_dir():
        shutil.copytree(configs, source / "tests" / CONFIGS)
    return source


def passed(run_command, sources: Path, *, ours: bool) -> set[tuple[str, str]]:
    """(file, test) of what passes, of all files in one process."""
    report = sources.parent / f"{'ours' if ours else 'theirs'}.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:accel"]
    words += ["--deselect", MEASURES_THE_MACHINE]
    paths = {"PYTHONPATH": str(sources), "ACCEL_COMPAT": str(int(ours))}
    run_command(
        [*words, "--timeout", "300", f"--junitxml={report}", *(f"tests/test_{each}.py" for each in FILES)],
        cwd=sources,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **paths},
        capture_output=True,
        timeout=1700,
        check=False,
    )
    return set(names_of_passed(report))


def names_of_passed(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).getroot().iter("testcase"):
        if all(case.find(outcome) is None for outcome in ("failure", "error", "skipped")):
            yield f"{str(case.get('classname')).split('.')[1]}.py", str(case.get("name"))


def test_what_passes_on_accelerate_passes_here(sources, run_command):
    theirs, ours = (passed(run_command, sources, ours=each) for each in (False, True))

    has_configs = (sources / "tests" / CONFIGS).is_dir()
    different = {(file, test) for file, tests in DIFFERENT.items() for test in tests}
    assert len(theirs) > 240
    assert theirs - ours == {each for each in different if has_configs or each[1] not in READ_CONFIGS}
