"""Imports go one way, and `import flexvarlen` brings in nothing that takes long."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import flexvarlen

ROOT = Path(flexvarlen.__file__).parent

ORDER = (
    # Each imports those below it alone. "flexvarlen" is `flexvarlen/__init__.py`: what it names,
    # the modules below it import from where it is defined.
    "__main__",
    "cli",
    "bench",
    "flexvarlen",
    "verify",
    "runner",
    "report",
    # patches/, the only part of the runtime that knows transformers
    "patches.trainers",
    "patches.context_parallel_trainer",
    "patches.shard_collator",
    "patches.tree_trainer",
    "patches.tree_logprobs",
    "patches.embed",
    "patches.embed_rows",
    "patches.embedding_settings",
    "patches.row_cost",
    "patches.trainer_callback",
    "patches.api",
    "patches.apply",
    "patches.verification",
    "patches.isolation",
    "patches.forward",
    "patches.lm_head",
    "patches.inner_model",
    "patches.attention",
    "patches.models.llama4",
    "patches.batch",
    "patches.names",
    "patches.why_not",
    "patches.adapters",
    "patches.state",
    "patches.parts",
    "patches.models",
    "patches",
    "packing",
    "trees",
    "parallel",
    "recurrent",
    "attention.explain",
    "attention.api",
    "attention.choose",
    "attention.auto",
    "attention.backends",
    "attention",
    "mask",
    "layout",
    "measure",
    "reference",
    "env",
    "import_hook",
    "upstream",
    "_version",
)


def modules() -> dict[str, Path]:
    """All of the package, by name; without "flexvarlen." but for `flexvarlen/__init__.py`."""
    found = {}
    # bench/ and patches/ are symbolic links, which rglob does not follow.
    folders = os.walk(ROOT, followlinks=True)
    for path in (Path(folder) / name for folder, _, names in folders for name in names):
        if path.suffix == ".py":
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name or "flexvarlen"] = path
    return found


def entry_of(name: str) -> str | None:
    """The longest entry of `ORDER` that the module is in."""
    own = [entry for entry in ORDER if name == entry or name.startswith(f"{entry}.")]
    return max(own, key=len) if own else None


@cache
def imports_of(path: Path, *, types: bool = False) -> list[tuple[str, str]]:
    """Module and name (perhaps a module too) of all imports, also those inside functions.

    `types`: and those for annotations alone; in a package's `__init__` these are its lazy names.
    """
    return list(imported(ast.parse(path.read_text()), types and path.name != "__init__.py"))


def imported(node: ast.AST, types: bool) -> Iterator[tuple[str, str]]:
    if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from ((node.module, alias.name) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child, types)


def own_imports(path: Path, *, types: bool = False) -> set[str]:
    """The package's modules that a file imports."""
    found = set()
    for module, name in imports_of(path, types=types):
        own = module.removeprefix("flexvarlen.")
        inside = name if module == "flexvarlen" else f"{own}.{name}"
        found.add(inside if inside in MODULES else own)
    return found & MODULES.keys()


MODULES = modules()


@cache
def graph(*, types: bool = False) -> dict[str, set[str]]:
    return {name: own_imports(path, types=types) for name, path in MODULES.items()}


def test_every_module_is_ranked():
    entries = {name: entry_of(name) for name in MODULES}
    assert [name for name, entry in entries.items() if entry is None] == []
    assert [entry for entry in ORDER if entry not in entries.values()] == [], "no such modules"


def test_arrows_point_down():
    rank = {name: ORDER.index(entry_of(name)) for name in MODULES}
    for name, others in graph().items():
        upward = [other for other in others if rank[other] < rank[name]]
        assert not upward, f"{name} imports {upward}, which stand above it"


def test_no_circle():
    try:
        list(TopologicalSorter(graph(types=True)).static_order())
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_no_private_name_of_another_package():
    for name, path in MODULES.items():
        for module, private in imports_of(path):
            top, package, *_ = f"{module}.".split(".")
            if top == "flexvarlen" and package != name.partition(".")[0]:
                is_private = private.startswith("_") and private not in ("_version", "__version__")
                assert not is_private, f"{name} imports {private} of {module}"


def test_backends_do_not_import_one_another():
    backends = {name for name, path in MODULES.items() if "\nBACKEND = " in path.read_text()}
    assert len(backends) == 10
    for name in backends:
        assert not graph()[name] & backends, name


def test_transformers_is_known_to_patches_and_above():
    for name, path in MODULES.items():
        if ORDER.index(entry_of(name)) > ORDER.index("patches"):
            packages = {module.partition(".")[0] for module, _ in imports_of(path)}
            assert "transformers" not in packages, name


def test_public_names_are_what_dir_shows_and_each_has_a_home():
    """Also once they are looked up, which keeps them among the module's globals."""
    assert dir(flexvarlen) == sorted(flexvarlen.__all__)
    for name in flexvarlen.__all__:
        found = getattr(flexvarlen, name)
        assert getattr(found, "__name__", name) == name
    assert dir(flexvarlen) == sorted(flexvarlen.__all__)


def printed(program: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


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
    brought = printed(program).split()
    assert "flexvarlen" in brought
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
        "import transformers.trainer, flexvarlen",
        "import flexvarlen",
        "import transformers.modeling_utils, flexvarlen",
        "import flexvarlen, transformers.models.auto.modeling_auto",
        "import flexvarlen, transformers.trainer",
        "import flexvarlen; from transformers.models.qwen3 import modeling_qwen3",
        "from flexvarlen.patches.models import layers",
        "from flexvarlen import patch_model",
        # a look, as importlib takes it, is no import
        "import flexvarlen, importlib.util as u; u.find_spec('transformers.modeling_utils'); "
        "import transformers.modeling_utils",
    ],
)
@pytest.mark.sampled(1)
def test_names_are_registered_whoever_is_imported_first(first):
    printed(f"{first}\n{REGISTERED}")


WITHOUT_DISTRIBUTED = """
import sys

class BeforeDistributed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch.distributed":
            for init in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                delattr(sys.modules["torch._C"], init)

sys.meta_path.insert(0, BeforeDistributed)
import torch
import flexvarlen as fv
from transformers import AutoModelForCausalLM, LlamaConfig

assert not torch.distributed.is_available()
sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = fv.patch_model(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)))
model(torch.ones(1, 5, dtype=torch.int64), packed_layout=fv.PackedLayout.from_lengths([2, 3]))
"""


def test_a_torch_built_without_distributed():
    """As builds for some boards are."""
    printed(WITHOUT_DISTRIBUTED)
