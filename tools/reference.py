"""Write the parts of the docs that repeat the code.

These are docs/hooks.md, docs/reference.md, the diffs in README.md and docs/tutorial.md, the stub
accel_core/__init__.pyi, and the help of `accel launch` and `accel submit`.
`python tools/reference.py` rewrites them, `--check` compares them. Imports no torch.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from accel_core.cli.launch import launch, submit

ROOT = Path(__file__).resolve().parent.parent
SPECS = Path("accel_core/contract/hooks")
ROLES = ("heart", "prepare", "device", "launcher", "observer")
MARK = re.compile(r"spec\('(\w+)'(?:, (\w+))?(, per_step=True)?\)")
_FACTS = ("name", "slot", "dimensions")
DIFF = re.compile(r"(?<=\n```diff\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def hooks(root: Path = ROOT) -> str:
    """docs/hooks.md: every hook by role and section, with kind, signature and docstring."""
    lines = ["# Hooks", "", f"Written by tools/reference.py from {SPECS}/; change them there.", ""]
    lines += [ast.get_docstring(_module(root / SPECS / "__init__.py")) or "", ""]
    for role in ROLES:
        source = (root / SPECS / f"{role}.py").read_text(encoding="utf-8")
        module = ast.parse(source)
        lines += [f"## {role.capitalize()}", "", ast.get_docstring(module) or "", ""]
        for node in module.body:
            lines += list(_entry(node, source))
    return "\n".join((*lines, *_words(root), ""))


def _words(root: Path) -> Iterator[str]:
    """Describe the phases of `transform_model`, and each capability word."""
    yield from ("## Phases of `transform_model`", "", "In order:", "")
    for phase in _literal(root / SPECS / "prepare.py", "PHASES"):
        yield f"- `{phase}`"
    yield from (
        "",
        "## Capability words",
        "",
        "A card's `offers` and `needs` hold only these. A plugin that offers a word:",
    )
    yield from ("", "| word | promise |", "|---|---|")
    for word, promise in _literal(root / "accel_core/contract/card.py", "CAPABILITIES").items():
        yield f"| `{word}` | {promise} |"


def _literal(path: Path, name: str) -> Any:
    """Read a constant of a module without importing the module."""
    for node in _module(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [ast.unparse(target) for target in targets if target]:
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise LookupError(f"{path} has no {name}")


def _entry(node: ast.stmt, source: str) -> Iterator[str]:
    title = _banner_above(node, source)
    if title:
        yield from (f"### {title[0].upper()}{title[1:]}", "")
    if not isinstance(node, ast.FunctionDef):
        return
    marks = [mark for decorator in node.decorator_list if (mark := MARK.match(ast.unparse(decorator)))]
    if not marks:
        return
    kind = marks[0][1].replace("observer", "everyone, trackers too")
    combined = f", {marks[0][2]}" if marks[0][2] else ""
    per_step = ", per step" if marks[0][3] else ""
    refined = next((argument.arg for argument in node.args.args if argument.arg != "unit"), "")
    of_what = f" of `{refined}`" if kind == "wrapper" else ""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield from (f"#### {node.name}", "", f"*{kind}{combined}{per_step}{of_what}*", "")
    yield from ("```text", f"{node.name}({ast.unparse(node.args)}){result}", "```", "")
    yield from (ast.get_docstring(node) or "", "")


def _banner_above(node: ast.stmt, source: str) -> str | None:
    """Find the title in a `# -- title ----` line above the node."""
    decorators = getattr(node, "decorator_list", None)
    line = decorators[0].lineno if decorators else node.lineno
    for text in reversed(source.splitlines()[: line - 1]):
        if text and not text.startswith("#"):
            return None
        if found := re.fullmatch(r"# -- (.+?) -+", text):
            return found[1]
    return None


def names(root: Path = ROOT) -> str:
    """docs/reference.md: every exported name, every member of the Accelerator, every option."""
    about = "Written by tools/reference.py from signatures, docstrings and config classes; change them there."
    lines = ["# Reference", "", f"{about} Hooks have [a page of their own](hooks.md).", ""]
    classes = {
        node.name: node
        for file in sorted((root / "accel_core/accelerator").glob("*.py"))
        for node in _module(file).body
        if isinstance(node, ast.ClassDef)
    }
    members = dict(_members(classes["Accelerator"], classes))
    del members["__init__"]  # the class stands among the names
    lines += ["## Members of the Accelerator", ""]
    for name, node in sorted(members.items()):
        lines += _described(f"accelerator.{name}", node)
    lines += ["## Names of accel_core", ""]
    exports = _exports(root)
    del exports["__version__"]
    for name, module in sorted(exports.items()):
        lines += _described(name, _definition(root, module, name))
    return "\n".join((*lines, *_options(root)))


def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _members(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, ast.stmt]]:
    for base in map(ast.unparse, cls.bases):
        if base in classes:
            yield from _members(classes[base], classes)
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in cls.body:
        if isinstance(node, ast.Assign) and (same := methods.get(ast.unparse(node.value))):
            yield ast.unparse(node.targets[0]), same  # a second name
        if not isinstance(node, ast.FunctionDef) or (node.name != "__init__" and node.name[0] == "_"):
            continue
        if not any(".setter" in ast.unparse(each) for each in node.decorator_list):
            yield node.name, node


def _exports(root: Path) -> dict[str, str]:
    """Public name -> the module that defines it."""
    table: dict[str, str] = _literal(root / "accel_core" / "__init__.py", "_PUBLIC")
    return {name: f"accel_core.{module}" for module, names in table.items() for name in names.split()}


def stub(root: Path = ROOT) -> str:
    """accel_core/__init__.pyi: every public name, for type checkers."""
    head = "# Written by tools/reference.py from __init__.py.\n# ruff: noqa: E501, I001\n# fmt: off\n"
    lines = [f"from {module} import {name} as {name}\n" for name, module in _exports(root).items()]
    return head + "".join(lines)


def _definition(root: Path, module: str, name: str) -> ast.stmt | None:
    """Find the definition of a name; None for a module."""
    file = root.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    for node in _module(file).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if getattr(node, "name", None) == name or (target and ast.unparse(target) == name):
            return node
        if isinstance(node, ast.ImportFrom) and name in [it.name for it in node.names]:
            return _definition(root, node.module or "", name)
    return None


def _described(name: str, node: ast.stmt | None) -> Iterator[str]:
    """Signature and the docstring's first paragraph."""
    yield from (f"### {name}", "")
    first: ast.AST | None = node
    if isinstance(node, ast.ClassDef):
        first = next((it for it in node.body if getattr(it, "name", "") == "__init__"), None)
    if isinstance(first, ast.FunctionDef):
        is_property = any("property" in ast.unparse(each) for each in first.decorator_list)
        arguments = "" if is_property else f"({re.sub(r'^self(, )?', '', ast.unparse(first.args))})"
        result = f" -> {ast.unparse(first.returns)}" if first.returns and first is node else ""
        yield from ("```text", f"{name}{arguments}{result}", "```", "")
    documented = isinstance(node, ast.ClassDef | ast.FunctionDef)
    told = ast.get_docstring(node) if documented else None  # type: ignore[arg-type]
    yield from ((told or "").partition("\n\n")[0], "")


