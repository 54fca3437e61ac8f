"""A store that accepts connections and never answers: waits end, and so does the process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import stored_job as job
import tiers_job
import torch
from s3_server import BUCKET, Request, S3Server

from accel_core import Accelerator, CheckpointError, InitProcessGroupKwargs
from accel_core.checkpoint import votes
from accel_stores import store
from accel_testing.patience import patience

STORE = f"s3://{BUCKET}/run"
SCRIPT = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    from datetime import timedelta
    sys.path.insert(0, {tests!r})
    import s3fs, stored_job as job, tiers_job
    from accel_core import InitProcessGroupKwargs, ProjectConfiguration
    quick = [InitProcessGroupKwargs(timeout=timedelta(seconds={timeout}))]

    def hang():
        os.environ["AWS_ENDPOINT_URL"] = {silent!r}
        s3fs.S3FileSystem.clear_instance_cache()

    def made(store, folder, **options):
        named = dict(automatic_checkpoint_naming=True, record_every=0, **options)
        project = ProjectConfiguration(project_dir=folder, store=store, **named)
        return job.made(project_config=project, kwargs_handlers=quick)

    {script}
"""
COPIED = """
    accelerator, model, optimizer = made({store!r}, {folder!r})
    job.step(accelerator, model, optimizer)
    hang()
    accelerator.save_state()
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """Give the URL of a server that accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = list[socket.socket]()

        def accept() -> None:
            while True:
                try:
                    accepted.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for each in accepted:
            each.close()


def started(
    start_command, script: str, silent: str, tmp_path: Path, timeout: int = 1
) -> subprocess.Popen[str]:
    script = textwrap.dedent(script.format(store=STORE, folder=str(tmp_path)))
    tests = str(Path(__file__).parent)
    text = textwrap.dedent(SCRIPT).format(tests=tests, silent=silent, script=script, timeout=timeout)
    command = [sys.executable, "-u", "-c", text]
    return start_command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def waiting(process: subprocess.Popen[str]) -> None:
    """Return a while after the script says that it waits."""
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    time.sleep(2)


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """Return what the process has said on stderr; it ends in this time."""
    begun = time.monotonic()
    try:
        _, said = process.communicate(timeout=patience(60))
    finally:
        process.kill()
    assert time.monotonic() - begun < seconds
    return said


@pytest.mark.full
@pytest.mark.parametrize("last", ["accelerator.end_training()", "pass"])
def test_a_copy_that_gets_no_answer_is_given_up_and_its_local_checkpoint_named(
    s3: S3Server, silent: str, tmp_path: Path, last: str, start_command
) -> None:
    process = started(start_command, f'{COPIED}\n    print("waits")\n    {last}\n', silent, tmp_path)
    waiting(process)
    said = ended(process, 50)
    assert process.returncode == 1
    assert f"the copy of checkpoint_0 to {STORE} was not over after 10 s" in said
    assert f"{tmp_path}/checkpoints/checkpoint_0 is whole" in said
    place, _ = tiers_job.resumed(str(tmp_path), STORE)
    assert place == f"{tmp_path}/checkpoints/checkpoint_0"
    assert any(key.startswith("run/checkpoints/checkpoint_0/manifest-") for key in s3.names()), "made up"


