"""A record is read as one run, however often it was started, and says what it could not read."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import pytest

from accel_core import AccelError
from accel_monitor.facts import about, differences, notes, paces
from accel_monitor.records import Record, Tail, find, read

LONG = 20_000


def lines(*added):
    head = {"kind": "run", "time": 100.0, "step": 0, "config": [["a", 1, "default"]]}
    return [head, *({"time": 100.0 + at, **line} for at, line in enumerate(added, 1))]


def sample(step, **values):
    return {"kind": "step", "step": step, **values}


def record_of(*added):
    record = Record("a.jsonl", "a")
    for line in lines(*added):
        record.add(line)
    return record


def write(folder, name, *added, rest=""):
    path = folder / "records" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(*added)) + rest)
    return path


def values(record, name):
    return [(point.step, point.value) for point in record.curves()[name]]


def test_a_run_that_was_killed_and_resumed_has_one_curve_of_each_step_once(resumed):
    folder, after, _ = resumed
    (record,) = read([folder])

    logged = dict(values(record, "logged loss"))
    assert list(logged) == list(range(1, 31))
    assert {step: logged[step] for step in after} == after
    assert [step for step, _ in values(record, "lr")] == list(range(1, 31))
    assert len(record.starts) == 2
    assert record.redone >= 5
    assert record.ended
    assert record.done == 30


def test_a_sample_has_the_items_of_all_ranks_a_second(resumed):
    (record,) = read([resumed[0]])

    items, samples = dict(values(record, "items_per_second")), dict(values(record, "samples_per_second"))
    assert items == pytest.approx(samples)  # each item is a sample here
    assert len(items) > 20


def test_a_record_names_its_profiles_and_the_steps_of_its_warnings(resumed):
    (record,) = read([resumed[0]])

    (profile,) = record.of("profile")
    assert json.loads(Path(profile["path"]).read_text())["traceEvents"]
    (warning,) = record.of("warning")
    assert (warning["text"], warning["step"]) == ("ten are done", 10)
    assert [start["restarts"] for start in record.starts] == [0, 0]


def test_later_values_win_after_a_state_was_loaded_again():
    record = record_of(
        sample(1, lr=3.0), sample(2, lr=2.0), sample(3, lr=9.0), {"kind": "restart", "step": 1}
    )
    record.add({"time": 110.0, **sample(2, lr=1.0)})

    assert values(record, "lr") == [(1, 3.0), (2, 1.0)]
    assert record.redone == 2
    (note,) = notes(record)
    assert "went on from step 1: 2 line(s)" in note


def test_a_cut_last_line_is_left_out_and_said(tmp_path):
    write(tmp_path, "a.jsonl", sample(1, lr=3.0), rest='{"time": 1, "kind": "st')
    (record,) = read([tmp_path])

    assert values(record, "lr") == [(1, 3.0)]
    assert "1 line(s) of the record are cut" in notes(record)[0]


def test_a_line_that_is_still_being_written_waits(tmp_path):
    path = write(tmp_path, "a.jsonl", rest='{"time": 103.0, "kind": "step", ')
    tail = Tail(path)
    assert tail.read().sample == {}
    with path.open("a") as file:
        file.write('"step": 1, "lr": 3.0}\n')

    assert values(tail.read(), "lr") == [(1, 3.0)]
    assert tail.record.torn == 0


def test_values_that_are_not_finite_are_kept_and_counted():
    record = record_of(sample(1, lr="NaN"), sample(2, lr="Infinity"), sample(3, lr=1.0))

    (_, nan), (_, infinite), last = values(record, "lr")
    assert math.isnan(nan)
    assert infinite == math.inf
    assert last == (3, 1.0)
    assert "not finite are gaps in the curves: 2 of learning rate, the first at step 1." in notes(record)[0]


def test_logged_values_are_drawn_over_the_step_that_the_program_gave():
    record = record_of({"kind": "log", "step": 5, "given": 500, "values": {"eval": {"f1": 0.5}, "note": "x"}})

    (point,) = record.curves()["logged eval/f1"]
    assert (point.x, point.step, point.value) == (500, 5, 0.5)
    assert set(record.curves()) == {"logged eval/f1"}


def test_a_sample_stands_for_the_steps_since_the_one_before():
    record = record_of(
        sample(1, split={"forward": 1.0}),
        sample(11, split={"forward": 0.1, "checkpoint": 5.0}),
        {"kind": "checkpoint", "step": 11, "seconds": 0.5, "folder": "x"},
    )
    record.add({"time": 110.0, "kind": "end", "step": 11})

    assert record.time_by_phase() == pytest.approx({"forward": 2.0, "checkpoint": 0.5, "between": 7.5})


def test_a_sample_stands_for_no_more_time_than_its_steps_took():
    record = record_of(
        sample(1, split={"other": 1.0}),
        sample(11, seconds=0.4, split={"other": 2.0}),  # in which the program evaluated, say
    )

    assert record.time_by_phase() == pytest.approx({"other": 1.0 + 10 * 0.4})


def test_a_run_that_begins_from_a_checkpoint_is_not_charged_for_the_steps_before_it():
    begun = Record("a.jsonl", "a")
    begun.add({"kind": "run", "time": 100.0, "step": 1000})
    begun.add({"time": 101.0, **sample(1001, split={"forward": 0.5})})
    loaded = record_of({"kind": "restart", "step": 1000}, sample(1001, split={"forward": 0.5}))

    assert begun.time_by_phase() == pytest.approx({"forward": 0.5, "between": 0.5})
    assert loaded.time_by_phase() == pytest.approx({"forward": 0.5, "between": 1.5})


def test_time_in_steps_that_are_done_again_was_spent():
    record = record_of(
        sample(1, split={"forward": 1.0}),
        sample(2, split={"forward": 1.0}),
        {"kind": "restart", "step": 1},
        sample(2, split={"forward": 1.0}),
    )

    assert record.time_by_phase() == pytest.approx({"forward": 3.0, "between": 1.0})


def test_a_clock_that_was_set_back_turns_no_time_around():
    record = record_of(sample(1, lr=3.0, split={"forward": 1.0}))  # ends at 101
    record.add({"time": 40.0, "kind": "run", "step": 1})  # on another machine
    record.add({"time": 42.0, **sample(2, lr=2.0, split={"forward": 1.0})})
    record.add({"time": 200.0, "kind": "run", "step": 2})  # on the first
    record.add({"time": 201.0, **sample(3, lr=1.0, split={"forward": 1.0})})

    assert [point.time for point in record.curves()["lr"]] == [101.0, 103.0, 201.0]
    assert record.time_by_phase() == pytest.approx({"forward": 3.0, "between": 1.0})
    assert "a clock went back by 1 min 01 s" in notes(record)[0]


def test_a_run_that_went_on_elsewhere_tells_both_places():
    record = Record("a.jsonl", "a")
    record.add({"kind": "run", "time": 1.0, "step": 0, "processes": 4, "host": "one", "git": "abc"})
    record.add({"time": 2.0, **sample(1, ranks=[rank(3, 0.1)])})
    record.add({"kind": "run", "time": 3.0, "step": 1, "processes": 2, "host": "two", "git": "abc"})
    rows = {name: value for name, *value in about([record])}

    assert rows["processes"] == ["4 on one, then 2 on two"]
    assert rows["commit"] == ["abc"]
    assert paces(record) == []  # of the world before


def test_a_warning_that_comes_again_and_again_is_one_with_a_count():
    record = record_of(*({"kind": "warning", "step": step, "text": "overflow"} for step in range(9)))

    (warning,) = record.of("warning")
    assert (warning["step"], warning["until"]["step"], warning["times"]) == (0, 8, 9)


def test_a_long_record_takes_little_memory(tmp_path):
    values = {"a": 1.5, "b": 2.5}
    logged = ({"kind": "log", "step": step, "given": step, "values": values} for step in range(LONG))
    path = write(tmp_path, "a.jsonl", *logged)
    tracemalloc.start()
    record = Tail(path).end()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(record.curves()["logged b"]) == LONG
    assert kept / LONG < 200  # bytes of a line


def test_a_line_that_lacks_its_parts_is_torn():
    tail = Tail(Path("a.jsonl"))
    tail.record.add({"kind": "run", "time": 100.0, "step": 0})
    for text in (
        b'{"kind": "step", "time": 1}',
        b'{"kind": "step", "time": "x", "step": 1}',
        b'{"kind": "log", "time": 1, "step": 1, "given": 1, "values": 5}',
        b"[" * 100_000,
        b"[]",
        b"5",
    ):
        tail._take(text)

    assert tail.record.torn == 6
    assert not tail.record.sample


def test_a_number_beyond_all_floats_is_not_finite():
    record = record_of({"kind": "log", "step": 1, "given": 1, "values": {"n": -(10**400)}})

    assert values(record, "logged n") == [(1, -math.inf)]


def test_the_same_record_given_twice_has_two_names(tmp_path):
    write(tmp_path / "run", "a.jsonl")

    assert [record.name for record in read([tmp_path / "run"] * 2)] == ["1: run/a", "2: run/a"]


def test_time_between_two_processes_of_a_run_is_nobodys():
    record = record_of(sample(1, split={"forward": 1.0}))  # ends at 101
    record.add({"time": 500.0, "kind": "run", "step": 1})
    record.add({"time": 502.0, **sample(2, split={"forward": 1.0})})

    assert record.time_by_phase() == pytest.approx({"forward": 2.0, "between": 1.0})


def test_a_folder_means_its_latest_record_and_a_file_itself(tmp_path):
    old = write(tmp_path, "a.jsonl", sample(1, lr=1.0))
    new = write(tmp_path, "b.jsonl", sample(1, lr=2.0))
    old.touch()

    assert find(tmp_path) == [new, old]
    assert find(tmp_path / "records")[-1] == old
    assert [record.name for record in read([old, new])] == [f"{tmp_path.name}/a", f"{tmp_path.name}/b"]


@pytest.mark.parametrize("content", ["", "x\n", '{"time": 1, "step": 0, "values": {}}\n'])
def test_what_is_no_record_is_refused(tmp_path, content):
    (tmp_path / "digits.jsonl").write_text(content)

    with pytest.raises(AccelError, match="record of a run"):
        read([tmp_path])
    with pytest.raises(AccelError, match="is not a record of a run"):
        read([tmp_path / "digits.jsonl"])


def test_runs_differ_in_options_settings_and_commit(resumed, whole):
    rows = {name: tuple(each) for name, *each in differences(read([resumed[0], whole[0]]))}

    assert rows["settings.lr"] == ("0.1", "0.05")
    assert "settings.api_key" not in rows
    assert "device" not in rows


def test_no_secret_is_in_the_record(resumed):
    assert "sk-secret" not in find(resumed[0])[0].read_text()


def test_sensors_are_curves_and_a_throttled_clock_is_one_where_it_has_reasons():
    record = record_of(
        sample(1, health={"temperature": 60, "throttled": []}),
        sample(2),
        sample(3, health={"temperature": 83, "throttled": ["hw_slowdown"]}),
    )

    assert values(record, "device temperature") == [(1, 60), (3, 83)]
    assert values(record, "device throttled") == [(1, 0), (3, 1)]


def rank(number, own, **values):
    found = {"rank": number, "host": f"node{number}", "own": own, "data": 0.01, "slow": own > 1}
    return {**found, "memory": {"allocated": 3 << 20}, **values}


def test_ranks_are_shown_as_they_were_last_compared():
    first, last = [rank(0, 0.1), rank(1, 0.1)], [rank(1, 1.5), rank(0, 0.1, memory={})]
    record = record_of(sample(1, ranks=first), sample(2, ranks=last), sample(3))

    assert paces(record) == [
        ("rank", "host", "own time", "data", "allocated"),
        ("1", "node1", "1.5 s slow", "0.01 s", "3.0 MiB"),
        ("0", "node0", "0.1 s", "0.01 s", "-"),
    ]
    assert paces(record_of(sample(1))) == []
