"""Broken plugins, one promise each; the kit must be red at exactly the check of that promise.

Cards only: the faults are in the modules of this folder, or in the card itself.
"""

from __future__ import annotations

import time
from typing import Any

from accel_core import Card

DEVICE_WORDS = {"bf16", "fp16", "float64", "memory_stats", "rng", "process_per_device", "collectives.torch"}
SOUND = "broken_plugins.devices:Sound"


def slow_probe() -> None:
    time.sleep(0.1)


def heavy_probe() -> None:
    import numpy as np  # noqa: F401


def device(name: str, **more: Any) -> Card:
    given = {
        "offers": DEVICE_WORDS,
        "torch_device": "sim",
        "implementation": f"broken_plugins.devices:{''.join(part.title() for part in name.split('-'))}",
    }
    return Card(name=name, slot="device", summary="A broken plugin.", api_version="1.0", **{**given, **more})


def reporting(name: str) -> Card:
    function = name.replace("-", "_")
    return device(name, implementation=SOUND, environment_report=f"broken_plugins.devices:{function}")


def strategy(name: str, **more: Any) -> Card:
    given = {
        "offers": {"no_sync", "local_sgd", "several_optimizers", "whole_weights"},
        "implementation": f"broken_plugins.strategies:{''.join(part.title() for part in name.split('-'))}",
    }
    return Card(
        name=name, slot="strategy", summary="A broken plugin.", api_version="1.0", **{**given, **more}
    )


def tracker(name: str) -> Card:
    implementation = f"broken_plugins.trackers:{''.join(part.title() for part in name.split('-'))}"
    return Card(
        name=name,
        slot="tracker",
        summary="A broken plugin.",
        api_version="1.0",
        implementation=implementation,
    )


def launcher(name: str) -> Card:
    implementation = f"broken_plugins.launchers:{''.join(part.title() for part in name.split('-'))}"
    return Card(
        name=name,
        slot="launcher",
        summary="A broken plugin.",
        api_version="1.0",
        implementation=implementation,
    )


# -- level 0
SLOW_PROBE = device("slow-probe", probe=slow_probe, implementation=SOUND)
HEAVY_PROBE = device("heavy-probe", probe=heavy_probe, implementation=SOUND)
HEAVY_CONFIG = device("heavy-config", config="broken_plugins.heavy_config:Config", implementation=SOUND)
LOOSE_OPTIONS = device("loose-options", config="broken_plugins.loose_options:Config", implementation=SOUND)
HEAVY_LAUNCH = device(
    "heavy-launch", launch_environment="broken_plugins.heavy_launch:launch_environment", implementation=SOUND
)
WORD_TAKEN = device("word-taken", also=("bf16",), implementation=SOUND)
MISSPELT_HOOK = device("misspelt-hook")

# -- level 1
ON_THE_HOST = device("on-the-host")
CLAIMS_MORE = device("claims-more")
FORGETS_BUFFERS = device("forgets-buffers")
UNTIES_WEIGHTS = device("unties-weights")
FORGETS_SEEDS = device("forgets-seeds")
LOSES_RANDOMNESS = device("loses-randomness")
SEEDS_ALL_BUT_ITS_OWN = device("seeds-all-but-its-own")
COUNTS_KILOBYTES = device("counts-kilobytes")
FORGETS_WHAT_IS_HELD = device("forgets-what-is-held")
CLAIMS_FLOAT8 = device("claims-float8", offers=DEVICE_WORDS | {"fp8"})
FAILS_TO_REPORT = reporting("fails-to-report")
WAITS_FOR_ITSELF = device("waits-for-itself")
WARNS_ITSELF = reporting("warns-itself")
ITS_VENDOR_WARNS = reporting("its-vendor-warns")
CLAIMS_TOO_LITTLE = device("claims-too-little", offers=DEVICE_WORDS - {"rng"}, implementation=SOUND)
WRITES_ON_EACH_RANK = tracker("writes-on-each-rank")
FORGETS_ITS_RUN = tracker("forgets-its-run")
WANTS_NUMBERS = tracker("wants-numbers")

