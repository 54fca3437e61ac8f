"""Choosing plugins: explicit beats automatic and fails loudly; nothing is ever downgraded in silence."""

from __future__ import annotations

import re

import pytest
from attrs import frozen

from accel_core import Card, ConfigError, PluginError, option
from accel_core.config.resolve import load
from accel_core.plugins.discovery import Discovery, Imported, Record, discover
from accel_core.runtime.selection import choose


def record(name, slot, *, priority=None, reason=None, **options):
    card = Card(
        name=name,
        slot=slot,
        summary="For a test.",
        api_version="1.0",
        priority=priority,
        probe=lambda: reason,
        **options,
    )
    return Record(name=name, slot=slot, distribution=f"accel-{name}", version="1.0", known=Imported(card))


def native_and(*records):
    ours = [found for found in discover(environment={}).records if found.distribution == "accel-core"]
    return Discovery((*ours, *records))


def stack_of(discovery, processes=1, **python):
    resolved = load(python=python, discovery=discovery, environment={}, directory="/nonexistent")
    return choose(resolved, processes, discovery)


def test_one_process_without_plugins_is_native_and_single():
    assert str(stack_of(native_and(), device="cpu")) == "native + single + fp32"


def test_auto_takes_the_usable_device_of_highest_priority():
    slow, fast = record("slow", "device", priority=50), record("fast", "device", priority=100)
    assert stack_of(native_and(slow, fast)).device.name == "fast"


def test_auto_passes_over_what_its_probe_finds_unusable():
    fast = record("fast", "device", priority=100, reason="no driver")
    assert stack_of(native_and(fast)).device.name == "native"


def test_auto_passes_over_a_strategy_that_the_device_cannot_carry():
    chip = record("chip", "device", offers={"collectives.own"})
    usual = record("usual", "strategy", priority=100, needs={"collectives.torch"})
    chips = record("chips", "strategy", priority=50, needs={"collectives.own"})
    assert stack_of(native_and(chip, usual, chips), 2, device="chip").strategy.name == "chips"
    assert stack_of(native_and(chip, usual, chips), 2, device="cpu").strategy.name == "usual"


def test_where_no_strategy_can_be_carried_the_words_that_it_lacks_are_named():
    chip, usual = (
        record("chip", "device"),
        record("usual", "strategy", priority=100, needs={"collectives.torch"}),
    )
    with pytest.raises(ConfigError, match=r"usual \(auto.*needs collectives.torch, which the stack chip"):
        stack_of(native_and(chip, usual), 2, device="chip")


def test_auto_never_takes_what_has_no_priority():
    assert stack_of(native_and(record("shy", "device"))).device.name == "native"


def test_a_device_that_shadows_another_wins_whatever_the_priorities():
    spoofed, real = (
        record("spoofed", "device", priority=200),
        record("real", "device", priority=1, shadows=("spoofed",)),
    )
    assert stack_of(native_and(spoofed, real)).device.name == "real"
    assert stack_of(native_and(spoofed, real), device="spoofed").device.name == "spoofed"


def test_a_tie_is_an_error_that_names_both_distributions_and_the_setting():
    one, two = record("one", "device", priority=100), record("two", "device", priority=100)
    with pytest.raises(
        PluginError, match=r"between one \(accel-one 1.0\) and two \(accel-two 1.0\)\nset device: one"
    ):
        stack_of(native_and(one, two))


def test_a_word_is_answered_by_the_usable_plugin_of_highest_priority():
    discovery = native_and(
        record("small-a", "precision", priority=100, also=("small",)),
        record("small-b", "precision", priority=200, also=("small",), reason="no library"),
        record("small-c", "precision", priority=50, also=("small",)),
    )
    chosen = stack_of(discovery, mixed_precision="small").precision
    assert chosen.name == "small-a"
    assert chosen.why.startswith("answers small, asked for by Accelerator(")
    assert stack_of(discovery, mixed_precision="small-c").precision.name == "small-c"


