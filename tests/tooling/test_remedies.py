"""Errors of ours end with what to do, and the commands that they name exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import attrs
import click
import pytest
from click.exceptions import BadOptionUsage, BadParameter, NoArgsIsHelpError

from accel_core import errors
from accel_core.cli import BUILT_IN, accel
from accel_core.config.sections import CORE
from accel_core.contract.options import options_of, section_class
from accel_core.errors import PluginError
from accel_core.plugins.catalog import catalog_entries

ROOT = Path(__file__).parents[2]
KINDS = {name for name in errors.__all__ if name.endswith("Error")}
COMMAND = re.compile(rf"accel ((?:{'|'.join(BUILT_IN)})\b[^`\n;,()|]*)")


@cache
def sources() -> dict[str, ast.Module]:
    """Path -> syntax tree of each file of the packages that are installed from here."""
    files = [*ROOT.glob("accel_core/**/*.py")]
    files += [*ROOT.glob("backends/*/src/**/*.py"), *ROOT.glob("contrib/*/src/**/*.py")]
    return {str(it.relative_to(ROOT)): ast.parse(it.read_text("utf-8")) for it in sorted(files)}


def text_of(node: ast.AST | None) -> str | None:
    """A string as it is written, {} for each value in it; None if it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(it.value if isinstance(it, ast.Constant) else "{}" for it in node.values)
    return None


def raised() -> Iterator[tuple[str, ast.expr, str]]:
    """(place, message, its text) of each error of our kinds that is raised with a message of its own."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
                message = call.args[0] if call.args else None
                if (text := text_of(message)) is not None:
                    yield f"{path}:{node.lineno}", message, text


def has_remedy(message: ast.expr, text: str) -> bool:
    """Whether there is a second line; `reason` is of a function that writes both."""
    if "\n" in text.strip():
        return True
    last = message.values[-1] if isinstance(message, ast.JoinedStr) else None
    return isinstance(last, ast.FormattedValue) and ast.unparse(last.value) == "reason"


def test_every_error_ends_with_a_line_that_says_what_to_do():
    found = list(raised())
    assert len(found) > 250
    assert [f"{place}: {text}" for place, message, text in found if not has_remedy(message, text)] == []


def commands() -> list[str]:
    """The commands of ours that strings of the packages name, placeholders filled in."""
    found = set()
    for tree in sources().values():
        parts = {id(it) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for it in node.values}
        for node in ast.walk(tree):
            if id(node) not in parts and (text := text_of(node)):
                found.update(match[1].strip() for match in COMMAND.finditer(text.replace("{}", "thing")))
    return sorted(found)


@pytest.mark.parametrize("line", commands())
def test_a_command_that_a_text_names_exists_with_its_flags(line):
    words = [word for word in shlex.split(line.rstrip(".:")) if word != "--help"]
    command: click.Command = accel
    context = click.Context(accel)
    while isinstance(command, click.Group) and words:
        try:
            _, command, words = command.resolve_command(context, words)
        except PluginError as error:
            pytest.skip(str(error))  # it comes with a package that is not installed here
    with suppress(BadParameter, BadOptionUsage, NoArgsIsHelpError):  # texts leave values out
        command.make_context("accel", words)


def remedies() -> Iterator[tuple[str, str]]:
    """(place, what follows the first line) of each text of several lines that is not a docstring."""
    for path, tree in sources().items():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = None if id(node) in docstrings else text_of(node)
            if text and "\n" in text.strip():
                yield f"{path}:{node.lineno}", text.strip().partition("\n")[2]


@cache
def methods() -> dict[str, set[str]]:
    """The members of an Accelerator -> their parameters."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("accel_core/accelerator/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found.setdefault(node.name, set()).update(argument.arg for argument in taken)
            elif isinstance(node, ast.AnnAssign):
                found.setdefault(ast.unparse(node.target).removeprefix("self."), set())
    return found


def test_each_option_and_member_that_a_remedy_names_is_there() -> None:
    classes = {name: section_class(kind) for name, kind in CORE.items()}
    options = {name: set(options_of(cls)) for name, cls in classes.items() if attrs.has(cls)}
    options |= {entry.name: set(entry.keys) for entry in catalog_entries()}
    options["accelerator"] = set(methods())
    dotted = re.compile(rf"(?<![\w./'-])({'|'.join(map(re.escape, options))})\.([a-z]\w*)(?!\w*\.)")
    named = [(place, *match) for place, text in remedies() for match in dotted.findall(text)]
    assert len(named) > 80
    assert [each for each in named if each[2] not in options[each[1]]] == []


def test_each_argument_that_a_remedy_gives_to_a_member_is_taken() -> None:
    members, taken = methods(), methods()["__init__"]
    call = re.compile(r"\b(Accelerator|[a-z]\w+)\(([^()]*)\)")
    given = [
        (place, name, argument)
        for place, text in remedies()
        for name, arguments in call.findall(text)
        for argument in re.findall(r"\b(\w+)=", arguments)
        if name == "Accelerator" or name in members
    ]
    assert len(given) > 10
    assert [
        each for each in given if each[2] not in (taken if each[1] == "Accelerator" else members[each[1]])
    ] == []


def flags_of(command: click.Command) -> set[str]:
    """The flags of a command and of those under it."""
    context = click.Context(command)
    found = {flag for parameter in command.get_params(context) for flag in parameter.opts}
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    return found.union(*(flags_of(inner) for name in names if (inner := command.get_command(context, name))))


def declared() -> set[str]:
    """The flags that are arguments of a call somewhere: of plugins' own commands."""
    calls = [node for tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = [text_of(argument) or "" for call in calls for argument in call.args]
    return {text for text in texts if re.fullmatch(r"--?[a-z-]+", text)}


def test_each_flag_that_an_error_names_is_a_flag():
    known = flags_of(accel) | declared() | {f"--{entry.name}" for entry in catalog_entries()}
    known |= {"--module", "--ntasks-per-node"}  # Accelerate's, which compat takes; srun's
    named = {
        f"{place}: {flag}"
        for place, _, text in raised()
        for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)
        if flag not in known
    }
    assert named == set()


def test_no_text_has_a_package_of_ours_installed_by_its_name() -> None:
    """No index has them: whoever registers a name there would be installed."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("accel_core/**/*.in")]
    for folder in ("accel_core", "backends/*/src", "contrib/*/src", "examples"):
        texts += [*ROOT.glob(f"{folder}/**/*.py"), *ROOT.glob(f"{folder}/**/*.yaml")]
    texts += [*ROOT.glob("backends/*/README.md"), *ROOT.glob("contrib/*/README.md")]
    texts.remove(ROOT / "CHANGELOG.md")
    by_name = re.compile(r"pip install[^\n`]*[\s'\"]accel[-_][a-z]")
    assert [it for it in texts if by_name.search(it.read_text("utf-8"))] == []
