"""What each library's files hold, read by the library's own reader, or by its format."""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path


def read(name, folder):
    """(ids of the runs, metric -> step -> last value) of a tracker's folder."""
    ids, metrics = set(), defaultdict(dict)
    for run_id, metric, step, value in globals()[name](Path(folder)):
        ids.add(run_id)
        if metric is not None:
            metrics[metric][int(step)] = float(value)
    return ids, dict(metrics)


def records(path):
    """The records of a LevelDB log, the form of wandb's and SwanLab's files, up to one that is cut."""
    data, position, parts = path.read_bytes(), 7, b""  # after a header of the library's own
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or position + 7 + size > len(data):
            return
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield parts
            parts = b""


def wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run_id = path.stem.removeprefix("run-")
        yield run_id, None, 0, 0  # of a killed process there may be no more
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == run_id
            items = record.history.item
            named = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            for metric, value in named.items():
                if metric.startswith("train/"):
                    yield (
                        run_id,
                        metric,
                        named.get("_step", record.history.step.num),
                        value,
                    )


def mlflow(folder):
    with sqlite3.connect(folder / "mlflow.db") as database:
        yield from database.execute("select run_uuid, key, step, value from metrics order by timestamp")


def comet(folder):
    for path in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime):
        yield path.name.split("-")[0], None, 0, 0
        with zipfile.ZipFile(path) as archive:
            if "messages.json" not in archive.namelist():
                continue
            for line in archive.read("messages.json").decode().splitlines():
                payload = json.loads(line)["payload"]
                metric = payload.get("metric") or {}
                if str(metric.get("metricName", "")).startswith("train/"):
                    run_id = path.name.split("-")[0]
                    yield run_id, metric["metricName"], metric["step"], metric["metricValue"]


def clearml(folder):
    for path in folder.glob("offline/*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            for event in json.loads(line):
                if event.get("type") == "training_stats_scalar":
                    yield path.parent.name, event["metric"], event["iter"], event["value"]


def dvclive(folder):
    for path in folder.glob("*/plots/metrics/train/*.tsv"):
        with path.open() as file:
            for row in csv.DictReader(file, delimiter="\t"):
                yield path.parts[-5], f"train/{path.stem}", row["step"], row[path.stem]


def aim(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import is not as SQLAlchemy 2 likes it
        from aim.storage.encoding import decode, decode_path
        from aim.storage.rockscontainer import RocksContainer

    # Below `aim.Repo`, whose queries find no run in a repository that has just been written.
    for path in folder.glob(".aim/seqs/chunks/*"):
        columns = defaultdict(dict)
        for key, value in list(RocksContainer(str(path), read_only=True).items()):
            parts = decode_path(key)
            if len(parts) == 8 and str(parts[5]).startswith("train/") and parts[6] in {"step", "val"}:
                columns[parts[5], parts[7]][parts[6]] = decode(value)
        for (metric, _), entry in columns.items():
            yield path.name, metric, entry["step"], entry["val"]


def swanlab(folder):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for path in sorted(folder.glob("run-*/run-*.swanlab")):
        yield path.stem.removeprefix("run-"), None, 0, 0
        for data in records(path):
            scalar = Record.FromString(data).scalar
            if scalar.key.startswith("train/"):
                yield path.stem.removeprefix("run-"), scalar.key, scalar.step, scalar.value.number


def trackio(folder):
    with sqlite3.connect(folder / "digits.db") as database:
        rows = list(database.execute("select run_name, step, metrics from metrics order by id"))
    for run_name, step, metrics in rows:
        for metric, value in json.loads(metrics).items():
            if metric.startswith("train/"):
                yield run_name, metric, step, value


def neptune(folder):
    for path in sorted(folder.glob("offline/run__*")):
        operations = [entry["obj"] for entry in entries_of(path)]
        ids = [made["value"] for made in operations if made["path"] == ["accel", "run"]]
        for made in operations:
            if made["type"] == "LogFloats" and made["path"][0] == "train":
                for point in made["values"]:
                    yield ids[0], "/".join(made["path"]), point["step"], point["value"]


def entries_of(folder):
    decoder = json.JSONDecoder()
    text = "".join(file.read_text() for file in sorted(folder.glob("data-*.log"))).strip()
    position = 0
    while position < len(text):
        entry, position = decoder.raw_decode(text, position)
        yield entry
        while position < len(text) and text[position].isspace():
            position += 1
