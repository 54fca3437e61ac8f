"""Programs written for Accelerate quantise by its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_problem import QUANTISED, config, empty, ids, model, saved

from accel_bitsandbytes import load_and_quantize_model

pytestmark = pytest.mark.needs("accel-compat")


def program(file: Path, away: Path) -> Any:
    """Call Accelerate's functions, as its documentation does."""
    import accel_compat

    accel_compat.install()
    from accelerate import init_empty_weights
    from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
    from accelerate.utils.bnb import get_keys_to_not_convert

    asked = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32", torch_dtype="fp32"
    )
    with init_empty_weights():
        net = empty()
    net = load_and_quantize_model(net, asked, weights_location=file, device_map="auto")
    found: dict[str, Any] = {
        "output": net(ids()).detach(),
        "flags": (net.is_loaded_in_4bit, net.is_loaded_in_8bit, net.hf_device_map),
        "head": get_keys_to_not_convert(model()),
        "config": (asked.skip_modules, asked.keep_in_fp32_modules),
    }
    places = {"words": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "head": "cpu"}
    eight = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    net = load_and_quantize_model(
        empty(), eight, weights_location=file, device_map=places, offload_folder=away
    )
    found["eight"] = net(ids()).detach()
    mixed = load_and_quantize_model(empty(), asked, file, device_map=places, offload_folder=away)
    found["packed"] = [name for name, each in mixed.named_parameters() if each.dtype is torch.uint8]
    return found


def test_the_names_of_accelerate_do_the_same(tmp_path: Path, run_processes) -> None:
    (found,) = run_processes(program, saved(tmp_path), tmp_path / "away", world=1)
    expected = load_and_quantize_model(model(), config("nf4"))(ids())
    assert torch.equal(found["output"], expected)
    assert torch.equal(found["eight"], load_and_quantize_model(model(), config("int8"))(ids()))
    assert found["flags"] == (True, False, {"": "cpu"})
    assert found["head"] == ["head"]
    assert found["config"] == (None, None)
    assert found["packed"] == [f"{name}.weight" for name in QUANTISED]
