"""A program that starts children in every way, and prints who serves `accelerate` in each of them.

With the word `install` it calls `accel_compat.install()` first.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from torch.utils.data import DataLoader, Dataset


def server(_: object = None) -> str:
    """Return who serves `accelerate` in this process."""
    import accelerate

    return "ours" if "accel_compat" in accelerate.__file__ else f"theirs {version('accelerate')}"


class Servers(Dataset):
    """Samples that say who serves `accelerate` in the worker that reads them."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return server()


def by_subprocess(*words: str) -> str:
    """Return what Python printed."""
    ended = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout.strip()


def main() -> None:
    """Print a line per kind of child."""
    code = "import children; print(children.server())"
    print("subprocess", by_subprocess("-c", code), sep=": ")
    print("python -E", by_subprocess("-E", "-c", f"import sys; sys.path.insert(0, '.'); {code}"), sep=": ")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "rank"]
    print("torchrun", *sorted(set(by_subprocess(*torchrun).splitlines())), sep=": ")
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            print(method, pool.map(server, [0])[0], sep=": ")
        loader = DataLoader(Servers(), num_workers=1, multiprocessing_context=context)
        print(f"DataLoader by {method}", next(iter(loader))[0], sep=": ")
    print("this process", server(), sep=": ")


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    if sys.argv[1:] == ["rank"]:
        print(server())
    else:
        if sys.argv[1:] == ["install"]:
            import accel_compat

            accel_compat.install()
        main()
