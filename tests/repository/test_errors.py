"""Errors end with what to do, and the commands, flags, options and members that texts name exist."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache

import attrs
import click
from checkout import ROOT, modules, place, refuse, text, tree
from click.exceptions import BadOptionUsage, BadParameter, NoArgsIsHelpError

from accel_core import errors
from accel_core.cli.commands import BUILT_IN
from accel_core.cli.group import accel
from accel_core.config.sections import CORE
from accel_core.contract.options import options_of
from accel_core.errors import PluginError
from accel_core.plugins.catalog import catalog_entries
from accel_core.plugins.discovery import discover, load

KINDS = {name for name in errors.__all__ if name.endswith("Error")}
COMMAND = re.compile(rf"accel ((?:{'|'.join(BUILT_IN)})\b[^`\n;,()|]*)")
OF_OTHERS = {"--module", "--ntasks-per-node"}
"""Flags of Accelerate, which compat takes, and of srun."""


def words_of(node: ast.AST | None) -> str | None:
    """A string as it is written, {} for each value in it; None if it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(it.value if isinstance(it, ast.Constant) else "{}" for it in node.values)
    return None


@cache
def raised() -> list[tuple[str, ast.expr, str]]:
    """(place, message, its words) of each error of our kinds that is raised with a message of its own."""
    found = []
    for file in modules():
        for node in ast.walk(tree(file)):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
                message = call.args[0] if call.args else None
                if message is not None and (words := words_of(message)) is not None:
                    found.append((place(file, node.lineno), message, words))
    return found


def has_remedy(message: ast.expr, words: str) -> bool:
    """Whether there is a second line; `reason` is of a function that writes both."""
    if "\n" in words.strip():
        return True
    last = message.values[-1] if isinstance(message, ast.JoinedStr) else None
    return isinstance(last, ast.FormattedValue) and ast.unparse(last.value) == "reason"


def test_every_error_ends_with_a_line_that_says_what_to_do() -> None:
    assert len(raised()) > 150
    refuse(
        (f"{where}: {words}" for where, message, words in raised() if not has_remedy(message, words)),
        "an error without a last line that says what to do",
    )


@cache
def commands() -> dict[str, str]:
    """Each command of ours that strings of the packages name, placeholders filled in -> one place of it."""
    found: dict[str, str] = {}
    for file in modules():
        parts = {
            id(it) for node in ast.walk(tree(file)) if isinstance(node, ast.JoinedStr) for it in node.values
        }
        for node in ast.walk(tree(file)):
            if id(node) not in parts and (words := words_of(node)):
                for match in COMMAND.finditer(words.replace("{}", "thing")):
                    found.setdefault(match[1].strip(), place(file, node.lineno))
    return found


def mistake(line: str) -> str | None:
    """What click says against a command; None if it takes it, values aside, which texts leave out."""
    words = [word for word in shlex.split(line.rstrip(".:")) if word != "--help"]
    command: click.Command = accel
    context = click.Context(accel)
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            _, command, words = command.resolve_command(context, words)
        command.make_context("accel", words)
    except (BadParameter, BadOptionUsage, NoArgsIsHelpError):
        return None
    except PluginError:  # it comes with a package that is not installed here; where `lint` runs, all are
        return None
    except click.UsageError as error:
        return error.format_message()
    return None


def test_each_command_that_a_text_names_exists_with_its_flags() -> None:
    assert len(commands()) > 20
    refuse(
        (f"{where}: accel {line}: {said}" for line, where in commands().items() if (said := mistake(line))),
        "a command that does not exist as it is named",
    )


def test_a_command_that_does_not_exist_is_seen() -> None:
    assert mistake("plugins lost") == "No such command 'lost'"
    assert mistake("config check --gone") is not None
    assert mistake("config check") is None


@cache
def remedies() -> list[tuple[str, str]]:
    """(place, all but the first line) of each text of several lines that is not a docstring."""
    found = []
    for file in modules():
        docstrings = {id(node.value) for node in ast.walk(tree(file)) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree(file)):
            words = None if id(node) in docstrings else words_of(node)
            if words and "\n" in words.strip():
                found.append((place(file, node.lineno), words.strip().partition("\n")[2]))
    return found


