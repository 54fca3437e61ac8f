"""Write what `gpu_proof.py` found on a real device into the pages, or that nothing ran on one yet.

`python tools/gpu_figures.py proof.json` keeps the file as `benchmarks/gpu.json`, and writes its figures,
with the device's name, into docs/tested.md, and a line into the READMEs, each between the marks of a page.
Several files of one device are one proof, for machines that end a command early; those of several devices
follow each other. Without a file it writes the pages anew from what is kept. `--check` compares. Imports no
torch.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path("benchmarks/gpu.json")
PAGE = Path("docs/tested.md")
LINES = {
    Path("README.md"): "docs/tested.md",
    Path("benchmarks/README.md"): "../docs/tested.md",
    Path("backends/cuda/README.md"): "../../docs/tested.md",
}
"""Page with one line -> how it links to PAGE."""
BEGIN, END = "<!-- gpu: tools/gpu_figures.py writes this -->", "<!-- /gpu -->"
BLOCK = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
NONE = "**No GPU run yet**: we had no accelerator to test on"
REHEARSALS = ("cpu", "sim")
NOT_RUN = ("out of time", "not here")

Proof = Mapping[str, Any]


def read(file: Path) -> Proof:
    """Read a proof; exit with what is wrong with it."""
    try:
        proof = json.loads(file.read_text(encoding="utf-8"))
        device, parts = proof["device"], proof["parts"]
        whole = all(isinstance(word, str) for word in (device, proof["torch"], proof.get("date", "")))
        complete = whole and parts and all(map(_is_whole, parts))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{file} is no proof.json of tools/gpu_proof.py: {error!r}") from error
    if not complete:
        raise SystemExit(f"{file} is no proof.json of tools/gpu_proof.py: it has no whole parts")
    if END in json.dumps(proof):
        raise SystemExit(f"{file} holds {END}, which ends the figures of a page")
    if device in REHEARSALS:
        raise SystemExit(f"{file} is of a rehearsal on {device!r}, which shows nothing of a GPU")
    return proof


def _is_whole(part: Mapping[str, Any]) -> bool:
    """Return whether a part has all that a page shows of it."""
    words = [part["name"], part["result"], part["detail"], *part["tables"]]
    in_lines = isinstance(part["tables"], list) and all(isinstance(word, str) for word in words)
    return in_lines and isinstance(part["seconds"], float | int) and not any("\n" in word for word in words)


def merged(proofs: Sequence[Proof]) -> list[Proof]:
    """Return one proof for each device and torch; the last that ran a part counts."""
    of_device: dict[tuple[str, str], list[Proof]] = {}
    for proof in proofs:
        of_device.setdefault((proof["device"], proof["torch"]), []).append(proof)
    return [_one(same) for same in of_device.values()]


def _one(proofs: Sequence[Proof]) -> Proof:
    parts: dict[str, Mapping[str, Any]] = {}
    for part in (part for proof in proofs for part in proof["parts"]):
        if part["name"] not in parts or part["result"] not in NOT_RUN:
            parts[part["name"]] = part
    if all(part["result"] in NOT_RUN for part in parts.values()):
        device = proofs[0]["device"]
        raise SystemExit(f"the proof of {device} shows nothing of it: of {len(parts)} parts none ran")
    return {**proofs[-1], "parts": [*parts.values()]}


def line(proofs: Sequence[Proof], link: str) -> str:
    """Say in a sentence for each device what ran."""
    if not proofs:
        return _wrapped(f"{NONE}; [what ran where]({link}) says what that leaves open.")
    seen = " ".join(f"Seen on one {_sum(proof)}" for proof in proofs)
    return _wrapped(f"{seen} [The figures]({link}#on-a-gpu) name each part; no other accelerator was seen.")


def _sum(proof: Proof) -> str:
    results = Counter(part["result"] for part in proof["parts"])
    counts = ", ".join(
        f"{count} {result}" for result, count in sorted(results.items(), key=lambda it: -it[1])
    )
    when = f", {proof['date']}" if "date" in proof else ""
    return f"{proof['device']} (torch {proof['torch']}{when}): of {results.total()} parts {counts}."


def page(proofs: Sequence[Proof]) -> str:
    """Write a row for each part, and the tables of those that measure."""
    if not proofs:
        command = "`tools/gpu_proof.py` is what runs on the first one, and `tools/gpu_figures.py` writes"
        return _wrapped(f"{NONE}. {command} its figures here.")
    return "\n\n".join(map(_of_device, proofs))


def _of_device(proof: Proof) -> str:
    lines = [
        _wrapped(f"Seen on one {_sum(proof)}"),
        "",
        "| part | result | seconds | detail |",
        "|---|---|---|---|",
    ]
    for part in proof["parts"]:
        detail = str(part["detail"]).replace("|", "/")
        lines.append(f"| {part['name']} | {part['result']} | {part['seconds']} | {detail} |")
    for part in proof["parts"]:
        if part["tables"]:
            lines += ["", f"**{part['name']}**", "", *part["tables"]]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 119, break_long_words=False, break_on_hyphens=False)


def pages(root: Path, proofs: Sequence[Proof]) -> dict[Path, str]:
    """Return the text of each page with what is between its marks written anew."""
    found = {PAGE: page(proofs), **{file: line(proofs, link) for file, link in LINES.items()}}
    written = {}
    for file, text in found.items():
        old = (root / file).read_text(encoding="utf-8")
        block = f"{BEGIN}\n\n{text}\n\n{END}"
        new, count = BLOCK.subn(lambda _, block=block: block, old)
        if count != 1:
            raise SystemExit(f"{file} has {count} parts between {BEGIN} and {END}, not one")
        written[root / file] = new
    return written


def main() -> int:
    """Update the pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("proofs", type=Path, nargs="*", help="proof.json of runs on a real device")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (this one)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is stale")
    given = parser.parse_args()
    kept = given.root / KEPT
    found = [read(file) for file in given.proofs]
    if not found and kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
    proofs = merged(found)
    fresh = pages(given.root, proofs)
    stale = [file for file, text in fresh.items() if file.read_text(encoding="utf-8") != text]
    if given.check:
        print("\n".join(f"{file} is stale: run tools/gpu_figures.py" for file in stale) or "the pages agree")
        return int(bool(stale))
    if given.proofs:
        kept.write_text(json.dumps(proofs, indent=2) + "\n", encoding="utf-8")
    for each in stale:
        each.write_text(fresh[each], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
