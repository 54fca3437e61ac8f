"""Checkpoints for tests, read into memory, and changed."""

from __future__ import annotations

from accel_checkpoint_tools.contents import Contents


def tensors_of(folder):
    """Return the tensors of a checkpoint by (unit, key)."""
    with Contents.open(folder) as contents:
        return read(contents)


def read(contents):
    return {key: source.read() for key, source in contents.tensors.items()}


def tensor(contents, unit, key):
    return contents.tensors[unit, key].read()


def rewrite(source, target, change):
    """Write a checkpoint again, changed by a function."""
    with Contents.open(source) as contents:
        change(contents)
        return contents.write(target).path
