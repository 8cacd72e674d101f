"""The command line: exit codes, sentences, what it writes."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.cli import app
from flexvarlen.cli_console import progress_bar
from flexvarlen.equivalence.report import read_rows

SMALL = ["compare", "--model", "qwen3", "--backends", "sdpa", "--tokens", "64", "--device", "cpu"]


@pytest.fixture
def run(tmp_path):
    def run(*args):
        return CliRunner().invoke(
            app, [*args, *(["--out", str(tmp_path / "out")] * ("compare" in args))]
        )

    return run


def test_compare_prints_a_verdict_and_writes_three_files(run, tmp_path):
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    assert "sdpa right, no leak" in result.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["compare.png", "rows.jsonl", "table.md"]
    rows = read_rows(tmp_path / "out" / "rows.jsonl").rows
    assert [row.tokens for row in rows] == [64, 64]
    assert rows[1].passes == "forward+backward"


def test_without_a_terminal_each_step_is_a_line_of_standard_error(capsys):
    with progress_bar(left=True) as show:
        for done, what in enumerate(["first [0]", "second"]):
            show(done, 2, what)
        show(2, 2, "all")
    written = capsys.readouterr()
    assert [line.partition(" s  ")[2] for line in written.err.splitlines()] == [
        "1 of 2: first [0]",
        "2 of 2: second",
    ]
    assert written.out == ""


def test_own_text_and_options_reach_the_rows(run, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("\f".join(f"document {i} " * (i + 1) for i in range(9)))
    result = run(*SMALL, "--text", str(text), "--no-train", "--dtype", "bfloat16", "--seed", "5")
    assert result.exit_code == 0, result.output
    row = read_rows(tmp_path / "out" / "rows.jsonl").rows[1]
    assert (row.passes, row.dtype, row.seed) == ("forward", "bfloat16", 5)
    assert "pydoc" not in row.source


def test_leaking_backend_fails_the_command(run, monkeypatch):
    attend = SdpaBackend.attend

    def leaky(self, q, k, v, *rest):
        out, lse = attend(self, q, k, v, *rest)
        return out + v[:1].mean(), lse

    monkeypatch.setattr(SdpaBackend, "attend", leaky)
    result = run(*SMALL)
    assert result.exit_code == 1, result.output
    assert "not right: sdpa (leaks)" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "lama"], "model must be"),
        (["--backends", "flsh"], "backends must be"),
        (["--dtype", "int8"], "dtype must be"),
        (["--device", "tpu"], "device must be"),
        (["--device", "cuda:99"], "device must be"),
        (["--text", "no-such-file"], "text must name"),
        (["--out", __file__], "out must be a folder"),
        (["--out", f"{__file__}/below"], "out must be a folder"),
        (["--out", "/proc/none"], "out must be a folder"),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(args, words):
    result = CliRunner().invoke(app, ["compare", *args])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_doctor_names_every_backend_and_the_decoding_path():
    import flexvarlen as fv

    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in (*fv.BACKENDS, "torch", "transformers", "Decoding"):
        assert name in result.output
    text = " ".join(result.output.split())
    reason = fv.why_not("fa2", needs_grad=False)
    assert reason is None or reason.split(";")[0][:30] in text


def test_importing_the_command_brings_no_plotting_or_comparison_along():
    heavy = ["matplotlib", "flexvarlen.equivalence"]
    code = f"import sys, flexvarlen.cli; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_explain_leaves_out_a_backend_or_the_reason():
    import flexvarlen as fv

    options = ["--explain", "--tokens", "256", "--mean", "40", "--heads", "4/2", "--head-dim", "16"]
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    told = text.partition("Decoding")[2]
    assert told.count("4/2 heads of 16") == 2  # training and running
    assert told.count("total_tokens=256") == 2
    assert told.count("auto takes ") == 2
    for name in fv.BACKENDS:
        assert told.count(f" {name} ") >= 2, name


def test_doctor_times_unasked(monkeypatch):
    import flexvarlen.doctor

    def explained(*_args, **_options):
        pytest.fail("explained without --explain")

    monkeypatch.setattr(flexvarlen.doctor, "explanations", explained)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("heads", ["32", "8/3", "8/0", "a/b", "-8/2", "0/2"])
def test_bad_heads_of_doctor_reach_a_kernel(heads):
    result = CliRunner().invoke(app, ["doctor", "--explain", f"--heads={heads}"])
    assert result.exit_code == 2
    assert "heads must be" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_no_lengths_of_typical_rows_fill_them():
    from flexvarlen.doctor import TYPICAL_ROWS, log_normal_lengths

    for tokens, mean in (*TYPICAL_ROWS, (1, 1), (10, 1000), (50, 1)):
        lengths = log_normal_lengths(tokens, mean)
        assert sum(lengths) == tokens
        assert min(lengths) >= 1
    assert 0.7 * 2048 < 131_072 / len(log_normal_lengths(131_072, 2048)) < 1.4 * 2048
