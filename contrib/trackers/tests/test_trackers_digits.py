"""Digits on two processes with all nine trackers at once, offline, killed, resumed, and read back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import read_back

MODULES = {
    "aim": "aim",
    "clearml": "clearml",
    "comet": "comet_ml",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "swanlab": "swanlab",
    "trackio": "trackio",
    "wandb": "wandb",
}
NAMES = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
# The others hold what was logged last in memory, or in files of their own, until the run ends.
ON_DISK_AT_ONCE = {"aim", "clearml", "dvclive", "mlflow", "neptune", "trackio"}
SECRET = "terces"[::-1].upper()  # libraries keep the text of scripts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folder of a run that was killed after 7 steps, and went on from its checkpoint after 5, to 12."""
    folder = tmp_path_factory.mktemp("digits")
    environment = {
        **os.environ,
        "HOME": str(folder.parent / "home"),
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "ACCEL_TEST_NETWORK_NOTES": str(folder.parent / "network"),
        "HTTP_PROXY": "http://127.0.0.1:9",  # nobody listens there
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "WANDB_API_KEY": SECRET * 7,
        "COMET_API_KEY": f"{SECRET}-comet",
        "MLFLOW_TRACKING_PASSWORD": f"{SECRET}-mlflow",
    }
    job = Path(__file__).with_name("tracked_digits.py")
    codes, given = [], ["--key", f"{SECRET}-argument"]
    for arguments in (["0", "7", *given, "kill"], ["5", "12", *given]):
        command = [
            str(Path(sys.executable).with_name("accel")),
            "launch",
            "--device",
            "cpu",
            "-n",
            "2",
            str(job),
        ]
        done = subprocess.run(
            [*command, str(folder), ",".join(NAMES), *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        codes.append(done.returncode)
        (folder.parent / f"said-{len(codes)}").write_text(done.stdout + done.stderr)
    assert codes == [9, 0], (folder.parent / f"said-{len(codes)}").read_text()[-3000:]
    return folder


@pytest.fixture(scope="module")
def expected(digits):
    """Metric -> step -> value, by the JSON lines of both processes' main rank."""
    lines = [json.loads(line) for line in (digits / "digits.jsonl").read_text().splitlines()]
    found = {"train/loss": {}, "train/half": {}}
    for line in lines:
        if "values" in line:
            for metric, value in line["values"]["train"].items():
                found[f"train/{metric}"][line["step"]] = value
    assert sorted(found["train/loss"]) == list(range(12))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_library_has_one_run_with_the_values_of_both_processes(digits, expected, name):
    ids, metrics = read_back.read(name, digits / name)

    assert len(ids) == 1, ids
    first = 0 if name in ON_DISK_AT_ONCE else 5
    for metric, values in expected.items():
        assert set(metrics[metric]) >= set(range(first, 12))
        for step in range(first, 12):
            assert metrics[metric][step] == pytest.approx(values[step], rel=1e-6)


def test_nobody_tried_the_network(digits):
    notes = digits.parent / "network"
    assert not notes.exists(), notes.read_text()


def test_no_secret_is_in_any_file(digits):
    assert [
        str(path) for path in digits.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ] == []


def test_no_library_failed(digits):
    for said in digits.parent.glob("said-*"):
        lines = said.read_text().splitlines()
        assert [line for line in lines if "could not be" in line or "left out" in line] == []
