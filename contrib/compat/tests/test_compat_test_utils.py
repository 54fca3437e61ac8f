"""`accelerate.test_utils`, which tests of other libraries import."""

from __future__ import annotations

import os
import sys
import unittest

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.test_utils import (
    RegressionDataset,
    RegressionModel,
    are_the_same_tensors,
    assert_exception,
    capture_call_output,
    execute_subprocess_async,
    get_launch_command,
    path_in_accelerate_package,
    require_cpu,
    require_multi_device,
    require_non_cpu,
    require_torch_min_version,
    slow,
    torch_device,
)
from accelerate.test_utils.testing import (
    AccelerateTestCase,
    MockingTestCase,
    SubprocessCallException,
    TempDirTestCase,
    get_backend,
    run_command,
)
from peers import needs_accelerate, said

on_the_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@on_the_cpu
def test_programs_ask_it_for_the_device():
    """Those of transformers' documentation do, outside of tests."""
    device, count, allocated = get_backend()
    assert (device, count, allocated()) == ("cpu", 1, 0)


def is_skipped(decorate):
    @decorate
    class Some(unittest.TestCase):
        pass

    return getattr(Some, "__unittest_skip__", False)


@on_the_cpu
def test_tests_are_skipped_where_what_they_need_is_absent(monkeypatch):
    assert torch_device == "cpu"
    assert [is_skipped(each) for each in (require_cpu, require_non_cpu, require_multi_device)] == [
        False,
        True,
        True,
    ]
    assert not is_skipped(require_torch_min_version(version="2.0.0"))
    assert is_skipped(require_torch_min_version(version="99.0.0"))
    assert is_skipped(slow)
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert not is_skipped(slow)


@needs_accelerate
def test_each_requirement_of_accelerates_is_there_and_decides_alike(run_processes):
    code = """
    import json, unittest
    from accelerate.test_utils import testing

    answers = {}
    for name in sorted(vars(testing)):
        if name.startswith("require_") and name != "require_torch_min_version":
            case = getattr(testing, name)(type("Case", (unittest.TestCase,), {}))
            answers[name] = getattr(case, "__unittest_skip__", False)
    print(json.dumps(answers))
    """
    theirs, ours = said(run_processes, code, ours=False), said(run_processes, code, ours=True)

    assert {name: ours.get(name) for name in theirs} == theirs


def test_a_command_that_fails_says_what_it_printed(start_command):
    fails = [sys.executable, "-c", "import sys; sys.exit('too bad')"]
    with pytest.raises(RuntimeError, match="too bad"):
        execute_subprocess_async(fails, quiet=True)
    with pytest.raises(SubprocessCallException, match="too bad"):
        run_command(fails)


def test_what_a_command_prints_is_returned(capsys, start_command):
    speaks = [sys.executable, "-c", "print('one'); print('two')"]

    assert execute_subprocess_async(speaks, env=os.environ.copy()).stdout == ["one", "two"]
    assert "stdout: two" in capsys.readouterr().out
    assert run_command(speaks, return_stdout=True).split() == ["one", "two"]
    assert capture_call_output(print, "three") == "three\n"


def test_a_command_that_does_not_end_is_killed(start_command):
    with pytest.raises(TimeoutError):
        execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(600)"], timeout=2)


def test_a_launch_command_has_the_flags():
    command = get_launch_command(num_processes=2, use_fsdp=True, config_file=None)

    assert command == ["accelerate", "launch", "--num_processes=2", "--use_fsdp"]
    assert path_in_accelerate_package("utils", "operations.py").is_file()


def test_an_exception_is_asserted():
    with assert_exception(ValueError, "so"):
        raise ValueError("and so on")
    with (
        pytest.raises(AssertionError, match="Expected message 'other'"),
        assert_exception(ValueError, "other"),
    ):
        raise ValueError("and so on")
    with pytest.raises(AssertionError, match="ran without issue"), assert_exception(ValueError):
        pass


def test_cases_keep_a_folder_forget_states_and_stop_mocks():
    class Case(TempDirTestCase, AccelerateTestCase, MockingTestCase):
        seen = ()

        def setUp(self):
            super().setUp()
            self.add_mocks(unittest.mock.patch.dict(os.environ, {"IN_A_CASE": "1"}))

        def test_first(self):
            self.tmpdir.joinpath("left").write_text("")
            Accelerator(cpu=True)
            assert are_the_same_tensors(torch.ones(2))
            assert os.environ["IN_A_CASE"] == "1"

        def test_second(self):
            assert not list(self.tmpdir.iterdir())
            assert not PartialState._shared_state

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)

    assert (result.testsRun, result.errors, result.failures) == (2, [], [])
    assert "IN_A_CASE" not in os.environ
    assert not Case.tmpdir.exists()


def test_the_smallest_model_learns_its_line():
    data, model = RegressionDataset(length=32, seed=1), RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(50):
        loss = (model(torch.tensor(data.x)) - torch.tensor(data.y)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert (model.a.item(), model.b.item()) == pytest.approx((2, 3), abs=0.2)
