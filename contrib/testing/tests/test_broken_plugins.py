"""Each broken plugin is red at exactly the check of what it breaks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broken_plugins
import pytest
from run_kit import crashes, declare, describe, functions, run_kit

import accel_testing.kit
from accel_core import Card
from accel_core.checkpoint.places import store_for
from accel_testing import Conformance
from accel_testing.simulated import write_distribution

pytest_plugins = ["pytester"]

CARDS = {name: card for name, card in vars(broken_plugins).items() if isinstance(card, Card)}

PACKAGING = {
    "slow-probe": {"test_the_probe_is_quick_and_light"},
    "heavy-probe": {"test_the_probe_is_quick_and_light"},
    "heavy-config": {"test_the_config_class_is_light"},
    "loose-options": {"test_options_are_declared_in_full"},
    "heavy-launch": {"test_what_the_launcher_calls_is_light"},
    "word-taken": {"test_the_cards_words_are_no_plugins_names"},
    "misspelt-hook": {"test_the_stack_binds"},
}
DEVICE = {
    "on-the-host": {"test_the_run_is_on_the_cards_device"},
    "claims-more": {"test_capabilities_are_words_the_card_offers"},
    "forgets-buffers": {"test_models_are_placed_whole"},
    "unties-weights": {"test_models_are_placed_whole"},
    "forgets-seeds": {
        "test_seeding_repeats_what_is_drawn",
        "test_every_stream_follows_the_seed_and_is_restored",
    },
    "loses-randomness": {
        "test_random_streams_are_saved_and_restored",
        "test_every_stream_follows_the_seed_and_is_restored",
    },
    "seeds-all-but-its-own": {
        "test_random_streams_are_saved_and_restored",
        "test_every_stream_follows_the_seed_and_is_restored",
    },
    "counts-kilobytes": {"test_memory_is_reported_in_bytes"},
    "forgets-what-is-held": {"test_memory_is_reported_in_bytes"},
    "claims-float8": {"test_float8_matrices_are_multiplied"},
    "fails-to-report": {"test_services_answer"},
    "waits-for-itself": {"test_the_host_does_not_wait_for_the_device_in_a_step"},
    "sound": set[str](),
    "writes-on-each-rank": {"test_a_tracker_that_is_not_started_touches_nothing"},
    "wants-numbers": {
        "test_a_tracker_takes_any_config",
        "test_a_tracker_takes_numbers_text_and_nested_values",
    },
    "forgets-its-run": {"test_a_tracker_goes_on_in_a_run_that_is_resumed"},
    "jsonl": set[str](),
}
TRAINING = {
    "divides-twice": {
        "test_a_loop_of_ones_own_is_right_or_refused",
        "test_sums_are_divided_by_the_items_of_the_window",
        "test_losses_equal_the_plain_loop",
        "test_clipping_by_norm",
        "test_schedulers_step_with_the_optimizer",
        "test_two_optimizers_of_one_model",
        "test_mixed_precision",
        "test_two_units_keep_windows_of_their_own",
        "test_forward_backward_equals_the_loop",
    },
    "divides-loops-twice": {"test_a_loop_of_ones_own_is_right_or_refused"},
    "clips-at-one": {
        "test_sums_are_divided_by_the_items_of_the_window",
        "test_clipping_by_norm",
        "test_two_optimizers_of_one_model",
        "test_mixed_precision",
        "test_overflowing_steps_are_skipped",
    },
    "clips-values-loosely": {"test_clipping_by_value"},
    "never-unscales": {"test_mixed_precision", "test_overflowing_steps_are_skipped"},
    "denies-skips": {"test_overflowing_steps_are_skipped"},
    "leaves-autocast": {
        "test_forward_runs_in_the_precision",
        "test_mixed_precision",
        "test_overflowing_steps_are_skipped",
    },
    "never-recomputes": {"test_recomputed_activations_give_the_same_gradients"},
    "recomputes-otherwise": {"test_recomputed_activations_give_the_same_gradients"},
    "ignores-items": {"test_sums_are_divided_by_the_items_of_the_window"},
    "sums-windows": {"test_forward_backward_equals_the_loop"},
    "copies-optimizers": {
        "test_a_loop_of_ones_own_is_right_or_refused",
        "test_sums_are_divided_by_the_items_of_the_window",
        "test_losses_equal_the_plain_loop",
        "test_clipping_by_norm",
        "test_clipping_by_value",
        "test_schedulers_step_with_the_optimizer",
        "test_two_optimizers_of_one_model",
        "test_objects_prepared_in_several_calls",
        "test_mixed_precision",
        "test_overflowing_steps_are_skipped",
        "test_two_units_keep_windows_of_their_own",
        "test_a_student_learns_from_a_teacher",
        "test_forward_backward_equals_the_loop",
        "test_awkward_parameters_train_as_in_the_plain_loop",
    },
    "permutes-channels": {"test_awkward_parameters_train_as_in_the_plain_loop"},
    "permutes-transposed": {"test_awkward_parameters_train_as_in_the_plain_loop"},
    "unties-its-model": {"test_awkward_parameters_train_as_in_the_plain_loop"},
    "casts-parameters": {"test_float16_parameters_are_refused_by_name"},
    "describes-in-pages": {"test_units_are_described_line_by_line"},
    "unwraps-by-attribute": {"test_a_module_that_was_not_prepared_unwraps_to_itself"},
    "unwraps-all": {"test_a_module_that_was_not_prepared_unwraps_to_itself"},
    "nudges-weights": {"test_an_accumulated_step_is_left_alone_mid_window"},
    "keeps-no-layers": {"test_a_hook_that_only_calls_the_layer_below_changes_nothing"},
}
PROCESSES = {
    "flips-batches": {
        "test_data_arrives_whole_whoever_reads_it",
        "test_batches_are_dealt_in_turn",
        "test_metrics_see_each_sample_once_in_order",
    },
    "leaves-workers": {
        "test_a_failure_ends_all_workers_with_its_exit_code",
        "test_a_launcher_that_is_stopped_leaves_no_worker",
    },
    "loses-exit-codes": {"test_a_failure_ends_all_workers_with_its_exit_code"},
    "forgets-the-environment": {"test_settings_of_the_command_reach_the_workers"},
    "forgets-the-port": {"test_workers_meet"},
    "misnumbers-workers": {"test_workers_know_their_world_and_their_command"},
    "repeats-failures": {"test_a_traceback_is_shown_once"},
    "silences-workers": {"test_lines_of_workers_arrive_whole"},
    "sends-previews": {"test_a_dry_run_shows_what_would_be_sent_and_sends_nothing"},
    "hides-arguments": {"test_a_dry_run_shows_what_would_be_sent_and_sends_nothing"},
    "starts": set[str](),
    "draws-alike": {"test_layers_draw_alike_where_activations_are_alike"},
    "draws-apart": {"test_layers_draw_alike_where_activations_are_alike"},
    "schedules-per-process": {"test_schedulers_count_steps_not_processes"},
    "sums-gradients": {
        "test_the_items_of_all_decide_not_who_has_them",
        "test_the_global_batch_decides_not_who_computes_it",
        "test_clipping_sees_the_gradient_of_all",
        "test_awkward_parameters_train_as_over_global_batches",
        "test_ranks_that_use_different_parameters_are_right_or_refused",
    },
    "reduces-each-batch": {
        "test_a_window_communicates_once",
        "test_local_sgd_trains_apart_and_averages",
    },
    "shows-reduced-gradients": {
        "test_a_window_communicates_once",
        "test_ranks_that_use_different_parameters_are_right_or_refused",
    },
    "own-weights": {"test_replicas_begin_and_stay_equal"},
    "truncates-broadcasts": {
        "test_data_arrives_whole_whoever_reads_it",
        "test_a_saved_epoch_goes_on_where_it_was",
    },
    "reads-it-all": {
        "test_data_arrives_whole_whoever_reads_it",
        "test_every_kind_of_tensor_travels_whole",
        "test_objects_travel",
        "test_the_items_of_all_decide_not_who_has_them",
        "test_each_sample_is_read_once_an_epoch",
        "test_all_readers_get_equally_many_full_batches",
        "test_metrics_see_each_sample_once_in_order",
        "test_gather_reduce_broadcast_pad",
        "test_processes_coordinate",
        "test_the_global_batch_decides_not_who_computes_it",
        "test_clipping_sees_the_gradient_of_all",
        "test_a_window_communicates_once",
        "test_local_sgd_trains_apart_and_averages",
        "test_a_batch_that_others_lack_is_refused_not_waited_for",
        "test_awkward_parameters_train_as_over_global_batches",
        "test_ranks_that_use_different_parameters_are_right_or_refused",
        "test_layers_draw_alike_where_activations_are_alike",
    },
    "gathers-backwards": {
        "test_data_arrives_whole_whoever_reads_it",
        "test_collectives",
        "test_every_kind_of_tensor_travels_whole",
        "test_gather_reduce_broadcast_pad",
        "test_metrics_see_each_sample_once_in_order",
    },
    "means-are-sums": {
        "test_collectives",
        "test_gather_reduce_broadcast_pad",
        "test_the_global_batch_decides_not_who_computes_it",
        "test_clipping_sees_the_gradient_of_all",
        "test_local_sgd_trains_apart_and_averages",
        "test_awkward_parameters_train_as_over_global_batches",
        "test_ranks_that_use_different_parameters_are_right_or_refused",
    },
    "cuts-large": {"test_every_kind_of_tensor_travels_whole"},
    "hears-itself": {
        "test_data_arrives_whole_whoever_reads_it",
        "test_a_saved_epoch_goes_on_where_it_was",
        "test_collectives",
        "test_gather_reduce_broadcast_pad",
        "test_objects_travel",
        "test_ranks_that_disagree_are_told_what_each_brought",
        "test_each_sample_is_read_once_an_epoch",
    },
    "clips-locally": {
        "test_clipping_sees_the_gradient_of_all",
        "test_the_items_of_all_decide_not_who_has_them",
        "test_local_sgd_trains_apart_and_averages",
    },
    "keeps-its-weights": {"test_local_sgd_trains_apart_and_averages"},
    "gathers-unsaid": {"test_a_batch_that_others_lack_is_refused_not_waited_for"},
    "forgets-scalars": {"test_awkward_parameters_train_as_over_global_batches"},
    "adds-what-there-is": {"test_ranks_that_use_different_parameters_are_right_or_refused"},
    "exports-maxima": {"test_buffers_that_differ_by_rank_are_exported_as_the_first_ranks"},
    "gathers-late": {"test_each_rank_holds_whole_weights"},
    "remembers-runs": {
        "test_runs_follow_one_another_in_a_process",
        "test_two_runs_live_in_one_process",
    },
    "mixes-runs": {"test_two_runs_live_in_one_process"},
    "joins-nobody": {"test_ranks_may_run_out_of_batches"},
    "averages": set[str](),
}
GOES_ON = {"test_a_run_goes_on_as_if_nothing_had_happened", "test_cross_resume"}
SAVED = {
    *GOES_ON,
    "test_random_streams_go_on",
    "test_a_resumed_run_can_be_saved_and_resumed_again",
    "test_a_killed_save_leaves_a_checkpoint",
    "test_what_does_not_fit_is_refused_and_nothing_touched",
}
AWKWARD = {
    "test_a_checkpoint_holds_what_state_dict_names",
    "test_a_checkpoint_is_the_same_bit_for_bit_elsewhere",
}
CHECKPOINTS = {
    "loses-momentum": {*GOES_ON, *AWKWARD, "test_random_streams_go_on"},
    "counts-anew": {
        "test_a_resumed_run_can_be_saved_and_resumed_again",
        "test_a_killed_save_leaves_a_checkpoint",
    },
    "offers-copies": {*SAVED, "test_a_checkpoint_is_the_same_bit_for_bit_elsewhere"}
    - {"test_what_does_not_fit_is_refused_and_nothing_touched"},
    "renames-weights": {*SAVED, *AWKWARD, "test_state_has_the_names_of_the_users_model"},
    "loses-an-element": {*SAVED, *AWKWARD},
    "drifts-apart": {*SAVED, "test_replicas_are_equal"} - {"test_a_killed_save_leaves_a_checkpoint"},
    "hides-masters": {*GOES_ON, "test_random_streams_go_on"},
    "rebuilds-modules": AWKWARD,
    "forgets-its-optimizer": AWKWARD,
    "saves-memory": {"test_a_checkpoint_is_the_same_bit_for_bit_elsewhere"},
}

WAITS = {"leaves-workers"}
"""Launchers that a check waits for in vain."""
CARELESSLY_RED = {
    "test_the_card_describes_itself",
    "test_the_card_loads_nothing_heavy",
    "test_types_are_shipped",
    "test_requirements_leave_torch_alone",
    "test_the_command_is_listed",
    "test_its_help_is_quick",
    "test_nothing_lies_in_a_new_place",
    "test_a_second_create_is_refused",
    "test_of_creates_at_once_one_is_done",
    "test_a_folder_is_named_as_the_user_named_it",
    "test_a_folder_is_claimed_as_long_as_it_is_used",
    "test_a_large_file_is_written_whole_and_read_in_parts",
    "test_what_is_read_near_is_the_same",
    "test_what_is_removed_is_gone_and_may_be_gone_already",
    "test_a_file_that_is_not_there_is_said_so",
}
"""Checks that packages fail which a test below writes."""


def in_turn() -> Iterator[Any]:
    """Yield (level, name, red) of each; all but the first of a level are for `full`."""
    for number, level in enumerate((PACKAGING, DEVICE, TRAINING, PROCESSES, CHECKPOINTS)):
        first = next(name for name, red in level.items() if red)
        for name, red in level.items():
            yield pytest.param(number, name, red, id=name, marks=() if name == first else pytest.mark.full)


EACH = [*in_turn()]


def mostly_full(cases: list[Any]) -> list[Any]:
    """Return these cases, all but the first two for `full`."""
    return [*cases[:2], *(pytest.param(*case, marks=pytest.mark.full) for case in cases[2:])]


@pytest.fixture
def check_broken(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Conformance]:
    """`check_broken(level, name, *options)` runs the kit's level on the broken plugin of that name."""

    def run(level: int, name: str, *options: str) -> Conformance:
        declare(tmp_path / "site", "broken_plugins", CARDS)
        alone = level < 2 or next(card.slot for card in CARDS.values() if card.name == name) != "strategy"
        stack = name if alone else f"sound+{name}"
        world = "2" if level >= 3 else "1"
        given = ("--accel-level", str(level), "--accel-world", world, "--accel-exchange-with", "", *options)
        # Some wait in vain, for workers to end or for other ranks, and fail however long they wait.
        given += ("--accel-deadline", "15") if name in WAITS or stack != name else ()
        return run_kit(pytester, monkeypatch, tmp_path / "site", stack, *given)

    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("level", "name", "red"), [each for each in EACH if each.values[2]])