def _options(root: Path) -> Iterator[str]:
    """Write a table for each config class: option, type, default, help."""
    yield from ("## Options", "", "### Section parallelism", "")
    yield "The number of ranks along each dimension; -1 for one of them: the ranks that the others leave."
    yield from ("", "| dimension | of | |", "|---|---|---|", *_dimensions(root), "")
    files = [root / "accel_core/contract/config.py"]
    files += sorted(
        file
        for part in ("accel_core/defaults", "backends", "contrib")
        for file in (root / part).rglob("*.py")
        if "tests" not in file.relative_to(root).parts
    )
    for file in files:
        module = _module(file)
        texts = {
            ast.unparse(it.target): it.value
            for it in module.body
            if isinstance(it, ast.AnnAssign) and it.value
        }
        for cls in (it for it in module.body if isinstance(it, ast.ClassDef)):
            rows = [row for node in cls.body if (row := _option(node, texts))]
            if rows:
                package = (
                    "accel-core"
                    if file.is_relative_to(root / "accel_core")
                    else f"accel-{_package(file, root)}"
                )
                yield from (
                    f"### {cls.name} ({package})",
                    "",
                    (ast.get_docstring(cls) or "").partition("\n\n")[0],
                )
                yield from ("", "| option | type | default | |", "|---|---|---|---|", *rows, "")


