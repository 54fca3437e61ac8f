"""The options, the JSON, and what of them contradicts each other."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest

from accel_core import RunConfig
from accel_deepspeed import DeepSpeedPlugin, settings

ZERO = {"zero_optimization": {"stage": 1, "overlap_comm": False}}


def encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize("form", ["mapping", "path", "object", "base64"])
def test_the_json_is_a_mapping_a_file_an_object_or_base64(form: str, tmp_path: Any) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(ZERO))
    forms = {
        "mapping": ZERO,
        "path": str(file),
        "object": SimpleNamespace(config=ZERO),
        "base64": encoded(ZERO),
    }
    assert DeepSpeedPlugin(hf_ds_config=forms[form]).deepspeed_config == ZERO


def test_without_json_the_stage_is_2() -> None:
    assert DeepSpeedPlugin().stage == 2


def test_options_stand_in_the_json_where_it_says_auto_or_nothing() -> None:
    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"},
        zero_stage=3,
        gradient_clipping=0.5,
        offload_param_device="nvme",
        offload_param_nvme_path="/fast",
        zero3_save_16bit_model=True,
    )
    assert plugin.deepspeed_config == {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/fast"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 0.5,
    }
    assert plugin.shards_init


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hf_ds_config": "nowhere.json"}, "there is no file nowhere.json"),
    ({"hf_ds_config": 3}, "hf_ds_config is a int"),
    ({"hf_ds_config": encoded({})[:-1] + "!"}, "there is no file"),
    ({"hf_ds_config": {"zero_optimization": {"stage": 4}}}, "ZeRO has stages 0, 1, 2 and 3"),
    ({"zero_stage": 5}, "expected one of 0, 1, 2, 3"),
    (
        {"hf_ds_config": ZERO, "zero_stage": 2},
        "zero_stage is 2, but zero_optimization.stage in hf_ds_config is 1",
    ),
    ({"hf_ds_config": {"gradient_clipping": 1.0}, "gradient_clipping": 0.5}, "gradient_clipping is 0.5, but"),
    ({"zero_stage": 2, "offload_param_device": "cpu"}, "offload_param_device needs ZeRO stage 3"),
    ({"zero_stage": 2, "zero3_init_flag": True}, "zero3_init_flag needs ZeRO stage 3"),
    ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs ZeRO stage 1, 2 or 3"),
    ({"offload_optimizer_device": "nvme"}, "offload_optimizer_nvme_path None; give both"),
    ({"offload_optimizer_nvme_path": "/fast"}, "give both, or neither"),
    ({"enable_msamp": True}, "MS-AMP is no longer maintained"),
    ({"msamp_opt_level": "O1"}, "MS-AMP is no longer maintained"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        DeepSpeedPlugin(**options)
    assert message in str(caught.value)


def test_contradictions_are_listed_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        DeepSpeedPlugin(hf_ds_config=ZERO, zero_stage=2, offload_param_device="cpu")
    assert "zero_stage is 2" in str(caught.value)
    assert "offload_param_device needs" in str(caught.value)


def test_a_key_that_stands_twice_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "twice.json"
    file.write_text('{"bf16": {}, "bf16": {}}')
    with pytest.raises(ValueError, match="bf16 stands there twice"):
        DeepSpeedPlugin(hf_ds_config=str(file))


def test_it_proposes_what_its_json_says_of_the_run() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"gradient_accumulation_steps": 4, "bf16": {"enabled": True}})
    found = {proposal.path: proposal.value for proposal in plugin.propose(RunConfig())}
    assert found == {"gradient_accumulation_steps": 4, "mixed_precision": "bf16"}


def test_auto_is_filled_and_the_rest_must_match() -> None:
    made: dict[str, Any] = {"a": {"b": "auto", "c": 1}, "d": "auto"}
    mismatches = settings.fill(made, {"a.b": (2, "x"), "a.c": (3, "the run"), "e": (1, "x")})
    assert made == {"a": {"b": 2, "c": 1}, "d": "auto"}
    assert mismatches == ["a.c is 1 in the DeepSpeed config, but 3 by the run"]
    assert settings.autos(made) == ["d"]