def test_broken_plugins_are_red_where_they_are_broken(
    check_broken: Callable[..., Conformance], level: int, name: str, red: set[str]
) -> None:
    found = check_broken(level, name, "-k", " or ".join(sorted(red)))
    assert functions(found.failed) == red, describe(found)
    assert crashes(found) == {}


def test_each_check_can_fail() -> None:
    checks = {
        node.name
        for file in Path(accel_testing.kit.__file__).parent.glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    red = {check for each in EACH for check in each.values[2]} | CARELESSLY_RED
    assert checks - red == set()


CARELESS = """
from accel_core import Card
{imports}
CARD = Card(name="careless", slot="tracker", summary="{summary}", api_version="1.0",
            implementation="broken_plugins.trackers:Sound")
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("imports", "summary", "typed", "requires", "red"),
    mostly_full(
        [
            ("", "A broken plugin.", True, "accel-core", set[str]()),
            ("", " ", True, "accel-core", {"test_the_card_describes_itself"}),
            ("import numpy", "A broken plugin.", True, "accel-core", {"test_the_card_loads_nothing_heavy"}),
            ("", "A broken plugin.", False, "accel-core", {"test_types_are_shipped"}),
            ("", "A broken plugin.", True, "accel-core torch", {"test_requirements_leave_torch_alone"}),
            ("", "A broken plugin.", True, "attrs", {"test_requirements_leave_torch_alone"}),
        ]
    ),
    ids=["sound", "no-summary", "heavy-card", "untyped", "requires-torch", "requires-no-core"],
)
def test_careless_packages_are_red_where_they_are_careless(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    imports: str,
    summary: str,
    typed: bool,
    requires: str,
    red: set[str],
) -> None:
    package = tmp_path / "site" / "careless"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CARELESS.format(imports=imports, summary=summary))
    if typed:
        (package / "py.typed").touch()
    points = "[accel_core.tracker]\ncareless = careless:CARD\n"
    write_distribution(tmp_path / "site", "accel-careless", points, requires=requires.split())
    found = run_kit(pytester, monkeypatch, tmp_path / "site", "careless", "--accel-level", "0")
    assert functions(found.failed) == red, describe(found)


STORE = """
from contextlib import contextmanager
from io import BytesIO
from secrets import token_hex
from accel_core import Card
CARD = Card(name="careless", slot="store", summary="A broken plugin.", api_version="1.0",
            also=("careless-files",), implementation="careless:Folder")
files = {}
class Folder:
    shared = True
    def __init__(self, url):
        self.url = url
        self.name = url.rpartition("/")[2]
    def __str__(self):
        return NAMED
    def at(self, name):
        return Folder(f"{self.url}/{name}")
    def list(self):
        names = [name for name in files if name.startswith(self.url + "/")]
        below = {name[len(self.url) + 1 :]: len(files[name]) for name in names}
        return LISTED
    def read(self, name, start, into):
        url, size = f"{self.url}/{name}", len(into)
        if url not in files:
            raise MISSING(url)
        if start + size > len(files[url]):
            raise EOFError(url)
        into[:] = files[url][READ]
    def create(self, name, content):
        url = f"{self.url}/{name}"
        if CREATED != content:
            raise FileExistsError(url)
    @contextmanager
    def writer(self, name):
        url, file = f"{self.url}/{name}", BytesIO()
        yield file
        SENT
    def remove(self, names):
        for url in [f"{self.url}/{name}" for name in names]:
            REMOVED
    @contextmanager
    def claim(self):
        url = f"{self.url}/claim-{token_hex(8)}"
        CLAIMED
        yield
        files.pop(url, None)
    def is_claimed(self):
        return any(name.startswith(f"{self.url}/claim-") for name in files)
    def local_cache(self, nonce):
        return self
    def fetch(self, name, ranges):
        pass
    def local(self, name):
        return None
"""
SOUND = {
    "NAMED": "self.url",
    "LISTED": "{name.partition('/')[0]: None if '/' in name else size for name, size in below.items()}",
    "MISSING": "FileNotFoundError",
    "READ": "start : start + size",
    "CREATED": "files.setdefault(url, content)",
    "SENT": "files[url] = file.getvalue()",
    "CLAIMED": "files[url] = b'mine'",
    "REMOVED": "files.pop(url, None)",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("broken", "red"),
    mostly_full(
        [
            ({}, set[str]()),
            (
                {"CREATED": "files.__setitem__(url, content) or content"},
                {"test_a_second_create_is_refused", "test_of_creates_at_once_one_is_done"},
            ),
            ({"LISTED": "below"}, {"test_a_large_file_is_written_whole_and_read_in_parts"}),
            (
                {"READ": "start + 1 :][: size"},
                {
                    "test_a_second_create_is_refused",
                    "test_of_creates_at_once_one_is_done",
                    "test_a_large_file_is_written_whole_and_read_in_parts",
                    "test_what_is_read_near_is_the_same",
                },
            ),
            (
                {"SENT": "files[url] = file.getvalue()[:-1]"},
                {
                    "test_a_folder_is_claimed_as_long_as_it_is_used",
                    "test_a_large_file_is_written_whole_and_read_in_parts",
                    "test_what_is_read_near_is_the_same",
                    "test_what_is_removed_is_gone_and_may_be_gone_already",
                },
            ),
            ({"CLAIMED": "pass"}, {"test_a_folder_is_claimed_as_long_as_it_is_used"}),
            ({"REMOVED": "files.pop(url)"}, {"test_what_is_removed_is_gone_and_may_be_gone_already"}),
            ({"MISSING": "KeyError"}, {"test_a_file_that_is_not_there_is_said_so"}),
            ({"NAMED": "self.name"}, {"test_a_folder_is_named_as_the_user_named_it"}),
            (
                {"LISTED": "below or [][0]"},
                {
                    "test_nothing_lies_in_a_new_place",
                    "test_a_large_file_is_written_whole_and_read_in_parts",
                    "test_what_is_removed_is_gone_and_may_be_gone_already",
                },
            ),
        ]
    ),
    ids=[
        "sound",
        "creates-again",
        "lists-all",
        "reads-others",
        "writes-less",
        "claims-nothing",
        "removes-once",
        "odd-error",
        "odd-name",
        "odd-list",
    ],
)
def test_careless_stores_are_red_where_they_are_careless(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broken: dict[str, str],
    red: set[str],
) -> None:
    package = tmp_path / "site" / "careless"
    package.mkdir(parents=True)
    code = STORE
    for word, text in {**SOUND, **broken}.items():
        code = code.replace(word, text)
    (package / "__init__.py").write_text(code)
    (package / "py.typed").touch()
    write_distribution(tmp_path / "site", "accel-careless", "[accel_core.store]\ncareless = careless:CARD\n")
    store_for.cache_clear()  # the store before had the same scheme
    found = run_kit(pytester, monkeypatch, tmp_path / "site", "careless", "--accel-level", "1")
    assert functions(found.failed) == red, describe(found)


COMMAND = """
from accel_core import Card
{imports}
CARD = Card(name="careless", slot="command", summary="A broken plugin.", api_version="1.0",
            implementation="careless.command:command")
"""
COMMAND_ITSELF = """
import click
{imports}
@click.command()
def command():
    pass
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("listing", "itself", "red"),
    mostly_full(
        [
            ("", "", set[str]()),
            ("import careless.command", "", {"test_the_command_is_listed"}),
            ("", "import torch", {"test_its_help_is_quick"}),
        ]
    ),
    ids=["sound", "imported-to-be-listed", "heavy-help"],
)
def test_careless_commands_are_red_where_they_are_careless(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    listing: str,
    itself: str,
    red: set[str],
) -> None:
    package = tmp_path / "site" / "careless"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(COMMAND.format(imports=listing))
    (package / "command.py").write_text(COMMAND_ITSELF.format(imports=itself))
    (package / "py.typed").touch()
    write_distribution(
        tmp_path / "site", "accel-careless", "[accel_core.command]\ncareless = careless:CARD\n"
    )
    found = run_kit(pytester, monkeypatch, tmp_path / "site", "careless", "-k", "command or help")
    assert functions(found.failed) == red, describe(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("level", "name"),
    [pytest.param(*each.values[:2], id=each.id, marks=each.marks) for each in EACH if not each.values[2]],
)
def test_what_is_not_broken_is_red_nowhere(
    check_broken: Callable[..., Conformance], level: int, name: str
) -> None:
    found = check_broken(level, name)
    assert functions(found.failed) == set(), describe(found)


@pytest.mark.full
@pytest.mark.timeout(1500)  # of a whole level: it would strike inside a check, which then counts as red
@pytest.mark.parametrize(("level", "name", "red"), [each for each in EACH if each.values[2]])
def test_broken_plugins_are_red_nowhere_else(
    check_broken: Callable[..., Conformance], level: int, name: str, red: set[str]
) -> None:
    found = check_broken(level, name)
    assert functions(found.failed) == red, describe(found)
