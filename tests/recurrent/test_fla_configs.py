"""The stored configurations of fla's kernels: who gets them, and when they are given up."""

from __future__ import annotations

import json
import sys
from enum import Enum
from types import ModuleType

import pytest
import torch

from flexvarlen.cli import machine
from flexvarlen.recurrent import fla_configs

OPTION = "FLEXVARLEN_FLA_CONFIGS"


class Mode(Enum):
    DISABLED = "disabled"
    DEFAULT = "default"


def a_kernel():
    """What the two autotuners decorate."""


class Autotuner:
    """Triton's, as far as it is read."""

    def __init__(self):
        self.base_fn, self.cache = a_kernel, {"a shape": "a configuration"}


class CachedAutotuner(Autotuner):
    """fla's."""


class Heuristics:
    def __init__(self, fn):
        self.fn = fn


@pytest.fixture
def fla(monkeypatch):
    """A stand-in for fla, on a Hopper GPU; two of its kernels have a configuration."""
    cache, ops = ModuleType("fla.ops.utils.cache"), ModuleType("fla.ops.some")
    cache.FlaCacheMode, cache.FLA_CACHE_MODE = Mode, Mode.DISABLED
    cache.Autotuner, cache.CachedAutotuner = Autotuner, CachedAutotuner
    cache.get_fla_config_dir = lambda: "fla's own"
    ops.tuned, ops.below = CachedAutotuner(), Heuristics(CachedAutotuner())
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.utils"].cache = cache
    monkeypatch.setitem(sys.modules, cache.__name__, cache)
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    monkeypatch.setattr(fla_configs, "_on_hopper", lambda: True)
    monkeypatch.setattr(fla_configs, "TRITON_TIMES", (ops.__name__,))
    for name in (OPTION, "FLA_CACHE_MODE", "FLA_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return cache


def test_flas_kernels_find_the_files(fla):
    fla_configs.use_fla_configs()
    assert fla.FLA_CACHE_MODE is Mode.DEFAULT
    assert fla_configs.fla_configs_are_used()
    files = list(fla.get_fla_config_dir().glob("*.json"))
    assert len(files) > 20
    for file in files:
        stored = json.loads(file.read_text())
        assert stored["kernel_name"] == file.stem
        assert {"kwargs", "num_warps", "num_stages"} <= stored["default_config"].keys()


def test_kernels_that_triton_times_find_the_files_too(fla):
    ops = sys.modules["fla.ops.some"]
    ops.by_triton, ops.helper = Heuristics(Autotuner()), Heuristics(None)
    fla_configs.use_fla_configs()
    assert type(ops.by_triton.fn) is CachedAutotuner
    assert ops.by_triton.fn.kernel_name == a_kernel.__name__
    assert not ops.by_triton.fn.cache
    assert not hasattr(ops.tuned, "kernel_name")  # fla's own has its name already


@pytest.mark.parametrize(
    ("on_hopper", "variables", "used"),
    [
        (False, {}, False),
        (False, {OPTION: "1"}, True),
        (True, {OPTION: "0"}, False),
        (True, {"FLA_CACHE_MODE": "disabled"}, False),
        (True, {OPTION: "1", "FLA_CONFIG_DIR": "a/folder"}, False),
    ],
)
def test_who_gets_them(fla, monkeypatch, on_hopper, variables, used):
    monkeypatch.setattr(fla_configs, "_on_hopper", lambda: on_hopper)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fla_configs.use_fla_configs()
    assert fla_configs.fla_configs_are_used() is used


def test_fla_is_not_imported_for_them(fla, monkeypatch):
    """`flexvarlen bench` and the tests wait until something else imports it."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, fla.__name__)
    fla_configs.use_fla_configs_once_imported()
    assert fla.__name__ not in sys.modules
    assert fla.FLA_CACHE_MODE is Mode.DISABLED
    monkeypatch.setitem(sys.modules, fla.__name__, fla)
    fla_configs.use_fla_configs_once_imported()
    assert fla_configs.fla_configs_are_used()


def test_another_value_is_refused(fla, monkeypatch):
    monkeypatch.setenv(OPTION, "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, got 'yes'"):
        fla_configs.use_fla_configs()


def test_kernels_that_fail_with_them_are_timed(fla):
    """For all of the process, also if another model is patched."""
    ops = sys.modules["fla.ops.some"]
    assert not fla_configs.let_fla_time_its_own()
    assert ops.tuned.cache
    fla_configs.use_fla_configs()
    assert fla_configs.let_fla_time_its_own()
    assert not ops.tuned.cache
    assert not ops.below.fn.cache
    fla_configs.use_fla_configs()
    assert fla.FLA_CACHE_MODE is Mode.DISABLED
    assert not fla_configs.fla_configs_are_used()


def test_doctor_says_who_chooses(fla, monkeypatch):
    monkeypatch.setattr(machine, "_version", lambda package: None)
    assert machine.fla_configs() is None
    monkeypatch.setattr(machine, "_version", lambda package: "0.6.0")
    assert "found on an H200" in machine.fla_configs()
    assert fla.FLA_CACHE_MODE is Mode.DISABLED  # asking changes nothing
    monkeypatch.setenv(OPTION, "0")
    assert f"{OPTION}=1" in machine.fla_configs()


@pytest.mark.gpu
def test_on_a_gpu():
    """fla reads the two names that are replaced."""
    cache = pytest.importorskip("fla.ops.utils.cache")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    fla_configs.use_fla_configs()
    found = cache.load_cached_config("chunk_fwd_kernel_o")
    stored = json.loads((cache.get_fla_config_dir() / "chunk_fwd_kernel_o.json").read_text())
    assert found == stored["default_config"]
