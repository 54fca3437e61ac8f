"""Pages that list things of the repository list all of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from snippets import ROOT, documents

FORBIDDEN = re.compile(
    r"(?<!anyone )\bwho(?:ever)?\b"
    r"|(?<!there )\bis no (?!longer)\w+"
    r"|\bonce a (?:step|window|process|unit|epoch)\b",
    re.IGNORECASE,
)
PAGES = [page for page in documents() if page.name != "CONTRIBUTING.md"]
PAGES += sorted([*ROOT.glob("*/*/README.md"), *ROOT.glob("*/*/CHANGELOG.md")])


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def glossary() -> list[list[str]]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\*\*.+?) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in row] for row in rows]


def test_the_page_of_times_has_each_environment_of_tox() -> None:
    times = tool("tox_times")
    text = times.PAGE.read_text("utf-8")

    assert times.render(times.written(text)) in text


def test_names_with_braces_stand_for_several_environments() -> None:
    assert tool("tox_times").expanded("py{310,312}-x") == ["py310-x", "py312-x"]


def test_the_glossary_defines_each_word_once_beside_the_nearest_term() -> None:
    words = [row[0] for row in glossary()]

    assert len(words) == len(set(words)) > 40
    assert all(len(row) == 3 and all(row) for row in glossary())


def test_the_glossary_has_the_words_that_carry_the_design() -> None:
    words = {row[0].strip("*") for row in glossary()}

    asked = "unit window reader below card slot layer leaf box stack mesh probe verify offers needs shadows"
    assert set(asked.split()) <= words


def test_the_readme_is_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_the_list_of_decisions_has_each_page() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(r"^- \[(.+)\]\((.+)\)$", (folder / "index.md").read_text("utf-8"), re.MULTILINE)
    pages = {page.name: page for page in folder.glob("*.md") if page.name != "index.md"}

    assert sorted(page for _, page in rows) == sorted(pages)
    assert all(pages[page].read_text("utf-8").startswith(f"# {title}\n") for title, page in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_keeps_the_rules_that_can_be_searched_for(page: Path) -> None:
    """Rules 2 to 4 of CONTRIBUTING's style guide, as far as a search finds offences."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)

    assert FORBIDDEN.findall(text) == []
