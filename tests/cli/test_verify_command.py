"""`flexvarlen verify`: exit codes, sentences, JSON."""

import json

import pytest
import torch
from typer.testing import CliRunner

from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.cli import app
from flexvarlen.recurrent import layer_functions
from flexvarlen.verify.experiment.inputs import FORMS
from flexvarlen.verify.isolation.command import LENGTHS
from tests.planted import plant
from tests.verify.planted import leak

SMALL = ["--model", "qwen3", "--device", "cpu", "--lengths", "5,11,1,8"]

UNPATCHED = ("--unpatched", "--form", "default_cache")


def run(*args):
    return CliRunner().invoke(app, ["verify", *SMALL, *args])


@pytest.mark.sampled(3)  # patches/batch/ holds what a patched model finds in each
@pytest.mark.parametrize("form", FORMS)
def test_patched_model_passes_in_every_form(form):
    result = run("--backend", "sdpa", "--form", form, "--json")
    assert result.exit_code == 0, result.output
    (answer,) = json.loads(result.stdout)
    assert answer["isolated"]
    assert (answer["attention"], answer["form"], answer["lengths"]) == ("sdpa", form, [5, 11, 1, 8])
    report = answer["report"]
    assert (report["num_docs"], report["layers"], report["gradients"]) == (4, 2, "bits")
    assert not report["training"]


@pytest.mark.parametrize(
    ("model", "form", "code"),
    [
        ("qwen3", "position_ids", 0),
        ("qwen3", "document_ids", 1),
        ("qwen3_5_text", "position_ids", 1),
        ("qwen3_5_text", "cu_seq_lens", 2),  # transformers needs a package for it
    ],
)
def test_unpatched_model_leaks_where_a_plain_one_does_by_hand(model, form, code):
    result = run("--unpatched", "--form", form, "--model", model, "--json")
    assert result.exit_code == code, result.output
    if code == 2:
        assert "can't keep packed sequences apart" in result.output
    else:
        assert json.loads(result.stdout)[-1]["isolated"] == (code == 0)


def test_leak_is_exit_code_1_and_a_sentence():
    result = run(*UNPATCHED)
    assert result.exit_code == 1, result.output
    text = " ".join(result.output.split())
    assert "1 → 2, forward, layer 0, attention" in text
    assert "document 1 (tokens 5 to 15) leaks into document 2 (tokens 16 to 16)" in text
    result = run(*UNPATCHED, "--json")
    assert result.exit_code == 1
    (answer,) = json.loads(result.stdout)
    assert not answer["isolated"]
    assert (answer["leak"]["module"], answer["leak"]["layer"]) == ("model.layers.0.self_attn", 0)


def test_attention_of_transformers_is_named_as_everywhere():
    """It takes the documents' numbers for a mask of ones."""
    result = run("--backend", "transformers:eager", "--form", "document_ids", "--json")
    assert result.exit_code == 1, result.output
    (answer,) = json.loads(result.stdout)
    assert answer["attention"] == "transformers:eager"
    result = run("--backend", "transformers:spda")
    assert (result.exit_code, "spda" in result.output) == (2, True)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_leak_is_shown_when_a_later_model_fails(monkeypatch, form):
    from flexvarlen.verify.isolation import command

    build = command.build_model

    def fails_later(name, **options):
        if name == "llama":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(name, **options)

    monkeypatch.setattr(command, "build_model", fails_later)
    result = run(*UNPATCHED, "--model", "llama", *form)
    assert result.exit_code == 2, result.output
    assert "leaks into document 2 (tokens 16 to 16)" in " ".join(result.output.split())
    assert "OutOfMemoryError: CUDA out of memory" in result.output


def test_an_error_in_the_table_is_a_sentence(monkeypatch):
    def broken(answers, width):
        raise KeyError("column")

    monkeypatch.setattr("flexvarlen.verify.isolation.command.table_of", broken)
    result = run("--backend", "sdpa")
    assert result.exit_code == 2, result.output
    assert "KeyError: 'column'" in result.output


def test_names_of_transformers_are_those_of_our_backends():
    result = run("--backend", "flash_attention_2")
    assert result.exit_code == 2
    assert "fa2 needs a CUDA GPU, got cpu" in result.output


def test_leaking_backend_of_ours_fails_the_command(monkeypatch):
    plant(monkeypatch, leak)
    result = run("--backend", "sdpa")
    assert result.exit_code == 1, result.output
    assert "report this to flexvarlen" in " ".join(result.output.split())


def test_leaking_scan_of_ours_is_to_be_reported(monkeypatch):
    def over_all_documents(run, documents, rows, like, of_state, *, why):
        return run(None, False, *rows)[0]

    monkeypatch.setattr(layer_functions, "_loop_over_documents", over_all_documents)
    result = run("--backend", "sdpa", "--model", "qwen3_5_text")
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert "Qwen3_5GatedDeltaNet, linear attention" in said
    assert "report this to flexvarlen" in said


def test_options_reach_the_check():
    result = run("--backend", "sdpa", "--train", "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    (answer,) = json.loads(result.stdout)
    assert answer["report"]["training"]


def test_backend_without_a_backward_says_so(monkeypatch):
    """As flex on the CPU, whose kernels take longer to compile than what this looks at."""
    refusal = "sdpa has no backward on the CPU"
    monkeypatch.setattr("flexvarlen.attention.choose._choices", {})  # it was asked before
    monkeypatch.setattr(SdpaBackend, "why_not", lambda _, call: refusal * call.needs_grad or None)
    result = run("--backend", "sdpa")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert f"gradients were not tested: {refusal}" in text


def test_default_lengths_are_those_of_the_help():
    """One crosses the boundary of two blocks of 128 tokens."""
    result = CliRunner().invoke(app, ["verify", "--help"])
    assert ",".join(map(str, LENGTHS)) in result.output
