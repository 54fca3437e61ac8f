"""Accelerate's own tests, run on Accelerate and on accel-compat: what passes there passes here.

ACCEL_TEST_VENDOR names a folder with the source distribution of the release that is installed, and perhaps
the folder `test_configs` of its repository. The tests use Accelerate's own `test_utils`, whose scripts are
among them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from peers import needs_accelerate

from accel_compat.activation import VERSION

ARCHIVE = Path(os.environ.get("ACCEL_TEST_VENDOR", "."), f"accelerate-{VERSION}.tar.gz")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    needs_accelerate,
    pytest.mark.skipif(
        not ARCHIVE.is_file(), reason="Accelerate's source is not at hand (ACCEL_TEST_VENDOR)"
    ),
]
SP_IS_REFUSED = "sequence parallelism is refused with any model, so nothing looks at its layers"
SCRIPTS_ARE_NOT_OURS = "starts a script below the folder of the package `accelerate`, which has none here"
NAMES_INSIDE = "replaces a name inside a module of Accelerate's that only names ours here"
DIFFERENT = {
    "test_big_modeling.py": {
        "test_allows_full_attention": SP_IS_REFUSED,
        "test_allows_models_without_layer_types": SP_IS_REFUSED,
        "test_refuses_linear_attention": SP_IS_REFUSED,
    },
    "test_cli.py": {
        "test_executable_not_found": NAMES_INSIDE,
        "test_config_already_fsdp2": NAMES_INSIDE,
        "test_config_compatibility": SCRIPTS_ARE_NOT_OURS,
        "test_no_config": SCRIPTS_ARE_NOT_OURS,
    },
}
"""File -> test that passes there and not here -> why."""
CONFIGS = "test_configs"
READ_CONFIGS = {"test_config_already_fsdp2", "test_config_compatibility"}
"""Those of them that fail on Accelerate too without the folder, which the source distribution lacks."""
FILES = """
accelerator activation_checkpointing_offload big_modeling cli compile cpu data_loader dataclasses fp8
grad_sync hooks imports kwargs_handlers launch load_checkpoint_and_dispatch_with_broadcast logging
memory_utils metrics modeling_utils multidevice offload optimizer quantization sagemaker scheduler
state_checkpointing tpu tracking utils
""".split()  # noqa: SIM905
"""All but test_examples, whose scripts download their data."""
THEIR_TEST_UTILS = """
import importlib.util, pathlib, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] != ["accelerate", "test_utils"]:
            return None
        place = pathlib.Path(FOLDER).joinpath(*name.split("."))
        if place.is_dir():
            folders = [str(place)]
            return importlib.util.spec_from_file_location(
                name, place / "__init__.py", submodule_search_locations=folders
            )
        return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))

import accelerate  # which puts its own finder first

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The folder of the unpacked distribution, beside a folder for the search path of our side."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    (folder / "path").mkdir()
    source = folder / f"accelerate-{VERSION}"
    if (configs := ARCHIVE.parent / CONFIGS).is_dir():
        shutil.copytree(configs, source / "tests" / CONFIGS)
    finder = THEIR_TEST_UTILS.replace("FOLDER", repr(str(source / "src")))
    (folder / "path" / "sitecustomize.py").write_text(textwrap.dedent(finder))
    return source


def passed(run_command, sources: Path, name: str, *, ours: bool) -> set[str]:
    """The tests of a file that pass."""
    paths = {"PYTHONPATH": str(sources), "ACCEL_COMPAT": "0"}
    if ours:
        paths = {"PYTHONPATH": f"{sources.parent / 'path'}:{sources}", "ACCEL_COMPAT": "1"}
    report = sources.parent / f"{name}.{'ours' if ours else 'theirs'}.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:accel"]
    run_command(
        [*words, "--timeout", "300", f"--junitxml={report}", f"tests/{name}"],
        cwd=sources,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **paths},
        capture_output=True,
        timeout=850,
        check=False,
    )
    return set(names_of_passed(report))


def names_of_passed(report: Path) -> Iterator[str]:
    for case in ET.parse(report).getroot().iter("testcase"):
        if all(case.find(outcome) is None for outcome in ("failure", "error", "skipped")):
            yield str(case.get("name"))


@pytest.mark.parametrize("name", [f"test_{each}.py" for each in FILES])
def test_what_passes_on_accelerate_passes_here(sources, name, run_command):
    theirs, ours = (passed(run_command, sources, name, ours=each) for each in (False, True))

    has_configs = (sources / "tests" / CONFIGS).is_dir()
    assert theirs - ours == set(DIFFERENT.get(name, ())) - (set() if has_configs else READ_CONFIGS)
