"""A release of transformers that renamed something, simulated.

Its source is rewritten on import, or a name is taken from a model that was made.

`python -m tests.renamed` reads cases as JSON from stdin and prints what came of each. A case runs
in a process of its own, forked from one that has transformers, but none of its models, imported:
a third of a second. Where transformers itself has the name, all of it is imported again.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NamedTuple

RIGHT = 1e-4
"""Of the largest logit. All is computed in float64, but for rotary tables and losses."""
LENGTHS = (20, 9, 70, 30)
TINY = ("suites.contract.tiny_", "tests.tiny_models")  # they name fields of configs


class Case(NamedTuple):
    """A name, and the kind of model that is packed without it: as in tests/tiny_models.py.

    Attributes:
        where: "model", rename it in the modules of the model; "everywhere", in all of transformers;
            "made", take it from a model that was made, whose own code does not run without it.
    """

    kind: str
    name: str
    where: str = "model"


def outcomes(cases: Iterable[Case]) -> dict[Case, str]:
    """Of each "right", "wrong: …", the packed run's exception, or "broken: …" upstream."""
    cases = list(cases)
    run = subprocess.run(
        [sys.executable, "-m", "tests.renamed"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(zip(cases, json.loads(run.stdout), strict=True))


class _Renaming(MetaPathFinder):
    """Finds modules, and replaces a word in their source."""

    def __init__(self, name: str, modules: tuple[str, ...]) -> None:
        self.name, self.modules = name, modules

    def find_spec(self, name, path, target=None):
        if not any(part in name for part in self.modules):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and str(spec.origin).endswith(".py"):
            spec.loader = _Rewritten(name, spec.origin, self.name)
        return spec


class _Rewritten(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, word: str) -> None:
        super().__init__(name, path)
        self.word = word

    def get_code(self, fullname):
        of_tests = any(part in fullname for part in TINY)
        old = rf'(?<="){self.word}(?=")' if of_tests else rf"\b{self.word}\b"
        text = re.sub(old, f"renamed_{self.word}", Path(self.path).read_text())
        return compile(text, self.path, "exec")


def _outcome(kind: str, without: str = "") -> str:
    import torch
    from torch.nn.functional import cross_entropy

    import flexvarlen as fv
    from tests.tiny_models import new_model

    is_encoder = "bert" in kind
    documents = [torch.randint(3, 80, (n,), generator=torch.manual_seed(n)) for n in LENGTHS]
    row, layout = torch.cat(documents)[None], fv.PackedLayout.from_lengths(LENGTHS)
    try:
        model = new_model(kind).double()
    except Exception as error:
        return f"broken: {error}"
    if without:
        _take(without, model)
    labels = {} if is_encoder else {"labels": row}
    try:
        found = fv.patch_model(model, "reference")(input_ids=row, packed_layout=layout, **labels)
        packed, loss = found.logits[0], found.loss
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    fv.unpatch_model(model)
    options = {} if is_encoder else {"use_cache": False}
    try:
        alone = [model(input_ids=x[None], **options).logits[0] for x in documents]
        next_token = [
            cross_entropy(x[:-1], y[1:], reduction="sum")
            for x, y in zip(alone, documents, strict=True)
        ]
    except Exception as error:
        return f"broken: {error}"
    exact = torch.cat(alone)
    wrong = ((packed - exact).abs().max() / exact.abs().max()).item()
    if labels:
        mean = sum(next_token) / sum(len(x) - 1 for x in documents)
        wrong = max(wrong, abs(loss / mean - 1).item())
    return "right" if wrong < RIGHT else f"wrong: by {wrong:.1e} of the largest logit or the loss"


def _take(name: str, model: Any) -> None:
    """Remove an attribute from a model's modules and configs, and from their classes."""
    config = model.config
    for owner in (config, getattr(config, "text_config", config), *model.modules()):
        vars(owner).pop(name, None)
        for each in type(owner).__mro__:
            if name in vars(each) and each.__module__.startswith("transformers."):
                delattr(each, name)


def _in_a_child(case: Case) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            found = _run(case)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writer, found.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    found = b"".join(iter(lambda: os.read(reader, 65_536), b"")).decode()
    os.close(reader)
    os.waitpid(child, 0)
    return found or "died"


def _run(case: Case) -> str:
    if case.where == "everywhere":
        modules = ("transformers",)
    else:
        from transformers.models.auto.configuration_auto import model_type_to_module_name

        modules = (f"transformers.models.{model_type_to_module_name(case.kind.split('_w')[0])}.",)
    if case.where == "made":
        return _outcome(case.kind, without=case.name)
    sys.meta_path.insert(0, _Renaming(case.name, (*modules, *TINY)))
    return _outcome(case.kind)


def _main() -> None:
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cases = [Case(*x) for x in json.load(sys.stdin)]
    found = {case: _in_a_child(case) for case in cases if case.where == "everywhere"}
    import flexvarlen.patches.api  # noqa: F401  (transformers, without its models)

    found |= {case: _in_a_child(case) for case in cases if case not in found}
    print(json.dumps([found[case] for case in cases]))


if __name__ == "__main__":
    _main()
