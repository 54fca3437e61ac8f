"""Training under megatron is training the transformers model in plain PyTorch, number by number."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_jobs import native, train

CASES = [
    ("gpt2", 1, {}, False),
    ("gpt2", 1, {"num_micro_batches": 4}, True),
    ("llama", 2, {"tp_degree": 2}, False),
    ("gpt2", 2, {"pp_degree": 2}, False),
    ("bert", 2, {"pp_degree": 2}, False),
    ("bert", 2, {"tp_degree": 2, "num_micro_batches": 4}, True),
    ("llama", 2, {"tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 4}, True),
    ("gpt2", 2, {"use_distributed_optimizer": True, "recompute_activations": True}, False),
    (
        "llama",
        2,
        {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 4},
        True,
    ),
    ("gpt2", 4, {"tp_degree": 2, "pp_degree": 2, "use_distributed_optimizer": True}, False),
]


@pytest.mark.parametrize(("kind", "world", "options", "by_model"), CASES)
@pytest.mark.by_default("gpt2-1-options0-False", "gpt2-2-options3-False")
def test_losses_norms_and_weights_are_those_of_plain_pytorch(
    kind: str, world: int, options: dict[str, Any], by_model: bool, run_processes
) -> None:
    readers = world // (options.get("tp_degree", 1) * options.get("pp_degree", 1))
    ((losses, norms, weights),) = run_processes(native, kind, 3, 4 * readers, world=1)
    for found, totals, state in run_processes(train, kind, 3, options, 4, by_model, world=world):
        assert found == pytest.approx(losses, rel=1e-5)
        assert totals == pytest.approx(norms, rel=1e-4)
        assert state.keys() == weights.keys()
        assert max(float((state[name] - weights[name]).abs().max()) for name in weights) < 1e-4