@cache
def members() -> dict[str, set[str]]:
    """The members of an Accelerator -> their parameters."""
    found: dict[str, set[str]] = {}
    for file in ROOT.glob("accel_core/accelerator/*.py"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found.setdefault(node.name, set()).update(argument.arg for argument in taken)
            elif isinstance(node, ast.AnnAssign):
                found.setdefault(ast.unparse(node.target).removeprefix("self."), set())
    return found


def test_each_option_and_member_that_a_remedy_names_is_there() -> None:
    classes = dict(CORE)
    options = {name: set(options_of(cls)) for name, cls in classes.items() if attrs.has(cls)}
    options |= {
        record.name: set(options_of(load(record, record.card.config)))
        for record in discover().records
        if record.card and record.card.config
    }
    options["accelerator"] = set(members())
    dotted = re.compile(rf"(?<![\w./'-])({'|'.join(map(re.escape, options))})\.([a-z]\w*)(?!\w*\.)")
    named = [(where, *match) for where, words in remedies() for match in dotted.findall(words)]

    assert len(named) > 40
    refuse(
        (f"{where}: {owner}.{name}" for where, owner, name in named if name not in options[owner]),
        "an option or a member that a text names and nothing has",
    )


def test_each_argument_that_a_remedy_gives_to_a_member_is_taken() -> None:
    taken = {**members(), "Accelerator": members()["__init__"]}
    call = re.compile(r"\b(Accelerator|[a-z]\w+)\(([^()]*)\)")
    given = [
        (where, name, argument)
        for where, words in remedies()
        for name, arguments in call.findall(words)
        for argument in re.findall(r"\b(\w+)=", arguments)
        if name in taken
    ]

    assert len(given) > 5
    refuse(
        (f"{where}: {name}({argument}=)" for where, name, argument in given if argument not in taken[name]),
        "an argument that a text gives and that is not taken",
    )


def flags_of(command: click.Command) -> set[str]:
    """The flags of a command and of those under it."""
    context = click.Context(command)
    found = {flag for parameter in command.get_params(context) for flag in parameter.opts}
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    return found.union(*(flags_of(inner) for name in names if (inner := command.get_command(context, name))))


def declared() -> set[str]:
    """The flags that are arguments of a call somewhere: of plugins' own commands."""
    calls = [node for file in modules() for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    texts = [words_of(argument) or "" for call in calls for argument in call.args]
    return {words for words in texts if re.fullmatch(r"--?[a-z-]+", words)}


def test_each_flag_that_an_error_names_is_a_flag() -> None:
    known = OF_OTHERS | flags_of(accel) | declared() | {f"--{entry.name}" for entry in catalog_entries()}
    refuse(
        (
            f"{where}: {flag}"
            for where, _, words in raised()
            for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", words)
            if flag not in known
        ),
        "a flag that an error names and no command has",
    )


def test_no_text_has_a_package_of_ours_installed_by_its_name() -> None:
    """No index has them: whoever registers a name there would be installed."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("accel_core/**/*.in")]
    for folder in ("accel_core", "backends/*/src", "contrib/*/src", "examples"):
        texts += [*ROOT.glob(f"{folder}/**/*.py"), *ROOT.glob(f"{folder}/**/*.yaml")]
    texts += [*ROOT.glob("backends/*/README.md"), *ROOT.glob("contrib/*/README.md")]
    texts.remove(ROOT / "CHANGELOG.md")
    by_name = re.compile(r"pip install[^\n`]*[\s'\"]accel[-_][a-z]")
    refuse(
        (
            f"{place(file, text(file).count(chr(10), 0, found.start()) + 1)}: {found[0]}"
            for file in texts
            for found in by_name.finditer(text(file))
        ),
        "a package by a name that no index has: name its folder, as install_hint does",
    )
