"""The examples of Accelerate's documentation run as they are written there, or say what to write instead."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import accelerate
import pytest
import torch
from documented import MISNAMED, NEED_A_PACKAGE, REFUSED, RUN
from peers import OURS

from accel_core import PluginError

PAGES = {"kwargs": 6, "utilities": 10, "profiling": 1, "configuration": 5, "accelerator": 1}
"""Page -> how many examples it has."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What an example writes into its folder or its environment stays with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOO", "")
    monkeypatch.delenv("FOO")


def run(code: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(code, {"Accelerator": accelerate.Accelerator, "model": model, "optimizer": optimizer})


def test_each_example_is_here_once():
    numbers = [f"{page} {number + 1}" for page, last in PAGES.items() for number in range(last)]
    assert sorted([*RUN, *NEED_A_PACKAGE, *REFUSED]) == sorted(numbers)


@pytest.mark.parametrize("number", RUN)
def test_an_example_runs(number):
    run(RUN[number])


@pytest.mark.parametrize("number", REFUSED)
def test_what_cannot_run_says_what_to_write_instead(number):
    _, code, wanted = REFUSED[number]
    kind, _, text = wanted.partition(": ")
    with pytest.raises(Exception, match=text) as caught:
        run(code)
    assert caught.type.__name__ == kind


@pytest.mark.parametrize("number", NEED_A_PACKAGE)
def test_an_example_names_the_package_it_needs(number, monkeypatch):
    package, code = NEED_A_PACKAGE[number]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    folder = package.removeprefix("accel_").replace("_", "-")
    with pytest.raises(PluginError, match=f"pip install ./backends/{folder}"):
        run(code)


@pytest.mark.full
@pytest.mark.parametrize("number", NEED_A_PACKAGE)
def test_an_example_runs_with_its_package(number, run_command):
    package, code = NEED_A_PACKAGE[number]
    pytest.importorskip(package)
    if package == "accel_transformer_engine" and find_spec("transformer_engine") is None:
        pytest.skip("transformer-engine, which needs CUDA, is not installed")
    done = run_command(
        [sys.executable, "-c", OURS + code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", MISNAMED)
def test_an_argument_that_there_is_not_is_answered_with_those_there_are(name):
    for argument, text in MISNAMED[name].items():
        with pytest.raises(TypeError, match=text):
            getattr(accelerate.utils, name)(**{argument: None})


def test_variables_are_patched_inside_only(capsys):
    with pytest.raises(KeyError):
        run(REFUSED["utilities 6"][1])
    assert capsys.readouterr().out == "bar\n"
    assert "FOO" not in os.environ


def test_the_environment_is_cleared_inside_only(capsys):
    run(RUN["utilities 7"])
    assert capsys.readouterr().out == "environ({})\nnew_bar\nbar\n"


def test_variables_that_a_function_leaves_behind_are_purged():
    @accelerate.utils.purge_accelerate_environment
    def arguments_of_a_trainer() -> None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"

    arguments_of_a_trainer()
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_fp16_of_the_first_versions_is_the_mixed_precision_of_today():
    assert accelerate.Accelerator(cpu=True, fp16=True).mixed_precision == "fp16"


def test_what_the_pages_import_is_where_they_import_it_from():
    assert accelerate.utils.is_ipex_available() is (find_spec("intel_extension_for_pytorch") is not None)
    assert accelerate.ProjectConfiguration is accelerate.utils.ProjectConfiguration


def test_megatron_is_there_by_the_name_of_its_distribution(monkeypatch):
    from accel_compat.environment import libraries

    installed = ("megatron", "megatron-core")
    monkeypatch.setattr(libraries, "_is_package_available", lambda *names: names == installed)
    monkeypatch.setattr(libraries, "compare_versions", lambda name, *_: name == "megatron-core")
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    assert not accelerate.utils.is_megatron_lm_available()

    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert accelerate.utils.is_megatron_lm_available()


def test_a_basic_config_is_written_once(tmp_path):
    from accelerate.utils import write_basic_config

    from accel_compat.launch.request import read_file

    file = tmp_path / "default_config.yaml"
    assert write_basic_config(mixed_precision="bf16", save_location=str(file)) == file
    assert read_file(str(file))["mixed_precision"] == "bf16"
    assert write_basic_config(save_location=str(file)) is False
