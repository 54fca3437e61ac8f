"""Adapt the pages of docs/ for the documentation site; mkdocs.yml names this file as a hook.

The pages can be read in the repository too. For the site, links that leave docs/ get the repository's
address, the words behind a fence become its title, and each package gets a page with its README and names.
"""
# ruff: noqa: INP001  # a script

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import tomllib
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(```.*?```|`[^`]+`)", re.DOTALL)
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+) (?P<words>[^\n`]+)$", re.MULTILINE)
MODULES = {"hooks": "Every hook is described in [Hooks](../hooks.md)."}
"""Public modules that have a page elsewhere."""


class Package(NamedTuple):
    """A package as the site shows it."""

    names: list[str]
    description: str
    readme: Path | None


def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml."""
    config.repo_url = REPOSITORY
    config.repo_name = "Repository"
    config.edit_uri = ""
    for section in (page for group in config.nav for page in group.values() if isinstance(page, list)):
        for number, entry in enumerate(section):
            if isinstance(entry, dict) and "api/" in entry.values():
                section[number] = {
                    "Packages": ["api/index.md", *(f"api/{name}.md" for name in packages_of())]
                }
            elif isinstance(entry, dict) and "decisions/" in entry.values():
                pages = sorted(page.name for page in (DOCS / "decisions").glob("*.md"))
                pages.sort(key="index.md".__ne__)
                section[number] = {"Decisions": [f"decisions/{page}" for page in pages]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each package."""
    packages = packages_of()
    rows = [f"| [`{name}`]({name}.md) | {it.description} |\n" for name, it in packages.items()]
    index = "# Packages and their API\n\n| package | |\n|---|---|\n" + "".join(rows)
    files.append(File.generated(config, "api/index.md", content=index))
    for name, package in packages.items():
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name, package)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt a page of docs/."""
    source = DOCS / page.file.src_uri
    return markdown if page.file.generated_by else adapted(markdown, source, source)


def adapted(markdown: str, source: Path, place: Path) -> str:
    """Return the text of `source` for the site, where it lies at `place` below docs/."""

    def link(found: re.Match[str]) -> str:
        target, anchor = (source.parent / found[1]).resolve(), found[2] or ""
        if not target.exists():
            raise PluginError(f"{source.relative_to(ROOT)}: the link to {found[1]} leads nowhere")
        if target != ROOT and (target / "pyproject.toml").exists():
            target = DOCS / "api" / f"accel_{target.name.replace('-', '_')}.md"
        if target.is_relative_to(DOCS):
            return f"]({os.path.relpath(target, place.parent)}{anchor})"
        kind = "tree" if target.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{target.relative_to(ROOT).as_posix()}{anchor})"

    markdown = FENCE.sub(fence, markdown)
    parts = CODE.split(markdown)  # every second part is code
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def fence(found: re.Match[str]) -> str:
    """Write a fence in the site's syntax. The name of a file becomes its title; other words are for tests."""
    is_file = found["language"] in ("python", "toml", "yaml")
    title = f' title="{found["words"]}"' if is_file else ""
    return f"{found['indent']}```{found['language']}{title}"


def packages_of() -> dict[str, Package]:
    """Map each package to what its page tells."""
    found = {"accel_core": Package(public_names(ROOT / "accel_core"), PROJECT["description"], None)}
    for file in sorted(ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        name = project["name"].replace("-", "_")
        names = public_names(file.parent / "src" / name)
        found[name] = Package(names, project["description"], file.parent / "README.md")
    return found


def public_names(package: Path) -> list[str]:
    """Read the package's names from its stub, or from its `__all__`, without importing it."""
    stub = package / "__init__.pyi"
    if stub.exists():
        module = ast.parse(stub.read_text(encoding="utf-8"))
        imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
        names = [alias.name for node in imports for alias in node.names]
        return sorted((name for name in names if name != "__version__"), key=str.lower)
    for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def api_page(name: str, package: Package) -> str:
    """Write a page of the package's README, and of names that mkdocstrings describes."""
    parts = [f"# {name}", package.description]
    if package.readme:
        parts = [
            adapted(package.readme.read_text(encoding="utf-8"), package.readme, DOCS / "api" / "page.md")
        ]
    parts.append(f"## API of {name}")
    for public in package.names:
        told = MODULES.get(public)
        parts.append(f"### {public}\n\n{told}" if told else f"::: {name}.{public}")
    return "\n\n".join([*parts, ""])
