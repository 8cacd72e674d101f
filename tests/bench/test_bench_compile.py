"""Compile time and small inference on a tiny model: right before timed, each row in a table."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.auto import decide as auto
from flexvarlen.bench import report
from flexvarlen.bench.model import (
    compile_time,
    compile_time_child,
    small_inference,
    small_inference_inputs,
    utilisation,
)
from flexvarlen.bench.model.compile_time_child import Child
from flexvarlen.bench.model.geometries import GEOMETRIES, Case
from flexvarlen.bench.model.packings_tables import packings_section
from flexvarlen.bench.model.utilisation import noting_auto, peak_tflops, step_tflop
from flexvarlen.bench.model.variants import DEFAULT_VARIANTS
from flexvarlen.plotstyle import style_of
from flexvarlen.rows import Row, append_row, read_rows


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


QUICK = ["--quick", "--device", "cpu", "--compiler", "aot_eager", "--commit", "x"]


# ---- compile time ----


def child(*more):
    """Traced by Dynamo and not compiled further: that is enough to count and to be right."""
    return Child(compile_time.parse([*QUICK, "--backend", "sdpa", "--compiler", "eager", *more]))


@pytest.mark.parametrize(("scope", "graphs"), [("whole", 1), ("layer", 4), ("decoder", 1)])
def test_a_compilation_is_timed_apart_from_the_steps_after_it(scope, graphs):
    found = child("--scope", scope).compile()
    assert (found["graphs"], found["graph_breaks"], found["graphs_later"]) == (graphs, 0, 0)
    assert found["compile_wall_s"] == found["first_step_s"] - found["step_s"]
    assert math.isfinite(found["eager_start_s"])
    assert found["compile_wall_s"] > found["step_s"] > 0


@pytest.mark.parametrize("scope", compile_time.SCOPES)
def test_transformers_own_attention_is_timed_too(scope):
    found = child("--scope", scope, "--backend", "transformers:sdpa").compile()
    assert found["graphs"] >= 1
    assert found["compile_wall_s"] > found["step_s"] > 0


def test_layers_that_ran_eagerly_are_no_compile_time(monkeypatch):
    """accelerate before 1.15, and patch_model first: each layer keeps its eager forward."""
    nothing = {"layer": lambda model, _: (model, "nothing at all")}
    monkeypatch.setattr(compile_time_child, "BY_LAYER", compile_time_child.BY_LAYER | nothing)
    one = child("--scope", "layer", "--repeats", "1")
    found = one.compile()
    assert found["status"] == "failed"
    assert "nothing was compiled (nothing at all)" in found["reason"]
    steady = one.steady()
    assert steady["layer"]["status"] == "failed"
    assert "ms_p50" not in steady["layer"]
    assert steady["whole"]["repeats"] == 1


def test_wrong_gradients_are_not_timed(monkeypatch):
    one = child("--repeats", "1")
    step = one.step

    def forgetful(call):
        outputs = step(call)
        one.base.layers[0].self_attn.q_proj.weight.grad.mul_(1.1)
        return outputs

    monkeypatch.setattr(one, "step", forgetful)
    found = one.steady()
    for scope in compile_time.SCOPES:
        assert found[scope]["status"] == "wrong"
        assert "gradients" in found[scope]["reason"]


def test_all_ways_are_right_before_they_are_timed(monkeypatch):
    one = child("--repeats", "2")
    found = one.steady()
    for scope in compile_time.SCOPES:
        assert found[scope]["error"] <= 2 * (found[scope]["peer_error"] + 2e-7)
        assert found[scope]["repeats"] == 2
    torch._dynamo.reset()
    one.inputs = {"packed_layout": fv.PackedLayout.from_lengths([256])}  # everything leaks
    found = one.steady()
    assert {found[scope]["status"] for scope in compile_time.SCOPES} == {"wrong"}
    assert "ms_p50" not in found["whole"]


def test_every_process_gives_a_row_and_its_cache_is_its_scopes_own(tmp_path, monkeypatch):
    started = []

    def answer(self, part, scope, cache):
        started.append((part, scope, cache.name))
        cache.mkdir(exist_ok=True)
        if part == "resolve":
            return {"backend": "sdpa"}
        timing = {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 3.0, "mfu": 0.5}
        if part == "steady":
            wrong = {"status": "wrong", "reason": "it leaks"}
            return {"whole": timing, "layer": wrong, "decoder": timing}
        assert self.backend == "sdpa"
        how = "accelerate.utils.compile_regions" if scope == "layer" else "torch.compile"
        eager = {"eager_start_s": 4.0} if scope == "whole" else {}  # older rows have none
        return eager | {"compile_wall_s": 9.0, "graphs": 1, "graph_breaks": 0, "how": how}

    monkeypatch.setattr(compile_time.Parent, "child", answer)
    out = tmp_path / "rows.jsonl"
    compile_time.main([*QUICK, "--out", str(out)])
    assert started == [
        ("resolve", "whole", "resolve"),  # what "auto" compiles must not warm a cache
        *[("compile", scope, scope) for scope in compile_time.SCOPES for _ in range(2)],
        ("steady", "whole", "whole"),
    ]
    rows = read_rows([out])
    assert [(row.case["scope"], row.case["part"], row.status) for row in rows] == [
        *[(scope, part, "ok") for scope in compile_time.SCOPES for part in ("cold", "warm")],
        ("layer", "steady", "wrong"),
        ("decoder", "steady", "ok"),
        ("whole", "steady", "ok"),
    ]
    text = report.report([out])
    version = rows[0].environment["accelerate"]
    by = "accelerate.utils.compile_regions" + (f" {version}" if version else "")
    assert (
        "| the whole model (torch.compile) | 9.0 | 9.0 | 4.0 | 4.0 | 1 | 0 | 2.0 (1.0–3.0) | 50% |"
        in text
    )
    assert f"| layer by layer ({by}) | 9.0 | 9.0 | – | – | 1 | 0 | wrong (1) | – |" in text
    assert "(1) it leaks" in text


def test_only_the_named_scopes_are_compiled(monkeypatch):
    started = []

    def answer(self, part, scope, cache):
        started.append((part, scope))
        return {"backend": "sdpa", "how": "torch.compile", "compile_wall_s": 1.0}

    monkeypatch.setattr(compile_time.Parent, "child", answer)
    compile_time.main([*QUICK, "--scopes", "layer"])
    compiled = [("compile", "layer"), ("compile", "layer")]
    assert started == [("resolve", "whole"), *compiled, ("steady", "layer")]


def test_the_steady_part_is_of_the_named_scopes():
    one = child("--scopes", "decoder", "layer", "--repeats", "2")
    assert list(one.steady()) == ["decoder", "layer"]
    assert "--scopes decoder layer" in " ".join(compile_time.forwarded(one.args))


def test_a_process_that_fails_says_why(tmp_path):
    parent = compile_time.Parent(compile_time.parse([*QUICK, "--backend", "unheard-of"]))
    found = parent.child("compile", "whole", tmp_path / "cache")
    assert found["status"] == "failed"
    assert "variant must be one of" in found["reason"]
    parent.args.timeout = 0.01
    assert "not done" in parent.child("compile", "whole", tmp_path / "cache")["reason"]


def test_a_child_gets_the_arguments_of_its_parent():
    args = compile_time.parse(["--quick", "--device", "cpu", "--mean", "99", "--layers", "3"])
    again = compile_time.parse(compile_time.forwarded(args))
    names = ("geometry", "layers", "tokens", "mean", "dtype", "device", "repeats", "seed")
    assert [getattr(again, name) for name in names] == [getattr(args, name) for name in names]


# ---- small inference ----


def small(tmp_path, *variants):
    out = tmp_path / "small.jsonl"
    small_inference.main([*QUICK, "--out", str(out), "--variants", *variants])
    return out, {(row.case["variant"], row.case["mode"]): row for row in read_rows([out])}


def test_small_inference_rows(tmp_path):
    out, rows = small(tmp_path, "auto", "transformers:sdpa", "transformers:flash_attention_2")
    assert {row.status for row in rows.values()} == {"ok", "unsupported"}
    for variant in ("auto", "transformers:sdpa"):
        for mode in ("eager", "compiled"):
            measures = rows[variant, mode].measures
            assert measures["ms_p50"] > 0
            assert measures["compilations_while_timing_all"] == 0
            assert measures["error_other_packing"] < 1e-5
        assert "no CUDA graphs" in rows[variant, "cuda graphs"].reason
    assert rows["auto", "compiled"].measures["attends"] == "sdpa"
    assert rows["auto", "compiled"].measures["graph_breaks"] == 0
    readme = tmp_path / "README.md"
    markers = ["<!-- bench:small-inference begin -->", "<!-- bench:small-inference end -->"]
    readme.write_text("\n".join(markers))
    text = report.report([out], pages=[readme])
    assert "| flexvarlen `auto` (sdpa) | " in readme.read_text()
    assert "4 documents of 128, 64, 40, 24 tokens" in text


def test_defaults_hold_each_sides_other_form():
    ours = {"auto", "auto@position_ids"}
    theirs = {f"transformers:flash_attention_{n}" for n in (2, 3)}
    fast = {f"{name}@cu_seq_lens" for name in theirs}
    assert set(small_inference.DEFAULT_VARIANTS) >= ours | theirs | fast
    assert set(DEFAULT_VARIANTS) >= ours | {"transformers:flash_attention_3@cu_seq_lens"}
    with pytest.raises(ValueError, match="after @"):
        small_inference.main([*QUICK, "--variants", "auto@cu_seq_lens"])


def test_ours_from_position_ids_is_right_and_says_what_ran_in_each_mode(tmp_path):
    out, rows = small(tmp_path, "auto@position_ids", "transformers:flash_attention_3@cu_seq_lens")
    for mode in ("eager", "compiled"):
        measures = rows["auto@position_ids", mode].measures
        assert measures["attends"] == "sdpa"
        assert measures["graph_breaks"] == 0
        assert measures["recompilations"] == 0
        assert rows["transformers:flash_attention_3@cu_seq_lens", mode].status == "unsupported"
    text = report.report([out])
    assert "| flexvarlen `auto`, boundaries from position_ids (sdpa) | " in text
    assert "| transformers `flash_attention_3`, boundaries from cu_seq_lens | " in text


def test_rows_of_other_modes_stay_if_timing_raises(tmp_path, monkeypatch):
    timed = small_inference.time_interleaved

    def second_raises(calls, **options):
        monkeypatch.setattr(small_inference, "time_interleaved", raises)
        return timed(calls, **options)

    def raises(calls, **options):
        raise RuntimeError("CUDA error: out of patience")

    monkeypatch.setattr(small_inference, "time_interleaved", second_raises)
    _, rows = small(tmp_path, "sdpa", "transformers:sdpa")
    for variant in ("sdpa", "transformers:sdpa"):
        assert rows[variant, "eager"].status == "ok"
        assert rows[variant, "compiled"].status == "failed"
        assert "out of patience" in rows[variant, "compiled"].reason
        assert rows[variant, "compiled"].measures["graphs"] > 0


def test_rows_of_a_mode_stay_if_the_run_is_killed(tmp_path, monkeypatch):
    prepare = small_inference.Run.prepare

    def killed(self, variant, mode):
        if mode == "compiled":
            raise KeyboardInterrupt
        return prepare(self, variant, mode)

    monkeypatch.setattr(small_inference.Run, "prepare", killed)
    out = tmp_path / "small.jsonl"
    with pytest.raises(KeyboardInterrupt):
        small_inference.main([*QUICK, "--out", str(out), "--variants", "sdpa"])
    eager, graphs = read_rows([out])
    assert (eager.case["mode"], eager.status) == ("eager", "ok")
    assert (graphs.case["mode"], graphs.status) == ("cuda graphs", "unsupported")  # on the CPU


def test_a_graph_that_keeps_the_first_documents_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(small_inference.Inputs, "fill", lambda self, lengths: None)
    _, rows = small(tmp_path, "sdpa")
    for mode in ("eager", "compiled"):
        row = rows["sdpa", mode]
        assert row.status == "wrong"
        assert row.reason.startswith("other packing")
        assert "ms_p50" not in row.measures


@pytest.mark.parametrize("lengths", [[128, 64, 40, 24], [64, 64], [9], [200]])
def test_the_other_packing_fits_the_same_shapes(lengths):
    other = small_inference.other_packing(lengths)
    assert other != lengths
    assert sum(other) == sum(lengths)
    assert len(other) <= small_inference_inputs.slots_for(lengths)


@pytest.mark.parametrize("lengths", [[128, 64, 40, 24], [64, 64], [9]])
def test_their_fast_form_gets_boundaries_made_ahead_that_fit_both_packings(lengths):
    ids = torch.zeros((1, sum(lengths)), dtype=torch.long)
    inputs = small_inference_inputs.Inputs(ids, lengths, "cu_seq_lens")
    given = inputs.arguments()
    ends, other = given["cu_seq_lens_q"], small_inference.other_packing(lengths)
    assert ends is given["cu_seq_lens_k"]
    assert ends.dtype == torch.int32
    assert ends.tolist()[: len(lengths) + 1] == [0, *itertools.accumulate(lengths)]
    inputs.fill(other)
    assert inputs.arguments()["cu_seq_lens_q"] is ends  # where a graph looks for them
    assert ends.tolist()[: len(other) + 1] == [0, *itertools.accumulate(other)]
    assert set(ends.tolist()[len(other) + 1 :]) <= {sum(lengths)}
    assert given["max_length_q"] == given["max_length_k"] == max(*lengths, *other)


# ---- utilisation ----


def test_a_step_counts_matrix_products_and_unmasked_pairs():
    from transformers import AutoModel

    model = AutoModel.from_config(GEOMETRIES["qwen3-tiny"](2))
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    norms = 2 * (2 * 64 + 2 * 16) + 64
    pairs = 3 * 4 // 2 + 5 * 6 // 2
    attention = 2 * 4 * pairs * 16 * 4
    forward = 2 * (2 * per_layer + norms) * 8 + attention
    assert step_tflop(model, [3, 5], backward=False) * 1e12 == pytest.approx(forward)
    both = 6 * (2 * per_layer + norms) * 8 + 3.5 * attention
    assert step_tflop(model, [3, 5]) * 1e12 == pytest.approx(both)


def test_an_unknown_gpu_has_no_utilisation():
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756.5
    assert peak_tflops("Some GPU", "bfloat16") is None
    assert peak_tflops("NVIDIA RTX A1000", "bfloat16") is None
    assert peak_tflops("NVIDIA H200 MIG 1g.18gb", "bfloat16") is None
    assert peak_tflops(None, "bfloat16") is None
    assert utilisation.utilisation(1.0, 1.0, None) is None


def test_a_longer_name_is_not_taken_for_a_shorter_one():
    assert peak_tflops("NVIDIA H200 NVL", "bfloat16") == 835.5
    assert peak_tflops("NVIDIA GB200", "bfloat16") == 2500.0
    assert peak_tflops("NVIDIA B200", "bfloat16") == 2250.0
    assert peak_tflops("NVIDIA GH200 480GB", "bfloat16") == 989.4
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312.0


def test_layers_that_differ_in_their_causal_mask_alone_are_counted_apart():
    from transformers import AutoModel

    model = AutoModel.from_config(GEOMETRIES["qwen3-tiny"](2))
    causal = step_tflop(model, [8], backward=False)
    model.layers[1].self_attn.is_causal = False
    more = (8 * 8 - 8 * 9 // 2) * 4 * 16 * 4
    assert (step_tflop(model, [8], backward=False) - causal) * 1e12 == pytest.approx(more)


def test_what_auto_takes_is_seen_in_calls_and_in_graphs(monkeypatch):
    layout = fv.PackedLayout.from_lengths([3, 5])
    q = torch.randn(8, 2, 16)
    with noting_auto() as chosen:
        fv.packed_attention(q, q, q, layout)
    assert set(chosen) == {"sdpa"}

    def other(call, wasteful, failed):
        return "reference"

    monkeypatch.setattr(auto, "first_usable", other)  # as a graph's own sizes may have it
    choose.clear_cache()
    call = torch.compile(
        lambda q: fv.packed_attention(q, q, q, layout), fullgraph=True, backend="eager"
    )
    with noting_auto() as chosen:
        call(q)
    assert set(chosen) == {"reference"}
    choose.clear_cache()


def test_the_table_of_the_model_shows_utilisation_and_what_auto_chose(tmp_path):
    case = Case("auto", "qwen3-tiny", 2, 8, 4, 1.0, 0, "bfloat16", "inductor").data()
    measures = json.loads(
        '{"ms_p20": 1, "ms_p50": 2, "ms_p80": 3, "graph_breaks": 0, "recompilations": 0, '
        '"other_packings": 2, "compile_s": 1, "error": 0.1, "grad_error": 0.1, "peer_error": 0.1, '
        '"peer_grad_error": 0.1, "peak_meaning": "p", "mfu": 0.456, "attends": "fa3", '
        '"model_tflop": 99, "peak_tflops": 989.4}'
    )
    path = tmp_path / "rows.jsonl"
    append_row(path, Row("packings", case, "ok", None, measures))
    text = packings_section(read_rows([path]))
    assert "| flexvarlen `auto` (fa3) |" in text
    assert "| 46% |" in text
    assert "99e12 operations" in text


def test_every_default_variant_has_a_style():
    for name in (*DEFAULT_VARIANTS, *small_inference.DEFAULT_VARIANTS):
        style_of(name)
