"""A layout that cannot be is one readable error, before any group of ranks is made."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from megatron_jobs import MODELS, accelerator, optimizer_of

from accel_core import ConfigError


def refused(kind: str, settings: dict[str, Any], options: dict[str, Any]) -> str:
    from megatron.core import parallel_state

    from accel_core import AccelError

    try:
        ours = accelerator(**options)
        ours.prepare(MODELS[kind](**settings))
    except AccelError as error:
        assert not parallel_state.model_parallel_is_initialized()
        return str(error)
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"tp_degree": 3}, {}, "do not divide the world of 2"),
        (
            {"tp_degree": 2, "expert_model_parallel_size": 4},
            {},
            "parallelism.ep 4 does not divide",
        ),
        (
            {"tp_degree": 2},
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            "parallelism.tp 2 does not divide",
        ),
        ({"pp_degree": 2}, {"num_hidden_layers": 3}, "3 layers, which parallelism.pp 2 does not divide"),
        (
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 3},
            {},
            "parallelism.pp 2 × num_layers_per_virtual_pipeline_stage 3 does not divide",
        ),
        (
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 3},
            {},
            "multiple of parallelism.pp 2",
        ),
        ({"other_megatron_args": {"hidden_droput": 0.0}}, {}, "did you mean hidden_dropout"),
        ({"other_megatron_args": {"lr": 0.0}}, {}, "the prepared optimizer"),
        (
            {"tp_degree": 2},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'linear'",
        ),
        (
            {"recompute_activations": True, "seq_length": 8},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "megatron.recompute_activations, megatron.seq_length: LlamaForCausalLM runs its own forward",
        ),
    ],
)
def test_it_is_refused(options: dict[str, Any], settings: dict[str, Any], says: str, run_processes) -> None:
    for found in run_processes(refused, "llama", settings, options, world=2):
        assert says in found


def beside_context_parallelism(options: dict[str, Any]) -> str:
    try:
        accelerator(**options)
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.needs("accel-context-parallel")
@pytest.mark.parametrize(
    "options", [{"parallelism_config": {"cp": 2}}, {"context_parallel_size": 2}], ids=str
)
def test_an_extension_that_divides_the_ranks_is_refused(options: dict[str, Any], run_processes) -> None:
    for said in run_processes(beside_context_parallelism, options):
        assert "megatron: an extension divides the ranks along 'cp'" in said
        assert said.endswith("set parallelism.cp: 1, or strategy: fsdp beside it")


def test_the_librarys_own_attention_serves_no_parts_of_sequences() -> None:
    """The reason that the refusal of context_parallel_size gives. Read, as the import takes seconds."""
    library = find_spec("megatron.core")
    assert library is not None
    assert library.origin is not None
    source = Path(library.origin).with_name("transformer") / "dot_product_attention.py"
    assert "Context parallelism is only supported by TEDotProductAttention" in source.read_text("utf-8")


def two_runs() -> str:
    from accel_core import AccelError

    first = accelerator(tp_degree=2)
    first.prepare(MODELS["gpt2"]())
    second = accelerator(pp_degree=2)
    with pytest.raises(AccelError, match="has divided them into tp 2") as caught:
        second.prepare(MODELS["gpt2"]())
    first.end_training()
    second.prepare(MODELS["gpt2"]())
    return str(caught.value)


def test_another_layout_waits_for_the_end_of_the_first(run_processes) -> None:
    for found in run_processes(two_runs, world=2):
        assert "end_training" in found


def few_micro_batches() -> None:
    from accel_core import AccelError

    ours = accelerator(pp_degree=2)
    model = MODELS["gpt2"]()
    model, _ = ours.prepare(model, optimizer_of(model))
    with pytest.raises(AccelError, match="for 2 stages"):
        ours.forward_backward(model, iter([{}]), lambda m, b: (m(**b).loss, None), microbatches=1)


def test_fewer_micro_batches_than_stages_are_refused(run_processes) -> None:
    run_processes(few_micro_batches)
