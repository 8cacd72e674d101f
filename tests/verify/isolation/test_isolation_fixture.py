"""The pytest fixture `isolation_verifier`, and what its import costs those who do not use it."""

import subprocess
import sys

import pytest

import flexvarlen as fv
from flexvarlen.verify.isolation.fixture import isolation_verifier, packed_batch  # noqa: F401
from flexvarlen.verify.models import build_model


def test_both_modes_are_verified_and_restored(isolation_verifier):  # noqa: F811
    model = fv.patch_model(build_model("llama")[0].eval(), "sdpa")
    model.model.layers[0].train()
    modes = [module.training for module in model.modules()]
    reports = isolation_verifier(model)
    assert [reports[mode].training for mode in ("eval", "train")] == [False, True]
    assert [module.training for module in model.modules()] == modes


def test_leak_raises_in_the_named_mode(isolation_verifier):  # noqa: F811
    model, _ = build_model("llama")
    with pytest.raises(fv.IsolationError):
        isolation_verifier(model, packed_batch(model, (4, 5)), modes=["eval"], gradients=False)
    with pytest.raises(ValueError, match="modes must be"):
        isolation_verifier(model, modes=["test"])


def test_leak_of_a_user_s_model_fails_the_user_s_test(tmp_path):
    """In a pytest of their own; the sentence is what it reports."""
    (tmp_path / "test_user.py").write_text(
        "from flexvarlen.verify.models import build_model\n"
        "from flexvarlen.verify.isolation.fixture import isolation_verifier  # noqa: F401\n"
        "import flexvarlen as fv\n\n"
        "def test_leaks(isolation_verifier):\n"
        "    isolation_verifier(build_model('llama')[0])\n\n"
        "def test_passes(isolation_verifier):\n"
        "    isolation_verifier(fv.patch_model(build_model('llama')[0], 'sdpa'))\n"
    )
    report = tmp_path / "report.xml"
    plugins = ("no:cacheprovider", "no:faulthandler", "no:xdist")
    quiet = ("-q", *(x for plugin in plugins for x in ("-p", plugin)), f"--rootdir={tmp_path}")
    assert pytest.main([*quiet, f"--junitxml={report}", str(tmp_path)]) == 1
    assert 'failures="1" skipped="0" tests="2"' in report.read_text()
    assert "leaks into document" in report.read_text()
    assert "No bit of 6 documents" in report.read_text()


def test_pytest_starts_without_torch(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\ndef test_plain():\n    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
