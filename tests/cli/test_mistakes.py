"""A mistake in an option is one sentence that names it, and exit code 2, before any work."""

import pytest
from typer.testing import CliRunner

from flexvarlen.attention.auto import table
from flexvarlen.cli import app

MODELS = ("compare", "verify", "drift model")
BACKENDS = (*MODELS, "drift op")
RECORDS = ("compare", "drift model", "drift op")
ROLLOUT = ["--model", "qwen3", "--responses"]

MISTAKES = [
    (MODELS, ["--model", "lama"], "--model must be"),
    (MODELS, ["--model", "qwen3", "--model", "no/such"], "--model must be a folder or hub name"),
    (MODELS, ["--model", "llama:9b"], "size of llama must be"),
    (MODELS, ["--model", "qwen3:1.7b@0"], "at least 1"),
    (["verify"], ["--unpatched", "--model", "no/such"], "--model must be a folder or hub name"),
    (BACKENDS, ["--backend", "flsh"], "--backend must be"),
    (BACKENDS, ["--dtype", "int8"], "--dtype must be"),
    (["drift op"], ["--dtype", "float32,int8"], "--dtype must be"),
    (BACKENDS, ["--device", "tpu"], "--device must be"),
    (["compare"], ["--device", "cuda:99"], "--device must be"),
    (["compare", "drift model"], ["--text", "no-such-file"], "--text must name"),
    (["compare"], ["--text", str(table.PATH)], "--text must be a JSON object on each line"),
    (["compare"], ["--tokens", "8x"], "at least 2 tokens"),
    (RECORDS, ["--out", __file__], "--out must be a writable file"),
    (["compare"], ["--out", f"{__file__}/below"], "--out must be a writable file"),
    (["compare"], ["--out", "/proc/none"], "--out must be a writable file"),
    (["drift op"], ["--suite", "gpu"], "--suite must be one of"),
    (["drift op"], ["--comparisons", "exat"], "--comparisons must be all, or among"),
    (["drift model"], ["--comparisons", "packed"], "--comparisons must be all, or among"),
    (["drift op"], ["--fail-above", "relative=-1"], "--fail-above must be MEASURE=VALUE"),
    (["drift rollout"], [*ROLLOUT, "no-such-file"], "--responses must name a readable file"),
    (["drift rollout"], [*ROLLOUT, __file__], "--responses must have a JSON object on each line"),
    (["verify"], ["--form", "cu_seqlens"], "--form must be one of"),
    (
        ["verify"],
        ["--unpatched", "--form", "packed_layout"],
        "--form must be one of position_ids, cu_seq_lens, both, default_cache",
    ),
    (["verify"], ["--lengths", "5,0"], "--lengths must be"),
    (["verify"], ["--lengths", "5"], "two or more comma-separated numbers"),
    (["tune"], ["--heads=32"], "--heads must be"),
    (["tune"], ["--heads=8/3"], "--heads must be"),
    (["tune"], ["--heads=8/0"], "--heads must be"),
    (["tune"], ["--heads=a/b"], "--heads must be"),
    (["tune"], ["--heads=-8/2"], "--heads must be"),
    (["tune"], ["--heads=0/2"], "--heads must be"),
]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [(command, *mistake) for commands, *mistake in MISTAKES for command in commands],
)
def test_mistake_costs_work_or_ends_with_a_traceback(
    command, options, words, monkeypatch, tmp_path
):
    for module in ("models", "isolation.command"):
        monkeypatch.setattr(f"flexvarlen.verify.{module}.build_model", None)
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in options or command == "tune" else ["--device", "cpu"]
    result = CliRunner().invoke(app, [*command.split(), *options, *device])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
