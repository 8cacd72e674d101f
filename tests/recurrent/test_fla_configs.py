"""FLEXVARLEN_FLA_CONFIGS: what fla reads is set by the import, unless it is asked for elsewhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flexvarlen.cli import machine
from flexvarlen.recurrent import fla_configs

FLA = ("FLA_CACHE_MODE", "FLA_CONFIG_DIR")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without fla's variables; what the option sets is undone."""
    for name in FLA:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "fla.ops.utils.cache", raising=False)


def found():
    return [os.environ.get(name) for name in FLA]


def test_the_option_names_the_folder_of_the_files(monkeypatch):
    monkeypatch.setenv("FLEXVARLEN_FLA_CONFIGS", "1")
    fla_configs.use_configs_from_environment()
    mode, folder = found()
    assert mode == "default"
    files = list(Path(folder).glob("*.json"))
    assert len(files) > 20
    for file in files:
        stored = json.loads(file.read_text())
        assert stored["kernel_name"] == file.stem
        assert {"kwargs", "num_warps", "num_stages"} <= stored["default_config"].keys()


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_is_set_unasked(monkeypatch, value):
    monkeypatch.delenv("FLEXVARLEN_FLA_CONFIGS", raising=False)
    if value is not None:
        monkeypatch.setenv("FLEXVARLEN_FLA_CONFIGS", value)
    fla_configs.use_configs_from_environment()
    assert found() == [None, None]


def test_flas_own_variables_take_precedence(monkeypatch):
    monkeypatch.setenv("FLEXVARLEN_FLA_CONFIGS", "1")
    monkeypatch.setenv("FLA_CACHE_MODE", "disabled")
    fla_configs.use_configs_from_environment()
    assert found() == ["disabled", None]


def test_an_import_of_fla_before_is_warned_of(monkeypatch):
    monkeypatch.setenv("FLEXVARLEN_FLA_CONFIGS", "1")
    monkeypatch.setitem(sys.modules, "fla.ops.utils.cache", ModuleType("cache"))
    with pytest.warns(UserWarning, match="import flexvarlen before"):
        fla_configs.use_configs_from_environment()
    assert found() == [None, None]


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("FLEXVARLEN_FLA_CONFIGS", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, got 'yes'"):
        fla_configs.use_configs_from_environment()


def test_doctor_names_the_option_where_fla_is_installed(monkeypatch):
    monkeypatch.setattr(machine, "_version", lambda package: None)
    assert machine.fla_configs() is None
    monkeypatch.setattr(machine, "_version", lambda package: "0.6.0")
    assert "FLEXVARLEN_FLA_CONFIGS=1" in machine.fla_configs()
    fla_configs.use_fla_configs()
    assert "are stored" in machine.fla_configs()
