"""The command line: exit codes, sentences, what it writes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from flexvarlen import cli
from flexvarlen._version import __version__
from flexvarlen.cli import app, console
from flexvarlen.cli.console import progress_bar
from flexvarlen.report.records import read_records
from flexvarlen.verify.compare.report import BASELINE
from tests.planted import plant
from tests.verify.planted import leak, raising

pytestmark = pytest.mark.usefixtures("timed_briefly")

SMALL = ["compare", "--model", "qwen3", "--backend", "sdpa", "--tokens", "64", "--device", "cpu"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def run(out, tmp_path):
    """Compare on a short text: Python's help topics take a second to tokenize."""
    text = tmp_path / "own.txt"
    text.write_text("\f".join(f"document {i} " * (i + 1) for i in range(9)))

    def run(*args, files=("--text", str(text))):
        return CliRunner().invoke(app, [*SMALL, *args, *files, "--out", str(out)])

    return run


def records_in(out):
    return read_records([out / "records.jsonl"])


def option_names():
    found, commands = set(), [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        options = [x for x in command.params if x.param_type_name == "option"]
        found |= {name for x in options for name in (*x.opts, *x.secondary_opts)}
    return found


def test_every_option_has_a_name_of_its_own_that_no_release_of_typer_changes():
    """Without a name, typer 0.27 names an option with a parser after its metavar: --TOKENS."""
    found = option_names()
    assert {"--tokens", "--no-train", "--cases", "--fail-above"} <= found
    assert {name for name in found if not re.fullmatch(r"--[a-z][a-z-]*", name)} == set()
    for file in Path(cli.__file__).parent.glob("*.py"):
        calls = [x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Call)]
        options = [x for x in calls if ast.unparse(x.func) == "typer.Option"]
        assert [ast.unparse(x) for x in options if not x.args] == [], file.name


def test_an_option_of_several_commands_has_one_spelling():
    """A name in the plural is another spelling of an option that a command beside it has."""
    found = option_names()
    assert "--backend" in found
    assert {name for name in found if f"{name}s" in found} == set()


@pytest.mark.parametrize(
    "command", ["compare", "drift model", "drift rollout", "bench all", "tune", "verify"]
)
def test_help_shows_every_default(command):
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    result = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=100)
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())
    helps = [x.help for x in found.params if "[default:" in (x.help or "")]
    assert helps
    for text in helps:
        assert text.partition("[default:")[2] in shown


def test_compare_prints_a_verdict_and_writes_three_files(run, out):
    result = run(files=())
    assert result.exit_code == 0, result.output
    last = result.stdout.strip().splitlines()[-1]
    assert last == "Right, and no document leaks: sdpa on qwen3 tiny."
    assert result.stdout.index("backend ") < result.stdout.index("Written: ")
    written = sorted(path.name for path in (out).iterdir())
    assert written == ["compare.png", "records.jsonl", "table.md"]
    records = records_in(out)
    assert [record.case["tokens"] for record in records] == [64, 64]
    assert records[1].measures["passes"] == "forward+backward"
    assert "pydoc" in records[1].case["source"]


@pytest.fixture
def _no_pictures(monkeypatch):
    """matplotlib takes longer than what a test looks at."""
    monkeypatch.setattr("flexvarlen.verify.compare.figure.draw", lambda *args: args[1])


@pytest.mark.usefixtures("_no_pictures")
def test_records_of_the_first_model_are_kept_when_the_second_fails(run, out, monkeypatch):
    from flexvarlen.verify import compare as package

    right = package.compare

    def fails_later(model, *args, **options):
        if options["name"] == "llama tiny":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(model, *args, **options)

    monkeypatch.setattr(package, "compare", fails_later)
    result = run("--model", "llama")
    assert result.exit_code == 2
    assert "OutOfMemoryError: CUDA out of memory" in result.output
    assert "Traceback" not in result.output
    records = records_in(out)
    assert {record.case["model"] for record in records} == {"qwen3 tiny"}


