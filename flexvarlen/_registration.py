"""Register the `flexvarlen_*` attention implementations once transformers' modeling code is there.

To import transformers here would take seconds of every `import flexvarlen`. So if its modeling code
is not imported yet, its import ends with ours.
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
    """Register now, or at the end of the import of transformers' modeling code."""
    if _MODELING in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterModeling) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterModeling())


def _register() -> None:
    from flexvarlen.patches.attention.functions import register

    register()


class _AfterModeling(MetaPathFinder):
    """Finds transformers' modeling code as the other finders do, and registers after its import."""

    _searching = False  # the other finders are being asked

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for the one module; None for all others."""
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
