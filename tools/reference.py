"""Write what the documentation repeats from the code: docs/hooks.md, and the diff in README.md.

`python tools/reference.py` rewrites both; `--check` only says whether they are fresh. Imports no torch.
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

ROOT = Path(__file__).resolve().parent.parent
SPECS = Path("accel_core/hookspecs.py")
KINDS = {
    "owner": "owner",
    "owner_per_step": "owner, per step",
    "everyone": "everyone",
    "everyone_per_step": "everyone, per step",
    "wrapper": "wrapper",
    "wrapper_per_step": "wrapper, per step",
    "observer": "everyone, trackers too",
}
DIFF = re.compile(r"(?<=\n```diff\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def hooks(root: Path = ROOT) -> str:
    """docs/hooks.md: every hook by section, with kind, signature and docstring."""
    source = (root / SPECS).read_text(encoding="utf-8")
    module = ast.parse(source)
    lines = ["# Hooks", "", f"Written by tools/reference.py from {SPECS}; change them there.", ""]
    lines += [ast.get_docstring(module) or "", ""]
    for node in module.body:
        lines += list(_entry(node, source))
    return "\n".join((*lines, *_words(root), ""))


def _words(root: Path) -> Iterator[str]:
    """The phases of `transform_model`, and the capability words with what each promises."""
    yield from ("## Phases of `transform_model`", "", "In order:", "")
    for phase in _literal(root / SPECS, "PHASES"):
        yield f"- `{phase}`"
    yield from (
        "",
        "## Capability words",
        "",
        "A card's `offers` and `needs` hold only these. A plugin that offers a word:",
    )
    yield from ("", "| word | promise |", "|---|---|")
    for word, promise in _literal(root / "accel_core" / "plugins.py", "CAPABILITIES").items():
        yield f"| `{word}` | {promise} |"


def _literal(path: Path, name: str) -> Any:
    """The value of a constant of a module that is not imported."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return next(
        ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == name
    )


def _entry(node: ast.stmt, source: str) -> Iterator[str]:
    title = _banner_above(node, source)
    if title:
        yield from (f"## {title[0].upper()}{title[1:]}", "")
    if not isinstance(node, ast.FunctionDef):
        return
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    kind = next((KINDS[name] for each in decorators if (name := each.partition("(")[0]) in KINDS), None)
    if kind is None:
        return
    refined = "".join(re.findall(r"wrapper\('(\w+)'\)", " ".join(decorators)))
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield from (f"### {node.name}", "", f"*{kind}{f' of `{refined}`' if refined else ''}*", "")
    yield from ("```text", f"{node.name}({ast.unparse(node.args)}){result}", "```", "")
    yield from (ast.get_docstring(node) or "", "")


def _banner_above(node: ast.stmt, source: str) -> str | None:
    """The title in a `# -- title ----` line between the node and what comes before it."""
    decorators = getattr(node, "decorator_list", None)
    line = decorators[0].lineno if decorators else node.lineno
    for text in reversed(source.splitlines()[: line - 1]):
        if text and not text.startswith("#"):
            return None
        if found := re.fullmatch(r"# -- (.+?) -+", text):
            return found[1]
    return None


def loops(root: Path = ROOT) -> str:
    """What differs between the plain example and ours, a hunk for each place."""
    plain, ours = (
        (root / "examples" / name).read_text().splitlines() for name in ("digits_plain.py", "digits.py")
    )
    lines = list(difflib.unified_diff(plain[1:], ours[1:], n=0, lineterm=""))[2:]
    lines = [line for line in lines if line not in ("+", "-")]
    return "".join(("" if line.startswith("@@") else line) + "\n" for line in lines[1:])


def readme(root: Path = ROOT) -> str:
    """README.md with a fresh diff."""
    return DIFF.sub(lambda _: loops(root), (root / "README.md").read_text(encoding="utf-8"), count=1)


def main() -> int:
    """Write the files, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if one is stale; write nothing")
    fresh = {ROOT / "docs" / "hooks.md": hooks(), ROOT / "README.md": readme()}
    if not parser.parse_args().check:
        for path, text in fresh.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path.name for path, text in fresh.items() if path.read_text(encoding="utf-8") != text]
    print(
        f"{', '.join(stale)} stale: python tools/reference.py"
        if stale
        else "hooks.md and README.md are fresh"
    )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
