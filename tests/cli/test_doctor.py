"""`flexvarlen doctor`: what is best on a machine, and the one command that gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import flexvarlen as fv
from flexvarlen import env
from flexvarlen.attention.auto import cache_file, cache_keys
from flexvarlen.attention.backends.cu_seqlens import fa2, fa3, fa4, hub
from flexvarlen.cli import app
from flexvarlen.cli.install import advice, install
from flexvarlen.recurrent import fla_kernels
from flexvarlen.recurrent.fla_kernels.check import NOTED
from tests.attention.backends.hub_repositories import local_kernels  # noqa: F401

CUDA = torch.device("cuda")


@pytest.fixture
def bare(monkeypatch):
    """A function that makes this a GPU of a capability, with nothing but torch."""

    def make(major):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(hub, "find_spec", lambda name: None)
        for module in (fa2, fa3, fa4):
            monkeypatch.setattr(module.BACKEND, "_kernel", None)
            monkeypatch.setattr(module.BACKEND, "installed", lambda device: "it is not installed")

    return make


@pytest.mark.parametrize(
    ("major", "best", "repository"),
    [(8, "fa2", "flash-attn2"), (9, "fa3", "vllm-flash-attn3"), (10, "fa4", "flash-attn4")],
)
@pytest.mark.parametrize("offline", [False, True])
def test_what_is_best_and_the_command(bare, monkeypatch, major, best, repository, offline):
    bare(major)
    monkeypatch.setattr(hub, "is_offline", lambda: offline)
    sentences = advice(CUDA)
    assert sentences[0] == f"The best kernel for this machine is {best}, which is not installed."
    unset = "unset HF_HUB_OFFLINE and " if offline else ""
    assert sentences[1] == f"To get it, {unset}run: flexvarlen doctor --install"
    assert f"installs {hub.requirement(best)} with pip" in sentences[2]
    assert f"kernels-community/{repository} v" in sentences[2]
    copy = f"set LOCAL_KERNELS=kernels-community/{repository}=FOLDER to a copy"
    assert (copy in sentences[-1]) == offline
    assert len(sentences) <= 8  # with the line of auto and an empty one: ten lines


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_to_install(bare, device):
    """On a CPU, and on a GPU of before Ampere, pip is not called."""
    bare(7)
    for found in (advice(torch.device(device)), install(torch.device(device))):
        assert found == [f"Nothing to install: torch's own kernels are the best on {device}."]


def test_install_calls_pip_and_the_hub(bare, monkeypatch):
    bare(9)
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    calls = []
    monkeypatch.setattr(
        subprocess, "run", lambda x: calls.append(x) or subprocess.CompletedProcess(x, 0)
    )

    def download(name):
        calls.append(name)
        monkeypatch.setattr(fa3.BACKEND, "installed", lambda device: torch.ops.aten)
        monkeypatch.setattr(fa3.BACKEND, "functions", ("_flash_attention_forward",) * 2)

    monkeypatch.setattr(hub, "download", download)
    ready = "The best kernel for this machine is ready: fa3, from an installed package."
    assert install(CUDA) == [ready]
    pip = [sys.executable, "-m", "pip", "install", hub.requirement("fa3")]
    assert calls == [pip, "fa3"]


@pytest.mark.parametrize(
    ("offline", "code", "error", "sentence"),
    [
        (True, 0, OSError, "--install needs the network"),
        (False, 1, OSError, "pip could not install kernels"),
        (False, 0, NotImplementedError, "fa3 needs flash_attn_interface"),  # it does not load
    ],
)
def test_install_that_cannot_says_why(bare, monkeypatch, offline, code, error, sentence):
    bare(9)
    monkeypatch.setattr(hub, "is_offline", lambda: offline)
    monkeypatch.setattr(subprocess, "run", lambda x: subprocess.CompletedProcess(x, code))
    monkeypatch.setattr(hub, "download", lambda name: None)
    with pytest.raises(error, match=sentence):
        install(CUDA)


def test_doctor_names_every_backend_and_runs_no_kernel_and_imports_no_transformers():
    code = (
        "import sys\nfrom flexvarlen.attention.backends.sdpa import SdpaBackend\n"
        "SdpaBackend.attend = None\nfrom flexvarlen.cli import main\n"
        "try: main()\nexcept SystemExit as end: code = end.code\n"
        "assert 'transformers' not in sys.modules\nsys.exit(code)"
    )
    call = [sys.executable, "-c", code, "doctor"]
    output = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert output.startswith("auto takes ")
    names = [line.split(" ")[0] for line in output.splitlines()]
    stack = ["flexvarlen", "torch", "transformers", "accelerate", "trl", "peft"]
    stack += ["liger-kernel", "fla-core"]
    assert names[names.index("flexvarlen") :][: len(stack)] == stack
    for name in (*fv.BACKENDS, "Decoding"):
        assert name in output


def test_scans_that_were_checked_on_another_machine_are_named(monkeypatch, tmp_path):
    """Or any, where fla cannot run."""

    def said():
        return " ".join(CliRunner().invoke(app, ["doctor"]).output.split())

    monkeypatch.setenv(env.CACHE, str(tmp_path))
    assert "fla's scans" not in said()
    monkeypatch.setattr(fla_kernels, "why_not", lambda x: None)
    assert said().endswith("first use; on this machine, none has run yet.")
    machine = cache_keys.machine(torch.device("cpu"))
    notes = {f"{machine}; {NOTED}scan one": {}, f"another machine; {NOTED}scan two": {}}
    cache_file.write_entries(cache_file.cache_path(), notes)
    assert said().endswith("passed the check on this machine: scan one.")


def test_the_command_begins_with_them():
    result = CliRunner().invoke(app, ["doctor", "--install"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("auto takes ")
    if not torch.cuda.is_available():
        assert lines[1] == "Nothing to install: torch's own kernels are the best on cpu."


def test_a_kernel_of_the_hub_that_is_here(local_kernels, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    local_kernels("fa3")
    (sentence,) = advice(CUDA)
    ready = "The best kernel for this machine is ready: fa3, from kernels-community"
    assert sentence.startswith(ready)


def test_a_wrong_folder_is_named_and_not_a_command_that_cannot_help(
    local_kernels,  # noqa: F811
    monkeypatch,
    tmp_path,
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("LOCAL_KERNELS", f"{hub.REPOSITORIES['fa3'].name}={tmp_path}/none")
    (sentence,) = advice(CUDA)
    assert sentence.startswith("The best kernel for this machine cannot be used: fa3 needs")
    assert "correct what LOCAL_KERNELS names" in sentence
    assert hub.DOCTOR not in sentence
    with pytest.raises(NotImplementedError, match="correct what LOCAL_KERNELS names"):
        install(CUDA)