def _dimensions(root: Path) -> Iterator[str]:
    """Write a row for each dimension that a card declares."""
    for file in sorted(root.glob("*/*/src/*/card.py")):
        for call in (node for node in ast.walk(_module(file)) if isinstance(node, ast.Call)):
            facts = {it.arg: ast.literal_eval(it.value) for it in call.keywords if it.arg in _FACTS}
            for name, about in facts.get("dimensions", {}).items():
                yield f"| `{name}` | {facts['slot']} `{facts['name']}` | {about} |"


def _package(file: Path, root: Path) -> str:
    return file.relative_to(root).parts[1]


def _option(node: ast.stmt, texts: dict[str, ast.expr]) -> str:
    call = node.value if isinstance(node, ast.AnnAssign) else None
    if (
        not (isinstance(node, ast.AnnAssign) and isinstance(call, ast.Call))
        or ast.unparse(call.func) != "option"
    ):
        return ""
    given = {it.arg: texts.get(ast.unparse(it.value), it.value) for it in call.keywords if it.arg}
    default = (
        ast.unparse(call.args[0])
        if call.args
        else ast.unparse(given.get("factory", ast.Constant("required")))
    )
    told = given.get("help", ast.Constant(""))
    about = told.value if isinstance(told, ast.Constant) else ast.unparse(told)
    cells = (f"`{ast.unparse(node.target)}`", f"`{ast.unparse(node.annotation)}`", f"`{default}`", str(about))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def loops(name: str, context: int, root: Path = ROOT) -> str:
    """Compare examples/NAME_plain.py with examples/NAME.py, from the first line of code on."""
    plain, ours = (
        (root / "examples" / f"{stem}.py").read_text().splitlines()[4:] for stem in (f"{name}_plain", name)
    )
    lines = list(difflib.unified_diff(plain, ours, n=context, lineterm=""))[3:]
    lines = [line for line in lines if line not in ("+", "-")]
    return "".join(("" if line.startswith("@@") else line.rstrip()) + "\n" for line in lines)


def with_diff(page: Path, name: str, context: int) -> str:
    """Return the text of a page with a fresh diff."""
    return DIFF.sub(lambda _: loops(name, context), page.read_text(encoding="utf-8"), count=1)


def help_text(command: click.Command) -> str:
    """accel_core/cli/COMMAND.txt: the help of a command, as click writes it."""
    settings = {"help_option_names": ["-h", "--help"], "terminal_width": 80}
    context = click.Context(command, info_name=f"accel {command.name}", **settings)
    return click.Command.get_help(command, context) + "\n"


def main() -> int:
    """Write the files, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if one is stale; write nothing")
    docs = ROOT / "docs"
    readme, tutorial = ROOT / "README.md", docs / "tutorial.md"
    fresh = {docs / "hooks.md": hooks(), docs / "reference.md": names()}
    fresh |= {readme: with_diff(readme, "minimal", 99), tutorial: with_diff(tutorial, "digits", 0)}
    fresh[ROOT / "accel_core" / "__init__.pyi"] = stub()
    fresh |= {ROOT / "accel_core/cli" / f"{it.name}.txt": help_text(it) for it in (launch, submit)}
    if not parser.parse_args().check:
        for path, text in fresh.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path.name for path, text in fresh.items() if path.read_text(encoding="utf-8") != text]
    print(
        f"{', '.join(stale)} stale: python tools/reference.py"
        if stale
        else f"{', '.join(path.name for path in fresh)} are fresh"
    )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
