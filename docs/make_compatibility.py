"""docs/compatibility.md, from tests/compatibility.py; where backends run, on docs/backends.md.

python docs/make_compatibility.py             # writes the pages
python docs/make_compatibility.py --check     # exit code 1 if it would change
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from flexvarlen.attention.backends.machines import where
from flexvarlen.report.table import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, it finds no tests/

from tests.compatibility import ASKED, FEATURES, MEANING, TRAINERS, Column, cell  # noqa: E402
from tests.patches.kinds import KINDS  # noqa: E402

PAGE, BACKENDS = ROOT / "docs" / "compatibility.md", ROOT / "docs" / "backends.md"

HEAD = """\
# Compatibility

Rows are [kinds of model, and columns features](#what-the-names-mean). A `yes` links to its test, on
tiny models on a CPU; point at it for the name. A `no` has the number of the [sentence](#why-not)
that the code raises. A dash: encoders do not predict next tokens. Which model is of which kind:
[families](families.md); which kernel runs where: [backends](backends.md).
"""


def number(why: str, reasons: dict[str, str]) -> int:
    """Where a reason stands in the list; reasons that differ in the model's class alone are one."""
    key = re.sub(r"\b\w+For[A-Z]\w+", "", why)
    reasons.setdefault(key, why)
    return list(reasons).index(key) + 1


def table(columns: Mapping[str, Column], reasons: dict[str, str]) -> str:
    """Kinds of models by what is asked for; reasons that are new are added."""
    rows = []
    for kind in KINDS:
        cells = [f"**{kind}**"]
        for column in columns:
            test, why = cell(kind, column)
            if test is not None:
                file, _, name = test.partition("::")
                cells.append(f'[yes](../tests/{file} "{name}")')
            elif why is None:
                cells.append("–")
            else:
                cells.append(f"[no: {number(why, reasons)}](#why-not)")
        rows.append(cells)
    return markdown(["", *columns], rows)


def made() -> str:
    """The page."""
    reasons: dict[str, str] = {}
    tables = [table(FEATURES, reasons), table(TRAINERS, reasons)]
    meanings = [f"- **{name}**: {means}." for name, means in {**MEANING, **ASKED}.items()]
    parts = [
        HEAD,
        "## Features\n",
        tables[0],
        "\n## Trainers\n",
        tables[1],
        "\n## Why not\n",
        *(f"{at}. {why}" for at, why in enumerate(reasons.values(), 1)),
        "\n## What the names mean\n",
        *meanings,
    ]
    return "\n".join(parts) + "\n"


def backends() -> str:
    """The page of backends, with the last cell of its first table made."""
    text = BACKENDS.read_text(encoding="utf-8")
    row = re.compile(r"^(\| `(\w+)` \| `flexvarlen_\w+` \|[^|]*\|).*$", re.MULTILINE)
    return row.sub(lambda cells: f"{cells[1]} {where(cells[2])} |", text)


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    pages = {PAGE: made(), BACKENDS: backends()}
    if "--check" in arguments:
        return int(any(x.read_text(encoding="utf-8") != text for x, text in pages.items()))
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
