"""The command for a day with a GPU runs on a machine without one: to a clear message, and in rehearsal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from accel_testing.patience import patience

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_proof.py"


def prove(run_command, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(folder), "--jobs", "2", *arguments]
    return run_command(command, capture_output=True, text=True, timeout=250, check=False)


def parts(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "proof.json").read_text())["parts"]
    return {part["name"]: part["result"] for part in found}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_so(tmp_path, run_command):
    ended = prove(run_command, tmp_path)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.startswith("no accelerator: torch ")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", ["cuda", "typo"])
def test_a_device_that_this_machine_lacks_is_named(tmp_path, device, run_command):
    ended = prove(run_command, tmp_path, "--device", device)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.startswith(f"no {device}: torch {torch.__version__} sees none on this machine\n")


def test_a_file_in_the_place_of_its_folder_is_left_alone(tmp_path, run_command):
    (tmp_path / "notes").write_text("mine")
    ended = prove(run_command, tmp_path / "notes")
    assert ended.returncode == 2
    assert ended.stderr.endswith("notes is a file: name a folder\n")
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.full
@pytest.mark.simulated
def test_it_can_be_rehearsed_on_the_simulated_device(tmp_path, run_command):
    ended = prove(run_command, tmp_path, "--device", "sim", "-k", "a step waits for nothing")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("| ok | 8 batches |") == 3
    assert parts(tmp_path) == {f"a step waits for nothing, {each}": "ok" for each in ("no", "bf16", "fp16")}


@pytest.mark.full
@pytest.mark.simulated
def test_a_check_that_this_machine_cannot_make_says_why(tmp_path, run_command):
    ended = prove(run_command, tmp_path, "--device", "sim", "-k", "pinned")
    assert ended.returncode == 0, ended.stdout
    assert "| not here | torch pins no memory for sim |" in ended.stdout


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_on_the_cpu_what_needs_cuda_is_named_and_left_out(tmp_path, run_command):
    ended = prove(run_command, tmp_path, "--device", "cpu", "-k", "cuda")
    assert ended.returncode == 0, ended.stdout
    stacks = ("cuda", "cuda+bf16", "cuda+fp16", "cuda+fsdp")
    assert parts(tmp_path) == dict.fromkeys((f"kit: {stack}" for stack in stacks), "not here")
    assert "| kit: cuda+bf16 | not here | 0.0 | needs a CUDA device |" in (tmp_path / "proof.md").read_text()


@pytest.mark.full
def test_what_a_part_measures_is_in_both_files(tmp_path, run_command):
    ended = prove(run_command, tmp_path, "--device", "cpu", "-k", "Llama")
    assert ended.returncode == 0, ended.stdout
    (part,) = json.loads((tmp_path / "proof.json").read_text())["parts"]
    names = [line.split("|")[1].strip() for line in part["tables"][2:]]
    assert (names[0], names[-1]) == ("by hand", "accel-core")
    assert "\n".join(part["tables"]) in (tmp_path / "proof.md").read_text()


def test_at_its_limit_it_ends_with_what_it_has(tmp_path, run_command):
    ended = prove(run_command, tmp_path, "--device", "cpu", "--limit", "0", "-k", "benchmark")
    assert ended.returncode == 0, ended.stderr
    names = ("batches", "step", "loader")
    found = {name for name, result in parts(tmp_path).items() if result == "out of time"}
    assert found >= {f"benchmark: {name}" for name in names}


def test_words_that_are_in_no_name_are_an_error(tmp_path, run_command):
    ended = prove(run_command, tmp_path, "--device", "cpu", "-k", "no such part")
    assert ended.returncode == 2
    assert "nothing has 'no such part' in its name" in ended.stdout


LONG = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import gpu_proof
sleeps = (sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
gpu_proof.parts = lambda device: [gpu_proof.Part("a long one", sleeps, 600, cuda=False)]
sys.exit(gpu_proof.main())
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_a_run_that_is_terminated_ends_what_it_started(tmp_path, start_command):
    words = ("--out", str(tmp_path), "--device", "cpu", "-k", "a long one")
    running = start_command([sys.executable, "-c", LONG, str(SCRIPT.parent), *words])
    log, ends = tmp_path / "a-long-one.log", time.monotonic() + patience(120)
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < ends
        time.sleep(0.1)
    time.sleep(5)  # the part runs, and now it is waited for

    running.terminate()

    assert running.wait(patience(60)) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.full
def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch, run_command):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu_proof import Part, done

    child = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    starts = f"import subprocess, sys; p = subprocess.Popen({child}); print(p.pid, flush=True); p.wait()"
    part = Part("a: long one", (sys.executable, "-c", starts), 600, cuda=False)

    result, printed = done(part, "cpu", tmp_path, 10)

    assert result == "out of time"
    assert (tmp_path / "a-long-one.log").read_text() == printed
    started = Path("/proc", printed.strip(), "cmdline")
    ends = time.monotonic() + patience(60)
    with suppress(OSError):  # it has ended
        while started.read_text():  # until the signal has arrived; a zombie has none
            assert time.monotonic() < ends
            time.sleep(0.1)
