"""catalog.yaml: words of others, and the plugins of this repository."""

from __future__ import annotations

import re

import pytest

from accel_core.cli.launch import launch
from accel_core.config.sections import CORE
from accel_core.contract.options import options_of
from accel_core.plugins.catalog import catalog_entries, install_hint, renamed_flag
from accel_core.plugins.discovery import Discovery, discover, load


def test_each_known_plugin_has_the_distribution_to_install():
    assert catalog_entries()
    assert all(plugin.distribution.startswith("accel-") for plugin in catalog_entries())


def test_spellings_with_underscores_are_the_same_flag():
    assert renamed_flag("--num_processes") == renamed_flag("--num-processes")


def test_a_family_of_flags_is_answered_with_the_plugin_to_install(monkeypatch):
    monkeypatch.setattr("accel_core.plugins.catalog.discover", lambda: Discovery([]))
    answer = f"--strategy fsdp with --fsdp.OPTION VALUE ({install_hint('backends/fsdp')})"
    assert answer in (renamed_flag("--fsdp_offload_params") or "")


@pytest.mark.needs("accel-fsdp", "accel-deepspeed", "accel-megatron")
@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("--fsdp_offload_params", "--strategy fsdp with --fsdp.cpu-offload VALUE"),
        ("--fsdp_version", "--strategy fsdp with --fsdp.fsdp-version VALUE"),
        ("--zero3_init_flag", "--strategy deepspeed with --deepspeed.zero3-init-flag VALUE"),
        ("--megatron_lm_attention_backend", "--megatron.other-megatron-args '{attention_backend: VALUE}'"),
        ("--fsdp_anything_at_all", "has no such option; `accel config schema fsdp`"),
    ],
)
def test_a_family_of_flags_is_answered_with_the_option_of_its_plugin(flag, option):
    assert option in (renamed_flag(flag) or "")


def launch_flags() -> list[str]:
    """The flags of `accelerate launch`, by its own parser, where Accelerate is installed."""
    from accelerate.commands.launch import launch_command_parser

    actions = launch_command_parser()._actions
    return [flag for action in actions for flag in action.option_strings if re.match(r"--\w+$", flag)]


def test_each_flag_of_accelerate_launch_leads_to_flags_that_there_are():
    pytest.importorskip("accelerate.commands.launch")
    ours = [option for parameter in launch.params for option in parameter.opts]
    lost = []
    for flag in set(launch_flags()) - {"--help"}:
        answer = renamed_flag(flag) or (flag.replace("_", "-") if flag.replace("_", "-") in ours else "")
        # An answer may also say what the old flag did, or that it is left out.
        recipe = re.sub(r"; --\w+ counted.*|, where --.*", "", answer)
        words = re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", recipe)
        lost += [(flag, answer)] * (not answer) + [(flag, word) for word in words if not is_flag(word, ours)]
    assert lost == []


def is_flag(word: str, ours: list[str]) -> bool:
    """Whether `accel launch` takes it; --SECTION.OPTION stands for any option of the section."""
    section, _, option = word[2:].partition(".")
    if not option:
        return word in ours
    record = discover().get(section)
    cls = load(record, record.card.config) if record else CORE.get(section)
    return option == "OPTION" or (cls is not None and option.replace("-", "_") in options_of(cls))


def test_what_nobody_had_is_not_known():
    assert renamed_flag("--pony") is None
