"""`accel_core.storage` needs torch, numpy, xxhash, attrs and `accel_core.errors`, nothing else of core."""

from __future__ import annotations

import sys
from pathlib import Path

STORAGE_ALONE = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        parts = name.split(".")
        if parts[0] == "accel_core" and parts[1:2] not in ([], ["storage"], ["errors"]):
            raise ImportError(f"storage imports {name}")

sys.meta_path.insert(0, Block())
import accel_core.storage
found = [each.name for each in pkgutil.iter_modules(accel_core.storage.__path__, "accel_core.storage.")]
for name in found:
    importlib.import_module(name)
others = {"pluggy", "cattrs", "yaml", "click", "rich", "safetensors"} & sys.modules.keys()
assert not others, others

sys.path.insert(0, sys.argv[1])
import engine
from pathlib import Path
from accel_core.storage.disk import Disk
place = Disk(Path(sys.argv[2]))
for value in (1.0, 2.0):
    engine.save(place, value)
    assert engine.value_in(place) == value
print(len(found))
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from accel_core import Disk, open_checkpoint
with open_checkpoint(Disk(Path(sys.argv[1]))) as opened:
    opened.verify(opened.blocks)
    print(sorted(opened.manifest.files))
"""


def test_it_saves_and_opens_checkpoints_with_the_rest_of_core_blocked(tmp_path: Path, run_command) -> None:
    command = [sys.executable, "-c", STORAGE_ALONE, str(Path(__file__).parent), str(tmp_path / "here")]
    done = run_command(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15


def test_a_checkpoint_is_verified_without_torch(tmp_path: Path, run_command) -> None:
    import engine

    from accel_core import Disk

    engine.save(Disk(tmp_path / "here"), 1.0)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "here")]
    done = run_command(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['rank-00000.json', 'rank-00000.safetensors', 'state.json']"
