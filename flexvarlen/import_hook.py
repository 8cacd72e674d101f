"""Call a function once another package's module is imported.

Importing transformers would add seconds to every `import flexvarlen`. So what needs a module that
has not been imported yet waits for the end of its import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function` with a module: now, or at the end of its import."""
    if name in sys.modules:
        function(sys.modules[name])
    elif _AfterImport(name, function) not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport(name, function))


@dataclass
class _AfterImport(MetaPathFinder):
    """Finds a module as the other finders do, and calls a function after its import."""

    name: str
    function: Callable[[ModuleType], None]
    _searching: bool = field(default=False, compare=False)  # True while the other finders search

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the module, and None for all others."""
        if fullname != self.name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self.function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
