"""`accel launch` with real workers: what they see, how they end, and what is told of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from accel_core.launch.worker import command
from accel_testing.commands import ACCEL, clean_environment
from accel_testing.patience import patience
from accel_testing.processes import reserved_port

ALL_SEE = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCEL_RUN_ID", "PONY")
seen = {name: os.environ.get(name) for name in names}
seen.update(argv=sys.argv, name=__name__, file=__file__, path=sys.path[0], torch="torch" in sys.modules)
open(f"seen{os.environ['RANK']}", "w").write(json.dumps(seen))
print(f"rank {os.environ['RANK']} was here")
"""


def launch(
    accel, folder: Path, source: str, *flags: str, arguments: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    words = ("launch", "--device", "cpu", "-n", "2", *flags, "train.py", *arguments)
    return accel(*words, cwd=folder, environment=environment)


def seen(folder: Path) -> list[dict[str, object]]:
    return [json.loads((folder / f"seen{rank}").read_text()) for rank in (0, 1)]


def test_a_script_runs_in_each_worker_as_under_plain_python(tmp_path, accel):
    ended = launch(accel, tmp_path, ALL_SEE, arguments=("--lr", "0.1", "-n", "7"))

    assert ended.returncode == 0
    assert ended.stderr == "accel 0.1: 2 processes, device cpu, no config file\n"
    assert sorted(ended.stdout.splitlines()) == ["rank 0 was here", "rank 1 was here"]
    for rank, worker in enumerate(seen(tmp_path)):
        assert worker["argv"] == ["train.py", "--lr", "0.1", "-n", "7"]
        assert (worker["name"], worker["file"]) == ("__main__", str(tmp_path / "train.py"))
        assert worker["path"] == str(tmp_path)
        assert (worker["RANK"], worker["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (worker["WORLD_SIZE"], worker["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert worker["MASTER_ADDR"] == "127.0.0.1"
        assert worker["torch"] is False  # the script decides when to pay for it


def test_lines_of_workers_stay_whole_though_output_is_unbuffered(tmp_path, accel):
    halves = "import time; print('here ', end=''); time.sleep(0.5); print('I am')"

    ended = launch(accel, tmp_path, halves, PYTHONUNBUFFERED="1")

    assert ended.stdout == "here I am\n" * 2


def test_all_ranks_have_the_same_run_id(tmp_path, accel):
    launch(accel, tmp_path, ALL_SEE)

    first, second = seen(tmp_path)
    assert first["ACCEL_RUN_ID"]
    assert first["ACCEL_RUN_ID"] == second["ACCEL_RUN_ID"]


def test_a_run_id_of_the_user_is_kept(tmp_path, accel):
    launch(accel, tmp_path, ALL_SEE, ACCEL_RUN_ID="mine")

    assert {worker["ACCEL_RUN_ID"] for worker in seen(tmp_path)} == {"mine"}


@pytest.mark.full
def test_a_job_that_a_worker_launches_has_a_run_id_of_its_own(tmp_path, accel):
    (tmp_path / "inner.py").write_text("import os\nopen('inner', 'w').write(os.environ['ACCEL_RUN_ID'])")
    outer = """
import os, subprocess, sys
open("outer", "w").write(os.environ["ACCEL_RUN_ID"])
accel = os.path.join(os.path.dirname(sys.executable), "accel")
subprocess.run([accel, "launch", "--device", "cpu", "-n", "1", "inner.py"], check=True)
"""
    launch(accel, tmp_path, outer, "-n", "1")

    assert (tmp_path / "inner").read_text() != (tmp_path / "outer").read_text()


def test_a_module_runs_with_its_package_importable(tmp_path, accel):
    (tmp_path / "pony").mkdir()
    (tmp_path / "pony" / "__init__.py").write_text("")
    (tmp_path / "pony" / "gait.py").write_text("WORD = 'trot'")
    (tmp_path / "pony" / "run.py").write_text(
        "import sys\nfrom pony.gait import WORD\nprint(WORD, *sys.argv[1:])"
    )

    ended = accel("launch", "--device", "cpu", "-n", "1", "-m", "pony.run", "--fast", cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, "trot --fast\n")


def test_spawned_children_of_a_worker_find_the_scripts_functions(tmp_path, accel):
    source = """
import multiprocessing
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21]))
"""
    (tmp_path / "train.py").write_text(source)

    assert accel("launch", "--device", "cpu", "-n", "1", "train.py", cwd=tmp_path).stdout == "[42]\n"


MERGED = """
from accel_core.config.resolve import load
from accel_core.plugins.discovery import discover
resolved = load(discovery=discover())
print(resolved.config.gradient_accumulation_steps, resolved.origins["gradient_accumulation_steps"])
print(resolved.config.data.split_batches, resolved.origins["data.split_batches"])
print(resolved.config.device, resolved.config.strategy)
"""


def test_workers_get_the_merged_config_with_its_origins_and_auto_stays_auto(tmp_path, accel):
    (tmp_path / "accel.yaml").write_text("gradient_accumulation_steps: 4\n")

    ended = launch(accel, tmp_path, MERGED, "-n", "1", "--data.split-batches", "true")

    assert ended.stderr.startswith("accel 0.1: 1 process, device cpu, config accel.yaml\n")
    assert ended.stdout.splitlines()[0].startswith("4 ")
    assert "accel.yaml" in ended.stdout.splitlines()[0]
    assert ended.stdout.splitlines()[1] == "True flag --data.split-batches"
    assert ended.stdout.splitlines()[2] == "cpu auto"


# -- failures --------------------------------------------------------------------------------------


def test_the_first_failing_rank_is_named_and_only_its_traceback_shown(tmp_path, accel):
    source = """
import os, time
if os.environ["RANK"] == "0":
    note = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error", "/1/error")
    while not os.path.exists(note): time.sleep(0.001)
    raise RuntimeError("the peer is gone")
raise ValueError("bad batch\\nmore")
"""
    ended = launch(accel, tmp_path, source)

    assert ended.returncode == 1
    assert ended.stderr == (
        "accel 0.1: 2 processes, device cpu, no config file\n"
        "accel: rank 1 (local 1) failed: ValueError: bad batch\n"
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/train.py", line 7, in <module>\n'
        '    raise ValueError("bad batch\\nmore")\n'
        "ValueError: bad batch\nmore\n"
    )


def test_the_rank_that_failed_first_is_named_though_it_takes_longest_to_end(tmp_path, accel):
    source = """
import os, threading, time
if os.environ["RANK"] == "0":
    note = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error", "/1/error")
    while not os.path.exists(note): time.sleep(0.01)
    raise RuntimeError("the peer is gone")
threading.Thread(target=threading.Event().wait).start()  # which its process waits for
raise ValueError("bad batch")
"""
    ended = launch(accel, tmp_path, source)

    assert ended.returncode == 1
    assert "accel: rank 1 (local 1) failed: ValueError: bad batch\n" in ended.stderr
    assert "the peer is gone" not in ended.stderr


def test_an_error_of_ours_is_shown_without_our_own_frames(tmp_path, accel):
    source = """
from accel_core.contract.world import World
World.from_environment({"RANK": "0"})
"""
    ended = launch(accel, tmp_path, source, "-n", "1")

    assert "accel_core/contract/world.py" not in ended.stderr
    assert "line 3, in <module>" in ended.stderr
    assert "rank 0 (local 0) failed: LaunchError: the launcher's variable" in ended.stderr


def test_a_script_that_does_not_compile_is_told_like_any_failure(tmp_path, accel):
    ended = launch(accel, tmp_path, "def f(:\n")

    assert ended.returncode == 1
    assert ended.stderr.count("SyntaxError") == 2  # where the rank is named, and in the traceback


def test_the_scripts_own_excepthook_hears_of_the_failure(tmp_path, accel):
    source = "import sys\nsys.excepthook = lambda *about: print('heard', about[1])\nraise ValueError('bad')"

    assert launch(accel, tmp_path, source, "-n", "1").stdout == "heard bad\n"


def test_exit_codes_pass_through(tmp_path, accel):
    ended = launch(accel, tmp_path, "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)")

    assert ended.returncode == 3
    assert ended.stderr.splitlines()[1:] == ["accel: rank 1 (local 1) exited with code 3"]


@pytest.mark.parametrize(("asked", "code"), [(-1, 255), (-9, 247), (256, 0), (2**40 + 5, 5)])
def test_an_exit_code_is_what_the_system_makes_of_it(tmp_path, asked, code, accel):
    ended = launch(accel, tmp_path, f"import sys\nsys.exit({asked})", "-n", "1")

    assert ended.returncode == code
    assert ended.stderr.splitlines()[1:] == (
        [f"accel: rank 0 (local 0) exited with code {code}"] if code else []
    )


def test_a_script_behind_a_link_imports_from_where_the_link_leads(tmp_path, accel):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "helper.py").write_text("print('helped')")
    (tmp_path / "project" / "main.py").write_text("import helper")
    (tmp_path / "link.py").symlink_to(tmp_path / "project" / "main.py")

    assert accel("launch", "--device", "cpu", "-n", "1", "link.py", cwd=tmp_path).stdout == "helped\n"


def test_the_current_folder_stands_in_for_no_module_of_the_library(tmp_path, accel):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import json; print(json.dumps(1))")
    for name in ("json", "signal", "types", "traceback", "pathlib", "runpy"):
        (tmp_path / f"{name}.py").write_text("print('SHADOW')")

    ended = accel("launch", "--device", "cpu", "-n", "1", "sub/train.py", cwd=tmp_path)

    assert (ended.stdout, ended.returncode) == ("1\n", 0), ended.stderr


def test_a_script_finds_what_python_gives_a_main_module(tmp_path, accel, run_command):
    source = "print(type(__loader__).__name__, __cached__, __annotations__, __spec__, __package__)"
    (tmp_path / "plain.py").write_text(source)
    plain = run_command(
        [sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert launch(accel, tmp_path, source, "-n", "1").stdout == plain.stdout


def test_a_worker_killed_by_a_signal_is_128_plus_its_number(tmp_path, accel):
    ended = launch(
        accel,
        tmp_path,
        "import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nimport time; time.sleep(30)",
    )

    assert ended.returncode == 137
    assert ended.stderr.splitlines()[1:] == [
        "accel: rank 1 (local 1) was killed by SIGKILL",
        "the system kills processes when memory runs out: see `dmesg`",
    ]


MID_STEP = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(10))
"""


def test_a_worker_that_dies_mid_step_is_blamed_not_the_peer_that_misses_it(tmp_path, accel):
    ended = launch(accel, tmp_path, MID_STEP)

    assert ended.returncode == 7
    assert ended.stderr.splitlines()[-1] == "accel: rank 1 (local 1) exited with code 7"
    assert "Traceback" not in ended.stderr


def test_a_restart_is_told_with_the_reason_and_keeps_the_run_id(tmp_path, accel):
    source = (
        ALL_SEE
        + """
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open("first", "w").write(os.environ["ACCEL_RUN_ID"])
    raise ValueError("once")
"""
    )
    ended = launch(accel, tmp_path, source, "--max-restarts", "1")

    assert ended.returncode == 0
    assert "accel: rank 1 (local 1) failed: ValueError: once; restart 1 of 1" in ended.stderr
    assert (tmp_path / "first").read_text() == seen(tmp_path)[0]["ACCEL_RUN_ID"]


HELP = "You can disable extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0."


def test_a_launcher_that_cannot_import_torch_ends_with_the_variable_that_helps(
    half_installed, tmp_path, accel
):
    ended = launch(partial(accel, fresh=True), tmp_path, "open('ran', 'w')", **half_installed)

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[1:] == [
        "accel: torch cannot be imported: Failed to load the backend extension: torch_pony",
        "ImportError('libpony.so: cannot open shared object file')",
        HELP,
    ]
    assert not (tmp_path / "ran").exists()


def test_a_worker_whose_script_cannot_import_torch_ends_with_the_variable_that_helps(
    half_installed, tmp_path, run_command
):
    (tmp_path / "train.py").write_text("import torch")

    ended = run_command(
        command(["train.py"]),
        cwd=tmp_path, env=clean_environment(half_installed), capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.returncode == 1
    assert "libpony.so" in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(HELP)


def test_with_that_variable_set_the_script_runs(half_installed, tmp_path, accel):
    ended = launch(accel, tmp_path, ALL_SEE, **half_installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    assert (ended.returncode, len(seen(tmp_path))) == (0, 2)


def test_a_script_that_removes_what_the_launcher_keeps_of_it_ends_well(tmp_path, accel):
    removes = "import os, shutil; shutil.rmtree(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))"

    ended = launch(accel, tmp_path, removes)

    assert (ended.returncode, ended.stderr.count("\n")) == (0, 1), ended.stderr


# -- signals ---------------------------------------------------------------------------------------

WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])  # like a DataLoader's
open(f"pids{os.environ['RANK']}", "w").write(f"{os.getpid()} {child.pid} end")
time.sleep(60)
"""


@pytest.fixture
def waiting(tmp_path, start_command):
    """A launcher whose two workers wait, and the pids of worker, child, worker, child."""
    (tmp_path / "train.py").write_text(WAITS)
    words = [ACCEL, "launch", "--device", "cpu", "-n", "2", "train.py"]
    with start_command(
        words, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            files = [tmp_path / "pids0", tmp_path / "pids1"]
            deadline = time.monotonic() + patience(60)
            while not all(file.exists() and file.read_text().endswith("end") for file in files):
                assert time.monotonic() < deadline
                assert launcher.poll() is None
                time.sleep(0.05)
            yield launcher, [int(pid) for file in files for pid in file.read_text().split()[:2]]
        finally:
            launcher.kill()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + patience(10)
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.by_default
def test_a_stopped_launcher_takes_its_workers_and_their_children_along(waiting, number, code):
    launcher, pids = waiting

    launcher.send_signal(number)
    _, told = launcher.communicate(timeout=patience(30))

    assert launcher.returncode == code
    assert gone(pids)
    assert "Traceback" not in told


NEEDS_ITS_CHILD = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
def stop(*_):
    time.sleep(0.5)
    open("child", "w").write(repr(child.poll()))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open("ready", "w").close()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_stopped_worker_has_its_children_until_it_ends(tmp_path, start_command):
    (tmp_path / "train.py").write_text(NEEDS_ITS_CHILD)
    words = [ACCEL, "launch", "--device", "cpu", "-n", "1", "train.py"]
    with start_command(words, cwd=tmp_path, env=clean_environment()) as launcher:
        assert comes((tmp_path / "ready").exists)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=patience(60)) == 128 + signal.SIGTERM
    assert (tmp_path / "child").read_text() == "None"


STUCK = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])  # as in C++, where no handler runs
open("ready", "w").write("")
for _ in range(600):
    time.sleep(0.1)
    if signal.SIGTERM in signal.sigpending():
        open("asked again", "w").write("")
"""


@pytest.fixture
def stuck(tmp_path, start_command):
    """A launcher whose worker takes notice of no signal, with a folder of temporary files of its own."""
    place = tmp_path / "tmp"
    place.mkdir()
    (tmp_path / "train.py").write_text(STUCK)
    with start_command(
        [ACCEL, "launch", "--device", "cpu", "-n", "1", "train.py"],
        cwd=tmp_path,
        env=clean_environment({"TMPDIR": str(place)}),
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def comes(condition) -> bool:
    deadline = time.monotonic() + patience(60)
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_second_ctrl_c_kills_a_rank_that_does_not_end(stuck, tmp_path):
    assert comes((tmp_path / "ready").exists)

    stuck.send_signal(signal.SIGINT)
    stuck.stderr.readline()  # what starts
    told = stuck.stderr.readline()
    stuck.send_signal(signal.SIGINT)

    assert told == "accel: the processes have 30 s; another Ctrl-C kills them\n"
    assert stuck.wait(timeout=patience(60)) == 130
    assert not (tmp_path / "asked again").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_no_worker_outlives_a_launcher_that_is_killed(waiting):
    launcher, pids = waiting

    launcher.kill()
    launcher.wait(timeout=patience(30))
    for pid in pids[1::2]:  # children of the script's own, which nothing binds to their parent
        os.kill(pid, signal.SIGKILL)

    assert gone(pids)


def test_a_failing_worker_leaves_no_folder_behind(tmp_path, accel):
    place = tmp_path / "tmp"
    place.mkdir()

    launch(accel, tmp_path, "raise ValueError", TMPDIR=str(place))

    assert list(place.iterdir()) == []


@pytest.mark.full
def test_the_first_process_of_a_container_ends_by_a_signal_while_it_waits_for_a_node(
    tmp_path, run_command, start_command
):
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or run_command([*container, "true"], check=False).returncode:
        pytest.skip("this user may not make a namespace of processes")
    with reserved_port() as port:
        place = f"127.0.0.1:{port}"
    flags = ["--nodes", "2", "--node-rank", "1", "--rendezvous", place, "-n", "1", "--device", "cpu"]
    (tmp_path / "train.py").touch()
    launcher = start_command(
        [*container, ACCEL, "launch", *flags, "train.py"],
        env=clean_environment({}),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("waits for node 0" in line for line in launcher.stderr)
        first = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0]
        os.kill(int(first), signal.SIGTERM)
        assert launcher.wait(patience(30)) == 128 + signal.SIGTERM
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.full
def test_a_process_that_launches_never_searches_torch_for_garbage(tmp_path, run_command):
    (tmp_path / "train.py").touch()
    program = """
import gc, sys
from accel_core.cli import main
sys.argv = ["accel", "launch", "--device", "cpu", "-n", "1", "train.py"]
try:
    main()
finally:
    print(gc.isenabled(), gc.get_freeze_count() > 50_000)
"""
    ended = run_command(
        [sys.executable, "-c", program],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stdout == "True True\n", ended.stderr
