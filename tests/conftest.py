"""What every test runs under: no hub, a fair share of the cores, repeatable examples."""

import functools
import gc
import importlib.metadata
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

# Read when the libraries are imported, so set before any of them is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Each xdist worker takes its share: two workers with two threads each on two cores run slower
# than one. Eight are enough for the tiny models. Child processes inherit the same.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_threads = max(1, min(8, (os.cpu_count() or 1) // _workers))
os.environ.setdefault("OMP_NUM_THREADS", str(_threads))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other workers
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_threads))

# A child process that dies in C says where, in the output that its test shows.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Nothing that a test compiles is kept for the next run.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")

# accelerate reads PEFT's metadata, a file to parse, whenever it asks whether a model is PEFT's.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

# Inductor would compile a small program for each instruction set that /proc/cpuinfo names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def _quick_compiler() -> str:
    """g++ at -O1: a kernel of flex took 2.7 s on two cores, and 4.5 s at inductor's own -O3.

    Beside inductor's cache, which goes by the compiler's path: one path for all checkouts.
    """
    script = Path(tempfile.gettempdir()) / f"flexvarlen-tests-{os.getuid()}" / "g++"
    text = f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O1\n'
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(mode=0o700, exist_ok=True)
        new = script.with_name(f"g++.{os.getpid()}")  # another worker may run the old one
        new.write_text(text)
        new.chmod(new.stat().st_mode | stat.S_IXUSR)
        new.replace(script)
    return str(script)


if "CXX" not in os.environ and shutil.which("g++"):
    os.environ["CXX"] = _quick_compiler()

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from flexvarlen.recurrent.fla_configs import use_fla_configs_once_imported  # noqa: E402
from tests.pairwise import sampled  # noqa: E402
from tests.ranks import Ranks  # noqa: E402

torch.set_num_threads(_threads)

# pytest hands it to its own handlers; with any, torch writes a report of each compilation.
logging.getLogger("torch.__trace").addHandler = lambda handler: None
use_fla_configs_once_imported()

# The first example of a test may import or compile: a deadline would fail on that alone. The blob
# finds an example again in another checkout, which has not kept it.
hypothesis.settings.register_profile("dev", deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("dev"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
hypothesis.settings.register_profile("slow", max_examples=100)  # else as the loaded one


def pytest_addoption(parser):
    """`--mask-cases N`: random masks of each kind that are held against brute force.

    `--chat-cases N`: random chats of each tokenizer that are held against the chat template.
    `--all-forms`: all combinations of tests marked `pairwise`, not a sample.
    `--slow`: the tests marked `slow` too, every parameter of those marked `sampled`, and twice as
    many examples of hypothesis.
    """
    parser.addoption("--mask-cases", type=int, default=60)
    parser.addoption("--chat-cases", type=int, default=84)
    parser.addoption("--all-forms", action="store_true")
    parser.addoption("--slow", action="store_true")


def pytest_configure(config):
    """Before the tests are imported, whose own settings go by the profile."""
    if config.getoption("--slow"):
        hypothesis.settings.load_profile("slow")


def pytest_generate_tests(metafunc):
    """`@pytest.mark.pairwise(kind=..., form=...)` parametrizes by a sample of the combinations.

    Each value of one factor meets each of every other; `--all-forms` makes all combinations.
    """
    for mark in metafunc.definition.iter_markers("pairwise"):
        whole = metafunc.config.getoption("--all-forms")
        metafunc.parametrize(list(mark.kwargs), sampled(mark.kwargs, whole=whole))


def pytest_collection_modifyitems(config, items):
    """Leave out tests marked ``gpu`` without a CUDA device, and ``slow`` ones without --slow."""
    unwanted = set() if torch.cuda.is_available() else {"gpu"}
    unwanted |= set() if config.getoption("--slow") else {"slow"}
    kept = [item for item in items if not unwanted & set(item.keywords)]
    if not config.getoption("--slow"):
        kept = _sampled(kept)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def pytest_collection_finish(session):
    """Trainers and `compare` collect garbage, but not among the million objects of all imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _freeze_after_module():
    """What a module's tests leave in caches is not searched either: trainers took twice as long.

    With a GPU it is, as tensors in cycles that were frozen would never leave the GPU's memory.
    """
    yield
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()


def _sampled(items):
    """Of a test marked `sampled(n)`, n of its parameters, evenly spaced."""
    by_test = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            by_test.setdefault((item.path, item.originalname), []).append(item)
    left_out = set()
    for own in by_test.values():
        (most,) = own[0].get_closest_marker("sampled").args
        step = max(1.0, len(own) / most)
        left_out |= set(own) - {own[int(i * step)] for i in range(min(most, len(own)))}
    return [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _gradients_stay_on():
    """Nothing that runs may leave autograd off behind it: later code would silently not learn."""
    assert torch.is_grad_enabled()
    yield
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on, "autograd was left off"


@pytest.fixture
def fresh_accelerate():
    """accelerate as in a process that starts, and nothing of the test left in it."""
    forget_accelerate = importlib.import_module("tests.contract_training").forget_accelerate
    forget_accelerate()
    yield
    forget_accelerate()


@pytest.fixture(scope="session")
def ranks():
    """Two processes for the cases of all tests; what one case leaves behind, the next one finds."""
    with Ranks() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def timed_briefly():
    """`compare` takes the time of a variant's second run: for tests of what it finds."""
    module = importlib.import_module("flexvarlen.verify.compare.compare")
    check_and_time = module.check_and_time

    def briefly(*args, **kwargs):
        return check_and_time(*args, **(kwargs | {"slow_s": 0.0}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_and_time", briefly)
        patch.setattr(module, "TIMING_BUDGET_S", 0.0)  # of those whose second run compiles
        yield


@pytest.fixture
def process_group():
    """One process, by gloo; destroyed when nothing of the test refers to it any more.

    A wrapper such as DDP that outlives its group destroys it with the interpreter's lock held, and
    gloo's threads may wait for that lock: the process then hangs for ever (pytorch issue 56297).
    """
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    gc.collect()
    torch.distributed.destroy_process_group()
