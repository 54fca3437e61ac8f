"""What `accel launch` refuses, counts and says before a worker exists."""

from __future__ import annotations

import sys

import pytest

from accel_core import ConfigError
from accel_core.launch.plan import plan
from accel_testing.commands import clean_environment

DEVICE = """
def visible_devices(config):
    return 2

def launch_environment(config, world):
    return {"PONY_NEEDS": "hay"}
"""


@pytest.fixture
def pony(toys, tmp_path):
    """The environment with a device plugin `pony`: two devices, one variable that its library reads."""
    (tmp_path / "train.py").write_text(
        "import os\nif os.environ['RANK'] == '0': print(os.environ['WORLD_SIZE'], os.environ['PONY_NEEDS'])"
    )
    return toys(
        "pony",
        "device",
        launch_environment="'toy_launch:launch_environment'",
        visible_devices="'toy_launch:visible_devices'",
        offers="{'process_per_device'}",
        modules={"toy_launch": DEVICE},
    )


def test_auto_is_one_worker_a_device_of_the_kind_asked_for(pony, tmp_path, accel):
    ended = accel("launch", "--device", "pony", "train.py", environment=pony, cwd=tmp_path)

    assert ended.stderr == "accel 0.1: 2 processes, device pony, no config file\n"
    assert ended.stdout == "2 hay\n"


def test_what_a_device_wants_in_the_environment_does_not_replace_what_the_user_set(pony, tmp_path, accel):
    environment = {**pony, "PONY_NEEDS": "oats"}

    ended = accel("launch", "--device", "pony", "-n", "1", "train.py", environment=environment, cwd=tmp_path)

    assert ended.stdout == "1 oats\n"


@pytest.mark.parametrize(("own", "guessed"), [({}, "hay"), ({"PONY_NEEDS": "oats"}, None)])
def test_workers_know_which_variables_the_launcher_set_for_plugins(pony, tmp_path, own, guessed, accel):
    show = "import json, os; print(json.loads(os.environ['ACCEL_LAUNCH_VARIABLES']).get('PONY_NEEDS'))"
    (tmp_path / "train.py").write_text(show)

    words = ("launch", "--device", "pony", "-n", "1", "train.py")
    ended = accel(*words, environment={**pony, **own}, cwd=tmp_path)

    assert ended.stdout == f"{guessed}\n"


def test_more_processes_than_devices_is_an_error_not_fewer_processes(pony, tmp_path, accel):
    ended = accel("launch", "--device", "pony", "-n", "3", "train.py", environment=pony, cwd=tmp_path)

    assert ended.returncode == 1
    assert ended.stderr == (
        "accel: 3 processes per node were asked for; this machine shows 2 pony device(s)\n"
        "use -n 2, or -n auto, or --device cpu\n"
    )


def test_a_device_that_trains_in_one_process_refuses_two(toys, tmp_path, accel):
    (tmp_path / "train.py").write_text("")

    ended = accel(
        "launch", "--device", "mule", "-n", "2", "train.py", environment=toys("mule", "device"), cwd=tmp_path
    )

    assert ended.stderr == (
        "accel: 2 processes were asked for; mule trains in one\nuse -n 1, or --device cpu\n"
    )


# -- dry run ---------------------------------------------------------------------------------------


def test_a_dry_run_starts_nothing_and_says_where_each_value_comes_from(tmp_path, accel):
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    (tmp_path / "accel.yaml").write_text("mixed_precision: bf16\n")

    nodes = ("--nodes", "2", "--rendezvous", "10.0.0.1:29500")
    ended = accel("launch", *nodes, "-n", "8", "--dry-run", "train.py", "--lr", "1", cwd=tmp_path)

    assert ended.returncode == 0
    told = ended.stdout.splitlines()
    assert told[0] == "accel 0.1: 2 nodes x 8 = 16 processes, mixed precision bf16, config accel.yaml"
    assert told[1].endswith("/python train.py --lr 1")
    assert "  launch.nodes: flag --nodes" in told
    assert any(line.startswith("  mixed_precision: accel.yaml") for line in told)
    assert not (tmp_path / "ran").exists()


SPELLINGS = [
    ["-n", "2", "--data.split-batches", "true", "train.py"],
    ["-n2", "--data.split-batches=true", "train.py"],
    ["--processes-per-node=2", "--data.split_batches", "true", "--", "train.py"],
    [
        "--launch.processes-per-node",
        "2",
        "--data.split-batches",
        "true",
        "train.py",
        "-n",
        "7",
        "--data.x",
        "1",
    ],
]


