"""A store that accepts connections and never answers: each request ends in bounded time."""

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
from pathlib import Path

import mirror_job
import pytest
import stored_job as job
import torch
from hub_server import REPOSITORY, HubServer
from s3_server import BUCKET, Request, S3Server

from accel_core import CheckpointError, storage_at
from accel_stores import files
from accel_stores import hub as hub_module
from accel_testing.patience import patience

STORE = f"s3://{BUCKET}/run"
SECONDS = 30
"""In which a few requests end, of three seconds each."""
SCRIPT = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    from datetime import timedelta
    sys.path.insert(0, {tests!r})
    import s3fs, stored_job as job
    from accel_core import InitProcessGroupKwargs, ProjectConfiguration
    from accel_stores import MirrorConfig, files
    files.REQUEST_SECONDS = {silence}
    quick = [InitProcessGroupKwargs(timeout=timedelta(seconds={timeout}))]

    def hang():
        os.environ["AWS_ENDPOINT_URL"] = {silent!r}
        s3fs.S3FileSystem.clear_instance_cache()

    def made(store, folder, **options):
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **options)
        plugins = [MirrorConfig(url=store, every=9)] if store else []
        return job.made(project_config=project, kwargs_handlers=quick, plugins=plugins)

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
    start_command, script: str, silent: str, tmp_path: Path, timeout: int = 1, silence: int = 3
) -> subprocess.Popen[str]:
    """Start a script. silence: seconds after which a request ends."""
    script = textwrap.dedent(script.format(store=STORE, folder=str(tmp_path)))
    told = {"tests": str(Path(__file__).parent), "silent": silent, "timeout": timeout, "silence": silence}
    text = textwrap.dedent(SCRIPT).format(script=script, **told)
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
    assert time.monotonic() - begun < patience(seconds)
    return said


# -- requests ------------------------------------------------------------------------------------------


WORKS = {
    "load": 'accelerator.load_state("{store}/ck")',
    "load-series": "accelerator.load_state()",
    "save": 'accelerator.save_state("{store}/ck")',
    "save-in-background": 'accelerator.save_state("{store}/ck", wait=False)',
    "look": "made({store!r}, {folder!r})",
    "look-project": "made(None, {store!r})",
}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.by_default("load", "save")
def test_a_work_that_gets_no_answer_ends_in_time_and_so_does_the_process(
    s3: S3Server, silent: str, tmp_path: Path, work: str, start_command
) -> None:
    script = """
    accelerator, model, optimizer = made(None, "{store}" if "series" in "WHAT" else {folder!r})
    accelerator.save_state("{store}/ck")
    hang()
    print("waits")
    """.replace("WHAT", work)
    process = started(start_command, f"{script}{WORKS[work]}\n", silent, tmp_path, timeout=60)
    waiting(process)
    said = ended(process, SECONDS)
    assert process.returncode == 1
    assert "CheckpointError" in said or "UnreadableError" in said
    assert re.search(f"{STORE}.* cannot be (reached|saved): .*imeout", said)
    assert torch.equal(job.loaded(f"{STORE}/ck"), job.weight(*job.made()[:2]))


def test_a_save_whose_files_get_no_answer_leaves_the_one_before(
    s3: S3Server, silent: str, tmp_path: Path, start_command
) -> None:
    script = """
    accelerator, model, optimizer = job.made()
    accelerator.save_state("{store}/ck")
    from accel_core.storage.pending import Share
    write = Share.write
    def hanging(*given):
        hang()
        return write(*given)
    Share.write = hanging
    job.step(accelerator, model, optimizer)
    accelerator.save_state("{store}/ck", wait=False)
    print("waits")
    accelerator.end_training()
    """
    process = started(start_command, script, silent, tmp_path)
    waiting(process)
    said = ended(process, 3 * SECONDS)
    assert process.returncode == 1
    assert f"the save to {STORE}/ck failed; a checkpoint that was there is still whole" in said
    assert torch.equal(job.loaded(f"{STORE}/ck"), job.weight(*job.made()[:2]))


