"""Install packages of this checkout as wheels, each built once, with libraries beside them.

`python .ci/wheels.py FOLDER [--no-deps] [--unpinned | --lowest] accel-core accel-ddp transformers` installs
into the environment that runs it. Packages of ours come along where these require them, and no others. The
wheels are kept in FOLDER, which all tox environments share, and built anew when they are older than their
sources. `all` is every package of the checkout. --lowest: of each library the oldest release that a package
accepts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {"accel-core": ROOT} | {
    f"accel-{file.parent.name}": file.parent
    for parent in ("backends", "contrib")
    for file in sorted(ROOT.glob(f"{parent}/*/pyproject.toml"))
}


def main(folder: Path, words: list[str]) -> None:
    lowest = "--lowest" in words
    pinned = not lowest and "--unpinned" not in words
    if pinned and (compiled := os.environ.get("PYTHONPYCACHEPREFIX")):
        share_bytecode(Path(compiled))
    arguments = ["--constraints", str(ROOT / "constraints.txt")] if pinned else []
    arguments += ["--resolution", "lowest-direct", "--no-sources"] if lowest else []
    wanted = [word for word in words if word not in ("all", "--unpinned", "--lowest")]
    if "all" in words:
        wanted += ["accel-core[stateful]", *PROJECTS]
    for word in [*dict.fromkeys(wanted), *required({name_of(word) for word in wanted})]:
        name, extras = re.match(r"([^\[]*)(\[.*\])?", word).groups()
        if name not in PROJECTS:
            arguments.append(word)
            continue
        # uv asks a folder, and no wheel, what it needs directly.
        source = PROJECTS[name] if lowest else built(PROJECTS[name], folder / name)
        arguments += ["--reinstall-package", name, f"{name}{extras or ''} @ {source.resolve().as_uri()}"]
    uv("pip", "install", "--python", sys.executable, *arguments)


def name_of(word: str) -> str:
    return word.partition("[")[0]


def required(names: set[str]) -> list[str]:
    """List the packages of ours that these require, directly or by another, without these themselves."""
    found, new = set(names), names & PROJECTS.keys()
    while new:
        texts = [(PROJECTS[name] / "pyproject.toml").read_text("utf-8") for name in new]
        blocks = [re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL) for text in texts]
        asked = {name for block in blocks if block for name in re.findall(r'"(accel-[a-z-]+)', block[1])}
        new = asked & PROJECTS.keys() - found
        found |= new
    return sorted(found - names)


def share_bytecode(compiled: Path) -> None:
    """Compile the modules of site-packages once for all environments.

    Their files are the same, with the same time: uv links them. `compiled` has a folder for each
    environment's; here it leads to one for all.
    """
    packages = Path(sysconfig.get_path("purelib"))
    own, shared = compiled.joinpath(*packages.parts[1:]), compiled / "site-packages"
    if not own.is_symlink():
        shutil.rmtree(own, ignore_errors=True)  # of what Python imports when it starts
        for folder in (own.parent, shared):
            folder.mkdir(parents=True, exist_ok=True)
        own.symlink_to(shared, target_is_directory=True)


def built(project: Path, folder: Path) -> Path:
    """The project's wheel in `folder`, built unless it is newer than every source file.

    Environments may run side by side: a wheel is built in a folder of its own, and moved when it is whole.
    """
    sources = [project / "pyproject.toml", *project.glob("src/**/*.*"), *project.glob("accel_core/**/*.*")]
    newest = max(path.stat().st_mtime for path in sources if "__pycache__" not in path.parts)
    wheels = list(folder.glob("*.whl"))
    if not wheels or wheels[0].stat().st_mtime < newest:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as scratch:
            uv("build", "--wheel", "--out-dir", scratch, str(project))
            (wheel,) = Path(scratch).glob("*.whl")
            wheel = wheel.replace(folder / wheel.name)
        for stale in wheels:
            if stale != wheel:
                stale.unlink(missing_ok=True)
        return wheel
    return wheels[0]


def uv(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
