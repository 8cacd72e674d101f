"""Suites of attention, tiny: nothing wrong is timed, padded batches hold what the row holds."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from functools import partial
from itertools import groupby

import pytest
import torch

from flexvarlen.bench.suites import suite_of
from flexvarlen.bench.suites.attention import engine
from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Expected, Inputs, serial, switched
from flexvarlen.bench.suites.attention.kernels import Kernels
from flexvarlen.bench.suites.attention.packed import ours, sdpa_of_one
from flexvarlen.bench.suites.attention.padded import Padding, sdpa
from flexvarlen.bench.suites.attention.padding import PaddingCase
from flexvarlen.bench.suites.attention.tables import measured, times_table
from flexvarlen.bench.suites.attention.varlen_study import PACKINGS, StudyCase
from flexvarlen.reference.attention import Results, attend_alone
from flexvarlen.report.records import Record, read_records
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.run import RunRequest, run_suite
from flexvarlen.runner.suite import DeviceLost, Options
from tests.planted import with_gradient

CPU = torch.device("cpu")
QUICK = Options(CPU, quick=True, seconds=0.01, say=lambda line: None)
LENGTHS = (20, 17, 30, 1, 25, 19, 40, 16)


def inputs(lengths=LENGTHS, dtype=torch.float32, causal=True, heads=(2, 2)):
    return Inputs.random(lengths, heads, 16, dtype, CPU, causal)


def statuses(findings):
    return {(x.variant, x.pass_): x.status for x in findings}


def scaled(prepare, factor, at=slice(None)):
    """A variant whose output is wrong at some tokens."""

    def prepare_wrong(own, needs_grad):
        right = prepare(own, needs_grad)

        def forward():
            weight = torch.ones(own.q.shape[0], 1, 1)
            weight[at] = factor
            return right.forward() * weight

        return dataclasses.replace(right, forward=forward)

    return prepare_wrong


# --- the engine ----------------------------------------------------------------------------------


def test_what_is_right_is_timed():
    for found in measure_attention(inputs(), {"sdpa": ours("sdpa")}, QUICK):
        assert found.status == "ok"
        assert 0 < found.measures["device_ms_p20"] <= found.measures["device_ms_p80"]
        assert found.measures["tflops"] > 0
        assert ("error_out" in found.measures) == (found.pass_ == "forward")
        assert ("error_dk" in found.measures) == (found.pass_ == "backward")


def test_what_is_wrong_is_not_timed():
    calls = {"wrong": scaled(ours("sdpa"), 1.01), "sdpa": ours("sdpa")}
    found = measure_attention(inputs(), calls, QUICK)
    assert statuses(found)["wrong", "forward"] == "wrong"
    assert statuses(found)["sdpa", "forward"] == "ok"
    assert all("device_ms_p50" not in x.measures for x in found if x.variant == "wrong")


def test_an_error_outside_the_sampled_documents_is_found():
    own = inputs()
    expected = Expected(own)
    starts = {0, *torch.tensor(LENGTHS).cumsum(0)[:-1].tolist()}
    start = min(starts - {sample.tokens.start for sample in expected.samples})
    plain = Results(attend_alone(own.q, own.k, own.v, LENGTHS, dtype=torch.float32).out)
    assert expected.why_wrong(plain) is None
    plain.out[start] += 1
    assert "of the whole row differs" in expected.why_wrong(plain)
    plain.out[start] = float("nan")
    assert "of the whole row differs" in expected.why_wrong(plain)


def test_a_wrong_gradient_leaves_the_forward_right():
    doubled = with_gradient(lambda gradient, x: 2 * gradient)

    def prepare(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)
        return dataclasses.replace(right, forward=lambda: doubled(right.forward()))

    found = statuses(measure_attention(inputs(), {"x": prepare}, QUICK))
    assert found == {("x", "forward"): "ok", ("x", "backward"): "wrong"}


def test_a_refused_backward_leaves_the_forward():
    def prepare(own, needs_grad):
        if needs_grad:
            raise Unsupported("no backward here")
        return ours("sdpa")(own, needs_grad)

    forward, backward = measure_attention(inputs(), {"x": prepare}, QUICK)
    assert forward.status == "ok"
    assert (backward.status, backward.reason) == ("unsupported", "no backward here")


def test_out_of_memory_is_a_finding_and_the_others_are_timed():
    def prepare(own, needs_grad):
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = statuses(measure_attention(inputs(), {"sdpa": ours("sdpa"), "x": prepare}, QUICK))
    assert found["x", "backward"] == "oom"
    assert found["sdpa", "backward"] == "ok"


def out_of_memory_after(calls):
    """A variant whose backward finds no memory once that many ran."""
    count = iter(range(1000))

    def change(gradient, x):
        if next(count) >= calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient

    def prepare(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)
        return dataclasses.replace(right, forward=lambda: with_gradient(change)(right.forward()))

    return prepare


@pytest.mark.parametrize("calls", [0, 3])
def test_a_backward_without_memory_leaves_the_forward(calls):
    """Also where it runs out once others are timed beside it."""
    variants = {"x": out_of_memory_after(calls), "sdpa": ours("sdpa")}
    found = statuses(measure_attention(inputs(), variants, QUICK))
    assert found == {
        ("x", "forward"): "ok",
        ("x", "backward"): "oom",
        ("sdpa", "forward"): "ok",
        ("sdpa", "backward"): "ok",
    }


def test_what_is_retried_alone_holds_no_memory_of_the_others():
    outs = weakref.WeakSet()

    def prepare(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)

        def forward():
            out = right.forward()
            outs.add(out)
            return out

        return dataclasses.replace(right, forward=forward)

    alive = []

    def look(gradient, x):
        gc.collect()
        alive.append(len(outs))
        return gradient

    def watching(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)
        return dataclasses.replace(right, forward=lambda: with_gradient(look)(right.forward()))

    variants = {"a": prepare, "x": out_of_memory_after(3), "watching": watching}
    measure_attention(inputs(), variants, QUICK)
    assert alive[-1] == 0


def test_a_switched_backward_is_deterministic_and_leaves_the_switch_off():
    switch = []

    def look(gradient, x):
        switch.append(torch.are_deterministic_algorithms_enabled())
        return gradient

    def prepare(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)
        return dataclasses.replace(right, forward=lambda: with_gradient(look)(right.forward()))

    found = measure_attention(inputs(), {"x": partial(switched, prepare)}, QUICK)
    assert set(statuses(found).values()) == {"ok"}
    assert set(switch) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_variant_that_fails_in_the_timing_leaves_the_others():
    calls = []

    def prepare(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)

        def forward():
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("fails later")
            return right.forward()

        return dataclasses.replace(right, forward=forward)

    found = statuses(measure_attention(inputs(), {"sdpa": ours("sdpa"), "x": prepare}, QUICK))
    assert found["x", "forward"] == "failed"
    assert found["sdpa", "forward"] == "ok"


def test_a_lost_device_stops_the_run_and_names_the_variant():
    def prepare(own, needs_grad):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceLost, match="x lost the device") as caught:
        measure_attention(inputs(), {"x": prepare}, QUICK)
    assert all(x.measures == {"fatal": True} for x in caught.value.findings)


def test_the_garbage_collector_runs_again_after_a_failure():
    with pytest.raises(RuntimeError, match="fails"):
        engine._timed({"x": _fails}, {"x": 1.0}, QUICK, 5, print)
    assert gc.isenabled()


def _fails():
    raise RuntimeError("fails")


# --- variants ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_serial_calls_give_what_one_call_gives(causal):
    own = inputs(causal=causal)
    found = measure_attention(own, {"serial": serial(sdpa_of_one)}, QUICK)
    assert set(statuses(found).values()) == {"ok"}


def test_a_padded_batch_holds_the_tokens_of_the_row():
    own = inputs()
    padding = Padding.of(own, 64)
    padded = padding.pad(own.q)
    assert padded.shape == (len(LENGTHS), 64, 2, 16)
    assert torch.equal(padding.unpad(padded), own.q)
    assert not padded[1, 17:].any()
    assert padding.real.sum(1).tolist() == list(LENGTHS)


@pytest.mark.parametrize("causal", [True, False])
def test_padded_attention_is_right(causal):
    masked = {"masked": lambda own, grad: sdpa(own, grad, masked=True, length=64)}
    assert set(statuses(measure_attention(inputs(causal=causal), masked, QUICK)).values()) == {"ok"}


def test_sdpa_without_a_mask_sees_the_padding():
    unmasked = {"x": lambda own, grad: sdpa(own, grad, length=64)}
    found = measure_attention(inputs(causal=False), unmasked, QUICK)
    assert set(statuses(found).values()) == {"wrong"}


# --- cases and records ---------------------------------------------------------------------------


def test_cells_of_one_kind_follow_one_another():
    cells = Kernels().cases(Options(CPU))
    assert len({cell.name for cell in cells}) == len(cells) == 41
    assert len([kind for kind, _ in groupby(cells, key=lambda cell: cell.kind)]) == 5


def test_the_study_and_the_pull_request_have_their_documents():
    assert len(PACKINGS) == 13
    case = PaddingCase("multiples", False)
    assert case.lengths() == (448, 1280, 1856, 960, 704, 512, 1856, 1344)
    assert case.data()["sparsity"] == 0.4531
    assert StudyCase((4160, 4160)).name == "4160×2"


@pytest.mark.parametrize("name", ["kernels", "varlen-study", "padding"])
def test_a_quick_run_gives_records_and_a_table(name, tmp_path):
    suite, out = suite_of(name), tmp_path / "records.jsonl"
    one = suite.cases(QUICK)[0].name
    run_suite(suite, QUICK, RunRequest(out=out, cases=f"^{one}$"))
    found = read_records([out])
    assert not [r for r in found if r.status not in ("ok", "unsupported")]
    assert any(r.case["variant"] == "sdpa" and r.status == "ok" for r in found)
    assert "`sdpa`" in suite.section(found)
    assert all(table.lines for table in suite.page_tables(found))


def test_a_variant_that_is_unknown_is_refused(tmp_path):
    options = dataclasses.replace(QUICK, variants=("fa9",))
    with pytest.raises(ValueError, match=r"variants must be among .* got 'fa9'"):
        run_suite(suite_of("kernels"), options, RunRequest(out=tmp_path / "x.jsonl", cases="short"))


def record(variant, started, ms, bound=False):
    measures = {"device_ms_p50": ms} | ({"host_bound": True} if bound else {})
    case = {"tokens": 8, "variant": variant, "pass": "forward"}
    where = {"gpu": "NVIDIA H200", "started_utc": started}
    return Record("kernels", case, "ok", None, measures, where)


def test_times_of_two_runs_are_not_compared():
    (line,) = measured([record("fa2", "1", 1.0), record("fa3", "2", 2.0)])
    assert list(line.records) == ["fa3"]


def test_the_best_is_bold_and_never_one_that_waited_for_the_host():
    found = measured([record("a", "1", 1.0, bound=True), record("b", "1", 2.0)])
    table = times_table(found, [], "")
    assert table.lines == (("1.00†", "**2.00**"),)
    assert "waited for the host" in table.notes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kernels", "varlen-study", "padding", "published"])
def test_a_quick_run_on_a_gpu(name, tmp_path):
    suite, out = suite_of(name), tmp_path / "records.jsonl"
    options = Options(torch.device("cuda"), quick=True, seconds=0.05)
    run_suite(suite, options, RunRequest(out=out))
    found = read_records([out])
    assert not [r for r in found if r.status not in ("ok", "unsupported")]
    assert any(r.status == "ok" and r.measures["host_ms_p50"] > 0 for r in found)
