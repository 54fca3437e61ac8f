"""Digits on two processes with all nine trackers at once, offline, killed, resumed, and read back."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest
import read_back

from accel_testing.patience import patience

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
KEPT = {
    "aim": [".aim/artifacts/*/notes.txt"],
    "clearml": ["offline/**/shown_train_*.jpeg", "offline/**/artifacts/notes.txt/notes.txt"],
    "comet": [],
    "dvclive": ["*/plots/images/shown.png", "*/tables/rows/*.csv", "*/artifacts/notes.txt"],
    "mlflow": [
        f"artifacts/*/artifacts/{name}" for name in ("images/shown/*.png", "rows/*.json", "notes.txt")
    ],
    "neptune": ["offline/*/upload_path/rows_*.csv"],
    "swanlab": ["run-*/media/image/*.png", "artifacts/*/notes.txt", "run-*/files/*.txt"],
    "trackio": ["media/digits/*/*/*.png", "artifacts/digits/blobs/*/*/*"],
    "wandb": [f"wandb/*/files/media/{name}" for name in ("images/shown_*.png", "table/rows_*.json")],
}
"""What of an image, a table and a file lies in the folder by itself."""
# The others hold what was logged last in memory, or in files of their own, until the run ends.
ON_DISK_AT_ONCE = {"aim", "clearml", "dvclive", "mlflow", "neptune", "trackio"}
SECRET = "ekolps"[::-1]  # in no text of a script, which libraries keep

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory, start_command):
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
        words = [*command, str(folder), ",".join(NAMES), *arguments]
        with (folder.parent / f"said-{len(codes) + 1}").open("wb") as said:
            process = start_command(words, env=environment, cwd=folder, stdout=said, stderr=said)
        try:
            if "kill" in arguments:
                wait_until_written(folder, process)
            codes.append(process.wait(timeout=patience(1200)))
        finally:
            process.kill()
    assert codes == [9, 0], (folder.parent / f"said-{len(codes)}").read_text()[-3000:]
    return folder


def wait_until_written(folder, process):
    """Let the run be killed once what it logged is on the disk, or too long after it logged that."""
    while process.poll() is None and not (folder / "logged-0").exists():
        time.sleep(0.2)
    given_up = time.monotonic() + patience(120)
    while process.poll() is None and not is_written(folder) and time.monotonic() < given_up:
        time.sleep(0.5)
    (folder / "may-die").touch()


def is_written(folder):
    try:
        found = [read_back.read(name, folder / name)[1] for name in ON_DISK_AT_ONCE & {*NAMES}]
    except Exception:  # what is half written fails each reader in another way
        return False
    return all(
        set(metrics.get(metric, ())) >= set(range(5))  # the later ones are done again
        for metrics in found
        for metric in ("train/loss", "train/half")
    )


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


@pytest.mark.parametrize("name", NAMES)
def test_images_tables_and_files_are_kept(digits, name):
    assert [pattern for pattern in KEPT[name] if not [*(digits / name).glob(pattern)]] == []
    if name == "comet":  # all in the archive that the run which ended has left
        messages = str([text for path in (digits / name).glob("*.zip") for text in contents(path)])
        assert [asset for asset in ("shown", "rows.csv", "notes.txt") if asset not in messages] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name in {"dvclive", "mlflow", "swanlab"}])
def test_a_kept_file_has_the_name_it_was_given_and_is_a_copy(digits, name):
    """The file was written anew after it was logged, and logged again by another name."""
    found = {path.name: path.read_text() for path in (digits / name).rglob("*.txt")}

    assert {kept: found.get(kept) for kept in ("notes.txt", "again [1].txt")} == {
        "notes.txt": "kept",
        "again [1].txt": "changed",
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name in {"dvclive", "mlflow"}])
def test_tables_of_several_steps_are_several(digits, name):
    tables = [path for path in (digits / name).rglob("rows/*") if path.suffix in {".csv", ".json"}]

    assert sorted(path.stem for path in tables) == ["12", "7"]


def test_nobody_tried_the_network(digits):
    notes = digits.parent / "network"
    assert not notes.exists(), notes.read_text()


def test_no_secret_is_in_any_file(digits):
    files = [path for path in digits.rglob("*") if path.is_file()]
    assert any(zipfile.is_zipfile(path) for path in files) == ("comet" in NAMES)
    assert [str(path) for path in files if any(SECRET.encode() in text for text in contents(path))] == []


def contents(path):
    """Yield a file's bytes, and those of an archive's members."""
    yield path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def test_no_library_failed(digits):
    for said in digits.parent.glob("said-*"):
        lines = said.read_text().splitlines()
        assert [line for line in lines if "could not be" in line or "left out" in line] == []
