"""Core's code names no engine: what it says of one is data, or comes from its package."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

from checkout import packages, place, refuse, text

ENGINES = re.compile(
    r"slurm|srun|sbatch|ompi_|open[ _]mpi|mpirun|\bmpi\b|pmi_|pmix|\bflux|jsm_|jsrun", re.IGNORECASE
)


def named() -> Iterator[str]:
    for file in packages()["accel_core"]:
        for token in tokenize.generate_tokens(io.StringIO(text(file)).readline):
            if (found := ENGINES.search(token.string)) is not None:
                yield f"{place(file, token.start[0])}: {found[0]}"


def test_no_engine_is_named_in_core() -> None:
    refuse(named(), "an engine in core: ask the function `task` of its launcher's card")
