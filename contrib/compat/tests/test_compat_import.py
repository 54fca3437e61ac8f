"""`import accelerate` means ours where that was asked for, and nowhere else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from accel_compat.activation import SURFACE
from accel_compat.launch import commands, request
from accel_compat.launch.commands import compat
from accel_compat.unsupported import NotServedError, inventory


def python(run_command, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        [sys.executable, "-c", code],
        env={**os.environ, "ACCEL_COMPAT": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_distribution_says_which_release_is_served():
    import accelerate

    assert accelerate.__version__ == metadata.version("accelerate") == "1.15.0"
    assert "accelerate" in metadata.packages_distributions()["accelerate"]


def test_nothing_changes_before_it_is_installed(tmp_path: Path, run_command):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("mine = True")
    code = "import accel_compat, accelerate; print(accelerate.mine)"

    assert python(run_command, code, PYTHONPATH=str(tmp_path)).stdout == "True\n"


def test_too_late_is_an_error_that_says_so(tmp_path: Path, run_command):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("")
    ended = python(
        run_command, "import accelerate, accel_compat; accel_compat.install()", PYTHONPATH=str(tmp_path)
    )

    assert "accel_compat.install() came too late: accelerate is imported already" in ended.stderr
    assert str(tmp_path) in ended.stderr


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    Path("default_config.yaml").write_text("num_processes: 2\n")
    Path("file").touch()

    done = CliRunner().invoke(compat, ["import", "default_config.yaml", "-o", "file/inside"])

    assert done.exit_code == 1
    assert done.output.startswith("Error: Could not open file 'file/inside': ")


def test_a_file_that_is_not_text_is_named(tmp_path: Path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")

    done = CliRunner().invoke(compat, ["import", str(tmp_path / "bytes.yaml")])

    assert "bytes.yaml cannot be read: 'utf-8' codec" in str(done.exception)


def scripted(monkeypatch, *words: str) -> object:
    """What the `accelerate` script ends with: a code, or what it says."""
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    with pytest.raises(SystemExit) as ended:
        commands.accelerate()
    return ended.value.code


def test_the_script_writes_a_basic_config_which_launch_reads(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    assert scripted(monkeypatch, "config", "default", "--mixed_precision", "bf16") == 0
    file = tmp_path / "accelerate" / "default_config.yaml"
    assert request.parse(["script.py"], commands.default_file()).file == str(file)
    assert request.read_file(str(file))["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("name", "advice"),
    {"confg": "merge-weights", "lunch": "launch"}.items(),
)
def test_the_script_lists_its_commands_where_it_does_not_know_one(monkeypatch, capsys, name, advice):
    assert scripted(monkeypatch, name) == 2
    said = capsys.readouterr().err
    assert f"invalid choice: {name!r}" in said
    assert advice in said


def test_importing_the_package_imports_no_torch(run_command):
    assert (
        python(
            run_command, "import sys, accel_compat, accel_compat.card; print('torch' in sys.modules)"
        ).stdout
        == "False\n"
    )


def test_importing_accelerate_leaves_out_what_takes_long_and_few_programs_need(run_command):
    rare = ["sympy", "torch.distributed.fsdp", "torch.distributed.tensor", "deepspeed"]
    rare += ["yaml", "cattrs", "accel_core.storage.opened"]
    code = "import sys, accel_compat; accel_compat.install(); import accelerate.utils, accelerate.tracking\n"
    code += "from accelerate import Accelerator"

    done = python(run_command, f"{code}\nprint([name for name in {rare} if name in sys.modules])")
    assert (done.stdout, done.returncode) == ("[]\n", 0)


@pytest.mark.parametrize(
    "module", [name for name in inventory() if not name.startswith("accelerate.commands")]
)
def test_every_name_of_a_module_can_be_imported(module):
    found = import_module(module)

    assert [name for name in inventory()[module] if not hasattr(found, name)] == []


def test_what_is_not_served_says_why_when_it_is_called():
    from accelerate.utils.bnb import quantize_and_offload_8bit
    from accelerate.utils.megatron_lm import MegatronEngine

    with pytest.raises(
        NotServedError, match="accelerate.utils.bnb.quantize_and_offload_8bit of Accelerate is not served"
    ):
        quantize_and_offload_8bit(None, {})
    with pytest.raises(NotServedError, match="MegatronEngine"):
        MegatronEngine()


def test_nothing_is_an_instance_of_a_class_that_is_not_served():
    from accelerate.utils.megatron_lm import MegatronEngine

    assert not isinstance(object(), MegatronEngine)


def test_a_name_that_accelerate_does_not_have_is_absent():
    import accelerate.utils

    assert not hasattr(accelerate.utils, "make_coffee")


def test_the_page_of_names_is_what_is_served(run_command):
    tool = Path(__file__).parents[3] / "tools" / "accelerate_names.py"
    code = f"import runpy; tool = runpy.run_path({str(tool)!r})\n"
    code += "print(tool['page']() == tool['PAGE'].read_text())"

    assert python(run_command, code).stdout == "True\n"


def test_the_mirror_has_nothing_but_imports():
    def is_one(node: ast.stmt) -> bool:
        shown = ast.unparse(node)
        told = ("main = partial(accelerate, ", "if __name__ == '__main__':", "warnings.warn(")
        return isinstance(node, (ast.Import, ast.ImportFrom)) or shown.startswith(told)

    files = [*Path(SURFACE).rglob("*.py")]
    others = {
        str(file.relative_to(SURFACE)): ast.unparse(node)
        for file in files
        for number, node in enumerate(ast.parse(file.read_text()).body)
        if number and not is_one(node)  # the first is the docstring
    }
    assert len(files) > 30
    assert others == {}
    assert [file.name for file in files if file.name.startswith("_") and file.name != "__init__.py"] == []


def test_a_constant_is_found_where_accelerate_only_imports_it():
    from accelerate.accelerator import SAFE_WEIGHTS_NAME
    from accelerate.utils.constants import SAFE_WEIGHTS_NAME as defined

    assert SAFE_WEIGHTS_NAME is defined


def test_a_function_of_another_module_does_not_stand_for_one_of_the_same_name():
    from accelerate.utils.megatron_lm import prepare_data_loader

    with pytest.raises(NotServedError, match="accelerate.utils.megatron_lm.prepare_data_loader"):
        prepare_data_loader()


def test_a_function_named_like_its_module_is_the_function():
    import accelerate.utils.tqdm
    from accelerate.utils import tqdm

    assert accelerate.utils.tqdm is tqdm
    assert list(tqdm(range(3), main_process_only=False)) == [0, 1, 2]