@pytest.mark.usefixtures("_no_pictures")
def test_ctrl_c_keeps_what_was_checked_until_then(run, out, monkeypatch):
    plant(monkeypatch, raising(KeyboardInterrupt))
    result = run("--backend", "reference,sdpa", "--model", "llama")
    assert result.exit_code == 130, result.output
    assert "Stopped by Ctrl-C: these are the results so far." in result.output
    records = records_in(out)
    names = [(record.case["model"], record.case["variant"]) for record in records]
    assert names == [("qwen3 tiny", BASELINE), ("qwen3 tiny", "reference")]
    assert records[1].measures["verdict"] == "right"
    assert "| reference | right |" in (out / "table.md").read_text()


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize("stopped", [False, True])
def test_run_that_measured_nothing_leaves_results_as_they_were(run, out, monkeypatch, stopped):
    if stopped:
        monkeypatch.setattr("flexvarlen.verify.models.build_model", raising(KeyboardInterrupt))
    files = [out / name for name in ("records.jsonl", "table.md")]
    files[0].parent.mkdir()
    for file in files:
        file.write_text("")
    result = run("--backend", "fa3")
    assert result.exit_code == (130 if stopped else 2), result.output
    assert "Nothing was measured" in result.output
    assert [file.read_text() for file in files] == ["", ""]


@pytest.mark.usefixtures("_no_pictures")
def test_own_text_and_options_reach_the_records_each_of_which_is_written_once(run, out):
    result = run("--model", "llama", "--no-train", "--dtype", "bf16", "--seed", "5")
    assert result.exit_code == 0, result.output
    records = records_in(out)
    assert len(records) == 4  # two models, each alone and on one backend
    assert "llama tiny" in (out / "table.md").read_text()
    case = records[1].case
    assert (case["dtype"], case["seed"]) == ("bfloat16", 5)
    assert records[1].measures["passes"] == "forward"
    assert "own.txt" in case["source"]


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 200), ("0", 140), (None, 140)])
def test_a_pipe_is_as_wide_as_columns_says(columns, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    for stderr in (False, True):
        assert console.console_of(stderr=stderr).width == width


def test_in_a_pipe_progress_is_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 9.0, 10.5, 12.0, 21.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    with progress_bar("llama", left=True) as show:
        for done in range(5):
            show(done, 5, f"step [{done}]")
    written = capsys.readouterr()
    assert [line.partition(" s  ")[2] for line in written.err.splitlines()] == [
        "2 of 5 done, llama: step [2]",
        "4 of 5 done, llama: step [4]",
    ]
    assert written.out == ""


def test_the_module_runs_and_says_its_version():
    found = subprocess.run(
        [sys.executable, "-m", "flexvarlen", "--version"], stdout=subprocess.PIPE, text=True
    )
    assert found.stdout == f"flexvarlen {__version__}\n"


def test_help_and_a_mistyped_command_import_torch_or_matplotlib():
    code = (
        "import sys\nfrom flexvarlen.cli import main\n"
        "for sys.argv[1:], code in ((['--help'], 0), (['comapre'], 2)):\n"
        "    try: main()\n    except SystemExit as end: assert end.code == code\n"
        "assert not {'torch', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("_no_pictures")
def test_leaking_backend_fails_the_command(run, monkeypatch):
    plant(monkeypatch, leak)
    result = run()
    assert result.exit_code == 1, result.output
    assert "Not right: qwen3 tiny sdpa: leaks" in result.output


def test_tune_times_training_and_inference(monkeypatch, tmp_path):
    import flexvarlen as fv
    from flexvarlen import env
    from flexvarlen.attention.auto import decide, measure

    monkeypatch.setenv(env.CACHE, str(tmp_path))
    monkeypatch.setitem(decide.CANDIDATES, "cpu", ("sdpa", "reference"))
    monkeypatch.setattr(measure, "BUDGET_S", 0.01)
    options = ["--tokens", "256", "--mean", "40", "--heads", "4/2", "--head-dim", "16"]
    result = CliRunner().invoke(app, ["tune", *options])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert text.count("4/2 heads of 16") == 2
    assert text.count("total_tokens=256") == 2
    assert text.count(": measured on this machine") == 2
    for name in fv.BACKENDS:
        assert text.count(f" {name} ") >= 2, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU there is something to time")
def test_tune_on_a_cpu_says_that_nothing_is_to_be_tuned():
    result = CliRunner().invoke(app, ["tune", "--tokens", "256"])
    assert result.exit_code == 2
    assert result.output.startswith("tune times the kernels of a CUDA device, but found none")


def test_no_lengths_of_typical_rows_fill_them():
    from flexvarlen.cli.machine import TYPICAL_ROWS, log_normal_lengths

    for tokens, mean in (*TYPICAL_ROWS, (1, 1), (10, 1000), (50, 1)):
        lengths = log_normal_lengths(tokens, mean)
        assert sum(lengths) == tokens
        assert min(lengths) >= 1
    assert 0.7 * 2048 < 131_072 / len(log_normal_lengths(131_072, 2048)) < 1.4 * 2048
