"""Build this checkout's wheels that are missing or older than their sources, and install the named ones.

`python .ci/wheels.py FOLDER [--no-deps] accel-core[testing] accel-ddp`: in the environment to install
into. All tox environments share the folder: each wheel is built once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {"accel-core": ROOT} | {
    f"accel-{file.parent.name}": file.parent
    for parent in ("backends", "contrib")
    for file in ROOT.glob(f"{parent}/*/pyproject.toml")
}


def main(folder: Path, requirements: list[str]) -> None:
    arguments = [option for option in requirements if option.startswith("--")]
    for requirement in requirements[len(arguments) :]:
        name, extras = re.fullmatch(r"([a-z0-9-]+)(\[.*\])?", requirement).groups()
        wheel = built(PROJECTS[name], folder / name)
        arguments += ["--reinstall-package", name, f"{name}{extras or ''} @ {wheel.resolve().as_uri()}"]
    uv(
        "pip",
        "install",
        "--python",
        sys.executable,
        "--constraints",
        str(ROOT / "constraints.txt"),
        *arguments,
    )


def built(project: Path, folder: Path) -> Path:
    """The project's wheel in `folder`, built unless it is newer than every source file."""
    sources = [project / "pyproject.toml", *project.glob("src/**/*.*"), *project.glob("accel_core/**/*.*")]
    newest = max(path.stat().st_mtime for path in sources if "__pycache__" not in path.parts)
    wheels = list(folder.glob("*.whl"))
    if not wheels or wheels[0].stat().st_mtime < newest:
        for stale in wheels:
            stale.unlink()
        uv("build", "--wheel", "--out-dir", str(folder), str(project))
    return next(folder.glob("*.whl"))


def uv(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