@pytest.mark.parametrize("priority", [100, None])
def test_a_word_that_two_plugins_answer_alike_is_an_error_that_names_both(priority):
    discovery = native_and(
        record("one", "precision", priority=priority, also=("small",)),
        record("two", "precision", priority=priority, also=("small",)),
    )
    message = (
        r"mixed_precision: small cannot decide between one \(accel-one 1.0\) and two \(accel-two 1.0\)\n"
        "set mixed_precision: one, or another"
    )
    with pytest.raises(PluginError, match=message):
        stack_of(discovery, mixed_precision="small")


def test_a_word_whose_plugins_cannot_be_used_gives_the_reason():
    discovery = native_and(record("one", "precision", also=("small",), reason="no library"))
    with pytest.raises(PluginError, match=r"one \(.*\) cannot be used here: unavailable: no library"):
        stack_of(discovery, mixed_precision="small")


def test_a_word_of_another_slot_is_no_answer():
    with pytest.raises(ConfigError, match="no precision 'small' is installed"):
        stack_of(native_and(record("one", "strategy", also=("small",))), mixed_precision="small")


def test_a_named_device_that_cannot_be_used_is_an_error_with_its_reason():
    with pytest.raises(PluginError, match=r"device: fast \(.*\) cannot be used here: unavailable: no driver"):
        stack_of(native_and(record("fast", "device", priority=100, reason="no driver")), device="fast")


def test_a_misspelt_device_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"device \(.*\): 'fats' .*did you mean 'fast'"):
        stack_of(native_and(record("fast", "device")), device="fats")


def test_a_device_type_that_torch_lacks_here_is_an_error():
    with pytest.raises(ConfigError, match=r"device: xpu .*finds no such device here\nchoose device: cpu"):
        stack_of(native_and(), device="xpu")


def test_several_processes_without_a_strategy_say_what_to_install():
    with pytest.raises(
        ConfigError,
        match=r"auto found no strategy for 2 processes\nin a clone of.*pip install ./backends/ddp$",
    ):
        stack_of(native_and(), 2, device="cpu")


def test_several_processes_where_only_a_shy_strategy_is_installed_say_to_name_it():
    with pytest.raises(
        ConfigError, match=r"found no strategy for 2 processes\nshy is installed .*: --strategy shy$"
    ):
        stack_of(native_and(record("shy", "strategy")), 2, device="cpu")


def test_several_processes_take_the_strategy_of_highest_priority():
    joint = record("joint", "strategy", priority=100)
    assert stack_of(native_and(joint), 2, device="cpu").default == "joint"


def test_a_strategy_asked_for_in_one_process_is_that_strategy():
    joint = record("joint", "strategy", priority=100)
    assert stack_of(native_and(joint), 1, device="cpu", strategy="joint").default == "joint"


def test_single_in_several_processes_is_refused():
    with pytest.raises(
        ConfigError, match=r"strategy: single \(.*\) in a world of 2 processes would train 2 separate"
    ):
        stack_of(native_and(), 2, device="cpu", strategy="single")


def test_a_misspelt_strategy_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no strategy 'singel' .*did you mean 'single'\?\n`accel plugins`"):
        stack_of(native_and(), strategy="singel")


def test_a_strategy_that_looks_like_none_lists_the_installed_ones():
    with pytest.raises(ConfigError, match=r"no strategy 'best' is installed; installed: single"):
        stack_of(native_and(), strategy="best")


def test_a_strategy_of_ours_that_is_not_installed_says_how_to_get_it():
    with pytest.raises(ConfigError, match="pip install ./backends/ddp"):
        stack_of(native_and(), strategy="ddp")


def test_a_plugin_of_another_slot_is_refused():
    with pytest.raises(ConfigError, match=r"strategy .*: no strategy 'bf16' .*; bf16 is a precision"):
        stack_of(native_and(), strategy="bf16")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match=r"mixed_precision .*: no precision 'bf61' .*did you mean 'bf16'"):
        stack_of(native_and(), mixed_precision="bf61")


