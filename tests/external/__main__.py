"""`python -m tests.external`: transformers' own tests for models, with our attention inside.

Fetches transformers' source package (10 MB) and `parameterized` with pip at its first run, into
`build/external`; so it is no part of `make test`, but of `make test-external`. Some ten minutes
on two cores with the default backend.

Fails if a test fails that `tables.py` does not deselect, if a deselected one passes or fails for
another reason, and if one that must pass skips itself. (The F that pytest prints are the
deselected ones too.) Writes `summary-<backend>.json` and `.txt`.
What is after `--` goes to pytest (`-- -k training`); then tests may be missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Read when transformers is imported. A download by a test would be a mistake: pip made them all.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

import flexvarlen as fv
from tests.external.our_attention import WAYS
from tests.external.plugin import Recorder
from tests.external.source import prepare
from tests.external.tables import MODELS, class_name
from tests.external.verdict import judge

ROOT = Path(__file__).parents[2]
SUITE = Path(__file__).with_name("suite.py")

# Of its own: the repository's settings collect doctests, and know other markers.
INI = """[pytest]
addopts = -q --tb=short --no-summary --import-mode=importlib -p no:cacheprovider -p no:warnings
python_files = suite.py
pythonpath = {paths}
timeout = 600
verbosity_subtests = 0
"""


def main() -> int:
    """Run the suite; 0 if all is as the tables say."""
    options = _parser().parse_args()
    keep = options.keep.resolve()
    keep.mkdir(parents=True, exist_ok=True)
    models = list(MODELS) if options.model == "all" else _of_family(options.model)
    ways = tuple(WAYS[:2] if options.way == "both" else [options.way])
    classes = [class_name(model, way) for model in models for way in ways]

    settings = keep / "pytest.ini"
    settings.write_text(INI.format(paths=" ".join(map(str, [ROOT, *prepare(keep)]))))
    recorder, start = Recorder(), time.perf_counter()
    pytest.main(
        [
            *("-c", str(settings), "--rootdir", str(ROOT), "--confcutdir", str(ROOT)),
            *("-p", "tests.external.plugin", "--backend", options.backend),
            *("-n", str(options.workers)),
            *options.pytest,
            *(f"{SUITE}::{of}" for of in classes),
        ],
        plugins=[recorder],
    )
    if not recorder.outcomes:
        print("No test ran.", *recorder.collection_errors, sep="\n")
        return 2
    verdict = judge(recorder.outcomes, options.backend, ways, classes, all_ran=not options.pytest)
    about = {
        "backend": options.backend,
        "classes": classes,
        "seconds": round(time.perf_counter() - start),
    }
    verdict.save(keep / f"summary-{options.backend}", about)
    print(verdict.text(about), f"\nWritten: {keep}/summary-{options.backend}.json, .txt")
    return int(bool(verdict.wrong or recorder.collection_errors))


def _of_family(family: str) -> list[str]:
    return [model for model in MODELS if model.startswith(family)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.external", description=__doc__)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--backend", choices=[*fv.BACKENDS, "auto"], default="auto")
    parser.add_argument(
        "--way",
        choices=["both", *WAYS],
        default="both",
        help="by the plugin's name, patched, both, or transformers without us",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=ROOT / "build" / "external",
        help="folder for the downloads and the summary",
    )
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
