"""What is logged reaches each tracker of the run, on the main process, after init_trackers."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pytest
import torch

from accel_core import Accelerator, AccelError, ConfigError, GeneralTracker, PluginError, hooks, implements
from accel_testing import ProcessError


class Mine(GeneralTracker):
    name = "mine"

    def __init__(self):
        self.seen = []

    def start(self, **options):
        self.seen.append(("start", self.project, options))

    def store_init_configuration(self, values):
        self.seen.append(("config", values))

    def log(self, values, step=None, **options):
        self.seen.append((step, values, options))

    def finish(self):
        self.seen.append("finished")

    def show(self, images):
        self.seen.append(images)
        return self


@pytest.fixture
def tracked(tmp_path):
    made = []

    def make(log_with, **options):
        made.append(Accelerator(cpu=True, log_with=log_with, project_dir=tmp_path, **options))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


def test_a_tracker_of_ones_own_is_started_fed_and_finished(tracked):
    mine = Mine()
    accelerator = tracked(mine)
    accelerator.init_trackers("project", {"lr": 0.1}, {"mine": {"tag": 1}})
    accelerator.log({"loss": 2}, step=3, log_kwargs={"mine": {"more": True}})
    accelerator.end_training()

    assert mine.seen == [
        ("start", "project", {"tag": 1}),
        ("config", {"lr": 0.1}),
        (3, {"loss": 2}, {"more": True}),
        "finished",
    ]


def test_one_that_never_started_is_not_finished(tracked):
    mine = Mine()
    tracked(mine).end_training()

    assert mine.seen == []


def test_one_with_a_state_of_its_own_is_finished_once_per_run_that_starts_it(tracked):
    class Timed(Mine):
        def log(self, values, step=None, **options):
            self._started = False  # a name that a base class might have too

    timed = Timed()
    accelerator = tracked(timed)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 2})
    accelerator.end_training()
    assert timed.seen.count("finished") == 1

    tracked(timed).end_training()
    assert timed.seen.count("finished") == 1


def test_one_that_could_not_start_is_not_finished(tracked):
    class Refuses(Mine):
        def start(self, **options):
            raise ValueError("no such account")

    mine = Refuses()
    accelerator = tracked(mine)
    with pytest.raises(ValueError, match="no such account"):
        accelerator.init_trackers("project")
    accelerator.end_training()

    assert mine.seen == []


def test_trackers_finish_once_while_the_run_goes_on(tracked):
    class Ending(Mine):
        name = "ending"

        @implements(hooks.run_ended)
        def _end(self):  # without the count that the base keeps
            self.seen.append("ended")

    mine, ending = Mine(), Ending()
    accelerator = tracked([mine, ending])
    accelerator.init_trackers("project")
    accelerator.run.trackers.finish()
    accelerator.run.trackers.finish()

    assert accelerator.run.trackers.has_finished
    assert (mine.seen.count("finished"), ending.seen.count("ended")) == (1, 1)
    with pytest.raises(AccelError, match=r"used after they were finished\nlog before that"):
        accelerator.log({"loss": 2})
    accelerator.prepare(torch.nn.Linear(1, 1))  # the run goes on
    accelerator.end_training()
    assert (mine.seen.count("finished"), ending.seen.count("ended")) == (1, 1)


def test_a_tracker_that_cannot_finish_leaves_the_others_their_turn(tracked):
    class Fails(Mine):
        name = "fails"

        def finish(self):
            raise ValueError("the line is dead")

    mine = Mine()
    accelerator = tracked([Fails(), mine])
    accelerator.init_trackers("project")
    with pytest.raises(ValueError, match="the line is dead"):
        accelerator.run.trackers.finish()

    assert mine.seen[-1] == "finished"


def test_what_one_tracker_refuses_is_logged_by_the_others(tracked):
    class Refuses(Mine):
        name = "refuses"

        def log(self, values, step=None, **options):
            raise ValueError("too large")

    mine = Mine()
    accelerator = tracked([Refuses(), mine])
    accelerator.init_trackers("project")
    with pytest.raises(ValueError, match="too large"):
        accelerator.log({"loss": 2}, step=3)

    assert (3, {"loss": 2}, {}) in mine.seen


def test_tensors_of_one_element_arrive_as_numbers(tracked):
    mine = Mine()
    accelerator = tracked(mine)
    accelerator.init_trackers("project")
    accelerator.log({"a": torch.tensor(0.5, requires_grad=True), "b": {"c": torch.tensor([2])}, "d": [3]})

    assert mine.seen[-1] == (None, {"a": 0.5, "b": {"c": 2}, "d": [3]}, {})
    assert type(mine.seen[-1][1]["a"]) is float


def test_a_tensor_without_a_number_arrives_as_a_tensor(tracked):
    mine = Mine()
    accelerator = tracked(mine)
    accelerator.init_trackers("project")
    accelerator.log({"loss": torch.empty(1, device="meta")})

    assert mine.seen[-1][1]["loss"].is_meta


def test_what_the_program_or_a_tracker_writes_to_later_reaches_no_other_tracker(tracked):
    class Greedy(Mine):
        name = "greedy"

        def store_init_configuration(self, values):
            values["model"].clear()

        def log(self, values, step=None, **options):
            values["nested"].clear()

    mine = Mine()
    accelerator = tracked([Greedy(), mine])
    accelerator.init_trackers("project", {"model": {"depth": 2}})
    values = {"nested": {"x": 1}, "list": [1], "array": np.ones(2), "tensor": torch.ones(2)}
    accelerator.log(values)
    values["nested"]["x"] = values["list"][0] = 5
    values["array"] += 1
    values["tensor"] += 1

    (_, config), (_, kept, _) = mine.seen[-2:]
    assert config == {"model": {"depth": 2}}
    assert (kept["nested"], kept["list"]) == ({"x": 1}, [1])
    assert (kept["array"].tolist(), kept["tensor"].tolist()) == ([1, 1], [1, 1])


def test_a_tensor_is_waited_for_once_however_many_trackers_there_are(tracked):
    class Counted(torch.Tensor):
        reads = 0

        def item(self):
            Counted.reads += 1
            return super().item()

    mine, other = Mine(), Mine()
    other.name = "other"
    accelerator = tracked([mine, other])
    accelerator.init_trackers("project")
    accelerator.log({"loss": torch.tensor(0.5).as_subclass(Counted)})

    assert Counted.reads == 1
    assert mine.seen[-1] == other.seen[-1] == (None, {"loss": 0.5}, {})


def test_names_and_ones_own_go_together(tracked, tmp_path):
    mine = Mine()
    accelerator = tracked(["jsonl", mine])
    accelerator.init_trackers("both")
    accelerator.log({"x": 1})

    assert mine.seen[-1] == (None, {"x": 1}, {})
    assert json.loads((tmp_path / "both.jsonl").read_text().splitlines()[-1])["values"] == {"x": 1}


def test_all_is_every_tracker_that_is_installed(tracked):
    assert "jsonl" in tracked("all").run.trackers.names


@pytest.mark.parametrize("use", [lambda a: a.log({"x": 1}), lambda a: a.get_tracker("jsonl")])
def test_use_before_init_trackers_is_an_error(tracked, use):
    with pytest.raises(AccelError, match=r"before they were started\ncall accelerator.init_trackers"):
        use(tracked("jsonl"))


def test_log_without_trackers_is_an_error_before_init_and_nothing_after(tracked):
    accelerator = tracked(None)
    with pytest.raises(AccelError, match="init_trackers"):
        accelerator.log({"x": 1})
    accelerator.init_trackers("project")
    accelerator.log({"x": 1})


def test_log_after_the_end_is_an_error(tracked):
    accelerator = tracked("jsonl")
    accelerator.init_trackers("project")
    accelerator.end_training()
    with pytest.raises(AccelError, match="this run has ended"):
        accelerator.log({"x": 1})


def test_a_second_start_is_an_error(tracked):
    accelerator = tracked("jsonl")
    accelerator.init_trackers("one")
    with pytest.raises(AccelError, match=r"init_trackers\('two'\): .* started already"):
        accelerator.init_trackers("two")


def test_a_tracker_that_is_not_installed_is_an_error(tracked):
    with pytest.raises(ConfigError, match=r"no tracker 'jsnol' is installed; did you mean 'jsonl'"):
        tracked("jsnol")


def test_what_is_no_tracker_is_an_error(tracked):
    with pytest.raises(ConfigError, match=r"log_with=...\): log_with: expected string, got 3 at \[0\]"):
        tracked([3])


def test_two_trackers_of_one_name_are_an_error(tracked):
    with pytest.raises(PluginError, match="tracker plugin 'mine' .*: Plugin name already registered: mine"):
        tracked([Mine(), Mine()])


def test_a_tracker_that_cannot_log_says_so(tracked):
    class Mute(GeneralTracker):
        name = "mute"

    accelerator = tracked(Mute())
    accelerator.init_trackers("project")
    with pytest.raises(AccelError, match="Mute cannot log anything"):
        accelerator.log({"x": 1})


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a.init_trackers("project", init_kwargs={"jsnol": {}}),
        lambda a: a.log({"x": 1}, log_kwargs={"jsnol": {}}),
        lambda a: a.get_tracker("jsnol"),
    ],
)
def test_options_for_nobody_are_an_error(tracked, use):
    accelerator = tracked("jsonl")
    if "log" in use.__code__.co_names:
        accelerator.init_trackers("project")
    with pytest.raises(ConfigError, match="no tracker 'jsnol'; did you mean 'jsonl'"):
        use(accelerator)


def test_a_whole_step_arrives_as_a_number_of_python(tracked):
    mine = Mine()
    accelerator = tracked(mine)
    accelerator.init_trackers("project")
    for step in (torch.tensor(3), np.int64(4), 5):
        accelerator.log({"loss": 1}, step=step)
    assert [(type(seen[0]), seen[0]) for seen in mine.seen[2:]] == [(int, 3), (int, 4), (int, 5)]


def test_no_folder_is_an_error_at_the_start():
    with pytest.raises(ConfigError, match="tracker jsonl has no folder to write to"):
        Accelerator(cpu=True, log_with="jsonl")


def test_a_url_is_no_folder_for_it():
    with pytest.raises(ConfigError, match="tracker jsonl writes to a local folder, not to s3://bucket/run"):
        Accelerator(cpu=True, log_with="jsonl", project_dir="s3://bucket/run")


def test_get_tracker_gives_the_tracker_or_what_it_wraps(tracked, tmp_path):
    mine = Mine()
    accelerator = tracked(["jsonl", mine])
    accelerator.init_trackers("project")

    assert accelerator.get_tracker("mine") is mine
    assert accelerator.get_tracker("mine", unwrap=True) is mine
    assert accelerator.get_tracker("jsonl", unwrap=True) == tmp_path / "project.jsonl"
    assert accelerator.trackers == [accelerator.get_tracker("jsonl"), mine]


class Everywhere(Mine):
    name = "everywhere"
    main_process_only = False


class Remembering(Mine):
    """A tracker whose run has an id, which it takes over from a checkpoint."""

    name = "remembering"

    def __init__(self, run_id):
        super().__init__()
        self.run_id = run_id

    def state_dict(self):
        return {"id": self.run_id}

    def load_state_dict(self, state):
        self.run_id = state["id"]


def test_a_resumed_run_gives_a_tracker_its_state_back(tracked, tmp_path):
    tracked(Remembering("first")).save_state(tmp_path / "saved")
    later = Remembering("second")
    tracked(later).load_state(tmp_path / "saved")

    assert later.run_id == "first"


def test_state_of_a_tracker_that_is_gone_is_left_out_with_a_word(tracked, tmp_path, caplog):
    tracked(Remembering("first")).save_state(tmp_path / "saved")
    tracked("jsonl").load_state(tmp_path / "saved")

    assert "state of plugin remembering, which is not in this stack, is left out" in caplog.text


def test_a_checkpoint_without_such_state_leaves_a_tracker_alone(tracked, tmp_path):
    tracked("jsonl").save_state(tmp_path / "saved")
    later = Remembering("second")
    tracked(later).load_state(tmp_path / "saved")

    assert later.run_id == "second"


def ids_after_a_resume(folder):
    for round_ in ("saved", "loaded"):
        accelerator = Accelerator(cpu=True)
        mine = Remembering(f"{round_} on rank {accelerator.process_index}")
        accelerator.end_training()
        accelerator = Accelerator(cpu=True, log_with=mine)
        if round_ == "loaded":
            accelerator.load_state(folder)
        else:
            accelerator.save_state(folder)
        accelerator.end_training()
    return mine.run_id


@pytest.mark.needs("accel-ddp")
def test_every_rank_gets_the_state_of_the_main_process(tmp_path, run_processes):
    assert run_processes(ids_after_a_resume, tmp_path / "saved") == ["saved on rank 0"] * 2


def in_two_processes(folder):
    main, everywhere = Mine(), Everywhere()
    accelerator = Accelerator(cpu=True, log_with=["jsonl", main, everywhere], project_dir=folder)
    accelerator.init_trackers("project")
    accelerator.log({"rank": accelerator.process_index})
    accelerator.get_tracker("mine", unwrap=True).show("image").show("another")
    accelerator.end_training()
    return len(main.seen), len(everywhere.seen)


@pytest.mark.needs("accel-ddp")
def test_only_the_main_process_logs_unless_a_tracker_wants_all(tmp_path, run_processes):
    assert run_processes(in_two_processes, tmp_path) == [(6, 4), (0, 4)]
    lines = [json.loads(line) for line in (tmp_path / "project.jsonl").read_text().splitlines()]
    assert [line.get("values") for line in lines] == [None, {"rank": 0}]


def sum_of_a_split_tensor(folder):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("project")
    split = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    total = split.sum()
    try:
        accelerator.log({"total": total})
        refused = ""
    except AccelError as error:
        refused = str(error)
    accelerator.log({"total": total.full_tensor()})
    accelerator.end_training()
    return refused


@pytest.mark.needs("accel-ddp")
def test_a_rank_s_part_of_a_number_is_refused_and_the_whole_is_logged(tmp_path, run_processes):
    main, other = run_processes(sum_of_a_split_tensor, tmp_path)

    assert "this rank has a part" in main
    assert "full_tensor() on all ranks" in main
    assert other == ""
    line = json.loads((tmp_path / "project.jsonl").read_text().splitlines()[-1])
    assert line["values"] == {"total": 16.0}


def started_on_main_only(folder):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    if accelerator.is_main_process:
        accelerator.init_trackers("project")
    accelerator.log({"x": 1})
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_init_trackers_may_be_called_on_the_main_process_alone(tmp_path, run_processes):
    run_processes(started_on_main_only, tmp_path)


def to_event_files(folder):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("project")
    accelerator.log({"rank": accelerator.process_index})
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("direct", accelerator.process_index)
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_event_files_are_the_main_process_s(tmp_path, run_processes):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_processes(to_event_files, tmp_path)
    events = reader.EventAccumulator(str(tmp_path / "project")).Reload()

    assert len(list((tmp_path / "project").iterdir())) == 1
    assert [event.value for tag in ("rank", "direct") for event in events.Scalars(tag)] == [0, 0]


def never_started(folder):
    Accelerator(cpu=True, log_with="jsonl", project_dir=folder).log({"x": 1})


@pytest.mark.needs("accel-ddp")
def test_the_main_process_says_that_nothing_was_started(tmp_path, run_processes):
    with pytest.raises(ProcessError, match="before they were started") as caught:
        run_processes(never_started, tmp_path)
    assert caught.value.rank == 0


def stops_early():
    accelerator = Accelerator(cpu=True)
    losses = {0: [3.0, 2.0, 1.0, 0.5], 1: [3.0, 2.5, 2.5, 2.5]}[accelerator.process_index]
    best, epochs = float("inf"), 0
    for loss in losses:
        epochs += 1
        if loss >= best:
            accelerator.set_trigger()
        best = min(best, loss)
        if accelerator.check_trigger():
            break
    accelerator.end_training()
    return epochs


@pytest.mark.needs("accel-ddp")
def test_one_rank_that_stops_early_stops_all(run_processes):
    assert run_processes(stops_early) == [3, 3]


def test_a_tracker_is_not_told_secrets_of_the_configuration_it_stores():
    mine = Mine()
    accelerator = Accelerator(cpu=True, log_with=mine)
    accelerator.init_trackers("project", config={"lr": 1.0, "api_key": "s3cr3t", "pad_token": "<pad>"})
    accelerator.end_training()
    assert ("config", {"lr": 1.0, "api_key": "***", "pad_token": "<pad>"}) in mine.seen


def test_the_configuration_may_be_an_object_with_attributes():
    mine = Mine()
    accelerator = Accelerator(cpu=True, log_with=mine)
    accelerator.init_trackers("project", config=argparse.Namespace(lr=1.0))
    accelerator.end_training()
    assert ("config", {"lr": 1.0}) in mine.seen


CANNOT_CLOSE = """
from accel_core import Accelerator, GeneralTracker
class Mine(GeneralTracker):
    name = "mine"
    def finish(self):
        raise ConnectionError("the line is dead")
accelerator = Accelerator(cpu=True, log_with=[Mine()])
accelerator.init_trackers("project")
{last}
"""


@pytest.mark.parametrize("last", ["accelerator.end_training(); print('went on')", "print('went on')"])
def test_a_tracker_that_cannot_close_is_told_and_does_not_change_the_exit_code(last, run_command):
    script = CANNOT_CLOSE.format(last=last)
    ended = run_command([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert "accel: tracker 'mine' cannot close:\n" in ended.stderr
    assert "ConnectionError: the line is dead" in ended.stderr
