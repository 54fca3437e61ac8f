"""Trackers on a library made for tests, which fails where it is told to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from attrs import frozen

from accel_trackers.libraries.library import Library
from accel_trackers.options import TrackerConfig
from accel_trackers.tracker import LibraryTracker


class Notes(Library):
    """Keeps what it is told; raises for names that begin with "bad"."""

    module = "json"

    def __init__(self):
        self.told = []
        self.opens = True

    def check(self, name):
        if name.startswith("bad"):
            raise OSError(f"no space for {name}")

    def starter(self):
        return self.start

    def start(self, *, entity=None):
        """What `init_kwargs` may give."""

    def arguments(self, config, folder, run_id, *, resumed):
        return {"run_id": run_id, "resumed": resumed}

    def open(self, project, **arguments):
        if not self.opens:
            raise ConnectionError("the key is refused")
        self.handle = SimpleNamespace(**arguments)
        self.told.append(("open", project, arguments["resumed"]))

    def run_id(self, asked):
        return self.handle.run_id

    def configure(self, values):
        self.told.append(("configure", dict(values)))

    def log(self, values, step=None, *, colour=None):
        for name, value in values.items():
            self.check(name)
            self.told.append((step, {name: value}))

    def end_log(self):
        self.told.append("end of log")

    def log_images(self, values, step=None, **options):
        self.log(values, step)

    def log_table(self, table_name, columns=None, data=None, dataframe=None, step=None, **options):
        self.log({table_name: data}, step)

    def log_file(self, path, name):
        self.told.append(("file", name))

    def log_reference(self, name, facts):
        self.told.append(("reference", name, dict(facts)))

    def close(self):
        self.told.append("close")


@frozen(kw_only=True)
class NotesConfig(TrackerConfig):
    library = "accel_trackers_notes:Notes"
    name = "notes"


@pytest.fixture
def notes(monkeypatch, tmp_path):
    """`notes(**options)`: a tracker of the library above, as core makes it."""
    module = ModuleType("accel_trackers_notes")
    module.Notes = Notes
    monkeypatch.setitem(sys.modules, "accel_trackers_notes", module)
    run = SimpleNamespace(config=SimpleNamespace(project=SimpleNamespace(logging_dir=tmp_path / "logs")))

    def make(**options):
        return LibraryTracker(NotesConfig(**options), run)

    return make


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty home and working folder, and no settings of the person who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Path(tmp_path)
