"""A load's memory is the quantised model and a few blocks, with the allocator as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LOAD = """
import json, sys, threading, time
from pathlib import Path
from torch import nn
from accel_big_models import empty_weights
from accel_big_models.heap import trim_heap
from accel_bitsandbytes import BnbQuantizationConfig, load_and_quantize_model

def linear():
    return nn.Linear(2048, 2048, bias=False)

def build(blocks):
    pairs = (nn.Sequential(linear(), linear()) for _ in range(blocks))
    return nn.Sequential(*pairs, nn.Linear(2048, 8, bias=False))

def anonymous():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

kind = {"int8": {"load_in_8bit": True}}.get(sys.argv[1], {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
config = BnbQuantizationConfig(**kind)
load_and_quantize_model(build(1), config)  # imports and threads
with empty_weights():
    model = build(int(sys.argv[3]))
trim_heap()
base, peak, done = anonymous(), 0, False
watcher = threading.Thread(target=watch)
watcher.start()
load_and_quantize_model(model, config, sys.argv[2])
done = True
watcher.join()
result = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
print(json.dumps([peak - base, result]))
"""
MEGABYTE = 2**20
BLOCKS, BLOCK = 8, 32 * MEGABYTE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what memory a process has")
@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.by_default
def test_memory_beyond_the_result_does_not_grow_with_the_model(
    tmp_path: Path, kind: str, run_command
) -> None:
    file = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    weight = torch.randn(2048, 2048)
    weights = {f"{block}.{layer}.weight": weight.clone() for block in range(BLOCKS) for layer in range(2)}
    save_file({**weights, f"{BLOCKS}.weight": weight[:8].clone()}, file)
    try:
        command = [sys.executable, "-c", LOAD, kind, str(file), str(BLOCKS)]
        done = run_command(command, capture_output=True, text=True, check=False)
    finally:
        file.unlink()  # pytest keeps its folders
    assert done.returncode == 0, done.stderr
    peak, result = json.loads(done.stdout)
    # The block that is quantised, and a piece of it: 1.0 to 1.5 blocks were seen. The temporaries of a whole
    # weight would be two more, and a heap that keeps what is freed grows by all eight.
    assert peak - result <= 2.5 * BLOCK
