"""Loggers that know their rank, with and without an Accelerator."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta

import pytest

from accel_core import Accelerator, InitProcessGroupKwargs, get_logger
from accel_testing.patience import patience


@pytest.fixture
def logger(request):
    return get_logger(request.node.name, log_level="DEBUG")


def test_it_works_before_there_is_an_accelerator(logger, caplog):
    logger.warning("%d left", 3)
    logger.info("all ranks", main_process_only=False)
    logger.info("in turn", in_order=True)

    assert caplog.messages == ["[RANK 0] 3 left", "[RANK 0] all ranks", "[RANK 0] in turn"]


def test_it_imports_no_torch(run_command):
    code = "import accel_core, sys; accel_core.get_logger('x').error('y'); print('torch' in sys.modules)"
    result = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (result.stdout, result.stderr) == ("False\n", "[RANK 0] y\n")


def test_the_line_is_that_of_the_caller(logger, caplog):
    logger.info("here")
    logger.log(logging.INFO, "here")
    logger.warning_once("here")
    logger.info("above", stacklevel=2)

    assert [record.funcName for record in caplog.records[:3]] == ["test_the_line_is_that_of_the_caller"] * 3
    assert caplog.records[3].funcName == "pytest_pyfunc_call"


def test_the_level_may_come_from_the_environment(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    logger = get_logger("from_the_environment")
    logger.warning("no")
    logger.error("yes")

    assert caplog.messages == ["[RANK 0] yes"]
    assert logging.getLogger().level == logging.WARNING


def test_a_level_may_be_a_number_and_one_that_there_is_not_is_an_error(monkeypatch):
    assert get_logger("numbered", log_level=10).logger.level == logging.DEBUG
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("loud")


def test_warning_once_warns_once_for_each_message(logger, caplog):
    for _ in range(3):
        logger.warning_once("a %s", "b")
        logger.warning_once("a %s", "c")

        logger.warning_once("a %s", ["d"])

    assert caplog.messages == ["[RANK 0] a b", "[RANK 0] a c", "[RANK 0] a ['d']"]


def test_an_exception_brings_its_traceback(logger, caplog):
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("what")

    assert "ValueError: why" in caplog.text


def to(path):
    # One write a line, so that ranks do not mix them.
    logging.basicConfig(filename=path, format="%(message)s", level=logging.INFO)


def without_accelerator(path):
    to(path)
    logger = get_logger("ranks")
    logger.info("main")
    logger.info("all", main_process_only=False)


def test_ranks_are_known_from_the_launcher(tmp_path, run_processes):
    run_processes(without_accelerator, tmp_path / "log")

    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "[RANK 0] all",
        "[RANK 0] main",
        "[RANK 1] all",
    ]


def in_turn(path):
    to(path)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))]
    )
    logger = get_logger("ranks", log_level="INFO" if accelerator.process_index != 1 else "ERROR")
    for number in range(3):
        logger.info("%d", number, in_order=True)
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_in_order_goes_by_rank_and_waits_for_no_ones_level(tmp_path, run_processes):
    run_processes(in_turn, tmp_path / "log", world=3)

    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"[RANK {rank}] {number}" for number in range(3) for rank in (0, 2)]


def test_warning_once_is_once_a_process(logger, caplog):
    logger.warning_once("again")
    get_logger(logger.logger.name).warning_once("again")

    assert caplog.messages == ["[RANK 0] again"]


def test_a_level_that_was_asked_for_is_printed_also_where_nothing_sets_up_logging(run_command):
    code = "from accel_core import get_logger; get_logger('mine', log_level='INFO').info('seen')"
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["[RANK 0] seen"]
