"""The examples of Accelerate's documentation run as they are written there."""

from __future__ import annotations

import os
import textwrap

import pytest

from accel_compat.refusing import NotServedError

EXAMPLES = {
    "autocast": """
        from accelerate import Accelerator
        from accelerate.utils import AutocastKwargs

        kwargs = AutocastKwargs(cache_enabled=True)
        accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    "ddp": """
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    "grad scaler": """
        from accelerate import Accelerator
        from accelerate.utils import GradScalerKwargs

        kwargs = GradScalerKwargs(backoff_factor=0.25)
        accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    "process group": """
        from datetime import timedelta
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        kwargs = InitProcessGroupKwargs(timeout=timedelta(seconds=800))
        accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    "profile": """
        from accelerate import Accelerator
        from accelerate.utils import ProfileKwargs

        kwargs = ProfileKwargs(activities=["cpu", "cuda"])
        accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    "accumulation": """
        from accelerate import Accelerator
        from accelerate.utils import GradientAccumulationPlugin

        gradient_accumulation_plugin = GradientAccumulationPlugin(num_steps=2)
        accelerator = Accelerator(gradient_accumulation_plugin=gradient_accumulation_plugin)
    """,
    "batch size": """
        from accelerate.utils import find_executable_batch_size

        @find_executable_batch_size(starting_batch_size=128)
        def train(batch_size, model, optimizer):
            ...

        train("model", "optimizer")
    """,
}
REFUSED = {
    "fp8 by Transformer Engine": (
        """
        from accelerate import Accelerator
        from accelerate.utils import FP8RecipeKwargs

        kwargs = FP8RecipeKwargs(backend="te", fp8_format="HYBRID")
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[kwargs])
        """,
        NotServedError,
        "fp8 comes in a later package",
    ),
    "fp8 by MS-AMP, misspelled": (
        """
        from accelerate.utils import FP8RecipeKwargs

        kwargs = FP8RecipeKwargs(backend="msamp", optimization_level="02")
        """,
        TypeError,
        "did you mean 'opt_level'",
    ),
    "grad scaler, misspelled": (
        """
        from accelerate.utils import GradScalerKwargs

        kwargs = GradScalerKwargs(backoff_filter=0.25)
        """,
        TypeError,
        "did you mean 'backoff_factor'",
    ),
    "installing torch_xla": (
        """
        from accelerate.utils import install_xla

        install_xla(upgrade=True)
        """,
        NotServedError,
        "pip install 'accel-xla",
    ),
}
"""What 1.15 refuses too, or what comes in a later package: the code, the error, what it says."""


def run(code: str) -> None:
    exec(textwrap.dedent(code), {})


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name):
    run(EXAMPLES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_says_what_to_write_instead(name):
    code, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        run(code)


def test_variables_are_patched_inside_only(capsys):
    run(
        """
        import os
        from accelerate.utils import patch_environment

        with patch_environment(FOO="bar"):
            print(os.environ["FOO"])
        """
    )
    assert capsys.readouterr().out == "bar\n"
    assert "FOO" not in os.environ


def test_the_environment_is_cleared_inside_only(capsys, monkeypatch):
    monkeypatch.setenv("FOO", "bar")
    run(
        """
        import os
        from accelerate.utils import clear_environment

        with clear_environment():
            print(dict(os.environ))
            os.environ["FOO"] = "new_bar"
            print(os.environ["FOO"])
        print(os.environ["FOO"])
        """
    )
    assert capsys.readouterr().out == "{}\nnew_bar\nbar\n"


def test_a_basic_config_is_written_once(tmp_path):
    from accelerate.utils import write_basic_config

    from accel_compat.settings import read_file

    file = tmp_path / "default_config.yaml"
    assert write_basic_config(mixed_precision="bf16", save_location=str(file)) == file
    assert read_file(str(file))["mixed_precision"] == "bf16"
    assert write_basic_config(save_location=str(file)) is False