@pytest.mark.parametrize("words", SPELLINGS, ids=" ".join)
def test_a_flag_may_be_spelt_in_several_ways_and_behind_the_script_it_is_the_scripts(tmp_path, words, accel):
    (tmp_path / "train.py").write_text("")

    told = accel("launch", "--dry-run", *words, cwd=tmp_path).stdout.splitlines()

    arguments = " ".join(["", *words[words.index("train.py") + 1 :]]).rstrip()
    assert told[0].startswith("accel 0.1: 2 processes,")
    assert told[1].endswith(f" train.py{arguments}")
    given = [line.split(":")[0].strip() for line in told if line.startswith("  ")]
    assert given == ["data.split_batches", "launch.processes_per_node"]


NO_TORCH = """
import sys
from accel_core.cli import main
sys.argv = ["accel", "launch", "--dry-run", "train.py"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_a_dry_run_imports_no_torch_and_counts_nothing(tmp_path, run_command):
    (tmp_path / "train.py").write_text("")

    words, environment = [sys.executable, "-c", NO_TORCH], clean_environment()
    ended = run_command(words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("accel 0.1: auto processes, no config file\n")


# -- refusals --------------------------------------------------------------------------------------


def refused(accel, tmp_path, *words, code: int = 1) -> str:
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    ended = accel("launch", *words, cwd=tmp_path)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "ran").exists()
    return ended.stderr


def test_a_script_that_is_not_there(tmp_path, accel):
    told = refused(accel, tmp_path, "-n", "2", "trian.py", code=2)

    assert told.startswith(f"accel: there is no script trian.py in {tmp_path}\n")


def test_nothing_to_launch(tmp_path, accel):
    assert refused(accel, tmp_path, "-n", "2", code=2).startswith("accel: nothing to launch\n")


def test_a_number_that_is_none(tmp_path, accel):
    told = refused(accel, tmp_path, "-n", "two", "train.py")

    assert "--processes-per-node" in told
    assert "expected integer or one of 'auto', got 'two'" in told


def test_nodes_without_a_place_to_meet(tmp_path, accel):
    told = refused(accel, tmp_path, "--device", "cpu", "--nodes", "2", "train.py")

    assert (
        told.splitlines()[-1]
        == "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
    )


IMPOSSIBLE = ["host", ":29500", "host:", "host:http", "host:0", "host:65536"]
IMPOSSIBLE += ["tcp://host:29500", "fd00::1:29500", "a b:29500"]


@pytest.mark.parametrize("place", IMPOSSIBLE)
def test_a_place_where_nobody_can_meet_is_refused_before_anything_starts(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        plan(flags=[("launch.nodes", "2"), ("launch.rendezvous", place)])
    assert f"{place!r} is not HOST:PORT, such as 10.0.0.1:29500" in str(refused.value)


@pytest.mark.parametrize("place", ["host:29500", "[fd00::1]:29500", "10.0.0.1:1", "a_node-7.cluster:65535"])
def test_other_places_will_do(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    planned = plan(flags=[("launch.nodes", "2"), ("launch.rendezvous", place)])
    assert planned.config.launch.rendezvous == place


@pytest.mark.parametrize(("fewest", "restarts"), [("3", "1"), ("1", "0")])
def test_fewer_nodes_will_do_only_if_there_are_fewer_and_restarts(tmp_path, monkeypatch, fewest, restarts):
    monkeypatch.chdir(tmp_path)
    flags = [("launch.nodes", "2"), ("launch.min_nodes", fewest), ("launch.max_restarts", restarts)]
    with pytest.raises(ConfigError, match="goes on with fewer nodes by restarting"):
        plan(flags=flags)


def test_a_dry_run_of_nodes_without_a_place_to_meet_is_refused_too(tmp_path, accel):
    told = refused(accel, tmp_path, "--dry-run", "--nodes", "2", "train.py")

    assert "2 nodes were asked for, without an address at which they meet" in told


def test_a_launcher_that_finds_the_place_itself_is_given_none(toys, tmp_path, accel):
    source = "class Launcher:\n    def __init__(self, config, run): pass\n"
    modules = {"toy_other": source}
    environment = toys("herd", "launcher", implementation="'toy_other:Launcher'", modules=modules)
    (tmp_path / "train.py").touch()
    flags = ("--dry-run", "--nodes", "2", "--launcher", "herd", "train.py")

    ended = accel("launch", *flags, environment=environment, cwd=tmp_path)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "2 nodes x auto" in ended.stdout


LAUNCHER = """
import os
from accel_core import hooks, implements

