"""Pages keep the rules that a search can check; links lead somewhere, and quotes are as the sources are."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

from checkout import ROOT, place, refuse, text
from snippets import Block, blocks, documents, quoted_file

FORBIDDEN = re.compile(
    r"(?<!anyone )\bwho(?:ever)?\b"
    r"|(?<!there )\bis no (?!longer)\w+"
    r"|\bonce a (?:step|window|process|unit|epoch)\b",
    re.IGNORECASE,
)
"""Rules 2 to 4 of CONTRIBUTING's style guide, as far as a search finds offences."""
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
DONE_WITH = {
    "",
    "sh",
    "sh dry-run",
    "sh install",
    "sh slow",
    "sh tox",
    "text",
    "python",
    "diff",
    "powershell",
}


def pages() -> list[Path]:
    """The documents but the one that quotes what is forbidden, and the pages of each package."""
    written = [page for page in documents() if page.name != "CONTRIBUTING.md"]
    return written + sorted([*ROOT.glob("*/*/README.md"), *ROOT.glob("*/*/CHANGELOG.md")])


def every_block() -> list[Block]:
    return [block for page in documents() for block in blocks(page)]


def line_of(page: str, position: int) -> int:
    return page.count("\n", 0, position) + 1


def test_no_page_says_what_the_style_guide_forbids() -> None:
    offences = []
    for file in pages():
        prose = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text(file))
        offences += [
            f"{place(file, line_of(prose, found.start()))}: {found[0]!r}"
            for found in FORBIDDEN.finditer(prose)
        ]
    refuse(offences, "words that rules 2 to 4 of CONTRIBUTING's style guide replace")


def test_links_lead_somewhere() -> None:
    refuse(
        (
            f"{place(file, line_of(text(file), link.start()))}: {link[1]}"
            for file in documents()
            for link in LINK.finditer(text(file))
            if not (file.parent / link[1]).exists()
        ),
        "a link to a file that is not there",
    )


def test_every_block_of_code_says_what_is_to_be_done_with_it() -> None:
    refuse(
        (
            f"{block}: ```{' '.join(block.words)}"
            for block in every_block()
            if " ".join(block.words) not in DONE_WITH
            and not (len(block.words) == 2 and block.words[0] in ("yaml", "python", "toml"))
        ),
        "words behind a fence that tests/docs/snippets.py does not know",
    )


def test_what_a_page_quotes_stands_in_the_file_that_it_names() -> None:
    quoted = [it for it in every_block() if len(it.words) == 2 and it.words[0] in ("python", "toml")]
    refuse(
        (
            f"{block}: {part.strip()[:60]!r} is not in {block.words[1]}"
            for block in quoted
            for part in block.text.split("...\n")
            if part.strip("\n") not in quoted_file(block.words[1])
        ),
        "a quote that its file does not have",
    )


def test_windows_is_told_the_same() -> None:
    pairs = [(unix, it) for unix, it in pairwise(every_block()) if it.words == ("powershell",)]

    assert pairs
    refuse(
        (
            f"{windows}: {windows.text!r}"
            for unix, windows in pairs
            if windows.text != unix.text.replace(" &&", ";").replace(".venv/bin/", ".venv\\Scripts\\")
        ),
        "a block for PowerShell that is not the block above it",
    )


def test_the_glossary_defines_each_word_once_beside_the_nearest_term() -> None:
    file = ROOT / "docs" / "glossary.md"
    rows = [line.strip("|").split(" | ") for line in text(file).splitlines() if line.startswith("| **")]
    words = Counter(row[0].strip() for row in rows)

    assert rows
    refuse(
        [f"{file.relative_to(ROOT)}: {word}" for word, count in words.items() if count > 1]
        + [
            f"{file.relative_to(ROOT)}: {row}"
            for row in rows
            if len(row) != 3 or not all(map(str.strip, row))
        ],
        "a word that the glossary defines twice, or without one of its three cells",
    )


def test_the_readme_is_at_most_150_lines() -> None:
    lines = len(text(ROOT / "README.md").splitlines())
    refuse(
        [f"README.md:151: of {lines} lines"] * (lines > 150),
        "a README that is too long: move a part to docs/",
    )


def test_the_list_of_decisions_has_each_page_under_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = Counter(re.findall(r"^- \[(.+)\]\((.+)\)$", text(folder / "index.md"), re.MULTILINE))
    titled = Counter(
        (text(page).partition("\n")[0].removeprefix("# "), page.name)
        for page in folder.glob("*.md")
        if page.name != "index.md"
    )
    refuse(
        [f"docs/decisions/index.md: add {row}" for row in titled - rows]
        + [f"docs/decisions/index.md: drop {row}" for row in rows - titled],
        "the list of decisions differs from the pages",
    )