@pytest.mark.full
@pytest.mark.parametrize("last", ["accelerator.end_training()", "pass"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_copy_and_the_process_at_once(
    s3: S3Server, silent: str, tmp_path: Path, number: signal.Signals, last: str, start_command
) -> None:
    """A script that just ends did not hear SIGTERM after `save_on_preemption`."""
    script = f'{COPIED}    accelerator.save_on_preemption()\n    print("waits")\n    {last}\n'
    process = started(start_command, script, silent, tmp_path, timeout=9)
    waiting(process)
    process.send_signal(number)
    said = ended(process, 30)
    assert process.returncode not in (0, None)
    if number == signal.SIGINT or last == "pass":
        assert f"the copy of checkpoint_0 to {STORE} was not over when its wait was interrupted" in said
        assert f"{tmp_path}/checkpoints/checkpoint_0 is whole" in said


@pytest.mark.full
@pytest.mark.parametrize("last", ["accelerator.end_training()", "pass"])
def test_a_second_sigterm_ends_the_wait_for_the_copy_of_the_last_save(
    s3: S3Server, silent: str, tmp_path: Path, last: str, start_command
) -> None:
    script = f"""
    import time
    accelerator, model, optimizer = made({{store!r}}, {{folder!r}})
    accelerator.save_on_preemption()
    print("waits")
    while not accelerator.save_on_preemption():
        time.sleep(0.1)
        hang()
    print("waits", flush=True)
    {last}
    """
    process = started(start_command, script, silent, tmp_path, timeout=9)
    waiting(process)
    process.send_signal(signal.SIGTERM)
    waiting(process)
    process.send_signal(signal.SIGTERM)
    said = ended(process, 30)
    assert process.returncode not in (0, None)
    assert f"the copy of checkpoint_0 to {STORE} was not over when its wait was interrupted" in said
    assert f"{tmp_path}/checkpoints/checkpoint_0 is whole" in said


@pytest.mark.full
def test_a_save_goes_on_while_the_copy_before_gets_no_answer(
    s3: S3Server, silent: str, tmp_path: Path, start_command
) -> None:
    saves = "    accelerator.save_state()\n" * 2
    script = f'{COPIED}\n    print("waits")\n{saves}\n    accelerator.end_training()\n'
    process = started(
        start_command, script.replace("folder!r}", "folder!r}, total_limit=1"), silent, tmp_path
    )
    waiting(process)
    said = ended(process, 55)
    assert said.count("was not over after 10 s") == 3, "the saves' warnings, and the end's error"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_2",
    ], "total_limit leaves the one whose copy is not made"


def test_a_save_to_a_store_that_gets_no_answer_is_given_up(
    s3: S3Server, silent: str, tmp_path: Path, start_command
) -> None:
    script = """
    accelerator, model, optimizer = job.made(kwargs_handlers=quick)
    accelerator.save_state("{store}/ck")
    from accel_core.checkpoint import stored_target
    write = stored_target.StoredTarget.write
    def hanging(*given):
        hang()
        return write(*given)
    stored_target.StoredTarget.write = hanging
    job.step(accelerator, model, optimizer)
    accelerator.save_state("{store}/ck", wait=False)
    print("waits")
    accelerator.end_training()
    """
    process = started(start_command, script, silent, tmp_path)
    waiting(process)
    said = ended(process, 30)
    assert process.returncode == 1
    assert f"the save to {STORE}/ck failed; a checkpoint that was there is still whole" in said
    assert "it was not over after 10 s" in said
    assert torch.equal(job.loaded(f"{STORE}/ck"), job.weight(*job.made()[:2]))


WORKS = {
    "load": 'accelerator.load_state("{store}/ck")',
    "load-series": "accelerator.load_state()",
    "save": 'accelerator.save_state("{store}/ck")',
    "look": "made({store!r}, {folder!r})",
    "look-project": "made(None, {store!r})",
}


@pytest.mark.full
@pytest.mark.parametrize("work", WORKS)
def test_a_work_that_gets_no_answer_ends_in_time_and_so_does_the_process(
    s3: S3Server, silent: str, tmp_path: Path, work: str, start_command
) -> None:
    """It lasted as long as s3fs tries again: eight minutes."""
    script = """
    accelerator, model, optimizer = made(None, "{store}" if "series" in "WHAT" else {folder!r})
    accelerator.save_state("{store}/ck")
    hang()
    print("waits")
    """.replace("WHAT", work)
    process = started(start_command, f"{script}{WORKS[work]}\n", silent, tmp_path)
    waiting(process)
    said = ended(process, 45)
    assert process.returncode == 1
    assert "CheckpointError" in said or "UnreadableError" in said
    assert re.search(f"{STORE}.* NoAnswerError: no answer to list_stored within 10 s", said)
    assert "look after the store" in said


@pytest.mark.full
def test_list_and_verify_end_at_once_by_an_interrupt(s3: S3Server, silent: str, start_command) -> None:
    for command in ("list", "verify"):
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"sys.argv[1:] = ['checkpoint', {command!r}, '{STORE}/ck']\n"
            "from accel_core.cli import main; main()"
        )
        environment = os.environ | {"AWS_ENDPOINT_URL": silent}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = start_command([sys.executable, "-c", code], env=environment, **options)  # type: ignore[call-overload]
        time.sleep(8)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        ended(process, 30)
        assert process.returncode not in (0, None)


def works_while_rank_0_hangs(url: str, work: str) -> str:
    """Load or save while rank 0 alone gets no answer; return the error."""
    votes.TIMEOUTS = 3  # type: ignore[misc]
    quick = [InitProcessGroupKwargs(timeout=timedelta(seconds=3))]
    accelerator, *_ = job.made(kwargs_handlers=quick)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        store._opened = lambda url: time.sleep(120)  # type: ignore[assignment, func-returns-value]
    with pytest.raises(CheckpointError) as caught:
        getattr(accelerator, f"{work}_state")(url)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return str(caught.value)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@pytest.mark.parametrize("work", ["load", "save"])
def test_ranks_give_a_work_up_together_when_one_alone_gets_no_answer(
    s3: S3Server, work: str, run_processes
) -> None:
    job.saved(f"{STORE}/ck", 1)
    for said in run_processes(works_while_rank_0_hangs, f"{STORE}/ck", work, world=2):
        assert "NoAnswerError: no answer to list_stored within 9 s" in said


def save_and_wait(accelerator: Accelerator, *, background: bool) -> None:
    accelerator.save_state(f"{STORE}/ck", wait=not background)
    accelerator.wait_for_checkpoint()


