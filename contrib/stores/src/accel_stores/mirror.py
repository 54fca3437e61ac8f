"""The extension `mirror`: copies of numbered checkpoints in another place, made in the background.

    checkpoint_N is committed, and its number is due
    its first rank of each node claims it, so that total_limit passes over it
    its copy, in a thread of each rank, with messages as a save has them (accel_core/storage/pending.py):
        rank 0 begins in the other place, and tells the others
        each rank sends the files that it has written, and votes
        rank 0 commits the copy, and removes those over `keep`

One copy is made at a time: a checkpoint that is due waits for the one before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from accel_core import (
    CheckpointError,
    ConfigError,
    Meter,
    Pending,
    StoreMailbox,
    commits,
    get_logger,
    hooks,
    implements,
    mailbox_of,
    manifests,
    read_manifest,
    show_progress,
    storage_at,
    uncaught_error,
)
from accel_stores.bucket import Bucket

if TYPE_CHECKING:
    from accel_core import FileRecord, Manifest, Run, RunConfig, Storage
    from accel_stores.config import MirrorConfig

__all__ = ["Mirror"]

_logger = get_logger(__name__)

TIMEOUTS: Final = 10
"""Times process_group.timeout that a copy is waited for."""
FAILED_SECONDS: Final = 60.0
"""Seconds that a process that failed waits for one."""
PIECE_BYTES: Final = 4 << 20
_OF_THE_FILE: Final = ("format", "version", "files", "checksum")
"""Members of a manifest that are written anew."""
_NAME: Final = re.compile(r"checkpoint_(\d+)")


class Mirror:
    """Extension `mirror`: see the module."""

    def __init__(self, config: MirrorConfig, run: Run) -> None:
        if config.url is None:
            raise ConfigError(
                "mirror.url is not set: copies have no place\nset it, such as to s3://bucket/run"
            )
        project = run.config.project
        if not project.automatic_checkpoint_naming:
            raise ConfigError(
                "mirror copies numbered checkpoints, and this run numbers none\n"
                "set project.automatic_checkpoint_naming"
            )
        self.config, self.run = config, run
        self.folder = storage_at(config.url).at("checkpoints")
        keep = project.total_limit if config.keep is None else config.keep
        self._series: Any = run.checkpoints.series.copied_to(self.folder, keep)
        self._copies = 0
        """Number of those that were begun: the same on all ranks."""
        self._copy: Pending | None = None
        self._deadline = 0.0
        self._newest: Storage | None = None
        self._copied: str | None = None
        """Id of the save that was copied last."""

    @implements(hooks.run_started)
    def run_started(self, run_id: str, config: RunConfig) -> None:
        """Refuse a place that cannot be reached."""
        del run_id, config
        try:
            with show_progress(f"looking at {self.folder}"):
                self.folder.list()
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be reached: {type(error).__name__}: {error}\n"
                "check mirror.url, and that this process may use it",
                path=str(self.folder),
            ) from error

    @implements(hooks.checkpoint_committed)
    def checkpoint_committed(self, folder: Path | str, step: int | None) -> None:
        """Copy a numbered checkpoint that is due; tell why the copy before has failed."""
        del step
        place = storage_at(folder, each_node=self.run.config.project.save_on_each_node)
        numbered, series = _NAME.fullmatch(place.name), self.run.checkpoints.series
        if numbered is None or str(place) != str(series.folder.at(place.name)):
            return
        is_due = int(numbered[1]) % self.config.every == 0
        self._newest = place
        try:
            if is_due or (self._copy is not None and self._copy.is_over):
                self._join(self._deadline - time.monotonic())
        except CheckpointError as error:
            _logger.warning("%s\nthe next copy is that of %s", error, place if is_due else "one that is due")
        if is_due:
            try:
                self._start(place, read_manifest(place))
            except (CheckpointError, OSError) as error:
                _logger.warning("%s is not copied: %s", place, error)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        """Wait for the copy under way, and copy the newest checkpoint, due or not.

        Raises:
            CheckpointError: the newest one is not copied.
        """
        has_failed, copy, failure = uncaught_error() is not None, self._copy, None
        try:
            self._join(FAILED_SECONDS if has_failed else self._deadline - time.monotonic())
        except CheckpointError as error:
            failure = error
        is_over = copy is None or copy.is_over
        if self._newest is not None and is_over and not has_failed:
            manifest = read_manifest(self._newest)
            if manifest.save_id != self._copied:
                self._start(self._newest, manifest)
                self._join(self._deadline - time.monotonic())
        elif failure is not None:
            raise failure

    def _join(self, patience: float) -> None:
        """Wait for the copy under way.

        Raises:
            CheckpointError: it has failed, or is not over after `patience` seconds.
        """
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.wait(max(0.0, patience))
            self._copied = copy.save_id

    def _start(self, place: Storage, manifest: Manifest) -> None:
        """Let a thread copy a checkpoint, unless it is not this run's, or of one rank alone."""
        run, rank, ranks = self.run, self.run.world.rank, self.run.world.size
        if manifest.name is None or manifest.world["size"] != ranks:
            return
        home, target, claim = place.at(manifest.save_id), self.folder.at(place.name), ExitStack()
        if run.world.local_rank == 0:
            claim.enter_context(home.claim())
        self._copies += 1
        mail = self._mail.under(f"mirror/{self._copies}")
        names = [name for name in manifest.files if _sender(name, ranks) == rank]
        records = {name: manifest.files[name] for name in names}
        members = {name: each for name, each in manifest.members.items() if name not in _OF_THE_FILE}
        part = _Part(home, records, rank, mail)
        self._copy = copy = Pending(
            target,
            manifest.save_id,
            1,
            [part],
            members,
            claim,
            _Copiers(rank, [0] * ranks, f"copying {place.name} to {self.folder}"),
            mail,
            self._series.apply_limit,
            what="copy",
        )
        part.begin = lambda: self._begin(copy, manifest)
        self._deadline = time.monotonic() + TIMEOUTS * mail.timeout
        copy.start()

    @cached_property
    def _mail(self) -> StoreMailbox:
        return mailbox_of(self.run)

    def _begin(self, copy: Pending, manifest: Manifest) -> None:
        """Claim the place of a copy, and number its commit. By rank 0, in the thread."""
        target = copy.place
        if not self._series.ancestors:
            self._series.clear()
            self._series.resume(manifest)
        if any(each.run_id not in manifest.lineage for each in manifests(target)):
            raise CheckpointError(
                f"{target} is another run's checkpoint; it was left as it is\n"
                "give each run a mirror.url of its own",
                path=str(target),
            )
        copy.number = max(commits(target), default=0) + 1
        copy.claim.enter_context(target.at(copy.save_id).claim())


