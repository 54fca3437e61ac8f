"""Write what all packages declare alike: classifiers, URLs, and the extras of accel-core.

`[project.urls] Repository` in the root pyproject.toml is the project's address. `python tools/metadata.py`
writes what follows from it, `--repository URL` changes it everywhere, `--check` compares.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
CLASSIFIERS = (
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.10",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
)
LIST = re.compile(r"^classifiers = \[.*?\]\n", re.DOTALL | re.MULTILINE)
URLS = re.compile(r"^\[project\.urls\]\n(?:.+\n)+\n", re.MULTILINE)
TABLE = re.compile(r"^\[(?:project\.|tool\.)", re.MULTILINE)
EXTRAS = re.compile(r"(?<=^\[project\.optional-dependencies\]\n)(?:.+\n)+", re.MULTILINE)
SOURCES = re.compile(r"(?<=^\[tool\.uv\.sources\]\n)(?:.+\n)+", re.MULTILINE)


def read(folder: Path) -> dict[str, object]:
    """Parse the pyproject.toml of a folder."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def members(root: Path = ROOT) -> list[Path]:
    """List the folders of the workspace's packages."""
    return [root / folder for folder in read(root)["tool"]["uv"]["workspace"]["members"]]  # type: ignore[index]


def repository(root: Path = ROOT) -> str:
    """Return the address of the project."""
    return str(read(root)["project"]["urls"]["Repository"])  # type: ignore[index]


def described(folder: Path, root: Path = ROOT) -> str:
    """Return the folder's pyproject.toml with fresh classifiers and URLs."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    own = [name for name in read(folder)["project"]["classifiers"] if name.startswith("Framework ::")]  # type: ignore[index]
    rows = "".join(f'    "{name}",\n' for name in sorted({*CLASSIFIERS, *own}))
    text = LIST.sub(f"classifiers = [\n{rows}]\n", text, count=1)
    address, page = repository(root), (folder / "CHANGELOG.md").relative_to(root).as_posix()
    urls = {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/{page}",
    }
    text = URLS.sub("", text)
    start = TABLE.search(text).start()  # type: ignore[union-attr]
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return f"{text[:start]}[project.urls]\n{table}\n{text[start:]}"


def fresh(root: Path = ROOT) -> dict[Path, str]:
    """Map each pyproject.toml to its fresh text."""
    texts = {folder / "pyproject.toml": described(folder, root) for folder in (root, *members(root))}
    names = sorted(str(read(folder)["project"]["name"]) for folder in members(root))  # type: ignore[index]
    extras = "".join(f'{name.removeprefix("accel-")} = ["{name}>=0.1,<0.3"]\n' for name in names)
    sources = "".join(f"{name} = {{ workspace = true }}\n" for name in names)
    core = EXTRAS.sub('stateful = ["torchdata>=0.11"]\n' + extras, texts[root / "pyproject.toml"], count=1)
    texts[root / "pyproject.toml"] = SOURCES.sub(sources, core, count=1)
    return texts


def move(address: str, root: Path = ROOT) -> None:
    """Replace the address of the project in every tracked file."""
    old = repository(root)
    command = ["git", "grep", "--files-with-matches", "--fixed-strings", old]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)  # noqa: S603 - fixed
    for name in listed.stdout.splitlines():
        file = root / name
        file.write_text(file.read_text(encoding="utf-8").replace(old, address.rstrip("/")), encoding="utf-8")


def main() -> int:
    """Write the files, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is stale; write nothing")
    parser.add_argument("--repository", metavar="URL", help="the new address of the project")
    options = parser.parse_args()
    if options.repository:
        move(options.repository)
    stale = {path: text for path, text in fresh().items() if path.read_text(encoding="utf-8") != text}
    if options.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: python tools/metadata.py")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
