"""The benchmark on a tiny model: rows are honest, wrong variants are never timed, tables render."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import flexvarlen as fv
import flexvarlen.rows as row_module
from flexvarlen.attention import choose
from flexvarlen.bench import report
from flexvarlen.bench.model import packings as model
from flexvarlen.bench.model import packings_run as model_run
from flexvarlen.bench.model.accuracy import Answer, Errors, document_errors, errors_of
from flexvarlen.bench.model.geometries import GEOMETRIES, Case, log_normal_lengths
from flexvarlen.bench.model.packings_tables import packings_groups, packings_section
from flexvarlen.bench.model.variants import make_variant
from flexvarlen.plotstyle import STYLES, style_of
from flexvarlen.rows import Row, append_row, read_rows, run_environment


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    names = ["transformers:sdpa", "transformers:flash_attention_2", "flex", "sdpa"]
    torch._dynamo.reset()
    model.main(
        ["--quick", "--device", "cpu", "--out", str(path), "--commit", "x", "--variants", *names]
    )
    return {row.case["variant"]: row for row in read_rows([path])}


def test_every_variant_has_its_row(rows):
    assert set(rows) == {
        "transformers:sdpa",
        "transformers:flash_attention_2",
        "flex",
        "sdpa",
    }
    assert rows["transformers:sdpa"].status == rows["sdpa"].status == "ok"
    assert rows["flex"].status == "unsupported"
    assert "backward" in rows["flex"].reason
    assert rows["transformers:flash_attention_2"].status == "unsupported"
    assert Case.of(rows["sdpa"].case).tokens == 256
    assert rows["sdpa"].environment["torch"] == torch.__version__


def test_the_commit_that_was_given_wins_over_a_stale_checkout(rows, monkeypatch):
    where = rows["sdpa"].environment
    assert (where["git_commit"], where["git_dirty"]) == ("x", None)
    assert "commit x:" in packings_section(list(rows.values()))
    stale = {"git_commit": "0123456789", "git_dirty": True}
    monkeypatch.setattr(row_module, "environment", lambda device: dict(stale))
    given, found = (run_environment(torch.device("cpu"), commit) for commit in ("new", None))
    assert (given["git_commit"], given["git_dirty"]) == ("new", None)
    assert stale.items() <= found.items()
    assert "started_utc" in found


def test_ours_compiles_once_and_is_right(rows):
    m = rows["sdpa"].measures
    assert (m["graph_breaks"], m["graphs"]) == (0, 1)
    assert (m["recompilations"], m["other_packings"]) == (0, 2)
    assert m["compilations_while_timing_all"] == 0
    assert m["error"] <= 2 * (m["peer_error"] + torch.finfo(torch.float32).eps)
    assert m["error_last_packing"] < 1e-5
    assert m["error_worst_document"] > m["error"]
    assert m["peer_error_worst_document"] > m["peer_error"]
    assert m["ms_p20"] <= m["ms_p50"] <= m["ms_p80"]
    assert m["eager_ms_p50"] > 0
    assert m["compile_s"] > 0


def test_what_attends_is_what_the_graph_took(tmp_path, monkeypatch, capsys):
    """From position_ids a graph's sizes are not the layout's: "auto" may take another kernel."""
    decide = choose.decision_for

    def by_mode(call, sizes, mask, *args, **options):
        found = decide(call, sizes, mask, *args, **options)
        return found if mask is not None else dataclasses.replace(found, compiled="reference")

    monkeypatch.setattr(choose, "decision_for", by_mode)
    choose.clear_cache()
    out = tmp_path / "rows.jsonl"
    arguments = ["--quick", "--device", "cpu", "--out", str(out), "--packings", "1"]
    model.main([*arguments, "--variants", "auto@position_ids"])
    choose.clear_cache()
    (row,) = read_rows([out])
    assert row.status == "ok"
    assert row.measures["attends"] == "reference"
    assert row.measures["attends_eager"] == "sdpa"
    assert "from position_ids (reference; eagerly sdpa)" in packings_section([row])


def test_a_variant_that_leaks_is_wrong_and_not_timed(tmp_path, monkeypatch):
    def leaking(name, base, sizes):
        variant = make_variant(name, base, sizes)
        return dataclasses.replace(variant, inputs=lambda lengths: {"use_cache": False})

    monkeypatch.setattr(model_run, "make_variant", leaking)
    out = tmp_path / "rows.jsonl"
    model.main(["--quick", "--device", "cpu", "--out", str(out), "--variants", "transformers:sdpa"])
    (row,) = read_rows([out])
    assert row.status == "wrong"
    assert "outputs" in row.reason
    assert "ms_p50" not in row.measures
    assert "wrong" in packings_section([row])


def test_a_run_that_ends_among_the_other_packings_keeps_what_was_timed(tmp_path, monkeypatch):
    def killed(self, live):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_run.Run, "other_packings", killed)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        model.main(
            ["--quick", "--device", "cpu", "--out", str(out), "--variants", "sdpa", "reference"]
        )
    rows = read_rows([out])
    assert [(row.case["variant"], row.status) for row in rows] == [
        ("sdpa", "ok"),
        ("reference", "ok"),
    ]
    assert all(row.measures["ms_p50"] > 0 for row in rows)
    (line,) = [
        x for x in packings_section(rows).splitlines() if x.startswith("| flexvarlen `sdpa`")
    ]
    assert "| 0 | none run |" in line  # graph breaks; other packings
    assert "none run: time was up before other packings ran" in packings_section(rows)


def test_a_variant_that_keeps_the_first_packing_is_wrong(tmp_path, monkeypatch):
    def stale(name, base, sizes):
        variant = make_variant(name, base, sizes)
        first = log_normal_lengths(256, 32, 1.0, seed=0)
        return dataclasses.replace(variant, inputs=lambda lengths: variant.inputs(first))

    monkeypatch.setattr(model_run, "make_variant", stale)
    out = tmp_path / "rows.jsonl"
    model.main(["--quick", "--device", "cpu", "--out", str(out), "--variants", "transformers:sdpa"])
    (row,) = read_rows([out])
    assert row.status == "wrong"
    assert "another packing" in row.reason


def test_variants_begun_too_late_are_skipped(tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["--quick", "--device", "cpu", "--out", str(out), "--start-until", "0"]
    model.main([*arguments, "--variants", "sdpa"])
    (row,) = read_rows([out])
    assert row.status == "skipped"


def test_unknown_variant_raises():
    with pytest.raises(ValueError, match="variant must be one of"):
        make_variant("flash", torch.nn.Linear(1, 1), None)


def test_nan_is_wrong():
    peer = Errors(1e-3, 1e-3)
    assert Errors(float("nan"), 1e-3).why_wrong(peer, torch.bfloat16) is not None
    assert Errors(1e-3, float("nan")).why_wrong(peer, torch.bfloat16) is not None
    assert Errors(1e-3, 1e-3).why_wrong(peer, torch.bfloat16) is None


def test_a_short_documents_leak_is_seen_in_a_long_row():
    """8 rows of 8,192: in the norm of all they are a thirtieth."""
    torch.manual_seed(0)
    lengths = (4000, 8, 4184)
    oracle = Answer(torch.randn(8192, 16), {}, lengths)

    def off(share: float, rows: slice = slice(None)) -> Errors:
        outputs = oracle.outputs.clone()
        outputs[rows] += share * torch.randn_like(outputs[rows])
        return errors_of(Answer(outputs, {}), oracle)

    peer = off(0.01)
    assert peer.why_wrong(peer, torch.bfloat16) is None
    leak = off(0.5, slice(4000, 4008))
    assert leak.outputs < 2 * peer.outputs < leak.worst_document
    reason = leak.why_wrong(peer, torch.bfloat16)
    assert "of document 1 is" in reason
    assert "1 of 3 documents" in reason
    assert off(float("nan"), slice(4000, 4008)).why_wrong(peer, torch.bfloat16) is not None
    assert math.isnan(Errors(0.0, None, (1.0, float("nan"), 2.0)).worst_document)
    told = document_errors(oracle.outputs[:4008] * 1.25, oracle.outputs[:4008], lengths[:2])
    assert told == pytest.approx((0.25, 0.25))
    with pytest.raises(ValueError, match="peer must hold 3 documents"):
        leak.why_wrong(Errors(0.01, None), torch.bfloat16)


def test_a_documents_peer_that_is_right_by_chance_condemns_nothing():
    peer = Errors(1e-2, None, (0.0, 1e-2))
    assert Errors(1e-2, None, (3e-2, 1e-2)).why_wrong(peer, torch.bfloat16) is None
    assert Errors(1e-2, None, (1e-2, 4e-2)).why_wrong(peer, torch.bfloat16) is not None
    harder = Errors(1e-2, None, (5e-2, 1e-2))  # a document that any kernel gets worse
    assert Errors(1e-2, None, (8e-2, 1e-2)).why_wrong(harder, torch.bfloat16) is None


def test_lengths_fill_the_row_and_repeat_with_the_seed():
    lengths = log_normal_lengths(32_768, 2048, 1.0, seed=0)
    assert sum(lengths) == 32_768
    assert min(lengths) >= 1
    assert lengths == log_normal_lengths(32_768, 2048, 1.0, seed=0)
    assert lengths != log_normal_lengths(32_768, 2048, 1.0, seed=1)
    many = log_normal_lengths(2**24, 2048, 1.0, seed=0)
    assert 0.9 < sum(many) / len(many) / 2048 < 1.1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 0.596e9),
        ("qwen3-1.7b", 1.72e9),
        ("qwen3-4b", 4.02e9),
        ("llama-3.2-1b", 1.24e9),
        ("llama-3.1-8b", 8.03e9 - 128_256 * 4096),  # the head is not the base model's
    ],
)
def test_geometries_have_the_published_number_of_parameters(name, parameters):
    from transformers import AutoModel

    with torch.device("meta"):
        built = AutoModel.from_config(GEOMETRIES[name](None))
    assert sum(p.numel() for p in built.parameters()) == pytest.approx(parameters, rel=0.01)


def test_the_last_of_equal_rows_wins(tmp_path):
    path = tmp_path / "rows.jsonl"
    for value in (1, 2):
        append_row(path, Row("packings", {"variant": "a"}, "ok", None, {"ms_p50": value}))
    append_row(path, Row("packings", {"variant": "b"}, "oom", "too big"))
    found = read_rows([path])
    assert [row.case["variant"] for row in found] == ["a", "b"]
    assert found[0].measures == {"ms_p50": 2}
    assert len(path.read_text().splitlines()) == 3


def test_report_prints_writes_and_draws(rows, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    for row in rows.values():
        append_row(path, row)
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- bench:packings begin -->\nstale table\n<!-- bench:packings end -->\nafter\n"
    )
    told = report.report([path], pages=[readme], figures=tmp_path / "figures")
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "stale" not in text
    assert "| flexvarlen `sdpa` |" in text
    assert "unsupported (1)" in text
    assert "float32, forward+backward" in told
    (png,) = (tmp_path / "figures").glob("*.png")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text",
    ["", "<!-- bench:x end --><!-- bench:x begin -->", "<!-- bench:x begin -->" * 2],
)
def test_markers_must_be_there_once_and_in_order(text):
    with pytest.raises(ValueError, match="once each"):
        report.replace_between_markers(text, "x", "body")


def test_runs_are_never_mixed_in_one_table():
    where = {"gpu": "G", "started_utc": "1"}
    case = {"variant": "flex", "geometry": "g"}
    one = Row("packings", case, "oom", "", {}, where)
    other = dataclasses.replace(one, environment=where | {"started_utc": "2"})
    assert len(packings_groups([one, other])) == 2


def test_every_variant_has_a_style():
    assert style_of("flex@position_ids") is STYLES["flex"]
    with pytest.raises(ValueError, match="plotstyle"):
        style_of("unheard-of")
    beside = [n for n in STYLES if n in (*fv.BACKENDS, "auto") or n.startswith("transformers:")]
    drawn = [(STYLES[name].color, STYLES[name].filled) for name in beside]
    assert len(set(drawn)) == len(drawn)