@define(eq=False)
class _Part:
    """The files that a rank copies. begin: called by rank 0 before any is sent."""

    source: Storage
    records: Mapping[str, FileRecord]
    rank: int
    mail: StoreMailbox
    begin: Callable[[], None] = lambda: None
    meter: Meter = field(factory=Meter)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(record.size for record in self.records.values())

    def write(self, home: Storage) -> dict[str, FileRecord]:
        """Send the files, once rank 0 has begun; name -> record."""
        if self.rank == 0:
            has_begun = False
            try:
                self.begin()
                has_begun = True
            finally:  # the others wait for it
                self.mail.put("begin", {"has_begun": has_begun})
        else:
            heard = self.mail.wait({0: "begin"}, self.mail.timeout)[0]
            has_begun = heard is not None and heard["has_begun"]
        for name in self.records if has_begun else ():
            try:
                self._send(home, name)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{self.source}/{name} cannot be copied: {error}\n"
                    "give each run a project_dir and a mirror.url of its own"
                ) from error
        return dict(self.records)

    def _send(self, home: Storage, name: str) -> None:
        size = self.records[name].size
        path = self.source.local(name)
        if path is not None and isinstance(home, Bucket):
            home.send(path, name)  # it would spool the file once more
            self.meter.count += size
            return
        piece = memoryview(bytearray(min(size, PIECE_BYTES)))
        with home.writer(name) as file:
            for start in range(0, size, PIECE_BYTES):
                self.source.read(name, start, part := piece[: size - start])
                file.write(part)
                self.meter.count += len(part)


@define
class _Copiers:
    """The ranks that make a copy together: see `Comm` in accel_core/storage/protocols.py.

    Its place is one for all, and they never meet in a collective.
    """

    rank: int
    nodes: Sequence[int]
    text: str

    def together(self, step: str, action: Callable[[], Any]) -> Sequence[Any]:
        raise NotImplementedError

    def mailbox(self, key: str) -> Any:
        raise NotImplementedError

    def shown(
        self, text: str, measure: Callable[[], tuple[int, int]] | None = None
    ) -> AbstractContextManager[object]:
        del text
        return show_progress(self.text, measure)


def _sender(name: str, ranks: int) -> int:
    """Return the rank that sends a file: its writer; rank 0 sends the rest."""
    number = name.removeprefix("rank-").partition(".")[0]
    return int(number) if number.isdecimal() and int(number) < ranks else 0
