"""flexvarlen as it is installed from the wheel: `python -I tests/installed.py`, by `make dist`.

A checkout without symbolic links builds a wheel without flexvarlen.patches and flexvarlen.bench,
and says nothing.
"""

import sysconfig
from pathlib import Path

import flexvarlen.bench
import flexvarlen.patches

for module in (flexvarlen.patches, flexvarlen.bench):
    home = Path(sysconfig.get_path("purelib"), *module.__name__.split("."))
    found = Path(module.__file__).parent
    assert found.samefile(home), f"{module.__name__} comes from {found}, not from the wheel: {home}"
    assert not home.is_symlink(), f"{home} is a link: the wheel must hold the files"
