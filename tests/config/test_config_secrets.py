"""What is secret is masked wherever settings are printed or stored, and reaches the plugin as it is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import frozen
from config_toys import record

from accel_core import ConfigError, option
from accel_core.config.resolve import load
from accel_core.contract.options import is_secret, may_be_secret
from accel_core.plugins.discovery import Discovery

SECRET = "s3cr3t"


@frozen(kw_only=True)
class Config:
    """Options of a tracker."""

    api_key: str | None = option(None, help="By its name.")
    phrase: str | None = option(None, help="By its mark.", secret=True)
    pad_token: str = option("pad", help="No secret.")
    extra: Mapping[str, Any] = option(factory=dict, help="May hold secrets.")


VAULT = Discovery((record("vault", "tracker", config=f"{__name__}:Config"), record("torchrun", "launcher")))
GIVEN = {"ACCEL__VAULT__API_KEY": SECRET, "ACCEL__VAULT__PHRASE": SECRET, "ACCEL__VAULT__PAD_TOKEN": "pad2"}


def test_a_plugin_gets_its_secrets_and_nobody_else_does():
    found = load(discovery=VAULT, environment=GIVEN, directory=os.devnull)
    mine = found.config.plugins["vault"]
    assert (mine.api_key, mine.phrase, mine.pad_token) == (SECRET, SECRET, "pad2")
    shown = {"api_key": "***", "phrase": "***", "pad_token": "pad2", "extra": {}}
    assert found.tree["plugins"]["vault"] == shown
    assert "phrase" not in repr(mine)


def test_a_secret_that_is_not_set_is_not_masked():
    found = load(discovery=VAULT, environment={"ACCEL__VAULT__PAD_TOKEN": "x"}, directory=os.devnull)
    assert found.tree["plugins"]["vault"]["api_key"] is None


@pytest.mark.parametrize("name", ["api_key", "phrase"])
def test_a_contradiction_does_not_spell_the_secrets(name):
    with pytest.raises(ConfigError) as caught:
        load(
            discovery=VAULT,
            environment=GIVEN,
            objects=[Config(**{name: "other5ecret"})],
            directory=os.devnull,
        )
    assert SECRET not in str(caught.value)
    assert "other5ecret" not in str(caught.value)


def test_secrets_within_an_option_are_masked_too(tmp_path):
    inner = {"hub": [{"token": SECRET}], "size": 3}
    tmp_path.joinpath("accel.yaml").write_text(f"vault: {{extra: {inner}}}", encoding="utf-8")
    flags = [("vault.extra", f"{{password: {SECRET}}}")]

    found = load(discovery=VAULT, environment={}, directory=tmp_path)
    assert found.tree["plugins"]["vault"]["extra"] == {"hub": [{"token": "***"}], "size": 3}
    over = load(discovery=VAULT, environment={}, flags=flags, directory=tmp_path)
    assert over.origins["vault.extra"].startswith("flag --vault.extra (over {'hub'")
    assert SECRET not in str(over.origins)
    with pytest.raises(ConfigError) as caught:
        load(discovery=VAULT, environment={}, flags=flags, objects=[Config(extra=inner)], directory=tmp_path)
    assert SECRET not in str(caught.value)


def test_names_of_secrets():
    assert all(map(is_secret, ["api_key", "token", "password", "hf_token", "access-token", "client_secret"]))
    assert not any(
        map(is_secret, ["pad_token", "num_key_value_heads", "sort_key", "max_tokens", "moe_token_drop"])
    )
    assert all(
        map(may_be_secret, ["ACCEL_TOKEN", "TORCHHUB_TOKEN", "ACCEL__FOO__API_KEY", "TORCH_ACCESS_KEY_ID"])
    )


def test_env_and_show_mask_secrets_and_ask_devices_only(tmp_path, accel):
    secrets = {
        "ACCEL_TOKEN": SECRET,
        "TORCHHUB_TOKEN": SECRET,
        "ACCEL__FOO__API_KEY": SECRET,
        "TORCH_HOME": "/seen",
    }
    done = accel("env", environment=secrets, cwd=tmp_path)
    assert SECRET not in done.stdout + done.stderr
    assert "ACCEL_TOKEN=***" in done.stdout
    assert "TORCH_HOME=/seen" in done.stdout
    assert not re.search(r"^ddp \.\.\. ", done.stdout, re.MULTILINE)


def test_help_of_the_world_prints_no_environment(run_command):
    code = "import pydoc, accel_core; print(pydoc.render_doc(accel_core.World))"
    done = run_command(
        [sys.executable, "-c", code],
        env={**os.environ, "MY_TOKEN": SECRET},
        capture_output=True,
        text=True,
        check=True,
    )
    assert SECRET not in done.stdout
