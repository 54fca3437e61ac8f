"""Accelerate's variables count where neither accel.yaml, a flag nor an argument says more."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from accelerate.utils.environment import override_numa_affinity
from peers import said

from accel_compat import runs
from accel_core import PluginError

needs_fsdp = pytest.mark.needs("accel-fsdp")


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """Set variables, and accel.yaml's text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def set_them(file: str = "", **values: str) -> None:
        (tmp_path / "accel.yaml").write_text(file or "{}")
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_them


def test_alone_a_variable_counts_and_is_named(variables):
    variables(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    accelerator = Accelerator()

    assert (accelerator.mixed_precision, accelerator.state.mixed_precision) == ("bf16", "bf16")
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 4
    origins = accelerator.run.resolved.origins
    assert origins["mixed_precision"] == "variable ACCELERATE_MIXED_PRECISION"


def test_the_file_wins_over_a_variable(variables):
    variables("mixed_precision: 'no'\n", ACCELERATE_MIXED_PRECISION="bf16")
    accelerator = Accelerator()

    assert accelerator.mixed_precision == accelerator.state.mixed_precision == "no"
    assert "over 'bf16' from variable ACCELERATE_MIXED_PRECISION" in str(accelerator.run.resolved.origins)


def test_an_argument_wins_over_a_variable(variables):
    variables(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_DYNAMO_BACKEND="EAGER")
    accelerator = Accelerator(mixed_precision="no", dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))

    assert accelerator.mixed_precision == "no"
    assert accelerator.run.config.compile.backend == "aot_eager"


def test_over_a_number_of_micro_batches_the_variable_wins_and_that_is_said(variables, capsys):
    variables(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")

    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 4
    assert "gradient_accumulation_steps is 2 in the program, 4 by" in capsys.readouterr().err


def test_a_compilers_settings_come_from_variables(variables):
    variables(ACCELERATE_DYNAMO_BACKEND="EAGER", ACCELERATE_DYNAMO_USE_FULLGRAPH="1")
    accelerator = Accelerator()

    assert (accelerator.run.config.compile.backend, accelerator.run.config.compile.fullgraph) == (
        "eager",
        True,
    )


@needs_fsdp
def test_what_a_variable_filled_in_a_plugin_reaches_the_strategy(monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")

    assert FullyShardedDataParallelPlugin(fsdp_version=2).to_ours().cpu_offload


@needs_fsdp
def test_a_strategy_that_only_variables_ask_for_gives_way_to_the_file(variables):
    variables(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_MIN_NUM_PARAMS="7")
    chosen = Accelerator()
    assert chosen.run.stack.default == "fsdp"
    assert chosen.run.configs["fsdp"].fsdp_version == 2
    chosen.run.end()
    variables("strategy: single\n")

    assert Accelerator().run.stack.default == "single"


def test_a_devices_number_counts_for_a_process_that_is_alone(variables):
    variables(ACCELERATE_TORCH_DEVICE="cpu:3")

    assert str(Accelerator().device) == "cpu:3"


def test_that_several_processes_leave_it_out_is_said(monkeypatch, tmp_path, run_processes):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    code = """
    import json
    from accelerate import Accelerator
    from accel_compat.notices import _warned

    device = str(Accelerator().device)
    print(json.dumps([device, [text for text in _warned if "TORCH_DEVICE" in text]]))
    """
    variable = {"ACCELERATE_TORCH_DEVICE": "cpu:3"}
    device, told = said(run_processes, code, ours=True, environment=variable, processes=2)

    assert device == "cpu"
    assert told == ["ACCELERATE_TORCH_DEVICE=cpu:3: the number is ignored, as each process has its own"]


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "eight",
        "ACCELERATE_USE_CPU": "maybe",
        "ACCELERATE_CPU_AFFINITY": "maybe",
        "ACCELERATE_MIXED_PRECISION": "bf61",
    }.items(),
)
def test_a_wrong_value_names_its_variable(variables, name, value):
    variables(**{name: value})
    with pytest.raises(ValueError, match=rf"the variable {name}.*{value}"):
        Accelerator()


@pytest.mark.parametrize("steps", [{}, {"gradient_accumulation_steps": 2}])
def test_a_window_of_no_micro_batch_is_refused(variables, steps):
    variables(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="0")
    with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 0\nset it to 1 or more"):
        Accelerator(**steps)


def test_a_backend_of_torch_compile_that_is_none_is_named(variables):
    variables(ACCELERATE_DYNAMO_BACKEND="EAGR")
    with pytest.raises(ValueError, match="'EAGR' is not a valid DynamoBackend"):
        Accelerator()
    with pytest.raises(ValueError, match="'INDUCTR' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="inductr")


@needs_fsdp
def test_a_word_that_is_neither_true_nor_false_is_named(variables):
    variables(FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="perhaps")
    with pytest.raises(ValueError, match="invalid truth value perhaps"):
        FullyShardedDataParallelPlugin()


@pytest.fixture
def bound(monkeypatch):
    """Stand in for a GPU and accel-cuda; collect what is bound."""
    calls = []
    library = SimpleNamespace(override_numa_affinity=lambda *args: calls.append(args))
    monkeypatch.setitem(sys.modules, "accel_cuda", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return calls


def test_affinity_is_set_for_the_gpu_of_the_number_and_without_a_run(bound):
    override_numa_affinity(5)
    override_numa_affinity(3, verbose=True)

    assert bound == [(5, None), (3, True)]


@pytest.mark.parametrize("status", ["available", "missing"])
def test_the_variable_of_affinity_is_read_in_workers(monkeypatch, bound, status):
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    monkeypatch.setattr(runs, "plugin_status", {"cuda": status}.get)
    if status == "missing":
        monkeypatch.setitem(sys.modules, "accel_cuda", None)
        with pytest.raises(PluginError, match="CPU affinity needs accel-cuda, which is not installed\n"):
            runs.affinity_preset()
    else:
        assert runs.affinity_preset() == {"cuda.numa_affinity": (True, "variable ACCELERATE_CPU_AFFINITY")}


def test_affinity_has_no_effect_without_a_gpu(variables):
    variables(ACCELERATE_CPU_AFFINITY="1")
    override_numa_affinity(0)
    assert Accelerator(cpu=True).device.type == PartialState().device.type == "cpu"


def test_a_state_refuses_a_wrong_word_too(variables):
    variables(ACCELERATE_CPU_AFFINITY="maybe")
    with pytest.raises(ValueError, match="the variable ACCELERATE_CPU_AFFINITY is 'maybe', not yes or no"):
        PartialState()
