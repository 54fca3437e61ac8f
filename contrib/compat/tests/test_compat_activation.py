"""`import accelerate` means ours where that was asked for, in all processes of a job, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from click.testing import CliRunner

import accel_compat
from accel_compat import activation

KINDS = {"subprocess", "python -E", "torchrun", "this process", "spawn", "fork", "forkserver"}
KINDS |= {f"DataLoader by {method}" for method in ("spawn", "fork", "forkserver")}
LINE = "accel-compat: accelerate 1.15.0 is served by accel-core\n"
needs_accelerate = pytest.mark.skipif(
    not any(each.name == "accelerate" for each in distributions(path=sys.path)),
    reason="Accelerate itself is not installed",
)


@pytest.fixture
def python(run_command):
    """Run Python with ACCEL_COMPAT of that value, which None unsets."""

    def run(*words: str, asked: str | None = "1", **variables: str) -> subprocess.CompletedProcess[str]:
        plain = {name: text for name, text in os.environ.items() if not name.startswith("ACCEL_COMPAT")}
        plain |= {} if asked is None else {"ACCEL_COMPAT": asked}
        return run_command(
            [sys.executable, *words], env=plain | variables, capture_output=True, text=True, check=False
        )

    return run


def served(ended: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Kind of child -> who serves `accelerate` in it."""
    assert ended.returncode == 0, ended.stderr
    return dict(line.split(": ") for line in ended.stdout.splitlines())


PROGRAM = str(Path(__file__).with_name("children.py"))


@pytest.mark.parametrize(("asked", "words"), [("1", []), (None, ["install"])])
def test_all_children_get_ours(python, asked, words):
    ended = python(PROGRAM, *words, asked=asked)

    assert served(ended) == dict.fromkeys(KINDS, "ours")


@needs_accelerate
def test_without_the_variable_all_get_the_installed_one(python):
    ended = python(PROGRAM, asked=None)
    (version,) = (each.version for each in distributions(path=sys.path) if each.name == "accelerate")

    assert served(ended) == dict.fromkeys(KINDS, f"theirs {version}")
    assert "accel-compat" not in ended.stderr


def test_one_process_of_a_job_says_who_serves_accelerate(python):
    code = "import accelerate, subprocess, sys; subprocess.run([sys.executable, '-c', 'import accelerate'])"

    assert python("-c", code).stderr == LINE
    assert python("-c", code, RANK="1").stderr == ""
    assert python("-c", "pass").stderr == ""


def test_at_the_start_only_one_small_file_is_imported(python):
    code = "import sys; print([name for name in sys.modules if name[:6] in ('accel_', 'torch', 'attr')])"

    assert python("-c", code).stdout == "['accel_compat', 'accel_compat.activation']\n"
    for other in (None, "0", ""):
        assert python("-c", code, asked=other).stdout == "[]\n"


def test_installers_see_what_is_installed(python):
    code = "import sys\nfrom importlib.metadata import distributions, version\n"
    code += "installed = [each.version for each in distributions(name='accelerate', path=sys.path)]\n"
    code += "print(version('accelerate'), installed)"
    real = [each.version for each in distributions(path=sys.path) if each.name == "accelerate"]

    assert python("-c", code).stdout == f"1.15.0 {real}\n"


@needs_accelerate
def test_the_installed_scripts_run_ours(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import accelerate; print(accelerate.__file__)")
    program = str(Path(sys.executable).with_name("accelerate"))

    ended = python(program, "launch", "--cpu", "--num_processes", "2", str(script))

    assert ended.stdout.count("accel_compat") == 2, ended.stderr


def test_a_module_of_commands_launches(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import accelerate; print(accelerate.__file__)")

    ended = python("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(script))

    assert ended.stdout.count("accel_compat") == 2, ended.stderr
    assert ended.stderr.count(LINE) == 1


def test_install_says_that_children_will_not_follow(python, tmp_path):
    folder = Path(accel_compat.__file__).parent.parent
    code = f"import sys; sys.path[:0] = {[str(folder), *sys.path]!r}\n"
    code += "import accel_compat; accel_compat.install()"

    ended = python("-S", "-c", code, asked=None)

    assert ended.stderr.startswith("accel-compat: children of this process do not import its accelerate: ")
    assert "-S" in ended.stderr


def test_launch_and_the_doctor_name_a_missing_file(monkeypatch, tmp_path):
    from accel_compat.launch.commands import compat

    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)

    assert "accel_compat.pth is in none of the folders" in activation.explain_inactive()
    assert str(tmp_path) in activation.explain_inactive()
    done = CliRunner().invoke(compat, ["launch", "script.py"])
    assert "workers would not import accel-compat's accelerate" in str(done.exception)


def test_the_doctor_checks_the_start_of_processes(python):
    ended = python("-m", "accel_core", "plugins", "doctor", "compat", asked=None)

    assert "verify: accel_compat.activation:explain_inactive ... ok" in ended.stdout, ended.stderr


def test_a_newer_release_is_one_warning(python, tmp_path):
    (tmp_path / "accelerate-1.16.2.dist-info").mkdir()
    (tmp_path / "accelerate-1.16.2.dist-info" / "METADATA").write_text("Name: accelerate\nVersion: 1.16.2\n")

    said = python("-c", "import accelerate", PYTHONPATH=str(tmp_path)).stderr

    assert said == LINE + (
        "accel-compat: Accelerate 1.16.2 is installed, and 1.15.0 is the newest whose names and defaults"
        " are served\n"
    )


@needs_accelerate
def test_the_helpers_of_accelerates_own_tests_are_the_installed_ones(python):
    code = "import accelerate.test_utils.scripts.test_cli, accelerate.test_utils.testing as t\n"
    code += "print(t.__file__, t.AcceleratorState.__module__)"

    file, module = python("-c", code).stdout.split()

    assert "accel_compat" not in file
    assert module == "accel_compat.state.states"
