"""Two checkpoints of real runs, compared from the command line."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from html.parser import HTMLParser
from inspect import signature

import diff_jobs as jobs
import opened
import pytest
import torch
from attrs import asdict
from click.testing import CliRunner
from opened import rewrite

from accel_checkpoint_tools.contents import Contents, Source
from accel_core import Outline, ParallelismConfig, commits, read_manifest, storage_at
from accel_core.cli.group import accel
from accel_core.storage.commit import manifest_of
from accel_core.storage.files import write_file

# click 8.1 joins both streams unless it is told not to; later ones keep them apart, and take no argument.
APART = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}


def command(*words):
    return CliRunner(**APART).invoke(accel, ["checkpoint", *map(str, words)])


def diff(*words):
    """Return the exit status and what `--json` prints."""
    ended = command("diff", "--json", *words)
    return ended.exit_code, json.loads(ended.stdout)


def named(found):
    return {(each["section"], each["name"]) for each in found["tensors"]}


def paths(found, section):
    return {value["path"] for value in found["values"] if value["section"] == section}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_processes):
    """Three steps by one process, by two that replicate and by two that shard; and the first, sharded."""
    folder = tmp_path_factory.mktemp("runs")
    run_processes(jobs.train, str(folder / "one"), "single", world=1)
    run_processes(jobs.train, str(folder / "ddp"), "ddp", world=2)
    run_processes(jobs.train, str(folder / "fsdp"), "fsdp", world=2)
    first = str(folder / "one" / "step3")
    run_processes(jobs.save_again, first, str(folder / "sharded"), "fsdp", world=2)
    return folder


@pytest.fixture
def changed(runs, tmp_path):
    """Write the first run's checkpoint again, changed by a function; return both folders."""

    def change(function):
        return runs / "one" / "step3", rewrite(runs / "one" / "step3", tmp_path / "changed", function)

    return change


@pytest.mark.needs("accel-ddp")
def test_a_run_against_itself_resumed_is_empty(runs, tmp_path, run_processes):
    project, first = str(runs / "one"), runs / "one" / "step3"
    before = tmp_path / "before"
    first.rename(before)

    run_processes(jobs.train, project, "single", f"{project}/step2", 2, world=1)

    ended = command("diff", before, first)
    assert (ended.exit_code, ended.stdout) == (0, "no difference\n")


@pytest.mark.needs("accel-ddp")
def test_a_sharded_checkpoint_and_a_whole_one_of_one_state_have_the_same_tensors(runs):
    code, found = diff(runs / "one" / "step3", runs / "sharded", "--only", "model", "--only", "optimizer")

    assert (code, found["tensors"], found["values"]) == (0, [], [])
    assert found["compared"] == 5 + 5 * 3


@pytest.mark.needs("accel-fsdp")
def test_rows_and_columns_of_tensor_parallel_ranks_are_whole_tensors(tmp_path, run_processes):
    from accel_fsdp import TorchTensorParallelPlugin

    plan = {"layers.0": "colwise", "layers.1": "rowwise"}
    split = [TorchTensorParallelPlugin(tp_size=2, parallelize_plan=plan)]
    run_processes(jobs.train, str(tmp_path), "fsdp", None, 0, split, world=2)
    before = (tmp_path / "step3").rename(tmp_path / "before")
    run_processes(jobs.train, str(tmp_path), "fsdp", str(tmp_path / "step2"), 2, split, world=2)
    run_processes(jobs.save_again, str(before), str(tmp_path / "whole"), "single", world=1)

    again = command("diff", before, tmp_path / "step3")
    assert (again.exit_code, again.stdout) == (0, "no difference\n")
    code, found = diff(before, tmp_path / "whole", "--only", "model", "--only", "optimizer")
    assert (code, found["compared"]) == (0, 5 + 5 * 3)
    rows = {row["key"]: row for row in json.loads(command("show", "--json", before).stdout)["tensors"]}
    boxes = {name: [box["shape"] for box in rows[f"model/{name}.weight"]["boxes"]] for name in plan}
    assert boxes == {"layers.0": [[3, 6]] * 2, "layers.1": [[6, 3]] * 2}