def test_needs_that_the_stack_does_not_offer_are_named():
    joint = record("joint", "strategy", needs={"collectives.torch"})
    lonely = record("lonely", "device", torch_device="cpu")
    with pytest.raises(ConfigError, match=r"strategy joint .* needs collectives.torch, which the stack"):
        stack_of(native_and(joint, lonely), device="lonely", strategy="joint")


def test_a_tracker_that_is_not_installed_is_an_error():
    with pytest.raises(ConfigError, match=r"log_with .*: no tracker 'nowhere'"):
        stack_of(native_and(), log_with="nowhere")


@pytest.mark.parametrize("name", ["log_with", "strategy", "mixed_precision", "device"])
def test_an_error_quotes_at_most_200_characters_of_a_name(name):
    with pytest.raises(ConfigError) as told:
        stack_of(native_and(), **{name: "x" * 3000})
    assert len(str(told.value)) < 500


def test_the_config_object_of_an_extension_chooses_it(toy_plugin, monkeypatch):
    source = (
        "from attrs import frozen\nfrom accel_core import Card, option\n\n"
        "@frozen(kw_only=True)\nclass Options:\n    size: int = option(1, help='Any.')\n\n"
        "CARD = Card(name='around', slot='extension', summary='A toy.', api_version='1.0',"
        " config='toy_around:Options')\n"
    )
    toy_plugin("around", "extension", source=source)
    import toy_around

    discovery = discover()
    for names in ([], ["around"]):
        given = {"python": {"extensions": names, "device": "cpu"}, "objects": [toy_around.Options()]}
        resolved = load(**given, discovery=discovery, environment={}, directory="/nonexistent")
        assert [chosen.name for chosen in choose(resolved, 1, discovery).extensions] == ["around"]


def stack_with(source, processes=2, **python):
    """The stack where a strategy and an extension with options are installed beside a usual strategy."""
    config = "accel_core.contract.config:GradScalerKwargs"
    discovery = native_and(
        record("usual", "strategy", priority=100),
        record("rare", "strategy", config=config),
        record("extra", "extension", config=config),
    )
    given = {"environment": {}, "directory": "/nonexistent"} | source
    return choose(load(python={"device": "cpu"} | python, discovery=discovery, **given), processes, discovery)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ({"flags": [("extra.enabled", "true")]}, r"choose it \(extensions: extra\)"),
        ({"environment": {"ACCEL__EXTRA__ENABLED": "true"}}, r"choose it \(extensions: extra\)"),
        ({"flags": [("rare.enabled", "true")]}, r"choose it \(strategy: rare\)"),
    ],
)
def test_a_flag_or_variable_of_a_plugin_outside_the_stack_is_an_error_with_what_chooses_it(source, remedy):
    with pytest.raises(ConfigError, match=rf"is not in this run \(native \+ usual \+ fp32\)\n{remedy}"):
        stack_with(source)


def test_options_of_plugins_in_the_stack_are_used_without_a_word():
    flags = [("extra.enabled", "true"), ("rare.enabled", "true")]
    stack = stack_with({"flags": flags}, strategy="rare", extensions=["extra"])
    assert (str(stack), stack.notes) == ("native + rare + fp32 + extra", ())


def test_a_files_section_of_a_plugin_outside_the_stack_is_a_note(tmp_path):
    (tmp_path / "accel.yaml").write_text("extra: {enabled: true}\nrare: {enabled: true}\n")
    stack = stack_with({"directory": tmp_path})
    absent = "is not in this run (native + usual + fp32): its options do nothing"
    assert stack.notes == (
        f"accel.yaml:1:9: extension extra {absent}; `extensions: extra` chooses it",
        f"accel.yaml:2:8: strategy rare {absent}; `strategy: rare` chooses it",
    )


def test_a_section_that_an_alias_does_not_read_is_unused():
    aliases = {"strategies.big.plugin": "rare"}
    with pytest.raises(ConfigError, match="strategy rare is not in this run"):
        stack_with({"flags": [("rare.enabled", "true")]}, strategy="big", **aliases)