@pytest.mark.full
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("held", ["rank-00000.safetensors", "manifest.json", "manifest-00000002.json"])
def test_a_save_that_was_given_up_commits_nothing_that_is_not_on_its_way(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, held: str, background: bool
) -> None:
    """What came late went on to its commit: a save that had failed took the place of the one before."""
    monkeypatch.setattr(votes, "TIMEOUTS", 3)
    old = job.saved(f"{STORE}/ck", 1)
    over = threading.Event()

    def hold(request: Request) -> None:
        if request.method == "PUT" and request.name == held:
            over.wait(patience(50))

    quick = [InitProcessGroupKwargs(timeout=timedelta(seconds=1))]
    accelerator, model, optimizer = job.made(kwargs_handlers=quick)
    job.step(accelerator, model, optimizer)
    job.step(accelerator, model, optimizer)
    new = job.weight(accelerator, model)
    s3.fault = hold
    with pytest.raises(CheckpointError, match=r"no answer to \w+ within 3 s|was not over after 3 s"):
        save_and_wait(accelerator, background=background)
    over.set()
    time.sleep(3)
    s3.wait_until_idle()
    names = [key.rpartition("/")[2] for key in s3.names()]
    assert ("manifest-00000002.json" in names) == (held == "manifest-00000002.json")
    assert torch.equal(job.loaded(f"{STORE}/ck"), new if held == "manifest-00000002.json" else old)
    accelerator.save_state(f"{STORE}/ck")
    assert torch.equal(job.loaded(f"{STORE}/ck"), new)
    accelerator.end_training()


@pytest.mark.full
def test_a_manifest_that_comes_after_an_interrupt_finds_the_files_of_its_save(s3: S3Server) -> None:
    """The next save removed them: the folder held a commit of a checkpoint that was gone."""
    job.saved(f"{STORE}/ck", 1)
    held, over = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.method == "PUT" and request.name == "manifest-00000002.json":
            if held.is_set():  # of the next save
                over.set()
                time.sleep(1)
            else:
                held.set()
                over.wait(patience(60))

    def interrupt() -> None:
        assert held.wait(patience(60))
        time.sleep(0.3)
        signal.raise_signal(signal.SIGINT)

    accelerator, model, optimizer = job.made()
    job.step(accelerator, model, optimizer)
    job.step(accelerator, model, optimizer)
    interrupted = job.weight(accelerator, model)
    s3.fault = hold
    threading.Thread(target=interrupt).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(f"{STORE}/ck")
    signal.signal(signal.SIGINT, before)
    with pytest.raises(CheckpointError, match="KeyboardInterrupt"):
        accelerator.wait_for_checkpoint()
    job.step(accelerator, model, optimizer)
    with pytest.raises(CheckpointError, match="has changed while this save was written"):
        accelerator.save_state(f"{STORE}/ck")
    assert torch.equal(job.loaded(f"{STORE}/ck"), interrupted)
    accelerator.save_state(f"{STORE}/ck")
    assert torch.equal(job.loaded(f"{STORE}/ck"), job.weight(accelerator, model))
    accelerator.end_training()


@pytest.mark.full
def test_an_interrupted_load_waits_for_no_answer(
    s3: S3Server, silent: str, tmp_path: Path, start_command
) -> None:
    job.saved(f"{STORE}/ck", 1)
    asked, over = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.method == "GET" and request.name.endswith(".safetensors"):
            asked.set()
            over.wait(patience(60))

    s3.fault = hold
    process = started(start_command, '    job.made()[0].load_state("{store}/ck")\n', silent, tmp_path)
    assert asked.wait(patience(60))
    os.kill(process.pid, signal.SIGINT)
    ended(process, 30)
    over.set()


@pytest.mark.full
@pytest.mark.parametrize("project", ["{store!r}", "None"])
def test_a_script_that_just_ends_sends_all_though_the_library_needs_threads(
    s3: S3Server, silent: str, tmp_path: Path, project: str, start_command
) -> None:
    """As s3fs does, to look up a host: Python ends pools of threads before `atexit`."""
    script = """
    from concurrent.futures import ThreadPoolExecutor
    import time
    from accel_stores import store
    opened = store._opened
    def slowly(url):
        time.sleep(0.3)
        return ThreadPoolExecutor(1).submit(opened, url).result()
    accelerator, model, optimizer = made(PROJECT, {folder!r})
    store._opened = slowly
    accelerator.save_state(None if PROJECT else "{store}/checkpoints/checkpoint_0", wait=False)
    print("waits")
    """
    process = started(start_command, script.replace("PROJECT", project), silent, tmp_path)
    said = ended(process, 60)
    assert (process.returncode, said) == (0, "")
    assert "manifest-00000001.json" in [key.rpartition("/")[2] for key in s3.names()]