class Launcher:
    def __init__(self, config, run):
        pass

    @implements(hooks.launch)
    def launch(self, job):
        return eval(os.environ["GIVES"])
"""


@pytest.fixture
def herd(toys, tmp_path, accel):
    """Launches by the launcher `herd`, which ends as it is told."""
    (tmp_path / "train.py").write_text("print('trains')")
    environment = toys(
        "herd", "launcher", implementation="'toy_herds:Launcher'", modules={"toy_herds": LAUNCHER}
    )

    def launch(gives):
        command = ("launch", "--launcher", "herd", "--device", "cpu", "-n", "2", "train.py")
        return accel(*command, environment={**environment, "GIVES": gives}, cwd=tmp_path)

    return launch


@pytest.mark.parametrize(("gives", "code"), [("0", 0), ("3", 3), ("256", 1), ("-15", 241)])
def test_no_exit_code_but_0_is_a_success(herd, gives, code):
    assert herd(gives).returncode == code


def test_an_unknown_launcher(tmp_path, accel):
    told = refused(accel, tmp_path, "--launcher", "torchrn", "train.py")

    assert told.startswith("accel: flag --launcher: launch.launcher: ")
    assert "did you mean 'torchrun'?" in told


def test_an_unknown_strategy_is_refused_before_workers_exist(tmp_path, accel):
    told = refused(accel, tmp_path, "--device", "cpu", "-n", "2", "--strategy", "sinlge", "train.py")

    assert told.startswith("accel: flag --strategy: strategy: ")
    assert "did you mean 'single'?" in told


def test_a_misspelt_flag(tmp_path, accel):
    assert "--devise is not a flag of accel launch; did you mean '--device'?" in refused(
        accel, tmp_path, "--devise", "train.py"
    )


@pytest.mark.parametrize(("one", "other"), [("--tee", "--launch.tee"), ("--log-dir", "--launch.log-dir")])
def test_two_spellings_of_a_flag_with_two_values_are_refused(tmp_path, one, other, accel):
    (tmp_path / "train.py").touch()
    for asked in ((one, "main", other, "all"), (other, "all", one, "main")):
        ended = accel("launch", "--dry-run", *asked, "train.py", cwd=tmp_path)

        assert ended.returncode == 1
        assert f"accel: flag {one}: " in ended.stderr
        assert "give it once" in ended.stderr


def test_a_misspelt_dotted_flag_of_a_plugin_is_answered_with_its_option(toys, tmp_path, accel):
    config = "from attrs import frozen\nfrom accel_core import option\n"
    config += "@frozen(kw_only=True)\nclass Config:\n    static_gait: bool = option(False, help='Trot.')\n"
    environment = toys("pony", "strategy", config="'toy_config:Config'", modules={"toy_config": config})
    (tmp_path / "train.py").write_text("")

    ended = accel("launch", "--pony.static-gate", "true", "train.py", environment=environment, cwd=tmp_path)

    assert ended.returncode == 1
    assert "--pony.static-gate" in ended.stderr
    assert "static_gait" in ended.stderr.replace("-", "_")


def test_a_dotted_flag_without_its_value_is_told_from_a_missing_script(tmp_path, accel):
    told = refused(accel, tmp_path, "--data.split-batches", "train.py")

    assert "--data.split-batches" in told
    assert "'train.py'" in told


OLD = {
    "--num_processes 4": "counted all of them",
    "--num_processes=4": "counted all of them",
    "--nproc-per-node gpu": "auto is one process on a CPU, not one a core",
    "--cpu": "where --cpu started one",
    "--num_machines 2": "use --nodes",
    "--nnodes 1:4": "use --nodes N; for MIN:MAX --nodes MAX --min-nodes MIN",
    "--machine_rank 0": "use --node-rank",
    "--main_process_ip 10.0.0.1": "use --rendezvous HOST:PORT",
    "--main_process_port 29500": "a free port is taken by itself",
    "--rdzv-endpoint 10.0.0.1:1": "--node-rank 0 on the node that has this address",
    "--config_file a.yaml": "use --config FILE; it is accel-core's YAML",
    "--mixed_precision fp16": "did you mean '--mixed-precision'?",
    "--multi_gpu": "-n N or auto says how many processes",
    "--fsdp_offload_params true": "use --strategy fsdp with --fsdp.",
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_flag_is_answered_with_what_it_means_here(tmp_path, old, accel):
    told = refused(accel, tmp_path, *old.split(), "train.py")

    assert told.startswith(f"accel: {old.replace('=', ' ').split()[0]} is not a flag of accel launch")
    assert OLD[old] in told


OPTIONS = """
from attrs import frozen
from accel_core import option