def test_a_file_may_hold_options_of_what_auto_takes_elsewhere(tmp_path):
    discovery = native_and(
        record(
            "chip",
            "device",
            priority=100,
            reason="none here",
            config="accel_core.contract.config:AutocastKwargs",
        )
    )
    (tmp_path / "accel.yaml").write_text("chip: {enabled: true}\n")
    resolved = load(discovery=discovery, environment={}, directory=tmp_path)
    assert choose(resolved, 1, discovery).notes == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("compile: {mode: default}", "compile.mode (accel.yaml:1:11) .*where compile.backend is set"),
        ("compile: {mode: default, backend: 'no'}", "compile.mode .*where compile.backend is set"),
        ("data: {data_seed: 3}", "data.data_seed .*where data.use_seedable_sampler is set"),
        ("project: {total_limit: 3}", "project.total_limit .*project.automatic_checkpoint_naming is set"),
    ],
)
def test_an_option_that_does_nothing_without_another_is_a_note(tmp_path, text, note):
    (tmp_path / "accel.yaml").write_text(text + "\n")
    (said,) = stack_with({"directory": tmp_path}, processes=1).notes
    assert re.match(note.replace("(accel.yaml:1:11)", r"\(accel.yaml:1:11\)"), said), said
    assert "does nothing here" in said


@pytest.mark.parametrize(
    "text",
    [
        "compile: {mode: default, backend: eager}",
        "compile: {disable: false}",
        "data: {data_seed: 3, use_seedable_sampler: true}",
    ],
)
def test_an_option_that_counts_is_used_without_a_word(tmp_path, text):
    (tmp_path / "accel.yaml").write_text(text + "\n")
    assert stack_with({"directory": tmp_path}).notes == ()


@frozen(kw_only=True)
class Staged:
    """Options that need each other."""

    stages: int = option(1, help="How many.")
    schedule: str = option("a", only_with="stages", help="In which order.")


def test_a_strategys_option_that_needs_another_is_a_note_where_it_is_chosen(tmp_path):
    discovery = native_and(record("staged", "strategy", config=f"{__name__}:Staged"))
    given = {"discovery": discovery, "environment": {}, "directory": tmp_path}
    (tmp_path / "accel.yaml").write_text("strategy: staged\nstaged: {schedule: b}\n")
    (said,) = choose(load(**given), 2, discovery).notes
    assert said.startswith(
        "staged.schedule (accel.yaml:2:10) does nothing here: it counts only where staged.s"
    )
    aliases = "strategy: big\nstrategies: {big: {plugin: staged, schedule: b}}\n"
    (tmp_path / "accel.yaml").write_text(aliases)
    (said,) = choose(load(**given), 2, discovery).notes
    assert said.startswith("strategies.big.schedule")


@frozen(kw_only=True)
class Rare:
    """Options of a strategy."""

    depth: int = option(1, help="How deep.")


def test_a_config_object_of_a_strategy_wins_over_the_strategy_of_a_file_and_not_over_a_flag(tmp_path):
    (tmp_path / "accel.yaml").write_text("strategy: usual\n")
    discovery = native_and(record("usual", "strategy"), record("rare", "strategy", config=f"{__name__}:Rare"))
    given = {"objects": [Rare()], "discovery": discovery, "environment": {}}
    found = choose(load(directory=tmp_path, **given), 2, discovery)
    assert (found.strategy.name, "over 'usual' from accel.yaml:1:1" in found.strategy.why) == ("rare", True)
    with pytest.raises(
        ConfigError, match="given the config of rare, but strategy is 'usual' .flag --strategy"
    ):
        choose(load(flags=[("strategy", "usual")], **given), 2, discovery)


def test_an_extension_that_the_strategy_cannot_carry_names_the_strategies_that_can():
    needy = record("needy", "extension", needs={"dtensors"})
    plain, able = record("plain", "strategy"), record("able", "strategy", offers={"dtensors"})
    with pytest.raises(ConfigError, match="needs dtensors(.|\n)*set strategy: able"):
        stack_of(native_and(needy, plain, able), strategy="plain", extensions=("needy",))
