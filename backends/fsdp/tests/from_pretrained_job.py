"""What each rank of test_fsdp_from_pretrained does: train models that transformers has sharded."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError

BATCH, WINDOW, CLIP, STEPS, WORDS, LENGTH = 4, 2, 0.5, 20, 64, 8
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {
    "llama": ("Llama", SMALL),
    "tied": ("Llama", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 8}),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4}),
}


def write_model(folder, kind):
    """Save a model of random weights as the hub has them."""
    import transformers

    family, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    model.save_pretrained(folder)
    return str(folder)


def load(folder, layout=None):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = {} if layout is None else {"distributed_config": DistributedConfig(**layout)}
    dtype = getattr(torch, os.environ.get("ACCEL_TEST_DTYPE", "float64"))
    config["experts_implementation"] = "eager"  # others take no float64
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **config)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (STEPS * WINDOW * BATCH, LENGTH), generator=generator)


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


def plain(folder, steps=STEPS, adapt=None):
    """Losses and norms of one process of plain torch, and its weights."""
    model = load(folder)
    model = adapt(model) if adapt else model
    optimizer, losses, norms = optimizer_of(model), [], []
    for number, words in enumerate(DataLoader(data(), BATCH)):
        loss = model(input_ids=words, labels=words).loss
        losses.append(loss.item())
        (loss / WINDOW).backward()
        if (number + 1) % WINDOW == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        if len(norms) == steps:
            break
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def begin(settings):
    warnings.filterwarnings("ignore")
    os.environ.update(settings, ACCEL__GRADIENT_ACCUMULATION_STEPS=str(WINDOW), ACCEL__STRATEGY="fsdp")
    return Accelerator(cpu=True)


def train(accelerator, folder, layout, *, steps, loaded=None, adapt=None):
    """The prepared model, which `layout` shards, or `prepare`; losses and norms of some steps."""
    model = load(folder, layout)
    model = adapt(model) if adapt else model
    loader = DataLoader(data(), BATCH // accelerator.run.topology.readers)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    if loaded:
        accelerator.load_state(loaded)
    losses, norms = [], []
    for words in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=words, labels=words).loss
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        if len(norms) == steps:
            break
    return model, losses, norms


def each(cases, run, *arguments):
    """{name of a case: `run(accelerator, layout, name, *arguments)`}, each with an Accelerator of its own."""
    kept, found = dict(os.environ), {}
    for name, (settings, layout) in cases.items():
        accelerator = begin(settings)
        found[name] = run(accelerator, layout, name, *arguments)
        accelerator.end_training()
        os.environ.clear()
        os.environ.update(kept)
    return found


def _trained(accelerator, layout, name, folder, steps, states):
    model, losses, norms = train(accelerator, folder, layout, steps=steps)
    if states:
        accelerator.save_state(str(Path(states) / name))
    return losses, norms, accelerator.get_state_dict(model, rank0_only=False)


def trained(cases, folder, steps, states=None):
    """Losses, norms and weights of each case; its state is saved in a folder of its name."""
    return each(cases, _trained, folder, steps, states)


def _resumed(accelerator, layout, _, folder, steps, state):
    return train(accelerator, folder, layout, steps=steps, loaded=state)[1:]


def resumed(cases, folder, steps, states):
    """Losses and norms of each case, after each of the saved states."""
    saved = sorted(Path(states).iterdir())
    return {one.name: each(cases, _resumed, folder, steps, str(one)) for one in saved}


def _exported(accelerator, layout, name, folder, target):
    model, _, _ = train(accelerator, folder, layout, steps=1)
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        Path(target) / name,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=weights,
    )
    accelerator.wait_for_everyone()
    return weights


def exported(cases, folder, target):
    """The weights of rank 0, which `save_pretrained` has written too, as Accelerate's docs have it."""
    return each(cases, _exported, folder, target)


def with_adapters(model):
    """Add LoRA to a model. peft draws other first values for split layers, so all are given here."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 8)
    return model


def _adapted(accelerator, layout, name, folder, steps, target):
    model, losses, norms = train(accelerator, folder, layout, steps=steps, adapt=with_adapters)
    accelerator.save_state(str(Path(target) / f"{name}-state"))
    inside = accelerator.unwrap_model(model)
    inside.save_pretrained(
        Path(target) / name,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    return losses, norms


def adapted(cases, folder, steps, target):
    """Losses and norms of LoRA; state and adapter are saved."""
    return each(cases, _adapted, folder, steps, target)


def _adapted_again(accelerator, layout, _, folder, steps, state):
    return train(accelerator, folder, layout, steps=steps, loaded=state, adapt=with_adapters)[1:]


def adapted_again(cases, folder, steps, target):
    """Losses and norms of LoRA, after each of the saved states."""
    saved = sorted(Path(target).glob("*-state"))
    return {one.name: each(cases, _adapted_again, folder, steps, str(one)) for one in saved}


def refused(folder, settings, layout):
    """What `prepare` says."""
    accelerator = begin(settings)
    try:
        train(accelerator, folder, layout, steps=1)
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "nothing"
