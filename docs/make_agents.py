"""Make docs/images/agents.png, which the Python of docs/agents.md draws."""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "agents.md"


def main(folder: Path = PAGE.parent / "images") -> None:
    """Run the page's blocks up to the picture, in the folder that it is for."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    with chdir(folder):
        while "shared" not in names:
            exec(blocks.pop(0), names)


if __name__ == "__main__":
    main()
