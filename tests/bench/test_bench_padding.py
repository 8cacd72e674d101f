"""The suite "padding": the source's documents, padding that is seen is wrong, the module undone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flexvarlen.bench.attention import padding, padding_tables, sdpa_ways
from flexvarlen.bench.attention.accuracy import Oracle
from flexvarlen.bench.attention.engine import Inputs, findings_of_all
from flexvarlen.bench.attention.padded_module import Module, packed_module, padded_module
from flexvarlen.bench.attention.padding import PADDED, SUITE, PaddingCase
from flexvarlen.bench.attention.rectangle import Rectangle
from flexvarlen.bench.attention.sdpa_ways import sdpa
from flexvarlen.bench.mask_build.accuracy import Answer
from flexvarlen.bench.series import measured_cases
from flexvarlen.bench.suite import Options, suite_of
from tests.bench.suite_runs import CPU, on_h200, ran, row_of, sizes_of, too_large

CUDA = Options(torch.device("cuda"))
QUICK = Options(CPU, quick=True)
RAGGED = (20, 48, 5)


def inputs_of(lengths=RAGGED, causal=False, dtype=torch.float32):
    return Inputs.random(lengths, (2, 2), 16, dtype, CPU, causal)


def verdict(prepare, inputs, needs_grad=True):
    """Why an answer is wrong, or None."""
    qkv = (inputs.q, inputs.k, inputs.v)
    row = "backward" if needs_grad else "forward"
    oracle = Oracle(qkv, inputs.cotangent, inputs.lengths, inputs.causal, row)
    prepared = prepare(inputs, needs_grad)
    out = prepared.forward()
    gradients = prepared.backward(out) if needs_grad else ()
    return oracle.judge(Answer(prepared.answer(out, gradients)))[1]


# --- documents -----------------------------------------------------------------------------------


def test_the_source_s_documents_are_those_its_figures_tell_of():
    case = SUITE.cases(CUDA)[0]
    lengths = case.lengths()
    assert suite_of("padding") is SUITE
    assert lengths == (448, 1280, 1856, 960, 704, 512, 1856, 1344)
    assert case.data()["sparsity"] == pytest.approx(0.453, abs=1e-3)  # as published
    # Published TFLOP/s times milliseconds, over FLOPs of attention alone: the same of both.
    packed = 231.812e12 * 0.21750560760498047e-3 / (4 * 1024 * sum(x * x for x in lengths))
    padded = 320.840e12 * 0.43171775817871094e-3 / (4 * 1024 * 8 * 2048**2)
    assert packed == pytest.approx(padded, rel=1e-3)
    assert packed == pytest.approx(1 + 1 / 128, rel=1e-3)


def test_cases_are_those_of_the_issue():
    cases = SUITE.cases(CUDA)
    assert len({case.name for case in cases}) == len(cases)
    assert {(x.batch, x.max_length, x.embedding, x.num_heads, x.dtype) for x in cases} == {
        (8, 2048, 1024, 16, "bfloat16")
    }
    kinds = {(case.documents, case.causal) for case in cases if case.part == "attention"}
    assert {(x, y) for x in ("multiples", "log-normal") for y in (False, True)} <= kinds
    for case in cases:
        assert max(case.lengths()) <= case.max_length
        assert len(case.lengths()) == case.batch
    assert len(set(PaddingCase("log-normal", False).lengths())) == 8


def test_a_gpu_is_asked_for_nested_tensors_and_every_packed_backend():
    variants = set(SUITE.variants(SUITE.cases(CUDA)[0], CUDA))
    assert {"raw:varlen", "raw:nested", "nested", "varlen", "fa2", "fa3", "fa4", "flex"} < variants
    assert set(PADDED) < variants


# --- the rectangle -------------------------------------------------------------------------------


def test_what_is_padded_is_gathered_again():
    x = torch.arange(sum(RAGGED) * 3.0).view(-1, 3)
    rectangle = Rectangle.of(RAGGED, CPU, 50)
    lines = rectangle.pad(x)
    assert lines.shape == (3, 50, 3)
    assert torch.equal(lines[1, :48], x[20:68])
    assert not lines[~rectangle.real(CPU)].any()
    assert rectangle.real(CPU).sum(1).tolist() == list(RAGGED)
    assert torch.equal(rectangle.gather(lines), x)


def test_full_lines_are_views():
    x = torch.zeros(12, 2)
    lines = Rectangle.of((4, 4, 4), CPU).pad(x)
    assert lines.shape == (3, 4, 2)
    assert lines.data_ptr() == x.data_ptr()


def test_equal_documents_in_wider_lines_are_padded():
    rectangle = Rectangle.of((4, 4), CPU, 6)
    x = torch.ones(8, 1)
    assert rectangle.pad(x).shape == (2, 6, 1)
    assert torch.equal(rectangle.gather(rectangle.pad(x)), x)


def test_a_document_longer_than_its_line_is_refused():
    with pytest.raises(ValueError, match=r"longest must be at least .* 48 tokens, got 40; raise"):
        Rectangle.of(RAGGED, CPU, 40)


# --- padded SDPA ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_sdpa_sees_no_padding(causal, dtype):
    inputs = inputs_of(causal=causal, dtype=dtype)

    def masked(inputs, needs_grad):
        return sdpa(inputs, needs_grad, masked=True, width=64)

    assert verdict(masked, inputs) is None


def test_unmasked_sdpa_is_wrong_where_padding_is_seen():
    assert "relative error" in verdict(sdpa, inputs_of())
    assert verdict(sdpa, inputs_of(causal=True)) is None
    assert verdict(sdpa, inputs_of((24, 24))) is None


# --- the module ----------------------------------------------------------------------------------


def module_of(dtype=torch.bfloat16, lengths=RAGGED):
    return Module.random(sum(lengths), 32, 2, dtype, CPU, seed=1)


def test_projections_are_the_source_s():
    module = module_of(torch.float32)
    q, k, v = module.project(module.x)
    whole = module.x @ module.qkv.T
    for found, chunk in zip((q, k, v), whole.chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(found, chunk.view(-1, 2, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_every_module_is_right_and_a_wrong_one_is_seen(causal, dtype):
    module = module_of(dtype)
    inputs = module.inputs(RAGGED, causal)
    assert verdict(padded_module(module, 64, masked=True), inputs, False) is None
    assert verdict(packed_module(module, "sdpa"), inputs, False) is None
    unmasked = padded_module(module, 64, masked=False)
    assert (verdict(unmasked, inputs, False) is None) == causal
    other = dataclasses.replace(inputs, causal=not causal)
    assert verdict(lambda i, g: packed_module(module, "sdpa")(other, g), inputs, False)


def test_a_refused_backend_of_a_module_says_why():
    found = SUITE.measure(PaddingCase("multiples", False, "module", 2, 64, 32, 2), ["fa3"], QUICK)
    assert [(x.status, x.pass_) for x in found] == [("unsupported", "forward")]
    assert found[0].reason


# --- rows ----------------------------------------------------------------------------------------


def test_a_run_has_a_row_of_every_variant_and_pass(tmp_path):
    rows = ran(SUITE, tmp_path)
    wanted = {
        (case.part, case.documents, case.causal, variant, pass_)
        for case in SUITE.cases(QUICK)
        for variant in SUITE.variants(case, QUICK)
        for pass_ in case.passes
    }
    names = ("part", "documents", "causal", "variant", "pass")
    assert {tuple(row.case[x] for x in names) for row in rows} == wanted
    assert len(rows) == len(wanted)
    masked = row_of(rows, "padded:masked", documents="multiples", part="attention", causal=False)
    assert masked.measures["sdpa_kernel"] == "flash"
    unmasked = {
        (row.case["documents"], row.case["causal"]): row
        for row in rows
        if row.case["variant"] == "padded:unmasked" and row.case["pass"] == "forward"
    }
    bad = unmasked["multiples", False]
    assert bad.status == "unsupported"  # known ahead to be wrong: no fault of a run
    assert "padding is attended to" in bad.reason
    assert not {row.status for row in rows} - {"ok", "unsupported"}
    assert unmasked["multiples", True].status == "ok"
    assert unmasked["full-length", False].status == "ok"
    nested = row_of(rows, "raw:nested", documents="log-normal", causal=True)
    assert nested.status == "unsupported"
    assert nested.reason
    text = SUITE.section(rows)
    assert "without a mask is not timed in 2 of 6 cases: without a mask padding is" in text
    assert "claimed" not in text  # these are not the claim's documents
    (figure,) = SUITE.figures(rows, tmp_path)
    assert min(sizes_of(figure)) > 300
    for row in rows:
        row.measures["host_bound"] = row.case["variant"] == "sdpa"
    points = {p.variant: p for p in padding_tables._points(measured_cases(rows)[0], "forward")}
    assert (points["sdpa"].y, points["sdpa"].status) == (None, "host-bound")
    assert points["padded:masked"].y > 0


@pytest.mark.parametrize("part", ["attention", "module"])
def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch, part):
    known = padding._prepared

    def with_unmasked(case, device):
        """As if nobody knew that padding is seen."""
        inputs, ways = known(case, device)
        full = dataclasses.replace(case, causal=True)
        return inputs, ways | {"padded:unmasked": known(full, device)[1]["padded:unmasked"]}

    monkeypatch.setattr(padding, "_prepared", with_unmasked)
    rows = ran(SUITE, tmp_path, variants=("padded:unmasked", "sdpa"), cases=f"{part}-full-multi")
    bad = row_of(rows, "padded:unmasked")
    assert bad.status == "wrong"
    assert "relative error" in bad.reason
    assert "device_ms_p50" not in bad.measures
    assert row_of(rows, "sdpa").status == "ok"


@pytest.mark.parametrize("part", ["attention", "module"])
def test_out_of_memory_is_a_row(tmp_path, monkeypatch, part):
    known = padding._prepared

    def with_one_too_large(case, device):
        inputs, ways = known(case, device)
        return inputs, ways | {"padded:masked": too_large}

    monkeypatch.setattr(padding, "_prepared", with_one_too_large)
    rows = ran(SUITE, tmp_path, variants=("padded:masked", "sdpa"), cases=f"{part}-full-multi")
    assert row_of(rows, "padded:masked").status == "oom"
    assert "137.44 GB" in row_of(rows, "padded:masked").reason
    assert row_of(rows, "sdpa").status == "ok"
    assert SUITE.figures(rows, tmp_path)[0].is_file()
    assert "oom (1)" in SUITE.section(rows)


def test_inputs_that_do_not_fit_are_rows_of_every_variant(tmp_path, monkeypatch):
    monkeypatch.setattr(padding, "_prepared", too_large)
    rows = ran(SUITE, tmp_path, cases="attention-full-multi")
    assert {row.status for row in rows} == {"oom"}
    assert len(rows) == 2 * len(SUITE.variants(SUITE.cases(QUICK)[0], QUICK))


def test_a_kernel_that_cannot_be_seen_for_memory_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(sdpa_ways, "noted_forward", lambda *a, **k: too_large(None, None))
    rows = ran(SUITE, tmp_path, variants=("padded:masked",), cases="attention-full-multi")
    found = row_of(rows, "padded:masked")
    assert found.status == "ok"
    assert found.measures["sdpa_kernel"].startswith("not known: OutOfMemoryError")


# --- tables --------------------------------------------------------------------------------------


def claimed(masked_ms, unmasked_ms):
    """Rows of the source's documents, varlen in 0.2 ms."""
    ragged, full = PaddingCase("multiples", False), PaddingCase("full-length", False)
    wrong = ("unsupported", "padding is seen")
    first = {"raw:varlen forward": 0.2, "padded:masked forward": masked_ms}
    return [
        *on_h200(SUITE, ragged, first | {"padded:unmasked forward": wrong}),
        *on_h200(SUITE, full, {"raw:varlen forward": 0.4, "padded:unmasked forward": unmasked_ms}),
    ]