def test_a_request_to_a_silent_hub_ends(hub: HubServer, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfFileSystem, close_session

    close_session()
    HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(hub_module, "SILENT_SECONDS", 0.2)
    over = threading.Event()
    hub.refuses = lambda method, path: over.wait(patience(60)) and None  # type: ignore[func-returns-value]
    folder = storage_at(f"hf://{REPOSITORY}/run")
    begun = time.monotonic()
    with pytest.raises(OSError, match="imeout|timed out"):
        folder.create("one", b"1")
    assert time.monotonic() - begun < patience(30)
    over.set()


@pytest.mark.full
def test_a_request_to_a_silent_hdfs_server_ends(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("requests")
    monkeypatch.setattr(files, "REQUEST_SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        storage_at(f"webhdfs://{silent.removeprefix('http://')}/folder").list()
    assert time.monotonic() - begun < patience(30)


# -- signals, and the end of a process -------------------------------------------------------------------


@pytest.mark.full
def test_list_and_verify_end_at_once_by_an_interrupt(s3: S3Server, silent: str, start_command) -> None:
    for work in ("storage_at(url).list()", "storage_at(url).local_cache('word').fetch('one', [(0, 1)])"):
        code = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"from accel_core import storage_at\nurl = '{STORE}/ck'\nprint('waits', flush=True)\n{work}"
        )
        environment = os.environ | {"AWS_ENDPOINT_URL": silent}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = start_command([sys.executable, "-c", code], env=environment, **options)  # type: ignore[call-overload]
        waiting(process)
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        ended(process, 15)
        assert process.returncode not in (0, None)


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
@pytest.mark.parametrize("store", [STORE, None])
def test_a_script_that_just_ends_sends_all_though_the_library_needs_threads(
    s3: S3Server, silent: str, tmp_path: Path, store: str | None, start_command
) -> None:
    """As s3fs does, to look up a host: Python ends pools of threads before `atexit`."""
    script = """
    import time
    from accel_stores import files
    opened = files._opened
    def slowly(url):
        from fsspec.asyn import get_loop, sync
        found = opened(url)
        loop = get_loop()
        async def pooled():
            await loop.run_in_executor(None, time.sleep, 0.3)
        sync(loop, pooled)
        return found
    accelerator, model, optimizer = made(STORE, {folder!r})
    files._opened = slowly
    accelerator.save_state(None if STORE else "{store}/checkpoints/checkpoint_0", wait=False)
    print("waits")
    """.replace("STORE", repr(store))
    process = started(start_command, script, silent, tmp_path, timeout=60, silence=9)
    waiting(process)
    said = ended(process, 60)
    assert (process.returncode, said) == (0, "")
    assert "manifest-00000001.json" in [key.rpartition("/")[2] for key in s3.names()]


# -- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["accelerator.end_training()", "pass"])
@pytest.mark.by_default("accelerator.end_training()")
def test_a_copy_that_gets_no_answer_is_given_up(
    s3: S3Server, silent: str, tmp_path: Path, last: str, start_command
) -> None:
    script = f'{COPIED}\n    print("waits")\n    {last}\n'
    process = started(start_command, script, silent, tmp_path, silence=60)
    waiting(process)
    said = ended(process, 30)
    assert process.returncode == 1
    assert f"the copy to {STORE}/checkpoints/checkpoint_0 failed" in said
    assert "it was not over after" in said
    (weight,) = mirror_job.trained(str(tmp_path), STORE, 1)
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_1"), weight), "the local one was whole"


@pytest.mark.full
def test_saves_that_are_not_due_go_on_while_a_copy_gets_no_answer(
    s3: S3Server, silent: str, tmp_path: Path, start_command
) -> None:
    saves = "    accelerator.save_state()\n" * 3
    script = f'{COPIED}{saves}    print("waits")\n    os._exit(7)\n'
    limited = script.replace("folder!r}", "folder!r}, total_limit=1")
    process = started(start_command, limited, silent, tmp_path, timeout=60, silence=60)
    begun = time.monotonic()
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    assert time.monotonic() - begun < patience(30)
    ended(process, 30)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["checkpoint_0", "checkpoint_3"], "total_limit leaves the one that is being copied"


@pytest.mark.full
@pytest.mark.parametrize("last", ["accelerator.end_training()", "pass"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_copy_and_the_process(
    s3: S3Server, silent: str, tmp_path: Path, number: signal.Signals, last: str, start_command
) -> None:
    script = f'{COPIED}    print("waits")\n    {last}\n'
    process = started(start_command, script, silent, tmp_path, timeout=9, silence=60)
    waiting(process)
    process.send_signal(number)
    ended(process, 15)
    assert process.returncode not in (0, None)
    assert (tmp_path / "checkpoints/checkpoint_0/manifest-00000001.json").exists()
