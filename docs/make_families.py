"""The tables of docs/families.md, from the code's own lists of families and refusals.

python docs/make_families.py             # writes the page
python docs/make_families.py --check     # exit code 1 if it would change
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from flexvarlen.patches.models.families import FAMILIES
from flexvarlen.patches.models.unsupported import STATEFUL
from flexvarlen.report.table import markdown

PAGE = Path(__file__).resolve().parent / "families.md"


def verified() -> str:
    """The verified families; those of equal features share a row, common notes are said once."""
    notes = Counter(note for family in FAMILIES for note in family.needs.split("; "))
    common = [note for note, count in notes.items() if note and count > 2]
    alike: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        own = "; ".join(note for note in family.needs.split("; ") if note not in common)
        alike.setdefault((family.has, own), []).append(f"{family.name} (`{family.model_type}`)")
    rows = [[", ".join(names), *key] for key, names in alike.items()]
    sentences = " ".join(f"{note[0].upper()}{note[1:]}." for note in common)
    return f"{markdown(['families', 'have', 'notes'], rows)}\n\n{sentences}"


def patched() -> str:
    """The model types that `attn_implementation` alone does not serve."""
    return ", ".join(f"`{family.model_type}`" for family in FAMILIES if not family.by_name_alone)


def stateful() -> str:
    """Model types that mix tokens beside attention, by what does it."""
    by_state: dict[str, list[str]] = {}
    for model_type, state in STATEFUL.items():
        by_state.setdefault(state.rstrip(","), []).append(f"`{model_type}`")
    return "\n".join(f"- {state}: {', '.join(types)}" for state, types in by_state.items())


SECTIONS = {"verified": verified, "patched": patched, "stateful": stateful}


def made(page: str) -> str:
    """The page with its marked parts replaced."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have {begin} and {end} once; put them back.")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{section()}\n{end}{rest.split(end)[1]}"
    return page


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return int(made(page) != page)
    PAGE.write_text(made(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