# -- level 2
DIVIDES_TWICE = strategy("divides-twice")
CLIPS_AT_ONE = strategy("clips-at-one")
CLIPS_VALUES_LOOSELY = strategy("clips-values-loosely")
NEVER_UNSCALES = strategy("never-unscales")
DENIES_SKIPS = strategy("denies-skips")
LEAVES_AUTOCAST = strategy("leaves-autocast")
NEVER_RECOMPUTES = strategy("never-recomputes")
RECOMPUTES_OTHERWISE = strategy("recomputes-otherwise")
DIVIDES_LOOPS_TWICE = strategy("divides-loops-twice")
SUMS_WINDOWS = strategy("sums-windows")
COPIES_OPTIMIZERS = strategy("copies-optimizers")
IGNORES_ITEMS = strategy("ignores-items")
PERMUTES_CHANNELS = strategy("permutes-channels")
PERMUTES_TRANSPOSED = strategy("permutes-transposed")
UNTIES_ITS_MODEL = strategy("unties-its-model")
DESCRIBES_IN_PAGES = strategy("describes-in-pages")
UNWRAPS_BY_ATTRIBUTE = strategy("unwraps-by-attribute")
UNWRAPS_ALL = strategy("unwraps-all")
NUDGES_WEIGHTS = strategy("nudges-weights")
KEEPS_NO_LAYERS = strategy("keeps-no-layers")

CASTS_PARAMETERS = device("casts-parameters")

# -- level 3
FLIPS_BATCHES = strategy("flips-batches")
LEAVES_WORKERS = launcher("leaves-workers")
LOSES_EXIT_CODES = launcher("loses-exit-codes")
FORGETS_THE_ENVIRONMENT = launcher("forgets-the-environment")
FORGETS_THE_PORT = launcher("forgets-the-port")
MISNUMBERS_WORKERS = launcher("misnumbers-workers")
REPEATS_FAILURES = launcher("repeats-failures")
SENDS_PREVIEWS = launcher("sends-previews")
HIDES_ARGUMENTS = launcher("hides-arguments")
SILENCES_WORKERS = launcher("silences-workers")
SOUND_LAUNCHER = launcher("starts")
SCHEDULES_PER_PROCESS = strategy("schedules-per-process")
SUMS_GRADIENTS = strategy("sums-gradients")
REDUCES_EACH_BATCH = strategy("reduces-each-batch")
SHOWS_REDUCED_GRADIENTS = strategy(
    "shows-reduced-gradients", offers={"no_sync", "whole_weights", "local_gradients"}
)
OWN_WEIGHTS = strategy("own-weights")
READS_IT_ALL = strategy("reads-it-all")
GATHERS_BACKWARDS = strategy("gathers-backwards")
TRUNCATES_BROADCASTS = strategy("truncates-broadcasts")
MEANS_ARE_SUMS = strategy("means-are-sums")
CUTS_LARGE = strategy("cuts-large")
HEARS_ITSELF = strategy("hears-itself")
CLIPS_LOCALLY = strategy("clips-locally")
KEEPS_ITS_WEIGHTS = strategy("keeps-its-weights")
GATHERS_UNSAID = strategy("gathers-unsaid")
DRAWS_ALIKE = strategy("draws-alike")
DRAWS_APART = strategy("draws-apart")
FORGETS_SCALARS = strategy("forgets-scalars")
ADDS_WHAT_THERE_IS = strategy("adds-what-there-is")
EXPORTS_MAXIMA = strategy("exports-maxima")
GATHERS_LATE = strategy("gathers-late")
REMEMBERS_RUNS = strategy("remembers-runs")
MIXES_RUNS = strategy("mixes-runs")
JOINS_NOBODY = strategy(
    "joins-nobody", offers={"no_sync", "local_sgd", "several_optimizers", "whole_weights", "join"}
)

# -- level 4
LOSES_MOMENTUM = strategy("loses-momentum")
COUNTS_ANEW = strategy("counts-anew")
OFFERS_COPIES = strategy("offers-copies")
RENAMES_WEIGHTS = strategy("renames-weights")
LOSES_AN_ELEMENT = strategy("loses-an-element")
DRIFTS_APART = strategy("drifts-apart")
HIDES_MASTERS = strategy("hides-masters")
REBUILDS_MODULES = strategy("rebuilds-modules")
FORGETS_ITS_OPTIMIZER = strategy("forgets-its-optimizer")
SAVES_MEMORY = strategy("saves-memory")

# -- a stack that is right, under them
SOUND_DEVICE = device("sound")
SOUND_STRATEGY = strategy("averages")
ASKS_FOR_A_SETTING = strategy("asks-for-a-setting")
