"""Adapt the pages of docs/ for the documentation site; mkdocs.yml names this file as a hook.

The pages can be read in the repository too. For the site, links that leave docs/ get the repository's
address, the words behind a fence become its title, and each package gets a page with its public names.
"""
# ruff: noqa: INP001  # a script

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import tomllib
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+) (?P<words>[^\n`]+)$", re.MULTILINE)
MODULES = {"hooks": "Every hook is described in [Hooks](../hooks.md)."}
"""Public modules that have a page elsewhere."""


def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml."""
    config.repo_url = REPOSITORY
    config.repo_name = "Repository"
    config.edit_uri = ""
    for section in (page for group in config.nav for page in group.values() if isinstance(page, list)):
        for number, entry in enumerate(section):
            if isinstance(entry, dict) and "api/" in entry.values():
                section[number] = {"API": ["api/index.md", *(f"api/{name}.md" for name in packages_of())]}
            elif isinstance(entry, dict) and "decisions/" in entry.values():
                pages = sorted(page.name for page in (ROOT / "docs" / "decisions").glob("*.md"))
                pages.sort(key="index.md".__ne__)
                section[number] = {"Decisions": [f"decisions/{page}" for page in pages]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each package."""
    packages = packages_of()
    rows = [f"| [`{name}`]({name}.md) | {about} |\n" for name, (_, about) in packages.items()]
    index = "# API\n\nThe public names of each package.\n\n| package | |\n|---|---|\n" + "".join(rows)
    files.append(File.generated(config, "api/index.md", content=index))
    for name, (names, about) in packages.items():
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name, names, about)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Give links that leave docs/ the repository's address, and fences titles."""
    source = Path(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        target = (ROOT / "docs" / source.parent / found[1]).resolve()
        if target.is_relative_to(ROOT / "docs") or page.file.generated_by:
            return found[0]
        if not target.exists():
            raise PluginError(f"{source}: the link to {found[1]} leads nowhere")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{found[2] or ''})"

    return FENCE.sub(fence, LINK.sub(link, markdown))


def fence(found: re.Match[str]) -> str:
    """Write a fence in the site's syntax. The name of a file becomes its title; other words are for tests."""
    is_file = found["language"] in ("python", "toml", "yaml")
    title = f' title="{found["words"]}"' if is_file else ""
    return f"{found['indent']}```{found['language']}{title}"


def packages_of() -> dict[str, tuple[list[str], str]]:
    """Map each package to its public names and its description."""
    found = {"accel_core": (public_names(ROOT / "accel_core"), PROJECT["description"])}
    for file in sorted(ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        name = project["name"].replace("-", "_")
        found[name] = (public_names(file.parent / "src" / name), project["description"])
    return found


def public_names(package: Path) -> list[str]:
    """Read the package's `__all__` without importing it."""
    for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def api_page(package: str, names: list[str], about: str) -> str:
    """Write a page that mkdocstrings fills."""
    parts = [
        f"## {name}\n\n{MODULES[name]}" if name in MODULES else f"::: {package}.{name}" for name in names
    ]
    return "\n\n".join([f"# {package}", about, *parts, ""])