def test_the_claim_s_milliseconds_stand_beside_those_of_its_own_documents():
    text = SUITE.section(claimed(0.9, 0.4))
    assert "is not timed in 1 of 2 cases: padding is seen." in text
    assert "| attention | padded:unmasked | 0.432 | 0.400 |" in text
    assert "hold" not in text  # whether a claim holds is said in one place


def test_a_quick_run_s_rows_have_a_table_and_a_header_of_their_own():
    quick = PaddingCase("multiples", False, max_length=128, embedding=32, num_heads=2, batch=3)
    text = SUITE.section(on_h200(SUITE, quick, {"raw:varlen forward": 0.1}) + claimed(0.9, 0.4))
    assert text.count("| attention | varlen | 0.218 |") == 1
    whole, small = text.index("up to 2,048 tokens"), text.index("up to 128 tokens")
    assert whole < text.index("| **0.200** |") < small < text.index("| **0.100** |")


def test_a_hundred_runs_are_asked_for_as_the_source_s(tmp_path, monkeypatch):
    asked = []

    def measured(inputs, ways, options, **more):
        asked.append(more["repeats"])
        return findings_of_all(ways, more["passes"], "unsupported", "not now")

    monkeypatch.setattr(padding, "measure_attention", measured)
    ran(SUITE, tmp_path, cases="attention-full-multi")
    assert asked == [100]