@frozen(kw_only=True)
class Config:
    size: int = option(1, help="How many.")
"""
PLUGIN = "class Plugin:\n    def __init__(self, config, run):\n        print('size', config.size)\n"
TRAIN = "from accel_core import Accelerator\nAccelerator()\n"


@pytest.fixture
def trot(toys, tmp_path):
    """The environment with an extension that has an option."""
    (tmp_path / "train.py").write_text(TRAIN)
    return toys(
        "trot",
        "extension",
        config="'toy_config:Config'",
        implementation="'toy_trotter:Plugin'",
        modules={"toy_config": OPTIONS, "toy_trotter": PLUGIN},
    )


@pytest.mark.full
def test_the_flag_of_an_extension_that_is_not_chosen_ends_the_run_and_one_more_flag_chooses_it(
    trot, tmp_path, accel
):
    words = ["launch", "--device", "cpu", "--trot.size", "2"]
    refused = accel(*words, "train.py", environment=trot, cwd=tmp_path)
    chosen = accel(*words, "--extensions", "trot", "train.py", environment=trot, cwd=tmp_path)

    assert refused.returncode == 1
    assert "flag --trot.size: extension trot is not in this run" in refused.stderr
    assert "--extensions trot" in refused.stderr
    assert chosen.stdout == "size 2\n"


@pytest.mark.full
def test_a_section_of_an_extension_that_is_not_chosen_is_a_note_of_check_dry_run_and_the_run(
    trot, tmp_path, accel
):
    (tmp_path / "accel.yaml").write_text("device: cpu\ntrot: {size: 2}\n")
    ran = accel("launch", "train.py", environment=trot, cwd=tmp_path)
    told = [
        accel("config", "check", environment=trot, cwd=tmp_path).stdout,
        accel("launch", "--dry-run", "train.py", environment=trot, cwd=tmp_path).stdout,
        ran.stderr,
    ]

    assert ran.returncode == 0
    assert all("extension trot is not in this" in each and "`extensions: [trot]`" in each for each in told)


def test_every_option_of_the_top_level_has_a_flag(tmp_path, accel):
    (tmp_path / "train.py").write_text("")
    words = "--gradient-accumulation-steps 2 --device-placement false --step-scheduler-with-optimizer false"
    words += " --rng-types torch,python --log-with jsonl"
    told = accel("launch", "--dry-run", *words.split(), "train.py", cwd=tmp_path)

    assert told.returncode == 0, told.stderr
    assert all(f": flag {word}\n" in told.stdout for word in words.split() if word.startswith("--"))


def test_help_lists_the_sections_of_core_and_those_of_plugins(trot, tmp_path, accel):
    told = accel("launch", "--help-all", environment=trot).stdout

    assert all(f"--{name}.OPTION VALUE" in told for name in ("data", "compile", "process_group"))
    assert "  --trot." in told


def test_a_launch_within_a_worker_reads_its_own_file(tmp_path, accel):
    (tmp_path / "inner").mkdir()
    (tmp_path / "accel.yaml").write_text("gradient_accumulation_steps: 2\nlaunch: {processes_per_node: 1}\n")
    (tmp_path / "inner" / "accel.yaml").write_text("gradient_accumulation_steps: 5\n")
    show = "import os, sys\nfrom accel_core.cli import main\n"
    show += "os.chdir('inner')\nsys.argv = ['accel', 'config', 'show']\nmain()\n"
    (tmp_path / "train.py").write_text(show)

    told = accel("launch", "--device", "cpu", "train.py", cwd=tmp_path).stdout

    assert "5  " in next(line for line in told.splitlines() if line.startswith("gradient_accumulation_steps"))
