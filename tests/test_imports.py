"""Imports go one way, and `import flexvarlen` brings in nothing that takes long."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flexvarlen

ROOT = Path(flexvarlen.__file__).parent

ORDER = (
    # each imports those below it alone
    "cli",
    "bench",
    "verify",
    "runner",
    "report",
    "flexvarlen",
    "patches.embed",
    "patches.sentence_transformers_files",
    "patches.api",
    "patches.verification",
    "patches.isolation",
    "patches.forward",
    "patches.attention",
    "patches.state",
    "patches.models",
    "patches.batch",
    "packing",
    "parallel",
    "attention.explain",
    "attention.api",
    "attention.choose",
    "attention.auto",
    "attention.backends.registry",
    "attention.backends.nested",
    "attention.backends.cu_seqlens",
    "attention.backends.cu_seqlens.triton",
    "attention.backends",
    "attention",
    "mask",
    "mask.triton",
    "mask.table_shapes",
    "mask.spec",
    "layout",
    "layout.triton",
    "measure",
    "reference",
    "environment",
    "env",
    "_version",
)


def runtime() -> dict[str, Path]:
    """The modules of the runtime, by name without the package's."""
    found = {}
    # bench/ and patches/ are symbolic links, which rglob does not follow.
    folders = os.walk(ROOT, followlinks=True)
    for path in (Path(folder) / name for folder, _, names in folders for name in names):
        if path.suffix != ".py":
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if rank_of(name) is not None and name:
            found[name] = path
    return found


def rank_of(name: str) -> int | None:
    """Where a module stands: that of the longest entry of `ORDER` it is in."""
    own = [entry for entry in ORDER if name == entry or name.startswith(f"{entry}.")]
    return ORDER.index(max(own, key=len)) if own else None


def imports_of(path: Path, modules) -> set[str]:
    """The runtime's modules that a file imports, anywhere but for annotations."""
    found = set()
    tree = ast.parse(path.read_text())
    for_types = [
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    ]
    for node in ast.walk(tree):
        if node in for_types or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            own = name.removeprefix("flexvarlen.")
            if own != name and own in modules:
                found.add(own)
    packages = {name for name in found if modules[name].name == "__init__.py"}
    return {x for x in found if x not in packages or not any(y.startswith(f"{x}.") for y in found)}


MODULES = runtime()
GRAPH = {name: imports_of(path, MODULES) for name, path in MODULES.items()}


def test_every_package_is_looked_at():
    packages = {name.partition(".")[0] for name in MODULES}
    assert packages >= {"bench", "patches", "cli", "attention", "verify"}


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_arrows_point_down(name):
    upward = [other for other in GRAPH[name] if rank_of(other) < rank_of(name)]
    assert not upward, f"{name} imports {upward}, which stand above it"


def test_no_cycle():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(GRAPH[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(GRAPH):
        visit(name)


def test_backends_do_not_import_one_another():
    backends = {name for name, path in MODULES.items() if "\nBACKEND = " in path.read_text()}
    assert len(backends) == 10
    for name in backends:
        assert not GRAPH[name] & backends, name


@pytest.mark.parametrize("package", ["layout", "mask", "attention", "packing", "parallel", "env"])
def test_transformers_is_known_to_patches_alone(package):
    for name, path in MODULES.items():
        if name == package or name.startswith(f"{package}."):
            assert "import transformers" not in path.read_text(), name
            assert "from transformers" not in path.read_text(), name


SLOW = (
    *("torch._dynamo", "torch._inductor", "torch.nn.attention", "triton", "sympy"),
    *("transformers", "accelerate", "flash_attn", "numpy.testing"),
    *("matplotlib", "rich", "typer", "markdown_it", "tokenizers"),
)


def test_import_brings_nothing_that_takes_long():
    program = (
        "import sys, torch; before = set(sys.modules); import flexvarlen; "
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    brought = done.stdout.split()
    assert "flexvarlen" in brought, done.stderr
    assert not [name for name in brought if name.startswith(SLOW)]
    assert len([name for name in brought if name.startswith("flexvarlen")]) <= 3


REGISTERED = (
    "from transformers import AttentionInterface\n"
    "assert 'flexvarlen_flex' in AttentionInterface._global_mapping\n"
    "from transformers import trainer\n"
    "assert [x.__name__ for x in trainer.DEFAULT_CALLBACKS].count('CollatorCallback') == 1"
)


@pytest.mark.parametrize(
    "first",
    [
        "import flexvarlen",
        "import transformers.modeling_utils, flexvarlen",
        "import flexvarlen, transformers.models.auto.modeling_auto",
        "import transformers.trainer, flexvarlen",
        "import flexvarlen, transformers.trainer",
        "import flexvarlen; from transformers.models.qwen3 import modeling_qwen3",
        "from flexvarlen.patches.models import layers",
        "from flexvarlen import patch_model",
        # a look, as importlib takes it, is no import
        "import flexvarlen, importlib.util as u; u.find_spec('transformers.modeling_utils'); "
        "import transformers.modeling_utils",
    ],
)
@pytest.mark.sampled(2)
def test_names_are_registered_whoever_is_imported_first(first):
    program = f"{first}\n{REGISTERED}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
