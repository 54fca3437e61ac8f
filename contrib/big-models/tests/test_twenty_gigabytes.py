"""A model of 20 GB loads, generates and exports in 4 GiB of memory that no file backs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE = int(os.environ.get("BIG_MODEL_GIB", "20")) << 30
"""Bytes of the model; a smaller one tells less, and is quicker."""
SHARD = SIZE // 20
BLOCKS = SIZE // (8 * 4096 * 4096 * 2)
BOUND = max(SIZE // 5, 1 << 30)
CODE = """
import json, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from accel_big_models import empty_weights, load, plan
from accel_core import Accelerator

WIDTH, BLOCKS = 4096, int(sys.argv[3])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 256)
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

peak, took = 0, {}
def sample():
    global peak
    while True:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.05)
threading.Thread(target=sample, daemon=True).start()

with empty_weights():
    model = Model().to(torch.bfloat16)
accelerator = Accelerator(cpu=True, strategy="dispatched")
began = time.time()
load(model, sys.argv[1], plan(model, {"disk": "100GB"}), mapped=sys.argv[4] == "mapped")
took["load"] = time.time() - began
model = accelerator.prepare(model)
ids = torch.zeros(1, 1, dtype=torch.long)
with torch.no_grad():
    for _ in range(2):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
took["generate"] = time.time() - began
if sys.argv[2]:
    accelerator.save_model(model, sys.argv[2], max_shard_size=int(sys.argv[5]))
took["export"] = time.time() - began
print(json.dumps({"peak": peak, "took": took, "ids": ids.tolist()}))
"""


def write(folder: Path, blocks: int, width: int = 4096) -> None:
    """Write shards of one block each, the weights those of one random block."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    shapes = {
        "norm.weight": (width,),
        "norm.bias": (width,),
        "first.weight": (4 * width, width),
        "first.bias": (4 * width,),
        "second.weight": (width, 4 * width),
        "second.bias": (width,),
    }
    block = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    ends = {"embedding.weight": (256, width), "head.weight": (256, width), "head.bias": (256,)}
    homes = dict.fromkeys(ends, "ends.safetensors")
    save_file(
        {name: torch.randn(shape).bfloat16() for name, shape in ends.items()}, folder / "ends.safetensors"
    )
    for number in range(blocks):
        named = {f"blocks.{number}.{name}": value for name, value in block.items()}
        save_file(named, folder / f"block-{number}.safetensors")
        homes |= dict.fromkeys(named, f"block-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def run(run_command, folder: Path, target: Path | str, how: str, group: Path | None = None) -> dict:
    command = [sys.executable, "-c", CODE, str(folder), str(target), str(BLOCKS), how, str(SHARD)]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
    done = run_command(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("in")
    if shutil.disk_usage(folder).free < 2 * SIZE + (5 << 30):
        pytest.skip(f"the checkpoint and its export take {2 * SIZE >> 30} GiB of disk")
    try:
        write(folder, BLOCKS)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a new memory cgroup of BOUND bytes, inside this process's own."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {kinds: path for _, kinds, path in lines if kinds in ("", "memory")}
    version_1 = "memory" in own
    root = Path("/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup")
    made = root / own["memory" if version_1 else ""].lstrip("/") / f"big-models-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        limit = made / ("memory.limit_in_bytes" if version_1 else "memory.max")
        if not limit.exists():
            pytest.skip(f"{made} has no {limit.name}: the cgroup above does not divide its memory")
        limit.write_text(str(BOUND))
        yield made
    finally:
        made.rmdir()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_gigabytes_in_four(checkpoint: Path, tmp_path: Path, run_command) -> None:
    check(run_command, checkpoint, tmp_path / "out")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_gigabytes_where_the_system_gives_no_more_than_four(
    checkpoint: Path, tmp_path: Path, group: Path, run_command
) -> None:
    check(run_command, checkpoint, tmp_path / "out", group)


def check(run_command, checkpoint: Path, out: Path, group: Path | None = None) -> None:
    try:
        mapped = run(run_command, checkpoint, out, "mapped", group)
        exported = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    read = run(run_command, checkpoint, "", "read", group)

    print(f"mapped: {mapped}, read: {read}")  # for reports of a run with -s
    assert exported > 0.99 * SIZE
    assert mapped["peak"] <= BOUND
    assert read["peak"] <= BOUND
    assert mapped["ids"] == read["ids"]
