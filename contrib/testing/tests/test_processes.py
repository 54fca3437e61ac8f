"""The process harness: clean worlds, results by rank, failures with their reason."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import textwrap
import time
import types
import warnings
from pathlib import Path

import hanging_rank
import pytest

from accel_testing import processes
from accel_testing.patience import PATIENCE
from accel_testing.processes import ProcessError

MARK: list[int] = []


def variables(*names: str) -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in names)


def all_reduce(value: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def leave_a_mark() -> int:
    MARK.append(1)
    return len(MARK)


def raise_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        print("about to fail")
        raise ValueError("no such luck")
    time.sleep(60)


def die_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        os._exit(7)
    time.sleep(60)


def fail_one_after_the_other(folder: str) -> None:
    here = Path(folder)
    if os.environ["RANK"] == "0":
        atexit.register(time.sleep, 1)  # it reports after the other
        try:
            raise ValueError("the cause")
        finally:
            (here / "failed").touch()
    while not (here / "failed").exists():
        time.sleep(0.001)
    time.sleep(0.1)
    raise RuntimeError("the consequence")


def abort_or_fail() -> None:
    if os.environ["RANK"] == "0":
        os.abort()
    time.sleep(0.5)
    raise ValueError("the cause")


def leave_by_exit() -> None:
    sys.exit(3)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def remember_at_exit(file: str) -> None:
    atexit.register(Path(file).write_text, "ended")


def pid() -> int:
    return os.getpid()


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_in_rank_order_with_launcher_variables(run_processes) -> None:
    found = run_processes(variables, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", world=3)
    assert found == [(str(rank), str(rank), "3", "3") for rank in range(3)]


def test_ranks_form_a_process_group(run_processes) -> None:
    assert run_processes(all_reduce, 10) == [21.0, 21.0]


def test_a_second_world_rendezvous_again_in_clean_processes(run_processes) -> None:
    assert run_processes(leave_a_mark) == [1, 1]
    assert run_processes(leave_a_mark) == [1, 1]


def test_the_callers_environment_and_the_given_one_arrive(
    monkeypatch: pytest.MonkeyPatch, run_processes
) -> None:
    monkeypatch.setenv("ACCEL_TEST_CALLER", "here")
    monkeypatch.setenv("ACCEL_TEST_UNSET", "gone")
    found = run_processes(
        variables,
        *("ACCEL_TEST_CALLER", "ACCEL_TEST_GIVEN", "ACCEL_TEST_UNSET"),
        world=1,
        environment={"ACCEL_TEST_GIVEN": "there", "ACCEL_TEST_UNSET": None},
    )
    assert found == [("here", "there", None)]


def test_the_failing_rank_is_named_with_its_traceback_and_output(run_processes) -> None:
    with pytest.raises(ProcessError, match="rank 1 of 2 failed") as caught:
        run_processes(raise_on, 1)
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")
    assert "in raise_on" in caught.value.text
    assert "no such luck" in caught.value.text
    assert caught.value.output == "about to fail"


def test_a_rank_that_dies_is_named_with_its_exit_code(run_processes) -> None:
    with pytest.raises(ProcessError, match="rank 0 of 2 failed") as caught:
        run_processes(die_on, 0)
    assert caught.value.kind == "exit 7"


def test_the_rank_that_failed_first_is_named_though_it_reports_last(tmp_path: Path, run_processes) -> None:
    with pytest.raises(ProcessError, match="the cause") as caught:
        run_processes(fail_one_after_the_other, str(tmp_path))
    assert (caught.value.rank, caught.value.kind) == (0, "ValueError")


def test_a_rank_that_aborted_is_not_the_cause_where_another_failed(run_processes) -> None:
    with pytest.raises(ProcessError, match="the cause") as caught:
        run_processes(abort_or_fail)
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")


def test_a_rank_that_hangs_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch, run_processes) -> None:
    monkeypatch.setenv(PATIENCE, "1")
    with pytest.raises(ProcessError, match=r"ranks \[1\] of 2 had not returned after 2 s") as caught:
        run_processes(hanging_rank.hang_on, 1, timeout=2)
    assert "in hang_on" in caught.value.text


def test_leaving_by_exit_is_a_failure(run_processes) -> None:
    with pytest.raises(ProcessError) as caught:
        run_processes(leave_by_exit, world=1)
    assert caught.value.kind == "SystemExit"


def test_warning_filters_of_the_caller_hold_in_the_workers(run_processes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ProcessError, match="UserWarning: careful"):
            run_processes(warn, world=1)
        warnings.simplefilter("ignore")
        run_processes(warn, world=1)


def test_exit_functions_run_before_the_result_arrives(tmp_path: Path, run_processes) -> None:
    run_processes(remember_at_exit, str(tmp_path / "end"), world=1)
    assert (tmp_path / "end").read_text() == "ended"


def test_no_process_is_left_behind(run_processes) -> None:
    assert not any(alive(process) for process in run_processes(pid, world=2))


def test_functions_of_a_file_that_a_test_runner_named_may_be_arguments(tmp_path, monkeypatch, run_processes):
    """As with pytest's import mode "importlib", which imports files under names that no path knows."""
    file = tmp_path / "test_it.py"
    file.write_text("def call(function): return function()\ndef answer(): return 42\n")
    spec = importlib.util.spec_from_file_location("nowhere.inner.test_it", file)
    module = importlib.util.module_from_spec(spec)
    for name in ("nowhere", "nowhere.inner"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "nowhere.inner.test_it", module)
    spec.loader.exec_module(module)

    assert run_processes(module.call, module.answer, world=1) == [42]


def test_no_other_harness_takes_the_port_of_a_world_that_is_about_to_start(monkeypatch):
    monkeypatch.setattr("random.SystemRandom.sample", lambda self, ports, count: [*ports][:100])
    with processes.reserved_port() as first, processes.reserved_port() as second:
        assert first < second


def test_a_preloaded_module_that_fails_is_named(tmp_path: Path, run_command) -> None:
    (tmp_path / "failing.py").write_text("raise RuntimeError('no driver')")
    program = "from accel_testing import run_processes\nrun_processes(print, 1)\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ACCEL_TEST_PRELOAD": "failing"}

    ended = run_command(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )

    assert "RuntimeError: no driver" in ended.stderr
    assert "the process that workers are forked from has ended" in ended.stderr
    assert "ACCEL_TEST_PRELOAD names: failing" in ended.stderr


THREADS = """
import os
from concurrent.futures import ThreadPoolExecutor
from accel_testing import run_processes

with ThreadPoolExecutor(4) as threads:
    started = [threads.submit(run_processes, os.getenv, "PYTHONSAFEPATH", world=1) for _ in range(4)]
print([each.result() for each in started], os.getenv("PYTHONSAFEPATH"))
"""


def test_worlds_of_several_threads_have_the_callers_environment_and_it_stays(run_command) -> None:
    program = f"if __name__ == '__main__':\n{textwrap.indent(THREADS, '    ')}"

    ended = run_command([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.stdout.splitlines() == ["[[None], [None], [None], [None]] None"], ended.stderr
