"""The programs of the README, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cuda_on_cpu
import torch
from megatron_jobs import MODELS, batches, optimizer_of, quiet

README = Path(__file__).parents[1] / "README.md"


def program() -> int:
    """The blocks in turn, with what a reader has; how often the loss is asked."""
    cuda_on_cpu.install()
    with quiet():
        import megatron.core.optimizer  # noqa: F401 - warns of what it does not find
    asked: list[Any] = []

    def my_loss(logits: Any, labels: Any) -> Any:
        asked.append(labels)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    first, loops, step = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"my_loss": my_loss}
    exec(first, names)
    model = MODELS["gpt2"]()
    rows = [{name: each[row] for name, each in batches(1)[0].items()} for row in range(8)] * 8
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    prepared = names["accelerator"].prepare(model, optimizer_of(model), loader)
    names |= dict(zip(("model", "optimizer", "loader"), prepared, strict=True))
    exec(loops, names)
    exec(step, names)
    one = torch.ones(1, 3)
    judged, _ = names["plugin"].custom_train_step_class(None, token=5).judge(one * 5, one)
    assert judged == 4
    return len(asked)


def test_the_readmes_programs_run(run_processes) -> None:
    assert sorted(run_processes(program, world=4)) == [0, 0, 8, 8]