@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize("world", [2, 4], ids=["stages", "sharded stages"])
def test_stages_of_a_pipeline_are_one_model_by_its_names(tmp_path, world, run_processes):
    from accel_fsdp import FullyShardedDataParallelPlugin

    cut = [FullyShardedDataParallelPlugin(pp_split_points=["layers.1"]), ParallelismConfig(pp=2)]
    run_processes(jobs.train, str(tmp_path), "fsdp", None, 0, cut, world=world)
    before = (tmp_path / "step3").rename(tmp_path / "before")
    run_processes(jobs.train, str(tmp_path), "fsdp", str(tmp_path / "step2"), 2, cut, world=world)
    run_processes(jobs.save_again, str(before), str(tmp_path / "whole"), "single", world=1)

    again = command("diff", before, tmp_path / "step3")
    assert (again.exit_code, again.stdout) == (0, "no difference\n")
    code, found = diff(before, tmp_path / "whole", "--only", "model", "--only", "optimizer")
    assert (code, found["compared"]) == (0, 5 + 5 * 3)
    rows = json.loads(command("show", "--json", before).stdout)["tensors"]
    assert {row["key"] for row in rows if row["key"].startswith("model/")} == {
        f"model/{name}" for name in jobs.Net().state_dict() if name != "head.weight"
    }
    stages = {row["key"]: {int(box["file"][5:10]) * 2 // world for box in row["boxes"]} for row in rows}
    assert (stages["model/layers.0.weight"], stages["model/layers.1.weight"]) == ({0}, {1})


@pytest.mark.needs("accel-ddp")
def test_world_and_stack_are_told(runs):
    _, found = diff(runs / "one" / "step3", runs / "sharded")

    assert {"world.size", "units.unit0"} <= paths(found, "stack")
    assert "stack" not in found["decisive"]


@pytest.mark.needs("accel-ddp")
def test_world_and_stack_alone_do_not_change_the_exit_status(runs, changed):
    def elsewhere(contents):
        contents.members["stack"]["device"] = "other"

    one, other = changed(elsewhere)

    assert diff(one, other)[0] == 0
    assert diff(one, other, "--only", "stack")[0] == 1
    assert (
        "stack (told only: does not change the exit status)\n  device: " in command("diff", one, other).stdout
    )


@pytest.mark.needs("accel-ddp")
def test_replicated_and_sharded_training_agree_within_a_tolerance(runs):
    words = runs / "ddp" / "step3", runs / "fsdp" / "step3", "--only", "model"

    assert diff(*words, "--rtol", "1e-4", "--atol", "1e-6")[0] == 0


@pytest.mark.needs("accel-ddp")
def test_two_steps_differ_in_tensors_schedule_position_and_random_numbers(runs):
    code, found = diff(runs / "one" / "step2", runs / "one" / "step3")

    assert code == 1
    assert {("model", "layers.0.weight"), ("optimizer", "layers.1.bias/exp_avg")} <= named(found)
    assert "unit0.schedulers[0].state.last_epoch" in paths(found, "hyperparameters")
    assert {"step", "rank0.loaders[0].consumed"} <= paths(found, "data")
    assert paths(found, "random")
    assert not paths(found, "config")


@pytest.mark.needs("accel-ddp")
def test_a_changed_tensor_is_named_and_measured(changed):
    def add(contents):
        tensor = contents.tensors["unit0", "model/layers.0.weight"].read()
        tensor[2, 3] += 0.25
        contents.tensors["unit0", "model/layers.0.weight"] = Source.of(tensor)

    ended = command("diff", *changed(add))

    assert ended.exit_code == 1
    assert re.search(
        r"model: 1 of 5 tensors differ\n  unit0  layers.0.weight  max 0.25  relative .* 1 of 36 elements\n$",
        ended.stdout,
    )


@pytest.mark.needs("accel-ddp")
def test_a_name_on_one_side_is_told(changed):
    def drop(contents):
        del contents.tensors["unit0", "model/layers.1.bias"]

    code, found = diff(*changed(drop))

    assert code == 1
    assert [(each["name"], each["problem"], each["b"]) for each in found["tensors"]] == [
        ("layers.1.bias", "only in A", None)
    ]


@pytest.mark.needs("accel-ddp")
def test_another_shape_and_another_dtype_are_told(changed):
    def convert(contents):
        tensors = contents.tensors
        tensors["unit0", "model/layers.0.bias"] = Source.of(torch.ones(7))
        bias = tensors["unit0", "model/layers.1.bias"].read()
        tensors["unit0", "model/layers.1.bias"] = Source.of(bias.bfloat16())

    _, found = diff(*changed(convert))

    told = {each["name"]: each for each in found["tensors"]}
    assert told["layers.0.bias"]["problem"] == "shape [6] in A, [7] in B"
    assert told["layers.1.bias"]["problem"] == "float32 in A, bfloat16 in B"
    assert 0 < told["layers.1.bias"]["difference"]["relative"] < 0.01


@pytest.mark.needs("accel-ddp")
def test_a_tie_that_is_gone_is_told_though_all_values_are_equal(changed):
    def untie(contents):
        contents.state["units"]["unit0"]["aliases"] = {}
        contents.tensors["unit0", "model/head.weight"] = contents.tensors["unit0", "model/embedding.weight"]

    code, found = diff(*changed(untie))

    assert (code, found["tensors"]) == (1, [])
    assert paths(found, "model") == {"ties.unit0"}


@pytest.mark.needs("accel-ddp")
def test_hyperparameters_are_told_once_for_all_parameters_that_have_them(changed):
    def slower(contents):
        contents.state["units"]["unit0"]["optimizers"][0]["groups"][0]["weight_decay"] = 0.5

    ended = command("diff", *changed(slower))

    assert ended.exit_code == 1
    assert "unit0.weight_decay: 0.01 -> 0.5 (5 parameters: embedding.weight, " in ended.stdout


@pytest.mark.needs("accel-ddp")
def test_hyperparameters_that_are_only_grouped_otherwise_are_equal(changed):
    def split(contents):
        groups = contents.state["units"]["unit0"]["optimizers"][0]["groups"]
        rest = groups[0]["params"][2:]
        groups[0]["params"] = groups[0]["params"][:2]
        groups.append({**groups[0], "params": rest})

    assert diff(*changed(split))[0] == 0


@pytest.mark.needs("accel-ddp")
def test_registered_objects_and_their_large_tensors_are_compared(changed, runs, tmp_path):
    values = torch.zeros(40000)

    def register_first(contents):
        contents.state["registered"] = [{"class": "Average", "state": {"mean": values, "count": 1}}]

    one = rewrite(runs / "one" / "step3", tmp_path / "registered", register_first)

    def register(contents):
        other = values.clone()
        other[39999] = math.inf
        contents.state["registered"] = [{"class": "Average", "state": {"mean": other, "count": 2}}]

    code, found = diff(one, changed(register)[1])

    assert code == 1
    assert paths(found, "registered") == {"[0].state.mean", "[0].state.count"}
    mean = next(each["difference"] for each in found["values"] if each["path"] == "[0].state.mean")
    assert (mean["different"], mean["max_abs"]) == (1, "inf")


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(
    ("forge_it", "section", "path"),
    [
        (lambda it: it.state.update(later=[1]), "later", ""),
        (lambda it: it.ranks[0].update(later=[1]), "later", "rank0"),
        (lambda it: it.state["units"]["unit0"].update(later=[1]), "later", "unit unit0"),
        (lambda it: it.members.update(later=[1]), "later", "manifest"),
        (
            lambda it: it.state["units"]["unit0"]["optimizers"][0].update(later=1),
            "optimizer",
            "unit0.0",
        ),
        (lambda it: it.state.update(steps_done=[9]), "data", "steps_done[0]"),
        (lambda it: it.members.update(metrics={"loss": 0.5}), "data", "metrics.loss"),
        (lambda it: it.state["run"].update(wandb={"id": "x"}), "run", "wandb"),
    ],
)
def test_state_of_any_name_is_compared(changed, forge_it, section, path):
    code, found = diff(*changed(forge_it))

    assert {(each["section"], each["path"]) for each in found["values"]} == {(section, path)}
    assert code == (section != "run"), "names of trackers' runs differ by design"


@pytest.mark.needs("accel-ddp")
def test_tensors_of_an_unknown_section_are_compared_under_its_name(runs, tmp_path):
    def put(value):
        def change(contents):
            contents.tensors["unit0", "later/layers.0"] = Source.of(torch.full((2,), value))

        return change

    folders = [rewrite(runs / "one" / "step3", tmp_path / str(it), put(it)) for it in (1.0, 2.0)]
    code, found = diff(*folders)

    assert (code, named(found)) == (1, {("later", "layers.0")})
    assert "\nlater: 1 of 1 tensors differ\n" in command("diff", *folders).stdout
    assert diff(*folders, "--only", "later")[0] == 1
    assert diff(*folders, "--only", "model")[0] == 0
    command("diff", *folders, "--html", tmp_path / "page.html")
    assert "later/layers.0: max 1" in (tmp_path / "page.html").read_text()


@pytest.mark.needs("accel-ddp")
def test_what_a_rank_tells_otherwise_than_the_first_is_compared(changed):
    def differ(contents):
        mine = contents.ranks[0]["units"] = deepcopy(contents.state["units"])
        mine["unit0"]["schedulers"][0]["state"]["last_epoch"] = 99
        mine["unit0"]["extra"] = {"seen": 1}
        mine["unit0"]["optimizers"][0]["groups"][0]["weight_decay"] = 0.5

    code, found = diff(*changed(differ))

    assert code == 1
    assert "unit0.extra.seen" in paths(found, "model")
    assert "unit0.schedulers of rank0" in paths(found, "hyperparameters")
    assert "unit0.parameters.layers.0.bias of rank0" in paths(found, "hyperparameters")


@pytest.mark.needs("accel-ddp")
def test_parts_of_a_wrapper_of_another_layout_differ(runs, tmp_path):
    def put(layout):
        def change(contents):
            outline = Outline("opaque", (2,), "int8", layout)
            source = Source(outline, lambda: torch.ones(2, dtype=torch.int8))
            contents.tensors["unit0", "optimizer/layers.0.weight/exp_avg#codes"] = source

        return change

    folders = [rewrite(runs / "one" / "step3", tmp_path / it, put(it)) for it in ("q4", "q8")]
    code, found = diff(*folders)

    assert (code, named(found)) == (1, {("optimizer", "layers.0.weight/exp_avg#codes")})
    assert found["tensors"][0]["problem"] == "layout q4 in A, q8 in B"


@pytest.mark.needs("accel-ddp")
def test_config_is_told(changed):
    def reconfigure(contents):
        contents.members["config"]["mixed_precision"] = "bf16"

    code, found = diff(*changed(reconfigure))

    assert (code, paths(found, "config")) == (0, {"mixed_precision"})


@pytest.mark.needs("accel-ddp")
def test_what_cannot_be_compared_has_an_exit_status_of_its_own(runs, tmp_path):
    ended = command("diff", runs / "one" / "step3", tmp_path)

    assert ended.exit_code == 2
    assert "is not a checkpoint" in ended.stderr


@pytest.mark.needs("accel-ddp")
def test_damage_is_no_difference(runs, tmp_path):
    shutil.copytree(runs / "one" / "step3", tmp_path / "damaged")
    data = file_of(tmp_path / "damaged", "rank-00000.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 0x40
    data.write_bytes(content)

    ended = command("diff", runs / "one" / "step3", tmp_path / "damaged")

    assert ended.exit_code == 2
    assert f"{data} is damaged: block 0 is not what was written" in ended.stderr


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(
    ("forge_it", "said"),
    [
        (lambda outline, _: outline.pop("shape"), "KeyError('shape')"),
        (lambda outline, _: outline.update(shape=7), "TypeError"),
        (lambda outline, _: outline.update(shape=[-6, 6]), "[-6, 6]"),
        (lambda _, weight: weight.append(0), "too many values to unpack"),
        (lambda _, weight: weight.__setitem__(0, -1), "KeyError(-1)"),
        (
            lambda _, weight: weight.__setitem__(1, [[[1, 0], [6, 6], 0]]),
            "[1:7, 0:6] is not inside of [6, 6]",
        ),
        (lambda _, weight: weight.__setitem__(1, [[[0, 0], [6], 0]]), "ValueError"),
    ],
)
@pytest.mark.parametrize("words", [["diff", "--only", "model"], ["show"]], ids=["diff", "show"])
def test_an_index_that_no_save_writes_is_told_in_a_sentence(runs, tmp_path, words, forge_it, said):
    shutil.copytree(runs / "one" / "step3", tmp_path / "forged")
    index = file_of(tmp_path / "forged", "rank-00000.json")

    def change(told):
        weight = told["tensors"]["unit0"]["model/layers.0.weight"]
        forge_it(told["outlines"][weight[0]], weight)

    forge(index, change)

    ended = command(*words, *([runs / "one" / "step3"] if "diff" in words else []), tmp_path / "forged")

    assert (ended.exit_code, ended.stdout) == (2, "")
    forged = tmp_path / "forged"
    assert re.match(f"accel: ({index}|{forged}) is damaged: it cannot be understood ", ended.stderr)
    assert said in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("restore this file")


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("start", [-1, 1 << 40, "first", 1.5, None])
def test_a_place_outside_the_file_is_told_in_a_sentence(runs, tmp_path, start):
    shutil.copytree(runs / "one" / "step3", tmp_path / "forged")
    index = file_of(tmp_path / "forged", "rank-00000.json")
    forge(index, lambda told: told["tensors"]["unit0"]["model/layers.0.weight"].__setitem__(1, start))

    ended = command("diff", runs / "one" / "step3", tmp_path / "forged")

    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("accel: ")
    assert len(ended.stderr.splitlines()) == 2


def file_of(folder, name):
    return folder / read_manifest(storage_at(folder)).save_id / name


def forge(file, change):
    """Change a JSON file of a checkpoint, and what the manifest says of it."""
    place = storage_at(file.parents[1])
    told, manifest = json.loads(file.read_bytes()), read_manifest(place).members
    change(told)
    with io.BytesIO() as written:
        record, _ = write_file(written, [json.dumps(told).encode()])
        file.write_bytes(written.getvalue())
    members = {**manifest, "files": {**manifest["files"], file.name: asdict(record)}}
    members.pop("checksum")
    (name,) = commits(place).values()
    (file.parents[1] / name).write_bytes(manifest_of(members))


@pytest.mark.needs("accel-ddp")
def test_a_reader_that_has_read_enough_does_not_change_the_exit_status(runs, start_command):
    words = [sys.executable, "-m", "accel_core", "checkpoint", "diff"]
    folders = runs / "one" / "step2", runs / "one" / "step3"
    with start_command([*words, *folders], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ended:
        ended.stdout.close()
        told = ended.stderr.read()

    assert (ended.returncode, told) == (1, b"")


@pytest.mark.needs("accel-ddp")
def test_what_moves_the_cursor_in_a_name_is_printed_as_escapes(changed):
    def rename(contents):
        contents.tensors["unit0", "model/\x1b[2J\nno difference"] = Source.of(torch.ones(2))

    first, other = changed(rename)

    for ended in (command("diff", first, other), command("show", other)):
        assert "\\x1b[2J\\nno difference" in ended.stdout
        assert "\x1b" not in ended.stdout


@pytest.mark.needs("accel-ddp")
def test_a_tensor_and_a_layer_may_have_one_name(changed):
    def name_alike(contents):
        contents.tensors["unit0", "model/one"] = Source.of(torch.ones(2))
        contents.tensors["unit0", "model/one.more"] = Source.of(torch.ones(3))

    _, other = changed(name_alike)
    ended = command("show", other)

    assert re.search(r"(?m)^ *one +float32 +\[2\]", ended.stdout)
    assert re.search(r"(?m)^ *one\n *more +float32 +\[3\]", ended.stdout)


@pytest.mark.needs("accel-ddp")
def test_an_angle_that_cannot_be_measured_is_no_number(changed):
    def add(value):
        def change(contents):
            contents.tensors["unit0", "model/huge"] = Source.of(
                torch.tensor([1e300, value], dtype=torch.float64)
            )

        return change

    first = changed(add(1e300))[1]
    first = first.rename(first.with_name("first"))
    _, found = diff(first, changed(add(2e300))[1])

    assert found["tensors"][0]["difference"]["cosine"] == "nan"


@pytest.mark.needs("accel-ddp")
def test_the_text_for_what_is_absent_is_a_value(changed):
    def register(contents):
        contents.state["registered"] = [{"class": "Mine", "state": {"note": "(absent)"}}]

    first, other = changed(register)
    code, found = diff(first, other)

    assert (code, paths(found, "registered")) == (1, {""})


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.cells, self.links = {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag == "td" and "title" in values:
            name, _, told = values["title"].partition(": ")
            self.cells[name] = (values["class"], told)


@pytest.mark.needs("accel-ddp")
def test_the_page_has_a_cell_for_each_tensor_and_needs_no_network(changed, tmp_path):
    def add(contents):
        tensor = contents.tensors["unit0", "model/layers.0.weight"].read()
        tensor[2, 3] += 0.25
        contents.tensors["unit0", "model/layers.0.weight"] = Source.of(tensor)

    target = tmp_path / "diff.html"
    assert command("diff", *changed(add), "--html", target).exit_code == 1

    text = target.read_text(encoding="utf-8")
    page = Page(text)
    kind, told = page.cells.pop("model/layers.0.weight")
    assert (kind, told[:8]) == ("heat", "max 0.25")
    assert len(page.cells) == 4 + 5 * 3
    assert set(page.cells.values()) == {("equal", "equal")}
    assert page.links == []
    assert "<script" not in text
    assert "//" not in text.replace("</", "")


@pytest.mark.needs("accel-ddp")
def test_show_prints_the_tree(runs):
    ended = command("show", runs / "sharded")

    assert ended.exit_code == 0
    assert re.search(
        r"\n  model\n(.*\n)*    layers\n      0\n        bias .*\n"
        r"        weight +float32 +\[6, 6\] +144 B  2 files",
        ended.stdout,
    )
    assert "tied in unit0: embedding.weight = head.weight\n20 tensors, " in ended.stdout


@pytest.mark.needs("accel-ddp")
def test_show_tells_programs_where_each_box_lies(runs):
    rows = json.loads(command("show", "--json", runs / "sharded").stdout)["tensors"]

    weight = next(row for row in rows if row["key"] == "model/layers.0.weight")
    assert (weight["shape"], weight["dtype"], weight["bytes"]) == ([6, 6], "float32", 144)
    assert {box["file"] for box in weight["boxes"]} == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert sum(math.prod(box["shape"]) for box in weight["boxes"]) == 36


@pytest.mark.needs("accel-ddp")
def test_no_stack_is_imported(runs, run_command):
    code = "import atexit, sys; from accel_core.cli import main; sys.argv = ['accel', *sys.argv[1:]]\n"
    code += "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    folders = [str(runs / "ddp" / "step3"), str(runs / "sharded")]

    for words in (["diff", *folders], ["show", folders[1]]):
        ended = run_command(
            [sys.executable, "-c", code, "checkpoint", *words], capture_output=True, text=True, check=False
        )
        assert not {"accel_fsdp.strategy", "accel_ddp.strategy"} & set(ended.stderr.split())
        assert ended.stdout


@pytest.mark.needs("accel-ddp")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "megabytes", [256, pytest.param(4096, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_memory_does_not_grow_with_the_checkpoint(runs, tmp_path, megabytes, run_command):
    for name, value in (("a", 0.0), ("b", 1.0)):
        huge = torch.full((2, megabytes << 17), value)
        with Contents.open(runs / "one" / "step3") as contents:
            contents.tensors["unit0", "model/layers.0.weight"] = Source.of(huge)
            contents.write(tmp_path / name)
        del huge

    output, peak = opened.watched(
        run_command, "diff", tmp_path / "a", tmp_path / "b", "--only", "model", status=1
    )

    assert f"max 1  relative inf  cosine 0  {megabytes << 18} of" in output
    assert peak <= 400, "torch, and some blocks"
