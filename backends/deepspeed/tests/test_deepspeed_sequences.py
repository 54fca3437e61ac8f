"""Ulysses: two ranks share each sequence, and train as one process does with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, AccelError, ConfigError, ParallelismConfig
from accel_deepspeed import DeepSpeedPlugin

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
LENGTH, WORDS, WIDTH = 8, 13, 16


def accelerator(stage: int, in_json: bool = False) -> Accelerator:
    settings: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if in_json:
        settings["sequence_parallel_size"] = 2
    sizes = None if in_json else ParallelismConfig(sp=2)
    return Accelerator(
        device="cpu", parallelism_config=sizes, plugins=[DeepSpeedPlugin(hf_ds_config=settings)]
    )


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal, of (batch, sequence, heads, width)."""
    turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)


class Net(nn.Module):
    """One layer of attention; with a group, DeepSpeed's over the parts that its ranks have."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)
        self.attend: Any = attend
        if group is not None:
            from deepspeed.sequence.layer import DistributedAttention

            self.attend = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.mix(self.words(ids)).view(*ids.shape, 3, 4, -1).unbind(2)
        batch = {} if self.attend is attend else {"batch_dim_idx": 0}
        output: Tensor = self.out(self.attend(*parts, **batch).reshape(*ids.shape, WIDTH))
        return output


def tokens() -> TensorDataset:
    ids = torch.randint(WORDS, (6, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def shared(stage: int, in_json: bool) -> tuple[list[float], list[float]]:
    """(mean loss of all ranks, by hand of one process), step by step."""
    ours = accelerator(stage, in_json)
    assert ours.run.mesh is not None
    model: Any = Net(ours.run.mesh.device_mesh["sp"].get_group())
    plain = Net()
    by_hand = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, optimizer, loader = ours.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(tokens(), 2)
    )
    found, expected = [], []
    for _ in range(2):
        for (ids, next_ids), (whole, whole_next) in zip(loader, DataLoader(tokens(), 2), strict=True):
            loss = cross_entropy(model(ids).flatten(0, 1), next_ids.flatten())
            ours.backward(loss)
            found += [
                ours.reduce(loss.detach(), "mean").item(),
                float(ours.clip_grad_norm_(model.parameters(), 0.5)),
            ]
            plain_loss = cross_entropy(plain(whole).flatten(0, 1), whole_next.flatten())
            plain_loss.backward()
            plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            expected += [plain_loss.item(), plain_norm.item()]
            for each in (optimizer, by_hand):
                each.step()
                each.zero_grad()
    ours.end_training()
    return found, expected


@pytest.mark.full
@pytest.mark.parametrize(("stage", "in_json"), [(2, False), (3, True)])
def test_deepspeeds_attention_over_parts_trains_as_attention_over_the_whole(
    stage: int, in_json: bool, run_processes
) -> None:
    for found, expected in run_processes(shared, stage, in_json, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)


def test_two_sizes_that_differ_are_refused() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"sequence_parallel_size": 4, "zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match="sequence_parallel_size is 4, and parallelism.sp is 2"):
        Accelerator(device="cpu", parallelism_config=ParallelismConfig(sp=2), plugins=[plugin])


def of_transformers(folder: str) -> tuple[list[float], list[float], list[str]]:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AutoModelForCausalLM

    ours = accelerator(2)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    deepspeed.init_distributed("gloo")  # it makes groups of its own
    UlyssesSPAttentionHF.register_with_transformers(folder, "sdpa", 2, micro_batch_size=2)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    rows = [{"input_ids": ids, "labels": ids} for ids, _ in tokens()]
    model, optimizer, loader = ours.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 2)
    )
    found, expected = [], []
    for batch, whole in zip(loader, DataLoader(rows, 2), strict=True):
        labels = batch["shift_labels"]
        output = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        # The last token of a sequence has no next one: shares of tokens differ, so sums are shared out.
        loss = cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * (LENGTH - 1))
        ours.backward(loss * 2)
        plain_loss = plain(**whole).loss
        plain_loss.backward()
        for each in (optimizer, by_hand):
            each.step()
            each.zero_grad()
        found.append(ours.reduce(loss.detach(), "sum").item())
        expected.append(plain_loss.item())
    ours.end_training()
    return found, expected, sorted(batch)


@pytest.mark.full
def test_ulysses_for_transformers_trains_as_the_whole_sequence_does(tmp_path: Path, run_processes) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for found, expected, names in run_processes(of_transformers, str(tmp_path), timeout=200):
        assert found == pytest.approx(expected, rel=1e-5)
        assert names == ["input_ids", "labels", "position_ids", "shift_labels"]


def odd_lengths() -> str:
    ours = accelerator(2)
    model = Net()
    _, _, loader = ours.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(torch.ones(4, 7), 2))
    try:
        next(iter(loader))
    except AccelError as error:
        return str(error)
    return ""


def without_exchange() -> tuple[str, str]:
    """What is said of the first forward that trains, and of the second."""
    ours, net = accelerator(2), Net()
    model, _, loader = ours.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(tokens(), 2))
    ids = next(iter(loader))[0]
    with torch.no_grad():
        model(ids)
    said = []
    for _ in range(2):
        try:
            model(ids)
            said.append("nothing")
        except AccelError as error:
            said.append(str(error))
    ours.end_training()
    return said[0], said[1]


def test_a_model_that_exchanges_no_heads_is_refused_in_its_first_forward(run_processes) -> None:
    for said, later in run_processes(without_exchange, timeout=120):
        assert "the forward of Net exchanges no heads between the ranks that share a sequence" in said
        assert later == "nothing"


@pytest.mark.full
def test_a_sequence_that_has_no_equal_parts_is_refused(run_processes) -> None:
    for said in run_processes(odd_lengths, timeout=120):
        assert "parallelism.sp is 2, and a batch has the shape [2, 7]" in said
        assert "pad sequences" in said
