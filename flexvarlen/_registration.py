"""Register the `flexvarlen_*` attention implementations once transformers' models are imported.

Importing transformers here would add seconds to every `import flexvarlen`. So if its modeling code
has not been imported yet, an import hook registers them at the end of that import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODELING = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Register now, or as soon as transformers' modeling code has been imported."""
    if _MODELING in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterModeling) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterModeling())


def _register() -> None:
    from flexvarlen.patches.attention.functions import register

    register()


class _AfterModeling(MetaPathFinder):
    """Finds transformers' modeling code as the other finders do, and registers after its import."""

    _searching = False  # True while the other finders search

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the modeling code, and None for all other modules."""
        if fullname != _MODELING or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
